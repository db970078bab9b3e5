//! Reading a file past the page cache (O_DIRECT): for what is not in it, so that a load neither waits for the cache to be
//! filled nor throws out what others have there. Where the file system does not take it, or refuses a read that it seemed
//! to take, the caller reads through the cache. Called by `input` and `ring`.

use super::buffered::Target;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A file that can be read past the page cache.
pub struct Direct {
    file: OwnedFd,
    alignment: Alignment,
}

/// What a file system wants of a read past the page cache; bytes, powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// What addresses in memory have to be multiples of.
    pub memory: usize,
    /// The same of offsets in the file, and of lengths.
    pub offset: usize,
}

impl Alignment {
    /// `None` where the file system tells none (STATX_DIOALIGN: ext4, XFS, btrfs and others do since Linux 6.1; tmpfs,
    /// overlayfs and network file systems do not).
    pub fn of(file: BorrowedFd<'_>) -> Option<Alignment> {
        let status = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
        let told = StatxFlags::from_bits_retain(status.stx_mask).contains(StatxFlags::DIOALIGN);
        let (memory, offset) = (status.stx_dio_mem_align as usize, status.stx_dio_offset_align as usize);
        (told && memory.is_power_of_two() && offset.is_power_of_two()).then_some(Alignment { memory, offset })
    }

    /// How many of the first `length` bytes from `offset` of the file can be read into `target` in whole blocks. The last
    /// block may take more room than it has bytes.
    pub fn whole(&self, offset: u64, length: usize, target: Target) -> usize {
        if !offset.is_multiple_of(self.offset as u64) || !target.is_aligned(self.memory) {
            return 0;
        }
        if length.next_multiple_of(self.offset) <= target.room() { length } else { length - length % self.offset }
    }

    /// What has to be asked for, to read `length` bytes: whole blocks.
    pub fn rounded(&self, length: usize) -> usize {
        length.next_multiple_of(self.offset)
    }
}

impl Direct {
    /// Opens `file` once more. `None` where its file system tells no alignment, or will not open it so.
    pub fn open(file: BorrowedFd<'_>) -> Option<Direct> {
        let alignment = Alignment::of(file)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()).ok()?;
        Some(Direct { file, alignment })
    }

    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Reads `length` bytes, a number that [`Alignment::whole`] gave for `target`, and says how many there were. Fewer: the
    /// file ends there, or a read was refused in the middle.
    pub fn read(&self, offset: u64, length: usize, target: Target) -> Result<usize, Errno> {
        let mut done = 0;
        while done < length {
            let wanted = self.alignment.rounded(length - done);
            match target.part(done, wanted).pread(self.file.as_fd(), offset + done as u64) {
                Ok(0) => break,
                // A count that is no multiple is the file's end.
                Ok(count) if !count.is_multiple_of(self.alignment.offset) => return Ok((done + count).min(length)),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(done.min(length))
    }
}

impl AsFd for Direct {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
