//! Locks between descriptors and between processes, leases, and who hears of changes.

use super::process::{Ended, child, child_gets, soon};
use super::stage::{Case, case, see};
use super::sys::*;
use crate::harness::{DEADLINE, signal};
use libc::{F_RDLCK, F_UNLCK, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN};
use std::time::Duration;

fn flock(fd: &Fd, operation: i32) -> R<()> {
    // SAFETY: plain numbers on a descriptor of ours.
    checked(unsafe { libc::flock(fd.raw(), operation | LOCK_NB) }.into()).map(|_| ())
}

/// A record lock of `length` bytes from `start`; the command says whose and whether it waits.
fn lock(fd: &Fd, command: i32, kind: i32, start: i64, length: i64) -> R<()> {
    record(fd, command, kind, start, length).map(|_| ())
}

/// What stands in the way of a lock: its kind and range, and whether its holder is a process.
fn blocker(fd: &Fd, command: i32, kind: i32, start: i64, length: i64) -> R<(i16, i64, i64, bool)> {
    record(fd, command, kind, start, length).map(|l| (l.l_type, l.l_start, l.l_len, l.l_pid > 0))
}

fn record(fd: &Fd, command: i32, kind: i32, start: i64, length: i64) -> R<libc::flock> {
    let whence = libc::SEEK_SET as i16;
    let mut lock = libc::flock { l_type: kind as i16, l_whence: whence, l_start: start, l_len: length, l_pid: 0 };
    // SAFETY: a whole struct flock, which outlives the call.
    checked(unsafe { libc::fcntl(fd.raw(), command, &raw mut lock) }.into())?;
    Ok(lock)
}

const SET: i32 = libc::F_SETLK;
const WAIT: i32 = libc::F_SETLKW;
const GET: i32 = libc::F_GETLK;
const OFD_SET: i32 = libc::F_OFD_SETLK;
const OFD_WAIT: i32 = libc::F_OFD_SETLKW;
const OFD_GET: i32 = libc::F_OFD_GETLK;

/// What a child's attempt gives, without our descriptors and with one of them.
fn in_child(attempt: impl FnOnce() -> R<()>) -> String {
    child_gets(&[], attempt)
}

fn in_child_with(ours: &Fd, attempt: impl FnOnce() -> R<()>) -> String {
    child_gets(&[ours], attempt)
}

/// Whether another process has the byte at `start`, once it has or after a while.
fn is_held(fd: &Fd, start: i64) -> bool {
    let held = || match blocker(fd, GET, F_WRLCK, start, 1)? {
        (kind, ..) if i32::from(kind) == F_UNLCK => Err(Errno(libc::EAGAIN)),
        _ => Ok(()),
    };
    soon(held).is_ok()
}

/// A child that waits for what `attempt` waits for: whether it waited, and how it ended once `release` was done.
fn waits(attempt: impl FnOnce() -> R<()>, release: impl FnOnce()) -> (Option<Ended>, Ended) {
    let mut child = child(&[], || attempt().map_or_else(|e| e.0, |()| 0));
    std::thread::sleep(Duration::from_millis(60));
    let early = child.ended();
    release();
    (early, child.wait())
}

fn fcntl(fd: &Fd, command: i32, argument: i32) -> R<libc::c_long> {
    // SAFETY: plain numbers on a descriptor of ours.
    checked(unsafe { libc::fcntl(fd.raw(), command, argument) }.into())
}

fn watch(path: &str, mask: u32) -> Fd {
    use rustix::fs::inotify;
    let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).expect("made");
    inotify::add_watch(&fd, path, inotify::WatchFlags::from_bits_retain(mask)).expect("watched");
    Fd(fd)
}

/// What was heard since the last time: masks and names.
fn heard(watch: &Fd) -> Vec<String> {
    let mut buffer = vec![std::mem::MaybeUninit::uninit(); 65_536];
    let mut reader = rustix::fs::inotify::Reader::new(watch, &mut buffer);
    let mut events = Vec::new();
    while let Ok(event) = reader.next() {
        let name = event.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        events.push(format!("{:x} {name}", event.events().bits()));
    }
    events
}

/// The same, once there is something: who else has the file open closes it later.
fn heard_at_last(watch: &Fd) -> Vec<String> {
    soon(|| match heard(watch) {
        nothing if nothing.is_empty() => Err(Errno(libc::EAGAIN)),
        events => Ok(events),
    })
    .unwrap_or_default()
}

