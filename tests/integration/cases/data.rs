//! What goes wrong with open files: several opens of one, direct I/O, mappings, files without a name, set-user-id bits.

use super::EACH_WAY;
use crate::harness::*;
use crate::mount::{errno, the_same_everywhere};
use crate::warpfs;
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use warpfs::protocol::{IOCTL_MATERIALIZE, IOCTL_STATUS, MaterializeIoctl, State, StatusIoctl, Wire};

/// Memory that direct I/O takes.
#[derive(Clone)]
#[repr(C, align(4096))]
struct Block([u8; 8192]);

fn direct(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    options.custom_flags(libc::O_DIRECT).open(path)
}

#[test]
fn m01_fifty_threads_open_one_file_in_every_way() {
    for options in EACH_WAY {
        let mounted = Mounted::with(options);
        let content = noise(1, 1 << 16);
        let path = mounted.file("f", &content);
        let open_and_use = move |way: usize| {
            let mut options = OpenOptions::new();
            options.read(way % 5 != 2).write(matches!(way % 5, 1 | 2 | 4));
            let file = if way % 5 >= 3 { direct(&mut options, &path) } else { options.open(&path) }.expect("opened");
            let mut block = Box::new(Block([0; 8192]));
            if matches!(way % 5, 1 | 2 | 4) {
                block.0.copy_from_slice(&content[..8192]);
                assert_eq!(file.write_at(&block.0, 0).expect("written"), 8192);
            }
            if way % 5 != 2 {
                assert_eq!(file.read_at(&mut block.0, 8192).expect("read"), 8192);
                assert!(block.0 == content[8192..16384], "other bytes, opened in way {way}");
            }
            file
        };
        let threads = (0..50)
            .map(|i| {
                let open_and_use = open_and_use.clone();
                std::thread::spawn(move || {
                    // Each keeps one open while it opens the next, so that all ways meet.
                    let mut kept = None;
                    for round in 0..20 {
                        let file = open_and_use(i + round * (1 + i / 10));
                        drop(kept.replace(file));
                    }
                })
            })
            .collect();
        super::all_end(threads, DEADLINE);
        let seen = mounted.stats()["mount"]["reads"].as_u64().expect("a number");
        assert_eq!(seen > 0, !mounted.passes_through(), "the daemon saw {seen} reads");
    }
}

#[test]
fn m02_direct_reads_and_writes_are_native() {
    let work = |folder: &Path, misaligned: bool| {
        let path = folder.join("f");
        let (first, second) = (Block([b'1'; 8192]), Block([b'2'; 8192]));
        let file = direct(OpenOptions::new().create_new(true).read(true).write(true), &path);
        // A file system may have no direct I/O; then there is nothing to be the same.
        let Ok(file) = file else { return (vec![errno(file).map(|e| e as usize)], Vec::new()) };
        let mut done = vec![file.write_at(&second.0, 8192).ok(), file.write_at(&first.0, 0).ok()];
        fs::OpenOptions::new().append(true).open(&path).expect("opened").write_all(b"tail").expect("appended");
        let mut block = Block([0; 8192]);
        for offset in [0, 8192, 16384, 24576] {
            let read = file.read_at(&mut block.0, offset).expect("read");
            done.push(Some(read));
            done.push(Some(block.0[..read].iter().map(|b| usize::from(*b)).sum()));
        }
        if misaligned {
            let refused = |result: std::io::Result<usize>| Some(errno(result).unwrap_or(0) as usize);
            done.push(refused(file.read_at(&mut block.0[..100], 0)));
            done.push(refused(file.read_at(&mut block.0[1..4097], 0)));
            done.push(refused(file.read_at(&mut block.0, 7)));
            done.push(refused(file.write_at(&first.0[..100], 0)));
            done.push(refused(file.write_at(&first.0, 7)));
        }
        (done, fs::read(&path).expect("read"))
    };
    let native = tempfile::tempdir().expect("a folder");
    for (i, options) in EACH_WAY.into_iter().enumerate() {
        let mounted = Mounted::with(options);
        // Without passthrough the daemon reads and writes what a disk would refuse: there a program fails less.
        let misaligned = mounted.passes_through();
        let twin = native.path().join(i.to_string());
        fs::create_dir(&twin).expect("made");
        let expected = work(&twin, misaligned);
        assert_eq!(expected.1.len(), 2 * 8192 + 4, "no direct I/O here: {:?}", expected.0);
        assert_eq!(work(&mounted.mountpoint, misaligned), expected, "mounted with {options:?}");
        assert_eq!(fs::read(mounted.source.join("f")).expect("read"), expected.1);
    }
}

