//! The whole way on a `cuda` device where there is no GPU: the driver is its test double, for the daemon, its loaders and
//! the clients alike. What the double does is in tests/fake-libcuda; it is no GPU, and says nothing about speed.

use crate::harness::*;
use std::path::Path;

/// A mount whose processes find the double.
struct Doubled {
    mounted: Option<Mounted>,
    _library: tempfile::TempDir,
    environment: Vec<(&'static str, String)>,
}

impl Doubled {
    fn new(options: &[&str], environment: &[(&'static str, &str)]) -> Doubled {
        let (mut doubled, mounted) = Doubled::prepare(&[], environment);
        doubled.mounted = Some(mounted.mount(options, &doubled.environment()).expect("mounted"));
        doubled
    }

    fn prepare(flags: &[&str], environment: &[(&'static str, &str)]) -> (Doubled, Mounted) {
        let library = tempfile::tempdir().expect("a folder");
        fake_driver(library.path(), flags);
        let mut all = vec![("LD_LIBRARY_PATH", library.path().to_str().expect("text").to_string())];
        all.push(("FAKE_CUDA_TOTAL", (4_u64 << 30).to_string()));
        all.extend(environment.iter().map(|(name, value)| (*name, value.to_string())));
        (Doubled { mounted: None, _library: library, environment: all }, Mounted::prepare())
    }

    fn environment(&self) -> Vec<(&str, &str)> {
        self.environment.iter().map(|(name, value)| (*name, value.as_str())).collect()
    }

    fn mounted(&self) -> &Mounted {
        self.mounted.as_ref().expect("mounted")
    }

    /// A command that finds the double too.
    fn warpfs(&self, words: &[&str], path: &Path) -> Output {
        let mut command = warpfs(words);
        run(command.arg(path).envs(self.environment()).env_remove("CUDA_VISIBLE_DEVICES"))
    }
}

#[test]
fn device_bytes_equal_file_bytes_for_every_client() {
    let doubled = Doubled::new(&["--device", "cuda:0"], &[("FAKE_CUDA_COPY_DELAY_US", "300")]);
    let mounted = doubled.mounted();
    assert_eq!(mounted.device()["label"], "cuda:0");
    for (i, size) in [0, 1, 511, 4095, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, (9 << 20) + 5].iter().enumerate() {
        mounted.file(&format!("f{i}"), &noise(i as u64, *size));
    }
    doubled.warpfs(&["preload"], &mounted.mountpoint).ok();
    assert_eq!(mounted.used(), (2 + 2 * 2 + 4 + 10) << 20, "2 MiB at a time, and one of them for all that are small");
    doubled.warpfs(&["verify"], &mounted.mountpoint).ok();
    let read = doubled.warpfs(&["read"], &mounted.mountpoint.join("f8")).ok();
    assert_eq!(read.stdout, noise(8, (9 << 20) + 5));
    assert_eq!((mounted.counter("loads"), mounted.counter("misses")), (8, 8), "each file once, for all of them");
    doubled.warpfs(&["evict"], &mounted.mountpoint).ok();
    assert!(mounted.used() <= 2 << 20, "but for the slab that was filled last");
    eventually("that goes too", || mounted.used() == 0);
}

#[test]
fn two_devices_have_two_budgets_and_two_loaders() {
    let options = ["--device", "cuda:0,cuda:1", "--budget", "8MiB"];
    let doubled = Doubled::new(&options, &[("FAKE_CUDA_DEVICES", "2")]);
    let mounted = doubled.mounted();
    let files = [0, 1, 2].map(|i| mounted.file(&format!("f{i}"), &noise(i, 4 << 20)));
    doubled.warpfs(&["preload"], &files[0]).ok();
    doubled.warpfs(&["preload", "--device", "cuda:1"], &files[0]).ok();
    doubled.warpfs(&["preload", "--device", "cuda:1"], &files[1]).ok();
    doubled.warpfs(&["preload", "--device", "cuda:1"], &files[2]).ok();
    let stats = mounted.stats();
    let of = |device: usize, name: &str| stats["devices"][device][name].as_u64();
    assert_eq!((of(0, "used"), of(0, "resident_files")), (Some(4 << 20), Some(1)));
    assert_eq!((of(1, "used"), of(1, "resident_files")), (Some(8 << 20), Some(2)));
    assert_eq!(mounted.loaders().len(), 2);
    doubled.warpfs(&["verify", "--device", "cuda:1"], &files[2]).ok();
    let status = doubled.warpfs(&["status", "--device", "cuda:1"], &mounted.mountpoint).ok().text();
    assert_eq!(status.lines().filter(|line| line.starts_with("resident")).count(), 2, "{status}");
    doubled.warpfs(&["preload", "--device", "cuda:7"], &files[2]).fails(&["cuda:7", "cuda:0, cuda:1"]);
    // Evicting is on every device.
    doubled.warpfs(&["evict"], &mounted.mountpoint).ok();
    assert!(mounted.stats()["devices"].as_array().expect("a list").iter().all(|device| device["used"] == 0));
}

#[test]
fn g13_a_full_device_gives_copies_up_and_leaves_nothing_half_done() {
    let doubled = Doubled::new(&["--device", "cuda:0"], &[("FAKE_CUDA_OOM_AT", "2")]);
    let mounted = doubled.mounted();
    let files = [0, 1].map(|i| mounted.file(&format!("f{i}"), &noise(i, 3 << 20)));
    doubled.warpfs(&["preload"], &files[0]).ok();
    // The second allocation fails once: the first copy goes for it.
    doubled.warpfs(&["preload"], &files[1]).ok();
    doubled.warpfs(&["verify"], &files[1]).ok();
    assert_eq!((mounted.used(), mounted.counter("evictions")), (4 << 20, 1));
    // Where another program has the memory there is nothing to give up: an error that says so, and nothing is left of the
    // attempt.
    let state = tempfile::NamedTempFile::new().expect("a file");
    let others = |bytes: u64| std::fs::write(state.path(), bytes.to_ne_bytes()).expect("written");
    let in_use = || u64::from_ne_bytes(std::fs::read(state.path()).expect("read").try_into().expect("eight bytes"));
    others((4 << 30) - (2 << 20));
    let doubled = Doubled::new(&["--device", "cuda:0"], &[("FAKE_CUDA_STATE", state.path().to_str().expect("text"))]);
    let mounted = doubled.mounted();
    let (small, large) = (mounted.file("small", b"fits"), mounted.file("large", &noise(2, 3 << 20)));
    doubled.warpfs(&["preload"], &small).ok();
    doubled.warpfs(&["preload"], &large).fails(&[
        "large",
        "cuda:0 has no room for 4.0 MiB",
        "CUDA_ERROR_OUT_OF_MEMORY",
    ]);
    assert_eq!((mounted.used(), in_use()), (0, (4 << 30) - (2 << 20)), "as before, without what was given up for it");
    others(0);
    doubled.warpfs(&["verify"], &large).ok();
    assert_eq!((mounted.used(), in_use()), (4 << 20, 4 << 20));
}

#[test]
fn a_lost_device_fails_its_load_and_the_next_loader_works() {
    let doubled = Doubled::new(&["--device", "cuda:0"], &[("FAKE_CUDA_STICKY_AT", "3")]);
    let mounted = doubled.mounted();
    let files = [0, 1, 2, 3].map(|i| mounted.file(&format!("f{i}"), &noise(i, 10_000)));
    doubled.warpfs(&["preload"], &files[0]).ok();
    doubled.warpfs(&["preload"], &files[1]).ok();
    let first = mounted.loaders();
    doubled.warpfs(&["preload"], &files[2]).fails(&["f2", "CUDA_ERROR_ILLEGAL_ADDRESS"]);
    assert_eq!(mounted.device()["resident_files"], 2, "nothing of the failed load is left");
    doubled.warpfs(&["preload"], &files[2]).ok();
    assert_ne!(mounted.loaders(), first, "a new process");
    for file in &files[..3] {
        doubled.warpfs(&["verify"], file).ok();
    }
}

#[test]
fn no_driver_no_device_and_an_old_driver_are_one_line_each() {
    for (flags, environment, words) in [
        (&["-DOMIT_CUMEMMAP"][..], &[][..], &["too old", "cuMemMap"][..]),
        (&[], &[("FAKE_CUDA_NO_INIT", "1")], &["CUDA_ERROR_NO_DEVICE"]),
        (&[], &[("FAKE_CUDA_DEVICES", "0")], &["no device"]),
    ] {
        let (doubled, mounted) = Doubled::prepare(flags, environment);
        let refused = mounted.mount(&["--device", "cuda:0"], &doubled.environment()).expect_err("refused");
        assert_eq!(refused.fails(words).lines().count(), 1);
        // auto takes the host instead, and says why.
        let (doubled, mounted) = Doubled::prepare(flags, environment);
        let mut command = warpfs(["mount", "--device", "auto"]);
        command.args([&mounted.source, &mounted.mountpoint]).envs(doubled.environment());
        let said = run(&mut command).ok().text();
        assert!(said.contains("host memory") && words.iter().all(|word| said.contains(word)), "{said}");
    }
    let (doubled, mounted) = Doubled::prepare(&[], &[]);
    let mut command = warpfs(["mount", "--device", "auto"]);
    command.args([&mounted.source, &mounted.mountpoint]).envs(doubled.environment());
    let said = run(&mut command).ok().text();
    assert!(said.contains("took cuda:0"), "the control: {said}");
}

#[test]
fn a_client_that_does_not_see_the_device_is_told_so() {
    let doubled = Doubled::new(&["--device", "cuda:0"], &[]);
    let file = doubled.mounted().file("f", b"content");
    let mut command = warpfs(["verify"]);
    // Without the double, this client has no driver (or another GPU).
    let said = run(command.arg(&file).env_remove("LD_LIBRARY_PATH"));
    said.fails(&["f"]);
    doubled.warpfs(&["verify"], &file).ok();
}

#[test]
fn an_interrupted_preload_leaves_nothing_behind_unless_somebody_else_waits() {
    // A copy of 4 MiB takes a while: the load is under way when the signal comes.
    let doubled = Doubled::new(&["--device", "cuda:0"], &[("FAKE_CUDA_COPY_DELAY_US", "400000")]);
    let mounted = doubled.mounted();
    let small = mounted.file("a", &noise(1, 3 << 20));
    let large = mounted.file("b", &noise(2, 200 << 20));
    doubled.warpfs(&["preload"], &small).ok();
    let begin = |path: &Path| {
        let mut command = warpfs(["preload"]);
        command.arg(path).envs(doubled.environment()).env_remove("CUDA_VISIBLE_DEVICES");
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command.spawn().expect("started")
    };
    let state = |path: &Path| getxattr(path, "user.warpfs.state").expect("known");
    let loading = || state(&large) == "loading";
    let interrupt = |child: &std::process::Child| {
        let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("sent");
    };
    let first = begin(&mounted.mountpoint);
    eventually("it is loading", loading);
    interrupt(&first);
    let said = first.wait_with_output().expect("ended");
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert_eq!(said.status.code(), Some(130), "{text}");
    assert!(text.contains("interrupted: 1 of 2 files had come"), "{text}");
    eventually("nothing is left of it", || state(&large) == "absent" && mounted.used() == 4 << 20);
    assert_eq!(state(&small), "resident");
    // The control: with two that want it, one may go.
    let (first, second) = (begin(&large), begin(&large));
    eventually("both wait", || mounted.counter("joined") > 0 && loading());
    interrupt(&first);
    assert_eq!(first.wait_with_output().expect("ended").status.code(), Some(130));
    assert!(second.wait_with_output().expect("ended").status.success());
    doubled.warpfs(&["verify"], &large).ok();
}
