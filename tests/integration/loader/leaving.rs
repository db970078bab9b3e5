//! The end of a loader that has nothing to do: without a crash, whatever its libraries have left behind (kvikio 497).

use super::*;
use std::os::unix::fs::PermissionsExt;

/// A loader that lets its children go after `idle`, and a file with their exit statuses.
fn recorded(idle: Duration) -> (Bench, PathBuf) {
    let device = crate::harness::device();
    let device = if std::env::var_os(INNER).is_some() { "cuda:0" } else { &device };
    let mut bench = Bench::new(device, &[], &[]);
    let (script, statuses) = (bench.dir.path().join("loader"), bench.dir.path().join("statuses"));
    let program = crate::harness::warpfs_binary();
    let text = format!("#!/bin/sh\n{} \"$@\"\necho $? >> {}\n", program.display(), statuses.display());
    std::fs::write(&script, text).expect("written");
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("executable");
    let settings = Settings { program: script, idle, ..Settings::default() };
    bench.loader = ChildLoader::new(bench.memory.info(), settings).expect("a thread");
    std::fs::write(&statuses, "").expect("written");
    (bench, statuses)
}

fn statuses(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).expect("there").lines().map(str::to_string).collect()
}

fn a_hundred_times() {
    let (bench, path) = recorded(Duration::ZERO);
    let content = content(70_000, 9);
    for cycle in 1..=100 {
        bench.loads("f", &content, 0);
        eventually("the loader leaves", || statuses(&path).len() == cycle && bench.loader.pid().is_none());
    }
    assert_eq!(statuses(&path), vec!["0"; 100]);
    // The control: a crash would be seen.
    let (bench, path) = recorded(DEADLINE);
    bench.loads("f", &content, 0);
    for child in crate::harness::children(bench.pid() as i32) {
        crate::harness::signal(child, libc::SIGABRT);
    }
    eventually("a crash is seen", || statuses(&path) == ["134"]);
}

#[test]
fn g15_a_loader_that_leaves_a_hundred_times_never_crashes() {
    a_hundred_times();
    with_double("leaving::g15_a_loader_that_leaves_a_hundred_times_never_crashes", &[], &[], a_hundred_times);
}
