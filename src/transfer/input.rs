//! The file of one part of a load, as its readers read it: each chunk by the route that serves it, and through the page
//! cache what no other route has brought. A chunk is whole or its part fails; by which route its bytes came is counted, never
//! assumed. Called by `ring`.

use super::buffered::{self, Target};
use super::direct::Direct;
use super::gds::route::Standing;
use super::plan::{self, Chunk};
use super::report::{Fallback, Route, Tally};
use super::residency;
use crate::failure::Result;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A file that is being loaded.
pub struct Input {
    file: OwnedFd,
    /// Made by the first reader that wants it; `None` inside: the file cannot be read so.
    direct: OnceLock<Option<Direct>>,
    /// What cuFile makes of it.
    pub(super) gds: Standing,
    /// It has refused a direct read that it was to take: it would refuse the next too.
    refuses: AtomicBool,
}

/// Bytes that came, by route in the order of [`Route::ALL`].
pub type Came = [u64; Route::ALL.len()];

/// A read past the page cache that is worth a try.
pub struct Attempt<'a> {
    pub direct: &'a Direct,
    /// Bytes of the chunk, from its beginning.
    pub whole: usize,
}

impl Input {
    pub fn new(file: OwnedFd) -> Input {
        Input { file, direct: OnceLock::new(), gds: Standing::default(), refuses: AtomicBool::new(false) }
    }

    /// What of the chunk shall be read past the page cache.
    pub fn attempt(&self, chunk: Chunk, target: Target, tally: &Tally) -> Option<Attempt<'_>> {
        if self.refuses.load(Ordering::Relaxed) {
            return None;
        }
        let cached = residency::cached(self.file.as_fd(), chunk.file, chunk.length);
        if plan::choose(cached, chunk.length as u64, true).route != Route::Direct {
            return None;
        }
        let direct = self.direct.get_or_init(|| {
            let direct = Direct::open(self.file.as_fd());
            if direct.is_none() {
                tally.fallback(Fallback::DirectUnsupported);
            }
            direct
        });
        let direct = direct.as_ref()?;
        let whole = direct.alignment().whole(chunk.file, chunk.length, target);
        (whole > 0).then_some(Attempt { direct, whole })
    }

    /// Fills the beginning of `target` with `chunk`, through the page cache.
    pub fn read(&self, chunk: Chunk, target: Target, tally: &Tally) -> Result<Came> {
        self.rest(chunk, 0, target, tally)
    }

    /// The same by an attempt that was made for this target, beyond the chunk's length in which may be written too.
    pub fn read_past(&self, attempt: &Attempt<'_>, chunk: Chunk, target: Target, tally: &Tally) -> Result<Came> {
        let begun = Instant::now();
        let result = attempt.direct.read(chunk.file, attempt.whole, target);
        self.complete(chunk, attempt.whole, result, begun.elapsed(), target, tally)
    }

    /// What an attempt to read `whole` bytes of the chunk came to, and the rest of it through the page cache. An error is
    /// none of the load's: if it stays, reading through the page cache says it.
    pub fn complete(
        &self,
        chunk: Chunk,
        whole: usize,
        result: rustix::io::Result<usize>,
        time: Duration,
        target: Target,
        tally: &Tally,
    ) -> Result<Came> {
        let done = match result {
            Ok(count) => count.min(whole),
            Err(errno) => {
                tally.error(Route::Direct);
                // A bad block is of this chunk; "not like that" is of the file.
                if errno != Errno::IO {
                    self.refuses.store(true, Ordering::Relaxed);
                }
                0
            }
        };
        if done > 0 {
            tally.read(Route::Direct, done as u64, time);
        }
        if done < whole {
            tally.fallback(Fallback::DirectRefused);
        }
        self.rest(chunk, done, target, tally)
    }

    /// What is left of the chunk after `done` bytes past the page cache.
    fn rest(&self, chunk: Chunk, done: usize, target: Target, tally: &Tally) -> Result<Came> {
        let left = chunk.length - done;
        if left > 0 {
            let begun = Instant::now();
            buffered::read(self.file.as_fd(), chunk.file + done as u64, target.part(done, left))
                .inspect_err(|_| tally.error(Route::Buffered))?;
            tally.read(Route::Buffered, left as u64, begun.elapsed());
        }
        let mut came = Came::default();
        came[Route::Direct as usize] = done as u64;
        came[Route::Buffered as usize] = left as u64;
        Ok(came)
    }
}

impl AsFd for Input {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
