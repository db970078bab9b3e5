//! The GPU's link, and how far it is from the disks, read from sysfs as `nvidia-smi topo` has it: PIX (one PCIe switch),
//! PXB (several), PHB (a host bridge), NODE (host bridges of one NUMA node), SYS (between NUMA nodes). Called by `examine`.

use super::Finding;
use super::block::{Disk, Kind};
use super::gpu::Gpu;
use super::machine::Machine;

pub(super) const LINK: &str = "pcie link";
const DISTANCE: &str = "gpu to disk";

pub(super) fn links(machine: &Machine, gpus: &[Gpu]) -> Vec<Finding> {
    if gpus.is_empty() {
        return vec![Finding::unknown(LINK, "there is no device to ask")];
    }
    gpus.iter().map(|gpu| link(machine, gpu)).collect()
}

/// One end of a link, as far as sysfs tells.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Link {
    /// Billions of transfers a second on a lane.
    speed: f64,
    lanes: u32,
}

impl Link {
    fn read(machine: &Machine, device: &str, which: &str) -> Option<Link> {
        let speed = machine.text(&format!("{device}/{which}_link_speed"))?;
        let lanes = machine.number(&format!("{device}/{which}_link_width"))?;
        // 0 and 255 lanes are those of a device that does not tell, such as a virtual one.
        let lanes = u32::try_from(lanes).ok().filter(|lanes| (1..255).contains(lanes))?;
        Some(Link { speed: speed.split_whitespace().next()?.parse().ok()?, lanes })
    }

    /// The generation of PCIe that has this speed.
    fn generation(self) -> u32 {
        match self.speed {
            speed if speed <= 2.5 => 1,
            speed if speed <= 5.0 => 2,
            speed if speed <= 8.0 => 3,
            speed if speed <= 16.0 => 4,
            speed if speed <= 32.0 => 5,
            _ => 6,
        }
    }

    /// GB/s each way, less what the line's code takes: 2 bits of 10, and since the third generation 2 of 130.
    fn bandwidth(self) -> f64 {
        let code = if self.generation() < 3 { 0.8 } else { 128.0 / 130.0 };
        self.speed * f64::from(self.lanes) * code / 8.0
    }

    fn words(self) -> String {
        format!("generation {} x{} ({:.0} GB/s at most)", self.generation(), self.lanes, self.bandwidth())
    }
}

fn link(machine: &Machine, gpu: &Gpu) -> Finding {
    let label = &gpu.label;
    let device = gpu.facts.bus.as_ref().map(|bus| format!("/sys/bus/pci/devices/{bus}"));
    let read = |which| Link::read(machine, device.as_ref()?, which);
    let (Some(now), Some(most)) = (read("current"), read("max")) else {
        let bus = gpu.facts.bus.as_deref().unwrap_or("an unknown place");
        return Finding::unknown(LINK, format!("sysfs does not show the link of {label} at {bus}"));
    };
    let what = format!("{label}: {}", now.words());
    if now.lanes < most.lanes {
        return Finding::note(LINK, format!("{what}; it has x{}", most.lanes))
            .so("look at the slot (some have fewer lanes, or share them), reseat the card, or change riser or cable");
    }
    let port = device.as_ref().and_then(|device| Some(above(&machine.target(device)?)?.to_string()));
    let port = port.and_then(|port| Link::read(machine, &port, "max"));
    if now.speed < most.speed && port.is_some_and(|port| port.speed <= now.speed) {
        let what =
            format!("{what}, which is all that the slot can do; the GPU can do generation {}", most.generation());
        return Finding::note(LINK, what)
            .so("a slot of that generation, where the machine has one; look in the BIOS too");
    }
    if now.speed < most.speed {
        return Finding::note(LINK, format!("{what}; it can do generation {}", most.generation()))
            .so("look again while the GPU works, since idle ones slow the link down; if it stays, look at the slot and the BIOS");
    }
    Finding::ok(LINK, what)
}

/// The port into which a device is plugged, whose directory its own lies in.
fn above(device: &str) -> Option<&str> {
    device.rsplit_once('/').map(|(port, _)| port)
}

pub(super) fn distances(machine: &Machine, gpus: &[Gpu], disks: &[Disk]) -> Vec<Finding> {
    let nvme: Vec<&Disk> = disks.iter().filter(|disk| matches!(disk.kind, Kind::Nvme(_))).collect();
    let pairs = gpus.iter().flat_map(|gpu| nvme.iter().map(move |disk| (gpu, *disk)));
    pairs.map(|(gpu, disk)| between(machine, gpu, disk)).collect()
}

