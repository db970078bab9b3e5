//! The cache's state as OpenMetrics text (openmetrics.io, 1.0): what `.warpfs/metrics` shows to Prometheus and its like.
//! Names, units and words come from the tables, so that nothing is counted that is not explained. It names no file and no
//! user, and so is the same for everybody. Called by `cache`.

use super::shelf::Shelf;
use crate::metrics::{BOUNDS, TABLE};
use crate::transfer::{Fallback, Report, Route};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

/// One family of samples: its name without the prefix, its kind, its unit if it has one, what it means.
struct Family(&'static str, &'static str, &'static str, &'static str);

/// Everything of every device, with `sessions` and the daemon's age.
pub(super) fn text(shelves: &[Arc<Shelf>], sessions: usize, age: Duration) -> String {
    let mut out = Text(String::new());
    out.family(Family("build", "info", "", "the daemon"), |out| {
        out.line("build_info", &[("version", env!("CARGO_PKG_VERSION"))], "1");
    });
    out.family(Family("uptime_seconds", "gauge", "seconds", "age of the daemon"), |out| {
        out.line("uptime_seconds", &[], &age.as_secs_f64().to_string());
    });
    out.family(Family("sessions", "gauge", "", "clients that are connected"), |out| {
        out.line("sessions", &[], &sessions.to_string());
    });
    gauges(&mut out, shelves);
    for (number, row) in TABLE.iter().enumerate() {
        let value = |shelf: &Shelf| shelf.counters.all().nth(number).map_or(0, |(_, value)| value);
        out.family(Family(row.name, "counter", "", row.help), |out| {
            for shelf in shelves {
                out.line(&format!("{}_total", row.name), &[("device", &shelf.info().label)], &value(shelf).to_string());
            }
        });
    }
    routes(&mut out, shelves);
    latencies(&mut out, shelves);
    out.0.push_str("# EOF\n");
    out.0
}

fn gauges(out: &mut Text, shelves: &[Arc<Shelf>]) {
    type Value = fn(&Shelf) -> u64;
    let table: [(Family, Value); 6] = [
        (Family("budget_bytes", "gauge", "bytes", "bytes that copies may take"), |s| s.budget.limit()),
        (Family("used_bytes", "gauge", "bytes", "bytes of the budget in use"), |s| s.budget.used()),
        (Family("resident_files", "gauge", "", "files that are resident"), |s| s.survey(0).resident.files),
        (Family("resident_bytes", "gauge", "bytes", "bytes of the budget that they take"), |s| {
            s.survey(0).resident.bytes
        }),
        (Family("loading_files", "gauge", "", "files that are loading"), |s| s.survey(0).loading.files),
        (Family("loading_bytes", "gauge", "bytes", "bytes of the loading files"), |s| s.survey(0).loading.content),
    ];
    for (family, value) in table {
        let name = family.0;
        out.family(family, |out| {
            for shelf in shelves {
                out.line(name, &[("device", &shelf.info().label)], &value(shelf).to_string());
            }
        });
    }
}

fn routes(out: &mut Text, shelves: &[Arc<Shelf>]) {
    type Value = fn(&Report, Route) -> String;
    let table: [(Family, Value); 4] = [
        (Family("route_reads", "counter", "", "reads by each route"), |r, x| r.route(x).operations.to_string()),
        (Family("route_bytes", "counter", "bytes", "bytes by each route"), |r, x| r.route(x).bytes.to_string()),
        (
            Family("route_busy_seconds", "counter", "seconds", "time in reads, summed over those at the same time"),
            |r, x| r.route(x).busy.as_secs_f64().to_string(),
        ),
        (Family("route_errors", "counter", "", "reads that failed"), |r, x| r.route(x).errors.to_string()),
    ];
    let reports: Vec<_> = shelves.iter().map(|shelf| (shelf.info().label.as_str(), shelf.routes.report())).collect();
    for (family, value) in table {
        let name = format!("{}_total", family.0);
        out.family(family, |out| {
            for ((device, report), route) in reports.iter().flat_map(|r| Route::ALL.map(|route| (r, route))) {
                out.line(&name, &[("device", device), ("route", route.word())], &value(report, route));
            }
        });
    }
    out.family(Family("fallbacks", "counter", "", "times that a route was left, by reason"), |out| {
        for (device, report) in &reports {
            for reason in Fallback::ALL {
                let count = report.fallbacks[*reason as usize].to_string();
                out.line("fallbacks_total", &[("device", device), ("reason", reason.word())], &count);
            }
        }
    });
}

fn latencies(out: &mut Text, shelves: &[Arc<Shelf>]) {
    let help = "time from a request to its published copy, by the route that brought the most";
    out.family(Family("load_seconds", "histogram", "seconds", help), |out| {
        for (shelf, route) in shelves.iter().flat_map(|s| Route::ALL.map(|route| (s, route))) {
            let latency = &shelf.latencies[route as usize];
            let labels = [("device", shelf.info().label.as_str()), ("route", route.word())];
            let within = latency.within();
            for (bound, count) in BOUNDS.iter().zip(within) {
                let bound = (*bound as f64 / 1e6).to_string();
                out.line("load_seconds_bucket", &[labels[0], labels[1], ("le", &bound)], &count.to_string());
            }
            let all = within[BOUNDS.len()].to_string();
            out.line("load_seconds_bucket", &[labels[0], labels[1], ("le", "+Inf")], &all);
            out.line("load_seconds_count", &labels, &all);
            out.line("load_seconds_sum", &labels, &latency.sum().as_secs_f64().to_string());
        }
    });
}

struct Text(String);

impl Text {
    fn family(&mut self, Family(name, kind, unit, help): Family, samples: impl FnOnce(&mut Text)) {
        let _ = writeln!(self.0, "# TYPE warpfs_{name} {kind}");
        if !unit.is_empty() {
            let _ = writeln!(self.0, "# UNIT warpfs_{name} {unit}");
        }
        let _ = writeln!(self.0, "# HELP warpfs_{name} {help}");
        samples(self);
    }

    /// No label of ours has a character that would need a backslash.
    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: &str) {
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "warpfs_{name}{labels} {value}");
    }
}
