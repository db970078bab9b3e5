//! The loader as a process: whole files arrive, and what goes wrong (a dead child, a lost device, a file that shrinks)
//! costs the loads that it touches and nothing else. CUDA is a test double here; a test that needs it runs again in a
//! process of its own, whose library path leads to the double.

#[path = "loader/destination.rs"]
mod destination;
#[path = "loader/direct.rs"]
mod direct;
#[path = "loader/gds.rs"]
mod gds;
#[path = "loader/leaving.rs"]
mod leaving;
#[path = "loader/lent.rs"]
mod lent;
#[path = "loader/slabs.rs"]
mod slabs;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use warpfs::device::{self, Access, Allocation, Memory};
use warpfs::failure::{Failure, Result};
use warpfs::loader::parent::{ChildLoader, Settings};
use warpfs::loader::{Destination, Job, Loaded, Loader, Part, Watch};
use warpfs::protocol::Code;
use warpfs::source::OpenFile;

/// Nothing here takes longer.
const DEADLINE: Duration = Duration::from_secs(60);

// ------------------------------------------------------------------------------------------------------------- the double

const INNER: &str = "WARPFS_TEST_INNER";

/// Runs `body` in a process of its own that finds the double of the CUDA driver, built with `flags`, and has `environment`.
fn with_double(name: &str, flags: &[&str], environment: &[(&str, &str)], body: fn()) {
    with_double_and(name, flags, environment, |_| {}, body);
}

