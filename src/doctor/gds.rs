//! The two ways in which cuFile reaches a disk directly: the kernel module nvidia-fs, and the kernel's own PCI peer-to-peer DMA.
//! What each needs is as NVIDIA's guides have it (GPUDirect Storage: "Installation and Troubleshooting", "NVMe P2PDMA").
//! That everything is there does not prove that bytes go that way: only cuFile's counters do. Called by `examine`.

use super::gpu::{Gpu, kernel_module};
use super::machine::{Machine, numbers};
use super::{Finding, cufile};

const NVIDIA_FS: &str = "nvidia-fs";
const P2P_KERNEL: &str = "p2pdma kernel";
const P2P_DRIVER: &str = "p2pdma driver";
const MULTIPATH: &str = "nvme multipath";
const IOMMU: &str = "iommu";
/// The checks that only GDS needs.
pub(super) const NAMES: [&str; 7] =
    [cufile::LIBRARY, cufile::CONFIGURATION, NVIDIA_FS, P2P_KERNEL, P2P_DRIVER, MULTIPATH, IOMMU];

/// The options of the driver with which its memory can be a peer's (static BAR1, no write combining); x86 only.
const DWORDS: [&str; 2] = ["RMForceStaticBar1", "RmForceDisableIomapWC"];
/// The first driver whose open kernel modules can do it.
const P2P_VERSION: (u32, u32) = (565, 0);

/// Which ways are open, as far as one can see without going them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ways {
    pub(super) cufile: bool,
    /// cuFile is told never to go directly.
    pub(super) forced_off: bool,
    pub(super) nvidia_fs: bool,
    /// The storage drivers that have registered with nvidia-fs; `None` where it does not say.
    pub(super) registered: Option<Vec<String>>,
    pub(super) p2pdma: bool,
}

pub(super) fn check(machine: &Machine, gpus: &[Gpu]) -> (Ways, Vec<Finding>) {
    let (installed, found) = cufile::library();
    let (settings, configured) = cufile::configuration(machine, |name| std::env::var(name).ok());
    let (nvidia_fs, registered, module) = nvidia_fs(machine);
    let (by_kernel, kernel) = p2p_kernel(machine);
    let (by_driver, driver) = p2p_driver(machine, cfg!(target_arch = "x86_64"), settings.p2pdma);
    let multipath = multipath(machine);
    let by_multipath = machine.text(MULTIPATH_PARAMETER).as_deref() != Some("Y");
    let ways = Ways {
        cufile: installed,
        forced_off: settings.force_compat == Some(true),
        nvidia_fs,
        registered,
        p2pdma: by_kernel && by_driver && by_multipath && settings.p2pdma == Some(true),
    };
    (ways, vec![found, configured, module, kernel, driver, multipath, iommu(machine, gpus)])
}

fn nvidia_fs(machine: &Machine) -> (bool, Option<Vec<String>>, Finding) {
    let version = machine.text("/proc/driver/nvidia-fs/version");
    if version.is_none() && !machine.exists("/sys/module/nvidia_fs") {
        let finding = Finding::note(NVIDIA_FS, "the kernel module nvidia-fs is not loaded")
            .so("if P2PDMA is not ready either: `apt install nvidia-fs-dkms` (NVIDIA's repository) and `modprobe nvidia-fs`");
        return (false, None, finding);
    }
    let version = version.or_else(|| machine.text("/sys/module/nvidia_fs/version"));
    let version = version.map_or("loaded; its version is unknown".to_string(), |text| {
        text.strip_prefix("version:").unwrap_or(&text).trim().to_string()
    });
    let stats = machine.text("/proc/driver/nvidia-fs/stats").unwrap_or_default();
    let counts = stats.lines().find(|line| line.starts_with("IO stats")).map(|line| format!("; {line}"));
    let modules = machine.text("/proc/driver/nvidia-fs/modules");
    let registered = modules.map(|text| -> Vec<String> {
        text.lines().filter_map(|line| line.split(':').next()).map(|name| name.trim().to_string()).collect()
    });
    let drivers = match registered.as_deref() {
        None => String::new(),
        Some([]) => "; no storage driver has registered with it".to_string(),
        Some(names) => format!("; for {}", names.join(", ")),
    };
    (true, registered, Finding::ok(NVIDIA_FS, format!("{version}{drivers}{}", counts.unwrap_or_default())))
}

