//! Which files go by cuFile, and what becomes of those that cannot. It is tried where it can be worth it, believed only what
//! its counters show, and left for good, file by file, at the first trouble; asked for by name, trouble is the file's
//! failure. Called by `ring`, once a chunk.

use super::{File, Gds, Scratch, Way};
use crate::device::{Importer, Mapping};
use crate::failure::{Failure, Result};
use crate::protocol::{Code, DeviceUuid};
use crate::transfer::input::{Came, Input};
use crate::transfer::plan::{Chunk, Wanted};
use crate::transfer::report::{Fallback, Route, Tally};
use crate::transfer::{Options, residency};
use parking_lot::Mutex;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Told what is found out about cuFile, in words: when it is about to be opened, and what came of that.
pub type Note = Box<dyn Fn(&str) + Send + Sync>;

/// The first words of a note from which on a crash of the process may be cuFile's.
pub const OPENING: &str = "opening cuFile";

/// cuFile, as far as it is wanted and there.
pub struct Straight {
    wanted: Wanted,
    threshold: u64,
    compat: bool,
    importer: Arc<dyn Importer>,
    device: DeviceUuid,
    /// Opened for the first file that may go this way, on a thread that has a context.
    gds: OnceLock<Result<Arc<Gds>>>,
    note: Note,
}

/// What is known of one file.
#[derive(Default)]
pub struct Standing {
    file: OnceLock<Result<File>>,
    /// Which way its first read went. Other readers of the file wait for it.
    way: Mutex<Option<Way>>,
    off: AtomicBool,
}

impl Standing {
    /// Never again for this file; true for whoever is the first to say so.
    fn leave(&self) -> bool {
        !self.off.swap(true, Ordering::Relaxed)
    }
}

impl Straight {
    pub fn new(options: &Options, importer: Arc<dyn Importer>, device: DeviceUuid, note: Note) -> Straight {
        let Options { route, gds_threshold, gds_compat, .. } = *options;
        let gds = OnceLock::new();
        Straight { wanted: route, threshold: gds_threshold, compat: gds_compat, importer, device, gds, note }
    }

    /// Nothing but cuFile will do.
    pub fn only(&self) -> bool {
        self.wanted == Wanted::Gds
    }

    fn gds(&self) -> &Result<Arc<Gds>> {
        self.gds.get_or_init(|| {
            (self.note)(OPENING);
            let opened = Gds::open(Arc::clone(&self.importer), self.device, self.compat);
            match &opened {
                Ok(gds) => (self.note)(&format!("{OPENING}: {} is open", gds.describe())),
                Err(failure) => (self.note)(&failure.message),
            }
            opened.map(Arc::new)
        })
    }

    /// Brings the chunk, if this is its way; `size`: bytes of the file that are wanted in all. Nothing: it is not, or not any
    /// more. Fails where the file cannot be had this way and no other will do, or at all.
    pub fn bring(
        &self,
        input: &Input,
        chunk: Chunk,
        size: u64,
        mapping: &dyn Mapping,
        scratch: &mut Scratch,
        tally: &Tally,
    ) -> Result<Option<Came>> {
        let (file, standing) = (input.as_fd(), &input.gds);
        if !self.only() && (standing.off.load(Ordering::Relaxed) || !self.worth(file, chunk, size)) {
            return Ok(None);
        }
        let gds = match self.gds() {
            Ok(gds) => gds,
            Err(failure) => return self.trouble(standing, failure, None, tally),
        };
        let source = match standing.file.get_or_init(|| gds.file(file)) {
            Ok(source) => source,
            Err(failure) => return self.trouble(standing, failure, Some(Fallback::GdsRefused), tally),
        };
        let begun = Instant::now();
        let read = self.read(source, standing, chunk, mapping, scratch);
        let way = match read {
            Ok(Some(way)) => way,
            Ok(None) => return Ok(None), // somebody else has just found out
            Err(failure) if failure.code == Code::Changing => return Err(failure),
            Err(failure) => {
                tally.error(Route::Gds);
                return self.trouble(standing, &failure, Some(Fallback::GdsFailed), tally);
            }
        };
        // The bytes are there, whichever way they came.
        let route = if way == Way::Straight { Route::Gds } else { Route::Cufile };
        if !self.believes(way) {
            let why = match way {
                Way::Untold => "this libcufile is too old (before 1.15) to tell which way it reads",
                _ => "cuFile's own counters show that it reads the file through the processor's memory",
            };
            let failure = Failure::new(Code::Unsupported, why);
            if self.only() {
                return Err(self.refusal(&failure));
            }
            let _ = self.trouble(standing, &failure, Some(Fallback::GdsUnproven), tally);
        }
        tally.read(route, chunk.length as u64, begun.elapsed());
        let mut came = Came::default();
        came[route as usize] = chunk.length as u64;
        Ok(Some(came))
    }

    /// Whether a file that goes this way is to go on.
    fn believes(&self, way: Way) -> bool {
        match way {
            Way::Straight => true,
            Way::Around => self.compat,
            Way::Untold => self.compat || self.only(),
        }
    }

    /// Large enough, and not in the page cache.
    fn worth(&self, file: BorrowedFd<'_>, chunk: Chunk, size: u64) -> bool {
        let cold = |cached: u64| cached * 2 < chunk.length as u64;
        size >= self.threshold && residency::cached(file, chunk.file, chunk.length).is_some_and(cold)
    }

    fn read(
        &self,
        source: &File,
        standing: &Standing,
        chunk: Chunk,
        mapping: &dyn Mapping,
        scratch: &mut Scratch,
    ) -> Result<Option<Way>> {
        let mut known = standing.way.lock();
        if let Some(way) = *known {
            drop(known);
            if !self.believes(way) && !self.only() {
                return Ok(None);
            }
            return source.fetch(chunk, mapping, scratch).map(|()| Some(way));
        }
        let way = source.prove(chunk, mapping, scratch)?;
        *known = Some(way);
        Ok(Some(way))
    }

    /// The file goes another way from here on, once with its reason; or it fails.
    fn trouble(
        &self,
        standing: &Standing,
        failure: &Failure,
        reason: Option<Fallback>,
        tally: &Tally,
    ) -> Result<Option<Came>> {
        if self.only() {
            return Err(self.refusal(failure));
        }
        if standing.leave()
            && let Some(reason) = reason
        {
            tally.fallback(reason);
            (self.note)(&failure.message);
        }
        Ok(None)
    }

    fn refusal(&self, failure: &Failure) -> Failure {
        let message = format!("--route gds: {failure}; mount with --route auto, or, to try cuFile, with --gds-compat");
        Failure { message, ..failure.clone() }
    }
}
