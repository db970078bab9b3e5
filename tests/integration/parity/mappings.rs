//! Files as memory: what is stored is read, what is written is seen, and what is cut off is gone.

use super::process::{Ended, child};
use super::stage::{Case, case, see};
use super::sys::*;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

/// Some bytes of a file as memory, unmapped when dropped. They are read and written as volatile, one at a time.
pub struct Mapping {
    start: *mut u8,
    length: usize,
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("mapped")
    }
}

pub const READ: ProtFlags = ProtFlags::READ;
pub const BOTH: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
pub const SHARED: MapFlags = MapFlags::SHARED;
const PRIVATE: MapFlags = MapFlags::PRIVATE;

pub fn map(file: &Fd, length: usize, rights: ProtFlags, flags: MapFlags, offset: u64) -> R<Mapping> {
    // SAFETY: a fresh mapping at a place of the kernel's choice touches no memory that is in use.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, rights, flags, file, offset) }?;
    Ok(Mapping { start: start.cast(), length })
}

impl Mapping {
    pub fn get(&self, at: usize, length: usize) -> Bytes {
        assert!(at + length <= self.length);
        // SAFETY: within the mapping, and within the file where a case is not about SIGBUS.
        Bytes((at..at + length).map(|i| unsafe { self.start.add(i).read_volatile() }).collect())
    }

