//! The thread that minds one device's loader: what is waiting, what the child works on, and whether the child lives. It
//! owns all of that, so nothing here is locked; it must never wait for one job while another could go on.

use super::child::EXIT_LOST;
use super::packet::Packet;
use super::parent::{Done, Settings, Shared};
use super::process::{Ended, Process};
use super::{Job, Loaded};
use crate::device::Info;
use crate::failure::{Failure, Result, usual_errno};
use crate::protocol::{
    Code, ErrorReply, LoadDone, LoadId, LoadJob, LoadProgress, LoaderReady, PROTOCOL_VERSION, loader_kind,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How late a cancellation or a deadline is noticed.
const TICK: Duration = Duration::from_millis(50);
/// How late the end of a dying child is noticed.
const DYING: Duration = Duration::from_millis(2);
/// Loads that a child has at a time. Each takes two descriptors on their way, of which the system lets a process have as
/// many as files; and a few dozen keep every reader busy.
const WINDOW: usize = 64;
/// A job is tried so often: the second time on a new child.
const ATTEMPTS: u32 = 2;

/// A job that is not over.
struct Flight {
    job: Job,
    done: Done,
    /// Children that have died with it.
    deaths: u32,
    cancel_sent: bool,
}

struct Child {
    process: Process,
    ready: bool,
    /// When it last said anything, or was given work while it had none.
    heard: Instant,
    flights: BTreeMap<u64, Flight>,
    /// Loads that it has brought to an end.
    finished: u64,
}

pub(super) struct Minder {
    info: Info,
    settings: Settings,
    shared: Arc<Shared>,
    waiting: VecDeque<Flight>,
    child: Option<Child>,
    /// Children that are dead to us, with what killed them where we did, until the system has taken them apart: only then
    /// their jobs' allocations are left alone.
    dying: Vec<(Child, Option<String>)>,
    /// Children that were let go and are not collected yet.
    leaving: Vec<Process>,
    next: u64,
    /// Children in a row that died before they were ready.
    stillborn: u32,
}

impl Minder {
    pub(super) fn new(info: Info, settings: Settings, shared: Arc<Shared>) -> Minder {
        let (waiting, dying, leaving) = (VecDeque::new(), Vec::new(), Vec::new());
        Minder { info, settings, shared, waiting, child: None, dying, leaving, next: 1, stillborn: 0 }
    }

    /// Until the loader is dropped.
    pub(super) fn mind(&mut self) {
        loop {
            self.sleep();
            let (stop, close) = self.take_in();
            if close {
                return self.close();
            }
            self.listen();
            self.cancel();
            self.check_silence();
            self.inherit();
            self.hand_out();
            self.let_go(stop);
            self.leaving.retain_mut(|process| process.ended().is_none());
        }
    }

    /// Until somebody wants something, or something could be due.
    fn sleep(&self) {
        let busy = !self.waiting.is_empty() || !self.leaving.is_empty();
        let timeout = match &self.child {
            _ if !self.dying.is_empty() => Some(DYING),
            Some(child) if busy || !child.ready || !child.flights.is_empty() => Some(TICK),
            Some(child) => Some(self.settings.idle.saturating_sub(child.heard.elapsed()).max(TICK)),
            None => busy.then_some(TICK),
        };
        let timeout = timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        let mut ends = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        if let Some(child) = &self.child {
            ends.push(PollFd::from_borrowed_fd(child.process.socket(), PollFlags::IN));
        }
        // Interrupted or not: everything is looked at anyway.
        let _ = poll(&mut ends, timeout.as_ref());
    }

    fn take_in(&mut self) -> (bool, bool) {
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        let mut inbox = self.shared.inbox.lock();
        let new = inbox.jobs.drain(..).map(|(job, done)| Flight { job, done, deaths: 0, cancel_sent: false });
        self.waiting.extend(new);
        // Kept until the present work is done.
        let stop = inbox.stop;
        (stop, inbox.close)
    }

    fn listen(&mut self) {
        while let Some(child) = &mut self.child {
            match child.process.receive() {
                Ok(Some(packet)) => {
                    child.heard = Instant::now();
                    self.handle(packet);
                }
                Err(rustix::io::Errno::AGAIN) => return,
                Ok(None) => self.bury(None),
                Err(e) => {
                    child.process.kill();
                    self.bury(Some(format!("could not be understood ({e})")));
                }
            }
        }
    }

    fn handle(&mut self, packet: Packet) {
        let Some(child) = &mut self.child else { return };
        match packet.kind {
            loader_kind::READY => {
                let version = packet.body::<LoaderReady>().map(|(ready, _)| ready.version);
                if version == Some(PROTOCOL_VERSION) {
                    child.ready = true;
                    self.stillborn = 0;
                } else {
                    let message = format!("{} speaks another protocol version", self.name());
                    self.give_up(Failure::new(Code::WrongVersion, message));
                }
            }
            loader_kind::FAILED => {
                if let Some((reply, text)) = packet.body::<ErrorReply>() {
                    let code = Code::from_number(reply.code).unwrap_or(Code::Loader);
                    let message = format!("{} cannot begin: {text}", self.name());
                    self.give_up(Failure { code, errno: reply.errno, message });
                }
            }
            loader_kind::PROGRESS => {
                if let Some((LoadProgress { id, loaded }, _)) = packet.body()
                    && let Some(flight) = child.flights.get(&id)
                {
                    flight.job.watch.loaded.store(loaded, Ordering::Relaxed);
                }
            }
            loader_kind::DONE => {
                if let Some((done, text)) = packet.body::<LoadDone>()
                    && let Some(flight) = child.flights.remove(&done.id)
                {
                    child.finished += 1;
                    end(flight, outcome(&done, text));
                }
            }
            _ => {}
        }
    }

    fn name(&self) -> String {
        format!("the loader for {}", self.info.label)
    }

    /// The child is dead or as good as.
    fn bury(&mut self, instead: Option<String>) {
        if let Some(mut child) = self.child.take() {
            self.shared.pid.store(0, Ordering::Relaxed);
            child.process.expire();
            self.dying.push((child, instead));
        }
    }

    /// The jobs of children that are gone by now go to the next one, once.
    fn inherit(&mut self) {
        for (mut child, instead) in std::mem::take(&mut self.dying) {
            match child.process.ended() {
                Some(ended) => self.settle(child, ended, instead),
                None => self.dying.push((child, instead)),
            }
        }
    }

    fn settle(&mut self, child: Child, ended: Ended, instead: Option<String>) {
        // It left by itself because the device was lost: what it had begun has said so, the rest it never touched. That
        // holds only if something had begun, or the next child would be lost in the same way for ever.
        let orderly = ended.code == Some(EXIT_LOST) && child.finished > 0;
        let how = format!("{} {}", self.name(), instead.unwrap_or(ended.words));
        if !child.ready {
            self.stillborn += 1;
            if self.stillborn >= ATTEMPTS {
                self.stillborn = 0;
                self.fail_waiting(&Failure::new(Code::Loader, format!("{how} before it was ready")));
            }
        }
        for (_, mut flight) in child.flights.into_iter().rev() {
            flight.deaths += u32::from(!orderly);
            flight.cancel_sent = false;
            if flight.deaths < ATTEMPTS {
                flight.job.watch.loaded.store(0, Ordering::Relaxed);
                self.waiting.push_front(flight);
            } else {
                let message = format!("{how} while it loaded this file, and so did the one before it");
                end(flight, Err(Failure::new(Code::Loader, message)));
            }
        }
    }

    /// The child says that it cannot work: nor could another.
    fn give_up(&mut self, failure: Failure) {
        if let Some(mut child) = self.child.take() {
            self.shared.pid.store(0, Ordering::Relaxed);
            child.process.dismiss();
            self.leaving.push(child.process);
            for flight in child.flights.into_values() {
                self.waiting.push_back(flight);
            }
        }
        self.fail_waiting(&failure);
    }

    fn fail_waiting(&mut self, failure: &Failure) {
        for flight in std::mem::take(&mut self.waiting) {
            end(flight, Err(failure.clone()));
        }
    }

    fn cancel(&mut self) {
        let cancelled = |flight: &Flight| flight.job.watch.cancelled.load(Ordering::Relaxed);
        if self.waiting.iter().any(cancelled) {
            for flight in std::mem::take(&mut self.waiting) {
                if cancelled(&flight) {
                    end(flight, Err(Failure::new(Code::Stopping, "the load was cancelled")));
                } else {
                    self.waiting.push_back(flight);
                }
            }
        }
        if let Some(child) = &mut self.child {
            for (id, flight) in child.flights.iter_mut().filter(|(_, f)| !f.cancel_sent && cancelled(f)) {
                // A full socket: the next tick says it.
                flight.cancel_sent = child.process.send(loader_kind::CANCEL, &LoadId { id: *id }, &[]).is_ok();
            }
        }
    }

    fn check_silence(&mut self) {
        let Some(child) = &mut self.child else { return };
        let limit = match (child.ready, child.flights.is_empty()) {
            (false, _) => self.settings.start,
            (true, false) => self.settings.silence,
            (true, true) => return,
        };
        if child.heard.elapsed() > limit {
            child.process.kill();
            let what = if child.ready { "made no progress" } else { "was not ready" };
            self.bury(Some(format!("{what} for {} s and was killed", limit.as_secs_f32())));
        }
    }

    /// Gives waiting jobs to the child, and starts one where there is none.
    fn hand_out(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        // A child that died before it was ready may be the last that is tried.
        if self.child.is_none() && self.dying.iter().all(|(child, _)| child.ready) {
            match Process::start(&self.info, &self.settings) {
                Ok(process) => {
                    self.shared.pid.store(process.pid(), Ordering::Relaxed);
                    let (heard, flights) = (Instant::now(), BTreeMap::new());
                    self.child = Some(Child { process, ready: false, heard, flights, finished: 0 });
                }
                Err(failure) => return self.fail_waiting(&failure),
            }
        }
        let Some(child) = &mut self.child else { return };
        while child.ready && child.flights.len() < WINDOW {
            let Some(flight) = self.waiting.pop_front() else { return };
            let job = &flight.job;
            let message = LoadJob {
                id: self.next,
                allocation_size: job.allocation.size(),
                lead: job.lead,
                offset: job.offset,
                length: job.length,
            };
            let beside = [job.file.as_fd(), job.allocation.descriptor()];
            match child.process.send(loader_kind::LOAD, &message, &beside) {
                Ok(()) => {}
                // Full, or too many descriptors on their way: a tick later there is room. Dead: that is noticed at once.
                Err(
                    Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS | Errno::PIPE | Errno::CONNRESET,
                ) => {
                    self.waiting.push_front(flight);
                    return;
                }
                Err(e) => {
                    let what = format!("cannot hand the load to the loader for {}", self.info.label);
                    end(flight, Err(Failure { code: Code::Loader, ..Failure::system(what, e) }));
                    continue;
                }
            }
            if child.flights.is_empty() {
                child.heard = Instant::now();
            }
            child.flights.insert(self.next, flight);
            self.next += 1;
        }
    }

    /// Lets a child go that has nothing to do, and has had nothing for a while or is to stop.
    fn let_go(&mut self, stop: bool) {
        if !self.waiting.is_empty() {
            return;
        }
        if let Some(child) = &self.child {
            let due =
                child.flights.is_empty() && (stop || (child.ready && child.heard.elapsed() >= self.settings.idle));
            if !due {
                return;
            }
        }
        if let Some(mut child) = self.child.take() {
            self.shared.pid.store(0, Ordering::Relaxed);
            child.process.dismiss();
            self.leaving.push(child.process);
        }
        self.shared.inbox.lock().stop = false;
    }

    /// The loader is dropped: the child dies, then every job ends.
    fn close(&mut self) {
        let failure = Failure::new(Code::Stopping, format!("{} was stopped", self.name()));
        let child = self.child.take().into_iter();
        for child in child.chain(std::mem::take(&mut self.dying).into_iter().map(|(child, _)| child)) {
            // Nobody touches the allocations any more when it is collected.
            drop(child.process);
            for flight in child.flights.into_values() {
                end(flight, Err(failure.clone()));
            }
        }
        self.shared.pid.store(0, Ordering::Relaxed);
        self.fail_waiting(&failure);
        self.leaving.clear();
    }
}

impl Drop for Minder {
    fn drop(&mut self) {
        // Also where this thread panicked: nobody waits for ever.
        self.shared.inbox.lock().close = true;
        let rest = std::mem::take(&mut self.shared.inbox.lock().jobs);
        self.waiting.extend(rest.into_iter().map(|(job, done)| Flight { job, done, deaths: 0, cancel_sent: false }));
        self.close();
    }
}

/// Says how a job went. What the caller does then is not this thread's risk.
fn end(flight: Flight, result: Result<Loaded>) {
    let Flight { job, done, .. } = flight;
    if result.is_ok() {
        job.watch.loaded.store(job.length, Ordering::Relaxed);
    }
    let path = job.file.path.clone();
    let result = result.map_err(|f| f.within(path.display()));
    // The job keeps the allocation: who is told that the load is over may count on being the last to have it.
    drop(job);
    if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
        tracing::error!(file = %path.display(), "a panic in what follows a load");
    }
}

fn outcome(done: &LoadDone, text: String) -> Result<Loaded> {
    if done.code == 0 {
        let duration = Duration::from_nanos(done.nanoseconds);
        return Ok(Loaded { buffered: done.buffered, direct: done.direct, gds: done.gds, duration });
    }
    let code = Code::from_number(done.code).unwrap_or(Code::Loader);
    let errno = if done.errno > 0 { done.errno } else { usual_errno(code) };
    Err(Failure { code, errno, message: text })
}
