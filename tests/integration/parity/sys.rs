//! System calls in the fewest letters, with results that can be compared and read: an errno is shown by its name, a
//! descriptor by nothing that differs between two runs. Paths are relative to the thread's own working directory.

use rustix::fs::{self as rfs, AtFlags, CWD, Mode, OFlags, XattrFlags};
use rustix::io::{Errno as Raw, ReadWriteFlags};
use rustix::path::Arg;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

pub type R<T> = Result<T, Errno>;

macro_rules! errnos {
    ($($name:ident)*) => {
        impl fmt::Debug for Errno {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    $(libc::$name => f.write_str(stringify!($name)),)*
                    other => write!(f, "errno {other}"),
                }
            }
        }
    };
}

errnos! {
    EPERM ENOENT EINTR EIO ENXIO E2BIG ENOEXEC EBADF EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST EXDEV ENODEV ENOTDIR EISDIR
    EINVAL ENFILE EMFILE ENOTTY ETXTBSY EFBIG ENOSPC ESPIPE EROFS EMLINK EPIPE ERANGE EDEADLK ENAMETOOLONG ENOLCK ENOSYS
    ENOTEMPTY ELOOP ENODATA EOVERFLOW EOPNOTSUPP ECONNREFUSED EADDRINUSE EPROTOTYPE ESTALE ENOTCONN EDQUOT ETIMEDOUT
}

impl From<Raw> for Errno {
    fn from(raw: Raw) -> Errno {
        Errno(raw.raw_os_error())
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Errno {
        Errno(error.raw_os_error().unwrap_or(-1))
    }
}

/// The result of a libc function that says -1 and leaves an errno.
pub fn checked(result: libc::c_long) -> R<libc::c_long> {
    if result < 0 { Err(std::io::Error::last_os_error().into()) } else { Ok(result) }
}

/// An open file, closed when dropped.
pub struct Fd(pub OwnedFd);

impl fmt::Debug for Fd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("open")
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Fd {
    pub fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// The path that leads to what this descriptor has open.
    pub fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.raw())
    }
}

pub fn open(path: impl Arg, flags: i32) -> R<Fd> {
    open_mode(path, flags, 0o644)
}

pub fn open_mode(path: impl Arg, flags: i32, mode: u32) -> R<Fd> {
    let flags = OFlags::from_bits_retain((flags | libc::O_CLOEXEC) as u32);
    Ok(Fd(rfs::open(path, flags, Mode::from_raw_mode(mode))?))
}

pub const RDWR: i32 = libc::O_RDWR;
pub const RDONLY: i32 = libc::O_RDONLY;
pub const WRONLY: i32 = libc::O_WRONLY;
pub const CREAT: i32 = libc::O_CREAT;

/// A new file with this content, open for reading and writing.
#[track_caller]
pub fn file(path: &str, content: &[u8]) -> Fd {
    let file = open(path, RDWR | CREAT | libc::O_EXCL).expect("created");
    assert_eq!(pwrite(&file, content, 0), Ok(content.len()), "{path}");
    file
}

pub fn mkdir(path: impl Arg, mode: u32) -> R<()> {
    Ok(rfs::mkdir(path, Mode::from_raw_mode(mode))?)
}

pub fn mknod(path: impl Arg, mode: u32, device: u64) -> R<()> {
    let kind = rfs::FileType::from_raw_mode(mode);
    Ok(rfs::mknodat(CWD, path, kind, Mode::from_raw_mode(mode & 0o7777), device)?)
}

pub fn link(old: impl Arg, new: impl Arg) -> R<()> {
    Ok(rfs::link(old, new)?)
}

pub fn link_follow(old: impl Arg, new: impl Arg) -> R<()> {
    Ok(rfs::linkat(CWD, old, CWD, new, AtFlags::SYMLINK_FOLLOW)?)
}

