//! Sources of every kind: other file systems and bind mounts inside, overlayfs and FUSE below, overlayfs on top, the
//! directory that the mount covers itself, and two mounts of one directory. All need root, who alone may mount these.

use crate::harness::*;
use crate::warpfs;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("not shown here: it needs root");
    }
    root
}

/// A daemon in the foreground, whose words are kept.
struct Spoken {
    mounted: Mounted,
    child: Child,
    log: PathBuf,
}

impl Spoken {
    #[track_caller]
    fn mount(mounted: Mounted, options: &[&str]) -> Spoken {
        let log = folder_of(&mounted).join("log");
        Spoken::mount_with_log(mounted, log, options)
    }

    #[track_caller]
    fn mount_with_log(mounted: Mounted, log: PathBuf, options: &[&str]) -> Spoken {
        let mut command = warpfs([Path::new("mount"), &mounted.source, &mounted.mountpoint]);
        command.args(["--foreground", "--device", "host"]).args(options).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(File::create(&log).expect("created")).spawn().expect("started");
        let spoken = Spoken { mounted, child, log };
        eventually("mounted", || spoken.mounted.is_mounted());
        spoken
    }

    /// Lines about passthrough being off.
    fn refusals(&self) -> Vec<String> {
        let log = fs::read_to_string(&self.log).expect("readable");
        log.lines().filter(|line| line.contains("no passthrough")).map(String::from).collect()
    }

    /// Reads that the daemon served.
    fn reads(&self) -> u64 {
        self.mounted.stats()["mount"]["reads"].as_u64().expect("a number")
    }
}

impl Spoken {
    fn end(&mut self) {
        if self.mounted.is_mounted() {
            let _ = run(Command::new("umount").arg("-l").arg(&self.mounted.mountpoint));
        }
        let _ = end(&mut self.child, DEADLINE);
    }
}

impl Drop for Spoken {
    fn drop(&mut self) {
        self.end();
    }
}

fn folder_of(mounted: &Mounted) -> PathBuf {
    mounted.source.parent().expect("a folder").to_path_buf()
}

#[test]
fn a_file_system_in_the_source_can_be_unmounted_while_its_files_are_known() {
    if !is_root() {
        return;
    }
    let mounted = Mounted::with(&[]);
    let inner = mounted.source.join("inner");
    fs::create_dir_all(&inner).expect("made");
    let _tmpfs = Tmpfs::mount(&inner);
    fs::create_dir(inner.join("d")).expect("made");
    fs::write(inner.join("d/f"), "content").expect("written");
    let through = mounted.mountpoint.join("inner/d/f");
    let open = File::open(&through).expect("opened");
    assert_eq!(fs::read(&through).expect("read"), b"content");
    // Renamed through the mount, and still found by those who knew it.
    fs::rename(mounted.mountpoint.join("inner/d"), mounted.mountpoint.join("inner/e")).expect("renamed");
    let through = mounted.mountpoint.join("inner/e/f");
    assert_eq!(fs::read(&through).expect("read"), b"content");
    fs::write(&through, "changed").expect("written");
    assert_eq!(fs::read(inner.join("e/f")).expect("read"), b"changed");
    // Natively too an open file keeps it busy, its name being known does not.
    let busy = run(Command::new("umount").arg(&inner));
    assert!(!busy.status.success() && busy.stderr.contains("busy"), "{busy:?}");
    drop(open);
    // The last close is told to the daemon a moment later.
    eventually("unmounted", || run(Command::new("umount").arg(&inner)).status.success());
    assert_eq!(fs::metadata(&through).map_err(|e| e.kind()).expect_err("gone"), std::io::ErrorKind::NotFound);
    assert_eq!(fs::read_dir(mounted.mountpoint.join("inner")).expect("listed").count(), 0);
}

#[test]
fn a_directory_that_is_bound_twice_is_two_places() {
    if !is_root() {
        return;
    }
    let mounted = Mounted::prepare();
    for name in ["a/sub", "b", "whole"] {
        fs::create_dir_all(mounted.source.join(name)).expect("made");
    }
    fs::write(mounted.source.join("a/sub/f"), "x").expect("written");
    let (a, b, whole) = (mounted.source.join("a"), mounted.source.join("b"), mounted.source.join("whole"));
    let _bound = Other::mount(&["--bind", a.to_str().expect("text")], &b);
    let _below = Other::mount(&["--bind", mounted.source.to_str().expect("text")], &whole);
    let mounted = mounted.mount(&["--device", "host"], &[]).expect("mounted");
    for place in ["a/sub", "b/sub", "whole/a/sub", "a/sub", "b/sub"] {
        let path = mounted.mountpoint.join(place);
        let said = run(Command::new("sh").args(["-c", "cd \"$1\" && pwd -P", "sh"]).arg(&path)).ok().text();
        assert_eq!(Path::new(said.trim_end()), path);
        assert_eq!(fs::read(path.join("f")).expect("read"), b"x");
    }
    let number = |place: &str| fs::metadata(mounted.mountpoint.join(place)).expect("stat").ino();
    assert_ne!(number("a/sub"), number("b/sub"));
    // Natively two places are two file systems for link and rename.
    let link = fs::hard_link(mounted.mountpoint.join("a/sub/f"), mounted.mountpoint.join("b/sub/g"));
    assert_eq!(link.expect_err("refused").raw_os_error(), Some(libc::EXDEV));
    let moved = fs::rename(mounted.mountpoint.join("a/sub/f"), mounted.mountpoint.join("b/sub/g"));
    assert_eq!(moved.expect_err("refused").raw_os_error(), Some(libc::EXDEV));
}

