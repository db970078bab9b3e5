//! Small files that wait together: they get places in slabs, and go to the loader as one job. What becomes of one of them is
//! its own affair: it may have changed, or be unreadable, and the others are published. Called by the thread that begins
//! loads.

use super::copy::{Block, Filling, Key, Place};
use super::dispatch::Flight;
use super::placement;
use super::shelf::{Shelf, copy_of};
use super::slab::{Slabs, padded};
use crate::failure::Result;
use crate::loader::{Destination, Ended, Job, Loaded, Part, Slab, Watch};
use crate::protocol::DeviceKind;
use crate::source::OpenFile;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A load that was asked for so recently takes the version that was seen then: at its end it is looked at again anyway.
const RECENT: Duration = Duration::from_millis(100);

/// A file with what it needs.
struct Small {
    key: Key,
    number: u64,
    file: OpenFile,
    size: u64,
    lead: u64,
    watch: Arc<Watch>,
}

impl Small {
    /// Bytes in a slab.
    fn bytes(&self) -> u64 {
        padded(self.lead + self.size)
    }
}

/// A file of a job that is over.
struct End {
    key: Key,
    number: u64,
    file: OpenFile,
    place: Place,
    result: Result<Loaded>,
}

/// Where a file of a job goes.
struct Placed {
    small: Small,
    offset: u64,
}

impl Shelf {
    /// Takes up loads that waited, of one domain. What cannot share memory after all goes its own way.
    pub(super) fn begin_together(self: &Arc<Self>, slabs: &mut Slabs, wanted: &[(Key, u64)]) {
        let mut smalls = self.look(wanted);
        smalls.reverse();
        let mut job: Option<(Filling, Vec<Placed>)> = None;
        while let Some(small) = smalls.pop() {
            let domain = small.key.domain;
            let (block, offset) = match slabs.take(domain, small.bytes(), &*self.loader) {
                Some(taken) => taken,
                None => {
                    // Making room may have to wait for what is under way: that shall not be these.
                    if let Some((filling, parts)) = job.take() {
                        self.hand_over_together(filling, parts);
                    }
                    let bytes = small.bytes() + smalls.iter().map(Small::bytes).sum::<u64>();
                    match self.new_slab(slabs, &small, bytes) {
                        Some(block) => (block, 0),
                        None => {
                            self.begin(small.key, small.number);
                            continue;
                        }
                    }
                }
            };
            let placed = Placed { small, offset };
            match &mut job {
                Some((filling, parts)) if filling.block().id == block.id => parts.push(placed),
                _ => {
                    if let Some((filling, parts)) = job.take() {
                        self.hand_over_together(filling, parts);
                    }
                    job = Some((Filling::begin(block), vec![placed]));
                }
            }
        }
        if let Some((filling, parts)) = job {
            self.hand_over_together(filling, parts);
        }
    }

    /// The files as they are now, without those that are not wanted any more, or that cannot share memory and went their own
    /// way. The lock is taken once for all of them, or twice: others want it as often.
    fn look(self: &Arc<Self>, wanted: &[(Key, u64)]) -> Vec<Small> {
        let (mut smalls, mut others, mut found, mut unsettled) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let recent = Instant::now().checked_sub(RECENT);
        let mut index = self.index.lock();
        for (key, number) in wanted {
            let (key, number) = (*key, *number);
            let Some(load) = index.load(&key, number) else { continue };
            let known = load.settled && !load.stale && recent.is_some_and(|recent| load.asked > recent);
            let (file, watch) = (load.file.clone(), Arc::clone(&load.watch));
            if known && load.shares() && !watch.cancelled.load(Ordering::Acquire) {
                smalls.push(Small { key, number, file, size: load.version.size, lead: 0, watch });
            } else {
                // Before the look at the file: what changes from here on is seen.
                load.stale = false;
                found.push((key, number, file, watch));
            }
        }
        drop(index);
        let versions: Vec<_> = found.iter().map(|(_, _, file, _)| file.version()).collect();
        let mut index = self.index.lock();
        for ((key, number, file, watch), version) in found.into_iter().zip(versions) {
            let version = match version {
                Ok(version) => version,
                Err(failure) => {
                    others.push((key, number, Some(failure)));
                    continue;
                }
            };
            let Some(load) = index.load(&key, number) else { continue };
            let wanted = load.shares() && !watch.cancelled.load(Ordering::Acquire);
            if wanted && !load.settled {
                unsettled.push((key, number, file));
            } else if wanted && load.version == version {
                smalls.push(Small { key, number, file, size: version.size, lead: 0, watch });
            } else {
                others.push((key, number, None));
            }
        }
        drop(index);
        if !unsettled.is_empty() {
            self.settle(unsettled);
        }
        for (key, number, failure) in others {
            match failure {
                Some(failure) => self.fail(&key, number, failure),
                None => self.begin(key, number),
            }
        }
        smalls.iter_mut().for_each(|small| small.lead = placement::small_lead(&small.file, small.size));
        smalls
    }

