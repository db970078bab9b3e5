//! What a person asks about the driver and a device when something does not work. It makes no context and allocates nothing.
//! Called by the doctor.

use super::driver::Driver;
use super::nvml;
use crate::failure::Result;
use crate::protocol::DeviceUuid;

/// What is true of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Where it is plugged in, as sysfs names it: `0000:be:00.0`.
    pub bus: Option<String>,
    /// Its memory can be handed to another process as a descriptor.
    pub can_share: bool,
    /// Other devices, such as NVMe disks, can reach memory that is shared so.
    pub can_be_reached: bool,
}

/// Of the device with this UUID. Fails where this process does not see it.
pub fn device_facts(uuid: &DeviceUuid) -> Result<DeviceFacts> {
    let driver = Driver::get()?;
    let devices = driver.devices()?;
    let number = devices.iter().find(|d| d.uuid == *uuid).ok_or_else(|| super::hidden(uuid))?.number;
    Ok(DeviceFacts {
        bus: driver.bus_id(number).ok().map(|bus| bus.to_ascii_lowercase()),
        can_share: driver.can_share(number),
        can_be_reached: driver.can_be_reached(number),
    })
}

/// The newest CUDA that the driver runs, as (major, minor).
pub fn cuda_version() -> Result<(u32, u32)> {
    let version = Driver::get()?.version()?;
    Ok((version / 1000, version % 1000 / 10))
}

/// The driver's own version, such as `580.65.06`. `None` where NVML does not tell.
pub fn driver_version() -> Option<String> {
    nvml::driver_version()
}
