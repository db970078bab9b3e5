//! The bytes of files: opening, reading, writing and what else a handle can do. Under passthrough the kernel does the
//! reading and writing itself and only opening and closing come here. All handles of an inode are open in one mode,
//! because the kernel refuses a mixture; the cache hears of every way to write before the writer gets its reply.
//! Called by `fuse`; it never waits for a load.

use super::FileSystem;
use super::attributes::Entry;
use super::error::Result;
use super::handle::{FileHandle, Handle, writes};
use super::inode::{Inode, Mode as OpenMode};
use super::names::Made;
use super::origin::{Origin, with_fsetid, without_fsetid};
use super::proc_path;
use super::status::Status;
use fuser::BackingId;
use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, SeekFrom, StatVfsMountFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The caller's open flags that the real descriptor shares. O_APPEND is decided at each write and O_DIRECT would only
/// bind our buffers; under passthrough the kernel opens the file again with all of the caller's own flags.
const SHARED_FLAGS: i32 =
    libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_SYNC | libc::O_DSYNC | libc::O_NOATIME | libc::O_LARGEFILE;

/// `__FMODE_EXEC` of the kernel (linux/fs.h): the file is opened to be executed.
const OPENED_TO_EXECUTE: i32 = 0x20;

/// Bytes that one copy_file_range copies at most, so that its caller can be interrupted soon.
const COPY_LIMIT: usize = 64 << 20;

/// An open file: the number of its handle, and how the kernel shall treat it.
pub(crate) struct Opened {
    pub(crate) handle: u64,
    /// `None`: reads and writes come to the daemon.
    pub(crate) backing: Option<Arc<BackingId>>,
    /// The file is as it was when it was last open: pages in the kernel are still good.
    pub(crate) keep_cache: bool,
    /// A close has nothing to tell: no page of the kernel's to write back, and no server that could refuse one.
    pub(crate) closes_silently: bool,
}

/// A write, as WRITE describes it.
pub(crate) struct Write<'d> {
    pub(crate) offset: u64,
    pub(crate) data: &'d [u8],
    /// The descriptor's flags now.
    pub(crate) flags: i32,
    /// The kernel writes its own pages back: their place is fixed.
    pub(crate) from_cache: bool,
    pub(crate) clears_suid: bool,
}

