//! A copy and the memory it lies in. A copy is immutable once it is published; the memory under it lives as long as
//! anyone has it: the index, a session's lease, a load in progress.

use super::budget::Charge;
use crate::cache::Placement;
use crate::device::Allocation;
use crate::source::{Domain, FileId, Version};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// What a copy is found by. A changed file has the same key and another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub file: FileId,
    pub domain: Domain,
}

/// One allocation with its share of the budget.
pub struct Block {
    /// Unique in this daemon, over all devices; never 0.
    pub id: u64,
    /// Index of the device.
    pub device: usize,
    /// The memory is freed first, then the charge: never the other way round.
    pub allocation: Arc<Allocation>,
    charge: Charge,
    /// Number of live [`Hold`]s. The first is made while the copy is found through the index, under the shelf's lock, so
    /// that eviction, under the same lock, sees it; others only while there is one.
    holds: AtomicU32,
}

impl Block {
    pub fn new(device: usize, allocation: Allocation, charge: Charge) -> Arc<Block> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Block { id, device, allocation: Arc::new(allocation), charge, holds: AtomicU32::new(0) })
    }

    /// Bytes of the budget that this takes.
    pub fn bytes(&self) -> u64 {
        self.charge.bytes()
    }

    pub fn is_held(&self) -> bool {
        self.holds.load(Ordering::Acquire) > 0
    }

    pub fn holders(&self) -> u32 {
        self.holds.load(Ordering::Acquire)
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
        self.block.charge.budget().poke();
    }
}

/// The bytes of one version of a file on one device.
pub struct Copy {
    pub key: Key,
    pub version: Version,
    /// Unique in this daemon; another version of the file has another.
    pub generation: u64,
    /// Nothing for an empty file.
    pub block: Option<Arc<Block>>,
    /// Where the content begins in the block, in bytes.
    pub lead: u64,
    /// For people.
    pub path: PathBuf,
    pub published: Instant,
}

impl Copy {
    pub fn placement(&self) -> Placement {
        let block = self.block.as_ref();
        Placement {
            allocation: block.map_or(0, |b| b.id),
            allocation_size: block.map_or(0, |b| b.allocation.size()),
            offset: self.lead,
            length: self.version.size,
            generation: self.generation,
        }
    }

    pub fn bytes(&self) -> u64 {
        self.block.as_ref().map_or(0, |b| b.bytes())
    }

    pub fn holders(&self) -> u32 {
        self.block.as_ref().map_or(0, |b| b.holders())
    }

    pub fn is_held(&self) -> bool {
        self.block.as_ref().is_some_and(|b| b.is_held())
    }
}

/// A generation that no copy has had.
pub fn next_generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
