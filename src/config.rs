//! Everything that can be set, checked as a whole.

use std::path::PathBuf;

/// How a directory is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// The real directory, absolute.
    pub source: PathBuf,
    /// Where it is mounted, absolute.
    pub mountpoint: PathBuf,
    /// Refuse every change, in the daemon, so that triggers still work.
    pub read_only: bool,
    /// Let other users in; always with the kernel's own permission checks.
    pub allow_other: bool,
    /// Let the kernel read and write file data itself where it can.
    pub passthrough: bool,
    /// Mount over a directory that is not empty.
    pub nonempty: bool,
}
