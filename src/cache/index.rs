//! What a device has and what is on its way to it, by file and domain; which copies share a slab; in which order they go.
//! Only ever seen under the shelf's lock, so nothing here may block. Called by `shelf` and `dispatch`.

use super::copy::{Copy, Key};
use super::policy::Policy;
use super::policy::lru::Lru;
use super::slab::{SMALL, padded};
use super::{Answer, SessionId};
use crate::failure::Failure;
use crate::loader::Watch;
use crate::protocol::LOAD_PARTS;
use crate::source::{Domain, FileId, OpenFile, Version};
use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Failures that are remembered for STATUS, per device.
const REMEMBERED_FAILURES: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// Loads in the queue that are looked at before a slab is made for them.
const LOOKED_AT: usize = 2048;

/// Bytes of small files that go to the loader together at most: enough for a few slots of its ring.
const TOGETHER: u64 = 16 << 20;

/// Much is looked up here under one lock, so it is hashed quickly.
type HashMap<K, V> = std::collections::HashMap<K, V, foldhash::fast::RandomState>;
type HashSet<K> = std::collections::HashSet<K, foldhash::fast::RandomState>;

pub(super) struct Index {
    pub(super) files: HashMap<FileId, Vec<(Domain, Slot)>>,
    /// The copies that lie in each slab.
    slabs: HashMap<u64, HashSet<Key>>,
    pub(super) policy: Box<dyn Policy>,
    /// Loads that wait for the dispatcher, oldest first.
    pub(super) queue: VecDeque<(Key, u64)>,
    /// Loads that the loader has.
    pub(super) in_flight: usize,
    pub(super) failures: lru::LruCache<Key, (Version, Failure)>,
    pub(super) stopping: bool,
    next_number: u64,
    pub(super) resident: Sum,
    pub(super) loading: Sum,
}

impl Load {
    /// Whether the file may share an allocation with others.
    pub(super) fn shares(&self) -> bool {
        !self.alone && self.version.size > 0 && self.version.size <= SMALL
    }
}

impl Default for Index {
    fn default() -> Index {
        Index {
            files: HashMap::default(),
            slabs: HashMap::default(),
            policy: Box::new(Lru::default()),
            queue: VecDeque::new(),
            in_flight: 0,
            failures: lru::LruCache::new(REMEMBERED_FAILURES),
            stopping: false,
            next_number: 0,
            resident: Sum::default(),
            loading: Sum::default(),
        }
    }
}

/// Files and bytes of the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    pub files: u64,
    pub bytes: u64,
    /// Bytes of the files themselves.
    pub content: u64,
}

pub(super) enum Slot {
    Loading(Load),
    Resident(Arc<Copy>),
}

/// A file on its way.
pub(super) struct Load {
    /// Tells this load from a later one of the same key.
    pub number: u64,
    pub file: OpenFile,
    /// When it was first asked for.
    pub asked: Instant,
    /// The version that is being loaded.
    pub version: Version,
    /// Behind that version no change can hide: no other is loaded.
    pub settled: bool,
    pub attempt: u32,
    /// It shall share no memory, and be begun when that is there: it failed with others, for a reason that may be its own, or
    /// there was no memory.
    pub alone: bool,
    /// The file was changed through the mount since the load began.
    pub stale: bool,
    pub watch: Arc<Watch>,
    /// Somebody asked and went away: nobody can say that it is not wanted any more.
    pub detached: bool,
    pub waiters: Vec<Waiter>,
}

pub(super) struct Waiter {
    pub number: u64,
    /// The thread that asked.
    pub pid: u32,
    pub session: Option<SessionId>,
    pub answer: Answer,
}

impl Index {
    pub(super) fn slot(&mut self, key: &Key) -> Option<&mut Slot> {
        let slots = self.files.get_mut(&key.file)?;
        slots.iter_mut().find(|(domain, _)| *domain == key.domain).map(|(_, slot)| slot)
    }

    /// Bytes that have arrived of everything that is loading: it moves while anything does.
    pub(super) fn arrived(&self) -> u64 {
        let loads = self.files.values().flatten().filter_map(|(_, slot)| match slot {
            Slot::Loading(load) => Some(load.watch.loaded.load(Ordering::Relaxed)),
            Slot::Resident(_) => None,
        });
        loads.fold(0, u64::wrapping_add)
    }

    /// The load of `key` with this number, if it is still wanted.
    pub(super) fn load(&mut self, key: &Key, number: u64) -> Option<&mut Load> {
        match self.slot(key) {
            Some(Slot::Loading(load)) if load.number == number => Some(load),
            _ => None,
        }
    }

    pub(super) fn put(&mut self, key: Key, slot: Slot) {
        match &slot {
            Slot::Resident(copy) => self.count(copy),
            Slot::Loading(load) => {
                self.loading.files += 1;
                self.loading.content += load.version.size;
            }
        }
        self.files.entry(key.file).or_default().push((key.domain, slot));
    }

    /// Of a copy that becomes resident.
    fn count(&mut self, copy: &Copy) {
        self.policy.admit(copy.key, copy.bytes());
        self.resident.files += 1;
        self.resident.bytes += copy.bytes();
        self.resident.content += copy.version.size;
        if let Some(slab) = copy.slab() {
            self.slabs.entry(slab).or_default().insert(copy.key);
        }
    }

