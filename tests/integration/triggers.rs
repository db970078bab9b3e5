//! The four ways to ask by path: ioctl (from C), extended attributes, lines in `.warpfs/preload`, and the command line.

use crate::harness::*;
use crate::warpfs;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;
use warpfs::protocol::*;

#[test]
fn a_c_program_with_nothing_but_the_header_preloads() {
    let mounted = Mounted::new();
    let folder = tempfile::tempdir().expect("a folder");
    let program = compiled("mount-scripts/examples/preload.c", folder.path());
    let (one, two) = (mounted.file("one", &noise(1, 100_000)), mounted.file("two", b"2"));
    run(Command::new(&program).args([&one, &two])).ok();
    for path in [&one, &two] {
        assert_eq!(getxattr(path, "user.warpfs.state").as_deref(), Ok("resident"));
    }
    warpfs!("verify", one, two).ok();
    // It says what is wrong, for a directory, for a missing file, and off the mount.
    run(Command::new(&program).arg(&mounted.mountpoint)).fails(&["directory"]);
    run(Command::new(&program).arg(mounted.mountpoint.join("none"))).fails(&["none"]);
    run(Command::new(&program).arg(mounted.source.join("one"))).fails(&["one"]);
}

#[test]
fn the_ioctls_answer_on_any_descriptor_that_may_read() {
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(2, 50_000));
    let open = |read: bool, write: bool| File::options().read(read).write(write).open(&path).expect("opened");
    for file in [open(true, false), open(true, true), File::open(&mounted.mountpoint).expect("a directory")] {
        let (errno, version) = ioctl(&file, IOCTL_VERSION, &VersionIoctl::zeroed());
        assert_eq!((errno, version.protocol, version.devices), (0, PROTOCOL_VERSION, 1));
        assert_eq!(field_text(&version.socket), mounted.socket().to_str().expect("text"));
    }
    let mut ask = MaterializeIoctl::zeroed();
    let (errno, reply) = ioctl(open(true, true), IOCTL_MATERIALIZE, &ask);
    assert_eq!((errno, reply.state, reply.data_length), (0, State::Resident as u32, 50_000));
    assert!(reply.allocation_size >= 50_000 && reply.generation > 0);
    let (errno, status) = ioctl(open(true, false), IOCTL_STATUS, &StatusIoctl::zeroed());
    assert_eq!((errno, status.state, status.size), (0, State::Resident as u32, 50_000));
    assert_eq!((status.generation, status.holders), (reply.generation, 0));
    let (errno, evicted) = ioctl(open(true, false), IOCTL_EVICT, &EvictIoctl::zeroed());
    assert_eq!((errno, evicted.freed, evicted.held), (0, reply.allocation_size, 0));
    let (_, status) = ioctl(open(true, false), IOCTL_STATUS, &StatusIoctl::zeroed());
    assert_eq!(status.state, State::Absent as u32);
    // NOWAIT only starts it.
    ask.flags = MATERIALIZE_NOWAIT;
    let (errno, reply) = ioctl(open(true, false), IOCTL_MATERIALIZE, &ask);
    assert_eq!((errno, reply.state, reply.data_length), (0, State::Loading as u32, 50_000));
    becomes_resident(&path);
    // A descriptor that may not read may not ask, and what nobody knows is no ioctl.
    let writer = open(false, true);
    assert_eq!(ioctl(&writer, IOCTL_MATERIALIZE, &MaterializeIoctl::zeroed()).0, libc::EBADF);
    assert_eq!(ioctl(&writer, IOCTL_STATUS, &StatusIoctl::zeroed()).0, libc::EBADF);
    assert_eq!(ioctl(&writer, IOCTL_EVICT, &EvictIoctl::zeroed()).0, libc::EBADF);
    let file = open(true, false);
    let unknown = IOCTL_MATERIALIZE & !0xFF | 0x77;
    assert_eq!(ioctl(&file, unknown, &MaterializeIoctl::zeroed()).0, libc::ENOTTY);
    let (size, step) = (0x3FFF << 16, 1 << 16);
    for wrong in [IOCTL_MATERIALIZE & !size | step, IOCTL_MATERIALIZE - step, IOCTL_MATERIALIZE + step] {
        assert_eq!(ioctl(&file, wrong, &MaterializeIoctl::zeroed()).0, libc::ENOTTY, "{wrong:#x}");
    }
    ask.flags = 1 << 31;
    let (errno, reply) = ioctl(&file, IOCTL_MATERIALIZE, &ask);
    assert_eq!((errno, reply.error), (libc::EINVAL, Code::BadRequest as u32));
    ask.flags = 0;
    ask.secret = [9; 16];
    let (errno, reply) = ioctl(&file, IOCTL_MATERIALIZE, &ask);
    assert_eq!((errno, reply.error), (libc::EACCES, Code::BadSession as u32));
    ask.secret = NONE;
    ask.device = [9; 16];
    let (errno, reply) = ioctl(&file, IOCTL_MATERIALIZE, &ask);
    assert_eq!((errno, reply.error), (libc::ENODEV, Code::NoDevice as u32));
    let folder = File::open(&mounted.mountpoint).expect("a directory");
    assert_eq!(ioctl(&folder, IOCTL_MATERIALIZE, &MaterializeIoctl::zeroed()).0, libc::EISDIR);
}

