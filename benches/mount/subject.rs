//! The subjects: the native directory, and the file systems mounted over it. Each is a process of its own in the
//! foreground that ends with its [`Subject`], and with the benchmark even if that is killed.

use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What every row is compared with.
pub const NATIVE: &str = "native";
pub const WARPFS: &str = "warpfs";
pub const WARPFS_DAEMON: &str = "warpfs-no-passthrough";
pub const BINDFS: &str = "bindfs";
pub const MERGERFS: &str = "mergerfs";

/// Mounting takes milliseconds.
const MOUNT_DEADLINE: Duration = Duration::from_secs(20);
const END_DEADLINE: Duration = Duration::from_secs(10);

/// bindfs is single-threaded unless it is told otherwise; its manual calls the other mode unsafe only for the moment in
/// which it changes owner or permissions of a new file.
const BINDFS_OPTIONS: &[&str] = &["-f", "--multithreaded"];
/// Page cache like a native file's (kept over a close while size and time are the same), inode numbers as they are, no
/// question for security.capability before each write, and no branch refused for being nearly full: what mergerfs'
/// documentation advises for speed, short of what breaks programs (`xattr=nosys`) or delays writes (`cache.writeback`).
const MERGERFS_OPTIONS: &str = "cache.files=auto-full,dropcacheonclose=false,inodecalc=passthrough,\
                                security_capability=false,category.create=ff,minfreespace=0";

/// One thing to measure.
pub struct Subject {
    pub name: &'static str,
    pub root: PathBuf,
    /// As a person would type it; empty for the native directory.
    pub command: String,
    pub version: String,
    /// Why it cannot be measured.
    pub refused: Option<String>,
    mounted: Option<Mounted>,
}

/// What the measuring process has to know of a subject.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    pub name: String,
    pub root: PathBuf,
    pub command: String,
    pub version: String,
    pub refused: Option<String>,
    /// The process that answers.
    pub pid: Option<u32>,
}

impl Subject {
    pub fn place(&self) -> Place {
        Place {
            name: self.name.into(),
            root: self.root.clone(),
            command: self.command.clone(),
            version: self.version.clone(),
            refused: self.refused.clone(),
            pid: self.mounted.as_ref().map(|mounted| mounted.pid),
        }
    }

    /// From the start of the process until the mount answered.
    pub fn mounted_in(&self) -> Option<Duration> {
        self.mounted.as_ref().map(|mounted| mounted.took)
    }
}

/// The native directory and everything that can be mounted over it, below `folder`.
pub fn mount_all(folder: &Path, source: &Path) -> Result<Vec<Subject>, String> {
    let native = Subject {
        name: NATIVE,
        root: source.into(),
        command: String::new(),
        version: String::new(),
        refused: None,
        mounted: None,
    };
    let mut subjects = vec![native];
    for name in [WARPFS, WARPFS_DAEMON, BINDFS, MERGERFS] {
        let subject = mount(name, folder, source)?;
        if let (WARPFS | WARPFS_DAEMON, Some(reason)) = (name, &subject.refused) {
            return Err(format!("{name}: {reason}"));
        }
        subjects.push(subject);
    }
    Ok(subjects)
}

/// The program; elsewhere than it was built, `WARPFS_BIN` says where it is.
fn warpfs() -> PathBuf {
    std::env::var_os("WARPFS_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_warpfs").into()).into()
}

/// Mounts one subject; a peer that is not installed or does not mount is a subject that was refused.
pub fn mount(name: &'static str, folder: &Path, source: &Path) -> Result<Subject, String> {
    let root = folder.join(name);
    std::fs::create_dir_all(&root).map_err(|e| format!("{}: {e}", root.display()))?;
    // Only root may let others in without asking the administrator.
    let for_others = rustix::process::geteuid().is_root();
    let mut command = match name {
        WARPFS | WARPFS_DAEMON => {
            let mut command = Command::new(warpfs());
            command.args(["mount", "--foreground", "--device", "host"]);
            if for_others {
                command.arg("--allow-other");
            }
            if name == WARPFS_DAEMON {
                command.arg("--no-passthrough");
            }
            command
        }
        BINDFS => {
            let mut command = Command::new(BINDFS);
            command.args(BINDFS_OPTIONS);
            // Without it FUSE 2 writes 4 KiB at a time; FUSE 3 does not know it any more.
            if said(Command::new(BINDFS).arg("--fuse-version")).contains("version 2.") {
                command.args(["-o", "big_writes"]);
            }
            command
        }
        _ => {
            let mut command = Command::new(MERGERFS);
            command.args(["-f", "-o", MERGERFS_OPTIONS]);
            if for_others {
                command.args(["-o", "allow_other"]);
            }
            command
        }
    };
    command.arg(source).arg(&root);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let shown = words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
    let (mounted, refused) = match Mounted::start(command, &root, &folder.join(format!("{name}.log"))) {
        Ok(mounted) => (Some(mounted), None),
        Err(_) if interrupted() => return Err("interrupted".into()),
        Err(reason) => (None, Some(reason)),
    };
    Ok(Subject { name, version: version(name), root, command: shown, refused, mounted })
}

