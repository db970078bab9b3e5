//! Mounts that are taken away on every path, commands with a deadline, and the daemon's statistics.

use serde_json::Value;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Nothing in these tests may take longer.
pub const DEADLINE: Duration = Duration::from_secs(60);

pub fn warpfs_binary() -> PathBuf {
    std::env::var_os("WARPFS_BIN").map_or_else(|| env!("CARGO_BIN_EXE_warpfs").into(), PathBuf::from)
}

pub fn tree() -> PathBuf {
    std::env::var_os("WARPFS_ROOT").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

pub fn device() -> String {
    std::env::var("WARPFS_TEST_DEVICE").ok().filter(|d| !d.is_empty()).unwrap_or_else(|| "host".into())
}

pub fn on_host() -> bool {
    device() == "host"
}

/// What a command did.
#[derive(Debug)]
pub struct Output {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Output {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The output of a command that had to succeed.
    #[track_caller]
    pub fn ok(self) -> Output {
        assert!(self.status.success(), "{}: {}{}", self.status, self.text(), self.stderr);
        self
    }

    /// stderr of a command that had to fail with exit code 1, in one line that contains each of `words`.
    #[track_caller]
    pub fn fails(self, words: &[&str]) -> String {
        assert_eq!(self.status.code(), Some(1), "{}{}", self.text(), self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is not in: {}", self.stderr);
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self.stderr
    }
}

/// Runs a command to its end, or kills it at the deadline.
#[track_caller]
pub fn run(command: &mut Command) -> Output {
    run_within(command, DEADLINE)
}

/// The same for what is known to take longer.
#[track_caller]
pub fn run_within(command: &mut Command, limit: Duration) -> Output {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut stdout = child.stdout.take().expect("piped");
    let mut stderr = child.stderr.take().expect("piped");
    let out = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stdout.read_to_end(&mut bytes);
        bytes
    });
    let err = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        text
    });
    let status = end(&mut child, limit).unwrap_or_else(|| panic!("{command:?} did not end in {limit:?}"));
    Output { status, stdout: out.join().expect("read"), stderr: err.join().expect("read") }
}

