//! Which bytes a file has: the identity of a version. Two equal versions have the same bytes as far as the file system
//! can tell; when a store to a page that a shared mapping has dirtied already cannot hide behind one, `stability` says.

use crate::failure::{Failure, Result};
use rustix::fs::Stat;
use std::os::fd::AsFd;

/// A file, whatever its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    pub device: u64,
    pub inode: u64,
}

/// The identity of a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version {
    pub file: FileId,
    /// Bytes.
    pub size: u64,
    /// Nanoseconds since the epoch.
    pub mtime: i128,
    /// Nanoseconds since the epoch.
    pub ctime: i128,
}

impl Version {
    pub fn of_stat(stat: &Stat) -> Version {
        let nanoseconds = |seconds: i64, part: u64| i128::from(seconds) * 1_000_000_000 + i128::from(part);
        Version {
            file: FileId { device: stat.st_dev, inode: stat.st_ino },
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: nanoseconds(stat.st_mtime, stat.st_mtime_nsec),
            ctime: nanoseconds(stat.st_ctime, stat.st_ctime_nsec),
        }
    }

    /// The version that `file` has now.
    pub fn of(file: impl AsFd) -> Result<Version> {
        let stat = rustix::fs::fstat(file).map_err(|e| Failure::system("cannot stat the file", e))?;
        Ok(Version::of_stat(&stat))
    }
}
