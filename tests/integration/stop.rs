//! The end that somebody asks for: signals, in the background and in the foreground, with and without users.

use crate::harness::*;
use crate::warpfs;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A daemon in the foreground, whose words go to a file.
struct Foreground {
    mounted: Mounted,
    supervisor: std::process::Child,
    words: std::path::PathBuf,
}

impl Foreground {
    #[track_caller]
    fn start(mounted: Mounted, options: &[&str]) -> Foreground {
        let words = mounted.source.with_file_name("words");
        let file = std::fs::File::create(&words).expect("created");
        let mut command = warpfs(["mount", "--foreground", "--device", &device()]);
        command.args(options).args([&mounted.source, &mounted.mountpoint]).stdout(Stdio::null()).stderr(file);
        // A group of its own, as a shell gives it, for the signals of a terminal.
        let supervisor = std::os::unix::process::CommandExt::process_group(&mut command, 0).spawn().expect("started");
        let foreground = Foreground { mounted, supervisor, words };
        eventually("mounted", || foreground.mounted.is_mounted());
        eventually("ready", || foreground.words().contains("is mounted on"));
        foreground
    }

    fn words(&self) -> String {
        std::fs::read_to_string(&self.words).expect("readable")
    }

    /// As Ctrl-C does it: to every process of the group.
    fn interrupt(&self) {
        let group = -(self.supervisor.id() as i32);
        // SAFETY: sends a signal to our own children; touches no memory.
        assert_eq!(unsafe { libc::kill(group, libc::SIGINT) }, 0);
    }

    /// Its exit code.
    #[track_caller]
    fn end(&mut self) -> Option<i32> {
        end(&mut self.supervisor, DEADLINE).expect("it ends").code()
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        // The daemon ends when its mount is taken away; a supervisor that is left is ended here.
        if self.supervisor.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = run(std::process::Command::new("umount").arg("-l").arg(&self.mounted.mountpoint));
            let _ = end(&mut self.supervisor, Duration::from_secs(15));
        }
    }
}

/// Reads 4 KiB at `offset`, which nobody has read before, so that no page of it is in the kernel's memory.
fn read_at(file: &std::fs::File, offset: u64) -> std::io::Result<u8> {
    let mut piece = [0; 4096];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut piece, offset).map(|()| piece[0])
}

#[test]
fn sigterm_unmounts_while_a_file_is_open() {
    let mounted = Mounted::new();
    let path = mounted.file("f", b"x");
    let open = std::fs::File::open(&path).expect("opened");
    let daemon = mounted.daemon();
    signal(daemon, libc::SIGTERM);
    eventually("the mount is gone", || !mounted.is_mounted());
    drop(open);
    eventually("the daemon ends", || !is_alive(daemon));
}

