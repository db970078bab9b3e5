//! The processes around a daemon: the one that the user started, which waits for "mounted", and a tiny supervisor, which
//! waits for the daemon's end and takes a dead mount away, so that nobody hangs on it. Everything here happens before
//! any thread and any CUDA: a fork after either would be wrong.

use crate::failure::{Failure, Result};
use crate::protocol::Code;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long programs may use what they have open after the daemon was told to stop.
const PATIENCE: Duration = Duration::from_secs(10);
/// Signals that follow so soon are the same order: a terminal, timeout(1) and systemd signal every process of a group,
/// and the supervisor, which is one of them, passes its own on.
const ONE_ORDER: Duration = Duration::from_millis(400);

/// SIGTERM, SIGINT and SIGHUP, kept from killing this process, and given to one thread.
pub struct Signals {
    set: libc::sigset_t,
}

impl Signals {
    /// Blocks them for this thread and all that it starts. Call before any thread.
    pub fn block(extra: &[libc::c_int]) -> Signals {
        // SAFETY: a sigset_t is plain memory which sigemptyset initialises; the calls touch nothing else, and signal
        // masks of the calling thread are ours to change.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP].iter().chain(extra) {
                libc::sigaddset(&raw mut set, *signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            Signals { set }
        }
    }

    /// The next of them.
    pub fn wait(&self) -> libc::c_int {
        let mut signal = 0;
        // SAFETY: both pointers name live memory; sigwait writes the number only.
        while unsafe { libc::sigwait(&raw const self.set, &raw mut signal) } != 0 {}
        signal
    }

    /// The next of them, if it comes in time.
    pub fn wait_until(&self, end: Instant) -> Option<libc::c_int> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = libc::timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
            // SAFETY: both pointers name live memory; nothing is written where no information is asked for.
            match unsafe { libc::sigtimedwait(&raw const self.set, std::ptr::null_mut(), &raw const left) } {
                -1 if io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) => {}
                -1 => return None,
                signal => return Some(signal),
            }
        }
    }

    /// On a thread of its own: calls `stop`, which unmounts, for each of them, until that has worked. Who still uses the
    /// mount then has ten seconds, or until the next signal; after that, `cut_off` is called with the reason.
    pub fn on_stop(
        self,
        mut stop: impl FnMut() -> Result<()> + Send + 'static,
        cut_off: impl FnOnce(String) + Send + 'static,
    ) -> io::Result<()> {
        let thread = std::thread::Builder::new().name("signals".into());
        thread.spawn(move || {
            loop {
                let signal = self.wait();
                tracing::info!("signal {signal}: unmounting");
                match stop() {
                    Ok(()) => break,
                    Err(failure) => tracing::error!("cannot unmount: {failure}"),
                }
            }
            let stopped = Instant::now();
            while self.wait_until(stopped + ONE_ORDER).is_some() {}
            let seconds = PATIENCE.as_secs();
            tracing::info!("still in use: programs are cut off {seconds} s after the signal, or at another one");
            let why = match self.wait_until(stopped + PATIENCE) {
                None => format!("{seconds} s after it was told to stop"),
                Some(signal) => format!("at a second signal ({signal})"),
            };
            cut_off(why);
        })?;
        Ok(())
    }
}

/// What the daemon tells the process that waits for it.
pub struct Ready {
    pipe: File,
}

impl Ready {
    /// It works: lines for the user.
    pub fn mounted(mut self, lines: &[String]) {
        let _ = self.pipe.write_all(format!("+{}", lines.join("\n")).as_bytes());
    }

    /// It does not.
    pub fn failed(mut self, failure: &Failure) {
        let _ = self.pipe.write_all(format!("-{failure}").as_bytes());
    }
}

