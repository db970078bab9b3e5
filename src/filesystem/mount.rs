//! Bringing a mount up and down: the checks before it, what is asked of the kernel, the workers, and taking it away
//! again. The source's directory is opened before the mount covers it, so a directory can be mounted over itself.
//! Called by the daemon.

mod checks;

use super::FileSystem;
use super::control::{Control, Queue};
use super::fuse::{Fuse, Workers};
use super::handle::Handles;
use super::inode::Inodes;
use super::status::Status;
use crate::cache::Cache;
use crate::config::MountOptions;
use crate::failure::{Failure, Result};
use crate::mounts;
use crate::protocol::Code;
use fuser::{Config, InitFlags, KernelConfig, MountOption, Session, SessionACL};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags, StatVfsMountFlags};
use rustix::thread::CapabilitySet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

/// `f_type` of overlayfs (linux/magic.h).
const OVERLAYFS_MAGIC: i64 = 0x794c_7630;
/// `f_type` of file systems of which a close has nothing to say: ext2 to ext4, XFS, Btrfs, F2FS, ZFS, tmpfs.
const LOCAL: [i64; 6] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x2fc1_2fc1, 0x0102_1994];
/// Largest write that the kernel sends at once, in bytes.
const MAX_WRITE: u32 = 1 << 20;
/// Read-aheads and other background requests that the kernel sends at most before it waits for answers.
const MAX_BACKGROUND: u16 = 64;

/// What the daemon knows and the mount shows.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Path of the channel's socket.
    pub socket: PathBuf,
    /// The configuration, as TOML text.
    pub config: String,
}

/// A mount that the kernel has accepted. Dropping it unmounts.
pub struct Mounted {
    session: Session<Fuse>,
    unmounter: Unmounter,
    fs: Arc<FileSystem>,
    passthrough: String,
    end: Arc<End>,
}

/// The end of a mount that was served. fuser unmounts after it, by name, and would take away whatever somebody has
/// mounted there since; so the thread that serves does not go back to fuser.
#[derive(Default)]
pub(crate) struct End {
    serving: OnceLock<(ThreadId, Tell)>,
}

type Tell = Box<dyn Fn(Result<()>) + Send + Sync>;

impl End {
    /// Called when the last worker is done: tells of it, and does not return, on the thread that serves.
    pub(crate) fn reached(&self) {
        let Some((_, tell)) = self.serving.get().filter(|(thread, _)| *thread == std::thread::current().id()) else {
            return;
        };
        tell(Ok(()));
        loop {
            std::thread::park();
        }
    }
}

/// Takes the mount away, from any thread; [`Mounted::serve`] then returns.
#[derive(Clone)]
pub struct Unmounter {
    mountpoint: PathBuf,
    /// The mount's device number, by which it is known wherever it is now, and whatever lies on top of it.
    device: Option<String>,
    fs: Arc<FileSystem>,
}

/// Mounts `options.source` at `options.mountpoint`. Requests are answered when [`Mounted::serve`] runs.
///
/// Fails with a sentence that says what to do: `NotFound` or `NotRegular` for a directory that is none, `BadRequest` for
/// a mount point that is in use, `Permission` and `Unsupported` for what the system does not let this user do.
pub fn mount(options: &MountOptions, cache: Arc<Cache>, facts: Facts) -> Result<Mounted> {
    checks::source(&options.source)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(&options.source, flags, Mode::empty())
        .map_err(|e| Failure::system(format!("cannot open the source {}", options.source.display()), e))?;
    checks::mountpoint(options)?;
    checks::device()?;
    let kind = rustix::fs::fstatfs(&root).map_or(0, |s| s.f_type);
    let forbids = forbidden(options, &root);
    let config = session_config(options, forbids);
    let fs = file_system(options, root, (forbids, LOCAL.contains(&kind)), cache, facts)?;
    let reason = Arc::new(Mutex::new(String::new()));
    let end = Arc::new(End::default());
    let adapter = Fuse {
        fs: fs.clone(),
        wants_passthrough: options.passthrough,
        depth: if kind == OVERLAYFS_MAGIC { 2 } else { 1 },
        reason: reason.clone(),
        end: end.clone(),
        workers: Workers::new(config.n_threads.unwrap_or(1)),
    };

    let session = Session::new(adapter, &options.mountpoint, &config).map_err(|e| {
        fs.control.queue.stop();
        checks::refused(options, &e)
    })?;
    let device = mounts::at(&options.mountpoint).map(|mount| mount.device);
    let unmounter = Unmounter { mountpoint: options.mountpoint.clone(), device, fs: fs.clone() };
    let passthrough = reason.lock().clone();
    Ok(Mounted { session, unmounter, fs, passthrough, end })
}

