//! Errors of the source come through unchanged: each operation on the mount says what it says on the source, for errors
//! that a real file system can be brought to, and for any error that a source may have.

use super::{EACH_WAY, faulty};
use crate::harness::*;
use crate::mount::errno;
use rustix::fs::{FallocateFlags, XattrFlags};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Result, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

/// An operation in a folder.
type Attempt = (&'static str, fn(&Path) -> Result<()>);

fn open(options: &mut OpenOptions, path: &Path) -> Result<File> {
    options.open(path)
}

/// By name, which is another operation than by descriptor.
fn truncate(path: &Path) -> Result<()> {
    let path = CString::new(path.as_os_str().as_bytes()).expect("no NUL");
    // SAFETY: the path ends with NUL and outlives the call, which only reads it.
    if unsafe { libc::truncate(path.as_ptr(), 3) } == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Closes what was opened for good: an error of close is an error.
fn with_file(folder: &Path, work: impl Fn(&File) -> Result<()>) -> Result<()> {
    let file = open(OpenOptions::new().read(true).write(true), &folder.join("f"))?;
    work(&file)?;
    close(file)
}

/// One of each operation, by the name under which it fails in `faulty`.
const OPERATIONS: [Attempt; 30] = [
    // Of a name that is not there, because the kernel remembers the others for a moment.
    ("lookup", |at| match fs::symlink_metadata(at.join("none")) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        found => found.map(drop),
    }),
    // Of a file that is open for writing, whose attributes it does not remember.
    ("getattr", |at| with_file(at, |file| file.metadata().map(drop))),
    ("chmod", |at| fs::set_permissions(at.join("f"), Permissions::from_mode(0o700))),
    ("chown", |at| std::os::unix::fs::chown(at.join("f"), Some(rustix::process::geteuid().as_raw()), None)),
    ("utimens", |at| with_file(at, |file| file.set_modified(std::time::UNIX_EPOCH))),
    ("truncate", |at| with_file(at, |file| file.set_len(3))),
    ("truncate", |at| truncate(&at.join("f"))),
    ("readlink", |at| fs::read_link(at.join("l")).map(drop)),
    ("mknod", |at| {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        Ok(rustix::fs::mknodat(rustix::fs::CWD, at.join("new"), rustix::fs::FileType::Fifo, mode, 0)?)
    }),
    ("mkdir", |at| fs::create_dir(at.join("new"))),
    ("unlink", |at| fs::remove_file(at.join("f"))),
    ("rmdir", |at| fs::remove_dir(at.join("d"))),
    ("symlink", |at| symlink("f", at.join("new"))),
    ("rename", |at| fs::rename(at.join("f"), at.join("new"))),
    ("link", |at| fs::hard_link(at.join("f"), at.join("new"))),
    ("open", |at| File::open(at.join("f")).map(drop)),
    ("open", |at| open(OpenOptions::new().write(true).truncate(true), &at.join("f")).map(drop)),
    ("create", |at| open(OpenOptions::new().create_new(true).write(true), &at.join("new")).map(drop)),
    // Of what the kernel has not in memory.
    ("read", |at| {
        with_file(at, |file| {
            rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
            file.read_at(&mut [0; 4], 0).map(drop)
        })
    }),
    ("write", |at| with_file(at, |file| file.write_at(b"x", 0).map(drop))),
    ("write", |at| open(OpenOptions::new().append(true), &at.join("f"))?.write(b"x").map(drop)),
    ("flush", |at| with_file(at, |_| Ok(()))),
    ("fsync", |at| with_file(at, File::sync_all)),
    ("fsync", |at| with_file(at, File::sync_data)),
    ("opendir", |at| fs::read_dir(at).map(drop)),
    ("readdir", |at| fs::read_dir(at)?.try_for_each(|entry| entry.map(drop))),
    ("fsyncdir", |at| File::open(at)?.sync_all()),
    ("statfs", |at| Ok(rustix::fs::statvfs(at.join("d")).map(drop)?)),
    ("fallocate", |at| with_file(at, |file| Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), 0, 10)?))),
    ("lseek", |at| with_file(at, |file| Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(0)).map(drop)?))),
];