fn between(machine: &Machine, gpu: &Gpu, disk: &Disk) -> Finding {
    let pair = format!("{} and {}", gpu.label, disk.name);
    let place = gpu.facts.bus.as_ref().and_then(|bus| machine.target(&format!("/sys/bus/pci/devices/{bus}")));
    let here = place.as_deref().and_then(Chain::of);
    // Of several ways to a disk the shortest.
    let ways = disk.controllers.iter().filter_map(|there| distance(machine, here.as_ref()?, &Chain::of(there)?));
    let Some(distance) = ways.min() else {
        return Finding::unknown(DISTANCE, format!("sysfs does not show how {pair} are connected"));
    };
    let what = format!("{pair}: {}", distance.words());
    if distance < Distance::Sys {
        return Finding::ok(DISTANCE, what);
    }
    let node = here.map(|here| here.node(machine)).unwrap_or(-1);
    Finding::note(DISTANCE, what).so(format!(
        "take a GPU of the disk's NUMA node, or put the data on a disk of the GPU's (node {node}); else `numactl \
         --cpunodebind={node} warpfs mount ...` keeps the CPU's part near the GPU"
    ))
}

/// From near to far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Distance {
    Pix,
    Pxb,
    Phb,
    Node,
    Sys,
}

impl Distance {
    fn words(self) -> &'static str {
        match self {
            Distance::Pix => "PIX, one PCIe switch lies between: the shortest way",
            Distance::Pxb => "PXB, several PCIe switches lie between, and no CPU",
            Distance::Phb => "PHB, the CPU's host bridge lies between",
            Distance::Node => "NODE, host bridges of one NUMA node lie between",
            Distance::Sys => "SYS, the link between NUMA nodes lies between: the longest way",
        }
    }
}

/// The way from a host bridge to a device.
struct Chain {
    /// `pci0000:00`
    host: String,
    /// Bus addresses, the device's last.
    devices: Vec<String>,
    /// The device's directory in sysfs.
    path: String,
}

impl Chain {
    /// The PCI devices in a path of sysfs, down to the last of them.
    fn of(path: &str) -> Option<Chain> {
        let mut chain: Option<Chain> = None;
        let mut so_far = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            so_far = format!("{so_far}/{part}");
            if part.starts_with("pci") && part.contains(':') {
                chain = Some(Chain { host: part.to_string(), devices: Vec::new(), path: so_far.clone() });
            } else if let Some(chain) = chain.as_mut().filter(|_| is_address(part)) {
                chain.devices.push(part.to_string());
                chain.path = so_far.clone();
            }
        }
        chain.filter(|chain| !chain.devices.is_empty())
    }

    /// The NUMA node, or -1 where the system does not tell.
    fn node(&self, machine: &Machine) -> i64 {
        machine.number(&format!("{}/numa_node", self.path)).unwrap_or(-1)
    }
}

/// Whether `part` is `DOMAIN:BUS:DEVICE.FUNCTION`.
fn is_address(part: &str) -> bool {
    let fields: Vec<&str> = part.split([':', '.']).collect();
    fields.len() == 4 && fields.iter().all(|field| !field.is_empty() && field.bytes().all(|b| b.is_ascii_hexdigit()))
}

