//! The operations of random sequences: what they are, how they are chosen, and what each does in the directory that the
//! thread works in. Few names, few descriptors and sizes around pages, so that operations meet.

use super::mappings;
use super::sys::*;
use proptest::prelude::*;
use proptest::sample::select;
use std::fmt;

/// Open files at a time.
const SLOTS: usize = 4;
/// A modification time that only utimensat sets; what is changed later gets another.
const OLD: i64 = 1_000_000_000;
/// More than any file gets, so that a content is read whole.
const ALL: usize = 1 << 20;

type Name = &'static str;

/// A number that is shown by name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Flags(i32, &'static str);

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.1)
    }
}

macro_rules! flags {
    ($($first:ident $(| $more:ident)*),+ $(,)?) => {
        vec![$(Flags(libc::$first $(| libc::$more)*, stringify!($first $(| $more)*))),+]
    };
}

#[derive(Clone, Debug)]
pub enum Op {
    Open { slot: usize, name: Name, flags: Flags, mode: Bits },
    Close { slot: usize },
    Pwrite { slot: usize, at: u64, length: usize, fill: char },
    Write { slot: usize, length: usize, fill: char },
    Pread { slot: usize, at: u64, length: usize },
    Append { name: Name, length: usize, fill: char },
    Store { slot: usize, at: u64, length: usize, fill: char },
    Content { name: Name },
    Truncate { name: Name, size: u64 },
    Ftruncate { slot: usize, size: u64 },
    Fallocate { slot: usize, mode: Flags, at: u64, length: u64 },
    Copy { from: usize, from_at: u64, to: usize, to_at: u64, length: usize },
    Seek { slot: usize, at: u64, whence: Flags },
    Fsync { slot: usize },
    Mkdir { name: Name, mode: Bits },
    Rmdir { name: Name },
    Unlink { name: Name },
    Link { old: Name, new: Name },
    LinkOpen { slot: usize, new: Name },
    Symlink { target: Name, name: Name },
    Mknod { name: Name, mode: Bits },
    Rename { old: Name, new: Name, flags: u32 },
    Chmod { name: Name, mode: Bits },
    Fchmod { slot: usize, mode: Bits },
    Chown { name: Name, uid: Option<u32>, gid: Option<u32> },
    Age { name: Name },
    Setxattr { name: Name, attribute: Name, length: usize },
    Removexattr { name: Name, attribute: Name },
    Stat { name: Name },
    Fstat { slot: usize },
    List { name: Name },
    Readlink { name: Name },
}

fn name() -> impl Strategy<Value = Name> {
    prop_oneof![
        8 => select(vec!["a", "b", "d/a"]),
        6 => select(vec!["c", "d", "e", "d/b", "e/a", "d/e"]),
        1 => select(vec!["d/e/a", "."]),
    ]
}

/// Where directories, or links, are more often than elsewhere.
fn folder() -> impl Strategy<Value = Name> {
    select(vec!["d", "d", "e", "d/e", "c", "."])
}

fn linked() -> impl Strategy<Value = Name> {
    select(vec!["c", "c", "d/b", "e/a"])
}

fn offset() -> impl Strategy<Value = u64> {
    select(vec![0, 1, 100, 4095, 4096, 4097, 8192, 10_000, 65_536, 70_000])
}

fn length() -> impl Strategy<Value = usize> {
    select(vec![0usize, 1, 10, 4095, 4096, 4097, 9000, 70_000])
}

/// Permission bits, shown as people write them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Bits(u32);

impl fmt::Debug for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#o}", self.0)
    }
}

