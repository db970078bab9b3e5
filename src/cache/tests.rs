//! The cache without FUSE, loader process or GPU: memory from memfds, and a loader that does what the test says.

use super::*;
use crate::device::{Allocation, Info, Memory};
use crate::loader::{Done, Ended, Job, Loaded, Report};
use crate::protocol::{DeviceKind, HOST_UUID};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;

mod slabs;

const PAGE: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(20);

/// Memory whose allocations are counted.
struct Counted {
    info: Info,
    live: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
    refuse: AtomicUsize,
    /// By inode.
    sealed: Mutex<HashSet<u64>>,
}

struct Piece(u64, Arc<AtomicU64>);

impl Drop for Piece {
    fn drop(&mut self) {
        self.1.fetch_sub(self.0, Ordering::SeqCst);
    }
}

impl Memory for Counted {
    fn info(&self) -> &Info {
        &self.info
    }

    fn free(&self) -> Option<u64> {
        None
    }

    fn allocate(&self, size: u64) -> Result<Allocation> {
        if self.refuse.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
            return Err(Failure::new(Code::OutOfMemory, "the device is full"));
        }
        let live = self.live.fetch_add(size, Ordering::SeqCst) + size;
        self.most.fetch_max(live, Ordering::SeqCst);
        let memfd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        Ok(Allocation::new(memfd, size, Some(Box::new(Piece(size, Arc::clone(&self.live))))))
    }

    fn seal(&self, _allocation: &Allocation) -> Result<()> {
        Ok(())
    }

    /// Once, as the kernel has it.
    fn seal_slab(&self, allocation: &Allocation) -> Result<()> {
        let inode = rustix::fs::fstat(allocation.descriptor()).expect("a memfd").st_ino;
        let first = self.sealed.lock().insert(inode);
        std::thread::sleep(Duration::from_millis(20));
        if first { Ok(()) } else { Err(Failure::system("sealed already", rustix::io::Errno::PERM)) }
    }
}

/// Finishes jobs at once, or keeps them until the test asks.
#[derive(Default)]
struct Puppet {
    manual: bool,
    waiting: Mutex<Vec<(Job, Done)>>,
    jobs: AtomicUsize,
}

impl Loader for Puppet {
    fn submit(&self, job: Job, done: Done) {
        self.jobs.fetch_add(1, Ordering::SeqCst);
        if self.manual {
            self.waiting.lock().push((job, done));
            return;
        }
        std::thread::spawn(move || {
            let whole = |part: &crate::loader::Part| Ok(Loaded { bytes: [part.length, 0, 0, 0], ..Loaded::default() });
            let parts = job.parts.iter().map(whole).collect();
            drop(job);
            done(Ended { parts, report: Report::default() });
        });
    }

    fn open(&self, _slab: u64) {}

    fn has(&self, _slab: u64) -> bool {
        true
    }

    fn forget(&self, _slab: u64) {}

    fn stop(&self) {}
}

