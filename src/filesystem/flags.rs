//! The flags of files that lsattr and chattr show and set (append only, immutable, no copy on write): ioctls which the
//! kernel sends here after it has checked the caller's rights itself. They go to the source's file as they are. Called by
//! `ioctl` for these four numbers.

use super::FileSystem;
use super::directory::DirectoryHandle;
use super::error::Result;
use super::handle::Handle;
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd};

/// FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR (linux/fs.h) on a 64-bit system.
const GET_FLAGS: u32 = 0x8008_6601;
const SET_FLAGS: u32 = 0x4008_6602;
const GET_XFLAGS: u32 = 0x801c_581f;
const SET_XFLAGS: u32 = 0x401c_5820;

/// Bytes of the flags alone: the number says 8, the kernel and every file system mean an int.
const FLAGS_SIZE: usize = 4;
/// Bytes of `struct fsxattr`.
const XFLAGS_SIZE: usize = 28;

pub(crate) fn is_flags(number: u32) -> bool {
    matches!(number, GET_FLAGS | SET_FLAGS | GET_XFLAGS | SET_XFLAGS)
}

impl FileSystem {
    /// The bytes that go back to the caller; none for the two that set.
    pub(crate) fn flags_ioctl(&self, handle: u64, number: u32, input: &[u8], output: u32) -> Result<Vec<u8>> {
        let handle = self.handles.get(handle)?;
        let file = match &handle {
            Handle::File(file) => file.file.as_fd(),
            Handle::Directory(directory) => match &**directory {
                DirectoryHandle::Real { file, .. } => file.as_fd(),
                DirectoryHandle::Virtual => return Err(Errno::NOTTY),
            },
            Handle::Control(_) => return Err(Errno::NOTTY),
        };
        let size = if matches!(number, GET_FLAGS | SET_FLAGS) { FLAGS_SIZE } else { XFLAGS_SIZE };
        let mut value = [0; XFLAGS_SIZE];
        let sets = matches!(number, SET_FLAGS | SET_XFLAGS);
        if sets {
            self.writable()?;
            value[..size].copy_from_slice(input.get(..size).ok_or(Errno::INVAL)?);
        } else if (output as usize) < size {
            return Err(Errno::INVAL);
        }
        // SAFETY: each of the four numbers reads or writes at most the 28 bytes of struct fsxattr, which `value` has, and
        // `file` is open for the call.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), number.into(), value.as_mut_ptr()) };
        if done < 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
        }
        Ok(if sets { Vec::new() } else { value[..size].to_vec() })
    }
}
