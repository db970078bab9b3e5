//! The bytes of files: reads and overwrites in place, through the page cache (which holds the whole file before the
//! clock starts) or with O_DIRECT, by one or more threads with a descriptor each, of one file or of one for each; and reads
//! of mapped pages.

use crate::measure::{Noise, Plan, Site, prepared};
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

pub const READ_SIZE: u64 = 128 << 20;
/// Small, so that what an overwrite leaves dirty is soon on the disk.
const WRITE_SIZE: u64 = 64 << 20;
const FOLDER: &str = "data";
const READ_FILE: &str = "read";
const WRITE_FILE: &str = "write";
/// There are files for so many jobs that have one each; together they are as large as the one.
pub const JOBS: usize = 8;
/// What O_DIRECT wants of a buffer.
const ALIGNMENT: usize = 4096;

#[derive(Clone, Copy)]
pub struct Transfer {
    pub block: usize,
    pub jobs: usize,
    pub direct: bool,
    pub writes: bool,
    /// Each job has a file of its own.
    pub apart: bool,
}

pub fn prepare(plan: &Plan) -> io::Result<()> {
    prepared(plan, FOLDER, |folder| {
        for (name, size) in [(READ_FILE, READ_SIZE), (WRITE_FILE, WRITE_SIZE)] {
            fill(&folder.join(name), size)?;
            (0..JOBS as u64).try_for_each(|job| fill(&folder.join(part(name, job)), size / JOBS as u64))?;
        }
        Ok(())
    })
}

fn fill(path: &Path, size: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    let (mut noise, mut piece) = (Noise::new(size), vec![0; 1 << 20]);
    for _ in 0..size >> 20 {
        noise.fill(&mut piece);
        file.write_all(&piece)?;
    }
    Ok(())
}

impl Transfer {
    /// From the start of the first thread to the end of the last; opening and closing do not count.
    pub fn measure(self, site: &Site<'_>, count: usize) -> io::Result<Duration> {
        let (name, size) = if self.writes { (WRITE_FILE, WRITE_SIZE) } else { (READ_FILE, READ_SIZE) };
        let flags = if self.direct { libc::O_DIRECT } else { 0 };
        let folder = site.root.join(FOLDER);
        let (jobs, size) = (self.jobs as u64, if self.apart { size / self.jobs as u64 } else { size });
        let names = (0..jobs).map(|job| if self.apart { part(name, job) } else { name.to_string() });
        let open = |name| File::options().read(true).write(self.writes).custom_flags(flags).open(folder.join(name));
        let files = names.map(open).collect::<io::Result<Vec<File>>>()?;
        if !self.direct {
            files[..if self.apart { self.jobs } else { 1 }].iter().try_for_each(|file| warm(file, size))?;
        }
        if self.writes {
            site.sync()?;
        }
        let barrier = Barrier::new(self.jobs);
        let times = std::thread::scope(|scope| {
            let threads: Vec<_> = files
                .iter()
                .enumerate()
                .map(|(job, file)| {
                    let barrier = &barrier;
                    scope.spawn(move || self.job(file, size, job, count / self.jobs, barrier))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<io::Result<Vec<_>>>()
        })?;
        let begun = times.iter().map(|(begun, _)| *begun).min().expect("a job");
        let ended = times.iter().map(|(_, ended)| *ended).max().expect("a job");
        Ok(ended - begun)
    }

    fn job(
        self,
        file: &File,
        size: u64,
        job: usize,
        count: usize,
        barrier: &Barrier,
    ) -> io::Result<(Instant, Instant)> {
        let mut memory = vec![0; self.block + ALIGNMENT];
        let block = aligned(&mut memory, self.block);
        let mut noise = Noise::new(job as u64 + 1);
        noise.fill(block);
        let blocks = size / self.block as u64;
        let random = self.block < 1 << 20;
        barrier.wait();
        let begun = Instant::now();
        for operation in 0..count as u64 {
            let at = if random { noise.next() % blocks } else { operation % blocks } * self.block as u64;
            if self.writes {
                file.write_all_at(block, at)?;
            } else {
                file.read_exact_at(block, at)?;
            }
        }
        Ok((begun, Instant::now()))
    }
}

/// The name of one job's own file.
fn part(name: &str, job: u64) -> String {
    format!("{name}-{job}")
}

fn aligned(memory: &mut [u8], length: usize) -> &mut [u8] {
    let at = memory.as_ptr().align_offset(ALIGNMENT);
    let range: Range<usize> = at..at + length;
    &mut memory[range]
}

/// Reads the whole file through `file`, so that the page cache behind it has it.
fn warm(file: &File, size: u64) -> io::Result<()> {
    let mut piece = vec![0; 1 << 20];
    (0..size >> 20).try_for_each(|mib| file.read_exact_at(&mut piece, mib << 20))
}

/// Touches each page of the mapped file in turn, as often as it takes; a mapping and its end for each time.
pub fn touch(site: &Site<'_>, pages: usize) -> io::Result<Duration> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let file = File::open(site.root.join(FOLDER).join(READ_FILE))?;
    warm(&file, READ_SIZE)?;
    let size = READ_SIZE as usize;
    let begun = Instant::now();
    let mut sum = 0_u64;
    for _ in 0..pages / (size / ALIGNMENT) {
        // SAFETY: a new mapping at an address that the kernel chooses; the file keeps its size, so each page is there.
        let mapped = unsafe { mmap(std::ptr::null_mut(), size, ProtFlags::READ, MapFlags::SHARED, &file, 0)? };
        for page in (0..size).step_by(ALIGNMENT) {
            // SAFETY: within the mapping, which lives until the end of this turn.
            sum += u64::from(unsafe { mapped.cast::<u8>().add(page).read_volatile() });
        }
        // SAFETY: the mapping is whole, and nothing refers to it any more.
        unsafe { munmap(mapped, size)? };
    }
    let took = begun.elapsed();
    std::hint::black_box(sum);
    Ok(took)
}
