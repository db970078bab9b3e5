//! What works on this machine and what does not, check by check, and for each shortfall what to do. It looks and never
//! changes anything, says "unknown" where nobody tells it, and must not be hurt by what it looks at: a library that crashes
//! is loaded by a child. Called by `warpfs doctor`.

mod block;
mod cufile;
mod gds;
mod gpu;
mod kernel;
mod limits;
mod machine;
mod pcie;
pub mod probe;
mod source;
mod verdict;

use machine::Machine;
use serde::Serialize;
use std::path::PathBuf;

/// What to look at.
#[derive(Clone, Debug)]
pub struct Options {
    /// As `warpfs mount --device` takes it.
    pub device: String,
    /// The directory that is to be mounted.
    pub source: Option<PathBuf>,
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    Ok,
    /// It works, but slower or with less, or nobody can tell.
    Note,
    /// A mount on this device fails, or does so for a good part of what it is for.
    Wrong,
    /// The chosen device has no use for it.
    NotNeeded,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub name: &'static str,
    pub state: State,
    /// One sentence, without the name.
    pub what: String,
    /// What to do about it.
    #[serde(rename = "do", skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    fn new(state: State, name: &'static str, what: impl Into<String>) -> Finding {
        Finding { name, state, what: what.into(), remedy: None }
    }

    fn ok(name: &'static str, what: impl Into<String>) -> Finding {
        Finding::new(State::Ok, name, what)
    }

    fn note(name: &'static str, what: impl Into<String>) -> Finding {
        Finding::new(State::Note, name, what)
    }

    fn wrong(name: &'static str, what: impl Into<String>) -> Finding {
        Finding::new(State::Wrong, name, what)
    }

    /// Something that nobody tells; `why` says who was asked.
    fn unknown(name: &'static str, why: impl std::fmt::Display) -> Finding {
        Finding::note(name, format!("unknown: {why}"))
    }

    fn not_needed(name: &'static str) -> Finding {
        Finding::new(State::NotNeeded, name, "not needed for host memory")
    }

    /// The same with what to do about it.
    fn so(mut self, remedy: impl Into<String>) -> Finding {
        self.remedy = Some(remedy.into());
        self
    }
}

/// Every finding, in the order in which a person reads them.
#[derive(Clone, Debug)]
pub struct Report {
    pub findings: Vec<Finding>,
    /// The labels of the devices that were looked at, or what `--device` said where there is none.
    pub device: String,
}

impl Report {
    pub fn count(&self, state: State) -> usize {
        self.findings.iter().filter(|finding| finding.state == state).count()
    }

    /// Nothing is wrong for the chosen device.
    pub fn is_well(&self) -> bool {
        self.count(State::Wrong) == 0
    }
}

/// Looks at everything. Takes some milliseconds, and some seconds where something hangs.
pub fn examine(options: &Options) -> Report {
    let machine = Machine::real();
    let chosen = gpu::choose(&machine, &options.device);
    let mut findings = vec![chosen.finding.clone()];
    findings.extend(chosen.room.iter().cloned());
    findings.extend(kernel::check(&machine));
    findings.extend(limits::check(&machine));
    let place = options.source.as_deref().map(source::look);
    let (disks, seen) = match &place {
        Some(Ok(place)) => source::check(&machine, place),
        Some(Err(finding)) => (Vec::new(), vec![finding.clone()]),
        None => (Vec::new(), Vec::new()),
    };
    let place = place.and_then(Result::ok);
    if chosen.wants_gpu() {
        findings.extend(gpu::check(&machine, &chosen));
        let (ways, checked) = gds::check(&machine, &chosen.gpus);
        findings.extend(checked);
        findings.extend(pcie::links(&machine, &chosen.gpus));
        findings.extend(seen);
        findings.extend(pcie::distances(&machine, &chosen.gpus, &disks));
        findings.extend(place.map(|place| verdict::with_gpu(&place, &disks, &ways, &chosen.gpus)));
    } else {
        let names = gpu::NAMES.iter().chain(&gds::NAMES).chain([&pcie::LINK]);
        findings.extend(names.map(|name| Finding::not_needed(name)));
        findings.extend(seen);
        findings.extend(place.map(|place| verdict::without_gpu(&place, &disks)));
    }
    Report { findings, device: chosen.label() }
}
