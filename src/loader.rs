//! The child process that does a device's work, and the daemon's end of its socket. The child is this same binary,
//! exec'd: it imports the allocations it is given, owns the context and the pinned ring, and may die at any time. Its
//! death fails its loads and nothing else; the next load starts a new one. The cache knows only the trait here.

pub mod child;
mod minder;
mod packet;
pub mod parent;
mod process;

use crate::device::Allocation;
use crate::failure::Result;
use crate::source::OpenFile;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// One piece of work: bytes of a file to a place in an allocation.
pub struct Job {
    pub file: OpenFile,
    pub allocation: Arc<Allocation>,
    /// First byte of the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Where the first byte goes in the allocation; the bytes before and after the content are zeroed.
    pub lead: u64,
    pub watch: Arc<Watch>,
}

/// What others see and say while a job runs.
#[derive(Default)]
pub struct Watch {
    /// Bytes that have arrived.
    pub loaded: AtomicU64,
    /// Set, the job ends soon with a failure, unless it is done already.
    pub cancelled: AtomicBool,
}

/// How a job went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Bytes by route.
    pub buffered: u64,
    pub direct: u64,
    pub gds: u64,
    /// From the first read to the last completed copy.
    pub duration: std::time::Duration,
}

/// Something that can carry out jobs for one device.
pub trait Loader: Send + Sync {
    /// Starts `job` and returns at once; `done` is called exactly once, from a thread of the loader's, when the
    /// allocation is no longer touched. May block for as long as it takes to start a child.
    fn submit(&self, job: Job, done: Box<dyn FnOnce(Result<Loaded>) + Send>);

    /// Ends the child after its present work. A later job starts a new one.
    fn stop(&self);
}
