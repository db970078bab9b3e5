//! The host device: memory of the computer itself, as sealed memfds, so that everything but CUDA works where there is no
//! GPU. It must never hand out memory that a client could change once it was sealed. Called by the daemon (owner) and by
//! loaders and clients (importers).

use super::{Access, Allocation, Importer, Info, Lane, Mapping, Memory};
use crate::failure::{Failure, Result};
use crate::protocol::{Code, DeviceKind, HOST_UUID};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::LazyLock;

/// The owner's side.
pub struct HostMemory {
    info: Info,
}

impl HostMemory {
    /// Looks at the computer. Fails with `NoDevice` where /proc/meminfo cannot be read.
    pub fn new() -> Result<HostMemory> {
        let memory = meminfo("MemTotal:")
            .ok_or_else(|| Failure::new(Code::NoDevice, "cannot tell how much memory the host has: /proc/meminfo"))?;
        let total = cgroup_limit().map_or(memory, |limit| limit.min(memory));
        let info = Info {
            uuid: HOST_UUID,
            kind: DeviceKind::Host,
            ordinal: 0,
            label: "host".to_string(),
            name: "host memory".to_string(),
            total,
            granularity: rustix::param::page_size() as u64,
        };
        Ok(HostMemory { info })
    }
}

impl Memory for HostMemory {
    fn info(&self) -> &Info {
        &self.info
    }

    fn free(&self) -> Option<u64> {
        meminfo("MemAvailable:")
    }

    fn allocate(&self, size: u64) -> Result<Allocation> {
        let what = || format!("cannot create {size} bytes of host memory");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = rustix::fs::memfd_create("warpfs", flags).map_err(|e| match e {
            // As good as no memory: room can be made.
            rustix::io::Errno::MFILE | rustix::io::Errno::NFILE => {
                Failure { code: Code::OutOfMemory, ..Failure::system(what(), e) }
            }
            e => Failure::system(what(), e),
        })?;
        rustix::fs::ftruncate(&descriptor, size).map_err(|e| Failure::system(what(), e))?;
        Ok(Allocation::new(descriptor, size, None))
    }

    fn seal(&self, allocation: &Allocation) -> Result<()> {
        seal(allocation, SealFlags::WRITE)
    }

    fn seal_slab(&self, allocation: &Allocation) -> Result<()> {
        seal(allocation, SealFlags::FUTURE_WRITE)
    }
}

/// All at once: with the seal against writing alone the owner of a descriptor could still cut the file under a client's feet.
fn seal(allocation: &Allocation, against: SealFlags) -> Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | against | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(allocation.descriptor(), seals).map_err(|e| match e {
        rustix::io::Errno::BUSY => {
            Failure::system("cannot seal host memory, because somebody still maps it writable", e)
        }
        e => Failure::system("cannot seal host memory", e),
    })
}

/// The importer's side.
pub struct HostImporter;