fn p2p_kernel(machine: &Machine) -> (bool, Finding) {
    const OPTION: &str = "CONFIG_PCI_P2PDMA";
    if machine.kernel().is_some_and(|kernel| kernel < (6, 2)) {
        let finding = Finding::note(P2P_KERNEL, "PCI peer-to-peer DMA to disks begins with Linux 6.2");
        return (false, finding.so("take Linux 6.2 or newer, or nvidia-fs"));
    }
    match machine.has_option(OPTION).or_else(|| has_symbols(machine)) {
        Some(true) => (true, Finding::ok(P2P_KERNEL, format!("built with {OPTION}"))),
        Some(false) => {
            let finding = Finding::note(P2P_KERNEL, format!("built without {OPTION}"));
            (false, finding.so("take a kernel that has it (Ubuntu's generic ones do), or nvidia-fs"))
        }
        None => (false, Finding::unknown(P2P_KERNEL, "the kernel's configuration and symbols cannot be read")),
    }
}

/// Whether the kernel's list of its own functions has those of P2PDMA.
fn has_symbols(machine: &Machine) -> Option<bool> {
    let symbols = machine.text("/proc/kallsyms").filter(|text| !text.is_empty())?;
    Some(symbols.contains(" pci_p2pdma_"))
}

/// `wanted` is what cuFile's configuration says about P2PDMA.
fn p2p_driver(machine: &Machine, x86: bool, wanted: Option<bool>) -> (bool, Finding) {
    let Some(module) = kernel_module(machine) else {
        return (false, Finding::unknown(P2P_DRIVER, "/proc/driver/nvidia is not to be seen from here"));
    };
    let mut missing = Vec::new();
    let mut todo = Vec::new();
    if module.open == Some(false) {
        missing.push("its kernel modules are not the open ones".to_string());
        todo.push("install the driver with the open kernel modules (nvidia-open)".to_string());
    }
    if numbers(&module.version).is_some_and(|version| version < P2P_VERSION) {
        missing.push(format!("{} is older than {}", module.version, P2P_VERSION.0));
        todo.push(format!("install driver {} or newer", P2P_VERSION.0));
    }
    if x86 {
        let Some(params) = machine.text("/proc/driver/nvidia/params") else {
            return (false, Finding::unknown(P2P_DRIVER, "/proc/driver/nvidia/params cannot be read"));
        };
        let unset: Vec<&str> = DWORDS.into_iter().filter(|name| !is_set(&params, name)).collect();
        if !unset.is_empty() {
            missing.push(format!("{} is not set", unset.join(" and ")));
            let all = DWORDS.map(|name| format!("{name}=1;")).concat();
            todo.push(format!(
                "`options nvidia NVreg_RegistryDwords=\"{all}\"` in /etc/modprobe.d/nvidia-p2pdma.conf, rebuild the initramfs, reboot"
            ));
        }
    }
    if wanted != Some(true) {
        todo.push("`\"use_pci_p2pdma\": true` below `properties` of cufile.json".to_string());
    }
    if missing.is_empty() {
        let finding = Finding::ok(P2P_DRIVER, "set up for PCI peer-to-peer DMA");
        return match wanted {
            Some(true) => (true, finding),
            _ => {
                (true, Finding::note(P2P_DRIVER, "set up for it, but cuFile is not told to use it").so(todo.join("; ")))
            }
        };
    }
    (false, Finding::note(P2P_DRIVER, missing.join("; ")).so(format!("if nvidia-fs is not used: {}", todo.join("; "))))
}

