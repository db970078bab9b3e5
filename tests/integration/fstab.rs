//! Mounts that mount(8) makes: by type, by a line of fstab, by an ordinary user; and the options after `-o`. In a mount
//! namespace of their own, in which mount(8) finds what `make install` installed, and a fstab of ours.

use crate::harness::*;
use crate::namespace::Namespace;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// A place with these options in its fstab line, where mount(8) finds our helpers. `None`: not on this machine.
fn with_fstab(options: &str) -> Option<Namespace> {
    if !rustix::process::geteuid().is_root() || !has_make() {
        return None;
    }
    let place = Mounted::prepare();
    let folder = place.source.parent().expect("a folder");
    let helpers = format!("HELPERS={}", folder.join("helpers").display());
    make_install(folder, &[&format!("PREFIX={}", folder.display()), &helpers]);
    let (source, point) = (place.source.display(), place.mountpoint.display());
    std::fs::create_dir(folder.join("etc")).expect("created");
    std::fs::write(folder.join("etc/fstab"), format!("{source} {point} fuse.warpfs {options} 0 0\n")).expect("written");
    // A /dev/fuse for everybody, as on a workstation.
    let script = r#"
        sbin=$(realpath /sbin)
        mount -t overlay -o "lowerdir=$1/helpers:$sbin" overlay "$sbin" &&
            mount -t overlay -o "lowerdir=$1/etc:/etc" overlay /etc &&
            mknod -m 666 "$1/fuse" c 10 229 && mount --bind "$1/fuse" /dev/fuse"#;
    Some(Namespace::new(place, script))
}

/// `mount -t TYPE SOURCE MOUNTPOINT -o OPTIONS`
fn mount(namespace: &Namespace, kind: &str, options: &str) -> Output {
    let (source, point) = (namespace.place.source.as_os_str(), namespace.place.mountpoint.as_os_str());
    namespace.run(["mount".as_ref(), "-t".as_ref(), kind.as_ref(), source, point, "-o".as_ref(), options.as_ref()])
}

fn umount(namespace: &Namespace) -> Output {
    namespace.run(["umount".as_ref(), namespace.place.mountpoint.as_os_str()])
}

fn has_make() -> bool {
    let found =
        Command::new("make").arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success());
    assert!(found || !on_host(), "make is missing: mount-scripts/install-dependencies.sh installs it");
    found
}

/// `make install` of the program under test.
fn make_install(folder: &Path, variables: &[&str]) -> Output {
    let release = folder.join("target/release");
    std::fs::create_dir_all(&release).expect("created");
    std::os::unix::fs::symlink(warpfs_binary().canonicalize().expect("built"), release.join("warpfs")).expect("linked");
    let mut make = Command::new("make");
    // With SUDO_USER it builds nothing, and installs what is there.
    make.arg("-C").arg(tree()).arg("install").args(variables).env("SUDO_USER", "somebody");
    run(make.env("CARGO_TARGET_DIR", folder.join("target"))).ok()
}

#[test]
fn both_types_mount_and_a_plain_umount_ends_the_daemon() {
    let Some(namespace) = with_fstab("noauto") else { return };
    namespace.place.file("f", b"content");
    for kind in ["fuse.warpfs", "warpfs"] {
        // This returns only when nobody has its stdout and stderr any more, so the daemon has not.
        mount(&namespace, kind, "device=host,budget=64MiB").ok();
        assert_eq!(std::fs::read(namespace.at("f")).expect("read"), b"content");
        let config = std::fs::read_to_string(namespace.at(".warpfs/config")).expect("read");
        assert!(config.contains(&format!("budget = \"{}\"", 64 << 20)), "{config}");
        let point = namespace.place.mountpoint.display().to_string();
        let found = namespace.run(["findmnt", "-n", "-r", "-o", "FSTYPE,SOURCE", &point]).ok().text();
        assert_eq!(found.trim_end(), format!("fuse.warpfs {}", namespace.place.source.display()));
        let daemon = namespace.daemon();
        assert!(is_alive(daemon));
        umount(&namespace).ok();
        eventually("the daemon ends", || !is_alive(daemon));
        assert!(namespace.mounts().is_empty());
    }
}