/// The status of a child that ends before the deadline; else it is killed.
pub fn end(child: &mut Child, deadline: Duration) -> Option<ExitStatus> {
    let until = Instant::now() + deadline;
    while Instant::now() < until {
        if let Some(status) = child.try_wait().expect("our child") {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

pub fn warpfs<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(warpfs_binary());
    command.args(arguments);
    command
}

/// `run(warpfs([...]))` with arguments of mixed kinds.
#[macro_export]
macro_rules! warpfs {
    ($($argument:expr),* $(,)?) => {
        $crate::harness::run(&mut $crate::harness::warpfs([$(std::ffi::OsStr::new(&$argument)),*]))
    };
}

/// Waits until `condition` holds.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < until, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A directory and its mount, which goes with it.
#[derive(Debug)]
pub struct Mounted {
    _folder: tempfile::TempDir,
    pub source: PathBuf,
    pub mountpoint: PathBuf,
}

impl Mounted {
    pub fn new() -> Mounted {
        Mounted::with(&[])
    }

    /// Mounted with more options, on the device of this test run.
    #[track_caller]
    pub fn with(options: &[&str]) -> Mounted {
        let device = device();
        let mut all = vec!["--device", &device];
        all.extend(options);
        Mounted::prepare().mount(&all, &[]).expect("mounted")
    }

    /// A mount of a source that somebody else made, and which has to outlive it.
    #[track_caller]
    pub fn over(source: &Path, options: &[&str]) -> Mounted {
        let device = device();
        let mut all = vec!["--device", &device];
        all.extend(options);
        let mut prepared = Mounted::prepare();
        prepared.source = source.to_path_buf();
        prepared.mount(&all, &[]).expect("mounted")
    }

    /// The two directories, not mounted yet.
    pub fn prepare() -> Mounted {
        let folder = tempfile::Builder::new().prefix("warpfs-test-").tempdir().expect("a folder");
        let (source, mountpoint) = (folder.path().join("source"), folder.path().join("mount"));
        std::fs::create_dir(&source).expect("created");
        std::fs::create_dir(&mountpoint).expect("created");
        Mounted { _folder: folder, source, mountpoint }
    }

    /// Mounts with these options and this environment; else what it said.
    pub fn mount(self, options: &[&str], environment: &[(&str, &str)]) -> Result<Mounted, Output> {
        let mut command = warpfs([OsStr::new("mount"), self.source.as_ref(), self.mountpoint.as_ref()]);
        let output = run(command.args(options).envs(environment.iter().copied()));
        if output.status.success() { Ok(self) } else { Err(output) }
    }

    /// Creates a file in the source; its path in the mount.
    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let mut file = File::create(self.source.join(name)).expect("created");
        file.write_all(content).expect("written");
        self.mountpoint.join(name)
    }

    pub fn stats(&self) -> Value {
        let text = std::fs::read_to_string(self.mountpoint.join(".warpfs/stats")).expect("stats");
        serde_json::from_str(&text).expect("JSON")
    }

    /// The default device in the statistics.
    pub fn device(&self) -> Value {
        self.stats()["devices"][0].clone()
    }

    pub fn used(&self) -> u64 {
        self.device()["used"].as_u64().expect("a number")
    }

    pub fn counter(&self, name: &str) -> u64 {
        self.device()["counters"][name].as_u64().expect("a number")
    }

    /// Whether the kernel reads and writes file data itself.
    pub fn passes_through(&self) -> bool {
        self.stats()["mount"]["passthrough"].as_bool().expect("a truth value")
    }

    /// Inodes that the daemon knows; the root is one of them.
    pub fn inodes(&self) -> u64 {
        self.stats()["mount"]["inodes"].as_u64().expect("a number")
    }

    pub fn daemon(&self) -> i32 {
        self.stats()["pid"].as_i64().expect("a number") as i32
    }

    pub fn socket(&self) -> PathBuf {
        let text = std::fs::read_to_string(self.mountpoint.join(".warpfs/socket")).expect("socket");
        PathBuf::from(text.trim_end())
    }

    /// The loader children of the daemon.
    pub fn loaders(&self) -> Vec<i32> {
        children(self.daemon())
    }

    pub fn is_mounted(&self) -> bool {
        let table = std::fs::read_to_string("/proc/self/mounts").expect("readable");
        table.lines().any(|line| line.split(' ').nth(1) == self.mountpoint.to_str())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if !self.is_mounted() {
            return;
        }
        let text = std::fs::read_to_string(self.mountpoint.join(".warpfs/stats")).unwrap_or_default();
        let pid = serde_json::from_str::<Value>(&text).ok().and_then(|stats| stats["pid"].as_i64());
        let _ = run(Command::new("umount").arg("-l").arg(&self.mountpoint));
        if let Some(pid) = pid {
            let until = Instant::now() + Duration::from_secs(15);
            while is_alive(pid as i32) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            if is_alive(pid as i32) {
                signal(pid as i32, libc::SIGKILL);
                eprintln!("the daemon {pid} had to be killed");
            }
        }
    }
}

pub fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which ends with the last parenthesis.
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

pub fn signal(pid: i32, signal: i32) {
    assert!(pid > 1);
    // SAFETY: sends a signal to one process; touches no memory.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "signal {signal} to {pid}");
}

/// The process that started this one: of a daemon, its supervisor.
pub fn parent(pid: i32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("alive");
    stat.rsplit(") ").next().and_then(|s| s.split(' ').nth(1)?.parse().ok()).expect("a parent")
}

pub fn children(pid: i32) -> Vec<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("alive");
    let lists = tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<_>>()).collect()
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether mounts of this test run must have passthrough: kernel 6.9 and CAP_SYS_ADMIN are needed for it.
pub fn has_passthrough() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("readable");
    let mut numbers = release.split(['.', '-']).filter_map(|number| number.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 9) && is_root()
}

/// Bytes that look random and are always the same for a seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Calls an ioctl with the bytes of a wire struct: the errno or 0, and the struct as it came back.
pub fn ioctl<M: warpfs::protocol::Wire>(file: impl AsFd, number: u32, message: &M) -> (i32, M) {
    let mut bytes = message.encode();
    // Room for a number that names more than the struct has.
    bytes.resize(bytes.len().max(1 << 14), 0);
    // SAFETY: no number can name more bytes than the buffer has (14 bits of size).
    let result = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), number.into(), bytes.as_mut_ptr()) };
    let errno = if result < 0 { std::io::Error::last_os_error().raw_os_error().unwrap_or(-1) } else { 0 };
    (errno, M::decode(&bytes).expect("the buffer is large enough"))
}

pub fn setxattr(path: &Path, name: &str) -> Result<(), i32> {
    rustix::fs::setxattr(path, name, b"1", rustix::fs::XattrFlags::empty()).map_err(|e| e.raw_os_error())
}

