//! `warpfs evict`: gives copies up.

use super::{Done, complain, paths, some_failed};
use crate::client;
use crate::size::Human;
use std::path::PathBuf;

/// Give up the copies of files, on every device; of directories, of every file below them.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Files and directories of a mount
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

pub(super) fn run(args: &Args) -> Done {
    let (files, mut failures) = paths::files(&args.paths);
    let (mut freed, mut held) = (0, 0);
    for path in &files {
        match client::open(path).and_then(|file| client::evict(&file, path)) {
            Ok(evicted) => {
                freed += evicted.freed;
                held += evicted.held;
            }
            Err(failure) => failures.push(failure),
        }
    }
    failures.iter().for_each(complain);
    let later = match held {
        0 => String::new(),
        held => format!("; {} are held, and free when their holders let go", Human(held)),
    };
    say!("freed {}{later}", Human(freed));
    if failures.is_empty() { Ok(()) } else { Err(some_failed()) }
}
