//! Every counter in one table: name, unit, stability. A counter that is not in the table does not exist.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Whether a name may change between releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    Stable,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    /// What one of it is.
    pub unit: &'static str,
    pub stability: Stability,
    pub help: &'static str,
}

macro_rules! counters {
    ($($variant:ident: $name:literal, $unit:literal, $help:literal;)*) => {
        /// What is counted, for each device.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Counter { $(#[doc = $help] $variant),* }

        /// The table, in the order of [`Counter`].
        pub const TABLE: &[Row] = &[
            $(Row { name: $name, unit: $unit, stability: Stability::Stable, help: $help }),*
        ];
    };
}

counters! {
    Hits: "hits", "requests", "requests answered from a resident, current copy";
    Misses: "misses", "requests", "requests that started a load";
    Joined: "joined", "requests", "requests that joined a load in progress";
    Loads: "loads", "files", "loads that were published";
    LoadFailures: "load_failures", "files", "loads that failed";
    LoadRetries: "load_retries", "files", "loads repeated because the file changed meanwhile";
    Evictions: "evictions", "files", "copies given up to make room";
    EvictionsAsked: "evictions_asked", "files", "copies given up because somebody asked for it";
    Superseded: "superseded", "files", "copies given up because the file changed";
    Lapsed: "holds_lapsed", "holds", "holds whose allocation was not fetched in time";
}

/// How long things took: how many were over within each bound, and the sum.
#[derive(Debug, Default)]
pub struct Histogram {
    /// Not summed up; the last is what took longer than every bound.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

/// Upper bounds of a histogram, in microseconds: from a small file out of the page cache to a large one from a slow disk.
pub const BOUNDS: [u64; 18] = [
    100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000,
    5_000_000, 10_000_000, 20_000_000, 50_000_000,
];

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let bucket = BOUNDS.partition_point(|bound| u128::from(*bound) < time.as_micros());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// How many were over within each of [`BOUNDS`], and how many there were in all.
    pub fn within(&self) -> [u64; BOUNDS.len() + 1] {
        let mut sum = 0;
        std::array::from_fn(|bucket| {
            sum += self.buckets[bucket].load(Ordering::Relaxed);
            sum
        })
    }

    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed))
    }
}

/// The counters of one device.
#[derive(Debug)]
pub struct Counters([AtomicU64; TABLE.len()]);

impl Default for Counters {
    fn default() -> Counters {
        Counters(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Counters {
    pub fn add(&self, counter: Counter, amount: u64) {
        self.0[counter as usize].fetch_add(amount, Ordering::Relaxed);
    }

    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Ordering::Relaxed)
    }

    /// Name and value of each, in the table's order.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
        TABLE.iter().zip(&self.0).map(|(row, value)| (row.name, value.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_its_row() {
        let counters = Counters::default();
        counters.add(Counter::Lapsed, 7);
        assert_eq!(counters.all().last(), Some(("holds_lapsed", 7)));
        assert_eq!(TABLE[Counter::Joined as usize].name, "joined");
    }

    #[test]
    fn a_time_is_within_its_bound_and_all_that_are_longer() {
        let histogram = Histogram::default();
        for micros in [100, 101, 60_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        let within = histogram.within();
        assert_eq!((within[0], within[1], within[17], within[18]), (1, 2, 2, 3));
        assert_eq!(histogram.sum(), Duration::from_micros(60_000_201));
    }
}