#[test]
fn extended_attributes_trigger_and_are_never_listed() {
    let mounted = Mounted::new();
    let (set, get) = (mounted.file("set", &noise(3, 70_000)), mounted.file("get", &noise(4, 70_000)));
    assert_eq!(getxattr(&set, "user.warpfs.state").as_deref(), Ok("absent"));
    setxattr(&set, "user.warpfs.preload").expect("started");
    becomes_resident(&set);
    let word = getxattr(&get, "user.warpfs.preload").expect("started");
    assert!(["loading", "resident"].contains(&word.as_str()), "{word}");
    becomes_resident(&get);
    let status: serde_json::Value =
        serde_json::from_str(&getxattr(&get, "user.warpfs.status").expect("known")).expect("JSON");
    assert_eq!((status["state"].as_str(), status["size"].as_u64()), (Some("resident"), Some(70_000)));
    setxattr(&set, "user.warpfs.evict").expect("evicted");
    assert_eq!(getxattr(&set, "user.warpfs.state").as_deref(), Ok("absent"));
    // An ordinary attribute is the source's, and ours are nobody's.
    rustix::fs::setxattr(&set, "user.color", b"blue", rustix::fs::XattrFlags::empty()).expect("set");
    let mut names = vec![0; 4096];
    let length = rustix::fs::listxattr(&set, &mut names[..]).expect("listed");
    assert_eq!(&names[..length], b"user.color\0");
    let length = rustix::fs::listxattr(mounted.source.join("set"), &mut names[..]).expect("listed");
    assert_eq!(&names[..length], b"user.color\0");
    // The tools that people have.
    let value = run(Command::new("getfattr").args(["--only-values", "-n", "user.warpfs.state"]).arg(&get)).ok();
    assert_eq!(value.text(), "resident");
    run(Command::new("setfattr").args(["-n", "user.warpfs.preload", "-v", "1"]).arg(&set)).ok();
    becomes_resident(&set);
    assert_eq!(setxattr(&mounted.mountpoint, "user.warpfs.preload"), Err(libc::EISDIR));
}

#[test]
fn lines_in_the_control_file_trigger() {
    let mounted = Mounted::new();
    std::fs::create_dir(mounted.source.join("sub")).expect("created");
    let files = ["a", "b c", "sub/d", "e"].map(|name| mounted.file(name, &noise(5, 30_000)));
    let mut control = File::create(mounted.mountpoint.join(".warpfs/preload")).expect("opened");
    // Absolute and relative, a line over two writes, the last without its newline.
    control.write_all(format!("{}\nb c\nsu", files[0].display()).as_bytes()).expect("taken");
    control.write_all(b"b/d\ne").expect("taken");
    close(control).expect("every line was right");
    files.iter().for_each(|file| becomes_resident(file));
    let mut evict = File::create(mounted.mountpoint.join(".warpfs/evict")).expect("opened");
    evict.write_all(b"b c\n").expect("taken");
    close(evict).expect("right");
    eventually("evicted", || getxattr(&files[1], "user.warpfs.state").as_deref() == Ok("absent"));
    assert_eq!(getxattr(&files[0], "user.warpfs.state").as_deref(), Ok("resident"));
}

#[test]
fn a_wrong_line_in_the_control_file_is_said_and_the_others_count() {
    let mounted = Mounted::new();
    let good = mounted.file("good", &noise(6, 10_000));
    std::os::unix::fs::symlink("/etc/passwd", mounted.source.join("out")).expect("linked");
    let mut control =
        File::options().read(true).write(true).open(mounted.mountpoint.join(".warpfs/preload")).expect("opened");
    control.write_all(b"none\ngood\nout\n.\n../escape\n\n").expect("taken");
    let mut said = String::new();
    control.read_to_string(&mut said).expect("read back");
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines.len(), 5, "{said}");
    for (line, word) in lines.iter().zip(["error none", "good", "error out", "error .", "error ../escape"]) {
        assert!(line.contains(word), "{line:?} has no {word:?}");
    }
    assert_eq!(close(control).expect_err("some failed").raw_os_error(), Some(libc::EIO));
    becomes_resident(&good);
}

