//! One load, as its readers and those who wait for it see it: which work is left, which of its parts have failed, how much
//! has arrived. Its end must be told once, when nothing of it is open, mapped or under way. Called by the engine and its
//! readers.

use super::input::{Came, Input};
use super::plan::{Plan, Span, Work};
use super::report::{Loaded, Report, Tally};
use crate::device::Mapping;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// How a load went.
#[derive(Debug)]
pub struct Ended {
    /// Of each part, in their order.
    pub parts: Vec<Result<Loaded>>,
    pub report: Report,
}

/// Says how a load went, once, when nothing of it is mapped or under way.
pub type Done = Box<dyn FnOnce(Ended) + Send>;

/// Tells the descriptor of an allocation, and may wait for it.
pub type Awaited = Box<dyn FnOnce() -> Result<OwnedFd> + Send>;

/// What a load has open. Gone when `done` runs: the daemon may count on the memory then.
pub(super) struct Hold {
    /// By part.
    pub(super) inputs: Vec<Input>,
    /// Until it is mapped.
    pub(super) allocation: Mutex<Option<Awaited>>,
    /// Bytes.
    pub(super) allocation_size: u64,
    pub(super) slab: Option<u64>,
    /// Made by the first reader while the others wait for it and for nothing else; `None` inside: it could not be made,
    /// and the load has failed.
    pub(super) mapping: OnceLock<Option<Arc<dyn Mapping>>>,
}

impl Hold {
    pub(super) fn new(inputs: Vec<Input>, allocation: Awaited, allocation_size: u64, slab: Option<u64>) -> Hold {
        let allocation = Mutex::new(Some(allocation));
        Hold { inputs, allocation, allocation_size, slab, mapping: OnceLock::new() }
    }
}

/// One load.
pub struct Load {
    parts: Vec<Part>,
    plan: Plan,
    /// Number of the next work that nobody has taken.
    next: AtomicU64,
    /// Readers in the load; changed under the queue's lock only.
    readers: AtomicUsize,
    /// Written by the last reader only, so readers never wait for each other here.
    hold: RwLock<Option<Hold>>,
    /// What ends all of it; no work is begun after it.
    failure: OnceLock<Failure>,
    tally: Tally,
    started: OnceLock<Instant>,
    done: Mutex<Option<Done>>,
    /// Its pages are to be lent to the device.
    lent: AtomicBool,
    /// A reader does that.
    lending: AtomicBool,
}

struct Part {
    span: Span,
    /// No work of the part is begun after it.
    failure: OnceLock<Failure>,
    cancelled: AtomicBool,
    /// Bytes that have arrived, by route.
    came: [AtomicU64; size_of::<Came>() / size_of::<u64>()],
}

