//! Past the page cache: what is not in it is read from the disk and stays out of it, what is in it is not read again, and
//! a file system that refuses costs nothing but a count. Where the folder for temporary files lives in the page cache
//! itself (tmpfs) there is nothing to see, and the tests say so.

use super::*;
use std::os::unix::fs::FileExt;
use warpfs::transfer::{Fallback, Report, Route, direct::Alignment, residency};

/// Puts the file on the disk and out of the page cache. `false`: its file system has no direct reads.
pub(super) fn cold(file: &OpenFile) -> bool {
    if Alignment::of(file.as_fd()).is_none() {
        println!("not tested: {} is on a file system without direct reads", file.path.display());
        return false;
    }
    rustix::fs::fsync(file).expect("on the disk");
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).expect("advised");
    assert_eq!(cached(file), 0, "out of the page cache");
    true
}

/// Bytes of the file in the page cache.
pub(super) fn cached(file: &OpenFile) -> u64 {
    let size = file.version().expect("there").size;
    residency::cached(file.as_fd(), 0, size as usize).expect("our own file")
}

impl Bench {
    /// One load with everything that is said of it.
    pub(super) fn reported(&self, file: &OpenFile, lead: u64) -> (Arc<Allocation>, Result<Loaded>, Report) {
        let length = file.version().expect("there").size;
        let size = self.memory.info().rounded(lead + length);
        let allocation = Arc::new(self.memory.allocate(size).expect("room"));
        let (answer, answered) = channel();
        let part = Part { file: file.clone(), offset: 0, length, place: lead, watch: Arc::default() };
        let job = Job { memory: Destination::of(&allocation), slab: None, parts: vec![part] };
        self.loader.submit(job, Box::new(move |ended| drop(answer.send(ended))));
        let mut ended = answered.recv_timeout(DEADLINE).expect("an answer in time");
        (allocation, ended.parts.remove(0), ended.report)
    }
}

/// How reads past the page cache are made.
const WAYS: [&[&str]; 2] = [&[], &["--synchronous"]];

/// Bytes of several sizes around a block, cold, with and without a lead: alignment that was "fixed up" into other bytes
/// (fastsafetensors 38).
#[test]
fn g06_every_size_arrives_past_the_page_cache() {
    for words in WAYS {
        every_size_cold(&Bench::new("host", &[&["--slot-size", "65536"][..], words].concat(), &[]));
    }
}

#[test]
fn g06_every_size_arrives_on_a_device_past_the_page_cache() {
    with_double("direct::g06_every_size_arrives_on_a_device_past_the_page_cache", &[], &[], || {
        for words in WAYS {
            every_size_cold(&Bench::new("cuda:0", &[&["--slot-size", "65536"], words].concat(), &[]));
            let delays = [("FAKE_CUDA_COPY_DELAY_US", "700")];
            let tiny = [&["--readers", "1", "--slots", "1", "--slot-size", "8192"], words].concat();
            every_size_cold(&Bench::new("cuda:0", &tiny, &delays));
        }
    });
}

fn every_size_cold(bench: &Bench) {
    for (number, size) in [1, 511, 4095, 4096, 4097, 65536, 65537, 200_000, (1 << 20) + 511].into_iter().enumerate() {
        for lead in [0, 88] {
            let content = content(size, number as u64 + 1);
            let file = bench.file("cold", &content);
            if !cold(&file) {
                return;
            }
            let (allocation, loaded, report) = bench.reported(&file, lead);
            let loaded = loaded.expect("loads");
            bench.check(&allocation, &content, lead as usize);
            assert_eq!(loaded.bytes.iter().sum::<u64>(), size as u64);
            let told: Vec<u64> = report.routes.iter().map(|work| work.bytes).collect();
            assert_eq!(told, loaded.bytes, "what the load says and what its reads say");
            let blocks = size as u64 / 4096 * 4096;
            assert!(loaded.bytes[Route::Direct as usize] >= blocks, "{size} {lead}: {:?}", loaded.bytes);
        }
    }
}

