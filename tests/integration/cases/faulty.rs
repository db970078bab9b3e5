//! A file system made to fail: one folder with one file, one folder and one link, of which the next operation of a chosen
//! kind fails with a chosen errno. A disk that does so on demand is not to be had on most machines. Called by `errors`.

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Which operation fails, with what, and how often it did.
#[derive(Debug, Default)]
pub(super) struct Fault {
    operation: &'static str,
    errno: i32,
    hits: u64,
    /// What was made since, under whatever name.
    made: Option<FileAttr>,
}

/// Shared by the file system and the test.
#[derive(Clone, Default)]
pub(super) struct Faults(Arc<Mutex<Fault>>);

impl Faults {
    pub(super) fn set(&self, operation: &'static str, errno: i32) {
        *self.0.lock().expect("unharmed") = Fault { operation, errno, ..Fault::default() };
    }

    /// Nothing fails any more, and what was made is gone; how often something failed.
    pub(super) fn clear(&self) -> u64 {
        std::mem::take(&mut *self.0.lock().expect("unharmed")).hits
    }

    fn of(&self, operation: &str) -> Option<Errno> {
        let mut fault = self.0.lock().expect("unharmed");
        (fault.operation == operation).then(|| {
            fault.hits += 1;
            Errno::from_i32(fault.errno)
        })
    }

    fn make(&self, attr: FileAttr) -> FileAttr {
        self.0.lock().expect("unharmed").made = Some(attr);
        attr
    }

    fn made(&self) -> Option<FileAttr> {
        self.0.lock().expect("unharmed").made
    }
}

/// Mounts it, until what is returned is dropped.
pub(super) fn mount(place: &Path, faults: &Faults) -> fuser::BackgroundSession {
    let mut config = fuser::Config::default();
    // A request may wait for another one's answer.
    config.n_threads = Some(4);
    fuser::spawn_mount(Faulty(faults.clone()), place, &config).expect("mounted")
}

struct Faulty(Faults);

/// Nothing is kept: every operation comes here.
const KEEP: Duration = Duration::ZERO;
const ROOT: u64 = 1;
/// Name, number and kind of everything there is.
const ENTRIES: [(&str, u64, FileType); 3] =
    [("f", 2, FileType::RegularFile), ("d", 3, FileType::Directory), ("l", 4, FileType::Symlink)];
/// The number of what was made.
const MADE: u64 = 5;
pub(super) const CONTENT: &[u8] = b"content";

fn attributes(ino: u64, kind: FileType) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size: CONTENT.len() as u64,
        blocks: 1,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: 0o755,
        nlink: 1,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn of(ino: INodeNo) -> FileAttr {
    let known = ENTRIES.iter().find(|(_, number, _)| *number == ino.0);
    let other = if ino.0 == ROOT { FileType::Directory } else { FileType::RegularFile };
    attributes(ino.0, known.map_or(other, |(_, _, kind)| *kind))
}

/// Answers with the fault of the operation, if it has one now.
macro_rules! fails {
    ($self:ident, $operation:literal, $reply:ident) => {
        if let Some(errno) = $self.0.of($operation) {
            return $reply.error(errno);
        }
    };
}

impl Filesystem for Faulty {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        fails!(self, "lookup", reply);
        match ENTRIES.iter().find(|(known, _, _)| parent.0 == ROOT && name == *known) {
            Some((_, number, kind)) => reply.entry(&KEEP, &attributes(*number, *kind), Generation(0)),
            None => match self.0.made() {
                Some(made) => reply.entry(&KEEP, &made, Generation(0)),
                None => reply.error(Errno::ENOENT),
            },
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        fails!(self, "getattr", reply);
        reply.attr(&KEEP, &self.0.made().filter(|made| made.ino == ino).unwrap_or_else(|| of(ino)));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match (mode, uid, size) {
            (_, _, Some(_)) => fails!(self, "truncate", reply),
            (_, Some(_), _) => fails!(self, "chown", reply),
            (Some(_), _, _) => fails!(self, "chmod", reply),
            _ => fails!(self, "utimens", reply),
        }
        reply.attr(&KEEP, &of(ino));
    }

    fn readlink(&self, _: &Request, _: INodeNo, reply: ReplyData) {
        fails!(self, "readlink", reply);
        reply.data(b"f");
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        fails!(self, "mknod", reply);
        reply.entry(&KEEP, &self.0.make(attributes(MADE, FileType::NamedPipe)), Generation(0));
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        fails!(self, "mkdir", reply);
        reply.entry(&KEEP, &self.0.make(attributes(MADE, FileType::Directory)), Generation(0));
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        fails!(self, "unlink", reply);
        reply.ok();
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        fails!(self, "rmdir", reply);
        reply.ok();
    }

    fn symlink(&self, _: &Request, _: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        fails!(self, "symlink", reply);
        reply.entry(&KEEP, &self.0.make(attributes(MADE, FileType::Symlink)), Generation(0));
    }

    fn rename(&self, _: &Request, _: INodeNo, _: &OsStr, _: INodeNo, _: &OsStr, _: RenameFlags, reply: ReplyEmpty) {
        fails!(self, "rename", reply);
        reply.ok();
    }

    fn link(&self, _: &Request, ino: INodeNo, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        fails!(self, "link", reply);
        reply.entry(&KEEP, &self.0.make(of(ino)), Generation(0));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        fails!(self, "open", reply);
        // Without a page cache, which would make one error of all.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn create(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        fails!(self, "create", reply);
        let attr = self.0.make(attributes(MADE, FileType::RegularFile));
        reply.created(&KEEP, &attr, Generation(0), FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        fails!(self, "read", reply);
        let from = CONTENT.len().min(offset as usize);
        reply.data(&CONTENT[from..CONTENT.len().min(from + size as usize)]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        fails!(self, "write", reply);
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        fails!(self, "flush", reply);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        fails!(self, "fsync", reply);
        reply.ok();
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        fails!(self, "opendir", reply);
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        fails!(self, "readdir", reply);
        let entries = if ino.0 == ROOT { &ENTRIES[..] } else { &[] };
        for (i, (name, number, kind)) in entries.iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(*number), i as u64 + 1, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        fails!(self, "fsyncdir", reply);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        fails!(self, "statfs", reply);
        reply.statfs(1000, 500, 500, 1000, 500, 4096, 255, 4096);
    }

    fn setxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        fails!(self, "setxattr", reply);
        reply.ok();
    }

    fn getxattr(&self, _: &Request, _: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        // The kernel asks for names of its own before many operations.
        if name != "user.note" {
            return reply.error(Errno::ENODATA);
        }
        fails!(self, "getxattr", reply);
        if size == 0 { reply.size(1) } else { reply.data(b"x") }
    }

    fn listxattr(&self, _: &Request, _: INodeNo, size: u32, reply: ReplyXattr) {
        fails!(self, "listxattr", reply);
        if size == 0 { reply.size(10) } else { reply.data(b"user.note\0") }
    }

    fn removexattr(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        fails!(self, "removexattr", reply);
        reply.ok();
    }

    fn fallocate(&self, _: &Request, _: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        fails!(self, "fallocate", reply);
        reply.ok();
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        fails!(self, "lseek", reply);
        reply.offset(0);
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        fails!(self, "copy_file_range", reply);
        reply.written(len as u32);
    }
}
