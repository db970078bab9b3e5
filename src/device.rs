//! Memory that other processes can map. A device has two sides, and no process has both: the daemon *owns* memory (it
//! creates and exports it, and never maps it or holds a context), the loader and the clients *import* it (they map a
//! descriptor that they were given). Nothing here knows what a file is.

pub mod cuda;
pub mod host;
mod select;

pub use select::{Selection, select};

use crate::failure::{Failure, Result};
use crate::protocol::{Code, DeviceKind, DeviceUuid};
use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// What is known of a device without a context on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    pub uuid: DeviceUuid,
    pub kind: DeviceKind,
    /// The driver's ordinal; 0 for the host.
    pub ordinal: u32,
    /// `host` or `cuda:N`.
    pub label: String,
    /// What a person calls it, such as `NVIDIA H200`.
    pub name: String,
    /// Bytes of memory in all.
    pub total: u64,
    /// Every allocation is a multiple of this many bytes.
    pub granularity: u64,
}

impl Info {
    /// The bytes that an allocation for `length` bytes takes.
    pub fn rounded(&self, length: u64) -> u64 {
        length.div_ceil(self.granularity) * self.granularity
    }
}

/// The owner's side, in the daemon.
pub trait Memory: Send + Sync {
    fn info(&self) -> &Info;

    /// Bytes that nobody uses now, as the system says. `None` where nobody can tell.
    fn free(&self) -> Option<u64>;

    /// Creates `size` bytes, a multiple of the granularity. Their content is undefined until a loader has filled them.
    /// Fails with `OutOfMemory` where the device has no room.
    fn allocate(&self, size: u64) -> Result<Allocation>;

    /// Makes a filled allocation unchangeable for whoever maps it, as far as the device can. Called before anyone but
    /// the loader has seen the descriptor, when the loader has unmapped it.
    fn seal(&self, allocation: &Allocation) -> Result<()>;

    /// The same while the loader has it mapped, and goes on writing to it: nobody else can map it writable after.
    fn seal_slab(&self, allocation: &Allocation) -> Result<()>;
}

/// One piece of device memory. It is freed when this is dropped and everyone who mapped it has unmapped it.
pub struct Allocation {
    descriptor: OwnedFd,
    size: u64,
    /// Whatever else keeps the memory; dropped before the descriptor.
    _handle: Option<Box<dyn Any + Send + Sync>>,
}

impl Allocation {
    pub fn new(descriptor: OwnedFd, size: u64, handle: Option<Box<dyn Any + Send + Sync>>) -> Allocation {
        Allocation { descriptor, size, _handle: handle }
    }

    /// Bytes, a multiple of the device's granularity.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The descriptor that another process imports.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// How an importer maps an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// What clients ask for.
    ReadOnly,
    /// What the loader asks for while it fills.
    ReadWrite,
}

