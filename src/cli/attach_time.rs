//! `warpfs attach-time`: how long a process needs from a path to a mapped device address, step by step. For benchmarks.

use super::Done;
use crate::client::{self, Device, Session};
use std::path::PathBuf;
use std::time::Instant;

/// Measure how long attaching to a file in device memory takes, in milliseconds, as JSON.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    path: PathBuf,
}

pub(super) fn run(args: &Args) -> Done {
    let mut times = Vec::new();
    let begun = Instant::now();
    let session = Session::of_path(&args.path)?;
    times.push(begun.elapsed());
    session.prepare(Device::Default)?;
    times.push(begun.elapsed());
    let file = client::open(&args.path)?;
    let buffer = session.open_file(&file, &args.path, Device::Default, &mut |_| {})?;
    times.push(begun.elapsed());
    let again = session.open_file(&file, &args.path, Device::Default, &mut |_| {})?;
    times.push(begun.elapsed());
    let ms = |time: std::time::Duration| time.as_micros() as f64 / 1e3;
    let steps: Vec<f64> = times.windows(2).map(|pair| ms(pair[1] - pair[0])).collect();
    let report = serde_json::json!({
        "bytes": buffer.len(),
        "session_ms": ms(times[0]),
        "context_ms": steps[0],
        "attach_ms": steps[1],
        "again_ms": steps[2],
    });
    say!("{report}");
    drop((buffer, again));
    Ok(())
}
