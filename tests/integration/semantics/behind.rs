//! Changes behind the mount, by a program that works on the source itself: when they are seen.

use crate::harness::*;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// What the documentation promises, and as much again and a half for a busy machine.
const LIMIT: Duration = Duration::from_millis(2500);

/// The mount with passthrough where it is to be had, and the one without.
fn mounts() -> [Mounted; 2] {
    [Mounted::new(), Mounted::with(&["--no-passthrough"])]
}

/// Seen before the limit.
#[track_caller]
fn soon(what: &str, mut seen: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !seen() {
        assert!(begun.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("listed");
    let mut names: Vec<_> = entries.map(|e| e.expect("an entry").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

#[test]
fn new_names_and_listings_are_seen_at_once() {
    for mounted in mounts() {
        for i in 0..50 {
            let name = format!("f{i}");
            assert!(!mounted.mountpoint.join(&name).exists());
            let before = names(&mounted.mountpoint);
            let path = mounted.file(&name, b"content");
            assert!(names(&mounted.mountpoint).contains(&name), "f{i} after {before:?}");
            assert_eq!(fs::read(path).expect("there"), b"content");
            if i % 2 == 0 {
                fs::remove_file(mounted.source.join(&name)).expect("removed");
                assert!(!names(&mounted.mountpoint).contains(&name));
            }
        }
    }
}

#[test]
fn a_listing_that_the_kernel_keeps_is_given_up_at_the_next_open_after_a_change() {
    for mounted in mounts() {
        let folder = mounted.source.join("d");
        fs::create_dir(&folder).expect("made");
        for i in 0..500 {
            File::create(folder.join(format!("f{i}"))).expect("created");
        }
        let seen = mounted.mountpoint.join("d");
        let asked = || mounted.stats()["mount"]["listings"].as_u64().expect("a number");
        let mut kept = 0;
        for round in 0..10 {
            // A directory that has just changed is not kept: its times might not tell of the next change.
            std::thread::sleep(Duration::from_millis(150));
            let before = names(&seen);
            names(&seen);
            let asked_before = asked();
            assert_eq!(names(&seen), before);
            kept += u64::from(asked() == asked_before);
            match round % 3 {
                0 => drop(File::create(folder.join(format!("new{round}"))).expect("created")),
                1 => fs::remove_file(folder.join(format!("f{round}"))).expect("removed"),
                _ => fs::rename(folder.join(format!("f{round}")), folder.join(format!("r{round}"))).expect("renamed"),
            }
            let after = names(&seen);
            assert_eq!(after, names(&folder), "round {round}");
            assert_ne!(after, before);
        }
        assert!(kept >= 5, "the control: the kernel answered {kept} of 10 itself");
    }
}

#[test]
fn what_became_of_a_known_name_is_seen_within_a_second() {
    for mounted in mounts() {
        let path = mounted.file("f", b"old");
        assert_eq!(fs::read(&path).expect("read"), b"old");
        fs::write(mounted.source.join("new"), "new").expect("written");
        fs::rename(mounted.source.join("new"), mounted.source.join("f")).expect("replaced");
        soon("another file", || fs::read(&path).expect("there") == b"new");
        fs::remove_file(mounted.source.join("f")).expect("removed");
        soon("no file", || !path.exists());
    }
}

#[test]
fn attributes_are_seen_within_a_second() {
    for mounted in mounts() {
        let path = mounted.file("f", b"old");
        assert_eq!(fs::metadata(&path).expect("stat").len(), 3);
        let source = mounted.source.join("f");
        fs::write(&source, "longer").expect("written");
        fs::set_permissions(&source, fs::Permissions::from_mode(0o4711)).expect("chmod");
        soon("size and mode", || {
            let meta = fs::metadata(&path).expect("stat");
            (meta.len(), meta.mode() & 0o7777) == (6, 0o4711)
        });
    }
}

#[test]
fn bytes_are_seen_at_once_with_passthrough_and_by_an_open_within_a_second_without() {
    for mounted in mounts() {
        let passes = mounted.stats()["mount"]["passthrough"] == true;
        let path = mounted.file("f", &[0; 4096]);
        let open = File::open(&path).expect("opened");
        let source = File::options().write(true).open(mounted.source.join("f")).expect("opened");
        for byte in 1..20 {
            source.write_all_at(&[byte; 4096], 0).expect("written");
            let mut seen = [0; 4096];
            if passes {
                open.read_exact_at(&mut seen, 0).expect("read");
                assert_eq!(seen, [byte; 4096]);
            } else {
                // The same size: only the times tell.
                soon("bytes", || fs::read(&path).expect("read") == [byte; 4096]);
            }
        }
    }
}

#[test]
fn what_is_done_through_the_mount_is_seen_at_once_on_both_sides() {
    for mounted in mounts() {
        for i in 0..50 {
            let (path, source) = (mounted.mountpoint.join("f"), mounted.source.join("f"));
            fs::write(&path, vec![b'x'; i]).expect("written");
            assert_eq!(fs::metadata(&path).expect("stat").len(), i as u64);
            assert_eq!(fs::metadata(&source).expect("stat").len(), i as u64);
            fs::rename(&path, mounted.mountpoint.join("g")).expect("renamed");
            assert!(!path.exists() && !source.exists());
            assert_eq!(names(&mounted.mountpoint), ["g"]);
            fs::remove_file(mounted.mountpoint.join("g")).expect("removed");
            assert!(names(&mounted.mountpoint).is_empty() && names(&mounted.source).is_empty());
        }
    }
}
