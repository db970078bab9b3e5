//! Memory at a page's beginning, for direct reads whose place does not lie right: a file with a lead, or a small one in a slab.
//! Never pinned, and never larger than a slot. Called by `ring`.

use super::buffered::Target;
use crate::failure::{Failure, Result};
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;

pub struct Bounce {
    address: *mut c_void,
    size: usize,
}

// SAFETY: plain memory of this value's own.
unsafe impl Send for Bounce {}

impl Bounce {
    pub fn new(size: usize) -> Result<Bounce> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
        let address = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), size, protection, MapFlags::PRIVATE) }
            .map_err(|e| Failure::system(format!("cannot take {size} bytes of memory to read into"), e))?;
        Ok(Bounce { address, size })
    }

    /// All of it. Whoever has the target has the value too, and uses it for one read at a time.
    pub fn target(&self) -> Target {
        // SAFETY: the mapping lives as long as this value.
        unsafe { Target::new(self.address.cast(), self.size) }
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; nothing reads into it any more (contract of `target`).
        let _ = unsafe { rustix::mm::munmap(self.address, self.size) };
    }
}
