//! Who is asking, and doing file work as that user. Nobody acts as root for another: whatever a peer asks by path is
//! opened by a thread that has the peer's user, group and supplementary groups while it opens, and its own again after.

use rustix::fs::Stat;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// The credentials with which the system checks file access.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// Who may share one allocation: an importer of CUDA memory can ask for write access, so read-only is a guard-rail and
/// not a wall, and only processes of one user in one user and mount namespace share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Domain {
    pub uid: u32,
    /// Inode number of the peer's user namespace.
    pub user_namespace: u64,
    /// Inode number of the peer's mount namespace. Where /proc does not show the namespaces, a number that nobody else
    /// has: who cannot be placed shares with nobody.
    pub mount_namespace: u64,
}

/// One process that asks for something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub identity: Identity,
    pub pid: u32,
    pub domain: Domain,
}

impl Caller {
    /// The process `pid` (or a thread's id), which the kernel says has `uid` and `gid`. What /proc does not show of it
    /// (another user's process, another PID namespace) stays empty: no supplementary groups, a domain of its own.
    pub fn of_process(uid: u32, gid: u32, pid: u32) -> Caller {
        let identity = Identity { uid, gid, groups: groups_of(pid) };
        Caller { identity, pid, domain: Domain::of_process(uid, pid) }
    }

    /// This process.
    pub fn this() -> Caller {
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        Caller::of_process(uid, gid, std::process::id())
    }
}

impl Domain {
    pub fn of_process(uid: u32, pid: u32) -> Domain {
        let namespace = |name: &str| {
            let path = format!("/proc/{pid}/ns/{name}");
            rustix::fs::stat(Path::new(&path)).map(|s: Stat| s.st_ino).ok().filter(|_| pid != 0)
        };
        match (namespace("user"), namespace("mnt")) {
            (Some(user_namespace), Some(mount_namespace)) => Domain { uid, user_namespace, mount_namespace },
            _ => {
                static NOBODY_ELSES: AtomicU64 = AtomicU64::new(0);
                let mount_namespace = NOBODY_ELSES.fetch_add(1, Ordering::Relaxed);
                Domain { uid, user_namespace: 0, mount_namespace }
            }
        }
    }
}

fn groups_of(pid: u32) -> Vec<u32> {
    let line = status_line(pid, "Groups:").unwrap_or_default();
    line.split_whitespace().filter_map(|g| g.parse().ok()).collect()
}

/// The process that the thread `pid` belongs to, where /proc shows it.
pub fn process_of(pid: u32) -> Option<u32> {
    status_line(pid, "Tgid:")?.trim().parse().ok()
}

fn status_line(pid: u32, name: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::to_string)
}

impl Identity {
    /// Runs `work` with this identity's fsuid, fsgid and supplementary groups on the calling thread, and restores the
    /// thread's own after. A daemon that is not root keeps its own identity: it can do nothing that its user cannot. One
    /// that is root but may not change identities (a container without CAP_SETUID and CAP_SETGID) does nothing, and gets
    /// EPERM: it must not do the work as root.
    pub fn with<T>(&self, work: impl FnOnce() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        let _guard = Assumed::new(self)?;
        work()
    }
}

/// Restores the thread's credentials when dropped, also when the work panics.
struct Assumed {
    own: Option<Identity>,
}

impl Assumed {
    fn new(wanted: &Identity) -> rustix::io::Result<Assumed> {
        let own = OWN.with(Identity::clone);
        if own.uid != 0 || (wanted.uid == 0 && wanted.gid == own.gid) {
            return Ok(Assumed { own: None });
        }
        set_groups(&wanted.groups)?;
        // From here on the guard restores, whatever fails.
        let guard = Assumed { own: Some(own) };
        if set_fs_ids(wanted.uid, wanted.gid) { Ok(guard) } else { Err(rustix::io::Errno::PERM) }
    }
}

impl Drop for Assumed {
    fn drop(&mut self) {
        if let Some(own) = self.own.take()
            && (!set_fs_ids(own.uid, own.gid) || set_groups(&own.groups).is_err())
        {
            // A thread that goes on as somebody else is worse than no daemon.
            tracing::error!("a thread could not become itself again");
            std::process::abort();
        }
    }
}

thread_local! {
    /// The identity the thread was born with.
    static OWN: Identity = Identity {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: rustix::process::getgroups()
            .map(|groups| groups.iter().map(|g| g.as_raw()).collect())
            .unwrap_or_default(),
    };
}

/// The system call itself: glibc's wrapper would change every thread of the process.
fn set_groups(groups: &[u32]) -> rustix::io::Result<()> {
    // SAFETY: the pointer and the length name a live slice of gid_t, which the kernel only reads.
    let done = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(rustix::io::Errno::PERM) }
}

/// Whether the thread has these ids now: the calls never say that they failed. The group goes first: without root's
/// capabilities it could not be set any more.
fn set_fs_ids(uid: u32, gid: u32) -> bool {
    const ASK: u32 = u32::MAX;
    // SAFETY: the calls take plain numbers and change the calling thread only; an impossible id changes nothing and
    // tells the present one.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        libc::syscall(libc::SYS_setfsgid, ASK) as u32 == gid && libc::syscall(libc::SYS_setfsuid, ASK) as u32 == uid
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn files_belong_to_the_assumed_identity_and_root_returns() {
        if !rustix::process::geteuid().is_root() {
            return; // an ordinary user has one identity only
        }
        let dir = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::chown(dir.path(), Some(1234), Some(1234)).expect("chown");
        let path = dir.path().join("f");
        let nobody = Identity { uid: 1234, gid: 1234, groups: vec![77] };
        let written = nobody.with(|| Ok(std::fs::write(&path, b"x"))).expect("root may become another");
        written.expect("may write into its own directory");
        let meta = std::fs::metadata(&path).expect("exists");
        assert_eq!((meta.uid(), meta.gid()), (1234, 1234));
        let denied = nobody.with(|| Ok(std::fs::read("/etc/shadow"))).expect("root may become another");
        assert_eq!(denied.expect_err("not readable").kind(), std::io::ErrorKind::PermissionDenied);
        std::fs::read("/etc/shadow").expect("root again");
    }
}
