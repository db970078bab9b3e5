//! What a file is, as one statx tells it: its attributes, which file it is, and in which mount it was found. The mount
//! counts because one file seen through two mounts (a bind mount in the source) obeys two sets of mount flags, and because
//! a directory can have one place only in ours. Called by whatever replies with attributes.

use super::error::Result;
use crate::source::FileId;
use rustix::fs::{AtFlags, FileType, StatVfsMountFlags, Statx, StatxFlags};
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// STATX_MNT_ID_UNIQUE (linux/stat.h, since 6.8): a number that no later mount gets again.
const UNIQUE_MOUNT: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// Longer than a tick of the clock with which a file system of this machine stamps (10 ms with HZ=100).
const TICK: Duration = Duration::from_millis(100);

const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::MNT_ID).union(UNIQUE_MOUNT);

/// A file's attributes at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Status(Statx);

/// A file in a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// 0 where the kernel does not tell (before Linux 5.8).
    pub(crate) mount: u64,
    pub(crate) file: FileId,
}

/// Seconds and nanoseconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Changes {
    modified: (i64, u32),
    changed: (i64, u32),
}

impl Changes {
    /// Whether a change that comes now gets other times: these are older than any clock's tick.
    pub(crate) fn settled(&self) -> bool {
        let (seconds, nanoseconds) = self.modified.max(self.changed);
        SystemTime::now().duration_since(time(seconds, nanoseconds)).is_ok_and(|age| age > TICK)
    }
}

impl Status {
    /// Of an open file, or of what an O_PATH descriptor names.
    pub(crate) fn of(descriptor: impl AsFd) -> Result<Status> {
        rustix::fs::statx(descriptor, c"", AtFlags::EMPTY_PATH, WANTED).map(Status)
    }

    /// Of what has this name; a symbolic link itself, and no automount that waits to be triggered.
    pub(crate) fn at(directory: impl AsFd, name: &OsStr) -> Result<Status> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        rustix::fs::statx(directory, name, flags, WANTED).map(Status)
    }

    pub(crate) fn place(&self) -> Place {
        let told = StatxFlags::from_bits_retain(self.0.stx_mask).intersects(StatxFlags::MNT_ID | UNIQUE_MOUNT);
        let device = libc::makedev(self.0.stx_dev_major, self.0.stx_dev_minor);
        let file = FileId { device, inode: self.0.stx_ino };
        Place { mount: if told { self.0.stx_mnt_id } else { 0 }, file }
    }

    /// The last change of the content and of anything at all. A directory's tell whether it is still the same.
    pub(crate) fn changes(&self) -> Changes {
        let at = |t: &rustix::fs::StatxTimestamp| (t.tv_sec, t.tv_nsec);
        Changes { modified: at(&self.0.stx_mtime), changed: at(&self.0.stx_ctime) }
    }

    /// What tells whether a file's bytes are still the same: its size in bytes, and its times.
    pub(crate) fn content(&self) -> (u64, Changes) {
        (self.0.stx_size, self.changes())
    }

    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.0.stx_mode.into())
    }

    /// The attributes in FUSE's words, with `number` as the inode's.
    pub(crate) fn attr(&self, number: u64) -> fuser::FileAttr {
        let s = &self.0;
        fuser::FileAttr {
            ino: fuser::INodeNo(number),
            size: s.stx_size,
            blocks: s.stx_blocks,
            atime: time(s.stx_atime.tv_sec, s.stx_atime.tv_nsec),
            mtime: time(s.stx_mtime.tv_sec, s.stx_mtime.tv_nsec),
            ctime: time(s.stx_ctime.tv_sec, s.stx_ctime.tv_nsec),
            crtime: UNIX_EPOCH,
            kind: kind_of(self.kind()),
            perm: s.stx_mode & 0o7777,
            nlink: s.stx_nlink,
            uid: s.stx_uid,
            gid: s.stx_gid,
            rdev: encode_device(s.stx_rdev_major, s.stx_rdev_minor),
            blksize: s.stx_blksize,
            flags: 0,
        }
    }

    /// Takes away what `flags` of the file's own mount forbid: set-user-id bits and device numbers.
    pub(crate) fn restrict(mut self, flags: StatVfsMountFlags) -> Status {
        if flags.contains(StatVfsMountFlags::NOSUID) && self.kind() != FileType::Directory {
            self.0.stx_mode &= !0o6000;
        }
        if flags.contains(StatVfsMountFlags::NODEV) {
            (self.0.stx_rdev_major, self.0.stx_rdev_minor) = (0, 0);
        }
        self
    }
}