pub fn link_fd(fd: &Fd, new: impl Arg) -> R<()> {
    Ok(rfs::linkat(fd, "", CWD, new, AtFlags::EMPTY_PATH)?)
}

pub fn symlink(target: impl Arg, path: impl Arg) -> R<()> {
    Ok(rfs::symlink(target, path)?)
}

/// As much of the link's target as fits into `size` bytes.
pub fn readlink(path: impl Arg, size: usize) -> R<String> {
    let mut target = vec![0; size];
    let length = rfs::readlinkat_raw(CWD, path, target.as_mut_slice())?;
    target.truncate(length);
    Ok(String::from_utf8_lossy(&target).into_owned())
}

pub fn rename(old: impl Arg, new: impl Arg) -> R<()> {
    Ok(rfs::rename(old, new)?)
}

pub fn rename_with(old: impl Arg, new: impl Arg, flags: u32) -> R<()> {
    Ok(rfs::renameat_with(CWD, old, CWD, new, rfs::RenameFlags::from_bits_retain(flags))?)
}

pub fn unlink(path: impl Arg) -> R<()> {
    Ok(rfs::unlink(path)?)
}

pub fn rmdir(path: impl Arg) -> R<()> {
    Ok(rfs::rmdir(path)?)
}

pub fn access(path: impl Arg, mode: i32) -> R<()> {
    Ok(rfs::access(path, rfs::Access::from_bits_retain(mode as u32))?)
}

pub fn eaccess(path: impl Arg, mode: i32) -> R<()> {
    Ok(rfs::accessat(CWD, path, rfs::Access::from_bits_retain(mode as u32), AtFlags::EACCESS)?)
}

pub fn chmod(path: impl Arg, mode: u32) -> R<()> {
    Ok(rfs::chmod(path, Mode::from_raw_mode(mode))?)
}

pub fn fchmod(fd: &Fd, mode: u32) -> R<()> {
    Ok(rfs::fchmod(fd, Mode::from_raw_mode(mode))?)
}

