//! Loads by a loader process, as the daemon has it: into memory that is new each time, and seen to be right the first time of
//! each kind. Called by `bench`.

use super::{ROUNDS, Row, Sample};
use crate::device::{Access, Allocation, Importer, Memory};
use crate::failure::{Failure, Result};
use crate::loader::parent::{ChildLoader, Settings};
use crate::loader::{Destination, Ended, Job, Loader, Part, Slab};
use crate::protocol::{Code, LOAD_PARTS};
use crate::source::OpenFile;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// No load takes longer.
const PATIENCE: Duration = Duration::from_secs(600);
/// Files of the row of small ones, and bytes of each.
const FILES: usize = 2000;
const SMALL: u64 = 110_000;
/// Loads of the smallest file.
const TINY_ROUNDS: usize = 100;

pub(super) struct Loads<'a> {
    memory: &'a Arc<dyn Memory>,
    importer: Arc<dyn Importer>,
    loader: ChildLoader,
}

impl<'a> Loads<'a> {
    pub(super) fn start(memory: &'a Arc<dyn Memory>, importer: Arc<dyn Importer>) -> Result<Loads<'a>> {
        let settings = Settings { environment: crate::loader::child::environment(), ..Settings::default() };
        Ok(Loads { memory, importer, loader: ChildLoader::new(memory.info(), settings)? })
    }

    /// Seconds until the file is on the device, with the creation of its memory.
    fn load(&self, file: &OpenFile, size: u64, check: bool) -> Result<f64> {
        let mut begun = Instant::now();
        let allocation = Arc::new(self.memory.allocate(self.memory.info().rounded(size))?);
        if check {
            // Memory that was used before may have the very bytes that are to come.
            let mapping = self.importer.map(allocation.descriptor(), allocation.size(), Access::ReadWrite)?;
            self.importer.zero(&*mapping, 0, allocation.size())?;
            begun = Instant::now();
        }
        let part = Part { file: file.clone(), offset: 0, length: size, place: 0, watch: Arc::default() };
        let ended = self.submit(Job { memory: Destination::of(&allocation), slab: None, parts: vec![part] })?;
        let seconds = begun.elapsed().as_secs_f64();
        ended.parts.into_iter().collect::<Result<Vec<_>>>()?;
        if check {
            self.check(&allocation, file, 0, size)?;
        }
        Ok(seconds)
    }

    fn submit(&self, job: Job) -> Result<Ended> {
        let (tell, told) = mpsc::channel();
        self.loader.submit(job, Box::new(move |ended| drop(tell.send(ended))));
        let late = |_| Failure::new(Code::Loader, "a load does not end");
        told.recv_timeout(PATIENCE).map_err(late)
    }

    /// Compares what lies at `place` with the file.
    fn check(&self, allocation: &Allocation, file: &OpenFile, place: u64, size: u64) -> Result<()> {
        const PIECE: u64 = 8 << 20;
        let mapping = self.importer.map(allocation.descriptor(), allocation.size(), Access::ReadOnly)?;
        let (mut there, mut here) = (vec![0; PIECE as usize], vec![0; PIECE as usize]);
        for at in (0..size).step_by(PIECE as usize) {
            let length = PIECE.min(size - at) as usize;
            self.importer.read(&*mapping, place + at, &mut there[..length])?;
            let mut done = 0;
            while done < length {
                match rustix::io::pread(file, &mut here[done..length], at + done as u64) {
                    Ok(count) if count > 0 => done += count,
                    other => {
                        let message = format!("{}: cannot be read again: {other:?}", file.path.display());
                        return Err(Failure::new(Code::Io, message));
                    }
                }
            }
            if there[..length] != here[..length] {
                let message = "bytes on the device are not the file's: please report this";
                return Err(Failure::new(Code::Io, message));
            }
        }
        Ok(())
    }

    /// Rates of a row, after a round that is checked and not counted.
    fn rates(&self, sample: &Sample, mut prepare: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
        prepare()?;
        self.load(&sample.file, sample.size, true)?;
        let one = |_| {
            prepare()?;
            Ok(sample.size as f64 / self.load(&sample.file, sample.size, false)?)
        };
        (0..ROUNDS).map(one).collect()
    }

    pub(super) fn cached(&self, sample: &Sample) -> Result<Row> {
        let rates = self.rates(sample, || sample.warm())?;
        Ok(Row::of("warpfs, from the page cache", "bytes/s", rates, String::new()))
    }

    pub(super) fn cold(&self, sample: &Sample) -> Result<Row> {
        let rates = self.rates(sample, || sample.chill(sample.size))?;
        Ok(Row::of("warpfs, from the disk", "bytes/s", rates, String::new()))
    }

    /// Half of it in the page cache, beside the time of the other half alone.
    pub(super) fn half(&self, sample: &Sample) -> Result<Vec<Row>> {
        let half = sample.size / 2;
        let (mut alone, mut both) = (Vec::new(), Vec::new());
        sample.warm()?;
        sample.chill(half)?;
        self.load(&sample.file, sample.size, true)?;
        for _ in 0..ROUNDS {
            sample.chill(sample.size)?;
            alone.push(self.load(&sample.file, half, false)?);
            sample.warm()?;
            sample.chill(half)?;
            both.push(self.load(&sample.file, sample.size, false)?);
        }
        let alone = Row::of("warpfs, a half, from the disk", "s", alone, String::new());
        let both = Row::of("warpfs, that half and one from the page cache", "s", both, String::new());
        let limit = alone.median;
        Ok(vec![alone, both.within(limit, "the half from the disk alone")])
    }

    /// Thousands of files that share memory.
    pub(super) fn small(&self, sample: &Sample) -> Result<Row> {
        let files = sample.small(FILES, SMALL)?;
        let step = SMALL.next_multiple_of(256);
        let mut rates = Vec::new();
        for round in 0..=ROUNDS {
            let begun = Instant::now();
            let mut waiting = Vec::new();
            for (number, files) in files.chunks(LOAD_PARTS).enumerate() {
                let size = self.memory.info().rounded(step * files.len() as u64);
                let allocation = Arc::new(self.memory.allocate(size)?);
                let slab = Slab { number: (round * FILES + number) as u64 + 1, keeper: Arc::new(()) };
                self.loader.open(slab.number);
                let part = |(place, file): (usize, &OpenFile)| Part {
                    file: file.clone(),
                    offset: 0,
                    length: SMALL,
                    place: step * place as u64,
                    watch: Arc::default(),
                };
                let parts = files.iter().enumerate().map(part).collect();
                let (tell, told) = mpsc::channel();
                let job = Job { memory: Destination::of(&allocation), slab: Some(slab.clone()), parts };
                self.loader.submit(job, Box::new(move |ended| drop(tell.send(ended))));
                waiting.push((slab.number, allocation, files, told));
            }
            let mut loaded = Vec::new();
            for (slab, allocation, files, told) in waiting {
                let late = |_| Failure::new(Code::Loader, "a load does not end");
                let ended = told.recv_timeout(PATIENCE).map_err(late)?;
                ended.parts.into_iter().collect::<Result<Vec<_>>>()?;
                loaded.push((slab, allocation, files));
            }
            let seconds = begun.elapsed().as_secs_f64();
            for (slab, allocation, files) in loaded {
                if round == 0 {
                    for (place, file) in files.iter().enumerate() {
                        self.check(&allocation, file, step * place as u64, SMALL)?;
                    }
                } else {
                    self.loader.forget(slab);
                }
            }
            if round > 0 {
                rates.push((FILES as u64 * SMALL) as f64 / seconds);
            }
        }
        let note = format!("{FILES} files of {SMALL} bytes, cached");
        Ok(Row::of("warpfs, small files", "bytes/s", rates, note))
    }

    /// What one load costs, whatever its size.
    pub(super) fn tiny(&self, sample: &Sample) -> Result<Row> {
        let file = sample.small(1, 4096)?.remove(0);
        self.load(&file, 4096, true)?;
        let times = (0..TINY_ROUNDS).map(|_| self.load(&file, 4096, false)).collect::<Result<Vec<f64>>>()?;
        Ok(Row::of("warpfs, 4 KiB, memory of its own", "s", times, "loader running".into()))
    }

    /// The same with the start of a loader: its process, the device's context, the ring.
    pub(super) fn start_again(&self, sample: &Sample) -> Result<Row> {
        let file = sample.small(1, 4096)?.remove(0);
        let mut times = Vec::new();
        for _ in 0..3 {
            self.loader.stop();
            let end = Instant::now() + Duration::from_secs(30);
            while self.loader.pid().is_some() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            times.push(self.load(&file, 4096, false)?);
        }
        Ok(Row::of("warpfs, 4 KiB, with the start of a loader", "s", times, String::new()))
    }
}