/// The same; `more` puts something beside the double.
fn with_double_and(name: &str, flags: &[&str], environment: &[(&str, &str)], more: impl FnOnce(&Path), body: fn()) {
    if std::env::var(INNER).as_deref() == Ok(name) {
        return body();
    }
    let dir = tempfile::tempdir().expect("a directory");
    crate::harness::fake_driver(dir.path(), flags);
    more(dir.path());
    let output = dir.path().join("output");
    let file = std::fs::File::create(&output).expect("a file");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args([&format!("loader::{name}"), "--exact", "--nocapture", "--test-threads=1"]);
    command.env(INNER, name).env("LD_LIBRARY_PATH", dir.path()).env_remove("CUDA_VISIBLE_DEVICES");
    command.envs(environment.iter().copied());
    command.stdout(Stdio::from(file.try_clone().expect("a descriptor"))).stderr(Stdio::from(file));
    let mut inner = command.spawn().expect("the test again");
    let begun = Instant::now();
    let status = loop {
        match inner.try_wait().expect("a child of ours") {
            Some(status) => break Some(status),
            None if begun.elapsed() > 2 * DEADLINE => {
                inner.kill().expect("a child of ours");
                inner.wait().expect("a child of ours");
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let text = std::fs::read_to_string(&output).unwrap_or_default();
    assert!(status.is_some_and(|s| s.success()), "{name} with the double ({status:?}):\n{text}");
    assert!(text.contains("1 passed"), "{name} did not run with the double:\n{text}");
}

// ---------------------------------------------------------------------------------------------------------------- a bench

/// A device and a loader for it.
struct Bench {
    memory: Arc<dyn Memory>,
    loader: ChildLoader,
    dir: tempfile::TempDir,
}

/// A load that was asked for.
struct Pending {
    allocation: Arc<Allocation>,
    watch: Arc<Watch>,
    answer: Receiver<Result<Loaded>>,
}

impl Pending {
    fn answer(&self) -> Result<Loaded> {
        let answer = self.answer.recv_timeout(DEADLINE).expect("an answer in time");
        let again = self.answer.recv_timeout(Duration::from_millis(1));
        assert!(again.is_err(), "an answer comes once");
        answer
    }

    fn failure(&self) -> Failure {
        self.answer().expect_err("this load fails")
    }
}

impl Bench {
    fn new(device: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Bench {
        Bench::with(device, arguments, environment, |_| {})
    }

    fn with(device: &str, words: &[&str], environment: &[(&str, &str)], change: fn(&mut Settings)) -> Bench {
        let memory = Arc::clone(&device::select(device).expect(device).memories[0]);
        let mut settings = Settings {
            program: crate::harness::warpfs_binary(),
            arguments: words.iter().map(ToString::to_string).collect(),
            environment: environment.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
            ..Settings::default()
        };
        change(&mut settings);
        let loader = ChildLoader::new(memory.info(), settings).expect("a thread");
        Bench { memory, loader, dir: tempfile::tempdir().expect("a directory") }
    }

    fn file(&self, name: &str, content: &[u8]) -> OpenFile {
        let path = self.dir.path().join(name);
        // A new file each time: what is being loaded must not be rewritten by the next one of its name.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, content).expect("written");
        OpenFile::new(std::os::fd::OwnedFd::from(std::fs::File::open(&path).expect("there")), path).expect("a file")
    }

    fn load(&self, file: &OpenFile, offset: u64, length: u64, lead: u64) -> Pending {
        let size = self.memory.info().rounded(lead + length);
        let allocation = Arc::new(self.memory.allocate(size).expect("room"));
        let watch = Arc::new(Watch::default());
        let (answer, answered) = channel();
        let part = Part { file: file.clone(), offset, length, place: lead, watch: Arc::clone(&watch) };
        let job = Job { memory: Destination::of(&allocation), slab: None, parts: vec![part] };
        self.loader.submit(job, Box::new(move |mut ended| drop(answer.send(ended.parts.remove(0)))));
        Pending { allocation, watch, answer: answered }
    }

    /// The whole allocation is zeros but for `content` at `lead`.
    fn check(&self, allocation: &Allocation, content: &[u8], lead: usize) {
        let info = self.memory.info();
        let importer = device::importer(&info.uuid, info.kind).expect("the device");
        let size = allocation.size();
        let mapping = importer.map(allocation.descriptor().as_fd(), size, Access::ReadOnly).expect("maps");
        let mut seen = vec![1; size as usize];
        importer.read(&*mapping, 0, &mut seen).expect("reads");
        assert!(seen[..lead].iter().all(|b| *b == 0), "the lead is zeroed");
        let wrong = seen[lead..].iter().zip(content).position(|(s, c)| s != c);
        assert_eq!(wrong, None, "of {} bytes with a lead of {lead}", content.len());
        assert!(seen[lead + content.len()..].iter().all(|b| *b == 0), "the slack is zeroed");
    }

    fn loads(&self, name: &str, content: &[u8], lead: usize) {
        let file = self.file(name, content);
        let pending = self.load(&file, 0, content.len() as u64, lead as u64);
        let loaded = pending.answer().expect(name);
        assert_eq!(loaded.bytes.iter().sum::<u64>(), content.len() as u64);
        assert_eq!(pending.watch.loaded.load(Ordering::Relaxed), content.len() as u64);
        self.check(&pending.allocation, content, lead);
    }

    fn pid(&self) -> u32 {
        self.loader.pid().expect("a child")
    }
}

/// Bytes that no shift or swap leaves as they are.
fn content(length: usize, seed: u64) -> Vec<u8> {
    crate::harness::noise(seed, length)
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < DEADLINE, "{what}: not within {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a process id");
    rustix::process::kill_process(pid, signal).expect("a process of ours");
}

const MIB: usize = 1 << 20;
const SIZES: [usize; 9] = [1, 511, 4095, 4096, 4097, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 33 * MIB];

fn every_size(bench: &Bench) {
    for (number, size) in SIZES.into_iter().enumerate() {
        for lead in [0, 88] {
            bench.loads(&format!("{size}-{lead}"), &content(size, number as u64 + 1), lead);
        }
    }
    // A range from the middle of a file.
    let whole = content(3 * MIB, 77);
    let file = bench.file("range", &whole);
    let pending = bench.load(&file, 4097, MIB as u64 + 3, 88);
    pending.answer().expect("a range");
    bench.check(&pending.allocation, &whole[4097..4097 + MIB + 3], 88);
}

// ------------------------------------------------------------------------------------------------------------- whole files

#[test]
fn every_byte_arrives_in_host_memory() {
    let bench = Bench::new("host", &[], &[]);
    every_size(&bench);
    // The loader has unmapped it, or this could not be sealed.
    let file = bench.file("sealed", b"content");
    let pending = bench.load(&file, 0, 7, 0);
    pending.answer().expect("loads");
    bench.memory.seal(&pending.allocation).expect("nobody maps it");
    bench.check(&pending.allocation, b"content", 0);
}

/// Bounce slots that were filled again while their copy was under way (flashpack 25).
#[test]
fn g09_every_byte_arrives_on_a_device_whatever_the_delays() {
    with_double("g09_every_byte_arrives_on_a_device_whatever_the_delays", &[], &[], || {
        every_size(&Bench::new("cuda:0", &[], &[("FAKE_CUDA_COPY_DELAY_US", "3000")]));
        for (readers, slots, size) in [("1", "1", "262144"), ("4", "1", "65536"), ("3", "8", "65536")] {
            let words = ["--readers", readers, "--slots", slots, "--slot-size", size];
            every_size(&Bench::new("cuda:0", &words, &[("FAKE_CUDA_COPY_DELAY_US", "500")]));
        }
    });
}

/// On the machine's own GPU, where there is one: every size, and more than 4 GiB in one load.
#[test]
fn every_byte_arrives_on_a_real_device() {
    if let Err(why) = device::cuda::list() {
        println!("not tested: {why}");
        return;
    }
    let bench = Bench::new("cuda:0", &[], &[]);
    println!("{:?}, {:?} bytes free", bench.memory.info(), bench.memory.free());
    every_size(&bench);
    let length = (4u64 << 30) + 4097;
    let path = bench.dir.path().join("large");
    let sparse = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path).expect("a file");
    sparse.set_len(length).expect("sparse");
    let marks = [0, (2 << 30) - 4, (4 << 30) - 8, 4 << 30, length - 8];
    for mark in marks {
        std::os::unix::fs::FileExt::write_all_at(&sparse, &(mark + 1).to_le_bytes(), mark).expect("written");
    }
    let file = OpenFile::new(std::os::fd::OwnedFd::from(sparse), path).expect("a file");
    let pending = bench.load(&file, 0, length, 88);
    let loaded = pending.answer().expect("loads");
    println!("{length} bytes in {:?}: {:.1} GB/s", loaded.duration, length as f64 / loaded.duration.as_nanos() as f64);
    let info = bench.memory.info();
    let importer = device::importer(&info.uuid, info.kind).expect("the device");
    let size = pending.allocation.size();
    let mapping = importer.map(pending.allocation.descriptor(), size, Access::ReadOnly).expect("maps");
    importer.zero(&*mapping, 0, 1).expect_err("read-only");
    for mark in marks {
        let mut seen = [0; 8];
        importer.read(&*mapping, 88 + mark, &mut seen).expect("reads");
        assert_eq!(u64::from_le_bytes(seen), mark + 1);
    }
}

/// A batch that waits for ever on an empty pool (nixl 2070).
#[test]
fn g11_five_hundred_loads_share_a_tiny_ring() {
    many(&Bench::new("host", &["--readers", "2", "--slots", "1", "--slot-size", "4096"], &[]), 512);
}

#[test]
fn g11_many_loads_share_a_tiny_ring_of_a_device() {
    let total = (2u64 << 30).to_string();
    let environment = [("FAKE_CUDA_TOTAL", total.as_str())];
    with_double("g11_many_loads_share_a_tiny_ring_of_a_device", &[], &environment, || {
        let words = ["--readers", "2", "--slots", "1", "--slot-size", "4096"];
        let bench = Bench::new("cuda:0", &words, &[("FAKE_CUDA_COPY_DELAY_US", "200")]);
        many(&bench, 128);
    });
}

fn many(bench: &Bench, count: usize) {
    let whole = content(20_000, 5);
    let file = bench.file("many", &whole);
    let length = |number: usize| 1 + number * 37 % 19_000;
    let pending: Vec<Pending> = (0..count).map(|n| bench.load(&file, n as u64, length(n) as u64, 0)).collect();
    for (n, pending) in pending.iter().enumerate() {
        pending.answer().expect("a load among many");
        bench.check(&pending.allocation, &whole[n..n + length(n)], 0);
    }
}

// ------------------------------------------------------------------------------------------------------------------ failures

#[test]
fn a_file_that_shrinks_fails_and_the_others_do_not() {
    let bench = Bench::new("host", &["--readers", "2"], &[]);
    shrinks(&bench);
    with_double("a_file_that_shrinks_fails_and_the_others_do_not", &[], &[], || {
        shrinks(&Bench::new("cuda:0", &[], &[("FAKE_CUDA_COPY_DELAY_US", "2000")]));
    });
}

fn shrinks(bench: &Bench) {
    let whole = content(9 * MIB, 3);
    let (good, short) = (bench.file("good", &whole), bench.file("short", &whole[..5 * MIB + 7]));
    let before = bench.load(&good, 0, whole.len() as u64, 0);
    let shrunk = bench.load(&short, 0, whole.len() as u64, 0);
    let after = bench.load(&good, 0, whole.len() as u64, 88);
    let failure = shrunk.failure();
    assert_eq!(failure.code, Code::Changing);
    assert!(failure.message.contains("short: the file became shorter"), "{failure}");
    before.answer().expect("unharmed");
    after.answer().expect("unharmed");
    bench.check(&before.allocation, &whole, 0);
    bench.check(&after.allocation, &whole, 88);
    bench.loads("short", &whole, 0);
}

#[test]
fn a_page_that_cannot_be_read_fails_that_load() {
    let bench = Bench::new("host", &[], &[]);
    // The one regular file whose first page gives EIO everywhere: nothing is mapped at address 0.
    let memory = std::os::fd::OwnedFd::from(std::fs::File::open("/proc/self/mem").expect("there"));
    let bad = OpenFile::new(memory, PathBuf::from("bad")).expect("counts as regular");
    let failure = bench.load(&bad, 0, 4096, 0).failure();
    assert_eq!((failure.code, failure.errno), (Code::Io, libc::EIO));
    assert!(failure.message.starts_with("bad: cannot read at byte 0: "), "{failure}");
    bench.loads("good", b"good", 0);
}

#[test]
fn memory_that_is_not_there_is_out_of_memory() {
    let total = (8 * MIB).to_string();
    let environment = [("FAKE_CUDA_OOM_AT", "2"), ("FAKE_CUDA_TOTAL", total.as_str())];
    with_double("memory_that_is_not_there_is_out_of_memory", &[], &environment, || {
        let memory = Arc::clone(&device::select("cuda:0").expect("the double").memories[0]);
        let first = memory.allocate(4 * MIB as u64).expect("room");
        let failure = memory.allocate(2 * MIB as u64).err().expect("the second fails");
        assert_eq!(failure.code, Code::OutOfMemory);
        assert!(failure.message.contains("cuda:0: CUDA cannot create 2097152 bytes"), "{failure}");
        let _second = memory.allocate(4 * MIB as u64).expect("all there is");
        assert_eq!(memory.allocate(2 * MIB as u64).err().expect("full").code, Code::OutOfMemory);
        drop(first);
        memory.allocate(4 * MIB as u64).expect("what was freed");
        assert_eq!(memory.allocate(1).err().expect("no multiple of the granularity").code, Code::Device);
    });
}

#[test]
fn a_lost_device_costs_its_load_and_a_new_child_has_it_again() {
    with_double("a_lost_device_costs_its_load_and_a_new_child_has_it_again", &[], &[], || {
        let bench = Bench::new("cuda:0", &[], &[("FAKE_CUDA_STICKY_AT", "3")]);
        bench.loads("first", &content(1000, 1), 0);
        bench.loads("second", &content(1000, 2), 0);
        let pid = bench.pid();
        let file = bench.file("third", &content(1000, 3));
        let failure = bench.load(&file, 0, 1000, 0).failure();
        assert_eq!(failure.code, Code::Device);
        assert!(failure.message.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{failure}");
        bench.loads("fourth", &content(1000, 4), 0);
        assert_ne!(bench.pid(), pid, "a new child");
    });
}

#[test]
fn an_error_that_nobody_knows_is_a_number() {
    with_double("an_error_that_nobody_knows_is_a_number", &[], &[], || {
        let bench = Bench::new("cuda:0", &[], &[("FAKE_CUDA_UNKNOWN_AT", "1")]);
        let file = bench.file("first", &content(1000, 1));
        let failure = bench.load(&file, 0, 1000, 0).failure();
        assert_eq!(failure.code, Code::Device);
        assert!(failure.message.contains("CUDA error 77777"), "{failure}");
        let pid = bench.pid();
        bench.loads("second", &content(1000, 2), 0);
        assert_eq!(bench.pid(), pid, "the device is not lost");
    });
}

/// One failed transfer that freed buffers under the others (dynamo 9635).
#[test]
fn a_failure_in_the_middle_harms_no_other_load() {
    with_double("a_failure_in_the_middle_harms_no_other_load", &[], &[], || {
        let words = ["--readers", "3", "--slots", "2", "--slot-size", "65536"];
        let environment = [("FAKE_CUDA_COPY_DELAY_US", "3000"), ("FAKE_CUDA_UNKNOWN_AT", "40")];
        let bench = Bench::new("cuda:0", &words, &environment);
        let failed = several(&bench);
        assert_eq!(failed, [Code::Device], "one load fails, and only it");
    });
}

#[test]
fn loads_that_a_lost_device_had_not_begun_go_to_the_next_child() {
    with_double("loads_that_a_lost_device_had_not_begun_go_to_the_next_child", &[], &[], || {
        let words = ["--readers", "2", "--slots", "2", "--slot-size", "65536"];
        let environment = [("FAKE_CUDA_COPY_DELAY_US", "3000"), ("FAKE_CUDA_STICKY_AT", "40")];
        let bench = Bench::new("cuda:0", &words, &environment);
        let failed = several(&bench);
        // Each child carries out two loads and is lost in the third, where two readers may be in two loads.
        assert!(!failed.is_empty() && failed.len() < 6, "{failed:?}");
        assert!(failed.iter().all(|code| *code == Code::Device), "{failed:?}");
        bench.loads("next", &content(1000, 4), 0);
    });
}

/// Ten loads of 16 chunks of 64 KiB at once: those that do not fail are right. The codes of those that do.
fn several(bench: &Bench) -> Vec<Code> {
    let contents: Vec<Vec<u8>> = (0..10).map(|n| content(MIB, n + 1)).collect();
    let files: Vec<OpenFile> = contents.iter().enumerate().map(|(n, c)| bench.file(&format!("{n}"), c)).collect();
    let pending: Vec<Pending> = files.iter().map(|file| bench.load(file, 0, MIB as u64, 88)).collect();
    let mut failed = Vec::new();
    for (pending, content) in pending.iter().zip(&contents) {
        match pending.answer() {
            Ok(_) => bench.check(&pending.allocation, content, 88),
            Err(failure) => failed.push(failure.code),
        }
    }
    failed
}

// -------------------------------------------------------------------------------------------------------- the child's death

/// About a second for 2 MiB, and progress all the while.
const SLOW: [(&str, &str); 1] = [("FAKE_CUDA_COPY_DELAY_US", "60000")];
const SMALL: [&str; 6] = ["--readers", "1", "--slots", "1", "--slot-size", "65536"];

fn slow(bench: &Bench) -> (Pending, Vec<u8>) {
    let whole = content(2 * MIB, 9);
    let file = bench.file("slow", &whole);
    (bench.load(&file, 0, whole.len() as u64, 0), whole)
}

/// Waits until the load is under way in a child other than `but`, and returns that child.
fn under_way(bench: &Bench, pending: &Pending, but: Option<u32>) -> u32 {
    eventually("a load under way", || {
        let other = bench.loader.pid().is_some_and(|pid| Some(pid) != but);
        other && pending.watch.loaded.load(Ordering::Relaxed) > 0
    });
    bench.pid()
}

#[test]
fn a_killed_child_is_replaced_once() {
    with_double("a_killed_child_is_replaced_once", &[], &[], || {
        let bench = Bench::new("cuda:0", &SMALL, &SLOW);
        let (pending, whole) = slow(&bench);
        let first = under_way(&bench, &pending, None);
        signal(first, rustix::process::Signal::KILL);
        pending.answer().expect("the second child loads it");
        bench.check(&pending.allocation, &whole, 0);
        assert_ne!(bench.pid(), first);
        assert!(!Path::new(&format!("/proc/{first}")).exists(), "no zombie");

        let (pending, _) = slow(&bench);
        let first = under_way(&bench, &pending, None);
        signal(first, rustix::process::Signal::KILL);
        let second = under_way(&bench, &pending, Some(first));
        signal(second, rustix::process::Signal::KILL);
        let failure = pending.failure();
        assert_eq!(failure.code, Code::Loader);
        assert!(failure.message.contains("the loader for cuda:0 was killed by signal 9"), "{failure}");
        bench.loads("next", &content(1000, 4), 0);
    });
}

#[test]
fn a_child_that_hangs_is_killed_and_replaced() {
    with_double("a_child_that_hangs_is_killed_and_replaced", &[], &[], || {
        let bench = Bench::with("cuda:0", &SMALL, &SLOW, |s| s.silence = Duration::from_millis(700));
        let (pending, whole) = slow(&bench);
        let first = under_way(&bench, &pending, None);
        signal(first, rustix::process::Signal::STOP);
        pending.answer().expect("the second child loads it");
        bench.check(&pending.allocation, &whole, 0);
        assert_ne!(bench.pid(), first);
    });
}

#[test]
fn a_cancelled_load_ends_soon_and_harms_no_other() {
    with_double("a_cancelled_load_ends_soon_and_harms_no_other", &[], &[], || {
        let bench = Bench::new("cuda:0", &SMALL, &SLOW);
        let (pending, _) = slow(&bench);
        let pid = under_way(&bench, &pending, None);
        let (waiting, _) = slow(&bench);
        pending.watch.cancelled.store(true, Ordering::Relaxed);
        waiting.watch.cancelled.store(true, Ordering::Relaxed);
        for pending in [pending, waiting] {
            let failure = pending.failure();
            assert_eq!(failure.code, Code::Stopping, "{failure}");
        }
        bench.loads("next", &content(1000, 4), 0);
        assert_eq!(bench.pid(), pid, "the same child");
    });
}

#[test]
fn a_dropped_loader_ends_its_loads() {
    with_double("a_dropped_loader_ends_its_loads", &[], &[], || {
        let bench = Bench::new("cuda:0", &SMALL, &SLOW);
        let (pending, _) = slow(&bench);
        let pid = under_way(&bench, &pending, None);
        let (waiting, _) = slow(&bench);
        let Bench { loader, .. } = bench;
        drop(loader);
        assert_eq!(pending.failure().code, Code::Stopping);
        assert_eq!(waiting.failure().code, Code::Stopping);
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the child is gone and collected");
    });
}

#[test]
fn a_stopped_loader_finishes_its_work_and_starts_again() {
    with_double("a_stopped_loader_finishes_its_work_and_starts_again", &[], &[], || {
        let bench = Bench::new("cuda:0", &SMALL, &SLOW);
        let (pending, whole) = slow(&bench);
        let pid = under_way(&bench, &pending, None);
        bench.loader.stop();
        pending.answer().expect("present work is finished");
        bench.check(&pending.allocation, &whole, 0);
        eventually("the child leaves", || !Path::new(&format!("/proc/{pid}")).exists());
        bench.loads("next", &content(1000, 4), 0);
    });
}

#[test]
fn an_idle_child_leaves_and_the_next_load_starts_another() {
    let bench = Bench::with("host", &[], &[], |s| s.idle = Duration::from_millis(150));
    for number in 1..4 {
        bench.loads("f", &content(5000, number), 0);
        let pid = bench.pid();
        eventually("the child leaves", || !Path::new(&format!("/proc/{pid}")).exists());
        eventually("nobody says that it is there", || bench.loader.pid().is_none());
    }
}

/// Attach and detach that leak descriptors or address space (ucx 11753).
#[test]
fn a_child_keeps_nothing_of_a_load() {
    keeps_nothing(&Bench::new("host", &[], &[]));
    with_double("a_child_keeps_nothing_of_a_load", &[], &[], || keeps_nothing(&Bench::new("cuda:0", &[], &[])));
}

fn keeps_nothing(bench: &Bench) {
    let file = bench.file("f", &content(10_000, 1));
    let round = || {
        bench.load(&file, 0, 10_000, 88).answer().expect("loads");
        // One that fails half way, too.
        assert_eq!(bench.load(&file, 0, 20_000, 0).failure().code, Code::Changing);
        let process = format!("/proc/{}", bench.pid());
        let descriptors = std::fs::read_dir(format!("{process}/fd")).expect("it runs").count();
        let mappings = std::fs::read_to_string(format!("{process}/maps")).expect("it runs").matches("memfd:").count();
        (descriptors, mappings)
    };
    let first = round();
    for _ in 0..200 {
        round();
    }
    assert_eq!(round(), first, "descriptors and mappings");
}

#[test]
fn a_child_ignores_the_terminals_interrupt() {
    let bench = Bench::new("host", &[], &[]);
    bench.loads("f", b"x", 0);
    let pid = bench.pid();
    signal(pid, rustix::process::Signal::INT);
    bench.loads("f", b"y", 0);
    assert_eq!(bench.pid(), pid);
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).expect("it runs");
    assert!(words.starts_with(b"warpfs\0loader\0--device\0host\0"), "{}", String::from_utf8_lossy(&words));
}

#[test]
fn a_loader_that_cannot_begin_says_why() {
    let bench = Bench::with("host", &[], &[], |s| s.program = PathBuf::from("/nonexistent/warpfs"));
    let file = bench.file("f", b"x");
    let failure = bench.load(&file, 0, 1, 0).failure();
    assert_eq!(failure.code, Code::Loader);
    assert!(failure.message.contains("cannot start the loader for host (/nonexistent/warpfs)"), "{failure}");

    let bench = Bench::with("host", &[], &[], |s| s.program = PathBuf::from("/bin/false"));
    let file = bench.file("f", b"x");
    let failure = bench.load(&file, 0, 1, 0).failure();
    assert_eq!(failure.code, Code::Loader);
    assert!(failure.message.contains("exited with status 1 before it was ready"), "{failure}");
}

#[test]
fn a_device_that_the_child_does_not_see_is_named() {
    with_double("a_device_that_the_child_does_not_see_is_named", &[], &[], || {
        let hidden = [("FAKE_CUDA_DEVICES", "0"), ("CUDA_VISIBLE_DEVICES", "")];
        let bench = Bench::new("cuda:0", &[], &hidden);
        let file = bench.file("f", b"x");
        let failure = bench.load(&file, 0, 1, 0).failure();
        assert_eq!(failure.code, Code::NoDevice);
        assert!(failure.message.contains("does not see the device GPU-66616b65-"), "{failure}");
        assert!(failure.message.contains("CUDA_VISIBLE_DEVICES"), "{failure}");
    });
}

// ------------------------------------------------------------------------------------------------------------ which device

#[test]
fn devices_are_found_by_number_and_uuid() {
    let name = "devices_are_found_by_number_and_uuid";
    with_double(name, &[], &[("FAKE_CUDA_DEVICES", "3")], || {
        let labels = |spec: &str| -> Vec<String> {
            let selection = device::select(spec).expect(spec);
            assert!(!selection.line.contains('\n'));
            selection.memories.iter().map(|m| m.info().label.clone()).collect()
        };
        assert_eq!(labels("auto"), ["cuda:0"]);
        assert_eq!(labels("cuda:all"), ["cuda:0", "cuda:1", "cuda:2"]);
        assert_eq!(labels("cuda:2,cuda:0"), ["cuda:2", "cuda:0"]);
        let uuid = device::format_uuid(&device::cuda::list().expect("three")[1].uuid);
        assert_eq!(labels(&uuid), ["cuda:1"]);
        let line = device::select("auto").expect("auto").line;
        assert!(line.starts_with("took cuda:0 (Fake GPU 0, "), "{line}");
        let failure = device::select("cuda:3").err().expect("there are three");
        assert_eq!(failure.code, Code::NoDevice);
        assert!(failure.message.contains("there is no cuda:3; there is cuda:0"), "{failure}");
    });
}

/// `auto` takes the host and says why; a device that was named is a failure with the same reason.
fn without_cuda(why: &str) {
    let selection = device::select("auto").expect("falls back");
    assert_eq!(selection.memories[0].info().label, "host");
    assert!(selection.line.starts_with("took host memory: ") && selection.line.contains(why), "{}", selection.line);
    let failure = device::select("cuda:0").err().expect("no such device");
    assert_eq!(failure.code, Code::NoDevice);
    assert!(failure.message.contains(why) && !failure.message.contains('\n'), "{failure}");
}

#[test]
fn a_driver_that_does_not_start_is_said() {
    let name = "a_driver_that_does_not_start_is_said";
    with_double(name, &[], &[("FAKE_CUDA_NO_INIT", "1")], || {
        without_cuda("the CUDA driver does not start: CUDA_ERROR_NO_DEVICE");
    });
}

#[test]
fn a_driver_without_devices_is_said() {
    let name = "a_driver_without_devices_is_said";
    with_double(name, &[], &[("FAKE_CUDA_DEVICES", "0")], || without_cuda("the CUDA driver finds no device"));
}

#[test]
fn a_driver_that_is_too_old_is_said() {
    let name = "a_driver_that_is_too_old_is_said";
    with_double(name, &["-DOMIT_CUMEMMAP"], &[], || without_cuda("libcuda.so.1 has no cuMemMap"));
}

#[test]
fn a_missing_driver_is_said() {
    if device::cuda::list().is_ok() {
        println!("not tested: this machine has a CUDA driver");
        return;
    }
    without_cuda("no CUDA driver (libcuda.so.1 not found)");
}
