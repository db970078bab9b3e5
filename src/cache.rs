//! What is resident, for whom, until when. The one small interface through which the filesystem and the channel ask for
//! files in device memory; they never call each other. Everything is per device: one budget, one index, one loader.
//! Nothing here knows FUSE or CUDA: the memory and the loader are traits, so the cache is tested without either.

mod ask;
mod budget;
mod copy;
mod dispatch;
mod explain;
mod hold;
mod index;
mod openmetrics;
mod placement;
mod policy;
mod room;
mod settle;
mod shelf;
mod slab;
mod stats;
#[cfg(test)]
mod tests;
mod timer;
mod together;

use crate::device::{Info, Memory};
use crate::failure::{Failure, Result};
use crate::loader::Loader;
use crate::protocol::{Code, DeviceUuid, NONE, Secret, State};
use crate::source::{Caller, Domain, FileId, OpenFile};
use crate::transfer::Options;
pub use copy::Hold;
use hold::Sessions;
use shelf::Shelf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use timer::Timer;

/// A client's session, numbered by the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// A request that a file be in device memory.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The file, opened for reading with the caller's rights.
    pub file: OpenFile,
    /// [`crate::protocol::NONE`]: the default device.
    pub device: DeviceUuid,
    /// First byte and number of bytes; 0 bytes: to the end of the file.
    pub offset: u64,
    pub length: u64,
    pub caller: Caller,
    /// The session that shall hold the copy.
    pub session: Option<SessionId>,
    /// How long the answer may take; then it is [`Outcome::Loading`]. [`Duration::MAX`]: as long as the load.
    pub wait: Duration,
}

/// The answer to an [`Ask`] that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Resident(Placement),
    /// Still on its way.
    Loading {
        loaded: u64,
        total: u64,
    },
}

/// Where a copy lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// 0: an empty file, nothing to map.
    pub allocation: u64,
    pub allocation_size: u64,
    /// Where the first byte of the file lies in the allocation.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    pub generation: u64,
}

/// Where a file stands on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    pub state: State,
    /// Bytes of the file now.
    pub size: u64,
    pub loaded: u64,
    pub generation: u64,
    /// Sessions that hold the copy.
    pub holders: u32,
    /// Why the last load failed, where nothing is resident or loading.
    pub failure: Option<Failure>,
}

/// What an eviction did, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Free now. Small files share memory, which is free with the last of them.
    pub freed: u64,
    /// Given up, but held: free when its holders let go.
    pub held: u64,
}

/// Told the answer exactly once, from any thread.
pub type Answer = Box<dyn FnOnce(Result<Outcome>) + Send>;

/// What one device is made of.
pub struct Setup {
    pub memory: Arc<dyn Memory>,
    pub loader: Arc<dyn Loader>,
    /// The budget, in bytes.
    pub limit: u64,
    /// Allocations that may be live at once: each takes a descriptor.
    pub pieces: u64,
    /// What the loader was told.
    pub transfer: Options,
}

/// The cache of one daemon.
pub struct Cache {
    devices: Vec<Info>,
    shelves: Vec<Arc<Shelf>>,
    sessions: Arc<Sessions>,
    started: Instant,
}

/// Files that the statistics name at most, per device.
const FILES_NAMED: usize = 1000;

impl Cache {
    /// A cache over `devices`, the default first; at least one. Fails where no thread can be started.
    pub fn start(devices: Vec<Setup>) -> std::io::Result<Cache> {
        let sessions = Arc::new(Sessions::default());
        let timer = Arc::new(Timer::start()?);
        let mut shelves = Vec::new();
        for (number, device) in devices.into_iter().enumerate() {
            let (sessions, timer) = (Arc::clone(&sessions), Arc::clone(&timer));
            let shelf = Shelf::new(number, device, sessions, timer);
            dispatch::start(&shelf)?;
            shelves.push(shelf);
        }
        let devices = shelves.iter().map(|shelf| shelf.info().clone()).collect();
        Ok(Cache { devices, shelves, sessions, started: Instant::now() })
    }

    /// The devices, the default first.
    pub fn devices(&self) -> &[Info] {
        &self.devices
    }

    fn shelf(&self, device: DeviceUuid) -> Result<&Arc<Shelf>> {
        let found = self.shelves.iter().find(|shelf| device == NONE || shelf.info().uuid == device);
        found.ok_or_else(|| {
            let labels: Vec<_> = self.devices.iter().map(|d| d.label.as_str()).collect();
            let message = format!("this mount does not serve that device; it serves {}", labels.join(", "));
            Failure::new(Code::NoDevice, message)
        })
    }

