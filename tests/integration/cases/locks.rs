//! Locks between processes: a waiter can be interrupted and killed, and keeps nobody else waiting.

use super::EACH_WAY;
use crate::harness::*;
use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug)]
enum Kind {
    Flock,
    /// fcntl's, which belong to a process.
    Posix,
    /// fcntl's, which belong to an open file.
    OpenFile,
}

/// Locks bytes 0 to 9 exclusively: 0 or an errno. Makes only system calls, so that a forked child may call it.
fn lock(kind: Kind, descriptor: RawFd, waits: bool) -> i32 {
    range(kind, descriptor, waits, 0)
}

fn range(kind: Kind, descriptor: RawFd, waits: bool, start: libc::off_t) -> i32 {
    let wanted = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: 10,
        l_pid: 0,
    };
    let command = match (kind, waits) {
        (Kind::Flock, _) => 0,
        (Kind::Posix, true) => libc::F_SETLKW,
        (Kind::Posix, false) => libc::F_SETLK,
        (Kind::OpenFile, true) => libc::F_OFD_SETLKW,
        (Kind::OpenFile, false) => libc::F_OFD_SETLK,
    };
    // SAFETY: system calls on a descriptor; `wanted` outlives the call that reads it.
    unsafe {
        let done = match kind {
            Kind::Flock => libc::flock(descriptor, libc::LOCK_EX | if waits { 0 } else { libc::LOCK_NB }),
            Kind::Posix | Kind::OpenFile => libc::fcntl(descriptor, command, &raw const wanted),
        };
        if done == 0 { 0 } else { *libc::__errno_location() }
    }
}

/// Another process, which opens the file, asks for the lock, and exits with what it was told.
struct Asker(i32);

impl Asker {
    fn start(path: &Path, kind: Kind, waits: bool, start: libc::off_t) -> Asker {
        extern "C" fn interrupted(_: libc::c_int) {}
        let path = CString::new(path.as_os_str().as_bytes()).expect("no NUL");
        // SAFETY: between fork and _exit the child makes nothing but system calls, and touches no memory but its own
        // stack and the path that was made before. The handler does nothing.
        unsafe {
            let child = libc::fork();
            assert!(child >= 0, "{}", std::io::Error::last_os_error());
            if child == 0 {
                // The locked file is among what it inherits, and it must not keep that open.
                libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = interrupted as *const () as usize;
                libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
                let descriptor = libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                libc::_exit(if descriptor < 0 { 200 } else { range(kind, descriptor, waits, start) });
            }
            Asker(child)
        }
    }

    /// What it exits with, or less than 0 for the signal that ended it.
    #[track_caller]
    fn answer(mut self) -> i32 {
        let until = Instant::now() + DEADLINE;
        loop {
            let mut status = 0;
            // SAFETY: our child, which nobody else waits for; the status is written where we say.
            if unsafe { libc::waitpid(self.0, &raw mut status, libc::WNOHANG) } == self.0 {
                self.0 = 0;
                return if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) };
            }
            assert!(Instant::now() < until, "it does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        if self.0 > 0 {
            // SAFETY: our own child, not waited for yet.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// How many wait for a lock on the file with this inode number.
fn waiting(inode: u64) -> usize {
    let table = fs::read_to_string("/proc/locks").expect("readable");
    table.lines().filter(|line| line.contains(" -> ") && line.contains(&format!(":{inode} "))).count()
}

#[test]
fn m11_waiting_for_a_lock_can_be_interrupted_and_holds_up_nothing() {
    // More than the daemon has workers.
    const WAITERS: usize = 40;
    for (options, kind) in EACH_WAY.into_iter().flat_map(|o| [Kind::Flock, Kind::Posix, Kind::OpenFile].map(|k| (o, k)))
    {
        let mounted = Mounted::with(options);
        let path = mounted.file("f", &[b'x'; 100]);
        mounted.file("other", b"x");
        let holder = File::options().read(true).write(true).open(&path).expect("opened");
        let inode = holder.metadata().expect("stat").ino();
        assert_eq!(lock(kind, holder.as_raw_fd(), true), 0);
        assert_eq!(Asker::start(&path, kind, false, 0).answer(), libc::EAGAIN, "{kind:?}");
        if !matches!(kind, Kind::Flock) {
            assert_eq!(Asker::start(&path, kind, false, 10).answer(), 0, "bytes that nobody locked");
        }

        let mut waiters: Vec<_> = (0..WAITERS).map(|_| Asker::start(&path, kind, true, 0)).collect();
        eventually("they wait", || waiting(inode) == WAITERS);
        let begun = Instant::now();
        for i in 0..20 {
            let new = mounted.mountpoint.join(format!("new{i}"));
            fs::write(&new, "content").expect("written");
            assert_eq!(fs::read(&new).expect("read"), b"content");
            assert_eq!(fs::read(mounted.mountpoint.join("other")).expect("read"), b"x");
            holder.metadata().expect("stat of the locked file");
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());

        let (interrupted, killed) = (waiters.pop().expect("one"), waiters.pop().expect("one"));
        signal(interrupted.0, libc::SIGUSR1);
        assert_eq!(interrupted.answer(), libc::EINTR, "{kind:?}");
        signal(killed.0, libc::SIGKILL);
        assert_eq!(killed.answer(), -libc::SIGKILL, "{kind:?}");
        // The table is not read in one moment, and other locks come and go.
        eventually("the others wait on", || waiting(inode) == WAITERS - 2);
        // Whoever closes the file lets go, and the others come in one after the other.
        drop(holder);
        for waiter in waiters {
            assert_eq!(waiter.answer(), 0, "{kind:?}, mounted with {options:?}");
        }
    }
}
