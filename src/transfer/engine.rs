//! The threads that carry out loads. They take work of the first load in a queue that all of them share; a reader that
//! leaves a load has drained its ring, and the last one to leave unmaps the allocation and says how the load went. So
//! `done` must never run before the last copy is over. Called by the loader child.

use super::Options;
use super::gds::route::Straight;
use super::input::Input;
use super::load::{Awaited, Done, Hold, Load};
use super::plan::{Plan, Span, Work};
use super::residency::{self, Seen};
use super::ring::{Job, Ring};
use crate::device::{Access, Importer, Mapping};
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// So few readers copy less to the ring than one of them can bring by lending pages of the page cache to the device: on an
/// H200 one core had 30 GB/s instead of 7.7, two 30 instead of 14, four 31 instead of 20 to 26. With more it is the other
/// way round, and lenders hinder each other: there is one, and no more readers beside it than cores.
const FEW_READERS: usize = 4;
/// Bytes that are lent at a time: 4 MiB had 20 GB/s, 8 MiB 25, 16 MiB 30.
const LENT: usize = 16 << 20;

/// Bytes of files to places in an allocation. In memory of its own the rest of the allocation becomes zeros; a slab is
/// zeros when it is new.
pub struct Request {
    /// Tells the allocation, once, when it is to be mapped: until it is there, the first of the files is read.
    pub allocation: Awaited,
    /// Bytes of the allocation.
    pub allocation_size: u64,
    /// The slab's number, if more will be put into the same memory: it stays mapped until it is forgotten.
    pub slab: Option<u64>,
    /// One part of any length, or several in the order of their places, none longer than a slot.
    pub parts: Vec<Part>,
}

/// Bytes of one file.
pub struct Part {
    pub file: OwnedFd,
    /// First byte of the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Where the first byte goes in the allocation.
    pub place: u64,
}

/// A slab's mapping, once it is made.
type Kept = Mutex<Option<Arc<dyn Mapping>>>;