const ATTRIBUTES: [Attempt; 4] = [
    ("setxattr", |at| Ok(rustix::fs::setxattr(at.join("f"), "user.note", b"v", XattrFlags::empty())?)),
    ("getxattr", |at| Ok(rustix::fs::getxattr(at.join("f"), "user.note", &mut [0; 10]).map(drop)?)),
    ("listxattr", |at| Ok(rustix::fs::listxattr(at.join("f"), &mut [0; 100][..]).map(drop)?)),
    ("removexattr", |at| Ok(rustix::fs::removexattr(at.join("f"), "user.note")?)),
];

#[test]
fn m18_every_error_of_the_source_comes_through_unchanged() {
    // Not EINTR, ENOSYS and EOPNOTSUPP, which the kernel understands as words to itself, nor ESTALE, which it tries again.
    let errnos = [
        libc::EPERM,
        libc::EIO,
        libc::ENXIO,
        libc::EACCES,
        libc::ENODEV,
        libc::ENOSPC,
        libc::EROFS,
        libc::EMLINK,
        libc::ENAMETOOLONG,
        libc::ELOOP,
        libc::ETXTBSY,
        libc::EFBIG,
        libc::EUCLEAN,
        libc::EDQUOT,
        libc::ETIMEDOUT,
        libc::EREMOTEIO,
    ];
    for options in EACH_WAY {
        let folder = tempfile::tempdir().expect("a folder");
        let faults = faulty::Faults::default();
        let _faulty = faulty::mount(folder.path(), &faults);
        let mounted = Mounted::over(folder.path(), options);
        assert_eq!(fs::read(mounted.mountpoint.join("f")).expect("read"), faulty::CONTENT, "the control");
        let mut wrong = Vec::new();
        let mut told = 0;
        for (operation, attempt) in OPERATIONS.into_iter().chain(ATTRIBUTES) {
            // The control: it works where nothing fails.
            let works = |place: &Path| {
                assert_eq!(errno(attempt(place)), None, "{operation} in {}, without a fault", place.display());
                faults.clear();
            };
            works(folder.path());
            // The target of a link is kept by the kernel once it was told.
            if operation != "readlink" {
                works(&mounted.mountpoint);
            }
            for number in errnos {
                faults.set(operation, number);
                let natively = errno(attempt(folder.path()));
                let reached = faults.clear();
                faults.set(operation, number);
                let seen = errno(attempt(&mounted.mountpoint));
                let reached = reached.min(faults.clear());
                if natively != seen || natively != Some(number) || reached == 0 {
                    wrong.push(format!("{operation}: {number} is {natively:?} natively and {seen:?} on the mount"));
                }
                told += 1;
            }
            works(&mounted.mountpoint);
        }
        eprintln!("m18: {told} errors of {} operations, mounted with {options:?}", OPERATIONS.len() + ATTRIBUTES.len());
        assert!(wrong.is_empty(), "mounted with {options:?}, {} of {told}:\n{}", wrong.len(), wrong.join("\n"));
        // None of these left anything behind that still fails.
        assert_eq!(fs::read(mounted.mountpoint.join("f")).expect("read"), faulty::CONTENT);
    }
}

/// Natively and on the mount the same, and as expected: an errno for each attempt.
#[track_caller]
fn compare(source: &Path, mountpoint: &Path, expected: i32, attempts: &[Attempt]) {
    for (name, attempt) in attempts {
        let natively = errno(attempt(source));
        assert_eq!(natively, Some(expected), "{name}: the control, natively");
        assert_eq!(errno(attempt(mountpoint)), natively, "{name}");
    }
}

#[test]
fn m18_a_full_device_says_so() {
    if !is_root() {
        return; // nobody else may mount one
    }
    for options in EACH_WAY {
        let folder = tempfile::tempdir().expect("a folder");
        let _tmpfs = Tmpfs::with(folder.path(), "size=1m");
        let mounted = Mounted::over(folder.path(), options);
        for (i, name) in ["f", "g"].iter().enumerate() {
            mounted.file(name, &noise(i as u64, 100));
        }
        fs::create_dir(folder.path().join("d")).expect("made");
        compare(
            folder.path(),
            &mounted.mountpoint,
            libc::ENOSPC,
            &[
                ("write", |at| {
                    let written = fs::write(at.join("large"), noise(1, 2 << 20));
                    fs::remove_file(at.join("large"))?;
                    written
                }),
                ("fallocate", |at| {
                    with_file(at, |file| Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), 0, 2 << 20)?))
                }),
                ("copy_file_range", |at| {
                    let large = File::create(at.join("large"))?;
                    large.set_len(900 << 10)?;
                    large.write_all_at(&noise(2, 700 << 10), 0)?;
                    let copied = fs::copy(at.join("large"), at.join("larger"));
                    fs::remove_file(at.join("large"))?;
                    fs::remove_file(at.join("larger"))?;
                    copied.map(drop)
                }),
            ],
        );
    }
}

