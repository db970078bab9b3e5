//! Every counter in one table: name, unit, stability. A counter that is not in the table does not exist.

use std::sync::atomic::{AtomicU64, Ordering};

/// Whether a name may change between releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    Stable,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
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
    BytesBuffered: "bytes_buffered", "bytes", "bytes loaded through the page cache";
    BytesDirect: "bytes_direct", "bytes", "bytes loaded with O_DIRECT";
    BytesGds: "bytes_gds", "bytes", "bytes loaded by cuFile, as its own counters say";
    LoadNanoseconds: "load_nanoseconds", "nanoseconds", "time from first read to last completed copy, summed over loads";
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
        counters.add(Counter::LoadNanoseconds, 7);
        assert_eq!(counters.all().last(), Some(("load_nanoseconds", 7)));
        assert_eq!(TABLE[Counter::Joined as usize].name, "joined");
    }
}
