//! A tree with one of everything that a copy has to keep, and a description of a tree by which two are compared. Called
//! by `copies`.

use crate::harness::*;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file that has a hole in it, and how much of it is hole at the least, in bytes.
pub(super) const SPARSE: (&str, u64) = ("d/sparse", 15 << 20);

/// Makes the tree; an ordinary user's lacks what only root may make.
pub(super) fn make(folder: &Path) {
    let at = |name: &str| folder.join(name);
    for name in ["d/inner/deep", "empty", "sticky"] {
        fs::create_dir_all(at(name)).expect("made");
    }
    let odd = std::ffi::OsStr::from_bytes(b"odd \xff\n name");
    for (i, name) in ["plain", "d/f", "d/inner/large", "d/inner/deep/tool", "empty-file"].iter().enumerate() {
        fs::write(at(name), noise(i as u64, [5000, 1, 3 << 20, 70_000, 0][i])).expect("written");
    }
    fs::write(folder.join(odd), "odd").expect("written");
    fs::write(at(&"n".repeat(255)), "long").expect("written");
    let sparse = File::create(at(SPARSE.0)).expect("created");
    sparse.write_all_at(b"begin", 0).expect("written");
    sparse.write_all_at(b"end", 16 << 20).expect("written");
    fs::hard_link(at("d/f"), at("d/inner/hard")).expect("linked");
    fs::hard_link(at("d/f"), at("harder")).expect("linked");
    symlink("d/f", at("link")).expect("linked");
    symlink("nowhere/at all", at("dangling")).expect("linked");
    rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::from_raw_mode(0o640), 0).expect("made");

    let attribute = |name: &str, key: &str, value: &[u8]| {
        rustix::fs::setxattr(at(name), key, value, rustix::fs::XattrFlags::empty()).expect("set");
    };
    attribute("plain", "user.note", b"a note");
    attribute("plain", "user.binary", &noise(9, 1000));
    attribute("d", "user.of.folder", b"");
    if is_root() {
        attribute("d/inner/large", "trusted.note", b"root's");
        std::os::unix::fs::lchown(at("plain"), Some(1234), Some(4321)).expect("chown");
        std::os::unix::fs::lchown(at("link"), Some(1235), Some(5321)).expect("chown");
        let null = rustix::fs::makedev(1, 3);
        rustix::fs::mknodat(CWD, at("device"), FileType::CharacterDevice, Mode::from_raw_mode(0o600), null)
            .expect("made");
    }
    let uid = rustix::process::geteuid().as_raw();
    run(Command::new("setfacl").arg("-m").arg(format!("u:7:rwx,u:{uid}:r,g:8:rx,m:rx")).arg(at("d/inner/large"))).ok();
    run(Command::new("setfacl").args(["-d", "-m", "u:7:rx,o:-"]).arg(at("d"))).ok();
    for (name, mode) in [("d/inner/deep/tool", 0o4755), ("empty-file", 0o400), ("sticky", 0o1777), ("empty", 0o2750)] {
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).expect("chmod");
    }
    // Times last, the folders' after those of what is in them.
    let mut names: Vec<_> = describe(folder).into_keys().collect();
    names.reverse();
    for (i, name) in names.iter().enumerate() {
        let time = Timespec { tv_sec: 1_000_000_000 + i as i64, tv_nsec: 123_456_789 + i as i64 };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, folder.join(name), &times, AtFlags::SYMLINK_NOFOLLOW).expect("set");
    }
}

/// What a copy has to keep of one file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Described {
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    size: u64,
    device: u64,
    target: Option<PathBuf>,
    /// The first name of the same file.
    same_as: PathBuf,
    content: Option<Vec<u8>>,
    /// Among them the ACLs.
    attributes: BTreeMap<String, Vec<u8>>,
}

/// Everything below `root`, and `root` itself (as the empty name), by name.
pub(super) fn describe(root: &Path) -> BTreeMap<PathBuf, Described> {
    let mut names = vec![PathBuf::new()];
    let mut next = 0;
    while next < names.len() {
        let path = root.join(&names[next]);
        if fs::symlink_metadata(&path).expect("stat").is_dir() {
            let entries = fs::read_dir(&path).expect("listed");
            let found: Vec<_> = entries.map(|e| names[next].join(e.expect("entry").file_name())).collect();
            names.extend(found);
        }
        next += 1;
    }
    names.sort();
    let mut first = HashMap::new();
    names.into_iter().map(|name| (name.clone(), of_one(root, name, &mut first))).collect()
}

fn of_one(root: &Path, name: PathBuf, first: &mut HashMap<(u64, u64), PathBuf>) -> Described {
    let path = if name.as_os_str().is_empty() { root.to_path_buf() } else { root.join(&name) };
    let meta = fs::symlink_metadata(&path).expect("stat");
    let kind = meta.file_type();
    Described {
        mode: meta.mode(),
        owner: (meta.uid(), meta.gid()),
        modified: (meta.mtime(), meta.mtime_nsec()),
        // A folder's is the file system's own affair.
        size: if kind.is_dir() { 0 } else { meta.len() },
        device: meta.rdev(),
        target: kind.is_symlink().then(|| fs::read_link(&path).expect("read")),
        same_as: if kind.is_dir() { name } else { first.entry((meta.dev(), meta.ino())).or_insert(name).clone() },
        content: kind.is_file().then(|| fs::read(&path).expect("read")),
        attributes: attributes(&path),
    }
}

fn attributes(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut names = vec![0; 65536];
    let length = rustix::fs::llistxattr(path, names.as_mut_slice()).expect("listed");
    let names = names[..length].split(|b| *b == 0).filter(|name| !name.is_empty());
    let value = |name: &str| {
        let mut value = vec![0; 65536];
        let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice()).expect("read");
        value.truncate(length);
        value
    };
    let names = names.map(|name| String::from_utf8(name.to_vec()).expect("text"));
    names.map(|name| (name.clone(), value(&name))).collect()
}

/// Says what differs, and not two trees with all their bytes.
#[track_caller]
pub(super) fn same(one: &Path, other: &Path) {
    let (ones, others) = (describe(one), describe(other));
    let names = |tree: &BTreeMap<PathBuf, Described>| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&ones), names(&others), "{} and {}", one.display(), other.display());
    for (name, described) in &ones {
        let copy = &others[name];
        assert!(described.content == copy.content, "{}: other content", name.display());
        let short = |d: &Described| format!("{:?}", Described { content: None, ..clone(d) });
        assert_eq!(short(described), short(copy), "{}", name.display());
    }
    let ours = |name: &PathBuf, d: &Described| {
        name.starts_with(".warpfs") || d.attributes.keys().any(|key| key.starts_with("user.warpfs"))
    };
    assert!(!others.iter().any(|(name, described)| ours(name, described)), "a name of ours was copied");
}

fn clone(d: &Described) -> Described {
    Described {
        target: d.target.clone(),
        same_as: d.same_as.clone(),
        content: None,
        attributes: d.attributes.clone(),
        ..*d
    }
}
