//! The directory that is to be mounted: its file system, whether that reads directly, and the disks beneath. `look` asks the
//! system, which may take long or for ever where a server is gone, and so runs with a deadline; the rest judges what came of
//! it. Nothing is written. Called by `examine`.

use super::Finding;
use super::block::{self, Disk};
use super::machine::Machine;
use crate::failure::describe;
use crate::mounts::{self, Mount};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const SOURCE: &str = "source";
const DIRECT: &str = "direct io";
const DISK: &str = "disk";

/// Entries that are looked at for a regular file, of which alone the kernel tells how it is read directly.
const ENTRIES: usize = 1000;
/// The name that every mount needs for itself.
const RESERVED: &str = ".warpfs";

/// What the system says of a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    /// The file system's type, as in mountinfo.
    pub(super) kind: String,
    /// The file system's own options.
    pub(super) options: String,
    /// The block device beneath, `MAJOR:MINOR`.
    pub(super) device: Option<String>,
    pub(super) direct: Direct,
}

/// How files are read around the page cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Direct {
    /// No file was found to ask about.
    #[default]
    NoFile,
    /// At addresses and offsets that are multiples of so many bytes.
    Aligned {
        memory: u32,
        offset: u32,
    },
    /// O_DIRECT is accepted; nobody tells the alignment.
    Accepted,
    Refused,
    /// Looking failed, in the system's words.
    Unknown(String),
}

/// Looks at `path`; a directory that cannot be a source is wrong.
pub(super) fn look(path: &Path) -> Result<Place, Finding> {
    let shown = path.display().to_string();
    let path = path.to_path_buf();
    match mounts::patiently(move || see(&path)) {
        Some(seen) => seen,
        None => Err(Finding::wrong(SOURCE, format!("{shown}: its file system does not answer"))
            .so("look at its server or daemon; `umount -l` takes a dead mount away")),
    }
}

fn see(path: &Path) -> Result<Place, Finding> {
    let cannot = |e: io::Error| {
        let words = e.raw_os_error().map_or_else(|| e.to_string(), describe);
        Finding::wrong(SOURCE, format!("{}: {words}", path.display())).so(match e.kind() {
            io::ErrorKind::NotFound => "create it, or check the spelling",
            io::ErrorKind::PermissionDenied => "run as a user who may read it",
            _ => "name a directory that can be read",
        })
    };
    let path = path.canonicalize().map_err(cannot)?;
    let meta = std::fs::metadata(&path).map_err(cannot)?;
    if !meta.is_dir() {
        return Err(
            Finding::wrong(SOURCE, format!("{} is not a directory", path.display())).so("name the directory it is in")
        );
    }
    std::fs::read_dir(&path).map_err(cannot)?;
    let mount = mount_of(&path, meta.dev());
    let kind =
        mount.as_ref().map(|mount| mount.kind.as_str()).or_else(|| by_magic(&path)).unwrap_or("unknown").to_string();
    if kind == mounts::KIND {
        let source = mount.map(|mount| mount.source.display().to_string()).unwrap_or_default();
        return Err(Finding::wrong(SOURCE, format!("{} is on a warpfs mount itself", path.display()))
            .so(format!("name the directory that it fronts: {source}")));
    }
    if rustix::fs::lstat(path.join(RESERVED)).is_ok() {
        let what =
            format!("{} has an entry named {RESERVED}, which every warpfs mount needs for itself", path.display());
        return Err(Finding::wrong(SOURCE, what).so("rename that entry first"));
    }
    let device = block_device(meta.dev(), mount.as_ref());
    let direct = match some_file(&path) {
        Some(file) => direct(&file),
        None => Direct::NoFile,
    };
    let options = mount.map(|mount| mount.options).unwrap_or_default();
    Ok(Place { path, kind, options, device, direct })
}

/// By the mount's number, since directories are mounted over each other; before Linux 5.8 by the file system's.
fn mount_of(path: &Path, number: u64) -> Option<Mount> {
    let seen = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).ok();
    let id = seen.filter(|seen| seen.stx_mask & StatxFlags::MNT_ID.bits() != 0).map(|seen| seen.stx_mnt_id);
    let device = shown(number);
    mounts::list().into_iter().rfind(|mount| id.map_or(mount.device == device, |id| mount.id == id))
}

/// The type where the table of mounts does not show it, as in a chroot, from the number in statfs(2). ext2, ext3 and ext4 have
/// one number between them.
fn by_magic(path: &Path) -> Option<&'static str> {
    match rustix::fs::statfs(path).ok()?.f_type {
        0x5846_5342 => Some("xfs"),
        0x9123_683e => Some("btrfs"),
        0x2fc1_2fc1 => Some("zfs"),
        0x0102_1994 => Some("tmpfs"),
        0x794c_7630 => Some("overlay"),
        0x6969 => Some("nfs"),
        0x6573_5546 => Some("fuse"),
        _ => None,
    }
}

