//! `warpfs status`: the mounts of this machine, or where files stand.

use super::{Done, complain, paths, some_failed};
use crate::client;
use crate::failure::{Failure, Result};
use crate::mounts;
use crate::protocol::{State, field_text};
use crate::size::Human;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Show every warpfs mount and what is resident; with PATHS, the state of those files.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Files and directories of a mount; without any, every mount is shown
    paths: Vec<PathBuf>,
    /// The device, host or cuda:N [default: the mount's first]
    #[arg(long)]
    device: Option<String>,
    /// JSON; sizes are bytes
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Done {
    if args.paths.is_empty() { mounted(args.json) } else { files(args) }
}

fn mounted(as_json: bool) -> Done {
    let mut shown = Vec::new();
    for mount in mounts::ours() {
        let stats = if mounts::is_dead(&mount.mountpoint) {
            Err("its daemon is gone; `warpfs umount` takes it away".to_string())
        } else {
            let path = mount.mountpoint.join(".warpfs/stats");
            let text = mounts::patiently(move || std::fs::read_to_string(path).map_err(|e| unreadable(&e)));
            let text = text.unwrap_or_else(|| {
                Err("its daemon does not answer; `warpfs umount --lazy` takes the mount away, if it stays so".into())
            });
            text.and_then(|text| serde_json::from_str::<Value>(&text).map_err(|e| e.to_string()))
        };
        if as_json {
            let (stats, error) = (stats.as_ref().ok(), stats.as_ref().err());
            shown.push(json!({
                "source": mount.source.to_string_lossy(), "mountpoint": mount.mountpoint.to_string_lossy(), "stats": stats, "error": error
            }));
            continue;
        }
        say!("{} on {}", mount.source.display(), mount.mountpoint.display());
        match stats {
            Err(error) => say!("  {error}"),
            Ok(stats) => stats["devices"].as_array().into_iter().flatten().for_each(print_device),
        }
        shown.push(Value::Null);
    }
    if as_json {
        say!("{:#}", Value::Array(shown));
    } else if shown.is_empty() {
        say!("nothing is mounted; `warpfs mount SOURCE MOUNTPOINT` mounts a directory");
    }
    Ok(())
}

/// Why a mount does not say what is on it.
fn unreadable(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => {
            "another user's, mounted without --allow-other: nobody else can look into it".into()
        }
        _ => error.to_string(),
    }
}

fn print_device(device: &Value) {
    let number = |name: &str| device[name].as_u64().unwrap_or(0);
    say!(
        "  {} ({}): {} of {} in use; {} files resident, {} loading; {} hits, {} misses",
        device["label"].as_str().unwrap_or("?"),
        device["name"].as_str().unwrap_or("?"),
        Human(number("used")),
        Human(number("budget")),
        number("resident_files"),
        number("loading_files"),
        device["counters"]["hits"],
        device["counters"]["misses"],
    );
    for holder in device["holders"].as_array().into_iter().flatten() {
        let bytes = holder["bytes"].as_u64().unwrap_or(0);
        say!("    held by process {} of user {}: {}", holder["pid"], holder["uid"], Human(bytes));
    }
}

#[derive(Serialize)]
struct FileState {
    /// A name that is no UTF-8 is shown as well as it can be.
    path: String,
    state: &'static str,
    size: u64,
    loaded: u64,
    holders: u32,
    generation: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn files(args: &Args) -> Done {
    let device = paths::device(args.device.as_deref(), &args.paths[0])?;
    let (files, mut failures) = paths::files(&args.paths);
    let state_of = |path: PathBuf| -> Result<FileState> {
        let file = client::open(&path)?;
        let status = client::standing(&file, &path, device)?;
        let state = State::from_number(status.state).unwrap_or(State::Absent).word();
        let error = (status.error != 0).then(|| field_text(&status.message));
        let (size, loaded, holders, generation) = (status.size, status.loaded, status.holders, status.generation);
        let path = path.to_string_lossy().into_owned();
        Ok(FileState { path, state, size, loaded, holders, generation, error })
    };
    let mut states = Vec::new();
    for path in files {
        match state_of(path) {
            Ok(state) => states.push(state),
            Err(failure) => failures.push(failure),
        }
    }
    if args.json {
        say!("{}", serde_json::to_string_pretty(&states).expect("plain values become JSON"));
    } else {
        states.iter().for_each(print_file);
    }
    failures.iter().for_each(|failure: &Failure| complain(failure));
    if failures.is_empty() { Ok(()) } else { Err(some_failed()) }
}

fn print_file(file: &FileState) {
    let mut line = format!("{:<8}  {:>10}  {}", file.state, Human(file.size).to_string(), file.path);
    if file.state == "loading" {
        line += &format!("  ({} have arrived)", Human(file.loaded));
    }
    if file.holders > 0 {
        line += &format!("  (held by {})", file.holders);
    }
    if let Some(error) = &file.error {
        line += &format!("  (last load failed: {error})");
    }
    say!("{line}");
}
