//! What goes wrong with names: lookups that race with forgets, listings that leak or are stale, numbers that collide.

use super::{EACH_WAY, all_end, alone, drop_caches, only_the_root_is_left, size};
use crate::harness::*;
use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Result};
use std::os::unix::fs::{DirEntryExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Some names that everybody in the storm works on, so that they meet.
fn name(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("n{}", number % 40))
}

/// One deed of each participant in the storm, by its number.
const DEEDS: [fn(&Path, u64) -> Result<()>; 8] = [
    |folder, i| fs::metadata(name(folder, i)).map(drop),
    |folder, i| fs::read(name(folder, i * 7)).map(drop),
    |folder, i| fs::write(name(folder, i), "content"),
    |folder, i| fs::hard_link(name(folder, i), name(folder, i * 3 + 1)),
    |folder, i| fs::remove_file(name(folder, i * 5)),
    |folder, i| fs::rename(name(folder, i * 11), name(folder, i * 13 + 2)),
    |folder, _| fs::read_dir(folder)?.try_for_each(|entry| entry?.metadata().map(drop)),
    |folder, i| {
        let inner = folder.join(format!("d{}", i % 3));
        fs::create_dir(&inner)?;
        fs::write(inner.join("f"), "x")?;
        fs::remove_dir_all(inner)
    },
];

#[test]
fn m04_lookups_links_and_unlinks_race_with_forgets() {
    if !is_root() {
        return; // nobody else may have the kernel forget
    }
    let _alone = alone();
    let mounted = Mounted::new();
    let until = Instant::now() + Duration::from_secs(size("WARPFS_STORM_SECONDS", 10));
    let done = Arc::new([const { AtomicU64::new(0) }; DEEDS.len()]);
    // Each deed twice, so that it also meets itself.
    let threads = (0..2 * DEEDS.len())
        .map(|i| {
            let (folder, done) = (mounted.mountpoint.clone(), done.clone());
            std::thread::spawn(move || {
                let mut unexpected = BTreeSet::new();
                let mut number = i as u64 * 1000;
                while Instant::now() < until {
                    number += 1;
                    match DEEDS[i % DEEDS.len()](&folder, number) {
                        Ok(()) => drop(done[i % DEEDS.len()].fetch_add(1, Ordering::Relaxed)),
                        // What a race leads to natively.
                        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::AlreadyExists) => {}
                        Err(e) => drop(unexpected.insert(format!("deed {}: {e}", i % DEEDS.len()))),
                    }
                }
                unexpected
            })
        })
        .collect::<Vec<_>>();
    let mut most = 0;
    while Instant::now() < until {
        drop_caches();
        most = most.max(mounted.inodes());
        std::thread::sleep(Duration::from_millis(20));
    }
    let unexpected: BTreeSet<_> = all_end(threads, DEADLINE).into_iter().flatten().collect();
    assert!(unexpected.is_empty(), "{unexpected:?}");
    let done: Vec<_> = done.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    assert!(most > 1 && done.iter().all(|count| *count > 0), "the control: {most} inodes, {done:?} deeds");
    eprintln!("m04: {done:?} deeds, at most {most} inodes seen");
    only_the_root_is_left(&mounted);
    // And what is left is what the source has.
    let names = |folder: &Path| -> BTreeSet<_> {
        fs::read_dir(folder).expect("listed").map(|entry| entry.expect("an entry").file_name()).collect()
    };
    assert_eq!(names(&mounted.mountpoint), names(&mounted.source));
}

#[test]
fn m05_a_listing_of_100000_entries_leaves_no_inode() {
    const ENTRIES: usize = 100_000;
    let _alone = alone();
    let mounted = Mounted::new();
    let folder = mounted.source.join("d");
    fs::create_dir(&folder).expect("made");
    for i in 0..ENTRIES {
        File::create(folder.join(format!("entry-{i}"))).expect("created");
    }
    let folder = mounted.mountpoint.join("d");
    let listed = || -> HashSet<_> {
        fs::read_dir(&folder).expect("listed").map(|entry| entry.expect("an entry").file_name()).collect()
    };
    // The kernel asks for names alone where nobody looks at what it got with attributes.
    for _ in 0..3 {
        assert_eq!(listed().len(), ENTRIES);
    }
    if is_root() {
        only_the_root_is_left(&mounted);
        // The control: whoever looks at each has each known.
        let looked = fs::read_dir(&folder).expect("listed").filter(|e| e.as_ref().is_ok_and(|e| e.metadata().is_ok()));
        assert_eq!(looked.count(), ENTRIES);
        assert!(mounted.inodes() > ENTRIES as u64, "{}", mounted.inodes());
        only_the_root_is_left(&mounted);
    }
}

