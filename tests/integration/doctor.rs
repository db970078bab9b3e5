//! `warpfs doctor`: what it says of this machine, of one without a driver, and of one whose driver and libcufile are test
//! doubles. What it makes of other machines is tested beside each check, on files of our own.

use crate::harness::*;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Checks that every device needs.
const ALWAYS: &[&str] = &[
    "device",
    "device memory",
    "kernel",
    "fuse",
    "passthrough",
    "io_uring",
    "cachestat",
    "locked memory",
    "descriptors",
    "mount helper",
    "other users",
];
/// Checks that only a GPU needs.
const GPU: &[&str] = &[
    "nvidia driver",
    "cuda",
    "gpu sharing",
    "gpu direct memory",
    "libcufile",
    "cufile.json",
    "nvidia-fs",
    "p2pdma kernel",
    "p2pdma driver",
    "nvme multipath",
    "iommu",
    "pcie link",
];
/// Checks of a directory.
const SOURCE: &[&str] = &["source", "direct io", "disk", "gds"];

/// What it says as JSON, and its exit code.
struct Said {
    json: Value,
    output: Output,
}

impl Said {
    fn of(words: &[&str], source: Option<&Path>, environment: &[(&str, &str)]) -> Said {
        let mut command = warpfs(["doctor", "--json"]);
        command.args(words).args(source).envs(environment.iter().copied());
        let output = run(&mut command);
        let json = serde_json::from_slice(&output.stdout).expect("JSON, whatever is wrong");
        Said { json, output }
    }

    fn names(&self) -> Vec<&str> {
        self.findings().iter().map(|finding| finding["name"].as_str().expect("a name")).collect()
    }

    fn findings(&self) -> &Vec<Value> {
        self.json["findings"].as_array().expect("a list")
    }

    /// The first finding of this name, as (state, what, do).
    #[track_caller]
    fn finding(&self, name: &str) -> (&str, &str, &str) {
        let finding = self.findings().iter().find(|finding| finding["name"] == name);
        let finding = finding.unwrap_or_else(|| panic!("no {name} in {}", self.json));
        let text = |key: &str| finding[key].as_str().unwrap_or_default();
        (text("state"), text("what"), text("do"))
    }
}

#[test]
fn the_host_is_well_and_every_check_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("file"), "content").expect("written");
    let said = Said::of(&["--device", "host"], Some(folder.path()), &[]);
    assert!(said.output.status.success(), "{}{}", said.output.text(), said.output.stderr);
    assert_eq!(said.output.stderr, "");
    assert_eq!(said.names(), [ALWAYS, GPU, SOURCE].concat());
    assert!(GPU.iter().all(|name| said.finding(name).0 == "not-needed"), "{}", said.json);
    assert!(said.finding("device").1.starts_with("took host memory"));
    assert!(said.finding("source").1.contains(folder.path().to_str().expect("text")));
    assert_eq!(said.finding("fuse").0, "ok");
    assert_eq!((&said.json["summary"]["well"], &said.json["summary"]["device"]), (&Value::Bool(true), &"host".into()));

    // For people: a line a finding, in columns, and under it what to do.
    let text = run(warpfs(["doctor", "--device", "host"]).arg(folder.path())).ok().text();
    let width = said.names().iter().map(|name| name.len()).max().expect("some");
    let mut lines = text.lines();
    for finding in said.findings() {
        let line = lines.next().expect("a line");
        let (name, what) = (finding["name"].as_str().expect("text"), finding["what"].as_str().expect("text"));
        let state = finding["state"].as_str().expect("text").replace("not-needed", "-");
        // What is free changes from one run to the next.
        let what = if name == "device memory" { "host: " } else { what };
        assert!(line.starts_with(&format!("{state:<5}  {name:<width$}  {what}")), "{line}");
        if let Some(remedy) = finding["do"].as_str() {
            assert_eq!(lines.next().expect("a line").trim_start(), format!("do: {remedy}"));
        }
    }
    assert!(lines.any(|line| line.starts_with("host: 0 wrong, ")), "{text}");
}