struct Shared {
    importer: Arc<dyn Importer>,
    slot_size: usize,
    straight: Option<Straight>,
    /// Readers of a load whose pages are lent; nothing: none are.
    crew: Option<usize>,
    queue: Mutex<Queue>,
    wake: Condvar,
    lost: AtomicBool,
    /// What stays mapped between loads, by number. A lock for each: while one is mapped, readers of others go on.
    slabs: Mutex<HashMap<u64, Arc<Kept>>>,
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
        Engine::start_with(importer, options, None)
    }

    /// The same, with cuFile for what it serves.
    pub fn start_with(importer: Arc<dyn Importer>, options: Options, straight: Option<Straight>) -> Result<Engine> {
        let Options { readers, slot_size, slots, asynchronous, .. } = options;
        if readers == 0 || slot_size == 0 || slots == 0 {
            return Err(Failure::new(Code::BadRequest, "a loader needs a reader and a slot of a byte at least"));
        }
        let cores = std::thread::available_parallelism().map_or(readers, usize::from);
        let may_lend = readers <= FEW_READERS && straight.as_ref().is_none_or(|straight| !straight.only());
        let shared = Arc::new(Shared {
            importer,
            slot_size,
            straight,
            crew: may_lend.then_some(cores.min(readers)),
            queue: Mutex::default(),
            wake: Condvar::new(),
            lost: AtomicBool::new(false),
            slabs: Mutex::default(),
        });
        let mut engine = Engine { shared, readers: Vec::new() };
        let (said, heard) = mpsc::channel();
        for number in 0..readers {
            let (shared, said) = (Arc::clone(&engine.shared), said.clone());
            let body = move || match shared.importer.lane(slots, slot_size) {
                Ok(lane) => {
                    let ring = Ring::new(lane, slots, slot_size, asynchronous);
                    let _ = said.send(Ok(()));
                    drop(said);
                    shared.read(ring);
                }
                Err(failure) => drop(said.send(Err(failure))),
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
        let Request { allocation, allocation_size, slab, parts } = request;
        let span = |part: &Part| Span { offset: part.offset, length: part.length, place: part.place };
        let spans: Vec<Span> = parts.iter().map(span).collect();
        let lies = |span: &Span| span.place.checked_add(span.length).is_some_and(|end| end <= allocation_size);
        let fits = !spans.is_empty() && spans.iter().all(lies);
        let plan = Plan::new(spans.clone(), self.shared.slot_size)
            .filter(|_| fits)
            .ok_or_else(|| Failure::new(Code::BadRequest, "the range does not lie in the allocation"))?;
        let seen = match &parts[..] {
            // Of what is read in one go nothing follows from it.
            [part] if part.length > self.shared.slot_size as u64 => {
                residency::look(part.file.as_fd(), part.offset, part.length)
            }
            _ => None,
        };
        let plan = if seen == Some(Seen::Some) { plan.by_turns() } else { plan };
        let lent = self.shared.crew.is_some() && seen == Some(Seen::All) && parts[0].length >= 2 * LENT as u64;
        let inputs = parts.into_iter().map(|part| Input::new(part.file)).collect();
        let hold = Hold::new(inputs, allocation, allocation_size, slab);
        let load = Load::new(spans, plan, hold, done);
        let load = Arc::new(if lent { load.lent() } else { load });
        self.shared.queue.lock().loads.push_back(Arc::clone(&load));
        self.shared.wake.notify_all();
        Ok(load)
    }

    /// Unmaps a slab. Nothing may be under way or come into it after.
    pub fn forget(&self, slab: u64) {
        let mapping = self.shared.slabs.lock().remove(&slab);
        drop(mapping);
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
    fn read(&self, mut ring: Ring) {
        while let Some((load, first)) = self.join() {
            if let Err(failure) = self.work(&load, first, &mut ring) {
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
                load.finish();
            }
        }
    }

    /// Waits for work: a load with, if it is not empty, its next work. `None`: the reader shall end.
    fn join(&self) -> Option<(Arc<Load>, Option<Work>)> {
        let mut queue = self.queue.lock();
        loop {
            if self.lost.load(Ordering::Acquire) {
                return None;
            }
            let has_room = |load: &Arc<Load>| !load.is_lent() || self.crew.is_some_and(|crew| load.readers() < crew);
            if let Some(place) = queue.loads.iter().position(has_room) {
                let load = Arc::clone(&queue.loads[place]);
                let work = load.take();
                // A load without work, or one that failed before it began, still needs somebody to end it.
                if work.is_none() {
                    queue.loads.remove(place);
                    if load.has_begun() {
                        continue;
                    }
                }
                load.enter();
                return Some((load, work));
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
        load.leave()
    }

    /// Takes work until there is none. Nothing of the load is under way when this returns.
    fn work(&self, load: &Load, first: Option<Work>, ring: &mut Ring) -> Result<()> {
        if load.has_failed() {
            return Ok(());
        }
        let hold = load.hold();
        let Some(hold) = &*hold else {
            return Ok(()); // over already
        };
        let mapping = || hold.mapping.get_or_init(|| self.prepare(load, hold)).as_deref();
        // One maps while the others read their first; where reads go straight into the mapping, all wait for it.
        if (load.is_alone() || ring.is_bare()) && mapping().is_none() {
            return Ok(()); // it could not be mapped, and whoever tried said so
        }
        let (inputs, straight) = (&hold.inputs, self.straight.as_ref());
        let job = Job { load, inputs, mapping: &mapping, straight };
        let passed = first.map_or(Ok(()), |work| ring.pass(job, &work)).and_then(|()| self.lend(job, ring));
        let passed =
            passed.and_then(|()| std::iter::from_fn(|| load.take()).try_for_each(|work| ring.pass(job, &work)));
        // Others must not begin more of a failed load while this reader drains.
        if let Err(failure) = &passed {
            load.fail(failure.clone());
        }
        passed.and(ring.drain(job))
    }

    /// The lender's part of a load; nothing for other readers. Where the system or the driver refuses, the load goes on with
    /// all readers.
    fn lend(&self, job: Job<'_>, ring: &mut Ring) -> Result<()> {
        if !job.load.begin_lending() {
            return Ok(());
        }
        loop {
            let run = job.load.take_run((LENT / self.slot_size).max(1) as u64);
            if run.is_empty() {
                return Ok(());
            }
            if !ring.lend(job, &run)? {
                job.load.stop_lending();
                // Under the lock, or a reader that is about to wait would miss it.
                let queue = self.queue.lock();
                drop(queue);
                self.wake.notify_all();
                return run.iter().try_for_each(|work| ring.pass(job, work));
            }
        }
    }

    /// Maps the allocation, and zeroes what the content leaves; once a load, or once a slab.
    fn prepare(&self, load: &Load, hold: &Hold) -> Option<Arc<dyn Mapping>> {
        self.mapped(load, hold).map_err(|failure| load.fail(failure)).ok()
    }

    fn mapped(&self, load: &Load, hold: &Hold) -> Result<Arc<dyn Mapping>> {
        let size = hold.allocation_size;
        let map = || {
            let allocation = hold.allocation.lock().take();
            let gone = || Failure::new(Code::Device, "the memory could not be mapped before");
            self.importer.map(allocation.ok_or_else(gone)?()?.as_fd(), size, Access::ReadWrite)
        };
        let Some(slab) = hold.slab else {
            let mapping = map()?;
            let (begin, end) = load.extent();
            self.importer.zero(&*mapping, 0, begin)?;
            self.importer.zero(&*mapping, end, size - end)?;
            return Ok(mapping.into());
        };
        let place = Arc::clone(self.slabs.lock().entry(slab).or_default());
        let mut place = place.lock();
        if let Some(mapping) = &*place {
            return Ok(Arc::clone(mapping));
        }
        let mapping: Arc<dyn Mapping> = map()?.into();
        self.importer.clear(&*mapping)?;
        *place = Some(Arc::clone(&mapping));
        Ok(mapping)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Lane;
    use std::os::fd::BorrowedFd;
    use std::sync::atomic::AtomicUsize;
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
        let engine = Engine::start(importer, Options { readers: 4, slot_size: 4096, slots: 2, ..Options::default() })
            .expect("started");
        let file = tempfile::tempfile().expect("a file");
        file.set_len(32 * 4096).expect("long enough");
        let allocation = file.try_clone().expect("a descriptor");
        let part = Part { file: file.into(), offset: 0, length: 32 * 4096, place: 0 };
        let request = Request {
            allocation: Box::new(|| Ok(allocation.into())),
            allocation_size: 32 * 4096,
            slab: None,
            parts: vec![part],
        };
        let (send, receive) = mpsc::channel();
        engine.submit(request, Box::new(move |ended| send.send(ended).expect("heard"))).expect("queued");
        let ended = receive.recv_timeout(Duration::from_secs(30)).expect("in time");
        ended.parts[0].as_ref().expect("loaded");
        assert_eq!(most.load(Ordering::SeqCst), 4, "copies at a time");
    }
}