    /// A slab with room for `bytes`, of which `small` takes the first. Nothing: it would be alone in it, or there is no
    /// room for so much.
    fn new_slab(&self, slabs: &mut Slabs, small: &Small, bytes: u64) -> Option<Arc<Block>> {
        let free = self.budget.limit().saturating_sub(self.budget.used());
        let waiting = self.index.lock().waiting(small.key.domain);
        let size = self.info().rounded(slabs.size(small.key.domain, bytes, waiting, free));
        if size < small.bytes() + padded(1) {
            return None;
        }
        let (allocation, charge) = self.make_room(&small.file, size, &|| true).ok()?;
        let block = Block::slab(self.number, allocation, charge, Arc::clone(&self.loader));
        self.loader.open(block.id);
        slabs.begin(small.key.domain, &block, small.bytes(), &*self.loader);
        Some(block)
    }

    fn hand_over_together(self: &Arc<Self>, filling: Filling, placed: Vec<Placed>) {
        let flight = Flight::begin(self);
        let block = filling.block();
        let part = |Placed { small, offset }: &Placed| Part {
            file: small.file.clone(),
            offset: 0,
            length: small.size,
            place: offset + small.lead,
            watch: Arc::clone(&small.watch),
        };
        // Memory of the host is made as quickly as it is found again.
        if self.info().kind == DeviceKind::Cuda
            && let Some(time) = self.kept.keep(block)
        {
            self.let_kept_go(time);
        }
        let keeper = Arc::clone(&block.piece);
        let job = Job {
            memory: Destination::of(block.allocation()),
            slab: Some(Slab { number: block.id, keeper }),
            parts: placed.iter().map(part).collect(),
        };
        let done = move |ended: Ended| {
            let shelf = &flight.0;
            shelf.routes.add(&ended.report);
            let block = filling.block();
            if ended.parts.iter().all(Result::is_err) {
                // Perhaps it could not be mapped at all: nothing more shall come into it.
                shelf.loader.forget(block.id);
                shelf.kept.give_up();
            }
            let sealed = shelf.seal_slab(block);
            let ends = placed.into_iter().zip(ended.parts).map(|(Placed { small, offset }, result)| {
                let place = Place { block: Arc::clone(block), offset: offset + small.lead, bytes: small.bytes() };
                let result = result.and_then(|loaded| sealed.clone().map(|()| loaded));
                End { key: small.key, number: small.number, file: small.file, place, result }
            });
            shelf.ended_together(ends.collect());
        };
        self.loader.submit(job, Box::new(done));
    }

    /// Lets the slab go that was filled last, when its time is over.
    fn let_kept_go(&self, after: Duration) {
        let shelf = Weak::clone(&self.this);
        let look = move || {
            let Some(shelf) = shelf.upgrade() else { return };
            if let Some(left) = shelf.kept.lapse() {
                shelf.let_kept_go(left);
            }
        };
        self.timer.after(after, look);
    }

    /// Publishes what has come as it was to come, all under one lock; the rest goes the way of a single file.
    fn ended_together(&self, ends: Vec<End>) {
        let now: Vec<_> = ends.iter().map(|end| (end.file.version(), end.file.hides())).collect();
        let (mut rest, mut published) = (Vec::new(), Vec::new());
        let mut index = self.index.lock();
        for (end, now) in ends.into_iter().zip(now) {
            let Some(load) = index.load(&end.key, end.number) else { continue };
            match (&end.result, now) {
                (Ok(loaded), (Ok(now), false)) if now == load.version && !load.stale => {
                    self.latencies[loaded.route() as usize].observe(load.asked.elapsed());
                    let copy = copy_of(end.key, load, Some(end.place));
                    published.extend(self.replace(&mut index, copy, end.number));
                }
                _ => rest.push(end),
            }
        }
        drop(index);
        published.into_iter().for_each(|published| self.tell(published));
        for End { key, number, file, place, result } in rest {
            self.ended(key, number, &file, place, result);
        }
    }

    /// Before anybody else sees the slab: only the loader, which has it mapped, can write to it from now on.
    fn seal_slab(&self, block: &Block) -> Result<()> {
        block.sealed.get_or_init(|| self.memory.seal_slab(block.allocation())).clone()
    }
}
