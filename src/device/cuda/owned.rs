//! What the CUDA driver gives out, each as a value that gives it back when dropped: memory handles, the context, address
//! ranges, pinned memory, streams and events. Nothing above this file calls the driver unsafely, and no value here must
//! outlive the context under which it was made, which each of them therefore holds.

use super::driver::{DESCRIPTOR, Driver, Pointer, Properties, RawContext, RawEvent, RawHandle, RawStream, location};
use crate::device::Access;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use cudarc::driver::sys;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// A piece of device memory, mapped or not. Needs no context.
pub(super) struct Handle {
    driver: &'static Driver,
    raw: RawHandle,
}

impl Handle {
    /// Fails with `OutOfMemory` where the device has no room.
    pub(super) fn create(driver: &'static Driver, size: usize, properties: &Properties) -> Result<Handle> {
        let mut raw = 0;
        // SAFETY: both pointers name live values; the flags must be 0.
        let code = unsafe { (driver.functions.cuMemCreate)(&mut raw, size, properties, 0) };
        driver.check(code, &format!("create {size} bytes of device memory"))?;
        Ok(Handle { driver, raw })
    }

    /// A descriptor of the memory for other processes.
    pub(super) fn export(&self) -> Result<OwnedFd> {
        let mut descriptor: c_int = -1;
        let place = (&raw mut descriptor).cast::<c_void>();
        // SAFETY: for this handle type the driver stores an int; the handle is live.
        let code = unsafe { (self.driver.functions.cuMemExportToShareableHandle)(place, self.raw, DESCRIPTOR, 0) };
        self.driver.check(code, "export device memory")?;
        // SAFETY: the driver made this descriptor for us, and nobody else closes it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)
            .map_err(|e| Failure::system("cannot mark a device descriptor close-on-exec", e))?;
        Ok(descriptor)
    }

    /// The memory behind a descriptor that another process exported.
    pub(super) fn import(driver: &'static Driver, descriptor: BorrowedFd<'_>) -> Result<Handle> {
        let mut raw = 0;
        let value = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: for this handle type the driver takes the descriptor itself in place of a pointer, and does not keep it.
        let code = unsafe { (driver.functions.cuMemImportFromShareableHandle)(&mut raw, value, DESCRIPTOR) };
        driver.check(code, "import device memory")?;
        Ok(Handle { driver, raw })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is live and released once; mappings keep their memory.
        let _ = unsafe { (self.driver.functions.cuMemRelease)(self.raw) };
    }
}

/// The device's primary context, held.
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    device: c_int,
    raw: RawContext,
}

