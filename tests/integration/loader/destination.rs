//! Memory that comes while the file for it is read already.

use super::*;
use warpfs::loader::Promise;

/// A load of the whole file into memory that is promised.
fn begin(bench: &Bench, file: &OpenFile, length: usize) -> (Receiver<Result<Loaded>>, Promise) {
    let (memory, promise) = Destination::promised(bench.memory.info().rounded(length as u64)).expect("a socket");
    let part = Part { file: file.clone(), offset: 0, length: length as u64, place: 0, watch: Arc::default() };
    let (answer, answered) = channel();
    let job = Job { memory, slab: None, parts: vec![part] };
    bench.loader.submit(job, Box::new(move |mut ended| drop(answer.send(ended.parts.remove(0)))));
    (answered, promise)
}

/// Makes the memory, keeps the promise, and looks at every byte.
fn keep(bench: &Bench, answered: &Receiver<Result<Loaded>>, promise: Promise, content: &[u8]) {
    let size = bench.memory.info().rounded(content.len() as u64);
    let allocation = Arc::new(bench.memory.allocate(size).expect("room"));
    promise.keep(Arc::clone(&allocation));
    answered.recv_timeout(DEADLINE).expect("in time").expect("loaded");
    bench.check(&allocation, content, 0);
}

#[test]
fn memory_may_come_after_its_job() {
    let bench = Bench::new(&crate::harness::device(), &[], &[]);
    let content = content(33 * MIB + 5, 1);
    let file = bench.file("later", &content);
    for _ in 0..2 {
        let (answered, promise) = begin(&bench, &file, content.len());
        assert!(answered.recv_timeout(Duration::from_millis(200)).is_err(), "nothing can have come");
        keep(&bench, &answered, promise, &content);
    }
}

#[test]
fn without_its_memory_a_job_fails_and_no_other() {
    let bench = Bench::new(&crate::harness::device(), &[], &[]);
    let whole = content(9 * MIB, 2);
    let file = bench.file("never", &whole);
    let (answered, promise) = begin(&bench, &file, whole.len());
    let (others, kept) = begin(&bench, &file, whole.len());
    drop(promise);
    let failure = answered.recv_timeout(DEADLINE).expect("in time").expect_err("no memory");
    assert_eq!(failure.code, warpfs::protocol::Code::OutOfMemory, "{failure}");
    keep(&bench, &others, kept, &whole);
    bench.loads("the control", &whole, 0);
}

#[test]
fn a_loader_that_dies_before_the_memory_came_is_replaced() {
    let bench = Bench::new(&crate::harness::device(), &[], &[]);
    let content = content(9 * MIB, 3);
    let file = bench.file("dies", &content);
    bench.loads("first", &content, 0);
    let first = bench.pid();
    let (answered, promise) = begin(&bench, &file, content.len());
    std::thread::sleep(Duration::from_millis(100));
    signal(first, rustix::process::Signal::KILL);
    eventually("another loader", || bench.loader.pid().is_some_and(|pid| pid != first));
    keep(&bench, &answered, promise, &content);
}
