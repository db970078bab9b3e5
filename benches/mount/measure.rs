//! The measuring process. Each row is first tried on every subject, which warms it and settles how often its operation
//! is repeated: equally often for all of them. Then every round measures each subject once, in an order that rotates,
//! so that a disturbance of the machine hits all alike. Rows go to the parent as lines of JSON.

use crate::rows::{Row, Unit, all};
use crate::subject::{NATIVE, Place};
use rustix::fs::{CWD, Mode, OFlags};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The argument that makes a process the measuring one.
pub const WORD: &str = "measure";

/// A measurement of the native directory shall take so long, ...
const WANTED: Duration = Duration::from_millis(150);
/// ... but of the slowest subject no longer than this, ...
const LONGEST: Duration = Duration::from_millis(600);
/// ... unless the native one would become shorter than this.
const SHORTEST: Duration = Duration::from_millis(30);
/// How long the trial of the native directory takes at least.
const TRIAL: Duration = Duration::from_millis(15);

/// What is measured, and where.
pub struct Plan {
    /// The folder of everything, outside of the source.
    pub work: PathBuf,
    pub source: PathBuf,
    pub rounds: usize,
    pub rows: Vec<String>,
    pub ordinary_user: bool,
    pub subjects: Vec<Place>,
}

/// A row's figures: the seconds of each round by subject, or why there are none.
pub struct Measured {
    pub name: String,
    pub unit: Unit,
    /// How often the operation was repeated in each measurement.
    pub count: usize,
    pub seconds: BTreeMap<String, Vec<f64>>,
    pub refused: BTreeMap<String, String>,
}

/// Where a measurement runs.
pub struct Site<'p> {
    /// The subject's view of the source.
    pub root: &'p Path,
    pub plan: &'p Plan,
}

/// Reads the plan from stdin and measures its rows.
pub fn run() {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).expect("the plan");
    let plan = Plan::from_json(&text).expect("the plan");
    for row in all() {
        let has = |word: &String| row.names.iter().any(|name| name.contains(word.as_str()));
        let wanted = plan.rows.is_empty() || plan.rows.iter().any(has);
        if wanted && (row.for_ordinary_user || !plan.ordinary_user) {
            let begun = Instant::now();
            let parts = measure(&row, &plan);
            eprintln!("{:<37}{:6.1} s", row.names.join(", "), begun.elapsed().as_secs_f64());
            for measured in parts {
                // Who reads it may have gone; then nobody wants the rest either.
                if writeln!(io::stdout(), "{}", measured.to_json()).is_err() {
                    return;
                }
            }
        }
    }
}

fn measure(row: &Row, plan: &Plan) -> Vec<Measured> {
    let mut refused: BTreeMap<String, String> =
        plan.subjects.iter().filter_map(|s| Some((s.name.clone(), s.refused.clone()?))).collect();
    let mut seconds = vec![BTreeMap::<String, Vec<f64>>::new(); row.names.len()];
    let mut count = 0;
    if let Err(e) = (row.prepare)(plan) {
        refused = plan.subjects.iter().map(|s| (s.name.clone(), format!("cannot be prepared: {e}"))).collect();
    } else {
        count = calibrate(row, plan, &mut refused);
        for turn in 0..plan.rounds * plan.subjects.len() {
            let (round, place) = (turn / plan.subjects.len(), turn % plan.subjects.len());
            let subject = &plan.subjects[(round + place) % plan.subjects.len()];
            if refused.contains_key(&subject.name) {
                continue;
            }
            match (row.measure)(&Site { root: &subject.root, plan }, count) {
                Ok(parts) => {
                    for (seconds, took) in seconds.iter_mut().zip(parts) {
                        seconds.entry(subject.name.clone()).or_default().push(took.as_secs_f64());
                    }
                }
                Err(e) => {
                    refused.insert(subject.name.clone(), e.to_string());
                }
            }
        }
    }
    let parts = row.names.iter().zip(seconds).map(|(name, mut seconds)| {
        seconds.retain(|subject, _| !refused.contains_key(subject));
        Measured { name: name.to_string(), unit: row.unit, count, seconds, refused: refused.clone() }
    });
    parts.collect()
}

/// How often the operation is repeated. Tries it on every subject.
fn calibrate(row: &Row, plan: &Plan, refused: &mut BTreeMap<String, String>) -> usize {
    let mut count = row.step;
    let mut native = Duration::from_secs(1);
    let mut slowest: f64 = 0.0;
    for subject in &plan.subjects {
        if refused.contains_key(&subject.name) {
            continue;
        }
        let site = Site { root: &subject.root, plan };
        let trial = |count| Ok((row.measure)(&site, count)?.iter().sum::<Duration>());
        let mut tried: io::Result<Duration> = trial(count);
        while subject.name == NATIVE && row.repeats && tried.as_ref().is_ok_and(|took| *took < TRIAL) {
            count *= 2;
            tried = trial(count);
        }
        match tried {
            Ok(took) if subject.name == NATIVE => native = took,
            Ok(took) => slowest = slowest.max(took.as_secs_f64()),
            Err(e) => {
                refused.insert(subject.name.clone(), e.to_string());
            }
        }
    }
    if !row.repeats {
        return row.step;
    }
    let times = |wanted: Duration, took: f64| wanted.as_secs_f64() / took.max(1e-9);
    let least = times(SHORTEST, native.as_secs_f64());
    let factor = times(WANTED, native.as_secs_f64()).min(times(LONGEST, slowest).max(least));
    let steps = (count as f64 * factor / row.step as f64).ceil() as usize;
    steps.max(1) * row.step
}