pub fn getxattr(path: &Path, name: &str) -> Result<String, i32> {
    let mut value = vec![0; 4096];
    let length = rustix::fs::getxattr(path, name, &mut value[..]).map_err(|e| e.raw_os_error())?;
    Ok(String::from_utf8_lossy(&value[..length]).into_owned())
}

#[track_caller]
pub fn becomes_resident(path: &Path) {
    eventually("resident", || getxattr(path, "user.warpfs.state").as_deref() == Ok("resident"));
}

/// Compiles a C program of the tree, or takes the one that was compiled before the binary was carried here.
pub fn compiled(source: &str, folder: &Path) -> PathBuf {
    let name = Path::new(source).file_stem().expect("a name");
    if let Some(prebuilt) = std::env::var_os("WARPFS_PREBUILT").map(PathBuf::from) {
        let program = prebuilt.join(name);
        if program.exists() {
            return program;
        }
    }
    let program = folder.join(name);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    run(Command::new(compiler)
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .arg(tree().join("include"))
        .arg(tree().join(source))
        .arg("-o")
        .arg(&program))
    .ok();
    program
}

/// The bytes of `path` as a client in this process sees them in device memory.
#[track_caller]
pub fn device_bytes(session: &warpfs::client::Session, path: &Path) -> Vec<u8> {
    let buffer = session.open(path).expect("opened");
    let mut bytes = vec![0xAA; buffer.len() as usize];
    buffer.read(0, &mut bytes).expect("read");
    bytes
}

/// A file of `length` bytes that costs no time to make: one written byte in each 64 KiB.
pub fn sparse(path: &Path, length: u64) {
    let file = File::create(path).expect("created");
    file.set_len(length).expect("long enough");
    for offset in (0..length).step_by(1 << 16) {
        file.write_all_at(&[(offset >> 16) as u8], offset).expect("written");
    }
}

/// Compiles a C file of tests/ into a library; `flags` go to the compiler, behind everything else.
pub fn compile_library(library: &Path, source: &str, flags: &[&str]) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O1", "-pthread", "-o"]).arg(library).arg(tree().join("tests").join(source));
    run(command.args(flags)).ok();
}

/// The test double of the CUDA driver, as programs find it which have `folder` as their LD_LIBRARY_PATH.
pub fn fake_driver(folder: &Path, flags: &[&str]) {
    compile_library(&folder.join("libcuda.so.1"), "fake-libcuda/fake_cuda.c", flags);
}

/// The double of cuFile, beside that of the driver.
pub fn fake_cufile(folder: &Path, flags: &[&str]) {
    compile_library(&folder.join("libcufile.so.0"), "fake-libcufile/fake_cufile.c", &[flags, &["-ldl"]].concat());
}

/// close(2) with its error, which dropping a file swallows.
pub fn close(file: File) -> std::io::Result<()> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor was just taken out of its owner.
    if unsafe { libc::close(file.into_raw_fd()) } == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The next frame on a socket, in time.
pub fn receive(socket: &std::os::unix::net::UnixStream) -> warpfs::failure::Result<Option<warpfs::socket::Frame>> {
    warpfs::socket::receive(socket, Instant::now() + DEADLINE)
}

/// Something mounted by mount(8), for as long as this lives.
pub struct Other(PathBuf);

impl Other {
    #[track_caller]
    pub fn mount(arguments: &[&str], place: &Path) -> Other {
        run(Command::new("mount").args(arguments).arg(place)).ok();
        Other(place.to_path_buf())
    }

    pub fn overlay(lower: &Path, upper: &Path, work: &Path, place: &Path) -> Other {
        for folder in [lower, upper, work, place] {
            std::fs::create_dir_all(folder).expect("made");
        }
        let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        Other::mount(&["-t", "overlay", "overlay", "-o", &options], place)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = run(Command::new("umount").arg("-l").arg(&self.0));
    }
}

/// A tmpfs, for as long as this lives.
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    #[track_caller]
    pub fn mount(place: &Path) -> Tmpfs {
        Tmpfs::with(place, "mode=755")
    }

    #[track_caller]
    pub fn with(place: &Path, options: &str) -> Tmpfs {
        run(Command::new("mount").args(["-t", "tmpfs", "-o", options, "warpfs-test"]).arg(place)).ok();
        Tmpfs(place.to_path_buf())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = run(Command::new("umount").arg("-l").arg(&self.0));
    }
}