#[test]
fn programs_and_devices_are_what_the_files_own_mount_allows() {
    if !is_root() {
        return;
    }
    let mounted = Mounted::prepare();
    fs::set_permissions(folder_of(&mounted), fs::Permissions::from_mode(0o755)).expect("chmod");
    for name in ["open", "closed"] {
        fs::create_dir(mounted.source.join(name)).expect("made");
    }
    let _open = Other::mount(&["-t", "tmpfs", "-o", "mode=755", "t"], &mounted.source.join("open"));
    let closed = mounted.source.join("closed");
    let _closed = Other::mount(&["-t", "tmpfs", "-o", "mode=755,nosuid,nodev,noexec", "t"], &closed);
    for folder in [&mounted.source, &mounted.source.join("open"), &closed] {
        fs::copy(run(Command::new("sh").args(["-c", "command -v id"])).ok().text().trim_end(), folder.join("id"))
            .expect("copied");
        fs::set_permissions(folder.join("id"), fs::Permissions::from_mode(0o4755)).expect("chmod");
        run(Command::new("mknod").arg(folder.join("null")).args(["c", "1", "3", "-m", "666"])).ok();
    }
    let outcome = |folder: &Path| {
        let mut other = Command::new("setpriv");
        let id = run(other.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(folder.join("id")).arg("-u"));
        let written = fs::write(folder.join("null"), "x").map_err(|e| e.raw_os_error());
        (id.status.success(), id.text(), written.is_ok())
    };
    // The control: the source's own mount allows both, or this shows nothing.
    let native = outcome(&mounted.source);
    let mounted = mounted.mount(&["--device", "host", "--allow-other"], &[]).expect("mounted");
    assert_eq!(outcome(&mounted.mountpoint), native);
    assert_eq!(outcome(&mounted.mountpoint.join("open")), outcome(&mounted.source.join("open")));
    assert_eq!(native, (true, "0\n".to_string(), true), "the source's file system forbids it already");
    let refused = outcome(&mounted.mountpoint.join("closed"));
    assert_eq!(refused, outcome(&closed));
    assert_eq!(refused, (false, String::new(), false));
    assert_eq!(fs::metadata(mounted.mountpoint.join("closed/id")).expect("stat").mode() & 0o7777, 0o755);
    // Only without the set-user-id bit does the program run where that is all that is forbidden.
    run(Command::new("mount").args(["-o", "remount,nosuid,exec"]).arg(&closed)).ok();
    assert_eq!(outcome(&mounted.mountpoint.join("closed")).1, "65534\n");
    assert_eq!(outcome(&closed).1, "65534\n");
}

#[test]
fn a_mount_forbids_what_the_sources_own_mount_forbids_and_what_is_asked() {
    if !is_root() {
        return;
    }
    let flags_of = |forbidden: &str, asked: &[&str]| {
        let mounted = Mounted::prepare();
        let options = format!("mode=755,{forbidden}");
        let _tmpfs = Other::mount(&["-t", "tmpfs", "-o", &options, "t"], &mounted.source);
        let mounted = mounted.mount(&[&["--device", "host"], asked].concat(), &[]).expect("mounted");
        let table = fs::read_to_string("/proc/self/mounts").expect("readable");
        let line = table.lines().find(|l| l.contains(mounted.mountpoint.to_str().expect("text"))).expect("listed");
        let options = line.split(' ').nth(3).expect("options").to_string();
        ["nosuid", "nodev", "noexec"].map(|flag| options.split(',').any(|option| option == flag))
    };
    assert_eq!(flags_of("suid,dev,exec", &[]), [false, false, false]);
    assert_eq!(flags_of("nosuid,dev,exec", &[]), [true, false, false]);
    assert_eq!(flags_of("suid,nodev,noexec", &[]), [false, true, true]);
    assert_eq!(flags_of("suid,dev,exec", &["-o", "nosuid,nodev,noexec"]), [true, true, true]);
}