#[test]
fn m03_a_copy_after_an_extending_write_has_every_byte() {
    the_same_everywhere(|folder| {
        let make = |name: &str| {
            OpenOptions::new().create_new(true).read(true).write(true).open(folder.join(name)).expect("created")
        };
        let (from, to) = (make("from"), make("to"));
        let mut seen = Vec::new();
        for round in 0..20_u64 {
            let (begin, piece) = (round * 10_000, noise(round, 10_000));
            from.write_all_at(&piece, begin).expect("extended");
            let (mut read_at, mut write_at) = (begin, begin);
            let copied = rustix::fs::copy_file_range(&from, Some(&mut read_at), &to, Some(&mut write_at), 20_000);
            // By both descriptors and by both names.
            let sizes = [&from, &to].map(|file| file.metadata().expect("stat").len());
            let by_name = ["from", "to"].map(|name| fs::metadata(folder.join(name)).expect("stat").len());
            seen.push((copied.expect("copied"), sizes, by_name));
        }
        assert_eq!(seen.last(), Some(&(10_000, [200_000; 2], [200_000; 2])));
        assert!(fs::read(folder.join("to")).expect("read") == fs::read(folder.join("from")).expect("read"));
        seen
    });
}

#[test]
fn m08_a_child_that_closes_the_file_publishes_nothing() {
    for options in EACH_WAY {
        let mounted = Mounted::with(options);
        let path = mounted.mountpoint.join("f");
        let file = OpenOptions::new().create_new(true).read(true).write(true).open(&path).expect("created");
        let mut content = Vec::new();
        for round in 0..5_u64 {
            content.extend(noise(round, 100_000));
            file.write_all_at(&noise(round, 100_000), round * 100_000).expect("written");
            // The child has the descriptor as its input, and closes it when it exits: a FLUSH, and no RELEASE.
            let input = Stdio::from(file.try_clone().expect("duplicated"));
            let mut child = Command::new("true").stdin(input).spawn().expect("started");
            assert!(end(&mut child, DEADLINE).expect("it ends").success());
            assert_eq!(fs::metadata(&path).expect("stat").len(), content.len() as u64);
            // A copy of what is there now is no copy of what the parent writes next.
            assert!(warpfs!("read", path).ok().stdout == content, "round {round}, mounted with {options:?}");
        }
        file.write_all_at(b"changed in place", 10).expect("written");
        content[10..26].copy_from_slice(b"changed in place");
        assert!(warpfs!("read", path).ok().stdout == content, "mounted with {options:?}");
        assert_eq!(mounted.counter("loads"), 6, "the control: each time there was something new");
        drop(file);
        warpfs!("verify", path).ok();
    }
}

/// Two pages of a file, mapped.
struct Mapping(*mut u8);

impl Mapping {
    const LENGTH: usize = 8192;

    fn new(file: &File, flags: MapFlags) -> Mapping {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let mapped = unsafe { rustix::mm::mmap(std::ptr::null_mut(), Mapping::LENGTH, both, flags, file, 0) };
        Mapping(mapped.expect("mapped").cast())
    }

    fn get(&self, at: usize) -> u8 {
        assert!(at < Mapping::LENGTH);
        // SAFETY: inside the mapping, whose file is not shortened while it lives.
        unsafe { self.0.add(at).read_volatile() }
    }

    fn set(&self, at: usize, byte: u8) {
        assert!(at < Mapping::LENGTH);
        // SAFETY: as in `get`.
        unsafe { self.0.add(at).write_volatile(byte) }
    }

    fn sync(&self) {
        // SAFETY: the whole mapping and nothing else.
        unsafe { rustix::mm::msync(self.0.cast(), Mapping::LENGTH, rustix::mm::MsyncFlags::SYNC) }.expect("synced");
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody keeps an address in it.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), Mapping::LENGTH) };
    }
}

