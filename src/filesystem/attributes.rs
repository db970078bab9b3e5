//! What a file is: attributes out, changes of them in, and the space of the file system. The kernel may keep attributes
//! for a moment, but never those of a file that somebody is writing, because under passthrough the daemon does not see
//! the writes. Called by `fuse`, and by whatever replies with an entry.

use super::error::Result;
use super::handle::{Handle, writes};
use super::inode::{Inode, is_virtual};
use super::origin::Origin;
use super::{FileSystem, proc_path};
use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, StatVfs, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long the kernel may keep names and attributes. A change behind the mount is seen after this time at the latest;
/// changes through the mount are seen at once. One second is FUSE's customary value.
pub(crate) const KEEP: Duration = Duration::from_secs(1);

/// Attributes, and how long they are good for.
pub(crate) struct Attributes {
    pub(crate) attr: FileAttr,
    pub(crate) keep: Duration,
}

/// What a name leads to; its lookup was counted, unless it is virtual.
pub(crate) struct Entry {
    pub(crate) node: u64,
    pub(crate) generation: u64,
    pub(crate) attributes: Attributes,
}

/// What a SETATTR asks for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Change {
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) size: Option<u64>,
    pub(crate) atime: Option<TimeOrNow>,
    pub(crate) mtime: Option<TimeOrNow>,
}

impl Change {
    /// chown(2) sends its user or group, or, told to leave both, nothing at all: that too takes the set-user-id bits.
    fn is_chown(&self) -> bool {
        let Change { mode, uid, gid, size, atime, mtime } = self;
        let others = mode.is_some() || size.is_some() || atime.is_some() || mtime.is_some();
        uid.is_some() || gid.is_some() || !others
    }
}

impl FileSystem {
    pub(crate) fn getattr(&self, node: u64) -> Result<Attributes> {
        if is_virtual(node) {
            return self.control.attributes(node);
        }
        self.attributes_of(&*self.inodes.get(node)?)
    }

    /// The inode's attributes as they are now.
    pub(crate) fn attributes_of(&self, inode: &Inode) -> Result<Attributes> {
        let keep = {
            let mut opens = inode.opens.lock();
            let unsettled = opens.writers > 0 || opens.written;
            opens.written = false;
            if unsettled { Duration::ZERO } else { KEEP }
        };
        // After the look at the writers: one that comes now finds the kernel's copy already on its way.
        let stat = rustix::fs::fstat(inode.reach()?)?;
        Ok(Attributes { attr: attr_of(&stat, inode), keep })
    }

