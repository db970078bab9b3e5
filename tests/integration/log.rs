//! Where the daemon's words go. The syslogd is a socket of the test's, in a mount namespace whose `/dev/log` it is.

use crate::harness::*;
use crate::namespace::Namespace;
use std::io::Write;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::time::Duration;

/// A `/dev` that has what a mount needs, and a log where somebody listens at `log` in the place's folder.
const DEV: &str = r#"mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/fuse c 10 229 &&
    ln -s "$1/log" /dev/log"#;

fn place() -> Option<Namespace> {
    rustix::process::geteuid().is_root().then(|| Namespace::new(Mounted::prepare(), DEV))
}

/// The folder's socket, as a syslogd has it.
fn syslogd(namespace: &Namespace) -> UnixDatagram {
    let path = namespace.place.source.with_file_name("log");
    let _ = std::fs::remove_file(&path);
    let socket = UnixDatagram::bind(path).expect("bound");
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("set");
    socket
}

/// What has arrived.
fn entries(socket: &UnixDatagram) -> Vec<String> {
    let mut entries = Vec::new();
    let mut bytes = vec![0; 1 << 16];
    while let Ok(length) = socket.recv(&mut bytes) {
        entries.push(String::from_utf8_lossy(&bytes[..length]).into_owned());
    }
    entries
}

/// The first entry with `words`, of all that arrived until then.
#[track_caller]
fn arrives(socket: &UnixDatagram, seen: &mut Vec<String>, words: &str) -> String {
    let mut found = None;
    eventually(words, || {
        seen.extend(entries(socket));
        found = seen.iter().find(|entry| entry.contains(words)).cloned();
        found.is_some()
    });
    found.expect("just found")
}

/// Mounts in the background; what it said.
#[track_caller]
fn mount(namespace: &Namespace, filter: Option<&str>) -> String {
    let setting = format!("WARPFS_LOG={}", filter.unwrap_or_default());
    let place = &namespace.place;
    let mut words = vec!["env".to_string(), setting, warpfs_binary().display().to_string()];
    words.extend(["mount", "--device", "host", "--budget", "1MiB"].map(String::from));
    words.extend([&place.source, &place.mountpoint].map(|path| path.display().to_string()));
    namespace.run(words).ok().text()
}

/// A warning: a client that talks nonsense.
fn provoke_warning(namespace: &Namespace) {
    let path = std::fs::read_to_string(namespace.at(".warpfs/socket")).expect("read");
    let mut socket = UnixStream::connect(Path::new(path.trim_end())).expect("connected");
    let _ = socket.write_all(&noise(1, 5000));
}

/// A debug line: a request that fails, of which its caller hears.
fn provoke_debug(namespace: &Namespace) {
    assert_eq!(setxattr(&namespace.at("large"), "user.warpfs.preload"), Err(libc::EFBIG));
}

#[test]
fn syslog_gets_each_line_with_its_severity() {
    let Some(namespace) = place() else { return };
    let log = syslogd(&namespace);
    let mut seen = Vec::new();
    sparse(&namespace.place.source.join("large"), 2 << 20);
    let said = mount(&namespace, None);
    assert!(!said.contains("logged"), "nothing to say about the log: {said}");
    let daemon = namespace.daemon();
    let mounted = arrives(&log, &mut seen, "is mounted on");
    // Facility daemon is 3, and info 6: 3 * 8 + 6.
    assert!(mounted.starts_with(&format!("<30>warpfs[{daemon}]: ")), "{mounted}");
    provoke_debug(&namespace);
    provoke_warning(&namespace);
    let warning = arrives(&log, &mut seen, "dropped a client");
    assert!(warning.starts_with(&format!("<28>warpfs[{daemon}]: ")), "{warning}");
    signal(daemon, libc::SIGKILL);
    let error = arrives(&log, &mut seen, "killed by signal 9");
    assert!(error.starts_with("<27>warpfs["), "{error}");
    assert!(!seen.iter().any(|entry| entry.starts_with("<31>")), "nothing was to be debugged: {seen:?}");
}

#[test]
fn a_filter_asks_for_more_or_less() {
    let Some(namespace) = place() else { return };
    let log = syslogd(&namespace);
    let mut seen = Vec::new();
    sparse(&namespace.place.source.join("large"), 2 << 20);
    mount(&namespace, Some("warpfs=debug"));
    provoke_debug(&namespace);
    let debug = arrives(&log, &mut seen, "DEBUG");
    assert!(debug.starts_with("<31>warpfs[") && debug.contains("whole budget"), "{debug}");
    arrives(&log, &mut seen, "is mounted on");
    drop(namespace);

    let Some(namespace) = place() else { return };
    let log = syslogd(&namespace);
    let mut seen = Vec::new();
    mount(&namespace, Some("warn"));
    provoke_warning(&namespace);
    arrives(&log, &mut seen, "dropped a client");
    assert!(!seen.iter().any(|entry| entry.contains("is mounted on")), "{seen:?}");
    drop(namespace);

    let Some(namespace) = place() else { return };
    let said = mount(&namespace, Some("warpfs=loud"));
    assert!(said.contains("WARPFS_LOG=warpfs=loud is no filter"), "{said}");
}

#[test]
fn a_syslogd_that_was_restarted_is_found_again() {
    let Some(namespace) = place() else { return };
    let log = syslogd(&namespace);
    mount(&namespace, None);
    arrives(&log, &mut Vec::new(), "is mounted on");
    drop(log);
    // Nobody listens: the line is lost, and nothing else.
    provoke_warning(&namespace);
    namespace.daemon();
    let log = syslogd(&namespace);
    let mut seen = Vec::new();
    eventually("a line arrives", || {
        provoke_warning(&namespace);
        seen.extend(entries(&log));
        seen.iter().any(|entry| entry.contains("dropped a client"))
    });
    // A full queue, with nobody who reads, holds nothing up.
    for _ in 0..2000 {
        provoke_warning(&namespace);
    }
    assert!(is_alive(namespace.daemon()));
}

#[test]
fn a_log_that_goes_nowhere_is_said_when_it_is_mounted() {
    let Some(namespace) = place() else { return };
    let said = mount(&namespace, None);
    assert!(said.contains("nothing is logged until a syslogd listens (/dev/log: No such file"), "{said}");
    // When one does, it hears.
    let log = syslogd(&namespace);
    provoke_warning(&namespace);
    arrives(&log, &mut Vec::new(), "dropped a client");
}
