//! Beginning and end: the background, deaths, and who is left unharmed.

use crate::harness::*;
use crate::warpfs;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn mount_returns_when_it_is_mounted_and_umount_when_the_daemon_is_gone() {
    let mounted = Mounted::new();
    assert!(mounted.is_mounted());
    let daemon = mounted.daemon();
    assert!(is_alive(daemon));
    // It lives in the background: no terminal, no directory of ours.
    assert_eq!(std::fs::read_link(format!("/proc/{daemon}/fd/0")).expect("open"), std::path::Path::new("/dev/null"));
    assert_eq!(std::fs::read_link(format!("/proc/{daemon}/cwd")).expect("known"), std::path::Path::new("/"));
    warpfs!("umount", mounted.mountpoint).ok();
    assert!(!mounted.is_mounted() && !is_alive(daemon));
}

#[test]
fn the_kernel_lists_it_as_warpfs_with_its_source() {
    let mut inner = Mounted::prepare();
    inner.source.push("with, comma");
    std::fs::create_dir(&inner.source).expect("created");
    std::fs::write(inner.source.join("f"), "x").expect("written");
    let inner = inner.mount(&["--device", &device()], &[]).expect("mounted");
    let table = std::fs::read_to_string("/proc/self/mounts").expect("readable");
    let line = table.lines().find(|line| line.contains(inner.mountpoint.to_str().expect("text"))).expect("listed");
    assert!(line.contains(" fuse.warpfs "), "{line}");
    assert!(line.contains("with,\\040comma"), "{line}");
    assert_eq!(std::fs::read(inner.mountpoint.join("f")).expect("read"), b"x");
}

#[test]
fn a_daemon_keeps_nothing_of_whoever_started_it() {
    let mounted = Mounted::prepare();
    let lock = mounted.source.with_file_name("lock");
    // A script that mounts while it holds a lock, as scripts do that must not run twice.
    let script = r#"exec 9>"$1"; flock 9 && "$0" mount --device host "$2" "$3""#;
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script]).arg(warpfs_binary()).arg(&lock);
    run(command.args([&mounted.source, &mounted.mountpoint])).ok();
    assert!(mounted.is_mounted());
    run(std::process::Command::new("flock").arg("--nonblock").arg(&lock).arg("true")).ok();
}

#[test]
fn a_killed_supervisor_ends_nothing() {
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(2, 1 << 20));
    let (daemon, socket) = (mounted.daemon(), mounted.socket());
    let supervisor = parent(daemon);
    signal(supervisor, libc::SIGKILL);
    eventually("no supervisor", || !is_alive(supervisor));
    warpfs!("preload", path).ok();
    warpfs!("verify", path).ok();
    warpfs!("umount", mounted.mountpoint).ok();
    assert!(!mounted.is_mounted() && !is_alive(daemon) && !socket.exists());
}

#[test]
fn the_mount_point_of_a_killed_daemon_is_usable_within_a_second() {
    // The best of three, because a busy machine may keep anybody waiting.
    let took = (0..3).map(|_| {
        let mounted = Mounted::new();
        let daemon = mounted.daemon();
        let begun = Instant::now();
        signal(daemon, libc::SIGKILL);
        eventually("usable", || std::fs::read_dir(&mounted.mountpoint).is_ok_and(|mut names| names.next().is_none()));
        begun.elapsed()
    });
    let best = took.min().expect("three");
    assert!(best < Duration::from_secs(1), "{best:?}");
}

#[test]
fn umount_says_that_somebody_uses_the_mount() {
    let mounted = Mounted::new();
    let path = mounted.file("f", b"x");
    let open = std::fs::File::open(&path).expect("opened");
    warpfs!("umount", mounted.mountpoint).fails(&["in use", "--lazy"]);
    assert!(mounted.is_mounted());
    drop(open);
    warpfs!("umount", mounted.mountpoint).ok();
}

#[test]
fn umount_waits_for_who_only_looks() {
    let mounted = Mounted::new();
    let path = mounted.file("f", b"x");
    let open = std::fs::File::open(&path).expect("opened");
    let look = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(open);
    });
    warpfs!("umount", mounted.mountpoint).ok();
    look.join().expect("it looked");
    assert!(!mounted.is_mounted());
}