#[test]
fn m10_shared_mappings_are_shared_and_written_through() {
    // The programs of this case (sqlite in WAL mode, a cargo build, git clone and fsck) are in `programs`.
    for options in EACH_WAY {
        let mounted = Mounted::with(options);
        let path = mounted.file("f", &[b'a'; Mapping::LENGTH]);
        let open = || OpenOptions::new().read(true).write(true).open(&path).expect("opened");
        let (one, two, private) = (open(), open(), open());
        let (one, two) = (Mapping::new(&one, MapFlags::SHARED), Mapping::new(&two, MapFlags::SHARED));
        let private = Mapping::new(&private, MapFlags::PRIVATE);
        private.set(1, b'p');
        one.set(5000, b'b');
        assert_eq!((two.get(5000), private.get(5000)), (b'b', b'b'));
        // What read and write do is seen in the mappings, and the other way round.
        let file = open();
        file.write_all_at(b"w", 100).expect("written");
        assert_eq!((one.get(100), two.get(100)), (b'w', b'w'));
        two.set(200, b'm');
        let mut byte = [0];
        file.read_exact_at(&mut byte, 200).expect("read");
        assert_eq!(byte, *b"m");
        one.sync();
        two.sync();
        let content = fs::read(mounted.source.join("f")).expect("read");
        assert_eq!([1, 100, 200, 5000].map(|at| content[at]), *b"awmb", "mounted with {options:?}");
        // Nobody has it open but the mappings.
        drop(file);
        one.set(300, b'l');
        one.sync();
        assert_eq!(fs::read(mounted.source.join("f")).expect("read")[300], b'l');
    }
}

#[test]
fn m12_a_file_without_a_name_can_do_everything() {
    let work = |folder: &Path, replaced: bool| {
        let path = folder.join("f");
        let file = OpenOptions::new().create_new(true).read(true).write(true).open(&path).expect("created");
        file.write_all_at(b"content", 0).expect("written");
        if replaced {
            fs::write(folder.join("g"), "another").expect("written");
            fs::rename(folder.join("g"), &path).expect("renamed over");
        } else {
            fs::remove_file(&path).expect("unlinked");
        }
        file.set_len(4).expect("ftruncate");
        file.set_permissions(fs::Permissions::from_mode(0o600)).expect("fchmod");
        file.write_all_at(b"more", 4).expect("written");
        rustix::fs::fchown(&file, Some(rustix::process::geteuid()), None).expect("fchown");
        rustix::fs::fsetxattr(&file, "user.note", b"v", rustix::fs::XattrFlags::empty()).expect("fsetxattr");
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 8).expect("fallocate");
        let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_234_567_890, 123_456_789);
        file.set_modified(time).expect("futimens");
        file.sync_all().expect("fsync");
        let mut content = [0; 8];
        file.read_exact_at(&mut content, 0).expect("read");
        let meta = file.metadata().expect("fstat");
        let by_name = fs::read(&path).ok();
        ((content, meta.nlink(), meta.len(), meta.mode(), meta.mtime_nsec()), by_name, file)
    };
    for replaced in [false, true] {
        the_same_everywhere(|folder| {
            let (seen, by_name, _file) = work(folder, replaced);
            (seen, by_name)
        });
        for options in EACH_WAY {
            let mounted = Mounted::with(options);
            let (_, _, file) = work(&mounted.mountpoint, replaced);
            let (errno, reply) = ioctl(&file, IOCTL_MATERIALIZE, &MaterializeIoctl::zeroed());
            assert_eq!((errno, reply.state, reply.data_length), (0, State::Resident as u32, 8), "{options:?}");
            let (errno, status) = ioctl(&file, IOCTL_STATUS, &StatusIoctl::zeroed());
            assert_eq!((errno, status.state, status.size), (0, State::Resident as u32, 8), "{options:?}");
            if replaced {
                let path = mounted.mountpoint.join("f");
                assert_eq!(getxattr(&path, "user.warpfs.state").as_deref(), Ok("absent"), "that is another file");
            }
        }
    }
}

#[test]
fn m15_set_user_id_bits_go_as_they_do_natively() {
    bits_go_as_they_do_natively(&[0o4755, 0o2755, 0o6755, 0o6777]);
}