#[test]
fn the_summary_counts_the_findings() {
    for device in ["host", "cuda:77"] {
        let said = Said::of(&["--device", device], None, &[]);
        assert_eq!(said.names(), [ALWAYS, GPU].concat(), "without a directory nothing is said of one");
        for state in ["ok", "note", "wrong", "not-needed"] {
            let counted = said.findings().iter().filter(|finding| finding["state"] == state).count();
            assert_eq!(said.json["summary"][state], counted, "{state}: {}", said.json);
        }
        assert_eq!(said.json["summary"]["well"], said.output.status.success());
    }
}

#[test]
fn a_device_that_is_not_there_is_wrong_and_what_to_do_is_said() {
    for device in ["cuda:77", "toaster"] {
        let said = Said::of(&["--device", device], None, &[]);
        let (state, what, remedy) = said.finding("device");
        assert!(state == "wrong" && what.contains(device) && !remedy.is_empty(), "{}", said.json);
        let (what, remedy) = (what.to_string(), remedy.to_string());
        assert_eq!(said.output.fails(&["device: ", &what, &remedy]).lines().count(), 1);
    }
}

#[test]
fn without_a_driver_a_gpu_is_wrong() {
    if Said::of(&[], None, &[]).json["summary"]["device"] != "host" || Path::new("/proc/driver/nvidia").exists() {
        return; // this machine has one
    }
    let said = Said::of(&["--device", "cuda:0"], None, &[]);
    let (state, what, remedy) = said.finding("device");
    assert_eq!(state, "wrong");
    assert!(what.contains("libcuda.so.1 not found") && remedy.contains("install NVIDIA's driver"), "{}", said.json);
    assert_eq!(said.finding("nvidia driver").0, "wrong");
    assert!(said.finding("pcie link").1.starts_with("unknown"));
    said.output.fails(&["libcuda.so.1", "install NVIDIA's driver"]);
    // auto takes the host, and nothing is wrong with that.
    let said = Said::of(&["--device", "auto"], None, &[]);
    assert!(said.output.status.success() && said.finding("device").1.contains("no CUDA driver"), "{}", said.json);
}

#[test]
fn a_directory_that_cannot_be_mounted_is_wrong() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("file"), "content").expect("written");
    for (name, words) in
        [("none", ["No such file", "check the spelling"]), ("file", ["not a directory", "directory it is in"])]
    {
        let said = Said::of(&["--device", "host"], Some(&folder.path().join(name)), &[]);
        assert_eq!(said.finding("source").0, "wrong");
        assert_eq!(said.names(), [ALWAYS, GPU, &["source"]].concat(), "the rest is looked at all the same");
        said.output.fails(&[name, words[0], words[1]]);
    }
}

#[test]
fn a_mount_of_ours_is_no_source_and_its_source_is_named() {
    let mounted = Mounted::new();
    let said = Said::of(&["--device", "host"], Some(&mounted.mountpoint), &[]);
    let (state, what, remedy) = said.finding("source");
    assert!(state == "wrong" && what.contains("warpfs mount itself"), "{}", said.json);
    assert!(remedy.contains(mounted.source.to_str().expect("text")), "{remedy}");
    assert_eq!(Said::of(&["--device", "host"], Some(&mounted.source), &[]).finding("source").0, "ok", "the control");
}

#[test]
fn gds_cannot_serve_a_directory_in_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let _tmpfs = is_root().then(|| Tmpfs::mount(folder.path()));
    let place = if is_root() { folder.path() } else { Path::new("/dev/shm") };
    let said = Said::of(&["--device", "host"], Some(place), &[]);
    assert!(said.output.status.success());
    assert!(said.finding("source").1.ends_with("on tmpfs"), "{}", said.json);
    assert_eq!(said.finding("gds").0, "not-needed");
    assert!(said.finding("gds").1.contains("GDS cannot serve tmpfs"), "{}", said.json);
    // The control: of another file system that is not said.
    let said = Said::of(&["--device", "host"], Some(Path::new("/proc")), &[]);
    assert!(!said.finding("gds").1.contains("tmpfs"), "{}", said.json);
}

/// Compiles a library of one C source.
fn library(folder: &Path, name: &str, source: &str) {
    let file = folder.join(format!("{name}.c"));
    std::fs::write(&file, source).expect("written");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    run(Command::new(compiler).args(["-shared", "-fPIC", "-o"]).arg(folder.join(name)).arg(file)).ok();
}

