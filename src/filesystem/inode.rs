//! The inodes that the kernel knows. A node id is the source's inode number, so that programs which remember inode
//! numbers see them stay; an O_PATH descriptor keeps each inode from reuse while it is known. A lookup is counted before
//! its reply leaves, and an inode that was forgotten is never revived: the count never goes from 0 to 1, a new entry is
//! made instead. No system call is made under the table's lock.

mod numbering;

pub(crate) use numbering::{is_virtual, virtual_node};

use super::directory::{Fresh, KeptListing};
use super::error::Result;
use super::location::{Handle, Location, Named, Reached};
use super::status::{Changes, Place, Status};
use crate::source::FileId;
use fuser::BackingId;
use numbering::Numbering;
use parking_lot::{Mutex, RwLock};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The root's node id, which FUSE fixes.
pub(crate) const ROOT: u64 = 1;

/// A table that has shrunk to less than a quarter gives memory back, unless it is this small.
const SMALL: usize = 1 << 14;

/// One inode of the source that the kernel knows.
pub(crate) struct Inode {
    pub(crate) node: u64,
    /// Differs between two lives of one node id.
    pub(crate) generation: u64,
    pub(crate) id: FileId,
    /// The mount of the source in which it was found.
    pub(crate) mount: u64,
    /// That mount is not the source's own.
    pub(crate) foreign: bool,
    pub(crate) kind: FileType,
    location: Location,
    /// Lookups that the kernel has not yet forgotten. Raised under the table's lock, lowered under its write lock; 0
    /// means "not in the table any more".
    lookups: AtomicU64,
    /// Of a directory: what was asked about its entries one by one since it was last opened.
    pub(crate) asked: AtomicU32,
    pub(crate) fresh: Fresh,
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
    /// What an inode without a descriptor of its own is reached by while it is open: it may have no name any more.
    pub(crate) kept: Option<Arc<OwnedFd>>,
    /// Of a directory: what the kernel keeps of its listing.
    pub(crate) kept_listing: Option<Box<KeptListing>>,
    /// Size, mtime and ctime at the last cached open: while they stay the kernel may keep its pages.
    pub(crate) seen: Option<(u64, Changes)>,
}

#[derive(Clone)]
pub(crate) enum Mode {
    Cached,
    /// One backing for all opens, given back with the last handle.
    Passthrough(Arc<BackingId>),
}

impl Inode {
    /// An O_PATH descriptor for as long as the result lives. Not to be called under the lock of `opens`.
    pub(crate) fn reach(&self) -> Result<Reached<'_>> {
        if !self.has_descriptor()
            && let Some(kept) = self.opens.lock().kept.clone()
        {
            return Ok(Reached::Shared(kept));
        }
        self.location.reach()
    }

    pub(crate) fn has_descriptor(&self) -> bool {
        matches!(self.location, Location::Descriptor(_))
    }

    pub(super) fn location(&self) -> &Location {
        &self.location
    }

    /// It has this name now, which counts where it is reached by its name.
    fn found(&self, parent: &Arc<Inode>, name: &OsStr) {
        if let Location::Named(named) = &self.location {
            named.found(parent, name);
        }
    }

    pub(crate) fn place(&self) -> Place {
        Place { mount: self.mount, file: self.id }
    }
}

/// All inodes that the kernel knows.
pub(crate) struct Inodes {
    table: RwLock<Table>,
    /// With more inodes than this that have a descriptor, new ones are reached by file handles or names.
    most_descriptors: usize,
    descriptors: AtomicUsize,
    /// Inodes that are reached by name.
    named: AtomicUsize,
    /// The source's file system, to open its handles with; `None` where that is not possible.
    file_system: Option<Arc<OwnedFd>>,
    /// The source's own mount.
    mount: u64,
    device: u64,
}

struct Table {
    by_node: HashMap<u64, Arc<Inode>>,
    by_place: HashMap<Place, u64>,
    numbering: Numbering,
    /// Entries made so far.
    generation: u64,
}