/// A device number as sysfs and mountinfo write it.
fn shown(number: u64) -> String {
    format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number))
}

/// The file system's own number, or that of the device that it was mounted from (btrfs has a number without a device).
fn block_device(number: u64, mount: Option<&Mount>) -> Option<String> {
    let number = if rustix::fs::major(number) != 0 {
        number
    } else {
        let meta = std::fs::metadata(&mount.filter(|mount| mount.source.starts_with("/dev"))?.source).ok()?;
        meta.file_type().is_block_device().then(|| meta.rdev())?
    };
    Some(shown(number))
}

/// A regular file at or below `folder` that is not empty, if one is found soon.
fn some_file(folder: &Path) -> Option<PathBuf> {
    let mut folders = VecDeque::from([folder.to_path_buf()]);
    let mut seen = 0;
    while let Some(folder) = folders.pop_front() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            seen += 1;
            if seen > ENTRIES {
                return None;
            }
            match entry.file_type() {
                Ok(kind) if kind.is_file() && entry.metadata().is_ok_and(|meta| meta.len() > 0) => {
                    return Some(entry.path());
                }
                Ok(kind) if kind.is_dir() => folders.push_back(entry.path()),
                _ => {}
            }
        }
    }
    None
}

fn direct(file: &Path) -> Direct {
    let seen = match rustix::fs::statx(CWD, file, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::DIOALIGN) {
        Ok(seen) => seen,
        Err(e) => return Direct::Unknown(describe(e.raw_os_error())),
    };
    if seen.stx_mask & StatxFlags::DIOALIGN.bits() != 0 {
        return match (seen.stx_dio_mem_align, seen.stx_dio_offset_align) {
            (0, _) | (_, 0) => Direct::Refused,
            (memory, offset) => Direct::Aligned { memory, offset },
        };
    }
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match rustix::fs::open(file, flags, Mode::empty()) {
        Ok(_) => Direct::Accepted,
        Err(rustix::io::Errno::INVAL) => Direct::Refused,
        Err(e) => Direct::Unknown(describe(e.raw_os_error())),
    }
}

/// The disks beneath, and what there is to say of the directory.
pub(super) fn check(machine: &Machine, place: &Place) -> (Vec<Disk>, Vec<Finding>) {
    let disks = place.device.as_deref().map(|number| block::disks(machine, number)).unwrap_or_default();
    let findings = vec![file_system(place), direct_io(&place.direct), disk(place, &disks)];
    (disks, findings)
}

/// What a type of file system means for a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Local,
    Network,
    Memory,
    Stacked,
    Fuse,
}

pub(super) fn family(kind: &str) -> Family {
    match kind {
        "nfs" | "nfs4" | "cifs" | "smb3" | "lustre" | "gpfs" | "beegfs" | "wekafs" | "scatefs" | "ceph" | "9p"
        | "afs" | "virtiofs" | "glusterfs" | "orangefs" | "ocfs2" | "gfs2" => Family::Network,
        "tmpfs" | "ramfs" | "hugetlbfs" => Family::Memory,
        "overlay" | "aufs" | "ecryptfs" => Family::Stacked,
        _ if kind == "fuse" || kind == "fuseblk" || kind.starts_with("fuse.") => Family::Fuse,
        _ => Family::Local,
    }
}

fn file_system(place: &Place) -> Finding {
    let (path, kind) = (place.path.display(), &place.kind);
    match family(kind) {
        Family::Local if kind == "unknown" => {
            Finding::unknown(SOURCE, format!("the table of mounts does not show what {path} is on"))
        }
        Family::Local | Family::Memory => Finding::ok(SOURCE, format!("{path} on {kind}")),
        Family::Network => Finding::note(
            SOURCE,
            format!(
                "{path} on {kind}, which others may change too: their changes are seen when {kind} sees them, and no \
                     notice tells of them"
            ),
        )
        .so("give changed files new names, or change them on this machine"),
        Family::Stacked => Finding::note(
            SOURCE,
            format!("{path} on {kind}, stacked on other file systems: who writes through a shared mapping is not seen"),
        )
        .so("mount the directory that lies below, such as a volume of the container, where there is one"),
        Family::Fuse => Finding::note(
            SOURCE,
            format!("{path} on {kind}, another FUSE file system: every read takes its daemon's way too"),
        )
        .so("mount what that one is mounted from, where it is a directory here"),
    }
}

