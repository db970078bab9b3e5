//! From a file system's device number to the disks beneath it, through partitions, RAID and the device mapper, as sysfs shows
//! them. It opens no device. Called by the checks of the source.

use super::machine::Machine;
use std::path::Path;

/// A disk with nothing beneath it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    /// As in /dev.
    pub(super) name: String,
    pub(super) kind: Kind,
    /// What lies between it and the file system, the uppermost first: `md0 (raid0)`.
    pub(super) layers: Vec<String>,
    /// The directories in sysfs of the devices that lead to it: one, or an NVMe disk's several controllers.
    pub(super) controllers: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// How its controllers are reached: `pcie`, `rdma`, `tcp`; `unknown` where sysfs does not say.
    Nvme(String),
    /// Another, in words.
    Other(&'static str),
}

impl Disk {
    /// For a person.
    pub(super) fn words(&self) -> String {
        match &self.kind {
            Kind::Nvme(transport) if transport == "pcie" => format!("{} (NVMe)", self.name),
            Kind::Nvme(transport) => format!("{} (NVMe over {transport})", self.name),
            Kind::Other(kind) => format!("{} ({kind})", self.name),
        }
    }
}

/// Deeper than any stack that works: a loop in what is read ends here.
const DEEPEST: usize = 16;

/// The disks beneath the block device `MAJOR:MINOR`; none where sysfs does not show it.
pub(super) fn disks(machine: &Machine, number: &str) -> Vec<Disk> {
    let mut found = Vec::new();
    if let Some(device) = machine.target(&format!("/sys/dev/block/{number}")) {
        descend(machine, &device, &[], &mut found);
    }
    found
}

fn descend(machine: &Machine, device: &str, layers: &[String], found: &mut Vec<Disk>) {
    if layers.len() > DEEPEST {
        return;
    }
    // A partition's directory lies in its disk's.
    if machine.exists(&format!("{device}/partition")) {
        if let Some(disk) = parent(device) {
            descend(machine, disk, layers, found);
        }
        return;
    }
    let slaves = machine.names(&format!("{device}/slaves"));
    if slaves.is_empty() {
        let disk = leaf(machine, device, layers);
        // Several layers may lie on partitions of one disk.
        if !found.iter().any(|known| known.name == disk.name) {
            found.push(disk);
        }
        return;
    }
    let mut layers = layers.to_vec();
    layers.push(layer(machine, device));
    for slave in slaves {
        if let Some(slave) = machine.target(&format!("{device}/slaves/{slave}")) {
            descend(machine, &slave, &layers, found);
        }
    }
}

fn parent(device: &str) -> Option<&str> {
    Path::new(device).parent()?.to_str()
}

fn name_of(device: &str) -> &str {
    device.rsplit('/').next().unwrap_or(device)
}

/// A device that lies on others.
fn layer(machine: &Machine, device: &str) -> String {
    let name = name_of(device);
    if let Some(level) = machine.text(&format!("{device}/md/level")) {
        return format!("{name} ({level})");
    }
    let uuid = machine.text(&format!("{device}/dm/uuid")).unwrap_or_default();
    let kind = match uuid.split('-').next().unwrap_or_default() {
        "LVM" => "LVM",
        "CRYPT" => "encrypted",
        "mpath" => "multipath",
        _ if machine.exists(&format!("{device}/dm")) => "device mapper",
        _ => "unknown kind",
    };
    format!("{name} ({kind})")
}

fn leaf(machine: &Machine, device: &str, layers: &[String]) -> Disk {
    let name = name_of(device);
    let (kind, controllers) = if name.starts_with("nvme") {
        let controllers = controllers(machine, device);
        let transport = controllers.first().and_then(|path| machine.text(&format!("{path}/transport")));
        (Kind::Nvme(transport.unwrap_or_else(|| "unknown".to_string())), controllers)
    } else {
        let kind = match name.trim_end_matches(|c: char| c.is_ascii_digit()) {
            "loop" => "a file by a loop device",
            "zram" | "ram" => "in memory",
            name if name.starts_with("vd") => "virtio",
            name if name.starts_with("sd") => "SCSI or SATA",
            name if name.starts_with("xvd") => "Xen",
            name if name.starts_with("pmem") => "persistent memory",
            _ => "no NVMe",
        };
        (Kind::Other(kind), vec![device.to_string()])
    };
    Disk { name: name.to_string(), kind, layers: layers.to_vec(), controllers }
}

