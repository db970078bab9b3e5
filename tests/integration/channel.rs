//! The socket: what a client may say, and that nothing else does any harm.

use crate::harness::*;
use crate::warpfs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use warpfs::protocol::*;
use warpfs::socket::send;

fn connect(mounted: &Mounted) -> UnixStream {
    let socket = UnixStream::connect(mounted.socket()).expect("connected");
    socket.set_read_timeout(Some(DEADLINE)).expect("set");
    socket
}

fn greet(socket: &UnixStream, version: u32) -> warpfs::socket::Frame {
    let hello = Hello { magic: HELLO_MAGIC, version, capabilities: 0 };
    send(socket, kind::HELLO, 1, &hello.encode(), &[]).expect("sent");
    receive(socket).expect("received").expect("a frame")
}

/// Whether the daemon has closed the connection, after what it may have said.
fn is_dropped(mut socket: &UnixStream) -> bool {
    let mut rest = Vec::new();
    match socket.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

fn error_of(frame: &warpfs::socket::Frame) -> (u32, String) {
    assert_eq!(frame.kind, kind::ERROR);
    let error = ErrorReply::decode(&frame.body).expect("an error");
    (error.code, String::from_utf8_lossy(&frame.body[ErrorReply::SIZE..]).into_owned())
}

#[test]
fn a_session_begins_with_the_version_and_a_secret() {
    let mounted = Mounted::new();
    let (one, two) = (connect(&mounted), connect(&mounted));
    let replies = [&one, &two].map(|socket| greet(socket, PROTOCOL_VERSION));
    let hellos = replies.each_ref().map(|frame| HelloReply::decode(&frame.body).expect("a hello"));
    assert_eq!(hellos[0].version, PROTOCOL_VERSION);
    assert_ne!(hellos[0].secret, hellos[1].secret);
    assert_ne!(hellos[0].secret, NONE);
    let device = DeviceEntry::decode(&replies[0].body[HelloReply::SIZE..]).expect("a device");
    assert_eq!(field_text(&device.label), device_label());
}

fn device_label() -> String {
    if device() == "auto" { "host".into() } else { device() }
}

#[test]
fn garbage_half_messages_and_wrong_versions_lose_the_connection_only() {
    let mounted = Mounted::new();
    let path = mounted.file("f", b"content");
    let long = FrameHeader { length: FRAME_LIMIT + 1, kind: kind::HELLO, reserved: 0, id: 1 }.encode();
    let hello = Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, capabilities: 0 }.encode();
    let header = |length: usize, kind| FrameHeader { length: length as u32, kind, reserved: 0, id: 1 }.encode();
    let first = [header(hello.len(), kind::HELLO), hello.clone()].concat();
    let unknown = [first.clone(), header(0, 999)].concat();
    let short = [first.clone(), header(3, kind::FETCH), vec![0; 3]].concat();
    let early = [header(8, kind::FETCH), vec![0; 8]].concat();
    let magic = [header(hello.len(), kind::HELLO), vec![1; hello.len()]].concat();
    for (what, bytes) in [
        ("garbage", noise(1, 5000)),
        ("text", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ("too long", long),
        ("unknown kind", unknown),
        ("short body", short),
        ("no hello", early),
        ("wrong magic", magic),
    ] {
        let mut socket = connect(&mounted);
        socket.write_all(&bytes).expect("written");
        assert!(is_dropped(&socket), "{what}");
    }
    // Half a message, then the end.
    let mut half = connect(&mounted);
    half.write_all(&first[..first.len() - 5]).expect("written");
    half.shutdown(std::net::Shutdown::Write).expect("shut");
    assert!(is_dropped(&half), "half a message");
    // A wrong version is told so.
    let socket = connect(&mounted);
    let (code, text) = error_of(&greet(&socket, PROTOCOL_VERSION + 1));
    assert_eq!(code, Code::WrongVersion as u32);
    assert!(text.contains("version"), "{text}");
    assert!(is_dropped(&socket));
    // Half a message that nobody finishes is dropped in time, and keeps nobody waiting meanwhile.
    let mut lazy = connect(&mounted);
    lazy.write_all(&first[..7]).expect("written");
    warpfs!("verify", path).ok();
    lazy.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    assert!(is_dropped(&lazy), "a message that is never finished");
    assert_eq!(mounted.stats()["sessions"], 0);
    // The control: the same daemon serves who speaks properly.
    assert_eq!(greet(&connect(&mounted), PROTOCOL_VERSION).kind, kind::HELLO | kind::REPLY);
}

#[test]
fn what_a_session_does_not_hold_it_cannot_fetch() {
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(2, 100_000));
    let session = warpfs::client::Session::of_path(&path).expect("a session");
    let buffer = session.open(&path).expect("opened");
    let stranger = connect(&mounted);
    greet(&stranger, PROTOCOL_VERSION);
    for allocation in 0..20 {
        send(&stranger, kind::FETCH, 7, &Fetch { allocation }.encode(), &[]).expect("sent");
        let reply = receive(&stranger).expect("received").expect("a frame");
        assert_eq!(error_of(&reply).0, Code::NotHeld as u32);
        assert!(reply.descriptors.is_empty());
    }
    // Such an answer does not end the connection, and the holder is not disturbed.
    send(&stranger, kind::RELEASE, 8, &Release { allocation: 1, grants: 1 }.encode(), &[]).expect("sent");
    assert_eq!(error_of(&receive(&stranger).expect("received").expect("a frame")).0, Code::NotHeld as u32);
    drop(buffer);
}

