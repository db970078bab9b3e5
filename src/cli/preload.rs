//! `warpfs preload`: brings files into device memory, several at a time, and waits for them. Ctrl-C ends what is under way,
//! and leaves nothing of it behind; what has come already stays.

use super::{Done, complain, paths, some_failed};
use crate::client::{self, Device};
use crate::daemon::supervise::Signals;
use crate::failure::Failure;
use crate::protocol::NONE;
use crate::size::Human;
use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Bring files into device memory, and wait until they are there; of directories, every file below them. Ctrl-C gives up
/// what is not there yet.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    which: paths::Which,
    /// One line of JSON for each file
    #[arg(long)]
    json: bool,
}

/// Requests at once: enough to keep a loader busy with small files.
const AT_ONCE: usize = 64;

/// How often the bar moves.
const TICK: Duration = Duration::from_millis(100);

/// What a shell shows for a program that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

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

/// What every thread of a preload sees.
struct Preload {
    files: Vec<PathBuf>,
    device: Device,
    json: bool,
    bar: ProgressBar,
    next: AtomicUsize,
    sum: Mutex<Sum>,
    /// What is being asked for, by its place among the files.
    under_way: Mutex<HashMap<usize, Arc<File>>>,
    cancelled: Arc<AtomicBool>,
}

pub(super) fn run(args: &Args) -> Done {
    let device = args.which.device()?;
    // Before any thread, and before anything is asked of a daemon that may not answer: the signals are for the thread that
    // waits for them, which asks nothing.
    let signals = Signals::block(&[]);
    let cancelled = Arc::new(AtomicBool::new(false));
    let interrupted = Arc::clone(&cancelled);
    std::thread::spawn(move || listen(&signals, &interrupted));
    let (files, missing) = paths::files(&args.which.paths);
    for failure in &missing {
        // The path stands in the failure's words.
        report(args.json, "", &Err(failure.clone()), Duration::ZERO);
        complain(failure);
    }
    let total = files.iter().filter_map(|file| std::fs::metadata(file).ok()).map(|meta| meta.len()).sum();
    let preload = Arc::new(Preload {
        files,
        device,
        json: args.json,
        bar: if args.json { ProgressBar::hidden() } else { progress_bar(total) },
        next: AtomicUsize::new(0),
        sum: Mutex::new(Sum { failed: missing.len(), ..Sum::default() }),
        under_way: Mutex::default(),
        cancelled,
    });
    let begun = Instant::now();
    let watched = Arc::clone(&preload);
    // It ends with the process.
    std::thread::spawn(move || watched.watch());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(preload.files.len()) {
            scope.spawn(|| preload.work());
        }
    });
    preload.bar.finish_and_clear();
    let sum = preload.sum.lock();
    if !args.json {
        let seconds = begun.elapsed().as_secs_f64();
        let files = if sum.files == 1 { "file" } else { "files" };
        // What was there already takes no time, and has no rate.
        let rate =
            if seconds < 0.001 { String::new() } else { format!(" ({:.2} GB/s)", sum.bytes as f64 / seconds / 1e9) };
        let failed = if sum.failed == 0 { String::new() } else { format!("; {} failed", sum.failed) };
        say!("{} {files}, {}, in {seconds:.3} s{rate}{failed}", sum.files, Human(sum.bytes));
    }
    if preload.cancelled.load(Ordering::Relaxed) {
        let left = preload.files.len() - sum.files - sum.failed;
        let (came, all) = (sum.files, preload.files.len());
        complain(&format!("interrupted: {came} of {all} files had come; of the other {left} nothing is left"));
        std::process::exit(INTERRUPTED);
    }
    if sum.failed == 0 { Ok(()) } else { Err(some_failed()) }
}

/// Waits for somebody's Ctrl-C.
fn listen(signals: &Signals, cancelled: &AtomicBool) {
    signals.wait();
    cancelled.store(true, Ordering::Relaxed);
    signals.wait();
    // He means it: what is under way is the daemon's to finish.
    std::process::exit(INTERRUPTED);
}

impl Preload {
    /// Asks for one file after the other until there are no more.
    fn work(&self) {
        while !self.cancelled.load(Ordering::Relaxed) {
            let place = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(path) = self.files.get(place) else { return };
            let begun = Instant::now();
            let result = self.one(place, path);
            if result.is_err() && self.cancelled.load(Ordering::Relaxed) {
                return; // that is why
            }
            if let Err(failure) = &result {
                self.bar.suspend(|| complain(failure));
            }
            report(self.json, &path.to_string_lossy(), &result, begun.elapsed());
            let mut sum = self.sum.lock();
            match result {
                Ok(bytes) => {
                    sum.files += 1;
                    sum.bytes += bytes;
                }
                Err(_) => sum.failed += 1,
            }
        }
    }

    /// Loads one file; its bytes.
    fn one(&self, place: usize, path: &Path) -> Result<u64, Failure> {
        let file = Arc::new(client::open(path)?);
        self.under_way.lock().insert(place, Arc::clone(&file));
        let loaded = client::materialize(&*file, path, &NONE, self.device, &mut |_| {
            // Cancelled between two requests for the same file, this one began its load anew.
            if self.cancelled.load(Ordering::Relaxed) {
                let _ = client::cancel(&*file, path, self.device);
            }
        });
        self.under_way.lock().remove(&place);
        loaded.map(|reply| reply.data_length)
    }

    /// Moves the bar, and ends what is under way when it was cancelled.
    fn watch(&self) {
        let mut told = false;
        loop {
            std::thread::sleep(TICK);
            if self.cancelled.load(Ordering::Relaxed) && !std::mem::replace(&mut told, true) {
                self.cancel();
            }
            if !self.bar.is_hidden() {
                let arrived = |(place, file): &(usize, Arc<File>)| {
                    client::standing(&**file, &self.files[*place], self.device).map_or(0, |standing| standing.loaded)
                };
                let here = self.sum.lock().bytes;
                self.bar.set_position(here + self.files_under_way().iter().map(arrived).sum::<u64>());
            }
        }
    }

    fn files_under_way(&self) -> Vec<(usize, Arc<File>)> {
        self.under_way.lock().iter().map(|(place, file)| (*place, Arc::clone(file))).collect()
    }

    fn cancel(&self) {
        for (place, file) in self.files_under_way() {
            // What cannot be cancelled comes, and stays as if nobody had tried.
            let _ = client::cancel(&*file, &self.files[place], self.device);
        }
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
    bar.enable_steady_tick(TICK);
    bar
}
