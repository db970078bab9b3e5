//! What this user may take and do: pinned memory, descriptors, and mounting without root. Called by `examine`.

use super::Finding;
use super::kernel::has;
use super::machine::Machine;
use crate::mounts;
use crate::size::Human;
use rustix::process::{Resource, Rlimit, getrlimit};
use rustix::thread::CapabilitySet;
use std::path::PathBuf;

const MEMLOCK: &str = "locked memory";
const DESCRIPTORS: &str = "descriptors";
const HELPER: &str = "mount helper";
const OTHERS: &str = "other users";

/// The most that a loader's ring takes, in bytes.
const RING: u64 = 256 << 20;
/// With fewer descriptors (of which copies take a quarter) a directory of some size does not fit as copies.
const FEW: u64 = 1 << 16;

pub(super) fn check(machine: &Machine) -> Vec<Finding> {
    let root = has(CapabilitySet::SYS_ADMIN);
    vec![
        memlock(getrlimit(Resource::Memlock), has(CapabilitySet::IPC_LOCK)),
        descriptors(getrlimit(Resource::Nofile), machine, has(CapabilitySet::SYS_RESOURCE)),
        helper(root, mounts::helper()),
        others(machine, root),
    ]
}

fn shown(limit: Option<u64>) -> String {
    limit.map_or("unlimited".to_string(), |bytes| Human(bytes).to_string())
}

fn memlock(limit: Rlimit, exempt: bool) -> Finding {
    if exempt {
        return Finding::ok(MEMLOCK, format!("{}, which does not bind this user", shown(limit.current)));
    }
    let Some(most) = limit.current.filter(|most| *most < RING) else {
        return Finding::ok(MEMLOCK, shown(limit.current));
    };
    let what = format!(
        "at most {}: memory pinned through CUDA is not counted, but the buffers that are registered with io_uring are, and \
         a ring takes up to {}",
        Human(most),
        Human(RING)
    );
    Finding::note(MEMLOCK, what).so(
        "`ulimit -l unlimited`; where that is refused a line `USER - memlock unlimited` in /etc/security/limits.conf and a new login; LimitMEMLOCK=infinity for a \
         service of systemd; --ulimit memlock=-1 for a container",
    )
}

fn descriptors(limit: Rlimit, machine: &Machine, may_raise: bool) -> Finding {
    // The daemon raises its limit as far as it may when it starts.
    let nr_open = machine.number("/proc/sys/fs/nr_open").and_then(|most| u64::try_from(most).ok());
    let most = nr_open.filter(|_| may_raise).or(limit.maximum).unwrap_or(u64::MAX);
    let what = format!("{most} for a daemon of this user: at most {} copies at a time", most / 4);
    if most >= FEW {
        return Finding::ok(DESCRIPTORS, what);
    }
    Finding::note(DESCRIPTORS, what).so(if may_raise {
        "`sysctl fs.nr_open=1048576`"
    } else {
        "a line `USER - nofile 1048576` in /etc/security/limits.conf and a new login; LimitNOFILE=1048576 for a service of \
         systemd; --ulimit nofile=1048576 for a container"
    })
}

fn helper(root: bool, found: Option<PathBuf>) -> Finding {
    match (root, found) {
        (_, Some(path)) => Finding::ok(HELPER, format!("{}, for mounts of ordinary users", path.display())),
        (true, None) => {
            Finding::ok(HELPER, "no fusermount3, which this user does without; ordinary users cannot mount")
        }
        (false, None) => Finding::wrong(HELPER, "no fusermount3, without which an ordinary user cannot mount")
            .so("`apt install fuse3` (or your system's package of that name), or mount as root"),
    }
}

fn others(machine: &Machine, root: bool) -> Finding {
    const FILE: &str = "/etc/fuse.conf";
    if root {
        return Finding::ok(OTHERS, "this user may mount with --allow-other");
    }
    let text = machine.text(FILE);
    if text.is_none() && machine.exists(FILE) {
        return Finding::unknown(OTHERS, format!("{FILE}, which allows or forbids --allow-other, cannot be read"));
    }
    if text.unwrap_or_default().lines().any(|line| line.trim() == "user_allow_other") {
        return Finding::ok(OTHERS, "/etc/fuse.conf lets this user mount with --allow-other");
    }
    Finding::note(OTHERS, "only you can use a mount of yours: --allow-other is refused")
        .so("if others are to use it, put the line `user_allow_other` into /etc/fuse.conf, or mount as root")
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::super::machine::made::Made;
    use super::*;

    fn limit(soft: u64, hard: Option<u64>) -> Rlimit {
        Rlimit { current: Some(soft), maximum: hard }
    }

    #[test]
    fn locked_memory_binds_only_who_is_not_exempt() {
        assert_eq!(memlock(limit(65536, Some(65536)), true).state, State::Ok);
        assert_eq!(memlock(limit(1 << 30, None), false).state, State::Ok);
        let finding = memlock(limit(8 << 20, None), false);
        assert_eq!(finding.state, State::Note);
        assert!(finding.what.contains("8.0 MiB") && finding.what.contains("256.0 MiB"), "{finding:?}");
    }

    #[test]
    fn descriptors_are_those_that_the_daemon_gets() {
        let made = Made::new();
        made.file("/proc/sys/fs/nr_open", "1048576\n");
        let machine = made.machine();
        let few = descriptors(limit(1024, Some(4096)), &machine, false);
        assert_eq!(few.state, State::Note);
        assert!(few.what.contains("at most 1024 copies"), "{few:?}");
        let raised = descriptors(limit(1024, Some(4096)), &machine, true);
        assert_eq!(raised.state, State::Ok);
        assert!(raised.what.contains("at most 262144 copies"), "{raised:?}");
    }

    #[test]
    fn an_ordinary_user_needs_the_helper_and_a_line_for_others() {
        assert_eq!(helper(true, None).state, State::Ok);
        assert_eq!(helper(false, Some("/bin/fusermount3".into())).state, State::Ok);
        assert_eq!(helper(false, None).state, State::Wrong);
        let made = Made::new();
        made.file("/etc/fuse.conf", "# user_allow_other\nmount_max = 1000\n");
        assert_eq!(others(&made.machine(), false).state, State::Note, "a comment is no line");
        assert_eq!(others(&made.machine(), true).state, State::Ok);
        made.file("/etc/fuse.conf", "user_allow_other\n");
        assert_eq!(others(&made.machine(), false).state, State::Ok);
    }
}
