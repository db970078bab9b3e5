//! The thread that minds one device's loader: what is waiting, what the child works on, and whether the child lives. It
//! owns all of that, so nothing here is locked; it must never wait for one job while another could go on.

use super::child::EXIT_LOST;
use super::packet::{self, Packet};
use super::parent::{Settings, Shared};
use super::process::{Gone, Process};
use super::{Done, Ended, Job, Loaded, Report};
use crate::device::Info;
use crate::failure::{Failure, Result, usual_errno};
use crate::protocol::{
    Code, ErrorReply, FallbackDone, LOAD_PARTS, LoadDone, LoadId, LoadJob, LoadPart, LoadProgress, LoaderReady, Note,
    PROTOCOL_VERSION, PartDone, RouteDone, SlabId, Wire, loader_kind,
};
use crate::transfer::gds::route::OPENING;
use crate::transfer::report::Work;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How late a cancellation or a deadline is noticed.
const TICK: Duration = Duration::from_millis(50);
/// How late the end of a dying child is noticed.
const DYING: Duration = Duration::from_millis(2);
/// Files that a child has at a time, at most: enough batches that readers never wait for the next while the daemon makes
/// something of the last. Each takes a descriptor on its way, of which the system lets a process have as many as files.
const WINDOW: usize = 16 * LOAD_PARTS;
/// And not more than this part of the descriptors that a process may have.
const SHARE_OF_DESCRIPTORS: usize = 4;
/// What follows a job of more files than that (15 us a file, measured) is not worth this thread's time.
const FEW: usize = 8;
/// A job is tried so often: the second time on a new child.
const ATTEMPTS: u32 = 2;

/// A job that is not over.
struct Flight {
    job: Job,
    done: Done,
    /// Children that have died with it.
    deaths: u32,
    /// By part.
    cancel_sent: Vec<bool>,
}

impl Flight {
    fn new(job: Job, done: Done) -> Flight {
        let cancel_sent = vec![false; job.parts.len()];
        Flight { job, done, deaths: 0, cancel_sent }
    }

    fn is_for(&self, slab: u64) -> bool {
        self.job.slab.as_ref().is_some_and(|s| s.number == slab)
    }
}

struct Child {
    process: Process,
    ready: bool,
    /// When it last said anything, or was given work while it had none.
    heard: Instant,
    /// By the number of the first part; the others' follow it.
    flights: BTreeMap<u64, Flight>,
    /// Loads that it has brought to an end.
    finished: u64,
    /// It has begun to use cuFile: if it dies, that may be why.
    uses_cufile: bool,
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
    /// Slabs to be forgotten when nothing for them is under way any more.
    forgetting: Vec<u64>,
    next: u64,
    window: usize,
    /// Children in a row that died before they were ready.
    stillborn: u32,
    /// A child died that used cuFile: the next ones do not.
    distrusts_cufile: bool,
    /// When it was last looked who has cancelled what: not for each packet, for there may be thousands of files.
    looked: Instant,
}

