//! What is on one device: the index of copies and loads, the order of eviction, the counters. Requests come in here and
//! are answered at once from a copy, or wait with a load. No system call that can block is made under the lock.

use super::budget::Budget;
use super::copy::{Copy, Hold, Key, next_generation};
use super::hold::Sessions;
use super::index::{Index, Load, Slot, Sum, Waiter};
use super::slab::Kept;
use super::timer::Timer;
use super::{Evicted, Placement, SessionId, Setup, Standing};
use crate::device::{Info, Memory};
use crate::failure::{Failure, Result};
use crate::loader::Loader;
use crate::metrics::{Counter, Counters, Histogram};
use crate::protocol::{Code, State};
use crate::source::identity::process_of;
use crate::source::{Caller, Domain, FileId, OpenFile, Version};
use crate::transfer::Options;
use crate::transfer::report::{Route, Tally};
use parking_lot::{Condvar, Mutex};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// One device with everything that is on it.
pub struct Shelf {
    pub(super) number: usize,
    pub(super) memory: Arc<dyn Memory>,
    pub(super) loader: Arc<dyn Loader>,
    pub(super) transfer: Options,
    pub(super) budget: Arc<Budget>,
    pub(super) counters: Counters,
    /// What the loads have done, also those that failed.
    pub(super) routes: Tally,
    /// From a request to its published copy, by the route that brought the most, in the order of [`Route::ALL`].
    pub(super) latencies: [Histogram; Route::ALL.len()],
    pub(super) sessions: Arc<Sessions>,
    pub(super) index: Mutex<Index>,
    /// Signalled when there may be something for the dispatcher.
    pub(super) work: Condvar,
    pub(super) kept: Kept,
    pub(super) timer: Arc<Timer>,
    pub(super) this: Weak<Shelf>,
}

impl Shelf {
    pub(super) fn new(number: usize, device: Setup, sessions: Arc<Sessions>, timer: Arc<Timer>) -> Arc<Shelf> {
        let Setup { memory, loader, limit, pieces, transfer } = device;
        Arc::new_cyclic(|this| Shelf {
            number,
            memory,
            loader,
            transfer,
            budget: Budget::new(limit, pieces),
            counters: Counters::default(),
            routes: Tally::default(),
            latencies: Default::default(),
            sessions,
            index: Mutex::default(),
            work: Condvar::new(),
            kept: Kept::default(),
            timer,
            this: this.clone(),
        })
    }

    pub(super) fn info(&self) -> &Info {
        self.memory.info()
    }

    /// Makes `copy` the current one and answers those who wait for it. False: the file was changed a moment ago, and the
    /// load is not over. Nothing is done where nobody wants it any more.
    pub(super) fn publish(&self, copy: Copy, number: u64) -> bool {
        let mut index = self.index.lock();
        if index.load(&copy.key, number).is_some_and(|load| load.stale) {
            return false;
        }
        let published = self.replace(&mut index, copy, number);
        drop(index);
        published.into_iter().for_each(|published| self.tell(published));
        true
    }

    /// Puts `copy` into the place of its load. Nothing: nobody wants it any more.
    pub(super) fn replace(&self, index: &mut Index, copy: Copy, number: u64) -> Option<Published> {
        let copy = Arc::new(copy);
        let load = index.publish(&copy, number)?;
        // Held before the lock goes, so that no eviction comes between.
        let answers = load.waiters.into_iter().map(|w| (hold(&copy, w.session), w)).collect();
        // From here on the index alone has the copy, so that its memory goes when it leaves the index.
        Some(Published { placement: copy.placement(), answers, _file: load.file })
    }

    /// Answers those who waited, without the lock.
    pub(super) fn tell(&self, published: Published) {
        self.counters.add(Counter::Loads, 1);
        for (hold, waiter) in published.answers {
            self.reply(published.placement, waiter.session, hold, waiter.answer);
        }
    }

