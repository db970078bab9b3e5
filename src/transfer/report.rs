//! What a load did, in numbers: by which route its bytes came, how long that took, and what made it leave a route. A byte is
//! counted under the route that brought it, never under the one that was wished for. Filled by the engine's readers, told
//! to the daemon with the load's end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How bytes reach the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// `pread` through the page cache, then a copy from pinned memory.
    Buffered,
    /// A read past the page cache (O_DIRECT), then a copy from pinned memory.
    Direct,
    /// cuFile, which its own counters saw to go straight from the disk to the device.
    Gds,
    /// cuFile, not seen to go straight: its compatibility mode, or a version that does not tell.
    Cufile,
}

impl Route {
    pub const ALL: [Route; 4] = [Route::Buffered, Route::Direct, Route::Gds, Route::Cufile];

    /// The word that statistics use.
    pub fn word(self) -> &'static str {
        match self {
            Route::Buffered => "buffered",
            Route::Direct => "direct",
            Route::Gds => "gds",
            Route::Cufile => "cufile_unverified",
        }
    }
}

macro_rules! fallbacks {
    ($($variant:ident: $word:literal, $help:literal;)*) => {
        /// Why bytes went another way than the one that was to bring them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Fallback { $(#[doc = $help] $variant),* }

        impl Fallback {
            pub const ALL: &[Fallback] = &[$(Fallback::$variant),*];

            /// The name that statistics use.
            pub fn word(self) -> &'static str {
                match self { $(Fallback::$variant => $word),* }
            }
        }
    };
}

fallbacks! {
    DirectUnsupported: "direct_unsupported", "the file system does not read past the page cache (files)";
    DirectRefused: "direct_refused", "a read past the page cache was refused or came short (chunks)";
    GdsRefused: "gds_refused", "cuFile does not take the file, or its file system (files)";
    GdsUnproven: "gds_unproven", "cuFile's counters do not show a direct path for the file (files)";
    GdsFailed: "gds_failed", "cuFile failed in the middle of a file (files)";
}

/// What one route did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Reads.
    pub operations: u64,
    pub bytes: u64,
    /// Spent in reads, summed over those that ran at the same time.
    pub busy: Duration,
    /// Reads that failed, whatever was done about it.
    pub errors: u64,
}

/// What one load, or several, did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// In the order of [`Route::ALL`].
    pub routes: [Work; Route::ALL.len()],
    /// In the order of [`Fallback::ALL`].
    pub fallbacks: [u64; Fallback::ALL.len()],
}

impl Report {
    pub fn route(&self, route: Route) -> &Work {
        &self.routes[route as usize]
    }
}

/// A report that several threads fill.
#[derive(Debug, Default)]
pub struct Tally {
    routes: [Counts; Route::ALL.len()],
    fallbacks: [AtomicU64; Fallback::ALL.len()],
}

#[derive(Debug, Default)]
struct Counts {
    operations: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
    errors: AtomicU64,
}

impl Tally {
    /// One read of `bytes` took `time`.
    pub fn read(&self, route: Route, bytes: u64, time: Duration) {
        let counts = &self.routes[route as usize];
        counts.operations.fetch_add(1, Ordering::Relaxed);
        counts.bytes.fetch_add(bytes, Ordering::Relaxed);
        counts.nanoseconds.fetch_add(nanoseconds(time), Ordering::Relaxed);
    }

    /// One read failed.
    pub fn error(&self, route: Route) {
        self.routes[route as usize].errors.fetch_add(1, Ordering::Relaxed);
    }

    pub fn fallback(&self, reason: Fallback) {
        self.fallbacks[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Adds what others did.
    pub fn add(&self, report: &Report) {
        for (counts, work) in self.routes.iter().zip(&report.routes) {
            counts.operations.fetch_add(work.operations, Ordering::Relaxed);
            counts.bytes.fetch_add(work.bytes, Ordering::Relaxed);
            counts.nanoseconds.fetch_add(nanoseconds(work.busy), Ordering::Relaxed);
            counts.errors.fetch_add(work.errors, Ordering::Relaxed);
        }
        for (count, more) in self.fallbacks.iter().zip(report.fallbacks) {
            count.fetch_add(more, Ordering::Relaxed);
        }
    }

    pub fn report(&self) -> Report {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Report {
            routes: std::array::from_fn(|i| Work {
                operations: load(&self.routes[i].operations),
                bytes: load(&self.routes[i].bytes),
                busy: Duration::from_nanos(load(&self.routes[i].nanoseconds)),
                errors: load(&self.routes[i].errors),
            }),
            fallbacks: std::array::from_fn(|i| load(&self.fallbacks[i])),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// How one part of a load arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Bytes by route, in the order of [`Route::ALL`].
    pub bytes: [u64; Route::ALL.len()],
    /// From the first read of the load to the last completed copy.
    pub duration: Duration,
}

impl Loaded {
    /// The route that brought the most.
    pub fn route(&self) -> Route {
        Route::ALL.into_iter().rev().max_by_key(|route| self.bytes[*route as usize]).unwrap_or(Route::Buffered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_reported_under_its_route() {
        let (tally, sum) = (Tally::default(), Tally::default());
        tally.read(Route::Direct, 7, Duration::from_nanos(3));
        tally.error(Route::Gds);
        tally.fallback(Fallback::DirectRefused);
        sum.add(&tally.report());
        sum.add(&tally.report());
        let report = sum.report();
        let direct = Work { operations: 2, bytes: 14, busy: Duration::from_nanos(6), errors: 0 };
        assert_eq!(*report.route(Route::Direct), direct);
        assert_eq!(*report.route(Route::Gds), Work { errors: 2, ..Work::default() });
        assert_eq!(report.fallbacks[Fallback::DirectRefused as usize], 2);
        assert_eq!(report.fallbacks.iter().sum::<u64>(), 2);
    }

    #[test]
    fn a_file_is_of_the_route_that_brought_the_most() {
        let loaded = |bytes| Loaded { bytes, ..Loaded::default() };
        assert_eq!(loaded([1, 2, 0, 0]).route(), Route::Direct);
        assert_eq!(loaded([2, 2, 0, 0]).route(), Route::Buffered);
        assert_eq!(loaded([0, 0, 0, 0]).route(), Route::Buffered);
    }
}
