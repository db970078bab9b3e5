//! Small files share an allocation: a slab, of one domain, to which files are added one behind the other and from which none
//! is taken back; it goes when all of them have. It must never hand out the same bytes twice, nor memory that the loader
//! does not have mapped any more. Called by the thread that begins loads.

use super::copy::Block;
use super::placement::ALIGNMENT;
use crate::loader::Loader;
use crate::source::Domain;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Files of so many bytes at most share memory. A file of its own takes whole pages of the device (2 MiB on a GPU).
pub(super) const SMALL: u64 = 1 << 20;

/// Bytes of a slab at most: mapping it takes a client 0.3 ms whatever its size, and as long as one file of it is held it
/// stays whole.
const LARGEST: u64 = 64 << 20;

/// A slab that is begun for files to come takes this part of the memory that slabs have already: so much is unused at most.
const AHEAD: u64 = 10;

/// Slabs of a domain that are filled at a time: what does not fit into one may fit into another.
const OPEN: usize = 4;

/// The slab that was filled last outlives its last copy for so long: a small file that is given up and wanted again, or
/// changed, then finds memory that is there and mapped (0.1 ms on a GPU, where a new slab takes 0.5 to 1.8).
const KEPT: Duration = Duration::from_secs(2);

/// The slabs of one device, as far as they are filled.
#[derive(Default)]
pub(super) struct Slabs {
    domains: HashMap<Domain, Vec<Filled>>,
}

struct Filled {
    block: Weak<Block>,
    size: u64,
    /// Bytes from the beginning that are given out.
    used: u64,
}

impl Filled {
    /// Bytes that are not given out.
    fn room(&self) -> u64 {
        self.size - self.used
    }
}

/// Bytes that `length` bytes of content take in a slab.
pub(super) fn padded(length: u64) -> u64 {
    length.next_multiple_of(ALIGNMENT)
}

impl Slabs {
    /// Takes `bytes` of the slab of `domain` into which they fit best, if there is one with so much room.
    pub(super) fn take(&mut self, domain: Domain, bytes: u64, loader: &dyn Loader) -> Option<(Arc<Block>, u64)> {
        let open = self.domains.get_mut(&domain)?.iter_mut().filter(|slab| slab.room() >= bytes);
        let mut fitting: Vec<_> = open.collect();
        fitting.sort_by_key(|slab| slab.room());
        for slab in fitting {
            match slab.block.upgrade().filter(|block| loader.has(block.id)) {
                Some(block) => {
                    let offset = slab.used;
                    slab.used += bytes;
                    return Some((block, offset));
                }
                // All its copies have gone, or no process has it mapped.
                None => slab.used = slab.size,
            }
        }
        None
    }

    /// `block` is new, and the first `bytes` of it are given out. Of the others only a few stay open.
    pub(super) fn begin(&mut self, domain: Domain, block: &Arc<Block>, bytes: u64, loader: &dyn Loader) {
        let slabs = self.domains.entry(domain).or_default();
        slabs.push(Filled { block: Arc::downgrade(block), size: block.allocation().size(), used: bytes });
        let mut open: Vec<_> = slabs.iter_mut().filter(|slab| slab.room() > 0).collect();
        let many = open.len().saturating_sub(OPEN);
        for slab in open.drain(..many) {
            slab.used = slab.size;
            if let Some(block) = slab.block.upgrade() {
                loader.forget(block.id);
            }
        }
    }

    /// Bytes of a new slab for `domain`, of which `bytes` are wanted now and `waiting` by those behind them, where `free` can
    /// be had without anything's being given up for it.
    pub(super) fn size(&mut self, domain: Domain, bytes: u64, waiting: u64, free: u64) -> u64 {
        let slabs = self.domains.entry(domain).or_default();
        slabs.retain(|slab| slab.block.strong_count() > 0);
        let live: u64 = slabs.iter().map(|slab| slab.size).sum();
        if slabs.is_empty() {
            self.domains.remove(&domain);
        }
        bytes.max((bytes + waiting).max(live / AHEAD).min(LARGEST).min(free))
    }
}

/// The slab of a device that was filled last, for a moment or until its room is needed.
#[derive(Default)]
pub(super) struct Kept(Mutex<Keeping>);

#[derive(Default)]
struct Keeping {
    slab: Option<(Arc<Block>, Instant)>,
    /// Somebody is going to ask [`Kept::lapse`]: one is enough, however often slabs come and go.
    watched: bool,
}

impl Kept {
    /// Keeps `block` instead of another. How long, if nobody is going to ask [`Kept::lapse`] yet, as somebody then is to.
    pub(super) fn keep(&self, block: &Arc<Block>) -> Option<Duration> {
        let mut kept = self.0.lock();
        let before = kept.slab.replace((Arc::clone(block), Instant::now() + KEPT));
        let watched = std::mem::replace(&mut kept.watched, true);
        // Without the lock: it may be the last to have it.
        drop(kept);
        drop(before);
        (!watched).then_some(KEPT)
    }

    /// Lets the slab go if its time is over. If not: how long it has, after which this is to be asked again.
    pub(super) fn lapse(&self) -> Option<Duration> {
        let mut kept = self.0.lock();
        let end = kept.slab.as_ref().map(|(_, end)| *end);
        let left = end.map(|end| end.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero());
        let over = if left.is_none() { kept.slab.take() } else { None };
        kept.watched = left.is_some();
        drop(kept);
        drop(over);
        left
    }

