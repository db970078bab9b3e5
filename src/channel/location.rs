//! Where the channel's socket is, and who may connect: `/run/warpfs` for root, `$XDG_RUNTIME_DIR/warpfs` for users, or
//! wherever `WARPFS_SOCKET` says.

use crate::failure::{Failure, Result};
use crate::protocol::Code;
use crate::socket::VARIABLE;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Bytes of a socket's path at most: what `sockaddr_un` takes with its NUL, less what a longer first name may need.
const PATH_LIMIT: usize = 107 - 16;

/// The path for the daemon that serves `mountpoint`, unless the user `asked` for one. Its folder exists afterwards, and
/// sockets of dead daemons in it are gone. `open`: other users may connect.
pub fn choose(asked: Option<&Path>, mountpoint: &Path, open: bool) -> Result<PathBuf> {
    if let Some(path) = asked {
        return checked(path.to_path_buf());
    }
    let uid = rustix::process::geteuid().as_raw();
    let folder = if uid == 0 {
        PathBuf::from("/run/warpfs")
    } else {
        match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_dir()) {
            Some(runtime) => runtime.join("warpfs"),
            None => PathBuf::from(format!("/tmp/warpfs-{uid}")),
        }
    };
    prepare(&folder, uid, open)?;
    sweep(&folder);
    let name: String = mountpoint
        .file_name()
        .map(|name| {
            name.to_string_lossy().chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c)).collect()
        })
        .unwrap_or_default();
    let name: String = name.chars().take(32).collect();
    checked(folder.join(format!("{name}-{}.sock", std::process::id())))
}

fn checked(path: PathBuf) -> Result<PathBuf> {
    if path.as_os_str().len() <= PATH_LIMIT {
        return Ok(path);
    }
    let message = format!("{}: too long for a socket's path ({PATH_LIMIT} bytes); set {VARIABLE}", path.display());
    Err(Failure { errno: libc::ENAMETOOLONG, ..Failure::new(Code::BadRequest, message) })
}

/// The folder, ours, and closed to others unless they may connect.
fn prepare(folder: &Path, uid: u32, open: bool) -> Result<()> {
    let shown = folder.display();
    let made = std::fs::DirBuilder::new().mode(0o700).recursive(true).create(folder);
    made.map_err(|e| Failure::system(format!("cannot create {shown} for the channel's socket"), e))?;
    let found = std::fs::symlink_metadata(folder).map_err(|e| Failure::system(&shown, e))?;
    if found.uid() != uid || !found.is_dir() {
        let message = format!("{shown} is not a folder of user {uid}: remove it, or set {VARIABLE}");
        return Err(Failure::new(Code::Permission, message));
    }
    if open && uid == 0 {
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(folder, mode).map_err(|e| Failure::system(&shown, e))?;
    }
    Ok(())
}

/// Removes the sockets of daemons that are gone: the name says whose it is.
fn sweep(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let owner = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".sock")?.rsplit('-').next());
        let owner = owner.and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) && is_stale(&path) {
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Whether there is a socket at which nobody listens. Something else than a socket is never stale.
pub fn is_stale(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
        && UnixStream::connect(path).is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused)
}
