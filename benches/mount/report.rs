//! The tables for people, and the JSON for programs. A ratio is native time by the subject's time in the same round, so
//! 1.00 is native and more is better; of the rounds' ratios the median is shown, with quartiles.

use crate::machine::Facts;
use crate::measure::{Measured, Plan};
use crate::million::Million;
use crate::rows::Unit;
use crate::subject::{BINDFS, MERGERFS, NATIVE, Subject, WARPFS, WARPFS_DAEMON};
use serde_json::{Value, json};

const MOUNTS: [&str; 4] = [WARPFS, WARPFS_DAEMON, BINDFS, MERGERFS];
const PEERS: [&str; 2] = [BINDFS, MERGERFS];

/// Median and quartiles.
#[derive(Clone, Copy)]
struct Spread {
    low: f64,
    median: f64,
    high: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Option<Spread> {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let at = |part: f64| sorted.get((part * (sorted.len().checked_sub(1)?) as f64).round() as usize).copied();
        Some(Spread { low: at(0.25)?, median: at(0.5)?, high: at(0.75)? })
    }
}

impl Measured {
    fn median(&self, subject: &str) -> Option<f64> {
        Spread::of(self.seconds.get(subject)?.iter().copied()).map(|spread| spread.median)
    }

    /// The native directory's fastest round by the subject's: what is left when the machine does nothing else.
    fn undisturbed(&self, subject: &str) -> Option<f64> {
        let fastest = |name: &str| self.seconds.get(name)?.iter().copied().min_by(f64::total_cmp);
        Some(fastest(NATIVE)? / fastest(subject)?)
    }

    /// How fast `subject` is by `other`'s measure, round by round.
    fn ratio(&self, subject: &str, other: &str) -> Option<Spread> {
        let (own, others) = (self.seconds.get(subject)?, self.seconds.get(other)?);
        Spread::of(own.iter().zip(others).map(|(own, other)| other / own))
    }

    /// The ratios of all mounts, for the JSON.
    fn ratios(&self, other: &str) -> Value {
        let each = MOUNTS.iter().filter_map(|subject| Some((subject.to_string(), self.ratio(subject, other)?)));
        each.map(|(name, r)| (name, json!({ "q1": r.low, "median": r.median, "q3": r.high }))).collect()
    }

    fn better_peer(&self) -> Option<&'static str> {
        let medians = PEERS.into_iter().filter_map(|peer| Some((self.median(peer)?, peer)));
        medians.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, peer)| peer)
    }

    /// The median as people say it.
    fn shown(&self, subject: &str) -> String {
        let Some(seconds) = self.median(subject) else { return "-".into() };
        let rate = self.count as f64 / seconds;
        match self.unit {
            Unit::Bytes(bytes) => format!("{:.2} GB/s", rate * bytes as f64 / 1e9),
            Unit::Operations => format!("{:.1} k/s", rate / 1e3),
            Unit::Whole => format!("{:.1} ms", 1e3 / rate),
        }
    }
}

pub fn heading(facts: &Facts, subjects: &[Subject], ordinary_user: bool) {
    println!("Linux {}, {} cores ({}), {} MiB", facts.kernel, facts.cores, facts.processor, facts.memory_mib);
    println!("source: {}; load {}", facts.file_system, facts.load);
    for subject in subjects.iter().filter(|subject| subject.name != NATIVE) {
        println!("{:<22} {} [{}]", subject.name, subject.command, subject.version);
        if let Some(reason) = &subject.refused {
            println!("{:<22} not measured: {reason}", "");
        }
    }
    let who = if ordinary_user { "an ordinary user" } else { "the user who mounted" };
    println!("measured as {who}\n");
}

pub fn tables(rows: &[Measured]) {
    println!("\nMedians");
    print!("{:<38}{:>14}", "", NATIVE);
    MOUNTS.iter().for_each(|mount| print!("{mount:>22}"));
    println!();
    for row in rows {
        print!("{:<38}{:>14}", row.name, row.shown(NATIVE));
        MOUNTS.iter().for_each(|mount| print!("{:>22}", row.shown(mount)));
        println!();
    }

    println!("\nSpeed by native: median of the rounds (quartiles); last, warpfs by the better of bindfs and mergerfs");
    print!("{:<38}", "");
    MOUNTS.iter().for_each(|mount| print!("{mount:>22}"));
    println!("{:>14}{:>16}", "warpfs", "no passthrough");
    for row in rows {
        print!("{:<38}", row.name);
        for mount in MOUNTS {
            let ratio = row.ratio(mount, NATIVE);
            let text = ratio.map(|r| format!("{:.2} ({:.2}..{:.2})", r.median, r.low, r.high));
            print!("{:>22}", text.unwrap_or_else(|| "-".into()));
        }
        let by_peer = |subject: &str| {
            let ratio = row.better_peer().and_then(|peer| row.ratio(subject, peer));
            ratio.map_or_else(|| "-".into(), |ratio| format!("{:.2}", ratio.median))
        };
        println!("{:>14}{:>16}", by_peer(WARPFS), by_peer(WARPFS_DAEMON));
    }
    println!("\nThe same of the fastest rounds, which a busy machine disturbs least");
    for row in rows {
        print!("{:<38}", row.name);
        for mount in MOUNTS {
            print!("{:>22}", row.undisturbed(mount).map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")));
        }
        println!();
    }
    for row in rows {
        for (subject, reason) in &row.refused {
            println!("{}: {subject} not measured: {reason}", row.name);
        }
    }
    println!(
        "\nO_DIRECT: native, warpfs and mergerfs go to the disk; bindfs and warpfs without passthrough take the flag\n\
         off and use the page cache of the source. Warm rows: the page cache has the whole file. Cold rows: after\n\
         drop_caches 2, and when the daemons have heard of it."
    );
}

pub fn json(facts: &Facts, plan: &Plan, rows: &[Measured], million: Option<&Million>) -> String {
    let subjects = plan
        .subjects
        .iter()
        .map(|s| json!({ "name": s.name, "command": s.command, "version": s.version, "refused": s.refused }));
    let rows = rows.iter().map(|row| {
        let mut value = row.value();
        value["median_seconds"] =
            MOUNTS.iter().chain([&NATIVE]).map(|s| (s.to_string(), json!(row.median(s)))).collect();
        value["by_native"] = row.ratios(NATIVE);
        value["better_peer"] = json!(row.better_peer());
        value["by_better_peer"] = row.better_peer().map(|peer| row.ratios(peer)).into();
        value
    });
    let value = json!({
        "machine": {
            "kernel": facts.kernel, "cores": facts.cores, "processor": facts.processor,
            "memory_mib": facts.memory_mib, "file_system": facts.file_system,
            "load_before": facts.load, "load_after": crate::machine::load(),
        },
        "rounds": plan.rounds,
        "ordinary_user": plan.ordinary_user,
        "subjects": subjects.collect::<Vec<_>>(),
        "rows": rows.collect::<Vec<_>>(),
        "million": million.map(Million::value),
    });
    format!("{value:#}\n")
}
