//! The inodes that the kernel knows. A node id is the source's inode number, so that programs which remember inode
//! numbers see them stay; an O_PATH descriptor keeps each inode from reuse while it is known. A lookup is counted before
//! its reply leaves, and an inode that was forgotten is never revived: the count never goes from 0 to 1, a new entry is
//! made instead. No system call is made under the table's lock.

use super::error::Result;
use super::location::{Handle, Location, Reached};
use crate::source::FileId;
use fuser::BackingId;
use parking_lot::{Mutex, RwLock};
use rustix::fs::{FileType, OFlags, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The root's node id, which FUSE fixes.
pub(crate) const ROOT: u64 = 1;

/// A node id is a device index above this bit and an inode number below it.
const DEVICE_SHIFT: u32 = 48;
/// Device index of the inodes that exist in the mount only.
const VIRTUAL_INDEX: u64 = 0xFFFF;
/// Device index of the inodes whose number or device does not fit; they are numbered as they come.
const NUMBERED_INDEX: u64 = 0xFFFE;

/// Tables that never had more inodes than this are not made smaller: their memory is not worth the work.
const SHRINK_FROM: usize = 10_000;

/// Node id of a virtual inode.
pub(crate) const fn virtual_node(number: u64) -> u64 {
    (VIRTUAL_INDEX << DEVICE_SHIFT) | number
}

pub(crate) fn is_virtual(node: u64) -> bool {
    node >> DEVICE_SHIFT == VIRTUAL_INDEX
}

/// One inode of the source that the kernel knows.
pub(crate) struct Inode {
    pub(crate) node: u64,
    /// Differs between two lives of one node id.
    pub(crate) generation: u64,
    pub(crate) id: FileId,
    pub(crate) kind: FileType,
    location: Location,
    /// Lookups that the kernel has not yet forgotten. Changed under the table's write lock only; 0 means "not in the
    /// table any more".
    lookups: AtomicU64,
    pub(crate) opens: Mutex<Opens>,
}

/// The open handles of an inode, and how the kernel reads and writes it meanwhile.
#[derive(Default)]
pub(crate) struct Opens {
    pub(crate) handles: u32,
    pub(crate) writers: u32,
    /// How all handles of the inode are open; the kernel refuses a mixture. `None`: no handles.
    pub(crate) mode: Option<Mode>,
    /// The kernel refused this inode once; it is not asked again.
    pub(crate) refused: bool,
    /// Was open for writing since the attributes were last given out.
    pub(crate) written: bool,
    /// Size, mtime and ctime at the last cached open: while they stay the kernel may keep its pages.
    pub(crate) seen: Option<(i64, i64, u64, i64, u64)>,
}

#[derive(Clone)]
pub(crate) enum Mode {
    Cached,
    /// One backing for all opens, given back with the last handle.
    Passthrough(Arc<BackingId>),
}

impl Inode {
    /// An O_PATH descriptor for as long as the result lives.
    pub(crate) fn reach(&self) -> Result<Reached<'_>> {
        self.location.reach()
    }
}

/// All inodes that the kernel knows.
pub(crate) struct Inodes {
    table: RwLock<Table>,
    /// With more inodes than this, new ones are reached by file handles.
    descriptors: usize,
    /// The source's file system, to open its handles with; `None` where that is not possible.
    mount: Option<Arc<OwnedFd>>,
    device: u64,
}

struct Table {
    by_node: HashMap<u64, Arc<Inode>>,
    by_id: HashMap<FileId, u64>,
    numbering: Numbering,
    /// Entries made so far.
    generation: u64,
    /// The most entries since the tables were last made smaller.
    most: usize,
}

