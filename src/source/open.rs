//! Opening a file of the source so that it can be loaded: as the user who asks, beneath the source's root, never a
//! directory, FIFO, socket or device, and never waiting for any of them.

use super::identity::Identity;
use super::stability::{self, Proof};
use super::version::Version;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// A regular file of the source, open for reading, and the name by which people know it.
#[derive(Clone, Debug)]
pub struct OpenFile {
    descriptor: Arc<OwnedFd>,
    /// For messages; the descriptor is what counts.
    pub path: Arc<Path>,
}

impl OpenFile {
    /// Opens `relative` beneath `root` as `identity`. Symbolic links are followed as long as they stay beneath the root.
    pub fn beneath(root: BorrowedFd<'_>, relative: &Path, identity: &Identity) -> Result<OpenFile> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let opened = identity.with(|| {
            // What is not a regular file must not be opened at all: a device may act on it.
            let found = rustix::fs::openat2(root, relative, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve)?;
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
            if kind != FileType::RegularFile {
                return Ok(Err(kind));
            }
            rustix::fs::open(proc_path(found.as_fd()), flags, Mode::empty()).map(Ok)
        });
        match opened {
            Ok(Ok(descriptor)) => OpenFile::new(descriptor, relative),
            Ok(Err(kind)) => Err(not_regular(relative, kind)),
            Err(rustix::io::Errno::XDEV) => {
                Err(Failure::new(Code::NotFound, format!("{}: leads out of the mounted directory", relative.display())))
            }
            Err(e) => Err(Failure::system(relative.display(), e)),
        }
    }

    /// Opens the inode behind an O_PATH descriptor for reading as `identity`. `path` is for messages.
    pub fn reopen(inode: BorrowedFd<'_>, path: &Path, identity: &Identity) -> Result<OpenFile> {
        let stat = rustix::fs::fstat(inode).map_err(|e| Failure::system(path.display(), e))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind != FileType::RegularFile {
            return Err(not_regular(path, kind));
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let descriptor = identity
            .with(|| rustix::fs::open(proc_path(inode), flags, Mode::empty()))
            .map_err(|e| Failure::system(path.display(), e))?;
        OpenFile::new(descriptor, path)
    }

    /// Takes a descriptor that is open for reading; refuses what is not a regular file.
    pub fn new(descriptor: impl Into<Arc<OwnedFd>>, path: impl Into<Arc<Path>>) -> Result<OpenFile> {
        let (descriptor, path) = (descriptor.into(), path.into());
        let stat = rustix::fs::fstat(&*descriptor).map_err(|e| Failure::system(path.display(), e))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind != FileType::RegularFile {
            return Err(not_regular(&path, kind));
        }
        Ok(OpenFile { descriptor, path })
    }

    /// What `version` is worth; see [`stability::proof`].
    pub fn proof(&self, version: &Version) -> Proof {
        stability::proof(&*self.descriptor, version)
    }

    /// Whether even an equal version means nothing; see [`stability::hides`].
    pub fn hides(&self) -> bool {
        stability::hides(&*self.descriptor)
    }

    /// A version behind which no change can hide; see [`stability::settle`].
    pub fn settle(&self) -> Result<Version> {
        stability::settle(&*self.descriptor).map_err(|f| f.within(self.path.display()))
    }

    /// The version that the file has now.
    pub fn version(&self) -> Result<Version> {
        Version::of(&*self.descriptor).map_err(|f| f.within(self.path.display()))
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

fn proc_path(descriptor: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", descriptor.as_raw_fd())
}

/// Says what was found where a regular file is needed.
pub fn not_regular(path: &Path, kind: FileType) -> Failure {
    let (what, errno) = match kind {
        FileType::Directory => ("a directory (preload its files, or use `warpfs preload`)", libc::EISDIR),
        FileType::Fifo => ("a FIFO", libc::EINVAL),
        FileType::Socket => ("a socket", libc::EINVAL),
        FileType::CharacterDevice | FileType::BlockDevice => ("a device", libc::EINVAL),
        FileType::Symlink => ("a symbolic link", libc::ELOOP),
        _ => ("no regular file", libc::EINVAL),
    };
    let message = format!("{}: is {what}; only regular files can be in device memory", path.display());
    Failure { code: Code::NotRegular, errno, message }
}
