//! Everything that can be set, checked as a whole. The command line becomes one [`Config`]; `.warpfs/config` shows it.

use crate::device::Info;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use crate::size::{Amount, Human};
use crate::transfer;
use serde::Serialize;
use std::path::PathBuf;

/// How a directory is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// The real directory, absolute.
    pub source: PathBuf,
    /// Where it is mounted, absolute.
    pub mountpoint: PathBuf,
    /// Refuse every change, in the daemon, so that triggers still work.
    pub read_only: bool,
    /// Let other users in; always with the kernel's own permission checks.
    pub allow_other: bool,
    /// Let the kernel read and write file data itself where it can.
    pub passthrough: bool,
    /// Mount over a directory that is not empty.
    pub nonempty: bool,
    /// Set-user-id bits have no effect; `false`: as in the source.
    pub nosuid: bool,
    /// Device nodes have no effect; `false`: as in the source.
    pub nodev: bool,
    /// No file can be executed; `false`: as in the source.
    pub noexec: bool,
}

/// One daemon.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub mount: MountOptions,
    /// `auto`, `host`, `cuda:N[,cuda:M]`, `cuda:all` or a UUID.
    pub device: String,
    /// Bytes for copies on each device; nothing: half of the device.
    pub budget: Option<Amount>,
    /// Bytes of each device that are left to others; nothing: a tenth, and not less than [`RESERVE_LEAST`].
    pub reserve: Option<Amount>,
    /// How files get to the device.
    pub transfer: transfer::Options,
    /// Where the channel's socket shall be; nothing: where it belongs.
    pub socket: Option<PathBuf>,
}

/// The default budget.
pub const BUDGET: Amount = Amount::Percent(50.0);
/// The default reserve.
pub const RESERVE: Amount = Amount::Percent(10.0);
/// The least default reserve, in bytes.
pub const RESERVE_LEAST: u64 = 512 << 20;

impl Config {
    /// The budget on a device, in bytes. `free`: what nobody uses there now, where that is known.
    pub fn limit(&self, device: &Info, free: Option<u64>) -> Result<u64> {
        Config::limit_of(self.budget, self.reserve, device, free)
    }

    /// The same for settings without a mount.
    pub fn limit_of(budget: Option<Amount>, reserve: Option<Amount>, device: &Info, free: Option<u64>) -> Result<u64> {
        let wanted = budget.unwrap_or(BUDGET).of(device.total);
        let usual = || RESERVE.of(device.total).max(RESERVE_LEAST);
        let reserve = reserve.map_or_else(usual, |reserve| reserve.of(device.total));
        // A budget that was asked for counts even if others use the device now; only the whole device bounds it.
        let most = match budget {
            Some(_) => device.total,
            None => free.unwrap_or(device.total).min(device.total).saturating_sub(reserve),
        };
        if budget.is_some() && wanted > most {
            let (label, most) = (&device.label, Human(most));
            let message = format!(
                "--budget {} is more than {label} has: {most}; ask for less, or for a part of it, such as 50%",
                Human(wanted)
            );
            return Err(Failure::new(Code::BadRequest, message));
        }
        let limit = wanted.min(most);
        if budget.is_some() && limit < device.granularity {
            let message = format!(
                "--budget {}: a copy on {} takes at least {}; ask for more",
                Human(wanted),
                device.label,
                Human(device.granularity)
            );
            return Err(Failure::new(Code::BadRequest, message));
        }
        if limit < device.granularity {
            let message = format!(
                "{}: no room for a cache: {} of {} are free, and {} are reserved; set --budget, or --reserve, or use another --device",
                device.label,
                free.map_or(String::from("unknown bytes"), |free| Human(free).to_string()),
                Human(device.total),
                Human(reserve),
            );
            return Err(Failure::new(Code::OutOfMemory, message));
        }
        Ok(limit)
    }

    /// The settings as TOML, as `.warpfs/config` shows them.
    pub fn toml(&self, devices: &[String]) -> String {
        #[derive(Serialize)]
        struct Shown<'a> {
            source: String,
            mountpoint: String,
            devices: &'a [String],
            budget: String,
            reserve: String,
            route: &'static str,
            gds_threshold: u64,
            gds_compat: bool,
            readers: usize,
            /// Bytes.
            pinned: u64,
            read_only: bool,
            allow_other: bool,
            passthrough: bool,
        }
        let shown = Shown {
            source: self.mount.source.display().to_string(),
            mountpoint: self.mount.mountpoint.display().to_string(),
            devices,
            budget: self.budget.unwrap_or(BUDGET).to_string(),
            reserve: self.reserve.unwrap_or(RESERVE).to_string(),
            route: self.transfer.route.word(),
            gds_threshold: self.transfer.gds_threshold,
            gds_compat: self.transfer.gds_compat,
            readers: self.transfer.readers,
            pinned: (self.transfer.readers * self.transfer.slots * self.transfer.slot_size) as u64,
            read_only: self.mount.read_only,
            allow_other: self.mount.allow_other,
            passthrough: self.mount.passthrough,
        };
        toml::to_string(&shown).expect("plain values become TOML")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{DeviceKind, HOST_UUID};

    fn config(budget: Option<Amount>) -> Config {
        let mount = MountOptions {
            source: "/s".into(),
            mountpoint: "/m".into(),
            read_only: false,
            allow_other: false,
            passthrough: true,
            nonempty: false,
            nosuid: false,
            nodev: false,
            noexec: false,
        };
        Config {
            mount,
            device: "host".into(),
            budget,
            reserve: None,
            transfer: transfer::Options::default(),
            socket: None,
        }
    }

    #[test]
    fn a_budget_leaves_the_reserve_to_others() {
        const GIB: u64 = 1 << 30;
        let info = Info {
            uuid: HOST_UUID,
            kind: DeviceKind::Host,
            ordinal: 0,
            label: "host".into(),
            name: "memory".into(),
            total: 100 * GIB,
            granularity: 4096,
        };
        let limit = |budget, free| config(budget).limit(&info, free);
        assert_eq!(limit(None, Some(90 * GIB)), Ok(50 * GIB));
        assert_eq!(limit(None, Some(30 * GIB)), Ok(20 * GIB));
        assert_eq!(limit(None, None), Ok(50 * GIB));
        assert_eq!(limit(Some(Amount::Percent(80.0)), Some(GIB)), Ok(80 * GIB));
        assert_eq!(limit(None, Some(10 * GIB)).expect_err("nothing left").code, Code::OutOfMemory);
        assert_eq!(limit(Some(Amount::Bytes(101 * GIB)), None).expect_err("too much").code, Code::BadRequest);
    }
}
