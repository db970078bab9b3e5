//! The threads that carry out loads. They take chunks of the first load in a queue that all of them share; a reader that
//! leaves a load has drained its ring, and the last one to leave unmaps the allocation and says how the load went. So
//! `done` must never run before the last copy is over. Called by the loader child.

use super::Options;
use super::buffered::{self, Target};
use super::plan::{self, Chunk, Plan, Route};
use super::ring::Ring;
use crate::device::{Access, Importer, Mapping};
use crate::failure::{Failure, Result};
use crate::loader::Loaded;
use crate::protocol::Code;
use parking_lot::{Condvar, Mutex, RwLock};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

/// Bytes of a file to a place in an allocation; the rest of the allocation becomes zeros.
pub struct Request {
    pub file: OwnedFd,
    pub allocation: OwnedFd,
    /// Bytes of the allocation.
    pub allocation_size: u64,
    /// Where the first byte goes.
    pub lead: u64,
    /// First byte of the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Says how a load went, once, when nothing of it is mapped or under way.
pub type Done = Box<dyn FnOnce(Result<Loaded>) + Send>;

/// What a load has open. Gone when `done` runs: the daemon may count on the memory then.
struct Hold {
    file: OwnedFd,
    allocation: OwnedFd,
    /// Made by the first reader while the others wait for it and for nothing else; `None` inside: it could not be made,
    /// and the load has failed.
    mapping: OnceLock<Option<Box<dyn Mapping>>>,
}

/// One load, as others watch it.
pub struct Load {
    /// Bytes.
    allocation_size: u64,
    lead: u64,
    length: u64,
    plan: Plan,
    /// Number of the next chunk that nobody has taken.
    next: AtomicU64,
    /// Readers in the load; changed under the queue's lock only.
    readers: AtomicUsize,
    /// Written by the last reader only, so readers never wait for each other here.
    hold: RwLock<Option<Hold>>,
    /// The first failure; no chunk is begun after it.
    failure: OnceLock<Failure>,
    cancelled: AtomicBool,
    loaded: AtomicU64,
    started: OnceLock<Instant>,
    done: Mutex<Option<Done>>,
}

impl Load {
    /// Bytes that have arrived.
    pub fn loaded(&self) -> u64 {
        self.loaded.load(Ordering::Relaxed)
    }

    /// The load ends soon, with a failure unless it is complete.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    fn fail(&self, failure: Failure) {
        let _ = self.failure.set(failure);
    }