    pub(crate) fn setattr(&self, origin: Origin, node: u64, handle: Option<u64>, change: Change) -> Result<Attributes> {
        if is_virtual(node) {
            // A shell's `>` truncates; nothing else about these files can be changed.
            let only_size = change.mode.is_none() && change.uid.is_none() && change.gid.is_none();
            return if only_size { self.control.attributes(node) } else { Err(Errno::PERM) };
        }
        self.writable()?;
        let inode = self.inodes.get(node)?;
        if let Some(size) = change.size {
            self.truncate(origin, &inode, handle, size)?;
        }
        if change.is_chown() {
            let uid = change.uid.map(rustix::fs::Uid::from_raw);
            let gid = change.gid.map(rustix::fs::Gid::from_raw);
            rustix::fs::chownat(inode.reach()?, "", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = change.mode {
            // After chown, which clears the bits that the caller may want set.
            rustix::fs::chmod(proc_path(&inode.reach()?), Mode::from_raw_mode(mode & 0o7777))?;
        }
        if change.atime.is_some() || change.mtime.is_some() {
            let times = Timestamps { last_access: timespec(change.atime), last_modification: timespec(change.mtime) };
            rustix::fs::utimensat(CWD, proc_path(&inode.reach()?), &times, AtFlags::empty())?;
        }
        self.attributes_of(&inode)
    }

    /// As the caller, so that set-user-id bits go as they would natively.
    fn truncate(&self, origin: Origin, inode: &Inode, handle: Option<u64>, size: u64) -> Result<()> {
        self.cache.changed(inode.id);
        let open = handle.and_then(|number| match self.handles.get(number) {
            Ok(Handle::File(file)) if writes(file.flags) => Some(file),
            _ => None,
        });
        let reached = inode.reach()?; // as the daemon, which may open by handle
        let done = origin.identity().with(|| match open {
            Some(open) => rustix::fs::ftruncate(&open.file, size),
            None => {
                let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                let file = rustix::fs::open(proc_path(&reached), flags, Mode::empty())?;
                rustix::fs::ftruncate(file, size)
            }
        });
        self.cache.changed(inode.id);
        done
    }

    pub(crate) fn statfs(&self, node: u64) -> Result<StatVfs> {
        let inode = if is_virtual(node) { self.inodes.root() } else { self.inodes.get(node)? };
        rustix::fs::fstatvfs(inode.reach()?)
    }
}

/// What `stat` says, in FUSE's words. The root keeps the source's inode number although its node id is 1.
pub(crate) fn attr_of(stat: &Stat, inode: &Inode) -> FileAttr {
    let number = if inode.node == super::inode::ROOT { stat.st_ino } else { inode.node };
    FileAttr {
        ino: INodeNo(number),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        blocks: u64::try_from(stat.st_blocks).unwrap_or(0),
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        crtime: UNIX_EPOCH,
        kind: kind_of(rustix::fs::FileType::from_raw_mode(stat.st_mode)),
        perm: (stat.st_mode & 0o7777) as u16,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: encode_device(stat.st_rdev),
        blksize: u32::try_from(stat.st_blksize).unwrap_or(4096),
        flags: 0,
    }
}

pub(crate) fn kind_of(kind: rustix::fs::FileType) -> FileType {
    match kind {
        rustix::fs::FileType::Directory => FileType::Directory,
        rustix::fs::FileType::Symlink => FileType::Symlink,
        rustix::fs::FileType::Fifo => FileType::NamedPipe,
        rustix::fs::FileType::Socket => FileType::Socket,
        rustix::fs::FileType::CharacterDevice => FileType::CharDevice,
        rustix::fs::FileType::BlockDevice => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn time(seconds: i64, nanoseconds: u64) -> SystemTime {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base = if seconds >= 0 { UNIX_EPOCH.checked_add(whole) } else { UNIX_EPOCH.checked_sub(whole) };
    base.and_then(|t| t.checked_add(Duration::from_nanos(nanoseconds))).unwrap_or(UNIX_EPOCH)
}

fn timespec(wanted: Option<TimeOrNow>) -> Timespec {
    match wanted {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeOrNow::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeOrNow::SpecificTime(time)) => match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Timespec { tv_sec: after.as_secs() as i64, tv_nsec: i64::from(after.subsec_nanos()) },
            // fuser subtracts the nanoseconds of a time before the epoch where the kernel means them to be added.
            Err(before) => {
                let (seconds, nanoseconds) = (before.duration().as_secs(), before.duration().subsec_nanos());
                Timespec { tv_sec: -(seconds as i64), tv_nsec: i64::from(nanoseconds) }
            }
        },
    }
}

/// The kernel's 32-bit form of a device number.
pub(crate) fn encode_device(device: u64) -> u32 {
    let (major, minor) = (libc::major(device), libc::minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The other way.
pub(crate) fn decode_device(encoded: u32) -> u64 {
    libc::makedev((encoded & 0xfff00) >> 8, (encoded & 0xff) | ((encoded >> 12) & 0xfff00))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_return() {
        for (major, minor) in [(1, 3), (8, 255), (259, 70_000), (4095, 1_048_575)] {
            let device = libc::makedev(major, minor);
            assert_eq!(decode_device(encode_device(device)), device);
        }
    }

    #[test]
    fn times_before_the_epoch_are_what_the_kernel_said() {
        for (seconds, nanoseconds) in [(-1i64, 0), (-1, 999_999_999), (-100, 1)] {
            let as_fuser_says = UNIX_EPOCH - Duration::new(seconds.unsigned_abs(), nanoseconds);
            let there = timespec(Some(TimeOrNow::SpecificTime(as_fuser_says)));
            assert_eq!((there.tv_sec, there.tv_nsec), (seconds, i64::from(nanoseconds)));
            let given = time(seconds, u64::from(nanoseconds));
            assert_eq!(UNIX_EPOCH.duration_since(given).expect("before"), {
                Duration::from_secs(seconds.unsigned_abs()) - Duration::from_nanos(u64::from(nanoseconds))
            });
        }
    }
}