/// As chown(2), where -1 (here `None`) leaves one as it is; a link itself and not its target.
pub fn lchown(path: impl Arg, uid: Option<u32>, gid: Option<u32>) -> R<()> {
    let (uid, gid) = (uid.map(rfs::Uid::from_raw), gid.map(rfs::Gid::from_raw));
    Ok(rfs::chownat(CWD, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?)
}

pub fn fchown(fd: &Fd, uid: Option<u32>, gid: Option<u32>) -> R<()> {
    Ok(rfs::fchown(fd, uid.map(rfs::Uid::from_raw), gid.map(rfs::Gid::from_raw))?)
}

pub fn truncate(path: impl Arg, size: i64) -> R<()> {
    let path = path.into_c_str()?;
    // SAFETY: the path ends with NUL and outlives the call.
    checked(unsafe { libc::truncate(path.as_ptr(), size) }.into()).map(|_| ())
}

pub fn ftruncate(fd: &Fd, size: i64) -> R<()> {
    Ok(rfs::ftruncate(fd, size as u64)?)
}

/// Seconds and nanoseconds, the latter also UTIME_NOW or UTIME_OMIT.
pub type Time = (i64, i64);
pub const NOW: Time = (0, libc::UTIME_NOW);
pub const OMIT: Time = (0, libc::UTIME_OMIT);

fn times(access: Time, modification: Time) -> rfs::Timestamps {
    let spec = |(tv_sec, tv_nsec): Time| rfs::Timespec { tv_sec, tv_nsec };
    rfs::Timestamps { last_access: spec(access), last_modification: spec(modification) }
}

/// A link itself and not its target.
pub fn utimens(path: impl Arg, access: Time, modification: Time) -> R<()> {
    Ok(rfs::utimensat(CWD, path, &times(access, modification), AtFlags::SYMLINK_NOFOLLOW)?)
}

pub fn futimens(fd: &Fd, access: Time, modification: Time) -> R<()> {
    Ok(rfs::futimens(fd, &times(access, modification))?)
}

pub fn pread(fd: &Fd, length: usize, offset: i64) -> R<Bytes> {
    let mut bytes = vec![0; length];
    let read = rustix::io::pread(fd, bytes.as_mut_slice(), offset as u64)?;
    bytes.truncate(read);
    Ok(Bytes(bytes))
}

pub fn pwrite(fd: &Fd, bytes: &[u8], offset: i64) -> R<usize> {
    Ok(rustix::io::pwrite(fd, bytes, offset as u64)?)
}

pub fn read(fd: &Fd, length: usize) -> R<Bytes> {
    let mut bytes = vec![0; length];
    let read = rustix::io::read(fd, bytes.as_mut_slice())?;
    bytes.truncate(read);
    Ok(Bytes(bytes))
}

pub fn write(fd: &Fd, bytes: &[u8]) -> R<usize> {
    Ok(rustix::io::write(fd, bytes)?)
}

/// preadv2 into buffers of 3 bytes and of the rest; offset -1 is the descriptor's own.
pub fn preadv2(fd: &Fd, length: usize, offset: i64, flags: i32) -> R<Bytes> {
    let mut bytes = vec![0; length];
    let (first, rest) = bytes.split_at_mut(3.min(length));
    let mut parts = [IoSliceMut::new(first), IoSliceMut::new(rest)];
    let read = rustix::io::preadv2(fd, &mut parts, offset as u64, ReadWriteFlags::from_bits_retain(flags as u32))?;
    bytes.truncate(read);
    Ok(Bytes(bytes))
}

/// pwritev2 of 3 bytes and of the rest.
pub fn pwritev2(fd: &Fd, bytes: &[u8], offset: i64, flags: i32) -> R<usize> {
    let (first, rest) = bytes.split_at(3.min(bytes.len()));
    let parts = [IoSlice::new(first), IoSlice::new(rest)];
    Ok(rustix::io::pwritev2(fd, &parts, offset as u64, ReadWriteFlags::from_bits_retain(flags as u32))?)
}

pub fn lseek(fd: &Fd, offset: i64, whence: i32) -> R<i64> {
    // SAFETY: plain numbers on a descriptor of ours.
    checked(unsafe { libc::lseek(fd.raw(), offset, whence) })
}

pub fn fallocate(fd: &Fd, mode: i32, offset: i64, length: i64) -> R<()> {
    Ok(rfs::fallocate(fd, rfs::FallocateFlags::from_bits_retain(mode as u32), offset as u64, length as u64)?)
}

pub fn copy_range(from: &Fd, from_at: u64, to: &Fd, to_at: u64, length: usize) -> R<usize> {
    let (mut from_at, mut to_at) = (from_at, to_at);
    Ok(rfs::copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), length)?)
}

/// How much arrived.
pub fn sendfile(to: &Fd, from: &Fd, offset: u64, length: usize) -> R<usize> {
    Ok(rfs::sendfile(to, from, Some(&mut offset.clone()), length)?)
}

/// Moves bytes from one file to another through a pipe: what each half did.
pub fn splice(from: &Fd, from_at: u64, to: &Fd, to_at: u64, length: usize) -> (R<usize>, R<usize>) {
    let flags = rustix::pipe::SpliceFlags::NONBLOCK;
    let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
    let into = rustix::pipe::splice(from, Some(&mut from_at.clone()), &writer, None, length, flags);
    let out = rustix::pipe::splice(&reader, None, to, Some(&mut to_at.clone()), length, flags);
    (into.map_err(Errno::from), out.map_err(Errno::from))
}

pub fn fsync(fd: &Fd) -> R<()> {
    Ok(rfs::fsync(fd)?)
}

pub fn fdatasync(fd: &Fd) -> R<()> {
    Ok(rfs::fdatasync(fd)?)
}

