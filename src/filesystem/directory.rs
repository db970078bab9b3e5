//! Listing directories. Offsets are the source's own, so that a listing can be continued after any entry, also while
//! the directory changes. Plain listings count no lookups; those with attributes count one for every entry that went
//! into the reply, except `.` and `..`. The name `.warpfs` of the root is not listed. Called by `fuse`.

use super::FileSystem;
use super::attributes::Entry;
use super::control;
use super::error::Result;
use super::handle::Handle;
use super::inode::{Inode, ROOT, is_virtual, virtual_node};
use super::proc_path;
use super::status::{Changes, Status, kind_of};
use fuser::{FileAttr, FopenFlags, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use parking_lot::Mutex;
use rustix::fs::{FileType, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Bytes of entries that are taken from the source at once: as many entries as fit into the 32 KiB in which the C library
/// asks for them, where each takes some bytes more.
const BATCH: usize = 24 * 1024;

/// Bytes of an entry beside its name, at most: `struct linux_dirent64`, the terminating NUL and the padding.
const BESIDE_NAME: usize = 19 + 8;

/// An open directory; of the virtual one there is nothing to keep.
pub(crate) enum DirectoryHandle {
    Real { inode: Arc<Inode>, file: OwnedFd, ahead: Mutex<Ahead> },
    Virtual,
}

/// Entries that were read and not yet handed out. The memory is kept from batch to batch.
#[derive(Default)]
pub(crate) struct Ahead {
    /// The offset with which the next one continues.
    at: u64,
    entries: VecDeque<Read>,
    /// Their names, one after the other.
    names: Vec<u8>,
    buffer: Vec<MaybeUninit<u8>>,
    /// The number of the directory's entries where one batch had them all, else 0.
    all: usize,
}

/// One entry that was read; its name lies in `names`.
#[derive(Clone)]
struct Read {
    number: u64,
    next: u64,
    kind: FileType,
    name: Range<usize>,
}

/// One entry of a listing.
pub(crate) struct Listed<'n> {
    pub(crate) number: u64,
    /// Where the listing continues after this entry.
    pub(crate) next: u64,
    pub(crate) kind: FileType,
    pub(crate) name: &'n OsStr,
}

/// What the kernel keeps of a directory's listing, and whether that is of use.
#[derive(Clone, Copy)]
pub(crate) struct KeptListing {
    /// The directory's times when it was last opened.
    changes: Changes,
    /// When the kernel was told to keep it. Not at the first time: keeping costs more than a listing gains by it.
    filled: Option<Instant>,
    /// For so many opens more the entries' attributes are taken to be wanted too.
    wants_attributes: u8,
}

/// Attributes that the kernel got within this time will not be out of date while a listing is looked at.
const FRESH: Duration = Duration::from_millis(700);

/// A directory of so few entries gains nothing from a listing in two pieces: that is one request more.
const FEW: usize = 8;

/// How many entries of a directory the kernel has got with their attributes lately: since `since`, in milliseconds of the
/// monotonic clock. Only a hint, and so not exact when many count at once.
#[derive(Default)]
pub(crate) struct Fresh {
    since: AtomicU32,
    entries: AtomicU32,
}

impl Fresh {
    /// One entry is given out now.
    pub(crate) fn given(&self) {
        let now = now();
        if self.over(now) {
            self.since.store(now, Ordering::Relaxed);
            self.entries.store(0, Ordering::Relaxed);
        }
        self.entries.fetch_add(1, Ordering::Relaxed);
    }

    fn entries(&self) -> usize {
        if self.over(now()) { 0 } else { self.entries.load(Ordering::Relaxed) as usize }
    }

    fn over(&self, now: u32) -> bool {
        now.wrapping_sub(self.since.load(Ordering::Relaxed)) > FRESH.as_millis() as u32
    }
}

fn now() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    (now.tv_sec as u32).wrapping_mul(1000).wrapping_add(now.tv_nsec as u32 / 1_000_000)
}

/// Opens for which a directory is remembered as one whose entries are looked at.
const REMEMBERED: u8 = 8;

