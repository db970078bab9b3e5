//! The mount behaves as the directory it fronts: each operation on the mount and on a native twin, with passthrough and
//! without.

use crate::harness::*;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

/// Runs `work` on a native directory, on a mount, and on a mount without passthrough; what it returns must be the same.
#[track_caller]
pub fn the_same_everywhere<T: PartialEq + std::fmt::Debug>(work: impl Fn(&Path) -> T) {
    let native = tempfile::tempdir().expect("a folder");
    let expected = work(native.path());
    for options in [&[][..], &["--no-passthrough"]] {
        let mounted = Mounted::with(options);
        assert_eq!(work(&mounted.mountpoint), expected, "mounted with {options:?}");
        // And the source has it all.
        let names = |folder: &Path| {
            let mut names: Vec<_> =
                fs::read_dir(folder).expect("listed").map(|e| e.expect("entry").file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&mounted.source), names(native.path()), "mounted with {options:?}");
    }
}

pub fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

#[test]
fn files_are_created_written_read_and_truncated() {
    the_same_everywhere(|folder| {
        let path = folder.join("f");
        let mut file = OpenOptions::new().create_new(true).read(true).write(true).open(&path).expect("created");
        file.write_all(b"hello world").expect("written");
        file.seek(SeekFrom::Start(6)).expect("sought");
        let mut rest = String::new();
        file.read_to_string(&mut rest).expect("read");
        file.set_len(5).expect("truncated");
        file.write_all_at(b"!", 9).expect("written past the end");
        file.sync_all().expect("synced");
        let mut append = OpenOptions::new().append(true).open(&path).expect("opened");
        append.write_all(b"end").expect("appended");
        let again = errno(OpenOptions::new().create_new(true).write(true).open(&path));
        let content = fs::read(&path).expect("read");
        drop(OpenOptions::new().write(true).truncate(true).open(&path).expect("opened"));
        (rest, content, again, file.metadata().expect("stat").len())
    });
}

#[test]
fn names_are_made_linked_renamed_and_removed() {
    the_same_everywhere(|folder| {
        let at = |name: &str| folder.join(name);
        fs::create_dir(at("d")).expect("made");
        fs::write(at("d/f"), "x").expect("written");
        fs::hard_link(at("d/f"), at("link")).expect("linked");
        symlink("d/f", at("sym")).expect("linked");
        let links = fs::metadata(at("link")).expect("stat").nlink();
        let same = fs::metadata(at("link")).expect("stat").ino() == fs::metadata(at("d/f")).expect("stat").ino();
        fs::rename(at("d/f"), at("d/g")).expect("renamed");
        fs::write(at("other"), "other").expect("written");
        fs::rename(at("other"), at("d/g")).expect("renamed over");
        let refused = [
            errno(fs::remove_dir(at("d"))),
            errno(fs::remove_file(at("d"))),
            errno(fs::create_dir(at("d"))),
            errno(fs::rename(at("none"), at("x"))),
            errno(fs::read(at("d/f"))),
            errno(fs::File::create(at(&"n".repeat(256)))),
        ];
        let target = fs::read_link(at("sym")).expect("read");
        fs::remove_file(at("sym")).expect("removed");
        let content = (fs::read(at("d/g")).expect("read"), fs::read(at("link")).expect("read"));
        (links, same, refused, target, content)
    });
}

#[test]
fn attributes_are_set_and_seen() {
    the_same_everywhere(|folder| {
        let path = folder.join("f");
        fs::write(&path, "x").expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4640)).expect("chmod");
        let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_234_567_890, 123_456_789);
        File::options().write(true).open(&path).expect("opened").set_modified(time).expect("utimens");
        let meta = fs::metadata(&path).expect("stat");
        let name = "user.note";
        rustix::fs::setxattr(&path, name, b"value", rustix::fs::XattrFlags::CREATE).expect("set");
        let value = getxattr(&path, name);
        let twice =
            rustix::fs::setxattr(&path, name, b"v", rustix::fs::XattrFlags::CREATE).map_err(|e| e.raw_os_error());
        rustix::fs::removexattr(&path, name).expect("removed");
        (meta.mode(), meta.mtime(), meta.mtime_nsec(), meta.size(), value, twice, getxattr(&path, name))
    });
}

