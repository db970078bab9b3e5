//! Bytes: every way to read and write them, at and past every end, and what moves them between files.

use super::stage::{Case, case, root_case, see};
use super::sys::*;
use libc::{
    FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_INSERT_RANGE, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE,
    FALLOC_FL_UNSHARE_RANGE, FALLOC_FL_ZERO_RANGE, O_APPEND, O_DIRECT, O_TRUNC, SEEK_CUR, SEEK_DATA, SEEK_END,
    SEEK_HOLE, SEEK_SET,
};

/// Where a page ends, and around.
const EDGES: [i64; 9] = [0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 100_000];

fn noise(length: usize) -> Vec<u8> {
    crate::harness::noise(7, length)
}

/// Memory that begins at a page, and the same one byte later.
fn aligned(work: impl FnOnce(&mut [u8], usize)) {
    let mut memory = vec![0; 5 * 4096];
    let start = memory.as_ptr().align_offset(4096);
    work(&mut memory, start);
}

fn direct_read(file: &Fd, length: usize, offset: u64, shift: usize) -> R<Bytes> {
    let mut read = Err(Errno(0));
    aligned(|memory, start| {
        let buffer = &mut memory[start + shift..start + shift + length];
        read = rustix::io::pread(file, &mut *buffer, offset).map(|n| Bytes(buffer[..n].to_vec())).map_err(Errno::from);
    });
    read
}

fn direct_write(file: &Fd, length: usize, offset: u64, shift: usize) -> R<usize> {
    let mut written = Err(Errno(0));
    aligned(|memory, start| {
        let buffer = &mut memory[start + shift..start + shift + length];
        buffer.fill(b'w');
        written = rustix::io::pwrite(file, buffer, offset).map_err(Errno::from);
    });
    written
}

/// Where data and holes begin, from the beginning to the end.
fn map_of(file: &Fd) -> Vec<R<i64>> {
    let mut map = Vec::new();
    let mut at = 0;
    while map.len() < 40 {
        let data = lseek(file, at, SEEK_DATA);
        map.push(data);
        let Ok(data) = data else { break };
        let hole = lseek(file, data, SEEK_HOLE);
        map.push(hole);
        let Ok(hole) = hole else { break };
        at = hole;
    }
    map
}

