//! Facts about the machine and its processes, without which no figure means anything.

use std::path::Path;

pub struct Facts {
    pub kernel: String,
    pub cores: usize,
    pub processor: String,
    pub memory_mib: u64,
    /// Type and device of the source's file system.
    pub file_system: String,
    /// Load averages before the first row.
    pub load: String,
}

pub fn facts(source: &Path) -> Facts {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map(|(_, value)| value.trim().to_string()).unwrap_or_default()
    };
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    Facts {
        kernel: read("/proc/sys/kernel/osrelease").trim().to_string(),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        processor: field(&read("/proc/cpuinfo"), "model name"),
        memory_mib: memory.split(' ').next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) >> 10,
        file_system: file_system(source, &read("/proc/self/mounts")),
        load: load(),
    }
}

/// The last mount whose place contains `source` most deeply.
fn file_system(source: &Path, mounts: &str) -> String {
    let lines = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (device, place, kind) = (words.next()?, words.next()?, words.next()?);
        source.starts_with(place).then_some((place.len(), format!("{kind} on {device}")))
    });
    lines.max_by_key(|(depth, _)| *depth).map(|(_, text)| text).unwrap_or_default()
}

/// The load averages of 1, 5 and 15 minutes.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// What all threads of a process have used of processors so far, in nanoseconds.
pub fn processor_time(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let times = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok());
    times.filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok()).sum()
}