pub const CASES: &[Case] = &[
    case("flock between descriptors", |s| {
        let (a, b) = (file("f", b"x"), open("f", RDONLY).expect("opened"));
        for (one, two) in [(LOCK_SH, LOCK_SH), (LOCK_SH, LOCK_EX), (LOCK_EX, LOCK_SH), (LOCK_EX, LOCK_EX)] {
            s.part((one, two));
            see!(s; flock(&a, one); flock(&b, two); flock(&a, two); flock(&a, LOCK_UN); flock(&b, two); flock(&a, one));
            see!(s; flock(&b, LOCK_UN));
            see!(s; flock(&a, LOCK_UN); flock(&a, LOCK_UN));
        }
        s.part("others");
        let twin = Fd(rustix::io::dup(&a).expect("duplicated"));
        see!(s; flock(&a, LOCK_EX); flock(&twin, LOCK_SH); flock(&b, LOCK_SH); flock(&b, LOCK_EX));
        see!(s; flock(&twin, LOCK_UN); flock(&b, LOCK_EX));
        see!(s; flock(&open(".", RDONLY).expect("opened"), LOCK_EX));
        see!(s; flock(&open("f", libc::O_PATH).expect("opened"), LOCK_SH));
        drop(b);
        see!(s; soon(|| flock(&a, LOCK_EX)));
        drop(a);
        see!(s; flock(&open("f", RDONLY).expect("opened"), LOCK_SH));
        drop(twin);
        see!(s; soon(|| flock(&open("f", RDONLY)?, LOCK_EX)));
        let c = open("f", WRONLY).expect("opened");
        see!(s; soon(|| flock(&c, LOCK_EX)); unlink("f"); file("f", b"y"));
        see!(s; flock(&open("f", RDWR).expect("opened"), LOCK_EX); flock(&c, LOCK_SH));
    }),
    case("flock and children", |s| {
        let a = file("f", b"x");
        see!(s; flock(&a, LOCK_EX); in_child(|| flock(&open("f", RDWR)?, LOCK_EX)));
        see!(s; in_child_with(&a, || flock(&a, LOCK_SH)));
        // The child had the same open file, so it changed ours; its end gave nothing up.
        see!(s; in_child(|| flock(&open("f", RDWR)?, LOCK_SH)); in_child(|| flock(&open("f", RDWR)?, LOCK_EX)));
        see!(s; in_child_with(&a, || flock(&a, LOCK_UN)));
        see!(s; in_child(|| flock(&open("f", RDWR)?, LOCK_EX)); flock(&a, LOCK_EX));
        let blocking = || {
            let f = open("f", RDWR)?;
            // SAFETY: plain numbers on a descriptor of ours.
            checked(unsafe { libc::flock(f.raw(), LOCK_EX) }.into()).map(|_| ())
        };
        see!(s; waits(blocking, || flock(&a, LOCK_UN).expect("unlocked")));
    }),
    case("record locks between processes", |s| {
        let a = file("f", b"0123456789");
        let theirs = |command, kind, start, length| in_child(|| lock(&open("f", RDWR)?, command, kind, start, length));
        for (kind, other) in [(F_RDLCK, F_RDLCK), (F_RDLCK, F_WRLCK), (F_WRLCK, F_RDLCK), (F_WRLCK, F_WRLCK)] {
            s.part((kind, other));
            see!(s; lock(&a, SET, kind, 10, 10); theirs(SET, other, 10, 10); theirs(SET, other, 0, 10));
            see!(s; theirs(SET, other, 20, 0));
            see!(s; theirs(SET, other, 0, 0); theirs(SET, other, 19, 1); lock(&a, SET, F_UNLCK, 12, 3));
            see!(s; theirs(SET, other, 12, 3));
            see!(s; theirs(SET, other, 11, 2); theirs(SET, other, 14, 2); lock(&a, SET, F_UNLCK, 0, 0));
            see!(s; theirs(SET, other, 0, 0));
        }
        s.part("asked");
        see!(s; lock(&a, SET, F_WRLCK, 5, 5); lock(&a, SET, F_RDLCK, 20, 0); blocker(&a, GET, F_WRLCK, 0, 0));
        for (kind, start, length) in
            [(F_WRLCK, 0, 0), (F_RDLCK, 0, 0), (F_WRLCK, 10, 5), (F_RDLCK, 20, 5), (F_WRLCK, 30, 1)]
        {
            let stands = || open("f", RDWR).and_then(|f| blocker(&f, GET, kind, start, length));
            see!(s; (kind, start, length, child_gets(&[], stands)));
        }
        s.part("errors");
        see!(s; lock(&open("f", RDONLY).expect("opened"), SET, F_WRLCK, 0, 1));
        see!(s; lock(&open("f", WRONLY).expect("opened"), SET, F_RDLCK, 0, 1));
        see!(s; lock(&a, SET, 9, 0, 1); lock(&a, SET, F_RDLCK, -1, 1); lock(&a, SET, F_RDLCK, 5, -5));
        see!(s; lock(&a, SET, F_RDLCK, i64::MAX, 2));
        see!(s; lock(&open(".", RDONLY).expect("opened"), SET, F_RDLCK, 0, 1));
        see!(s; lock(&open("f", libc::O_PATH).expect("opened"), SET, F_RDLCK, 0, 1));
    }),
    case("record locks go with any close", |s| {
        let a = file("f", b"x");
        let theirs = || in_child(|| lock(&open("f", RDWR)?, SET, F_WRLCK, 0, 0));
        see!(s; lock(&a, SET, F_WRLCK, 0, 0); theirs(); drop(open("f", RDONLY)); theirs());
        // A child has none of ours, and ours stay when it ends.
        see!(s; lock(&a, SET, F_WRLCK, 0, 0); in_child_with(&a, || lock(&a, SET, F_WRLCK, 0, 0)); theirs());
        let mut holder = child(&[], || {
            let _held = open("f", RDWR).and_then(|f| lock(&f, WAIT, F_WRLCK, 0, 0).map(|()| f));
            std::thread::sleep(DEADLINE / 4);
            0
        });
        see!(s; lock(&a, SET, F_UNLCK, 0, 0); is_held(&a, 0); lock(&a, SET, F_RDLCK, 0, 0));
        signal(holder.pid(), libc::SIGKILL);
        see!(s; holder.wait(); lock(&a, SET, F_RDLCK, 0, 0));
    }),
    case("record locks that wait", |s| {
        let a = file("f", b"x");
        see!(s; lock(&a, SET, F_WRLCK, 0, 5));
        let wait = |kind, start| move || lock(&open("f", RDWR)?, WAIT, kind, start, 5);
        see!(s; waits(wait(F_WRLCK, 5), || {}).1);
        see!(s; waits(wait(F_RDLCK, 3), || lock(&a, SET, F_UNLCK, 0, 0).expect("unlocked")));
        see!(s; lock(&a, SET, F_WRLCK, 0, 5); waits(wait(F_WRLCK, 0), || drop(open("f", RDONLY))));
        // Who waits is interrupted by a signal, and goes.
        see!(s; lock(&a, SET, F_WRLCK, 0, 5));
        let mut waiter = child(&[], || wait(F_WRLCK, 0)().map_or_else(|e| e.0, |()| 0));
        std::thread::sleep(Duration::from_millis(60));
        signal(waiter.pid(), libc::SIGTERM);
        see!(s; waiter.wait(); in_child(|| lock(&open("f", RDWR)?, SET, F_WRLCK, 5, 5)));
    }),
    case("two who wait for each other", |s| {
        let a = file("f", b"x");
        see!(s; lock(&a, SET, F_WRLCK, 0, 1));
        let mut other = child(&[], || {
            let locks = |f: &Fd| lock(f, SET, F_WRLCK, 1, 1).and_then(|()| lock(f, WAIT, F_WRLCK, 0, 1));
            open("f", RDWR).and_then(|f| locks(&f)).map_or_else(|e| e.0, |()| 0)
        });
        // Whoever waits last is told so, and the other one gets the lock when that one gives up its own.
        see!(s; is_held(&a, 1));
        let ours = lock(&a, WAIT, F_WRLCK, 1, 1);
        see!(s; lock(&a, SET, F_UNLCK, 0, 0));
        let told = (ours, other.wait());
        let deadlock = libc::EDEADLK;
        let one = [(Err(Errno(deadlock)), Ended::Exit(0)), (Ok(()), Ended::Exit(deadlock))].contains(&told);
        see!(s; if one { "one of the two".to_string() } else { format!("{told:?}") });
    }),
    case("locks of open files", |s| {
        let (a, b) = (file("f", b"x"), open("f", RDWR).expect("opened"));
        see!(s; lock(&a, OFD_SET, F_WRLCK, 0, 10); lock(&b, OFD_SET, F_RDLCK, 5, 1); lock(&b, OFD_SET, F_WRLCK, 10, 5));
        see!(s; blocker(&b, OFD_GET, F_WRLCK, 0, 0));
        see!(s; drop(open("f", RDONLY)); lock(&b, OFD_SET, F_RDLCK, 5, 1));
        see!(s; in_child_with(&a, || lock(&a, OFD_SET, F_RDLCK, 0, 10)); lock(&b, OFD_SET, F_RDLCK, 5, 1));
        see!(s; lock(&b, SET, F_WRLCK, 0, 1); in_child(|| lock(&open("f", RDWR)?, SET, F_WRLCK, 0, 1)));
        let unlock = || lock(&a, OFD_SET, F_UNLCK, 0, 0).expect("unlocked");
        see!(s; waits(|| lock(&open("f", RDWR)?, OFD_WAIT, F_WRLCK, 0, 3), unlock));
        drop(a);
        see!(s; soon(|| lock(&b, OFD_SET, F_WRLCK, 0, 0)));
    }),
    case("locks of two kinds", |s| {
        let (a, b) = (file("f", b"x"), open("f", RDWR).expect("opened"));
        see!(s; flock(&a, LOCK_EX); lock(&b, SET, F_WRLCK, 0, 0));
        see!(s; in_child(|| lock(&open("f", RDWR)?, SET, F_WRLCK, 0, 0)));
        see!(s; in_child(|| flock(&open("f", RDWR)?, LOCK_EX)); flock(&a, LOCK_UN));
        see!(s; in_child(|| flock(&open("f", RDWR)?, LOCK_EX)));
    }),
    case("leases", |s| {
        file("f", b"x");
        let (reader, writer) = (open("f", RDONLY).expect("opened"), open("f", RDWR).expect("opened"));
        see!(s; fcntl(&reader, libc::F_GETLEASE, 0));
        see!(s; fcntl(&reader, libc::F_SETLEASE, F_RDLCK));
        see!(s; fcntl(&writer, libc::F_SETLEASE, F_WRLCK));
        drop(writer);
        see!(s; soon(|| fcntl(&reader, libc::F_SETLEASE, F_RDLCK)).is_ok());
        see!(s; fcntl(&reader, libc::F_GETLEASE, 0) == Ok(F_RDLCK.into()));
        see!(s; fcntl(&reader, libc::F_SETLEASE, F_UNLCK) == Ok(0));
    }),
    case("who watches hears", |s| {
        let events = libc::IN_ATTRIB
            | libc::IN_MODIFY
            | libc::IN_CREATE
            | libc::IN_DELETE
            | libc::IN_MOVE
            | libc::IN_CLOSE_WRITE
            | libc::IN_OPEN
            | libc::IN_ACCESS
            | libc::IN_DELETE_SELF
            | libc::IN_MOVE_SELF;
        mkdir("d", 0o755).expect("made");
        let folder = watch("d", events);
        let f = file("d/f", b"content");
        see!(s; heard(&folder); pwrite(&f, b"x", 0); heard(&folder); pread(&f, 1, 0); heard(&folder); ftruncate(&f, 2));
        see!(s; heard(&folder));
        see!(s; fchmod(&f, 0o600); heard(&folder); setxattr("d/f", "user.x", b"1", 0); heard(&folder));
        see!(s; utimens("d/f", NOW, NOW); heard(&folder));
        drop(f);
        see!(s; heard_at_last(&folder); rename("d/f", "d/g"); heard(&folder).len(); link("d/g", "d/h"); heard(&folder));
        see!(s; unlink("d/h"); heard(&folder));
        see!(s; mkdir("d/e", 0o755); heard(&folder); rmdir("d/e"); heard(&folder); symlink("x", "d/l"); heard(&folder));
        see!(s; truncate("d/g", 1); heard(&folder));
        let own = watch("d/g", events);
        see!(s; rename("d/g", "g"); heard(&own); unlink("g"); heard(&own).len());
    }),
];
