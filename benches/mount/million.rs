//! A source with a million files: how soon it is mounted, and how much memory the daemon takes when every file has been
//! looked at, and when the kernel has forgotten them again. `MILLION=1`, because making the files takes a minute.

use crate::machine::processor_time;
use crate::subject::{self, BINDFS, MERGERFS, Subject, WARPFS, end, interrupted};
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const FOLDERS: usize = 1_000;
const FILES: usize = 1_000;
/// `find` over all files takes some seconds through the slowest.
const FIND_DEADLINE: Duration = Duration::from_secs(300);

/// What one file system needed; memory in KiB.
struct Figures {
    name: &'static str,
    mounted_seconds: Vec<f64>,
    find_seconds: f64,
    memory_before: u64,
    memory_after_find: u64,
    memory_after_drop: u64,
}

pub struct Million {
    figures: Vec<Figures>,
    refused: Vec<(&'static str, String)>,
}

/// Every file system in turn, mounted `rounds` times.
pub fn measure(folder: &Path, rounds: usize) -> Result<Million, String> {
    let source = folder.join("million");
    let begun = Instant::now();
    make(&source)?;
    println!("\nA million files, made in {:.0} s", begun.elapsed().as_secs_f64());
    println!("{:<12}{:>14}{:>12}{:>44}", "", "mounted, ms", "find, s", "memory, MiB: before, after find, after drop");
    let mut million = Million { figures: Vec::new(), refused: Vec::new() };
    for name in [WARPFS, BINDFS, MERGERFS] {
        match one(name, folder, &source, rounds) {
            Ok(figures) => {
                figures.print();
                million.figures.push(figures);
            }
            Err(reason) if interrupted() => return Err(reason),
            Err(reason) => {
                println!("{name:<12}not measured: {reason}");
                million.refused.push((name, reason));
            }
        }
    }
    Ok(million)
}

fn make(source: &Path) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", source.display());
    std::fs::create_dir(source).map_err(failed)?;
    for folder in 0..FOLDERS {
        if interrupted() {
            return Err("interrupted".into());
        }
        let folder = source.join(format!("{folder:03}"));
        std::fs::create_dir(&folder).map_err(failed)?;
        (0..FILES).try_for_each(|file| File::create(folder.join(format!("{file:03}"))).map(drop)).map_err(failed)?;
    }
    rustix::fs::sync();
    Ok(())
}

fn one(name: &'static str, folder: &Path, source: &Path, rounds: usize) -> Result<Figures, String> {
    let mut mounted_seconds = Vec::new();
    let mut last = None;
    for _ in 0..rounds {
        drop(last.take());
        let mounted = subject::mount(name, folder, source)?;
        let took = mounted.mounted_in().ok_or_else(|| mounted.refused.clone().unwrap_or_default())?;
        mounted_seconds.push(took.as_secs_f64());
        last = Some(mounted);
    }
    let mounted = last.ok_or("no rounds")?;
    let memory_before = memory(&mounted);
    let begun = Instant::now();
    find(&mounted.root)?;
    let find_seconds = begun.elapsed().as_secs_f64();
    let memory_after_find = memory(&mounted);
    std::fs::write("/proc/sys/vm/drop_caches", "2").map_err(|e| format!("cannot drop the kernel's caches: {e}"))?;
    let memory_after_drop = settled(&mounted);
    Ok(Figures { name, mounted_seconds, find_seconds, memory_before, memory_after_find, memory_after_drop })
}

/// Looks at the attributes of every file.
fn find(root: &Path) -> Result<(), String> {
    let mut command = Command::new("find");
    command.arg(root).args(["-size", "+1"]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = subject::ends_with_us(&mut command).spawn().map_err(|e| format!("find: {e}"))?;
    let until = Instant::now() + FIND_DEADLINE;
    while Instant::now() < until && !interrupted() {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("find: {status}")),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    end(&mut child, Duration::ZERO); // kills it
    Err(if interrupted() { "interrupted".into() } else { format!("find took more than {FIND_DEADLINE:?}") })
}

/// VmRSS of the daemon, in KiB.
fn memory(subject: &Subject) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid(subject))).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0)
}

fn pid(subject: &Subject) -> u32 {
    subject.place().pid.unwrap_or(0)
}

/// The memory when the daemon has done nothing for a second: it is told of a million names that the kernel forgot.
fn settled(subject: &Subject) -> u64 {
    let until = Instant::now() + Duration::from_secs(30);
    let mut before = processor_time(pid(subject));
    while Instant::now() < until && !interrupted() {
        std::thread::sleep(Duration::from_secs(1));
        let now = processor_time(pid(subject));
        if now.saturating_sub(before) < 5_000_000 {
            break;
        }
        before = now;
    }
    memory(subject)
}

impl Figures {
    fn print(&self) {
        let mut sorted = self.mounted_seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let memory = [self.memory_before, self.memory_after_find, self.memory_after_drop];
        let memory = memory.map(|kib| format!("{:.1}", kib as f64 / 1024.0)).join(", ");
        let mounted = sorted.get(sorted.len() / 2).copied().unwrap_or_default() * 1e3;
        println!("{:<12}{mounted:>14.1}{:>12.1}{memory:>44}", self.name, self.find_seconds);
    }
}

impl Million {
    pub fn value(&self) -> Value {
        let figures = self.figures.iter().map(|f| {
            json!({ "name": f.name, "mounted_seconds": f.mounted_seconds, "find_seconds": f.find_seconds,
                "memory_kib": { "before": f.memory_before, "after_find": f.memory_after_find,
                    "after_drop": f.memory_after_drop } })
        });
        json!({ "figures": figures.collect::<Vec<_>>(), "refused": self.refused })
    }
}
