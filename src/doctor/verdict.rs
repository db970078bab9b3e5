//! Whether GPUDirect Storage can serve the source, from everything that the other checks found. It can at best say that nothing
//! speaks against it: that bytes go the direct way is only proved by cuFile's counters while they do. What it cannot serve,
//! the posix route serves, and so nothing here is ever wrong. Called by `examine`.

use super::Finding;
use super::block::{Disk, Kind};
use super::gds::Ways;
use super::gpu::Gpu;
use super::source::{Family, Place, family};

const GDS: &str = "gds";

/// Why not, and what to do.
type Against = (String, String);

/// For a host device, which has no use for it.
pub(super) fn without_gpu(place: &Place, disks: &[Disk]) -> Finding {
    let mut finding = Finding::not_needed(GDS);
    if let Err((why, _)) = file_system(place).and_then(|who| storage(who, place, disks)) {
        finding.what += &format!("; for a GPU: {why}");
    }
    finding
}

pub(super) fn with_gpu(place: &Place, disks: &[Disk], ways: &Ways, gpus: &[Gpu]) -> Finding {
    match judge(place, disks, ways, gpus) {
        Ok(way) => Finding::ok(GDS, format!("nothing speaks against it, by {way}")),
        Err((why, remedy)) => {
            Finding::note(GDS, why).so(format!("{remedy}; or nothing, since the posix route serves every file"))
        }
    }
}

/// What is hardest to change comes first.
fn judge(place: &Place, disks: &[Disk], ways: &Ways, gpus: &[Gpu]) -> Result<&'static str, Against> {
    let who = file_system(place)?;
    storage(who, place, disks)?;
    reach(gpus)?;
    journal(place)?;
    library(ways)?;
    way(who, disks, ways)
}

/// Who moves the bytes of a file system that GDS knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    /// The NVMe driver, for a file system on disks.
    Disk,
    /// The file system's own client, which registers with nvidia-fs under this name.
    Client(&'static str),
    /// One of which we do not know the name.
    SomeClient,
}

fn against<T>(why: impl Into<String>, remedy: &str) -> Result<T, Against> {
    Err((why.into(), remedy.to_string()))
}

fn has_option(place: &Place, option: &str) -> bool {
    place.options.split(',').any(|known| known == option)
}

/// As the guides list them; others go by cuFile's compatibility mode, which is the posix way.
fn file_system(place: &Place) -> Result<Who, Against> {
    let kind = place.kind.as_str();
    let cannot = |why: &str, remedy: &str| against(format!("GDS cannot serve {kind}: {why}"), remedy);
    match kind {
        "xfs" | "ext4" => Ok(Who::Disk),
        "lustre" => Ok(Who::Client("lnet")),
        "wekafs" => Ok(Who::Client("wekafsio")),
        "gpfs" => Ok(Who::Client("mmfslinux")),
        "beegfs" => Ok(Who::Client("beegfs")),
        "scatefs" | "virtiofs" => Ok(Who::SomeClient),
        "nfs" | "nfs4" if has_option(place, "proto=rdma") => Ok(Who::Client("rpcrdma")),
        "nfs" | "nfs4" => {
            cannot("it is mounted without RDMA", "mount it with -o proto=rdma, where network and server can")
        }
        "unknown" => against("unknown: so is the file system", "look at /proc/self/mountinfo"),
        _ => match family(kind) {
            Family::Memory => {
                cannot("it is in memory, and has no disk to read from", "put the files on ext4 or xfs on NVMe")
            }
            Family::Stacked => {
                cannot("it is stacked on another file system", "mount the directory below, if it is on ext4 or xfs")
            }
            Family::Fuse => {
                cannot("it is a FUSE file system", "mount what lies behind it, if that is ext4 or xfs on NVMe")
            }
            Family::Local | Family::Network => {
                cannot("it is none of those that cuFile knows", "copy the files to ext4 or xfs on NVMe")
            }
        },
    }
}

/// Whether the disks are such as GDS reads from.
fn storage(who: Who, place: &Place, disks: &[Disk]) -> Result<(), Against> {
    if who != Who::Disk {
        return Ok(());
    }
    if disks.is_empty() {
        return against(
            format!("unknown: the disks below {} are not to be seen", place.kind),
            "look at /sys/dev/block",
        );
    }
    if let Some(disk) = disks.iter().find(|disk| driver(disk).is_none()) {
        let why = format!("GDS cannot serve {}: it reads from NVMe disks, local ones or over RDMA", disk.words());
        return against(why, "put the files on one");
    }
    match disks.iter().flat_map(|disk| &disk.layers).find(|layer| layer.contains("encrypted")) {
        None => Ok(()),
        Some(layer) => against(
            format!("GDS cannot serve {layer}: the CPU has to decrypt what is read"),
            "put the files on a disk that is not encrypted, or encrypts by itself",
        ),
    }
}

