//! The device: which one `--device` means and why, what is free on it, its driver, and whether its memory can be shared and reached. Called by
//! `examine`.

use super::machine::{Machine, numbers};
use super::{Finding, State};
use crate::config::Config;
use crate::device::cuda::{self, DeviceFacts};
use crate::device::{self, Info, Selection};
use crate::failure::Failure;
use crate::protocol::{Code, DeviceKind};
use crate::size::Human;

const DEVICE: &str = "device";
const MEMORY: &str = "device memory";
const DRIVER: &str = "nvidia driver";
const CUDA: &str = "cuda";
const SHARING: &str = "gpu sharing";
const REACH: &str = "gpu direct memory";
/// The checks that only a GPU needs.
pub(super) const NAMES: [&str; 4] = [DRIVER, CUDA, SHARING, REACH];

/// One GPU that was chosen.
#[derive(Clone, Debug)]
pub(super) struct Gpu {
    /// `cuda:N`
    pub(super) label: String,
    pub(super) facts: DeviceFacts,
}

/// What `--device` came to.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) finding: Finding,
    pub(super) gpus: Vec<Gpu>,
    /// Whether copies have room, a finding for each device.
    pub(super) room: Vec<Finding>,
    /// What was asked for, where it is not there.
    missing: Option<String>,
}

impl Chosen {
    /// A GPU was chosen, or asked for in vain.
    pub(super) fn wants_gpu(&self) -> bool {
        !self.gpus.is_empty() || self.missing.is_some()
    }

    pub(super) fn label(&self) -> String {
        match &self.missing {
            Some(spec) => spec.clone(),
            None if self.gpus.is_empty() => "host".to_string(),
            None => self.gpus.iter().map(|gpu| gpu.label.as_str()).collect::<Vec<_>>().join(","),
        }
    }
}

pub(super) fn choose(machine: &Machine, spec: &str) -> Chosen {
    match device::select(spec) {
        Ok(selection) => chosen(machine, spec, &selection),
        Err(failure) => Chosen {
            finding: refused(machine, &failure),
            gpus: Vec::new(),
            room: vec![Finding::unknown(MEMORY, "there is no device to ask")],
            missing: Some(spec.into()),
        },
    }
}

fn chosen(machine: &Machine, spec: &str, selection: &Selection) -> Chosen {
    let mut gpus = Vec::new();
    for info in selection.memories.iter().map(|memory| memory.info()).filter(|info| info.kind == DeviceKind::Cuda) {
        let facts = cuda::device_facts(&info.uuid).unwrap_or_default();
        gpus.push(Gpu { label: info.label.clone(), facts });
    }
    let plugged = plugged_in(machine);
    let mut finding = Finding::ok(DEVICE, &selection.line);
    // `auto` took the host although there is a GPU: hardly what somebody wants who bought one.
    if spec == "auto" && gpus.is_empty() && !plugged.is_empty() {
        finding.state = State::Note;
        finding.what += &format!("; yet an NVIDIA GPU is plugged in at {}", plugged.join(", "));
        finding = finding.so(install(machine));
    }
    let room = selection.memories.iter().map(|memory| room(memory.info(), memory.free())).collect();
    Chosen { finding, gpus, room, missing: None }
}

/// Whether a mount finds room for its copies where it is not told how much they may take.
fn room(info: &Info, free: Option<u64>) -> Finding {
    let there = match free {
        Some(free) => format!("{}: {} of {} are free", info.label, Human(free), Human(info.total)),
        None => format!("{}: {}; nobody tells how much of it is free", info.label, Human(info.total)),
    };
    match Config::limit_of(None, None, info, free) {
        Ok(limit) => Finding::ok(MEMORY, format!("{there}; copies take up to {} by default", Human(limit))),
        Err(_) => Finding::wrong(MEMORY, format!("{there}: no room for copies"))
            .so("end what uses it (`nvidia-smi` lists that), set a --budget that fits, or take another --device"),
    }
}

