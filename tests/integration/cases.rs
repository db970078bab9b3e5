//! Failures that users of other file systems of this kind have met, each kept here as a test that it cannot be met here.
//! The tests are numbered as the project's list of such failures is. What takes long at full size has a smaller default,
//! and an environment variable for the rest: `WARPFS_STORM_SECONDS` (m04), `WARPFS_FILES` (m13), `WARPFS_INODES` (m17).

#[path = "cases/data.rs"]
mod data;
#[path = "cases/errors.rs"]
mod errors;
#[path = "cases/faulty.rs"]
mod faulty;
#[path = "cases/life.rs"]
mod life;
#[path = "cases/locks.rs"]
mod locks;
#[path = "cases/names.rs"]
mod names;
#[path = "cases/scale.rs"]
mod scale;

use crate::harness::*;
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The ways to mount under which a test runs.
const EACH_WAY: [&[&str]; 2] = [&[], &["--no-passthrough"]];

/// A number from the environment.
fn size(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// What threads return that must end in time. They are not scoped: one that hangs fails its test and does not hang it.
#[track_caller]
fn all_end<T>(threads: Vec<JoinHandle<T>>, limit: Duration) -> Vec<T> {
    let until = Instant::now() + limit;
    while let left @ 1.. = threads.iter().filter(|thread| !thread.is_finished()).count() {
        assert!(Instant::now() < until, "{left} threads hang after {limit:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

/// Held by tests that have the kernel forget, or that count what it knows.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|of_a_failed_test| of_a_failed_test.into_inner())
}

/// Has the kernel forget every name and inode that nobody uses; root only.
fn drop_caches() {
    std::fs::write("/proc/sys/vm/drop_caches", "2").expect("dropped");
}

/// Nothing but the root is known when nobody uses anything and the kernel has forgotten everything.
#[track_caller]
fn only_the_root_is_left(mounted: &Mounted) {
    let mut left = 0;
    let until = Instant::now() + DEADLINE;
    while left != 1 {
        assert!(Instant::now() < until, "{left} inodes are left");
        drop_caches();
        std::thread::sleep(Duration::from_millis(50));
        left = mounted.inodes();
    }
}
