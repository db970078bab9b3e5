//! What is resident, for whom, until when. The one small interface through which the filesystem and the channel ask for
//! files in device memory; they never call each other. Everything is per device: one budget, one index, one loader.
//! Nothing here knows FUSE or CUDA: the memory and the loader are traits, so the cache is tested without either.

use crate::device::Info;
use crate::failure::{Failure, Result};
use crate::protocol::{Code, DeviceUuid, Secret, State};
use crate::source::{Caller, Domain, FileId, OpenFile};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

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
    /// How long the answer may take; then it is [`Outcome::Loading`].
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
    pub freed: u64,
    /// Given up, but held: free when its holders let go.
    pub held: u64,
}

/// Told the answer exactly once, from any thread.
pub type Answer = Box<dyn FnOnce(Result<Outcome>) + Send>;

pub struct Cache {
    devices: Vec<Info>,
}

impl Cache {
    /// The devices, the default first.
    pub fn devices(&self) -> &[Info] {
        &self.devices
    }

    /// Answers at once where the file is resident and current; otherwise starts or joins its load. Never waits itself.
    pub fn materialize(&self, ask: Ask, answer: Answer) {
        let _ = ask;
        answer(Err(Failure::new(Code::Unsupported, "not built yet")));
    }

    /// Where `file` stands for `domain`. Starts nothing.
    pub fn standing(&self, file: &OpenFile, device: DeviceUuid, domain: Domain) -> Result<Standing> {
        let _ = (file, device, domain);
        Err(Failure::new(Code::Unsupported, "not built yet"))
    }

    /// Gives the copies of `file` in `domain` up, on `device` or, with [`crate::protocol::NONE`], on every device.
    pub fn evict(&self, file: FileId, device: DeviceUuid, domain: Domain) -> Result<Evicted> {
        let _ = (file, device, domain);
        Err(Failure::new(Code::Unsupported, "not built yet"))
    }

    /// `file` was truncated or opened for writing through the mount: its copies are not current any more.
    /// Quick, and called before the writer gets its reply.
    pub fn changed(&self, file: FileId) {
        let _ = file;
    }

    /// The session that has this secret, where it belongs to `uid`.
    pub fn session_of(&self, secret: &Secret, uid: u32) -> Result<SessionId> {
        let _ = (secret, uid);
        Err(Failure::new(Code::BadSession, "not built yet"))
    }

    /// Counters and, for the daemon's owner, files, as JSON text.
    pub fn stats_json(&self, owner: bool) -> String {
        let _ = owner;
        String::from("{}\n")
    }
}
