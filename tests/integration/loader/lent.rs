//! Few readers: one of them lends pages of the page cache to the device instead of copying them to the ring.

use super::*;
use warpfs::transfer::{Report, Route};

/// A load of more than is lent at a time.
const LENGTH: usize = 71 * MIB + 4097;

/// Loads a file that is in the page cache, looks at every byte, and says what was done.
fn report(bench: &Bench, lead: u64) -> Report {
    let whole = content(LENGTH, 4 + lead);
    let file = bench.file("f", &whole);
    let (allocation, loaded, report) = bench.reported(&file, lead);
    assert_eq!(loaded.expect("loads").bytes, [LENGTH as u64, 0, 0, 0]);
    bench.check(&allocation, &whole, lead as usize);
    assert_eq!(report.routes[Route::Buffered as usize].bytes, LENGTH as u64);
    report
}

fn pieces(report: &Report) -> u64 {
    report.routes[Route::Buffered as usize].operations
}

#[test]
fn few_readers_lend_the_page_cache_and_every_byte_arrives() {
    with_double("lent::few_readers_lend_the_page_cache_and_every_byte_arrives", &[], &[], || {
        for lead in [0, 88] {
            let bench = Bench::new("cuda:0", &["--readers", "1"], &[("FAKE_CUDA_COPY_DELAY_US", "2000")]);
            // A chunk of 4 MiB, then 16 MiB at a time.
            assert_eq!(pieces(&report(&bench, lead)), 6);
            let several = Bench::new("cuda:0", &["--readers", "4"], &[("FAKE_CUDA_COPY_DELAY_US", "2000")]);
            assert!(pieces(&report(&several, lead)) < 18);
            // The control: many readers, and a driver that does not lend.
            assert_eq!(pieces(&report(&Bench::new("cuda:0", &["--readers", "5"], &[]), lead)), 18);
            let refused = Bench::new("cuda:0", &["--readers", "2"], &[("FAKE_CUDA_NO_LENDING", "1")]);
            assert_eq!(pieces(&report(&refused, lead)), 18);
        }
    });
}

#[test]
fn a_lent_file_that_shrinks_fails_and_a_half_cached_one_is_whole() {
    with_double("lent::a_lent_file_that_shrinks_fails_and_a_half_cached_one_is_whole", &[], &[], || {
        let bench = Bench::new("cuda:0", &["--readers", "2"], &[("FAKE_CUDA_COPY_DELAY_US", "2000")]);
        let whole = content(LENGTH, 9);
        let short = bench.file("short", &whole[..40 * MIB + 7]);
        let failure = bench.load(&short, 0, LENGTH as u64, 0).failure();
        assert_eq!(failure.code, Code::Changing, "{failure}");
        let file = bench.file("f", &whole);
        if direct::cold(&file) {
            // The looks at the file find all of it, and most of it is not there.
            let step = LENGTH as u64 / 16;
            for look in 0..16 {
                let mut page = [0; 1];
                std::os::unix::fs::FileExt::read_exact_at(&readable(&file), &mut page, look * step).expect("read");
            }
            let (allocation, loaded, report) = bench.reported(&file, 0);
            loaded.expect("loads");
            bench.check(&allocation, &whole, 0);
            assert!(report.routes[Route::Direct as usize].bytes > 0, "{:?}", report.routes);
        }
        bench.loads("the control", &whole, 0);
    });
}

/// The file, for reads that bring nothing beside what they read.
fn readable(file: &OpenFile) -> std::fs::File {
    let plain = std::fs::File::open(&file.path).expect("there");
    rustix::fs::fadvise(&plain, 0, None, rustix::fs::Advice::Random).expect("advised");
    plain
}