/// One operation; what changes content comes more often. Set-user-id bits only where a write by root leaves them as it
/// does natively.
pub fn op(set_id: bool) -> impl Strategy<Value = Op> {
    let permissions = move || {
        let more = if set_id { vec![0o4755, 0o2775] } else { vec![] };
        let bits = [vec![0o644, 0o600, 0o755, 0o777, 0o1777, 0o400, 0], more].concat();
        select(bits).prop_map(Bits)
    };
    let slot = || 0..SLOTS;
    let fill = || select(vec!['x', 'y', 'z']);
    let attribute = || select(vec!["user.a", "user.b"]);
    let owner = || select(vec![None, Some(0), Some(1234)]);
    let opens = || {
        select(flags![
            O_RDONLY,
            O_RDWR,
            O_RDWR | O_CREAT,
            O_RDWR | O_CREAT | O_EXCL,
            O_RDWR | O_CREAT | O_TRUNC,
            O_WRONLY,
            O_WRONLY | O_APPEND,
            O_RDWR | O_TRUNC,
            O_RDONLY | O_NOFOLLOW,
            O_RDONLY | O_DIRECTORY,
            O_PATH,
            O_RDWR | O_APPEND | O_CREAT,
        ])
    };
    let allocations = || {
        select(vec![
            Flags(0, "allocate"),
            Flags(libc::FALLOC_FL_KEEP_SIZE, "allocate, keep size"),
            Flags(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, "punch"),
            Flags(libc::FALLOC_FL_ZERO_RANGE, "zero"),
            Flags(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, "zero, keep size"),
        ])
    };
    let bytes = prop_oneof![
        4 => (slot(), offset(), length(), fill())
            .prop_map(|(slot, at, length, fill)| Op::Pwrite { slot, at, length, fill }),
        2 => (slot(), length(), fill()).prop_map(|(slot, length, fill)| Op::Write { slot, length, fill }),
        3 => (slot(), offset(), length()).prop_map(|(slot, at, length)| Op::Pread { slot, at, length }),
        1 => (name(), length(), fill()).prop_map(|(name, length, fill)| Op::Append { name, length, fill }),
        3 => (slot(), offset(), length(), fill())
            .prop_map(|(slot, at, length, fill)| Op::Store { slot, at, length, fill }),
        2 => name().prop_map(|name| Op::Content { name }),
        2 => (name(), offset()).prop_map(|(name, size)| Op::Truncate { name, size }),
        3 => (slot(), offset()).prop_map(|(slot, size)| Op::Ftruncate { slot, size }),
        3 => (slot(), allocations(), offset(), 1..20_000u64)
            .prop_map(|(slot, mode, at, length)| Op::Fallocate { slot, mode, at, length }),
        2 => (slot(), offset(), slot(), offset(), length())
            .prop_map(|(from, from_at, to, to_at, length)| Op::Copy { from, from_at, to, to_at, length }),
        2 => (slot(), offset(), select(flags![SEEK_DATA, SEEK_HOLE, SEEK_SET, SEEK_END]))
            .prop_map(|(slot, at, whence)| Op::Seek { slot, at, whence }),
        1 => slot().prop_map(|slot| Op::Fsync { slot }),
    ];
    let names = prop_oneof![
        3 => (folder(), permissions()).prop_map(|(name, mode)| Op::Mkdir { name, mode: Bits(mode.0 | 0o700) }),
        1 => folder().prop_map(|name| Op::Rmdir { name }),
        2 => name().prop_map(|name| Op::Unlink { name }),
        2 => (name(), name()).prop_map(|(old, new)| Op::Link { old, new }),
        1 => (slot(), name()).prop_map(|(slot, new)| Op::LinkOpen { slot, new }),
        1 => (name(), linked()).prop_map(|(target, name)| Op::Symlink { target, name }),
        1 => (name(), select(vec![libc::S_IFREG, libc::S_IFIFO]))
            .prop_map(|(name, kind)| Op::Mknod { name, mode: Bits(kind | 0o644) }),
        3 => (name(), name(), select(vec![0, 0, libc::RENAME_NOREPLACE, libc::RENAME_EXCHANGE]))
            .prop_map(|(old, new, flags)| Op::Rename { old, new, flags }),
    ];
    let attributes = prop_oneof![
        2 => (name(), permissions()).prop_map(|(name, mode)| Op::Chmod { name, mode }),
        1 => (slot(), permissions()).prop_map(|(slot, mode)| Op::Fchmod { slot, mode }),
        1 => (name(), owner(), owner()).prop_map(|(name, uid, gid)| Op::Chown { name, uid, gid }),
        3 => name().prop_map(|name| Op::Age { name }),
        1 => (name(), attribute(), select(vec![0usize, 5, 2000]))
            .prop_map(|(name, attribute, length)| Op::Setxattr { name, attribute, length }),
        1 => (name(), attribute()).prop_map(|(name, attribute)| Op::Removexattr { name, attribute }),
    ];
    let looks = prop_oneof![
        2 => name().prop_map(|name| Op::Stat { name }),
        2 => slot().prop_map(|slot| Op::Fstat { slot }),
        1 => folder().prop_map(|name| Op::List { name }),
        1 => linked().prop_map(|name| Op::Readlink { name }),
    ];
    let opening = prop_oneof![
        8 => (slot(), name(), opens(), permissions())
            .prop_map(|(slot, name, flags, mode)| Op::Open { slot, name, flags, mode }),
        2 => slot().prop_map(|slot| Op::Close { slot }),
    ];
    prop_oneof![5 => bytes, 4 => names, 2 => attributes, 2 => looks, 4 => opening]
}

