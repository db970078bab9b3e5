//! cuFile, as its double has it: whole files by the straight way, trouble of every shape, and never a straight way that its
//! counters do not show. With the real one on a GPU, in compatibility mode.

use super::direct::{cached, cold};
use super::*;
use warpfs::transfer::{Fallback, Report, Route};

/// Runs `body` with the doubles of the driver and of cuFile.
fn with_both(name: &str, flags: &[&str], body: fn()) {
    with_double_and(name, &[], &[], |folder| crate::harness::fake_cufile(folder, flags), body);
}

/// What a load of a cold file comes to.
fn load(bench: &Bench, name: &str, content: &[u8], lead: u64) -> Option<(Result<Loaded>, Report)> {
    let file = bench.file(name, content);
    if !cold(&file) {
        return None;
    }
    let (allocation, loaded, report) = bench.reported(&file, lead);
    if loaded.is_ok() {
        bench.check(&allocation, content, lead as usize);
    }
    Some((loaded, report))
}

fn bench(words: &[&str], environment: &[(&str, &str)]) -> Bench {
    Bench::new("cuda:0", &[&["--slot-size", "1048576"], words].concat(), environment)
}

const SIZE: u64 = 5 * MIB as u64 + 777;

/// By route: buffered, direct, gds, cuFile without proof.
fn bytes(loaded: Result<Loaded>) -> [u64; 4] {
    loaded.expect("loads").bytes
}

#[test]
fn g06_every_size_arrives_straight() {
    with_both("gds::g06_every_size_arrives_straight", &[], || {
        for environment in [&[][..], &[("FAKE_CUFILE_SHORT", "1")], &[("FAKE_CUFILE_WAY", "p2p")]] {
            let bench = bench(&["--gds-threshold", "1"], environment);
            for (i, size) in [1, 511, 4095, 4096, 4097, 65536, MIB, MIB + 1, 3 * MIB + 511].into_iter().enumerate() {
                for lead in [0, 88, 4096] {
                    let content = content(size, i as u64 + 1);
                    let Some((loaded, report)) = load(&bench, "f", &content, lead) else { return };
                    let came = bytes(loaded);
                    assert_eq!(came.iter().sum::<u64>(), size as u64);
                    // What is too small for a block of its own cannot be seen to go straight.
                    if size >= 65536 && lead % 4096 == 0 {
                        assert_eq!(came[2], size as u64, "{size} {lead} {report:?}");
                    }
                }
            }
        }
    });
}

#[test]
fn g08_what_is_cached_or_small_does_not_go_by_cufile() {
    with_both("gds::g08_what_is_cached_or_small_does_not_go_by_cufile", &[], || {
        let bench = bench(&[], &[]);
        let whole = content(SIZE as usize, 3);
        let Some((loaded, report)) = load(&bench, "cold", &whole, 0) else { return };
        assert_eq!(bytes(loaded), [0, 0, SIZE, 0], "the control: {:?}", bench.loader.note());
        assert!(report.route(Route::Gds).operations >= 6 && report.fallbacks.iter().sum::<u64>() == 0);
        let file = bench.file("warm", &whole);
        assert!(cached(&file) >= SIZE);
        assert_eq!(bytes(bench.reported(&file, 0).1), [SIZE, 0, 0, 0]);
        let (loaded, _) = load(&bench, "small", &whole[..16_000], 0).expect("tested above");
        assert_eq!(bytes(loaded)[2], 0);
        // Switched off.
        let posix = Bench::new("cuda:0", &["--route", "posix"], &[]);
        let (loaded, _) = load(&posix, "cold", &whole, 0).expect("tested above");
        assert_eq!(bytes(loaded)[2..], [0, 0]);
    });
}