/// The driver of a disk that GDS reads from, by its name in nvidia-fs. Who does not tell its transport may be local.
fn driver(disk: &Disk) -> Option<&'static str> {
    match &disk.kind {
        Kind::Nvme(transport) => match transport.as_str() {
            "pcie" | "unknown" => Some("nvme"),
            "rdma" => Some("nvme_rdma"),
            _ => None,
        },
        Kind::Other(_) => None,
    }
}

fn reach(gpus: &[Gpu]) -> Result<(), Against> {
    if gpus.is_empty() {
        return against("there is no GPU", "see `device`");
    }
    match gpus.iter().find(|gpu| !gpu.facts.can_be_reached) {
        None => Ok(()),
        Some(gpu) => against(format!("disks cannot reach the memory of {}", gpu.label), "take another GPU"),
    }
}

/// cuFile looks for the word in the table of mounts, where ext4 does not show its default.
fn journal(place: &Place) -> Result<(), Against> {
    const REMEDY: &str = "mount it with -o data=ordered (in /etc/fstab; a remount does not change it)";
    if place.kind != "ext4" || has_option(place, "data=ordered") {
        return Ok(());
    }
    if has_option(place, "data=journal") || has_option(place, "data=writeback") {
        return against("GDS cannot serve this ext4: its journal is not in ordered mode", REMEDY);
    }
    against("GDS cannot serve this ext4: its options do not show data=ordered, for which cuFile looks", REMEDY)
}

fn library(ways: &Ways) -> Result<(), Against> {
    if !ways.cufile {
        return against("libcufile cannot be loaded", "see `libcufile`");
    }
    if ways.forced_off {
        return against("cuFile is told to go the posix way", "see `cufile.json`");
    }
    Ok(())
}