impl Mounted {
    /// Whether the kernel reads and writes file data itself, and if not, why.
    pub fn passthrough_line(&self) -> &str {
        &self.passthrough
    }

    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// Runs the workers on this thread, and tells when the mount is gone, or that they failed. The process has to end
    /// then, as this need not return.
    pub fn serve(self, tell: impl Fn(Result<()>) + Send + Sync + 'static) {
        let Mounted { session, unmounter, fs, end, .. } = self;
        let told = move |served: Result<()>| {
            fs.control.queue.stop();
            // Somebody aborted it, or every worker has failed: the supervisor takes it away.
            let dead = mounts::of_device(unmounter.device.as_deref()).iter().any(|place| mounts::is_dead(place));
            let ended = Failure::new(Code::Io, "the kernel's connection ended before the mount");
            let served = if dead { served.and(Err(ended)) } else { served };
            tell(served.map_err(|failure| failure.within(format!("serving {}", unmounter.mountpoint.display()))));
        };
        let _ = end.serving.set((std::thread::current().id(), Box::new(told)));
        let served = session.run().map_err(|e| Failure::system("its workers", e));
        // Only where a worker has panicked. fuser has unmounted it.
        if let Some((_, tell)) = end.serving.get() {
            tell(served);
        }
    }
}

impl Unmounter {
    /// Unmounts, wherever the mount is seen by now; where it is in use it is taken out of sight at once and goes when its
    /// last user lets go. A foreign mount on top of it stays.
    pub fn unmount(&self) -> Result<()> {
        let mut done = Ok(());
        for place in mounts::of_device(self.device.as_deref()) {
            if mounts::at(&place).map(|top| top.device) != self.device {
                let message = format!("{}: something else is mounted on top; unmount that first", place.display());
                done = Err(Failure::new(Code::BadRequest, message));
            } else if let Err(busy) = mounts::unmount(&place) {
                tracing::info!("{busy}: detached");
                done = done.and(mounts::detach(&place));
            }
        }
        done
    }

    /// Regular files that programs have open.
    pub fn open_files(&self) -> usize {
        self.fs.handles.files()
    }
}

fn file_system(
    options: &MountOptions,
    root: OwnedFd,
    (forbids, local): (StatVfsMountFlags, bool),
    cache: Arc<Cache>,
    facts: Facts,
) -> Result<Arc<FileSystem>> {
    let failed = |e| Failure::system(options.source.display(), e);
    let status = Status::of(&root).map_err(failed)?;
    let for_queue = rustix::io::fcntl_dupfd_cloexec(&root, 0).map_err(failed)?;
    let queue = Queue::start(for_queue, &options.mountpoint, cache.clone())?;
    Ok(Arc::new(FileSystem {
        inodes: Inodes::new(root, &status, descriptors_for_inodes()),
        handles: Handles::new(),
        cache,
        control: Control::new(facts, &options.mountpoint, queue),
        source: options.source.clone(),
        read_only: options.read_only,
        passthrough: AtomicBool::new(false),
        served: Default::default(),
        waiting: Default::default(),
        local,
        forbids,
        refusals: Default::default(),
        applies_umask: AtomicBool::new(false),
    }))
}

/// What our mount forbids: for root what was asked for and what the source's own mount does; fusermount3 forbids more.
fn forbidden(options: &MountOptions, root: &OwnedFd) -> StatVfsMountFlags {
    let (nosuid, nodev) = (StatVfsMountFlags::NOSUID, StatVfsMountFlags::NODEV);
    let mut flags = rustix::fs::fstatvfs(root).map_or(nosuid | nodev, |s| s.f_flag);
    let privileged = has(CapabilitySet::SYS_ADMIN);
    for (flag, asked) in [
        (nosuid, options.nosuid || !privileged),
        (nodev, options.nodev || !privileged),
        (StatVfsMountFlags::NOEXEC, options.noexec),
    ] {
        flags.set(flag, asked || flags.contains(flag));
    }
    flags & (nosuid | nodev | StatVfsMountFlags::NOEXEC)
}