    /// The next chunk, unless there is none or none is wanted any more.
    fn take(&self) -> Option<Chunk> {
        if self.cancelled.load(Ordering::Relaxed) {
            self.fail(Failure::new(Code::Stopping, "the load was cancelled"));
        }
        if self.failure.get().is_some() {
            return None;
        }
        self.plan.chunk(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

struct Shared {
    importer: Arc<dyn Importer>,
    slot_size: usize,
    queue: Mutex<Queue>,
    wake: Condvar,
    lost: AtomicBool,
}

#[derive(Default)]
struct Queue {
    loads: VecDeque<Arc<Load>>,
    stopping: bool,
}

/// The readers and their queue.
pub struct Engine {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
}

impl Engine {
    /// Starts the readers, each with its lane. Fails where a lane cannot be had.
    pub fn start(importer: Arc<dyn Importer>, options: Options) -> Result<Engine> {
        let Options { readers, slot_size, slots } = options;
        if readers == 0 || slot_size == 0 || slots == 0 {
            return Err(Failure::new(Code::BadRequest, "a loader needs a reader and a slot of a byte at least"));
        }
        let shared = Arc::new(Shared {
            importer,
            slot_size,
            queue: Mutex::default(),
            wake: Condvar::new(),
            lost: AtomicBool::new(false),
        });
        let mut engine = Engine { shared, readers: Vec::new() };
        let (said, heard) = mpsc::channel();
        for number in 0..readers {
            let (shared, said) = (Arc::clone(&engine.shared), said.clone());
            let body = move || {
                let ring = shared.importer.lane(slots, slot_size).map(|lane| lane.map(|lane| Ring::new(lane, slots)));
                match ring {
                    Ok(ring) => {
                        let _ = said.send(Ok(()));
                        drop(said);
                        shared.read(ring);
                    }
                    Err(failure) => drop(said.send(Err(failure))),
                }
            };
            let reader = std::thread::Builder::new()
                .name(format!("reader {number}"))
                .spawn(body)
                .map_err(|e| Failure::system("cannot start a reader", e))?;
            engine.readers.push(reader);
        }
        drop(said);
        heard.iter().collect::<Result<Vec<()>>>()?;
        Ok(engine)
    }

    /// Queues a load. `done` is called once, from a reader, unless the device is lost before the load begins.
    pub fn submit(&self, request: Request, done: Done) -> Result<Arc<Load>> {
        let end = request.lead.checked_add(request.length);
        let plan = Plan::new(request.offset, request.length, request.lead, self.shared.slot_size)
            .filter(|_| end.is_some_and(|end| end <= request.allocation_size))
            .ok_or_else(|| Failure::new(Code::BadRequest, "the range does not lie in the allocation"))?;
        let load = Arc::new(Load {
            allocation_size: request.allocation_size,
            lead: request.lead,
            length: request.length,
            plan,
            next: AtomicU64::new(0),
            readers: AtomicUsize::new(0),
            hold: RwLock::new(Some(Hold {
                file: request.file,
                allocation: request.allocation,
                mapping: OnceLock::new(),
            })),
            failure: OnceLock::new(),
            cancelled: AtomicBool::new(false),
            loaded: AtomicU64::new(0),
            started: OnceLock::new(),
            done: Mutex::new(Some(done)),
        });
        self.shared.queue.lock().loads.push_back(Arc::clone(&load));
        self.shared.wake.notify_all();
        Ok(load)
    }

    /// Whether the device is lost to this process. Loads that have begun still say how they went; the others say nothing.
    pub fn is_lost(&self) -> bool {
        self.shared.lost.load(Ordering::Acquire)
    }

    /// Returns when every load that was queued is over, or, where the device is lost, every load that had begun.
    pub fn finish(&mut self) {
        self.shared.queue.lock().stopping = true;
        self.shared.wake.notify_all();
        for reader in self.readers.drain(..) {
            // A reader that panicked has said so; its load never ends, and the daemon sees this process end without it.
            let _ = reader.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Shared {
    /// A reader's life.
    fn read(&self, mut ring: Option<Ring>) {
        while let Some((load, first)) = self.join() {
            if let Err(failure) = self.work(&load, first, ring.as_mut()) {
                load.fail(failure);
            }
            if self.importer.lost() {
                // Under the lock, or a reader that is about to wait would miss it.
                let queue = self.queue.lock();
                self.lost.store(true, Ordering::Release);
                drop(queue);
                self.wake.notify_all();
            }
            if self.leave(&load) {
                finish(&load);
            }
        }
    }

    /// Waits for work: a load with, if it is not empty, its next chunk. `None`: the reader shall end.
    fn join(&self) -> Option<(Arc<Load>, Option<Chunk>)> {
        let mut queue = self.queue.lock();
        loop {
            if self.lost.load(Ordering::Acquire) {
                return None;
            }
            if let Some(load) = queue.loads.front().cloned() {
                let chunk = load.take();
                // A load without chunks, or one that failed before it began, still needs somebody to end it.
                let begun = load.started.get().is_some();
                if chunk.is_none() {
                    queue.loads.pop_front();
                    if begun {
                        continue;
                    }
                }
                let _ = load.started.set(Instant::now());
                load.readers.fetch_add(1, Ordering::Relaxed);
                return Some((load, chunk));
            }
            if queue.stopping {
                return None;
            }
            self.wake.wait(&mut queue);
        }
    }

    /// Leaves the load, of which nothing is left to take. True: nobody else is in it, nor will be.
    fn leave(&self, load: &Arc<Load>) -> bool {
        let mut queue = self.queue.lock();
        queue.loads.retain(|l| !Arc::ptr_eq(l, load));
        load.readers.fetch_sub(1, Ordering::Relaxed) == 1
    }

    /// Takes chunks until there are none. Nothing of the load is under way when this returns.
    fn work(&self, load: &Load, first: Option<Chunk>, ring: Option<&mut Ring>) -> Result<()> {
        if load.failure.get().is_some() {
            return Ok(());
        }
        let hold = load.hold.read();
        let Some(Hold { file, allocation, mapping }) = &*hold else {
            return Ok(()); // over already
        };
        let Some(mapping) = mapping.get_or_init(|| self.prepare(load, allocation)) else {
            return Ok(()); // it could not be mapped, and whoever tried said so
        };
        let (file, mapping) = (file.as_fd(), &**mapping);
        let mut chunks = first.into_iter().chain(std::iter::from_fn(|| load.take()));
        let mut arrived = |bytes: usize| {
            load.loaded.fetch_add(bytes as u64, Ordering::Relaxed);
        };
        match plan::choose().route {
            Route::Buffered => match (mapping.host(), ring) {
                (None, Some(ring)) => {
                    let passed = chunks.try_for_each(|chunk| ring.pass(file, chunk, mapping, &mut arrived));
                    // Others must not begin more of a failed load while this reader drains.
                    if let Err(failure) = &passed {
                        load.fail(failure.clone());
                    }
                    passed.and(ring.drain(&mut arrived))
                }
                (Some(start), _) => chunks.try_for_each(|chunk| {
                    store(file, start, mapping.size(), chunk)?;
                    arrived(chunk.length);
                    Ok(())
                }),
                (None, None) => Err(Failure::new(Code::Device, "the device has neither a lane nor a host address")),
            },
        }
    }

    /// Maps the allocation and zeroes what lies around the content; once a load.
    fn prepare(&self, load: &Load, allocation: &OwnedFd) -> Option<Box<dyn Mapping>> {
        let (size, end) = (load.allocation_size, load.lead + load.length);
        let zeroed = self.importer.map(allocation.as_fd(), size, Access::ReadWrite).and_then(|mapping| {
            self.importer.zero(&*mapping, 0, load.lead)?;
            self.importer.zero(&*mapping, end, size - end)?;
            Ok(mapping)
        });
        zeroed.map_err(|failure| load.fail(failure)).ok()
    }
}

/// Reads a chunk straight into memory that the processor can store into.
fn store(file: BorrowedFd<'_>, start: *mut u8, size: u64, chunk: Chunk) -> Result<()> {
    let end = chunk.device + chunk.length as u64;
    assert!(end <= size, "a chunk lies in the allocation");
    // SAFETY: the chunk lies in the mapping, which the caller keeps borrowed while the read runs. Nobody else is given
    // this part of it.
    let target = unsafe { Target::new(start.add(chunk.device as usize), chunk.length) };
    buffered::read(file, chunk.file, target)
}

/// The last reader has left: unmaps and closes, and says how it went.
fn finish(load: &Load) {
    let duration = load.started.get().map(Instant::elapsed).unwrap_or_default();
    *load.hold.write() = None;
    let result = match load.failure.get() {
        Some(failure) => Err(failure.clone()),
        None => Ok(Loaded { buffered: load.loaded(), duration, ..Loaded::default() }),
    };
    if let Some(done) = load.done.lock().take() {
        done(result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Lane;
    use std::os::fd::BorrowedFd;
    use std::time::Duration;

    /// A device whose copies take a while, and which counts how many run at a time.
    #[derive(Default)]
    struct Slow {
        now: Arc<AtomicUsize>,
        most: Arc<AtomicUsize>,
    }

    struct SlowMapping(u64);

    // SAFETY: nobody uses the address: the double of an importer touches no memory.
    unsafe impl Mapping for SlowMapping {
        fn address(&self) -> u64 {
            0
        }
        fn size(&self) -> u64 {
            self.0
        }
        fn host(&self) -> Option<*mut u8> {
            None
        }
    }

    struct SlowLane {
        slots: Vec<Vec<u8>>,
        now: Arc<AtomicUsize>,
        most: Arc<AtomicUsize>,
    }

    impl Lane for SlowLane {
        fn slot(&mut self, slot: usize) -> &mut [u8] {
            &mut self.slots[slot]
        }
        fn copy(&mut self, _: usize, _: usize, _: &dyn Mapping, _: u64) -> Result<()> {
            self.most.fetch_max(self.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(30));
            self.now.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        }
        fn wait(&mut self, _: usize) -> Result<()> {
            Ok(())
        }
    }

    impl Importer for Slow {
        fn map(&self, _: BorrowedFd<'_>, size: u64, _: Access) -> Result<Box<dyn Mapping>> {
            Ok(Box::new(SlowMapping(size)))
        }
        fn read(&self, _: &dyn Mapping, _: u64, _: &mut [u8]) -> Result<()> {
            Ok(())
        }
        fn zero(&self, _: &dyn Mapping, _: u64, _: u64) -> Result<()> {
            Ok(())
        }
        fn lane(&self, slots: usize, slot_size: usize) -> Result<Option<Box<dyn Lane>>> {
            let slots = vec![vec![0; slot_size]; slots];
            Ok(Some(Box::new(SlowLane { slots, now: Arc::clone(&self.now), most: Arc::clone(&self.most) })))
        }
    }

    #[test]
    fn the_readers_of_one_load_work_at_the_same_time() {
        // Seen on a GPU: a lock held over the work let one reader through at a time, at 7 GB/s instead of 50.
        let importer = Arc::new(Slow::default());
        let most = Arc::clone(&importer.most);
        let engine = Engine::start(importer, Options { readers: 4, slot_size: 4096, slots: 2 }).expect("started");
        let file = tempfile::tempfile().expect("a file");
        file.set_len(32 * 4096).expect("long enough");
        let allocation = file.try_clone().expect("a descriptor");
        let request = Request {
            file: file.into(),
            allocation: allocation.into(),
            allocation_size: 32 * 4096,
            lead: 0,
            offset: 0,
            length: 32 * 4096,
        };
        let (send, receive) = mpsc::channel();
        engine.submit(request, Box::new(move |result| send.send(result).expect("heard"))).expect("queued");
        receive.recv_timeout(Duration::from_secs(30)).expect("in time").expect("loaded");
        assert_eq!(most.load(Ordering::SeqCst), 4, "copies at a time");
    }
}
