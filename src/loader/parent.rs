//! The daemon's end of a loader. Jobs are queued and one thread a device minds them and the child: it starts a child when
//! there is work, lets it go when there is none, and starts another when it died. A job's `done` must run exactly once,
//! whatever happens to the child, and only when the child no longer touches the allocation. Called by the cache.

use super::minder::Minder;
use super::{Done, Job, Loader};
use crate::device::Info;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use crate::transfer::Wanted;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How a child is started and minded.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The program with the subcommand `loader`.
    pub program: PathBuf,
    /// More words for the subcommand.
    pub arguments: Vec<String>,
    /// More environment for it.
    pub environment: Vec<(String, String)>,
    /// A child that has work and says nothing for so long hangs, and is killed.
    pub silence: Duration,
    /// A child without work for so long is let go, and its context's memory (519 MiB, measured) with it.
    pub idle: Duration,
    /// A child that is not ready after so long is killed. A context takes half a second, and minutes on a machine whose
    /// driver has to wake many devices first.
    pub start: Duration,
}

impl Settings {
    /// Nothing but cuFile will do.
    pub(super) fn insists_on_cufile(&self) -> bool {
        self.arguments.windows(2).any(|words| words == ["--route", Wanted::Gds.word()])
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            // Still the running program after its file was replaced by another version.
            program: PathBuf::from("/proc/self/exe"),
            arguments: Vec::new(),
            environment: Vec::new(),
            silence: Duration::from_secs(60),
            idle: Duration::from_secs(60),
            start: Duration::from_secs(120),
        }
    }
}

/// What callers leave for the minding thread.
#[derive(Default)]
pub(super) struct Inbox {
    pub(super) jobs: Vec<(Job, Done)>,
    /// Slabs that nothing more comes into.
    pub(super) forget: Vec<u64>,
    /// Let the child go after its present work.
    pub(super) stop: bool,
    /// End everything now.
    pub(super) close: bool,
}

/// Both sides' part.
pub(super) struct Shared {
    pub(super) inbox: Mutex<Inbox>,
    /// Wakes the minding thread.
    pub(super) wake: OwnedFd,
    /// The child's process id; 0 where there is none.
    pub(super) pid: AtomicU32,
    /// The slabs that the child has, or will have with the jobs for them.
    pub(super) slabs: Mutex<HashSet<u64>>,
    /// What the child has found out about cuFile.
    pub(super) note: Mutex<Option<String>>,
}

/// A loader that is a child process.
pub struct ChildLoader {
    shared: Arc<Shared>,
    minder: Mutex<Option<JoinHandle<()>>>,
}

impl ChildLoader {
    /// A loader for the device; its child starts with the first job. Fails where the system has no thread left.
    pub fn new(info: &Info, settings: Settings) -> Result<ChildLoader> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Failure::system("cannot make an event for the loader", e))?;
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            wake,
            pid: AtomicU32::new(0),
            slabs: Mutex::default(),
            note: Mutex::default(),
        });
        let mut minder = Minder::new(info.clone(), settings, Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name(format!("loader {}", info.label))
            .spawn(move || minder.mind())
            .map_err(|e| Failure::system("cannot start the loader's thread", e))?;
        Ok(ChildLoader { shared, minder: Mutex::new(Some(thread)) })
    }

    /// The child's process id, where there is a child now.
    pub fn pid(&self) -> Option<u32> {
        match self.shared.pid.load(Ordering::Relaxed) {
            0 => None,
            pid => Some(pid),
        }
    }
}

impl Shared {
    fn wake(&self) {
        // It can only fail where the count is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Loader for ChildLoader {
    fn submit(&self, job: Job, done: Done) {
        let mut inbox = self.shared.inbox.lock();
        if inbox.close {
            drop(inbox);
            let ended = job.failed(&Failure::new(Code::Stopping, "the loader was stopped"));
            drop(job);
            done(ended);
            return;
        }
        inbox.jobs.push((job, done));
        drop(inbox);
        self.shared.wake();
    }

    fn open(&self, slab: u64) {
        self.shared.slabs.lock().insert(slab);
    }

    fn has(&self, slab: u64) -> bool {
        self.shared.slabs.lock().contains(&slab)
    }

    fn forget(&self, slab: u64) {
        if self.has(slab) {
            self.shared.inbox.lock().forget.push(slab);
            self.shared.wake();
        }
    }

    fn note(&self) -> Option<String> {
        self.shared.note.lock().clone()
    }

    fn stop(&self) {
        self.shared.inbox.lock().stop = true;
        self.shared.wake();
    }
}

impl Drop for ChildLoader {
    /// Ends the child and every job, within seconds.
    fn drop(&mut self) {
        self.shared.inbox.lock().close = true;
        self.shared.wake();
        if let Some(minder) = self.minder.lock().take()
            && minder.thread().id() != std::thread::current().id()
        {
            let _ = minder.join();
        }
    }
}
