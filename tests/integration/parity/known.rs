//! The differences that are known, each with its reason. A step that is listed here must give exactly what is listed: a
//! difference that goes away, or becomes another, fails until it is taken out.

use super::stage::Side::{self, Passthrough, ThroughDaemon};

pub struct Known {
    pub case: &'static str,
    pub why: &'static str,
    pub sides: &'static [Side],
    /// Steps of the case, and what the mount gives.
    pub steps: &'static [(&'static str, &'static str)],
}

const BOTH: &[Side] = &[Passthrough, ThroughDaemon];

pub const KNOWN: &[Known] = &[
    Known {
        case: "set-user-id bits and what takes them",
        why: "the kernel writes with the rights at registration, which are none to keep the bits: else they would \
              survive everybody's writes; now root's writes take them too",
        sides: &[Passthrough],
        steps: &[(r#"mode("f") (time 3)"#, r#"Ok("775")"#)],
    },
    Known {
        case: "flags of vectors that FUSE does not carry",
        why: "the kernel offers RWF_NOWAIT and RWF_DONTCACHE on no FUSE file",
        sides: BOTH,
        steps: &[
            ("preadv2(&f, 6, 2, nowait)", "Err(EOPNOTSUPP)"),
            ("preadv2(&f, 6, 20, nowait)", "Err(EOPNOTSUPP)"),
            (r#"pwritev2(&f, b"abcdef", 0, dontcache)"#, "Err(EOPNOTSUPP)"),
            ("preadv2(&f, 6, 0, dontcache)", "Err(EOPNOTSUPP)"),
            (r#"pwritev2(&f, b"abcdef", 0, nowait)"#, "Err(EOPNOTSUPP)"),
        ],
    },
    Known {
        case: "flags of vectors that FUSE does not carry",
        why: "a WRITE says O_APPEND of the descriptor and not RWF_NOAPPEND of the call",
        sides: BOTH,
        steps: &[(r#"size("f")"#, "Ok(16)")],
    },
    Known {
        case: "O_APPEND comes and goes",
        why: "the kernel opens the backing once, with the flags of the open",
        sides: &[Passthrough],
        steps: &[(r#"size("f")"#, "Ok(11)")],
    },
    Known {
        case: "what FUSE has no word for",
        why: "the birth time is not asked of FUSE",
        sides: BOTH,
        steps: &[("statx(0x800).map(|x| x.stx_mask & 0x800 != 0 && x.stx_btime.tv_sec > 1_600_000_000)", "Ok(false)")],
    },
    Known {
        case: "what FUSE has no word for",
        why: "how O_DIRECT has to be aligned is not asked of FUSE",
        sides: BOTH,
        steps: &[("statx(0x2000).map(|x| x.stx_mask & 0x2000 != 0)", "Ok(false)")],
    },
    Known {
        case: "what FUSE has no word for",
        why: "fuser has no TMPFILE",
        sides: BOTH,
        steps: &[(r#"open(".", RDWR | libc::O_TMPFILE)"#, "Err(EOPNOTSUPP)")],
    },
    Known {
        case: "what FUSE has no word for",
        why: "FUSE has no word for shared extents",
        sides: BOTH,
        steps: &[("rustix::fs::ioctl_ficlone(&g, &f).map_err(Errno::from)", "Err(EOPNOTSUPP)")],
    },
    Known {
        case: "what FUSE has no word for",
        why: "the kernel takes any offset on FUSE, and every file system has its own limit",
        sides: BOTH,
        steps: &[("lseek(&f, i64::MAX, SEEK_SET)", "Ok(9223372036854775807)")],
    },
    Known {
        case: "what FUSE has no word for",
        why: "FUSE has no FIEMAP",
        sides: BOTH,
        steps: &[("ioctl(&f, 0xC020_660B, fiemap.as_mut_ptr() as usize)", "Err(EOPNOTSUPP)")],
    },
    Known {
        case: "fallocate that moves what follows",
        why: "the kernel sends no such mode to FUSE",
        sides: BOTH,
        steps: &[
            ("fallocate(&f, FALLOC_FL_COLLAPSE_RANGE, 4096, 8192)", "Err(EOPNOTSUPP)"),
            ("fallocate(&f, FALLOC_FL_INSERT_RANGE, 4096, 8192)", "Err(EOPNOTSUPP)"),
            ("fallocate(&f, FALLOC_FL_UNSHARE_RANGE, 4096, 8192)", "Err(EOPNOTSUPP)"),
        ],
    },
    Known {
        case: "O_DIRECT that does not fit",
        why: "without passthrough O_DIRECT binds the kernel's own way to the daemon and not the daemon's to the disk",
        sides: &[ThroughDaemon],
        steps: &[
            ("direct_read(&direct, 100, 0, 0).map(|b| b.0.len())", "Ok(100)"),
            ("direct_read(&direct, 4096, 5, 0).map(|b| b.0.len())", "Ok(4096)"),
            ("direct_read(&direct, 4096, 0, 1).map(|b| b.0.len())", "Ok(4096)"),
            ("direct_write(&direct, 100, 0, 0)", "Ok(100)"),
            ("direct_write(&direct, 4096, 5, 0)", "Ok(4096)"),
            ("direct_write(&direct, 4096, 0, 1)", "Ok(4096)"),
        ],
    },
    Known {
        case: "flags of vectors that FUSE does not carry",
        why: "the kernel offers RWF_ATOMIC on no FUSE file",
        sides: BOTH,
        steps: &[(r#"pwritev2(&f, b"abcdef", 0, atomic)"#, "Err(EOPNOTSUPP)")],
    },
    Known {
        case: "which times an operation moves",
        why: "XFS leaves the times of what truncate(2) finds as long as it shall be; the mount truncates by descriptor",
        sides: BOTH,
        steps: &[(r#"moved("f", || truncate("f", 5))"#, r#""Ok(()) moves mtime ctime""#)],
    },
];