#[test]
fn overlayfs_as_a_source_is_passed_through() {
    if !is_root() {
        return;
    }
    let mounted = Mounted::prepare();
    let at = |name: &str| folder_of(&mounted).join(name);
    let (lower, upper, work, source) = (at("lower"), at("upper"), at("work"), mounted.source.clone());
    fs::create_dir(&lower).expect("made");
    fs::write(lower.join("f"), "lower").expect("written");
    let _overlay = Other::overlay(&lower, &upper, &work, &source);
    let spoken = Spoken::mount(mounted, &[]);
    let path = spoken.mounted.mountpoint.join("f");
    assert_eq!(fs::read(&path).expect("read"), b"lower");
    fs::write(&path, "copied up").expect("written");
    assert_eq!(fs::read(&path).expect("read"), b"copied up");
    assert_eq!((fs::read(upper.join("f")).expect("up"), fs::read(lower.join("f")).expect("still")), {
        (b"copied up".to_vec(), b"lower".to_vec())
    });
    assert_eq!((spoken.reads(), spoken.refusals()), (0, Vec::new()));
}

#[test]
fn a_source_that_is_stacked_too_deep_is_served_by_the_daemon_and_says_so_once() {
    if !is_root() {
        return;
    }
    let mounted = Mounted::prepare();
    let at = |name: &str| folder_of(&mounted).join(name);
    let middle = at("middle");
    let _first = Other::overlay(&at("lower"), &at("upper1"), &at("work1"), &middle);
    let _second = Other::overlay(&middle, &at("upper2"), &at("work2"), &mounted.source);
    let spoken = Spoken::mount(mounted, &[]);
    for name in ["f", "g", "h"] {
        let path = spoken.mounted.mountpoint.join(name);
        fs::write(&path, name).expect("written");
        assert_eq!(fs::read(&path).expect("read"), name.as_bytes());
    }
    assert!(spoken.reads() > 0);
    let refusals = spoken.refusals();
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    assert!(refusals[0].contains("stacked too deep"), "{refusals:?}");
}

#[test]
fn a_fuse_file_system_as_a_source_works_with_the_passthrough_that_it_leaves() {
    if !is_root() {
        return;
    }
    for (options, passes) in [(&["--no-passthrough"][..], true), (&[], false)] {
        let below = Mounted::with(options);
        fs::create_dir(below.source.join("d")).expect("made");
        fs::write(below.source.join("d/f"), "content").expect("written");
        let mut mounted = Mounted::prepare();
        mounted.source = below.mountpoint.join("d");
        let log = tempfile::tempdir().expect("a folder");
        let mut spoken = Spoken::mount_with_log(mounted, log.path().join("log"), &[]);
        let path = spoken.mounted.mountpoint.join("f");
        assert_eq!(fs::read(&path).expect("read"), b"content");
        fs::write(&path, "changed").expect("written");
        assert_eq!(fs::read(&path).expect("read"), b"changed");
        assert_eq!(fs::read(below.source.join("d/f")).expect("read"), b"changed");
        assert_eq!(spoken.reads() == 0, passes, "below with {options:?}");
        assert_eq!(spoken.refusals().len(), usize::from(!passes), "{:?}", spoken.refusals());
        spoken.end();
    }
}

#[test]
fn overlayfs_lies_on_top_of_the_mount() {
    if !is_root() {
        return;
    }
    let mounted = Mounted::with(&[]);
    let path = mounted.file("f", b"lower");
    let at = |name: &str| folder_of(&mounted).join(name);
    let merged = at("merged");
    let overlay = Other::overlay(&mounted.mountpoint, &at("upper"), &at("work"), &merged);
    assert_eq!(fs::read(merged.join("f")).expect("read"), b"lower");
    fs::write(merged.join("f"), "upper").expect("written");
    assert_eq!((fs::read(merged.join("f")).expect("read"), fs::read(&path).expect("read")), {
        (b"upper".to_vec(), b"lower".to_vec())
    });
    assert!(!fs::read_dir(&merged).expect("listed").any(|e| e.expect("an entry").file_name() == ".warpfs"));
    drop(overlay);
}

#[test]
fn a_directory_is_mounted_over_itself() {
    let mut mounted = Mounted::prepare();
    fs::write(mounted.source.join("f"), "content").expect("written");
    mounted.mountpoint = mounted.source.clone();
    let mounted = mounted.mount(&["--device", &device()], &[]).expect("mounted");
    let path = mounted.mountpoint.join("f");
    assert_eq!(fs::read(&path).expect("read"), b"content");
    fs::write(&path, "changed").expect("written");
    warpfs!("verify", path).ok();
    warpfs!("umount", mounted.mountpoint).ok();
    assert_eq!(fs::read(&path).expect("the directory again"), b"changed");
}

#[test]
fn two_mounts_of_one_source_see_each_others_changes() {
    let first = Mounted::new();
    let mut second = Mounted::prepare();
    second.source = first.source.clone();
    let second = second.mount(&["--device", &device()], &[]).expect("mounted");
    let path = first.file("f", b"content");
    let other = second.mountpoint.join("f");
    assert_eq!(fs::read(&other).expect("read"), b"content");
    fs::write(&path, "longer content").expect("written");
    eventually("seen within a second", || fs::read(&other).expect("read") == b"longer content");
    warpfs!("verify", path, other).ok();
    fs::write(&other, "again").expect("written");
    warpfs!("verify", path, other).ok();
}
