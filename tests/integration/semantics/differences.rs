//! Differences that are known and that no other test shows.

use crate::harness::*;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::fs;
use std::mem::MaybeUninit;
use std::path::Path;

/// The names of which a watch on `folder` hears while `work` runs.
fn heard(folder: &Path, work: impl FnOnce()) -> Vec<String> {
    let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).expect("inotify");
    inotify::add_watch(&watch, folder, WatchFlags::CREATE | WatchFlags::CLOSE_WRITE).expect("watched");
    work();
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(&watch, &mut buffer);
    let mut names = Vec::new();
    while let Ok(event) = reader.next() {
        names.extend(event.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    names.dedup();
    names
}

#[test]
fn a_watch_on_the_mount_hears_what_is_done_through_it_and_not_what_is_done_behind() {
    let mounted = Mounted::new();
    let through = heard(&mounted.mountpoint, || fs::write(mounted.mountpoint.join("f"), "x").expect("written"));
    assert_eq!(through, ["f"]);
    let behind = heard(&mounted.mountpoint, || fs::write(mounted.source.join("g"), "x").expect("written"));
    assert!(behind.is_empty(), "{behind:?}");
    // A watch on the source hears of both.
    let both = heard(&mounted.source, || {
        fs::write(mounted.source.join("h"), "x").expect("written");
        fs::write(mounted.mountpoint.join("i"), "x").expect("written");
    });
    assert!(both.contains(&"h".to_string()) && both.contains(&"i".to_string()), "{both:?}");
}

#[test]
fn the_file_systems_type_is_fuses() {
    let mounted = Mounted::new();
    let kind = rustix::fs::statfs(&mounted.mountpoint).expect("statfs").f_type;
    assert_eq!(kind, 0x6573_5546, "FUSE_SUPER_MAGIC");
}

#[test]
fn syncfs_returns_at_once_and_fsync_syncs() {
    let mounted = Mounted::new();
    let path = mounted.mountpoint.join("f");
    fs::write(&path, "x").expect("written");
    let file = fs::File::open(&path).expect("opened");
    rustix::fs::syncfs(&file).expect("it says so");
    file.sync_all().expect("this is the one to use");
}

#[test]
fn locks_do_not_reach_the_source() {
    let mounted = Mounted::new();
    let path = mounted.file("f", b"x");
    let lock = |path: &Path| {
        let file = fs::File::open(path).expect("opened");
        let locked = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        (file, locked)
    };
    let (_kept, first) = lock(&path);
    assert_eq!(first, Ok(()));
    assert_eq!(lock(&path).1, Err(rustix::io::Errno::WOULDBLOCK), "the control: on the mount it counts");
    assert_eq!(lock(&mounted.source.join("f")).1, Ok(()));
}