pub fn sync_range(fd: &Fd, offset: i64, length: i64, flags: u32) -> R<()> {
    // SAFETY: plain numbers on a descriptor of ours.
    checked(unsafe { libc::sync_file_range(fd.raw(), offset, length, flags) }.into()).map(|_| ())
}

pub fn fadvise(fd: &Fd, advice: i32) -> R<()> {
    // SAFETY: plain numbers on a descriptor of ours.
    match unsafe { libc::posix_fadvise(fd.raw(), 0, 4096, advice) } {
        0 => Ok(()),
        errno => Err(Errno(errno)),
    }
}

pub fn readahead(fd: &Fd, offset: i64, length: usize) -> R<()> {
    // SAFETY: plain numbers on a descriptor of ours.
    checked(unsafe { libc::readahead(fd.raw(), offset, length) } as libc::c_long).map(|_| ())
}

/// An ioctl with a number or a pointer as its argument.
pub fn ioctl(fd: &Fd, number: u64, argument: usize) -> R<i32> {
    // SAFETY: callers pass numbers, or the address of a struct of the size that the request has.
    checked(unsafe { libc::ioctl(fd.raw(), number, argument) }.into()).map(|n| n as i32)
}

pub fn setxattr(path: impl Arg, name: impl Arg, value: &[u8], flags: i32) -> R<()> {
    Ok(rfs::lsetxattr(path, name, value, XattrFlags::from_bits_retain(flags as u32))?)
}

/// Of what a link leads to.
pub fn setxattr_followed(path: impl Arg, name: impl Arg, value: &[u8]) -> R<()> {
    Ok(rfs::setxattr(path, name, value, XattrFlags::empty())?)
}

pub fn fsetxattr(fd: &Fd, name: impl Arg, value: &[u8]) -> R<()> {
    Ok(rfs::fsetxattr(fd, name, value, XattrFlags::empty())?)
}

/// With room for `size` bytes; 0 asks for the size.
pub fn getxattr(path: impl Arg, name: impl Arg, size: usize) -> R<Bytes> {
    let mut value = vec![0; size];
    let length = rfs::lgetxattr(path, name, value.as_mut_slice())?;
    if size > 0 {
        value.truncate(length);
    } else {
        value = format!("size {length}").into_bytes();
    }
    Ok(Bytes(value))
}

/// The names in order: a file system may list them in any.
pub fn listxattr(path: impl Arg) -> R<Vec<String>> {
    let mut list = vec![0; 1 << 16];
    let length = rfs::llistxattr(path, list.as_mut_slice())?;
    let mut names: Vec<_> =
        list[..length].split(|b| *b == 0).map(|n| String::from_utf8_lossy(n).into_owned()).collect();
    names.pop();
    names.sort();
    Ok(names)
}

pub fn removexattr(path: impl Arg, name: impl Arg) -> R<()> {
    Ok(rfs::lremovexattr(path, name)?)
}

/// Bytes that are shown as text, and by length and sum where they are many.
#[derive(Clone, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.len() <= 64 {
            return write!(f, "\"{}\"", self.0.escape_ascii());
        }
        let sum = self.0.iter().fold(0u32, |sum, b| sum.wrapping_mul(31).wrapping_add((*b).into()));
        write!(f, "{} bytes \"{}...\" sum {sum:08x}", self.0.len(), self.0[..16].escape_ascii())
    }
}

/// What stat says, without what differs between two runs: device, inode number and times. Blocks are not shown: how
/// many a file takes is also a matter of how it lies on the disk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub mode: u32,
    pub nlink: u64,
    pub owner: (u32, u32),
    pub rdev: u64,
    pub size: i64,
    pub blocks: i64,
    pub blksize: i64,
}

impl fmt::Debug for Stat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stat { mode, nlink, owner: (uid, gid), rdev, size, blksize, .. } = self;
        write!(f, "{mode:o} x{nlink} {uid}:{gid} {size} bytes, blocks of {blksize}")?;
        if *rdev != 0 { write!(f, " device {}:{}", libc::major(*rdev), libc::minor(*rdev)) } else { Ok(()) }
    }
}

