//! How a request becomes an answer: at once from a copy, or with a load that it starts or joins. Requests that come together
//! are taken in under one lock: thousands of small files would take turns at it otherwise. Called through [`super::Cache`];
//! the dispatcher and the ends of loads do the rest.

use super::copy::{Hold, Key};
use super::hold::FETCH_TIME;
use super::index::{Index, Load, Slot, Waiter};
use super::shelf::{Shelf, empty, hold};
use super::{Answer, Ask, Outcome, Placement, SessionId};
use crate::failure::{Failure, Result};
use crate::metrics::Counter;
use crate::protocol::Code;
use crate::size::Human;
use crate::source::{OpenFile, Proof, Version};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Loads that may wait for the dispatcher, per device: each has a descriptor open.
const QUEUED: usize = 4096;

/// A request with its file's version, and what that is worth.
type Seen = (Ask, Result<(Version, Proof)>, Answer);

/// What is left to do for a request when the lock is gone.
enum Rest {
    Answer(Answer, Result<Outcome>),
    Resident(Answer, Placement, Option<SessionId>, Option<Hold>),
    /// A waiter hears at the end of the load, or when its time is over.
    Waits {
        key: Key,
        number: u64,
        wait: Duration,
    },
}

impl Shelf {
    /// See [`super::Cache::materialize`].
    pub(super) fn materialize(&self, asks: Vec<(Ask, Answer)>) {
        if asks.is_empty() {
            return;
        }
        let looked = self.see(asks);
        let mut superseded = Vec::new();
        let mut index = self.index.lock();
        let queued = index.queue.len();
        let take_in = |(ask, seen, answer)| match seen {
            Ok(seen) => self.take_in(&mut index, ask, seen, answer, &mut superseded),
            Err(failure) => Rest::Answer(answer, Err(failure)),
        };
        let rest: Vec<Rest> = looked.into_iter().map(take_in).collect();
        if index.queue.len() > queued {
            self.work.notify_one();
        }
        drop(index);
        // Outside the lock: this may free memory.
        drop(superseded);
        for rest in rest {
            match rest {
                Rest::Answer(answer, said) => answer(said),
                Rest::Resident(answer, placement, session, hold) => self.reply(placement, session, hold, answer),
                Rest::Waits { wait: Duration::MAX, .. } => {}
                Rest::Waits { key, number, wait } => {
                    let this = self.this.clone();
                    self.timer.after(wait, move || {
                        if let Some(shelf) = this.upgrade() {
                            shelf.expire(&key, number);
                        }
                    });
                }
            }
        }
    }

    /// The files' versions, and what they are worth. Of what is resident only whether it may be a hit.
    fn see(&self, asks: Vec<(Ask, Answer)>) -> Vec<Seen> {
        let version = |(ask, _): &(Ask, Answer)| ask.file.version().and_then(|version| self.check(ask, version));
        let versions: Vec<_> = asks.iter().map(version).collect();
        let mut index = self.index.lock();
        let mut is_resident = |ask: &Ask, version: Version| {
            let key = Key { file: version.file, domain: ask.caller.domain };
            matches!(index.slot(&key), Some(Slot::Resident(copy)) if copy.version == version)
        };
        let resident = |((ask, _), version): (&(Ask, Answer), &Result<Version>)| match version {
            Ok(version) => is_resident(ask, *version),
            Err(_) => false,
        };
        let resident: Vec<bool> = asks.iter().zip(&versions).map(resident).collect();
        drop(index);
        let seen = asks.into_iter().zip(versions).zip(resident);
        let seen = seen.map(|(((ask, answer), version), resident)| {
            let proof = |version: Version| match resident {
                true if ask.file.hides() => (version, Proof::Hidden),
                // Should it be given up at this moment, the load will find out.
                true => (version, Proof::Unsettled),
                false => (version, ask.file.proof(&version)),
            };
            let seen = version.map(proof);
            (ask, seen, answer)
        });
        seen.collect()
    }

