//! What is open: files, directories and the virtual files of `.warpfs`. A handle keeps the real descriptor and the flags
//! it was opened with, so that work on it needs no name and goes on when the name is gone. Never holds its lock during a
//! system call. Called by every operation that has a handle.

use super::control::ControlHandle;
use super::directory::DirectoryHandle;
use super::error::Result;
use super::inode::Inode;
use parking_lot::RwLock;
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An open regular file.
pub(crate) struct FileHandle {
    pub(crate) inode: Arc<Inode>,
    pub(crate) file: Arc<OwnedFd>,
    /// The caller's flags at open.
    pub(crate) flags: i32,
}

impl FileHandle {
    pub(crate) fn reads(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_WRONLY
    }

    pub(crate) fn writes(&self) -> bool {
        writes(self.flags)
    }
}

/// Whether an open with `flags` can change the file afterwards.
pub(crate) fn writes(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}

#[derive(Clone)]
pub(crate) enum Handle {
    File(Arc<FileHandle>),
    Directory(Arc<DirectoryHandle>),
    Control(Arc<ControlHandle>),
}

/// All open handles.
pub(crate) struct Handles {
    next: AtomicU64,
    open: RwLock<HashMap<u64, Handle>>,
}

impl Handles {
    pub(crate) fn new() -> Handles {
        Handles { next: AtomicU64::new(1), open: RwLock::default() }
    }

    pub(crate) fn insert(&self, handle: Handle) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().insert(number, handle);
        number
    }

    pub(crate) fn get(&self, number: u64) -> Result<Handle> {
        self.open.read().get(&number).cloned().ok_or(Errno::BADF)
    }

    pub(crate) fn file(&self, number: u64) -> Result<Arc<FileHandle>> {
        match self.get(number)? {
            Handle::File(file) => Ok(file),
            Handle::Directory(_) => Err(Errno::ISDIR),
            Handle::Control(_) => Err(Errno::OPNOTSUPP),
        }
    }

    pub(crate) fn directory(&self, number: u64) -> Result<Arc<DirectoryHandle>> {
        match self.get(number)? {
            Handle::Directory(directory) => Ok(directory),
            _ => Err(Errno::NOTDIR),
        }
    }

    /// How many regular files are open.
    pub(crate) fn files(&self) -> usize {
        self.open.read().values().filter(|handle| matches!(handle, Handle::File(_))).count()
    }

    pub(crate) fn remove(&self, number: u64) -> Option<Handle> {
        self.open.write().remove(&number)
    }
}