impl Puppet {
    fn wait_for_a_job(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.waiting.lock().is_empty() {
            assert!(Instant::now() < deadline, "no job came");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends the oldest job.
    fn end(&self, result: Result<Loaded>) {
        self.wait_for_a_job();
        let (job, done) = self.waiting.lock().remove(0);
        let parts = job.parts.iter().map(|_| result.clone()).collect();
        drop(job);
        done(Ended { parts, report: Report::default() });
    }
}

struct Bench {
    cache: Cache,
    loader: Arc<Puppet>,
    memory: Arc<Counted>,
    folder: tempfile::TempDir,
}

fn bench(pages: u64, manual: bool) -> Bench {
    bench_on(DeviceKind::Host, pages, manual)
}

fn bench_on(kind: DeviceKind, pages: u64, manual: bool) -> Bench {
    let info = Info {
        uuid: HOST_UUID,
        kind,
        ordinal: 0,
        label: "host".into(),
        name: "test".into(),
        total: 1 << 40,
        granularity: PAGE,
    };
    let memory = Arc::new(Counted {
        info,
        live: Arc::default(),
        most: Arc::default(),
        refuse: AtomicUsize::new(0),
        sealed: Mutex::default(),
    });
    let loader = Arc::new(Puppet { manual, ..Puppet::default() });
    let setup = Setup {
        memory: memory.clone(),
        loader: loader.clone(),
        limit: pages * PAGE,
        pieces: 1000,
        transfer: Default::default(),
    };
    let cache = Cache::start(vec![setup]).expect("threads");
    Bench { cache, loader, memory, folder: tempfile::tempdir().expect("a folder") }
}

impl Bench {
    fn file(&self, name: &str, bytes: u64) -> OpenFile {
        let path = self.folder.path().join(name);
        let mut file = File::create(&path).expect("created");
        file.write_all(&vec![7; bytes as usize]).expect("written");
        OpenFile::new(OwnedFd::from(File::open(&path).expect("opened")), path).expect("regular")
    }

    fn ask(&self, file: &OpenFile, session: Option<SessionId>, wait: Duration) -> mpsc::Receiver<Result<Outcome>> {
        let (send, receive) = mpsc::channel();
        let (file, caller) = (file.clone(), Caller::this());
        let ask = Ask { file, device: NONE, offset: 0, length: 0, caller, session, wait };
        self.cache.materialize(ask, Box::new(move |answer| send.send(answer).unwrap_or_default()));
        receive
    }

    fn get(&self, file: &OpenFile, session: Option<SessionId>) -> Result<Placement> {
        match self.ask(file, session, PATIENCE).recv_timeout(PATIENCE * 2).expect("answered")? {
            Outcome::Resident(placement) => Ok(placement),
            Outcome::Loading { .. } => panic!("still loading"),
        }
    }

    fn evict(&self, file: &OpenFile) -> Evicted {
        let id = file.version().expect("there").file;
        self.cache.evict(id, NONE, Caller::this().domain).expect("a device")
    }

    /// Ends every job until this is answered.
    fn end_all_while(&self, answer: mpsc::Receiver<Result<Outcome>>) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for (job, done) in std::mem::take(&mut *self.loader.waiting.lock()) {
                let parts = job.parts.iter().map(|_| Ok(Loaded::default())).collect();
                drop(job);
                done(Ended { parts, report: Report::default() });
            }
            match answer.recv_timeout(Duration::from_millis(2)) {
                Ok(answer) => {
                    answer.expect("loaded");
                    return;
                }
                Err(_) => assert!(Instant::now() < deadline, "no answer came"),
            }
        }
    }

    fn state(&self, file: &OpenFile) -> State {
        self.cache.standing(file, NONE, Caller::this().domain).expect("known").state
    }

    fn used(&self) -> u64 {
        self.cache.shelves[0].budget.used()
    }

    fn counter(&self, counter: crate::metrics::Counter) -> u64 {
        self.cache.shelves[0].counters.get(counter)
    }
}

#[test]
fn a_file_is_loaded_once_and_then_hit() {
    let bench = bench(10, false);
    let file = bench.file("f", 5000);
    assert_eq!(bench.state(&file), State::Absent);
    let first = bench.get(&file, None).expect("loaded");
    assert_eq!((first.length, first.allocation_size, first.offset), (5000, 2 * PAGE, 0));
    assert_eq!(bench.get(&file, None), Ok(first));
    assert_eq!(bench.state(&file), State::Resident);
    assert_eq!(bench.loader.jobs.load(Ordering::SeqCst), 1);
    assert_eq!(bench.counter(crate::metrics::Counter::Hits), 1);
    assert_eq!(bench.used(), 2 * PAGE);
}

#[test]
fn concurrent_requests_join_one_load() {
    let bench = bench(10, true);
    let file = bench.file("f", 100);
    let answers: Vec<_> = (0..50).map(|_| bench.ask(&file, None, PATIENCE)).collect();
    assert_eq!(bench.state(&file), State::Loading);
    bench.loader.end(Ok(Loaded::default()));
    for answer in answers {
        assert!(matches!(answer.recv_timeout(PATIENCE), Ok(Ok(Outcome::Resident(_)))));
    }
    assert_eq!(bench.loader.jobs.load(Ordering::SeqCst), 1);
}

#[test]
fn who_cannot_wait_hears_that_it_is_loading() {
    let bench = bench(10, true);
    let file = bench.file("f", 100);
    for wait in [0, 30] {
        let answer = bench.ask(&file, None, Duration::from_millis(wait)).recv_timeout(PATIENCE);
        assert_eq!(answer, Ok(Ok(Outcome::Loading { loaded: 0, total: 100 })));
    }
    bench.loader.end(Ok(Loaded::default()));
    bench.get(&file, None).expect("resident after all");
}

