//! The mount's own names: the hidden directory `.warpfs` in the root, its files, and the `user.warpfs.*` attributes. They
//! are for programs that can do nothing but read and write files. Nothing here waits for a load, and whatever is asked
//! is done with the rights of whoever asks. Called by `fuse` and by the operations on names.

mod lines;
mod queue;
mod triggers;

pub(crate) use queue::Queue;

use super::FileSystem;
use super::attributes::{Attributes, Entry, KEEP};
use super::directory::Listed;
use super::error::Result;
use super::handle::{Handle, writes};
use super::inode::{ROOT, virtual_node};
use super::mount::Facts;
use super::origin::Origin;
use fuser::{FileAttr, FileType, INodeNo};
use lines::Lines;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

/// The directory's name in the mount's root.
pub(crate) const NAME: &str = ".warpfs";

/// Node id of the directory; its files follow.
pub(crate) const DIRECTORY: u64 = virtual_node(1);

/// The files of `.warpfs`, in the order of their node ids.
const FILES: [(&str, u16); 6] =
    [("preload", 0o666), ("evict", 0o666), ("stats", 0o444), ("metrics", 0o444), ("config", 0o444), ("socket", 0o444)];

pub(crate) fn is_reserved(name: &OsStr) -> bool {
    name == NAME
}

/// What a line of a control file asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Preload,
    Evict,
}

/// An open file of `.warpfs`.
pub(crate) enum ControlHandle {
    /// The content at the time of the open.
    Text(Vec<u8>),
    Lines(Arc<Lines>),
}

pub(crate) struct Control {
    facts: Facts,
    mountpoint: PathBuf,
    /// Whom the files belong to.
    owner: (u32, u32),
    since: SystemTime,
    pub(crate) queue: Arc<Queue>,
}

impl Control {
    pub(crate) fn new(facts: Facts, mountpoint: &Path, queue: Arc<Queue>) -> Control {
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Control { facts, mountpoint: mountpoint.to_path_buf(), owner, since: SystemTime::now(), queue }
    }

    pub(crate) fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.facts.socket
    }

    /// Hands the lines that `data` completes to the queue.
    pub(crate) fn write(&self, lines: &Arc<Lines>, data: &[u8], over: Over) {
        match lines.write(data) {
            None => over(Err(Errno::AGAIN)), // the writer is far ahead of the loads
            Some(paths) if paths.is_empty() => over(Ok(())),
            Some(paths) => self.queue.push(lines.clone(), paths, Box::new(move || over(Ok(())))),
        }
    }

    /// A descriptor was closed: a last line without a newline is done too, and EIO says that a line failed.
    pub(crate) fn flush(&self, lines: &Arc<Lines>, over: Over) {
        let rest = lines.unfinished().into_iter().collect();
        let closed = lines.clone();
        let begun = Box::new(move || over(if closed.failed() { Err(Errno::IO) } else { Ok(()) }));
        self.queue.push(lines.clone(), rest, begun);
    }

    fn file_of(node: u64) -> Option<&'static (&'static str, u16)> {
        let index = node.checked_sub(DIRECTORY + 1)?;
        FILES.get(usize::try_from(index).ok()?)
    }

    pub(crate) fn attributes(&self, node: u64) -> Result<Attributes> {
        let (kind, perm, nlink) = match Control::file_of(node) {
            Some((_, mode)) => (FileType::RegularFile, *mode, 1),
            None if node == DIRECTORY => (FileType::Directory, 0o555, 2),
            None => return Err(Errno::STALE),
        };
        let (uid, gid) = self.owner;
        let attr = FileAttr {
            ino: INodeNo(node),
            size: 0,
            blocks: 0,
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind,
            perm,
            nlink,
            uid,
            gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        Ok(Attributes { attr, keep: KEEP })
    }

    /// Finds `.warpfs` in the root, and the files in it.
    pub(crate) fn lookup(&self, parent: u64, name: &OsStr) -> Result<Entry> {
        let node = if parent == ROOT && is_reserved(name) {
            DIRECTORY
        } else if parent == DIRECTORY {
            let index = FILES.iter().position(|(file, _)| name == *file).ok_or(Errno::NOENT)?;
            DIRECTORY + 1 + index as u64
        } else {
            return Err(Errno::NOENT);
        };
        Ok(Entry { node, generation: 0, attributes: self.attributes(node)? })
    }

    /// The whole listing of `.warpfs`.
    pub(crate) fn entries(&self) -> Vec<Listed<'static>> {
        let listed = |index: usize, node: u64, name: &'static str, kind: rustix::fs::FileType| Listed {
            number: node,
            next: index as u64 + 1,
            kind,
            name: OsStr::new(name),
        };
        let directories = [(DIRECTORY, "."), (ROOT, "..")].into_iter().enumerate();
        let mut all: Vec<Listed<'static>> =
            directories.map(|(i, (node, name))| listed(i, node, name, rustix::fs::FileType::Directory)).collect();
        for (index, (name, _)) in FILES.iter().enumerate() {
            all.push(listed(index + 2, DIRECTORY + 1 + index as u64, name, rustix::fs::FileType::RegularFile));
        }
        all
    }
}

