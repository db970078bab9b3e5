//! `warpfs mount`: checks what can be checked, and launches the daemon.

use super::options::{self, List, Options, agreed};
use super::{Done, complain, usage};
use crate::config::{Config, MountOptions};
use crate::daemon;
use crate::daemon::supervise::{Signals, launch};
use crate::failure::{Failure, Result};
use crate::size::{Amount, Human};
use crate::transfer::{self, Wanted};
use std::path::{Path, PathBuf};

/// The device where none is named.
const DEVICE: &str = "auto";

/// Mount SOURCE on MOUNTPOINT, and serve it in the background until it is unmounted.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The directory to front
    source: PathBuf,
    /// An empty directory to mount it on, which must exist
    mountpoint: PathBuf,
    /// Where copies go: auto, host, cuda:N or several with commas, cuda:all, or a GPU's UUID; requests take the first
    /// [default: auto]
    #[arg(long, help_heading = "Cache")]
    device: Option<String>,
    /// Bytes for copies on each device, such as 16GiB, or a percentage of it [default: 50%, and never what is not free]
    #[arg(long, value_name = "SIZE|PERCENT", help_heading = "Cache")]
    budget: Option<Amount>,
    /// Bytes of each device that the default budget leaves to others; no effect with --budget [default: 10%, at least
    /// 512 MiB]
    #[arg(long, value_name = "SIZE|PERCENT", help_heading = "Cache")]
    reserve: Option<Amount>,
    /// Which way files go to the device: auto (the best that works), gds (GPUDirect Storage only), posix
    #[arg(long, value_name = "ROUTE", help_heading = "Transfer")]
    route: Option<Wanted>,
    /// Do not try GPUDirect Storage for smaller files [default: 16KiB]
    #[arg(long, value_name = "SIZE", help_heading = "Transfer")]
    gds_threshold: Option<Amount>,
    /// Take cuFile's compatibility mode for GPUDirect Storage, to try it where there is none: slower than posix
    #[arg(long, help_heading = "Transfer")]
    gds_compat: bool,
    /// Threads that read files for a device [default: one a core, from 4 to 12]
    #[arg(long, value_name = "NUMBER", help_heading = "Transfer")]
    readers: Option<u16>,
    /// Pinned memory for the reads of a device at most [default: 256MiB]
    #[arg(long, value_name = "SIZE", help_heading = "Transfer")]
    pinned: Option<Amount>,
    /// Refuse every change; triggers still work
    #[arg(long, help_heading = "Mount")]
    read_only: bool,
    /// Let other users in, with the source's permissions checked by the kernel
    #[arg(long, help_heading = "Mount")]
    allow_other: bool,
    /// Read and write file data in the daemon, even where the kernel could do it
    #[arg(long, help_heading = "Mount")]
    no_passthrough: bool,
    /// Mount over a directory that is not empty
    #[arg(long, help_heading = "Mount")]
    nonempty: bool,
    /// Mount options with commas, as in fstab: those above by their names, ro, noexec, nosuid, nodev, and what mount(8)
    /// itself reads
    #[arg(short, value_name = "OPTIONS", value_parser = options::parse, help_heading = "Mount")]
    options: Vec<List>,
    /// Stay in the foreground, and log to stderr
    #[arg(long, short, help_heading = "Mount")]
    foreground: bool,
}

pub(super) fn run(args: &Args) -> Done {
    let config = config(args)?;
    let source = config.mount.source.clone();
    let foreground = args.foreground;
    let report = |lines: &str| lines.lines().for_each(|line| say!("warpfs: {line}"));
    launch(&source, foreground, report, move |ready| {
        let signals = Signals::block(&[]);
        let notes = daemon::log::start(!foreground);
        let mut ready = Some(ready);
        let done = daemon::run(&config, signals, |mut lines| {
            lines.extend(notes);
            if let Some(ready) = ready.take() {
                ready.mounted(&lines);
            }
        });
        match (done, ready) {
            (Ok(()), _) => 0,
            (Err(failure), Some(ready)) => {
                ready.failed(&failure);
                1
            }
            (Err(failure), None) => {
                tracing::error!("{failure}");
                1
            }
        }
    })
}