#[test]
fn sparse_files_copies_and_preallocation() {
    the_same_everywhere(|folder| {
        let file =
            OpenOptions::new().create(true).truncate(true).read(true).write(true).open(folder.join("f")).expect("made");
        file.write_all_at(b"end", 1 << 20).expect("written");
        let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).expect("SEEK_DATA");
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).expect("SEEK_HOLE");
        let mode = rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, mode, 0, 4 << 20).expect("preallocated");
        let mode = mode | rustix::fs::FallocateFlags::PUNCH_HOLE;
        rustix::fs::fallocate(&file, mode, 1 << 20, 4096).expect("punched");
        let to =
            OpenOptions::new().create(true).truncate(true).read(true).write(true).open(folder.join("g")).expect("made");
        let copied = rustix::fs::copy_file_range(&file, Some(&mut 0), &to, Some(&mut 0), 1 << 20).expect("copied");
        (data, hole, file.metadata().expect("stat").len(), copied, to.metadata().expect("stat").len())
    });
}

#[test]
fn a_directory_of_3000_entries_is_listed_whole() {
    the_same_everywhere(|folder| {
        for i in 0..3000 {
            File::create(folder.join(format!("entry-{i:05}"))).expect("created");
        }
        let mut names: Vec<_> = fs::read_dir(folder)
            .expect("listed")
            .map(|e| e.expect("entry").file_name().into_string().expect("text"))
            .collect();
        names.sort();
        names.dedup();
        (names.len(), names.first().cloned(), names.last().cloned())
    });
}