fn distance(machine: &Machine, a: &Chain, b: &Chain) -> Option<Distance> {
    if a.host == b.host {
        let shared = a.devices.iter().zip(&b.devices).take_while(|(a, b)| a == b).count();
        // Below a shared port, a switch is one port down and the device; more is a further switch.
        let far = (a.devices.len() - shared).max(b.devices.len() - shared);
        return Some(match shared {
            0 => Distance::Phb,
            _ if far <= 2 => Distance::Pix,
            _ => Distance::Pxb,
        });
    }
    match (a.node(machine), b.node(machine)) {
        (a, b) if a >= 0 && b >= 0 => Some(if a == b { Distance::Node } else { Distance::Sys }),
        // With one node there is nothing to tell.
        _ if machine.text("/sys/devices/system/node/online").as_deref() == Some("0") => Some(Distance::Node),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::super::machine::made::Made;
    use super::*;
    use crate::device::cuda::DeviceFacts;

    const GPU: &str = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:03:00.0";

    fn gpu() -> Gpu {
        let facts = DeviceFacts { bus: Some("0000:03:00.0".into()), ..DeviceFacts::default() };
        Gpu { label: "cuda:0".into(), facts }
    }

    fn with_gpu() -> Made {
        let made = Made::new();
        made.link("/sys/bus/pci/devices/0000:03:00.0", GPU);
        made.file(&format!("{GPU}/numa_node"), "0\n");
        made
    }

    fn disk_at(path: &str) -> Disk {
        Disk {
            name: "nvme0n1".into(),
            kind: Kind::Nvme("pcie".into()),
            layers: Vec::new(),
            controllers: vec![format!("{path}/nvme/nvme0")],
        }
    }

    #[test]
    fn a_link_below_its_best_is_a_note() {
        let of = |speed: &str, width: &str| {
            let made = with_gpu();
            made.file(&format!("{GPU}/current_link_speed"), speed).file(&format!("{GPU}/current_link_width"), width);
            made.file(&format!("{GPU}/max_link_speed"), "32.0 GT/s PCIe\n")
                .file(&format!("{GPU}/max_link_width"), "16\n");
            link(&made.machine(), &gpu())
        };
        let best = of("32.0 GT/s PCIe\n", "16\n");
        assert_eq!((best.state, best.what.as_str()), (State::Ok, "cuda:0: generation 5 x16 (63 GB/s at most)"));
        let narrow = of("32.0 GT/s PCIe\n", "8\n");
        assert!(narrow.state == State::Note && narrow.what.ends_with("it has x16"), "{narrow:?}");
        let slow = of("2.5 GT/s PCIe\n", "16\n");
        assert!(slow.what.contains("generation 1") && slow.remedy.is_some_and(|remedy| remedy.contains("idle")));
        assert!(of("Unknown\n", "0\n").what.starts_with("unknown"));
        let made = with_gpu();
        made.file(&format!("{GPU}/current_link_speed"), "16.0 GT/s PCIe")
            .file(&format!("{GPU}/current_link_width"), "16");
        made.file(&format!("{GPU}/max_link_speed"), "32.0 GT/s PCIe").file(&format!("{GPU}/max_link_width"), "16");
        let port = GPU.trim_end_matches("/0000:03:00.0");
        made.file(&format!("{port}/max_link_speed"), "16.0 GT/s PCIe").file(&format!("{port}/max_link_width"), "16");
        assert!(link(&made.machine(), &gpu()).what.contains("all that the slot can do"));
        assert!(link(&Made::new().machine(), &gpu()).what.starts_with("unknown"), "no such device");
    }

    #[test]
    fn the_way_between_two_devices_is_told_from_where_their_paths_part() {
        let host = "/sys/devices/pci0000:00";
        for (path, words) in [
            // Another port of the GPU's switch, a further switch below it, and one above.
            (format!("{host}/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:04:00.0"), "PIX"),
            (format!("{host}/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:04:00.0/0000:05:00.0/0000:06:00.0"), "PXB"),
            // A function of the GPU's own card.
            (format!("{host}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:03:00.1"), "PIX"),
            // Another root port of the same host bridge.
            (format!("{host}/0000:00:02.0/0000:07:00.0"), "PHB"),
        ] {
            let finding = &distances(&with_gpu().machine(), &[gpu()], &[disk_at(&path)])[0];
            assert_eq!(finding.state, State::Ok);
            assert!(finding.what.starts_with(&format!("cuda:0 and nvme0n1: {words}, ")), "{finding:?}");
        }
    }

    #[test]
    fn between_host_bridges_the_numa_nodes_decide() {
        let other = "/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0";
        let of = |node: Option<&str>, online: &str| {
            let made = with_gpu();
            made.file("/sys/devices/system/node/online", online);
            if let Some(node) = node {
                made.file(&format!("{other}/numa_node"), node);
            }
            distances(&made.machine(), &[gpu()], &[disk_at(other)]).remove(0)
        };
        assert!(of(Some("0"), "0-1").what.contains("NODE, "));
        let far = of(Some("1"), "0-1");
        assert!(far.state == State::Note && far.what.contains("SYS, "), "{far:?}");
        assert!(far.remedy.is_some_and(|remedy| remedy.contains("--cpunodebind=0")));
        assert!(of(None, "0").what.contains("NODE, "), "there is only one node");
        assert!(of(Some("-1"), "0-1").what.starts_with("unknown"));
    }

    #[test]
    fn only_nvme_disks_are_looked_at_and_of_several_ways_the_shortest_counts() {
        let near = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:04:00.0/nvme/nvme1";
        let mut disk = disk_at("/sys/devices/pci0000:00/0000:00:02.0/0000:07:00.0");
        disk.controllers.push(near.to_string());
        assert!(distances(&with_gpu().machine(), &[gpu()], &[disk.clone()])[0].what.contains("PIX"));
        disk.controllers = vec!["/sys/devices/virtual/nvme-fabrics/ctl/nvme0".to_string()];
        assert!(distances(&with_gpu().machine(), &[gpu()], &[disk.clone()])[0].what.starts_with("unknown"));
        disk.kind = Kind::Other("virtio");
        assert!(distances(&with_gpu().machine(), &[gpu()], &[disk]).is_empty());
    }
}
