//! Bad input gets a clear error, the right exit code and errno, and nothing is lost.

use crate::harness::*;
use crate::warpfs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

fn refused(mounted: Mounted, options: &[&str]) -> Output {
    mounted.mount(options, &[]).expect_err("refused")
}

#[test]
fn a_source_that_is_missing_or_no_directory() {
    let mut mounted = Mounted::prepare();
    mounted.source = mounted.source.join("none");
    let said = refused(mounted, &["--device", "host"]).fails(&["source", "none", "No such file"]);
    assert_eq!(said.lines().count(), 1, "one line: {said}");
    let mut mounted = Mounted::prepare();
    std::fs::write(mounted.source.join("file"), "x").expect("written");
    mounted.source = mounted.source.join("file");
    refused(mounted, &["--device", "host"]).fails(&["not a directory"]);
}

#[test]
fn a_mount_point_that_is_missing_a_file_or_not_empty() {
    let mut mounted = Mounted::prepare();
    mounted.mountpoint = mounted.mountpoint.join("none");
    refused(mounted, &["--device", "host"]).fails(&["mount point", "none", "No such file"]);
    let mounted = Mounted::prepare();
    std::fs::remove_dir(&mounted.mountpoint).expect("removed");
    std::fs::write(&mounted.mountpoint, "x").expect("written");
    refused(mounted, &["--device", "host"]).fails(&["not a directory"]);
    let mounted = Mounted::prepare();
    std::fs::write(mounted.mountpoint.join("hidden"), "x").expect("written");
    let output = run(warpfs(["mount", "--device", "host"]).args([&mounted.source, &mounted.mountpoint]));
    output.fails(&["not empty", "--nonempty"]);
    let mounted = mounted.mount(&["--device", "host", "--nonempty"], &[]).expect("mounted");
    assert!(!mounted.mountpoint.join("hidden").exists());
    warpfs!("umount", mounted.mountpoint).ok();
    assert!(mounted.mountpoint.join("hidden").exists());
}

#[test]
fn a_mount_point_that_is_in_use_already() {
    let mounted = Mounted::with(&[]);
    let again = run(warpfs(["mount", "--device", "host"]).args([&mounted.source, &mounted.mountpoint]));
    again.fails(&["already"]);
    assert!(mounted.is_mounted());
}

#[test]
fn a_source_with_a_warpfs_directory_of_its_own() {
    let mounted = Mounted::prepare();
    std::fs::create_dir(mounted.source.join(".warpfs")).expect("created");
    refused(mounted, &["--device", "host"]).fails(&[".warpfs"]);
}

#[test]
fn no_dev_fuse() {
    // A mount namespace of its own, in which /dev has no fuse.
    let mounted = Mounted::prepare();
    let script =
        r#"mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec "$0" mount --device host "$1" "$2""#;
    let output = run(Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .arg(warpfs_binary())
        .args([&mounted.source, &mounted.mountpoint]));
    output.fails(&["/dev/fuse", "modprobe"]);
}

#[test]
fn an_ordinary_user_who_may_not_mount_there() {
    if !rustix::process::geteuid().is_root() {
        return; // needs another user to be
    }
    let mounted = Mounted::prepare();
    let folder = mounted.source.parent().expect("a folder").to_path_buf();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).expect("opened");
    let binary = folder.join("warpfs");
    std::fs::copy(warpfs_binary(), &binary).expect("copied");
    // Its runtime directory, so that nothing stays in /tmp.
    let runtime = folder.join("run");
    std::fs::create_dir(&runtime).expect("created");
    std::os::unix::fs::chown(&runtime, Some(65534), Some(65534)).expect("theirs");
    let output = run(Command::new("setpriv")
        .env("XDG_RUNTIME_DIR", &runtime)
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&binary)
        .args(["mount", "--device", "host"])
        .args([&mounted.source, &mounted.mountpoint]));
    let said = output.fails(&[]);
    assert!(said.contains("ermission") || said.contains("fuse3"), "{said}");
    assert!(!mounted.is_mounted());
}

#[test]
fn a_device_that_is_not_there() {
    for (device, word) in
        [("cuda:77", "cuda:77"), ("toaster", "toaster"), ("GPU-00000000-0000-0000-0000-000000000000", "GPU-")]
    {
        let output = refused(Mounted::prepare(), &["--device", device]);
        assert_eq!(output.fails(&[word]).lines().count(), 1, "{device}");
    }
}

