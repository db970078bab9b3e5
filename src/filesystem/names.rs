//! Names: finding, making, moving and removing them. What is made belongs to the caller; whether the caller may do it
//! was decided by the kernel, which checks the permissions on every mount of ours. The name `.warpfs` in the root is
//! ours and is never passed to the source. Called by `fuse`.

use super::FileSystem;
use super::attributes::Entry;
use super::control;
use super::error::Result;
use super::inode::{Inode, ROOT, is_virtual};
use super::origin::{Origin, with_fsetid, with_umask};
use super::proc_path;
use super::status::{Status, decode_device};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How a name is looked at.
pub(crate) const FOUND: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// What MKNOD, MKDIR and CREATE say beside the name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made {
    pub(crate) mode: u32,
    pub(crate) umask: u32,
}

impl FileSystem {
    /// Counts the lookup where the name is the source's.
    pub(crate) fn lookup(&self, parent: u64, name: &OsStr) -> Result<Entry> {
        if is_virtual(parent) || (parent == ROOT && control::is_reserved(name)) {
            return self.control.lookup(parent, name);
        }
        let parent = self.directory_inode(parent)?;
        parent.asked.fetch_add(1, Ordering::Relaxed);
        self.find(&parent, name)
    }

    /// Finds `name` in the source's directory and counts the lookup.
    pub(crate) fn find(&self, parent: &Arc<Inode>, name: &OsStr) -> Result<Entry> {
        let at = parent.reach()?;
        // Most lookups are of what the kernel knew a second ago: one call tells that it is the same.
        let status = Status::at(&at, name)?;
        if let Some(inode) = self.inodes.recall(&status, &at, (parent, name)) {
            parent.fresh.given();
            return Ok(self.entry_for(&inode, &status));
        }
        self.look(&at, parent, name)
    }

    /// The same for what is most probably not known.
    fn look(&self, at: impl AsFd, parent: &Arc<Inode>, name: &OsStr) -> Result<Entry> {
        let descriptor = rustix::fs::openat(at, name, FOUND, Mode::empty())?;
        let status = Status::of(&descriptor)?;
        self.entry(descriptor, status, parent, name)
    }

    /// The entry of what an O_PATH descriptor names, which was found as `name` in `parent`; its lookup is counted.
    pub(crate) fn entry(
        &self,
        descriptor: OwnedFd,
        status: Status,
        parent: &Arc<Inode>,
        name: &OsStr,
    ) -> Result<Entry> {
        let foreign = status.place().mount != parent.mount || parent.foreign;
        let flags = if foreign { Some(rustix::fs::fstatvfs(&descriptor)?.f_flag) } else { None };
        let inode = self.inodes.looked_up(descriptor, &status, parent, name);
        parent.fresh.given();
        Ok(self.entry_for(&inode, &flags.map_or(status, |flags| status.restrict(flags - self.forbids))))
    }

    fn entry_for(&self, inode: &Inode, status: &Status) -> Entry {
        let unsettled = {
            let opens = inode.opens.lock();
            opens.writers > 0 || opens.written
        };
        let keep = if unsettled { std::time::Duration::ZERO } else { super::attributes::KEEP };
        // An entry's attributes name the node: fuser takes the node id from them.
        let attributes = super::attributes::Attributes { attr: status.attr(inode.node), keep };
        Entry { node: inode.node, generation: inode.generation, attributes }
    }

    pub(crate) fn readlink(&self, node: u64) -> Result<Vec<u8>> {
        let inode = self.real(node)?;
        Ok(rustix::fs::readlinkat(inode.reach()?, "", Vec::with_capacity(256))?.into_bytes())
    }

    pub(crate) fn mknod(&self, origin: Origin, parent: u64, name: &OsStr, made: Made, device: u32) -> Result<Entry> {
        let parent = self.changeable(parent, name)?;
        let (kind, mode) = (FileType::from_raw_mode(made.mode), Mode::from_raw_mode(made.mode & 0o7777));
        let at = parent.reach()?;
        // A mode without a type is a regular file, as for mknod(2).
        let kind = if made.mode & libc::S_IFMT == 0 { FileType::RegularFile } else { kind };
        self.make(origin, made, || rustix::fs::mknodat(&at, name, kind, mode, decode_device(device)))?;
        self.look(&at, &parent, name)
    }