impl Load {
    pub(super) fn new(spans: Vec<Span>, plan: Plan, hold: Hold, done: Done) -> Load {
        let part = |span| Part {
            span,
            failure: OnceLock::new(),
            cancelled: AtomicBool::new(false),
            came: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        Load {
            parts: spans.into_iter().map(part).collect(),
            plan,
            next: AtomicU64::new(0),
            readers: AtomicUsize::new(0),
            hold: RwLock::new(Some(hold)),
            failure: OnceLock::new(),
            tally: Tally::default(),
            started: OnceLock::new(),
            done: Mutex::new(Some(done)),
            lent: AtomicBool::new(false),
            lending: AtomicBool::new(false),
        }
    }

    /// The same, of one part, whose pages in the page cache shall be lent to the device.
    pub(super) fn lent(self) -> Load {
        Load { lent: AtomicBool::new(true), ..self }
    }

    pub(super) fn is_lent(&self) -> bool {
        self.lent.load(Ordering::Relaxed)
    }

    /// True for the one reader that shall lend.
    pub(super) fn begin_lending(&self) -> bool {
        self.is_lent() && !self.lending.swap(true, Ordering::Relaxed)
    }

    pub(super) fn stop_lending(&self) {
        self.lent.store(false, Ordering::Relaxed);
    }

    /// The next `count` pieces of work, each of which begins where the one before ends; fewer at the end.
    pub(super) fn take_run(&self, count: u64) -> Vec<Work> {
        if self.has_failed() || !self.wants(0) {
            return Vec::new();
        }
        let first = self.next.fetch_add(count, Ordering::Relaxed);
        (first..first + count).map_while(|number| self.plan.work(number)).collect()
    }

    /// Bytes of the part that have arrived.
    pub fn loaded(&self, part: usize) -> u64 {
        self.parts[part].came.iter().map(|came| came.load(Ordering::Relaxed)).sum()
    }

    /// The part ends soon, with a failure unless it is complete.
    pub fn cancel(&self, part: usize) {
        self.parts[part].cancelled.store(true, Ordering::Relaxed);
    }

    /// Bytes of the part.
    pub(super) fn length(&self, part: usize) -> u64 {
        self.parts[part].span.length
    }

    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Ends all of it.
    pub(super) fn fail(&self, failure: Failure) {
        let _ = self.failure.set(failure);
    }

    /// Ends one part; the others go on.
    pub(super) fn fail_part(&self, part: usize, failure: Failure) {
        let _ = self.parts[part].failure.set(failure);
    }

    /// Whether the part is still to be loaded.
    pub(super) fn wants(&self, part: usize) -> bool {
        let Part { failure, cancelled, .. } = &self.parts[part];
        if cancelled.load(Ordering::Relaxed) {
            let _ = failure.set(Failure::new(Code::Stopping, "the load was cancelled"));
        }
        failure.get().is_none()
    }

    pub(super) fn arrived(&self, part: usize, came: Came) {
        for (sum, more) in self.parts[part].came.iter().zip(came) {
            sum.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// The next work, unless there is none or none is wanted any more.
    pub(super) fn take(&self) -> Option<Work> {
        while !self.has_failed() {
            let work = self.plan.work(self.next.fetch_add(1, Ordering::Relaxed))?;
            if work.chunks.iter().any(|chunk| self.wants(chunk.part)) {
                return Some(work);
            }
            if self.parts.len() == 1 {
                return None;
            }
        }
        None
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    pub(super) fn has_begun(&self) -> bool {
        self.started.get().is_some()
    }

    /// A reader comes. Under the queue's lock.
    pub(super) fn enter(&self) {
        let _ = self.started.set(Instant::now());
        self.readers.fetch_add(1, Ordering::Relaxed);
    }

    /// Readers in the load.
    pub(super) fn readers(&self) -> usize {
        self.readers.load(Ordering::Relaxed)
    }

    /// Nobody else is in the load, or nobody has come after.
    pub(super) fn is_alone(&self) -> bool {
        self.readers.load(Ordering::Relaxed) == 1
    }

    /// A reader goes; true: the last. Under the queue's lock.
    pub(super) fn leave(&self) -> bool {
        self.readers.fetch_sub(1, Ordering::Relaxed) == 1
    }

    pub(super) fn hold(&self) -> RwLockReadGuard<'_, Option<Hold>> {
        self.hold.read()
    }

    /// First byte of the content in the allocation, and the first after it.
    pub(super) fn extent(&self) -> (u64, u64) {
        let end = |part: &Part| part.span.place + part.span.length;
        (self.parts.first().map_or(0, |part| part.span.place), self.parts.last().map_or(0, end))
    }

    /// The last reader has left: unmaps and closes, and says how it went.
    pub(super) fn finish(&self) {
        let duration = self.started.get().map(Instant::elapsed).unwrap_or_default();
        *self.hold.write() = None;
        let went = |part: &Part| match part.failure.get().or(self.failure.get()) {
            Some(failure) => Err(failure.clone()),
            None => {
                let bytes = std::array::from_fn(|i| part.came[i].load(Ordering::Relaxed));
                Ok(Loaded { bytes, duration })
            }
        };
        let ended = Ended { parts: self.parts.iter().map(went).collect(), report: self.tally.report() };
        if let Some(done) = self.done.lock().take() {
            done(ended);
        }
    }
}