    /// Puts a copy into the place of its load, which is returned; one that lies nowhere just ends it. Nothing: nobody wants
    /// it any more.
    pub(super) fn publish(&mut self, copy: &Arc<Copy>, number: u64) -> Option<Load> {
        let slot = self.slot(&copy.key).filter(|slot| matches!(slot, Slot::Loading(load) if load.number == number))?;
        let before = match &copy.place {
            None => self.take(&copy.key),
            Some(_) => {
                let before = std::mem::replace(slot, Slot::Resident(Arc::clone(copy)));
                self.count(copy);
                if let Slot::Loading(load) = &before {
                    self.loading.files -= 1;
                    self.loading.content -= load.version.size;
                }
                Some(before)
            }
        };
        match before {
            Some(Slot::Loading(load)) => Some(load),
            _ => unreachable!("looked at just now"),
        }
    }

    pub(super) fn take(&mut self, key: &Key) -> Option<Slot> {
        let slots = self.files.get_mut(&key.file)?;
        let place = slots.iter().position(|(domain, _)| *domain == key.domain)?;
        let (_, slot) = slots.swap_remove(place);
        if slots.is_empty() {
            self.files.remove(&key.file);
        }
        if let Slot::Resident(copy) = &slot {
            self.policy.remove(key);
            self.resident.files -= 1;
            self.resident.bytes -= copy.bytes();
            self.resident.content -= copy.version.size;
            if let Some(slab) = copy.slab()
                && let Some(keys) = self.slabs.get_mut(&slab)
            {
                keys.remove(key);
                if keys.is_empty() {
                    self.slabs.remove(&slab);
                }
            }
        }
        if let Slot::Loading(load) = &slot {
            self.loading.files -= 1;
            self.loading.content -= load.version.size;
        }
        Some(slot)
    }

    /// A load is of another version of its file than it was.
    pub(super) fn revise(&mut self, key: &Key, number: u64, version: Version) -> Option<&mut Load> {
        let before = self.load(key, number)?.version.size;
        self.loading.content = self.loading.content - before + version.size;
        let load = self.load(key, number)?;
        load.version = version;
        Some(load)
    }

    /// Whether there are copies in the slab.
    pub(super) fn has_more_in(&self, slab: u64) -> bool {
        self.slabs.contains_key(&slab)
    }

    /// Takes what shall go next out of the index, never what is held: one copy, or, because only that frees memory, all
    /// that lie in a slab. Nothing: nothing may go.
    pub(super) fn take_victims(&mut self) -> Vec<Arc<Copy>> {
        let Index { files, policy, .. } = self;
        let may_go = |key: &Key| {
            let slots = files.get(&key.file).map_or(&[][..], Vec::as_slice);
            slots.iter().any(|(domain, slot)| {
                *domain == key.domain && matches!(slot, Slot::Resident(copy) if copy.bytes() > 0 && !copy.is_in_use())
            })
        };
        let Some(key) = policy.victim(&may_go) else { return Vec::new() };
        let slab = match self.slot(&key) {
            Some(Slot::Resident(copy)) => copy.slab(),
            _ => unreachable!("the policy names resident keys only"),
        };
        let keys = slab.and_then(|slab| self.slabs.get(&slab)).map_or(vec![key], |keys| keys.iter().copied().collect());
        let taken = keys.iter().map(|key| match self.take(key) {
            Some(Slot::Resident(copy)) => copy,
            _ => unreachable!("a slab's keys are resident"),
        });
        taken.collect()
    }

    /// The load that has waited longest, and, if it may share memory, those right behind it that may share it: of one
    /// domain, and of `bytes` together at most.
    pub(super) fn take_together(&mut self, bytes: u64) -> Vec<(Key, u64)> {
        let mut taken: Vec<(Key, u64)> = Vec::new();
        let mut sum = 0;
        while let Some((key, number)) = self.queue.front().copied() {
            let size = self.load(&key, number).and_then(|load| load.shares().then_some(load.version.size));
            let same = taken.first().is_none_or(|(first, _)| first.domain == key.domain);
            let fits = size.is_some_and(|size| sum + size <= bytes.min(TOGETHER)) && taken.len() < LOAD_PARTS;
            if !(taken.is_empty() || same && fits) {
                break;
            }
            self.queue.pop_front();
            taken.push((key, number));
            match size {
                Some(size) => sum += size,
                None => break,
            }
        }
        taken
    }

    /// Bytes that the first loads in the queue will take in slabs of `domain`, as far as they follow one another.
    pub(super) fn waiting(&mut self, domain: Domain) -> u64 {
        let mut sum = 0;
        for place in 0..self.queue.len().min(LOOKED_AT) {
            let (key, number) = self.queue[place];
            match self.load(&key, number).and_then(|load| load.shares().then_some(load.version.size)) {
                Some(size) if key.domain == domain => sum += padded(size),
                _ => break,
            }
        }
        sum
    }

    /// Puts a load that failed among others back at the front.
    pub(super) fn again_alone(&mut self, key: Key, number: u64) {
        if let Some(load) = self.load(&key, number) {
            load.alone = true;
            load.watch.loaded.store(0, Ordering::Relaxed);
            self.queue.push_front((key, number));
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }
}
