//! Listing directories. Offsets are the source's own, so that a listing can be continued after any entry, also while
//! the directory changes. Plain listings count no lookups; those with attributes count one for every entry that went
//! into the reply, except `.` and `..`. The name `.warpfs` of the root is not listed. Called by `fuse`.

use super::FileSystem;
use super::attributes::{Entry, attr_of, kind_of};
use super::control;
use super::error::Result;
use super::handle::Handle;
use super::inode::{Inode, ROOT, is_virtual, virtual_node};
use super::proc_path;
use crate::source::FileId;
use fuser::{FileAttr, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use parking_lot::Mutex;
use rustix::fs::{FileType, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// Bytes of entries that are taken from the source at once.
const BATCH: usize = 32 * 1024;

/// An open directory; of the virtual one there is nothing to keep.
pub(crate) enum DirectoryHandle {
    Real { inode: Arc<Inode>, file: OwnedFd, ahead: Mutex<Ahead> },
    Virtual,
}

/// Entries that were read and not yet handed out.
#[derive(Default)]
pub(crate) struct Ahead {
    /// The offset with which the next one continues.
    at: u64,
    entries: VecDeque<Listed>,
}

/// One entry of a listing.
pub(crate) struct Listed {
    pub(crate) number: u64,
    /// Where the listing continues after this entry.
    pub(crate) next: u64,
    pub(crate) kind: FileType,
    pub(crate) name: OsString,
}

impl FileSystem {
    pub(crate) fn opendir(&self, node: u64) -> Result<u64> {
        if is_virtual(node) {
            self.control.attributes(node)?;
            return Ok(self.handles.insert(Handle::Directory(Arc::new(DirectoryHandle::Virtual))));
        }
        let inode = self.inodes.get(node)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let file = rustix::fs::open(proc_path(&inode.reach()?), flags, Mode::empty())?;
        let directory = DirectoryHandle::Real { inode, file, ahead: Mutex::default() };
        Ok(self.handles.insert(Handle::Directory(Arc::new(directory))))
    }

    pub(crate) fn readdir(&self, handle: u64, offset: u64, reply: &mut ReplyDirectory) -> Result<()> {
        let directory = self.handles.directory(handle)?;
        let device = match &*directory {
            DirectoryHandle::Real { inode, .. } => Some(inode.id.device),
            DirectoryHandle::Virtual => None,
        };
        directory.list(self, offset, |listed| {
            let inode = listed.number;
            // As stat will show it: another file system in the source has numbers of its own.
            let number = device.map_or(inode, |device| self.inodes.number_of(FileId { device, inode }));
            reply.add(INodeNo(number), listed.next, kind_of(listed.kind), &listed.name)
        })
    }

    pub(crate) fn readdirplus(&self, handle: u64, offset: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        let directory = self.handles.directory(handle)?;
        directory.list(self, offset, |listed| match self.entry_of(&directory, listed) {
            Ok((entry, counted)) => {
                let keep = entry.attributes.keep;
                let generation = fuser::Generation(entry.generation);
                let full = reply.add(
                    INodeNo(entry.node),
                    listed.next,
                    &listed.name,
                    &keep,
                    &entry.attributes.attr,
                    generation,
                );
                if full && counted {
                    self.inodes.forget(entry.node, 1);
                }
                full
            }
            Err(Errno::NOENT) => false, // it is gone meanwhile
            // It is there but cannot be looked at: a folder may be readable and not searchable.
            Err(_) => {
                let attr = nameless(listed);
                reply.add(attr.ino, listed.next, &listed.name, &Duration::ZERO, &attr, fuser::Generation(0))
            }
        })
    }

    /// The entry, and whether its lookup was counted.
    fn entry_of(&self, directory: &DirectoryHandle, listed: &Listed) -> Result<(Entry, bool)> {
        let DirectoryHandle::Real { inode, .. } = directory else {
            let known = if is_virtual(listed.number) { listed.number } else { control::DIRECTORY };
            let mut attributes = self.control.attributes(known)?;
            attributes.attr.ino = INodeNo(listed.number);
            return Ok((Entry { node: listed.number, generation: 0, attributes }, false));
        };
        if listed.name == "." || listed.name == ".." {
            let stat = rustix::fs::fstat(inode.reach()?)?;
            let mut attr = attr_of(&stat, inode);
            attr.ino = INodeNo(listed.number);
            let attributes = super::attributes::Attributes { attr, keep: Duration::ZERO };
            return Ok((Entry { node: listed.number, generation: 0, attributes }, false));
        }
        Ok((self.find(inode, &listed.name)?, true))
    }

    pub(crate) fn fsyncdir(&self, handle: u64, data_only: bool) -> Result<()> {
        match &*self.handles.directory(handle)? {
            DirectoryHandle::Real { file, .. } if data_only => rustix::fs::fdatasync(file),
            DirectoryHandle::Real { file, .. } => rustix::fs::fsync(file),
            DirectoryHandle::Virtual => Ok(()),
        }
    }
}

/// Attributes of an entry of which only the name and kind are known. fuser has no entry without a node, so it gets one
/// that no operation finds and no forget counts; it is good for no time, so that whoever uses the name looks it up.
fn nameless(listed: &Listed) -> FileAttr {
    const BEHIND_CONTROL: u64 = 1 << 47;
    FileAttr {
        ino: INodeNo(virtual_node(BEHIND_CONTROL | (listed.number & (BEHIND_CONTROL - 1)))),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: kind_of(listed.kind),
        perm: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl DirectoryHandle {
    /// Hands entries from `offset` on to `full` until it says that it can take no more; that one is handed out again.
    fn list(&self, fs: &FileSystem, offset: u64, mut full: impl FnMut(&Listed) -> bool) -> Result<()> {
        let (inode, file, ahead) = match self {
            DirectoryHandle::Real { inode, file, ahead } => (inode, file, ahead),
            DirectoryHandle::Virtual => {
                for listed in fs.control.entries().into_iter().skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
                    if full(&listed) {
                        break;
                    }
                }
                return Ok(());
            }
        };
        // The lock belongs to one open directory: whoever waits for it waits for his own listing.
        let mut ahead = ahead.lock();
        if offset == 0 || offset != ahead.at {
            ahead.entries.clear();
            rustix::fs::seek(file, SeekFrom::Start(offset))?;
            ahead.at = offset;
        }
        let hides = inode.node == ROOT;
        loop {
            if ahead.entries.is_empty() && !read_batch(file, &mut ahead.entries)? {
                return Ok(());
            }
            while let Some(listed) = ahead.entries.front() {
                let hidden = hides && control::is_reserved(&listed.name);
                if !hidden && full(listed) {
                    return Ok(());
                }
                ahead.at = listed.next;
                ahead.entries.pop_front();
            }
        }
    }
}

/// Reads the next entries; false at the end of the directory.
fn read_batch(file: &OwnedFd, entries: &mut VecDeque<Listed>) -> Result<bool> {
    let mut buffer = vec![MaybeUninit::uninit(); BATCH];
    let mut batch = RawDir::new(file, &mut buffer);
    while let Some(entry) = batch.next() {
        let entry = entry?;
        entries.push_back(Listed {
            number: entry.ino(),
            next: entry.next_entry_cookie(),
            kind: entry.file_type(),
            name: OsStr::from_bytes(entry.file_name().to_bytes()).to_os_string(),
        });
        if batch.is_buffer_empty() {
            break;
        }
    }
    Ok(!entries.is_empty())
}
