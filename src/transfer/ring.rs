//! One reader's slots: a slot must never be filled while a copy out of it is under way, nor copied while it is filled, and a
//! load must never be over while the ring has anything of it. Where the processor can store into the device's memory there
//! is nothing to copy, and a slot is a place in that memory. Called by the engine's readers, each with a ring of its own.

use super::bounce::Bounce;
use super::buffered::Target;
use super::gds::Scratch;
use super::gds::route::Straight;
use super::input::{Came, Input};
use super::load::Load;
use super::plan::{Chunk, Work};
use super::report::Route;
use super::residency;
use super::uring::{Completed, Uring};
use crate::device::{Lane, Mapping};
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::Instant;

/// No file system wants more of an address.
const PAGE: usize = 4096;

/// A reader's slots and what is under way in each.
pub struct Ring {
    /// Before the memory that it may fill: reads end first.
    uring: Option<Uring>,
    lane: Option<Box<dyn Lane>>,
    free: Vec<usize>,
    /// By slot.
    reading: Vec<Option<Reading>>,
    /// In the order in which they were started.
    copying: VecDeque<Copying>,
    /// By slot, for direct reads that cannot go to their place; made when they are needed.
    bounces: Vec<Option<Bounce>>,
    slot_size: usize,
    /// For what cuFile brings.
    scratch: Scratch,
}

/// A read past the page cache.
struct Reading {
    chunk: Chunk,
    /// Bytes that were asked for.
    whole: usize,
    target: Target,
    /// Where the bytes shall be then.
    place: Target,
    begun: Instant,
}

// SAFETY: the target is an address in memory that belongs to the ring, or to the mapping that its reader works on.
unsafe impl Send for Reading {}

struct Copying {
    slot: usize,
    /// What arrives with it.
    parts: Vec<(usize, Came)>,
}

/// What a reader works on.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    pub load: &'a Load,
    pub inputs: &'a [Input],
    /// The mapping, when it is there. Nothing: it could not be made, and the load has failed.
    pub mapping: &'a (dyn Fn() -> Option<&'a dyn Mapping> + 'a),
    /// Where bytes may go to the device without the processor.
    pub straight: Option<&'a Straight>,
}

impl<'a> Job<'a> {
    fn mapping(&self) -> Result<&'a dyn Mapping> {
        (self.mapping)().ok_or_else(|| Failure::new(Code::Device, "the memory could not be mapped"))
    }
}

impl Ring {
    /// Whether reads go straight into the device's memory.
    pub fn is_bare(&self) -> bool {
        self.lane.is_none()
    }

    /// `direct`: reads past the page cache may be under way while others are made.
    pub fn new(mut lane: Option<Box<dyn Lane>>, slots: usize, slot_size: usize, direct: bool) -> Ring {
        let mut uring = if direct { Uring::new(slots) } else { None };
        if let (Some(uring), Some(lane)) = (&mut uring, &mut lane) {
            let whole = |slot| {
                let memory = lane.slot(slot);
                // SAFETY: the slots are mapped as long as the lane, which this value has until it is dropped.
                unsafe { Target::new(memory.as_mut_ptr(), memory.len()) }
            };
            let slots = (0..slots).map(whole).collect();
            // SAFETY: as above; the ring's reads end before the lane.
            unsafe { uring.register(slots) };
        }
        let reading = (0..slots).map(|_| None).collect();
        let bounces = (0..slots).map(|_| None).collect();
        Ring {
            uring,
            lane,
            free: (0..slots).rev().collect(),
            reading,
            copying: VecDeque::new(),
            bounces,
            slot_size,
            scratch: None,
        }
    }

    /// Brings `work` on its way. Earlier work arrives meanwhile. A part that cannot be read fails, and nothing else; after
    /// an error of the device `drain` is still needed.
    pub fn pass(&mut self, job: Job<'_>, work: &Work) -> Result<()> {
        if let Some(straight) = job.straight
            && self.bring(job, straight, work)
        {
            return Ok(());
        }
        let slot = self.slot(job)?;
        let passed = self.fill(job, slot, work);
        if passed.is_err() {
            self.free.push(slot);
        }
        passed
    }