// SAFETY: a context may be made current on any thread, on several at a time; the driver does its own locking.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn retain(driver: &'static Driver, device: c_int) -> Result<Arc<Context>> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer names a live value; the device number is the driver's own.
        let code = unsafe { (driver.functions.cuDevicePrimaryCtxRetain)(&mut raw, device) };
        driver.check(code, "take a context on the device")?;
        Ok(Arc::new(Context { driver, device, raw }))
    }

    /// Makes it the calling thread's context: every other call here needs that first.
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained as long as this value lives.
        self.driver.check(unsafe { (self.driver.functions.cuCtxSetCurrent)(self.raw) }, "make the context current")
    }

    /// Copies device memory to `out` and returns when it is there.
    pub(super) fn read(&self, from: Pointer, out: &mut [u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: `out` is live and as long as it says; a device address that is not mapped is the driver's error.
        let code = unsafe { (self.driver.functions.cuMemcpyDtoH_v2)(out.as_mut_ptr().cast(), from, out.len()) };
        self.driver.check(code, &format!("read {} bytes of device memory", out.len()))
    }

    /// Copies device memory to device memory and returns when it is there.
    pub(super) fn shift(&self, from: Pointer, to: Pointer, length: usize) -> Result<()> {
        self.enter()?;
        let tried = format!("move {length} bytes of device memory");
        // SAFETY: plain numbers; a device address that is not mapped is the driver's error.
        self.driver.check(unsafe { (self.driver.functions.cuMemcpyDtoD_v2)(to, from, length) }, &tried)?;
        // SAFETY: null names the default stream, in which the copy runs on after the call.
        self.driver.check(unsafe { (self.driver.functions.cuStreamSynchronize)(std::ptr::null_mut()) }, &tried)
    }

    /// Memory of the device, of the kind that copies have.
    pub(super) fn allocate(self: &Arc<Context>, size: u64) -> Result<Mapped> {
        let properties = self.driver.properties(self.device);
        let whole = length(size)?.next_multiple_of(length(self.driver.granularity(&properties)?)?);
        let handle = Handle::create(self.driver, whole, &properties)?;
        // The mapping keeps the memory: the handle may go.
        Mapped::new(self, &handle, whole, Access::ReadWrite)
    }

    /// Writes zeros to device memory and returns when they are there.
    pub(super) fn zero(&self, at: Pointer, length: usize) -> Result<()> {
        self.enter()?;
        let tried = format!("zero {length} bytes of device memory");
        // SAFETY: plain numbers; a device address that is not mapped writable is the driver's error.
        self.driver.check(unsafe { (self.driver.functions.cuMemsetD8_v2)(at, 0, length) }, &tried)?;
        // SAFETY: null names the default stream, in which the memset ran; lanes' streams are not waited for.
        self.driver.check(unsafe { (self.driver.functions.cuStreamSynchronize)(std::ptr::null_mut()) }, &tried)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, released once.
        let _ = unsafe { (self.driver.functions.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// Device memory in the context's address space. Undoes on drop what was done, however far that came.
pub(super) struct Mapped {
    context: Arc<Context>,
    pub(super) address: Pointer,
    pub(super) size: usize,
    mapped: bool,
}

impl Mapped {
    pub(super) fn new(context: &Arc<Context>, handle: &Handle, size: usize, access: Access) -> Result<Mapped> {
        context.enter()?;
        let driver = context.driver;
        let mut address = 0;
        // SAFETY: the pointer names a live value; no wish for alignment or address.
        let code = unsafe { (driver.functions.cuMemAddressReserve)(&mut address, size, 0, 0, 0) };
        driver.check(code, &format!("reserve {size} bytes of device address space"))?;
        let mut range = Mapped { context: Arc::clone(context), address, size, mapped: false };
        // SAFETY: the range was just reserved with this size; the handle is live; an offset is not supported.
        let code = unsafe { (driver.functions.cuMemMap)(address, size, 0, handle.raw, 0) };
        driver.check(code, &format!("map {size} bytes of device memory"))?;
        range.mapped = true;
        let description = sys::CUmemAccessDesc {
            location: location(context.device),
            flags: match access {
                Access::ReadOnly => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
                Access::ReadWrite => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            },
        };
        // SAFETY: the range is mapped; the pointer names one live description.
        let code = unsafe { (driver.functions.cuMemSetAccess)(address, size, &description, 1) };
        driver.check(code, "set the access to device memory")?;
        Ok(range)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let functions = &self.context.driver.functions;
        // An error leaves nothing to do: the context is lost, and the process will end.
        let _ = self.context.enter();
        if self.mapped {
            // SAFETY: exactly the range that was mapped; whoever copies to it borrows this value's owner until it is done.
            let _ = unsafe { (functions.cuMemUnmap)(self.address, self.size) };
        }
        // SAFETY: exactly the range that was reserved, no longer mapped.
        let _ = unsafe { (functions.cuMemAddressFree)(self.address, self.size) };
    }
}

/// A mapping of this process's, that the device can read by itself while this lives.
struct Registered {
    context: Arc<Context>,
    address: *mut c_void,
    size: usize,
    registered: bool,
}

// SAFETY: a mapping of this value's own, that no thread is special to.
unsafe impl Send for Registered {}

impl Registered {
    /// Registers `size` bytes mapped at `address`, whole pages, which are unmapped in the end whatever comes of it.
    ///
    /// # Safety
    /// Exactly one mapping, and nobody else unmaps it.
    unsafe fn new(context: &Arc<Context>, address: *mut c_void, size: usize, flags: c_uint) -> Result<Registered> {
        let mut mapping = Registered { context: Arc::clone(context), address, size, registered: false };
        context.enter()?;
        // SAFETY: the range is mapped, ours, and stays until it was unregistered.
        let code = unsafe { (context.driver.functions.cuMemHostRegister_v2)(address, size, flags) };
        context.driver.check(code, &format!("pin {size} bytes of memory"))?;
        mapping.registered = true;
        Ok(mapping)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.registered {
            let _ = self.context.enter();
            // SAFETY: registered at exactly this address. The lane has waited for the copies out of it.
            let _ = unsafe { (self.context.driver.functions.cuMemHostUnregister)(self.address) };
        }
        // SAFETY: exactly the mapping that `new` was given, and no slice of it is borrowed.
        let _ = unsafe { rustix::mm::munmap(self.address, self.size) };
    }
}

/// Host memory that the device can read by itself.
pub(super) struct Pinned(Registered);

impl Pinned {
    /// One anonymous mapping, registered: ten times quicker than memory that the driver allocates (0.05 s/GiB, not 0.55).
    pub(super) fn new(context: &Arc<Context>, size: usize) -> Result<Pinned> {
        let what = || format!("cannot take {size} bytes of memory for the ring");
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
        let address = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), size, protection, MapFlags::PRIVATE) }
            .map_err(|e| Failure::system(what(), e))?;
        // Large pages where the system has them: it is written to and read from at the speed of the bus.
        for advice in [Advice::LinuxHugepage, Advice::LinuxPopulateWrite] {
            // SAFETY: exactly the mapping made above. Where the advice is not known, pages come when they are touched.
            let _ = unsafe { rustix::mm::madvise(address, size, advice) };
        }
        // SAFETY: exactly the mapping made above, which is given away here.
        Ok(Pinned(unsafe { Registered::new(context, address, size, 0) }?))
    }

    /// Where the `length` bytes from `offset` begin.
    pub(super) fn at(&self, offset: usize, length: usize) -> *mut c_void {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.0.size), "a slot lies in the ring");
        // SAFETY: the offset lies in the mapping.
        unsafe { self.0.address.cast::<u8>().add(offset).cast() }
    }

    /// `length` bytes from `offset`.
    pub(super) fn bytes(&mut self, offset: usize, length: usize) -> &mut [u8] {
        // SAFETY: the range lies in the mapping, which is initialised (zeros at first) and borrowed through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.at(offset, length).cast(), length) }
    }
}

