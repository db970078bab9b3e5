//! Extended attributes and access control lists.

use super::stage::{Case, case, root_case, see};
use super::sys::*;
use libc::{XATTR_CREATE, XATTR_REPLACE};

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;

/// An access control list as the attribute has it (linux/posix_acl_xattr.h).
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(rights.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

const NOBODY: u32 = u32::MAX;

fn small() -> Vec<u8> {
    acl(&[(USER_OBJ, 6, NOBODY), (GROUP_OBJ, 4, NOBODY), (OTHER, 0, NOBODY)])
}

/// With the rights of one user and one group beside.
fn full() -> Vec<u8> {
    let named = [(USER_OBJ, 7, NOBODY), (USER, 6, 1234), (GROUP_OBJ, 5, NOBODY), (GROUP, 7, 2345)];
    acl(&[&named[..], &[(MASK, 6, NOBODY), (OTHER, 1, NOBODY)]].concat())
}

fn all_kinds() -> [&'static str; 6] {
    file("f", b"x");
    mkdir("d", 0o755).expect("made");
    symlink("f", "l").expect("made");
    symlink("none", "dangling").expect("made");
    mknod("p", libc::S_IFIFO | 0o644, 0).expect("made");
    ["f", "d", "l", "dangling", "p", "none"]
}

pub const CASES: &[Case] = &[
    case("attributes of every kind", |s| {
        for name in all_kinds() {
            s.part(name);
            for flags in [0, XATTR_CREATE, XATTR_CREATE, XATTR_REPLACE, XATTR_CREATE | XATTR_REPLACE, 8] {
                see!(s; (flags, setxattr(name, "user.x", b"value", flags), getxattr(name, "user.x", 10)));
            }
            see!(s; setxattr(name, "user.new", b"", XATTR_REPLACE); setxattr(name, "user.new", b"", XATTR_CREATE));
            see!(s; getxattr(name, "user.new", 10); getxattr(name, "user.new", 0); listxattr(name));
            see!(s; removexattr(name, "user.new"); removexattr(name, "user.new"); getxattr(name, "user.new", 5));
            see!(s; listxattr(name));
            // Through the link, not of it.
            see!(s; setxattr_followed(name, "user.followed", b"1"));
            see!(s; rustix::fs::getxattr(name, "user.followed", &mut [0u8; 9][..]).map_err(Errno::from));
            see!(s; rustix::fs::removexattr(name, "user.followed").map_err(Errno::from));
        }
    }),
    case("sizes of values and lists", |s| {
        file("f", b"x");
        for length in [0, 1, 100, 1000, 1024, 1025, 2000, 3000, 3800, 5000, 65_535, 65_536, 65_537] {
            s.part(length);
            see!(s; setxattr("f", "user.x", &vec![b'v'; length], 0); getxattr("f", "user.x", 0));
            see!(s; getxattr("f", "user.x", 1));
            see!(s; getxattr("f", "user.x", length); getxattr("f", "user.x", 65_536));
            see!(s; getxattr("f", "user.x", length.saturating_sub(1).max(1)));
            let _ = removexattr("f", "user.x");
        }
        s.part("lists");
        for n in 0..20 {
            see!(s; setxattr("f", format!("user.attribute.{n}"), b"v", 0));
        }
        let list = |room: usize| rustix::fs::listxattr("f", &mut vec![0u8; room][..]).map_err(Errno::from);
        see!(s; list(0); list(1); list(10); list(1000); listxattr("f"));
        s.part("names");
        for length in [0, 1, 249, 250, 251, 300] {
            let name = format!("user.{}", "n".repeat(length));
            see!(s; (length, setxattr("f", &name, b"v", 0), getxattr("f", &name, 5), removexattr("f", &name)));
        }
    }),
    case("spaces of names", |s| {
        file("f", b"x");
        for name in [
            "x",
            "",
            ".x",
            "user",
            "user.",
            "User.x",
            "unknown.x",
            "system.x",
            "security.x",
            "os2.x",
            "btrfs.x",
            "user.\u{fc}",
            "user.a b",
        ] {
            s.part(name);
            see!(s; setxattr("f", name, b"v", 0); getxattr("f", name, 9); removexattr("f", name));
        }
        s.part("bytes");
        see!(s; setxattr("f", &b"user.\xff"[..], b"\0\x01", 0); getxattr("f", &b"user.\xff"[..], 9));
        see!(s; listxattr("f").map(|l| l.len()));
        let (read_only, path) = (open("f", RDONLY).expect("opened"), open("f", libc::O_PATH).expect("opened"));
        let set = |fd: &Fd| fsetxattr(fd, "user.fd", b"1");
        see!(s; set(&read_only); set(&path); getxattr("f", "user.fd", 5));
        chmod("f", 0o400).expect("chmod");
        see!(s; setxattr("f", "user.x", b"v", 0); getxattr("f", "user.x", 5));
        chmod("f", 0o200).expect("chmod");
        see!(s; setxattr("f", "user.x", b"v", 0); getxattr("f", "user.x", 5); listxattr("f").map(|l| l.len()));
        mkdir("sticky", 0o755).and_then(|()| chmod("sticky", 0o1777)).expect("made");
        see!(s; setxattr("sticky", "user.x", b"v", 0); getxattr("sticky", "user.x", 5));
    }),
    root_case("names that are root's", |s| {
        for name in all_kinds() {
            for attribute in ["trusted.x", "security.x", "security.capability", "security.selinux"] {
                s.part((name, attribute));
                see!(s; setxattr(name, attribute, b"value", 0); getxattr(name, attribute, 10); listxattr(name));
                see!(s; removexattr(name, attribute));
            }
        }
        s.part("capability");
        // Version 2, effective, CAP_NET_RAW: what a write takes away.
        let capability = [2_u32 << 24 | 1, 1 << 13, 0, 0, 0].map(u32::to_le_bytes).concat();
        let f = file("g", b"x");
        see!(s; setxattr("g", "security.capability", &capability, 0); getxattr("g", "security.capability", 99));
        see!(s; pread(&f, 1, 0); getxattr("g", "security.capability", 99); pwrite(&f, b"new", 0));
        see!(s; getxattr("g", "security.capability", 99));
        see!(s; setxattr("g", "security.capability", &capability, 0); ftruncate(&f, 1));
        see!(s; getxattr("g", "security.capability", 99));
        see!(s; setxattr("g", "security.capability", &capability, 0); lchown("g", Some(0), None));
        see!(s; getxattr("g", "security.capability", 99));
        see!(s; setxattr("g", "security.capability", &capability, 0); chmod("g", 0o600));
        see!(s; getxattr("g", "security.capability", 99));
        see!(s; open("g", WRONLY | libc::O_TRUNC); getxattr("g", "security.capability", 99));
    }),
    case("an access list and the mode", |s| {
        for name in all_kinds() {
            s.part(name);
            see!(s; getxattr(name, ACCESS, 99); setxattr(name, ACCESS, &small(), 0); mode(name));
            see!(s; getxattr(name, ACCESS, 99));
            see!(s; setxattr(name, ACCESS, &full(), 0); mode(name); getxattr(name, ACCESS, 99); listxattr(name));
            if name != "l" && name != "dangling" {
                see!(s; chmod(name, 0o640); getxattr(name, ACCESS, 99); chmod(name, 0o2777));
                see!(s; getxattr(name, ACCESS, 99); mode(name));
            }
            see!(s; setxattr(name, DEFAULT, &full(), 0); getxattr(name, DEFAULT, 99); removexattr(name, ACCESS));
            see!(s; mode(name));
            see!(s; getxattr(name, ACCESS, 99); removexattr(name, ACCESS); listxattr(name); removexattr(name, DEFAULT));
            see!(s; removexattr(name, DEFAULT));
        }
    }),
    case("access lists that are none", |s| {
        file("f", b"x");
        mkdir("d", 0o755).expect("made");
        let broken = [
            vec![],
            vec![2, 0, 0, 0],
            vec![3, 0, 0, 0],
            vec![2, 0, 0, 0, 1],
            full()[..20].to_vec(),
            acl(&[(USER_OBJ, 6, NOBODY)]),
            acl(&[(USER_OBJ, 6, NOBODY), (USER, 6, 5), (GROUP_OBJ, 4, NOBODY), (OTHER, 0, NOBODY)]),
            acl(&[(OTHER, 6, NOBODY), (GROUP_OBJ, 4, NOBODY), (USER_OBJ, 0, NOBODY)]),
            acl(&[(64, 6, NOBODY)]),
            acl(&[(USER_OBJ, 8, NOBODY), (GROUP_OBJ, 4, NOBODY), (OTHER, 0, NOBODY)]),
        ];
        for (n, value) in broken.iter().enumerate() {
            s.part(n);
            see!(s; setxattr("f", ACCESS, value, 0); setxattr("d", DEFAULT, value, 0));
            see!(s; setxattr("f", DEFAULT, value, 0); mode("f"); listxattr("d"));
        }
        s.part("flags");
        see!(s; setxattr("f", ACCESS, &full(), XATTR_REPLACE); setxattr("f", ACCESS, &full(), XATTR_CREATE));
        see!(s; setxattr("f", ACCESS, &full(), XATTR_CREATE));
        see!(s; getxattr("f", ACCESS, 0); getxattr("f", ACCESS, 5); getxattr("f", "system.posix_acl_other", 5));
    }),
    case("a default list is handed on", |s| {
        for (n, list) in [small(), full()].iter().enumerate() {
            for mask in [0o022, 0o077, 0] {
                let folder = format!("d{n}{mask:o}");
                s.part(&folder);
                mkdir(&folder, 0o755).expect("made");
                see!(s; setxattr(&folder, DEFAULT, list, 0); mode(&folder));
                rustix::process::umask(rustix::fs::Mode::from_raw_mode(mask));
                let at = |name: &str| format!("{folder}/{name}");
                see!(s; open_mode(at("f"), RDWR | CREAT, 0o666); open_mode(at("x"), RDWR | CREAT, 0o700));
                see!(s; mkdir(at("e"), 0o777));
                see!(s; mknod(at("p"), libc::S_IFIFO | 0o666, 0); mknod(at("r"), libc::S_IFREG | 0o604, 0));
                see!(s; symlink("f", at("l")); mkdir(at("e/g"), 0o700));
                see!(s; open_mode(at("e/g/h"), RDWR | CREAT, 0o666); link(at("f"), at("e/linked")));
                for name in ["f", "x", "e", "p", "r", "l", "e/g", "e/g/h", "e/linked"] {
                    see!(s; (name, mode(at(name)), getxattr(at(name), ACCESS, 99), getxattr(at(name), DEFAULT, 99)));
                }
                rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
                see!(s; removexattr(&folder, DEFAULT); open_mode(at("late"), RDWR | CREAT, 0o666); mode(at("late")));
                see!(s; listxattr(at("late")));
            }
        }
    }),
    root_case("an access list gives and takes", |s| {
        file("f", b"secret");
        chmod("f", 0o600).expect("chmod");
        chmod(".", 0o755).expect("chmod");
        for (uid, gid) in [(1234, 9), (5, 2345), (5, 9)] {
            s.part((uid, gid));
            see!(s; removexattr("f", ACCESS); as_user(uid, gid, &[], || (open("f", RDONLY), open("f", WRONLY))));
            see!(s; setxattr("f", ACCESS, &full(), 0));
            see!(s; as_user(uid, gid, &[], || (open("f", RDONLY), open("f", WRONLY), eaccess("f", 1))));
            see!(s; chmod("f", 0o707));
            see!(s; as_user(uid, gid, &[], || (open("f", RDONLY), open("f", WRONLY), eaccess("f", 1))));
            see!(s; chmod("f", 0o770));
            see!(s; as_user(uid, gid, &[], || (open("f", RDONLY), open("f", WRONLY))));
            see!(s; as_user(uid, gid, &[], || (setxattr("f", ACCESS, &small(), 0), removexattr("f", ACCESS))));
        }
    }),
    case("attributes and times, names and links", |s| {
        let f = file("f", b"x");
        see!(s; setxattr("f", "user.x", b"1", 0); link("f", "g"); getxattr("g", "user.x", 5); rename("f", "h"));
        see!(s; getxattr("h", "user.x", 5));
        see!(s; ftruncate(&f, 0); getxattr("h", "user.x", 5); open("h", RDWR | libc::O_TRUNC));
        see!(s; getxattr("h", "user.x", 5));
        see!(s; file("new", b"y"); rename("new", "h"); getxattr("h", "user.x", 5); getxattr("g", "user.x", 5));
        see!(s; moved("g", || setxattr("g", ACCESS, &small(), 0)); moved("g", || setxattr("g", "user.x", b"1", 0)));
        see!(s; moved("g", || setxattr("g", "user.x", b"1", XATTR_CREATE)));
        see!(s; moved("g", || listxattr("g")); moved("g", || removexattr("g", "user.none")));
    }),
];
