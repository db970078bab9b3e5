//! Several files in one allocation, in one job and in jobs that follow: each has its bytes and its own result, between them
//! are zeros, and a loader that died takes nothing with it but its slabs.

use super::*;
use std::any::Any;
use warpfs::loader::{Ended, Slab};

const SLAB: u64 = 4 << 20;

/// A slab and what is to be in it.
struct Shared<'a> {
    bench: &'a Bench,
    allocation: Arc<Allocation>,
    slab: Slab,
    expected: Vec<u8>,
    end: u64,
}

impl Shared<'_> {
    fn new(bench: &Bench, number: u64) -> Shared<'_> {
        let allocation = Arc::new(bench.memory.allocate(SLAB).expect("room"));
        let keeper: Arc<dyn Any + Send + Sync> = Arc::new(());
        bench.loader.open(number);
        Shared { bench, allocation, slab: Slab { number, keeper }, expected: vec![0; SLAB as usize], end: 0 }
    }

    /// The next part, behind the others; `content` is what shall arrive.
    fn part(&mut self, file: &OpenFile, length: u64, content: Option<&[u8]>) -> Part {
        let place = self.end.next_multiple_of(256);
        self.end = place + length;
        if let Some(content) = content {
            self.expected[place as usize..][..content.len()].copy_from_slice(content);
        }
        Part { file: file.clone(), offset: 0, length, place, watch: Arc::default() }
    }

    fn submit(&self, parts: Vec<Part>) -> Receiver<Ended> {
        let (answer, answered) = channel();
        let job = Job { memory: Destination::of(&self.allocation), slab: Some(self.slab.clone()), parts };
        self.bench.loader.submit(job, Box::new(move |ended| drop(answer.send(ended))));
        answered
    }

    fn check(&self) {
        self.bench.check(&self.allocation, &self.expected, 0);
    }
}

fn ended(answer: &Receiver<Ended>) -> Ended {
    answer.recv_timeout(DEADLINE).expect("an answer in time")
}

const SIZES: [usize; 9] = [1, 255, 256, 257, 4095, 4097, 100_000, 200_001, 65_536];

#[test]
fn small_files_share_host_memory_and_nothing_lies_between_them() {
    let bench = Bench::new("host", &["--slot-size", "262144"], &[]);
    share(&bench);
}

#[test]
fn small_files_share_a_device_and_nothing_lies_between_them() {
    with_double("slabs::small_files_share_a_device_and_nothing_lies_between_them", &[], &[], || {
        share(&Bench::new("cuda:0", &["--slot-size", "262144"], &[("FAKE_CUDA_COPY_DELAY_US", "500")]));
        let tiny = ["--slot-size", "200001", "--readers", "1", "--slots", "1"];
        share(&Bench::new("cuda:0", &tiny, &[]));
    });
}

fn share(bench: &Bench) {
    // Slots have had other bytes before.
    bench.loads("before", &content(3 * MIB, 1), 0);
    let mut shared = Shared::new(bench, 7);
    for round in 0..3 {
        let files: Vec<_> = SIZES
            .iter()
            .enumerate()
            .map(|(i, size)| {
                let content = content(*size, round * 100 + i as u64 + 1);
                (bench.file(&format!("{round}-{i}"), &content), content)
            })
            .collect();
        let parts = files.iter().map(|(file, c)| shared.part(file, c.len() as u64, Some(c))).collect();
        let ended = ended(&shared.submit(parts));
        for (result, (_, content)) in ended.parts.iter().zip(&files) {
            assert_eq!(result.as_ref().expect("loads").bytes.iter().sum::<u64>(), content.len() as u64);
        }
        if round == 0 {
            // It stays writable for the loader, and for nobody else.
            bench.memory.seal_slab(&shared.allocation).expect("sealed");
        }
        shared.check();
    }
    assert!(bench.loader.has(7));
    let info = bench.memory.info();
    let importer = device::importer(&info.uuid, info.kind).expect("the device");
    if info.label == "host" {
        assert!(importer.map(shared.allocation.descriptor(), SLAB, Access::ReadWrite).is_err(), "sealed");
    }
}

/// One failed transfer that frees the buffers of the others (dynamo 9635).
#[test]
fn g12_a_file_that_fails_among_others_harms_none_and_leaves_no_bytes() {
    with_double("slabs::g12_a_file_that_fails_among_others_harms_none_and_leaves_no_bytes", &[], &[], || {
        for device in ["host", "cuda:0"] {
            one_fails(&Bench::new(device, &["--slot-size", "262144"], &[]));
        }
    });
}

fn one_fails(bench: &Bench) {
    let mut shared = Shared::new(bench, 1);
    let good = content(50_000, 5);
    let (first, short, last) =
        (bench.file("first", &good), bench.file("short", &content(40_000, 6)), bench.file("last", &good));
    let parts = vec![
        shared.part(&first, 50_000, Some(&good)),
        // It became shorter since it was asked for: nothing of it stays.
        shared.part(&short, 60_000, None),
        shared.part(&last, 50_000, Some(&good)),
    ];
    let ended = ended(&shared.submit(parts));
    let codes: Vec<_> = ended.parts.iter().map(|part| part.as_ref().err().map(|failure| failure.code)).collect();
    assert_eq!(codes, [None, Some(Code::Changing), None]);
    let failure = ended.parts[1].as_ref().expect_err("short");
    assert!(failure.message.contains("short: the file became shorter"), "{failure}");
    shared.check();
}

#[test]
fn a_dead_loader_takes_its_slabs_along_and_says_so_of_each_file() {
    let bench = Bench::new("host", &[], &[]);
    let mut shared = Shared::new(&bench, 3);
    let small = content(1000, 2);
    let file = bench.file("f", &small);
    let part = shared.part(&file, 1000, Some(&small));
    ended(&shared.submit(vec![part])).parts.remove(0).expect("loads");
    let dead = bench.pid();
    signal(dead, rustix::process::Signal::KILL);
    eventually("it is noticed", || !bench.loader.has(3));
    let part = shared.part(&file, 1000, None);
    let failure = ended(&shared.submit(vec![part])).parts.remove(0).expect_err("nobody has it mapped");
    assert_eq!(failure.code, Code::Loader);
    shared.check();
    // Control: what has memory of its own goes to the next child.
    bench.loads("own", &small, 0);
    assert_ne!(bench.pid(), dead);
}

#[test]
fn a_forgotten_slab_is_unmapped_and_its_keeper_dropped() {
    let bench = Bench::new("host", &[], &[]);
    let mut shared = Shared::new(&bench, 9);
    let small = content(1000, 2);
    let file = bench.file("f", &small);
    let part = shared.part(&file, 1000, Some(&small));
    ended(&shared.submit(vec![part])).parts.remove(0).expect("loads");
    let mapped =
        || std::fs::read_to_string(format!("/proc/{}/maps", bench.pid())).expect("maps").contains("memfd:warpfs");
    assert!(mapped() && Arc::strong_count(&shared.slab.keeper) > 1, "the control");
    bench.loader.forget(9);
    eventually("it is unmapped", || !mapped());
    eventually("nobody keeps it", || Arc::strong_count(&shared.slab.keeper) == 1);
    assert!(!bench.loader.has(9));
    bench.memory.seal(&shared.allocation).expect("nobody maps it writable");
}
