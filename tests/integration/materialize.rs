//! The main job: a file's bytes in device memory, once, for every process.

use crate::harness::*;
use crate::warpfs;
use std::process::Stdio;
use warpfs::client::Session;

/// Sizes around every boundary that matters, then random ones up to 3 MiB.
fn sizes() -> Vec<usize> {
    let mut sizes =
        vec![0, 1, 511, 512, 4095, 4096, 4097, (1 << 20) - 1, 1 << 21, (1 << 21) + 1, (4 << 20) + 4095, 9 << 20];
    let mut random =
        noise(42, 8 * 200).chunks(8).map(|c| u64::from_le_bytes(c.try_into().expect("eight"))).collect::<Vec<_>>();
    sizes.extend(random.drain(..200 - sizes.len()).map(|n| (n % (3 << 20)) as usize >> (n >> 60)));
    sizes
}

#[test]
fn device_bytes_equal_file_bytes_for_200_files() {
    let mounted = Mounted::new();
    let contents: Vec<_> = sizes().into_iter().enumerate().map(|(i, size)| noise(i as u64, size)).collect();
    assert_eq!(contents.len(), 200);
    for (i, content) in contents.iter().enumerate() {
        mounted.file(&format!("f{i}"), content);
    }
    let output = warpfs!("preload", mounted.mountpoint).ok();
    assert!(output.text().starts_with("200 files, "), "{}", output.text());
    let device = mounted.device();
    let empty = contents.iter().filter(|content| content.is_empty()).count() as u64;
    assert_eq!(device["resident_files"].as_u64(), Some(200 - empty));
    let session = Session::of_path(&mounted.mountpoint).expect("a session");
    for (i, content) in contents.iter().enumerate() {
        assert_eq!(&device_bytes(&session, &mounted.mountpoint.join(format!("f{i}"))), content, "file {i}");
    }
    // Reading them was free.
    assert_eq!(mounted.counter("misses"), 200 - empty);
    let verified = warpfs!("verify", mounted.mountpoint).ok().text();
    assert_eq!(verified.lines().count(), 201);
    assert!(verified.ends_with("200 of 200 files are equal\n"), "{verified}");
}

#[test]
fn a_second_process_shares_the_one_copy() {
    let mounted = Mounted::new();
    let content = noise(1, 24 << 20);
    let path = mounted.file("model", &content);
    let session = Session::of_path(&path).expect("a session");
    let ours = session.open(&path).expect("opened");
    let used = mounted.used();
    assert!(used >= content.len() as u64);
    // Another process maps it, while we do; a third writes it out.
    warpfs!("verify", path).ok();
    assert_eq!(warpfs!("read", path).ok().stdout, content);
    assert_eq!(mounted.used(), used, "no byte more for the second process");
    assert_eq!((mounted.counter("loads"), mounted.counter("hits")), (1, 2));
    let mut bytes = vec![0; content.len()];
    ours.read(0, &mut bytes).expect("read");
    assert_eq!(bytes, content);
    // The control for "no byte more": another file does cost.
    let other = mounted.file("other", &noise(2, 24 << 20));
    warpfs!("preload", other).ok();
    assert!(mounted.used() >= 2 * content.len() as u64);
}

#[test]
fn a_client_that_is_killed_gives_its_hold_back() {
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(3, 4 << 20));
    // It blocks when the pipe is full, with the copy in its hands.
    let mut reader = warpfs(["read".as_ref(), path.as_os_str()]).stdout(Stdio::piped()).spawn().expect("started");
    let held = || mounted.device()["holders"].as_array().expect("a list").len();
    eventually("the reader holds the copy", || held() == 1);
    let holder = mounted.device()["holders"][0].clone();
    assert_eq!(holder["pid"].as_u64(), Some(reader.id().into()));
    let evicted = warpfs!("evict", path).ok().text();
    assert!(evicted.contains("are held"), "{evicted}");
    assert!(mounted.used() >= 4 << 20, "memory under a lease is not freed");
    reader.kill().expect("killed");
    reader.wait().expect("reaped");
    eventually("the hold is gone, and the memory", || held() == 0 && mounted.used() == 0);
}

#[test]
fn eviction_makes_room_but_never_takes_what_is_held() {
    let mounted = Mounted::with(&["--budget", "32MiB"]);
    let files: Vec<_> = (0..5).map(|i| mounted.file(&format!("f{i}"), &noise(i, 8 << 20))).collect();
    let session = Session::of_path(&mounted.mountpoint).expect("a session");
    let held = session.open(&files[0]).expect("opened");
    for file in &files[1..] {
        warpfs!("preload", file).ok();
    }
    assert!(mounted.used() <= 32 << 20);
    assert_eq!(mounted.counter("evictions"), 1);
    let state = |i: usize| getxattr(&files[i], "user.warpfs.state").expect("known");
    assert_eq!([state(0), state(1), state(4)], ["resident", "absent", "resident"]);
    let mut first = [0; 64];
    held.read(0, &mut first).expect("read");
    assert_eq!(first[..], noise(0, 64));
    // All of it held: nothing can go, and the message says who is in the way.
    let all: Vec<_> = files[2..].iter().map(|file| session.open(file).expect("opened")).collect();
    let said = warpfs!("preload", files[1]).fails(&["no room", "held by process"]);
    assert!(said.contains(&std::process::id().to_string()), "{said}");
    drop(all);
    warpfs!("preload", files[1]).ok();
}

