//! One reader's slots, in turn: a slot must never be filled while a copy out of it is under way, and a load must never be
//! over while the ring has copies of it. Called by the engine's readers, each with a ring of its own.

use super::buffered::{self, Target};
use super::plan::Chunk;
use crate::device::{Lane, Mapping};
use crate::failure::Result;
use std::os::fd::BorrowedFd;

/// A lane's slots and what is under way in each.
pub struct Ring {
    lane: Box<dyn Lane>,
    /// Bytes under way from each slot; 0: the slot is free.
    under_way: Vec<usize>,
    next: usize,
}

impl Ring {
    pub fn new(lane: Box<dyn Lane>, slots: usize) -> Ring {
        Ring { lane, under_way: vec![0; slots], next: 0 }
    }

    /// Reads `chunk` of `file` into the next slot and starts its copy into `mapping`. Says through `arrived` how many
    /// bytes of earlier chunks have arrived meanwhile. After an error `drain` is still needed.
    pub fn pass(
        &mut self,
        file: BorrowedFd<'_>,
        chunk: Chunk,
        mapping: &dyn Mapping,
        arrived: &mut dyn FnMut(usize),
    ) -> Result<()> {
        let slot = self.next;
        self.next = (slot + 1) % self.under_way.len();
        self.finish(slot, arrived)?;
        let memory = &mut self.lane.slot(slot)[..chunk.length];
        // SAFETY: the slot is borrowed until the read has returned.
        buffered::read(file, chunk.file, unsafe { Target::new(memory.as_mut_ptr(), memory.len()) })?;
        self.lane.copy(slot, chunk.length, mapping, chunk.device)?;
        self.under_way[slot] = chunk.length;
        Ok(())
    }

    /// Returns when no copy is under way any more, with the first error of those that were.
    pub fn drain(&mut self, arrived: &mut dyn FnMut(usize)) -> Result<()> {
        let mut result = Ok(());
        for slot in 0..self.under_way.len() {
            result = result.and(self.finish(slot, arrived));
        }
        result
    }

    fn finish(&mut self, slot: usize, arrived: &mut dyn FnMut(usize)) -> Result<()> {
        let bytes = std::mem::take(&mut self.under_way[slot]);
        if bytes > 0 {
            self.lane.wait(slot)?;
            arrived(bytes);
        }
        Ok(())
    }
}