#[test]
fn m18_a_device_without_room_for_a_file_says_so() {
    if !is_root() {
        return; // nobody else may mount one
    }
    let folder = tempfile::tempdir().expect("a folder");
    let _tmpfs = Tmpfs::with(folder.path(), "nr_inodes=20");
    let mounted = Mounted::over(folder.path(), &[]);
    let fillers = (0..).map(|i| folder.path().join(format!("filler{i}"))).take_while(|path| File::create(path).is_ok());
    assert!(fillers.count() < 20);
    let attempts: &[Attempt] = &[
        ("create", |at| File::create(at.join("new")).map(drop)),
        ("mkdir", |at| fs::create_dir(at.join("new"))),
        ("symlink", |at| symlink("filler0", at.join("new"))),
        ("link", |at| fs::hard_link(at.join("filler0"), at.join("new"))),
    ];
    compare(folder.path(), &mounted.mountpoint, libc::ENOSPC, attempts);
    // When there is room again, it works: the kernel gives the removed file up when it has told the daemon so.
    fs::remove_file(mounted.mountpoint.join("filler0")).expect("removed");
    eventually("there is room", || File::create(mounted.mountpoint.join("new")).is_ok());
}

#[test]
fn m18_a_read_only_source_says_so() {
    if !is_root() {
        return; // nobody else may mount one
    }
    let folder = tempfile::tempdir().expect("a folder");
    let _tmpfs = Tmpfs::mount(folder.path());
    fs::write(folder.path().join("f"), "content").expect("written");
    fs::create_dir(folder.path().join("d")).expect("made");
    run(Command::new("mount").args(["-o", "remount,ro"]).arg(folder.path())).ok();
    for options in EACH_WAY {
        let mounted = Mounted::over(folder.path(), options);
        assert_eq!(fs::read(mounted.mountpoint.join("f")).expect("read"), b"content", "the control");
        let changes = ["chmod", "mknod", "mkdir", "unlink", "rmdir", "symlink", "rename", "link", "create", "write"];
        let attempts = OPERATIONS.into_iter().chain(ATTRIBUTES);
        let of_these = |name: &str| changes.contains(&name) || ["setxattr", "removexattr", "truncate"].contains(&name);
        let attempts: Vec<_> = attempts.filter(|(name, _)| of_these(name)).collect();
        assert_eq!(attempts.len(), 15);
        compare(folder.path(), &mounted.mountpoint, libc::EROFS, &attempts);
    }
}

