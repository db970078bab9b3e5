//! What the mount costs: the same operations on the native directory, through warpfs with and without passthrough,
//! through bindfs and through mergerfs. `make bench-mount`; the settings are in [`Settings`].
//!
//! This process mounts the subjects and takes them away again whatever happens; a child, which may be killed or be
//! another user, measures them. So nothing here ever waits for a mount without a deadline. On a machine that others use
//! `chrt -r 1 make bench-mount` keeps them out: it is inherited by every subject alike, and makes each wake-up dearer.

#[path = "mount/machine.rs"]
mod machine;
#[path = "mount/measure.rs"]
mod measure;
#[path = "mount/million.rs"]
mod million;
#[path = "mount/names.rs"]
mod names;
#[path = "mount/report.rs"]
mod report;
#[path = "mount/rows.rs"]
mod rows;
#[path = "mount/subject.rs"]
mod subject;
#[path = "mount/transfer.rs"]
mod transfer;
#[path = "mount/trees.rs"]
mod trees;

use measure::{Measured, Plan};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use subject::{Subject, interrupted};

/// A row that takes longer hangs.
const ROW_DEADLINE: Duration = Duration::from_secs(300);
/// The ordinary user of `BENCH_USER=1`.
const NOBODY: u32 = 65534;

/// The environment: `ROUNDS` (9), `ROWS` (words with commas; a row whose name has one of them is measured), `JSON`
/// (where the figures go), `WARPFS_BENCH_DIR` (where the directories are made), `BENCH_USER=1` (the write rows as an
/// ordinary user), `MILLION=1` (mounting a million files, and the daemons' memory). On a machine without cargo the
/// binary of this bench runs as it is, with `WARPFS_BIN` (the program) and `WARPFS_ROOT` (this repository).
struct Settings {
    rounds: usize,
    rows: Vec<String>,
    json: PathBuf,
    folder: PathBuf,
    ordinary_user: bool,
    million: bool,
}

impl Settings {
    fn from_environment() -> Settings {
        let text = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        // Where it was not built that folder need not exist.
        let built = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench-mount.json");
        let default_json = || if built.parent().is_some_and(Path::is_dir) { built } else { "bench-mount.json".into() };
        Settings {
            rounds: text("ROUNDS").map_or(9, |n| n.parse().expect("ROUNDS is a number")).max(1),
            rows: text("ROWS").map_or_else(Vec::new, |words| words.split(',').map(str::to_string).collect()),
            json: text("JSON").map_or_else(default_json, PathBuf::from),
            folder: text("WARPFS_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from),
            ordinary_user: text("BENCH_USER").is_some_and(|value| value != "0"),
            million: text("MILLION").is_some_and(|value| value != "0"),
        }
    }
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some(measure::WORD) {
        measure::run();
        return ExitCode::SUCCESS;
    }
    let settings = Settings::from_environment();
    subject::catch_interrupts();
    match bench(&settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench-mount: {message}");
            ExitCode::FAILURE
        }
    }
}

fn bench(settings: &Settings) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", settings.folder.display());
    let folder = tempfile::Builder::new().prefix("warpfs-bench-").tempdir_in(&settings.folder).map_err(failed)?;
    // Another user shall reach the mounts.
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).map_err(failed)?;
    let source = folder.path().join("source");
    std::fs::create_dir(&source).map_err(failed)?;
    if settings.ordinary_user {
        if !rustix::process::geteuid().is_root() {
            return Err("BENCH_USER=1 needs root: only root can measure as somebody else".into());
        }
        chown(&source, Some(NOBODY), Some(NOBODY)).map_err(failed)?;
    }
    // Declared after the folder: the mounts are taken away before what they front.
    let mut subjects = subject::mount_all(folder.path(), &source)?;
    let facts = machine::facts(&source);
    report::heading(&facts, &subjects, settings.ordinary_user);

    let plan = Plan {
        work: folder.path().into(),
        source: source.clone(),
        rounds: settings.rounds,
        rows: settings.rows.clone(),
        ordinary_user: settings.ordinary_user,
        subjects: subjects.iter().map(Subject::place).collect(),
    };
    let begun = Instant::now();
    let (rows, ended) = watch(&plan);
    report::tables(&rows);
    let million = if settings.million && ended.is_ok() {
        drop(std::mem::take(&mut subjects));
        Some(million::measure(folder.path(), settings.rounds)?)
    } else {
        println!("A million files: not measured; MILLION=1 does it.");
        None
    };
    let json = report::json(&facts, &plan, &rows, million.as_ref());
    std::fs::write(&settings.json, json).map_err(|e| format!("{}: {e}", settings.json.display()))?;
    println!("{} rows in {:.0} s; figures: {}", rows.len(), begun.elapsed().as_secs_f64(), settings.json.display());
    println!("load of the machine, before and after: {} | {}", facts.load, machine::load());
    ended
}

/// Lets a child measure, and collects its rows; also what it had measured before something went wrong.
fn watch(plan: &Plan) -> (Vec<Measured>, Result<(), String>) {
    let mut rows = Vec::new();
    let ended = Measurer::start(plan).and_then(|mut child| {
        loop {
            match child.next_row()? {
                Some(row) => rows.push(row),
                None => break child.end(),
            }
        }
    });
    (rows, ended)
}

/// The measuring child; killed when it is dropped.
struct Measurer {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Measurer {
    fn start(plan: &Plan) -> Result<Measurer, String> {
        let failed = |e: std::io::Error| format!("the measuring process: {e}");
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg(measure::WORD).stdin(Stdio::piped()).stdout(Stdio::piped());
        if plan.ordinary_user {
            command.uid(NOBODY).gid(NOBODY);
        }
        let mut child = subject::ends_with_us(&mut command).spawn().map_err(failed)?;
        let output = child.stdout.take().expect("piped");
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let mut input = child.stdin.take().expect("piped");
        let measurer = Measurer { child, lines };
        input.write_all(plan.to_json().as_bytes()).map_err(failed)?;
        Ok(measurer)
    }

    fn next_row(&mut self) -> Result<Option<Measured>, String> {
        let until = Instant::now() + ROW_DEADLINE;
        loop {
            match self.lines.recv_timeout(Duration::from_millis(100)) {
                Ok(line) => return Measured::from_json(&line).map(Some),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if interrupted() => return Err("interrupted".into()),
                Err(RecvTimeoutError::Timeout) if Instant::now() > until => {
                    return Err(format!("a row took more than {ROW_DEADLINE:?}"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn end(mut self) -> Result<(), String> {
        // Its output has ended, so it is about to.
        match subject::end(&mut self.child, Duration::from_secs(10)) {
            Some(status) if status.success() => Ok(()),
            _ if interrupted() => Err("interrupted".into()),
            Some(status) => Err(format!("the measuring process ended with {status}")),
            None => Err("the measuring process did not end".into()),
        }
    }
}

impl Drop for Measurer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = subject::end(&mut self.child, Duration::from_secs(10));
    }
}