    pub(crate) fn mkdir(&self, origin: Origin, parent: u64, name: &OsStr, made: Made) -> Result<Entry> {
        let parent = self.changeable(parent, name)?;
        let mode = Mode::from_raw_mode(made.mode & 0o7777);
        let at = parent.reach()?;
        self.make(origin, made, || rustix::fs::mkdirat(&at, name, mode))?;
        self.look(&at, &parent, name)
    }

    pub(crate) fn symlink(&self, origin: Origin, parent: u64, name: &OsStr, target: &Path) -> Result<Entry> {
        let parent = self.changeable(parent, name)?;
        let at = parent.reach()?; // as the daemon, which may open by handle
        origin.identity().with(|| rustix::fs::symlinkat(target, &at, name))?;
        self.look(&at, &parent, name)
    }

    /// Makes something as the caller and under the caller's umask.
    pub(crate) fn make<T>(&self, origin: Origin, made: Made, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let umask = if self.applies_umask.load(Ordering::Relaxed) { made.umask } else { 0 };
        let work = || origin.identity().with(|| with_umask(umask, work));
        // The capability counts only for a set-group-id bit that is asked for, outside of the caller's groups.
        if made.mode & libc::S_ISGID == 0 { work() } else { with_fsetid(work) }
    }

    pub(crate) fn link(&self, node: u64, parent: u64, name: &OsStr) -> Result<Entry> {
        let parent = self.changeable(parent, name)?;
        let inode = self.real(node)?;
        rustix::fs::linkat(CWD, proc_path(&inode.reach()?), parent.reach()?, name, AtFlags::SYMLINK_FOLLOW)?;
        self.find(&parent, name)
    }

    pub(crate) fn unlink(&self, parent: u64, name: &OsStr) -> Result<()> {
        let parent = self.changeable(parent, name)?;
        rustix::fs::unlinkat(parent.reach()?, name, AtFlags::empty())
    }

    pub(crate) fn rmdir(&self, parent: u64, name: &OsStr) -> Result<()> {
        let parent = self.changeable(parent, name)?;
        rustix::fs::unlinkat(parent.reach()?, name, AtFlags::REMOVEDIR)
    }

    pub(crate) fn rename(&self, from: u64, name: &OsStr, to: u64, new_name: &OsStr, flags: u32) -> Result<()> {
        let from = self.changeable(from, name)?;
        let to = self.changeable(to, new_name)?;
        let flags = RenameFlags::from_bits_retain(flags);
        rustix::fs::renameat_with(from.reach()?, name, to.reach()?, new_name, flags)?;
        if !self.inodes.by_name() {
            return Ok(());
        }
        let exchanged = flags.contains(RenameFlags::EXCHANGE).then_some((&from, name));
        for (parent, name) in [(&to, new_name)].into_iter().chain(exchanged) {
            if let Ok(descriptor) = rustix::fs::openat(parent.reach()?, name, FOUND, Mode::empty()) {
                self.inodes.moved(&descriptor, parent, name);
            }
        }
        Ok(())
    }

    /// An inode of the source; the virtual ones have no name or data there.
    pub(crate) fn real(&self, node: u64) -> Result<Arc<Inode>> {
        if is_virtual(node) {
            return Err(Errno::PERM);
        }
        self.inodes.get(node)
    }

    fn directory_inode(&self, node: u64) -> Result<Arc<Inode>> {
        let inode = self.inodes.get(node)?;
        if inode.kind == FileType::Directory { Ok(inode) } else { Err(Errno::NOTDIR) }
    }

    /// The directory in which `name` is to be made or removed.
    pub(crate) fn changeable(&self, parent: u64, name: &OsStr) -> Result<Arc<Inode>> {
        if is_virtual(parent) || (parent == ROOT && control::is_reserved(name)) {
            return Err(Errno::PERM);
        }
        self.writable()?;
        self.directory_inode(parent)
    }
}