#[test]
fn an_empty_file_is_resident_at_once_without_memory() {
    let bench = bench(1, true);
    let placement = bench.get(&bench.file("empty", 0), None).expect("done");
    assert_eq!((placement.allocation, placement.length), (0, 0));
    assert_eq!(bench.used(), 0);
}

#[test]
fn the_least_recently_used_makes_room_and_the_budget_is_never_passed() {
    let bench = bench(3, false);
    let files: Vec<_> = (0..4).map(|i| bench.file(&format!("f{i}"), PAGE)).collect();
    for file in &files[..3] {
        bench.get(file, None).expect("fits");
    }
    bench.get(&files[0], None).expect("a hit");
    bench.get(&files[3], None).expect("evicts");
    let states: Vec<_> = files.iter().map(|file| bench.state(file)).collect();
    assert_eq!(states, [State::Resident, State::Absent, State::Resident, State::Resident]);
    assert_eq!(bench.memory.most.load(Ordering::SeqCst), 3 * PAGE);
}

#[test]
fn what_is_held_is_not_evicted_and_the_refusal_names_the_holder() {
    let bench = bench(2, false);
    let (session, _) = bench.cache.open_session(Caller::this()).expect("a session");
    let (held, other, large) = (bench.file("held", PAGE), bench.file("other", PAGE), bench.file("large", 2 * PAGE));
    let placement = bench.get(&held, Some(session)).expect("fits");
    bench.get(&other, None).expect("fits");
    let failure = bench.get(&large, None).expect_err("no room");
    assert_eq!(failure.code, Code::OutOfMemory);
    assert!(failure.message.contains(&format!("process {}", std::process::id())), "{failure}");
    assert_eq!(bench.state(&held), State::Resident);
    // Control: let go, it fits.
    bench.cache.release(session, placement.allocation, 1).expect("given back");
    bench.get(&large, None).expect("fits now");
    assert_eq!(bench.used(), 2 * PAGE);
}

#[test]
fn evicting_what_is_held_frees_it_with_the_last_hold() {
    let bench = bench(2, false);
    let (session, _) = bench.cache.open_session(Caller::this()).expect("a session");
    let file = bench.file("f", PAGE);
    let first = bench.get(&file, Some(session)).expect("fits");
    let evicted = bench.cache.evict(file.version().expect("stat").file, NONE, Caller::this().domain);
    assert_eq!(evicted, Ok(Evicted { freed: 0, held: PAGE }));
    assert_eq!((bench.state(&file), bench.used()), (State::Absent, PAGE));
    let second = bench.get(&file, Some(session)).expect("a new copy");
    assert_ne!((first.allocation, first.generation), (second.allocation, second.generation));
    assert_eq!(bench.used(), 2 * PAGE);
    bench.cache.close_session(session);
    assert_eq!(bench.used(), PAGE, "the client's death frees what was evicted, and keeps what is current");
}

#[test]
fn grants_are_counted_so_that_a_release_cannot_cross_a_new_one() {
    let bench = bench(2, false);
    let (session, _) = bench.cache.open_session(Caller::this()).expect("a session");
    let file = bench.file("f", PAGE);
    let allocation = bench.get(&file, Some(session)).expect("fits").allocation;
    bench.get(&file, Some(session)).expect("a second grant");
    bench.cache.release(session, allocation, 1).expect("one back");
    bench.cache.fetch(session, allocation).expect("still held");
    assert_eq!(bench.cache.release(session, allocation, 2).expect_err("too many").code, Code::BadRequest);
    bench.cache.release(session, allocation, 1).expect("the last");
    assert_eq!(bench.cache.fetch(session, allocation).err().map(|f| f.code), Some(Code::NotHeld));
}

#[test]
fn a_changed_file_is_loaded_anew_and_holders_keep_the_old_copy() {
    let bench = bench(4, false);
    let (session, _) = bench.cache.open_session(Caller::this()).expect("a session");
    let file = bench.file("f", PAGE);
    let old = bench.get(&file, Some(session)).expect("loaded");
    std::fs::write(&file.path, vec![8; 100]).expect("rewritten in place");
    let new = bench.get(&file, None).expect("loaded again");
    assert_ne!(old.generation, new.generation);
    assert_eq!(new.length, 100);
    bench.cache.fetch(session, old.allocation).expect("the old bytes are still held");
    assert_eq!(bench.used(), 2 * PAGE);
}

