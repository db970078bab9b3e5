//! The adapter to fuser: every method calls one function of the file system and turns its result into a reply. No logic
//! is here, so that everything is tested without FUSE. A panic ends its request and nothing else.

mod reply;
mod workers;

pub(crate) use workers::Workers;

use super::FileSystem;
use super::attributes::Change;
use super::data::Write;
use super::error::{Reason, Result, only_errno};
use super::handle::Handle;
use super::inode::is_virtual;
use super::mount::{End, negotiate};
use super::names::Made;
use super::origin::Origin;
use super::xattr::trigger;
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo,
    IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
    Request, TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;
use reply::{attributes, empty, entry, open_flags, opened, value};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// What fuser calls.
pub(crate) struct Fuse {
    pub(crate) fs: Arc<FileSystem>,
    /// For INIT: whether passthrough is wanted, and how deep the source's file systems are stacked.
    pub(crate) wants_passthrough: bool,
    pub(crate) depth: u32,
    /// From INIT: whether passthrough is on, and why not.
    pub(crate) reason: Arc<Mutex<String>>,
    pub(crate) end: Arc<End>,
    pub(crate) workers: Arc<Workers>,
}

thread_local! {
    /// Each worker's buffer for reads; as large as the largest read so far.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Filesystem for Fuse {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        negotiate(self, config);
        Ok(())
    }

    fn destroy(&mut self) {
        self.fs.control.queue.stop();
        self.end.reached();
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.workers.serve(|| {
            entry(reply, self.fs.lookup(parent.0, name));
        });
    }

    fn forget(&self, _req: &Request, ino: INodeNo, nlookup: u64) {
        // One of many in a request, perhaps.
        workers::caught(|| {
            self.fs.inodes.forget(ino.0, nlookup);
        });
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        self.workers.serve(|| {
            attributes(reply, self.fs.getattr(ino.0));
        });
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.workers.serve(|| {
            let change = Change { mode, uid, gid, size, atime, mtime };
            let (fs, origin, handle) = (self.fs.clone(), Origin::from(req), fh.map(|fh| fh.0));
            match fs.setattr(origin, ino.0, handle, change, false) {
                // A truncation waits for a lease as opening does.
                Err(rustix::io::Errno::WOULDBLOCK) => self.fs.waiting.run(move |may_wait| {
                    attributes(reply, fs.setattr(origin, ino.0, handle, change, may_wait));
                }),
                done => attributes(reply, done),
            }
        });
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        self.workers.serve(|| match self.fs.readlink(ino.0) {
            Ok(target) => reply.data(&target),
            Err(e) => reply.error(e.errno()),
        });
    }

    fn mknod(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, rdev: u32, reply: ReplyEntry) {
        self.workers.serve(|| {
            entry(reply, self.fs.mknod(Origin::from(req), parent.0, name, Made { mode, umask }, rdev));
        });
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        self.workers.serve(|| {
            entry(reply, self.fs.mkdir(Origin::from(req), parent.0, name, Made { mode, umask }));
        });
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.workers.serve(|| {
            empty(reply, self.fs.unlink(parent.0, name));
        });
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.workers.serve(|| {
            empty(reply, self.fs.rmdir(parent.0, name));
        });
    }

    fn symlink(&self, req: &Request, parent: INodeNo, link_name: &OsStr, target: &Path, reply: ReplyEntry) {
        self.workers.serve(|| {
            entry(reply, self.fs.symlink(Origin::from(req), parent.0, link_name, target));
        });
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.workers.serve(|| {
            empty(reply, self.fs.rename(parent.0, name, newparent.0, newname, flags.bits()));
        });
    }

    fn link(&self, _req: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        self.workers.serve(|| {
            entry(reply, self.fs.link(ino.0, newparent.0, newname));
        });
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.workers.serve(|| {
            if is_virtual(ino.0) {
                return match self.fs.open_control(Origin::from(req), ino.0, flags.0) {
                    // A stream: a descriptor that wrote lines reads results from their beginning.
                    Ok(handle) if super::handle::writes(flags.0) => {
                        reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_STREAM);
                    }
                    Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO),
                    Err(e) => reply.error(e.errno()),
                };
            }
            let fs = self.fs.clone();
            match fs.open(ino.0, flags.0, false, |fd| reply.open_backing(fd)) {
                // Waiting for a lease is not a worker's: there are few of them.
                Err(rustix::io::Errno::WOULDBLOCK) if flags.0 & libc::O_NONBLOCK == 0 => {
                    self.fs.waiting.run(move |may_wait| {
                        let again = || fs.open(ino.0, flags.0, true, |fd| reply.open_backing(fd));
                        let found = if may_wait { again() } else { Err(rustix::io::Errno::AGAIN) };
                        opened(reply, found);
                    });
                }
                found => opened(reply, found),
            }
        });
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        self.workers.serve(|| {
            let made = Made { mode, umask };
            match self.fs.create(Origin::from(req), parent.0, name, made, flags, |fd| reply.open_backing(fd)) {
                Ok((entry, opened)) => {
                    let (keep, attr) = (entry.attributes.keep, entry.attributes.attr);
                    let (generation, handle) = (Generation(entry.generation), FileHandle(opened.handle));
                    let flags = open_flags(&opened);
                    match &opened.backing {
                        Some(backing) => reply.created_passthrough(&keep, &attr, generation, handle, flags, backing),
                        None => reply.created(&keep, &attr, generation, handle, flags),
                    }
                }
                Err(e) => reply.error(e.errno()),
            }
        });
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.workers.serve(|| {
            if let Ok(Handle::Control(control)) = self.fs.handles.get(fh.0) {
                return reply.data(&self.fs.read_control(&control, offset, size as usize));
            }
            BUFFER.with_borrow_mut(|buffer| {
                if buffer.len() < size as usize {
                    buffer.resize(size as usize, 0);
                }
                match self.fs.read(fh.0, offset, &mut buffer[..size as usize]) {
                    Ok(length) => reply.data(&buffer[..length]),
                    Err(e) => reply.error(e.errno()),
                }
            });
        });
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.workers.serve(|| {
            if let Ok(Handle::Control(control)) = self.fs.handles.get(fh.0) {
                let length = data.len() as u32;
                let answered = Box::new(move |done: Result<()>| match done {
                    Ok(()) => reply.written(length),
                    Err(e) => reply.error(e.errno()),
                });
                return self.fs.write_control(&control, data, answered);
            }
            let write = Write {
                offset,
                data,
                flags: flags.0,
                from_cache: write_flags.contains(WriteFlags::FUSE_WRITE_CACHE),
                clears_suid: write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
            };
            match self.fs.write(fh.0, &write) {
                Ok(length) => reply.written(length),
                Err(e) => reply.error(e.errno()),
            }
        });
    }

    fn flush(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, _lock_owner: LockOwner, reply: ReplyEmpty) {
        self.workers.serve(|| match self.fs.handles.get(fh.0) {
            Ok(Handle::Control(control)) => self.fs.flush_control(&control, Box::new(move |done| empty(reply, done))),
            Ok(_) => empty(reply, self.fs.flush(fh.0)),
            Err(e) => reply.error(e.errno()),
        });
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.workers.serve(|| {
            self.fs.release(fh.0);
            reply.ok();
        });
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        self.workers.serve(|| {
            let fs = self.fs.clone();
            self.fs.waiting.run(move |_| empty(reply, fs.fsync(fh.0, datasync)));
        });
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.workers.serve(|| match self.fs.opendir(ino.0) {
            Ok((handle, flags)) => reply.opened(FileHandle(handle), flags),
            Err(e) => reply.error(e.errno()),
        });
    }

    fn readdir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        self.workers.serve(|| match self.fs.readdir(fh.0, offset, &mut reply) {
            Ok(()) => {
                reply.ok();
                self.fs.read_ahead(fh.0);
            }
            Err(e) => reply.error(e.errno()),
        });
    }

    fn readdirplus(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        self.workers.serve(|| match self.fs.readdirplus(fh.0, offset, &mut reply) {
            Ok(()) => {
                reply.ok();
                self.fs.read_ahead(fh.0);
            }
            Err(e) => reply.error(e.errno()),
        });
    }

    fn releasedir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.workers.serve(|| {
            self.fs.handles.remove(fh.0);
            reply.ok();
        });
    }

    fn fsyncdir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        self.workers.serve(|| {
            let fs = self.fs.clone();
            self.fs.waiting.run(move |_| empty(reply, fs.fsyncdir(fh.0, datasync)));
        });
    }

    fn statfs(&self, _req: &Request, ino: INodeNo, reply: ReplyStatfs) {
        self.workers.serve(|| match self.fs.statfs(ino.0) {
            Ok(s) => reply.statfs(
                s.f_blocks,
                s.f_bfree,
                s.f_bavail,
                s.f_files,
                s.f_ffree,
                s.f_bsize as u32,
                s.f_namemax as u32,
                s.f_frsize as u32,
            ),
            Err(e) => reply.error(e.errno()),
        });
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        self.workers.serve(|| match trigger(name) {
            Some(name) => {
                let answered = Box::new(move |answer: crate::failure::Result<Vec<u8>>| {
                    empty(reply, answer.map(|_| ()).map_err(|f| only_errno(&f)));
                });
                self.fs.set_trigger(Origin::from(req), ino.0, name, answered);
            }
            None => empty(reply, self.fs.setxattr(Origin::from(req), ino.0, name, value, flags)),
        });
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.workers.serve(|| match trigger(name) {
            Some(name) => {
                let answered = Box::new(move |answer: crate::failure::Result<Vec<u8>>| {
                    value(reply, size, answer.map_err(|f| only_errno(&f)));
                });
                self.fs.get_trigger(Origin::from(req), ino.0, name, answered);
            }
            None => value(reply, size, self.fs.getxattr(ino.0, name)),
        });
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.workers.serve(|| {
            value(reply, size, self.fs.listxattr(Origin::from(req), ino.0));
        });
    }

    fn removexattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.workers.serve(|| {
            empty(reply, self.fs.removexattr(ino.0, name));
        });
    }

    fn access(&self, _req: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        self.workers.serve(|| {
            reply.ok(); // the kernel checks, and does not ask
        });
    }

    fn ioctl(
        &self,
        req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        self.workers.serve(|| {
            let answered = Box::new(move |answer: super::ioctl::Answer| {
                if answer.result < 0 && answer.data.is_empty() {
                    return reply.error(Errno::from_i32(-answer.result));
                }
                reply.ioctl(answer.result, &answer.data);
            });
            self.fs.ioctl(Origin::from(req), fh.0, cmd, in_data, out_size, answered);
        });
    }

    fn fallocate(
        &self,
        req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.workers.serve(|| {
            let (fs, origin) = (self.fs.clone(), Origin::from(req));
            self.fs.waiting.run(move |_| empty(reply, fs.fallocate(origin, fh.0, offset, length, mode)));
        });
    }

    fn lseek(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        self.workers.serve(|| match self.fs.lseek(fh.0, offset, whence) {
            Ok(at) => reply.offset(at),
            Err(e) => reply.error(e.errno()),
        });
    }

    fn copy_file_range(
        &self,
        req: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        _ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        self.workers.serve(|| {
            let (fs, origin) = (self.fs.clone(), Origin::from(req));
            let copied = move |_| match fs.copy_file_range(origin, (fh_in.0, offset_in), (fh_out.0, offset_out), len) {
                Ok(length) => reply.written(length),
                Err(e) => reply.error(e.errno()),
            };
            self.fs.waiting.run(copied);
        });
    }
}
