//! A child process for what one process cannot show, and how it ended. It never outlives its deadline.

use super::sys::{Errno, Fd, R, pread, write};
use crate::harness::DEADLINE;
use std::fmt;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Exit(i32),
    Signal(i32),
    TooLate,
}

impl fmt::Debug for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Exit(code) => write!(f, "exit {code}"),
            Ended::Signal(libc::SIGBUS) => f.write_str("SIGBUS"),
            Ended::Signal(signal) => write!(f, "signal {signal}"),
            Ended::TooLate => f.write_str("did not end"),
        }
    }
}

pub struct Child {
    pid: i32,
    ended: Option<Ended>,
}

/// Runs `work` in a fork of this process; what it returns is its exit code. Other threads are not there, so it may only
/// do system calls and what needs no lock (the C library keeps its allocator usable). Of the open files it has only
/// `keep`: what it held would be held for every other test too.
pub fn child(keep: &[&Fd], work: impl FnOnce() -> i32) -> Child {
    // SAFETY: the child does what is said above and then ends without running anything of ours.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "{}", std::io::Error::last_os_error());
    if pid == 0 {
        close_others(keep);
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(101);
        // SAFETY: ends the child.
        unsafe { libc::_exit(code) };
    }
    Child { pid, ended: None }
}

fn close_others(keep: &[&Fd]) {
    let mut kept: Vec<u32> = keep.iter().map(|fd| fd.raw() as u32).collect();
    kept.extend([0, 1, 2, u32::MAX]);
    kept.sort_unstable();
    for pair in kept.windows(2).filter(|pair| pair[1] > pair[0] + 1) {
        // SAFETY: only in the child, which uses none of the descriptors that it does not keep.
        unsafe { libc::close_range(pair[0] + 1, pair[1] - 1, 0) };
    }
}

/// What a child process gets, in words, or how it ended without a word.
pub fn child_gets<T: fmt::Debug>(keep: &[&Fd], work: impl FnOnce() -> T) -> String {
    let paper = rustix::fs::memfd_create("warpfs-test", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    let paper = Fd(paper);
    let keep = [keep, &[&paper]].concat();
    let ended = child(&keep, || i32::from(write(&paper, format!("{:?}", work()).as_bytes()).is_err())).wait();
    match pread(&paper, 1000, 0) {
        Ok(words) if ended == Ended::Exit(0) => String::from_utf8_lossy(&words.0).into_owned(),
        _ => format!("{ended:?}"),
    }
}

/// Tries again while it is EAGAIN, for a while: a child that another test starts has our descriptors until it has
/// closed them or runs its program.
pub fn soon<T>(mut attempt: impl FnMut() -> R<T>) -> R<T> {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        match attempt() {
            Err(Errno(libc::EAGAIN)) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            done => return done,
        }
    }
}

impl Child {
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// How it ended, once it has.
    pub fn ended(&mut self) -> Option<Ended> {
        if self.ended.is_none() {
            let mut status = 0;
            // SAFETY: `status` is written; the child is ours and not waited for yet.
            if unsafe { libc::waitpid(self.pid, &raw mut status, libc::WNOHANG) } == self.pid {
                self.ended = Some(match libc::WIFSIGNALED(status) {
                    true => Ended::Signal(libc::WTERMSIG(status)),
                    false => Ended::Exit(libc::WEXITSTATUS(status)),
                });
            }
        }
        self.ended
    }

    /// Waits for its end; at the deadline it is killed.
    pub fn wait(&mut self) -> Ended {
        let until = Instant::now() + DEADLINE / 2;
        loop {
            if let Some(ended) = self.ended() {
                return ended;
            }
            if Instant::now() > until {
                return Ended::TooLate; // dropped soon, and killed then
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.ended().is_none() {
            // SAFETY: ends and reaps a child of ours; the status goes nowhere.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
        }
    }
}