    pub fn set(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.length);
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: as in `get`; the mapping is writable where a case calls this.
            unsafe { self.start.add(at + i).write_volatile(*byte) };
        }
    }

    fn sync(&self, flags: MsyncFlags) -> R<()> {
        // SAFETY: the range is the mapping's own.
        Ok(unsafe { rustix::mm::msync(self.start.cast(), self.length, flags) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping's own, and nobody refers to it any more.
        unsafe { rustix::mm::munmap(self.start.cast(), self.length) }.expect("unmapped");
    }
}

/// How a child process ends that reads, or writes, one byte of the mapping.
fn touch(mapping: &Mapping, at: usize, write: bool) -> Ended {
    child(&[], || {
        if write {
            mapping.set(at, b"x")
        } else {
            drop(mapping.get(at, 1))
        }
        0
    })
    .wait()
}

pub const CASES: &[Case] = &[
    case("who may map what", |s| {
        file("f", b"content");
        for flags in [RDONLY, WRONLY, RDWR, libc::O_PATH, RDWR | libc::O_APPEND, RDWR | libc::O_DIRECT] {
            let f = open("f", flags).expect("opened");
            for kind in [SHARED, PRIVATE, MapFlags::SHARED_VALIDATE] {
                s.part((flags, kind.bits()));
                see!(s; map(&f, 4096, READ, kind, 0); map(&f, 4096, BOTH, kind, 0));
                see!(s; map(&f, 4096, READ | ProtFlags::EXEC, kind, 0));
            }
            see!(s; map(&f, 0, READ, SHARED, 0); map(&f, 4096, READ, SHARED, 5); map(&f, 4096, READ, SHARED, 1 << 30));
        }
        see!(s; map(&open(".", RDONLY).expect("opened"), 4096, READ, SHARED, 0));
        // MAP_SYNC is for persistent memory.
        let f = open("f", RDWR).expect("opened");
        see!(s; map(&f, 4096, BOTH, MapFlags::from_bits_retain(0x80003), 0));
    }),
    case("stores and reads are one", |s| {
        let f = file("f", &[b'.'; 10_000]);
        let other = open("f", RDWR).expect("opened");
        let (a, b) =
            (map(&f, 10_000, BOTH, SHARED, 0).expect("mapped"), map(&other, 8192, BOTH, SHARED, 0).expect("mapped"));
        a.set(4090, b"across pages");
        see!(s; pread(&other, 20, 4088); b.get(4088, 16); content("f"); pwrite(&other, b"written", 4094));
        see!(s; a.get(4088, 16); b.get(4088, 16));
        a.set(0, b"begin");
        see!(s; a.sync(MsyncFlags::SYNC); a.sync(MsyncFlags::ASYNC); a.sync(MsyncFlags::INVALIDATE); pread(&f, 9, 0));
        see!(s; fsync(&f));
        a.set(9_995, b"tail!");
        drop(a);
        see!(s; content("f"); b.get(0, 9); drop(b); content("f"));
        drop((f, other));
        see!(s; content("f"); lstat("f"));
    }),
    case("a mapping outlives its descriptor and its name", |s| {
        let f = file("f", &[b'.'; 5000]);
        let mapping = map(&f, 5000, BOTH, SHARED, 0).expect("mapped");
        let reader = open("f", RDONLY).expect("opened");
        drop(f);
        mapping.set(10, b"after close");
        see!(s; pread(&reader, 30, 0); rename("f", "g"); content("g"); unlink("g"));
        mapping.set(20, b"after unlink");
        see!(s; pread(&reader, 40, 0); mapping.get(0, 40); mapping.sync(MsyncFlags::SYNC));
    }),
    case("a private mapping keeps its stores", |s| {
        let f = file("f", &[b'.'; 5000]);
        let (mine, shared) =
            (map(&f, 5000, BOTH, PRIVATE, 0).expect("mapped"), map(&f, 5000, READ, SHARED, 0).expect("mapped"));
        mine.set(0, b"private");
        see!(s; content("f"); shared.get(0, 8); mine.get(0, 8); pwrite(&f, b"WRITTEN", 0); mine.get(0, 8));
        see!(s; shared.get(0, 8));
        see!(s; pwrite(&f, b"later", 4500); mine.get(4500, 6); lstat("f"));
    }),
    case("what is cut off is gone", |s| {
        let f = file("f", &[b'a'; 12_288]);
        let mapping = map(&f, 12_288, BOTH, SHARED, 0).expect("mapped");
        see!(s; touch(&mapping, 12_287, false); ftruncate(&f, 5000); touch(&mapping, 4999, false));
        see!(s; touch(&mapping, 8191, false));
        see!(s; touch(&mapping, 8192, false); touch(&mapping, 12_000, true); mapping.get(4995, 10));
        see!(s; content("f"); ftruncate(&f, 12_288); pread(&f, 20, 4995); mapping.get(4995, 20));
        see!(s; touch(&mapping, 12_000, true); content("f"));
        see!(s; truncate("f", 0); touch(&mapping, 0, false); pwrite(&f, b"new", 0); touch(&mapping, 0, false));
        see!(s; mapping.get(0, 5));
        see!(s; open("f", WRONLY | libc::O_TRUNC); touch(&mapping, 0, true));
    }),
    case("holes in a mapping", |s| {
        let f = file("f", &[b'a'; 20_000]);
        let mapping = map(&f, 20_000, BOTH, SHARED, 0).expect("mapped");
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        see!(s; mapping.get(4095, 3); fallocate(&f, punch, 4096, 8192); mapping.get(4095, 3); mapping.get(12_287, 3));
        mapping.set(5000, b"filled");
        see!(s; content("f"); fallocate(&f, libc::FALLOC_FL_ZERO_RANGE, 4990, 13); mapping.get(4985, 30); content("f"));
        let g = file("g", &[b'g'; 20_000]);
        see!(s; copy_range(&g, 0, &f, 100, 10_000); mapping.get(95, 10); mapping.get(10_095, 10));
        see!(s; copy_range(&f, 0, &g, 0, 20_000); content("g"));
        mapping.set(0, b"stored before the copy");
        see!(s; copy_range(&f, 0, &g, 0, 4096); pread(&g, 30, 0));
    }),
    case("which times a store moves", |s| {
        let f = file("f", &[b'a'; 5000]);
        let mapping = map(&f, 5000, BOTH, SHARED, 0).expect("mapped");
        fsync(&f).expect("synced");
        utimens("f", (1000, 0), (1000, 0)).expect("set");
        mapping.set(0, b"x");
        see!(s; mapping.sync(MsyncFlags::SYNC); times_of("f").map(|t| t[1].0 > 1_600_000_000));
        fsync(&f).expect("synced");
        utimens("f", (1000, 0), (1000, 0)).expect("set");
        see!(s; mapping.get(0, 1); times_of("f").map(|t| t[1]));
    }),
    case("a mapping is seen by a child, and its stores by us", |s| {
        let f = file("f", &[b'a'; 5000]);
        let mapping = map(&f, 5000, BOTH, SHARED, 0).expect("mapped");
        see!(s; touch(&mapping, 4000, true); mapping.get(3999, 3); content("f"));
    }),
];