impl Minder {
    pub(super) fn new(info: Info, settings: Settings, shared: Arc<Shared>) -> Minder {
        let (waiting, dying, leaving) = (VecDeque::new(), Vec::new(), Vec::new());
        let (child, forgetting) = (None, Vec::new());
        let descriptors = getrlimit(Resource::Nofile).maximum.map_or(usize::MAX, |most| most as usize);
        let window = (descriptors / SHARE_OF_DESCRIPTORS).clamp(LOAD_PARTS, WINDOW);
        Minder {
            info,
            settings,
            shared,
            waiting,
            child,
            dying,
            leaving,
            forgetting,
            next: 1,
            window,
            stillborn: 0,
            distrusts_cufile: false,
            looked: Instant::now(),
        }
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
            if self.looked.elapsed() >= TICK {
                self.cancel();
                self.looked = Instant::now();
            }
            self.forget();
            self.check_silence();
            self.inherit();
            self.hand_out();
            self.let_go(stop);
            self.leaving.retain_mut(|process| process.ended().is_none());
        }
    }

    /// Until somebody wants something, or something could be due.
    fn sleep(&self) {
        let busy = !self.waiting.is_empty() || !self.leaving.is_empty() || !self.forgetting.is_empty();
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
        self.waiting.extend(inbox.jobs.drain(..).map(|(job, done)| Flight::new(job, done)));
        self.forgetting.append(&mut inbox.forget);
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
                    && let Some((first, flight)) = child.flights.range(..=id).next_back()
                    && let Some(part) = flight.job.parts.get((id - first) as usize)
                {
                    part.watch.loaded.store(loaded, Ordering::Relaxed);
                }
            }
            loader_kind::DONE => {
                if let Some((first, ended)) = ended(&packet)
                    && let Some(flight) = child.flights.remove(&first)
                {
                    child.finished += 1;
                    if flight.job.parts.len() > FEW { end_elsewhere(flight, ended) } else { end(flight, ended) }
                }
            }
            loader_kind::NOTE => {
                if let Some((_, text)) = packet.body::<Note>() {
                    child.uses_cufile |= text.starts_with(OPENING);
                    tracing::info!(device = self.info.label, "{text}");
                    *self.shared.note.lock() = Some(text);
                }
            }
            loader_kind::FORGOTTEN => {
                if let Some((SlabId { slab }, _)) = packet.body() {
                    child.process.slabs.remove(&slab);
                }
            }
            _ => {}
        }
    }

    fn name(&self) -> String {
        format!("the loader for {}", self.info.label)
    }

    /// The child is given nothing more, and with it go its slabs.
    fn part(&mut self) -> Option<Child> {
        let child = self.child.take()?;
        self.shared.pid.store(0, Ordering::Relaxed);
        self.shared.slabs.lock().retain(|slab| !child.process.slabs.contains_key(slab));
        Some(child)
    }

    /// The child is dead or as good as.
    fn bury(&mut self, instead: Option<String>) {
        if let Some(mut child) = self.part() {
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

    fn settle(&mut self, child: Child, ended: Gone, instead: Option<String>) {
        // It left by itself because the device was lost: what it had begun has said so, the rest it never touched. That
        // holds only if something had begun, or the next child would be lost in the same way for ever.
        let orderly = ended.code == Some(EXIT_LOST) && child.finished > 0;
        let how = format!("{} {}", self.name(), instead.unwrap_or(ended.words));
        if child.uses_cufile && !orderly && !self.settings.insists_on_cufile() && !self.distrusts_cufile {
            self.distrusts_cufile = true;
            let text = format!("{how} while it used cuFile, which is not tried again; `warpfs doctor` may say more");
            tracing::warn!("{text}");
            *self.shared.note.lock() = Some(text);
        }
        if !child.ready {
            self.stillborn += 1;
            if self.stillborn >= ATTEMPTS {
                self.stillborn = 0;
                self.fail_waiting(&Failure::new(Code::Loader, format!("{how} before it was ready")));
            }
        }
        for (_, mut flight) in child.flights.into_iter().rev() {
            flight.deaths += u32::from(!orderly);
            flight.cancel_sent.fill(false);
            if flight.job.slab.is_some() {
                let ended = flight.job.failed(&Failure::new(Code::Loader, format!("{how} while it loaded this file")));
                end(flight, ended);
            } else if flight.deaths < ATTEMPTS {
                flight.job.parts.iter().for_each(|part| part.watch.loaded.store(0, Ordering::Relaxed));
                self.waiting.push_front(flight);
            } else {
                let message = format!("{how} while it loaded this file, and so did the one before it");
                let ended = flight.job.failed(&Failure::new(Code::Loader, message));
                end(flight, ended);
            }
        }
    }

    /// The child says that it cannot work: nor could another.
    fn give_up(&mut self, failure: Failure) {
        if let Some(mut child) = self.part() {
            child.process.dismiss();
            self.leaving.push(child.process);
            self.waiting.extend(child.flights.into_values());
        }
        self.fail_waiting(&failure);
    }

    fn fail_waiting(&mut self, failure: &Failure) {
        for flight in std::mem::take(&mut self.waiting) {
            let ended = flight.job.failed(failure);
            end(flight, ended);
        }
    }

    fn cancel(&mut self) {
        let cancelled = |flight: &Flight, part: usize| flight.job.parts[part].watch.cancelled.load(Ordering::Relaxed);
        // What waits is given up when nobody wants any part of it; until then it costs nothing.
        let unwanted = |flight: &Flight| (0..flight.job.parts.len()).all(|part| cancelled(flight, part));
        if self.waiting.iter().any(unwanted) {
            for flight in std::mem::take(&mut self.waiting) {
                if unwanted(&flight) {
                    let ended = flight.job.failed(&Failure::new(Code::Stopping, "the load was cancelled"));
                    end(flight, ended);
                } else {
                    self.waiting.push_back(flight);
                }
            }
        }
        let Some(child) = &mut self.child else { return };
        for (first, flight) in &mut child.flights {
            for part in 0..flight.cancel_sent.len() {
                if !flight.cancel_sent[part] && cancelled(flight, part) {
                    let id = LoadId { id: first + part as u64 };
                    // A full socket: the next tick says it.
                    flight.cancel_sent[part] = child.process.send(loader_kind::CANCEL, &id.encode(), &[]).is_ok();
                }
            }
        }
    }

    /// Has the child give up slabs for which nothing is under way any more.
    fn forget(&mut self) {
        for slab in std::mem::take(&mut self.forgetting) {
            let flying = self.child.iter().flat_map(|child| child.flights.values());
            if flying.chain(&self.waiting).any(|flight| flight.is_for(slab)) {
                self.forgetting.push(slab);
                continue;
            }
            self.shared.slabs.lock().remove(&slab);
            if let Some(child) = &self.child
                && child.process.slabs.contains_key(&slab)
                && matches!(
                    child.process.send(loader_kind::FORGET, &SlabId { slab }.encode(), &[]),
                    Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM)
                )
            {
                self.forgetting.push(slab);
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
            let more = if self.distrusts_cufile { &["--route", "posix"][..] } else { &[] };
            match Process::start(&self.info, &self.settings, more) {
                Ok(process) => {
                    self.shared.pid.store(process.pid(), Ordering::Relaxed);
                    let (heard, flights) = (Instant::now(), BTreeMap::new());
                    self.child = Some(Child { process, ready: false, heard, flights, finished: 0, uses_cufile: false });
                }
                Err(failure) => return self.fail_waiting(&failure),
            }
        }
        let Some(child) = &mut self.child else { return };
        while child.ready {
            let files: usize = child.flights.values().map(|flight| flight.job.parts.len()).sum();
            let fits = |next: &&Flight| files == 0 || files + next.job.parts.len() <= self.window;
            if self.waiting.front().filter(fits).is_none() {
                return;
            }
            let Some(flight) = self.waiting.pop_front() else { return };
            if let Some(slab) = &flight.job.slab
                && !self.shared.slabs.lock().contains(&slab.number)
            {
                let failure = Failure::new(Code::Loader, "the loader that had the memory for it has left");
                let ended = flight.job.failed(&failure);
                end(flight, ended);
                continue;
            }
            let (words, descriptors) = message(&flight.job, self.next);
            match child.process.send(loader_kind::LOAD, &words, &descriptors) {
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
                    let ended = flight.job.failed(&Failure { code: Code::Loader, ..Failure::system(what, e) });
                    end(flight, ended);
                    continue;
                }
            }
            if child.flights.is_empty() {
                child.heard = Instant::now();
            }
            if let Some(slab) = &flight.job.slab {
                child.process.slabs.entry(slab.number).or_insert_with(|| slab.clone());
            }
            let parts = flight.job.parts.len() as u64;
            child.flights.insert(self.next, flight);
            self.next += parts;
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
        if let Some(mut child) = self.part() {
            child.process.dismiss();
            self.leaving.push(child.process);
        }
        self.shared.inbox.lock().stop = false;
    }

    /// The loader is dropped: the child dies, then every job ends.
    fn close(&mut self) {
        let failure = Failure::new(Code::Stopping, format!("{} was stopped", self.name()));
        let child = self.part().into_iter();
        for child in child.chain(std::mem::take(&mut self.dying).into_iter().map(|(child, _)| child)) {
            // Nobody touches the allocations any more when it is collected.
            drop(child.process);
            for flight in child.flights.into_values() {
                let ended = flight.job.failed(&failure);
                end(flight, ended);
            }
        }
        self.fail_waiting(&failure);
        self.leaving.clear();
    }
}

impl Drop for Minder {
    fn drop(&mut self) {
        // Also where this thread panicked: nobody waits for ever.
        self.shared.inbox.lock().close = true;
        let rest = std::mem::take(&mut self.shared.inbox.lock().jobs);
        self.waiting.extend(rest.into_iter().map(|(job, done)| Flight::new(job, done)));
        self.close();
    }
}

/// Says how a job went. What the caller does then is not this thread's risk.
fn end(flight: Flight, ended: Ended) {
    let Flight { job, done, .. } = flight;
    let Ended { parts, report } = ended;
    let told = job.parts.iter().zip(parts).map(|(part, result)| {
        if result.is_ok() {
            part.watch.loaded.store(part.length, Ordering::Relaxed);
        }
        result.map_err(|failure| failure.within(part.file.path.display()))
    });
    let parts = told.collect();
    // The job keeps the allocation: who is told that the load is over may count on being the last to have it.
    drop(job);
    if catch_unwind(AssertUnwindSafe(|| done(Ended { parts, report }))).is_err() {
        tracing::error!("a panic in what follows a load");
    }
}

/// The same on a thread of its own, if there is one to be had.
fn end_elsewhere(flight: Flight, ended: Ended) {
    let both = Arc::new(Mutex::new(Some((flight, ended))));
    let theirs = Arc::clone(&both);
    let finish = move || {
        if let Some((flight, ended)) = theirs.lock().take() {
            end(flight, ended);
        }
    };
    if std::thread::Builder::new().name("published".into()).spawn(finish).is_err()
        && let Some((flight, ended)) = both.lock().take()
    {
        end(flight, ended);
    }
}

/// The words of a job, whose first part has the number `first`, and the descriptors that go with them.
fn message(job: &Job, first: u64) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
    let (memory, coming) = job.memory.descriptor();
    let head = LoadJob {
        allocation_size: job.memory.size(),
        slab: job.slab.as_ref().map_or(0, |slab| slab.number),
        parts: job.parts.len() as u32,
        coming: coming.into(),
    };
    let mut message = head.encode();
    for (id, part) in (first..).zip(&job.parts) {
        let (offset, length, place) = (part.offset, part.length, part.place);
        message.extend(LoadPart { id, offset, length, place }.encode());
    }
    (message, std::iter::once(memory).chain(job.parts.iter().map(|part| part.file.as_fd())).collect())
}