fn direct_io(direct: &Direct) -> Finding {
    match direct {
        Direct::Aligned { memory, offset } => {
            Finding::ok(DIRECT, format!("at multiples of {offset} bytes in the file and {memory} in memory"))
        }
        Direct::Accepted => Finding::ok(DIRECT, "accepted; at what multiples of bytes is unknown"),
        Direct::Refused => Finding::note(DIRECT, "this file system has none: what is read goes through the page cache")
            .so("nothing, the buffered route serves every file; direct reads take ext4 or xfs"),
        Direct::NoFile => Finding::unknown(DIRECT, "there is no file to ask about"),
        Direct::Unknown(why) => Finding::unknown(DIRECT, why),
    }
}

fn disk(place: &Place, disks: &[Disk]) -> Finding {
    let Some(number) = &place.device else {
        return match family(&place.kind) {
            Family::Local => Finding::unknown(DISK, format!("{} does not name its device", place.kind)),
            _ => Finding::ok(DISK, format!("{} is on none of this machine's", place.kind)),
        };
    };
    let Some(first) = disks.first() else {
        return Finding::unknown(DISK, format!("/sys/dev/block does not show the device {number}"));
    };
    let words: Vec<String> = disks.iter().map(Disk::words).collect();
    let below = if first.layers.is_empty() { String::new() } else { format!(" below {}", first.layers.join(", ")) };
    Finding::ok(DISK, format!("{}{below}", words.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    fn on(kind: &str) -> Place {
        Place { path: "/data".into(), kind: kind.into(), ..Place::default() }
    }

    #[test]
    fn what_cannot_be_a_source_is_wrong() {
        let folder = tempfile::tempdir().expect("a folder");
        let none = look(&folder.path().join("none")).expect_err("nothing there");
        assert_eq!((none.state, none.remedy.as_deref()), (State::Wrong, Some("create it, or check the spelling")));
        assert!(none.what.ends_with("none: No such file or directory"), "{none:?}");
        std::fs::write(folder.path().join("file"), "x").expect("written");
        assert!(look(&folder.path().join("file")).expect_err("a file").what.contains("not a directory"));
        let place = look(folder.path()).expect("a directory");
        assert_ne!((place.kind.as_str(), place.direct), ("", Direct::NoFile), "its file was found");
        std::fs::create_dir(folder.path().join(RESERVED)).expect("created");
        assert!(look(folder.path()).expect_err("reserved").what.contains(RESERVED));
    }

    #[test]
    fn the_kernels_own_file_systems_are_named() {
        let place = look(Path::new("/proc/sys/kernel")).expect("a directory");
        assert_eq!((place.kind.as_str(), place.device), ("proc", None));
        assert_eq!(by_magic(Path::new("/proc")), None, "no number of ours");
        let kind = look(Path::new("/")).map(|place| place.kind).unwrap_or_default();
        assert!(
            by_magic(Path::new("/"))
                .is_none_or(|known| kind == known || kind.starts_with("nfs") || kind.starts_with("fuse"))
        );
    }

    #[test]
    fn only_a_plain_file_system_goes_without_a_note() {
        for (kind, state) in [
            ("ext4", State::Ok),
            ("tmpfs", State::Ok),
            ("nfs4", State::Note),
            ("overlay", State::Note),
            ("fuse.sshfs", State::Note),
            ("fuseblk", State::Note),
        ] {
            let finding = file_system(&on(kind));
            assert_eq!(finding.state, state, "{finding:?}");
            assert!(finding.what.contains(kind) && finding.remedy.is_some() == (state == State::Note));
        }
        assert!(file_system(&on("unknown")).what.starts_with("unknown"));
    }

    #[test]
    fn direct_reads_are_told_apart() {
        assert!(direct_io(&Direct::Aligned { memory: 4, offset: 512 }).what.contains("512 bytes in the file and 4"));
        assert_eq!(direct_io(&Direct::Refused).state, State::Note);
        assert!(direct_io(&Direct::NoFile).what.starts_with("unknown"));
    }

    #[test]
    fn disks_are_named_with_what_lies_on_them() {
        let disk_of = |layers: &[&str]| Disk {
            name: "nvme0n1".into(),
            kind: block::Kind::Nvme("pcie".into()),
            layers: layers.iter().map(ToString::to_string).collect(),
            controllers: Vec::new(),
        };
        let place = Place { device: Some("9:0".into()), ..on("xfs") };
        assert_eq!(disk(&place, &[disk_of(&["md0 (raid0)"])]).what, "nvme0n1 (NVMe) below md0 (raid0)");
        assert!(disk(&place, &[]).what.starts_with("unknown"));
        assert!(disk(&on("zfs"), &[]).what.starts_with("unknown"));
        assert_eq!(disk(&on("nfs"), &[]).what, "nfs is on none of this machine's");
    }
}