impl Inodes {
    /// `root` is the source's directory, O_PATH.
    /// Of `most_descriptors` at most each belongs to an inode.
    pub(crate) fn new(root: OwnedFd, status: &Status, most_descriptors: usize) -> Inodes {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mount = rustix::fs::open(super::proc_path(&root), flags, rustix::fs::Mode::empty()).ok();
        // Opening by handle needs CAP_DAC_READ_SEARCH and a file system that can: tried once, here.
        let file_system = mount.map(Arc::new).filter(|mount| {
            Handle::of(&root).is_some_and(|h| Location::Handle(Box::new(h), mount.clone()).reach().is_ok())
        });
        let place = status.place();
        let inode = Inode {
            node: ROOT,
            generation: 0,
            id: place.file,
            mount: place.mount,
            foreign: false,
            kind: FileType::Directory,
            location: Location::Descriptor(root),
            lookups: AtomicU64::new(1),
            asked: AtomicU32::new(0),
            fresh: Fresh::default(),
            opens: Mutex::default(),
        };
        Inodes {
            table: RwLock::new(Table {
                by_node: HashMap::from([(ROOT, Arc::new(inode))]),
                by_place: HashMap::from([(place, ROOT)]),
                numbering: Numbering::new(place),
                generation: 0,
            }),
            most_descriptors,
            descriptors: AtomicUsize::new(1),
            named: AtomicUsize::new(0),
            file_system,
            mount: place.mount,
            device: place.file.device,
        }
    }

    pub(crate) fn get(&self, node: u64) -> Result<Arc<Inode>> {
        self.table.read().by_node.get(&node).cloned().ok_or(Errno::STALE)
    }

    pub(crate) fn root(&self) -> Arc<Inode> {
        self.get(ROOT).expect("the root is never forgotten")
    }

    /// The number by which a file of this directory's mount is shown that nobody has looked up yet.
    pub(crate) fn number_of(&self, directory: &Inode, inode: u64) -> u64 {
        if !directory.foreign && directory.id.device == self.device && numbering::is_own(inode) {
            return inode; // nearly always, and without the table
        }
        let file = FileId { device: directory.id.device, inode };
        let place = Place { mount: directory.mount, file };
        self.table.read().numbering.expected(place).unwrap_or(inode)
    }

    /// Number of inodes that the kernel knows, the root among them.
    pub(crate) fn len(&self) -> usize {
        self.table.read().by_node.len()
    }

    /// Counts one lookup of what was found as `name` in `parent` and has `status`, if that is known and needs no
    /// descriptor. Where a number alone does not tell, the handle of what is `at` that name is asked for.
    pub(crate) fn recall(
        &self,
        status: &Status,
        at: impl AsFd,
        (parent, name): (&Arc<Inode>, &OsStr),
    ) -> Option<Arc<Inode>> {
        let place = status.place();
        if place.mount != self.mount {
            return None;
        }
        let known = self.table.read().counted(place, |known| known.has_descriptor());
        if known.is_some() || !self.table.read().knows(place) {
            return known;
        }
        let handle = Handle::at(at, name)?;
        let known = self.table.read().counted(place, |known| known.location.handle() == Some(&handle))?;
        known.found(parent, name);
        Some(known)
    }

    /// Counts one lookup of the inode behind `descriptor` (O_PATH), which has `status` and was found as `name` in
    /// `parent`. The caller replies after.
    pub(crate) fn looked_up(
        &self,
        descriptor: OwnedFd,
        status: &Status,
        parent: &Arc<Inode>,
        name: &OsStr,
    ) -> Arc<Inode> {
        let place = status.place();
        if let Some(known) = self.table.read().counted(place, |known| known.has_descriptor()) {
            return known; // `descriptor` is closed after the lock is released
        }
        let foreign = place.mount != self.mount;
        // A directory is reached for every name in it, so it has a descriptor where files have none any more.
        let most = self.most_descriptors;
        let most = if status.kind() == FileType::Directory { most } else { most - most / 4 };
        let bare = foreign || self.descriptors.load(Ordering::Relaxed) >= most;
        let mut handle = if bare { Handle::of(&descriptor) } else { None };
        let mut asked = bare;
        loop {
            let mut table = self.table.write();
            let Some(known) = table.known(place) else {
                return self.insert(&mut table, descriptor, status, (parent, name), bare.then_some(handle));
            };
            if known.has_descriptor() || (asked && known.location.handle() == handle.as_ref()) {
                known.lookups.fetch_add(1, Ordering::Relaxed);
                let known = known.clone();
                drop(table);
                known.found(parent, name);
                return known;
            }
            if asked {
                // The known one is gone, and this file has only inherited its number.
                return self.insert(&mut table, descriptor, status, (parent, name), bare.then_some(handle));
            }
            drop(table);
            handle = Handle::of(&descriptor);
            asked = true;
        }
    }