impl Inodes {
    /// `root` is the source's directory, O_PATH.
    /// Of `descriptors` at most each belongs to an inode.
    pub(crate) fn new(root: OwnedFd, stat: &Stat, descriptors: usize) -> Inodes {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mount = rustix::fs::open(super::proc_path(&root), flags, rustix::fs::Mode::empty()).ok();
        // Opening by handle needs CAP_DAC_READ_SEARCH and a file system that can: tried once, here.
        let mount = mount.map(Arc::new).filter(|mount| {
            Handle::of(&root).is_some_and(|h| Location::Handle(Box::new(h), mount.clone()).reach().is_ok())
        });
        let id = FileId { device: stat.st_dev, inode: stat.st_ino };
        let inode = Inode {
            node: ROOT,
            generation: 0,
            id,
            kind: FileType::Directory,
            location: Location::Descriptor(root),
            lookups: AtomicU64::new(1),
            opens: Mutex::default(),
        };
        Inodes {
            table: RwLock::new(Table {
                by_node: HashMap::from([(ROOT, Arc::new(inode))]),
                by_id: HashMap::from([(id, ROOT)]),
                numbering: Numbering::new(stat.st_dev),
                generation: 0,
                most: 0,
            }),
            descriptors,
            mount,
            device: stat.st_dev,
        }
    }

    pub(crate) fn get(&self, node: u64) -> Result<Arc<Inode>> {
        self.table.read().by_node.get(&node).cloned().ok_or(Errno::STALE)
    }

    pub(crate) fn root(&self) -> Arc<Inode> {
        self.get(ROOT).expect("the root is never forgotten")
    }

    /// The number by which a file is shown that nobody has looked up yet.
    pub(crate) fn number_of(&self, id: FileId) -> u64 {
        let table = self.table.read();
        let index = table.numbering.devices.get(&id.device).copied();
        index.and_then(|index| Numbering::own(index, id.inode)).unwrap_or(id.inode)
    }

    /// Number of inodes that the kernel knows, the root among them.
    pub(crate) fn len(&self) -> usize {
        self.table.read().by_node.len()
    }

    /// Counts one lookup of the inode behind `descriptor` (O_PATH), which has `stat`. The caller replies after.
    pub(crate) fn looked_up(&self, descriptor: OwnedFd, stat: &Stat) -> Arc<Inode> {
        let id = FileId { device: stat.st_dev, inode: stat.st_ino };
        let many = self.mount.as_ref().filter(|_| id.device == self.device && self.len() >= self.descriptors);
        let handle = many.and_then(|mount| Some((Box::new(Handle::of(&descriptor)?), mount.clone())));
        // By its handle a file that has only inherited the number of a known one is told apart.
        let same = |known: &Inode| match (&known.location, &handle) {
            (Location::Handle(old, _), Some((new, _))) => old == new,
            (Location::Handle(old, _), None) => Handle::of(&descriptor).is_some_and(|new| **old == new),
            (Location::Descriptor(_), _) => true, // kept from reuse
        };
        let mut table = self.table.write();
        let table = &mut *table;
        if let Some(known) = table.by_id.get(&id).and_then(|node| table.by_node.get(node)).filter(|k| same(k)) {
            known.lookups.fetch_add(1, Ordering::Relaxed);
            return known.clone(); // `descriptor` is closed after the lock is released
        }
        let node = table.numbering.node_of(id, |node| table.by_node.contains_key(&node));
        table.generation += 1;
        let inode = Arc::new(Inode {
            node,
            generation: table.generation,
            id,
            kind: FileType::from_raw_mode(stat.st_mode),
            location: match handle {
                Some((handle, mount)) => Location::Handle(handle, mount),
                None => Location::Descriptor(descriptor),
            },
            lookups: AtomicU64::new(1),
            opens: Mutex::default(),
        });
        table.by_node.insert(node, inode.clone());
        table.by_id.insert(id, node);
        table.most = table.most.max(table.by_node.len());
        inode
    }

    /// The kernel gave `count` lookups of `node` back.
    pub(crate) fn forget(&self, node: u64, count: u64) {
        if node == ROOT || is_virtual(node) {
            return;
        }
        let (removed, shrunk) = {
            let mut table = self.table.write();
            let removed = table.forget(node, count);
            (removed, table.shrink())
        };
        drop(removed); // closes the descriptor, outside the lock
        if shrunk {
            give_memory_back();
        }
    }
}

impl Table {
    fn forget(&mut self, node: u64, count: u64) -> Option<Arc<Inode>> {
        let inode = self.by_node.get(&node)?;
        let left = inode.lookups.load(Ordering::Relaxed).saturating_sub(count);
        inode.lookups.store(left, Ordering::Relaxed);
        if left > 0 {
            return None;
        }
        let inode = self.by_node.remove(&node)?;
        if self.by_id.get(&inode.id) == Some(&node) {
            self.by_id.remove(&inode.id);
        }
        Some(inode)
    }