#[test]
fn a_budget_that_cannot_be() {
    refused(Mounted::prepare(), &["--device", "host", "--budget", "900TiB"]).fails(&["--budget", "900.0 TiB"]);
    refused(Mounted::prepare(), &["--device", "host", "--budget", "9"]).fails(&["--budget 9 B", "at least 4.0 KiB"]);
    assert!(warpfs!("mount", "--budget", "200%", "/", "/mnt").stderr.contains("at most 100%"));
    let output = warpfs!("mount", "--budget", "lots", "/", "/mnt");
    assert_eq!(output.status.code(), Some(2), "usage");
}

#[test]
fn usage_is_exit_code_2() {
    for arguments in [&["frobnicate"][..], &["preload"], &["mount", "/only-one"], &["status", "--colour"]] {
        assert_eq!(run(&mut warpfs(arguments)).status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn a_path_that_is_not_on_a_mount() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("f");
    std::fs::write(&path, "x").expect("written");
    for command in ["preload", "evict", "status", "verify", "read"] {
        warpfs!(command, path).fails(&["not on a warpfs mount"]);
        warpfs!(command, folder.path().join("none")).fails(&["none", "No such file"]);
    }
    warpfs!("umount", folder.path()).fails(&["not a warpfs mount"]);
    warpfs!("umount", folder.path().join("none")).fails(&["none does not exist"]);
    // Of a directory one line, however many files are in it.
    for name in ["g", "h"] {
        std::fs::write(folder.path().join(name), "x").expect("written");
    }
    for command in ["preload", "evict", "status", "verify"] {
        assert_eq!(warpfs!(command, folder.path()).fails(&["not on a warpfs mount"]).lines().count(), 1, "{command}");
    }
    // The source in place of the mount is the likeliest mistake.
    let mounted = Mounted::new();
    let path = mounted.file("f", b"x");
    warpfs!("preload", mounted.source.join("f")).fails(&["it can be had as", path.to_str().expect("text")]);
    warpfs!("preload", mounted.source).fails(&["it can be had as", mounted.mountpoint.to_str().expect("text")]);
}

#[test]
fn a_stderr_that_nobody_reads_is_no_defect() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, code) = (folder.path().join("f"), folder.path().join("code"));
    std::fs::write(&path, "x").expect("written");
    let (program, path, code) = (warpfs_binary(), path.display(), code.display());
    for command in ["preload", "evict", "status", "verify", "explain"] {
        let line = format!("{} {command} {path} 2>&1; echo $? > {code}", program.display());
        run(Command::new("sh").args(["-c", &format!("(sleep 0.3; {line}) | exec true; cat {code}")])).ok();
        assert_eq!(std::fs::read_to_string(folder.path().join("code")).expect("there").trim(), "1", "{command}");
    }
}

#[test]
fn directories_fifos_sockets_and_devices_are_refused_and_never_wait() {
    let mounted = Mounted::new();
    let at = |name: &str| mounted.source.join(name);
    std::fs::create_dir(at("directory")).expect("created");
    rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), 0o666.into()).expect("made");
    let _listener = UnixListener::bind(at("socket")).expect("bound");
    let mut names = vec!["fifo", "socket"];
    if rustix::process::geteuid().is_root() {
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            at("device"),
            rustix::fs::FileType::CharacterDevice,
            0o666.into(),
            rustix::fs::makedev(1, 5),
        );
        made.expect("made");
        names.push("device");
    }
    for name in &names {
        let path = mounted.mountpoint.join(name);
        for command in ["preload", "verify", "read", "status"] {
            let said = warpfs!(command, path).fails(&[name]);
            assert!(said.contains("only regular files"), "{said}");
        }
        assert!(setxattr(&path, "user.warpfs.preload").is_err(), "{name}");
        let mut control = std::fs::File::create(mounted.mountpoint.join(".warpfs/preload")).expect("opened");
        control.write_all(name.as_bytes()).expect("the line is taken");
        assert_eq!(close(control).expect_err("and failed").raw_os_error(), Some(libc::EIO), "{name}");
    }
    warpfs!("read", mounted.mountpoint.join("directory")).fails(&["directory"]);
    // And where a directory is walked they are passed over.
    warpfs!("preload", mounted.mountpoint).ok();
}