    /// Lets the slab go now. Whether there was one: its memory is free if no copy is in it, and soon.
    pub(super) fn give_up(&self) -> bool {
        let kept = self.0.lock().slab.take();
        kept.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::budget::Budget;
    use crate::device::{Memory, host::HostMemory};
    use crate::loader::{Done, Job};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// Has every slab until it is told to forget it, or is away.
    #[derive(Default)]
    struct Keeps {
        forgotten: AtomicU64,
        away: AtomicBool,
    }

    impl Loader for Keeps {
        fn submit(&self, _job: Job, _done: Done) {}
        fn open(&self, _slab: u64) {}
        fn has(&self, _slab: u64) -> bool {
            !self.away.load(Ordering::Relaxed)
        }
        fn forget(&self, slab: u64) {
            self.forgotten.store(slab, Ordering::Relaxed);
        }
        fn stop(&self) {}
    }

    fn block(size: u64, loader: &Arc<Keeps>) -> Arc<Block> {
        let charge = Budget::new(size, 1).reserve(size).expect("fits");
        let allocation = HostMemory::new().expect("a host").allocate(size).expect("room");
        Block::slab(0, allocation, charge, loader.clone())
    }

    const DOMAIN: Domain = Domain { uid: 1, user_namespace: 2, mount_namespace: 3 };

    #[test]
    fn bytes_are_given_out_once_and_in_order() {
        let (loader, mut slabs) = (Arc::new(Keeps::default()), Slabs::default());
        assert!(slabs.take(DOMAIN, 256, &*loader).is_none());
        let first = block(4096, &loader);
        slabs.begin(DOMAIN, &first, 1024, &*loader);
        let take = |slabs: &mut Slabs, bytes| slabs.take(DOMAIN, bytes, &*loader).map(|(block, at)| (block.id, at));
        assert_eq!(take(&mut slabs, 256), Some((first.id, 1024)));
        assert_eq!(take(&mut slabs, 2816), Some((first.id, 1280)));
        assert_eq!(take(&mut slabs, 256), None, "it is full");
        let others = Domain { uid: 9, ..DOMAIN };
        assert!(slabs.take(others, 1, &*loader).is_none(), "nobody else's");
    }

    #[test]
    fn a_slab_ends_with_its_room_its_copies_or_its_loader() {
        let (loader, mut slabs) = (Arc::new(Keeps::default()), Slabs::default());
        let blocks: Vec<_> = (0..5).map(|_| block(4096, &loader)).collect();
        for (number, block) in blocks.iter().enumerate() {
            slabs.begin(DOMAIN, block, 1024 + 256 * number as u64, &*loader);
        }
        assert_eq!(loader.forgotten.load(Ordering::Relaxed), blocks[0].id, "of five the oldest is given up");
        let taken = slabs.take(DOMAIN, 2048, &*loader).map(|(block, at)| (block.id, at));
        assert_eq!(taken, Some((blocks[4].id, 2048)), "where it fits best");
        assert!(slabs.take(DOMAIN, 4096, &*loader).is_none());
        loader.away.store(true, Ordering::Relaxed);
        assert!(slabs.take(DOMAIN, 256, &*loader).is_none(), "no process has them mapped");
        loader.away.store(false, Ordering::Relaxed);
        assert!(slabs.take(DOMAIN, 256, &*loader).is_none(), "nor will");
        let third = block(4096, &loader);
        slabs.begin(DOMAIN, &third, 0, &*loader);
        let id = third.id;
        drop(third);
        assert_eq!(loader.forgotten.load(Ordering::Relaxed), id);
        assert!(slabs.take(DOMAIN, 256, &*loader).is_none(), "all its copies have gone");
    }

    #[test]
    fn one_looks_after_what_is_kept_however_often_it_is_given_up() {
        let (loader, kept) = (Arc::new(Keeps::default()), Kept::default());
        let first = block(4096, &loader);
        assert_eq!(kept.keep(&first), Some(KEPT));
        assert!(kept.give_up() && !kept.give_up());
        let second = block(4096, &loader);
        assert_eq!(kept.keep(&second), None, "somebody looks already");
        assert!(kept.lapse().is_some_and(|left| left <= KEPT), "not yet");
        assert!(kept.give_up());
        assert_eq!(kept.lapse(), None);
        assert_eq!(kept.keep(&first), Some(KEPT), "nobody does any more");
    }

    #[test]
    fn what_is_begun_for_files_to_come_is_little() {
        let (loader, mut slabs) = (Arc::new(Keeps::default()), Slabs::default());
        assert_eq!(slabs.size(DOMAIN, 4096, 0, u64::MAX), 4096);
        assert_eq!(slabs.size(DOMAIN, 4096, 100_000, u64::MAX), 104_096, "for those that wait behind");
        assert_eq!(slabs.size(DOMAIN, 4096, u64::MAX >> 1, u64::MAX), LARGEST);
        let blocks: Vec<_> = (0..50).map(|_| block(40960, &loader)).collect();
        blocks.iter().for_each(|block| slabs.begin(DOMAIN, block, 40960, &*loader));
        assert_eq!(slabs.size(DOMAIN, 4096, 0, u64::MAX), 50 * 4096);
        assert_eq!(slabs.size(DOMAIN, 4096, 0, 8192), 8192, "nothing is given up for it");
        assert_eq!(slabs.size(DOMAIN, 1 << 20, 0, 0), 1 << 20);
        drop(blocks);
        assert_eq!(slabs.size(DOMAIN, 4096, 0, u64::MAX), 4096);
    }
}
