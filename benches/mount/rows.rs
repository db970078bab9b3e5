//! The table of rows: what is measured, in which order, and in which unit.

use crate::measure::{Plan, Site};
use crate::transfer::Transfer;
use crate::{names, transfer, trees};
use std::io;
use std::time::Duration;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unit {
    /// So many bytes an operation.
    Bytes(u64),
    Operations,
    /// The whole thing once.
    Whole,
}

impl Unit {
    pub fn word(self) -> &'static str {
        match self {
            Unit::Bytes(_) => "bytes",
            Unit::Operations => "operations",
            Unit::Whole => "whole",
        }
    }

    pub fn bytes(self) -> u64 {
        if let Unit::Bytes(bytes) = self { bytes } else { 0 }
    }

    pub fn from_word(word: &str, bytes: u64) -> Option<Unit> {
        [Unit::Bytes(bytes), Unit::Operations, Unit::Whole].into_iter().find(|unit| unit.word() == word)
    }
}

/// Makes what a row needs, natively, once.
pub type Prepare = fn(&Plan) -> io::Result<()>;
/// Repeats the operation so many times, and says how long each of its parts took.
pub type Measure = Box<dyn Fn(&Site<'_>, usize) -> io::Result<Vec<Duration>>>;

pub struct Row {
    /// A name for each part.
    pub names: &'static [&'static str],
    pub unit: Unit,
    /// The count is a multiple of this.
    pub step: usize,
    /// Whether the operation can be repeated within one measurement.
    pub repeats: bool,
    pub for_ordinary_user: bool,
    pub prepare: Prepare,
    pub measure: Measure,
}

/// All rows, in the order of the tables.
pub fn all() -> Vec<Row> {
    let mut rows = Vec::new();
    let many = transfer::JOBS;
    for (names, block, jobs, direct, writes, apart) in [
        (&["read 1 MiB"], MIB, 1, false, false, false),
        (&["read 1 MiB, O_DIRECT"], MIB, 1, true, false, false),
        (&["write 1 MiB"], MIB, 1, false, true, false),
        (&["write 1 MiB, O_DIRECT"], MIB, 1, true, true, false),
        (&["random read 4 KiB, 1 job"], PAGE, 1, false, false, false),
        (&["random read 4 KiB, 8 jobs"], PAGE, many, false, false, false),
        (&["random read 4 KiB, 8 jobs, a file each"], PAGE, many, false, false, true),
        (&["random read 4 KiB, 1 job, O_DIRECT"], PAGE, 1, true, false, false),
        (&["random read 4 KiB, 8 jobs, O_DIRECT"], PAGE, many, true, false, false),
        (&["random write 4 KiB, 1 job"], PAGE, 1, false, true, false),
        (&["random write 4 KiB, 8 jobs"], PAGE, many, false, true, false),
        (&["random write 4 KiB, 8 jobs, a file each"], PAGE, many, false, true, true),
        (&["random write 4 KiB, 1 job, O_DIRECT"], PAGE, 1, true, true, false),
        (&["random write 4 KiB, 8 jobs, O_DIRECT"], PAGE, many, true, true, false),
        (&["random write 4 KiB, 8 jobs, O_DIRECT, a file each"], PAGE, many, true, true, true),
    ] {
        let transfer = Transfer { block, jobs, direct, writes, apart };
        rows.push(Row {
            names,
            unit: if block == PAGE { Unit::Operations } else { Unit::Bytes(block as u64) },
            step: 8,
            repeats: true,
            for_ordinary_user: writes,
            prepare: transfer::prepare,
            measure: whole(move |site, count| transfer.measure(site, count)),
        });
    }
    let mut row = |names, unit, step, repeats, prepare: Prepare, measure: Measure| {
        rows.push(Row { names, unit, step, repeats, for_ordinary_user: false, prepare, measure });
    };
    use Unit::{Operations, Whole};
    let pages = transfer::READ_SIZE as usize / PAGE;
    row(&["mmap read"], Unit::Bytes(PAGE as u64), pages, true, transfer::prepare, whole(transfer::touch));
    row(&["open, read 4 KiB, close"], Operations, 500, true, names::prepare_small, whole(names::open_read_close));
    row(&["stat, known to the kernel"], Operations, 1000, true, names::prepare_small, whole(names::stat_known));
    row(&["stat, cold"], Operations, 10_000, false, names::prepare_large, whole(names::stat_cold));
    for (names, cold, stats, prepare) in [
        (&["list 100,000 names, cold"] as &[&str], true, false, names::prepare_large as Prepare),
        (&["list 100,000 names, again"] as &[&str], false, false, names::prepare_large),
        (&["list and stat 20,000, cold"] as &[&str], true, true, names::prepare_medium),
        (&["list and stat 20,000, again"] as &[&str], false, true, names::prepare_medium),
    ] {
        let list = names::List { cold, stats };
        row(names, Whole, 1, !cold, prepare, whole(move |site, count| list.measure(site, count)));
    }
    row(&["create and unlink"], Operations, 100, true, names::prepare_scratch, whole(names::create_unlink));
    row(&["mkdir and rmdir"], Operations, 100, true, names::prepare_scratch, whole(names::mkdir_rmdir));
    row(&["rename"], Operations, 500, true, names::prepare_scratch, whole(names::rename));
    let unpacked = &["untar 2,000 files", "rm -r 2,000 files"];
    row(unpacked, Whole, 1, false, trees::prepare_tar, Box::new(trees::untar_and_remove));
    row(&["git status, 5,000 files, cold"], Whole, 1, false, trees::prepare_git, whole(trees::git_status_cold));
    row(&["git status, 5,000 files, again"], Whole, 1, false, trees::prepare_git, whole(trees::git_status_again));
    rows
}

/// An operation of one part.
fn whole(measure: impl Fn(&Site<'_>, usize) -> io::Result<Duration> + 'static) -> Measure {
    Box::new(move |site, count| Ok(vec![measure(site, count)?]))
}