#[test]
fn a_line_of_fstab_is_mounted_once_with_its_options() {
    let options = "device=host,budget=64MiB,ro,noatime,nofail,_netdev,x-systemd.automount,comment=data";
    let Some(namespace) = with_fstab(options) else { return };
    namespace.place.file("f", &noise(1, 1 << 20));
    let said = namespace.run(["mount", "-a"]).ok().stderr;
    assert!(said.contains("noatime has no effect"), "{said}");
    namespace.run(["mount", "-a"]).ok();
    assert_eq!(namespace.mounts().len(), 1, "the second time there was nothing to do");
    let written = std::fs::write(namespace.at("new"), "x").expect_err("read-only");
    assert_eq!(written.raw_os_error(), Some(libc::EROFS));
    // Read-only is for the data: a trigger works, which MS_RDONLY would refuse.
    setxattr(&namespace.at("f"), "user.warpfs.preload").expect("taken");
    becomes_resident(&namespace.at("f"));
    let point = namespace.place.mountpoint.display().to_string();
    for change in ["remount,rw", "remount,ro"] {
        let refused = namespace.run(["mount", "-o", change, &point]);
        assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
        assert!(refused.stderr.contains("cannot be changed: unmount it"), "{}", refused.stderr);
    }
    assert_eq!(std::fs::read(namespace.at("f")).expect("still served"), noise(1, 1 << 20));
    umount(&namespace).ok();
    // What is said on the command line comes after the line of fstab, and counts.
    namespace.run(["mount", &point, "-o", "rw,budget=32MiB"]).ok();
    std::fs::write(namespace.at("new"), "x").expect("writable");
    let config = std::fs::read_to_string(namespace.at(".warpfs/config")).expect("read");
    assert!(config.contains(&format!("budget = \"{}\"", 32 << 20)), "{config}");
}

#[test]
fn a_dead_mount_is_cleared_by_the_next_mount_of_its_line() {
    let Some(namespace) = with_fstab("device=host") else { return };
    namespace.place.file("f", b"content");
    namespace.run(["mount", "-a"]).ok();
    let daemon = namespace.daemon();
    let supervisor = parent(daemon);
    signal(supervisor, libc::SIGKILL);
    eventually("no supervisor", || !is_alive(supervisor));
    signal(daemon, libc::SIGKILL);
    eventually("no daemon", || !is_alive(daemon));
    // mount -a sees it in the kernel's list, and does nothing.
    namespace.run(["mount", "-a"]).ok();
    let dead = std::fs::read(namespace.at("f")).expect_err("dead").raw_os_error();
    assert!([Some(libc::ENOTCONN), Some(libc::ECONNABORTED)].contains(&dead), "{dead:?}");
    namespace.run(["mount".as_ref(), namespace.place.mountpoint.as_os_str()]).ok();
    assert_eq!(std::fs::read(namespace.at("f")).expect("read"), b"content");
    assert_eq!(namespace.mounts().len(), 1);
}

#[test]
fn mount_says_why_not_with_its_own_exit_codes() {
    let Some(namespace) = with_fstab("noauto") else { return };
    for (options, code, word) in [
        ("device=host,frobnicate", 1, "`frobnicate` is no option"),
        ("device=host,sync", 1, "`sync`"),
        ("device=host,uid=1000", 1, "`uid`"),
        ("device=toaster", 32, "toaster"),
        (r"device=cuda:76\,cuda:77", 32, "cuda:76"),
    ] {
        let refused = mount(&namespace, "fuse.warpfs", options);
        assert_eq!(refused.status.code(), Some(code), "{options}: {}", refused.stderr);
        assert!(refused.stderr.contains(word), "{options}: {}", refused.stderr);
        assert!(namespace.mounts().is_empty(), "{options}");
    }
    // mount -f only goes through the motions.
    let (source, point) = (namespace.place.source.display(), namespace.place.mountpoint.display());
    let fake = ["mount", "-f", "-v", "-t", "warpfs", &source.to_string(), &point.to_string()];
    assert!(namespace.run(fake).ok().text().contains("warpfs mount"));
    assert!(namespace.mounts().is_empty());
}

#[test]
fn noexec_is_honoured() {
    let Some(namespace) = with_fstab("noauto") else { return };
    std::fs::copy("/bin/true", namespace.place.source.join("program")).expect("copied");
    for (options, refused) in [("device=host,exec", false), ("device=host,noexec,nosuid,nodev", true)] {
        mount(&namespace, "warpfs", options).ok();
        let (_, _, listed) = namespace.mounts().remove(0);
        assert_eq!(listed.contains("noexec"), refused, "{listed}");
        let program = namespace.place.mountpoint.join("program");
        let done = namespace.run([program.as_os_str()]);
        assert_eq!(done.status.success(), !refused, "{}", done.stderr);
        assert!(!refused || done.stderr.contains("Permission denied"), "{}", done.stderr);
        umount(&namespace).ok();
    }
}