fn version(name: &str) -> String {
    let program = if name.starts_with(WARPFS) { warpfs() } else { name.into() };
    said(Command::new(program).arg("--version")).lines().next().unwrap_or_default().to_string()
}

/// What a program that ends at once says on stdout; nothing where it cannot be started.
fn said(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
}

/// A mount, taken away when it is dropped.
struct Mounted {
    root: PathBuf,
    child: Child,
    pid: u32,
    took: Duration,
}

impl Mounted {
    fn start(mut command: Command, root: &Path, log: &Path) -> Result<Mounted, String> {
        let output = std::fs::File::create(log).and_then(|file| Ok((file.try_clone()?, file)));
        let (stdout, stderr) = output.map_err(|e| format!("{}: {e}", log.display()))?;
        // A group of its own: who interrupts the benchmark does not interrupt the mount under it.
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).process_group(0);
        let before = rustix::fs::stat(root).map_err(|e| format!("{}: {e}", root.display()))?.st_dev;
        let begun = Instant::now();
        let child = ends_with_us(&mut command).spawn();
        let child = child.map_err(|e| format!("{}: {e}", command.get_program().to_string_lossy()))?;
        let pid = child.id();
        let mut mounted = Mounted { root: root.into(), child, pid, took: Duration::ZERO };
        // The first answer with another device comes from the mount.
        while rustix::fs::stat(root).map_or(true, |stat| stat.st_dev == before) {
            if let Ok(Some(status)) = mounted.child.try_wait() {
                let said = std::fs::read_to_string(log).unwrap_or_default();
                return Err(format!("{status}: {}", said.trim()));
            }
            if begun.elapsed() > MOUNT_DEADLINE || interrupted() {
                return Err(format!("not mounted within {MOUNT_DEADLINE:?}"));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        mounted.took = begun.elapsed();
        // The daemon may be a child of what was started.
        if let Ok(text) = std::fs::read_to_string(root.join(".warpfs/stats")) {
            let stats: Value = serde_json::from_str(&text).map_err(|e| format!("stats: {e}"))?;
            mounted.pid = stats["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(pid);
        }
        Ok(mounted)
    }
}

impl Mounted {
    /// Whether there was something to unmount.
    fn unmount(&self) -> bool {
        if rustix::mount::unmount(&self.root, rustix::mount::UnmountFlags::DETACH).is_ok() {
            return true;
        }
        // Not root, or not mounted: then this says so to nobody.
        let mut quiet = Command::new("fusermount3");
        let child = quiet.args(["-u", "-z", "-q"]).arg(&self.root).stderr(Stdio::null()).spawn();
        child.ok().and_then(|mut child| end(&mut child, END_DEADLINE)).is_some_and(|status| status.success())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = self.unmount();
        if let (false, Some(pid)) =
            (unmounted, i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw))
        {
            // It had not mounted yet, and must not begin to.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if end(&mut self.child, END_DEADLINE).is_none() {
            eprintln!("bench-mount: the daemon of {} had to be killed", self.root.display());
        }
        if !unmounted {
            self.unmount(); // it had mounted between the two
        }
    }
}

/// The status of a child that ends before the deadline; else it is killed.
pub fn end(child: &mut Child, deadline: Duration) -> Option<ExitStatus> {
    let until = Instant::now() + deadline;
    while Instant::now() < until {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

/// The child gets SIGTERM when this process dies, however it dies.
pub fn ends_with_us(command: &mut Command) -> &mut Command {
    let signal = || rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM));
    // SAFETY: one system call, which is async-signal-safe and touches no memory.
    unsafe { command.pre_exec(move || signal().map_err(Into::into)) }
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn remember(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From now on SIGINT and SIGTERM only set what [`interrupted`] tells, so that every mount is taken away.
pub fn catch_interrupts() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        unsafe { libc::signal(signal, remember as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