pub(crate) fn kind_of(kind: FileType) -> fuser::FileType {
    match kind {
        FileType::Directory => fuser::FileType::Directory,
        FileType::Symlink => fuser::FileType::Symlink,
        FileType::Fifo => fuser::FileType::NamedPipe,
        FileType::Socket => fuser::FileType::Socket,
        FileType::CharacterDevice => fuser::FileType::CharDevice,
        FileType::BlockDevice => fuser::FileType::BlockDevice,
        _ => fuser::FileType::RegularFile,
    }
}

fn time(seconds: i64, nanoseconds: u32) -> SystemTime {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base = if seconds >= 0 { UNIX_EPOCH.checked_add(whole) } else { UNIX_EPOCH.checked_sub(whole) };
    base.and_then(|t| t.checked_add(Duration::from_nanos(nanoseconds.into()))).unwrap_or(UNIX_EPOCH)
}

/// The kernel's 32-bit form of a device number.
fn encode_device(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The other way, to the C library's form.
pub(crate) fn decode_device(encoded: u32) -> u64 {
    libc::makedev((encoded & 0xfff00) >> 8, (encoded & 0xff) | ((encoded >> 12) & 0xfff00))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn device_numbers_return() {
        for (major, minor) in [(1, 3), (8, 255), (259, 70_000), (4095, 1_048_575)] {
            assert_eq!(decode_device(encode_device(major, minor)), libc::makedev(major, minor));
        }
    }

    #[test]
    fn times_before_the_epoch_go_forward_from_their_second() {
        for (seconds, nanoseconds) in [(-1i64, 0), (-1, 999_999_999), (-100, 1)] {
            let before = UNIX_EPOCH.duration_since(time(seconds, nanoseconds)).expect("before");
            assert_eq!(before, Duration::from_secs(seconds.unsigned_abs()) - Duration::from_nanos(nanoseconds.into()));
        }
    }

    #[test]
    fn a_file_is_the_one_that_stat_tells_and_has_a_mount() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = std::fs::File::open(dir.path()).expect("opened");
        let meta = file.metadata().expect("stat");
        let place = Status::of(&file).expect("statx").place();
        assert_eq!((place.file.device, place.file.inode), (meta.dev(), meta.ino()));
        let proc = Status::of(std::fs::File::open("/proc").expect("opened")).expect("statx").place();
        assert_ne!(place.mount, proc.mount);
    }

    #[test]
    fn what_the_files_own_mount_forbids_is_taken_away() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("f");
        std::fs::write(&path, "x").expect("written");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).expect("chmod");
        let status = Status::of(std::fs::File::open(&path).expect("opened")).expect("statx");
        let mode = |flags| status.restrict(flags).attr(1).perm;
        assert_eq!(mode(StatVfsMountFlags::empty()), 0o4755);
        assert_eq!(mode(StatVfsMountFlags::NOSUID), 0o755);
        let null = Status::of(std::fs::File::open("/dev/null").expect("opened")).expect("statx");
        let device = |flags| null.restrict(flags).attr(1).rdev;
        assert_ne!(device(StatVfsMountFlags::empty()), 0);
        assert_eq!(device(StatVfsMountFlags::NODEV), 0);
    }
}
