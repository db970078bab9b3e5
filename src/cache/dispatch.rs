//! The thread that gives a device's loads to its loader, in the order in which they were asked for: it makes room, creates
//! the memory, hands both over, and decides what becomes of the result. Small files that wait together go together. Never
//! on a FUSE worker.

use super::budget::Charge;
use super::copy::{Block, Key, Place};
use super::placement;
use super::shelf::{Shelf, copy_of};
use super::slab::Slabs;
use crate::device::Allocation;
use crate::failure::{Failure, Result};
use crate::loader::{Destination, Ended, Job, Loaded, Part, Watch};
use crate::metrics::Counter;
use crate::protocol::Code;
use crate::source::OpenFile;
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Loads that the loader may have at once. Each costs two descriptors; more would not fill the bus better.
const IN_FLIGHT: usize = 64;

/// From so many bytes on a file is read while its memory is made, which takes some milliseconds for gigabytes.
const EARLY: u64 = 64 << 20;

/// How often a file is loaded again because it changed meanwhile.
pub(super) const ATTEMPTS: u32 = 3;

pub(super) fn start(shelf: &Arc<Shelf>) -> std::io::Result<std::thread::JoinHandle<()>> {
    let shelf = Arc::clone(shelf);
    std::thread::Builder::new().name(format!("loads-{}", shelf.number)).spawn(move || shelf.dispatch())
}

/// A file that gets memory of its own.
#[derive(Clone)]
struct Whole {
    key: Key,
    number: u64,
    file: OpenFile,
    /// Bytes before the content.
    lead: u64,
    length: u64,
    watch: Arc<Watch>,
}

impl Whole {
    fn bytes(&self) -> u64 {
        self.lead + self.length
    }

    fn place(&self, device: usize, allocation: Allocation, charge: Charge) -> Place {
        let block = Block::new(device, allocation, charge);
        Place { offset: self.lead, bytes: block.bytes(), block }
    }
}

/// One load that the loader has; counted until this is dropped, also by a panic in what follows the load.
pub(super) struct Flight(pub(super) Arc<Shelf>);

impl Flight {
    pub(super) fn begin(shelf: &Arc<Shelf>) -> Flight {
        shelf.index.lock().in_flight += 1;
        Flight(Arc::clone(shelf))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.index.lock().in_flight -= 1;
        self.0.work.notify_one();
        self.0.budget.poke();
    }
}

impl Shelf {
    fn dispatch(self: Arc<Self>) {
        let mut slabs = Slabs::default();
        loop {
            let mut index = self.index.lock();
            while !index.stopping && (index.queue.is_empty() || index.in_flight >= IN_FLIGHT) {
                self.work.wait(&mut index);
            }
            if index.stopping {
                return;
            }
            let wanted = index.take_together(self.budget.limit() / 4);
            drop(index);
            // A defect in one load must not end those of everybody else.
            let begun = catch_unwind(AssertUnwindSafe(|| match wanted[..] {
                [(key, number)] if !self.shares(&key, number) => self.begin(key, number),
                _ => self.begin_together(&mut slabs, &wanted),
            }));
            if begun.is_err() {
                let message = "a defect in warpfs ended this load; please report what the log says";
                for (key, number) in wanted {
                    self.fail(&key, number, Failure::new(Code::Loader, message));
                }
            }
        }
    }

    /// Whether the file shall share memory.
    fn shares(&self, key: &Key, number: u64) -> bool {
        self.index.lock().load(key, number).is_some_and(|load| load.shares())
    }

    /// Takes up a load that waited: with the version that the file has now, which it may have got while it waited.
    pub(super) fn begin(self: &Arc<Self>, key: Key, number: u64) {
        let file = self.index.lock().load(&key, number).map(|load| {
            // Before the look at the file: what changes from here on is seen.
            load.stale = false;
            load.file.clone()
        });
        let Some(file) = file else { return };
        let version = match file.version() {
            Ok(version) => version,
            Err(failure) => return self.fail(&key, number, failure),
        };
        let mut index = self.index.lock();
        let Some(load) = index.load(&key, number) else { return };
        let (settled, changed) = (load.settled, load.version != version);
        let Some(load) = index.revise(&key, number, version) else { return };
        if version.size > 0 && (changed || !settled) {
            drop(index);
            return if settled { self.again(&key, number, &file) } else { self.settle(vec![(key, number, file)]) };
        }
        let (watch, alone) = (Arc::clone(&load.watch), load.alone);
        let emptied = (version.size == 0).then(|| copy_of(key, load, None));
        drop(index);
        if let Some(copy) = emptied {
            if !self.publish(copy, number) {
                self.again(&key, number, &file);
            }
            return;
        }
        let lead = placement::lead(&file, version.size);
        let whole = Whole { key, number, file, lead, length: version.size, watch };
        if whole.bytes() >= EARLY && !alone && self.begin_early(&whole) {
            return;
        }
        let wanted = || !whole.watch.cancelled.load(Ordering::Acquire);
        match self.make_room(&whole.file, whole.bytes(), &wanted) {
            Err(failure) => self.fail(&key, number, failure),
            Ok((allocation, charge)) => {
                let place = whole.place(self.number, allocation, charge);
                let memory = Destination::of(place.block.allocation());
                self.hand_over(whole, memory, Arc::new(Mutex::new(Some(place))));
            }
        }
    }

