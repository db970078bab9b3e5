//! Extended attributes of the source as they are, symbolic links' own among them, and the virtual `user.warpfs.*` names,
//! which are handed to `control` and never listed, stored or passed on. Called by `fuse`.

use super::FileSystem;
use super::error::Result;
use super::inode::is_virtual;
use super::origin::{Origin, with_fsetid};
use super::proc_path;
use rustix::fs::{StatVfsMountFlags, XattrFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Every name that is ours.
pub(crate) const PREFIX: &str = "user.warpfs.";

/// The rest of a name of ours.
pub(crate) fn trigger(name: &OsStr) -> Option<&str> {
    std::str::from_utf8(name.as_bytes()).ok()?.strip_prefix(PREFIX)
}

impl FileSystem {
    pub(crate) fn getxattr(&self, node: u64, name: &OsStr) -> Result<Vec<u8>> {
        if is_virtual(node) {
            return Err(Errno::NODATA);
        }
        let inode = self.inodes.get(node)?;
        let reached = inode.reach()?;
        if name == "security.capability" && inode.foreign {
            // Where set-user-id bits have no effect, file capabilities have none.
            let flags = rustix::fs::fstatvfs(&reached)?.f_flag - self.forbids;
            if flags.contains(StatVfsMountFlags::NOSUID) {
                return Err(Errno::NODATA);
            }
        }
        let path = proc_path(&reached);
        // One attempt is enough for nearly every value; XATTR_SIZE_MAX is enough for all.
        for size in [1024, 65536] {
            let mut value = vec![0; size];
            match rustix::fs::getxattr(&path, name, value.as_mut_slice()) {
                Ok(length) => {
                    value.truncate(length);
                    return Ok(value);
                }
                Err(Errno::RANGE) => {}
                Err(e) => return Err(e),
            }
        }
        Err(Errno::TOOBIG)
    }

    pub(crate) fn setxattr(&self, origin: Origin, node: u64, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        let inode = self.real(node)?;
        self.writable()?;
        let flags = XattrFlags::from_bits_retain(flags as u32);
        let reached = inode.reach()?; // as the daemon, which may open by handle
        let set = || rustix::fs::setxattr(proc_path(&reached), name, value, flags);
        // An ACL changes the mode, and whoever is not in the file's group loses its set-group-id bit by that: the system
        // has to see who it is (CVE-2016-7097).
        with_fsetid(
            || if name.as_bytes().starts_with(b"system.posix_acl_") { origin.identity().with(set) } else { set() },
        )
    }

    pub(crate) fn removexattr(&self, node: u64, name: &OsStr) -> Result<()> {
        if trigger(name).is_some() {
            return Err(Errno::NODATA);
        }
        let inode = self.real(node)?;
        self.writable()?;
        rustix::fs::removexattr(proc_path(&inode.reach()?), name)
    }

    /// NUL-terminated names. `trusted.*` is shown to root only, as natively.
    pub(crate) fn listxattr(&self, origin: Origin, node: u64) -> Result<Vec<u8>> {
        if is_virtual(node) {
            return Ok(Vec::new());
        }
        let inode = self.inodes.get(node)?;
        let reached = inode.reach()?;
        let path = proc_path(&reached);
        let mut names = vec![0; 65536]; // XATTR_LIST_MAX
        let length = rustix::fs::listxattr(&path, names.as_mut_slice())?;
        names.truncate(length);
        if origin.uid == 0 {
            return Ok(names);
        }
        let shown = names.split_inclusive(|b| *b == 0).filter(|name| !name.starts_with(b"trusted."));
        Ok(shown.flatten().copied().collect())
    }
}
