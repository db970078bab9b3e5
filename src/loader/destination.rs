//! The memory of a job, which may still be made while the loader reads the job's files: some milliseconds for gigabytes. What
//! the child gets then is a socket, over which the descriptor follows; if that closes first, there is no memory. So whoever
//! promised it may fail, or end, and nobody waits for ever. Called by the cache and the minder; read by the child.

use super::packet;
use crate::device::Allocation;
use crate::failure::{Failure, Result};
use crate::protocol::{Code, loader_kind};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

/// Destination for a job's files.
pub struct Destination {
    size: u64,
    made: Arc<OnceLock<Arc<Allocation>>>,
    /// Over which it comes, where it was not there at once.
    coming: Option<OwnedFd>,
}

/// Destination that somebody waits for. Dropped, it never comes.
pub struct Promise {
    made: Arc<OnceLock<Arc<Allocation>>>,
    socket: OwnedFd,
}

impl Destination {
    /// That is there.
    pub fn of(allocation: &Arc<Allocation>) -> Destination {
        let made = Arc::new(OnceLock::from(Arc::clone(allocation)));
        Destination { size: allocation.size(), made, coming: None }
    }

    /// That will be `size` bytes. Fails where no socket can be had.
    pub fn promised(size: u64) -> Result<(Destination, Promise)> {
        let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|e| Failure::system("cannot make a socket for a load's memory", e))?;
        let made = Arc::new(OnceLock::new());
        Ok((Destination { size, made: Arc::clone(&made), coming: Some(far) }, Promise { made, socket: near }))
    }

    /// Bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// What the child is given: the memory, or (true) that over which it comes.
    pub(super) fn descriptor(&self) -> (BorrowedFd<'_>, bool) {
        match (self.made.get(), &self.coming) {
            (Some(allocation), _) => (allocation.descriptor(), false),
            (None, Some(socket)) => (socket.as_fd(), true),
            (None, None) => unreachable!("memory is made or promised"),
        }
    }
}

impl Promise {
    /// It is there.
    pub fn keep(self, allocation: Arc<Allocation>) {
        let made = self.made.get_or_init(|| allocation);
        // Whoever is given it from here on gets the memory itself; a child that is gone needs nothing.
        let _ = packet::send_bytes(self.socket.as_fd(), loader_kind::MEMORY, &[], &[made.descriptor()], true);
    }
}

/// Waits for memory that was promised. Called by the child.
pub(super) fn wait_for(socket: &OwnedFd) -> Result<OwnedFd> {
    let packet = packet::receive(socket.as_fd(), true).map_err(|e| Failure::system("cannot receive the memory", e))?;
    let descriptor = packet.and_then(|packet| packet.descriptors.into_iter().next());
    descriptor.ok_or_else(|| Failure::new(Code::OutOfMemory, "there was no memory for it"))
}
