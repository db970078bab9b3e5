//! What is checked before a mount, and the sentence for each way in which it can fail. It changes nothing but one thing:
//! what a dead daemon left at the mount point is taken away. Called by `mount` only.

use super::{Code, Failure, MountOptions, Result, has};
use crate::filesystem::control::NAME;
use crate::mounts;
use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The source is a directory that a mount can front.
pub(super) fn source(source: &Path) -> Result<()> {
    let meta = std::fs::metadata(source)
        .map_err(|e| Failure::system(format!("cannot mount the directory {}", source.display()), e))?;
    if !meta.is_dir() {
        return Err(not_a_directory("the source", source));
    }
    match rustix::fs::lstat(source.join(NAME)) {
        Err(Errno::NOENT) => Ok(()),
        _ if is_warpfs(source) => Err(Failure::new(
            Code::BadRequest,
            format!("{} is a warpfs mount itself: mount its source", source.display()),
        )),
        Ok(_) => Err(Failure::new(
            Code::BadRequest,
            format!(
                "{} has an entry named {NAME}, which every warpfs mount needs for itself: rename that entry first",
                source.display()
            ),
        )),
        Err(e) => Err(Failure::system(
            format!("cannot mount the directory {}, because this user cannot look into it", source.display()),
            e,
        )),
    }
}

/// The mount point is a directory on which the mount harms nobody.
pub(super) fn mountpoint(options: &MountOptions) -> Result<()> {
    let point = &options.mountpoint;
    if mounts::is_dead(point) {
        tracing::warn!("{}: a dead mount was left here; it is taken away", point.display());
        mounts::detach(point)?;
    }
    let meta = std::fs::metadata(point)
        .map_err(|e| Failure::system(format!("cannot use the mount point {}", point.display()), e))?;
    if !meta.is_dir() {
        return Err(not_a_directory("the mount point", point));
    }
    if options.nonempty {
        return inside(options);
    }
    if is_warpfs(point) {
        return Err(Failure::new(
            Code::BadRequest,
            format!("{0} is a warpfs mount already: `warpfs umount {0}` first", point.display()),
        ));
    }
    let itself = std::fs::metadata(&options.source).is_ok_and(|s| (s.dev(), s.ino()) == (meta.dev(), meta.ino()));
    let mut entries = std::fs::read_dir(point)
        .map_err(|e| Failure::system(format!("cannot read the mount point {}", point.display()), e))?;
    if !itself && entries.next().is_some() {
        return Err(Failure::new(
            Code::BadRequest,
            format!(
                "the mount point {} is not empty, and its files would be hidden: choose an empty directory, or say \
                 `--nonempty`",
                point.display()
            ),
        ));
    }
    inside(options)
}

/// A mount inside its own source would lead into itself for ever.
fn inside(options: &MountOptions) -> Result<()> {
    let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let (source, point) = (real(&options.source), real(&options.mountpoint));
    if point != source && point.starts_with(&source) {
        return Err(Failure::new(
            Code::BadRequest,
            format!(
                "the mount point {} lies inside the source {}: choose one outside, or mount the source over itself",
                point.display(),
                source.display()
            ),
        ));
    }
    Ok(())
}

/// FUSE is there for this user.
pub(super) fn device() -> Result<()> {
    let open = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    match open {
        Ok(_) => {}
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) => {
            return Err(Failure::new(
                Code::Unsupported,
                "there is no /dev/fuse: `modprobe fuse`, or give the container that device (--device /dev/fuse)",
            ));
        }
        Err(e) => {
            let failure = Failure::system("cannot open /dev/fuse", e);
            let message = format!("{}: ask for access to it (a container needs --device /dev/fuse)", failure.message);
            return Err(Failure { message, ..failure });
        }
    }
    if !has(CapabilitySet::SYS_ADMIN) && mounts::helper().is_none() {
        return Err(Failure::new(
            Code::Permission,
            "mounting as an ordinary user needs fusermount3: `apt install fuse3`, or run as root",
        ));
    }
    Ok(())
}

/// The mount itself was refused.
pub(super) fn refused(options: &MountOptions, error: &io::Error) -> Failure {
    let point = options.mountpoint.display();
    let text = error.to_string();
    if text.contains("user_allow_other") {
        let message = format!(
            "cannot mount {point} for other users: the line `user_allow_other` has to be in /etc/fuse.conf first"
        );
        return Failure::new(Code::Permission, message);
    }
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    let code = match error.kind() {
        io::ErrorKind::PermissionDenied => Code::Permission,
        _ => Code::Io,
    };
    Failure { code, errno, message: format!("cannot mount {point}: {}", text.trim()) }
}

fn not_a_directory(what: &str, path: &Path) -> Failure {
    let message = format!("{what} {} is not a directory", path.display());
    Failure { errno: libc::ENOTDIR, ..Failure::new(Code::NotRegular, message) }
}

/// Whether a mount of ours lies on top of `path`.
fn is_warpfs(path: &Path) -> bool {
    mounts::at(path).is_some_and(|mount| mount.kind == mounts::KIND)
}
