//! Who sent a request, and doing its work as that user where the system must see the user: what is created belongs to
//! the caller, and what a caller truncates loses its set-user-id bit as it would natively. It never reads /proc for a
//! caller whose rights are the daemon's own. Called by the operations on names and data.

use crate::source::{Caller, Identity};
use rustix::fs::Mode;
use rustix::thread::{CapabilitySet, UnshareFlags};
use std::cell::Cell;

/// The sender of a request, as the kernel names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
}

impl From<&fuser::Request> for Origin {
    fn from(request: &fuser::Request) -> Origin {
        Origin { uid: request.uid(), gid: request.gid(), pid: request.pid() }
    }
}

impl Origin {
    pub(crate) fn caller(&self) -> Caller {
        Caller::of_process(self.uid, self.gid, self.pid)
    }

    /// The credentials to act with. Root needs no supplementary groups, and a daemon that is not root keeps its own.
    pub(crate) fn identity(&self) -> Identity {
        if self.uid == 0 || !rustix::process::geteuid().is_root() {
            return Identity { uid: self.uid, gid: self.gid, groups: Vec::new() };
        }
        self.caller().identity
    }
}

/// Runs `work` without CAP_FSETID, so that the system clears set-user-id bits on what it writes.
pub(crate) fn without_fsetid<T>(work: impl FnOnce() -> T) -> T {
    let Ok(own) = rustix::thread::capabilities(None) else {
        return work();
    };
    if !own.effective.contains(CapabilitySet::FSETID) {
        return work();
    }
    let _restored = Restored(own);
    let mut less = own;
    less.effective.remove(CapabilitySet::FSETID);
    let _ = rustix::thread::set_capabilities(None, less);
    work()
}

/// Gives the thread its capabilities back, also when the work panics.
struct Restored(rustix::thread::CapabilitySets);

impl Drop for Restored {
    fn drop(&mut self) {
        if let Err(e) = rustix::thread::set_capabilities(None, self.0) {
            tracing::error!("cannot restore a thread's capabilities: {e}");
        }
    }
}

thread_local! {
    /// Whether this thread has a umask of its own.
    static OWN_UMASK: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` with `umask` on this thread only. The system then applies the umask or the directory's default ACL,
/// whichever counts.
pub(crate) fn with_umask<T>(umask: u32, work: impl FnOnce() -> T) -> T {
    if !OWN_UMASK.get() {
        // SAFETY: CLONE_FS gives this thread a copy of root directory, working directory and umask; no descriptor or
        // memory is concerned, and nothing here relies on sharing them.
        match unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) } {
            Ok(()) => OWN_UMASK.set(true),
            Err(e) => {
                tracing::warn!("a thread cannot have its own umask, files get the daemon's: {e}");
                return work();
            }
        }
    }
    rustix::process::umask(Mode::from_raw_mode(umask & 0o777));
    let done = work();
    rustix::process::umask(Mode::empty());
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capability_returns() {
        let own = rustix::thread::capabilities(None).expect("readable");
        let inside = without_fsetid(|| rustix::thread::capabilities(None).expect("readable"));
        assert!(!inside.effective.contains(CapabilitySet::FSETID));
        assert_eq!(rustix::thread::capabilities(None).expect("readable").effective, own.effective);
    }
}