/// What is said where the driver is its test double, and libcufile is this source or none.
fn doubled(libcufile: Option<&str>, source: Option<&Path>) -> Said {
    let folder = tempfile::tempdir().expect("a folder");
    fake_driver(folder.path(), &[]);
    if let Some(text) = libcufile {
        library(folder.path(), "libcufile.so.0", text);
    }
    let path = folder.path().to_str().expect("text");
    let environment = [
        ("LD_LIBRARY_PATH", path),
        ("FAKE_CUDA_DEVICES", "2"),
        ("FAKE_CUDA_TOTAL", "4294967296"),
        ("CUFILE_ENV_PATH_JSON", ""),
    ];
    Said::of(&["--device", "cuda:1"], source, &environment)
}

const WORKING: &str = "
typedef struct { int error, cuda; } status;
status cuFileGetVersion(int *version) { *version = 1150; return (status){0, 0}; }
";

#[test]
fn a_gpu_is_looked_at_through_its_driver() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = doubled(Some(WORKING), Some(folder.path()));
    assert!(said.output.status.success(), "{}{}", said.output.text(), said.output.stderr);
    assert!(said.finding("device").1.starts_with("took cuda:1 (Fake GPU 1"));
    assert!(said.finding("device memory").1.starts_with("cuda:1: 4.0 GiB; "), "{}", said.json);
    assert_eq!(said.finding("cuda").1, "the driver runs CUDA up to 12.8");
    assert_eq!(said.finding("gpu sharing"), ("ok", "cuda:1: its memory can be handed to other processes", ""));
    let (state, what, remedy) = said.finding("gpu direct memory");
    assert!(state == "note" && what.starts_with("cuda:1") && remedy.contains("posix route"), "{}", said.json);
    assert!(said.finding("pcie link").1.contains("cuda:1 at 0000:f1:00.0"), "{}", said.json);
    assert_eq!(said.json["summary"]["device"], "cuda:1");
    let (state, _, remedy) = said.finding("gds");
    assert!(state == "note" && remedy.contains("posix route"), "what cannot be had is not wrong: {}", said.json);
    assert!(said.findings().iter().all(|finding| finding["state"] != "not-needed"));
}

#[test]
fn libcufile_is_loaded_by_a_child_that_may_crash_or_hang() {
    let said = doubled(Some(WORKING), None);
    let (state, what, _) = said.finding("libcufile");
    assert!(state == "ok" && what.starts_with("1.15, /") && what.ends_with("/libcufile.so.0"), "{what}");
    let said = doubled(Some("int nothing;"), None);
    assert!(said.finding("libcufile").1.starts_with("loaded; it does not tell its version, /"), "{}", said.json);
    for (constructor, words) in [
        ("__builtin_trap();", "killed by signal"),
        ("_exit(3);", "exits with status 3"),
        ("_exit(0);", "ends without an answer"),
        ("for (;;) pause();", "hangs"),
    ] {
        let text =
            format!("#include <unistd.h>\n__attribute__((constructor)) static void begin(void) {{ {constructor} }}\n");
        let begun = Instant::now();
        let said = doubled(Some(&text), None);
        assert!(begun.elapsed() < Duration::from_secs(30));
        let (state, what, remedy) = said.finding("libcufile");
        assert!(state == "note" && what.contains(words) && !remedy.is_empty(), "{constructor}: {what}");
        assert!(said.output.status.success(), "the rest is looked at, and is well");
    }
}

#[test]
fn a_library_that_lacks_another_is_told_from_one_that_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    library(folder.path(), "libneeded-by-cufile.so", "int needed;");
    std::fs::write(folder.path().join("c.c"), "extern int needed; int *use(void) { return &needed; }")
        .expect("written");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut command = Command::new(compiler);
    command.current_dir(folder.path()).args([
        "-shared",
        "-fPIC",
        "-o",
        "libcufile.so.0",
        "c.c",
        "-L.",
        "-lneeded-by-cufile",
    ]);
    run(&mut command).ok();
    std::fs::remove_file(folder.path().join("libneeded-by-cufile.so")).expect("removed");
    let environment = [("LD_LIBRARY_PATH", folder.path().to_str().expect("text"))];
    let said = Said::of(&["--device", "cuda:77"], None, &environment);
    assert!(said.finding("libcufile").1.contains("libneeded-by-cufile.so"), "{}", said.json);
}