#[test]
fn m18_what_names_and_files_refuse() {
    for options in EACH_WAY {
        let native = tempfile::tempdir().expect("a folder");
        let mounted = Mounted::with(options);
        for folder in [native.path(), &mounted.source] {
            fs::create_dir_all(folder.join("d/full")).expect("made");
            fs::write(folder.join("f"), "content").expect("written");
            symlink("loop", folder.join("loop")).expect("linked");
            symlink("f", folder.join("l")).expect("linked");
            fs::write(folder.join("program"), "#!/bin/sh\n").expect("written");
        }
        let tables: [(i32, &[Attempt]); 10] = [
            (
                libc::ENAMETOOLONG,
                &[
                    ("create", |at| File::create(at.join("n".repeat(256))).map(drop)),
                    ("stat", |at| fs::metadata(at.join("n".repeat(256))).map(drop)),
                    ("mkdir", |at| fs::create_dir(at.join("n".repeat(256)))),
                    ("rename", |at| fs::rename(at.join("f"), at.join("n".repeat(256)))),
                    ("link", |at| fs::hard_link(at.join("f"), at.join("n".repeat(256)))),
                    ("symlink", |at| symlink("f", at.join("n".repeat(256)))),
                    ("symlink to", |at| symlink("n".repeat(4096), at.join("new"))),
                ],
            ),
            (
                libc::ELOOP,
                &[
                    ("open", |at| File::open(at.join("loop")).map(drop)),
                    ("stat", |at| fs::metadata(at.join("loop/f")).map(drop)),
                    ("O_NOFOLLOW", |at| {
                        open(OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW), &at.join("l")).map(drop)
                    }),
                ],
            ),
            (
                libc::ENOTEMPTY,
                &[
                    ("rmdir", |at| fs::remove_dir(at.join("d"))),
                    ("rename", |at| {
                        fs::create_dir(at.join("other"))?;
                        let renamed = fs::rename(at.join("other"), at.join("d"));
                        fs::remove_dir(at.join("other"))?;
                        renamed
                    }),
                ],
            ),
            (
                libc::EEXIST,
                &[
                    ("mkdir", |at| fs::create_dir(at.join("d"))),
                    ("create", |at| File::create_new(at.join("f")).map(drop)),
                    ("link", |at| fs::hard_link(at.join("f"), at.join("l"))),
                    ("setxattr", |at| {
                        rustix::fs::setxattr(at.join("f"), "user.twice", b"v", XattrFlags::empty())?;
                        Ok(rustix::fs::setxattr(at.join("f"), "user.twice", b"v", XattrFlags::CREATE)?)
                    }),
                ],
            ),
            (libc::EINVAL, &[("rename", |at| fs::rename(at.join("d"), at.join("d/full/below")))]),
            (
                libc::ENOTDIR,
                &[
                    ("stat", |at| fs::metadata(at.join("f/below")).map(drop)),
                    ("rmdir", |at| fs::remove_dir(at.join("f"))),
                    ("rename", |at| fs::rename(at.join("d"), at.join("f"))),
                ],
            ),
            (
                libc::EISDIR,
                &[
                    ("unlink", |at| Ok(rustix::fs::unlink(at.join("d"))?)),
                    ("open", |at| open(OpenOptions::new().write(true), &at.join("d")).map(drop)),
                    ("rename", |at| fs::rename(at.join("f"), at.join("d"))),
                    ("read", |at| fs::read(at.join("d")).map(drop)),
                ],
            ),
            (
                libc::ENODATA,
                &[
                    ("getxattr", |at| Ok(rustix::fs::getxattr(at.join("f"), "user.none", &mut [0; 9]).map(drop)?)),
                    ("removexattr", |at| Ok(rustix::fs::removexattr(at.join("f"), "user.none")?)),
                ],
            ),
            (
                libc::ENOENT,
                &[
                    ("open", |at| File::open(at.join("none")).map(drop)),
                    ("rename", |at| fs::rename(at.join("none"), at.join("new"))),
                    ("unlink", |at| fs::remove_file(at.join("none"))),
                ],
            ),
            (
                libc::ENXIO,
                &[
                    ("SEEK_DATA", |at| {
                        with_file(at, |f| Ok(rustix::fs::seek(f, rustix::fs::SeekFrom::Data(999)).map(drop)?))
                    }),
                    ("SEEK_HOLE", |at| {
                        with_file(at, |f| Ok(rustix::fs::seek(f, rustix::fs::SeekFrom::Hole(999)).map(drop)?))
                    }),
                ],
            ),
        ];
        for (expected, attempts) in tables {
            compare(native.path(), &mounted.mountpoint, expected, attempts);
        }
    }
}

