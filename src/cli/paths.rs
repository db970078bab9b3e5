//! What the file commands share: the files that the given paths mean, and the device that `--device` means.

use crate::client::{self, Device, Session};
use crate::failure::{Failure, Result};
use std::path::{Path, PathBuf};

/// The files that a command is about, and on which device.
#[derive(Debug, clap::Args)]
pub(super) struct Which {
    /// Files and directories of a mount
    #[arg(required = true)]
    pub(super) paths: Vec<PathBuf>,
    /// The device, host or cuda:N [default: the mount's first]
    #[arg(long)]
    device: Option<String>,
}

impl Which {
    pub(super) fn device(&self) -> Result<Device> {
        device(self.device.as_deref(), &self.paths[0])
    }
}

/// Regular files: `paths` themselves, and what lies below those that are directories. Symbolic links are followed where
/// they were given, not where they were met. What is neither file nor directory is left to whoever opens it to refuse.
pub(super) fn files(paths: &[PathBuf]) -> (Vec<PathBuf>, Vec<Failure>) {
    let (mut files, mut failures) = (Vec::new(), Vec::new());
    for path in paths {
        match std::fs::metadata(path) {
            // Of a directory that is not on a mount nothing below it is asked for: that would fail once a file.
            Ok(meta) if meta.is_dir() => match on_a_mount(path) {
                Ok(()) => walk(path, &mut files, &mut failures),
                Err(failure) => failures.push(failure),
            },
            Ok(_) => files.push(path.clone()),
            Err(e) => failures.push(Failure::system(path.display(), e)),
        }
    }
    (files, failures)
}

fn on_a_mount(folder: &Path) -> Result<()> {
    let open = std::fs::File::open(folder).map_err(|e| Failure::system(folder.display(), e))?;
    client::version(&open, folder).map(|_| ())
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>, failures: &mut Vec<Failure>) {
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(e) => {
                failures.push(Failure::system(folder.display(), e));
                continue;
            }
        };
        let mut here = Vec::new();
        for entry in entries {
            match entry.and_then(|entry| Ok((entry.path(), entry.file_type()?))) {
                Ok((path, kind)) if kind.is_dir() => folders.push(path),
                Ok((path, kind)) if kind.is_file() => here.push(path),
                Ok(_) => {}
                Err(e) => failures.push(Failure::system(folder.display(), e)),
            }
        }
        here.sort();
        files.append(&mut here);
    }
}

/// The device with this label on the mount that `path` is on.
pub(super) fn device(label: Option<&str>, path: &Path) -> Result<Device> {
    match label {
        None => Ok(Device::Default),
        Some(label) => Session::of_path(path)?.device(label),
    }
}