/// Whether a key is 1 in the driver's list of registry entries, `RegistryDwords: "A=1;B=0x11"`.
fn is_set(params: &str, key: &str) -> bool {
    let entries = params.lines().find_map(|line| line.strip_prefix("RegistryDwords:")).unwrap_or_default();
    let pairs = entries.trim().trim_matches('"').split(';').filter_map(|entry| entry.split_once('='));
    pairs.into_iter().any(|(name, value)| name.trim().eq_ignore_ascii_case(key) && matches!(value.trim(), "1" | "0x1"))
}

const MULTIPATH_PARAMETER: &str = "/sys/module/nvme_core/parameters/multipath";

fn multipath(machine: &Machine) -> Finding {
    match machine.text(MULTIPATH_PARAMETER).as_deref() {
        Some("N") => Finding::ok(MULTIPATH, "off, as P2PDMA needs it"),
        Some("Y") => Finding::note(MULTIPATH, "on: P2PDMA does not work with it")
            .so("if nvidia-fs is not used: `options nvme_core multipath=N` in /etc/modprobe.d/nvme.conf, rebuild the initramfs, \
                 reboot"),
        Some(other) => Finding::unknown(MULTIPATH, format!("{MULTIPATH_PARAMETER} says {other}")),
        None if machine.exists("/sys/module/nvme_core") => Finding::ok(MULTIPATH, "this kernel has none"),
        None => Finding::unknown(MULTIPATH, "no NVMe driver is loaded"),
    }
}