/// Direct reads of what is in the page cache (fastsafetensors 3, flashpack 33), and reads that fill it with what nobody
/// wants there.
#[test]
fn g08_what_is_cached_is_read_from_there_and_the_rest_stays_out() {
    const HALF: usize = 8 << 20;
    let bench = Bench::new("host", &["--slot-size", "1048576"], &[]);
    let whole = content(2 * HALF, 5);
    let file = bench.file("half", &whole);
    if !cold(&file) {
        return;
    }
    let (allocation, loaded, report) = bench.reported(&file, 0);
    bench.check(&allocation, &whole, 0);
    assert_eq!(loaded.expect("loads").bytes, [0, 2 * HALF as u64, 0, 0]);
    assert_eq!(report.route(Route::Direct).operations, 16);
    assert!(!report.route(Route::Direct).busy.is_zero());
    assert_eq!(cached(&file), 0, "the page cache is as it was");

    // The second half comes into the cache, and is read from there.
    let descriptor = std::fs::File::open(&file.path).expect("there");
    rustix::fs::fadvise(&descriptor, 0, None, rustix::fs::Advice::Random).expect("advised");
    descriptor.read_exact_at(&mut vec![0; HALF], HALF as u64).expect("read");
    assert_eq!(cached(&file), HALF as u64);
    let (allocation, loaded, _) = bench.reported(&file, 0);
    bench.check(&allocation, &whole, 0);
    assert_eq!(loaded.expect("loads").bytes, [HALF as u64, HALF as u64, 0, 0]);

    // Control: all of it.
    descriptor.read_exact_at(&mut vec![0; HALF], 0).expect("read");
    let (_, loaded, report) = bench.reported(&file, 0);
    assert_eq!(loaded.expect("loads").bytes, [2 * HALF as u64, 0, 0, 0]);
    assert_eq!(report.fallbacks.iter().sum::<u64>(), 0);
}

/// A library that answers reads in place of the disk; see its first lines.
fn faults(bench_folder: &Path) -> String {
    let library = bench_folder.join("faults.so");
    crate::harness::compile_library(&library, "fault-layer/faults.c", &[]);
    library.to_str().expect("text").to_string()
}

/// What a load of 16 chunks makes of a disk that is not well.
fn on_a_bad_disk(faults_are: &[(&str, &str)]) -> Option<(Result<Loaded>, Report)> {
    let folder = tempfile::tempdir().expect("a folder");
    let library = faults(folder.path());
    let environment = [&[("LD_PRELOAD", library.as_str())], faults_are].concat();
    let words = ["--slot-size", "1048576", "--synchronous", "--readers", "1"];
    let bench = Bench::new("host", &words, &environment);
    let whole = content(16 * MIB, 9);
    let file = bench.file("f", &whole);
    if !cold(&file) {
        return None;
    }
    let (allocation, loaded, report) = bench.reported(&file, 0);
    if loaded.is_ok() {
        bench.check(&allocation, &whole, 0);
    }
    Some((loaded, report))
}

/// O_DIRECT that is accepted at the open and refused at the read (LMCache 4364).
#[test]
fn g07_a_refused_direct_read_goes_through_the_page_cache_and_is_counted() {
    let Some((loaded, report)) = on_a_bad_disk(&[("FAULT_DIRECT", "einval"), ("FAULT_FROM", "3")]) else { return };
    assert_eq!(loaded.expect("loads").bytes, [13 << 20, 3 << 20, 0, 0]);
    assert_eq!(report.fallbacks[Fallback::DirectRefused as usize], 1, "it is not asked again");
    assert_eq!(report.route(Route::Direct).errors, 1);
    // Control: the same disk on a good day.
    let (loaded, report) = on_a_bad_disk(&[]).expect("tested above");
    assert_eq!(loaded.expect("loads").bytes, [0, 16 << 20, 0, 0]);
    assert_eq!(report.fallbacks.iter().sum::<u64>(), 0);
}

#[test]
fn g02_short_direct_reads_make_a_whole_file() {
    let Some((loaded, report)) = on_a_bad_disk(&[("FAULT_DIRECT", "short")]) else { return };
    assert_eq!(loaded.expect("loads").bytes, [0, 16 << 20, 0, 0]);
    assert_eq!(report.route(Route::Direct).operations, 16);
}

/// A page that is bad for one way of reading is read the other way; one that is bad for both fails this file alone.
#[test]
fn g05_an_input_output_error_of_one_chunk_is_tried_the_other_way() {
    let Some((loaded, report)) = on_a_bad_disk(&[("FAULT_DIRECT", "eio"), ("FAULT_FROM", "15")]) else { return };
    assert_eq!(loaded.expect("loads").bytes, [1 << 20, 15 << 20, 0, 0]);
    assert_eq!(report.fallbacks[Fallback::DirectRefused as usize], 1);
    let faults = [("FAULT_DIRECT", "eio"), ("FAULT_FROM", "5"), ("FAULT_EIO_AT", "9000000")];
    let (loaded, _) = on_a_bad_disk(&faults).expect("tested above");
    let failure = loaded.expect_err("the page is bad");
    assert_eq!((failure.code, failure.errno), (Code::Io, libc::EIO));
    assert!(failure.message.contains("f: cannot read at byte 8388608"), "{failure}");
}