#[test]
fn the_daemon_maps_no_copy() {
    if !on_host() {
        return; // for CUDA, a context would show in the driver's list; see the GPU round
    }
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(3, 8 << 20));
    let session = warpfs::client::Session::of_path(&path).expect("a session");
    let _held = session.open(&path).expect("opened");
    let maps = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("alive");
    assert!(!maps(mounted.daemon()).contains("/memfd:warpfs"));
    // The control: in this process, which holds it, the mapping shows.
    assert!(maps(std::process::id() as i32).contains("/memfd:warpfs"));
}

#[test]
fn a_killed_loader_fails_nothing_but_its_work() {
    let mounted = Mounted::new();
    let files: Vec<_> = (0..4).map(|i| mounted.file(&format!("f{i}"), &noise(i, 1 << 20))).collect();
    warpfs!("preload", files[0]).ok();
    for file in &files[1..] {
        let loaders = mounted.loaders();
        assert_eq!(loaders.len(), 1);
        signal(loaders[0], libc::SIGKILL);
        warpfs!("preload", file).ok();
        warpfs!("verify", file).ok();
    }
    assert_eq!(getxattr(&files[0], "user.warpfs.state").as_deref(), Ok("resident"));
    warpfs!("verify", files[0]).ok();
}

#[test]
fn a_loader_killed_in_the_middle_of_a_load() {
    let mounted = Mounted::new();
    let path = mounted.mountpoint.join("large");
    sparse(&mounted.source.join("large"), 3 << 30);
    let small = mounted.file("small", &noise(1, 1000));
    warpfs!("preload", small).ok();
    let mut preload = warpfs(["preload".as_ref(), path.as_os_str()]).stdout(Stdio::null()).spawn().expect("started");
    eventually("it is loading", || getxattr(&path, "user.warpfs.state").as_deref() == Ok("loading"));
    let loaders = mounted.loaders();
    assert_eq!(loaders.len(), 1);
    signal(loaders[0], libc::SIGKILL);
    assert_eq!(mounted.counter("loads"), 1, "killed before it was done");
    // Its work goes to a new loader.
    assert!(end(&mut preload, DEADLINE).expect("it ends").success());
    assert_ne!(mounted.loaders(), loaders);
    warpfs!("preload", path).ok();
    warpfs!("verify", path, small).ok();
}

#[test]
fn twenty_mounts_come_and_go_without_a_trace() {
    // G15: the end of a process is where libraries crash.
    let mut mounted = Mounted::prepare();
    mounted.file("f", &noise(4, 100_000));
    let device = device();
    for _ in 0..20 {
        mounted = mounted.mount(&["--device", &device], &[]).expect("mounted again");
        warpfs!("verify", mounted.mountpoint.join("f")).ok();
        let (daemon, loaders) = (mounted.daemon(), mounted.loaders());
        warpfs!("umount", mounted.mountpoint).ok();
        eventually("all gone", || !is_alive(daemon) && loaders.iter().all(|loader| !is_alive(*loader)));
    }
}

