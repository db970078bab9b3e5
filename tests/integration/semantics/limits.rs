//! More files than the daemon may have descriptors.

use crate::harness::*;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

/// Mounts with at most 600 descriptors: with root's power to open by file handle, or without.
fn mounted(by_handle: bool) -> Mounted {
    let mounted = Mounted::prepare();
    for folder in 0..10 {
        let folder = mounted.source.join(format!("d{folder}/sub"));
        fs::create_dir_all(&folder).expect("made");
        for i in 0..200 {
            fs::write(folder.join(format!("f{i}")), format!("content {i}")).expect("written");
        }
    }
    // prlimit sets hard limits, and root's way round them is taken away.
    let less = if by_handle { "-sys_resource" } else { "-sys_resource,-dac_read_search" };
    let mut command = Command::new("prlimit");
    command.arg("--nofile=600:600");
    if rustix::process::geteuid().is_root() {
        command.args(["setpriv", &format!("--bounding-set={less}"), &format!("--inh-caps={less}")]);
    }
    command.arg(warpfs_binary()).args(["mount", "--device", "host"]);
    run(command.args([&mounted.source, &mounted.mountpoint])).ok();
    mounted
}

fn known(mounted: &Mounted) -> u64 {
    mounted.stats()["mount"]["inodes"].as_u64().expect("a number")
}

/// Keeps the kernel from forgetting every file below the mount, whoever drops its caches meanwhile.
fn hold_all(mounted: &Mounted) -> Vec<OwnedFd> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let all = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, all).expect("as many as allowed");
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    let open = |path: String| {
        rustix::fs::open(mounted.mountpoint.join(path), flags, rustix::fs::Mode::empty()).expect("found")
    };
    (0..2000).map(|i| open(format!("d{}/sub/f{}", i / 200, i % 200))).collect()
}

/// Every file's content, by the paths of the mount.
fn all_are_there(folder: &Path, count: usize) {
    let mut seen = 0;
    for entry in fs::read_dir(folder).expect("listed") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().into_string().expect("text");
        let expected = format!("content {}", name.trim_start_matches('f'));
        assert_eq!(fs::read_to_string(entry.path()).expect("read"), expected, "{}", entry.path().display());
        seen += 1;
    }
    assert_eq!(seen, count, "{}", folder.display());
}

#[test]
fn more_files_are_known_than_there_are_descriptors() {
    for by_handle in [true, false] {
        let mounted = mounted(by_handle);
        let at = |path: &str| mounted.mountpoint.join(path);
        for i in 0..10 {
            all_are_there(&at(&format!("d{i}/sub")), 200);
        }
        let held = hold_all(&mounted);
        assert!(known(&mounted) > 2000, "{}", known(&mounted));
        let open = fs::read_dir(format!("/proc/{}/fd", mounted.daemon())).expect("listed").count();
        assert!(open < 450, "{open} descriptors");
        drop(held);
        // A directory is renamed, with everything that is known below it.
        let before = fs::metadata(at("d7/sub/f3")).expect("stat").ino();
        fs::rename(at("d7"), at("e7")).expect("renamed");
        all_are_there(&at("e7/sub"), 200);
        assert_eq!(fs::metadata(at("e7/sub/f3")).expect("stat").ino(), before);
        // Two directories change places.
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        fs::write(at("d8/sub/f0"), "content eight").expect("written");
        rustix::fs::renameat_with(rustix::fs::CWD, at("d8"), rustix::fs::CWD, at("d9"), flags).expect("exchanged");
        assert_eq!(fs::read_to_string(at("d9/sub/f0")).expect("read"), "content eight");
        assert_eq!(fs::read_to_string(at("d8/sub/f0")).expect("read"), "content 0");
        // A name goes, and the file lives on: by its other name, and while it is open.
        fs::hard_link(at("e7/sub/f5"), at("link")).expect("linked");
        fs::metadata(at("link")).expect("stat");
        fs::remove_file(at("e7/sub/f5")).expect("removed");
        fs::set_permissions(at("link"), fs::Permissions::from_mode(0o640)).expect("chmod");
        assert_eq!(fs::read_to_string(at("link")).expect("read"), "content 5");
        let file = File::options().read(true).write(true).open(at("e7/sub/f6")).expect("opened");
        fs::remove_file(at("e7/sub/f6")).expect("removed");
        assert_eq!(file.metadata().expect("fstat").nlink(), 0);
        file.set_permissions(fs::Permissions::from_mode(0o600)).expect("fchmod");
        file.set_len(3).expect("ftruncate");
        file.write_all_at(b"C", 0).expect("written");
        let mut content = [0; 3];
        file.read_exact_at(&mut content, 0).expect("read");
        assert_eq!((&content, file.metadata().expect("fstat").mode() & 0o777), (b"Con", 0o600));
    }
}

#[test]
fn what_is_replaced_behind_the_mount_is_never_taken_for_what_was_there() {
    for by_handle in [true, false] {
        let mounted = mounted(by_handle);
        let _held = hold_all(&mounted);
        let (source, path) = (mounted.source.join("d9/sub/f9"), mounted.mountpoint.join("d9/sub/f9"));
        for round in 0..20 {
            fs::remove_file(&source).expect("removed");
            // The number is often the old one's.
            fs::write(&source, format!("new {round}")).expect("written");
            eventually("seen within a second", || {
                fs::read_to_string(&path).is_ok_and(|text| text == format!("new {round}"))
            });
        }
    }
}
