//! The importer's side of a CUDA device: a context, mappings of what others exported, and lanes into them. It must never
//! leave a half-made mapping behind. Called by loaders and clients.

use super::driver::Driver;
use super::owned::{Context, Event, Handle, Lent, Mapped, Pinned, Stream, length};
use crate::device::{Access, Importer, Lane, Mapping, check_range};
use crate::failure::Result;
use crate::protocol::DeviceUuid;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The primary context of one device, held until this is dropped.
pub struct CudaImporter {
    context: Arc<Context>,
}

impl CudaImporter {
    /// Takes a context on the device with this UUID (some 130 to 450 ms and 519 MiB of its memory, unless the process has
    /// one). `NoDevice` where this process sees no such device.
    pub fn new(uuid: &DeviceUuid) -> Result<CudaImporter> {
        let driver = Driver::get()?;
        let device = driver.devices()?.into_iter().find(|d| d.uuid == *uuid).ok_or_else(|| super::hidden(uuid))?;
        Ok(CudaImporter { context: Context::retain(driver, device.number)? })
    }
}

impl Importer for CudaImporter {
    fn map(&self, descriptor: BorrowedFd<'_>, size: u64, access: Access) -> Result<Box<dyn Mapping>> {
        self.context.enter()?;
        let handle = Handle::import(self.context.driver, descriptor)?;
        // The mapping keeps the memory: the handle may go.
        Ok(Box::new(CudaMapping(Mapped::new(&self.context, &handle, length(size)?, access)?)))
    }

    fn read(&self, mapping: &dyn Mapping, offset: u64, out: &mut [u8]) -> Result<()> {
        check_range(mapping, offset, out.len() as u64)?;
        if out.is_empty() {
            return Ok(());
        }
        self.context.read(mapping.address() + offset, out)
    }

    fn zero(&self, mapping: &dyn Mapping, offset: u64, bytes: u64) -> Result<()> {
        check_range(mapping, offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.context.zero(mapping.address() + offset, length(bytes)?)
    }

    fn scratch(&self, size: u64) -> Result<Box<dyn Mapping>> {
        Ok(Box::new(CudaMapping(self.context.allocate(size)?)))
    }

    fn shift(&self, from: &dyn Mapping, from_offset: u64, to: &dyn Mapping, to_offset: u64, bytes: u64) -> Result<()> {
        check_range(from, from_offset, bytes)?;
        check_range(to, to_offset, bytes)?;
        self.context.shift(from.address() + from_offset, to.address() + to_offset, length(bytes)?)
    }

    fn lane(&self, slots: usize, slot_size: usize) -> Result<Option<Box<dyn Lane>>> {
        let stream = Stream::new(&self.context)?;
        let events = (0..slots).map(|_| Event::new(&self.context)).collect::<Result<Vec<_>>>()?;
        let pinned = Pinned::new(&self.context, slots * slot_size)?;
        let busy = vec![false; slots];
        let lent = (0..slots).map(|_| None).collect();
        let context = Arc::clone(&self.context);
        Ok(Some(Box::new(CudaLane { context, stream, events, busy, lent, slot_size, pinned })))
    }

    fn lost(&self) -> bool {
        self.context.driver.is_lost()
    }
}

struct CudaMapping(Mapped);

// SAFETY: exactly the range that was mapped for the device, until it is dropped.
unsafe impl Mapping for CudaMapping {
    fn address(&self) -> u64 {
        self.0.address
    }

    fn size(&self) -> u64 {
        self.0.size as u64
    }

    fn host(&self) -> Option<*mut u8> {
        None
    }
}

/// A stream of its own, and an event behind the last copy out of each slot.
struct CudaLane {
    context: Arc<Context>,
    stream: Stream,
    events: Vec<Event>,
    /// Whether a copy out of the slot was started and not waited for.
    busy: Vec<bool>,
    /// What is copied instead of the slot's own bytes.
    lent: Vec<Option<Lent>>,
    slot_size: usize,
    pinned: Pinned,
}

impl Lane for CudaLane {
    fn slot(&mut self, slot: usize) -> &mut [u8] {
        assert!(!self.busy[slot], "a slot is filled only after its copy was waited for");
        self.pinned.bytes(slot * self.slot_size, self.slot_size)
    }

    fn copy(&mut self, slot: usize, length: usize, mapping: &dyn Mapping, offset: u64) -> Result<()> {
        assert!(length <= self.slot_size, "a copy lies in its slot");
        check_range(mapping, offset, length as u64)?;
        let (from, to) = (slot * self.slot_size, mapping.address() + offset);
        // SAFETY: the slot lies in the ring, and nobody touches it until the event (contract of `Lane`).
        let started = unsafe { self.stream.copy(self.pinned.at(from, length), length, to, &self.events[slot]) };
        if started.is_err() {
            // The copy may have started without its event: let it end before anyone touches the slot.
            let _ = self.stream.synchronize();
            return started;
        }
        self.busy[slot] = true;
        Ok(())
    }

    fn lend(
        &mut self,
        slot: usize,
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        mapping: &dyn Mapping,
        at: u64,
    ) -> Result<bool> {
        assert!(!self.busy[slot], "a slot is free when something is lent in its place");
        check_range(mapping, at, length as u64)?;
        let Some(lent) = Lent::new(&self.context, file, offset, length)? else { return Ok(false) };
        // SAFETY: the pages are registered, and stay so until the event was waited for.
        let started = unsafe { self.stream.copy(lent.address(), length, mapping.address() + at, &self.events[slot]) };
        if started.is_err() {
            let _ = self.stream.synchronize();
        }
        started?;
        (self.busy[slot], self.lent[slot]) = (true, Some(lent));
        Ok(true)
    }

    fn wait(&mut self, slot: usize) -> Result<()> {
        if !std::mem::take(&mut self.busy[slot]) {
            return Ok(());
        }
        let waited = self.events[slot].wait();
        if waited.is_err() {
            let _ = self.stream.synchronize();
        }
        self.lent[slot] = None;
        waited
    }
}

impl Drop for CudaLane {
    fn drop(&mut self) {
        // No copy may run out of memory that is about to be unpinned.
        let _ = self.stream.synchronize();
    }
}
