//! What people and their tools see of the loads: by which route the bytes came, how long it took, and why another way was
//! taken, in `.warpfs/stats` and `.warpfs/metrics`.

use crate::harness::*;
use crate::warpfs;
use std::collections::HashMap;
use warpfs::transfer::direct::Alignment;

/// Sample values by name with labels, and the kinds of the families.
fn metrics(mounted: &Mounted) -> (HashMap<String, f64>, HashMap<String, String>) {
    let text = std::fs::read_to_string(mounted.mountpoint.join(".warpfs/metrics")).expect("readable");
    let (body, end) = text.split_at(text.len() - "# EOF\n".len());
    assert_eq!(end, "# EOF\n");
    let (mut samples, mut kinds) = (HashMap::new(), HashMap::new());
    for line in body.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.split_once(' ').expect("two words");
            assert!(kinds.insert(name.to_string(), kind.to_string()).is_none(), "{name} twice");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').expect("a name and a value");
            let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
            assert!(samples.insert(name.to_string(), value).is_none(), "{name} twice");
        }
    }
    (samples, kinds)
}

/// Many failures and fallbacks that look like one slow success (sglang 27139).
#[test]
fn loads_are_counted_once_and_by_their_route() {
    let mounted = Mounted::new();
    let content = noise(3, 6 << 20);
    let path = mounted.file("f", &content);
    warpfs!("preload", path).ok();
    warpfs!("preload", path).ok();
    let device = mounted.device();
    let routes = &device["routes"];
    assert_eq!(routes["buffered"]["bytes"], 6 << 20);
    assert_eq!((&routes["buffered"]["files"], &routes["direct"]["files"]), (&1.into(), &0.into()));
    assert!(routes["buffered"]["operations"].as_u64() >= Some(2));
    assert!(routes["buffered"]["busy_seconds"].as_f64() > Some(0.0));
    assert_eq!(routes["buffered"]["latency_within_us"]["50000000"], 1);
    assert_eq!((mounted.counter("misses"), mounted.counter("hits"), mounted.counter("loads")), (1, 1, 1));

    let (samples, kinds) = metrics(&mounted);
    let label = device["label"].as_str().expect("text");
    let value = |name: &str| {
        let name = name.replace("DEVICE", label);
        samples.get(&name).copied().unwrap_or_else(|| panic!("{name} in {samples:?}"))
    };
    assert_eq!(value(r#"warpfs_hits_total{device="DEVICE"}"#), 1.0);
    assert_eq!(value(r#"warpfs_route_bytes_total{device="DEVICE",route="buffered"}"#), (6 << 20) as f64);
    assert_eq!(value(r#"warpfs_route_bytes_total{device="DEVICE",route="gds"}"#), 0.0);
    assert_eq!(value(r#"warpfs_load_seconds_count{device="DEVICE",route="buffered"}"#), 1.0);
    assert_eq!(value(r#"warpfs_load_seconds_bucket{device="DEVICE",route="buffered",le="+Inf"}"#), 1.0);
    assert_eq!(value(r#"warpfs_resident_bytes{device="DEVICE"}"#), (6 << 20) as f64);
    assert_eq!(value(r#"warpfs_fallbacks_total{device="DEVICE",reason="direct_refused"}"#), 0.0);
    assert_eq!(kinds["warpfs_load_seconds"], "histogram");
    // Every sample belongs to a family that is explained.
    for name in samples.keys() {
        let bare = name.split('{').next().expect("a name");
        let family = ["_total", "_bucket", "_count", "_sum", "_info"].iter().find_map(|end| bare.strip_suffix(end));
        assert!(kinds.contains_key(family.unwrap_or(bare)) || kinds.contains_key(bare), "{name}");
    }

    // Out of the page cache: the other route, where the file system has it.
    warpfs!("evict", path).ok();
    let file = std::fs::File::open(mounted.source.join("f")).expect("there");
    if Alignment::of(std::os::fd::AsFd::as_fd(&file)).is_none() {
        println!("not tested: no direct reads here");
        return;
    }
    file.sync_all().expect("on the disk");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advised");
    warpfs!("preload", path).ok();
    let device = mounted.device();
    assert_eq!(device["routes"]["direct"]["bytes"], 6 << 20);
    assert_eq!((&device["routes"]["buffered"]["files"], &device["routes"]["direct"]["files"]), (&1.into(), &1.into()));
    warpfs!("verify", path).ok();
}

#[test]
fn small_files_lose_little_to_slack() {
    let mounted = Mounted::new();
    let mut sum = 0;
    for i in 0..400_u64 {
        let size = 1024 + (i * 7919 % 200) * 1024 + i % 511;
        sum += size;
        mounted.file(&format!("f{i}"), &noise(i, size as usize));
    }
    warpfs!("preload", mounted.mountpoint).ok();
    let device = mounted.device();
    assert_eq!(device["resident_files"], 400);
    let used = mounted.used();
    // Pages of a GPU are large: the last of a slab may be nearly empty.
    let page = if device["label"] == "host" { 0 } else { 2 << 20 };
    assert!(used >= sum && used <= sum + sum / 10 + page, "{used} bytes for {sum}");
    assert_eq!(device["slack_bytes"].as_u64(), Some(used - sum));
    warpfs!("verify", mounted.mountpoint).ok();
    warpfs!("evict", mounted.mountpoint).ok();
    eventually("its loader has unmapped it", || mounted.used() == 0);
}

/// Of a file half of which is in the page cache, each half by its way.
#[test]
fn explain_tells_each_way_and_its_reason_and_starts_nothing() {
    let mounted = Mounted::new();
    let path = mounted.file("f", &noise(3, 16 << 20));
    let explained = |path: &std::path::Path| -> serde_json::Value {
        serde_json::from_str(&warpfs!("explain", "--json", path).ok().text()).expect("JSON")
    };
    let ways = |explained: &serde_json::Value| -> Vec<(String, u64)> {
        let ways = explained[0]["devices"][0]["routes"].as_array().expect("a list").clone();
        let of = |way: serde_json::Value| (way["route"].as_str().expect("a word").to_string(), way["bytes"].as_u64());
        ways.into_iter().map(of).map(|(route, bytes)| (route, bytes.expect("bytes"))).collect()
    };
    let first = explained(&path);
    assert_eq!((&first[0]["size"], &first[0]["devices"][0]["state"]), (&(16 << 20).into(), &"absent".into()));
    assert_eq!(ways(&first), [("buffered".to_string(), 16 << 20)]);
    let text = warpfs!("explain", path).ok().text();
    assert!(text.contains("16.0 MiB on ") && text.contains("buffered for 16.0 MiB: it is in the page cache"), "{text}");
    let small = mounted.file("small", b"content");
    assert!(warpfs!("explain", small).ok().text().contains("256 bytes of a slab"));
    assert_eq!(mounted.counter("misses"), 0, "nothing was started");

    let file = std::fs::File::open(mounted.source.join("f")).expect("there");
    if Alignment::of(std::os::fd::AsFd::as_fd(&file)).is_some() {
        file.sync_all().expect("on the disk");
        let half = std::num::NonZeroU64::new(8 << 20);
        rustix::fs::fadvise(&file, 0, half, rustix::fs::Advice::DontNeed).expect("advised");
        let mut both = ways(&explained(&path));
        both.sort();
        assert_eq!(both, [("buffered".to_string(), 8 << 20), ("direct".to_string(), 8 << 20)]);
        // It says what then happens.
        warpfs!("preload", path).ok();
        let routes = &mounted.device()["routes"];
        assert_eq!((&routes["buffered"]["bytes"], &routes["direct"]["bytes"]), (&(8 << 20).into(), &(8 << 20).into()));
    }
    warpfs!("preload", path).ok();
    let after = explained(&path);
    assert_eq!(after[0]["devices"][0]["state"], "resident");
    assert!(ways(&after).is_empty());
    warpfs!("explain", "/proc/self/status").fails(&["is not on a warpfs mount"]);
}
