//! How an inode is reached: by an O_PATH descriptor, which keeps it from reuse, or, where more inodes are known than
//! descriptors can be had, by the file handle that the source's file system gives, which is opened for each use. A
//! handle whose file is gone is ESTALE and never another file. Called by `inode`.

use super::error::Result;
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// MAX_HANDLE_SZ of the kernel.
const HANDLE_SIZE: usize = 128;

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
}

/// A descriptor for one use.
pub(crate) enum Reached<'i> {
    Kept(BorrowedFd<'i>),
    Opened(OwnedFd),
}

impl AsFd for Reached<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Reached::Kept(descriptor) => *descriptor,
            Reached::Opened(descriptor) => descriptor.as_fd(),
        }
    }
}

impl Location {
    pub(crate) fn reach(&self) -> Result<Reached<'_>> {
        match self {
            Location::Descriptor(descriptor) => Ok(Reached::Kept(descriptor.as_fd())),
            Location::Handle(handle, mount) => handle.open(mount).map(Reached::Opened),
        }
    }
}

impl Handle {
    /// The handle of what an O_PATH descriptor names. `None`: its file system gives none.
    pub(crate) fn of(descriptor: impl AsFd) -> Option<Handle> {
        let mut handle = Handle { bytes: HANDLE_SIZE as u32, kind: 0, data: [0; HANDLE_SIZE] };
        let mut mount: libc::c_int = 0;
        // SAFETY: `handle` has the layout of struct file_handle and as much room as it says; the path is an empty string
        // that ends with NUL; both outlive the call.
        let done = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                descriptor.as_fd().as_raw_fd(),
                c"".as_ptr(),
                &raw mut handle,
                &raw mut mount,
                libc::AT_EMPTY_PATH,
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
