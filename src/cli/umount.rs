//! `warpfs umount`: unmounts, and waits until the daemon is gone.

use super::Done;
use crate::failure::Failure;
use crate::mounts;
use crate::protocol::Code;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Unmount MOUNTPOINT, and end its daemon.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The directory on which it is mounted
    mountpoint: PathBuf,
    /// Take the mount away even while programs use it; they keep what they have open
    #[arg(long, short)]
    lazy: bool,
}

/// How often a mount in use is tried again, and how long that takes each time.
const GLANCES: u32 = 5;
const GLANCE: Duration = Duration::from_millis(100);
/// How long the daemon may take to end.
const PATIENCE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

pub(super) fn run(args: &Args) -> Done {
    let mountpoint = resolve(&args.mountpoint);
    let shown = mountpoint.display();
    let mount = mounts::at(&mountpoint).filter(|mount| mount.kind == mounts::KIND);
    if mount.is_none() {
        let what = if mountpoint.symlink_metadata().is_ok() { "is not a warpfs mount" } else { "does not exist" };
        let message = format!("{shown} {what}; `warpfs status` lists the mounts");
        return Err(Failure::new(Code::NotWarpfs, message));
    }
    // Nothing is asked of a daemon that may not answer.
    if args.lazy || mounts::is_dead(&mountpoint) {
        return mounts::detach(&mountpoint);
    }
    let daemon = daemon_of(&mountpoint);
    // Who only looks at it, as `warpfs status` and a file manager do, is gone in a moment.
    for _ in 0..GLANCES {
        match mounts::unmount(&mountpoint) {
            Err(busy) if busy.errno == libc::EBUSY => std::thread::sleep(GLANCE),
            other => return other.and_then(|()| wait(daemon, &mountpoint)),
        }
    }
    mounts::unmount(&mountpoint)?;
    wait(daemon, &mountpoint)
}

/// Waits until the daemon, if it is known, has ended.
fn wait(daemon: Option<OwnedFd>, mountpoint: &Path) -> Done {
    let Some(daemon) = daemon else { return Ok(()) };
    let mut ended = [PollFd::new(&daemon, PollFlags::IN)];
    if poll(&mut ended, Some(&PATIENCE)) == Ok(0) {
        let shown = mountpoint.display();
        let message = format!(
            "{shown} is unmounted, but its daemon is still busy after {} s: files of it are open, or a bind mount or another mount namespace (a container) still has it",
            PATIENCE.tv_sec
        );
        return Err(Failure::new(Code::Io, message));
    }
    Ok(())
}

/// The mount point as the kernel lists it, without a look at the mount itself, which may be dead or stopped.
fn resolve(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    if mounts::at(&absolute).is_some() {
        return absolute;
    }
    if let Ok(target) = absolute.read_link() {
        return absolute.parent().unwrap_or(&absolute).join(target).canonicalize().unwrap_or(absolute);
    }
    match (absolute.parent().and_then(|folder| folder.canonicalize().ok()), absolute.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => absolute,
    }
}

/// The daemon's process, as its statistics name it, unless that number is somebody else's here (the daemon may be in
/// another PID namespace).
fn daemon_of(mountpoint: &Path) -> Option<OwnedFd> {
    let path = mountpoint.join(".warpfs/stats");
    let stats = mounts::patiently(|| std::fs::read_to_string(path))?.ok()?;
    let stats: serde_json::Value = serde_json::from_str(&stats).ok()?;
    let pid = i32::try_from(stats.get("pid")?.as_i64()?).ok()?;
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    (name.trim_end() == "warpfs").then_some(process)
}
