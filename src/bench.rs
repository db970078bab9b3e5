//! What this machine can do, and what warpfs makes of it: the user's own disk, page cache and bus beside loads by a real loader
//! process, without a mount. A limit is measured by a simpler loop than what is judged by it. Called by `warpfs bench`.

mod limits;
mod loads;
mod sample;

use crate::device::{self, Info, Memory};
use crate::failure::Result;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

pub use sample::Sample;

/// One line of the result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: &'static str,
    /// `bytes/s`, or `s` where less is better.
    pub unit: &'static str,
    /// Nothing where it could not be measured.
    pub median: Option<f64>,
    pub best: Option<f64>,
    /// What cannot be passed, in the same unit, and what it is.
    pub limit: Option<f64>,
    pub limit_is: &'static str,
    /// Of the limit, by medians: 1 is all of it, or, of a time, as long as it.
    pub fraction: Option<f64>,
    /// How it was had, or why it was not.
    pub note: String,
}

impl Row {
    fn of(name: &'static str, unit: &'static str, mut values: Vec<f64>, note: String) -> Row {
        values.sort_by(f64::total_cmp);
        let best = if unit == "s" { values.first() } else { values.last() };
        let (median, best) = (values.get(values.len() / 2).copied(), best.copied());
        Row { name, unit, median, best, limit: None, limit_is: "", fraction: None, note }
    }

    fn absent(name: &'static str, why: &str) -> Row {
        Row::of(name, "bytes/s", Vec::new(), why.to_string())
    }

    fn within(mut self, limit: Option<f64>, limit_is: &'static str) -> Row {
        (self.limit, self.limit_is) = (limit, limit_is);
        self.fraction = self.median.zip(limit).map(|(median, limit)| median / limit);
        self
    }
}

/// Rounds of each row, after one that is not counted.
const ROUNDS: usize = 5;

/// Everything, row by row; `told` hears each as it is there. Fails where the device or `folder` cannot be used, and where
/// bytes on the device are not the file's.
pub fn run(memory: &Arc<dyn Memory>, folder: &Path, size: u64, told: &mut dyn FnMut(&Row)) -> Result<Vec<Row>> {
    let info: Info = memory.info().clone();
    let sample = Sample::write(folder, size)?;
    let mut rows: Vec<Row> = Vec::new();
    let mut add = |row: Row| -> Option<f64> {
        told(&row);
        let median = row.median;
        rows.push(row);
        median
    };
    let disk = add(limits::disk(&sample)?);
    let cache = add(limits::page_cache(&sample)?);
    let importer = device::importer(&info.uuid, info.kind)?;
    let bus = add(limits::bus(memory.as_ref(), importer.as_ref())?);
    let loads = loads::Loads::start(memory, importer)?;
    let least = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a.min(b));
    add(loads.cached(&sample)?.within(least(cache, bus), "the slower of page cache and bus"));
    if disk.is_some() {
        add(loads.cold(&sample)?.within(least(disk, bus), "the slower of disk and bus"));
        for row in loads.half(&sample)? {
            add(row);
        }
    } else {
        add(Row::absent("warpfs, from the disk", "no direct reads there: nothing comes from a disk"));
    }
    add(loads.small(&sample)?.within(least(cache, bus), "the slower of page cache and bus"));
    add(loads.tiny(&sample)?);
    add(loads.start_again(&sample)?);
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_its_median_and_a_fraction_of_its_limit() {
        let row = Row::of("r", "bytes/s", vec![4.0, 1.0, 3.0], String::new()).within(Some(6.0), "more");
        assert_eq!((row.median, row.best, row.fraction), (Some(3.0), Some(4.0), Some(0.5)));
        assert_eq!(Row::of("t", "s", vec![4.0, 1.0, 3.0], String::new()).best, Some(1.0));
        assert_eq!(Row::absent("a", "why").within(Some(1.0), "x").fraction, None);
    }
}
