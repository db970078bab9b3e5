//! What a file is: attributes out, changes of them in, and the space of the file system. The kernel may keep attributes
//! for a moment, but never those of a file that somebody is writing, because under passthrough the daemon does not see
//! the writes. Called by `fuse`, and by whatever replies with an entry.

use super::error::Result;
use super::handle::{Handle, writes};
use super::inode::{Inode, ROOT, is_virtual};
use super::origin::{Origin, with_fsetid};
use super::status::Status;
use super::{FileSystem, proc_path};
use fuser::{FileAttr, TimeOrNow};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatVfs, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::time::{Duration, UNIX_EPOCH};

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
        let status = self.status_of(inode, &inode.reach()?)?;
        // The root keeps the source's inode number although its node id is 1.
        let number = if inode.node == ROOT { inode.id.inode } else { inode.node };
        Ok(Attributes { attr: status.attr(number), keep })
    }

    /// What the file is, less what the mount in which it was found forbids and ours does not.
    pub(crate) fn status_of(&self, inode: &Inode, reached: &impl AsFd) -> Result<Status> {
        let status = Status::of(reached)?;
        if !inode.foreign {
            return Ok(status);
        }
        Ok(status.restrict(rustix::fs::fstatvfs(reached)?.f_flag - self.forbids))
    }

    /// Without `waits` the answer is EWOULDBLOCK, and nothing is changed, where the file is truncated and somebody else's
    /// lease on it has to be broken first.
    pub(crate) fn setattr(
        &self,
        origin: Origin,
        node: u64,
        handle: Option<u64>,
        change: Change,
        waits: bool,
    ) -> Result<Attributes> {
        if is_virtual(node) {
            // A shell's `>` truncates; nothing else about these files can be changed.
            let only_size = change.mode.is_none() && change.uid.is_none() && change.gid.is_none();
            return if only_size { self.control.attributes(node) } else { Err(Errno::PERM) };
        }
        self.writable()?;
        let inode = self.inodes.get(node)?;
        with_fsetid(|| self.change(origin, &inode, handle, change, waits))?;
        self.attributes_of(&inode)
    }

    fn change(&self, origin: Origin, inode: &Inode, handle: Option<u64>, change: Change, waits: bool) -> Result<()> {
        if let Some(size) = change.size {
            self.truncate(origin, inode, handle, size, waits)?;
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
        Ok(())
    }

    /// As the caller, so that set-user-id bits go as they would natively.
    fn truncate(&self, origin: Origin, inode: &Inode, handle: Option<u64>, size: u64, waits: bool) -> Result<()> {
        self.cache.changed(inode.id);
        let open = handle.and_then(|number| match self.handles.get(number) {
            Ok(Handle::File(file)) if writes(file.flags) => Some(file),
            _ => None,
        });
        let reached = inode.reach()?; // as the daemon, which may open by handle
        let done = origin.identity().with(|| match open {
            Some(open) => rustix::fs::ftruncate(&open.file, size),
            None => {
                let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
                let flags = if waits { flags } else { flags | OFlags::NONBLOCK };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_the_epoch_are_what_the_kernel_said() {
        for (seconds, nanoseconds) in [(-1i64, 0), (-1, 999_999_999), (-100, 1)] {
            let as_fuser_says = UNIX_EPOCH - Duration::new(seconds.unsigned_abs(), nanoseconds);
            let there = timespec(Some(TimeOrNow::SpecificTime(as_fuser_says)));
            assert_eq!((there.tv_sec, there.tv_nsec), (seconds, i64::from(nanoseconds)));
        }
    }
}
