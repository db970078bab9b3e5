//! `warpfs bench`: how fast this machine is, and how much of that warpfs gets out of it.

use super::{Done, usage};
use crate::bench::{self, Row};
use crate::device;
use crate::failure::Failure;
use crate::size::{Amount, Human};
use std::path::PathBuf;

/// Measure the disk, the page cache and the bus of this machine, and loads by warpfs as fractions of them. Needs no mount.
/// The file that is measured has no name and leaves nothing behind.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Where the file goes: a directory on the disk that is to be measured [default: the temporary directory]
    dir: Option<PathBuf>,
    /// What is measured: auto, host, cuda:N or a GPU's UUID
    #[arg(long, default_value = "auto")]
    device: String,
    /// Bytes of the file [default: 4GiB, and at most a quarter of the free memory and of the free disk]
    #[arg(long, value_name = "SIZE")]
    size: Option<Amount>,
    /// JSON; bytes and seconds
    #[arg(long)]
    json: bool,
}

const SIZE: u64 = 4 << 30;
const LEAST: u64 = 16 << 20;

pub(super) fn run(args: &Args) -> Done {
    let folder = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let selection = device::select(&args.device)?;
    let memory = &selection.memories[0];
    let size = match args.size {
        Some(Amount::Bytes(bytes)) if bytes >= LEAST => bytes,
        Some(_) => usage("--size takes 16MiB or more"),
        None => usual(&folder, memory.free())?,
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let mut heading = Some(format!("{}; {cores} cores; {} in {}", selection.line, Human(size), folder.display()));
    let rows = bench::run(memory, &folder, size, &mut |row| {
        if args.json {
            return;
        }
        if let Some(heading) = heading.take() {
            say!("{heading}");
            say!("{:46} {:>12} {:>12} {:>9}", "", "median", "best", "of limit");
        }
        print(row);
    })?;
    if args.json {
        let all = serde_json::json!({ "device": memory.info().label, "size": size, "cores": cores, "rows": rows });
        say!("{all:#}");
    }
    Ok(())
}

/// As much as the machine has to spare.
fn usual(folder: &std::path::Path, free: Option<u64>) -> Result<u64, Failure> {
    let disk = rustix::fs::statvfs(folder).map_err(|e| Failure::system(folder.display(), e))?;
    let host = device::host::HostMemory::new()?;
    let memory = crate::device::Memory::free(&host).unwrap_or(SIZE).min(free.unwrap_or(u64::MAX));
    let most = SIZE.min(memory / 4).min(disk.f_bavail * disk.f_frsize / 4);
    Ok((most / LEAST * LEAST).max(LEAST))
}

fn print(row: &Row) {
    let figure = |value: Option<f64>| match value {
        None => "-".to_string(),
        Some(seconds) if row.unit == "s" && seconds < 0.01 => format!("{:.0} us", seconds * 1e6),
        Some(seconds) if row.unit == "s" => format!("{seconds:.3} s"),
        Some(rate) => format!("{:.2} GB/s", rate / 1e9),
    };
    let fraction = row.fraction.map_or(String::new(), |fraction| format!("{fraction:.2}"));
    let note = match (row.limit_is, row.note.as_str()) {
        ("", note) => note.to_string(),
        (limit, "") => format!("of {limit}"),
        (limit, note) => format!("{note}; of {limit}"),
    };
    say!("{:46} {:>12} {:>12} {:>9}  {note}", row.name, figure(row.median), figure(row.best), fraction);
}