#[test]
fn a_file_that_changes_while_it_is_loaded_is_not_published() {
    let bench = bench(4, true);
    let file = bench.file("f", PAGE);
    let answer = bench.ask(&file, None, PATIENCE);
    for round in 0..dispatch_attempts() {
        bench.loader.wait_for_a_job();
        std::fs::write(&file.path, vec![8; 100 + round]).expect("rewritten");
        bench.loader.end(Ok(Loaded::default()));
    }
    let failure = answer.recv_timeout(PATIENCE).expect("answered").expect_err("never stable");
    assert_eq!((failure.code, failure.errno), (Code::Changing, libc::EAGAIN));
    assert_eq!((bench.state(&file), bench.used()), (State::Absent, 0));
    // Control: undisturbed, the next try works.
    let answer = bench.ask(&file, None, PATIENCE);
    bench.loader.end(Ok(Loaded::default()));
    assert!(matches!(answer.recv_timeout(PATIENCE), Ok(Ok(Outcome::Resident(_)))));
}

fn dispatch_attempts() -> usize {
    super::dispatch::ATTEMPTS as usize
}

#[test]
fn opening_for_writing_through_the_mount_makes_a_load_start_over() {
    let bench = bench(4, true);
    let file = bench.file("f", PAGE);
    let answer = bench.ask(&file, None, PATIENCE);
    bench.loader.wait_for_a_job();
    bench.cache.changed(file.version().expect("stat").file);
    bench.loader.end(Ok(Loaded::default()));
    assert!(answer.recv_timeout(Duration::from_millis(50)).is_err(), "not published");
    bench.loader.end(Ok(Loaded::default()));
    assert!(matches!(answer.recv_timeout(PATIENCE), Ok(Ok(Outcome::Resident(_)))));
}

#[test]
fn a_request_after_a_change_does_not_get_the_load_before_it() {
    let bench = bench(4, true);
    let file = bench.file("f", PAGE);
    let early = bench.ask(&file, None, PATIENCE);
    bench.loader.wait_for_a_job();
    std::fs::write(&file.path, vec![8; 100]).expect("rewritten");
    let late = bench.ask(&file, None, PATIENCE);
    // Restored before the loader is done, with all that a program can restore: the version is still another one.
    std::fs::write(&file.path, vec![7; PAGE as usize]).expect("rewritten");
    bench.loader.end(Ok(Loaded::default()));
    bench.loader.end(Ok(Loaded::default()));
    for answer in [early, late] {
        let Ok(Ok(Outcome::Resident(placement))) = answer.recv_timeout(PATIENCE) else { panic!("not resident") };
        assert_eq!(placement.length, PAGE);
    }
    assert_eq!(bench.counter(crate::metrics::Counter::LoadRetries), 1);
}

#[test]
fn an_old_timer_does_not_end_a_new_lease() {
    let bench = bench(4, false);
    let (session, _) = bench.cache.open_session(Caller::this()).expect("a session");
    let file = bench.file("f", PAGE);
    let allocation = bench.get(&file, Some(session)).expect("granted").allocation;
    bench.cache.release(session, allocation, 1).expect("given back");
    bench.get(&file, Some(session)).expect("granted again");
    assert!(!bench.cache.sessions.lapse(session, allocation, 1), "the first lease's timer");
    bench.cache.fetch(session, allocation).expect("held");
    bench.cache.release(session, allocation, 1).expect("given back");
    bench.get(&file, Some(session)).expect("granted a third time");
    assert!(bench.cache.sessions.lapse(session, allocation, 3), "the control: its own timer");
}

#[test]
fn a_failed_load_leaves_nothing_and_is_remembered() {
    let bench = bench(4, true);
    let file = bench.file("f", PAGE);
    let answer = bench.ask(&file, None, PATIENCE);
    bench.loader.end(Err(Failure::new(Code::Io, "a bad sector")));
    assert_eq!(answer.recv_timeout(PATIENCE).expect("answered").expect_err("failed").code, Code::Io);
    let standing = bench.cache.standing(&file, NONE, Caller::this().domain).expect("known");
    assert_eq!((standing.state, standing.failure.map(|f| f.code)), (State::Absent, Some(Code::Io)));
    assert_eq!((bench.used(), bench.memory.live.load(Ordering::SeqCst)), (0, 0));
}

