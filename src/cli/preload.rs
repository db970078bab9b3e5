//! `warpfs preload`: brings files into device memory, several at a time, and waits for them.

use super::{Done, complain, paths, some_failed};
use crate::client::{self, Device, Progress};
use crate::failure::Failure;
use crate::protocol::NONE;
use crate::size::Human;
use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use serde::Serialize;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Bring files into device memory, and wait until they are there; of directories, every file below them.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    which: paths::Which,
    /// One line of JSON for each file
    #[arg(long)]
    json: bool,
}

/// Requests at once: enough to keep a loader busy with small files.
const AT_ONCE: usize = 32;

#[derive(Serialize)]
struct Report<'a> {
    /// A name that is no UTF-8 is shown as well as it can be.
    path: &'a str,
    bytes: u64,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

#[derive(Default)]
struct Sum {
    files: usize,
    bytes: u64,
    failed: usize,
}

pub(super) fn run(args: &Args) -> Done {
    let device = args.which.device()?;
    let (files, missing) = paths::files(&args.which.paths);
    for failure in &missing {
        // The path stands in the failure's words.
        report(args.json, "", &Err(failure.clone()), Duration::ZERO);
        complain(failure);
    }
    let total = files.iter().filter_map(|file| std::fs::metadata(file).ok()).map(|meta| meta.len()).sum();
    let bar = if args.json { ProgressBar::hidden() } else { progress_bar(total) };
    let sum = Mutex::new(Sum { failed: missing.len(), ..Sum::default() });
    let next = AtomicUsize::new(0);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(files.len()) {
            scope.spawn(|| {
                while let Some(path) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let begun = Instant::now();
                    let result = preload(path, device, &bar);
                    let mut sum = sum.lock();
                    tell(args.json, path, &result, begun.elapsed(), &bar);
                    match result {
                        Ok(bytes) => {
                            sum.files += 1;
                            sum.bytes += bytes;
                        }
                        Err(_) => sum.failed += 1,
                    }
                }
            });
        }
    });
    bar.finish_and_clear();
    let sum = sum.into_inner();
    if !args.json {
        let seconds = begun.elapsed().as_secs_f64();
        let files = if sum.files == 1 { "file" } else { "files" };
        // What was there already takes no time, and has no rate.
        let rate =
            if seconds < 0.001 { String::new() } else { format!(" ({:.2} GB/s)", sum.bytes as f64 / seconds / 1e9) };
        say!("{} {files}, {}, in {seconds:.3} s{rate}", sum.files, Human(sum.bytes));
    }
    if sum.failed == 0 { Ok(()) } else { Err(some_failed()) }
}

/// Loads one file; its bytes.
fn preload(path: &Path, device: Device, bar: &ProgressBar) -> Result<u64, Failure> {
    let file = client::open(path)?;
    let mut shown = 0;
    let mut show = |loaded: u64| {
        bar.inc(loaded.saturating_sub(shown));
        shown = loaded.max(shown);
    };
    let reply = client::materialize(&file, path, &NONE, device, &mut |p: Progress| show(p.loaded))?;
    show(reply.data_length);
    Ok(reply.data_length)
}

fn tell(json: bool, path: &Path, result: &Result<u64, Failure>, time: Duration, bar: &ProgressBar) {
    report(json, &path.to_string_lossy(), result, time);
    if let Err(failure) = result {
        bar.suspend(|| complain(failure));
    }
}

/// The line of JSON for one file.
fn report(json: bool, path: &str, result: &Result<u64, Failure>, time: Duration) {
    if !json {
        return;
    }
    let (bytes, error) = match result {
        Ok(bytes) => (*bytes, None),
        Err(failure) => (0, Some(failure.message.as_str())),
    };
    let report = Report { path, bytes, seconds: time.as_secs_f64(), error };
    say!("{}", serde_json::to_string(&report).expect("plain values become JSON"));
}

/// A bar on stderr, where that is a terminal.
fn progress_bar(total: u64) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{bar:40} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}");
    let bar = ProgressBar::new(total).with_style(style.expect("the template is right"));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}