    /// Answers at once where the file is resident and current; otherwise starts or joins its load. Never waits itself.
    pub fn materialize(&self, ask: Ask, answer: Answer) {
        match self.shelf(ask.device) {
            Ok(shelf) => shelf.materialize(vec![(ask, answer)]),
            Err(failure) => answer(Err(failure)),
        }
    }

    /// The same for many files that are to go to one device.
    pub fn materialize_all(&self, device: DeviceUuid, asks: Vec<(Ask, Answer)>) {
        match self.shelf(device) {
            Ok(shelf) => shelf.materialize(asks),
            Err(failure) => asks.into_iter().for_each(|(_, answer)| answer(Err(failure.clone()))),
        }
    }

    /// Where `file` stands for `domain`. Starts nothing.
    pub fn standing(&self, file: &OpenFile, device: DeviceUuid, domain: Domain) -> Result<Standing> {
        self.shelf(device)?.standing(file, domain)
    }

    /// Ends the load of `file`, unless somebody else than the caller's process wants it; says what is left.
    pub fn cancel(&self, file: FileId, device: DeviceUuid, caller: &Caller) -> Result<State> {
        Ok(self.shelf(device)?.cancel(file, caller))
    }

    /// Which way `file` would go to each device now, and why. Starts nothing.
    pub fn explain(&self, file: &OpenFile, domain: Domain) -> Result<serde_json::Value> {
        explain::explain(&self.shelves, file, domain)
    }

    /// Gives the copies of `file` in `domain` up, on `device` or, with [`NONE`], on every device.
    pub fn evict(&self, file: FileId, device: DeviceUuid, domain: Domain) -> Result<Evicted> {
        self.shelf(device)?;
        let mut sum = Evicted::default();
        for shelf in self.shelves.iter().filter(|shelf| device == NONE || shelf.info().uuid == device) {
            let evicted = shelf.evict(file, domain);
            sum.freed += evicted.freed;
            sum.held += evicted.held;
        }
        Ok(sum)
    }

    /// `file` was truncated or opened for writing through the mount: its copies are not current any more.
    /// Quick, and called before the writer gets its reply.
    pub fn changed(&self, file: FileId) {
        for shelf in &self.shelves {
            shelf.changed(file);
        }
    }

    /// Begins a session of `owner`, and draws its secret.
    pub fn open_session(&self, owner: Caller) -> Result<(SessionId, Secret)> {
        self.sessions.open(owner)
    }

    /// Ends a session: all that it held is free.
    pub fn close_session(&self, session: SessionId) {
        self.sessions.close(session);
    }

    /// The session that has this secret, where it is of `domain`.
    pub fn session_of(&self, secret: &Secret, domain: Domain) -> Result<SessionId> {
        self.sessions.find(secret, domain)
    }

    /// Whether the session's client was sent a descriptor that it has not given back, and so may have it mapped.
    pub fn has_fetched(&self, session: SessionId) -> bool {
        self.sessions.has_fetched(session)
    }

    /// The allocation that `session` holds, to be sent to it, with its device.
    pub fn fetch(&self, session: SessionId, allocation: u64) -> Result<(Hold, &Info)> {
        let hold = self.sessions.fetch(session, allocation)?;
        let device = &self.devices[hold.block().device];
        Ok((hold, device))
    }

    /// The client gives `grants` of the answers back that it got for `allocation`.
    pub fn release(&self, session: SessionId, allocation: u64, grants: u64) -> Result<()> {
        self.sessions.release(session, allocation, grants)
    }

    /// Counters and, for the daemon's owner, files and holders.
    pub fn stats(&self, owner: bool) -> serde_json::Value {
        let devices = self.shelves.iter().map(|shelf| stats::of_shelf(shelf, if owner { FILES_NAMED } else { 0 }));
        let stats = stats::Stats {
            version: env!("CARGO_PKG_VERSION"),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            sessions: self.sessions.count(),
            devices: devices.collect(),
        };
        serde_json::to_value(stats).expect("plain structs become JSON")
    }

    /// The same numbers for everybody, as OpenMetrics text.
    pub fn metrics(&self) -> String {
        openmetrics::text(&self.shelves, self.sessions.count(), self.started.elapsed())
    }

    /// Fails the loads that wait, and lets the loaders go. Nothing can be asked for after.
    pub fn stop(&self) {
        for shelf in &self.shelves {
            shelf.stop();
        }
    }
}