#[test]
fn m18_a_running_program_is_not_written_to() {
    for options in EACH_WAY {
        let mounted = Mounted::with(options);
        let write = |path: &Path| errno(open(OpenOptions::new().write(true), path));
        // Opened for reading, and truncated by that: the kernel refuses only after the file system has opened it.
        let truncate = |path: &Path| errno(open(OpenOptions::new().read(true).custom_flags(libc::O_TRUNC), path));
        for (runs, other) in [(&mounted.mountpoint, &mounted.source), (&mounted.source, &mounted.mountpoint)] {
            let program = runs.join("program");
            fs::copy("/bin/sleep", &program).expect("copied");
            assert_eq!(write(&program), None, "the control: nobody runs it");
            let size = fs::metadata(&program).expect("stat").len();
            let mut child = Command::new(&program).arg("60").spawn().expect("started");
            eventually("it runs", || {
                fs::read_link(format!("/proc/{}/exe", child.id())).is_ok_and(|exe| exe == program)
            });
            let (here, there) = (write(&program), write(&other.join("program")));
            let truncated = (truncate(&program), fs::metadata(&program).expect("stat").len());
            let _ = child.kill();
            let _ = child.wait();
            assert_eq!(here, Some(libc::ETXTBSY), "where it runs, mounted with {options:?}");
            assert_eq!(truncated, (Some(libc::ETXTBSY), size), "where it runs, mounted with {options:?}");
            // Behind a mount that runs it nobody knows of it; but who runs it behind the mount is respected.
            if runs == &mounted.source {
                assert_eq!(there, Some(libc::ETXTBSY), "on the mount, mounted with {options:?}");
            }
            fs::remove_file(&program).expect("removed");
        }
    }
}

#[test]
fn m18_other_file_systems_and_other_people() {
    if !is_root() {
        return; // needs a file system to cross into, and another user to be
    }
    for options in EACH_WAY {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).expect("made");
        let _inner = Tmpfs::mount(&inner);
        fs::write(folder.path().join("f"), "content").expect("written");
        fs::create_dir(folder.path().join("private")).expect("made");
        fs::write(folder.path().join("private/f"), "secret").expect("written");
        for (name, mode) in [("private", 0o700), ("f", 0o600), ("", 0o755)] {
            fs::set_permissions(folder.path().join(name), Permissions::from_mode(mode)).expect("chmod");
        }
        let mounted = Mounted::over(folder.path(), &[options, &["--allow-other"]].concat());
        compare(
            folder.path(),
            &mounted.mountpoint,
            libc::EXDEV,
            &[
                ("rename", |at| fs::rename(at.join("f"), at.join("inner/f"))),
                ("link", |at| fs::hard_link(at.join("f"), at.join("inner/f"))),
            ],
        );
        compare(folder.path(), &mounted.mountpoint, libc::EBUSY, &[("rmdir", |at| fs::remove_dir(at.join("inner")))]);

        let outer = mounted.mountpoint.parent().expect("a folder");
        fs::set_permissions(outer, Permissions::from_mode(0o755)).expect("chmod");
        let words = |at: &Path| {
            let script = "for what in 'cat f' 'ls private' 'cat private/f' 'touch new' 'chmod 777 f' 'rm f' 'mv f g' \
                          'setfattr -n user.a -v b f' 'chown 65534 f' 'truncate -s 0 f' 'true'; do \
                          $what 2>&1 || echo \"$what: failed\"; done";
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", script]);
            run(command.current_dir(at).env("LC_ALL", "C")).ok().text()
        };
        let natively = words(folder.path());
        assert_eq!(natively.matches(": failed").count(), 10, "the control: {natively}");
        assert!(natively.contains("Permission denied") && natively.contains("Operation not permitted"), "{natively}");
        assert_eq!(words(&mounted.mountpoint), natively, "mounted with {options:?}");
    }
}

#[test]
fn m18_no_more_links_than_the_source_can_count() {
    let mounted = Mounted::new();
    mounted.file("f", b"x");
    let at = |i: usize| mounted.source.join(format!("l{i}"));
    // ext4 counts to 65,000; other file systems further than a test should.
    let Some((last, e)) =
        (0..66_000).find_map(|i| fs::hard_link(mounted.source.join("f"), at(i)).err().map(|e| (i, e)))
    else {
        eprintln!("not shown here: the file system counts more than 66,000 links");
        return;
    };
    assert_eq!(e.raw_os_error(), Some(libc::EMLINK));
    let again = |i: usize| errno(fs::hard_link(mounted.mountpoint.join("f"), mounted.mountpoint.join(format!("l{i}"))));
    assert_eq!(again(last), Some(libc::EMLINK));
    fs::remove_file(mounted.mountpoint.join("l0")).expect("removed");
    assert_eq!((again(last), again(0)), (None, Some(libc::EMLINK)));
}
