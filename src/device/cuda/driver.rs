//! The CUDA driver library: loading it, calling it, and telling what it said. A missing library, a missing symbol or a
//! driver that does not start is one `NoDevice` failure and must never be a panic; an error number that we do not know
//! must never become an enum. The types are cudarc's, the functions are looked up here: all of them exist, or none is called.

use crate::failure::{Failure, Result, usual_errno};
use crate::protocol::{Code, DeviceUuid};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) type Pointer = sys::CUdeviceptr;
pub(super) type RawHandle = sys::CUmemGenericAllocationHandle;
pub(super) type RawContext = sys::CUcontext;
pub(super) type RawStream = sys::CUstream;
pub(super) type RawEvent = sys::CUevent;
pub(super) type Properties = sys::CUmemAllocationProp;
type AccessDescription = sys::CUmemAccessDesc;

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// Every function of the driver that warpfs calls, by its symbol. A result is a number: a driver may be newer
        /// than the list of errors that was compiled in.
        #[allow(non_snake_case)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            _library: libloading::Library,
        }

        impl Functions {
            fn of(library: libloading::Library) -> std::result::Result<Functions, &'static str> {
                Ok(Functions {
                    // SAFETY: the type is that of the symbol in cuda.h, whose enums are ints; the pointer stays valid
                    // because the library is kept beside it.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(|_| stringify!($name))?,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuGetErrorName(c_int, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut c_int, c_int);
    cuDeviceGetName(*mut c_char, c_int, c_int);
    cuDeviceGetPCIBusId(*mut c_char, c_int, c_int);
    cuDeviceGetUuid_v2(*mut sys::CUuuid, c_int);
    cuDeviceTotalMem_v2(*mut usize, c_int);
    cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    cuDevicePrimaryCtxRetain(*mut RawContext, c_int);
    cuDevicePrimaryCtxRelease_v2(c_int);
    cuCtxSetCurrent(RawContext);
    cuMemGetAllocationGranularity(*mut usize, *const Properties, c_int);
    cuMemCreate(*mut RawHandle, usize, *const Properties, c_ulonglong);
    cuMemRelease(RawHandle);
    cuMemExportToShareableHandle(*mut c_void, RawHandle, c_uint, c_ulonglong);
    cuMemImportFromShareableHandle(*mut RawHandle, *mut c_void, c_uint);
    cuMemAddressReserve(*mut Pointer, usize, usize, Pointer, c_ulonglong);
    cuMemAddressFree(Pointer, usize);
    cuMemMap(Pointer, usize, usize, RawHandle, c_ulonglong);
    cuMemUnmap(Pointer, usize);
    cuMemSetAccess(Pointer, usize, *const AccessDescription, usize);
    cuMemsetD8_v2(Pointer, u8, usize);
    cuMemcpyDtoH_v2(*mut c_void, Pointer, usize);
    cuMemcpyDtoD_v2(Pointer, Pointer, usize);
    cuMemcpyHtoDAsync_v2(Pointer, *const c_void, usize, RawStream);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuStreamCreate(*mut RawStream, c_uint);
    cuStreamSynchronize(RawStream);
    cuStreamDestroy_v2(RawStream);
    cuEventCreate(*mut RawEvent, c_uint);
    cuEventRecord(RawEvent, RawStream);
    cuEventSynchronize(RawEvent);
    cuEventDestroy_v2(RawEvent);
}

/// Where the driver is looked for: by name in the usual places, then where container runtimes put it.
const LIBRARIES: [&str; 3] = ["libcuda.so.1", "libcuda.so", "/usr/local/nvidia/lib64/libcuda.so.1"];

/// The driver, initialised.
pub(super) struct Driver {
    pub(super) functions: Functions,
    lost: AtomicBool,
}

/// One device as the driver counts them.
pub(super) struct Device {
    pub(super) number: c_int,
    pub(super) uuid: DeviceUuid,
}

impl Driver {
    /// The process's one driver, loaded and initialised at the first call. No context is made.
    pub(super) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Driver::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Driver> {
        // SAFETY: loading the vendor's library runs its initialisers, which is what every CUDA program does.
        let library = LIBRARIES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok());
        let library = library.ok_or_else(|| Failure::new(Code::NoDevice, "no CUDA driver (libcuda.so.1 not found)"))?;
        let functions = Functions::of(library).map_err(|symbol| {
            let message = format!("the CUDA driver is too old: libcuda.so.1 has no {symbol}; update the driver");
            Failure::new(Code::NoDevice, message)
        })?;
        let driver = Driver { functions, lost: AtomicBool::new(false) };
        // SAFETY: cuInit takes flags, which must be 0.
        let code = unsafe { (driver.functions.cuInit)(0) };
        if code != 0 {
            let message = format!("the CUDA driver does not start: {}", driver.name_of(code));
            return Err(Failure::new(Code::NoDevice, message));
        }
        Ok(driver)
    }

    /// `Ok` for 0; else a failure that says what was tried and the driver's name for what went wrong.
    pub(super) fn check(&self, code: c_int, tried: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        if STICKY.contains(&code) {
            self.lost.store(true, Ordering::Release);
        }
        let kind = match code {
            OUT_OF_MEMORY => Code::OutOfMemory,
            NO_DEVICE => Code::NoDevice,
            _ => Code::Device,
        };
        let message = format!("CUDA cannot {tried}: {}", self.name_of(code));
        Err(Failure { code: kind, errno: usual_errno(kind), message })
    }

    /// Whether an error was seen after which every call of this process fails.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    fn name_of(&self, code: c_int) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the driver takes any number here, and stores a pointer to a constant string or null.
        let known = unsafe { (self.functions.cuGetErrorName)(code, &mut name) };
        if known != 0 || name.is_null() {
            return format!("CUDA error {code}");
        }
        // SAFETY: the driver stored a pointer to a NUL-terminated constant.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Every device that this process may see.
    pub(super) fn devices(&self) -> Result<Vec<Device>> {
        let f = &self.functions;
        let mut count = 0;
        // SAFETY: the pointer names a live int.
        self.check(unsafe { (f.cuDeviceGetCount)(&mut count) }, "count the devices")?;
        let mut devices = Vec::new();
        for ordinal in 0..count {
            let mut number = 0;
            // SAFETY: the pointer names a live int.
            self.check(unsafe { (f.cuDeviceGet)(&mut number, ordinal) }, "name a device")?;
            let mut uuid = sys::CUuuid { bytes: [0; 16] };
            // SAFETY: the pointer names a live struct of 16 bytes; the device number is the driver's own.
            self.check(unsafe { (f.cuDeviceGetUuid_v2)(&mut uuid, number) }, "tell a device's UUID")?;
            devices.push(Device { number, uuid: uuid.bytes.map(|b| b as u8) });
        }
        Ok(devices)
    }

    pub(super) fn name(&self, device: c_int) -> Result<String> {
        let mut name = [0 as c_char; 128];
        // SAFETY: the pointer and the length name a live buffer, in which the driver leaves a NUL-terminated string.
        let code = unsafe { (self.functions.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int, device) };
        self.check(code, "tell a device's name")?;
        Ok(text(&name))
    }

    /// Where the device is plugged in, as `DOMAIN:BUS:DEVICE.FUNCTION` in hexadecimal digits.
    pub(super) fn bus_id(&self, device: c_int) -> Result<String> {
        let mut id = [0 as c_char; 32];
        // SAFETY: the pointer and the length name a live buffer, in which the driver leaves a NUL-terminated string.
        let code = unsafe { (self.functions.cuDeviceGetPCIBusId)(id.as_mut_ptr(), id.len() as c_int, device) };
        self.check(code, "tell where a device is plugged in")?;
        Ok(text(&id))
    }

    /// Bytes.
    pub(super) fn total(&self, device: c_int) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: the pointer names a live size.
        self.check(unsafe { (self.functions.cuDeviceTotalMem_v2)(&mut bytes, device) }, "tell a device's memory")?;
        Ok(bytes as u64)
    }

    fn has(&self, device: c_int, attribute: sys::CUdevice_attribute) -> bool {
        let mut value = 0;
        // SAFETY: the pointer names a live int. A driver that does not know the attribute answers with an error.
        let code = unsafe { (self.functions.cuDeviceGetAttribute)(&mut value, attribute as c_int, device) };
        code == 0 && value != 0
    }

    /// Whether memory of the device can be handed to another process as a descriptor.
    pub(super) fn can_share(&self, device: c_int) -> bool {
        self.has(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    }

    /// Whether other devices can reach memory that was created to be shared, which cuFile needs.
    pub(super) fn can_be_reached(&self, device: c_int) -> bool {
        self.has(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
    }

    /// The newest CUDA that the driver runs: 1000 times its major number and 10 times its minor.
    pub(super) fn version(&self) -> Result<u32> {
        let mut version = 0;
        // SAFETY: the pointer names a live int.
        self.check(unsafe { (self.functions.cuDriverGetVersion)(&mut version) }, "tell its version")?;
        Ok(version as u32)
    }

    /// What every allocation of ours on `device` is.
    pub(super) fn properties(&self, device: c_int) -> Properties {
        // cuFile can reach only memory that was created for it.
        let direct = self.can_be_reached(device);
        Properties {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType_enum(DESCRIPTOR),
            location: location(device),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(direct),
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    /// Bytes of which every allocation is a multiple.
    pub(super) fn granularity(&self, properties: &Properties) -> Result<u64> {
        const MINIMUM: c_int = 0;
        let mut bytes = 0;
        // SAFETY: both pointers name live values.
        let code = unsafe { (self.functions.cuMemGetAllocationGranularity)(&mut bytes, properties, MINIMUM) };
        self.check(code, "tell the granularity of memory")?;
        Ok(bytes as u64)
    }
}

/// The string at the beginning of a buffer.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().take_while(|b| **b != 0).map(|b| *b as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Memory that lies on `device`.
pub(super) fn location(device: c_int) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub(super) const DESCRIPTOR: c_uint = 1;
const OUT_OF_MEMORY: c_int = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int;
const NO_DEVICE: c_int = sys::CUresult::CUDA_ERROR_NO_DEVICE as c_int;

/// Errors after which a process can do nothing more with its device (cuda.h: "the process must be terminated").
const STICKY: [c_int; 14] = [
    sys::CUresult::CUDA_ERROR_DEINITIALIZED as c_int,
    sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE as c_int,
    sys::CUresult::CUDA_ERROR_ECC_UNCORRECTABLE as c_int,
    sys::CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE as c_int,
    sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as c_int,
    sys::CUresult::CUDA_ERROR_LAUNCH_TIMEOUT as c_int,
    sys::CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED as c_int,
    sys::CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR as c_int,
    sys::CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION as c_int,
    sys::CUresult::CUDA_ERROR_MISALIGNED_ADDRESS as c_int,
    sys::CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE as c_int,
    sys::CUresult::CUDA_ERROR_INVALID_PC as c_int,
    sys::CUresult::CUDA_ERROR_LAUNCH_FAILED as c_int,
    sys::CUresult::CUDA_ERROR_UNKNOWN as c_int,
];
