//! Listing directories: what is in them, where a listing stands, and what comes and goes meanwhile.

use super::stage::{Case, case, see};
use super::sys::*;
use libc::{SEEK_CUR, SEEK_SET};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, PartialEq, Eq)]
struct Entry {
    number: u64,
    next: i64,
    kind: u8,
    name: String,
}

/// The next entries that fit into `room` bytes, as getdents64 gives them.
fn next(fd: &Fd, room: usize) -> R<Vec<Entry>> {
    let mut buffer = vec![0u8; room];
    // SAFETY: the buffer has the room that the kernel is told of.
    let length = checked(unsafe { libc::syscall(libc::SYS_getdents64, fd.raw(), buffer.as_mut_ptr(), room) })?;
    let mut rest = &buffer[..length as usize];
    let mut entries = Vec::new();
    while !rest.is_empty() {
        // struct linux_dirent64: number, offset, length, kind, name.
        let word = |at: usize| u64::from_le_bytes(rest[at..at + 8].try_into().expect("eight bytes"));
        let size = usize::from(u16::from_le_bytes([rest[16], rest[17]]));
        let name = rest[19..size].split(|b| *b == 0).next().unwrap_or_default();
        let name = String::from_utf8_lossy(name).into_owned();
        entries.push(Entry { number: word(0), next: word(8) as i64, kind: rest[18], name });
        rest = &rest[size..];
    }
    Ok(entries)
}

/// All that is left.
fn rest(fd: &Fd, room: usize) -> Vec<Entry> {
    let mut all = Vec::new();
    loop {
        let some = next(fd, room).expect("listed");
        if some.is_empty() {
            return all;
        }
        all.extend(some);
        assert!(all.len() < 100_000, "a listing without an end");
    }
}

fn names(entries: &[Entry]) -> BTreeSet<String> {
    entries.iter().map(|entry| entry.name.clone()).collect()
}

fn here() -> Fd {
    open(".", RDONLY | libc::O_DIRECTORY).expect("opened")
}

fn fill(count: usize) {
    for n in 0..count {
        open(format!("{}{n:04}", "name".repeat(1 + n % 20)), RDWR | CREAT).expect("made");
    }
}