fn session_config(options: &MountOptions, forbids: StatVfsMountFlags) -> Config {
    let source = options.source.to_string_lossy();
    let privileged = has(CapabilitySet::SYS_ADMIN);
    // mount(2) takes the name as it is; fusermount3 takes it in a list of options.
    let name = if privileged { source.into_owned() } else { escaped(&source) };
    let mut wanted = vec![
        MountOption::FSName(name),
        MountOption::CUSTOM("subtype=warpfs".to_string()),
        // The kernel checks every access against what the source says; without it nobody would.
        MountOption::DefaultPermissions,
    ];
    if privileged {
        // fuser forbids both unless it is told not to.
        let allowed = [(StatVfsMountFlags::NOSUID, MountOption::Suid), (StatVfsMountFlags::NODEV, MountOption::Dev)];
        wanted.extend(allowed.into_iter().filter(|(flag, _)| !forbids.contains(*flag)).map(|(_, option)| option));
    }
    if forbids.contains(StatVfsMountFlags::NOEXEC) {
        wanted.push(MountOption::NoExec);
    }
    // Many more than the processors: a worker may wait for a disk. Who is not needed is parked.
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let mut config = Config::default();
    config.mount_options = wanted;
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some((4 * cores).clamp(16, 64));
    config.clone_fd = true;
    config
}

/// A name that fusermount3 does not take apart at its commas.
fn escaped(name: &str) -> String {
    name.replace('\\', "\\\\").replace(',', "\\,")
}

fn has(capability: CapabilitySet) -> bool {
    rustix::thread::capabilities(None).is_ok_and(|own| own.effective.contains(capability))
}

/// Half of the descriptors that this process may have; the other half is for open files and everything else.
fn descriptors_for_inodes() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
    usize::try_from(limit / 2).unwrap_or(usize::MAX)
}

/// Asks the kernel for what this file system can do. Never the writeback cache: the kernel would hold bytes that the
/// cache knows nothing of. Never the locks: the kernel keeps them better among the users of one mount. Never the truncation
/// as a part of opening: the kernel asks for it before it sees that the file is a program that runs.
pub(crate) fn negotiate(fuse: &mut Fuse, config: &mut KernelConfig) {
    let offered = config.capabilities();
    let mut ask = |flags: InitFlags| config.add_capabilities(flags).is_ok();
    for flag in [
        InitFlags::FUSE_AUTO_INVAL_DATA,
        InitFlags::FUSE_ASYNC_DIO,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_DO_READDIRPLUS,
        InitFlags::FUSE_READDIRPLUS_AUTO,
        InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        InitFlags::FUSE_HAS_IOCTL_DIR,
        InitFlags::FUSE_POSIX_ACL,
        // The target of a link never changes: another target is another inode.
        InitFlags::FUSE_CACHE_SYMLINKS,
    ] {
        ask(flag);
    }
    let umask = offered.contains(InitFlags::FUSE_POSIX_ACL) && ask(InitFlags::FUSE_DONT_MASK);
    fuse.fs.applies_umask.store(umask, Ordering::Relaxed);

    let why_not = if !fuse.wants_passthrough {
        Some("off: it was not wanted")
    } else if !has(CapabilitySet::SYS_ADMIN) {
        Some("off: it needs root (CAP_SYS_ADMIN); data goes through the daemon")
    } else if !ask(InitFlags::FUSE_PASSTHROUGH) {
        Some("off: this kernel has none (Linux 6.9 does); data goes through the daemon")
    } else if config.set_max_stack_depth(fuse.depth).is_err() {
        Some("off: the source is stacked too deep; data goes through the daemon")
    } else {
        None
    };
    fuse.fs.passthrough.store(why_not.is_none(), Ordering::Relaxed);
    *fuse.reason.lock() =
        format!("passthrough {}", why_not.unwrap_or("on: the kernel reads and writes file data itself"));

    // A value out of range leaves the kernel's own.
    let _ = config.set_max_write(MAX_WRITE);
    let _ = config.set_max_background(MAX_BACKGROUND);
}

#[cfg(test)]
mod tests;
