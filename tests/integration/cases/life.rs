//! What hangs: dead mounts, on which everything is "transport endpoint is not connected", and readers of what changes behind
//! the mount.

use super::{EACH_WAY, all_end};
use crate::harness::*;
use crate::warpfs;
use std::fs::{self, File};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn m06_sigterm_and_sigint_unmount_cleanly() {
    for number in [libc::SIGTERM, libc::SIGINT] {
        let mounted = Mounted::new();
        let path = mounted.file("f", &noise(1, 1 << 20));
        warpfs!("preload", path).ok();
        let (daemon, socket) = (mounted.daemon(), mounted.socket());
        signal(daemon, number);
        eventually("the daemon ends", || !is_alive(daemon));
        assert!(!mounted.is_mounted() && !socket.exists(), "signal {number}");
        assert_eq!(std::fs::read_dir(&mounted.mountpoint).expect("no dead mount").count(), 0);
    }
}

#[test]
fn m06_a_daemon_that_dies_leaves_no_dead_mount() {
    // By the system's hand, by a panic that cannot be caught, by a bad instruction.
    for number in [libc::SIGKILL, libc::SIGABRT, libc::SIGILL] {
        let mounted = Mounted::new();
        let path = mounted.file("f", &noise(2, 1 << 20));
        warpfs!("preload", path).ok();
        let (daemon, loaders) = (mounted.daemon(), mounted.loaders());
        assert_eq!(loaders.len(), 1, "a loader for the device");
        // Somebody is in the middle of it.
        let open = std::fs::File::open(&path).expect("opened");
        let begun = Instant::now();
        signal(daemon, number);
        eventually(&format!("signal {number}, and the mount is taken away"), || !mounted.is_mounted());
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert_eq!(std::fs::read_dir(&mounted.mountpoint).expect("no dead mount").count(), 0);
        eventually("its loader leaves", || !is_alive(loaders[0]));
        drop(open);
        // The same mount point works again.
        let device = device();
        let again = mounted.mount(&["--device", &device], &[]).expect("mounted");
        warpfs!("verify", again.mountpoint.join("f")).ok();
    }
}

#[test]
fn m06_a_dead_mount_is_recovered_by_the_next_mount() {
    // A dead mount without its supervisor, as a power cut or the OOM killer may leave it.
    let mounted = Mounted::new();
    mounted.file("f", b"x");
    let daemon = mounted.daemon();
    let stat = std::fs::read_to_string(format!("/proc/{daemon}/stat")).expect("alive");
    let supervisor: i32 = stat.rsplit(") ").next().and_then(|s| s.split(' ').nth(1)?.parse().ok()).expect("a parent");
    signal(supervisor, libc::SIGKILL);
    eventually("no supervisor", || !is_alive(supervisor));
    signal(daemon, libc::SIGKILL);
    eventually("the daemon is gone", || !is_alive(daemon));
    assert!(mounted.is_mounted(), "the control: a dead mount is there");
    let dead = std::fs::read_dir(&mounted.mountpoint).expect_err("dead").raw_os_error();
    assert!([Some(libc::ENOTCONN), Some(libc::ECONNABORTED)].contains(&dead), "{dead:?}");
    let device = device();
    let again = mounted.mount(&["--device", &device], &[]).expect("mounted");
    assert_eq!(std::fs::read(again.mountpoint.join("f")).expect("read"), b"x");
}

#[test]
fn m07_files_change_behind_the_mount_while_many_read() {
    const FILES: u64 = 8;
    let seconds = Duration::from_secs(5);
    for options in EACH_WAY {
        let mounted = Mounted::with(options);
        for i in 0..FILES {
            mounted.file(&format!("f{i}"), &[b'0'; 300_000]);
        }
        let over = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..32)
            .map(|i| {
                let (folder, over) = (mounted.mountpoint.clone(), over.clone());
                std::thread::spawn(move || {
                    let (mut reads, mut cut) = (0_u64, 0_u64);
                    while !over.load(Ordering::Relaxed) {
                        let path = folder.join(format!("f{}", (i + reads) % FILES));
                        let content = fs::read(&path).expect("read");
                        // Every byte is one that somebody wrote, or a zero where it was cut off while it was read: a
                        // kernel reads under passthrough as natively, and without a lock.
                        assert!(content.iter().all(|b| b.is_ascii_digit() || *b == 0), "foreign bytes");
                        cut += u64::from(content.contains(&0));
                        fs::metadata(&path).expect("stat");
                        reads += 1;
                    }
                    (reads, cut)
                })
            })
            .collect();
        let until = Instant::now() + seconds;
        let mut changes = 0_u64;
        while Instant::now() < until {
            changes += 1;
            let path = mounted.source.join(format!("f{}", changes % FILES));
            let content = vec![b'0' + (changes % 10) as u8; 200_000 + (changes as usize * 37) % 200_000];
            match changes % 3 {
                0 => fs::write(&path, content).expect("rewritten"),
                1 => {
                    fs::write(mounted.source.join("next"), content).expect("written");
                    fs::rename(mounted.source.join("next"), &path).expect("replaced");
                }
                _ => File::options().write(true).open(&path).and_then(|file| file.set_len(1000)).expect("shortened"),
            }
        }
        over.store(true, Ordering::Relaxed);
        let reads = all_end(readers, DEADLINE);
        let all = reads.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        eprintln!("m07: {changes} changes, {} reads, {} with zeros, mounted with {options:?}", all.0, all.1);
        assert!(changes > 20 && reads.iter().all(|(count, _)| *count > 1), "the control: {changes}, {reads:?}");
        // When it is quiet, everybody sees the last of it.
        std::thread::sleep(Duration::from_millis(1100));
        for i in 0..FILES {
            let name = format!("f{i}");
            let same = fs::read(mounted.mountpoint.join(&name)).expect("read")
                == fs::read(mounted.source.join(&name)).expect("read");
            assert!(same, "{name} is not what it became, mounted with {options:?}");
        }
    }
}