    /// Has the device read a run of work, of one part, out of the page cache itself. What is not all there goes its usual
    /// way. False: nothing was begun, and nothing can be lent.
    pub fn lend(&mut self, job: Job<'_>, run: &[Work]) -> Result<bool> {
        let Some(Chunk { part, file, device, .. }) = run.first().map(|work| work.chunks[0]) else { return Ok(true) };
        let length = run.iter().map(Work::length).sum();
        let (input, begun) = (&job.inputs[part], Instant::now());
        if self.lane.is_none() || residency::cached(input.as_fd(), file, length).is_none_or(|here| here < length as u64)
        {
            return run.iter().try_for_each(|work| self.pass(job, work)).map(|()| true);
        }
        let (mapping, slot) = (job.mapping()?, self.slot(job)?);
        let lent = self.lane.as_mut().map_or(Ok(false), |l| l.lend(slot, input.as_fd(), file, length, mapping, device));
        if !matches!(lent, Ok(true)) {
            self.free.push(slot);
            return lent;
        }
        job.load.tally().read(Route::Buffered, length as u64, begun.elapsed());
        let mut came = Came::default();
        came[Route::Buffered as usize] = length as u64;
        self.copying.push_back(Copying { slot, parts: vec![(part, came)] });
        Ok(true)
    }

    /// Has cuFile bring the work, where that is its way; nothing of it is under way then.
    fn bring(&mut self, job: Job<'_>, straight: &Straight, work: &Work) -> bool {
        if work.chunks.len() > 1 && !straight.only() {
            return false; // small files
        }
        for chunk in &work.chunks {
            let Chunk { part, .. } = *chunk;
            if !job.load.wants(part) {
                continue;
            }
            let (input, size, tally) = (&job.inputs[part], job.load.length(part), job.load.tally());
            let Ok(mapping) = job.mapping() else { return true };
            match straight.bring(input, *chunk, size, mapping, &mut self.scratch, tally) {
                Ok(Some(came)) => job.load.arrived(part, came),
                Ok(None) => return false,
                Err(failure) => job.load.fail_part(part, failure),
            }
        }
        true
    }

    fn fill(&mut self, job: Job<'_>, slot: usize, work: &Work) -> Result<()> {
        let all = self.target(job, slot, work)?;
        if let [chunk] = work.chunks[..]
            && self.begin(job, slot, chunk, all)?
        {
            return Ok(());
        }
        let mut parts = Vec::with_capacity(work.chunks.len());
        let mut filled = 0;
        for chunk in &work.chunks {
            let at = (chunk.device - work.device()) as usize;
            // What lies between is slack: the slot has had other bytes before.
            all.part(filled, at - filled).clear();
            filled = at + chunk.length;
            // Only a slot has room for more than the chunk.
            let room = if self.lane.is_some() { all.room() - at } else { chunk.length };
            let place = all.part(at, chunk.length);
            if !job.load.wants(chunk.part) {
                place.clear();
                continue;
            }
            match self.read(job, slot, *chunk, all.part(at, room))? {
                Ok(came) => parts.push((chunk.part, came)),
                Err(failure) => {
                    place.clear();
                    job.load.fail_part(chunk.part, failure);
                }
            }
        }
        self.launch(job, slot, work.device(), work.length(), parts)
    }

    /// Reads a chunk and returns when it is at its place. The outer error is of the ring, the inner one of the file.
    fn read(&mut self, job: Job<'_>, slot: usize, chunk: Chunk, place: Target) -> Result<Result<Came>> {
        let (input, tally) = (&job.inputs[chunk.part], job.load.tally());
        let via = self.aligned(slot, place)?;
        let Some(attempt) = input.attempt(chunk, via, tally) else { return Ok(input.read(chunk, place, tally)) };
        let came = input.read_past(&attempt, chunk, via, tally);
        if came.is_ok() && via.address() != place.address() {
            place.copy(via, chunk.length);
        }
        Ok(came)
    }

    /// The place itself, if a direct read can go there; else the slot's memory for those that cannot.
    fn aligned(&mut self, slot: usize, place: Target) -> Result<Target> {
        if place.is_aligned(PAGE) {
            return Ok(place);
        }
        let bounce = &mut self.bounces[slot];
        if bounce.is_none() {
            *bounce = Some(Bounce::new(self.slot_size)?);
        }
        Ok(bounce.as_ref().map_or(place, Bounce::target))
    }

    /// Where the slot's bytes go: for the processor, all that may be written.
    fn target(&mut self, job: Job<'_>, slot: usize, work: &Work) -> Result<Target> {
        if let Some(lane) = &mut self.lane {
            let memory = lane.slot(slot);
            // SAFETY: the slot is free, and nobody else is given it until its copy is over.
            return Ok(unsafe { Target::new(memory.as_mut_ptr(), memory.len()) });
        }
        let start =
            job.mapping()?.host().ok_or_else(|| Failure::new(Code::Device, "the device has no lane and no address"))?;
        let end = work.device() + work.length() as u64;
        assert!(end <= job.mapping()?.size(), "work lies in the allocation");
        job.mapping()?.about_to_fill(work.device(), work.length() as u64);
        // SAFETY: the work lies in the mapping, which the caller keeps borrowed until the ring is drained. Nobody else is
        // given this part of it.
        Ok(unsafe { Target::new(start.add(work.device() as usize), work.length()) })
    }

