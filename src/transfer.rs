//! File to device: the work that a loader does. Knows files, ranges and mappings; it must know nothing of caches, sockets
//! or who asked, and must never report a load as over while a copy of it is still under way. Called by the loader child.

pub mod buffered;
pub mod direct;
pub mod engine;
pub mod input;
pub mod load;
pub mod plan;
pub mod report;
pub mod residency;
pub mod ring;
pub mod uring;

pub use engine::{Engine, Part, Request};
pub use load::{Ended, Load};
pub use report::{Fallback, Loaded, Report, Route};

/// Bytes of a slot, and so of a chunk. Measured, page cache to one H200 with 12 readers: 52 GB/s with 4 MiB, 51 with 2,
/// 48 with 1; 8 MiB falls to 37, because the slots leave the processor's cache.
pub const SLOT_SIZE: usize = 4 << 20;

/// Slots of a lane: one is filled, one is copied, one is ready in between (what the measurements above were made with).
pub const SLOTS: usize = 3;

/// Readers: 12 fill the bus (52 GB/s), 4 give 27 GB/s; more than there are cores would only take turns, but below four
/// a slow disk would be asked for too little at a time.
pub fn default_readers() -> usize {
    std::thread::available_parallelism().map_or(4, usize::from).clamp(4, 12)
}

/// How an engine is built.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads, each with a lane of its own.
    pub readers: usize,
    /// Bytes.
    pub slot_size: usize,
    /// Slots of each lane.
    pub slots: usize,
    /// Reads past the page cache by io_uring, where the system has it; else each reader waits for its own.
    pub asynchronous: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { readers: default_readers(), slot_size: SLOT_SIZE, slots: SLOTS, asynchronous: true }
    }
}
