//! How fast the transfer engine fills device memory from the page cache, by readers and slot size, without mount, cache
//! or processes around it; and what the steps around a load cost. `make bench DEVICE=cuda:0`.
//!
//! Prints a line a configuration: the median and the best of five rounds, in GB/s (1e9 bytes). The file is made of
//! noise and is in the page cache.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use warpfs::device::{self, Access};
use warpfs::transfer::{Engine, Options, Part, Request};

const ROUNDS: usize = 5;
/// Nothing here takes longer.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() {
    let setting = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.into());
    let spec = setting("DEVICE", "host");
    let size: u64 = setting("SIZE_MIB", "1024").parse::<u64>().expect("SIZE_MIB is a number") << 20;
    let folder = setting("WARPFS_BENCH_DIR", "/tmp");
    let selection = device::select(&spec).unwrap_or_else(|failure| panic!("{failure}"));
    let memory = &selection.memories[0];
    println!("{}; {size} bytes; {} cores", selection.line, std::thread::available_parallelism().map_or(0, usize::from));

    let path = std::path::Path::new(&folder).join(format!("warpfs-bench-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).expect("a file");
    std::fs::remove_file(&path).expect("it has no name any more");
    fill(&file, size);

    let info = memory.info();
    let importer = device::importer(&info.uuid, info.kind).expect("an importer");
    steps(memory.as_ref(), importer.as_ref(), size);

    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut configurations: Vec<(usize, usize)> = Vec::new();
    for readers in [1, 2, 4, 8, 12, 16].into_iter().filter(|readers| *readers <= cores.max(4)) {
        configurations.extend([1, 2, 4, 8].map(|mib| (readers, mib << 20)));
    }
    println!("readers  slot MiB  median GB/s  best GB/s");
    for (readers, slot_size) in configurations {
        let engine =
            Engine::start(importer.clone(), Options { readers, slot_size, ..Options::default() }).expect("an engine");
        let mut rates: Vec<f64> = (0..ROUNDS).map(|_| load(&engine, memory.as_ref(), &file, size)).collect();
        rates.sort_by(f64::total_cmp);
        println!("{readers:7}  {:8}  {:11.2}  {:9.2}", slot_size >> 20, rates[ROUNDS / 2], rates[ROUNDS - 1]);
    }
}

/// Noise, so that no layer can be clever.
fn fill(mut file: &File, size: u64) {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut piece = vec![0; 1 << 20];
    for _ in 0..size >> 20 {
        for word in piece.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&piece).expect("written");
    }
    file.sync_all().expect("on the disk");
}

/// What is around a load.
fn steps(memory: &dyn device::Memory, importer: &dyn device::Importer, size: u64) {
    for _ in 0..3 {
        let begun = Instant::now();
        let allocation = memory.allocate(memory.info().rounded(size)).expect("room");
        let allocated = begun.elapsed();
        let mapping = importer.map(allocation.descriptor(), allocation.size(), Access::ReadWrite).expect("mapped");
        let mapped = begun.elapsed();
        drop(mapping);
        let unmapped = begun.elapsed();
        drop(allocation);
        let freed = begun.elapsed();
        let ms = |from: Duration, to: Duration| (to - from).as_secs_f64() * 1e3;
        println!(
            "allocate {:.2} ms, map {:.2} ms, unmap {:.2} ms, free {:.2} ms",
            ms(Duration::ZERO, allocated),
            ms(allocated, mapped),
            ms(mapped, unmapped),
            ms(unmapped, freed)
        );
    }
}

/// One load into fresh memory; GB/s from the first read to the last copy.
fn load(engine: &Engine, memory: &dyn device::Memory, file: &File, size: u64) -> f64 {
    let allocation = memory.allocate(memory.info().rounded(size)).expect("room");
    let duplicate = |fd: std::os::fd::BorrowedFd<'_>| -> OwnedFd { fd.try_clone_to_owned().expect("a descriptor") };
    let part = Part { file: duplicate(file.as_fd()), offset: 0, length: size, place: 0 };
    let descriptor = duplicate(allocation.descriptor());
    let request = Request {
        allocation: Box::new(move || Ok(descriptor)),
        allocation_size: allocation.size(),
        slab: None,
        parts: vec![part],
    };
    let (send, receive) = mpsc::channel();
    engine.submit(request, Box::new(move |ended| send.send(ended).expect("somebody waits"))).expect("queued");
    let loaded = receive.recv_timeout(PATIENCE).expect("in time").parts.remove(0).expect("loaded");
    assert_eq!(loaded.bytes, [size, 0, 0, 0]);
    size as f64 / loaded.duration.as_secs_f64() / 1e9
}