fn refused(machine: &Machine, failure: &Failure) -> Finding {
    let finding = Finding::wrong(DEVICE, &failure.message);
    match failure.code {
        Code::BadRequest => finding.so("name a device as `warpfs mount --device` takes it"),
        Code::NoDevice if cuda::list().is_ok() => finding
            .so("name one that is there, or look at CUDA_VISIBLE_DEVICES; --device auto takes the first that it finds"),
        _ => finding.so(install(machine)),
    }
}

/// What is missing where the CUDA driver does not start.
fn install(machine: &Machine) -> &'static str {
    if kernel_module(machine).is_some() {
        "the kernel's part of the driver is loaded, so its libraries are missing or of another version: install libcuda of \
         that version, or reboot after an update; start a container with --gpus all"
    } else {
        "install NVIDIA's driver (Ubuntu: `ubuntu-drivers install`), reboot, and see that `nvidia-smi` lists the GPU; start \
         a container with --gpus all; or use --device host"
    }
}

/// Bus addresses of NVIDIA's display controllers, with a driver or without.
fn plugged_in(machine: &Machine) -> Vec<String> {
    const DEVICES: &str = "/sys/bus/pci/devices";
    let is_gpu = |name: &String| {
        let says = |file: &str| machine.text(&format!("{DEVICES}/{name}/{file}")).unwrap_or_default();
        // PCI's number of NVIDIA, and the class of display controllers.
        says("vendor") == "0x10de" && says("class").starts_with("0x03")
    };
    machine.names(DEVICES).into_iter().filter(is_gpu).collect()
}

/// The driver's part in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KernelModule {
    pub(super) version: String,
    /// NVIDIA's open kernel modules, which P2PDMA needs. `None` where that is not said.
    pub(super) open: Option<bool>,
}

pub(super) fn kernel_module(machine: &Machine) -> Option<KernelModule> {
    if let Some(text) = machine.text("/proc/driver/nvidia/version") {
        let first = text.lines().next().unwrap_or_default();
        let is_version = |word: &&str| numbers(word).is_some() && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        if let Some(version) = first.split_whitespace().find(is_version) {
            return Some(KernelModule { version: version.into(), open: Some(first.contains("Open Kernel Module")) });
        }
    }
    Some(KernelModule { version: machine.text("/sys/module/nvidia/version")?, open: None })
}

pub(super) fn check(machine: &Machine, chosen: &Chosen) -> Vec<Finding> {
    let mut findings = vec![driver(machine, cuda::driver_version(), !chosen.gpus.is_empty())];
    if chosen.gpus.is_empty() {
        let why = "there is no device to ask";
        findings.extend([CUDA, SHARING, REACH].map(|name| Finding::unknown(name, why)));
        return findings;
    }
    findings.push(match cuda::cuda_version() {
        Ok((major, minor)) => Finding::ok(CUDA, format!("the driver runs CUDA up to {major}.{minor}")),
        Err(failure) => Finding::unknown(CUDA, failure),
    });
    findings.extend(chosen.gpus.iter().map(sharing));
    findings.extend(chosen.gpus.iter().map(reach));
    findings
}

/// `library` is the version that NVML tells; `works` says that CUDA finds a device.
fn driver(machine: &Machine, library: Option<String>, works: bool) -> Finding {
    const NOBODY: &str = "neither /proc/driver/nvidia nor NVML tells of it";
    match (kernel_module(machine), library) {
        (Some(module), _) => {
            let kind = match module.open {
                Some(true) => "open kernel modules",
                Some(false) => "proprietary kernel modules",
                None => "nobody says whether its kernel modules are the open ones",
            };
            Finding::ok(DRIVER, format!("{}, {kind}", module.version))
        }
        (None, Some(version)) => {
            Finding::ok(DRIVER, format!("{version}; /proc/driver/nvidia is not to be seen from here"))
        }
        (None, None) if works => Finding::unknown(DRIVER, format!("it works, but {NOBODY}")),
        (None, None) => Finding::wrong(DRIVER, format!("not loaded: {NOBODY}")).so("see `device`"),
    }
}

fn sharing(gpu: &Gpu) -> Finding {
    if gpu.facts.can_share {
        return Finding::ok(SHARING, format!("{}: its memory can be handed to other processes", gpu.label));
    }
    Finding::wrong(SHARING, format!("{}: its memory cannot be handed to other processes as a descriptor", gpu.label))
        .so("use another GPU, or --device host")
}