/// What the flags and the options after `-o` say together.
fn config(args: &Args) -> Result<Config> {
    let options = Options::of(args.options.clone());
    for name in &options.vain {
        complain(&format!("{name} has no effect: access times are those that the source's own mount keeps"));
    }
    let transfer = transfer(args, &options).unwrap_or_else(|said| usage(&said));
    let device = agreed("device", args.device.clone(), options.device).unwrap_or_else(|said| usage(&said));
    let budget = agreed("budget", args.budget, options.budget).unwrap_or_else(|said| usage(&said));
    let reserve = agreed("reserve", args.reserve, options.reserve).unwrap_or_else(|said| usage(&said));
    let read_only = agreed("read-only", args.read_only.then_some(true), options.read_only);
    let mount = MountOptions {
        source: absolute(&args.source, "the source directory")?,
        mountpoint: absolute(&args.mountpoint, "the mount point")?,
        read_only: read_only.unwrap_or_else(|said| usage(&said)) == Some(true),
        allow_other: args.allow_other || options.allow_other,
        passthrough: !(args.no_passthrough || options.no_passthrough),
        nonempty: args.nonempty || options.nonempty,
        nosuid: options.nosuid,
        nodev: options.nodev,
        noexec: options.noexec,
    };
    let device = device.unwrap_or_else(|| DEVICE.into());
    Ok(Config { mount, device, budget, reserve, transfer, socket: crate::socket::overridden() })
}

/// How files get to the device.
fn transfer(args: &Args, options: &Options) -> std::result::Result<transfer::Options, String> {
    let readers = agreed("readers", args.readers, options.readers)?;
    if readers == Some(0) {
        return Err("--readers has to be 1 at least".into());
    }
    let pinned = bytes("pinned", agreed("pinned", args.pinned, options.pinned)?)?.unwrap_or(transfer::PINNED);
    if pinned < transfer::LEAST_PINNED {
        return Err(format!("--pinned has to be {} at least", Human(transfer::LEAST_PINNED)));
    }
    let route = agreed("route", args.route, options.route)?.unwrap_or_default();
    let threshold = agreed("gds-threshold", args.gds_threshold, options.gds_threshold)?;
    let gds_threshold = bytes("gds-threshold", threshold)?.unwrap_or(transfer::GDS_THRESHOLD);
    let gds_compat = args.gds_compat || options.gds_compat;
    if gds_compat && route == Wanted::Posix {
        return Err("--gds-compat asks for cuFile, and --route posix never takes it: say one".into());
    }
    let sized = transfer::Options::sized(readers.map(usize::from), pinned);
    Ok(transfer::Options { route, gds_threshold, gds_compat, ..sized })
}

/// A size that is no share of anything.
fn bytes(name: &str, amount: Option<Amount>) -> std::result::Result<Option<u64>, String> {
    match amount {
        Some(Amount::Percent(_)) => Err(format!("--{name} takes bytes, such as 64MiB")),
        Some(Amount::Bytes(bytes)) => Ok(Some(bytes)),
        None => Ok(None),
    }
}

/// The path without symbolic links; says what it was to be where there is nothing. A dead mount cannot be looked at, so
/// only its folder is.
fn absolute(path: &Path, what: &str) -> Result<PathBuf> {
    let shown = path.display();
    let error = match std::fs::canonicalize(path) {
        Ok(absolute) => return Ok(absolute),
        Err(error) => error,
    };
    if error.raw_os_error() == Some(libc::ENOTCONN)
        && let (Ok(absolute), Some(name)) = (std::path::absolute(path), path.file_name())
        && let Some(folder) = absolute.parent().and_then(|folder| folder.canonicalize().ok())
    {
        return Ok(folder.join(name));
    }
    let advice = if error.kind() == std::io::ErrorKind::NotFound { "; create it, or check the spelling" } else { "" };
    let failure = Failure::system(format!("{what} {shown}"), error);
    Err(Failure { message: format!("{failure}{advice}"), ..failure })
}
