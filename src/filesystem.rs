//! The mount: names, attributes and data of the source as they are, and the triggers by which a program asks for a file
//! in device memory (ioctl, `user.warpfs.*`, `.warpfs`). It never waits for a load: what takes long is answered from
//! another thread. The daemon calls [`mount()`] and serves what it returns; everything else here is called by `fuse`.

mod attributes;
mod control;
mod data;
mod directory;
mod error;
mod flags;
mod fuse;
mod handle;
mod inode;
mod ioctl;
mod location;
mod mount;
mod names;
mod origin;
mod status;
mod waiting;
mod xattr;

pub use mount::{Facts, Mounted, Unmounter, mount};

use crate::cache::Cache;
use crate::failure::Failure;
use crate::source::OpenFile;
use control::Control;
use error::Result;
use handle::Handles;
use inode::{Inode, Inodes};
use origin::Origin;
use parking_lot::Mutex;
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Everything that the operations on one mount share.
pub(crate) struct FileSystem {
    pub(crate) inodes: Inodes,
    pub(crate) handles: Handles,
    pub(crate) cache: Arc<Cache>,
    pub(crate) control: Control,
    /// The source's absolute path, only to name files in messages.
    source: PathBuf,
    read_only: bool,
    pub(crate) served: Served,
    pub(crate) waiting: waiting::Waiting,
    /// The source's file system is on this machine, and a close cannot fail.
    pub(crate) local: bool,
    /// What our own mount forbids: of nosuid, nodev and noexec.
    pub(crate) forbids: StatVfsMountFlags,
    /// Mounts of the source whose files the kernel would not pass through, and the errno; each is told once.
    pub(crate) refusals: Mutex<HashSet<(u64, i32)>>,
    /// What INIT negotiated; set before the first request and not changed after.
    pub(crate) passthrough: AtomicBool,
    /// The daemon applies the caller's umask, because the kernel leaves it to whoever knows the default ACLs.
    pub(crate) applies_umask: AtomicBool,
}

/// Requests that the kernel answers itself where it can, as far as they came to the daemon.
#[derive(Default)]
pub(crate) struct Served {
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    /// Pieces of directories.
    pub(crate) listings: AtomicU64,
}

impl FileSystem {
    /// Refuses a change on a read-only mount. `MS_RDONLY` would refuse the triggers too.
    pub(crate) fn writable(&self) -> Result<()> {
        if self.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// The name by which people know the file: its path in the mount, or the source's own words for it.
    pub(crate) fn name_of(&self, inode: &Inode) -> PathBuf {
        let reached = inode.reach();
        let Some(path) = reached.ok().and_then(|fd| std::fs::read_link(proc_path(&fd)).ok()) else {
            return PathBuf::from(format!("inode {}", inode.node));
        };
        match path.strip_prefix(&self.source) {
            Ok(relative) => self.control.mountpoint().join(relative),
            Err(_) => path,
        }
    }

    /// The inode's file, opened for reading with the caller's own rights.
    pub(crate) fn readable(&self, inode: &Inode, origin: &Origin) -> crate::failure::Result<OpenFile> {
        let name = self.name_of(inode);
        let reached = inode.reach().map_err(|e| Failure::system(name.display(), e))?;
        OpenFile::reopen(reached.as_fd(), &name, &origin.identity())
    }

    /// Whether this mount reads and writes file data in the kernel.
    pub(crate) fn passes_through(&self) -> bool {
        self.passthrough.load(Ordering::Relaxed)
    }
}

/// The path that reaches what an O_PATH descriptor names, for the calls that take no descriptor. It leads to a symbolic
/// link itself and not to its target. Good for as long as the descriptor is open.
pub(crate) fn proc_path(descriptor: &impl AsFd) -> String {
    format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd())
}

/// The part of `path` below `root`, or `path` itself where it is relative. `None`: elsewhere.
pub(crate) fn beneath<'p>(root: &Path, path: &'p Path) -> Option<&'p Path> {
    if path.is_absolute() { path.strip_prefix(root).ok() } else { Some(path) }
}
