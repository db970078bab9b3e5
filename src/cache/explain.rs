//! Which way a file would go to the device now, and why: what `warpfs explain` and `user.warpfs.explain` tell. It asks the
//! same questions as the loader, of the same file, and starts nothing. Called by `cache`.

use super::placement;
use super::shelf::Shelf;
use super::slab::{SMALL, padded};
use crate::failure::Result;
use crate::mounts;
use crate::protocol::{DeviceKind, State};
use crate::source::{Domain, OpenFile};
use crate::transfer::direct::Alignment;
use crate::transfer::gds::route::OPENING;
use crate::transfer::{Options, Route, Wanted, plan, residency};
use rustix::fs::{AtFlags, StatxFlags};
use serde::Serialize;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Sizes are bytes.
#[derive(Serialize)]
struct Explained {
    path: String,
    size: u64,
    /// As the kernel names it; null where it does not tell.
    file_system: Option<String>,
    /// Bytes in the page cache; null where the kernel does not tell the daemon.
    cached: Option<u64>,
    /// What direct reads have to be multiples of; null: there are none.
    direct: Option<DirectReads>,
    devices: Vec<OnDevice>,
}

#[derive(Serialize)]
struct DirectReads {
    memory: usize,
    offset: usize,
}

#[derive(Serialize)]
struct OnDevice {
    device: String,
    state: &'static str,
    /// Whether it fits into the budget at all.
    fits: bool,
    /// Where it lies, or would lie.
    memory: String,
    /// By which way how much would go, and why; nothing where nothing has to.
    routes: Vec<Way>,
    /// Why cuFile would bring it or not.
    gds: String,
}

#[derive(Serialize)]
struct Way {
    route: &'static str,
    bytes: u64,
    reason: &'static str,
}

/// What there is to say of `file`, device by device.
pub(super) fn explain(shelves: &[Arc<Shelf>], file: &OpenFile, domain: Domain) -> Result<serde_json::Value> {
    let size = file.version()?.size;
    let direct = Alignment::of(file.as_fd());
    let cached = residency::cached(file.as_fd(), 0, usize::try_from(size).unwrap_or(usize::MAX));
    let cached = cached.map(|cached| cached.min(size));
    let devices = shelves.iter().map(|shelf| on_device(shelf, file, domain, size, cached, direct.is_some()));
    let explained = Explained {
        path: file.path.display().to_string(),
        size,
        file_system: file_system(file),
        cached,
        direct: direct.map(|d| DirectReads { memory: d.memory, offset: d.offset }),
        devices: devices.collect::<Result<_>>()?,
    };
    Ok(serde_json::to_value(explained).expect("plain structs become JSON"))
}

fn file_system(file: &OpenFile) -> Option<String> {
    let status = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    mounts::list().into_iter().find(|mount| mount.id == status.stx_mnt_id).map(|mount| mount.kind)
}

fn on_device(
    shelf: &Shelf,
    file: &OpenFile,
    domain: Domain,
    size: u64,
    cached: Option<u64>,
    direct: bool,
) -> Result<OnDevice> {
    let state = shelf.standing(file, domain)?.state;
    let info = shelf.info();
    let small = size > 0 && size <= SMALL;
    let lead = if small { placement::small_lead(file, size) } else { placement::lead(file, size) };
    let memory = match size {
        0 => "none: it is empty".to_string(),
        _ if small => format!("{} bytes of a slab that small files share", padded(lead + size)),
        _ => format!("{} bytes of its own", info.rounded(lead + size)),
    };
    let fits = shelf.fits(file, lead + size).is_ok();
    let goes = fits && state != State::Resident;
    let routes = if goes { ways(file, size, cached, direct, &shelf.transfer) } else { Vec::new() };
    let gds = gds(shelf, size, cached);
    Ok(OnDevice { device: info.label.clone(), state: state.word(), fits, memory, routes, gds })
}

/// By slots, as the loader cuts the file.
fn ways(file: &OpenFile, size: u64, cached: Option<u64>, direct: bool, options: &Options) -> Vec<Way> {
    let mut ways: Vec<Way> = Vec::new();
    let mut add = |cached, bytes| {
        let choice = plan::choose(cached, bytes, direct);
        match ways.iter_mut().find(|way| way.reason == choice.reason) {
            Some(way) => way.bytes += bytes,
            None => ways.push(Way { route: choice.route.word(), bytes, reason: choice.reason }),
        }
    };
    match cached {
        _ if size == 0 => {}
        // All of it is alike: no need to look at each slot of a large file.
        None | Some(0) => add(cached, size),
        Some(all) if all == size => add(cached, size),
        Some(_) => {
            let slot = options.slot_size as u64;
            for begin in (0..size).step_by(options.slot_size) {
                let bytes = slot.min(size - begin);
                add(residency::cached(file.as_fd(), begin, bytes as usize).map(|cached| cached.min(bytes)), bytes);
            }
        }
    }
    if options.route == Wanted::Gds {
        ways = vec![Way { route: Route::Gds.word(), bytes: size, reason: "--route gds: nothing else will do" }];
    }
    ways
}

fn gds(shelf: &Shelf, size: u64, cached: Option<u64>) -> String {
    let Options { route, gds_threshold, .. } = shelf.transfer;
    let note = shelf.loader.note();
    if shelf.info().kind == DeviceKind::Host {
        return "no: the host device has no use for it".into();
    }
    match (route, note) {
        (Wanted::Posix, _) => "no: --route posix".into(),
        (Wanted::Auto, _) if size < gds_threshold => format!("no: smaller than --gds-threshold, {gds_threshold} bytes"),
        (Wanted::Auto, _) if cached.is_none_or(|cached| cached * 2 >= size) => {
            "no: it is in the page cache, or the kernel does not tell".into()
        }
        (_, None) => {
            "perhaps: cuFile is opened with the first file for it, and believed if its counters show a direct way"
                .into()
        }
        (_, Some(note)) if note.starts_with(OPENING) => {
            format!("if cuFile's counters show a direct way for it: {note}")
        }
        (_, Some(note)) => format!("no, as far as is known: {note}"),
    }
}
