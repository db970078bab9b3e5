//! How much of a file's range is in the page cache, measured and never guessed: of a file that was only half read, half is.
//! It must read nothing of the file, or the answer would change. Called by the engine's readers, once a chunk.

use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsRawFd, BorrowedFd};

/// cachestat(2), since Linux 6.5; the number is the same on every architecture.
const CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of linux/mman.h; bytes.
#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

/// `struct cachestat`; pages.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    written_back: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Bytes of the range that are in the page cache, in whole pages and so up to a page too many at each end. `None` where the
/// kernel does not tell: it tells those who own the file or may write it.
pub fn cached(file: BorrowedFd<'_>, offset: u64, length: usize) -> Option<u64> {
    let page = rustix::param::page_size() as u64;
    let begin = offset - offset % page;
    let length = length as u64 + offset % page;
    let pages = counted(file, begin, length).or_else(|| mapped(file, begin, length as usize))?;
    Some(pages * page)
}

/// Places of a file that are looked at to see whether it is in the page cache in part.
const LOOKS: u64 = 16;

/// How much of a range is in the page cache, as far as a few looks tell: to count all pages of a large file would take longer
/// than it is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    All,
    Some,
    Nothing,
}

/// See [`Seen`]. `None`: the kernel does not tell, or there is too little to look at.
pub fn look(file: BorrowedFd<'_>, offset: u64, length: u64) -> Option<Seen> {
    let step = length / LOOKS;
    let looks = (0..LOOKS).map(|look| cached(file, offset + look * step, 1).map(|cached| cached > 0));
    let found = looks.collect::<Option<Vec<bool>>>().filter(|_| step > 0)?;
    Some(match (found.contains(&true), found.contains(&false)) {
        (true, false) => Seen::All,
        (true, true) => Seen::Some,
        _ => Seen::Nothing,
    })
}

fn counted(file: BorrowedFd<'_>, offset: u64, length: u64) -> Option<u64> {
    let (range, mut counts) = (Range { offset, length }, Counts::default());
    // SAFETY: the kernel reads one structure and writes the other, which both live over the call and have its layout.
    let result = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, 0) };
    (result == 0).then_some(counts.cached)
}

/// The same of a mapping. The kernel says "all of it" to whoever may not know, so this is asked only of who may write.
fn mapped(file: BorrowedFd<'_>, offset: u64, length: usize) -> Option<u64> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::access(path, rustix::fs::Access::WRITE_OK).ok()?;
    let mut pages = vec![0_u8; length.div_ceil(rustix::param::page_size())];
    // SAFETY: a new mapping at an address that the kernel chooses, which nobody looks into.
    let address = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, offset).ok()?
    };
    // SAFETY: the mapping has `length` bytes, and the vector a byte for each page of it.
    let result = unsafe { libc::mincore(address, length, pages.as_mut_ptr()) };
    // SAFETY: exactly the mapping made above.
    let _ = unsafe { rustix::mm::munmap(address, length) };
    (result == 0).then(|| pages.iter().filter(|page| **page & 1 == 1).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::Advice;
    use std::io::Write;
    use std::num::NonZeroU64;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    #[test]
    fn what_was_read_is_there_and_nothing_else() {
        const HALF: u64 = 1 << 20;
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&vec![1; 2 * HALF as usize]).expect("written");
        file.sync_all().expect("on the disk");
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).expect("advised");
        rustix::fs::fadvise(&file, 0, NonZeroU64::new(2 * HALF), Advice::Random).expect("advised");
        let both = |offset, length| {
            let (offset, length): (u64, usize) = (offset, length);
            let pages = mapped(file.as_fd(), offset, length).expect("our own file") * 4096;
            let counted = counted(file.as_fd(), offset, length as u64).map_or(pages, |pages| pages * 4096);
            assert_eq!(counted, pages, "cachestat and mincore");
            pages
        };
        let before = both(0, 2 * HALF as usize);
        file.read_exact_at(&mut vec![0; HALF as usize], HALF).expect("read");
        assert_eq!(both(HALF, HALF as usize), HALF);
        if before == 0 {
            // Not on a file system that lives in the page cache.
            assert_eq!(both(0, HALF as usize), 0);
            assert_eq!(cached(file.as_fd(), HALF - 1, 2), Some(4096));
        }
        assert_eq!(cached(file.as_fd(), HALF + 1, 10), Some(4096));
        let whole = if before == 0 { Seen::Some } else { Seen::All };
        assert_eq!(look(file.as_fd(), 0, 2 * HALF), Some(whole));
        assert_eq!((look(file.as_fd(), HALF, HALF), look(file.as_fd(), 0, 3)), (Some(Seen::All), None));
    }
}
