//! libcufile as functions: found at run time, because most machines have none, and by the name under which it is installed.
//! The types are our own and few: an error code that this version does not know must stay a number, and the statistics have
//! grown from version to version (cufile.h 1.15 to 1.20). Called by `gds`; nothing else calls cuFile.

use crate::device::Mapping;
use crate::failure::{Failure, Result, describe, usual_errno};
use crate::protocol::{Code, DeviceUuid};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Where it is looked for.
const LIBRARIES: [&str; 3] = ["libcufile.so.0", "libcufile.so", "/usr/local/cuda/lib64/libcufile.so.0"];

/// `CUfileError_t`
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    err: c_int,
    cu_err: c_int,
}

/// `CUfileDescr_t` of a file descriptor.
#[repr(C)]
struct Descriptor {
    kind: c_int,
    handle: Handle,
    operations: *const c_void,
}

/// Its union.
#[repr(C)]
union Handle {
    descriptor: c_int,
    _pointer: *mut c_void,
}

const _: () = assert!(size_of::<Status>() == 8 && size_of::<Descriptor>() == 24);
const _: () = assert!(std::mem::offset_of!(Descriptor, handle) == 8);

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`
const OPAQUE_FD: c_int = 1;
/// `CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE`
const ALLOW_COMPAT_MODE: c_int = 1;
/// `CUFILE_PARAM_FORCE_COMPAT_MODE`
const FORCE_COMPAT_MODE: c_int = 2;
/// Of `CUfileOpError`, where the driver's own code tells more.
const CUDA_DRIVER_ERROR: c_int = 5011;

/// A file that cuFile knows.
#[derive(Clone, Copy)]
pub(super) struct RawFile(*mut c_void);

// SAFETY: cuFile takes a handle from any thread, from several at a time.
unsafe impl Send for RawFile {}
// SAFETY: as above.
unsafe impl Sync for RawFile {}

/// What cuFile can do here. The library itself is never unloaded: it has threads of its own.
pub(super) struct Library {
    driver_open: unsafe extern "C" fn() -> Status,
    register: unsafe extern "C" fn(*mut *mut c_void, *mut Descriptor) -> Status,
    deregister: unsafe extern "C" fn(*mut c_void),
    read: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, libc::off_t, libc::off_t) -> isize,
    /// From 1.7.
    version: Option<unsafe extern "C" fn(*mut c_int) -> Status>,
    /// From 1.14.
    set_bool: Option<unsafe extern "C" fn(c_int, bool) -> Status>,
    /// From 1.15, all three.
    statistics: Option<Statistics>,
}

struct Statistics {
    level: unsafe extern "C" fn(c_int) -> Status,
    start: unsafe extern "C" fn() -> Status,
    /// Fills a `CUfileStatsLevel3_t`.
    third: unsafe extern "C" fn(*mut c_void) -> Status,
}

/// Reads of one device so far, by the way that cuFile took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub nvfs: u64,
    pub p2p: u64,
    pub posix: u64,
}

impl Library {
    /// Fails where there is none, or one that lacks what every version has.
    pub(super) fn load() -> Result<Library> {
        // SAFETY: loading the vendor's library runs its initialisers, which is what every program with cuFile does.
        let library = LIBRARIES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok());
        let library = library.ok_or_else(|| {
            let message = "there is no cuFile (libcufile.so.0 not found); install libcufile of the CUDA toolkit";
            Failure::new(Code::Unsupported, message)
        })?;
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let missing = |symbol: &str| {
            let message = format!("libcufile.so.0 has no {symbol}, and so is no cuFile; install another");
            Failure::new(Code::Unsupported, message)
        };
        macro_rules! find {
            ($name:literal) => {
                // SAFETY: the type is that of the function of this name in cufile.h.
                unsafe { library.get($name) }.map(|symbol| *symbol).ok()
            };
            (must $name:literal) => {
                find!($name).ok_or_else(|| missing(&String::from_utf8_lossy($name)))?
            };
        }
        let statistics = match (find!(b"cuFileSetStatsLevel"), find!(b"cuFileStatsStart"), find!(b"cuFileGetStatsL3")) {
            (Some(level), Some(start), Some(third)) => Some(Statistics { level, start, third }),
            _ => None,
        };
        Ok(Library {
            driver_open: find!(must b"cuFileDriverOpen"),
            register: find!(must b"cuFileHandleRegister"),
            deregister: find!(must b"cuFileHandleDeregister"),
            read: find!(must b"cuFileRead"),
            version: find!(b"cuFileGetVersion"),
            set_bool: find!(b"cuFileSetParameterBool"),
            statistics,
        })
    }

    /// As `1.15`; nothing where it does not tell.
    pub(super) fn version(&self) -> Option<String> {
        let mut version = 0;
        // SAFETY: the pointer names a live int.
        let status = unsafe { self.version?(&mut version) };
        (status.err == 0).then(|| format!("{}.{}", version / 1000, version % 1000 / 10))
    }

    /// Before the driver opens. Nothing: this version cannot be told.
    pub(super) fn allow_compatibility(&self, allow: bool) -> Option<Result<()>> {
        let set = self.set_bool?;
        // Forced: allowed alone, it still asks of the disk what not every machine tells.
        // SAFETY: plain numbers.
        let statuses = unsafe { [set(ALLOW_COMPAT_MODE, allow), set(FORCE_COMPAT_MODE, allow)] };
        Some(statuses.into_iter().try_for_each(|status| check(status, "set its compatibility mode")))
    }

    /// Needs a current context.
    pub(super) fn open_driver(&self) -> Result<()> {
        // SAFETY: takes nothing.
        check(unsafe { (self.driver_open)() }, "open its driver")
    }

    /// Begins to count. False: this version cannot.
    pub(super) fn start_statistics(&self) -> bool {
        let Some(statistics) = &self.statistics else { return false };
        // SAFETY: plain numbers.
        unsafe { (statistics.level)(3).err == 0 && (statistics.start)().err == 0 }
    }

    /// Reads so far from the device; nothing where it is not counted.
    pub(super) fn counts(&self, device: &DeviceUuid) -> Option<Counts> {
        // The struct is 5 KiB in 1.15 and has grown since; what is counted for each device has not. So it is looked for.
        let mut stats = vec![0_u64; 8192];
        // SAFETY: the buffer is several times as long as any version's struct, and aligned as it is.
        let status = unsafe { (self.statistics.as_ref()?.third)(stats.as_mut_ptr().cast()) };
        if status.err != 0 {
            return None;
        }
        let [first, second] = [0, 8].map(|at| u64::from_ne_bytes(std::array::from_fn(|i| device[at + i])));
        let place = stats.windows(2).position(|words| words == [first, second])?;
        // After the UUID: bytes, rate, utilization, duration, reads in all, by PCI peer-to-peer, by nvidia-fs, by POSIX.
        let word = |number: usize| stats.get(place + 2 + number).copied();
        Some(Counts { p2p: word(5)?, nvfs: word(6)?, posix: word(7)? })
    }

    /// The file must stay open until it is deregistered.
    pub(super) fn register(&self, file: BorrowedFd<'_>) -> Result<RawFile> {
        let handle = Handle { descriptor: file.as_raw_fd() };
        let mut descriptor = Descriptor { kind: OPAQUE_FD, handle, operations: std::ptr::null() };
        let mut raw = std::ptr::null_mut();
        // SAFETY: both pointers name live values.
        check(unsafe { (self.register)(&mut raw, &mut descriptor) }, "take the file").map(|()| RawFile(raw))
    }

    /// # Safety
    /// The handle is not used after, nor twice.
    pub(super) unsafe fn deregister(&self, file: RawFile) {
        // SAFETY: registered once, deregistered once.
        unsafe { (self.deregister)(file.0) };
    }

    /// Reads once, `length` bytes from `offset` of the file to `at` in the mapping; says how many bytes came.
    pub(super) fn read(
        &self,
        file: RawFile,
        mapping: &dyn Mapping,
        at: u64,
        offset: u64,
        length: usize,
    ) -> Result<usize> {
        let lies = at.checked_add(length as u64).is_some_and(|end| end <= mapping.size());
        let number = |value: u64| libc::off_t::try_from(value).ok();
        let (true, Some(at), Some(offset)) = (lies, number(at), number(offset)) else {
            return Err(Failure::new(Code::BadRequest, "the bytes do not lie in the allocation"));
        };
        let base = mapping.address() as usize as *mut c_void;
        // SAFETY: the mapping is device memory, writable, and borrowed until the call has returned; the range lies in it.
        let count = unsafe { (self.read)(file.0, base, length, offset, at) };
        match count {
            // The errno is the thread's, and still there.
            -1 => Err(Failure::system("cuFile cannot read", std::io::Error::last_os_error())),
            negative if negative < 0 => {
                let err = c_int::try_from(negative.unsigned_abs()).unwrap_or(0);
                Err(check(Status { err, cu_err: 0 }, "read").expect_err("an error"))
            }
            count => Ok(count.unsigned_abs()),
        }
    }
}

/// What cuFile says went wrong, in its three shapes: its own code, the CUDA driver's beside it, and an errno below its
/// first code.
fn check(status: Status, tried: &str) -> Result<()> {
    let Status { err, cu_err } = status;
    let why = match err.abs() {
        0 => return Ok(()),
        CUDA_DRIVER_ERROR => format!("CUDA driver error {cu_err}"),
        errno @ 1..5000 => describe(errno),
        code => match WORDS.iter().find(|(number, _)| *number == code) {
            Some((_, word)) => format!("{word} ({code})"),
            None => format!("error {code}"),
        },
    };
    let message = format!("cuFile cannot {tried}: {why}; `warpfs doctor` says what GPUDirect Storage lacks here");
    Err(Failure { code: Code::Device, errno: usual_errno(Code::Device), message })
}

/// `CUfileOpError` in words.
const WORDS: [(c_int, &str); 30] = [
    (5001, "its driver is not initialized: nvidia-fs is not loaded, or not for this process"),
    (5002, "invalid properties in its configuration"),
    (5003, "a limit in its configuration is not supported"),
    (5004, "the versions of nvidia-fs and libcufile do not fit"),
    (5005, "the version of nvidia-fs cannot be read"),
    (5006, "its driver is closing"),
    (5007, "the platform is not supported"),
    (5008, "the file system is not supported"),
    (5009, "the GPU is not supported"),
    (5010, "an error of nvidia-fs"),
    (5012, "no pointer to device memory"),
    (5013, "the wrong type of memory"),
    (5014, "a pointer beyond the device memory"),
    (5015, "another context"),
    (5016, "invalid size of a mapping"),
    (5017, "invalid range of a mapping"),
    (5018, "the wrong type of file"),
    (5019, "flags with which a file must not be open"),
    (5020, "the file is not open for direct reads"),
    (5022, "invalid value"),
    (5023, "memory that is registered already"),
    (5024, "memory that is not registered"),
    (5025, "permission denied"),
    (5026, "its driver is open already"),
    (5027, "the file is not registered"),
    (5028, "the file is registered already"),
    (5029, "no such device"),
    (5030, "an internal error"),
    (5033, "nvidia-fs could not be set up"),
    (5036, "GPU memory cannot be pinned"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shape_of_error_has_words() {
        let said = |err, cu_err| check(Status { err, cu_err }, "read").expect_err("an error").message;
        assert!(check(Status { err: 0, cu_err: 0 }, "read").is_ok());
        assert!(said(5030, 0).contains("an internal error (5030)"));
        assert!(said(-5008, 0).contains("the file system is not supported"));
        assert!(said(CUDA_DRIVER_ERROR, 700).contains("CUDA driver error 700"));
        assert!(said(libc::ENODEV, 0).contains("No such device"));
        assert!(said(5999, 0).contains("error 5999"), "what nobody knows stays a number");
    }
}
