//! `warpfs bench`: every row is there with a figure or a reason, the figures can be, and nothing stays of what was measured.

use crate::harness::*;
use serde_json::Value;

#[test]
fn every_row_has_a_figure_or_a_reason_and_nothing_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let device = device();
    let mut command = warpfs(["bench", "--json", "--size", "64MiB", "--device", &device]);
    let said = run(command.arg(folder.path())).ok().text();
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((&said["size"], &said["device"]), (&(64 << 20).into(), &device.into()));
    let rows = said["rows"].as_array().expect("rows");
    assert!(rows.len() >= 8, "{rows:?}");
    for row in rows {
        match row["median"].as_f64() {
            Some(median) => assert!(median > 0.0 && row["best"].as_f64() > Some(0.0), "{row}"),
            None => assert!(!row["note"].as_str().expect("words").is_empty(), "{row}"),
        }
        assert!(row["fraction"].as_f64().is_none_or(|fraction| fraction > 0.0), "{row}");
    }
    let named = |part: &str| rows.iter().any(|row| row["name"].as_str().is_some_and(|name| name.contains(part)));
    for part in ["disk", "page cache", "bus", "small files", "4 KiB", "start of a loader"] {
        assert!(named(part), "{part}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("listed").count(), 0);
}

#[test]
fn where_nothing_can_be_measured_it_says_why() {
    run(warpfs(["bench", "--size", "64MiB", "--device", "host"]).arg("/nowhere/at/all")).fails(&["/nowhere/at/all"]);
    let refused = run(warpfs(["bench", "--size", "1KiB"]).arg("/tmp"));
    assert_eq!(refused.status.code(), Some(2));
    if !rustix::process::geteuid().is_root() {
        return; // what follows takes a file system of its own
    }
    let folder = tempfile::tempdir().expect("a folder");
    let _full = Tmpfs::with(folder.path(), "size=32m");
    run(warpfs(["bench", "--size", "64MiB", "--device", "host"]).arg(folder.path()))
        .fails(&["are free, for a file of 64.0 MiB", "--size"]);
}
