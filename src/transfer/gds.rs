//! GPUDirect Storage: files straight from the disk to the device, by cuFile. What is called so here was seen by cuFile's own
//! counters to go that way; its compatibility mode, which reads through the processor's memory, is switched off, and is
//! never taken for it. Whoever calls has the device's context current. Called by `ring` on the loader's readers.

mod library;
pub mod route;

pub use library::Counts;

use super::plan::Chunk;
use crate::device::{Importer, Mapping};
use crate::failure::{Failure, Result};
use crate::protocol::{Code, DeviceUuid};
use library::{Library, RawFile};
use parking_lot::RwLock;
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// What offsets, lengths and device addresses have to be multiples of, or cuFile goes through buffers of its own.
const BLOCK: u64 = 4096;

/// cuFile, with its driver open, for one device.
pub struct Gds {
    cufile: Library,
    device: DeviceUuid,
    importer: Arc<dyn Importer>,
    /// Its counters tell which way a read went.
    counts: bool,
    compat: bool,
    /// Held for reading by reads, and for writing by one whose way is looked at: the counters are the process's.
    reads: RwLock<()>,
}

/// Which way the first read of a file went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Straight from the disk to the device, as the counters say.
    Straight,
    /// Through the processor's memory, as they say.
    Around,
    /// This version does not tell.
    Untold,
}

/// A file that cuFile reads.
pub struct File {
    gds: Arc<Gds>,
    raw: RawFile,
    /// Closed after it was deregistered.
    _descriptor: OwnedFd,
}

/// Device memory of this process, in which what does not lie right arrives first.
pub type Scratch = Option<Box<dyn Mapping>>;

impl Gds {
    /// Opens cuFile's driver; `compat`: its compatibility mode will do. Fails where there is no cuFile, or where it does not
    /// work here.
    pub fn open(importer: Arc<dyn Importer>, device: DeviceUuid, compat: bool) -> Result<Gds> {
        let cufile = Library::load()?;
        match cufile.allow_compatibility(compat) {
            Some(told) => told?,
            // What cannot be switched off would be found out by the counters, which such a version does not have either.
            None => tracing::debug!("this libcufile cannot be told whether compatibility mode will do"),
        }
        cufile.open_driver()?;
        let counts = cufile.start_statistics();
        Ok(Gds { cufile, device, importer, counts, compat, reads: RwLock::new(()) })
    }

    /// For people: the version, and whether it tells which way it goes.
    pub fn describe(&self) -> String {
        let version = self.cufile.version().unwrap_or_else(|| "of unknown version".into());
        let tells = if self.counts { "" } else { ", which does not tell which way it reads (from 1.15 it does)" };
        let compat = if self.compat { ", compatibility mode allowed" } else { "" };
        format!("libcufile {version}{tells}{compat}")
    }

    /// Reads of this process so far; nothing where they are not counted.
    pub fn counts(&self) -> Option<Counts> {
        if self.counts { self.cufile.counts(&self.device) } else { None }
    }

    /// Takes a file, which must not be one of a FUSE mount.
    pub fn file(self: &Arc<Gds>, file: BorrowedFd<'_>) -> Result<File> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let descriptor = match rustix::fs::open(&path, flags | OFlags::DIRECT, Mode::empty()) {
            // Compatibility mode reads anything.
            Err(rustix::io::Errno::INVAL) if self.compat => rustix::fs::open(&path, flags, Mode::empty()),
            other => other,
        };
        let descriptor = descriptor.map_err(|e| Failure::system("cannot open the file for cuFile", e))?;
        let raw = self.cufile.register(descriptor.as_fd())?;
        Ok(File { gds: Arc::clone(self), raw, _descriptor: descriptor })
    }
}

impl File {
    /// Brings the chunk to its place in the mapping, and nothing beside it.
    pub fn fetch(&self, chunk: Chunk, mapping: &dyn Mapping, scratch: &mut Scratch) -> Result<()> {
        let _others = self.gds.reads.read();
        self.bring(chunk, mapping, scratch)
    }

    /// The same, and looks which way it went. Nobody reads with cuFile meanwhile.
    pub fn prove(&self, chunk: Chunk, mapping: &dyn Mapping, scratch: &mut Scratch) -> Result<Way> {
        let _alone = self.gds.reads.write();
        // A device that was never read to has no counts yet.
        let before = self.gds.counts().unwrap_or_default();
        self.bring(chunk, mapping, scratch)?;
        Ok(match self.gds.counts() {
            None => Way::Untold,
            Some(now) if now.posix == before.posix && (now.nvfs > before.nvfs || now.p2p > before.p2p) => Way::Straight,
            Some(_) => Way::Around,
        })
    }

    fn bring(&self, chunk: Chunk, mapping: &dyn Mapping, scratch: &mut Scratch) -> Result<()> {
        let (end, place) = (chunk.file + chunk.length as u64, mapping.address() + chunk.device);
        let whole = chunk.length as u64 / BLOCK * BLOCK;
        if !chunk.file.is_multiple_of(BLOCK) || !place.is_multiple_of(BLOCK) {
            return self.shifted(chunk, chunk.file / BLOCK * BLOCK, end, mapping, scratch);
        }
        if whole > 0 {
            self.read(chunk.file, whole as usize, mapping, chunk.device, whole as usize)?;
        }
        if whole == chunk.length as u64 {
            return Ok(());
        }
        // The last block of the file: what lies behind it in the mapping is not ours to write.
        let rest = Chunk {
            file: chunk.file + whole,
            device: chunk.device + whole,
            length: chunk.length - whole as usize,
            ..chunk
        };
        self.shifted(rest, rest.file, end, mapping, scratch)
    }

    /// Whole blocks to memory of our own, and from there what is wanted to its place.
    fn shifted(&self, chunk: Chunk, begin: u64, end: u64, mapping: &dyn Mapping, scratch: &mut Scratch) -> Result<()> {
        let blocks = end.next_multiple_of(BLOCK) - begin;
        if scratch.as_ref().is_none_or(|scratch| scratch.size() < blocks) {
            *scratch = Some(self.gds.importer.scratch(blocks)?);
        }
        let Some(scratch) = scratch else { unreachable!("made just now") };
        self.read(begin, blocks as usize, &**scratch, 0, (end - begin) as usize)?;
        self.gds.importer.shift(&**scratch, chunk.file - begin, mapping, chunk.device, chunk.length as u64)
    }

    /// Asks for `length` bytes, of which `needed` have to come: the file may end before the last block does.
    fn read(&self, offset: u64, length: usize, mapping: &dyn Mapping, at: u64, needed: usize) -> Result<()> {
        let mut done = 0;
        while done < needed {
            let from = offset + done as u64;
            match self.gds.cufile.read(self.raw, mapping, at + done as u64, from, length - done)? {
                0 => {
                    let message = format!(
                        "the file became shorter while it was loaded: it ends before byte {from}; try again when nobody writes it"
                    );
                    return Err(Failure::new(Code::Changing, message));
                }
                count => done += count,
            }
        }
        Ok(())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: registered once; whoever reads with it borrows this value.
        unsafe { self.gds.cufile.deregister(self.raw) };
    }
}
