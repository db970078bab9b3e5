//! The files that are measured: noise, without a name from the beginning, so that nothing stays of them however this process
//! ends. Called by `bench`.

use crate::failure::{Failure, Result};
use crate::protocol::Code;
use crate::size::Human;
use crate::source::OpenFile;
use crate::transfer::direct::Alignment;
use crate::transfer::residency;
use rustix::fs::{Advice, Mode, OFlags};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A large file, and the folder for others.
pub struct Sample {
    pub file: OpenFile,
    /// Bytes.
    pub size: u64,
    pub folder: PathBuf,
}

/// Bytes that are left free on the file system.
const SPARE: u64 = 256 << 20;

impl Sample {
    /// Writes `size` bytes of noise into `folder`. Fails where there is no room for them.
    pub fn write(folder: &Path, size: u64) -> Result<Sample> {
        let about = |e| Failure::system(folder.display(), e);
        let free = rustix::fs::statvfs(folder).map_err(about)?;
        let free = free.f_bavail * free.f_frsize;
        if free < size + SPARE.min(size) {
            let message = format!(
                "{}: only {} are free, for a file of {}; use --size, or another directory",
                folder.display(),
                Human(free),
                Human(size)
            );
            return Err(Failure::new(Code::OutOfMemory, message));
        }
        let mut file = nameless(folder)?;
        noise(&mut file, size).map_err(|e| Failure::system(folder.display(), e))?;
        let file = OpenFile::new(OwnedFd::from(file), folder.join("(the file that is measured)"))?;
        Ok(Sample { file, size, folder: folder.to_path_buf() })
    }

    /// `count` files of `size` bytes, open.
    pub fn small(&self, count: usize, size: u64) -> Result<Vec<OpenFile>> {
        let one = |_| {
            let mut file = nameless(&self.folder)?;
            noise(&mut file, size).map_err(|e| Failure::system(self.folder.display(), e))?;
            OpenFile::new(OwnedFd::from(file), self.folder.join("(a small file that is measured)"))
        };
        (0..count).map(one).collect()
    }

    /// Whether the file can be read past the page cache.
    pub fn is_on_a_disk(&self) -> bool {
        Alignment::of(self.file.as_fd()).is_some()
    }

    /// Brings all of it into the page cache.
    pub fn warm(&self) -> Result<()> {
        let mut piece = vec![0; 4 << 20];
        let mut at = 0;
        while at < self.size {
            match rustix::io::pread(&self.file, &mut piece, at) {
                Ok(0) => break,
                Ok(count) => at += count as u64,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Failure::system(self.folder.display(), e)),
            }
        }
        Ok(())
    }

    /// Takes the first `length` bytes out of the page cache.
    pub fn chill(&self, length: u64) -> Result<()> {
        let about = |e| Failure::system(self.folder.display(), e);
        rustix::fs::fsync(&self.file).map_err(about)?;
        let range = std::num::NonZeroU64::new(length);
        rustix::fs::fadvise(&self.file, 0, range, Advice::DontNeed).map_err(about)?;
        match residency::cached(self.file.as_fd(), 0, length as usize) {
            Some(left) if left > length / 100 => {
                let message = format!("{}: the file system keeps its files in memory", self.folder.display());
                Err(Failure::new(Code::Unsupported, message))
            }
            _ => Ok(()),
        }
    }
}

fn nameless(folder: &Path) -> Result<File> {
    let (flags, mode) = (OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::from_raw_mode(0o600));
    match rustix::fs::open(folder, flags, mode) {
        Ok(file) => Ok(File::from(file)),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {
            let path = folder.join(format!(".warpfs-bench-{}", std::process::id()));
            let made = File::options().read(true).write(true).create_new(true).open(&path);
            let file = made.map_err(|e| Failure::system(path.display(), e))?;
            std::fs::remove_file(&path).map_err(|e| Failure::system(path.display(), e))?;
            Ok(file)
        }
        Err(e) => Err(Failure::system(folder.display(), e)),
    }
}

/// Nothing that a layer could be clever about.
fn noise(file: &mut File, size: u64) -> std::io::Result<()> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64 ^ size;
    let mut piece = vec![0_u8; (1 << 20).min(size as usize)];
    let mut left = size;
    while left > 0 {
        for word in piece.chunks_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
        }
        let now = left.min(piece.len() as u64);
        file.write_all(&piece[..now as usize])?;
        left -= now;
    }
    Ok(())
}