/// Whether the kernel may answer this open's listing from what it kept of the last, or is to keep this one. Only while the
/// directory's times say that it is the same. Where programs look at the entries too, a listing that brings their
/// attributes is better than a kept one as soon as the kernel has forgotten these.
fn keeping(inode: &Inode, file: &OwnedFd) -> Result<FopenFlags> {
    let changes = Status::of(file)?.changes();
    let asked = inode.asked.swap(0, Ordering::Relaxed) > 0;
    let mut opens = inode.opens.lock();
    if !changes.settled() {
        opens.kept_listing = None;
        return Ok(FopenFlags::empty());
    }
    let kept = opens.kept_listing.as_deref().copied();
    let before = kept.map_or(0, |kept| kept.wants_attributes);
    let wants_attributes = if asked { REMEMBERED } else { before.saturating_sub(1) };
    let same = kept.filter(|kept| kept.changes == changes);
    let filled = same.and_then(|kept| kept.filled);
    let useful = filled.filter(|filled| wants_attributes == 0 || filled.elapsed() < super::attributes::KEEP);
    let filling = useful.or_else(|| same.map(|_| Instant::now()));
    opens.kept_listing = Some(Box::new(KeptListing { changes, filled: filling, wants_attributes }));
    let mut flags = FopenFlags::empty();
    flags.set(FopenFlags::FOPEN_CACHE_DIR, filling.is_some());
    flags.set(FopenFlags::FOPEN_KEEP_CACHE, useful.is_some());
    Ok(flags)
}

impl FileSystem {
    pub(crate) fn opendir(&self, node: u64) -> Result<(u64, FopenFlags)> {
        if is_virtual(node) {
            self.control.attributes(node)?;
            let handle = self.handles.insert(Handle::Directory(Arc::new(DirectoryHandle::Virtual)));
            return Ok((handle, FopenFlags::empty()));
        }
        let inode = self.inodes.get(node)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let file = rustix::fs::open(proc_path(&inode.reach()?), flags, Mode::empty())?;
        let flags = if self.local && !inode.foreign { keeping(&inode, &file)? } else { FopenFlags::empty() };
        let directory = DirectoryHandle::Real { inode, file, ahead: Mutex::default() };
        Ok((self.handles.insert(Handle::Directory(Arc::new(directory))), flags))
    }

    pub(crate) fn readdir(&self, handle: u64, offset: u64, reply: &mut ReplyDirectory) -> Result<()> {
        let directory = self.handles.directory(handle)?;
        let inode = match &*directory {
            DirectoryHandle::Real { inode, .. } => Some(inode),
            DirectoryHandle::Virtual => None,
        };
        directory.list(self, offset, |listed, _| {
            // As stat will show it: another mount in the source has numbers of its own.
            let number = inode.map_or(listed.number, |inode| self.inodes.number_of(inode, listed.number));
            reply.add(INodeNo(number), listed.next, kind_of(listed.kind), listed.name)
        })
    }

    pub(crate) fn readdirplus(&self, handle: u64, offset: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        let directory = self.handles.directory(handle)?;
        let mut fresh = 0;
        if let DirectoryHandle::Real { inode, .. } = &*directory {
            if offset == 0 {
                fresh = inode.fresh.entries();
            } else {
                // The kernel goes on with attributes only where those before were used.
                inode.asked.fetch_add(1, Ordering::Relaxed);
            }
        }
        let mut given = 0;
        directory.list(self, offset, |listed, all| {
            // The kernel asks for the first piece with attributes, and for the next only where those were used. What it
            // has got one by one just now it need not get again: then the first piece is one entry.
            let known = all > FEW && fresh >= all - all / 4;
            let enough = known && given == 1;
            given += 1;
            enough || self.add_with_attributes(&directory, listed, reply)
        })
    }

    /// Adds the entry, if there is still room for it; true if there is not.
    fn add_with_attributes(
        &self,
        directory: &DirectoryHandle,
        listed: &Listed<'_>,
        reply: &mut ReplyDirectoryPlus,
    ) -> bool {
        match self.entry_of(directory, listed) {
            Ok((entry, counted)) => {
                let keep = entry.attributes.keep;
                let generation = fuser::Generation(entry.generation);
                let full =
                    reply.add(INodeNo(entry.node), listed.next, listed.name, &keep, &entry.attributes.attr, generation);
                if full && counted {
                    self.inodes.forget(entry.node, 1);
                }
                full
            }
            Err(Errno::NOENT) => false, // it is gone meanwhile
            // It is there but cannot be looked at: a folder may be readable and not searchable.
            Err(_) => {
                let attr = nameless(listed);
                reply.add(attr.ino, listed.next, listed.name, &Duration::ZERO, &attr, fuser::Generation(0))
            }
        }
    }