    /// Begins to read a chunk past the page cache, if that is its way and the system lets reads be under way.
    fn begin(&mut self, job: Job<'_>, slot: usize, chunk: Chunk, place: Target) -> Result<bool> {
        if self.uring.is_none() {
            return Ok(false);
        }
        let target = self.aligned(slot, place)?;
        let Some(attempt) = job.inputs[chunk.part].attempt(chunk, target, job.load.tally()) else { return Ok(false) };
        let Some(uring) = &mut self.uring else { return Ok(false) };
        let asked = target.part(0, attempt.direct.alignment().rounded(attempt.whole));
        // Memory beside the slots is none that the kernel knows.
        let registered = (target.address() == place.address()).then_some(slot);
        // SAFETY: the input is open and the mapping borrowed until the ring is drained; the slot is not free, so nobody
        // touches its memory.
        let begun = unsafe { uring.begin(attempt.direct.as_fd(), chunk.file, asked, registered, slot) };
        if begun.is_err() {
            return Ok(false);
        }
        self.reading[slot] = Some(Reading { chunk, whole: attempt.whole, target, place, begun: Instant::now() });
        Ok(true)
    }

    /// Starts the copy of a filled slot.
    fn launch(
        &mut self,
        job: Job<'_>,
        slot: usize,
        device: u64,
        length: usize,
        parts: Vec<(usize, Came)>,
    ) -> Result<()> {
        match &mut self.lane {
            Some(lane) if !parts.is_empty() => {
                lane.copy(slot, length, job.mapping()?, device)?;
                self.copying.push_back(Copying { slot, parts });
            }
            _ => {
                parts.into_iter().for_each(|(part, came)| job.load.arrived(part, came));
                self.free.push(slot);
            }
        }
        Ok(())
    }

    /// A slot that is free. What has been read meanwhile goes on its way first.
    fn slot(&mut self, job: Job<'_>) -> Result<usize> {
        loop {
            while let Some(completed) = self.uring.as_mut().and_then(|uring| uring.next(false)) {
                self.completed(job, completed)?;
            }
            if let Some(slot) = self.free.pop() {
                return Ok(slot);
            }
            self.advance(job)?;
        }
    }

    /// Waits for whatever is likely to be over first.
    fn advance(&mut self, job: Job<'_>) -> Result<()> {
        if let Some(copying) = self.copying.pop_front() {
            let waited = self.lane.as_mut().map_or(Ok(()), |lane| lane.wait(copying.slot));
            self.free.push(copying.slot);
            waited?;
            copying.parts.into_iter().for_each(|(part, came)| job.load.arrived(part, came));
            return Ok(());
        }
        match self.uring.as_mut().and_then(|uring| uring.next(true)) {
            Some(completed) => self.completed(job, completed),
            None => Ok(()),
        }
    }

    /// A read came back: what is missing is read through the page cache, then it is copied.
    fn completed(&mut self, job: Job<'_>, completed: Completed) -> Result<()> {
        let slot = completed.token;
        let Some(Reading { chunk, whole, target, place, begun }) = self.reading[slot].take() else { return Ok(()) };
        let input = &job.inputs[chunk.part];
        let read = input.complete(chunk, whole, completed.result, begun.elapsed(), target, job.load.tally());
        let launched = match read {
            Ok(came) => {
                if target.address() != place.address() {
                    place.copy(target, chunk.length);
                }
                self.launch(job, slot, chunk.device, chunk.length, vec![(chunk.part, came)])
            }
            Err(failure) => {
                // Where it was read straight into a slab, whoever has that mapped sees it.
                place.clear();
                job.load.fail_part(chunk.part, failure);
                self.free.push(slot);
                return Ok(());
            }
        };
        if launched.is_err() {
            self.free.push(slot);
        }
        launched
    }

    /// Returns when nothing is under way any more, with the first error of what was.
    pub fn drain(&mut self, job: Job<'_>) -> Result<()> {
        let mut result = Ok(());
        while !self.copying.is_empty() || self.uring.as_ref().is_some_and(|uring| uring.under_way() > 0) {
            result = result.and(self.advance(job));
        }
        result
    }
}
