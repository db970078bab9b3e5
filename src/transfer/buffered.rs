//! Reading a file through the page cache. A short read must never pass for a whole one, and a page that cannot be read
//! must be an error of this load and no signal. Called by the engine's readers.

use crate::failure::{Failure, Result};
use crate::protocol::Code;
use std::os::fd::BorrowedFd;

/// The most that Linux reads in one call, in bytes.
const MOST: usize = 0x7fff_f000;

/// Where bytes go: a slot, or memory that other processes map too and that Rust may hold no reference to.
#[derive(Clone, Copy)]
pub struct Target {
    address: *mut u8,
    room: usize,
}

impl Target {
    /// # Safety
    /// `room` bytes from `address` must be writable memory, and stay so until the last read into the target returned.
    pub unsafe fn new(address: *mut u8, room: usize) -> Target {
        Target { address, room }
    }

    /// Bytes that may be written.
    pub fn room(&self) -> usize {
        self.room
    }

    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// Whether it begins at a multiple of `bytes`.
    pub fn is_aligned(&self, bytes: usize) -> bool {
        self.address.addr().is_multiple_of(bytes)
    }

    /// `room` bytes of it, from `offset`.
    pub fn part(&self, offset: usize, room: usize) -> Target {
        assert!(offset.checked_add(room).is_some_and(|end| end <= self.room), "a part lies in its target");
        // SAFETY: the end of the part lies in the target, and so in memory that is one piece.
        Target { address: unsafe { self.address.add(offset) }, room }
    }

    /// Copies the first `length` bytes of another, which lies elsewhere.
    pub fn copy(&self, from: Target, length: usize) {
        assert!(length <= self.room.min(from.room), "a copy lies in both");
        // SAFETY: both are memory (contract of Target::new), and the ranges lie in them; they are different mappings.
        unsafe { std::ptr::copy_nonoverlapping(from.address, self.address, length) };
    }

    /// Writes zeros over all of it.
    pub fn clear(&self) {
        // SAFETY: the memory is writable (contract of Target::new).
        unsafe { std::ptr::write_bytes(self.address, 0, self.room) };
    }

    /// Reads once, from `offset` of `file`; says how many bytes came.
    pub fn pread(&self, file: BorrowedFd<'_>, offset: u64) -> rustix::io::Result<usize> {
        use std::os::fd::AsRawFd;
        let offset = i64::try_from(offset).map_err(|_| rustix::io::Errno::OVERFLOW)?;
        // SAFETY: the memory is writable (contract of Target::new).
        let count = unsafe { libc::pread(file.as_raw_fd(), self.address.cast(), self.room.min(MOST), offset) };
        usize::try_from(count).map_err(|_| {
            let error = std::io::Error::last_os_error();
            rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO)
        })
    }
}

/// Fills `target` from `offset` of `file`. Fails with `Changing` where the file ends before, and with the system's errno
/// where it cannot be read.
pub fn read(file: BorrowedFd<'_>, offset: u64, target: Target) -> Result<()> {
    let mut done = 0;
    while done < target.room {
        let at = offset + done as u64;
        match target.part(done, target.room - done).pread(file, at) {
            Ok(0) => {
                let message = format!(
                    "the file became shorter while it was loaded: it ends before byte {at}; try again when nobody writes it"
                );
                return Err(Failure::new(Code::Changing, message));
            }
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                let failure = Failure::system(format!("cannot read at byte {at}"), e);
                // Whatever the errno is: the file was opened, and this is reading it.
                return Err(Failure { code: Code::Io, ..failure });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    fn read_into(file: &std::fs::File, offset: u64, out: &mut [u8]) -> Result<()> {
        // SAFETY: the slice is live and writable while the read runs.
        read(file.as_fd(), offset, unsafe { Target::new(out.as_mut_ptr(), out.len()) })
    }

    #[test]
    fn a_file_that_ends_early_is_changing() {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"0123456789").expect("written");
        let mut out = [0; 4];
        read_into(&file, 6, &mut out).expect("all there");
        assert_eq!(&out, b"6789");
        let failure = read_into(&file, 7, &mut out).expect_err("ends early");
        assert_eq!(failure.code, Code::Changing);
        assert!(failure.message.contains("before byte 10"), "{failure}");
    }

    #[test]
    fn a_file_that_cannot_be_read_says_the_systems_word() {
        let directory = std::fs::File::open("/").expect("a directory");
        let failure = read_into(&directory, 0, &mut [0; 4]).expect_err("not a file");
        assert_eq!((failure.code, failure.errno), (Code::Io, libc::EISDIR));
    }

    #[test]
    fn a_page_that_cannot_be_had_is_an_error_and_no_signal() {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&[1; 4096]).expect("written");
        let empty = tempfile::tempfile().expect("a file");
        // SAFETY: the kernel chooses the address.
        let address = unsafe {
            let flags = rustix::mm::MapFlags::SHARED;
            let protection = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, flags, &empty, 0)
        }
        .expect("mapped past the end of a file");
        // SAFETY: only the kernel touches the page, and says EFAULT.
        let failure = read(file.as_fd(), 0, unsafe { Target::new(address.cast(), 4096) }).expect_err("no page");
        assert_eq!((failure.code, failure.errno), (Code::Io, libc::EFAULT));
        // SAFETY: exactly the mapping made above.
        unsafe { rustix::mm::munmap(address, 4096) }.expect("unmapped");
    }
}
