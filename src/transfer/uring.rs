//! Reads that are under way while their thread does something else, by io_uring. Many systems refuse it (containers, by
//! seccomp; a sysctl): then there is none, and readers wait for their reads. It must never be dropped, nor the memory
//! under a read, before that read has come back. Called by `ring`.

use super::buffered::Target;
use io_uring::{IoUring, opcode, types};
use std::os::fd::{AsRawFd, BorrowedFd};

/// One thread's reads.
pub struct Uring {
    ring: IoUring,
    /// Memory that the kernel has pinned once, by the number of the slot.
    registered: Vec<Target>,
    under_way: usize,
}

/// A read that came back.
pub struct Completed {
    /// What it was begun with.
    pub token: usize,
    /// Bytes.
    pub result: Result<usize, rustix::io::Errno>,
}

// SAFETY: the targets are addresses that only the kernel uses; the ring belongs to whoever has the value.
unsafe impl Send for Uring {}

impl Uring {
    /// Room for `depth` reads at a time. `None` where the system has no io_uring for this process.
    pub fn new(depth: usize) -> Option<Uring> {
        let ring = IoUring::new(u32::try_from(depth.next_power_of_two()).ok()?).ok()?;
        Some(Uring { ring, registered: Vec::new(), under_way: 0 })
    }

    /// Has the kernel pin `slots`, so that it need not for each read. Where it may not (RLIMIT_MEMLOCK of a user, before
    /// Linux 5.12 also of root), reads go on without.
    ///
    /// # Safety
    /// The slots stay mapped as long as this value lives.
    pub unsafe fn register(&mut self, slots: Vec<Target>) {
        let vectors: Vec<libc::iovec> =
            slots.iter().map(|s| libc::iovec { iov_base: s.address().cast(), iov_len: s.room() }).collect();
        // SAFETY: the memory stays mapped (contract of this function).
        if unsafe { self.ring.submitter().register_buffers(&vectors) }.is_ok() {
            self.registered = slots;
        }
    }

    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Begins to fill `target` from `offset` of `file`. `slot`: the number of the registered memory that it lies in, if any.
    ///
    /// # Safety
    /// Until the read with this token has come back, the file stays open, and nobody else touches the target's memory,
    /// which stays mapped.
    pub unsafe fn begin(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        target: Target,
        slot: Option<usize>,
        token: usize,
    ) -> std::io::Result<()> {
        let descriptor = types::Fd(file.as_raw_fd());
        let length = u32::try_from(target.room()).map_err(std::io::Error::other)?;
        let read = match slot.filter(|slot| *slot < self.registered.len()) {
            Some(slot) => {
                let slot = u16::try_from(slot).map_err(std::io::Error::other)?;
                opcode::ReadFixed::new(descriptor, target.address(), length, slot).offset(offset).build()
            }
            None => opcode::Read::new(descriptor, target.address(), length).offset(offset).build(),
        };
        // SAFETY: file and memory stay as they are until the read is over (contract of this function).
        unsafe { self.ring.submission().push(&read.user_data(token as u64)) }.map_err(std::io::Error::other)?;
        self.under_way += 1;
        // Whatever the kernel says (interrupted, no memory now): the read is in the queue, cannot be taken back, and goes with
        // the next call; where that fails too, `next` says so.
        let _ = self.ring.submit();
        Ok(())
    }

    /// The next read that came back. `None`: none is under way, or, unless it shall wait, none has come yet.
    pub fn next(&mut self, wait: bool) -> Option<Completed> {
        if self.under_way == 0 {
            return None;
        }
        loop {
            if let Some(entry) = self.ring.completion().next() {
                self.under_way -= 1;
                let result = match entry.result() {
                    count @ 0.. => Ok(count as usize),
                    errno => Err(rustix::io::Errno::from_raw_os_error(-errno)),
                };
                return Some(Completed { token: entry.user_data() as usize, result });
            }
            if !wait {
                return None;
            }
            if let Err(e) = self.ring.submit_and_wait(1)
                && !matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
            {
                // The kernel may still write into the slots, and nobody can say when it has done so.
                panic!("io_uring does not give reads back: {e}");
            }
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        while self.next(true).is_some() {}
    }
}