    /// Enters a file that is not known. `bare`: it gets no descriptor, and this is its handle.
    fn insert(
        &self,
        table: &mut Table,
        descriptor: OwnedFd,
        status: &Status,
        (parent, name): (&Arc<Inode>, &OsStr),
        bare: Option<Option<Handle>>,
    ) -> Arc<Inode> {
        let place = status.place();
        let foreign = place.mount != self.mount;
        let openable = self.file_system.as_ref().filter(|_| !foreign && place.file.device == self.device);
        let location = match (bare, openable) {
            (None, _) => Location::Descriptor(descriptor),
            (Some(Some(handle)), Some(mount)) => Location::Handle(Box::new(handle), mount.clone()),
            (Some(handle), _) => Location::Named(Named::new(parent.clone(), name, place, handle.map(Box::new))),
        };
        if let Some(counter) = self.counter(&location) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        table.insert(place, foreign, status.kind(), location)
    }

    /// Where inodes that are reached in this way are counted.
    fn counter(&self, location: &Location) -> Option<&AtomicUsize> {
        match location {
            Location::Descriptor(_) => Some(&self.descriptors),
            Location::Named(_) => Some(&self.named),
            Location::Handle(..) => None,
        }
    }

    /// A rename through the mount has put what is `descriptor` (O_PATH) at this name.
    pub(crate) fn moved(&self, descriptor: &OwnedFd, parent: &Arc<Inode>, name: &OsStr) {
        let Ok(status) = Status::of(descriptor) else { return };
        let known = self.table.read().known(status.place()).cloned();
        if let Some(known) = known {
            known.found(parent, name);
        }
    }

    /// Whether names count: some inode is reached by one.
    pub(crate) fn by_name(&self) -> bool {
        self.named.load(Ordering::Relaxed) > 0
    }

    /// The kernel gave `count` lookups of `node` back.
    pub(crate) fn forget(&self, node: u64, count: u64) {
        if node == ROOT || is_virtual(node) {
            return;
        }
        let (removed, shrunk) = {
            let mut table = self.table.write();
            (table.forget(node, count), table.shrink())
        };
        if let Some(counter) = removed.as_ref().and_then(|inode| self.counter(&inode.location)) {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
        drop(removed); // closes the descriptor, outside the lock
        if shrunk {
            give_back();
        }
    }
}

/// Returns freed memory to the system, which the allocator would keep after a million small pieces.
fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it only looks at the allocator's own free memory, under the allocator's locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

impl Table {
    fn known(&self, place: Place) -> Option<&Arc<Inode>> {
        self.by_place.get(&place).and_then(|node| self.by_node.get(node))
    }

    fn knows(&self, place: Place) -> bool {
        self.by_place.contains_key(&place)
    }

    /// The inode, with one lookup more. Whoever lowers the count holds the write lock, so it is not 0 here.
    fn counted(&self, place: Place, suits: impl FnOnce(&Inode) -> bool) -> Option<Arc<Inode>> {
        let known = self.known(place).filter(|known| suits(known))?;
        known.lookups.fetch_add(1, Ordering::Relaxed);
        Some(known.clone())
    }

    /// A new inode with one lookup.
    fn insert(&mut self, place: Place, foreign: bool, kind: FileType, location: Location) -> Arc<Inode> {
        let node = self.numbering.node_of(place, |node| self.by_node.contains_key(&node));
        self.generation += 1;
        let inode = Arc::new(Inode {
            node,
            generation: self.generation,
            id: place.file,
            mount: place.mount,
            foreign,
            kind,
            location,
            lookups: AtomicU64::new(1),
            asked: AtomicU32::new(0),
            fresh: Fresh::default(),
            opens: Mutex::default(),
        });
        self.by_node.insert(node, inode.clone());
        self.by_place.insert(place, node);
        inode
    }

    /// Whether the maps were much too large and are not any more.
    fn shrink(&mut self) -> bool {
        let capacity = self.by_node.capacity();
        let much = capacity > SMALL && self.by_node.len() < capacity / 4;
        if much {
            self.by_node.shrink_to(self.by_node.len() * 2);
            self.by_place.shrink_to(self.by_place.len() * 2);
        }
        much
    }