/// The way that is open.
fn way(who: Who, disks: &[Disk], ways: &Ways) -> Result<&'static str, Against> {
    // Where nvidia-fs does not say who has registered, nothing speaks against it.
    let knows = |name: &str| ways.registered.as_ref().is_none_or(|names| names.iter().any(|known| known == name));
    let stranger = match who {
        Who::Disk => disks.iter().filter_map(driver).find(|name| !knows(name)),
        Who::Client(name) => Some(name).filter(|name| !knows(name)),
        Who::SomeClient => None,
    };
    if ways.nvidia_fs && stranger.is_none() {
        return Ok("nvidia-fs");
    }
    if who == Who::Disk && ways.p2pdma {
        let plain = |disk: &Disk| driver(disk) == Some("nvme") && disk.layers.is_empty();
        return match disks.iter().find(|disk| !plain(disk)) {
            None => Ok("PCI peer-to-peer DMA"),
            Some(disk) => against(
                format!(
                    "P2PDMA serves a file system on a plain local disk only, and not {} below others",
                    disk.words()
                ),
                "put the files on one, or install nvidia-fs",
            ),
        };
    }
    match (stranger, who) {
        (Some(name), Who::Disk) if ways.nvidia_fs => against(
            format!("nvidia-fs is loaded, but {name} has not registered with it"),
            "install NVIDIA's NVMe driver (DOCA, or MLNX_OFED with --with-nvmf), or set up P2PDMA: see `p2pdma driver`",
        ),
        (Some(name), _) if ways.nvidia_fs => against(
            format!("nvidia-fs is loaded, but {name} has not registered with it"),
            "install a client of the file system that is built for GDS",
        ),
        (_, Who::Disk) => against(
            "neither nvidia-fs nor P2PDMA is ready",
            "set up P2PDMA (see `p2pdma kernel`, `p2pdma driver`, `nvme multipath`), or load nvidia-fs",
        ),
        _ => against("nvidia-fs is not loaded", "load it: see `nvidia-fs`"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;
    use crate::device::cuda::DeviceFacts;

    fn on(kind: &str, options: &str) -> Place {
        Place { kind: kind.into(), options: options.into(), ..Place::default() }
    }

    fn nvme(layers: &[&str]) -> Disk {
        Disk {
            name: "nvme0n1".into(),
            kind: Kind::Nvme("pcie".into()),
            layers: layers.iter().map(ToString::to_string).collect(),
            controllers: Vec::new(),
        }
    }

    fn gpu(can_be_reached: bool) -> Gpu {
        Gpu { label: "cuda:0".into(), facts: DeviceFacts { bus: None, can_share: true, can_be_reached } }
    }

    fn ready() -> Ways {
        Ways { cufile: true, nvidia_fs: true, registered: Some(vec!["nvme".into()]), ..Ways::default() }
    }

    fn of(place: &Place, disks: &[Disk], ways: &Ways) -> Finding {
        with_gpu(place, disks, ways, &[gpu(true)])
    }

    /// A note with these words, with something to do.
    fn notes(finding: Finding, words: &str) {
        assert!(finding.state == State::Note && finding.what.contains(words), "{words}: {finding:?}");
        assert!(finding.remedy.is_some_and(|remedy| remedy.contains("posix route")));
    }

    #[test]
    fn a_disk_that_everything_is_ready_for_can_be_served() {
        for place in [on("xfs", "rw"), on("ext4", "rw,data=ordered")] {
            assert_eq!(of(&place, &[nvme(&[])], &ready()).what, "nothing speaks against it, by nvidia-fs");
        }
        let p2p = Ways { nvidia_fs: false, registered: None, p2pdma: true, ..ready() };
        assert!(of(&on("xfs", "rw"), &[nvme(&[])], &p2p).what.ends_with("PCI peer-to-peer DMA"));
        assert_eq!(of(&on("lustre", ""), &[], &Ways { registered: None, ..ready() }).state, State::Ok);
    }

    #[test]
    fn file_systems_that_cannot_are_told_apart() {
        let on_nvme = |kind, options| of(&on(kind, options), &[nvme(&[])], &ready());
        notes(on_nvme("tmpfs", ""), "GDS cannot serve tmpfs: it is in memory");
        notes(on_nvme("overlay", ""), "stacked");
        notes(on_nvme("btrfs", ""), "none of those");
        notes(on_nvme("fuse.sshfs", ""), "FUSE");
        notes(on_nvme("ext4", "rw"), "do not show data=ordered");
        notes(on_nvme("ext4", "rw,data=writeback"), "ordered mode");
        notes(on_nvme("nfs4", "rw,proto=tcp"), "without RDMA");
        notes(on_nvme("unknown", ""), "unknown");
    }

    #[test]
    fn disks_that_cannot_are_told_apart() {
        let xfs = on("xfs", "rw");
        let other = Disk { kind: Kind::Other("virtio"), name: "vda".into(), ..nvme(&[]) };
        notes(of(&xfs, &[nvme(&[]), other], &ready()), "vda (virtio)");
        notes(of(&xfs, &[nvme(&["dm-0 (encrypted)"])], &ready()), "decrypt");
        notes(of(&xfs, &[], &ready()), "unknown");
        let over = |transport: &str| Disk { kind: Kind::Nvme(transport.into()), ..nvme(&[]) };
        notes(of(&xfs, &[over("tcp")], &ready()), "NVMe over tcp");
        notes(of(&xfs, &[over("rdma")], &ready()), "nvme_rdma has not registered");
        // A disk that cannot is said first: nobody is to remount for nothing.
        let other = Disk { kind: Kind::Other("virtio"), name: "vda".into(), ..nvme(&[]) };
        notes(of(&on("ext4", "rw"), &[other], &ready()), "vda (virtio)");
        let p2p = Ways { nvidia_fs: false, p2pdma: true, ..ready() };
        notes(of(&xfs, &[nvme(&["md0 (raid0)"])], &p2p), "plain local disk");
        assert_eq!(of(&xfs, &[nvme(&["md0 (raid0)"])], &ready()).state, State::Ok, "nvidia-fs can");
    }

    #[test]
    fn a_machine_that_is_not_ready_is_said_to_be() {
        let (xfs, disks) = (on("xfs", "rw"), [nvme(&[])]);
        notes(of(&xfs, &disks, &Ways { cufile: false, ..ready() }), "libcufile");
        notes(of(&xfs, &disks, &Ways { forced_off: true, ..ready() }), "posix way");
        notes(of(&xfs, &disks, &Ways { cufile: true, ..Ways::default() }), "neither");
        notes(of(&xfs, &disks, &Ways { registered: Some(vec![]), ..ready() }), "nvme has not registered");
        notes(of(&on("lustre", ""), &[], &ready()), "lnet has not registered");
        notes(with_gpu(&xfs, &disks, &ready(), &[gpu(false)]), "cannot reach the memory of cuda:0");
        notes(with_gpu(&xfs, &disks, &ready(), &[]), "no GPU");
    }

    #[test]
    fn the_host_has_no_use_for_it_and_hears_of_the_file_system_all_the_same() {
        let finding = without_gpu(&on("tmpfs", ""), &[]);
        assert_eq!(finding.state, State::NotNeeded);
        assert!(finding.what.contains("GDS cannot serve tmpfs"), "{finding:?}");
        assert_eq!(without_gpu(&on("xfs", ""), &[nvme(&[])]).what, "not needed for host memory");
    }
}
