//! Attributes: modes, owners, times, sizes, the rights they give, and the file system's own numbers.

use super::stage::{Case, case, root_case, see};
use super::sys::*;
use rustix::process::umask;

fn with_umask<T>(mask: u32, work: impl FnOnce() -> T) -> T {
    let old = umask(rustix::fs::Mode::from_raw_mode(mask));
    let done = work();
    umask(old);
    done
}

pub const CASES: &[Case] = &[
    case("chmod of everything", |s| {
        file("f", b"x");
        mkdir("d", 0o755).expect("made");
        symlink("f", "l").expect("made");
        mknod("p", libc::S_IFIFO | 0o644, 0).expect("made");
        for name in ["f", "d", "l", "p", "none"] {
            for bits in [0, 0o4711, 0o2755, 0o1777, 0o6755, 0o7777, 0o2644, 0o100_644, 0o600] {
                s.part(format!("{name} {bits:o}"));
                see!(s; chmod(name, bits); lstat(name));
            }
        }
        chmod("d", 0o755).expect("chmod");
        for flags in [RDONLY, WRONLY, RDWR, libc::O_PATH] {
            s.part(flags);
            let f = open("f", flags).expect("opened");
            see!(s; fchmod(&f, 0o640 + flags as u32 % 8); fstat(&f); lstat("f").map(|f| f.mode));
            see!(s; chmod(f.path(), 0o644));
        }
        let d = open("d", RDONLY).expect("opened");
        see!(s; fchmod(&d, 0o1700); fstat(&d).map(|d| d.mode); lstat("d").map(|d| d.mode));
    }),
    case("the umask counts", |s| {
        for mask in [0, 0o022, 0o027, 0o077, 0o777] {
            s.part(format!("{mask:o}"));
            let name = |kind: &str| format!("{kind}{mask:o}");
            with_umask(mask, || {
                see!(s; open_mode(name("f"), RDWR | CREAT, 0o666); open_mode(name("s"), RDWR | CREAT, 0o7777));
                see!(s; mkdir(name("d"), 0o777); mkdir(name("t"), 0o7777); mknod(name("p"), libc::S_IFIFO | 0o666, 0));
                see!(s; mknod(name("r"), libc::S_IFREG | 0o6777, 0); symlink("x", name("l")));
            });
            for kind in ["f", "s", "d", "t", "p", "r", "l"] {
                see!(s; (kind, mode(name(kind))));
            }
        }
    }),
    case("what an owner may give", |s| {
        file("f", b"x");
        symlink("f", "l").expect("made");
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        for bits in [0o6755, 0o2644, 0o644, 0o1755] {
            for (owner, group) in [(None, None), (Some(uid), None), (None, Some(gid)), (Some(uid), Some(gid))] {
                s.part(format!("{bits:o} {} {}", owner.is_some(), group.is_some()));
                chmod("f", bits).expect("chmod");
                see!(s; lchown("f", owner, group); mode("f"); lchown("l", owner, group));
                let f = open("f", RDONLY).expect("opened");
                chmod("f", bits).expect("chmod");
                see!(s; fchown(&f, owner, group); mode("f"));
            }
        }
        see!(s; moved("f", || lchown("f", None, None)); moved("f", || lchown("f", Some(uid), None)));
        see!(s; lchown("none", None, None));
    }),
    root_case("chown to others", |s| {
        file("f", b"x");
        mkdir("d", 0o755).expect("made");
        symlink("f", "l").expect("made");
        for name in ["f", "d", "l"] {
            for (owner, group) in
                [(Some(1), None), (None, Some(2)), (Some(3), Some(4)), (Some(0), Some(0)), (Some(u32::MAX - 1), None)]
            {
                s.part((name, owner, group));
                if name != "l" {
                    chmod(name, 0o6755).expect("chmod");
                }
                see!(s; lchown(name, owner, group); lstat(name); lstat("f"));
            }
        }
    }),
    case("a set-group-id directory hands on its group", |s| {
        mkdir("d", 0o755).expect("made");
        see!(s; chmod("d", 0o2775); mkdir("d/e", 0o755); file("d/f", b"x"); mkdir("d/e/g", 0o700); symlink("f", "d/l"));
        see!(s; mknod("d/p", libc::S_IFIFO | 0o644, 0); open_mode("d/x", RDWR | CREAT, 0o2777));
        for name in ["d/e", "d/f", "d/e/g", "d/l", "d/p", "d/x"] {
            see!(s; (name, lstat(name)));
        }
    }),
    root_case("a set-group-id directory of another group", |s| {
        mkdir("d", 0o755).expect("made");
        see!(s; lchown("d", Some(5), Some(6)); chmod("d", 0o2775));
        see!(s; mkdir("d/e", 0o755); file("d/f", b"x"); mkdir("d/e/g", 0o2700); symlink("f", "d/l"));
        see!(s; link("d/f", "d/h"));
        see!(s; mknod("d/p", libc::S_IFIFO | 0o644, 0); open_mode("d/x", RDWR | CREAT, 0o2777); rename("d/x", "x"));
        for name in ["d/e", "d/f", "d/e/g", "d/l", "d/h", "d/p", "x"] {
            see!(s; (name, lstat(name)));
        }
    }),
    case("set-user-id bits and what takes them", |s| {
        let bits = 0o6775;
        let fresh = |content: &[u8]| {
            let _ = unlink("f");
            let f = file("f", content);
            chmod("f", bits).expect("chmod");
            f
        };
        let f = fresh(b"content");
        see!(s; pread(&f, 3, 0); mode("f"); ftruncate(&f, 7); mode("f"); pwrite(&f, b"x", 0); mode("f"));
        let f = fresh(b"content");
        see!(s; fallocate(&f, 0, 0, 10000); mode("f"));
        let f = fresh(b"content");
        see!(s; ftruncate(&f, 3); mode("f"));
        fresh(b"content");
        see!(s; truncate("f", 3); mode("f"));
        fresh(b"content");
        see!(s; open("f", RDWR | libc::O_TRUNC); mode("f"));
        let f = fresh(b"content");
        let g = file("g", b"content");
        see!(s; copy_range(&g, 0, &f, 0, 5); mode("f"); content("f"));
        let f = fresh(b"content");
        see!(s; pwrite(&f, b"", 0); mode("f"); futimens(&f, NOW, NOW); mode("f"); setxattr("f", "user.x", b"1", 0));
        see!(s; mode("f"));
        see!(s; link("f", "h"); mode("f"); rename("f", "i"); mode("i"));
    }),
    case("times that are set", |s| {
        let f = file("f", b"x");
        mkdir("d", 0o755).expect("made");
        symlink("f", "l").expect("made");
        let modern = (1_700_000_000, 123_456_789);
        let values = [
            (0, 0),
            (1, 1),
            (0, 999_999_999),
            modern,
            (-1, 0),
            (-1, 999_999_999),
            (-1_000_000, 5),
            (i64::from(i32::MAX), 0),
            (i64::from(i32::MIN), 1),
            (i64::from(u32::MAX), 9),
            (15_032_385_535, 999_999_999),
        ];
        for name in ["f", "d", "l"] {
            for value in values {
                s.part((name, value));
                see!(s; utimens(name, value, modern); times_of(name).map(|t| (t[0], t[1])));
                see!(s; utimens(name, modern, value); times_of(name).map(|t| (t[0], t[1])));
                see!(s; utimens(name, OMIT, (5, 5)); utimens(name, (6, 6), OMIT); times_of(name).map(|t| (t[0], t[1])));
            }
            see!(s; moved(name, || utimens(name, OMIT, OMIT)); moved(name, || utimens(name, NOW, OMIT)));
            see!(s; moved(name, || utimens(name, OMIT, NOW)); moved(name, || utimens(name, NOW, NOW)));
        }
        s.part("errors");
        see!(s; utimens("f", (0, -1), NOW); utimens("f", (0, 1_000_000_000), NOW); utimens("none", NOW, NOW));
        see!(s; utimens("f/x", NOW, NOW));
        see!(s; futimens(&f, (7, 8), (9, 10)); times_of("f").map(|t| (t[0], t[1])); futimens(&f, OMIT, NOW));
        see!(s; futimens(&open("f", RDONLY).expect("opened"), (1, 2), (3, 4)); times_of("f").map(|t| (t[0], t[1])));
    }),
    case("which times an operation moves", |s| {
        let f = file("f", b"content");
        mkdir("d", 0o755).expect("made");
        file("d/inner", b"x");
        symlink("f", "l").expect("made");
        let g = file("g", b"content");
        see!(s; moved("f", || pwrite(&f, b"x", 0)); moved("f", || pwrite(&f, b"", 0)));
        see!(s; moved("f", || pwrite(&f, b"x", 9000)));
        see!(s; moved("f", || ftruncate(&f, 9001)); moved("f", || ftruncate(&f, 5)); moved("f", || truncate("f", 5)));
        see!(s; moved("f", || truncate("f", 100)); moved("f", || open("f", WRONLY | libc::O_TRUNC)));
        see!(s; moved("f", || open("f", WRONLY | libc::O_TRUNC)); moved("f", || fallocate(&f, 0, 0, 5000)));
        see!(s; moved("f", || fallocate(&f, 1, 0, 50000)); moved("f", || fallocate(&f, 3, 0, 4096)));
        see!(s; moved("f", || fallocate(&f, 0, 0, 10)));
        see!(s; moved("f", || copy_range(&g, 0, &f, 0, 5)); moved("f", || chmod("f", 0o600)));
        see!(s; moved("f", || chmod("f", 0o600)));
        see!(s; moved("f", || link("f", "h")); moved_to("f", "f2", || rename("f", "f2")));
        see!(s; moved_to("f2", "f", || rename("f2", "f")));
        see!(s; moved("f", || unlink("h")); moved("f", || setxattr("f", "user.x", b"1", 0)));
        see!(s; moved("f", || removexattr("f", "user.x")));
        see!(s; moved("f", || getxattr("f", "user.x", 10)); moved("f", || lstat("f")); moved("f", || open("f", RDWR)));
        see!(s; moved("f", || fchmod(&f, 0o644)); moved("f", || rustix::fs::fsync(&f)));
        see!(s; moved("f", || rename("l", "l2")));
        for (name, made) in [("d/f", 0), ("d/e", 1), ("d/l", 2), ("d/p", 3), ("d/h", 4)] {
            s.part(name);
            see!(s; moved("d", || match made {
                0 => open(name, RDWR | CREAT).map(drop),
                1 => mkdir(name, 0o755),
                2 => symlink("x", name),
                3 => mknod(name, libc::S_IFIFO | 0o644, 0),
                _ => link("f", name),
            }));
            see!(s; moved("d", || mkdir(name, 0o755)); moved("d", || chmod("d/f", 0o600)));
            see!(s; moved("d", || rename(name, "d/other")); moved("d", || rename("d/other", name)));
        }
        see!(s; moved("d", || unlink("d/f")); moved("d", || rmdir("d/e")); moved("d", || unlink("d/none")));
        see!(s; moved("d", || rename("d/l", "l3")));
        see!(s; moved("d", || rename("f", "d/f")); moved("d/f", || rename_with("d/f", "g", libc::RENAME_EXCHANGE)));
        see!(s; moved("l3", || lchown("l3", None, None)); moved("d", || open("d/p", libc::O_PATH)));
    }),
    case("the access time moves when it is read", |s| {
        let old = |name: &str| utimens(name, (1000, 0), OMIT);
        let f = file("f", b"content");
        mkdir("d", 0o755).expect("made");
        file("d/inner", b"x");
        symlink("f", "l").expect("made");
        see!(s; old("f"); moved("f", || pread(&f, 5, 0)); moved("f", || pread(&f, 5, 0)));
        see!(s; old("d"); moved("d", || std::fs::read_dir("d").map(Iterator::count).ok()));
        see!(s; old("l"); moved("l", || readlink("l", 10)));
        see!(s; old("f"); moved("f", || { let g = file("g", b""); copy_range(&f, 0, &g, 0, 5) }));
        let quiet = open("f", RDONLY | libc::O_NOATIME).expect("opened");
        see!(s; old("f"); moved("f", || pread(&quiet, 5, 0)));
    }),
    case("sizes that are set", |s| {
        let f = file("f", b"content");
        mkdir("d", 0o755).expect("made");
        symlink("f", "l").expect("made");
        mknod("p", libc::S_IFIFO | 0o644, 0).expect("made");
        for size in [0, 1, 4095, 4096, 4097, 1 << 20, 1 << 40, i64::MAX, -1, i64::MIN] {
            s.part(size);
            see!(s; truncate("f", size); lstat("f"); ftruncate(&f, size); fstat(&f));
        }
        s.part("others");
        see!(s; truncate("d", 0); truncate("d", -1); truncate("none", 0); truncate("f/x", 0); truncate("l", 3));
        see!(s; lstat("l"); content("f"));
        see!(s; truncate("p", 0); ftruncate(&open("f", RDONLY).expect("opened"), 0));
        see!(s; ftruncate(&open("d", RDONLY).expect("opened"), 0));
        see!(s; ftruncate(&open("f", libc::O_PATH).expect("opened"), 0));
        see!(s; ftruncate(&open("f", libc::O_APPEND | RDWR).expect("opened"), 1));
        chmod("f", 0).expect("chmod");
        see!(s; ftruncate(&f, 100); fstat(&f));
    }),
    case("rights", |s| {
        file("f", b"x");
        mkdir("d", 0o755).expect("made");
        file("d/inner", b"x");
        for name in ["f", "d", "d/inner", "none", "f/x"] {
            for bits in [0, 0o100, 0o200, 0o400, 0o500, 0o600, 0o700] {
                s.part(format!("{name} {bits:o}"));
                see!(s; chmod(name, bits); (0..8).map(|m| access(name, m)).collect::<Vec<_>>(); eaccess(name, 4));
                see!(s; access(name, 8));
                see!(s; open(name, RDONLY); open(name, WRONLY); open(name, RDWR | libc::O_TRUNC));
                see!(s; stat("d/inner").map(|f| f.size));
                see!(s; mkdir("d/x", 0o755); rmdir("d/x"); unlink("d/none"); link("d/inner", "h"); unlink("h"));
            }
            let _ = chmod(name, 0o755);
        }
    }),
    root_case("the rights of somebody else", |s| {
        file("secret", b"x");
        chmod("secret", 0o640).expect("chmod");
        file("open", b"x");
        chmod("open", 0o604).expect("chmod");
        mkdir("sticky", 0o755).expect("made");
        chmod("sticky", 0o1777).expect("chmod");
        file("sticky/roots", b"x");
        mkdir("shared", 0o755).expect("made");
        chmod("shared", 0o777).expect("chmod");
        // Credentials of this thread only.
        for (uid, gid) in [(1234, 1234), (1234, 0)] {
            s.part((uid, gid));
            as_user(uid, gid, &[], || {
                see!(s; open("secret", RDONLY));
                see!(s; open("open", RDONLY));
                see!(s; open("open", WRONLY));
                see!(s; eaccess("open", 4));
                see!(s; chmod("open", 0o777));
                see!(s; lchown("open", Some(uid), None));
                see!(s; utimens("open", NOW, NOW));
                see!(s; utimens("open", (1, 1), (1, 1)));
                see!(s; unlink("sticky/roots"));
                see!(s; rename("sticky/roots", "sticky/mine"));
                see!(s; mkdir("d", 0o755));
                see!(s; mkdir(format!("shared/d{gid}"), 0o2755));
                see!(s; open_mode(format!("shared/f{gid}"), RDWR | CREAT, 0o6777));
                see!(s; chmod(format!("shared/f{gid}"), 0o2777));
                see!(s; lchown(format!("shared/f{gid}"), None, Some(0)));
                see!(s; setxattr("open", "user.x", b"1", 0));
                see!(s; setxattr(format!("shared/f{gid}"), "trusted.x", b"1", 0));
                see!(s; getxattr(format!("shared/f{gid}"), "trusted.x", 5));
                see!(s; mknod(format!("shared/n{gid}"), libc::S_IFCHR | 0o666, 259));
                see!(s; link("secret", format!("shared/l{gid}")));
            });
            see!(s; lstat(format!("shared/d{gid}")); lstat(format!("shared/f{gid}")));
        }
    }),
    root_case("the rights of a group that is one of many", |s| {
        mkdir("d", 0o755).and_then(|()| lchown("d", None, Some(2345))).and_then(|()| chmod("d", 0o2770)).expect("made");
        for (name, mode) in [("d/f", 0o660), ("d/g", 0o640), ("d/h", 0o6770)] {
            file(name, b"content");
            chmod(name, mode).expect("chmod");
        }
        for groups in [&[][..], &[7, 2345, 9]] {
            s.part(groups);
            let name = format!("d/new{}", groups.len());
            as_user(1234, 1234, groups, || {
                see!(s; open("d/f", RDONLY); open("d/f", WRONLY | libc::O_TRUNC); open("d/g", RDONLY));
                see!(s; open("d/g", RDWR));
                see!(s; open_mode(&name, RDWR | CREAT, 0o2664); lstat(&name); chmod(&name, 0o2775); lstat(&name));
                see!(s; lchown(&name, None, Some(9)); lstat(&name); lchown(&name, None, Some(8)); chmod(&name, 0o2775));
                see!(s; lstat(&name); truncate("d/h", 3); lstat("d/h"); mkdir(format!("{name}.d"), 0o755));
                see!(s; lstat(format!("{name}.d")); symlink("x", format!("{name}.l")); unlink("d/g"); lstat("d/f"));
            });
            let _ = chmod("d/h", 0o6770);
        }
    }),
    case("what everything made looks like", |s| {
        for length in [0, 1, 4095, 4096, 4097, 100_000] {
            let name = format!("f{length}");
            see!(s; file(&name, &vec![7; length]); (length, lstat(&name), lstat(&name).map(|f| f.blocks)));
        }
        see!(s; mkdir("d", 0o755); lstat("d"); mkdir("d/e", 0o755); lstat("d"); lstat("."); rmdir("d/e"); lstat("d"));
        for n in 0..200 {
            open(format!("d/{}{n}", "long".repeat(40)), RDWR | CREAT).expect("made");
        }
        see!(s; lstat("d"));
    }),
    case("the file system's numbers", |s| {
        // Files come and go meanwhile, so only what stays.
        let vfs = rustix::fs::statvfs(".").expect("asked");
        see!(s; (vfs.f_bsize, vfs.f_frsize, vfs.f_blocks, vfs.f_files, vfs.f_namemax));
        see!(s; vfs.f_bavail <= vfs.f_bfree && vfs.f_bfree <= vfs.f_blocks && vfs.f_bfree > 0 && vfs.f_ffree > 0);
        let f = file("f", b"x");
        let again = rustix::fs::fstatvfs(&f).expect("asked");
        see!(s; (again.f_bsize, again.f_frsize, again.f_blocks, again.f_files, again.f_namemax));
    }),
];