/// cuFile that crashes, is missing, or says "internal error" (kvikio 97, 508).
#[test]
fn g10_trouble_with_cufile_leaves_the_other_routes() {
    with_both("gds::g10_trouble_with_cufile_leaves_the_other_routes", &[], || {
        let whole = content(SIZE as usize, 3);
        for (environment, reason) in [
            (&[("FAKE_CUFILE_OPEN", "5001")][..], None),
            (&[("FAKE_CUFILE_REGISTER", "5008")], Some(Fallback::GdsRefused)),
            (&[("FAKE_CUFILE_WAY", "posix")], Some(Fallback::GdsRefused)),
            (&[("FAKE_CUFILE_WAY", "posix"), ("FAKE_CUFILE_STUBBORN", "1")], Some(Fallback::GdsUnproven)),
            (&[("FAKE_CUFILE_FAIL_AT", "3"), ("FAKE_CUFILE_FAIL", "5030")], Some(Fallback::GdsFailed)),
            (&[("FAKE_CUFILE_FAIL_AT", "3"), ("FAKE_CUFILE_FAIL", "5")], Some(Fallback::GdsFailed)),
            (&[("FAKE_CUFILE_FAIL_AT", "1"), ("FAKE_CUFILE_FAIL", "5999")], Some(Fallback::GdsFailed)),
        ] {
            let bench = bench(&[], environment);
            let Some((loaded, report)) = load(&bench, "f", &whole, 0) else { return };
            let came = bytes(loaded);
            assert_eq!(came.iter().sum::<u64>(), SIZE, "{environment:?}");
            assert!(came[1] > 0, "the rest came past the page cache: {environment:?} {came:?}");
            let expected: Vec<u64> = Fallback::ALL.iter().map(|f| u64::from(Some(*f) == reason)).collect();
            assert_eq!(report.fallbacks, *expected, "once a file: {environment:?}");
            let said = bench.loader.note().expect("a note");
            assert!(said.contains("cuFile"), "{said}");
        }
    });
}

#[test]
fn g10_a_missing_libcufile() {
    // None beside the double of the driver.
    with_double("gds::g10_a_missing_libcufile", &[], &[], || {
        let bench = bench(&[], &[]);
        let Some((loaded, report)) = load(&bench, "f", &content(SIZE as usize, 3), 0) else { return };
        assert_eq!((bytes(loaded)[2..].iter().sum::<u64>(), report.fallbacks.iter().sum::<u64>()), (0, 0));
        if !bench.loader.note().expect("a note").contains("no cuFile") {
            println!("not tested: there is a libcufile on this machine");
            return;
        }
        let failure = load(&self::bench(&["--route", "gds"], &[]), "f", &[7; 50_000], 0).expect("cold").0;
        let failure = failure.expect_err("there is none");
        assert!(failure.message.contains("/f: --route gds: ") && failure.message.contains("libcufile"), "{failure}");
    });
}

#[test]
fn g10_a_libcufile_without_what_it_needs() {
    with_both("gds::g10_a_libcufile_without_what_it_needs", &["-DNO_READ"], || {
        let bench = bench(&[], &[]);
        let Some((loaded, _)) = load(&bench, "f", &content(SIZE as usize, 3), 0) else { return };
        assert_eq!(bytes(loaded)[2..], [0, 0]);
        assert!(bench.loader.note().expect("a note").contains("no cuFileRead"));
    });
}

#[test]
fn a_libcufile_that_does_not_tell_is_used_only_on_request_and_not_called_gds() {
    let name = "gds::a_libcufile_that_does_not_tell_is_used_only_on_request_and_not_called_gds";
    with_both(name, &["-DNO_STATISTICS"], || {
        let whole = content(SIZE as usize, 3);
        let Some((loaded, report)) = load(&bench(&[], &[]), "f", &whole, 0) else { return };
        let came = bytes(loaded);
        assert_eq!(came[2], 0, "not gds");
        assert!(came[3] <= MIB as u64 && came[1] > 0, "no more than the first read: {came:?}");
        assert_eq!(report.fallbacks[Fallback::GdsUnproven as usize], 1);
        let (loaded, _) = load(&bench(&["--route", "gds"], &[]), "f", &whole, 0).expect("tested above");
        assert_eq!(bytes(loaded), [0, 0, 0, SIZE], "unverified");
    });
}

#[test]
fn asked_for_by_name_gds_fails_clearly_where_it_is_not_real() {
    with_both("gds::asked_for_by_name_gds_fails_clearly_where_it_is_not_real", &[], || {
        let whole = content(SIZE as usize, 3);
        for environment in [
            &[("FAKE_CUFILE_WAY", "posix")][..],
            &[("FAKE_CUFILE_WAY", "posix"), ("FAKE_CUFILE_STUBBORN", "1")],
            &[("FAKE_CUFILE_OPEN", "5001")],
            &[("FAKE_CUFILE_FAIL_AT", "2")],
        ] {
            let Some((loaded, _)) = load(&bench(&["--route", "gds"], environment), "f", &whole, 0) else { return };
            let failure = loaded.expect_err("not real");
            assert!(failure.message.contains("/f: --route gds: "), "{failure}");
        }
        // The controls: where it is real, also for what is cached; and compatibility mode on request, which is not gds.
        let real = bench(&["--route", "gds"], &[]);
        assert_eq!(bytes(load(&real, "f", &whole, 88).expect("cold").0)[..2], [0, 0]);
        let file = real.file("warm", &whole);
        assert_eq!(bytes(real.reported(&file, 0).1), [0, 0, SIZE, 0]);
        let compat = bench(&["--route", "gds", "--gds-compat"], &[("FAKE_CUFILE_WAY", "posix")]);
        assert_eq!(bytes(load(&compat, "f", &whole, 0).expect("cold").0), [0, 0, 0, SIZE]);
    });
}