impl FileSystem {
    /// `register` makes a backing of an O_PATH descriptor. Without `waits` the answer is EWOULDBLOCK where somebody
    /// else's lease on the file has to be broken first, which can take a minute. The kernel truncates afterwards, by SETATTR.
    pub(crate) fn open(
        &self,
        node: u64,
        flags: i32,
        waits: bool,
        register: impl FnOnce(BorrowedFd<'_>) -> std::io::Result<BackingId>,
    ) -> Result<Opened> {
        let inode = self.real(node)?;
        if inode.kind != FileType::RegularFile {
            return Err(Errno::INVAL); // the kernel opens other kinds itself
        }
        if flags & OPENED_TO_EXECUTE != 0 && self.may_not_execute(&inode)? {
            return Err(Errno::ACCESS);
        }
        if writes(flags) {
            self.writable()?;
            self.cache.changed(inode.id);
        }
        // Without O_TRUNC: a truncation comes by itself, and is refused where a program runs.
        let asked = OFlags::from_bits_retain((flags & SHARED_FLAGS) as u32) | OFlags::CLOEXEC | OFlags::NOCTTY;
        let wanted = if waits { asked } else { asked | OFlags::NONBLOCK };
        let reached = inode.reach()?;
        let file = match rustix::fs::open(proc_path(&reached), wanted, Mode::empty()) {
            // O_NOATIME is the owner's to use, which a daemon that is not root may not be.
            Err(Errno::PERM) if wanted.contains(OFlags::NOATIME) => {
                rustix::fs::open(proc_path(&reached), wanted - OFlags::NOATIME, Mode::empty())?
            }
            other => other?,
        };
        drop(reached);
        if wanted != asked {
            // For the open only: it means nothing for a regular file, but an ioctl could ask.
            rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        }
        Ok(self.opened(inode, file, flags, register))
    }

    pub(crate) fn create(
        &self,
        origin: Origin,
        parent: u64,
        name: &OsStr,
        made: Made,
        flags: i32,
        register: impl FnOnce(BorrowedFd<'_>) -> std::io::Result<BackingId>,
    ) -> Result<(Entry, Opened)> {
        let parent = self.changeable(parent, name)?;
        // What was put there meanwhile may be a FIFO or a link: neither is waited for or followed.
        let wanted = OFlags::from_bits_retain((flags & (SHARED_FLAGS | libc::O_EXCL | libc::O_TRUNC)) as u32)
            | OFlags::CREATE
            | OFlags::NOFOLLOW
            | OFlags::NONBLOCK
            | OFlags::NOCTTY
            | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(made.mode & 0o7777);
        let at = parent.reach()?;
        let file = self.make(origin, made, || rustix::fs::openat(&at, name, wanted, mode))?;
        let (path, status) = path_to(&file)?;
        let mut entry = self.entry(path, status, &parent, name)?;
        let inode = self.inodes.get(entry.node)?;
        if inode.kind != FileType::RegularFile {
            self.inodes.forget(entry.node, 1);
            return Err(Errno::EXIST);
        }
        if writes(flags) {
            self.cache.changed(inode.id);
            if entry.attributes.attr.size > 0 {
                entry.attributes.keep = Duration::ZERO;
            }
            // To an empty file nobody can store through a mapping, and of all else the kernel hears itself.
        }
        let opened = self.opened(inode, file, flags, register);
        Ok((entry, opened))
    }

    /// Counts the handle and settles how the kernel reads and writes the inode.
    fn opened(
        &self,
        inode: Arc<Inode>,
        file: OwnedFd,
        flags: i32,
        register: impl FnOnce(BorrowedFd<'_>) -> std::io::Result<BackingId>,
    ) -> Opened {
        // An inode without a descriptor gets one for as long as it is open, when it may lose its name.
        let kept = if inode.has_descriptor() {
            None
        } else {
            rustix::fs::open(proc_path(&file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok().map(Arc::new)
        };
        let mut refused = None;
        let (backing, keep_cache) = {
            // Registering and statx are short and wait for nothing, and two opens must not register twice.
            let mut opens = inode.opens.lock();
            if opens.mode.is_none() {
                let wanted = self.passes_through() && !opens.refused;
                let backing = wanted.then(|| register_backing(&inode, kept.as_deref(), register)).transpose();
                refused = backing.as_ref().err().map(|e| e.raw_os_error().unwrap_or(libc::EIO));
                opens.refused |= refused.is_some();
                let backing = backing.ok().flatten().map(|backing| OpenMode::Passthrough(Arc::new(backing)));
                opens.mode = Some(backing.unwrap_or(OpenMode::Cached));
            }
            if opens.kept.is_none() {
                opens.kept = kept;
            }
            opens.handles += 1;
            opens.writers += u32::from(writes(flags));
            opens.written |= writes(flags) || flags & libc::O_TRUNC != 0;
            let backing = match &opens.mode {
                Some(OpenMode::Passthrough(backing)) => Some(backing.clone()),
                _ => None,
            };
            let status = if backing.is_none() { Status::of(&file).ok() } else { None };
            let now = status.map(|status| status.content());
            let keep_cache = now.is_some() && opens.seen == now;
            opens.seen = now;
            (backing, keep_cache)
        };
        if let Some(errno) = refused {
            self.say_refused(&inode, errno);
        }
        let closes_silently = !writes(flags) || (backing.is_some() && self.local && !inode.foreign);
        let handle = FileHandle { inode, file: Arc::new(file), flags };
        let handle = self.handles.insert(Handle::File(Arc::new(handle)));
        Opened { handle, backing, keep_cache, closes_silently }
    }

    /// Whether the mount in which the file was found allows no programs, and ours does.
    fn may_not_execute(&self, inode: &Inode) -> Result<bool> {
        let flags = if inode.foreign { rustix::fs::fstatvfs(inode.reach()?)?.f_flag } else { self.forbids };
        Ok((flags - self.forbids).contains(StatVfsMountFlags::NOEXEC))
    }

    /// Says once for each mount of the source, and each reason, that data goes through the daemon.
    fn say_refused(&self, inode: &Inode, errno: i32) {
        if self.refusals.lock().insert((inode.mount, errno)) {
            let why = match errno {
                libc::ELOOP => "its file system is stacked too deep for the kernel".to_string(),
                _ => std::io::Error::from_raw_os_error(errno).to_string(),
            };
            let name = self.name_of(inode);
            tracing::info!(
                "no passthrough for {} and the like: {why}; their data goes through the daemon",
                name.display()
            );
        }
    }

    pub(crate) fn release(&self, number: u64) {
        let Some(Handle::File(handle)) = self.handles.remove(number) else {
            return;
        };
        let closed = {
            let mut opens = handle.inode.opens.lock();
            opens.handles = opens.handles.saturating_sub(1);
            if handle.writes() {
                opens.writers = opens.writers.saturating_sub(1);
                opens.written = true;
            }
            if opens.handles == 0 { (opens.mode.take(), opens.kept.take()) } else { (None, None) }
        };
        drop(closed); // tells the kernel, outside the lock
    }

    /// Reads into `buffer`, as many bytes as there are.
    pub(crate) fn read(&self, number: u64, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        self.served.reads.fetch_add(1, Ordering::Relaxed);
        let handle = self.handles.file(number)?;
        let mut done = 0;
        while done < buffer.len() {
            match rustix::io::pread(&handle.file, &mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    pub(crate) fn write(&self, number: u64, write: &Write<'_>) -> Result<u32> {
        self.served.writes.fetch_add(1, Ordering::Relaxed);
        self.writable()?;
        let handle = self.handles.file(number)?;
        let append = write.flags & libc::O_APPEND != 0 && !write.from_cache;
        let flags = if append { ReadWriteFlags::APPEND } else { ReadWriteFlags::empty() };
        let store = || {
            let mut done = 0;
            while done < write.data.len() {
                let rest = [IoSlice::new(&write.data[done..])];
                match rustix::io::pwritev2(&handle.file, &rest, write.offset + done as u64, flags) {
                    Ok(0) => break,
                    Ok(n) => done += n,
                    Err(Errno::INTR) => {}
                    Err(_) if done > 0 => break,
                    Err(e) => return Err(e),
                }
            }
            Ok(done as u32)
        };
        let written = if write.clears_suid { without_fsetid(store) } else { with_fsetid(store) };
        self.cache.changed(handle.inode.id);
        written
    }

    /// A descriptor of the handle was closed; the handle may live on. Gives a file system that stores at close the
    /// opportunity to say that it could not.
    pub(crate) fn flush(&self, number: u64) -> Result<()> {
        let handle = self.handles.file(number)?;
        if handle.writes() {
            let copy = rustix::io::fcntl_dupfd_cloexec(&handle.file, 0)?;
            let raw = std::os::fd::IntoRawFd::into_raw_fd(copy);
            // SAFETY: `raw` was just duplicated and belongs to nobody else; it is not used after this.
            if unsafe { libc::close(raw) } != 0 {
                let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
                return Err(Errno::from_raw_os_error(errno));
            }
        }
        Ok(())
    }

    pub(crate) fn fsync(&self, number: u64, data_only: bool) -> Result<()> {
        match self.handles.get(number)? {
            Handle::File(handle) if data_only => rustix::fs::fdatasync(&handle.file),
            Handle::File(handle) => rustix::fs::fsync(&handle.file),
            Handle::Directory(_) | Handle::Control(_) => Ok(()),
        }
    }

    pub(crate) fn fallocate(&self, origin: Origin, number: u64, offset: u64, length: u64, mode: i32) -> Result<()> {
        self.writable()?;
        let handle = self.handles.file(number)?;
        let allocate = || {
            let mode = FallocateFlags::from_bits_retain(mode as u32);
            rustix::fs::fallocate(&handle.file, mode, offset, length)
        };
        let done = with_fsetid(|| origin.identity().with(allocate));
        self.cache.changed(handle.inode.id);
        done
    }

    /// SEEK_DATA and SEEK_HOLE; the kernel does the others itself. The descriptor's own position has no meaning here.
    pub(crate) fn lseek(&self, number: u64, offset: i64, whence: i32) -> Result<i64> {
        let handle = self.handles.file(number)?;
        let offset = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
        let position = match whence {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            libc::SEEK_SET => SeekFrom::Start(offset),
            _ => return Err(Errno::INVAL),
        };
        rustix::fs::seek(&handle.file, position).map(|at| at as i64)
    }

    pub(crate) fn copy_file_range(&self, origin: Origin, from: (u64, u64), to: (u64, u64), length: u64) -> Result<u32> {
        self.writable()?;
        let (source, target) = (self.handles.file(from.0)?, self.handles.file(to.0)?);
        let (mut read_at, mut write_at) = (from.1, to.1);
        let length = usize::try_from(length).unwrap_or(usize::MAX).min(COPY_LIMIT);
        let copy = || {
            rustix::fs::copy_file_range(
                source.file.as_fd(),
                Some(&mut read_at),
                target.file.as_fd(),
                Some(&mut write_at),
                length,
            )
        };
        let copied = with_fsetid(|| origin.identity().with(copy));
        self.cache.changed(target.inode.id);
        copied.map(|n| n as u32)
    }
}

/// An O_PATH descriptor of `file`, and what it is.
fn path_to(file: &OwnedFd) -> Result<(OwnedFd, Status)> {
    let path = rustix::fs::open(proc_path(file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    Ok((path, Status::of(file)?))
}

/// The kernel writes with the credentials of this moment: with CAP_FSETID set-user-id bits would survive.
fn register_backing(
    inode: &Inode,
    kept: Option<&OwnedFd>,
    register: impl FnOnce(BorrowedFd<'_>) -> std::io::Result<BackingId>,
) -> std::io::Result<BackingId> {
    match kept {
        Some(kept) => without_fsetid(|| register(kept.as_fd())),
        // Of an inode with a descriptor, which takes no lock.
        None => without_fsetid(|| register(inode.reach()?.as_fd())),
    }
}
