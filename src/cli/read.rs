//! `warpfs read`: a file's bytes, out of device memory, on stdout.

use super::{Done, paths, verify::PIECE};
use crate::client::{self, Session};
use crate::failure::Failure;
use std::io::Write;
use std::path::PathBuf;

/// Write a file's bytes to stdout, out of device memory; what is not resident is loaded first.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A file of a mount
    path: PathBuf,
    /// The device, host or cuda:N [default: the mount's first]
    #[arg(long)]
    device: Option<String>,
}

pub(super) fn run(args: &Args) -> Done {
    let session = Session::of_path(&args.path)?;
    let device = paths::device(args.device.as_deref(), &args.path)?;
    let buffer = session.open_file(&client::open(&args.path)?, &args.path, device, &mut |_| {})?;
    let mut out = std::io::stdout().lock();
    let mut piece = vec![0; PIECE];
    let mut offset = 0;
    while offset < buffer.len() {
        let length = PIECE.min((buffer.len() - offset) as usize);
        buffer.read(offset, &mut piece[..length])?;
        out.write_all(&piece[..length]).map_err(|e| Failure::system("cannot write to stdout", e))?;
        offset += length as u64;
    }
    out.flush().map_err(|e| Failure::system("cannot write to stdout", e))
}
