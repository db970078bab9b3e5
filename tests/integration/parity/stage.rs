//! Runs cases on three sides at once (a native directory, the mount, the mount without passthrough) and compares what
//! they saw, step by step. A case's thread has a working directory and a umask of its own, so that a case is written in
//! plain relative names. Nobody waits for a side for longer than the deadline.

use super::known::{KNOWN, Known};
use super::sys::Errno;
use crate::harness::{DEADLINE, Mounted};
use std::collections::BTreeMap;
use std::fmt::{Debug, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    Native,
    Passthrough,
    ThroughDaemon,
}

impl Side {
    /// Root lets others in, because some cases are somebody else.
    pub fn options(self) -> Vec<&'static str> {
        let mut options = Vec::new();
        if self == Side::ThroughDaemon {
            options.push("--no-passthrough");
        }
        if rustix::process::geteuid().is_root() {
            options.push("--allow-other");
        }
        options
    }
}

/// What is to be the same everywhere.
pub struct Case {
    pub name: &'static str,
    needs_root: bool,
    run: fn(&mut Scene),
}

pub const fn case(name: &'static str, run: fn(&mut Scene)) -> Case {
    Case { name, needs_root: false, run }
}

/// A case that only root can run: it makes devices, gives files away, or is somebody else.
pub const fn root_case(name: &'static str, run: fn(&mut Scene)) -> Case {
    Case { name, needs_root: true, run }
}

/// Each step of one run with its result.
type Seen = Vec<(String, String)>;

/// Where a case notes what it sees.
pub struct Scene {
    prefix: String,
    seen: Seen,
    /// How often each step was noted; its second time is another step.
    times: BTreeMap<String, usize>,
}

impl Scene {
    pub fn note(&mut self, step: &str, result: &dyn Debug) {
        let mut step = format!("{}{}", self.prefix, one_line(step));
        let times = self.times.entry(step.clone()).or_default();
        *times += 1;
        if *times > 1 {
            step += &format!(" (time {times})");
        }
        self.seen.push((step, format!("{result:?}")));
    }

    /// Steps noted from here on belong to `part`.
    pub fn part(&mut self, part: impl Debug) {
        self.prefix = format!("{part:?}: ").replace('"', "");
    }
}

/// An expression as it is shown: without the line breaks that formatting put there.
fn one_line(step: &str) -> String {
    step.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// `see!(scene; expression; expression)` notes each expression's text with its value.
macro_rules! see {
    ($scene:ident; $($step:expr);+ $(;)?) => {
        $( { let result = $step; $scene.note(stringify!($step), &result); } )+
    };
}
pub(crate) use see;

/// Says on stderr that something is left out because it needs root; true where it has to be.
pub fn skipped_without_root(what: &str) -> bool {
    let skipped = !rustix::process::geteuid().is_root();
    if skipped {
        eprintln!("parity: skipped, it needs root: {what}");
    }
    skipped
}

/// A mount of this kind; none where this user or this kernel has no passthrough, where the other one is enough.
pub fn mounted(side: Side) -> Option<(Side, Mounted)> {
    if side == Side::Passthrough && skipped_without_root("the mount with passthrough") {
        return None;
    }
    let mounted = Mounted::with(&side.options());
    let passes = mounted.stats()["mount"]["passthrough"].as_bool().expect("the statistics say so");
    assert!(!(passes && side == Side::ThroughDaemon), "it was told to go through the daemon");
    if side == Side::Passthrough && !passes {
        eprintln!("parity: skipped, this kernel has no passthrough: the mount with passthrough");
        return None;
    }
    Some((side, mounted))
}

/// A native directory and the mounts beside it.
pub struct Sides {
    mounts: Vec<(Side, Mounted)>,
    native: PathBuf,
}

impl Sides {
    pub fn new() -> Sides {
        let mounts: Vec<_> = [Side::ThroughDaemon, Side::Passthrough].into_iter().filter_map(mounted).collect();
        let native = mounts[0].1.source.with_file_name("native");
        std::fs::create_dir(&native).expect("created");
        Sides { mounts, native }
    }

    pub fn mounts(&self) -> impl Iterator<Item = (Side, &Mounted)> {
        self.mounts.iter().map(|(side, mounted)| (*side, mounted))
    }

    pub fn native(&self) -> &Path {
        &self.native
    }
}

/// Runs `work` on a thread with a working directory and a umask of its own; what it returns arrives when it is done.
pub fn stage<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> mpsc::Receiver<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        // SAFETY: this thread gets a working directory and a umask of its own; no descriptor or memory is concerned.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS) }.expect("unshared");
        let done = work();
        let _ = sender.send(done);
    });
    receiver
}

