//! Whether libcufile can be loaded, asked by a child: NVIDIA's library runs code of its own when it is loaded, and a crash or
//! a hang of that is a finding and not the end of who asks. `ask` starts the child, which is `warpfs probe-cufile`, and
//! `answer` is what runs in it. Called by the check of libcufile and by the command line.

use serde::{Deserialize, Serialize};
use std::ffi::c_int;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The hidden command of the child.
pub const COMMAND: &str = "probe-cufile";
/// The name under which the library is installed.
const LIBRARY: &str = "libcufile.so.0";
/// Loading takes some 10 ms.
const DEADLINE: Duration = Duration::from_secs(5);
/// What is read of the child at most: it has one line to say, and the library may print too.
const ROOM: usize = 1 << 16;

/// What the child found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Loaded {
        /// The file that the loader took.
        path: Option<String>,
        /// 1000 times the major number and 10 times the minor. Old libraries do not tell.
        version: Option<u32>,
    },
    /// The dynamic loader's own words.
    NotLoaded(String),
    /// The child did not answer; how it ended.
    Broken(String),
}

#[repr(C)]
struct CuFileError {
    error: c_int,
    cuda: c_int,
}

type GetVersion = unsafe extern "C" fn(*mut c_int) -> CuFileError;

/// Loads the library into this process, and prints what came of it as one line of JSON.
pub fn answer() {
    let answer = load();
    println!("\n{}", serde_json::to_string(&answer).expect("plain values become JSON"));
}

fn load() -> Answer {
    // SAFETY: loading the vendor's library runs its initialisers; this process exists for nothing else.
    let library = match unsafe { libloading::Library::new(LIBRARY) } {
        Ok(library) => library,
        Err(error) => return Answer::NotLoaded(words(&error)),
    };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = maps.lines().find_map(|line| line.get(line.find('/')?..).filter(|path| path.contains("/libcufile.so")));
    let mut number = 0;
    // SAFETY: the type is that of the symbol in cufile.h, whose error is a struct of two ints.
    let told = unsafe { library.get::<GetVersion>(b"cuFileGetVersion\0") }.is_ok_and(|get| {
        // SAFETY: the pointer names a live int.
        unsafe { get(&mut number) }.error == 0
    });
    let version = u32::try_from(number).ok().filter(|_| told);
    let answer = Answer::Loaded { path: path.map(String::from), version };
    // Unloading would run more of its code.
    std::mem::forget(library);
    answer
}

/// What the dynamic loader said, beneath the words that libloading puts around it.
fn words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Starts the child, and waits some seconds at most.
pub(super) fn ask() -> Answer {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("warpfs").arg(COMMAND);
    // cuFile writes its log where it is started, unless it is told of another place.
    command.env("CUFILE_LOGFILE_PATH", "/dev/null").current_dir(std::env::temp_dir());
    let mut child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn() {
        Ok(child) => child,
        Err(e) => return Answer::Broken(format!("the child cannot be started: {e}")),
    };
    match wait(&mut child) {
        Some(status) if status.success() => {}
        Some(status) => return Answer::Broken(format!("whoever loads it {}", ended(status))),
        None => return Answer::Broken(format!("whoever loads it hangs: no answer within {DEADLINE:?}")),
    }
    said(&mut child).unwrap_or_else(|| Answer::Broken("whoever loads it ends without an answer".to_string()))
}

/// How the child ended; `None` where it did not, and was killed.
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let until = Instant::now() + DEADLINE;
    while Instant::now() < until {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) => std::thread::sleep(Duration::from_millis(2)),
            Err(_) => break,
        }
    }
    let _ = child.kill();
    // Not `wait`: who waits for a device in the kernel outlives even SIGKILL. The system collects it when this process ends.
    std::thread::sleep(Duration::from_millis(20));
    let _ = child.try_wait();
    None
}

/// The answer among whatever the child printed, which has ended.
fn said(child: &mut Child) -> Option<Answer> {
    let stdout = child.stdout.take()?;
    // A process that the library left behind may keep the pipe open: nobody waits for that one.
    rustix::fs::fcntl_setfl(&stdout, rustix::fs::OFlags::NONBLOCK).ok()?;
    let mut bytes = Vec::new();
    // An error is the end of what is there now.
    let _ = stdout.take(ROOM as u64).read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).lines().rev().find_map(|line| serde_json::from_str(line).ok())
}

fn ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("is killed by signal {signal}"),
        None => format!("exits with status {}", status.code().unwrap_or(-1)),
    }
}