    /// After very many inodes most of the table is empty; whether it was made smaller.
    fn shrink(&mut self) -> bool {
        let left = self.by_node.len();
        if self.most < SHRINK_FROM || left > self.most / 8 {
            return false;
        }
        self.by_node.shrink_to_fit();
        self.by_id.shrink_to_fit();
        self.most = left;
        true
    }
}

/// The allocator keeps what was freed between what is in use, and would keep it for ever.
fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc gives back pages that belong to no allocation; it takes its own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Which node id a file gets.
struct Numbering {
    /// Index of each device that was seen; the source's own is 0.
    devices: HashMap<u64, u64>,
    numbered: u64,
}

impl Numbering {
    fn new(device: u64) -> Numbering {
        Numbering { devices: HashMap::from([(device, 0)]), numbered: 0 }
    }

    /// The file's own number, if it can be a node id.
    fn own(index: u64, inode: u64) -> Option<u64> {
        let own = (index << DEVICE_SHIFT) | inode;
        let fits = index < NUMBERED_INDEX && inode != 0 && inode >> DEVICE_SHIFT == 0;
        (fits && own != ROOT).then_some(own)
    }

    /// The file's own number where it is free, else the next of the numbers given out as they come.
    fn node_of(&mut self, id: FileId, taken: impl Fn(u64) -> bool) -> u64 {
        let next = self.devices.len() as u64;
        let index = *self.devices.entry(id.device).or_insert(next);
        if let Some(own) = Numbering::own(index, id.inode).filter(|own| !taken(*own)) {
            return own;
        }
        loop {
            self.numbered += 1;
            let node = (NUMBERED_INDEX << DEVICE_SHIFT) | self.numbered;
            if !taken(node) {
                return node;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(device: u64, inode: u64) -> FileId {
        FileId { device, inode }
    }

    #[test]
    fn a_node_is_the_sources_inode_number() {
        let mut numbering = Numbering::new(7);
        assert_eq!(numbering.node_of(id(7, 42), |_| false), 42);
        assert_eq!(numbering.node_of(id(7, 42), |_| false), 42);
    }

    #[test]
    fn submounts_do_not_collide() {
        let mut numbering = Numbering::new(7);
        let first = numbering.node_of(id(7, 42), |_| false);
        let second = numbering.node_of(id(8, 42), |_| false);
        let third = numbering.node_of(id(9, 42), |_| false);
        assert_eq!((first, second, third), (42, (1 << 48) | 42, (2 << 48) | 42));
    }

    #[test]
    fn the_roots_number_and_the_virtual_ones_are_not_given_out() {
        let mut numbering = Numbering::new(7);
        for strange in [id(7, 1), id(7, 0), id(7, virtual_node(3)), id(7, u64::MAX)] {
            let node = numbering.node_of(strange, |_| false);
            assert_eq!(node >> DEVICE_SHIFT, NUMBERED_INDEX, "{strange:?}");
        }
    }

    #[test]
    fn forgotten_inodes_leave_and_come_back_as_new_ones() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = |path: &std::path::Path| {
            let fd = rustix::fs::open(path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).expect("open");
            let stat = rustix::fs::fstat(&fd).expect("stat");
            (fd, stat)
        };
        let (root, stat) = open(dir.path());
        let inodes = Inodes::new(root, &stat, 10);
        let path = dir.path().join("f");
        std::fs::write(&path, b"x").expect("written");
        let look = || {
            let (fd, stat) = open(&path);
            inodes.looked_up(fd, &stat)
        };
        let first = look();
        assert_eq!(look().generation, first.generation);
        inodes.forget(first.node, 1);
        assert_eq!(inodes.len(), 2);
        inodes.forget(ROOT, 5);
        inodes.forget(first.node, 1);
        assert_eq!(inodes.len(), 1);
        assert!(inodes.get(first.node).is_err());
        let again = look();
        assert_eq!(again.node, first.node);
        assert_ne!(again.generation, first.generation);
    }
}