    /// A request for the file's present version.
    fn take_in(
        &self,
        index: &mut Index,
        ask: Ask,
        (version, proof): (Version, Proof),
        answer: Answer,
        superseded: &mut Vec<Slot>,
    ) -> Rest {
        if version.size == 0 {
            return Rest::Answer(answer, Ok(Outcome::Resident(empty(&version))));
        }
        if index.stopping {
            return Rest::Answer(answer, Err(Failure::new(Code::Stopping, "the daemon is shutting down")));
        }
        let key = Key { file: version.file, domain: ask.caller.domain };
        if let Some(Slot::Resident(copy)) = index.slot(&key) {
            if copy.version == version && proof != Proof::Hidden {
                // Not the copy itself: whoever evicts it next may count on its memory.
                let rest = Rest::Resident(answer, copy.placement(), ask.session, hold(copy, ask.session));
                index.policy.touch(&key);
                self.counters.add(Counter::Hits, 1);
                return rest;
            }
            self.counters.add(Counter::Superseded, 1);
            superseded.extend(index.take(&key));
        }
        let number = index.number();
        let wait = ask.wait;
        let detached = wait.is_zero() || wait == Duration::MAX;
        let (pid, session) = (ask.caller.pid, ask.session);
        // Joins the load, or gets its answer back, which cannot wait.
        let join = |load: &mut Load, answer| {
            load.detached |= detached;
            if wait.is_zero() {
                return Some(answer);
            }
            load.waiters.push(Waiter { number, pid, session, answer });
            None
        };
        let (mut loaded, mut total) = (0, version.size);
        let immediate;
        if let Some(Slot::Loading(load)) = index.slot(&key) {
            self.counters.add(Counter::Joined, 1);
            // Somebody changed the file since: what is on its way is not what this request asks for.
            load.stale |= load.version != version;
            immediate = join(load, answer);
            (loaded, total) = (load.watch.loaded.load(Ordering::Relaxed), load.version.size);
        } else if index.queue.len() >= QUEUED {
            return Rest::Answer(answer, Err(too_many(&ask.file)));
        } else {
            self.counters.add(Counter::Misses, 1);
            index.failures.pop(&key);
            let mut load = Load {
                number,
                file: ask.file,
                version,
                settled: proof == Proof::Settled,
                asked: Instant::now(),
                attempt: 1,
                alone: false,
                stale: false,
                watch: Arc::default(),
                detached: false,
                waiters: Vec::new(),
            };
            immediate = join(&mut load, answer);
            index.put(key, Slot::Loading(load));
            index.queue.push_back((key, number));
        }
        match immediate {
            Some(answer) => Rest::Answer(answer, Ok(Outcome::Loading { loaded, total })),
            None => Rest::Waits { key, number, wait },
        }
    }

    /// What can be said without looking at the index.
    fn check(&self, ask: &Ask, version: Version) -> Result<Version> {
        let path = ask.file.path.display();
        if ask.offset != 0 || (ask.length != 0 && ask.length < version.size) {
            let message = format!("{path}: a part of a file cannot be asked for yet; ask for the whole file");
            return Err(Failure::new(Code::Unsupported, message));
        }
        self.fits(&ask.file, version.size)?;
        Ok(version)
    }

    /// Whether a file of `size` bytes can ever be resident here.
    pub(super) fn fits(&self, file: &OpenFile, size: u64) -> Result<()> {
        if self.info().rounded(size) <= self.budget.limit() {
            return Ok(());
        }
        let (mut size_word, mut limit_word) = (Human(size).to_string(), Human(self.budget.limit()).to_string());
        if size_word == limit_word {
            (size_word, limit_word) = (format!("{size} bytes"), format!("{} bytes", self.budget.limit()));
        }
        let (path, label) = (file.path.display(), &self.info().label);
        let message = format!(
            "{path}: {size_word} are more than the whole budget of {label}, {limit_word}: mount with a larger --budget"
        );
        Err(Failure::new(Code::TooLarge, message))
    }

    /// A waiter's time is over: it hears how far the load is.
    fn expire(&self, key: &Key, number: u64) {
        let mut index = self.index.lock();
        let Some(Slot::Loading(load)) = index.slot(key) else { return };
        let Some(place) = load.waiters.iter().position(|w| w.number == number) else { return };
        let waiter = load.waiters.swap_remove(place);
        let outcome = Outcome::Loading { loaded: load.watch.loaded.load(Ordering::Relaxed), total: load.version.size };
        drop(index);
        (waiter.answer)(Ok(outcome));
    }

    /// Answers where the copy is, and lets the session hold it.
    pub(super) fn reply(&self, placement: Placement, session: Option<SessionId>, hold: Option<Hold>, answer: Answer) {
        if let (Some(session), Some(hold)) = (session, hold) {
            let allocation = hold.block().id;
            match self.sessions.grant(session, hold) {
                Err(failure) => return answer(Err(failure)),
                Ok(None) => {}
                Ok(Some(serial)) => {
                    let this = self.this.clone();
                    self.timer.after(FETCH_TIME, move || {
                        if let Some(shelf) = this.upgrade()
                            && shelf.sessions.lapse(session, allocation, serial)
                        {
                            shelf.counters.add(Counter::Lapsed, 1);
                        }
                    });
                }
            }
        }
        answer(Ok(Outcome::Resident(placement)));
    }
}

/// Too many files wait already.
fn too_many(file: &OpenFile) -> Failure {
    let path = file.path.display();
    let message = format!("{path}: {QUEUED} files wait to be loaded already; try again when some of them have come");
    Failure { errno: libc::EAGAIN, ..Failure::new(Code::OutOfMemory, message) }
}
