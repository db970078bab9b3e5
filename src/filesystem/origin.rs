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

/// Runs `work` without CAP_FSETID, so that the system clears set-user-id bits on what it writes. The thread stays without
/// it, because most of these come in a row: what needs the capability asks for it.
pub(crate) fn without_fsetid<T>(work: impl FnOnce() -> T) -> T {
    set_fsetid(false);
    work()
}

/// Runs `work` with CAP_FSETID, if the daemon has it: what root does keeps set-user-id bits, as natively.
pub(crate) fn with_fsetid<T>(work: impl FnOnce() -> T) -> T {
    set_fsetid(true);
    work()
}

/// Asked each time: a change of the thread's identity changes its capabilities too.
fn set_fsetid(wanted: bool) {
    let Ok(mut own) = rustix::thread::capabilities(None) else { return };
    let has = own.effective.contains(CapabilitySet::FSETID);
    if has == wanted || !own.permitted.contains(CapabilitySet::FSETID) {
        return;
    }
    own.effective.set(CapabilitySet::FSETID, wanted);
    if let Err(e) = rustix::thread::set_capabilities(None, own) {
        tracing::error!("cannot change a thread's capabilities: {e}");
    }
}

thread_local! {
    /// This thread's own umask, once it has one.
    static UMASK: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Runs `work` with `umask` on this thread only, which keeps it: nothing is created here without one. The system applies
/// the umask or the directory's default ACL, whichever counts.
pub(crate) fn with_umask<T>(umask: u32, work: impl FnOnce() -> T) -> T {
    let umask = umask & 0o777;
    if UMASK.get() == Some(umask) {
        return work();
    }
    if UMASK.get().is_none() {
        // SAFETY: CLONE_FS gives this thread a copy of root directory, working directory and umask; no descriptor or
        // memory is concerned, and nothing here relies on sharing them.
        if let Err(e) = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) } {
            tracing::warn!("a thread cannot have its own umask, files get the daemon's: {e}");
            return work();
        }
    }
    rustix::process::umask(Mode::from_raw_mode(umask));
    UMASK.set(Some(umask));
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capability_goes_and_returns() {
        let has = || rustix::thread::capabilities(None).expect("readable").effective.contains(CapabilitySet::FSETID);
        let own = has();
        for _ in 0..2 {
            assert!(!without_fsetid(has));
            assert_eq!(with_fsetid(has), own);
        }
        // Whoever was somebody else in between has it again.
        without_fsetid(|| ());
        let other = crate::source::Identity { uid: 1234, gid: 1234, groups: Vec::new() };
        let _ = other.with(|| Ok(()));
        assert!(!without_fsetid(has));
    }

    #[test]
    fn a_thread_has_the_umask_that_was_wanted_last() {
        let dir = tempfile::tempdir().expect("a directory");
        std::thread::spawn(move || {
            for (name, umask, mode) in [("a", 0o022, 0o644), ("b", 0o077, 0o600), ("c", 0o077, 0o600), ("d", 0, 0o666)]
            {
                let path = dir.path().join(name);
                with_umask(umask, || std::fs::write(&path, "x")).expect("written");
                let made = std::fs::metadata(path).expect("stat");
                assert_eq!(std::os::unix::fs::MetadataExt::mode(&made) & 0o777, mode, "umask {umask:o}");
            }
        })
        .join()
        .expect("no panic");
    }
}