impl From<rfs::Stat> for Stat {
    fn from(s: rfs::Stat) -> Stat {
        Stat {
            mode: s.st_mode,
            nlink: s.st_nlink,
            owner: (s.st_uid, s.st_gid),
            rdev: s.st_rdev,
            size: s.st_size,
            blocks: s.st_blocks,
            blksize: s.st_blksize,
        }
    }
}

pub fn stat(path: impl Arg) -> R<Stat> {
    Ok(rfs::stat(path)?.into())
}

pub fn lstat(path: impl Arg) -> R<Stat> {
    Ok(rfs::lstat(path)?.into())
}

pub fn fstat(fd: &Fd) -> R<Stat> {
    Ok(rfs::fstat(fd)?.into())
}

/// Access, modification and change time of the name itself.
pub fn times_of(path: impl Arg) -> R<[Time; 3]> {
    let s = rfs::lstat(path)?;
    let nano = |n: u64| n as i64;
    Ok([(s.st_atime, nano(s.st_atime_nsec)), (s.st_mtime, nano(s.st_mtime_nsec)), (s.st_ctime, nano(s.st_ctime_nsec))])
}

/// Which of the three times of `path` an operation moves, and its result. Waits a tick of the coarse clock first, so
/// that a time that is set again is another one.
pub fn moved<T: fmt::Debug>(path: &str, operation: impl FnOnce() -> T) -> String {
    moved_to(path, path, operation)
}

/// The same of what has another name afterwards.
pub fn moved_to<T: fmt::Debug>(path: &str, after: &str, operation: impl FnOnce() -> T) -> String {
    std::thread::sleep(std::time::Duration::from_millis(11));
    let before = times_of(path);
    let done = operation();
    let names = ["atime", "mtime", "ctime"];
    let moved = match (before, times_of(after)) {
        (Ok(before), Ok(after)) => {
            let changed = (0..3).filter(|i| before[*i] != after[*i]).map(|i| names[i]);
            changed.collect::<Vec<_>>().join(" ")
        }
        (before, after) => format!("{before:?} {after:?}"),
    };
    format!("{done:?} moves {moved}")
}

pub fn ino(path: impl Arg) -> R<u64> {
    Ok(rfs::lstat(path)?.st_ino)
}

/// The bytes of a file: its beginning, where it is larger than any that these tests fill.
pub fn content(path: impl Arg) -> R<Bytes> {
    let file = open(path, RDONLY)?;
    let size = fstat(&file)?.size.clamp(0, 2 << 20);
    pread(&file, size as usize + 1, 0)
}

/// The permission bits, and those of owner, group and sticky.
pub fn mode(path: impl Arg) -> R<String> {
    lstat(path).map(|s| format!("{:o}", s.mode & 0o7777))
}

pub fn size(path: impl Arg) -> R<i64> {
    lstat(path).map(|s| s.size)
}

/// Runs `work` with the rights to files of another user, group and more groups; of this thread only.
pub fn as_user<T>(uid: u32, gid: u32, groups: &[u32], work: impl FnOnce() -> T) -> T {
    let set = |uid: u32, gid: u32, groups: &[u32]| {
        // SAFETY: these raw calls change the credentials of this thread, and read `groups`, which outlives them.
        unsafe {
            checked(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr())).expect("setgroups");
            checked(libc::syscall(libc::SYS_setresgid, -1, gid, -1)).expect("setresgid");
            checked(libc::syscall(libc::SYS_setresuid, -1, uid, -1)).expect("setresuid");
        }
    };
    set(uid, gid, groups);
    let done = work();
    // SAFETY: as above; root's rights come back before root's groups can be taken.
    unsafe { checked(libc::syscall(libc::SYS_setresuid, -1, 0, -1)).expect("setresuid") };
    set(0, 0, &[]);
    done
}
