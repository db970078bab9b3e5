//! CUDA devices: memory as POSIX descriptors through the driver's virtual memory management. Every call of the driver is
//! in this room; none of them may panic where there is no driver. Called by the daemon (`CudaMemory`), by loaders and clients
//! (`CudaImporter`), and by the doctor (`device_facts`).

mod driver;
mod facts;
mod importer;
mod memory;
mod nvml;
mod owned;

pub use facts::{DeviceFacts, cuda_version, device_facts, driver_version};
pub use importer::CudaImporter;
pub use memory::CudaMemory;

use super::{Info, format_uuid};
use crate::failure::{Failure, Result};
use crate::protocol::{Code, DeviceKind, DeviceUuid};
use driver::{Device, Driver};

/// Every device that this process sees, in the driver's order. `NoDevice` where there is no driver or no device.
pub fn list() -> Result<Vec<Info>> {
    let driver = Driver::get()?;
    let devices = driver.devices()?;
    if devices.is_empty() {
        return Err(Failure::new(Code::NoDevice, "the CUDA driver finds no device"));
    }
    devices.iter().enumerate().map(|(ordinal, device)| info_of(driver, ordinal as u32, device)).collect()
}

fn info_of(driver: &Driver, ordinal: u32, device: &Device) -> Result<Info> {
    Ok(Info {
        uuid: device.uuid,
        kind: DeviceKind::Cuda,
        ordinal,
        label: format!("cuda:{ordinal}"),
        name: driver.name(device.number)?,
        total: driver.total(device.number)?,
        granularity: driver.granularity(&driver.properties(device.number))?,
    })
}

/// This process does not see the device, whoever else does.
fn hidden(uuid: &DeviceUuid) -> Failure {
    let why = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(value) => format!("CUDA_VISIBLE_DEVICES={value} may hide it"),
        Err(_) => "the driver does not list it".to_string(),
    };
    Failure::new(Code::NoDevice, format!("this process does not see the device {}: {why}", format_uuid(uuid)))
}