/// Pages of a file in the page cache, registered so that the device can read them. The processor never does: a file that was
/// cut meanwhile would be a SIGBUS for it, while the pages themselves stay as long as they are registered.
pub(super) struct Lent(Registered);

impl Lent {
    /// `size` bytes from `offset`, a multiple of the page size. `None` where the system or the driver refuses; an error where
    /// the device is lost.
    pub(super) fn new(context: &Arc<Context>, file: BorrowedFd<'_>, offset: u64, size: usize) -> Result<Option<Lent>> {
        const READ_ONLY: c_uint = 8;
        // To the end of its last page, which is zeros.
        let size = size.next_multiple_of(rustix::param::page_size());
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
        let mapped = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, ProtFlags::READ, flags, file, offset) };
        let Ok(address) = mapped else { return Ok(None) };
        // SAFETY: exactly the mapping made above, which is given away here.
        match unsafe { Registered::new(context, address, size, READ_ONLY) } {
            Err(failure) if context.driver.is_lost() => Err(failure),
            registered => Ok(registered.ok().map(Lent)),
        }
    }

    pub(super) fn address(&self) -> *mut c_void {
        self.0.address
    }
}

/// A queue of copies that waits for no other.
pub(super) struct Stream {
    context: Arc<Context>,
    raw: RawStream,
}

// SAFETY: the driver takes a stream from any thread whose context is current.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Stream> {
        const NON_BLOCKING: c_uint = 1;
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer names a live value.
        let code = unsafe { (context.driver.functions.cuStreamCreate)(&mut raw, NON_BLOCKING) };
        context.driver.check(code, "create a stream")?;
        Ok(Stream { context: Arc::clone(context), raw })
    }

    /// Starts copying `length` bytes at `from`, and records `event` behind the copy.
    ///
    /// # Safety
    /// The bytes lie in registered memory, and nobody touches or takes it until the event has come.
    pub(super) unsafe fn copy(&self, from: *mut c_void, length: usize, to: Pointer, event: &Event) -> Result<()> {
        self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the source is the caller's promise; the mapping outlives the copy (contract of Lane::copy).
        let code = unsafe { (driver.functions.cuMemcpyHtoDAsync_v2)(to, from, length, self.raw) };
        driver.check(code, &format!("copy {length} bytes to the device"))?;
        // SAFETY: both are live and of this context.
        let code = unsafe { (driver.functions.cuEventRecord)(event.raw, self.raw) };
        driver.check(code, "record an event")
    }

    /// Returns when everything in the stream is over.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the stream is live.
        driver.check(unsafe { (driver.functions.cuStreamSynchronize)(self.raw) }, "finish its copies to the device")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: created once, destroyed once.
        let _ = unsafe { (self.context.driver.functions.cuStreamDestroy_v2)(self.raw) };
    }
}

/// A mark in a stream.
pub(super) struct Event {
    context: Arc<Context>,
    raw: RawEvent,
}

// SAFETY: the driver takes an event from any thread whose context is current.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn new(context: &Arc<Context>) -> Result<Event> {
        const DISABLE_TIMING: c_uint = 2;
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer names a live value.
        let code = unsafe { (context.driver.functions.cuEventCreate)(&mut raw, DISABLE_TIMING) };
        context.driver.check(code, "create an event")?;
        Ok(Event { context: Arc::clone(context), raw })
    }

    /// Returns when the stream has passed the mark.
    pub(super) fn wait(&self) -> Result<()> {
        self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the event is live.
        driver.check(unsafe { (driver.functions.cuEventSynchronize)(self.raw) }, "finish a copy to the device")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: created once, destroyed once.
        let _ = unsafe { (self.context.driver.functions.cuEventDestroy_v2)(self.raw) };
    }
}

/// `size` as the driver counts it.
pub(super) fn length(size: u64) -> Result<usize> {
    usize::try_from(size).map_err(|_| Failure::new(Code::BadRequest, format!("{size} bytes cannot be addressed here")))
}
