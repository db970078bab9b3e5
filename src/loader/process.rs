//! A loader process as the daemon sees it: started, spoken to, and always collected in the end, so that none stays a
//! zombie. Called by the thread that minds the loader.

use super::Slab;
use super::packet::{self, Packet};
use super::parent::Settings;
use crate::device::Info;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long a loader that was told to leave, or that closed its socket, may take before it is killed.
const LEAVE: Duration = Duration::from_secs(5);

/// How a process ended.
pub(super) struct Gone {
    /// To follow its name.
    pub(super) words: String,
    /// Its exit status, unless a signal ended it.
    pub(super) code: Option<i32>,
}

pub(super) struct Process {
    child: std::process::Child,
    socket: OwnedFd,
    /// When it is killed, once it was told to leave.
    deadline: Option<Instant>,
    /// The slabs that it may have mapped, by number.
    pub(super) slabs: HashMap<u64, Slab>,
}

impl Process {
    /// `more`: words behind those of the settings, which count more.
    pub(super) fn start(info: &Info, settings: &Settings, more: &[&str]) -> Result<Process> {
        let cannot = |e: std::io::Error| {
            let message = format!("cannot start the loader for {} ({}): {e}", info.label, settings.program.display());
            Failure::new(Code::Loader, message)
        };
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|e| cannot(e.into()))?;
        let hex = crate::device::hex(&info.uuid);
        // The socket is the child's standard input: the one descriptor that needs no code between fork and exec.
        let child = Command::new(&settings.program)
            .arg0("warpfs")
            .args(["loader", "--device", &info.label, "--uuid", &hex, "--socket-fd", "0"])
            .args(&settings.arguments)
            .args(more)
            .envs(settings.environment.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .map_err(cannot)?;
        Ok(Process { child, socket: ours, deadline: None, slabs: HashMap::new() })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends without waiting: `AGAIN` where the socket is full.
    pub(super) fn send(&self, kind: u32, body: &[u8], beside: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        packet::send_bytes(self.socket(), kind, body, beside, false)
    }

    /// The next packet, without waiting.
    pub(super) fn receive(&self) -> rustix::io::Result<Option<Packet>> {
        packet::receive(self.socket(), false)
    }

    pub(super) fn kill(&mut self) {
        // It fails only where the process was collected already.
        let _ = self.child.kill();
    }

    /// Tells it to end after its present work.
    pub(super) fn dismiss(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        self.expire();
    }

    /// From now on it has a few seconds to end by itself.
    pub(super) fn expire(&mut self) {
        self.deadline = Some(Instant::now() + LEAVE);
    }

    /// How it ended, if it did; it is collected then. Kills it past its time, and never waits: a process that waits for a
    /// disk or a device in the kernel outlives even SIGKILL.
    pub(super) fn ended(&mut self) -> Option<Gone> {
        if self.deadline.is_some_and(|deadline| Instant::now() > deadline) {
            self.kill();
        }
        match self.child.try_wait() {
            Ok(Some(status)) => Some(Gone { words: words(status), code: status.code() }),
            Ok(None) => None,
            Err(e) => Some(Gone { words: format!("ended, and nobody knows how: {e}"), code: None }),
        }
    }
}

impl Drop for Process {
    /// Kills it and waits a few seconds for its end; past them it is the system's to collect when the daemon ends.
    fn drop(&mut self) {
        let limit = Instant::now() + LEAVE;
        while self.ended().is_none() && Instant::now() < limit {
            self.kill();
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(libc::SIGKILL)) => {
            "was killed by signal 9 (by hand, or by the system for want of memory)".to_string()
        }
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".to_string(),
    }
}