#[test]
fn m09_changes_behind_the_mount_are_seen_within_a_second() {
    // The time that the README names, and a little for a busy machine's clock.
    const SEEN: Duration = Duration::from_millis(1050);
    for options in EACH_WAY {
        let mounted = Mounted::with(options);
        for name in ["gone", "renamed", "grown", "rewritten", "replaced"] {
            mounted.file(name, b"before");
        }
        fs::create_dir(mounted.source.join("d")).expect("made");
        let state = |folder: &Path| {
            let mut seen: Vec<_> = ["gone", "renamed", "to", "grown", "rewritten", "replaced", "new", "d", "d/new"]
                .map(|name| (name, fs::metadata(folder.join(name)).ok().map(|m| (m.len(), m.nlink(), m.mode()))))
                .into_iter()
                .map(|(name, meta)| (name.to_string(), meta, fs::read(folder.join(name)).ok()))
                .collect();
            for listed in [folder.to_path_buf(), folder.join("d")] {
                let mut names: Vec<_> = fs::read_dir(listed)
                    .expect("listed")
                    .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
                    .collect();
                names.sort();
                seen.push((names.join(" "), None, None));
            }
            seen
        };
        // The kernel knows all of it, and what is not there too.
        assert_eq!(state(&mounted.mountpoint), state(&mounted.source));
        let at = |name: &str| mounted.source.join(name);
        fs::remove_file(at("gone")).expect("removed");
        fs::rename(at("renamed"), at("to")).expect("renamed");
        fs::write(at("grown"), "after, and longer").expect("written");
        fs::write(at("rewritten"), "AFTER!").expect("written");
        fs::write(at("other"), "another").expect("written");
        fs::rename(at("other"), at("replaced")).expect("replaced");
        fs::write(at("new"), "new").expect("written");
        fs::write(at("d/new"), "new").expect("written");
        fs::set_permissions(at("d"), fs::Permissions::from_mode(0o700)).expect("chmod");
        std::thread::sleep(SEEN);
        assert_eq!(state(&mounted.mountpoint), state(&mounted.source), "mounted with {options:?}");
    }
}

#[test]
fn m14_file_systems_in_the_source_have_numbers_of_their_own() {
    // As seen: plain readdir gave the raw number where stat gives the unique one.
    if !is_root() {
        return; // nobody else may mount there
    }
    // Two file systems of a kind that counts from 1 in each.
    let folder = tempfile::tempdir().expect("a folder");
    let _outer = Tmpfs::mount(folder.path());
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).expect("made");
    let _inner = Tmpfs::mount(&inner);
    for i in 0..1000 {
        File::create(folder.path().join(format!("f{i}"))).expect("created");
        File::create(inner.join(format!("f{i}"))).expect("created");
    }
    let numbers = |root: &Path| -> Vec<u64> {
        let listed = run(Command::new("find").arg(root).args(["-printf", "%i\\n"])).ok();
        assert_eq!(listed.stderr, "", "find complains");
        listed.text().lines().map(|line| line.parse().expect("a number")).collect()
    };
    let different = |numbers: &[u64]| numbers.iter().collect::<HashSet<_>>().len();
    let raw = numbers(folder.path());
    assert!(different(&raw) < raw.len(), "the control: numbers collide in the source");
    let mounted = Mounted::over(folder.path(), &[]);
    let seen = numbers(&mounted.mountpoint);
    assert_eq!((seen.len(), different(&seen)), (2002, 2002));
    let listed = || -> Vec<(u64, u64)> {
        let entries = fs::read_dir(mounted.mountpoint.join("inner")).expect("listed");
        entries.map(|e| e.expect("an entry")).map(|e| (e.ino(), fs::metadata(e.path()).expect("stat").ino())).collect()
    };
    // Twice: the kernel asks for attributes in the first listing, and for names only in a later one.
    let (first, second) = (listed(), listed());
    assert_eq!(first.len(), 1000);
    assert!(first.iter().chain(&second).all(|(listed, stat)| listed == stat), "a listing and stat disagree");
}
