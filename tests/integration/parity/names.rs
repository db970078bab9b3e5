//! Names: making, opening, linking, moving and removing them.

use super::stage::{Case, case, root_case, see};
use super::sys::*;
use libc::{O_APPEND, O_DIRECT, O_DIRECTORY, O_EXCL, O_NOFOLLOW, O_PATH, O_TRUNC};

/// Something of each kind, by the name of the kind.
fn one_of_each() {
    KINDS.into_iter().for_each(make);
}

/// What a kind's name says, with what it leads to.
fn make(kind: &str) {
    match kind {
        "file" => drop(file("file", b"content")),
        "dir" => {
            mkdir("dir", 0o755).expect("made");
            file("dir/inner", b"inner");
        }
        "empty" => mkdir("empty", 0o755).expect("made"),
        "to-file" => symlink("file", "to-file").expect("made"),
        "to-dir" => symlink("dir", "to-dir").expect("made"),
        "dangling" => symlink("nothing", "dangling").expect("made"),
        "loop" => symlink("loop", "loop").expect("made"),
        "fifo" => mknod("fifo", libc::S_IFIFO | 0o644, 0).expect("made"),
        "socket" => mknod("socket", libc::S_IFSOCK | 0o644, 0).expect("made"),
        _ => {}
    }
}

const KINDS: [&str; 10] = ["file", "dir", "empty", "to-file", "to-dir", "dangling", "loop", "fifo", "socket", "none"];

