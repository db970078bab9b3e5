//! Which node id a file gets: its own inode number in the source's own mount, so that programs which remember inode numbers see
//! them stay; with an index of the mount above it for files of other mounts in the source. What does not fit is numbered
//! as it comes. Called by the inode table, under its lock.

use super::ROOT;
use crate::filesystem::status::Place;
use std::collections::HashMap;

/// A node id is a mount's index above this bit and an inode number below it.
const MOUNT_SHIFT: u32 = 48;
/// Index of the inodes that exist in the mount only.
const VIRTUAL_INDEX: u64 = 0xFFFF;
/// Index of the inodes whose number or mount does not fit.
const NUMBERED_INDEX: u64 = 0xFFFE;

/// Node id of a virtual inode.
pub(crate) const fn virtual_node(number: u64) -> u64 {
    (VIRTUAL_INDEX << MOUNT_SHIFT) | number
}

pub(crate) fn is_virtual(node: u64) -> bool {
    node >> MOUNT_SHIFT == VIRTUAL_INDEX
}

pub(super) struct Numbering {
    /// Index of each mount and device (a btrfs mount has several) that was seen; the source's own is 0.
    indices: HashMap<(u64, u64), u64>,
    numbered: u64,
}

impl Numbering {
    pub(super) fn new(root: Place) -> Numbering {
        Numbering { indices: HashMap::from([((root.mount, root.file.device), 0)]), numbered: 0 }
    }

    /// The number that the file will have if it is looked up, as far as that is known already.
    pub(super) fn expected(&self, place: Place) -> Option<u64> {
        let index = self.indices.get(&(place.mount, place.file.device)).copied();
        index.and_then(|index| own(index, place.file.inode))
    }

    /// The file's own number where it is free, else the next of the numbers given out as they come.
    pub(super) fn node_of(&mut self, place: Place, taken: impl Fn(u64) -> bool) -> u64 {
        let next = self.indices.len() as u64;
        let index = *self.indices.entry((place.mount, place.file.device)).or_insert(next);
        if let Some(own) = own(index, place.file.inode).filter(|own| !taken(*own)) {
            return own;
        }
        loop {
            self.numbered += 1;
            let node = (NUMBERED_INDEX << MOUNT_SHIFT) | self.numbered;
            if !taken(node) {
                return node;
            }
        }
    }
}

/// Whether a file of the source's own mount has its own number as node id.
pub(super) fn is_own(inode: u64) -> bool {
    own(0, inode).is_some()
}

/// The file's own number, if it can be a node id.
fn own(index: u64, inode: u64) -> Option<u64> {
    let own = (index << MOUNT_SHIFT) | inode;
    let fits = index < NUMBERED_INDEX && inode != 0 && inode >> MOUNT_SHIFT == 0;
    (fits && own != ROOT).then_some(own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::FileId;

    fn place(mount: u64, device: u64, inode: u64) -> Place {
        Place { mount, file: FileId { device, inode } }
    }

    #[test]
    fn a_node_is_the_sources_inode_number() {
        let mut numbering = Numbering::new(place(1, 7, 2));
        assert_eq!(numbering.node_of(place(1, 7, 42), |_| false), 42);
        assert_eq!(numbering.node_of(place(1, 7, 42), |_| false), 42);
        assert_eq!(numbering.expected(place(1, 7, 43)), Some(43));
    }

    #[test]
    fn other_mounts_do_not_collide() {
        let mut numbering = Numbering::new(place(1, 7, 2));
        let mut node = |mount, device| numbering.node_of(place(mount, device, 42), |_| false);
        let (first, second, bound, subvolume) = (node(1, 7), node(2, 8), node(3, 7), node(1, 9));
        assert_eq!((first, second, bound, subvolume), (42, (1 << 48) | 42, (2 << 48) | 42, (3 << 48) | 42));
        assert_eq!(numbering.expected(place(2, 8, 5)), Some((1 << 48) | 5));
        assert_eq!(numbering.expected(place(4, 8, 5)), None);
    }

    #[test]
    fn the_roots_number_and_the_virtual_ones_are_not_given_out() {
        let mut numbering = Numbering::new(place(1, 7, 2));
        for inode in [1, 0, virtual_node(3), u64::MAX] {
            let node = numbering.node_of(place(1, 7, inode), |_| false);
            assert_eq!(node >> MOUNT_SHIFT, NUMBERED_INDEX, "{inode:?}");
        }
    }
}
