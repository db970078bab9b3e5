//! A copy and the memory it lies in. A copy is immutable once it is published; the memory under it lives as long as
//! anyone has it: the index, a session's lease, a load in progress.

use super::budget::Charge;
use crate::cache::Placement;
use crate::device::Allocation;
use crate::failure::Result;
use crate::loader::Loader;
use crate::source::{Domain, FileId, Version};
use std::path::Path;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// What a copy is found by. A changed file has the same key and another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub file: FileId,
    pub domain: Domain,
}

/// An allocation and its share of the budget.
pub struct Piece {
    /// The memory is freed first, then the charge: never the other way round.
    pub allocation: Arc<Allocation>,
    charge: Charge,
}

/// A piece, as long as copies lie in it: one, or, in a slab, several.
pub struct Block {
    /// Unique in this daemon, over all devices; never 0.
    pub id: u64,
    /// Index of the device.
    pub device: usize,
    pub piece: Arc<Piece>,
    /// Of a slab: who has it mapped until it is told to forget it.
    slab: Option<Arc<dyn Loader>>,
    /// Of a slab: what came of sealing it, which can be done once only, whichever of its loads is over first.
    pub sealed: OnceLock<Result<()>>,
    /// Number of live [`Hold`]s. The first is made while the copy is found through the index, under the shelf's lock, so
    /// that eviction, under the same lock, sees it; others only while there is one.
    holds: AtomicU32,
    /// Loads that put something into it.
    loads: AtomicU32,
}

impl Block {
    /// For one copy.
    pub fn new(device: usize, allocation: Allocation, charge: Charge) -> Arc<Block> {
        Block::with(device, allocation, charge, None)
    }

    /// For several, which come one after the other.
    pub fn slab(device: usize, allocation: Allocation, charge: Charge, loader: Arc<dyn Loader>) -> Arc<Block> {
        Block::with(device, allocation, charge, Some(loader))
    }

    fn with(device: usize, allocation: Allocation, charge: Charge, slab: Option<Arc<dyn Loader>>) -> Arc<Block> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Block {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            piece: Arc::new(Piece { allocation: Arc::new(allocation), charge }),
            slab,
            sealed: OnceLock::new(),
            holds: AtomicU32::new(0),
            loads: AtomicU32::new(0),
        })
    }

    pub fn allocation(&self) -> &Arc<Allocation> {
        &self.piece.allocation
    }

    /// Bytes of the budget that this takes.
    pub fn bytes(&self) -> u64 {
        self.piece.charge.bytes()
    }

    pub fn is_slab(&self) -> bool {
        self.slab.is_some()
    }

    pub fn is_held(&self) -> bool {
        self.holders() > 0
    }

    pub fn holders(&self) -> u32 {
        self.holds.load(Ordering::Acquire)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(loader) = &self.slab {
            loader.forget(self.id);
        }
    }
}

/// Keeps a slab from being evicted while something is put into it.
pub struct Filling(Arc<Block>);

impl Filling {
    pub fn begin(block: Arc<Block>) -> Filling {
        block.loads.fetch_add(1, Ordering::AcqRel);
        Filling(block)
    }

    pub fn block(&self) -> &Arc<Block> {
        &self.0
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        self.0.loads.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Keeps a block from being evicted, and its memory from being freed.
pub struct Hold {
    block: Arc<Block>,
}

impl Hold {
    pub fn new(block: &Arc<Block>) -> Hold {
        block.holds.fetch_add(1, Ordering::AcqRel);
        Hold { block: Arc::clone(block) }
    }

    pub fn block(&self) -> &Arc<Block> {
        &self.block
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.block.holds.fetch_sub(1, Ordering::AcqRel);
        self.block.piece.charge.budget().poke();
    }
}

/// Where a copy lies.
pub struct Place {
    pub block: Arc<Block>,
    /// Where the content begins in the block, in bytes.
    pub offset: u64,
    /// Bytes of the block that it takes, with its share of the slack.
    pub bytes: u64,
}

/// The bytes of one version of a file on one device.
pub struct Copy {
    pub key: Key,
    pub version: Version,
    /// Unique in this daemon; another version of the file has another.
    pub generation: u64,
    /// Nowhere, for an empty file.
    pub place: Option<Place>,
    /// For people.
    pub path: Arc<Path>,
    pub published: Instant,
}

impl Copy {
    pub fn placement(&self) -> Placement {
        let block = self.place.as_ref().map(|place| &place.block);
        Placement {
            allocation: block.map_or(0, |b| b.id),
            allocation_size: block.map_or(0, |b| b.allocation().size()),
            offset: self.place.as_ref().map_or(0, |place| place.offset),
            length: self.version.size,
            generation: self.generation,
        }
    }

    pub fn bytes(&self) -> u64 {
        self.place.as_ref().map_or(0, |place| place.bytes)
    }

    /// Holds on the memory that it lies in: in a slab, also those that are there for the sake of others.
    pub fn holders(&self) -> u32 {
        self.place.as_ref().map_or(0, |place| place.block.holders())
    }

    pub fn is_held(&self) -> bool {
        self.holders() > 0
    }

    /// Giving it up would free nothing now.
    pub fn is_in_use(&self) -> bool {
        self.is_held() || self.place.as_ref().is_some_and(|place| place.block.loads.load(Ordering::Acquire) > 0)
    }

    /// The slab that it lies in.
    pub fn slab(&self) -> Option<u64> {
        self.place.as_ref().map(|place| &place.block).filter(|block| block.is_slab()).map(|block| block.id)
    }
}

/// A generation that no copy has had.
pub fn next_generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