#[test]
fn the_control_directory_is_there_but_never_listed() {
    let mounted = Mounted::new();
    mounted.file("f", b"x");
    let names = |folder: &std::path::Path| {
        let entries = std::fs::read_dir(folder).expect("listed");
        let mut names: Vec<_> =
            entries.map(|e| e.expect("an entry").file_name().into_string().expect("text")).collect();
        names.sort();
        names
    };
    assert_eq!(names(&mounted.mountpoint), ["f"]);
    let inside = names(&mounted.mountpoint.join(".warpfs"));
    for name in ["config", "evict", "preload", "socket", "stats"] {
        assert!(inside.contains(&name.to_string()), "{name} in {inside:?}");
    }
    let config = std::fs::read_to_string(mounted.mountpoint.join(".warpfs/config")).expect("read");
    let config: toml::Table = toml::from_str(&config).expect("TOML");
    assert_eq!(config["source"].as_str(), mounted.source.to_str());
    assert!(std::fs::remove_dir(mounted.mountpoint.join(".warpfs")).is_err());
    assert!(std::fs::create_dir(mounted.mountpoint.join(".warpfs")).is_err());
}

#[test]
fn triggers_work_on_a_read_only_mount() {
    let mounted = Mounted::with(&["--read-only"]);
    let path = mounted.file("f", &noise(7, 20_000));
    assert_eq!(std::fs::write(&path, b"no").expect_err("read-only").raw_os_error(), Some(libc::EROFS));
    setxattr(&path, "user.warpfs.preload").expect("started");
    becomes_resident(&path);
    warpfs!("evict", path).ok();
    let mut control = File::create(mounted.mountpoint.join(".warpfs/preload")).expect("opened");
    control.write_all(b"f\n").expect("taken");
    close(control).expect("right");
    becomes_resident(&path);
    warpfs!("verify", path).ok();
}

#[test]
fn the_command_line_preloads_directories_and_reports() {
    let mounted = Mounted::new();
    std::fs::create_dir_all(mounted.source.join("d/e")).expect("created");
    for (i, name) in ["d/one", "d/e/two", "three"].iter().enumerate() {
        mounted.file(name, &noise(i as u64, 10_000));
    }
    rustix::fs::mkfifoat(rustix::fs::CWD, mounted.source.join("d/fifo"), 0o600.into()).expect("made");
    let output = warpfs!("preload", "--json", mounted.mountpoint.join("d")).ok().text();
    let reports: Vec<serde_json::Value> =
        output.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(reports.len(), 2, "the FIFO is passed over: {output}");
    assert!(reports.iter().all(|report| report["bytes"] == 10_000 && report["error"].is_null()));
    let states = warpfs!("status", "--json", mounted.mountpoint).ok().text();
    let states: Vec<serde_json::Value> = serde_json::from_str(&states).expect("JSON");
    let resident = states.iter().filter(|file| file["state"] == "resident").count();
    assert_eq!((states.len(), resident), (3, 2));
    let mounts = warpfs!("status").ok().text();
    assert!(mounts.contains(mounted.mountpoint.to_str().expect("text")), "{mounts}");
    warpfs!("evict", mounted.mountpoint).ok();
    // A loader has the memory of small files mapped a moment longer.
    eventually("the memory is free", || mounted.used() == 0);
}

#[test]
fn a_terminal_sees_how_far_a_preload_is() {
    let mounted = Mounted::new();
    sparse(&mounted.source.join("large"), 1 << 30);
    let path = mounted.mountpoint.join("large");
    let command = format!("{} preload {}", warpfs_binary().display(), path.display());
    let seen = run(Command::new("script").args(["-qec", &command, "/dev/null"]).env("TERM", "xterm")).ok().text();
    assert!(seen.contains("/1.00 GiB"), "a bar: {seen:?}");
    assert!(seen.contains("1 file, 1.0 GiB"), "{seen:?}");
    // The control: into a pipe there is only the summary.
    warpfs!("evict", path).ok();
    let seen = warpfs!("preload", path).ok();
    assert!(seen.stderr.is_empty() && seen.text().lines().count() == 1, "{}{}", seen.stderr, seen.text());
}

#[test]
fn a_descriptor_without_read_permission_gets_nothing() {
    let mounted = Mounted::new();
    let path = mounted.file("f", b"secret");
    // O_PATH: the kernel itself refuses.
    let opened = File::options().read(true).custom_flags(libc::O_PATH).open(&path).expect("opened");
    assert_eq!(ioctl(&opened, IOCTL_MATERIALIZE, &MaterializeIoctl::zeroed()).0, libc::EBADF);
}
