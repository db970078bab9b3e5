//! The differences that are known, each with its reason. A step that is listed here must give exactly what is listed: a
//! difference that goes away, or becomes another, fails until it is taken out.

use super::stage::Side;

pub struct Known {
    pub case: &'static str,
    pub step: &'static str,
    pub sides: &'static [Side],
    /// What the mount gives.
    pub mount: &'static str,
    pub why: &'static str,
}

const BOTH: &[Side] = &[Side::Passthrough, Side::ThroughDaemon];

const PASSTHROUGH: &[Side] = &[Side::Passthrough];
const THROUGH_DAEMON: &[Side] = &[Side::ThroughDaemon];

pub const KNOWN: &[Known] = &[
    Known {
        case: "set-user-id bits and what takes them",
        step: "mode(\"f\") (time 3)",
        sides: PASSTHROUGH,
        mount: "Ok(\"775\")",
        why: "the kernel writes with the rights at registration, which are none to keep the bits: else they would \
              survive everybody's writes; now root's writes take them too",
    },
    Known {
        case: "flags of vectors that FUSE does not carry",
        step: "preadv2(&f, 6, 2, nowait)",
        sides: BOTH,
        mount: "Err(EOPNOTSUPP)",
        why: "the kernel offers RWF_NOWAIT and RWF_DONTCACHE on no FUSE file",
    },
    Known {
        case: "flags of vectors that FUSE does not carry",
        step: "preadv2(&f, 6, 20, nowait)",
        sides: BOTH,
        mount: "Err(EOPNOTSUPP)",
        why: "the kernel offers RWF_NOWAIT and RWF_DONTCACHE on no FUSE file",
    },
    Known {
        case: "flags of vectors that FUSE does not carry",
        step: "pwritev2(&f, b\"abcdef\", 0, dontcache)",
        sides: BOTH,
        mount: "Err(EOPNOTSUPP)",
        why: "the kernel offers RWF_NOWAIT and RWF_DONTCACHE on no FUSE file",
    },
    Known {
        case: "flags of vectors that FUSE does not carry",
        step: "preadv2(&f, 6, 0, dontcache)",
        sides: BOTH,
        mount: "Err(EOPNOTSUPP)",
        why: "the kernel offers RWF_NOWAIT and RWF_DONTCACHE on no FUSE file",
    },
    Known {
        case: "flags of vectors that FUSE does not carry",
        step: "size(\"f\")",
        sides: BOTH,
        mount: "Ok(16)",
        why: "a WRITE says O_APPEND of the descriptor and not RWF_NOAPPEND of the call",
    },
    Known {
        case: "O_APPEND comes and goes",
        step: "size(\"f\")",
        sides: PASSTHROUGH,
        mount: "Ok(11)",
        why: "the kernel opens the backing once, with the flags of the open",
    },
    Known {
        case: "what FUSE has no word for",
        step: "statx(0x800).map(|x| x.stx_mask & 0x800 != 0 && x.stx_btime.tv_sec > 1_600_000_000)",
        sides: BOTH,
        mount: "Ok(false)",
        why: "the birth time is not asked of FUSE",
    },
    Known {
        case: "what FUSE has no word for",
        step: "statx(0x2000).map(|x| x.stx_mask & 0x2000 != 0)",
        sides: BOTH,
        mount: "Ok(false)",
        why: "how O_DIRECT has to be aligned is not asked of FUSE",
    },
    Known {
        case: "what FUSE has no word for",
        step: "open(\".\", RDWR | libc::O_TMPFILE)",
        sides: BOTH,
        mount: "Err(EOPNOTSUPP)",
        why: "fuser has no TMPFILE",
    },
    Known {
        case: "what FUSE has no word for",
        step: "rustix::fs::ioctl_getflags(&f).map(|f| f.bits() & 0x10).map_err(Errno::from)",
        sides: BOTH,
        mount: "Err(ENOTTY)",
        why: "the flags of chattr are not passed on",
    },
    Known {
        case: "what FUSE has no word for",
        step: "rustix::fs::ioctl_setflags(&g, rustix::fs::IFlags::NODUMP).map_err(Errno::from)",
        sides: BOTH,
        mount: "Err(ENOTTY)",
        why: "the flags of chattr are not passed on",
    },
    Known {
        case: "what FUSE has no word for",
        step: "rustix::fs::ioctl_ficlone(&g, &f).map_err(Errno::from)",
        sides: BOTH,
        mount: "Err(EOPNOTSUPP)",
        why: "FUSE has no word for shared extents",
    },
    Known {
        case: "what FUSE has no word for",
        step: "lseek(&f, i64::MAX, SEEK_SET)",
        sides: BOTH,
        mount: "Ok(9223372036854775807)",
        why: "the kernel takes any offset on FUSE, and every file system has its own limit",
    },
    Known {
        case: "what FUSE has no word for",
        step: "ioctl(&f, 0xC020_660B, fiemap.as_mut_ptr() as usize)",
        sides: BOTH,
        mount: "Err(EOPNOTSUPP)",
        why: "FUSE has no FIEMAP",
    },
    Known {
        case: "fallocate that moves what follows",
        step: "fallocate(&f, FALLOC_FL_COLLAPSE_RANGE, 4096, 8192)",
        sides: BOTH,
        mount: "Err(EOPNOTSUPP)",
        why: "the kernel sends no such mode to FUSE",
    },
    Known {
        case: "fallocate that moves what follows",
        step: "fallocate(&f, FALLOC_FL_INSERT_RANGE, 4096, 8192)",
        sides: BOTH,
        mount: "Err(EOPNOTSUPP)",
        why: "the kernel sends no such mode to FUSE",
    },
    Known {
        case: "O_DIRECT that does not fit",
        step: "direct_read(&direct, 100, 0, 0).map(|b| b.0.len())",
        sides: THROUGH_DAEMON,
        mount: "Ok(100)",
        why: "without passthrough O_DIRECT binds the kernel's own way to the daemon and not the daemon's to the disk",
    },
    Known {
        case: "O_DIRECT that does not fit",
        step: "direct_read(&direct, 4096, 5, 0).map(|b| b.0.len())",
        sides: THROUGH_DAEMON,
        mount: "Ok(4096)",
        why: "without passthrough O_DIRECT binds the kernel's own way to the daemon and not the daemon's to the disk",
    },
    Known {
        case: "O_DIRECT that does not fit",
        step: "direct_read(&direct, 4096, 0, 1).map(|b| b.0.len())",
        sides: THROUGH_DAEMON,
        mount: "Ok(4096)",
        why: "without passthrough O_DIRECT binds the kernel's own way to the daemon and not the daemon's to the disk",
    },
    Known {
        case: "O_DIRECT that does not fit",
        step: "direct_write(&direct, 100, 0, 0)",
        sides: THROUGH_DAEMON,
        mount: "Ok(100)",
        why: "without passthrough O_DIRECT binds the kernel's own way to the daemon and not the daemon's to the disk",
    },
    Known {
        case: "O_DIRECT that does not fit",
        step: "direct_write(&direct, 4096, 5, 0)",
        sides: THROUGH_DAEMON,
        mount: "Ok(4096)",
        why: "without passthrough O_DIRECT binds the kernel's own way to the daemon and not the daemon's to the disk",
    },
    Known {
        case: "O_DIRECT that does not fit",
        step: "direct_write(&direct, 4096, 0, 1)",
        sides: THROUGH_DAEMON,
        mount: "Ok(4096)",
        why: "without passthrough O_DIRECT binds the kernel's own way to the daemon and not the daemon's to the disk",
    },
    Known {
        case: "devices by name",
        step: "open(\"null\", RDWR).map(|null| write(&null, b\"x\"))",
        sides: BOTH,
        mount: "Err(EACCES)",
        why: "device nodes have no effect on the mount (nodev)",
    },
];
