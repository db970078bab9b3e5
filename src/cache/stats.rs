//! The cache's state as JSON: what `.warpfs/stats` shows. Sizes are bytes.

use super::shelf::Shelf;
use crate::metrics::BOUNDS;
use crate::transfer::{Fallback, Report, Route};
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Serialize)]
pub(super) struct Stats {
    pub version: &'static str,
    /// The daemon's process id.
    pub pid: u32,
    pub uptime_seconds: u64,
    pub sessions: usize,
    pub devices: Vec<DeviceStats>,
}

#[derive(Serialize)]
pub(super) struct DeviceStats {
    label: String,
    name: String,
    /// Hexadecimal.
    uuid: String,
    total: u64,
    /// Nobody's bytes now; null where the system does not tell.
    free: Option<u64>,
    budget: u64,
    /// Of the budget: resident, loading, superseded but held, and slack.
    used: u64,
    resident_files: u64,
    /// Bytes of the budget that they take.
    resident_bytes: u64,
    loading_files: u64,
    /// Bytes of the files that are loading.
    loading_bytes: u64,
    /// Of the budget: neither content of resident files nor of loading ones. Ends of pages, room in slabs, and what was
    /// superseded and is still held.
    slack_bytes: u64,
    counters: BTreeMap<&'static str, u64>,
    routes: BTreeMap<&'static str, RouteStats>,
    /// How often a route was left, by reason.
    fallbacks: BTreeMap<&'static str, u64>,
    holders: Vec<HolderStats>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files: Vec<FileStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    files_left_out: Option<u64>,
}

#[derive(Serialize)]
struct RouteStats {
    /// Reads, and their bytes, also of loads that failed.
    operations: u64,
    bytes: u64,
    /// Spent in reads, summed over those that ran at the same time.
    busy_seconds: f64,
    errors: u64,
    /// Files that were published, of which this route brought the most.
    files: u64,
    /// From the requests for them until they were published, summed.
    latency_seconds: f64,
    /// How many of them were published within so many microseconds.
    latency_within_us: BTreeMap<u64, u64>,
}

#[derive(Serialize)]
struct HolderStats {
    uid: u32,
    pid: u32,
    bytes: u64,
}

#[derive(Serialize)]
struct FileStats {
    path: String,
    state: &'static str,
    size: u64,
    loaded: u64,
    holders: u32,
    uid: u32,
    /// Since the file became resident.
    age_seconds: Option<u64>,
}

/// The device's state; names up to `files` files, and the holders only where that is not 0.
pub(super) fn of_shelf(shelf: &Shelf, files: usize) -> DeviceStats {
    let info = shelf.info();
    let survey = shelf.survey(files);
    let (report, used) = (shelf.routes.report(), shelf.budget.used());
    let holders = if files == 0 { Vec::new() } else { shelf.sessions.holders(shelf.number) };
    DeviceStats {
        label: info.label.clone(),
        name: info.name.clone(),
        uuid: crate::device::hex(&info.uuid),
        total: info.total,
        free: shelf.memory.free(),
        budget: shelf.budget.limit(),
        used,
        resident_files: survey.resident.files,
        resident_bytes: survey.resident.bytes,
        loading_files: survey.loading.files,
        loading_bytes: survey.loading.content,
        slack_bytes: used.saturating_sub(survey.resident.content + survey.loading.content),
        counters: shelf.counters.all().collect(),
        routes: Route::ALL.into_iter().map(|route| (route.word(), route_stats(shelf, &report, route))).collect(),
        fallbacks: Fallback::ALL.iter().map(|reason| (reason.word(), report.fallbacks[*reason as usize])).collect(),
        holders: holders.into_iter().map(|h| HolderStats { uid: h.uid, pid: h.pid, bytes: h.bytes }).collect(),
        files: survey
            .files
            .into_iter()
            .map(|seen| FileStats {
                path: seen.path,
                state: seen.state.word(),
                size: seen.size,
                loaded: seen.loaded,
                holders: seen.holders,
                uid: seen.uid,
                age_seconds: seen.age.map(|age| age.as_secs()),
            })
            .collect(),
        files_left_out: (files > 0 && survey.left_out > 0).then_some(survey.left_out),
    }
}

fn route_stats(shelf: &Shelf, report: &Report, route: Route) -> RouteStats {
    let work = report.route(route);
    let latency = &shelf.latencies[route as usize];
    let within = latency.within();
    RouteStats {
        operations: work.operations,
        bytes: work.bytes,
        busy_seconds: work.busy.as_secs_f64(),
        errors: work.errors,
        files: within[BOUNDS.len()],
        latency_seconds: latency.sum().as_secs_f64(),
        latency_within_us: BOUNDS.into_iter().zip(within).collect(),
    }
}