/// What the child says of a load's end, with the number of its first part.
fn ended(packet: &Packet) -> Option<(u64, Ended)> {
    let mut rest = packet.rest();
    let LoadDone { routes, fallbacks, parts, .. } = packet::take(&mut rest)?;
    let mut report = Report::default();
    for number in 0..routes as usize {
        let RouteDone { operations, bytes, nanoseconds, errors } = packet::take(&mut rest)?;
        *report.routes.get_mut(number)? = Work { operations, bytes, busy: Duration::from_nanos(nanoseconds), errors };
    }
    for number in 0..fallbacks as usize {
        let FallbackDone { count } = packet::take(&mut rest)?;
        *report.fallbacks.get_mut(number)? = count;
    }
    let parts = (0..parts).map(|_| packet::take(&mut rest)).collect::<Option<Vec<PartDone>>>()?;
    let first = parts.first()?.id;
    let mut outcome = |done: PartDone| {
        let text = rest.split_off(..usize::try_from(done.text).ok()?.min(rest.len()))?;
        if done.code == 0 {
            let duration = Duration::from_nanos(done.nanoseconds);
            return Some(Ok(Loaded { bytes: [done.buffered, done.direct, done.gds, done.cufile], duration }));
        }
        let code = Code::from_number(done.code).unwrap_or(Code::Loader);
        let errno = if done.errno > 0 { done.errno } else { usual_errno(code) };
        Some(Err(Failure { code, errno, message: String::from_utf8_lossy(text).into_owned() }))
    };
    let parts = parts.into_iter().map(&mut outcome).collect::<Option<Vec<Result<Loaded>>>>()?;
    Some((first, Ended { parts, report }))
}