#[test]
fn another_mount_namespace_is_entered() {
    let Some(namespace) = with_fstab("noauto") else { return };
    namespace.place.file("f", b"content");
    // mount(8) runs where the helper is, and the mount appears in the other namespace only.
    let mut inner = Command::new("nsenter");
    inner.arg(format!("--mount=/proc/{}/ns/mnt", namespace.pid())).args(["unshare", "--mount"]);
    let mut inner = inner.args(["sh", "-c", "echo ready; read -r _"]);
    inner = inner.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut inner = inner.spawn().expect("started");
    let mut line = String::new();
    let _ = BufReader::new(inner.stdout.take().expect("piped")).read_line(&mut line);
    let id = inner.id().to_string();
    let (source, point) =
        (namespace.place.source.display().to_string(), namespace.place.mountpoint.display().to_string());
    let mounted = namespace.run(["mount", "-N", &id, "-t", "warpfs", &source, &point, "-o", "device=host"]);
    let there = std::fs::read_to_string(format!("/proc/{id}/mounts")).unwrap_or_default();
    let taken_away = namespace.run(["umount", "-N", &id, &point]);
    drop(inner.stdin.take());
    let _ = end(&mut inner, DEADLINE);
    mounted.ok();
    assert!(there.contains(&format!("{point} fuse.warpfs ")), "{there}");
    taken_away.ok();
    assert!(namespace.mounts().is_empty());
}

#[test]
fn an_ordinary_user_mounts_a_line_that_lets_users() {
    if run(Command::new("sh").args(["-c", "command -v fusermount3"])).text().is_empty() {
        assert!(!on_host(), "fusermount3 is missing: mount-scripts/install-dependencies.sh installs it");
        return;
    }
    let Some(namespace) = with_fstab("device=host,noauto,user") else { return };
    let folder = namespace.place.source.parent().expect("a folder");
    for place in [folder, &namespace.place.source, &namespace.place.mountpoint] {
        std::os::unix::fs::chown(place, Some(65534), Some(65534)).expect("theirs");
    }
    namespace.place.file("f", b"content");
    let as_user = |words: &[&str]| {
        let mut all = vec!["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
        all.extend(words);
        namespace.run(all)
    };
    let point = namespace.place.mountpoint.display().to_string();
    as_user(&["mount", &point]).ok();
    let (kind, _, listed) = namespace.mounts().remove(0);
    assert_eq!(kind, "fuse.warpfs");
    for option in ["user_id=65534", "nosuid", "nodev", "noexec"] {
        assert!(listed.contains(option), "{listed}");
    }
    assert_eq!(as_user(&["cat", &format!("{point}/f")]).ok().text(), "content");
    as_user(&["umount", &point]).ok();
    assert!(namespace.mounts().is_empty());
}

#[test]
fn make_install_puts_the_helpers_where_mount_looks_or_nowhere() {
    if !has_make() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let destination = folder.path().join("system");
    make_install(folder.path(), &[&format!("DESTDIR={}", destination.display()), "PREFIX=/usr/local"]);
    assert!(destination.join("usr/local/bin/warpfs").exists());
    let helpers = std::fs::canonicalize("/sbin").expect("there");
    let helpers = destination.join(helpers.strip_prefix("/").expect("absolute"));
    for name in ["mount.warpfs", "mount.fuse.warpfs"] {
        let text = std::fs::read_to_string(helpers.join(name)).expect("installed");
        assert!(text.contains("program=\"/usr/local/bin/warpfs\"\n"), "the whole path");
        run(Command::new(helpers.join(name)).args(["/s", "/m", "-f", "-o", "rw"])).ok();
    }
    // A user's own: nothing for root's mount to run.
    let own = folder.path().join("own");
    std::fs::remove_dir_all(folder.path().join("target")).expect("removed");
    let said = make_install(folder.path(), &[&format!("PREFIX={}", own.display())]).text();
    assert!(said.contains("no helper for mount(8)"), "{said}");
    assert!(own.join("bin/warpfs").exists());
    assert!(!own.join("sbin").exists() && !own.join("usr").exists());
}

#[test]
fn options_are_those_of_the_flags_and_contradictions_are_usage_errors() {
    let mounted = Mounted::prepare().mount(&["-o", "ro,device=host", "-o", "budget=64MiB"], &[]).expect("mounted");
    let config = std::fs::read_to_string(mounted.mountpoint.join(".warpfs/config")).expect("read");
    for line in ["read_only = true", "devices = [\"host\"]", "budget = \"67108864\"", "allow_other = false"] {
        assert!(config.contains(line), "{line} is not in: {config}");
    }
    drop(mounted);
    let equal = ["--device", "host", "--read-only", "-o", "device=host,ro"];
    drop(Mounted::prepare().mount(&equal, &[]).expect("mounted"));
    for (options, word) in [
        (&["--device", "host", "-o", "device=cuda:0"][..], "--device"),
        (&["--budget", "1GiB", "-o", "budget=2GiB"], "--budget"),
        (&["--read-only", "-o", "rw"], "--read-only"),
        (&["-o", "frobnicate"], "`frobnicate`"),
        (&["-o", "foreground"], "--foreground"),
    ] {
        let refused = Mounted::prepare().mount(options, &[]).expect_err("refused");
        assert_eq!(refused.status.code(), Some(2), "{options:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(word), "{options:?}: {}", refused.stderr);
    }
}