#[test]
fn g10_a_crash_or_a_hang_in_cufile_costs_a_child_and_no_load() {
    with_both("gds::g10_a_crash_or_a_hang_in_cufile_costs_a_child_and_no_load", &[], || {
        let whole = content(SIZE as usize, 3);
        for environment in [("FAKE_CUFILE_CRASH_AT", "2"), ("FAKE_CUFILE_HANG_AT", "2")] {
            let words = ["--slot-size", "1048576"];
            let quick = |settings: &mut Settings| settings.silence = Duration::from_secs(2);
            let bench = Bench::with("cuda:0", &words, &[environment], quick);
            let Some((loaded, _)) = load(&bench, "f", &whole, 0) else { return };
            assert_eq!(bytes(loaded)[2..], [0, 0], "the next child does without");
            let said = bench.loader.note().expect("a note");
            assert!(said.contains("cuFile, which is not tried again"), "{said}");
            let child = bench.pid();
            bench.loads("after", &whole, 0);
            assert_eq!(bench.pid(), child);
        }
    });
}

/// A library that is initialised before a context exists (cudf 15293): the first request of a fresh loader is the test, in
/// each way that it can be made.
#[test]
fn g18_the_first_request_of_a_fresh_loader_works_on_every_route() {
    with_both("gds::g18_the_first_request_of_a_fresh_loader_works_on_every_route", &[], || {
        let whole = content(SIZE as usize, 3);
        for (words, route) in [(&["--route", "gds"][..], 2), (&["--route", "posix"], 1), (&[], 2)] {
            let Some((loaded, _)) = load(&bench(words, &[]), "f", &whole, 0) else { return };
            assert_eq!(bytes(loaded)[route], SIZE, "{words:?}");
        }
        let bench = bench(&[], &[]);
        let file = bench.file("warm", &whole);
        assert_eq!(bytes(bench.reported(&file, 0).1)[0], SIZE);
    });
}

/// The real libcufile, on the machine's own GPU: in compatibility mode, which works on any; its counters are read, and
/// nothing that they do not show is called gds.
#[test]
fn the_real_libcufile_reads_whole_files_in_compatibility_mode() {
    if let Err(why) = device::cuda::list() {
        println!("not tested: {why}");
        return;
    }
    let whole = content(37 * MIB + 777, 3);
    let bench = Bench::new("cuda:0", &["--route", "gds", "--gds-compat"], &[("CUFILE_LOGFILE_PATH", "/dev/null")]);
    for lead in [0, 88] {
        let Some((loaded, report)) = load(&bench, "f", &whole, lead) else { return };
        println!("lead {lead}: {loaded:?}\n{report:?}\n{:?}", bench.loader.note());
        match loaded {
            Ok(loaded) => assert_eq!(loaded.bytes[2] + loaded.bytes[3], whole.len() as u64),
            Err(failure) => assert!(failure.message.contains("libcufile.so.0 not found"), "{failure}"),
        }
    }
    // Without the permission it fails, or is real.
    let strict = Bench::new("cuda:0", &["--route", "gds"], &[("CUFILE_LOGFILE_PATH", "/dev/null")]);
    let (loaded, report) = load(&strict, "f", &whole, 0).expect("cold");
    println!("strict: {loaded:?}\n{report:?}\n{:?}", strict.loader.note());
    match loaded {
        Ok(loaded) => assert_eq!(loaded.bytes, [0, 0, whole.len() as u64, 0], "seen by its counters"),
        Err(failure) => assert!(failure.message.contains("--route gds: "), "{failure}"),
    }
    // Automatically: whatever way, whole.
    let auto = Bench::new("cuda:0", &[], &[("CUFILE_LOGFILE_PATH", "/dev/null")]);
    let (loaded, report) = load(&auto, "f", &whole, 88).expect("cold");
    println!("auto: {loaded:?}\n{report:?}\n{:?}", auto.loader.note());
    loaded.expect("loads");
}