pub const CASES: &[Case] = &[
    case("open with every flag", |s| {
        let flags = [
            ("", 0),
            ("TRUNC", O_TRUNC),
            ("APPEND", O_APPEND),
            ("APPEND TRUNC", O_APPEND | O_TRUNC),
            ("EXCL", O_EXCL),
            ("DIRECT", O_DIRECT),
            ("DIRECTORY", O_DIRECTORY),
            ("NOFOLLOW", O_NOFOLLOW),
            ("NOFOLLOW TRUNC", O_NOFOLLOW | O_TRUNC),
            ("PATH", O_PATH),
            ("PATH NOFOLLOW", O_PATH | O_NOFOLLOW),
            ("PATH DIRECTORY", O_PATH | O_DIRECTORY),
            ("CREAT", CREAT),
            ("CREAT EXCL", CREAT | O_EXCL),
            ("CREAT TRUNC", CREAT | O_TRUNC),
            ("CREAT DIRECTORY", CREAT | O_DIRECTORY),
            ("CREAT NOFOLLOW", CREAT | O_NOFOLLOW),
            ("CREAT APPEND EXCL NOFOLLOW", CREAT | O_APPEND | O_EXCL | O_NOFOLLOW),
            ("SYNC", libc::O_SYNC),
            ("DSYNC", libc::O_DSYNC),
            ("NOATIME", libc::O_NOATIME),
        ];
        for (n, (flag, bits)) in flags.into_iter().enumerate() {
            let folder = format!("d{n}");
            mkdir(&folder, 0o755).expect("made");
            rustix::process::chdir(&folder).expect("entered");
            one_of_each();
            for access in [RDONLY, WRONLY, RDWR, WRONLY | RDWR] {
                for kind in KINDS {
                    s.part((flag, access, kind));
                    // A FIFO's open waits for another end.
                    let opened = open(kind, access | bits | libc::O_NONBLOCK);
                    // What O_DIRECT means for reads and writes stands among the cases of data.
                    if let Some(file) = opened.as_ref().ok().filter(|_| bits != O_DIRECT) {
                        see!(s; fstat(file).map(|f| (f.mode, f.size)); write(file, b"new"));
                        see!(s; pread(file, 10, 0));
                    }
                    see!(s; opened);
                    see!(s; lstat(kind).map(|f| (f.mode, f.size)));
                }
            }
            rustix::process::chdir("..").expect("left");
        }
    }),
    case("an open names what it opened", |s| {
        one_of_each();
        for kind in KINDS {
            s.part(kind);
            let path = open(kind, O_PATH | O_NOFOLLOW);
            if let Ok(path) = &path {
                see!(s; fstat(path); read(path, 1); fchmod(path, 0o600); ftruncate(path, 0));
                see!(s; open(path.path(), RDONLY | libc::O_NONBLOCK); open(path.path(), RDWR | libc::O_NONBLOCK));
                see!(s; link_fd(path, format!("{kind}.1")); link_follow(path.path(), format!("{kind}.2")));
                see!(s; link(path.path(), format!("{kind}.3")); stat(path.path()));
            }
            see!(s; path);
        }
    }),
    case("names made where something is", |s| {
        one_of_each();
        for kind in KINDS {
            s.part(kind);
            see!(s; mkdir(kind, 0o755); symlink("x", kind); mknod(kind, libc::S_IFREG | 0o600, 0); link("file", kind));
            see!(s; mkdir(format!("{kind}/"), 0o755); symlink("x", format!("{kind}/")));
            see!(s; link("file", format!("{kind}/")));
            see!(s; mknod(format!("{kind}/x"), libc::S_IFREG | 0o600, 0); mkdir(format!("{kind}/y"), 0o755));
            see!(s; lstat(kind).map(|f| (f.mode, f.nlink)));
        }
    }),
    case("mknod of every kind", |s| {
        for kind in [0, libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFDIR, libc::S_IFLNK, 0o030000] {
            for mode in [0, 0o644, 0o777, 0o7777, 0o4711] {
                let name = format!("{kind:o}-{mode:o}");
                s.part(&name);
                see!(s; mknod(&name, kind | mode, 0); lstat(&name));
            }
        }
    }),
    case("a device that anybody may make", |s| {
        // A whiteout, which is no device.
        see!(s; mknod("w", libc::S_IFCHR | 0o600, 0); lstat("w"); mknod("b", libc::S_IFBLK | 0o600, 0));
    }),
    root_case("mknod of devices", |s| {
        for kind in [libc::S_IFCHR, libc::S_IFBLK] {
            for (major, minor) in [(1, 3), (0, 0), (7, 255), (259, 70_000), (4095, 1_048_575)] {
                let name = format!("{kind:o}-{major}-{minor}");
                s.part(&name);
                see!(s; mknod(&name, kind | 0o666, libc::makedev(major, minor)); lstat(&name));
            }
        }
    }),
    case("links", |s| {
        one_of_each();
        for kind in KINDS {
            s.part(kind);
            let (hard, followed) = (format!("{kind}.hard"), format!("{kind}.followed"));
            see!(s; link(kind, &hard); lstat(&hard); ino(&hard) == ino(kind); lstat(kind));
            see!(s; link_follow(kind, &followed); lstat(&followed); ino(&followed) == ino(kind));
            see!(s; link(kind, "none/x"); link(kind, "file/x"); link(kind, "."); link(kind, ".."); link(kind, kind));
            see!(s; unlink(&hard); lstat(kind));
        }
        let file = file("open", b"x");
        see!(s; unlink("open"); fstat(&file); link_fd(&file, "again"); link_follow(file.path(), "again"));
        see!(s; lstat("again"));
    }),
    case("symbolic links", |s| {
        for length in [1, 255, 4095, 4096] {
            s.part(length);
            let target = "t".repeat(length);
            see!(s; symlink(&target, format!("l{length}")); lstat(format!("l{length}")));
            for room in [1, 10, length, 5000] {
                see!(s; readlink(format!("l{length}"), room));
            }
        }
        s.part("others");
        one_of_each();
        see!(s; symlink("", "empty-target"); symlink("x", ""); symlink("x", "none/y"); symlink("x", "file/y"));
        see!(s; symlink("x", "."); symlink("x", ".."); symlink("/", "root"); stat("root").map(|f| f.mode));
        see!(s; readlink("file", 10); readlink("dir", 10); readlink("none", 10); readlink("to-dir/", 10));
        see!(s; readlink("file/x", 10); readlink("loop/x", 10); stat("loop"); stat("dangling"); lstat("dangling"));
        see!(s; symlink("dir/../to-file", "long-way"); content("long-way"); stat("to-dir/inner"));
        see!(s; symlink(&b"not\xfftext"[..], "strange"); readlink("strange", 20); stat("strange"));
        for n in 0..41 {
            symlink(if n == 0 { "file".into() } else { format!("chain{}", n - 1) }, format!("chain{n}")).expect("made");
        }
        see!(s; content("chain38"); content("chain39"); content("chain40"));
    }),
    case("rename of every kind over every kind", |s| {
        for flags in [0, libc::RENAME_NOREPLACE, libc::RENAME_EXCHANGE] {
            for from in KINDS {
                for to in KINDS {
                    s.part((flags, from, to));
                    mkdir("a", 0o755).expect("made");
                    rustix::process::chdir("a").expect("entered");
                    make(from);
                    if from != to {
                        make(to);
                    }
                    let number = ino(from);
                    see!(s; rename_with(from, to, flags); lstat(from); lstat(to); number == ino(to));
                    see!(s; lstat(".").map(|d| d.nlink));
                    rustix::process::chdir("..").expect("left");
                    std::fs::remove_dir_all("a").expect("removed");
                }
            }
        }
    }),
    case("rename elsewhere", |s| {
        one_of_each();
        mkdir("dir/sub", 0o755).expect("made");
        mkdir("dir/sub/sub", 0o755).expect("made");
        see!(s; rename("dir", "dir/x"); rename("dir", "dir/sub"); rename("dir", "dir/sub/sub/x"));
        see!(s; rename("dir/sub", "dir"));
        see!(s; rename("file", "none/x"); rename("file", "file/x"); rename("none/x", "file"));
        see!(s; rename("file", "to-dir/x"));
        see!(s; content("dir/x"); rename("dir/x", "file"); rename("dir/sub", "empty/sub"); lstat("dir"));
        see!(s; lstat("empty"));
        see!(s; rename(".", "x"); rename("dir", "."); rename("dir/.", "x"); rename("dir/..", "x"));
        see!(s; rename("x", "dir/.."));
        see!(s; rename("file", "file/"); rename("file/", "x"); rename("dir/", "moved/"); rename("moved", "dir/"));
        see!(s; rename("to-dir/", "x"); rename("file", "to-file"); rename("file", "to-file"); rename("empty", "dir"));
        see!(s; rename_with("dir", "dir/sub/sub", libc::RENAME_EXCHANGE));
        see!(s; rename_with("dir/sub/sub", "dir", libc::RENAME_EXCHANGE));
        see!(s; rename_with("dir", "x", libc::RENAME_EXCHANGE | libc::RENAME_NOREPLACE); rename_with("dir", "x", 8));
        see!(s; link("fifo", "fifo2"); rename("fifo", "fifo2"); lstat("fifo"); lstat("fifo2"));
        see!(s; rename_with("fifo", "fifo2", libc::RENAME_EXCHANGE));
        see!(s; rename_with("fifo", "fifo2", libc::RENAME_NOREPLACE));
    }),
    case("rename that leaves a whiteout", |s| {
        one_of_each();
        see!(s; rename_with("file", "moved", libc::RENAME_WHITEOUT); lstat("file"); content("moved"));
        see!(s; rename_with("dir", "dir2", libc::RENAME_WHITEOUT | libc::RENAME_NOREPLACE); lstat("dir"));
        see!(s; rename_with("moved", "dir2", libc::RENAME_WHITEOUT | libc::RENAME_EXCHANGE));
        see!(s; rename_with("none", "x", 4));
    }),
    case("unlink and rmdir", |s| {
        one_of_each();
        see!(s; rmdir("."); rmdir(".."); rmdir("dir/."); rmdir("dir/.."); rmdir("empty/."); unlink("."); unlink(".."));
        see!(s; unlink(""); rmdir(""); unlink("file/"); unlink("dir/"); unlink("to-dir/"); rmdir("to-dir/"));
        see!(s; unlink("/"));
        see!(s; unlink("file/x"); rmdir("file/x"); unlink("none/x"); unlink("dangling/x"); unlink("loop/x"));
        for kind in KINDS {
            s.part(kind);
            see!(s; rmdir(kind); unlink(kind); lstat(kind));
        }
        s.part("afterwards");
        see!(s; rmdir("dir/"); unlink("dir/inner"); rmdir("dir/"); mkdir("again/", 0o755); rmdir("again/"));
        mkdir("held", 0o755).expect("made");
        let held = open("held", RDONLY).expect("opened");
        see!(s; rmdir("held"); fstat(&held); open(held.path(), O_DIRECTORY));
        see!(s; mkdir(format!("{}/x", held.path()), 0o755));
        see!(s; open(format!("{}/x", held.path()), RDWR | CREAT));
        see!(s; std::fs::read_dir(held.path()).map(Iterator::count).map_err(Errno::from));
    }),
    case("slashes and dots", |s| {
        one_of_each();
        for kind in KINDS {
            for end in ["/", "//", "/.", "/..", "/./"] {
                let path = format!("{kind}{end}");
                s.part(&path);
                see!(s; stat(&path).map(|f| f.mode); lstat(&path).map(|f| f.mode));
                see!(s; open(&path, RDONLY | libc::O_NONBLOCK));
                see!(s; open(&path, WRONLY | CREAT | libc::O_NONBLOCK); chmod(&path, 0o755); truncate(&path, 7));
            }
        }
        s.part("more");
        see!(s; content("./file"); content(".//dir/../file"); content("dir/inner/../../file"); content("none/../file"));
        see!(s; stat(""); open("", RDONLY); open(".", RDONLY); open(".", RDWR); open("..", O_PATH));
    }),
    case("long names and paths", |s| {
        for length in [1, 254, 255, 256, 300, 4000] {
            let name = "n".repeat(length);
            s.part(length);
            see!(s; open(&name, RDWR | CREAT); lstat(&name); link(&name, "m".repeat(length)));
            see!(s; rename(&name, "o".repeat(length)));
            see!(s; symlink("x", "s".repeat(length)); mkdir("d".repeat(length), 0o755));
            see!(s; mknod("f".repeat(length), libc::S_IFIFO | 0o644, 0));
            see!(s; unlink("o".repeat(length)); rmdir("d".repeat(length)); setxattr(".", "user.x", b"1", 0));
            see!(s; access(&name, 0));
        }
        s.part("PATH_MAX");
        for length in [4094, 4095, 4096] {
            let path = format!("{}{}", "./".repeat(2040), "x".repeat(length - 4080));
            see!(s; open(&path, RDWR | CREAT));
        }
        let mut deep = String::new();
        for level in 0..30 {
            deep += &format!("{}{level:02}/", "d".repeat(100));
            see!(s; mkdir(&deep, 0o755));
        }
        see!(s; open(format!("{deep}f"), RDWR | CREAT); lstat(format!("{deep}f")));
    }),
    case("names that are no text", |s| {
        for name in [&b"\xff\xfe"[..], b"new\nline", b"\x01", b" ", b"\\", b"a\x7f", "\u{fc}".as_bytes(), b"-rf", b"*"]
        {
            s.part(name.escape_ascii().to_string());
            see!(s; open(name, RDWR | CREAT); lstat(name); rename(name, [name, b"2"].concat()));
            see!(s; unlink([name, b"2"].concat()));
            see!(s; mkdir(name, 0o755); symlink(name, [name, b"l"].concat()); readlink([name, b"l"].concat(), 99));
        }
    }),
    case("a file that was replaced", |s| {
        let old = file("f", b"old");
        file("new", b"new!");
        see!(s; rename("new", "f"); content("f"); pread(&old, 9, 0); fstat(&old).map(|f| (f.nlink, f.size)));
        see!(s; lstat("f"));
        see!(s; pwrite(&old, b"more", 3); ftruncate(&old, 5); fchmod(&old, 0o600); futimens(&old, (1, 2), (3, 4)));
        see!(s; fstat(&old));
        see!(s; open(old.path(), RDWR); open(old.path(), RDWR | O_TRUNC); fstat(&old); content("f"));
        see!(s; unlink("f"); open("f", RDWR | CREAT | O_EXCL); lstat("f"); pwrite(&old, b"x", 0); lstat("f"));
    }),
];