/// The importer's side, in a loader or a client.
pub trait Importer: Send + Sync {
    /// Maps the `size` bytes behind `descriptor`.
    fn map(&self, descriptor: BorrowedFd<'_>, size: u64, access: Access) -> Result<Box<dyn Mapping>>;

    /// Copies device bytes from `offset` of `mapping` into `out`, and returns when they are there.
    fn read(&self, mapping: &dyn Mapping, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Writes zeros over `length` bytes from `offset` of a writable mapping, and returns when they are there.
    fn zero(&self, mapping: &dyn Mapping, offset: u64, length: u64) -> Result<()>;

    /// Makes all of an allocation zeros to which nobody has written yet, and returns when it is.
    fn clear(&self, mapping: &dyn Mapping) -> Result<()> {
        self.zero(mapping, 0, mapping.size())
    }

    /// `size` bytes of device memory of this process's own, rounded up, that a disk may write to. `Unsupported` where the
    /// processor can store into a mapping itself.
    fn scratch(&self, _size: u64) -> Result<Box<dyn Mapping>> {
        Err(Failure::new(Code::Unsupported, "this device has no memory of its own"))
    }

    /// Copies `length` bytes from one mapping to another, and returns when they are there. `Unsupported` as above.
    fn shift(
        &self,
        _from: &dyn Mapping,
        _from_offset: u64,
        _to: &dyn Mapping,
        _to_offset: u64,
        _length: u64,
    ) -> Result<()> {
        Err(Failure::new(Code::Unsupported, "this device has no memory of its own"))
    }

    /// A lane with `slots` pinned slots of `slot_size` bytes, for one thread. `None` where the processor can store into
    /// a mapping itself and a lane would be a detour (the host device).
    fn lane(&self, slots: usize, slot_size: usize) -> Result<Option<Box<dyn Lane>>>;

    /// Whether this process can do nothing more with the device (its context met an error that does not go away), and
    /// should end so that a new one can.
    fn lost(&self) -> bool {
        false
    }
}

/// The importer's side of a device. A CUDA device is found by `uuid`; there is only one host. `NoDevice` where this
/// process does not see the device.
pub fn importer(uuid: &DeviceUuid, kind: DeviceKind) -> Result<Arc<dyn Importer>> {
    match kind {
        DeviceKind::Host => Ok(Arc::new(host::HostImporter)),
        DeviceKind::Cuda => Ok(Arc::new(cuda::CudaImporter::new(uuid)?)),
    }
}

/// An allocation in this process's (or this context's) address space, until it is dropped.
///
/// # Safety
/// As long as the value lives, `size` bytes from `address` are mapped, readable by whoever the address is for, and
/// writable where the mapping was asked for so.
pub unsafe trait Mapping: Send + Sync {
    /// Where it begins: a host address, or a device pointer.
    fn address(&self) -> u64;
    fn size(&self) -> u64;
    /// Where the processor can store into it: the host address of its first byte.
    fn host(&self) -> Option<*mut u8>;
    /// A thread is about to store to all of these bytes through `host()`: a hint.
    fn about_to_fill(&self, _offset: u64, _length: u64) {}
}

/// One thread's way into device memory: pinned slots that are filled from a file and copied asynchronously.
/// A slot's bytes must not be touched between `copy` and a `wait` for the same slot that returned.
pub trait Lane: Send {
    /// The memory of a slot.
    fn slot(&mut self, slot: usize) -> &mut [u8];
    /// Starts copying the first `length` bytes of `slot` to `offset` of `mapping`. The mapping must outlive the copy.
    fn copy(&mut self, slot: usize, length: usize, mapping: &dyn Mapping, offset: u64) -> Result<()>;
    /// Starts copying `length` bytes from `offset` of `file`, a multiple of the page size, out of the page cache to `at` of
    /// `mapping`, as if they were in `slot`. False where the system or the driver lets nobody do that: nothing was started.
    fn lend(
        &mut self,
        _slot: usize,
        _file: BorrowedFd<'_>,
        _offset: u64,
        _length: usize,
        _mapping: &dyn Mapping,
        _at: u64,
    ) -> Result<bool> {
        Ok(false)
    }
    /// Returns when the last copy out of `slot` has completed (at once where there was none). An error says that the
    /// copy failed or the device is lost; either way the copy is over.
    fn wait(&mut self, slot: usize) -> Result<()>;
}

/// Fails with `BadRequest` unless `length` bytes from `offset` lie in `mapping`.
fn check_range(mapping: &dyn Mapping, offset: u64, length: u64) -> Result<()> {
    if offset.checked_add(length).is_some_and(|end| end <= mapping.size()) {
        return Ok(());
    }
    let message = format!("{length} bytes from {offset} do not lie in a mapping of {} bytes", mapping.size());
    Err(Failure::new(Code::BadRequest, message))
}

/// 32 hexadecimal digits, as [`parse_hex`] reads them.
pub fn hex(uuid: &DeviceUuid) -> String {
    uuid.iter().map(|b| format!("{b:02x}")).collect()
}

/// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, as the vendor's tools write it.
pub fn format_uuid(uuid: &DeviceUuid) -> String {
    let hex = hex(uuid);
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Reads what [`format_uuid`] writes.
pub fn parse_uuid(text: &str) -> Option<DeviceUuid> {
    let text = text.strip_prefix("GPU-")?;
    let groups: Vec<&str> = text.split('-').collect();
    if groups.iter().map(|g| g.len()).collect::<Vec<_>>() != [8, 4, 4, 4, 12] {
        return None;
    }
    parse_hex(&groups.concat())
}

/// 32 hexadecimal digits, as a loader is told its device.
pub fn parse_hex(hex: &str) -> Option<DeviceUuid> {
    if hex.len() != 32 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    Some(u128::from_str_radix(hex, 16).ok()?.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_as_it_is_written() {
        let uuid = *b"\x01\x23\x45\x67\x89\xab\xcd\xef\x00\x11\x22\x33\x44\x55\x66\xff";
        let text = format_uuid(&uuid);
        assert_eq!(text, "GPU-01234567-89ab-cdef-0011-2233445566ff");
        assert_eq!(parse_uuid(&text), Some(uuid));
        for wrong in
            ["GPU-", "01234567-89ab-cdef-0011-2233445566ff", "GPU-01234567-89ab-cdef-0011-2233445566fx", "GPU-é"]
        {
            assert_eq!(parse_uuid(wrong), None, "{wrong}");
        }
    }
}