    fn forget(&mut self, node: u64, count: u64) -> Option<Arc<Inode>> {
        let inode = self.by_node.get(&node)?;
        let left = inode.lookups.load(Ordering::Relaxed).saturating_sub(count);
        inode.lookups.store(left, Ordering::Relaxed);
        if left > 0 {
            return None;
        }
        let inode = self.by_node.remove(&node)?;
        if self.by_place.get(&inode.place()) == Some(&node) {
            self.by_place.remove(&inode.place());
        }
        Some(inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table over a fresh directory, and looking up a name in it.
    fn table(most_descriptors: usize) -> (tempfile::TempDir, Inodes) {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, status) = open(dir.path());
        let inodes = Inodes::new(root, &status, most_descriptors);
        (dir, inodes)
    }

    fn open(path: &std::path::Path) -> (OwnedFd, Status) {
        let fd = rustix::fs::open(path, OFlags::PATH, rustix::fs::Mode::empty()).expect("open");
        let status = Status::of(&fd).expect("stat");
        (fd, status)
    }

    fn look(dir: &tempfile::TempDir, inodes: &Inodes, name: &str) -> Arc<Inode> {
        let (fd, status) = open(&dir.path().join(name));
        inodes.looked_up(fd, &status, &inodes.root(), name.as_ref())
    }

    #[test]
    fn forgotten_inodes_leave_and_come_back_as_new_ones() {
        let (dir, inodes) = table(10);
        std::fs::write(dir.path().join("f"), b"x").expect("written");
        let first = look(&dir, &inodes, "f");
        assert_eq!(look(&dir, &inodes, "f").generation, first.generation);
        inodes.forget(first.node, 1);
        assert_eq!(inodes.len(), 2);
        inodes.forget(ROOT, 5);
        inodes.forget(first.node, 1);
        assert_eq!(inodes.len(), 1);
        assert!(inodes.get(first.node).is_err());
        let again = look(&dir, &inodes, "f");
        assert_eq!(again.node, first.node);
        assert_ne!(again.generation, first.generation);
    }

    #[test]
    fn beyond_the_descriptors_an_inode_is_still_found_and_told_from_its_successor() {
        for by_name in [false, true] {
            let (dir, mut inodes) = table(1);
            if by_name {
                inodes.file_system = None; // as for an ordinary user
            }
            let path = dir.path().join("f");
            std::fs::write(&path, b"x").expect("written");
            let inode = look(&dir, &inodes, "f");
            assert!(!inode.has_descriptor());
            let reached = |inode: &Inode| inode.reach().and_then(Status::of).map(|status| status.place());
            assert_eq!(reached(&inode), Ok(inode.place()));
            // Another name, through the mount.
            std::fs::rename(&path, dir.path().join("g")).expect("renamed");
            let (moved, _) = open(&dir.path().join("g"));
            assert_eq!(inodes.by_name(), by_name || inodes.file_system.is_none());
            inodes.moved(&moved, &inodes.root(), "g".as_ref());
            assert_eq!(reached(&inode), Ok(inode.place()));
            // Another file, perhaps with the same number.
            std::fs::remove_file(dir.path().join("g")).expect("removed");
            drop(moved);
            std::fs::write(dir.path().join("g"), b"y").expect("written");
            assert_eq!(reached(&inode), Err(Errno::STALE));
            assert_ne!(look(&dir, &inodes, "g").generation, inode.generation);
        }
    }

    #[test]
    fn a_directory_on_the_way_may_be_known_by_name_too() {
        let (dir, mut inodes) = table(1);
        inodes.file_system = None;
        std::fs::create_dir(dir.path().join("d")).expect("made");
        std::fs::write(dir.path().join("d/f"), b"x").expect("written");
        let folder = look(&dir, &inodes, "d");
        let (fd, status) = open(&dir.path().join("d/f"));
        let file = inodes.looked_up(fd, &status, &folder, "f".as_ref());
        assert!(file.reach().is_ok());
        std::fs::rename(dir.path().join("d"), dir.path().join("e")).expect("renamed");
        assert!(matches!(file.reach(), Err(Errno::STALE)));
        inodes.moved(&open(&dir.path().join("e")).0, &inodes.root(), "e".as_ref());
        assert!(file.reach().is_ok());
    }
}