#[test]
fn the_kernel_moves_file_data_itself() {
    let traffic = |options: &[&str]| {
        let mounted = Mounted::with(options);
        let path = mounted.file("f", &noise(2, 1 << 20));
        assert_eq!(fs::read(&path).expect("read"), noise(2, 1 << 20));
        fs::write(mounted.mountpoint.join("g"), noise(3, 1 << 20)).expect("written");
        assert_eq!(fs::read(mounted.source.join("g")).expect("read"), noise(3, 1 << 20));
        let seen = mounted.stats()["mount"].clone();
        (
            seen["passthrough"].clone(),
            seen["reads"].as_u64().expect("a number"),
            seen["writes"].as_u64().expect("a number"),
        )
    };
    // The control: without it the daemon sees the data.
    let (on, reads, writes) = traffic(&["--no-passthrough"]);
    assert!(on == false && reads > 0 && writes > 0, "{reads} reads, {writes} writes");
    let (on, reads, writes) = traffic(&[]);
    if on == false {
        // Kernel 6.9 and CAP_SYS_ADMIN are needed; a test machine that has both must not lose it unnoticed.
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("readable");
        let mut numbers = release.split(['.', '-']).filter_map(|number| number.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        assert!(version < (6, 9) || !rustix::process::geteuid().is_root(), "no passthrough on {release}");
        eprintln!("not shown here: this kernel or user has no passthrough");
        return;
    }
    assert_eq!((reads, writes), (0, 0), "the daemon saw file data");
}

#[test]
fn inode_numbers_are_the_sources_own() {
    let mounted = Mounted::new();
    fs::create_dir(mounted.source.join("d")).expect("made");
    for name in ["f", "d"] {
        let (ours, real) = (mounted.mountpoint.join(name), mounted.source.join(name));
        if name == "f" {
            fs::write(&real, "x").expect("written");
        }
        assert_eq!(fs::metadata(ours).expect("stat").ino(), fs::metadata(real).expect("stat").ino(), "{name}");
    }
}

#[test]
fn new_files_belong_to_their_maker() {
    if !rustix::process::geteuid().is_root() {
        return; // needs another user to be
    }
    let mounted = Mounted::with(&["--allow-other"]);
    let folder = mounted.source.parent().expect("a folder").to_path_buf();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("opened");
    fs::set_permissions(&mounted.source, fs::Permissions::from_mode(0o777)).expect("opened");
    let path = mounted.mountpoint.join("theirs");
    let script = format!("umask 027; echo x > {0} && mkdir {0}.d", path.display());
    run(std::process::Command::new("setpriv").args([
        "--reuid=1234",
        "--regid=1235",
        "--clear-groups",
        "sh",
        "-c",
        &script,
    ]))
    .ok();
    let file = fs::metadata(mounted.source.join("theirs")).expect("made");
    assert_eq!((file.uid(), file.gid(), file.mode() & 0o777), (1234, 1235, 0o640));
    let folder = fs::metadata(mounted.source.join("theirs.d")).expect("made");
    assert_eq!((folder.uid(), folder.gid(), folder.mode() & 0o777), (1234, 1235, 0o750));
}

#[test]
fn a_tree_is_copied_and_equal() {
    let mounted = Mounted::new();
    for name in ["src", "tests", "include"] {
        run(std::process::Command::new("cp").arg("-a").arg(tree().join(name)).arg(&mounted.mountpoint)).ok();
        run(std::process::Command::new("diff").arg("-r").arg(tree().join(name)).arg(mounted.mountpoint.join(name)))
            .ok();
    }
    run(std::process::Command::new("diff").arg("-r").arg(&mounted.source).arg(&mounted.mountpoint)).ok();
    run(std::process::Command::new("rm").arg("-r").arg(mounted.mountpoint.join("src"))).ok();
    assert!(!mounted.source.join("src").exists());
}

#[test]
fn an_acl_takes_the_set_group_id_bit_from_a_stranger_to_the_group() {
    if !rustix::process::geteuid().is_root() {
        return; // needs another user to be
    }
    // What `setfacl -m u:7:r` writes: version 2; owner rwx, user 7 r, group r-x, mask r-x, others r-x.
    let entry =
        |tag: u16, bits: u16, id: u32| [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat();
    let none = u32::MAX;
    let acl = [
        2_u32.to_le_bytes().to_vec(),
        entry(1, 7, none),
        entry(2, 4, 7),
        entry(4, 5, none),
        entry(16, 5, none),
        entry(32, 5, none),
    ]
    .concat();
    let folder = tempfile::tempdir().expect("a folder");
    let value = folder.path().join("acl");
    fs::write(&value, format!("0x{}", acl.iter().map(|b| format!("{b:02x}")).collect::<String>())).expect("written");
    let mode_after = |folder: &Path| {
        let path = folder.join("f");
        fs::write(&path, "x").expect("written");
        std::os::unix::fs::chown(&path, Some(65534), Some(6000)).expect("chown");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o2775)).expect("chmod");
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).expect("chmod");
        let script = format!("setfattr -n system.posix_acl_access -v $(cat {}) {}", value.display(), path.display());
        let mut command = std::process::Command::new("setpriv");
        run(command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", &script])).ok();
        fs::metadata(&path).expect("stat").mode() & 0o7777
    };
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder.path(), open.clone()).expect("chmod");
    fs::set_permissions(&value, open.clone()).expect("chmod");
    let native = tempfile::tempdir().expect("a folder");
    let mounted = Mounted::with(&["--allow-other"]);
    fs::set_permissions(mounted.source.parent().expect("a folder"), open).expect("chmod");
    assert_eq!(mode_after(&mounted.mountpoint), mode_after(native.path()));
}