/// What the operations of one sequence have open.
pub struct World {
    slots: [Option<Fd>; SLOTS],
    /// Space was reserved: where data begins is now also a matter of what happens to be cached.
    reserved: bool,
}

impl World {
    /// What every sequence begins with: two files and a directory with a third, the files open.
    pub fn furnished() -> World {
        let first = file("a", &filled(10_000, 'a'));
        let second = file("b", b"content of b");
        mkdir("d", 0o755).expect("made");
        let third = file("d/a", b"");
        World { slots: [Some(first), Some(second), Some(third), None], reserved: false }
    }

    /// The open file of this slot, or of the next one that has any.
    fn open_at(&self, slot: usize) -> Option<&Fd> {
        self.slots.iter().cycle().skip(slot).take(SLOTS).flatten().next()
    }

    /// What the operation gives, in words.
    pub fn apply(&mut self, op: &Op) -> String {
        let say = |result: &dyn fmt::Debug| format!("{result:?}");
        match *op {
            Op::Open { slot, name, flags, mode } => {
                self.slots[slot] = None;
                let opened = open_mode(name, flags.0 | libc::O_NONBLOCK, mode.0);
                let said = say(&opened);
                self.slots[slot] = opened.ok();
                said
            }
            Op::Close { slot } => say(&self.slots[slot].take().map(drop)),
            Op::Append { name, length, fill } => say(&open(name, libc::O_WRONLY | libc::O_APPEND | libc::O_NONBLOCK)
                .and_then(|f| write(&f, &filled(length, fill)))),
            Op::Content { name } if lstat(name).is_ok_and(|s| s.mode & libc::S_IFMT == libc::S_IFREG) => {
                say(&content(name))
            }
            Op::Content { .. } => "no file".into(),
            Op::Truncate { name, size } => say(&truncate(name, size as i64)),
            Op::Mkdir { name, mode } => say(&mkdir(name, mode.0)),
            Op::Rmdir { name } => say(&rmdir(name)),
            Op::Unlink { name } => say(&unlink(name)),
            Op::Link { old, new } => say(&link(old, new)),
            Op::Symlink { target, name } => say(&symlink(target, name)),
            Op::Mknod { name, mode } => say(&mknod(name, mode.0, 0)),
            Op::Rename { old, new, flags } => say(&rename_with(old, new, flags)),
            Op::Chmod { name, mode } => say(&chmod(name, mode.0)),
            Op::Chown { name, uid, gid } => say(&lchown(name, uid, gid)),
            Op::Age { name } => say(&utimens(name, OMIT, (OLD, 0))),
            Op::Setxattr { name, attribute, length } => say(&setxattr(name, attribute, &filled(length, 'v'), 0)),
            Op::Removexattr { name, attribute } => say(&removexattr(name, attribute)),
            Op::Stat { name } => say(&(lstat(name), times_of(name).map(|t| t[1] == (OLD, 0)))),
            Op::List { name } => say(&list(name)),
            Op::Readlink { name } => say(&readlink(name, 100)),
            Op::Copy { from, from_at, to, to_at, length } => match (self.open_at(from), self.open_at(to)) {
                (Some(from), Some(to)) => say(&copy_range(from, from_at, to, to_at, length)),
                _ => "closed".into(),
            },
            Op::Pwrite { slot, .. }
            | Op::Write { slot, .. }
            | Op::Pread { slot, .. }
            | Op::Store { slot, .. }
            | Op::Ftruncate { slot, .. }
            | Op::Fallocate { slot, .. }
            | Op::Seek { slot, .. }
            | Op::Fsync { slot }
            | Op::LinkOpen { slot, .. }
            | Op::Fchmod { slot, .. }
            | Op::Fstat { slot } => match self.open_at(slot) {
                None => "closed".into(),
                Some(fd) => {
                    let said = on_open(fd, op, self.reserved);
                    let punches = matches!(op, Op::Fallocate { mode, .. } if mode.1 == "punch");
                    self.reserved |= matches!(op, Op::Fallocate { .. }) && !punches;
                    said
                }
            },
        }
    }
}

