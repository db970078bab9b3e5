//! The ioctls, as a client calls them on a descriptor of the mount. No session is needed for any of these.

use crate::failure::{Failure, Result, describe, usual_errno};
use crate::protocol::{
    Code, DeviceUuid, EvictIoctl, IOCTL_EVICT, IOCTL_MATERIALIZE, IOCTL_STATUS, IOCTL_VERSION, MATERIALIZE_CANCEL,
    MaterializeIoctl, NONE, Secret, State, StatusIoctl, VersionIoctl, Wire, field_text,
};
use rustix::fs::{FileType, Mode, OFlags};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

/// Which device is meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The daemon's first.
    #[default]
    Default,
    Uuid(DeviceUuid),
}

impl Device {
    fn uuid(self) -> DeviceUuid {
        match self {
            Device::Default => NONE,
            Device::Uuid(uuid) => uuid,
        }
    }
}

/// How far a load is, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub loaded: u64,
    pub total: u64,
}

/// Opens a regular file of the mount for reading. What is something else is refused without being opened, so that no
/// FIFO can make the caller wait.
pub fn open(path: &Path) -> Result<File> {
    let failed = |e| Failure::system(path.display(), e);
    let kind = FileType::from_raw_mode(rustix::fs::stat(path).map_err(failed)?.st_mode);
    if kind != FileType::RegularFile {
        return Err(crate::source::open::not_regular(path, kind));
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?))
}

/// Who serves the mount that `file` (or a directory) is on. `NotWarpfs` where it is on none.
pub fn version(file: impl AsFd, path: &Path) -> Result<VersionIoctl> {
    let mut message = VersionIoctl::zeroed();
    call(&file, IOCTL_VERSION, &mut message, path, |_| (0, String::new()))?;
    Ok(message)
}

/// Asks until `file` is resident; calls `watch` about once a second until then. With a secret, the reply is a grant that
/// has to be given back.
pub fn materialize(
    file: impl AsFd,
    path: &Path,
    secret: &Secret,
    device: Device,
    watch: &mut dyn FnMut(Progress),
) -> Result<MaterializeIoctl> {
    loop {
        let mut message = MaterializeIoctl::zeroed();
        message.secret = *secret;
        message.device = device.uuid();
        call(&file, IOCTL_MATERIALIZE, &mut message, path, |m| (m.error, field_text(&m.message)))?;
        if message.state == State::Resident as u32 {
            return Ok(message);
        }
        watch(Progress { loaded: message.loaded, total: message.data_length });
    }
}

/// Ends the load of `file`, unless another program wants it too; says what is left.
pub fn cancel(file: impl AsFd, path: &Path, device: Device) -> Result<State> {
    let mut message = MaterializeIoctl::zeroed();
    message.device = device.uuid();
    message.flags = MATERIALIZE_CANCEL;
    call(&file, IOCTL_MATERIALIZE, &mut message, path, |m| (m.error, field_text(&m.message)))?;
    Ok(State::from_number(message.state).unwrap_or(State::Absent))
}

/// Where `file` stands. Starts nothing.
pub fn standing(file: impl AsFd, path: &Path, device: Device) -> Result<StatusIoctl> {
    let mut message = StatusIoctl::zeroed();
    message.device = device.uuid();
    call(&file, IOCTL_STATUS, &mut message, path, |_| (0, String::new()))?;
    Ok(message)
}

/// Gives `file`'s copies up on every device.
pub fn evict(file: impl AsFd, path: &Path) -> Result<EvictIoctl> {
    let mut message = EvictIoctl::zeroed();
    call(&file, IOCTL_EVICT, &mut message, path, |_| (0, String::new()))?;
    Ok(message)
}

/// One ioctl. `said` reads the daemon's own words out of the reply of a failed one.
fn call<M: Wire>(
    file: impl AsFd,
    number: u32,
    message: &mut M,
    path: &Path,
    said: impl FnOnce(&M) -> (u32, String),
) -> Result<()> {
    let mut bytes = message.encode();
    let descriptor = file.as_fd().as_raw_fd();
    let result = loop {
        // SAFETY: the number names exactly `M::SIZE` bytes, which the buffer has, and the kernel writes no more.
        let result = unsafe { libc::ioctl(descriptor, number.into(), bytes.as_mut_ptr()) };
        let error = std::io::Error::last_os_error();
        if result >= 0 {
            break Ok(());
        }
        if error.kind() != std::io::ErrorKind::Interrupted {
            break Err(error.raw_os_error().unwrap_or(libc::EIO));
        }
    };
    *message = M::decode(&bytes).expect("the buffer has its size");
    let Err(errno) = result else { return Ok(()) };
    let (code, text) = said(message);
    if let Some(code) = Code::from_number(code) {
        return Err(Failure { code, errno, message: text });
    }
    let shown = path.display();
    Err(match errno {
        libc::ENOTTY => Failure::new(Code::NotWarpfs, format!("{shown}: {}", elsewhere(path))),
        libc::ENOTCONN | libc::ECONNABORTED => {
            let message = format!("{shown}: the daemon of this mount is gone; `warpfs umount` it and mount it again");
            Failure::new(Code::NotRunning, message)
        }
        _ => {
            let code = Code::ALL.into_iter().find(|code| usual_errno(*code) == errno).unwrap_or(Code::Io);
            Failure { code, errno, message: format!("{shown}: {}", describe(errno)) }
        }
    })
}

/// Of a path on no mount of ours: which one may have been meant.
fn elsewhere(path: &Path) -> String {
    let meant = path.canonicalize().ok().and_then(|whole| {
        let mount = crate::mounts::ours().into_iter().find(|mount| whole.starts_with(&mount.source))?;
        let there = mount.mountpoint.join(whole.strip_prefix(&mount.source).ok()?);
        Some(format!("is not on a warpfs mount; it can be had as {}", there.display()))
    });
    meant.unwrap_or_else(|| "is not on a warpfs mount (`warpfs status` lists those there are)".into())
}