/// The controllers of an NVMe disk. With multipath the disk lies in a subsystem, beside links to its controllers.
fn controllers(machine: &Machine, device: &str) -> Vec<String> {
    let Some(above) = parent(device) else { return Vec::new() };
    if !above.contains("/nvme-subsystem/") {
        return vec![above.to_string()];
    }
    let is_controller = |name: &String| {
        name.strip_prefix("nvme").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    let names = machine.names(above).into_iter().filter(is_controller);
    names.filter_map(|name| machine.target(&format!("{above}/{name}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::machine::made::Made;
    use super::*;

    const NVME0: &str = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme0";
    const NVME1: &str = "/sys/devices/pci0000:00/0000:00:02.0/0000:02:00.0/nvme/nvme1";

    fn two_disks() -> Made {
        let made = Made::new();
        for (number, controller, name) in [(0, NVME0, "nvme0n1"), (8, NVME1, "nvme1n1")] {
            made.file(&format!("{controller}/transport"), "pcie\n");
            made.link(&format!("/sys/dev/block/259:{number}"), &format!("{controller}/{name}"));
            made.file(&format!("{controller}/{name}/{name}p1/partition"), "1\n");
            made.link(&format!("/sys/dev/block/259:{}", number + 1), &format!("{controller}/{name}/{name}p1"));
        }
        made
    }

    #[test]
    fn a_partition_lies_on_its_disk() {
        let made = two_disks();
        for number in ["259:0", "259:1"] {
            let found = disks(&made.machine(), number);
            assert_eq!(found.len(), 1, "{number}");
            assert_eq!((found[0].words().as_str(), &found[0].layers), ("nvme0n1 (NVMe)", &Vec::<String>::new()));
            assert_eq!(found[0].controllers, [NVME0]);
        }
        assert!(disks(&made.machine(), "259:77").is_empty());
    }

    #[test]
    fn raid_and_the_device_mapper_lie_on_disks() {
        let made = two_disks();
        let (md, dm) = ("/sys/devices/virtual/block/md0", "/sys/devices/virtual/block/dm-0");
        made.file(&format!("{md}/md/level"), "raid0\n");
        made.link(&format!("{md}/slaves/nvme0n1p1"), &format!("{NVME0}/nvme0n1/nvme0n1p1"));
        made.link(&format!("{md}/slaves/nvme1n1"), &format!("{NVME1}/nvme1n1"));
        made.file(&format!("{dm}/dm/uuid"), "CRYPT-LUKS2-0123-data\n");
        made.link(&format!("{dm}/slaves/md0"), md);
        made.link("/sys/dev/block/253:0", dm);
        let found = disks(&made.machine(), "253:0");
        assert_eq!(found.iter().map(|disk| disk.name.as_str()).collect::<Vec<_>>(), ["nvme0n1", "nvme1n1"]);
        assert_eq!(found[1].layers, ["dm-0 (encrypted)", "md0 (raid0)"]);
    }

    #[test]
    fn with_multipath_a_disk_has_the_controllers_of_its_subsystem() {
        let made = two_disks();
        let subsystem = "/sys/devices/virtual/nvme-subsystem/nvme-subsys0";
        made.link("/sys/dev/block/259:16", &format!("{subsystem}/nvme0n1"));
        made.link(&format!("{subsystem}/nvme0"), NVME0);
        made.link(&format!("{subsystem}/nvme1"), NVME1);
        let found = disks(&made.machine(), "259:16");
        assert_eq!((found.len(), &found[0].kind), (1, &Kind::Nvme("pcie".into())));
        assert_eq!(found[0].controllers, [NVME0, NVME1]);
    }

    #[test]
    fn other_disks_are_no_nvme() {
        let made = Made::new();
        made.link("/sys/dev/block/254:0", "/sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda");
        made.link("/sys/dev/block/7:0", "/sys/devices/virtual/block/loop0");
        assert_eq!(disks(&made.machine(), "254:0")[0].words(), "vda (virtio)");
        assert_eq!(disks(&made.machine(), "7:0")[0].words(), "loop0 (a file by a loop device)");
    }
}
