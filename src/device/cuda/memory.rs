//! The owner's side of a CUDA device: creates memory and exports it, for which the driver needs no context, so that the
//! daemon costs no device memory of its own. It must never map memory or take a context. Called by the daemon.

use super::driver::Driver;
use super::{info_of, nvml, owned};
use crate::device::{Allocation, Info, Memory};
use crate::failure::{Failure, Result};
use crate::protocol::{Code, DeviceUuid};

/// Memory of one device.
pub struct CudaMemory {
    driver: &'static Driver,
    /// The driver's number of the device.
    device: i32,
    info: Info,
}

impl CudaMemory {
    /// The device with this UUID. `NoDevice` where there is none, no driver, or no way to share its memory.
    pub fn new(uuid: &DeviceUuid) -> Result<CudaMemory> {
        let driver = Driver::get()?;
        let devices = driver.devices()?;
        let found = devices.iter().enumerate().find(|(_, d)| d.uuid == *uuid);
        let (ordinal, device) = found.ok_or_else(|| super::hidden(uuid))?;
        let info = info_of(driver, ordinal as u32, device)?;
        if !driver.can_share(device.number) {
            let message = format!(
                "{} ({}): its memory cannot be handed to other processes as a descriptor; use --device host",
                info.label, info.name
            );
            return Err(Failure::new(Code::NoDevice, message));
        }
        Ok(CudaMemory { driver, device: device.number, info })
    }
}

impl Memory for CudaMemory {
    fn info(&self) -> &Info {
        &self.info
    }

    fn free(&self) -> Option<u64> {
        nvml::free(&self.info.uuid)
    }

    fn allocate(&self, size: u64) -> Result<Allocation> {
        let context = |f: Failure| f.within(&self.info.label);
        let properties = self.driver.properties(self.device);
        let handle = owned::Handle::create(self.driver, owned::length(size)?, &properties).map_err(context)?;
        let descriptor = handle.export().map_err(context)?;
        Ok(Allocation::new(descriptor, size, Some(Box::new(handle))))
    }

    /// Nothing to do: an importer chooses its own access, which is why a copy is shared within one domain only.
    fn seal(&self, _allocation: &Allocation) -> Result<()> {
        Ok(())
    }

    /// The same.
    fn seal_slab(&self, _allocation: &Allocation) -> Result<()> {
        Ok(())
    }
}
