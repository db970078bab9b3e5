//! File to device: the work that a loader does. Knows files, ranges and mappings; it must know nothing of caches, sockets
//! or who asked, and must never report a load as over while a copy of it is still under way. Called by the loader child.

pub mod bounce;
pub mod buffered;
pub mod direct;
pub mod engine;
pub mod gds;
pub mod input;
pub mod load;
pub mod plan;
pub mod report;
pub mod residency;
pub mod ring;
pub mod uring;

pub use engine::{Engine, Part, Request};
pub use load::{Ended, Load};
pub use plan::Wanted;
pub use report::{Fallback, Loaded, Report, Route};

/// Bytes of a slot, and so of a chunk. Measured, page cache to one H200 with 12 readers: 52 GB/s with 4 MiB, 51 with 2,
/// 48 with 1; 8 MiB falls to 37, because the slots leave the processor's cache.
pub const SLOT_SIZE: usize = 4 << 20;

/// The least: files that share memory have to fit into a slot.
pub const LEAST_SLOT_SIZE: usize = 1 << 20;

/// Slots of a lane: one is filled while the other is copied. A third would only widen what the processor's cache has to
/// hold: with 12 readers 52.9 GB/s with two slots and 51.3 with three, on a bus of 55.4.
pub const SLOTS: usize = 2;

/// Bytes of pinned memory that a loader takes at most, unless it is set.
pub const PINNED: u64 = 256 << 20;

/// The least that can be set: one reader's slots.
pub const LEAST_PINNED: u64 = (SLOTS * LEAST_SLOT_SIZE) as u64;

/// Files smaller than this are not worth cuFile's setting up, unless it is set (KvikIO's default too).
pub const GDS_THRESHOLD: u64 = 16 << 10;

/// Readers: 12 fill the bus (52 GB/s), 4 give 27 GB/s; more than there are cores would only take turns, but below four
/// a slow disk would be asked for too little at a time.
pub fn default_readers() -> usize {
    std::thread::available_parallelism().map_or(4, usize::from).clamp(4, 12)
}

/// How an engine is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Threads, each with a lane of its own.
    pub readers: usize,
    /// Bytes.
    pub slot_size: usize,
    /// Slots of each lane.
    pub slots: usize,
    /// Reads past the page cache by io_uring, where the system has it; else each reader waits for its own.
    pub asynchronous: bool,
    pub route: Wanted,
    /// Bytes from which cuFile is tried.
    pub gds_threshold: u64,
    /// Takes what cuFile calls compatibility mode for GPUDirect Storage: for trying it where there is none.
    pub gds_compat: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            readers: default_readers(),
            slot_size: SLOT_SIZE,
            slots: SLOTS,
            asynchronous: true,
            route: Wanted::Auto,
            gds_threshold: GDS_THRESHOLD,
            gds_compat: false,
        }
    }
}

impl Options {
    /// With `readers`, or as many as are usual, and slots that together take `pinned` bytes at most (not less than
    /// [`LEAST_PINNED`]).
    pub fn sized(readers: Option<usize>, pinned: u64) -> Options {
        let usual = Options::default();
        let pinned = usize::try_from(pinned).unwrap_or(usize::MAX);
        let readers = readers.unwrap_or(usual.readers).clamp(1, (pinned / SLOTS / LEAST_SLOT_SIZE).max(1));
        let share = pinned / SLOTS / readers;
        // A power of two: chunks are cut at its multiples.
        let slot_size = (share + 1).next_power_of_two() >> 1;
        Options { readers, slot_size: slot_size.clamp(LEAST_SLOT_SIZE, SLOT_SIZE), ..usual }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_stays_within_what_may_be_pinned() {
        for mib in [2, 3, 7, 8, 47, 48, 96, 256, 10_000] {
            for readers in [None, Some(1), Some(5), Some(64), Some(1000)] {
                let options = Options::sized(readers, mib << 20);
                let pinned = (options.readers * options.slots * options.slot_size) as u64;
                assert!(pinned <= mib << 20, "{options:?} within {mib} MiB");
                assert!(options.readers >= 1 && (LEAST_SLOT_SIZE..=SLOT_SIZE).contains(&options.slot_size));
            }
        }
        assert_eq!(Options::sized(None, PINNED), Options::default());
        assert_eq!(Options::sized(Some(12), 48 << 20).slot_size, 2 << 20);
    }
}
