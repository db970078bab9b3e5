//! What is mounted where, as the kernel says, and taking a mount away. Used by the daemon's supervisor and by the
//! command line; never touches the mounts themselves more than it must, since a dead one blocks whoever does.

use crate::failure::{Failure, Result};
use crate::protocol::Code;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// One line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The mount's number, as statx tells it of every file.
    pub id: u64,
    pub mountpoint: PathBuf,
    /// `major:minor`, the same for every place at which one file system is mounted.
    pub device: String,
    /// `fuse.warpfs` for ours.
    pub kind: String,
    /// For ours, the directory that is fronted.
    pub source: PathBuf,
    /// The options of the file system itself, with commas.
    pub options: String,
}

/// The type under which the kernel lists our mounts.
pub const KIND: &str = "fuse.warpfs";

/// Every mount that this process sees, the oldest first.
pub fn list() -> Vec<Mount> {
    of_table(&std::fs::read("/proc/self/mountinfo").unwrap_or_default())
}

/// Every mount in a text of the form of `/proc/self/mountinfo`.
pub fn of_table(table: &[u8]) -> Vec<Mount> {
    table.split(|b| *b == b'\n').filter_map(parse).collect()
}

/// Our mounts.
pub fn ours() -> Vec<Mount> {
    list().into_iter().filter(|mount| mount.kind == KIND).collect()
}

/// The program that mounts for ordinary users, where fuser looks for it.
pub fn helper() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("FUSERMOUNT_PATH") {
        return Some(PathBuf::from(path));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain([PathBuf::from("/bin"), PathBuf::from("/sbin")]);
    places.flat_map(|dir| [dir.join("fusermount3"), dir.join("fusermount")]).find(|path| path.is_file())
}

fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|b| *b == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let device = String::from_utf8_lossy(fields.nth(1)?).into_owned();
    let mountpoint = path(fields.nth(1)?);
    // Optional fields follow, up to a lone hyphen.
    fields.find(|field| *field == b"-")?;
    let kind = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = path(fields.next()?);
    let options = String::from_utf8_lossy(fields.next().unwrap_or_default()).into_owned();
    Some(Mount { id, mountpoint, device, kind, source, options })
}

/// A field of mountinfo, in which space, tab, newline and backslash are octal escapes.
fn path(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let escape = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match escape.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                out.push(byte);
                rest = &tail[3..];
            }
            _ => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

/// Every place at which the file system with this device number is mounted.
pub fn of_device(device: Option<&str>) -> Vec<PathBuf> {
    let ours = list().into_iter().filter(|mount| Some(mount.device.as_str()) == device);
    ours.map(|mount| mount.mountpoint).collect()
}

/// What `look` finds at a mount, unless the daemon behind it does not answer: then nothing, after two seconds. A thread
/// that waits in vain ends with the process.
pub fn patiently<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || drop(send.send(look())));
    receive.recv_timeout(std::time::Duration::from_secs(2)).ok()
}

/// The topmost mount at `mountpoint`.
pub fn at(mountpoint: &Path) -> Option<Mount> {
    list().into_iter().rfind(|mount| mount.mountpoint == mountpoint)
}

/// Whether a FUSE mount whose daemon is gone lies on `mountpoint`.
pub fn is_dead(mountpoint: &Path) -> bool {
    let fuse = at(mountpoint).is_some_and(|mount| mount.kind.starts_with("fuse"));
    let place = mountpoint.to_path_buf();
    // Not stat: the kernel may still answer that from what it remembers.
    let state = if fuse { patiently(move || rustix::fs::statfs(&place).map(drop)) } else { None };
    state.is_some_and(|state| state.is_err_and(|e| matches!(e, Errno::NOTCONN | Errno::CONNABORTED)))
}

/// Unmounts, and fails where somebody uses the mount.
pub fn unmount(mountpoint: &Path) -> Result<()> {
    take_away(mountpoint, UnmountFlags::empty(), "-u")
}

/// Takes the mount out of the tree at once; who still uses it keeps it until they are done.
pub fn detach(mountpoint: &Path) -> Result<()> {
    take_away(mountpoint, UnmountFlags::DETACH, "-uz")
}

fn take_away(mountpoint: &Path, flags: UnmountFlags, helper_flags: &str) -> Result<()> {
    let shown = mountpoint.display();
    match rustix::mount::unmount(mountpoint, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => return Ok(()),
        Err(Errno::BUSY) => return Err(busy(mountpoint)),
        // Only root may; everybody else has a helper for it.
        Err(Errno::PERM) => {}
        Err(e) => return Err(Failure::system(format!("cannot unmount {shown}"), e)),
    }
    let helper = Command::new("fusermount3").arg(helper_flags).arg("--").arg(mountpoint).stdin(Stdio::null()).output();
    let output = helper.map_err(|e| {
        let message = format!("cannot unmount {shown}: fusermount3 cannot be run ({e}); install the package fuse3");
        Failure::new(Code::Permission, message)
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("busy") {
        return Err(busy(mountpoint));
    }
    Err(Failure::new(Code::Permission, format!("cannot unmount {shown}: {}", said.trim())))
}

fn busy(mountpoint: &Path) -> Failure {
    let shown = mountpoint.display();
    let message = format!(
        "{shown} is in use: a program has a file of it open, or is in a directory of it; `fuser -vm {}` names it, and `warpfs umount --lazy` does not wait for it",
        String::from_utf8_lossy(mountpoint.as_os_str().as_bytes())
    );
    Failure { errno: libc::EBUSY, ..Failure::new(Code::Io, message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mountinfo_is_read() {
        let line = br"36 35 98:0 / /mnt/a\040b rw,noatime shared:1 - fuse.warpfs /data\0541 rw,user_id=0";
        let mount = parse(line).expect("well formed");
        assert_eq!(mount.mountpoint, Path::new("/mnt/a b"));
        assert_eq!((mount.kind.as_str(), mount.device.as_str()), (KIND, "98:0"));
        assert_eq!(mount.source, Path::new("/data,1"));
        assert_eq!((mount.id, mount.options.as_str()), (36, "rw,user_id=0"));
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn what_is_mounted_is_found_and_alive() {
        // Not the root, which is no mount in a chroot.
        assert_eq!(at(Path::new("/proc")).map(|mount| mount.kind).as_deref(), Some("proc"));
        assert!(!is_dead(Path::new("/proc")));
        assert_eq!(at(Path::new("/proc/self")), None);
    }
}