fn on_open(fd: &Fd, op: &Op, reserved: bool) -> String {
    let say = |result: &dyn fmt::Debug| format!("{result:?}");
    match *op {
        Op::Pwrite { at, length, fill, .. } => say(&pwrite(fd, &filled(length, fill), at as i64)),
        Op::Write { length, fill, .. } => say(&(write(fd, &filled(length, fill)), lseek(fd, 0, libc::SEEK_CUR))),
        Op::Pread { at, length, .. } => say(&pread(fd, length, at as i64)),
        Op::Store { at, length, fill, .. } => say(&store(fd, at, length, fill)),
        Op::Ftruncate { size, .. } => say(&ftruncate(fd, size as i64)),
        Op::Fallocate { mode, at, length, .. } => say(&fallocate(fd, mode.0, at as i64, length as i64)),
        Op::Seek { .. } if fstat(fd).is_ok_and(|s| s.mode & libc::S_IFMT == libc::S_IFDIR) => {
            "each file system has its own positions in a directory".into()
        }
        Op::Seek { at, whence, .. } => {
            let sought = lseek(fd, at as i64, whence.0);
            if reserved && whence.0 >= libc::SEEK_DATA { say(&holds(fd, at, whence, sought)) } else { say(&sought) }
        }
        Op::Fsync { .. } => say(&fsync(fd)),
        Op::LinkOpen { new, .. } => say(&link_follow(fd.path(), new)),
        Op::Fchmod { mode, .. } => say(&fchmod(fd, mode.0)),
        _ => say(&fstat(fd)),
    }
}

fn filled(length: usize, fill: char) -> Vec<u8> {
    vec![fill as u8; length]
}

fn list(name: &str) -> R<Vec<std::ffi::OsString>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(name)? {
        names.push(entry?.file_name());
    }
    names.sort();
    Ok(names)
}

/// Through a shared mapping, as far as the file reaches.
fn store(fd: &Fd, at: u64, length: usize, fill: char) -> R<&'static str> {
    let page = at / 4096 * 4096;
    let mapping = mappings::map(fd, (at - page) as usize + length.max(1), mappings::BOTH, mappings::SHARED, page)?;
    if fstat(fd)?.size < (at + length as u64) as i64 {
        return Ok("beyond the end");
    }
    mapping.set((at - page) as usize, &filled(length, fill));
    Ok("stored")
}

/// Whether what is said to be a hole holds nothing, which is all that can be relied on where space is reserved.
fn holds(fd: &Fd, at: u64, whence: Flags, sought: R<i64>) -> R<&'static str> {
    let size = fstat(fd)?.size;
    let end = match (whence.0 == libc::SEEK_DATA, sought) {
        (true, Ok(data)) => data,
        (true, Err(Errno(libc::ENXIO))) => size,
        (false, Ok(hole)) if hole >= at as i64 && hole <= size => return Ok("plausible"),
        (false, Err(Errno(libc::ENXIO))) if at as i64 >= size => return Ok("plausible"),
        (_, Err(other)) => return Err(other),
        (false, Ok(_)) => return Ok("a hole beyond the end"),
    };
    let hole = pread(fd, ALL, at as i64)?.0;
    let length = usize::try_from(end - at as i64).unwrap_or(0).min(hole.len());
    Ok(if hole[..length].iter().all(|b| *b == 0) { "plausible" } else { "data in a hole" })
}
