//! Small files, which share memory.

use super::*;

#[test]
fn small_files_share_memory_and_leave_it_together() {
    let bench = bench(40, true);
    // The first one waits in the loader, so that the others wait together.
    let first = bench.file("first", 3 * PAGE);
    let answer = bench.ask(&first, None, PATIENCE);
    bench.loader.wait_for_a_job();
    bench.end_all_while(answer);
    let files: Vec<_> = (0..8).map(|i| bench.file(&format!("f{i}"), 1000)).collect();
    let answers: Vec<_> = files.iter().map(|file| bench.ask(file, None, PATIENCE)).collect();
    for answer in answers {
        bench.end_all_while(answer);
    }
    let places: Vec<_> = files.iter().map(|file| bench.get(file, None).expect("resident")).collect();
    let mut allocations: Vec<_> = places.iter().map(|place| place.allocation).collect();
    allocations.sort_unstable();
    allocations.dedup();
    assert!(allocations.len() < files.len(), "{places:?}");
    let mut spans: Vec<_> = places.iter().map(|p| (p.allocation, p.offset, p.offset + p.length)).collect();
    spans.sort_unstable();
    assert!(spans.windows(2).all(|two| two[0].0 != two[1].0 || two[0].2 <= two[1].1), "no two overlap: {spans:?}");
    // A slab goes with its last file, and not before.
    let before = bench.used();
    let freed: u64 = files.iter().map(|file| bench.evict(file).freed).sum();
    assert_eq!((before - freed, bench.used()), (3 * PAGE, 3 * PAGE));
}

#[test]
fn room_is_made_by_giving_up_whole_slabs_and_never_one_that_is_held() {
    let bench = bench(8, false);
    let session = bench.cache.open_session(Caller::this()).expect("a session").0;
    let small: Vec<_> = (0..6).map(|i| bench.file(&format!("f{i}"), 1000)).collect();
    let places: Vec<_> = small.iter().map(|file| bench.get(file, None).expect("loaded")).collect();
    bench.get(&small[0], Some(session)).expect("held");
    let large = bench.file("large", 7 * PAGE);
    bench.get(&large, None).expect("there is room");
    assert!(bench.memory.most.load(Ordering::SeqCst) <= 8 * PAGE);
    for (file, place) in small.iter().zip(&places) {
        let kept = place.allocation == places[0].allocation;
        let state = if kept { State::Resident } else { State::Absent };
        assert_eq!(bench.state(file), state, "{place:?}");
    }
    assert!(places.iter().any(|place| place.allocation != places[0].allocation), "the control");
}

#[test]
fn a_file_that_a_loader_fails_among_others_is_tried_alone() {
    let bench = bench(40, true);
    let file = bench.file("f", 1000);
    let answer = bench.ask(&file, None, PATIENCE);
    bench.loader.end(Err(Failure::new(Code::Loader, "it died")));
    bench.loader.wait_for_a_job();
    assert!(bench.loader.waiting.lock()[0].0.slab.is_none(), "in memory of its own");
    bench.loader.end(Err(Failure::new(Code::Loader, "it died again")));
    let failure = answer.recv_timeout(PATIENCE).expect("answered").expect_err("that was its own fault");
    assert_eq!((failure.code, bench.used()), (Code::Loader, 0));
}

/// Seen as "cannot seal host memory: Operation not permitted": two loads of one slab were over at the same time.
#[test]
fn a_slab_is_sealed_once_whichever_of_its_loads_is_over_first() {
    let bench = bench(40, true);
    let files = [bench.file("a", 500), bench.file("b", 500)];
    let mut answers = Vec::new();
    for (number, file) in files.iter().enumerate() {
        answers.push(bench.ask(file, None, PATIENCE));
        let deadline = Instant::now() + PATIENCE;
        while bench.loader.waiting.lock().len() <= number {
            assert!(Instant::now() < deadline, "no job came");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let jobs = std::mem::take(&mut *bench.loader.waiting.lock());
    let slabs: Vec<_> = jobs.iter().map(|(job, _)| job.slab.as_ref().map(|slab| slab.number)).collect();
    assert!(slabs[0].is_some() && slabs[0] == slabs[1], "both are of one slab");
    std::thread::scope(|scope| {
        for (job, done) in jobs {
            scope.spawn(move || {
                drop(job);
                done(Ended { parts: vec![Ok(Loaded::default())], report: Report::default() });
            });
        }
    });
    for answer in answers {
        answer.recv_timeout(PATIENCE).expect("answered").expect("loaded");
    }
}

#[test]
fn files_that_are_asked_for_together_are_taken_in_under_one_lock() {
    // Seen on a GPU: asked for one by one, thousands of small files took turns at the index, and went in jobs of a few.
    let bench = bench(4096, true);
    let files: Vec<_> = (0..40).map(|i| bench.file(&format!("f{i}"), 1000)).collect();
    let (send, receive) = mpsc::channel();
    let ask = |file: &OpenFile| {
        let (send, file, caller) = (send.clone(), file.clone(), Caller::this());
        let ask = Ask { file, device: NONE, offset: 0, length: 0, caller, session: None, wait: Duration::MAX };
        let answer: Answer = Box::new(move |answer| send.send(answer).expect("heard"));
        (ask, answer)
    };
    bench.cache.materialize_all(NONE, files.iter().chain([&bench.file("empty", 0)]).map(ask).collect());
    let empty = receive.recv_timeout(PATIENCE).expect("answered").expect("resident");
    assert!(matches!(empty, Outcome::Resident(Placement { length: 0, .. })), "{empty:?}");
    bench.loader.wait_for_a_job();
    assert_eq!(bench.loader.waiting.lock()[0].0.parts.len(), 40, "the dispatcher saw all of them at once");
    bench.loader.end(Ok(Loaded::default()));
    for _ in &files {
        receive.recv_timeout(PATIENCE).expect("answered").expect("loaded");
    }
    receive.recv_timeout(Duration::from_millis(20)).expect_err("each once");
}

#[test]
fn the_slab_that_was_filled_last_outlives_its_last_file_until_room_is_needed() {
    let bench = bench_on(DeviceKind::Cuda, 8, false);
    let file = bench.file("f", 1000);
    let first = bench.get(&file, None).expect("loaded");
    bench.evict(&file);
    let again = bench.get(&file, None).expect("loaded");
    assert_eq!((again.allocation, again.offset > first.offset), (first.allocation, true), "in the same memory, behind");
    bench.evict(&file);
    assert!(bench.used() > 0, "it is kept");
    bench.get(&bench.file("large", 8 * PAGE), None).expect("it is given up for what needs its room");
    assert_eq!(bench.used(), 8 * PAGE);
}

#[test]
fn a_slab_is_kept_for_a_moment_only() {
    let (gpu, host) = (bench_on(DeviceKind::Cuda, 8, false), bench(8, false));
    for bench in [&gpu, &host] {
        let file = bench.file("f", 1000);
        bench.get(&file, None).expect("loaded");
        bench.evict(&file);
    }
    assert_eq!(host.used(), 0, "memory of the host is not kept");
    let deadline = Instant::now() + PATIENCE;
    while gpu.used() > 0 {
        assert!(Instant::now() < deadline, "it is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}
