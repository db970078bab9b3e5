//! The thread that gives a device's loads to its loader, in the order in which they were asked for: it makes room, creates
//! the memory, hands both over, and decides what becomes of the result. Never on a FUSE worker.

use super::copy::{Block, Key};
use super::placement;
use super::shelf::{Shelf, copy_of};
use crate::failure::{Failure, Result};
use crate::loader::{Job, Loaded, Watch};
use crate::metrics::Counter;
use crate::protocol::Code;
use crate::size::Human;
use crate::source::OpenFile;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Loads that the loader may have at once. Each costs two descriptors; more would not fill the bus better.
const IN_FLIGHT: usize = 64;

/// How often a file is loaded again because it changed meanwhile.
pub(super) const ATTEMPTS: u32 = 3;

/// How long the dispatcher sleeps at most before it looks again whether there is room.
const PATIENCE: Duration = Duration::from_millis(200);

/// Looks for room that is about to be free (a copy that was given up while somebody looked at it) this often.
const LAST_LOOKS: u32 = 5;

pub(super) fn start(shelf: &Arc<Shelf>) -> std::io::Result<std::thread::JoinHandle<()>> {
    let shelf = Arc::clone(shelf);
    std::thread::Builder::new().name(format!("loads-{}", shelf.number)).spawn(move || shelf.dispatch())
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
            let Some(load) = index.load(&key, number) else { continue };
            let (file, size, watch) = (load.file.clone(), load.version.size, Arc::clone(&load.watch));
            drop(index);
            let lead = placement::lead(&file, size);
            match self.make_room(&file, lead + size, &watch) {
                Err(failure) => self.fail(&key, number, failure),
                Ok(block) => self.hand_over(key, number, file, size, lead, block, watch),
            }
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
        self.index.lock().in_flight += 1;
        let allocation = Arc::clone(&block.allocation);
        let job = Job { file: file.clone(), allocation, offset: 0, length: size, lead, watch };
        let shelf = Arc::clone(self);
        self.loader.submit(
            job,
            Box::new(move |result| {
                shelf.ended(key, number, &file, lead, block, result);
                shelf.index.lock().in_flight -= 1;
                shelf.work.notify_one();
                shelf.budget.poke();
            }),
        );
    }

    /// A load came back from the loader.
    fn ended(&self, key: Key, number: u64, file: &OpenFile, lead: u64, block: Arc<Block>, result: Result<Loaded>) {
        // What the file is now decides, whatever the loader says.
        let now = file.version();
        let mut index = self.index.lock();
        let Some(load) = index.load(&key, number) else { return };
        let changed = load.stale
            || now.as_ref().is_ok_and(|now| *now != load.version)
            || result.as_ref().is_err_and(|failure| failure.code == Code::Changing);
        if changed && load.attempt < ATTEMPTS && now.is_ok() {
            let Ok(version) = now else { unreachable!("checked above") };
            load.attempt += 1;
            load.stale = false;
            load.version = version;
            load.watch.loaded.store(0, Ordering::Relaxed);
            let fits = self.fits(file, version.size);
            let emptied = (version.size == 0).then(|| copy_of(key, load, None, 0));
            if emptied.is_none() && fits.is_ok() {
                index.queue.push_back((key, number));
            }
            drop(index);
            drop(block);
            self.counters.add(Counter::LoadRetries, 1);
            match (emptied, fits) {
                (Some(copy), _) => drop(self.publish(copy, number)),
                (None, Err(failure)) => self.fail(&key, number, failure),
                (None, Ok(())) => drop(self.work.notify_one()),
            }
            return;
        }
        let copy = copy_of(key, load, Some(Arc::clone(&block)), lead);
        drop(index);
        let verdict = if changed {
            let path = file.path.display();
            let message =
                format!("{path}: changed {ATTEMPTS} times while it was loaded; try again when its writer is done");
            Err(Failure::new(Code::Changing, message))
        } else {
            now.and(result).and_then(|loaded| self.memory.seal(&block.allocation).map(|()| loaded))
        };
        match verdict {
            Ok(loaded) => {
                self.counters.add(Counter::BytesBuffered, loaded.buffered);
                self.counters.add(Counter::BytesDirect, loaded.direct);
                self.counters.add(Counter::BytesGds, loaded.gds);
                self.counters.add(Counter::LoadNanoseconds, loaded.duration.as_nanos() as u64);
                self.publish(copy, number);
            }
            Err(failure) => {
                // The memory goes before anyone hears of the failure, so that who tries again finds it free.
                drop(copy);
                drop(block);
                self.fail(&key, number, failure);
            }
        }
    }

    /// Memory for `bytes` of `file`, inside the budget. Gives up what nobody holds, waits for loads in progress, and
    /// fails only where the rest is held.
    fn make_room(&self, file: &OpenFile, bytes: u64, watch: &Watch) -> Result<Arc<Block>> {
        let needed = self.info().rounded(bytes);
        self.fits(file, bytes)?;
        let mut looks = 0;
        loop {
            if watch.cancelled.load(Ordering::Acquire) || self.index.lock().stopping {
                return Err(Failure::new(Code::Stopping, format!("{}: the load was cancelled", file.path.display())));
            }
            let epoch = self.budget.epoch();
            let refused = match self.budget.reserve(needed) {
                None => None,
                Some(charge) => match self.memory.allocate(needed) {
                    Ok(allocation) => return Ok(Block::new(self.number, allocation, charge)),
                    Err(failure) if failure.code == Code::OutOfMemory => Some(failure),
                    Err(failure) => return Err(failure.within(file.path.display())),
                },
            };
            let mut index = self.index.lock();
            let victim = index.take_victim();
            let others = index.in_flight;
            drop(index);
            if victim.is_some() {
                self.counters.add(Counter::Evictions, 1);
                drop(victim);
                looks = 0;
            } else if others > 0 || looks < LAST_LOOKS {
                looks += 1;
                self.budget.wait(epoch, if others > 0 { PATIENCE } else { Duration::from_millis(10) });
            } else {
                return Err(self.no_room(file, needed, refused));
            }
        }
    }

    /// Says who is in the way.
    fn no_room(&self, file: &OpenFile, needed: u64, refused: Option<Failure>) -> Failure {
        let (path, label) = (file.path.display(), &self.info().label);
        if let Some(refused) = refused {
            let free = self.memory.free().map_or(String::new(), |free| format!(" ({} are free)", Human(free)));
            let message = format!(
                "{path}: {label} has no room for {}{free}, though the budget would allow it: {refused}; end what uses the device, or ask for less",
                Human(needed)
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

    /// Fails every load and ends the loader. Copies stay until the shelf goes.
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
