//! The thread that gives a device's loads to its loader, in the order in which they were asked for: it makes room, creates
//! the memory, hands both over, and decides what becomes of the result. Never on a FUSE worker.

use super::copy::{Block, Key};
use super::placement;
use super::shelf::{Shelf, copy_of};
use crate::device::Allocation;
use crate::failure::{Failure, Result};
use crate::loader::{Ended, Job, Loaded, Part, Watch};
use crate::metrics::Counter;
use crate::protocol::Code;
use crate::size::Human;
use crate::source::OpenFile;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Loads that the loader may have at once. Each costs two descriptors; more would not fill the bus better.
const IN_FLIGHT: usize = 64;

/// How often a file is loaded again because it changed meanwhile.
pub(super) const ATTEMPTS: u32 = 3;

/// How long the dispatcher sleeps at most before it looks again whether there is room.
const PATIENCE: Duration = Duration::from_millis(200);

/// Loads in progress are waited for as long as they move; after this time without a byte they are given up hope of. More
/// than a loader may be silent before it is killed.
const STANDSTILL: Duration = Duration::from_secs(120);

/// Looks for room that is about to be free (a copy that was given up while somebody looked at it) this often.
const LAST_LOOKS: u32 = 5;

pub(super) fn start(shelf: &Arc<Shelf>) -> std::io::Result<std::thread::JoinHandle<()>> {
    let shelf = Arc::clone(shelf);
    std::thread::Builder::new().name(format!("loads-{}", shelf.number)).spawn(move || shelf.dispatch())
}

/// One load that the loader has; counted until this is dropped, also by a panic in what follows the load.
struct Flight(Arc<Shelf>);

impl Flight {
    fn begin(shelf: &Arc<Shelf>) -> Flight {
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
        loop {
            let mut index = self.index.lock();
            while !index.stopping && (index.queue.is_empty() || index.in_flight >= IN_FLIGHT) {
                self.work.wait(&mut index);
            }
            if index.stopping {
                return;
            }
            let Some((key, number)) = index.queue.pop_front() else { continue };
            drop(index);
            // A defect in one load must not end those of everybody else.
            if catch_unwind(AssertUnwindSafe(|| self.begin(key, number))).is_err() {
                let message = "a defect in warpfs ended this load; please report what the log says";
                self.fail(&key, number, Failure::new(Code::Loader, message));
            }
        }
    }