pub const CASES: &[Case] = &[
    case("reads around every edge", |s| {
        let f = file("f", &noise(8192));
        for offset in EDGES {
            for length in [0, 1, 4096, 5000, 1 << 20] {
                s.part((offset, length));
                see!(s; pread(&f, length, offset); preadv2(&f, length, offset, 0));
            }
        }
        s.part("errors");
        see!(s; pread(&f, 1, -1); pread(&f, 1, i64::MAX); pread(&f, 1, i64::MIN));
        see!(s; pread(&open("f", WRONLY).expect("opened"), 1, 0));
        see!(s; pread(&open(".", RDONLY).expect("opened"), 1, 0); read(&open(".", RDONLY).expect("opened"), 1));
        see!(s; pread(&open("f", libc::O_PATH).expect("opened"), 1, 0); read(&f, 3); lseek(&f, 0, SEEK_CUR));
        see!(s; read(&f, 1 << 20));
        see!(s; read(&f, 1); lseek(&f, 0, SEEK_CUR));
    }),
    case("writes around every edge", |s| {
        for offset in EDGES {
            for length in [0, 1, 4096, 5000, 300_000] {
                s.part((offset, length));
                let f = open("f", RDWR | CREAT | O_TRUNC).expect("opened");
                see!(s; pwrite(&f, &noise(5000), 0); pwrite(&f, &noise(length), offset); fstat(&f); content("f"));
                see!(s; pwritev2(&f, &noise(length), offset + 1, 0); content("f"));
            }
        }
        s.part("errors");
        let f = file("g", b"content");
        see!(s; pwrite(&f, b"x", -1); pwrite(&f, b"x", i64::MAX); pwrite(&f, b"x", i64::MIN); pwrite(&f, b"", -1));
        see!(s; pwrite(&open("g", RDONLY).expect("opened"), b"x", 0));
        see!(s; pwrite(&open(".", RDONLY).expect("opened"), b"x", 0));
        see!(s; write(&f, b"12"); lseek(&f, 0, SEEK_CUR); write(&f, b"34"); content("g"); write(&f, b""));
        see!(s; lseek(&f, 0, SEEK_CUR));
        // Larger than the largest file of any file system that this may run on.
        see!(s; pwrite(&f, b"x", i64::MAX - 1); fstat(&f));
    }),
    case("vectors and their flags", |s| {
        // HIPRI, DSYNC, SYNC, APPEND, one that nobody has, and two at once.
        for flag in [0, 1, 2, 4, 16, 1 << 30, 2 | 16] {
            s.part(flag);
            let f = open("f", RDWR | CREAT | O_TRUNC).expect("opened");
            pwrite(&f, b"0123456789", 0).expect("written");
            see!(s; pwritev2(&f, b"abcdef", 2, flag); pwritev2(&f, b"xyz", -1, flag); lseek(&f, 0, SEEK_CUR));
            see!(s; content("f"));
            see!(s; preadv2(&f, 6, 2, flag); preadv2(&f, 6, -1, flag); lseek(&f, 0, SEEK_CUR));
        }
    }),
    case("flags of vectors that FUSE does not carry", |s| {
        let f = file("f", b"0123456789");
        fsync(&f).expect("synced");
        let _ = content("f");
        let (nowait, noappend, atomic, dontcache) = (8, 32, 64, 128);
        see!(s; preadv2(&f, 6, 2, nowait); preadv2(&f, 6, 20, nowait));
        see!(s; pwritev2(&f, b"abcdef", 0, nowait); pwritev2(&f, b"abcdef", 0, atomic));
        see!(s; pwritev2(&f, b"abcdef", 0, dontcache); preadv2(&f, 6, 0, dontcache));
        see!(s; pwritev2(&f, b"XYZ", 1, noappend); content("f").is_ok_and(|c| c.0.len() == 10));
        let append = open("f", RDWR | O_APPEND).expect("opened");
        see!(s; pwritev2(&append, b"abcdef", 0, noappend); size("f"));
    }),
    case("several who append", |s| {
        let f = file("f", b"");
        let all: Vec<_> = (0..4).map(|_| open("f", RDWR | O_APPEND).expect("opened")).collect();
        for round in 0..20 {
            for (n, a) in all.iter().enumerate() {
                see!(s; write(a, format!("{n}{round};").as_bytes()); lseek(a, 0, SEEK_CUR));
            }
        }
        see!(s; content("f"); pwrite(&all[0], b"end", 0); pwrite(&f, b"begin", 0); content("f"); ftruncate(&f, 3));
        see!(s; write(&all[1], b"x"); content("f"));
        see!(s; open("f", WRONLY | O_APPEND | O_TRUNC).map(|f| write(&f, b"new")); content("f"));
    }),
    case("O_APPEND comes and goes", |s| {
        let set = |file: &Fd, flags: i32| {
            let flags = rustix::fs::OFlags::from_bits_retain(flags as u32);
            rustix::fs::fcntl_setfl(file, flags).map_err(Errno::from)
        };
        let f = file("f", b"content");
        see!(s; set(&f, O_APPEND); pwrite(&f, b"end", 0); set(&f, 0); pwrite(&f, b"begin", 0); content("f"));
        let append = open("f", RDWR | O_APPEND).expect("opened");
        see!(s; set(&append, 0); pwrite(&append, b"0", 0); size("f"));
    }),
    case("appends from threads at once", |s| {
        file("f", b"");
        std::thread::scope(|scope| {
            for n in 0..4u8 {
                let f = open("f", WRONLY | O_APPEND).expect("opened");
                scope.spawn(move || (0..200).for_each(|_| assert_eq!(write(&f, &[b'a' + n; 10]), Ok(10))));
            }
        });
        let bytes = content("f").expect("read").0;
        see!(s; bytes.len(); bytes.chunks(10).all(|chunk| chunk.iter().all(|b| *b == chunk[0])));
        see!(s; (0..4u8).map(|n| bytes.iter().filter(|b| **b == b'a' + n).count()).collect::<Vec<_>>());
    }),
    case("holes and data", |s| {
        let f = file("f", b"");
        see!(s; map_of(&f); ftruncate(&f, 1 << 20); map_of(&f); pwrite(&f, &noise(5000), 300_000); map_of(&f));
        see!(s; pwrite(&f, b"x", (1 << 20) - 1); map_of(&f); fsync(&f); map_of(&f); fstat(&f));
        let size = 1 << 20;
        for whence in [SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA, SEEK_HOLE, 5, -1] {
            for offset in [0, 1, -1, 299_008, 300_000, 304_999, 305_000, size - 1, size, size + 1, i64::MIN] {
                s.part((whence, offset));
                see!(s; lseek(&f, 10, SEEK_SET); lseek(&f, offset, whence); lseek(&f, 0, SEEK_CUR));
            }
        }
        s.part("others");
        see!(s; lseek(&open("f", WRONLY).expect("opened"), 0, SEEK_DATA));
        see!(s; lseek(&open("f", libc::O_PATH).expect("opened"), 0, SEEK_DATA));
        // A descriptor's position is its own, and a duplicate's too.
        let other = open("f", RDONLY).expect("opened");
        let twin = Fd(rustix::io::dup(&f).expect("duplicated"));
        see!(s; lseek(&f, 300_000, SEEK_DATA); lseek(&twin, 0, SEEK_CUR); lseek(&other, 0, SEEK_CUR); read(&twin, 5));
        see!(s; lseek(&f, 0, SEEK_CUR));
    }),
    case("fallocate in each mode", |s| {
        let (keep, punch, zero) = (FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE);
        for mode in [0, keep, punch, punch | keep, zero, zero | keep, punch | zero, keep | punch | zero, 1 << 20] {
            for (offset, length) in [
                (0, 0),
                (0, 100),
                (4096, 4096),
                (5000, 10_000),
                (90_000, 30_000),
                (200_000, 5),
                (-1, 5),
                (0, -1),
                (i64::MAX, 1),
            ] {
                s.part((mode, offset, length));
                let f = open("f", RDWR | CREAT | O_TRUNC).expect("opened");
                pwrite(&f, &noise(100_000), 0).expect("written");
                see!(s; fallocate(&f, mode, offset, length); fstat(&f).map(|f| (f.size, f.blocks * 512 >= f.size)));
                see!(s; content("f"));
                see!(s; map_of(&f));
            }
        }
        s.part("others");
        let f = open("f", RDONLY).expect("opened");
        see!(s; fallocate(&f, 0, 0, 1); fallocate(&open(".", RDONLY).expect("opened"), 0, 0, 1));
        see!(s; fallocate(&open("f", WRONLY | O_APPEND).expect("opened"), 0, 0, 200_000); size("f"));
        see!(s; fallocate(&open("f", RDWR).expect("opened"), 0, 1 << 60, 1 << 60));
    }),
    case("fallocate that moves what follows", |s| {
        let f = file("f", &noise(100_000));
        see!(s; fallocate(&f, FALLOC_FL_COLLAPSE_RANGE, 4096, 8192));
        see!(s; fallocate(&f, FALLOC_FL_INSERT_RANGE, 4096, 8192));
        see!(s; fallocate(&f, FALLOC_FL_UNSHARE_RANGE, 4096, 8192));
    }),
    case("copies within a file and across", |s| {
        let a = file("a", &noise(100_000));
        for (from, to, length) in [
            (0, 0, 100_000),
            (0, 0, 0),
            (5, 7, 100),
            (99_990, 0, 100),
            (100_000, 0, 10),
            (200_000, 0, 10),
            (0, 150_000, 10),
            (4096, 8192, 40_960),
            (0, 50_000, usize::MAX >> 1),
        ] {
            s.part((from, to, length));
            let b = open("b", RDWR | CREAT | O_TRUNC).expect("opened");
            pwrite(&b, b"target", 0).expect("written");
            see!(s; copy_range(&a, from, &b, to, length); content("b"); fstat(&b).map(|b| b.size));
            let c = open("c", RDWR | CREAT | O_TRUNC).expect("opened");
            pwrite(&c, &noise(100_000), 0).expect("written");
            see!(s; copy_range(&c, from, &c, to, length); content("c"));
        }
        s.part("errors");
        let b = open("b", RDWR).expect("opened");
        let dir = open(".", RDONLY).expect("opened");
        see!(s; copy_range(&open("a", WRONLY).expect("opened"), 0, &b, 0, 5));
        see!(s; copy_range(&a, 0, &open("b", RDONLY).expect("opened"), 0, 5));
        see!(s; copy_range(&a, 0, &open("b", RDWR | O_APPEND).expect("opened"), 0, 5); copy_range(&dir, 0, &b, 0, 5));
        see!(s; copy_range(&a, 0, &dir, 0, 5));
        see!(s; copy_range(&a, u64::MAX, &b, 0, 5); copy_range(&a, 0, &b, u64::MAX, 5));
        see!(s; copy_range(&a, 0, &b, i64::MAX as u64, 5));
        see!(s; rustix::fs::copy_file_range(&a, None, &b, None, 10).map_err(Errno::from); lseek(&a, 0, SEEK_CUR));
        see!(s; lseek(&b, 0, SEEK_CUR));
        // What was written a moment ago, or only into memory, is copied too.
        see!(s; pwrite(&a, b"fresh", 10); copy_range(&a, 8, &b, 0, 9); content("b").map(|b| b.0.len()));
        see!(s; pread(&b, 9, 0));
        see!(s; ftruncate(&a, 5); copy_range(&a, 0, &b, 0, 100); ftruncate(&a, 50); copy_range(&a, 0, &b, 0, 100));
        see!(s; pread(&b, 60, 0));
    }),
    case("copies to and from another file system", |s| {
        let a = file("a", &noise(10_000));
        let memory = Fd(rustix::fs::memfd_create("warpfs-test", rustix::fs::MemfdFlags::CLOEXEC).expect("memory"));
        see!(s; sendfile(&memory, &a, 10, 5000); pread(&memory, 10_000, 0); sendfile(&a, &memory, 5, 100));
        see!(s; pread(&a, 200, 0));
        see!(s; splice(&memory, 0, &a, 9000, 4000); content("a"); splice(&a, 100, &memory, 0, 4000));
        see!(s; pread(&memory, 9999, 0));
        let null =
            Fd(rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).expect("opened"));
        see!(s; sendfile(&null, &a, 0, 5); copy_range(&null, 0, &a, 0, 5); copy_range(&a, 0, &null, 0, 5));
    }),
    case("sendfile and splice", |s| {
        let (a, b) = (file("a", &noise(300_000)), file("b", b""));
        for (from, to, length) in
            [(0, 0, 1000), (4095, 2, 4098), (299_999, 5, 10), (300_000, 0, 10), (400_000, 0, 10), (0, 400_000, 60_000)]
        {
            s.part((from, to, length));
            see!(s; splice(&a, from, &b, to, length); content("b"); lseek(&b, to as i64, SEEK_SET));
            see!(s; sendfile(&b, &a, from, length); content("b"));
        }
        s.part("errors");
        let append = open("b", WRONLY | O_APPEND).expect("opened");
        see!(s; splice(&a, 0, &append, 0, 10); sendfile(&append, &a, 0, 10); sendfile(&a, &append, 0, 10));
        see!(s; sendfile(&open("b", RDONLY).expect("opened"), &a, 0, 10));
    }),
    case("syncing and advice", |s| {
        let f = file("f", &noise(10_000));
        let (read_only, dir, path) = (open("f", RDONLY), open(".", RDONLY), open("f", libc::O_PATH));
        let all = [
            ("file", &f),
            ("read only", &read_only.expect("opened")),
            ("directory", &dir.expect("opened")),
            ("path", &path.expect("opened")),
        ];
        for (name, fd) in all {
            s.part(name);
            see!(s; fsync(fd); fdatasync(fd); (0..8).map(|advice| fadvise(fd, advice)).collect::<Vec<_>>());
            see!(s; readahead(fd, 0, 4096));
            see!(s; (0..9).map(|flags| sync_range(fd, 0, 4096, flags)).collect::<Vec<_>>(); sync_range(fd, -1, 5, 1));
        }
        s.part("a pipe");
        mknod("p", libc::S_IFIFO | 0o644, 0).expect("made");
        let pipe = open("p", RDWR).expect("opened");
        see!(s; fsync(&pipe); fadvise(&pipe, 1); readahead(&pipe, 0, 1); lseek(&pipe, 0, SEEK_SET));
        see!(s; ftruncate(&pipe, 0); fallocate(&pipe, 0, 0, 1));
    }),
    case("two descriptors see one file", |s| {
        let (a, b) = (file("f", b"0123456789"), open("f", RDWR).expect("opened"));
        see!(s; pwrite(&a, b"abc", 2); pread(&b, 99, 0); pwrite(&b, b"end", 100); fstat(&a); pread(&a, 999, 0));
        see!(s; ftruncate(&b, 4); pread(&a, 99, 0); fstat(&a); pwrite(&a, b"x", 50); pread(&b, 99, 0); size("f"));
        see!(s; open("f", WRONLY | O_TRUNC); pread(&a, 9, 0); fstat(&b); pwrite(&a, b"again", 0); content("f"));
        see!(s; pread(&b, 9, 0));
        let late = open("f", WRONLY).expect("opened");
        see!(s; pwrite(&late, b"LATE", 1); pread(&a, 9, 0); truncate("f", 2); pread(&a, 9, 0); fstat(&late));
    }),
    case("a file without a name", |s| {
        let f = file("f", b"content");
        let again = open("f", RDONLY).expect("opened");
        see!(s; unlink("f"); fstat(&f); fstat(&again); pwrite(&f, b"more", 7); pread(&again, 99, 0); ftruncate(&f, 9));
        see!(s; fstat(&again));
        see!(s; fchmod(&f, 0o600); fchown(&f, None, None); futimens(&f, (1, 2), (3, 4)); fstat(&again); fsync(&f));
        see!(s; fallocate(&f, 0, 0, 9000));
        see!(s; fsetxattr(&f, "user.x", b"1"));
        see!(s; rustix::fs::fgetxattr(&f, "user.x", &mut [0u8; 9][..]).map_err(Errno::from); stat(f.path()));
        see!(s; open(f.path(), RDWR).map(|f| fstat(&f)));
        see!(s; open(again.path(), WRONLY | O_TRUNC); fstat(&f); copy_range(&f, 0, &f, 100, 5); map_of(&f));
        see!(s; link_follow(f.path(), "back"));
        see!(s; truncate(f.path(), 20); chmod(f.path(), 0o644); fstat(&f); setxattr("f", "user.x", b"1", 0));
        see!(s; lstat("f"));
        see!(s; readlink(f.path(), 4096).map(|path| path.ends_with("/f (deleted)")));
        drop(f);
        see!(s; pread(&again, 5, 0); fstat(&again));
    }),
    root_case("a file without a name is given away", |s| {
        let f = file("f", b"content");
        see!(s; unlink("f"); fchown(&f, Some(5), Some(6)); fstat(&f); fchmod(&f, 0o4755); fstat(&f));
        see!(s; fsetxattr(&f, "trusted.x", b"1"));
    }),
    case("O_DIRECT that fits", |s| {
        let f = file("f", &noise(20_000));
        fsync(&f).expect("synced");
        for flags in [0, O_TRUNC, O_APPEND] {
            s.part(flags);
            let direct = open("f", RDWR | O_DIRECT | flags).expect("opened");
            for (offset, length) in [(0, 4096), (4096, 8192), (16_384, 4096), (20_480, 4096), (1 << 20, 4096), (0, 0)] {
                s.part((flags, offset, length));
                see!(s; direct_read(&direct, length, offset, 0); direct_write(&direct, length, offset, 0); fstat(&f));
                see!(s; content("f"));
            }
            see!(s; pwrite(&f, b"buffered", 4090); direct_read(&direct, 8192, 0, 0));
            see!(s; direct_write(&direct, 4096, 4096, 0); pread(&f, 20, 4085));
        }
    }),
    case("O_DIRECT that does not fit", |s| {
        let f = file("f", &noise(20_480));
        fsync(&f).expect("synced");
        let direct = open("f", RDWR | O_DIRECT).expect("opened");
        see!(s; direct_read(&direct, 100, 0, 0).map(|b| b.0.len()));
        see!(s; direct_read(&direct, 4096, 5, 0).map(|b| b.0.len()));
        see!(s; direct_read(&direct, 4096, 0, 1).map(|b| b.0.len()));
        see!(s; direct_write(&direct, 100, 0, 0); direct_write(&direct, 4096, 5, 0); direct_write(&direct, 4096, 0, 1));
    }),
    case("what FUSE has no word for", |s| {
        let (f, g) = (file("f", &noise(10_000)), file("g", b""));
        let statx = |mask: u32| {
            let mask = rustix::fs::StatxFlags::from_bits_retain(mask);
            rustix::fs::statx(rustix::fs::CWD, "f", rustix::fs::AtFlags::empty(), mask).map_err(Errno::from)
        };
        see!(s; statx(0x7ff).map(|x| x.stx_mask & 0x7ff == 0x7ff));
        see!(s; statx(0x800).map(|x| x.stx_mask & 0x800 != 0 && x.stx_btime.tv_sec > 1_600_000_000));
        see!(s; statx(0x2000).map(|x| x.stx_mask & 0x2000 != 0));
        see!(s; open(".", RDWR | libc::O_TMPFILE));
        see!(s; rustix::fs::syncfs(&f).map_err(Errno::from));
        see!(s; rustix::fs::ioctl_getflags(&f).map(|f| f.bits() & 0x10).map_err(Errno::from));
        see!(s; rustix::fs::ioctl_setflags(&g, rustix::fs::IFlags::NODUMP).map_err(Errno::from));
        see!(s; rustix::fs::ioctl_ficlone(&g, &f).map_err(Errno::from));
        // FIONREAD.
        let mut number = 0i32;
        see!(s; ioctl(&f, 0x541B, &raw mut number as usize); number);
        see!(s; lseek(&f, i64::MAX, SEEK_SET));
        // FS_IOC_FIEMAP with room for no extent: fm_length is all, fm_flags FIEMAP_FLAG_SYNC.
        let mut fiemap = [0u64, u64::MAX, 1, 0];
        see!(s; ioctl(&f, 0xC020_660B, fiemap.as_mut_ptr() as usize));
    }),
];