#[test]
fn m15_a_set_group_id_bit_without_the_groups_x_goes_at_every_write() {
    // Natively it stays where its own group writes. On the mount the daemon or the kernel writes, who are in no group.
    if !is_root() {
        return; // needs another user to be
    }
    let mode_after = |source: &Path, folder: &Path, operation: &str| {
        fs::set_permissions(source, fs::Permissions::from_mode(0o777)).expect("chmod");
        let path = folder.join(operation.split(' ').next().expect("a word"));
        fs::write(&path, "content").expect("written");
        std::os::unix::fs::chown(&path, Some(65534), Some(65534)).expect("chown");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o2745)).expect("chmod");
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-ec", operation]);
        run(command.env("f", &path)).ok();
        fs::metadata(&path).expect("stat").mode() & 0o7777
    };
    let native = tempfile::tempdir().expect("a folder");
    for options in EACH_WAY {
        let mounted = Mounted::with(&[options, &["--allow-other"]].concat());
        let folder = mounted.source.parent().expect("a folder");
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("chmod");
        for (operation, on_the_mount) in [("printf x >> $f", 0o745), ("fallocate -l 9000 $f", 0o2745)] {
            assert_eq!(mode_after(native.path(), native.path(), operation), 0o2745, "the control: {operation}");
            let seen = mode_after(&mounted.source, &mounted.mountpoint, operation);
            assert_eq!(seen, on_the_mount, "{operation}, {options:?}: {seen:o}");
        }
    }
}

#[track_caller]
fn bits_go_as_they_do_natively(modes: &[u32]) {
    if !is_root() {
        return; // needs another user to be
    }
    let operations = [
        "printf x >> $f",
        "printf x | dd of=$f conv=notrunc status=none",
        "truncate -s 1 $f",
        ": > $f",
        "chown $(id -u) $f",
        "chgrp $(id -g) $f",
        "fallocate -l 9000 $f",
        "true", // the control: nothing was done, and the bits stay
    ];
    let open = |folder: &Path| fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).expect("chmod");
    // The modes after each operation on each file, done in `folder` as `user`.
    let modes_after = |source: &Path, folder: &Path, user: u32| {
        let mut seen = BTreeMap::new();
        open(source);
        for before in modes.iter().copied() {
            for operation in operations {
                // A name that was never there: the kernel remembers names for a moment.
                let name = format!("{user}-{}", seen.len());
                let path = folder.join(&name);
                fs::write(&path, "content").expect("written");
                std::os::unix::fs::chown(&path, Some(65534), Some(65534)).expect("chown");
                fs::set_permissions(&path, fs::Permissions::from_mode(before)).expect("chmod");
                let mut command = Command::new("setpriv");
                command.args([format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".into()]);
                run(command.args(["sh", "-ec", operation]).current_dir(folder).env("f", &name)).ok();
                let after = fs::metadata(&path).expect("stat").mode() & 0o7777;
                assert_eq!(fs::metadata(source.join(&name)).expect("stat").mode() & 0o7777, after, "{operation}");
                seen.insert((format!("{before:o}"), operation), format!("{after:o}"));
            }
        }
        seen
    };
    let native = tempfile::tempdir().expect("a folder");
    let natively = [65534, 0].map(|user| modes_after(native.path(), native.path(), user));
    for options in EACH_WAY {
        let mounted = Mounted::with(&[options, &["--allow-other"]].concat());
        open(mounted.source.parent().expect("a folder"));
        for (i, user) in [65534, 0].into_iter().enumerate() {
            for ((before, operation), after) in modes_after(&mounted.source, &mounted.mountpoint, user) {
                assert!(operation != "true" || before == after, "{before}: nothing was done, and it became {after}");
                // Under passthrough the kernel writes without the right to keep the bits, whoever asked for the write:
                // root's writes clear them as an ordinary user's do.
                let as_a_user = mounted.passes_through() && operation.starts_with("printf");
                let expected = &natively[if as_a_user { 0 } else { i }][&(before.clone(), operation)];
                assert_eq!(&after, expected, "{before}, {operation}, user {user}, mounted with {options:?}");
            }
        }
    }
}

#[test]
fn m16_truncating_at_open_counts_for_whoever_has_it_open() {
    the_same_everywhere(|folder| {
        let path = folder.join("f");
        fs::write(&path, noise(1, 100_000)).expect("written");
        let mut reader = File::open(&path).expect("opened");
        let mut some = vec![0; 1000];
        reader.read_exact(&mut some).expect("read");
        let writer = OpenOptions::new().write(true).truncate(true).open(&path).expect("opened");
        let sizes = [&reader, &writer].map(|file| file.metadata().expect("stat").len());
        assert_eq!((sizes, fs::metadata(&path).expect("stat").len()), ([0, 0], 0));
        let nothing = reader.read(&mut some).expect("read");
        writer.write_all_at(b"new", 0).expect("written");
        let read = reader.read_at(&mut some, 0).expect("read");
        (nothing, some[..read].to_vec(), reader.metadata().expect("stat").len())
    });
}
