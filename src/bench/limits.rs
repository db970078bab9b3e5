//! What nothing that loads a file can pass: plain threads, plain reads, plain copies. Called by `bench`.

use super::{ROUNDS, Row, Sample};
use crate::device::{Access, Importer, Memory};
use crate::failure::{Failure, Result};
use crate::transfer::buffered::Target;
use crate::transfer::direct::Direct;
use crate::transfer::{SLOT_SIZE, SLOTS, bounce::Bounce, default_readers};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long one way of reading is looked at.
const A_WHILE: Duration = Duration::from_millis(700);

/// Reads pieces of the file, one after the other, with so many threads, until it or `time` is over; bytes a second.
fn read(file: BorrowedFd<'_>, size: u64, piece: usize, threads: usize, time: Duration) -> Result<f64> {
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let failure = OnceLock::new();
    let memory = (0..threads).map(|_| Bounce::new(piece)).collect::<Result<Vec<_>>>()?;
    memory.iter().for_each(|memory| memory.target().clear());
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for memory in &memory {
            let (next, done, failure) = (&next, &done, &failure);
            let target = Place(memory.target());
            scope.spawn(move || {
                let target = target;
                while begun.elapsed() < time {
                    let at = next.fetch_add(piece as u64, Ordering::Relaxed);
                    if at + piece as u64 > size {
                        return;
                    }
                    match target.0.pread(file, at) {
                        Ok(count) => done.fetch_add(count as u64, Ordering::Relaxed),
                        Err(e) => {
                            let _ = failure.set(Failure::system("cannot read the file that is measured", e));
                            return;
                        }
                    };
                }
            });
        }
    });
    match failure.into_inner() {
        Some(failure) => Err(failure),
        None => Ok(done.into_inner() as f64 / begun.elapsed().as_secs_f64()),
    }
}

/// A target that one thread takes along.
#[derive(Clone, Copy)]
struct Place(Target);

// SAFETY: each is used by the one thread that it was given to, while its memory lives.
unsafe impl Send for Place {}

/// The best rate of direct reads, of several sizes and depths.
pub(super) fn disk(sample: &Sample) -> Result<Row> {
    const NAME: &str = "disk, direct reads";
    let Some(direct) = Direct::open(sample.file.as_fd()).filter(|_| sample.is_on_a_disk()) else {
        return Ok(Row::absent(NAME, "the file system has no direct reads"));
    };
    if let Err(why) = sample.chill(sample.size) {
        return Ok(Row::absent(NAME, &why.message));
    }
    let mut best = (0.0, String::new());
    for piece in [1 << 20, 4 << 20] {
        for threads in [1, 4, 16, 36] {
            sample.chill(sample.size)?;
            let rate = read(direct.as_fd(), sample.size, piece, threads, A_WHILE)?;
            if rate > best.0 {
                best = (rate, format!("{threads} at a time, of {} MiB", piece >> 20));
            }
        }
    }
    let (rate, how) = best;
    Ok(Row::of(NAME, "bytes/s", vec![rate], how))
}

/// The best rate of reads of the cached file into memory that is there already.
pub(super) fn page_cache(sample: &Sample) -> Result<Row> {
    sample.warm()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut best = (Vec::new(), 0);
    let mut most = 0.0;
    for threads in [1, cores.div_ceil(2), cores] {
        let rates = (0..3).map(|_| read(sample.file.as_fd(), sample.size, 1 << 20, threads, A_WHILE));
        let rates = rates.collect::<Result<Vec<f64>>>()?;
        let fastest = rates.iter().copied().fold(0.0, f64::max);
        if fastest > most {
            most = fastest;
            best = (rates, threads);
        }
    }
    let (rates, threads) = best;
    Ok(Row::of("page cache, plain reads", "bytes/s", rates, format!("{threads} threads")))
}

/// From pinned memory to the device, with nothing to read; for the host device, from memory to memory.
pub(super) fn bus(memory: &dyn Memory, importer: &dyn Importer) -> Result<Row> {
    const BYTES: u64 = 512 << 20;
    let allocation = memory.allocate(memory.info().rounded(BYTES))?;
    let mapping = importer.map(allocation.descriptor(), allocation.size(), Access::ReadWrite)?;
    let Some(mut lane) = importer.lane(SLOTS, SLOT_SIZE)? else {
        return copies(BYTES, mapping.host());
    };
    let mut rates = Vec::new();
    for _ in 0..=ROUNDS {
        let begun = Instant::now();
        for (number, at) in (0..BYTES).step_by(SLOT_SIZE).enumerate() {
            let slot = number % SLOTS;
            lane.wait(slot)?;
            lane.copy(slot, SLOT_SIZE, &*mapping, at)?;
        }
        (0..SLOTS).try_for_each(|slot| lane.wait(slot))?;
        rates.push(BYTES as f64 / begun.elapsed().as_secs_f64());
    }
    rates.remove(0);
    Ok(Row::of("bus, pinned memory to the device", "bytes/s", rates, format!("copies of {} MiB", SLOT_SIZE >> 20)))
}

/// Copies into the memory of the host device, by as many threads as would load: into pages that nobody has touched the
/// first time, which is what a load meets.
fn copies(bytes: u64, start: Option<*mut u8>) -> Result<Row> {
    let start = start.ok_or_else(|| Failure::new(crate::protocol::Code::Device, "the host's memory has no address"))?;
    let threads = default_readers().min(std::thread::available_parallelism().map_or(1, usize::from));
    let share = bytes as usize / threads / SLOT_SIZE * SLOT_SIZE;
    let source = Bounce::new(SLOT_SIZE)?;
    source.target().clear();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for number in 0..threads {
            // SAFETY: each thread has a share of its own of the mapping, which outlives the scope.
            let into = Place(unsafe { Target::new(start.add(number * share), share) });
            let from = Place(source.target());
            scope.spawn(move || {
                let (into, from) = (into, from);
                for at in (0..share).step_by(SLOT_SIZE) {
                    into.0.part(at, SLOT_SIZE).copy(from.0, SLOT_SIZE);
                }
            });
        }
    });
    let rate = (share * threads) as f64 / begun.elapsed().as_secs_f64();
    Ok(Row::of("bus, memory to fresh host memory", "bytes/s", vec![rate], format!("{threads} threads")))
}