/// Runs `daemon`, which mounts `source`, in a process of its own, and returns in the caller's process only, when the daemon has said that it is
/// ready (background) or has ended (foreground). `report` gets the daemon's lines. The daemon must speak through the
/// [`Ready`] that it gets, and returns its exit code.
pub fn launch(
    source: &Path,
    foreground: bool,
    report: impl FnOnce(&str),
    daemon: impl FnOnce(Ready) -> i32,
) -> Result<()> {
    // Whoever started us may ignore it, and then nobody would hear of the daemon's end.
    // SAFETY: the default action runs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let (reader, writer) = pipe()?;
    let background = !foreground;
    if background && fork()? == Some(()) {
        drop(writer);
        return hear(reader, report);
    }
    let mut reader = Some(reader);
    if background {
        reader = None;
        detach(&writer);
    }
    let signals = Signals::block(&[libc::SIGCHLD]);
    let Some(pid) = fork_child()? else {
        drop(reader);
        let code = daemon(Ready { pipe: File::from(writer) });
        std::process::exit(code);
    };
    drop(writer);
    let mut heard = Ok(());
    if let Some(reader) = reader {
        heard = hear(reader, report);
    }
    let status = supervise(pid, &signals);
    sweep(source);
    let killed = libc::WIFSIGNALED(status).then(|| {
        let message = format!("the daemon was killed by signal {}; its mount is taken away", libc::WTERMSIG(status));
        Failure::new(Code::NotRunning, message)
    });
    if background {
        if let Some(failure) = killed {
            super::log::start(true);
            tracing::error!("{failure}");
        }
        std::process::exit(i32::from(status != 0));
    }
    heard?;
    if let Some(failure) = killed {
        return Err(failure);
    }
    match libc::WEXITSTATUS(status) {
        0 => Ok(()),
        code => Err(Failure::new(Code::NotRunning, format!("the daemon ended with code {code}; its log says why"))),
    }
}

/// Waits for the daemon's word.
fn hear(pipe: OwnedFd, report: impl FnOnce(&str)) -> Result<()> {
    let mut said = String::new();
    // It ends when the daemon has spoken, or died.
    let _ = File::from(pipe).read_to_string(&mut said);
    match (said.get(..1), said.get(1..)) {
        (Some("+"), Some(lines)) => {
            report(lines);
            Ok(())
        }
        (Some("-"), Some(failure)) => Err(Failure::new(Code::NotRunning, failure)),
        _ => Err(Failure::new(Code::NotRunning, "the daemon died before it had mounted; its log may say why")),
    }
}

/// Waits for the daemon's end; passes signals on. Returns its wait status.
fn supervise(pid: libc::pid_t, signals: &Signals) -> libc::c_int {
    loop {
        match signals.wait() {
            libc::SIGCHLD => {
                let mut status = 0;
                // SAFETY: our own child, and a live place for its status.
                if unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == pid {
                    return status;
                }
            }
            // SAFETY: our own child, which is not reaped yet, so the number is still its own.
            signal => drop(unsafe { libc::kill(pid, signal) }),
        }
    }
}

/// Takes the mount away if its daemon is dead, so that whoever touches it gets the directory and not ENOTCONN: wherever
/// it is by now, and every copy of it.
fn sweep(source: &Path) {
    for mount in crate::mounts::ours().into_iter().filter(|mount| mount.source == source) {
        if crate::mounts::is_dead(&mount.mountpoint)
            && let Err(failure) = crate::mounts::detach(&mount.mountpoint)
        {
            eprintln!("warpfs: {failure}");
        }
    }
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|e| Failure::system("cannot create a pipe", e))
}

/// `Some(())` in the parent.
fn fork() -> Result<Option<()>> {
    Ok(fork_child()?.map(|_| ()))
}

/// The child's process id in the parent, nothing in the child.
fn fork_child() -> Result<Option<libc::pid_t>> {
    // SAFETY: this process has one thread (see the module's comment), so the child may do whatever the parent may.
    match unsafe { libc::fork() } {
        -1 => Err(Failure::system("cannot start a process", io::Error::last_os_error())),
        0 => Ok(None),
        pid => Ok(Some(pid)),
    }
}

/// Leaves the terminal and whoever started it: a session of its own, no directory that it keeps busy, and no descriptor of
/// theirs, at whose end somebody may wait. Call while nothing of ours but `pipe` is open.
fn detach(pipe: &OwnedFd) {
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        for stream in 0..=2 {
            // SAFETY: duplicates an open descriptor over a standard stream, which nobody has taken ownership of.
            unsafe { libc::dup2(null.as_raw_fd(), stream) };
        }
    }
    let kept = pipe.as_raw_fd();
    for (first, last) in [(3, kept - 1), (kept + 1, libc::c_int::MAX)] {
        // SAFETY: these descriptors were inherited; nothing in this process owns them. Kernels before 5.9 refuse.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}