#[test]
fn an_ordinary_user_mounts_and_is_served() {
    if !rustix::process::geteuid().is_root() {
        return; // then every other test shows this
    }
    let helper = std::process::Command::new("sh").args(["-c", "command -v fusermount3"]).output();
    if !helper.is_ok_and(|output| output.status.success()) {
        assert!(!on_host(), "fusermount3 is missing: mount-scripts/install-dependencies.sh installs it");
        return;
    }
    let folder = tempfile::Builder::new().prefix("warpfs, user-").tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    for name in ["source, 1", "mount, 1", "run"] {
        std::fs::create_dir(at(name)).expect("created");
        std::os::unix::fs::chown(at(name), Some(65534), Some(65534)).expect("theirs");
    }
    std::os::unix::fs::chown(folder.path(), Some(65534), Some(65534)).expect("theirs");
    std::fs::write(at("source, 1/f"), noise(5, 1 << 20)).expect("written");
    std::fs::copy(warpfs_binary(), at("warpfs")).expect("copied");
    // A mount namespace in which everybody may open /dev/fuse, as on a workstation.
    let script = r#"
        mknod -m 666 "$1/fuse" c 10 229 && mount --bind "$1/fuse" /dev/fuse || exit 9
        exec setpriv --reuid=65534 --regid=65534 --clear-groups env XDG_RUNTIME_DIR="$1/run" sh -ec '
            cd "$1"
            trap "fusermount3 -uz \"mount, 1\" 2>/dev/null || true" EXIT
            timeout 20 ./warpfs mount --device host "source, 1" "mount, 1"
            grep -q "fuse.warpfs" /proc/self/mounts
            timeout 20 ./warpfs preload "mount, 1/f"
            timeout 20 ./warpfs verify "mount, 1/f"
            timeout 20 ./warpfs read "mount, 1/f" | cmp - "source, 1/f"
            echo new > "mount, 1/new"
            test "$(stat -c %u:%g "source, 1/new")" = 65534:65534
            cat "mount, 1/.warpfs/socket" | grep -q "^$1/run/warpfs/"
            timeout 20 ./warpfs umount "mount, 1"
            ! grep -q "fuse.warpfs.*user_id=65534" /proc/self/mounts
            test -z "$(ls run/warpfs)"
        ' sh "$1""#;
    run(std::process::Command::new("unshare").args(["--mount", "sh", "-c", script, "sh"]).arg(folder.path())).ok();
}

#[test]
fn a_foreign_mount_on_top_is_left_alone() {
    if !rustix::process::geteuid().is_root() {
        return; // nobody else may mount there
    }
    let mounted = Mounted::new();
    let daemon = mounted.daemon();
    let foreign = Tmpfs::mount(&mounted.mountpoint);
    std::fs::write(mounted.mountpoint.join("precious"), "x").expect("written");
    signal(daemon, libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(500));
    let kept = std::fs::read(mounted.mountpoint.join("precious"));
    drop(foreign);
    assert_eq!(kept.expect("still there"), b"x");
    // When it is gone, the same signal does its work.
    signal(daemon, libc::SIGTERM);
    eventually("the daemon ends", || !is_alive(daemon));
    assert!(!mounted.is_mounted());
}

#[test]
fn a_mount_that_was_moved_is_still_taken_away() {
    for number in [libc::SIGTERM, libc::SIGKILL] {
        let mut mounted = Mounted::prepare();
        let (before, after) = (mounted.mountpoint.join("p"), mounted.mountpoint.join("q"));
        mounted.mountpoint = before.join("m");
        std::fs::create_dir_all(&mounted.mountpoint).expect("created");
        let mounted = mounted.mount(&["--device", "host"], &[]).expect("mounted");
        let daemon = mounted.daemon();
        std::fs::rename(&before, &after).expect("moved, with the mount in it");
        signal(daemon, number);
        eventually("no dead mount", || {
            std::fs::read_dir(after.join("m")).is_ok_and(|mut names| names.next().is_none())
        });
        eventually("the daemon ends", || !is_alive(daemon));
    }
}