fn iommu(machine: &Machine, gpus: &[Gpu]) -> Finding {
    let translated: Vec<&str> = gpus
        .iter()
        .filter(|gpu| {
            let group = |bus: &String| machine.text(&format!("/sys/bus/pci/devices/{bus}/iommu_group/type"));
            gpu.facts.bus.as_ref().and_then(group).is_some_and(|kind| kind != "identity")
        })
        .map(|gpu| gpu.label.as_str())
        .collect();
    if !translated.is_empty() {
        let what = format!(
            "it translates what {} reads and writes: traffic between devices goes by the CPU",
            translated.join(", ")
        );
        return Finding::note(IOMMU, what).so(
            "boot with iommu=off (or amd_iommu=off, intel_iommu=off), or with iommu=pt where the platform needs it",
        );
    }
    if !machine.exists("/sys/bus/pci/devices") {
        return Finding::unknown(IOMMU, "there is no PCI bus to be seen");
    }
    if machine.names("/sys/kernel/iommu_groups").is_empty() {
        return Finding::ok(IOMMU, "off, as this kernel sees it");
    }
    Finding::ok(IOMMU, "on, and it passes the GPU's traffic through")
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::super::machine::made::Made;
    use super::*;
    use crate::device::cuda::DeviceFacts;

    const OPEN: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n";

    fn remedy(finding: &Finding) -> &str {
        finding.remedy.as_deref().unwrap_or_default()
    }

    #[test]
    fn nvidia_fs_tells_its_version_and_who_registered() {
        let made = Made::new();
        let (there, _, finding) = nvidia_fs(&made.machine());
        assert!(!there && remedy(&finding).contains("modprobe nvidia-fs"), "{finding:?}");
        made.file("/proc/driver/nvidia-fs/version", "version: 2.30\n");
        made.file("/proc/driver/nvidia-fs/modules", "nvme: 6.8.0\nlustre: 2.15\n");
        made.file("/proc/driver/nvidia-fs/stats", "GDS Version: 1.0\nIO stats: Enabled, peer IO stats: Enabled\n");
        let (there, registered, finding) = nvidia_fs(&made.machine());
        assert!(there && finding.state == State::Ok);
        assert_eq!(registered, Some(vec!["nvme".to_string(), "lustre".to_string()]));
        assert_eq!(finding.what, "2.30; for nvme, lustre; IO stats: Enabled, peer IO stats: Enabled");
    }

    #[test]
    fn the_kernel_needs_its_option_or_its_symbols() {
        let of = |release: &str, files: &[(&str, &str)]| {
            let made = Made::new();
            made.file("/proc/sys/kernel/osrelease", release);
            for (path, text) in files {
                made.file(path, text);
            }
            p2p_kernel(&made.machine())
        };
        let symbols = "0 T pci_enable_device\n0 T pci_p2pdma_distance_many\n";
        assert!(of("6.8.0", &[("/boot/config-6.8.0", "CONFIG_PCI_P2PDMA=y\n")]).0);
        assert!(of("6.8.0", &[("/proc/kallsyms", symbols)]).0);
        assert!(!of("6.8.0", &[("/proc/kallsyms", "0 T pci_enable_device\n")]).0);
        assert!(!of("5.15.0", &[("/proc/kallsyms", symbols)]).0);
        let (ready, finding) = of("6.8.0", &[]);
        assert!(!ready && finding.what.starts_with("unknown"), "{finding:?}");
    }

    #[test]
    fn the_driver_needs_open_modules_an_age_and_two_settings() {
        let of = |version: &str, params: &str, x86, wanted| {
            let made = Made::new();
            made.file("/proc/driver/nvidia/version", version);
            made.file("/proc/driver/nvidia/params", params);
            p2p_driver(&made.machine(), x86, wanted)
        };
        let set = "Mobile: 4294967295\nRegistryDwords: \"RMForceStaticBar1=1;ForceP2P=0;RmForceDisableIomapWC=1;\"\n";
        let (ready, finding) = of(OPEN, set, true, Some(true));
        assert!(ready && finding.state == State::Ok, "{finding:?}");
        let (_, finding) = of(OPEN, set, true, None);
        assert!(remedy(&finding).contains("use_pci_p2pdma"), "{finding:?}");
        let half = "RegistryDwords: \"RMForceStaticBar1=1\"\n";
        let (ready, finding) = of(OPEN, half, true, Some(true));
        assert!(!ready && finding.what.contains("RmForceDisableIomapWC is not set"), "{finding:?}");
        assert!(of(OPEN, "", false, Some(true)).0, "elsewhere than on x86 they are not needed");
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n";
        let (ready, finding) = of(closed, set, true, Some(true));
        assert!(!ready && finding.what.contains("open") && finding.what.contains("565"), "{finding:?}");
        assert!(p2p_driver(&Made::new().machine(), true, None).1.what.starts_with("unknown"));
    }

    #[test]
    fn multipath_has_to_be_off() {
        let of = |text: &str| multipath(&Made::new().file(MULTIPATH_PARAMETER, text).machine());
        assert_eq!(of("N\n").state, State::Ok);
        assert!(remedy(&of("Y\n")).contains("multipath=N"));
        assert!(multipath(&Made::new().machine()).what.starts_with("unknown"));
    }

    #[test]
    fn an_iommu_that_translates_for_the_gpu_is_a_note() {
        let made = Made::new();
        let facts = DeviceFacts { bus: Some("0000:be:00.0".into()), ..DeviceFacts::default() };
        let gpus = [Gpu { label: "cuda:0".into(), facts }];
        assert!(iommu(&made.machine(), &gpus).what.starts_with("unknown"));
        made.file("/sys/bus/pci/devices/0000:be:00.0/vendor", "0x10de");
        assert_eq!(iommu(&made.machine(), &gpus).what, "off, as this kernel sees it");
        made.file("/sys/kernel/iommu_groups/7/type", "identity");
        made.file("/sys/bus/pci/devices/0000:be:00.0/iommu_group/type", "identity\n");
        assert_eq!(iommu(&made.machine(), &gpus).state, State::Ok);
        made.file("/sys/bus/pci/devices/0000:be:00.0/iommu_group/type", "DMA-FQ\n");
        assert!(remedy(&iommu(&made.machine(), &gpus)).contains("iommu=off"));
    }
}
