//! `warpfs explain`: which way files would go to the device now, and why.

use super::{Done, complain, paths, some_failed};
use crate::client;
use crate::failure::{Failure, Result};
use crate::size::Human;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Say which way files would go to the device now, and why: what is in the page cache, what the file system can do, what
/// became of GPUDirect Storage. Starts nothing.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Files and directories of a mount
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// JSON; sizes are bytes
    #[arg(long)]
    json: bool,
}

/// Bytes that an answer has at most.
const ANSWER: usize = 64 * 1024;

pub(super) fn run(args: &Args) -> Done {
    let (files, mut failures) = paths::files(&args.paths);
    let mut all = Vec::new();
    for path in &files {
        match ask(path) {
            Ok(explained) if args.json => all.push(explained),
            Ok(explained) => print(&explained),
            Err(failure) => failures.push(failure),
        }
    }
    if args.json {
        say!("{:#}", Value::Array(all));
    }
    failures.iter().for_each(complain);
    if failures.is_empty() { Ok(()) } else { Err(some_failed()) }
}

fn ask(path: &Path) -> Result<Value> {
    let file = client::open(path)?;
    // On another file system it would be an attribute like any other.
    client::version(&file, path)?;
    let mut answer = vec![0; ANSWER];
    let length = rustix::fs::fgetxattr(&file, "user.warpfs.explain", &mut answer[..])
        .map_err(|e| Failure::system(path.display(), e))?;
    let nonsense = |e: serde_json::Error| Failure::system(path.display(), std::io::Error::other(e));
    serde_json::from_slice(&answer[..length]).map_err(nonsense)
}

fn print(explained: &Value) {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let word = |value: &Value| value.as_str().unwrap_or("unknown").to_string();
    let size = number(&explained["size"]);
    say!("{}: {} on {}", word(&explained["path"]), Human(size), word(&explained["file_system"]));
    match explained["cached"].as_u64() {
        Some(cached) => say!("  page cache: {} of it ({:.0} %)", Human(cached), share(cached, size)),
        None => say!("  page cache: the kernel does not tell: the file is not the daemon's, nor may it write it"),
    }
    match &explained["direct"] {
        Value::Null => say!("  direct reads: the file system has none"),
        direct => say!("  direct reads: in blocks of {} bytes, to addresses of {}", direct["offset"], direct["memory"]),
    }
    for device in explained["devices"].as_array().into_iter().flatten() {
        say!("  {}: {}; {}", word(&device["device"]), word(&device["state"]), word(&device["memory"]));
        if device["fits"] == false {
            say!("    it does not fit into the budget: mount with a larger --budget");
        }
        for way in device["routes"].as_array().into_iter().flatten() {
            say!("    {} for {}: {}", word(&way["route"]), Human(number(&way["bytes"])), word(&way["reason"]));
        }
        say!("    gds: {}", word(&device["gds"]));
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 100.0 } else { part as f64 / whole as f64 * 100.0 }
}