    /// Takes up a load that waited: with the version that the file has now, which it may have got while it waited.
    fn begin(self: &Arc<Self>, key: Key, number: u64) {
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
        load.version = version;
        let watch = Arc::clone(&load.watch);
        let emptied = (version.size == 0).then(|| copy_of(key, load, None, 0));
        drop(index);
        if let Some(copy) = emptied {
            if !self.publish(copy, number) {
                self.again(&key, number, &file);
            }
            return;
        }
        let lead = placement::lead(&file, version.size);
        match self.make_room(&file, lead + version.size, &watch) {
            Err(failure) => self.fail(&key, number, failure),
            Ok(block) => self.hand_over(key, number, file, version.size, lead, block, watch),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one call, and a struct for it would be read once")]
    fn hand_over(
        self: &Arc<Self>,
        key: Key,
        number: u64,
        file: OpenFile,
        size: u64,
        lead: u64,
        block: Arc<Block>,
        watch: Arc<Watch>,
    ) {
        let flight = Flight::begin(self);
        let allocation = Arc::clone(&block.allocation);
        let part = Part { file: file.clone(), offset: 0, length: size, place: lead, watch };
        let job = Job { allocation, slab: None, parts: vec![part] };
        let done = move |ended: Ended| {
            let shelf = &flight.0;
            shelf.routes.add(&ended.report);
            let result = ended.parts.into_iter().next().expect("a result for each part");
            shelf.ended(key, number, &file, lead, block, result);
        };
        self.loader.submit(job, Box::new(done));
    }

    /// A load came back from the loader.
    fn ended(&self, key: Key, number: u64, file: &OpenFile, lead: u64, block: Arc<Block>, result: Result<Loaded>) {
        let result = result.and_then(|loaded| self.memory.seal(&block.allocation).map(|()| loaded));
        // What the file is now decides, whatever the loader says.
        let now = file.version();
        let mut index = self.index.lock();
        let Some(load) = index.load(&key, number) else { return };
        let changed = now.as_ref().is_ok_and(|now| *now != load.version)
            || result.as_ref().is_err_and(|failure| failure.code == Code::Changing);
        load.stale |= changed;
        let copy = copy_of(key, load, Some(block), lead);
        drop(index);
        let verdict = if changed { Ok(Loaded::default()) } else { now.and(result) };
        match verdict {
            Ok(loaded) => {
                if self.publish(copy, number) {
                    let [buffered, direct, gds] = loaded.bytes;
                    self.counters.add(Counter::BytesBuffered, buffered);
                    self.counters.add(Counter::BytesDirect, direct);
                    self.counters.add(Counter::BytesGds, gds);
                    self.counters.add(Counter::LoadNanoseconds, loaded.duration.as_nanos() as u64);
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

    /// Memory for `bytes` of `file`, inside the budget. Gives up what nobody holds, waits for loads in progress, and
    /// fails only where the rest is held.
    fn make_room(&self, file: &OpenFile, bytes: u64, watch: &Watch) -> Result<Arc<Block>> {
        let needed = self.info().rounded(bytes);
        self.fits(file, bytes)?;
        let mut looks = 0;
        let mut moved = (Instant::now(), self.budget.epoch(), 0);
        loop {
            if watch.cancelled.load(Ordering::Acquire) || self.index.lock().stopping {
                return Err(Failure::new(Code::Stopping, format!("{}: the load was cancelled", file.path.display())));
            }
            let mut epoch = self.budget.epoch();
            let refused = match self.budget.reserve(needed) {
                None => None,
                Some(charge) => match self.create(needed) {
                    Ok(allocation) => return Ok(Block::new(self.number, allocation, charge)),
                    Err(failure) if failure.code == Code::OutOfMemory => {
                        // What is given back here is nobody's room, and must not wake us.
                        drop(charge);
                        epoch = self.budget.epoch();
                        Some(failure)
                    }
                    Err(failure) => return Err(failure.within(file.path.display())),
                },
            };
            let mut index = self.index.lock();
            if let Some(victim) = index.take_victim() {
                drop(index);
                self.counters.add(Counter::Evictions, 1);
                drop(victim);
                looks = 0;
                continue;
            }
            // Only where nothing can go: this looks at every file, which must not be once for each that goes.
            let (others, arrived) = (index.in_flight, index.arrived());
            drop(index);
            if (moved.1, moved.2) != (epoch, arrived) {
                moved = (Instant::now(), epoch, arrived);
            }
            if others > 0 && moved.0.elapsed() < STANDSTILL {
                self.budget.wait(epoch, PATIENCE);
            } else if looks < LAST_LOOKS {
                looks += 1;
                self.budget.wait(epoch, Duration::from_millis(10));
            } else {
                return Err(self.no_room(file, needed, refused));
            }
        }
    }

    /// Creates the memory, unless the system says that there is none: not every device refuses by itself.
    fn create(&self, needed: u64) -> Result<Allocation> {
        match self.memory.free() {
            Some(free) if free < needed => {
                let message = format!("only {} are free", Human(free));
                Err(Failure::new(Code::OutOfMemory, message))
            }
            _ => self.memory.allocate(needed),
        }
    }

    /// Says who is in the way.
    fn no_room(&self, file: &OpenFile, needed: u64, refused: Option<Failure>) -> Failure {
        let (path, label) = (file.path.display(), &self.info().label);
        if let Some(refused) = refused {
            let message = format!(
                "{path}: {label} has no room for {}, though the budget would allow it: {refused}; end what uses the device, or ask for less",
                Human(needed)
            );
            return Failure::new(Code::OutOfMemory, message);
        }
        if self.budget.is_out_of_pieces() {
            let message = format!(
                "{path}: as many files are held on {label} as the daemon has descriptors for; let some go, or raise its limit of open files (ulimit -n)"
            );
            return Failure::new(Code::OutOfMemory, message);
        }
        let holders = self.sessions.holders(self.number);
        let named: Vec<String> = holders
            .iter()
            .take(3)
            .map(|h| format!("process {} of user {} ({})", h.pid, h.uid, Human(h.bytes)))
            .collect();
        let held = if named.is_empty() {
            String::from("held by nobody known")
        } else {
            format!("held by {}", named.join(", "))
        };
        let message = format!(
            "{path}: no room for {} within the budget of {label}, {}: {} are in use, {held}; try again when they let go, or mount with a larger --budget",
            Human(needed),
            Human(self.budget.limit()),
            Human(self.budget.used()),
        );
        Failure::new(Code::OutOfMemory, message)
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
