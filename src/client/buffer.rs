//! A file's bytes in device memory, as long as this lives.

use super::session::Lease;
use crate::failure::Result;
use crate::protocol::Code;

/// The bytes of one version of a file, in device memory, read-only and shared with whoever else asked for it.
pub struct Buffer {
    /// Nothing for an empty file.
    lease: Option<Lease>,
    offset: u64,
    length: u64,
    generation: u64,
}

impl Buffer {
    pub(super) fn new(lease: Option<Lease>, offset: u64, length: u64, generation: u64) -> Buffer {
        Buffer { lease, offset, length, generation }
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Where the file's first byte is: a device pointer, or an address in this process for the host device; 0 for an
    /// empty file. Storing there ends a CUDA context, or this process.
    pub fn address(&self) -> u64 {
        self.lease.as_ref().map_or(0, |lease| lease.mapping().address() + self.offset)
    }

    /// The daemon's number for this version of the file.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Copies bytes from `offset` of the file, out of device memory. They all have to lie within the file.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.length) {
            let message = format!("bytes {offset}+{} lie outside of the {} bytes of the file", out.len(), self.length);
            return Err(crate::failure::Failure::new(Code::BadRequest, message));
        }
        match &self.lease {
            Some(lease) => lease.importer.read(lease.mapping(), self.offset + offset, out),
            None => Ok(()),
        }
    }
}