    /// While the kernel hands a piece of a listing out, the next is read. What goes wrong now is said when it is asked for.
    pub(crate) fn read_ahead(&self, handle: u64) {
        let Ok(directory) = self.handles.directory(handle) else { return };
        if let DirectoryHandle::Real { file, ahead, .. } = &*directory
            && let Some(mut ahead) = ahead.try_lock()
            && ahead.entries.is_empty()
            && ahead.at != 0
        {
            let _ = ahead.read(file);
        }
    }

    /// The entry, and whether its lookup was counted.
    fn entry_of(&self, directory: &DirectoryHandle, listed: &Listed<'_>) -> Result<(Entry, bool)> {
        let DirectoryHandle::Real { inode, .. } = directory else {
            let known = if is_virtual(listed.number) { listed.number } else { control::DIRECTORY };
            let mut attributes = self.control.attributes(known)?;
            attributes.attr.ino = INodeNo(listed.number);
            return Ok((Entry { node: listed.number, generation: 0, attributes }, false));
        };
        if listed.name == "." || listed.name == ".." {
            // The kernel takes no more than the number and the kind of these.
            let attr = self.status_of(inode, &inode.reach()?)?.attr(listed.number);
            let attributes = super::attributes::Attributes { attr, keep: Duration::ZERO };
            return Ok((Entry { node: listed.number, generation: 0, attributes }, false));
        }
        Ok((self.find(inode, listed.name)?, true))
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
fn nameless(listed: &Listed<'_>) -> FileAttr {
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
    /// Hands entries from `offset` on to `full` until it says that it can take no more; that one is handed out again. It
    /// is also told how many entries the directory has, if that is known and few: else 0.
    fn list(&self, fs: &FileSystem, offset: u64, mut full: impl FnMut(&Listed<'_>, usize) -> bool) -> Result<()> {
        fs.served.listings.fetch_add(1, Ordering::Relaxed);
        let (inode, file, ahead) = match self {
            DirectoryHandle::Real { inode, file, ahead } => (inode, file, ahead),
            DirectoryHandle::Virtual => {
                for listed in fs.control.entries().into_iter().skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
                    if full(&listed, 0) {
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
        let mut given = false;
        // One batch for a request: the next is read while the kernel hands this one out.
        while !given {
            if ahead.entries.is_empty() && !ahead.read(file)? {
                return Ok(());
            }
            while let Some(Read { number, next, kind, name }) = ahead.entries.front().cloned() {
                let name = OsStr::from_bytes(&ahead.names[name]);
                let hidden = hides && control::is_reserved(name);
                if !hidden && full(&Listed { number, next, kind, name }, ahead.all) {
                    return Ok(());
                }
                given |= !hidden;
                ahead.at = next;
                ahead.entries.pop_front();
            }
        }
        Ok(())
    }
}

impl Ahead {
    /// Reads the next entries; false at the end of the directory.
    fn read(&mut self, file: &OwnedFd) -> Result<bool> {
        let from_the_start = self.at == 0;
        let Ahead { entries, names, buffer, all, .. } = self;
        names.clear();
        buffer.resize(BATCH, MaybeUninit::uninit());
        let mut batch = RawDir::new(file, buffer);
        while let Some(entry) = batch.next() {
            let entry = entry?;
            let begin = names.len();
            names.extend_from_slice(entry.file_name().to_bytes());
            entries.push_back(Read {
                number: entry.ino(),
                next: entry.next_entry_cookie(),
                kind: entry.file_type(),
                name: begin..names.len(),
            });
            if batch.is_buffer_empty() {
                break;
            }
        }
        // Where the longest entry would have had room there was none left.
        let taken = names.len() + entries.len() * BESIDE_NAME;
        *all = if from_the_start && taken + 255 + BESIDE_NAME <= BATCH { entries.len() } else { 0 };
        Ok(!entries.is_empty())
    }
}