    /// Ends a load without a copy.
    pub(super) fn fail(&self, key: &Key, number: u64, failure: Failure) {
        let mut index = self.index.lock();
        if index.load(key, number).is_none() {
            return;
        }
        let Some(Slot::Loading(load)) = index.take(key) else { unreachable!("found just now") };
        index.failures.put(*key, (load.version, failure.clone()));
        drop(index);
        self.counters.add(Counter::LoadFailures, 1);
        tracing::warn!(device = self.info().label, "{failure}");
        for waiter in load.waiters {
            (waiter.answer)(Err(failure.clone()));
        }
    }

    /// See [`super::Cache::standing`].
    pub(super) fn standing(&self, file: &OpenFile, domain: Domain) -> Result<Standing> {
        let version = file.version()?;
        let mut standing =
            Standing { state: State::Absent, size: version.size, loaded: 0, generation: 0, holders: 0, failure: None };
        if version.size == 0 {
            standing.state = State::Resident;
            standing.generation = empty(&version).generation;
            return Ok(standing);
        }
        let key = Key { file: version.file, domain };
        let hidden = file.hides();
        let mut index = self.index.lock();
        match index.slot(&key) {
            Some(Slot::Resident(copy)) if copy.version == version && !hidden => {
                standing.state = State::Resident;
                standing.loaded = version.size;
                standing.generation = copy.generation;
                standing.holders = copy.holders();
            }
            Some(Slot::Loading(load)) => {
                standing.state = State::Loading;
                standing.loaded = load.watch.loaded.load(Ordering::Relaxed).min(version.size);
            }
            _ => {
                let failed = index.failures.peek(&key).filter(|(failed, _)| *failed == version);
                standing.failure = failed.map(|(_, failure)| failure.clone());
            }
        }
        Ok(standing)
    }

    /// See [`super::Cache::evict`].
    pub(super) fn evict(&self, file: FileId, domain: Domain) -> Evicted {
        let mut index = self.index.lock();
        let taken = index.take(&Key { file, domain });
        let shared =
            matches!(&taken, Some(Slot::Resident(copy)) if copy.slab().is_some_and(|slab| index.has_more_in(slab)));
        drop(index);
        let mut evicted = Evicted::default();
        match taken {
            None => {}
            Some(Slot::Resident(copy)) => {
                self.counters.add(Counter::EvictionsAsked, 1);
                // Small files share their memory: it is free with the last of them.
                let bytes = copy.place.as_ref().map_or(0, |place| if shared { 0 } else { place.block.bytes() });
                if copy.is_held() {
                    evicted.held = bytes;
                } else {
                    evicted.freed = bytes;
                }
            }
            Some(Slot::Loading(load)) => self.give_up(load, "evicted while it was loading"),
        }
        evicted
    }

    /// See [`super::Cache::cancel`].
    pub(super) fn cancel(&self, file: FileId, caller: &Caller) -> State {
        let key = Key { file, domain: caller.domain };
        let process = process_of(caller.pid);
        let mut index = self.index.lock();
        let waiting = match index.slot(&key) {
            None => return State::Absent,
            Some(Slot::Resident(_)) => return State::Resident,
            Some(Slot::Loading(load)) if load.detached => return State::Loading,
            Some(Slot::Loading(load)) => load.waiters.iter().map(|waiter| waiter.pid).collect::<Vec<_>>(),
        };
        drop(index);
        // Looked up without the lock: this reads /proc.
        let own = |pid: &u32| *pid == caller.pid || (process.is_some() && process_of(*pid) == process);
        if !waiting.iter().all(own) {
            return State::Loading;
        }
        let mut index = self.index.lock();
        let Some(Slot::Loading(load)) = index.slot(&key) else { return State::Absent };
        if load.detached || !load.waiters.iter().all(|waiter| waiting.contains(&waiter.pid)) {
            return State::Loading;
        }
        let taken = index.take(&key);
        drop(index);
        if let Some(Slot::Loading(load)) = taken {
            self.give_up(load, "the load was cancelled");
        }
        State::Absent
    }