fn run(case: &'static Case, folder: &Path, source: Option<&Path>) -> Seen {
    let name: String = case.name.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let mut scene = Scene { prefix: String::new(), seen: Vec::new(), times: BTreeMap::new() };
    let place = folder.join(&name);
    if let Err(e) = std::fs::create_dir(&place).and_then(|()| Ok(rustix::process::chdir(&place)?)) {
        scene.note("a fresh directory", &Errno::from(e));
        return scene.seen;
    }
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (case.run)(&mut scene)));
    if let Err(panic) = ended {
        let message = panic.downcast_ref::<String>().cloned();
        let message = message.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        scene.seen.push(("panicked".into(), message.unwrap_or_default()));
    }
    scene.prefix.clear();
    if let Some(source) = source {
        let differences = super::tree::differences(&place, &source.join(&name));
        scene.note("differs from its source", &differences);
    } else {
        scene.note("differs from its source", &Vec::<String>::new());
    }
    rustix::process::chdir("/").expect("left");
    scene.seen
}

/// Runs every case on every side; what a mount shows has to be what the native directory shows, or a known difference.
#[track_caller]
pub fn compare(cases: &'static [Case]) {
    let cases: Vec<_> = cases.iter().filter(|case| !(case.needs_root && skipped_without_root(case.name))).collect();
    let sides = Sides::new();
    let start = |folder: PathBuf, source: Option<PathBuf>| {
        let cases = cases.clone();
        let (sender, receiver) = mpsc::channel();
        stage(move || {
            for case in cases {
                let _ = sender.send(run(case, &folder, source.as_deref()));
            }
        });
        receiver
    };
    let native = start(sides.native().to_path_buf(), None);
    let mounts: Vec<_> =
        sides.mounts().map(|(side, m)| (side, start(m.mountpoint.clone(), Some(m.source.clone())))).collect();
    let mut report = String::new();
    for case in &cases {
        let next = |side: Side, results: &mpsc::Receiver<Seen>| {
            results.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("{:?}, {side:?}: no result in time", case.name))
        };
        let expected = next(Side::Native, &native);
        if let Some((_, message)) = expected.iter().find(|(step, _)| step == "panicked") {
            let _ = writeln!(report, "{:?} panicked natively: {message}", case.name);
        }
        for (side, results) in &mounts {
            judge(KNOWN, case.name, *side, &expected, &next(*side, results), &mut report);
        }
    }
    assert!(report.is_empty(), "the mount does not do as the directory does:\n{report}");
}

/// Adds to the report what differs and is not known, and what is known and no longer so.
fn judge(known: &[Known], case: &str, side: Side, expected: &Seen, seen: &Seen, report: &mut String) {
    let known: BTreeMap<_, _> = known
        .iter()
        .filter(|known| known.case == case && known.sides.contains(&side))
        .flat_map(|known| known.steps.iter().map(|(step, result)| (*step, (*result, known.why))))
        .collect();
    let results: BTreeMap<_, _> = seen.iter().map(|(step, result)| (step.as_str(), result.as_str())).collect();
    for (step, (result, why)) in &known {
        let now = results.get(step).unwrap_or(&"no such step");
        if now != result {
            let _ = writeln!(report, "{case:?}, {side:?}: {step}\n  known: {result} ({why})\n  now:   {now}");
        }
    }
    for i in 0..expected.len().max(seen.len()) {
        let (native, mount) = (expected.get(i), seen.get(i));
        let step = mount.or(native).map_or("", |(step, _)| step);
        if native != mount && !known.contains_key(step) {
            let shown =
                |side: Option<&(String, String)>| {
                    side.map_or("nothing".into(), |(own, result)| {
                        if own == step { result.clone() } else { format!("{own} = {result}") }
                    })
                };
            let _ =
                writeln!(report, "{case:?}, {side:?}: {step}\n  native: {}\n  mount:  {}", shown(native), shown(mount));
        }
    }
}

#[test]
fn a_difference_is_reported_and_a_known_one_has_to_stay() {
    const LISTED: &[Known] =
        &[Known { case: "listed", why: "a reason", sides: &[Side::ThroughDaemon], steps: &[("two", "3")] }];
    let judged = |case: &str, native: &[(&str, &str)], mount: &[(&str, &str)]| {
        let seen = |results: &[(&str, &str)]| results.iter().map(|(s, r)| (s.to_string(), r.to_string())).collect();
        let mut report = String::new();
        judge(LISTED, case, Side::ThroughDaemon, &seen(native), &seen(mount), &mut report);
        report
    };
    let (same, other) = ([("one", "1"), ("two", "2")], [("one", "1"), ("two", "3")]);
    assert_eq!(judged("free", &same, &same), "");
    let report = judged("free", &same, &other);
    for word in ["\"free\"", "ThroughDaemon", "two", "native: 2", "mount:  3"] {
        assert!(report.contains(word), "{word} is not in {report}");
    }
    assert!(judged("free", &same, &same[..1]).contains("mount:  nothing"));
    assert!(judged("free", &same[..1], &same).contains("native: nothing"));
    assert_eq!(judged("listed", &same, &other), "");
    assert!(judged("listed", &same, &same).contains("now:   2"), "a fix has to show");
    assert!(
        judged("listed", &same, &[("one", "2"), ("two", "3")]).contains("mount:  2"),
        "and nothing else is covered"
    );
}
