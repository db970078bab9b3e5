//! Changes that leave no trace in a file's times: stores through shared mappings, which nobody who looks at the file sees.

use crate::harness::*;
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use warpfs::client::Session;
use warpfs::protocol::Code;

/// Its last page is less than a block: no direct read, which writes dirty pages first, ever reads it.
const SIZE: usize = 73 * 4096 + 100;
/// There, where nothing makes a page clean by the way.
const AT: usize = SIZE - 1;

/// A shared writable mapping of a file, whose descriptor is closed.
struct Mapped(*mut u8);

impl Mapped {
    fn of(path: &Path) -> Mapped {
        let file = File::options().read(true).write(true).open(path).expect("opened");
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), SIZE, protection, MapFlags::SHARED, &file, 0) };
        Mapped(at.expect("mapped").cast())
    }

    fn store(&self, at: usize, byte: u8) {
        assert!(at < SIZE);
        // SAFETY: in the mapping, which is as long as the file.
        unsafe { self.0.add(at).write_volatile(byte) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), SIZE) };
    }
}

fn times(path: &Path) -> (i64, i64, i64, i64) {
    let status = std::fs::metadata(path).expect("there");
    (status.mtime(), status.mtime_nsec(), status.ctime(), status.ctime_nsec())
}

/// Each store, made by `way` to the file, shows at the next request.
#[track_caller]
fn stores_show(mounted: &Mounted, way: &Path) {
    let mut content = noise(3, SIZE);
    let path = mounted.file("mapped", &content);
    let source = mounted.source.join("mapped");
    let session = Session::of_path(&path).expect("a session");
    let mapped = Mapped::of(&way.join("mapped"));
    mapped.store(AT, 1);
    let before = times(&source);
    std::thread::sleep(std::time::Duration::from_millis(20));
    mapped.store(AT, 2);
    assert_eq!(times(&source), before, "the control: this store left no trace");
    content[AT] = 2;
    for byte in 3..12 {
        assert!(device_bytes(&session, &path) == content, "byte {byte} by {}", way.display());
        // Twice, for the second leaves no trace; the first does since the request.
        mapped.store(AT, 100);
        mapped.store(AT, byte);
        content[AT] = byte;
    }
    drop(mapped);
    assert!(device_bytes(&session, &path) == content);
    let loads = mounted.counter("loads");
    assert!(device_bytes(&session, &path) == content);
    assert_eq!(mounted.counter("loads"), loads, "the control: what does not change is a hit");
}

#[test]
fn a_store_through_a_mapping_shows_at_the_next_request() {
    let mounted = Mounted::new();
    stores_show(&mounted, &mounted.source);
    if mounted.passes_through() {
        stores_show(&mounted, &mounted.mountpoint);
    }
    let mounted = Mounted::with(&["--no-passthrough"]);
    stores_show(&mounted, &mounted.source);
}

#[test]
fn a_store_through_a_mapping_shows_on_xfs() {
    on_a_disk_with("xfs");
}

#[test]
fn a_store_through_a_mapping_shows_on_btrfs() {
    on_a_disk_with("btrfs");
}

/// On a file system of its own, in a file.
fn on_a_disk_with(kind: &str) {
    let place = tempfile::tempdir().expect("a folder");
    let (image, source) = (place.path().join("image"), place.path().join("source"));
    File::create(&image).expect("created").set_len(400 << 20).expect("long enough");
    std::fs::create_dir(&source).expect("created");
    let made = std::process::Command::new(format!("mkfs.{kind}")).args(["-q", "-f"]).arg(&image).output();
    let known = std::fs::read_to_string("/proc/filesystems").expect("readable").contains(&format!("\t{kind}\n"));
    if !is_root() || !known || !made.is_ok_and(|made| made.status.success()) {
        eprintln!("skipped: no root, no {kind} in this kernel, or no mkfs.{kind}");
        return;
    }
    let _disk = Other::mount(&["-o", "loop", image.to_str().expect("a name")], &source);
    let mounted = Mounted::over(&source, &[]);
    stores_show(&mounted, &mounted.source);
    if mounted.passes_through() {
        stores_show(&mounted, &mounted.mountpoint);
    }
}

#[test]
fn a_store_through_a_mapping_shows_on_a_stacked_source() {
    if !is_root() {
        return;
    }
    let place = tempfile::tempdir().expect("a folder");
    let at = |name: &str| place.path().join(name);
    let _overlay = Other::overlay(&at("lower"), &at("upper"), &at("work"), &at("source"));
    let mounted = Mounted::over(&at("source"), &[]);
    stores_show(&mounted, &mounted.source);
}

#[test]
fn a_file_in_memory_is_refused_while_somebody_can_store_to_it() {
    if !is_root() {
        return;
    }
    let place = tempfile::tempdir().expect("a folder");
    let _tmpfs = Tmpfs::mount(place.path());
    let mounted = Mounted::over(place.path(), &[]);
    let mut content = noise(3, SIZE);
    let path = mounted.file("mapped", &content);
    let session = Session::of_path(&path).expect("a session");
    assert!(device_bytes(&session, &path) == content, "the control");
    let mapped = Mapped::of(&place.path().join("mapped"));
    mapped.store(AT, 1);
    content[AT] = 1;
    let failure = session.open(&path).err().expect("its bytes may change at any moment");
    assert_eq!((failure.code, failure.errno), (Code::Changing, libc::EAGAIN), "{failure}");
    assert!(failure.message.contains("mapped: is open for writing"), "{failure}");
    assert_eq!(mounted.used(), 0, "nothing stays of it");
    drop(mapped);
    assert!(device_bytes(&session, &path) == content);
}

#[test]
fn a_file_that_never_rests_is_not_published() {
    let mounted = Mounted::new();
    let path = mounted.file("restless", &noise(1, 8 << 20));
    let writer = File::options().write(true).open(mounted.source.join("restless")).expect("opened");
    let session = Session::of_path(&path).expect("a session");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 0_u64;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                number += 1;
                let bytes = number.to_le_bytes();
                std::os::unix::fs::FileExt::write_all_at(&writer, &bytes, (number % 1000) * 8192).expect("written");
            }
        });
        let answer = session.open(&path);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let failure = answer.err().expect("it changes all the time");
        assert_eq!((failure.code, failure.errno), (Code::Changing, libc::EAGAIN), "{failure}");
    });
    drop(writer);
    let content = std::fs::read(&path).expect("read");
    assert!(device_bytes(&session, &path) == content, "the control: now it rests");
}