impl FileSystem {
    /// Opens a file of `.warpfs`. The opener's identity counts for everything that is written to it.
    pub(crate) fn open_control(&self, origin: Origin, node: u64, flags: i32) -> Result<u64> {
        let (name, mode) = Control::file_of(node).ok_or(Errno::ISDIR)?;
        if writes(flags) && mode & 0o222 == 0 {
            return Err(Errno::ACCESS);
        }
        let owner = origin.uid == self.control.owner.0 || origin.uid == 0;
        if writes(flags) && !owner && !rustix::process::geteuid().is_root() {
            // Lines are done with their writer's rights, and a daemon that is not root has only its own.
            return Err(Errno::ACCESS);
        }
        let handle = match *name {
            "preload" => ControlHandle::Lines(Arc::new(Lines::new(Action::Preload, origin.caller()))),
            "evict" => ControlHandle::Lines(Arc::new(Lines::new(Action::Evict, origin.caller()))),
            "stats" => ControlHandle::Text(self.stats(owner).into_bytes()),
            "metrics" => ControlHandle::Text(self.cache.metrics().into_bytes()),
            "config" => ControlHandle::Text(self.control.facts.config.clone().into_bytes()),
            _ => {
                let mut path = self.control.facts.socket.as_os_str().as_encoded_bytes().to_vec();
                path.push(b'\n');
                ControlHandle::Text(path)
            }
        };
        Ok(self.handles.insert(Handle::Control(Arc::new(handle))))
    }

    /// What `.warpfs/stats` shows: the cache's word, and the mount's own. A read or write that the kernel does itself
    /// under passthrough is not seen here.
    fn stats(&self, owner: bool) -> String {
        let mut stats = self.cache.stats(owner);
        stats["mount"] = serde_json::json!({
            "passthrough": self.passes_through(),
            "inodes": self.inodes.len(),
            "reads": self.served.reads.load(Ordering::Relaxed),
            "writes": self.served.writes.load(Ordering::Relaxed),
            "listings": self.served.listings.load(Ordering::Relaxed),
        });
        format!("{stats:#}\n")
    }

    /// Bytes of a control file. Results are read once each, in order; at their end the next read begins anew.
    pub(crate) fn read_control(&self, handle: &ControlHandle, offset: u64, size: usize) -> Vec<u8> {
        match handle {
            ControlHandle::Text(text) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
                let to = from.saturating_add(size).min(text.len());
                text[from..to].to_vec()
            }
            ControlHandle::Lines(lines) => lines.read(size),
        }
    }

    pub(crate) fn write_control(&self, control: &ControlHandle, data: &[u8], over: Over) {
        match control {
            ControlHandle::Text(_) => over(Err(Errno::BADF)),
            ControlHandle::Lines(lines) => self.control.write(lines, data, over),
        }
    }

    pub(crate) fn flush_control(&self, control: &ControlHandle, over: Over) {
        match control {
            ControlHandle::Text(_) => over(Ok(())),
            ControlHandle::Lines(lines) => self.control.flush(lines, over),
        }
    }
}

/// How long a write or a close of a control file may take; what is left then is done after it.
pub(crate) const PATIENCE: Duration = Duration::from_millis(900);

/// Told that a control file's write or close is over.
pub(crate) type Over = Box<dyn FnOnce(Result<()>) + Send>;