#[test]
fn a_grant_that_is_not_fetched_lapses() {
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(3, 100_000));
    let socket = connect(&mounted);
    let hello = HelloReply::decode(&greet(&socket, PROTOCOL_VERSION).body).expect("a hello");
    let mut ask = MaterializeIoctl::zeroed();
    ask.secret = hello.secret;
    let (errno, granted) = ioctl(std::fs::File::open(&path).expect("opened"), IOCTL_MATERIALIZE, &ask);
    assert_eq!(errno, 0);
    assert_eq!(mounted.device()["holders"].as_array().map(Vec::len), Some(1));
    eventually("lapsed", || mounted.device()["holders"].as_array().map(Vec::len) == Some(0));
    assert_eq!(mounted.counter("holds_lapsed"), 1);
    send(&socket, kind::FETCH, 2, &Fetch { allocation: granted.allocation }.encode(), &[]).expect("sent");
    assert_eq!(error_of(&receive(&socket).expect("received").expect("a frame")).0, Code::NotHeld as u32);
}

#[test]
fn the_socket_is_the_owners_and_goes_with_the_daemon() {
    let mounted = Mounted::new();
    let socket = mounted.socket();
    let mode = |path: &std::path::Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    warpfs!("umount", mounted.mountpoint).ok();
    assert!(!socket.exists());
    // With --allow-other every user may connect.
    let mounted = Mounted::with(&["--allow-other"]);
    assert_eq!(mode(&mounted.socket()), 0o666);
    assert_eq!(mode(mounted.socket().parent().expect("a folder")) & 0o055, 0o055);
}

#[test]
fn a_file_that_is_no_socket_is_never_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let notes = folder.path().join("notes.txt");
    std::fs::write(&notes, "precious").expect("written");
    let path = notes.to_str().expect("text");
    let refused = Mounted::prepare().mount(&["--device", "host"], &[("WARPFS_SOCKET", path)]).expect_err("refused");
    refused.fails(&["notes.txt", "no socket", "WARPFS_SOCKET"]);
    assert_eq!(std::fs::read(&notes).expect("still there"), b"precious");
    // The control: a name that is free is taken, and one whose daemon was killed is taken over.
    let socket = folder.path().join("s.sock");
    let environment = [("WARPFS_SOCKET", socket.to_str().expect("text"))];
    let mounted = Mounted::prepare().mount(&["--device", "host"], &environment).expect("mounted");
    assert_eq!(mounted.socket(), socket);
    signal(mounted.daemon(), libc::SIGKILL);
    eventually("the mount is taken away", || !mounted.is_mounted());
    assert!(socket.exists(), "left behind");
    let mounted = Mounted::prepare().mount(&["--device", "host"], &environment).expect("mounted");
    drop(mounted);
    assert!(!socket.exists());
}

#[test]
fn descriptors_sent_to_the_daemon_do_not_stay_there() {
    use std::os::fd::AsFd;
    let mounted = Mounted::new();
    let path = mounted.file("f", b"content");
    let count = || std::fs::read_dir(format!("/proc/{}/fd", mounted.daemon())).expect("alive").count();
    let before = count();
    let null = std::fs::File::open("/dev/null").expect("opened");
    let socket = connect(&mounted);
    greet(&socket, PROTOCOL_VERSION);
    // One frame that never ends, with descriptors beside every byte.
    let header = FrameHeader { length: FRAME_LIMIT, kind: kind::FETCH, reserved: 0, id: 1 }.encode();
    (&socket).write_all(&header).expect("written");
    for _ in 0..500 {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        let sent = [null.as_fd(); 4];
        assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&sent)));
        let byte = [std::io::IoSlice::new(b"x")];
        if rustix::net::sendmsg(&socket, &byte, &mut ancillary, rustix::net::SendFlags::NOSIGNAL).is_err() {
            break; // dropped already
        }
    }
    assert!(is_dropped(&socket));
    eventually("the descriptors are closed", || count() <= before + 3);
    warpfs!("verify", path).ok();
}