impl Importer for HostImporter {
    fn map(&self, descriptor: BorrowedFd<'_>, size: u64, access: Access) -> Result<Box<dyn Mapping>> {
        let what = || format!("cannot map {size} bytes of host memory");
        let stat = rustix::fs::fstat(descriptor).map_err(|e| Failure::system(what(), e))?;
        let length = usize::try_from(size).map_err(|_| Failure::new(Code::BadRequest, what()))?;
        // A page past the memfd's end would be a SIGBUS for whoever touches it.
        if length == 0 || u64::try_from(stat.st_size).unwrap_or(0) < size {
            let message = format!("{}: the descriptor has {}", what(), stat.st_size);
            return Err(Failure::new(Code::BadRequest, message));
        }
        let protection = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
        let address =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, descriptor, 0) }
                .map_err(|e| Failure::system(what(), e))?;
        // A forked child would keep the memory of a lease that is over.
        // SAFETY: exactly the range mapped above; the advice changes what a fork copies, and nothing here.
        let _ = unsafe { rustix::mm::madvise(address, length, rustix::mm::Advice::LinuxDontFork) };
        Ok(Box::new(HostMapping { address, length, access }))
    }

    fn read(&self, mapping: &dyn Mapping, offset: u64, out: &mut [u8]) -> Result<()> {
        let start = checked(mapping, offset, out.len() as u64)?;
        // SAFETY: `checked` saw that the range lies in the mapping, which lives as long as the borrow of it; `out` is
        // this process's own memory and cannot overlap a mapping that nobody else in it can name.
        unsafe { std::ptr::copy_nonoverlapping(start as *const u8, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn zero(&self, mapping: &dyn Mapping, offset: u64, length: u64) -> Result<()> {
        let start = checked(mapping, offset, length)?;
        if mapping.host().is_none() {
            return Err(Failure::new(Code::BadRequest, "cannot zero host memory that is mapped read-only"));
        }
        // SAFETY: `checked` saw that the range lies in the mapping, and a mapping with a host address is writable.
        unsafe { std::ptr::write_bytes(start as *mut u8, 0, length as usize) };
        Ok(())
    }

    /// It is: the system gives out no other memory. Writing zeros would only make it take room.
    fn clear(&self, _mapping: &dyn Mapping) -> Result<()> {
        Ok(())
    }

    fn lane(&self, _slots: usize, _slot_size: usize) -> Result<Option<Box<dyn Lane>>> {
        Ok(None)
    }
}

/// The address of `offset` in `mapping`, if `length` bytes from there lie in it.
fn checked(mapping: &dyn Mapping, offset: u64, length: u64) -> Result<u64> {
    super::check_range(mapping, offset, length)?;
    Ok(mapping.address() + offset)
}

/// A memfd in this process's address space.
struct HostMapping {
    address: *mut c_void,
    length: usize,
    access: Access,
}

// SAFETY: the mapping is plain shared memory and belongs to this value alone; no thread is special to it.
unsafe impl Send for HostMapping {}
// SAFETY: as above; what is stored through its address is ordered by whoever stores.
unsafe impl Sync for HostMapping {}

// SAFETY: exactly the range that was mapped, until it is dropped.
unsafe impl Mapping for HostMapping {
    fn address(&self) -> u64 {
        self.address as u64
    }

    fn size(&self) -> u64 {
        self.length as u64
    }

    fn host(&self) -> Option<*mut u8> {
        (self.access == Access::ReadWrite).then_some(self.address.cast())
    }

    /// Has the system make all the pages at once, which costs less than a fault for each: on two cores 2.5 GB/s instead of
    /// 2.2. Many threads that do so hinder each other: twelve had 4.4 GB/s instead of 5.
    fn about_to_fill(&self, offset: u64, length: u64) {
        static FEW_CORES: LazyLock<bool> =
            LazyLock::new(|| std::thread::available_parallelism().is_ok_and(|cores| cores.get() <= 4));
        if !*FEW_CORES || super::check_range(self, offset, length).is_err() {
            return;
        }
        let begin = offset - offset % rustix::param::page_size() as u64;
        // SAFETY: the range lies in the mapping. Where the system does not know the advice, or has no memory left, pages come,
        // or do not, when they are stored to.
        let _ = unsafe {
            let first = self.address.cast::<u8>().add(begin as usize).cast();
            rustix::mm::madvise(first, (offset + length - begin) as usize, rustix::mm::Advice::LinuxPopulateWrite)
        };
    }
}

impl Drop for HostMapping {
    fn drop(&mut self) {
        // SAFETY: this is exactly the mapping made in `map`, and nobody borrows it any more.
        // It can fail only for arguments that `map` would not have accepted.
        let _ = unsafe { rustix::mm::munmap(self.address, self.length) };
    }
}

/// A line of /proc/meminfo, in bytes.
fn meminfo(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// The smallest memory limit of this process's control groups, in bytes.
fn cgroup_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut limits = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            c if c.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        // A limit holds for everything below it; `max` and files that a container does not show do not parse.
        let group = Path::new(root).join(path);
        let own = group.ancestors().take_while(|p| p.starts_with(root));
        limits.extend(own.filter_map(|p| std::fs::read_to_string(p.join(file)).ok()?.trim().parse::<u64>().ok()));
    }
    limits.into_iter().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writable(allocation: &Allocation) -> Box<dyn Mapping> {
        HostImporter.map(allocation.descriptor(), allocation.size(), Access::ReadWrite).expect("maps")
    }

    #[test]
    fn what_is_written_is_read_and_zeroed() {
        let memory = HostMemory::new().expect("a host");
        let allocation = memory.allocate(memory.info().rounded(1)).expect("a page");
        let mapping = writable(&allocation);
        let start = mapping.host().expect("writable");
        // SAFETY: the mapping is one page long and this test's own.
        unsafe { std::ptr::write_bytes(start, 7, allocation.size() as usize) };
        HostImporter.zero(&*mapping, 1, 2).expect("in range");
        let mut seen = [9; 4];
        HostImporter.read(&*mapping, 0, &mut seen).expect("in range");
        assert_eq!(seen, [7, 0, 0, 7]);
        let beyond = HostImporter.read(&*mapping, allocation.size() - 3, &mut seen).expect_err("past the end");
        assert_eq!(beyond.code, Code::BadRequest);
        HostImporter.zero(&*mapping, u64::MAX, 2).expect_err("overflows");
    }

    #[test]
    fn sealed_memory_is_readable_and_nothing_else() {
        let memory = HostMemory::new().expect("a host");
        let allocation = memory.allocate(memory.info().granularity).expect("a page");
        let mapping = writable(&allocation);
        let busy = memory.seal(&allocation).expect_err("mapped writable");
        assert_eq!(busy.errno, libc::EBUSY);
        assert!(busy.message.contains("still maps it writable"), "{busy}");
        drop(mapping);
        memory.seal(&allocation).expect("nobody maps it");
        HostImporter.map(allocation.descriptor(), allocation.size(), Access::ReadWrite).err().expect("sealed");
        let client = HostImporter.map(allocation.descriptor(), allocation.size(), Access::ReadOnly).expect("readable");
        assert!(client.host().is_none(), "nothing may store into it");
        rustix::fs::ftruncate(allocation.descriptor(), 0).expect_err("sealed against shrinking");
    }

    #[test]
    fn a_descriptor_that_is_too_short_is_refused() {
        let memory = HostMemory::new().expect("a host");
        let allocation = memory.allocate(4096).expect("a page");
        let failure = HostImporter.map(allocation.descriptor(), 8192, Access::ReadOnly).err().expect("too short");
        assert_eq!(failure.code, Code::BadRequest);
    }

    #[test]
    fn the_host_has_memory() {
        let memory = HostMemory::new().expect("a host");
        assert!(memory.free().expect("MemAvailable") > 0);
        assert!(memory.info().total >= memory.info().granularity);
        assert_eq!(memory.info().label, "host");
    }
}
