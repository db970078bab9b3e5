//! The child process that does a device's work, and the daemon's end of its socket. The child is this same binary,
//! exec'd: it imports the allocations it is given, owns the context and the pinned ring, and may die at any time. Its
//! death fails its loads and nothing else; the next load starts a new one. The cache knows only the trait here.

pub mod child;
mod destination;
mod minder;
mod packet;
pub mod parent;
mod process;

use crate::failure::Failure;
use crate::source::OpenFile;
pub use crate::transfer::{Ended, Loaded, Report};
pub use destination::{Destination, Promise};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Files to be brought into one allocation.
pub struct Job {
    pub memory: Destination,
    /// Where more will be put into the same memory: what stays as it is between jobs. Without it the memory belongs to
    /// this job's parts, and what they leave of it is zeroed.
    pub slab: Option<Slab>,
    /// One of any length, or up to [`crate::protocol::LOAD_PARTS`] short ones in the order of their places.
    pub parts: Vec<Part>,
}

/// Bytes of one file, and their place.
pub struct Part {
    pub file: OpenFile,
    /// First byte of the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Where the first byte goes in the allocation.
    pub place: u64,
    pub watch: Arc<Watch>,
}

/// Memory that is written to more than once.
#[derive(Clone)]
pub struct Slab {
    /// Not 0.
    pub number: u64,
    /// Kept for as long as the loader may have the memory mapped, and dropped after.
    pub keeper: Arc<dyn Any + Send + Sync>,
}

/// What others see and say while a part is on its way.
#[derive(Default)]
pub struct Watch {
    /// Bytes that have arrived.
    pub loaded: AtomicU64,
    /// Set, the part ends soon with a failure, unless it is done already.
    pub cancelled: AtomicBool,
}

/// Told how a job went, once, when the allocation is no longer touched for it.
pub type Done = Box<dyn FnOnce(Ended) + Send>;

impl Job {
    /// The end of a job of which nothing came.
    fn failed(&self, failure: &Failure) -> Ended {
        Ended { parts: self.parts.iter().map(|_| Err(failure.clone())).collect(), report: Report::default() }
    }
}

/// Something that can carry out jobs for one device.
pub trait Loader: Send + Sync {
    /// Starts `job` and returns at once; `done` is called from a thread of the loader's. May block for as long as it takes to
    /// start a child. A job for a slab that the loader does not have fails with `Loader`.
    fn submit(&self, job: Job, done: Done);

    /// Jobs for a new slab will come.
    fn open(&self, slab: u64);

    /// Whether more can be put into a slab: the process that has it mapped still runs.
    fn has(&self, slab: u64) -> bool;

    /// Nothing more comes into a slab.
    fn forget(&self, slab: u64);

    /// What was found out about cuFile, for people; nothing where it was not tried.
    fn note(&self) -> Option<String> {
        None
    }

    /// Ends the child after its present work. A later job starts a new one.
    fn stop(&self);
}