#[test]
fn in_the_foreground_it_stays_and_ends_with_its_signal() {
    let mounted = Mounted::prepare();
    let device = device();
    let mut command = warpfs(["mount", "--foreground", "--device", &device]);
    command.args([&mounted.source, &mounted.mountpoint]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().expect("started");
    eventually("mounted", || mounted.is_mounted());
    assert!(child.try_wait().expect("ours").is_none());
    signal(child.id() as i32, libc::SIGTERM);
    let status = end(&mut child, DEADLINE).expect("it ends");
    assert!(status.success(), "{status}");
    assert!(!mounted.is_mounted());
}

#[test]
fn after_sigterm_open_files_are_served_for_ten_seconds_and_then_cut_off() {
    let mounted = Mounted::prepare();
    sparse(&mounted.source.join("large"), 256 << 20);
    mounted.file("log", b"");
    // Data goes through the daemon, so that who is served and who is not can be told.
    let mut daemon = Foreground::start(mounted, &["--no-passthrough"]);
    let large = std::fs::File::open(daemon.mounted.mountpoint.join("large")).expect("opened");
    let mut log = std::fs::OpenOptions::new();
    let log = log.append(true).open(daemon.mounted.mountpoint.join("log")).expect("opened");
    let (pid, socket, loaders) = (daemon.mounted.daemon(), daemon.mounted.socket(), daemon.mounted.loaders());
    let begun = Instant::now();
    signal(daemon.supervisor.id() as i32, libc::SIGTERM);
    eventually("it is out of sight", || !daemon.mounted.is_mounted());
    while begun.elapsed() < Duration::from_secs(7) {
        let offset = begun.elapsed().as_secs() * (16 << 20);
        assert_eq!(read_at(&large, offset).expect("served"), (offset >> 16) as u8, "at {:?}", begun.elapsed());
        std::io::Write::write_all(&mut &log, b"line\n").expect("served");
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(is_alive(pid));
    assert_eq!(daemon.end(), Some(1), "{}", daemon.words());
    let took = begun.elapsed();
    assert!(took > Duration::from_secs(9) && took < Duration::from_secs(20), "{took:?}");
    let error = read_at(&large, 200 << 20).expect_err("cut off").raw_os_error();
    assert!([Some(libc::ENOTCONN), Some(libc::ECONNABORTED), Some(libc::EIO)].contains(&error), "{error:?}");
    let words = daemon.words();
    assert_eq!(words.matches("which had 2 files open").count(), 1, "{words}");
    assert!(std::fs::read(daemon.mounted.source.join("log")).expect("read").starts_with(b"line\nline\n"));
    assert!(!is_alive(pid) && !socket.exists());
    eventually("its loader leaves", || loaders.iter().all(|loader| !is_alive(*loader)));
    assert_eq!(std::fs::read_dir(&daemon.mounted.mountpoint).expect("no dead mount").count(), 0);
}

#[test]
fn ctrl_c_is_one_order_and_the_second_cuts_off_at_once() {
    let mounted = Mounted::prepare();
    mounted.file("f", b"x");
    let mut daemon = Foreground::start(mounted, &[]);
    let open = std::fs::File::open(daemon.mounted.mountpoint.join("f")).expect("opened");
    let pid = daemon.mounted.daemon();
    let begun = Instant::now();
    // Both the supervisor and the daemon get it, and the supervisor passes its own on, which may come late.
    daemon.interrupt();
    std::thread::sleep(Duration::from_millis(200));
    signal(pid, libc::SIGINT);
    eventually("it is out of sight", || !daemon.mounted.is_mounted());
    std::thread::sleep(Duration::from_secs(2));
    assert!(is_alive(pid), "it serves on: {}", daemon.words());
    assert!(daemon.words().contains("still in use: programs are cut off 10 s after"), "{}", daemon.words());
    daemon.interrupt();
    assert_eq!(daemon.end(), Some(1));
    assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
    let words = daemon.words();
    assert!(words.contains("second signal") && words.contains("which had 1 file open"), "{words}");
    drop(open);

    // The control: where nobody uses it, the first is the end.
    let mut daemon = Foreground::start(Mounted::prepare(), &[]);
    let begun = Instant::now();
    daemon.interrupt();
    assert_eq!(daemon.end(), Some(0), "{}", daemon.words());
    assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
}

#[test]
fn a_polite_unmount_bounds_nobody() {
    let mounted = Mounted::with(&["--no-passthrough"]);
    sparse(&mounted.source.join("large"), 64 << 20);
    let open = std::fs::File::open(mounted.mountpoint.join("large")).expect("opened");
    let daemon = mounted.daemon();
    warpfs!("umount", "--lazy", mounted.mountpoint).ok();
    std::thread::sleep(Duration::from_secs(12));
    assert_eq!(read_at(&open, 32 << 20).expect("served"), ((32_u64 << 20) >> 16) as u8);
    drop(open);
    eventually("the daemon ends", || !is_alive(daemon));
}

#[test]
fn the_end_of_a_daemon_takes_nothing_away_that_was_mounted_there_since() {
    if !rustix::process::geteuid().is_root() {
        return; // nobody else may mount there
    }
    for lazily in [true, false] {
        let mounted = Mounted::new();
        let path = mounted.file("f", b"x");
        let open = std::fs::File::open(&path).expect("opened");
        let daemon = mounted.daemon();
        if lazily {
            warpfs!("umount", "--lazy", mounted.mountpoint).ok();
        } else {
            signal(daemon, libc::SIGTERM);
        }
        eventually("it is out of sight", || !mounted.is_mounted());
        let other = Tmpfs::mount(&mounted.mountpoint);
        std::fs::write(mounted.mountpoint.join("precious"), "x").expect("written");
        drop(open);
        eventually("the daemon ends", || !is_alive(daemon));
        std::thread::sleep(Duration::from_millis(300));
        let kept = std::fs::read(mounted.mountpoint.join("precious"));
        drop(other);
        assert_eq!(kept.expect("still there"), b"x", "lazily: {lazily}");
    }
}

#[test]
fn an_aborted_connection_ends_the_daemon_and_leaves_no_dead_mount() {
    if !rustix::process::geteuid().is_root() {
        return; // it mounts fusectl
    }
    let mut daemon = Foreground::start(Mounted::prepare(), &[]);
    let table = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let point = daemon.mounted.mountpoint.display().to_string();
    let line = table.lines().find(|line| line.split(' ').nth(4) == Some(&point)).expect("listed");
    let minor = line.split(' ').nth(2).and_then(|device| device.split_once(':')).expect("a device number").1;
    // A namespace of its own, which goes with its fusectl.
    let script = r#"mount -t fusectl none "$1" && echo 1 > "$1/$2/abort""#;
    let empty = tempfile::tempdir().expect("a folder");
    let mut command = std::process::Command::new("unshare");
    run(command.args(["--mount", "sh", "-c", script, "sh"]).arg(empty.path()).arg(minor)).ok();
    assert_eq!(daemon.end(), Some(1));
    assert!(daemon.words().contains("connection ended before the mount"), "{}", daemon.words());
    assert_eq!(std::fs::read_dir(&daemon.mounted.mountpoint).expect("no dead mount").count(), 0);
}

/// Every mount ends with status 0, in its turn by unmounting and by a signal (kvikio 497: a crash at the end).
#[test]
fn g15_a_hundred_mounts_that_load_end_without_a_crash() {
    let mut folder = Mounted::prepare();
    folder.file("f", &noise(15, 70_000));
    for cycle in 0..100 {
        let mut daemon = Foreground::start(folder, &[]);
        warpfs!("preload", daemon.mounted.mountpoint.join("f")).ok();
        if cycle % 2 == 0 {
            warpfs!("umount", daemon.mounted.mountpoint).ok();
        } else {
            signal(daemon.supervisor.id() as i32, libc::SIGTERM);
        }
        assert_eq!(daemon.end(), Some(0), "cycle {cycle}: {}", daemon.words());
        folder = std::mem::replace(&mut daemon.mounted, Mounted::prepare());
    }
    // The control: a crash would be seen.
    let mut daemon = Foreground::start(folder, &[]);
    signal(daemon.supervisor.id() as i32, libc::SIGKILL);
    assert_eq!(daemon.end(), None);
}