#[test]
fn the_limits_of_whoever_mounts_end_no_daemon() {
    let mounted = Mounted::prepare();
    for folder in ["small", "large"] {
        std::fs::create_dir(mounted.source.join(folder)).expect("made");
    }
    for i in 0..1500 {
        mounted.file(&format!("small/f{i}"), b"content");
    }
    for i in 0..300 {
        let large = std::fs::File::create(mounted.source.join(format!("large/f{i}"))).expect("made");
        large.set_len((1 << 20) + 1).expect("sparse");
    }
    let script = r#"exec "$0" mount --device host --no-passthrough "$1" "$2""#;
    let mut command = std::process::Command::new("prlimit");
    // prlimit takes CAP_SYS_RESOURCE's way out away: these are hard limits.
    command.args(["--nofile=1024:1024", "--fsize=40000000:40000000", "setpriv", "--bounding-set=-sys_resource"]);
    command.args(["--inh-caps=-sys_resource", "sh", "-c", script]);
    run(command.arg(warpfs_binary()).args([&mounted.source, &mounted.mountpoint])).ok();
    // A write beyond the daemon's own limit is an error of that write.
    let written = std::fs::write(mounted.mountpoint.join("huge"), vec![0; 48 << 20]);
    assert_eq!(written.expect_err("beyond the limit").raw_os_error(), Some(libc::EFBIG));
    std::fs::remove_file(mounted.mountpoint.join("huge")).expect("removed");
    // More files than it has descriptors for: small ones share them.
    warpfs!("preload", mounted.mountpoint.join("small")).ok();
    let resident = || mounted.device()["resident_files"].as_u64().expect("a number");
    assert_eq!((resident(), mounted.counter("evictions")), (1500, 0));
    // Of large ones the oldest copies go, and the directory stays what it is.
    warpfs!("preload", mounted.mountpoint.join("large")).ok();
    warpfs!("evict", mounted.mountpoint.join("small")).ok();
    assert!(resident() <= 256, "{}", resident());
    assert!(mounted.counter("evictions") > 44);
    assert_eq!(std::fs::read_dir(mounted.mountpoint.join("small")).expect("listed").count(), 1500);
    warpfs!("verify", mounted.mountpoint.join("small/f7")).ok();
}

#[test]
fn nobody_is_served_as_root_by_a_daemon_that_cannot_become_him() {
    if !rustix::process::geteuid().is_root() {
        return; // it is about root
    }
    // The control: with both, the file is made, by him; root's is refused to him all the same.
    for capability in ["sys_resource", "setuid", "setgid"] {
        let mounted = Mounted::prepare();
        mounted.file("private", b"secret");
        let private = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(mounted.source.join("private"), private).expect("changed");
        std::fs::set_permissions(&mounted.source, std::fs::Permissions::from_mode(0o777)).expect("changed");
        let folder = mounted.source.parent().expect("a folder");
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("changed");
        let mut command = std::process::Command::new("setpriv");
        command.args([format!("--bounding-set=-{capability}"), format!("--inh-caps=-{capability}")]);
        command.arg(warpfs_binary()).args(["mount", "--device", "host", "--allow-other"]);
        run(command.args([&mounted.source, &mounted.mountpoint])).ok();
        let script = format!("touch {0}/mine; echo private > {0}/.warpfs/preload", mounted.mountpoint.display());
        let mut as_other = std::process::Command::new("setpriv");
        as_other.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", &script]);
        run(&mut as_other);
        let mine = std::fs::metadata(mounted.source.join("mine"));
        if capability == "sys_resource" {
            assert_eq!(std::os::unix::fs::MetadataExt::uid(&mine.expect("made")), 65534);
        } else {
            assert!(mine.is_err(), "made as root, without {capability}");
        }
        assert_eq!((mounted.counter("misses"), mounted.counter("hits")), (0, 0), "without {capability}");
        // root itself is served.
        warpfs!("verify", mounted.mountpoint.join("private")).ok();
    }
}

#[test]
fn a_stopped_daemon_hangs_no_command() {
    let mounted = Mounted::new();
    let path = mounted.file("f", b"x");
    let daemon = mounted.daemon();
    signal(daemon, libc::SIGSTOP);
    let status = warpfs!("status");
    let mut preload = warpfs(["preload"]).arg(&path).spawn().expect("started");
    for _ in 0..2 {
        std::thread::sleep(std::time::Duration::from_millis(400));
        signal(preload.id() as i32, libc::SIGINT);
    }
    let ended = end(&mut preload, std::time::Duration::from_secs(10));
    let lazy = warpfs!("umount", "--lazy", mounted.mountpoint);
    signal(daemon, libc::SIGCONT);
    assert_eq!(ended.expect("it ends at the second signal").code(), Some(130));
    assert!(status.ok().text().contains("does not answer"));
    lazy.ok();
    assert!(!mounted.is_mounted());
    eventually("the daemon ends", || !is_alive(daemon));
}
