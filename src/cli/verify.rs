//! `warpfs verify`: proves that the bytes in device memory are the file's, through a client's own mapping.

use super::{Done, complain, paths, some_failed};
use crate::client::{self, Buffer, Session};
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

/// Compare the bytes in device memory with the file's, byte for byte; of directories, of every file below them. What is
/// not resident is loaded first.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    which: paths::Which,
}

/// Bytes that are compared at a time.
pub(super) const PIECE: usize = 8 << 20;

pub(super) fn run(args: &Args) -> Done {
    let device = args.which.device()?;
    let (files, mut failures) = paths::files(&args.which.paths);
    // The paths may lie on several mounts, and a session belongs to the daemon of one.
    let mut sessions = HashMap::new();
    let mut equal = 0;
    for path in &files {
        let mut verify = || {
            client::open(path).and_then(|file| {
                let mount = file.metadata().map_err(|e| Failure::system(path.display(), e))?.dev();
                let session = match sessions.entry(mount) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(free) => free.insert(Session::of_path(path)?),
                };
                let buffer = session.open_file(&file, path, device, &mut |_| {})?;
                compare(&buffer, &file, path)
            })
        };
        let mut verified = verify();
        for _ in 0..RETRIES {
            if verified.as_ref().is_err_and(|failure| failure.code == Code::Changing) {
                std::thread::sleep(SETTLED);
                verified = verify();
            }
        }
        match verified {
            Ok(bytes) => {
                equal += 1;
                say!("{}: {bytes} bytes in device memory equal the file's", path.display());
            }
            Err(failure) => failures.push(failure),
        }
    }
    if files.len() > 1 {
        say!("{equal} of {} files are equal", files.len());
    }
    failures.iter().for_each(complain);
    if failures.is_empty() { Ok(()) } else { Err(some_failed()) }
}

/// A file whose size is not that of the copy has just been changed: through the mount its old size, and the pages that were
/// read of it, can be seen for a second.
const SETTLED: Duration = Duration::from_millis(600);
const RETRIES: usize = 2;

/// The bytes that were compared, if all are equal.
fn compare(buffer: &Buffer, file: &File, path: &Path) -> Result<u64> {
    let shown = path.display();
    let size = file.metadata().map_err(|e| Failure::system(&shown, e))?.len();
    if size != buffer.len() {
        let there = buffer.len();
        let message = format!(
            "{shown}: {there} bytes are in device memory, but the file has {size}: it is being changed; try again"
        );
        return Err(Failure::new(Code::Changing, message));
    }
    let (mut on_device, mut in_file) = (vec![0; PIECE], vec![0; PIECE]);
    let mut offset = 0;
    while offset < size {
        let length = PIECE.min((size - offset) as usize);
        buffer.read(offset, &mut on_device[..length])?;
        file.read_exact_at(&mut in_file[..length], offset).map_err(|e| Failure::system(&shown, e))?;
        if on_device[..length] != in_file[..length] {
            let place = on_device.iter().zip(&in_file).position(|(a, b)| a != b).expect("they differ");
            let message = format!("{shown}: byte {} in device memory is not the file's", offset + place as u64);
            return Err(Failure::new(Code::Io, message));
        }
        offset += length as u64;
    }
    Ok(size)
}