pub const CASES: &[Case] = &[
    case("kinds and numbers", |s| {
        file("f", b"x");
        mkdir("d", 0o755).expect("made");
        mkdir("d/sub", 0o755).expect("made");
        symlink("f", "l").expect("made");
        mknod("p", libc::S_IFIFO | 0o644, 0).expect("made");
        mknod("s", libc::S_IFSOCK | 0o644, 0).expect("made");
        link("f", "g").expect("linked");
        for folder in [".", "d", "d/sub"] {
            // The first listing brings attributes with it, a later one only names.
            for round in 0..3 {
                s.part((folder, round));
                let entries = rest(&open(folder, RDONLY).expect("opened"), 4096);
                let kinds: BTreeMap<_, _> = entries.iter().map(|e| (e.name.clone(), e.kind)).collect();
                see!(s; kinds);
                // As stat says, `.` and `..` among them; a case's own folder lies in the root of the mount.
                let said = |e: &Entry| ino(format!("{folder}/{}", e.name)) == Ok(e.number);
                see!(s; entries.iter().filter(|e| !said(e)).map(|e| e.name.clone()).collect::<Vec<_>>());
            }
        }
    }),
    case("small rooms and no room", |s| {
        fill(100);
        for room in [0, 10, 24, 32, 64, 280, 1000, 32_768] {
            s.part(room);
            let dir = here();
            see!(s; next(&dir, room).map(|e| e.is_empty()));
        }
        let whole = names(&rest(&here(), 32_768));
        for room in [280, 512, 4096] {
            see!(s; names(&rest(&here(), room)) == whole; rest(&here(), room).len());
        }
        see!(s; whole; next(&file("f", b"x"), 1000).map(|e| e.len()));
        see!(s; next(&open(".", libc::O_PATH).expect("opened"), 1000).map(|e| e.len()));
    }),
    case("each position continues with the same rest", |s| {
        fill(300);
        let entries = rest(&here(), 4096);
        let dir = here();
        let mut wrong = Vec::new();
        for (n, entry) in entries.iter().enumerate() {
            assert_eq!(lseek(&dir, entry.next, SEEK_SET), Ok(entry.next));
            let left = rest(&dir, 32_768);
            if left.iter().map(|e| &e.name).ne(entries[n + 1..].iter().map(|e| &e.name)) {
                wrong.push((n, left.len()));
            }
        }
        see!(s; entries.len(); wrong);
        // And where a listing stands is where lseek says.
        let dir = here();
        let mut wrong = 0;
        loop {
            let some = next(&dir, 1000).expect("listed");
            let Some(last) = some.last() else { break };
            wrong += u32::from(lseek(&dir, 0, SEEK_CUR) != Ok(last.next));
        }
        see!(s; wrong; lseek(&dir, 0, SEEK_SET); rest(&dir, 4096).len(); lseek(&dir, -1, SEEK_SET); lseek(&dir, 0, 9));
    }),
    case("what comes and goes while listing", |s| {
        fill(300);
        let dir = here();
        let first = next(&dir, 2000).expect("listed");
        let gone: Vec<_> =
            rest(&here(), 32_768).into_iter().rev().take(50).filter(|e| e.kind == libc::DT_REG).collect();
        for entry in &gone {
            unlink(&entry.name).expect("removed");
        }
        // What the first call already read ahead may be handed out still; what stays is handed out once.
        let left = rest(&dir, 2000);
        let mut seen: Vec<_> =
            first.iter().chain(&left).map(|e| e.name.clone()).filter(|n| !gone.iter().any(|g| g.name == *n)).collect();
        seen.sort();
        let all = seen.len();
        seen.dedup();
        see!(s; all - seen.len(); seen.len() + gone.len());
        see!(s; open("late", RDWR | CREAT); lseek(&dir, 0, SEEK_SET); names(&rest(&dir, 4096)).contains("late"));
        see!(s; rename("late", "later"); lseek(&dir, 0, SEEK_SET); names(&rest(&dir, 4096)).contains("later"));
        see!(s; lseek(&dir, 0, SEEK_SET); names(&rest(&dir, 4096)).contains("late"));
        let other = here();
        see!(s; unlink("later"); names(&rest(&other, 4096)).contains("later"));
    }),
    case("removing what is listed, as rm -r does", |s| {
        mkdir("d", 0o755).expect("made");
        rustix::process::chdir("d").expect("entered");
        fill(700);
        let dir = here();
        let mut removed = 0;
        loop {
            let some = next(&dir, 3000).expect("listed");
            if some.is_empty() {
                break;
            }
            for entry in some.iter().filter(|e| e.kind == libc::DT_REG) {
                removed += 1;
                unlink(&entry.name).expect("removed");
            }
        }
        rustix::process::chdir("..").expect("left");
        see!(s; removed; rmdir("d"));
    }),
    case("a directory that is gone", |s| {
        mkdir("d", 0o755).expect("made");
        file("d/f", b"x");
        let dir = open("d", RDONLY).expect("opened");
        see!(s; unlink("d/f"); rmdir("d"); next(&dir, 1000).map(|e| names(&e)); lseek(&dir, 0, SEEK_SET));
        see!(s; next(&dir, 1000).map(|e| names(&e)));
        see!(s; fstat(&dir).map(|d| d.nlink); fchmod(&dir, 0o700); fsync(&dir));
    }),
    case("a folder that may be read and not entered", |s| {
        // As seen: without root the names that came before the last one that could be looked up were left out.
        mkdir("d", 0o755).expect("made");
        for n in 0..50 {
            open(format!("d/f{n}"), RDWR | CREAT).expect("made");
        }
        mkdir("d/e", 0o755).expect("made");
        for mode in [0o400, 0o500, 0o300, 0o700] {
            s.part(format!("{mode:o}"));
            see!(s; chmod("d", mode));
            for _ in 0..2 {
                let entries = open("d", RDONLY).map(|dir| rest(&dir, 32_768));
                see!(s; entries.map(|all| all.into_iter().map(|e| (e.name, e.kind)).collect::<BTreeMap<_, _>>()));
                see!(s; lstat("d/f7").map(|f| f.mode); open("d/f7", RDONLY));
            }
        }
    }),
    case("the C library's view", |s| {
        fill(500);
        let list = || -> BTreeSet<_> {
            std::fs::read_dir(".").expect("listed").map(|e| e.expect("an entry").file_name()).collect()
        };
        see!(s; list().len(); list() == list());
        for n in (0..500).step_by(7) {
            unlink(format!("{}{n:04}", "name".repeat(1 + n % 20))).expect("removed");
        }
        see!(s; list());
    }),
];