#[test]
fn an_unreadable_file_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return; // needs another user to be
    }
    let mounted = Mounted::with(&["--allow-other"]);
    let secret = mounted.file("secret", b"not for everyone");
    let open = mounted.file("open", b"for everyone");
    for (path, mode) in [(mounted.source.join("secret"), 0o600), (mounted.source.join("open"), 0o644)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("changed");
    }
    let folder = mounted.source.parent().expect("a folder").to_path_buf();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).expect("opened");
    let binary = folder.join("warpfs");
    std::fs::copy(warpfs_binary(), &binary).expect("copied");
    let as_nobody = |program: &Path, arguments: &[&str], path: &Path| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program).args(arguments).arg(path);
        run(&mut command)
    };
    for command in ["preload", "verify", "read"] {
        as_nobody(&binary, &[command], &secret).fails(&["secret", "Permission denied"]);
    }
    let getfattr = ["--only-values", "-n", "user.warpfs.preload"];
    as_nobody(Path::new("getfattr"), &getfattr, &secret).fails(&["Permission denied"]);
    // By a line in the control file, which anyone may write: with the writer's rights.
    let control = mounted.mountpoint.join(".warpfs/preload");
    let script = format!("echo secret > {}; echo open > {0}", control.display());
    let _ = as_nobody(Path::new("sh"), &["-c"], Path::new(&script));
    // The control: what others may read, they may have.
    as_nobody(&binary, &["verify"], &open).ok();
    let files = mounted.device()["files"].clone();
    let loaded: Vec<_> =
        files.as_array().expect("a list").iter().map(|f| (f["path"].as_str(), f["uid"].as_u64())).collect();
    assert_eq!(loaded.len(), 1, "one load, of the open file, by nobody: {loaded:?}");
    assert!(loaded[0].0.is_some_and(|path| path.ends_with("open")) && loaded[0].1 == Some(65534), "{loaded:?}");
    assert_eq!((mounted.counter("loads"), mounted.counter("misses")), (1, 1));
    // root's own copy is another one.
    assert_eq!(getxattr(&open, "user.warpfs.state").as_deref(), Ok("absent"));
}

#[test]
fn a_file_larger_than_the_budget() {
    let mounted = Mounted::with(&["--budget", "4MiB"]);
    let large = mounted.file("large", &noise(1, 5 << 20));
    let small = mounted.file("small", &noise(1, 1000));
    warpfs!("preload", small).ok();
    warpfs!("preload", large).fails(&["large", "5.0 MiB", "whole budget of", "4.0 MiB", "--budget"]);
    assert_eq!(setxattr(&large, "user.warpfs.preload"), Err(libc::EFBIG));
    assert_eq!(getxattr(&small, "user.warpfs.state").as_deref(), Ok("resident"), "nothing was evicted for it");
}

#[test]
fn a_reader_that_goes_a_full_disk_and_odd_names() {
    use std::os::unix::ffi::OsStrExt;
    let mounted = Mounted::new();
    let odd = std::ffi::OsStr::from_bytes(b"odd \xff\xfe\n name");
    std::fs::write(mounted.source.join(odd), b"content").expect("created");
    for i in 0..200 {
        mounted.file(&format!("f{i}"), b"x");
    }
    for command in ["preload --json", "status --json", "status", "verify", "evict"] {
        let words: Vec<_> = command.split(' ').collect();
        let output = run(warpfs(&words).arg(&mounted.mountpoint)).ok();
        if command.contains("json") {
            assert!(output.text().contains("odd "), "{}", output.text());
        }
    }
    let shell = |script: String| run(Command::new("sh").args(["-c", &script]));
    let (binary, path) = (warpfs_binary().display().to_string(), mounted.mountpoint.display().to_string());
    let quiet = shell(format!("{binary} verify {path} | head -1 >/dev/null; {binary} read {path}/f1 | true")).ok();
    assert!(!quiet.stderr.contains("panicked"), "{}", quiet.stderr);
    shell(format!("{binary} status {path} > /dev/full")).fails(&["cannot write to stdout", "No space left"]);
}

#[test]
fn g01_an_empty_file_works() {
    let mounted = Mounted::new();
    let path = mounted.file("empty", b"");
    warpfs!("preload", path).ok();
    let verified = warpfs!("verify", path).ok().text();
    assert!(verified.contains(" 0 bytes"), "{verified}");
    assert!(warpfs!("read", path).ok().stdout.is_empty());
    assert_eq!(getxattr(&path, "user.warpfs.state").as_deref(), Ok("resident"));
    assert_eq!(mounted.used(), 0);
}

#[test]
fn a_link_is_followed_where_it_is_given() {
    let mounted = Mounted::new();
    mounted.file("f", b"content");
    symlink("f", mounted.source.join("link")).expect("linked");
    symlink("nowhere", mounted.source.join("dangling")).expect("linked");
    assert_eq!(warpfs!("read", mounted.mountpoint.join("link")).ok().stdout, b"content");
    warpfs!("read", mounted.mountpoint.join("dangling")).fails(&["dangling", "No such file"]);
}