fn reach(gpu: &Gpu) -> Finding {
    if gpu.facts.can_be_reached {
        return Finding::ok(REACH, format!("{}: disks can reach memory that is shared (RDMA-capable)", gpu.label));
    }
    let what = format!("{}: disks cannot reach memory that is shared (not RDMA-capable): no GDS", gpu.label);
    Finding::note(REACH, what)
        .so("nothing, the posix route serves every file; GDS takes a data-center or workstation GPU")
}

#[cfg(test)]
mod tests {
    use super::super::machine::made::Made;
    use super::*;

    const OPEN: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x)  Sun\n\
                        GCC version:  gcc version 12.3.0\n";
    const CLOSED: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n";

    #[test]
    fn the_kernel_module_tells_its_version_and_kind() {
        let of = |text: &str| {
            let made = Made::new();
            made.file("/proc/driver/nvidia/version", text);
            kernel_module(&made.machine())
        };
        assert_eq!(of(OPEN), Some(KernelModule { version: "580.65.06".into(), open: Some(true) }));
        assert_eq!(of(CLOSED), Some(KernelModule { version: "535.183.01".into(), open: Some(false) }));
        assert_eq!(of("gibberish"), None);
        let made = Made::new();
        made.file("/sys/module/nvidia/version", "580.65.06\n");
        assert_eq!(kernel_module(&made.machine()).map(|module| module.open), Some(None));
    }

    #[test]
    fn a_driver_that_is_nowhere_is_wrong_unless_it_works() {
        let nowhere = Made::new().machine();
        assert_eq!(driver(&nowhere, None, false).state, State::Wrong);
        assert_eq!(driver(&nowhere, Some("580.65.06".into()), false).state, State::Ok, "NVML tells");
        assert!(driver(&nowhere, None, true).what.starts_with("unknown"), "no module, as in a sandbox");
        assert!(install(&nowhere).contains("install NVIDIA's driver"));
        let made = Made::new();
        made.file("/proc/driver/nvidia/version", OPEN);
        assert_eq!(driver(&made.machine(), None, false).what, "580.65.06, open kernel modules");
        assert!(install(&made.machine()).contains("its libraries are missing"));
    }

    #[test]
    fn a_gpu_without_a_driver_is_seen() {
        let made = Made::new();
        made.file("/sys/bus/pci/devices/0000:be:00.0/vendor", "0x10de\n");
        made.file("/sys/bus/pci/devices/0000:be:00.0/class", "0x030200\n");
        // Its sound and another vendor's card are none.
        made.file("/sys/bus/pci/devices/0000:be:00.1/vendor", "0x10de\n");
        made.file("/sys/bus/pci/devices/0000:be:00.1/class", "0x040300\n");
        made.file("/sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086\n");
        made.file("/sys/bus/pci/devices/0000:00:02.0/class", "0x030000\n");
        assert_eq!(plugged_in(&made.machine()), ["0000:be:00.0"]);
    }

    #[test]
    fn a_device_without_room_is_wrong() {
        let selection = device::select("host").expect("the host");
        let info = selection.memories[0].info();
        let good = room(info, Some(info.total));
        assert!(good.state == State::Ok && good.what.starts_with("host: "), "{good:?}");
        assert_eq!(room(info, None).state, State::Ok);
        let full = room(info, Some(1 << 20));
        assert!(full.state == State::Wrong && full.remedy.is_some_and(|remedy| remedy.contains("--budget")));
    }

    #[test]
    fn the_host_wants_no_gpu_and_a_word_that_is_no_device_is_wrong() {
        let host = choose(&Made::new().machine(), "host");
        assert!(!host.wants_gpu());
        assert_eq!((host.finding.state, host.label().as_str()), (State::Ok, "host"));
        let toaster = choose(&Made::new().machine(), "toaster");
        assert!(toaster.wants_gpu());
        assert_eq!((toaster.finding.state, toaster.label().as_str()), (State::Wrong, "toaster"));
    }
}
