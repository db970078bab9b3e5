//! How an inode is reached. By an O_PATH descriptor, which keeps it from reuse; or, where more inodes are known than
//! descriptors can be had, by the file handle that the source's file system gives; or by its name in its parent, where
//! handles cannot be opened (an ordinary user), and in other mounts inside the source, which a descriptor would keep
//! from being unmounted. A handle or a name that leads to another file by now is ESTALE, and the kernel looks again.
//! Called by `inode`.

use super::error::Result;
use super::inode::Inode;
use super::status::{Place, Status};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// MAX_HANDLE_SZ of the kernel.
const HANDLE_SIZE: usize = 128;

/// More directories than this are in no path that the kernel takes (PATH_MAX is 4096 bytes).
const MOST_NAMES: usize = 4096;

/// `struct file_handle` with room for the largest.
#[repr(C)]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Handle {
    bytes: u32,
    kind: i32,
    data: [u8; HANDLE_SIZE],
}

pub(crate) enum Location {
    Descriptor(OwnedFd),
    /// The handle, and a descriptor of its file system.
    Handle(Box<Handle>, Arc<OwnedFd>),
    Named(Named),
}

/// A name, and what has to be found there.
pub(crate) struct Named {
    /// The name by which it was last found. The file may have others.
    name: Mutex<(Arc<Inode>, OsString)>,
    place: Place,
    /// Tells the file from a later one with its number. `None`: its file system gives no handles.
    handle: Option<Box<Handle>>,
}

/// A descriptor for one use.
pub(crate) enum Reached<'i> {
    Kept(BorrowedFd<'i>),
    Shared(Arc<OwnedFd>),
    Opened(OwnedFd),
}

impl AsFd for Reached<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Reached::Kept(descriptor) => *descriptor,
            Reached::Shared(descriptor) => descriptor.as_fd(),
            Reached::Opened(descriptor) => descriptor.as_fd(),
        }
    }
}

impl Location {
    pub(crate) fn reach(&self) -> Result<Reached<'_>> {
        match self {
            Location::Descriptor(descriptor) => Ok(Reached::Kept(descriptor.as_fd())),
            Location::Handle(handle, mount) => handle.open(mount).map(Reached::Opened),
            Location::Named(named) => named.open().map(Reached::Opened),
        }
    }

    /// The handle by which a known file is told from another that has only inherited its number. A descriptor needs
    /// none: it keeps the number from being given away.
    pub(crate) fn handle(&self) -> Option<&Handle> {
        match self {
            Location::Descriptor(_) => None,
            Location::Handle(handle, _) => Some(handle),
            Location::Named(named) => named.handle.as_deref(),
        }
    }
}

impl Named {
    pub(crate) fn new(parent: Arc<Inode>, name: &OsStr, place: Place, handle: Option<Box<Handle>>) -> Named {
        Named { name: Mutex::new((parent, name.to_os_string())), place, handle }
    }

    /// The file was found at this name.
    pub(crate) fn found(&self, parent: &Arc<Inode>, name: &OsStr) {
        let mut known = self.name.lock();
        if !Arc::ptr_eq(&known.0, parent) || known.1 != name {
            *known = (parent.clone(), name.to_os_string());
        }
    }

    fn open(&self) -> Result<OwnedFd> {
        let descriptor = self.follow()?;
        let same = Status::of(&descriptor)?.place() == self.place
            && self.handle.as_deref().is_none_or(|known| Handle::of(&descriptor).as_ref() == Some(known));
        if same { Ok(descriptor) } else { Err(Errno::STALE) }
    }

    /// What is at the name now. Of the directories on the way only the nearest that is reached otherwise has to be the
    /// same: whatever the others are, what is found in the end is compared.
    fn follow(&self) -> Result<OwnedFd> {
        const FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
        let mut names = Vec::new();
        let (mut parent, name) = self.name.lock().clone();
        names.push(name);
        while let Location::Named(above) = parent.location() {
            if names.len() > MOST_NAMES {
                return Err(Errno::STALE); // names of different moments can lead in a circle
            }
            let (next, name) = above.name.lock().clone();
            names.push(name);
            parent = next;
        }
        let gone = |e| if e == Errno::NOENT || e == Errno::NOTDIR { Errno::STALE } else { e };
        let start = parent.reach()?;
        let mut at = None;
        for name in names.iter().rev() {
            let from = at.as_ref().map_or(start.as_fd(), OwnedFd::as_fd);
            at = Some(rustix::fs::openat(from, name, FLAGS, Mode::empty()).map_err(gone)?);
        }
        at.ok_or(Errno::STALE)
    }
}

impl Handle {
    /// The handle of what an O_PATH descriptor names. `None`: its file system gives none.
    pub(crate) fn of(descriptor: impl AsFd) -> Option<Handle> {
        Handle::ask(descriptor.as_fd(), c"", libc::AT_EMPTY_PATH)
    }

    /// The handle of what has this name; of a symbolic link itself. `None`: nothing has it, or there are no handles.
    pub(crate) fn at(directory: impl AsFd, name: &OsStr) -> Option<Handle> {
        let name = CString::new(name.as_bytes()).ok()?;
        Handle::ask(directory.as_fd(), &name, 0)
    }

    fn ask(descriptor: BorrowedFd<'_>, name: &CStr, flags: libc::c_int) -> Option<Handle> {
        let mut handle = Handle { bytes: HANDLE_SIZE as u32, kind: 0, data: [0; HANDLE_SIZE] };
        let mut mount: libc::c_int = 0;
        // SAFETY: `handle` has the layout of struct file_handle and as much room as it says; `name` ends with NUL; both
        // outlive the call.
        let done = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                descriptor.as_raw_fd(),
                name.as_ptr(),
                &raw mut handle,
                &raw mut mount,
                flags,
            )
        };
        (done == 0).then_some(handle)
    }

    fn open(&self, mount: &OwnedFd) -> Result<OwnedFd> {
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: `self` has the layout of struct file_handle and is only read; `mount` is open during the call.
        let opened =
            unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), std::ptr::from_ref(self), flags) };
        match i32::try_from(opened) {
            // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
            Ok(raw) if raw >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(raw) }),
            _ => Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)),
        }
    }
}
