//! The listening socket: binds it with the right mode, accepts clients, and gives each a thread of its own. Ends when it
//! is dropped, and takes the socket's file with it.

use super::location;
use super::session;
use crate::cache::Cache;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use crate::socket;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Sessions at once; each is a thread.
const SESSIONS: usize = 4096;
/// Sessions of one user, so that nobody locks the others out.
const PER_USER: usize = 1024;

/// The channel of one daemon.
pub struct Server {
    path: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Binds `path` and serves `cache` there. `open`: every user may connect, else only the daemon's.
    pub fn start(path: PathBuf, open: bool, cache: Arc<Cache>) -> Result<Server> {
        let shown = path.display();
        if std::fs::symlink_metadata(&path).is_ok() {
            if !location::is_stale(&path) {
                let variable = socket::VARIABLE;
                let message =
                    format!("{shown} is there already, and is no socket that was left: set {variable} to another path");
                return Err(Failure { errno: libc::EEXIST, ..Failure::new(Code::BadRequest, message) });
            }
            let _ = std::fs::remove_file(&path);
        }
        let failed = |e| Failure::system(format!("cannot listen at {shown}"), e);
        // It gets its name when it listens and has its mode, so that nobody meets it half made.
        let unready = path.with_file_name(format!(".{}.new", std::process::id()));
        let _ = std::fs::remove_file(&unready); // left by a process that had our number
        let listener = UnixListener::bind(&unready).map_err(failed)?;
        let mode = std::fs::Permissions::from_mode(if open { 0o666 } else { 0o600 });
        let named = listener.set_nonblocking(true).and_then(|()| std::fs::set_permissions(&unready, mode));
        if let Err(e) = named.and_then(|()| std::fs::rename(&unready, &path)) {
            let _ = std::fs::remove_file(&unready);
            return Err(failed(e));
        }
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?);
        let ended = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("channel".into()).spawn(move || accept(&listener, &ended, &cache));
        let thread = thread.map_err(failed)?;
        Ok(Server { path, stop, thread: Some(thread) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Readable from now on, for the listener and for every session.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The sessions there are, by user.
type Count = Arc<Mutex<HashMap<u32, usize>>>;

fn accept(listener: &UnixListener, stop: &Arc<OwnedFd>, cache: &Arc<Cache>) {
    let sessions = Count::default();
    loop {
        let mut ready = [PollFd::new(listener, PollFlags::IN), PollFd::new(&**stop, PollFlags::IN)];
        if poll(&mut ready, None).is_err() {
            continue;
        }
        if !ready[1].revents().is_empty() {
            return;
        }
        match listener.accept() {
            Ok((socket, _)) => admit(socket, stop, cache, &sessions),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => {
                // Out of descriptors, most likely: it passes, and must not spin.
                tracing::warn!("cannot accept a client: {e}");
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
    }
}

fn admit(socket: UnixStream, stop: &Arc<OwnedFd>, cache: &Arc<Cache>, sessions: &Count) {
    let user = socket::peer(&socket).map_or(u32::MAX, |(uid, ..)| uid);
    let mut counts = sessions.lock();
    if counts.get(&user).copied().unwrap_or(0) >= PER_USER || counts.values().sum::<usize>() >= SESSIONS {
        drop(counts);
        let message = format!("user {user} has {PER_USER} connections already, or all users together {SESSIONS}");
        session::refuse(socket.as_fd(), 0, &Failure::new(Code::OutOfMemory, message));
        return;
    }
    *counts.entry(user).or_default() += 1;
    drop(counts);
    let (stop, cache, count) = (Arc::clone(stop), Arc::clone(cache), Arc::clone(sessions));
    let started = std::thread::Builder::new().name("session".into()).spawn(move || {
        session::serve(&socket, &stop, &cache);
        one_less(&count, user);
    });
    if let Err(e) = started {
        one_less(sessions, user);
        tracing::warn!("cannot start a thread for a client: {e}");
    }
}

fn one_less(sessions: &Count, user: u32) {
    let mut counts = sessions.lock();
    if let Some(count) = counts.get_mut(&user) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&user);
        }
    }
}