#[test]
fn a_full_device_makes_the_cache_give_copies_up() {
    let bench = bench(4, false);
    let (old, new) = (bench.file("old", PAGE), bench.file("new", PAGE));
    bench.get(&old, None).expect("fits");
    bench.memory.refuse.store(1, Ordering::SeqCst);
    bench.get(&new, None).expect("after an eviction");
    assert_eq!(bench.state(&old), State::Absent);
    bench.memory.refuse.store(1000, Ordering::SeqCst);
    let failure = bench.get(&old, None).expect_err("the device stays full");
    assert_eq!(failure.code, Code::OutOfMemory);
    assert_eq!(bench.used(), 0, "it gave up what it had, and keeps nothing of the failure");
}

#[test]
fn waiting_for_a_full_device_asks_it_seldom() {
    // As seen: the reservation that every refusal gave back woke the one who waited, so that it asked without a pause.
    let bench = bench(4, true);
    let (first, second) = (bench.file("first", PAGE), bench.file("second", PAGE));
    let loading = bench.ask(&first, None, PATIENCE);
    bench.loader.wait_for_a_job();
    const REFUSALS: usize = 1000;
    bench.memory.refuse.store(REFUSALS, Ordering::SeqCst);
    let waiting = bench.ask(&second, None, PATIENCE);
    std::thread::sleep(Duration::from_millis(700));
    let asked = REFUSALS - bench.memory.refuse.load(Ordering::SeqCst);
    assert!((1..=20).contains(&asked), "asked {asked} times");
    // The control: it waits, and is answered when the load before it is done.
    assert!(waiting.try_recv().is_err());
    bench.memory.refuse.store(0, Ordering::SeqCst);
    bench.loader.end(Ok(Loaded::default()));
    bench.loader.end(Ok(Loaded::default()));
    for answer in [loading, waiting] {
        assert!(matches!(answer.recv_timeout(PATIENCE), Ok(Ok(Outcome::Resident(_)))));
    }
}

#[test]
fn a_file_larger_than_the_budget_is_refused_at_once() {
    let bench = bench(1, true);
    let failure = bench.get(&bench.file("large", PAGE + 1), None).expect_err("too large");
    assert_eq!((failure.code, failure.errno), (Code::TooLarge, libc::EFBIG));
}

#[test]
fn many_loads_pass_through_a_small_budget() {
    let bench = bench(4, false);
    let files: Vec<_> = (0..200).map(|i| bench.file(&format!("f{i}"), PAGE)).collect();
    let answers: Vec<_> = files.iter().map(|file| bench.ask(file, None, PATIENCE)).collect();
    for answer in answers {
        assert!(matches!(answer.recv_timeout(PATIENCE), Ok(Ok(Outcome::Resident(_)))));
    }
    assert!(bench.memory.most.load(Ordering::SeqCst) <= 4 * PAGE);
}

#[test]
fn other_users_neither_share_a_copy_nor_a_session() {
    let bench = bench(4, false);
    let file = bench.file("f", PAGE);
    bench.get(&file, None).expect("loaded");
    let stranger = Domain { uid: 4711, ..Caller::this().domain };
    assert_eq!(bench.cache.standing(&file, NONE, stranger).map(|s| s.state), Ok(State::Absent));
    let (session, secret) = bench.cache.open_session(Caller::this()).expect("a session");
    assert_eq!(bench.cache.session_of(&secret, Caller::this().domain), Ok(session));
    assert_eq!(bench.cache.session_of(&secret, stranger).expect_err("not theirs").code, Code::BadSession);
    bench.cache.close_session(session);
    assert!(bench.cache.session_of(&secret, Caller::this().domain).is_err());
}

#[test]
fn a_large_file_is_begun_before_its_memory_and_again_where_there_was_none() {
    let bench = bench(1 << 16, false);
    let path = bench.folder.path().join("large");
    File::create(&path).expect("created").set_len(65 << 20).expect("long");
    let file = OpenFile::new(OwnedFd::from(File::open(&path).expect("opened")), path).expect("regular");
    bench.memory.refuse.store(1, Ordering::SeqCst);
    bench.get(&file, None).expect("room is made");
    assert_eq!(bench.loader.jobs.load(Ordering::SeqCst), 2, "begun, and begun again");
    assert_eq!(bench.used(), bench.memory.live.load(Ordering::SeqCst));
    assert_eq!(bench.evict(&file).freed, 65 << 20);
    assert_eq!((bench.used(), bench.memory.live.load(Ordering::SeqCst)), (0, 0));
}