impl Site<'_> {
    /// Everything written so far is on the disk, so that its writeback disturbs nobody.
    pub fn sync(&self) -> io::Result<()> {
        let source = rustix::fs::open(&self.plan.source, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(rustix::fs::syncfs(source)?)
    }

    /// The kernel forgets names and attributes, of the mounts and of the source, and the daemons have heard of it.
    pub fn drop_names(&self) -> io::Result<()> {
        self.sync()?;
        std::fs::write("/proc/sys/vm/drop_caches", "2")
            .map_err(|e| io::Error::new(e.kind(), format!("cannot drop the kernel's caches: {e}")))?;
        self.settle();
        Ok(())
    }

    /// Waits until no daemon works any more, for two seconds at most: each is told of what the kernel forgot.
    fn settle(&self) {
        let until = Instant::now() + Duration::from_secs(2);
        let mut before = self.processor_time();
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            let now = self.processor_time();
            if now.saturating_sub(before) < 500_000 {
                return;
            }
            before = now;
        }
    }

    /// Nanoseconds of the daemons.
    fn processor_time(&self) -> u64 {
        self.plan.subjects.iter().filter_map(|subject| subject.pid).map(crate::machine::processor_time).sum()
    }
}

impl Plan {
    pub fn to_json(&self) -> String {
        let places = self.subjects.iter().map(|s| {
            json!({ "name": s.name, "root": s.root, "command": s.command, "version": s.version, "refused": s.refused,
                "pid": s.pid })
        });
        json!({ "work": self.work, "source": self.source, "rounds": self.rounds, "rows": self.rows,
            "ordinary_user": self.ordinary_user, "subjects": places.collect::<Vec<_>>() })
        .to_string()
    }

    fn from_json(text: &str) -> Result<Plan, String> {
        let value: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let string = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let place = |value: &Value| Place {
            name: string(&value["name"]),
            root: string(&value["root"]).into(),
            command: string(&value["command"]),
            version: string(&value["version"]),
            refused: value["refused"].as_str().map(str::to_string),
            pid: value["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()),
        };
        Ok(Plan {
            work: string(&value["work"]).into(),
            source: string(&value["source"]).into(),
            rounds: value["rounds"].as_u64().and_then(|n| usize::try_from(n).ok()).ok_or("no rounds")?,
            rows: value["rows"].as_array().into_iter().flatten().map(string).collect(),
            ordinary_user: value["ordinary_user"].as_bool().unwrap_or_default(),
            subjects: value["subjects"].as_array().into_iter().flatten().map(place).collect(),
        })
    }
}

impl Measured {
    pub fn value(&self) -> Value {
        json!({ "row": self.name, "unit": self.unit.word(), "bytes": self.unit.bytes(), "count": self.count,
            "seconds": self.seconds, "refused": self.refused })
    }

    fn to_json(&self) -> String {
        self.value().to_string()
    }

    pub fn from_json(line: &str) -> Result<Measured, String> {
        let failed = |what: &str| format!("{what} is not in a row: {line}");
        let value: Value = serde_json::from_str(line).map_err(|e| format!("{e}: {line}"))?;
        let word = value["unit"].as_str().ok_or_else(|| failed("unit"))?;
        Ok(Measured {
            name: value["row"].as_str().ok_or_else(|| failed("row"))?.into(),
            unit: Unit::from_word(word, value["bytes"].as_u64().unwrap_or(0)).ok_or_else(|| failed("unit"))?,
            count: value["count"].as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(|| failed("count"))?,
            seconds: serde_json::from_value(value["seconds"].clone()).map_err(|e| e.to_string())?,
            refused: serde_json::from_value(value["refused"].clone()).map_err(|e| e.to_string())?,
        })
    }
}

/// Bytes that look random and are always the same for a seed.
pub struct Noise(u64);

impl Noise {
    pub fn new(seed: u64) -> Noise {
        Noise(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes()[..word.len()]);
        }
    }
}

/// Makes a directory of the source with `fill` once; it appears only when it is complete. Then waits until no mount
/// keeps what it knew before.
pub fn prepared(plan: &Plan, name: &str, fill: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let (ready, making) = (plan.source.join(name), plan.source.join(format!("{name}.making")));
    if rustix::fs::accessat(CWD, &ready, rustix::fs::Access::EXISTS, rustix::fs::AtFlags::empty()).is_ok() {
        return Ok(());
    }
    std::fs::create_dir(&making)?;
    fill(&making)?;
    std::fs::rename(&making, &ready)?;
    let source = rustix::fs::open(&plan.source, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::syncfs(source)?;
    std::thread::sleep(Duration::from_millis(1100));
    Ok(())
}