#[test]
fn a_changed_file_gets_a_new_copy_and_holders_keep_the_old_bytes() {
    let mounted = Mounted::new();
    let (old, new) = (noise(5, 100_000), noise(6, 70_000));
    let path = mounted.file("f", &old);
    let session = Session::of_path(&path).expect("a session");
    let before = session.open(&path).expect("opened");
    for (way, file) in [("through the mount", &path), ("behind it", &mounted.source.join("f"))] {
        std::fs::write(file, &new).expect("written");
        assert_eq!(device_bytes(&session, &path), new, "written {way}");
        std::fs::write(file, &old).expect("written");
        assert_eq!(device_bytes(&session, &path), old, "written {way}");
    }
    let replacement = mounted.file("g", &new);
    std::fs::rename(&replacement, &path).expect("renamed over");
    assert_eq!(device_bytes(&session, &path), new, "renamed over");
    let mut bytes = vec![0; old.len()];
    before.read(0, &mut bytes).expect("read");
    assert_eq!(bytes, old, "the holder's bytes");
    assert_ne!(before.generation(), session.open(&path).expect("opened").generation());
}

#[test]
fn tensors_of_a_safetensors_file_lie_aligned() {
    let mounted = Mounted::new();
    let session = Session::of_path(&mounted.mountpoint).expect("a session");
    for header in [100_u64, 248, 9999] {
        let mut content = header.to_le_bytes().to_vec();
        content.push(b'{');
        content.resize(8 + header as usize, b' ');
        content.extend(noise(header, 5000));
        let path = mounted.file(&format!("m{header}.safetensors"), &content);
        let buffer = session.open(&path).expect("opened");
        assert_eq!((buffer.address() + 8 + header) % 256, 0, "header of {header}");
        assert_eq!(device_bytes(&session, &path), content);
    }
    // The control: another file begins at such an address, or, where it has memory of its own, at the beginning.
    let path = mounted.file("plain", &noise(1, 5000));
    assert_eq!(session.open(&path).expect("opened").address() % 256, 0);
    let path = mounted.file("large", &noise(1, (1 << 20) + 1));
    assert_eq!(session.open(&path).expect("opened").address() % 4096, 0);
}

#[test]
fn buffers_in_one_allocation_are_mapped_once() {
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(8, 3 << 20));
    let session = Session::of_path(&path).expect("a session");
    let (first, second) = (session.open(&path).expect("opened"), session.open(&path).expect("opened"));
    assert_eq!(first.address(), second.address());
    drop(first);
    let mut bytes = vec![0; 3 << 20];
    second.read(0, &mut bytes).expect("still mapped");
    assert_eq!(bytes, noise(8, 3 << 20));
    assert_eq!(mounted.device()["holders"].as_array().map(Vec::len), Some(1));
    drop(second);
    assert_eq!(mounted.device()["holders"].as_array().map(Vec::len), Some(0));
}

#[test]
fn a_thousand_attaches_leave_nothing_behind() {
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(9, 1 << 20));
    let session = Session::of_path(&path).expect("a session");
    let count = |pid: u32, what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).expect("alive").count();
    let maps = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("alive").lines().count();
    let daemon = mounted.daemon() as u32;
    let attach = || drop(session.open(&path).expect("opened"));
    attach();
    let before = (count(daemon, "fd"), mounted.used());
    for _ in 0..1000 {
        attach();
    }
    // A close reaches the daemon a moment later, so one descriptor more or less says nothing; a thousand would.
    eventually("the daemon is as before", || count(daemon, "fd") <= before.0 + 2 && mounted.used() == before.1);
    // Other tests run in this process, so its own numbers may move a little, but not by a thousand.
    assert!(count(std::process::id(), "fd") < 500, "descriptors");
    assert!(maps(std::process::id()) < 2000, "mappings");
}

#[test]
fn a_copy_cannot_be_changed_by_its_clients() {
    if !on_host() {
        return; // the driver's word on this is in the GPU's own test
    }
    use warpfs::protocol::{Fetch, Hello, MaterializeIoctl, Wire, kind};
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(10, 10_000));
    let socket = std::os::unix::net::UnixStream::connect(mounted.socket()).expect("connected");
    let hello = Hello { magic: warpfs::protocol::HELLO_MAGIC, version: 1, capabilities: 0 };
    warpfs::socket::send(&socket, kind::HELLO, 1, &hello.encode(), &[]).expect("sent");
    let reply = crate::harness::receive(&socket).expect("received").expect("a frame");
    let secret = warpfs::protocol::HelloReply::decode(&reply.body).expect("a hello").secret;
    let mut ask = MaterializeIoctl::zeroed();
    ask.secret = secret;
    let (errno, granted) =
        ioctl(std::fs::File::open(&path).expect("opened"), warpfs::protocol::IOCTL_MATERIALIZE, &ask);
    assert_eq!((errno, granted.state), (0, 2));
    let fetch = Fetch { allocation: granted.allocation };
    warpfs::socket::send(&socket, kind::FETCH, 2, &fetch.encode(), &[]).expect("sent");
    let reply = crate::harness::receive(&socket).expect("received").expect("a frame");
    let memory = &reply.descriptors[0];
    assert_eq!(rustix::io::pwrite(memory, b"x", 0), Err(rustix::io::Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(memory, 0), Err(rustix::io::Errno::PERM));
    // SAFETY: a fresh mapping that nobody else knows; on success it would be leaked, and the test fails.
    let writable = unsafe {
        let flags = (rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE, rustix::mm::MapFlags::SHARED);
        rustix::mm::mmap(std::ptr::null_mut(), 4096, flags.0, flags.1, memory, 0)
    };
    assert_eq!(writable, Err(rustix::io::Errno::PERM));
    // What lies after the file's last byte is zero.
    let mut slack = vec![1; granted.allocation_size as usize - 10_000];
    rustix::io::pread(memory, &mut slack[..], 10_000).expect("read");
    assert!(slack.iter().all(|byte| *byte == 0));
}