    /// Ends a load that is not in the index any more.
    fn give_up(&self, load: Load, why: &str) {
        load.watch.cancelled.store(true, Ordering::Release);
        self.budget.poke();
        let failure = Failure::new(Code::Changing, format!("{}: {why}", load.file.path.display()));
        for waiter in load.waiters {
            (waiter.answer)(Err(failure.clone()));
        }
    }

    /// See [`super::Cache::changed`].
    pub(super) fn changed(&self, file: FileId) {
        let mut index = self.index.lock();
        let Some(slots) = index.files.get_mut(&file) else { return };
        let mut superseded = Vec::new();
        for (domain, slot) in slots {
            match slot {
                Slot::Loading(load) => load.stale = true,
                Slot::Resident(_) => superseded.push(Key { file, domain: *domain }),
            }
        }
        let gone: Vec<_> = superseded.iter().filter_map(|key| index.take(key)).collect();
        drop(index);
        self.counters.add(Counter::Superseded, gone.len() as u64);
    }

    /// What is resident and loading now, and every file of it up to `limit`.
    pub(super) fn survey(&self, limit: usize) -> Survey {
        let index = self.index.lock();
        let mut survey = Survey { resident: index.resident, loading: index.loading, ..Survey::default() };
        if limit == 0 {
            return survey;
        }
        for (domain, slot) in index.files.values().flatten() {
            if survey.files.len() == limit {
                survey.left_out += 1;
                continue;
            }
            survey.files.push(match slot {
                Slot::Loading(load) => Seen {
                    path: load.file.path.display().to_string(),
                    state: State::Loading,
                    size: load.version.size,
                    loaded: load.watch.loaded.load(Ordering::Relaxed),
                    holders: 0,
                    uid: domain.uid,
                    age: None,
                },
                Slot::Resident(copy) => Seen {
                    path: copy.path.display().to_string(),
                    state: State::Resident,
                    size: copy.version.size,
                    loaded: copy.version.size,
                    holders: copy.holders(),
                    uid: domain.uid,
                    age: Some(copy.published.elapsed()),
                },
            });
        }
        survey
    }
}

/// A copy that has just become current, for those who waited for it.
pub(super) struct Published {
    placement: Placement,
    answers: Vec<(Option<Hold>, Waiter)>,
    /// Closed without the lock.
    _file: OpenFile,
}

/// See [`Shelf::survey`].
#[derive(Default)]
pub(super) struct Survey {
    pub resident: Sum,
    pub loading: Sum,
    pub files: Vec<Seen>,
    pub left_out: u64,
}

/// One file on the shelf, for people.
pub(super) struct Seen {
    pub path: String,
    pub state: State,
    pub size: u64,
    pub loaded: u64,
    pub holders: u32,
    pub uid: u32,
    /// Since it was published.
    pub age: Option<Duration>,
}

pub(super) fn hold(copy: &Arc<Copy>, session: Option<SessionId>) -> Option<Hold> {
    session.and(copy.place.as_ref()).map(|place| Hold::new(&place.block))
}

/// Where an empty file is: nowhere, and that at once. It has no entry in the index; its generation follows from its
/// version, apart from those that are counted.
pub(super) fn empty(version: &Version) -> Placement {
    let mut hasher = DefaultHasher::new();
    version.hash(&mut hasher);
    let generation = hasher.finish() | 1 << 63;
    Placement { allocation: 0, allocation_size: 0, offset: 0, length: 0, generation }
}

/// A copy of `load`'s file, where `place` says.
pub(super) fn copy_of(key: Key, load: &Load, place: Option<super::copy::Place>) -> Copy {
    let generation = if place.is_some() { next_generation() } else { empty(&load.version).generation };
    Copy {
        key,
        version: load.version,
        generation,
        place,
        path: load.file.path.clone(),
        published: std::time::Instant::now(),
    }
}