#[test]
fn who_waits_for_a_lease_keeps_nobody_else_waiting() {
    // As seen: two opens of leased files stopped every request to the mount, which had two workers.
    const F_SETSIG: i32 = 10;
    let mounted = Mounted::new();
    let path = mounted.file("leased", b"content");
    mounted.file("other", b"x");
    let holder = OpenOptions::new().read(true).write(true).open(mounted.source.join("leased")).expect("opened");
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&holder);
    // SAFETY: fcntl with plain numbers on a descriptor of ours. The signal that tells of a break is one that is ignored.
    let leased = unsafe {
        libc::fcntl(descriptor, F_SETSIG, libc::SIGURG);
        libc::fcntl(descriptor, libc::F_SETLEASE, libc::F_WRLCK)
    };
    assert_eq!(leased, 0, "{}", std::io::Error::last_os_error());
    // Who will not wait hears so at once, as natively.
    let unwilling = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
    assert_eq!(errno(unwilling), Some(libc::EWOULDBLOCK));
    let waiting: Vec<_> = (0..40)
        .map(|_| {
            let path = path.clone();
            std::thread::spawn(move || fs::read(path))
        })
        .collect();
    let truncated = {
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).expect("no NUL");
        std::thread::spawn(move || {
            // SAFETY: the name is a C string that lives over the call.
            let done = unsafe { libc::truncate(name.as_ptr(), 7) };
            if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        })
    };
    std::thread::sleep(std::time::Duration::from_millis(300));
    let begun = std::time::Instant::now();
    for i in 0..20 {
        assert_eq!(fs::read(mounted.mountpoint.join("other")).expect("served"), b"x");
        assert_eq!(errno(fs::metadata(mounted.mountpoint.join(format!("none{i}")))), Some(libc::ENOENT));
    }
    assert!(begun.elapsed() < std::time::Duration::from_secs(5), "{:?}", begun.elapsed());
    assert!(waiting.iter().any(|thread| !thread.is_finished()), "the control: they do wait");
    assert!(!truncated.is_finished(), "the control: it does wait");
    drop(holder);
    truncated.join().expect("no panic").expect("truncated after all");
    for thread in waiting {
        assert_eq!(thread.join().expect("no panic").expect("opened after all"), b"content");
    }
}

#[test]
fn the_flags_of_a_file_are_shown_and_set() {
    if !rustix::process::geteuid().is_root() {
        return; // only root may make a file immutable
    }
    the_same_everywhere(|folder| {
        let path = folder.join("f");
        fs::write(&path, "x").expect("written");
        let file = File::open(&path).expect("opened");
        let before = rustix::fs::ioctl_getflags(&file).expect("shown");
        let immutable = before | rustix::fs::IFlags::IMMUTABLE;
        rustix::fs::ioctl_setflags(&file, immutable).expect("set");
        let shown = rustix::fs::ioctl_getflags(&file).expect("shown");
        let refused = [errno(fs::write(&path, "y")), errno(fs::remove_file(&path))];
        rustix::fs::ioctl_setflags(&file, before).expect("set back");
        let folder = rustix::fs::ioctl_getflags(File::open(folder).expect("opened")).expect("shown");
        (before, shown, folder, refused, errno(fs::remove_file(&path)))
    });
}

#[test]
fn a_listing_leaves_out_what_was_just_looked_at() {
    let mounted = Mounted::new();
    let listings = || mounted.stats()["mount"]["listings"].as_u64().expect("a number");
    // Requests for a listing of 50 entries, and how soon after the first look at them it was over.
    let listed = |name: String, looks: bool| {
        fs::create_dir(mounted.source.join(&name)).expect("made");
        let folder = mounted.mountpoint.join(&name);
        (0..50).for_each(|i| drop(File::create(mounted.source.join(&name).join(format!("f{i}"))).expect("created")));
        let begun = std::time::Instant::now();
        if looks {
            (0..50).for_each(|i| assert!(fs::metadata(folder.join(format!("f{i}"))).expect("there").is_file()));
        }
        let before = listings();
        assert_eq!(fs::read_dir(&folder).expect("listed").count(), 50);
        (listings() - before, begun.elapsed())
    };
    assert_eq!(listed("new".into(), false).0, 2, "the control: all entries, with attributes, and the end");
    let soon = (0..50).map(|i| listed(format!("d{i}"), true)).find(|(_, took)| took.as_millis() < 500);
    assert_eq!(soon.expect("one of 50 in time").0, 3, "one entry, all others by name, and the end");
}