    /// Has the loader read the file while its memory is made, if there is room for it. If there is none after all, the load
    /// is begun again, and room is made. False: nothing was begun.
    fn begin_early(self: &Arc<Self>, whole: &Whole) -> bool {
        let Some(charge) = self.budget.reserve(self.info().rounded(whole.bytes())) else { return false };
        let Ok((memory, promise)) = Destination::promised(charge.bytes()) else { return false };
        let place = Arc::new(Mutex::new(None));
        self.hand_over(whole.clone(), memory, Arc::clone(&place));
        if let Ok(allocation) = self.create(charge.bytes()) {
            let made = whole.place(self.number, allocation, charge);
            let allocation = Arc::clone(made.block.allocation());
            *place.lock() = Some(made);
            promise.keep(allocation);
        }
        true
    }

    /// Has the loader bring a file to `memory`; where that is stands in `place` when it is there.
    fn hand_over(self: &Arc<Self>, whole: Whole, memory: Destination, place: Arc<Mutex<Option<Place>>>) {
        let flight = Flight::begin(self);
        let Whole { key, number, file, lead, length, watch } = whole;
        let part = Part { file: file.clone(), offset: 0, length, place: lead, watch };
        let job = Job { memory, slab: None, parts: vec![part] };
        let done = move |ended: Ended| {
            let shelf = &flight.0;
            shelf.routes.add(&ended.report);
            let result = ended.parts.into_iter().next().expect("a result for each part");
            let Some(place) = place.lock().take() else { return shelf.once_more(&key, number, result) };
            let result = result.and_then(|l| shelf.memory.seal(place.block.allocation()).map(|()| l));
            shelf.ended(key, number, &file, place, result);
        };
        self.loader.submit(job, Box::new(done));
    }

    /// A load ended before its memory was there: once more, now with room made first.
    fn once_more(&self, key: &Key, number: u64, result: Result<Loaded>) {
        let mut index = self.index.lock();
        if index.stopping {
            drop(index);
            let failure = result.err().unwrap_or_else(|| Failure::new(Code::Stopping, "the daemon is shutting down"));
            return self.fail(key, number, failure);
        }
        index.again_alone(*key, number);
        drop(index);
        self.work.notify_one();
    }

    /// A file came back from the loader.
    pub(super) fn ended(&self, key: Key, number: u64, file: &OpenFile, place: Place, result: Result<Loaded>) {
        // What the file is now decides, whatever the loader says.
        let (now, hides) = (file.version(), file.hides());
        let mut index = self.index.lock();
        let Some(load) = index.load(&key, number) else { return };
        let changed = now.as_ref().is_ok_and(|now| *now != load.version || hides)
            || result.as_ref().is_err_and(|failure| failure.code == Code::Changing);
        load.stale |= changed;
        // A loader that fails a file among others may have failed because of one of them: each gets another try, alone.
        let lost = result.as_ref().is_err_and(|failure| failure.code == Code::Loader);
        if lost && place.block.is_slab() && !index.stopping {
            index.again_alone(key, number);
            drop(index);
            self.work.notify_one();
            return;
        }
        let Some(load) = index.load(&key, number) else { return };
        let asked = load.asked;
        let copy = copy_of(key, load, Some(place));
        drop(index);
        let verdict = if changed { Ok(Loaded::default()) } else { now.and(result) };
        match verdict {
            Ok(loaded) => {
                if self.publish(copy, number) {
                    self.latencies[loaded.route() as usize].observe(asked.elapsed());
                } else {
                    self.again(&key, number, file);
                }
            }
            Err(failure) => {
                // The memory goes before anyone hears of the failure, so that who tries again finds it free.
                drop(copy);
                self.fail(&key, number, failure);
            }
        }
    }

    /// The file changed while it was loaded: once more, a few times.
    fn again(&self, key: &Key, number: u64, file: &OpenFile) {
        let mut index = self.index.lock();
        let stopping = index.stopping;
        let Some(load) = index.load(key, number) else { return };
        if load.attempt < ATTEMPTS && !stopping {
            load.attempt += 1;
            load.settled = false;
            load.watch.loaded.store(0, Ordering::Relaxed);
            index.queue.push_back((*key, number));
            drop(index);
            self.counters.add(Counter::LoadRetries, 1);
            self.work.notify_one();
            return;
        }
        drop(index);
        let path = file.path.display();
        let message =
            format!("{path}: changed {ATTEMPTS} times while it was loaded; try again when its writer is done");
        self.fail(key, number, Failure::new(Code::Changing, message));
    }

    /// Fails what waits, and lets the loader end what it has. Copies stay until the shelf goes.
    pub(super) fn stop(&self) {
        let mut index = self.index.lock();
        index.stopping = true;
        let queued: Vec<_> = index.queue.drain(..).collect();
        drop(index);
        self.work.notify_all();
        self.budget.poke();
        for (key, number) in queued {
            self.fail(&key, number, Failure::new(Code::Stopping, "the daemon is shutting down"));
        }
        self.loader.stop();
    }
}
