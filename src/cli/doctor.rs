//! `warpfs doctor`: prints what the checks found, and what to do about it.

use super::Done;
use crate::doctor::{self, Finding, Options, State, probe};
use crate::failure::Failure;
use crate::protocol::Code;
use serde_json::json;
use std::path::PathBuf;

/// Check driver, CUDA, GPUDirect Storage, kernel, limits, PCIe and the disks below SOURCE, and say for each shortfall what to
/// do. Fails if something is wrong for the device.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The directory that is to be mounted; without it nothing is said of file system and disk
    source: Option<PathBuf>,
    /// The device, as `warpfs mount` takes it: auto, host, cuda:N or several with commas, cuda:all, or a GPU's UUID
    #[arg(long, default_value = "auto")]
    device: String,
    /// JSON: `findings` (name, state, what, do) and a `summary`
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Done {
    let report = doctor::examine(&Options { device: args.device.clone(), source: args.source.clone() });
    let count = |state| report.count(state);
    let (ok, notes, wrong, spared) =
        (count(State::Ok), count(State::Note), count(State::Wrong), count(State::NotNeeded));
    if args.json {
        let summary = json!({
            "device": report.device, "well": report.is_well(),
            "ok": ok, "note": notes, "wrong": wrong, "not-needed": spared,
        });
        say!("{:#}", json!({ "findings": report.findings, "summary": summary }));
    } else {
        let width = report.findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
        report.findings.iter().for_each(|finding| print(finding, width));
        say!("\n{}: {} wrong, {} to note, {} ok", report.device, wrong, notes, ok);
        if args.source.is_none() {
            say!("`warpfs doctor DIRECTORY` says more about the files of a directory");
        }
    }
    if report.is_well() {
        return Ok(());
    }
    let wrong = report.findings.iter().filter(|finding| finding.state == State::Wrong);
    let said: Vec<String> = wrong.map(complaint).collect();
    Err(Failure::new(Code::Io, said.join("; ")))
}

fn print(finding: &Finding, width: usize) {
    let state = match finding.state {
        State::Ok => "ok",
        State::Note => "note",
        State::Wrong => "wrong",
        State::NotNeeded => "-",
    };
    say!("{state:<5}  {:<width$}  {}", finding.name, finding.what);
    if let Some(remedy) = &finding.remedy {
        say!("       {:<width$}  do: {remedy}", "");
    }
}

/// For stderr, where the other lines may not be seen.
fn complaint(finding: &Finding) -> String {
    let remedy = finding.remedy.as_deref().map(|remedy| format!(" ({remedy})")).unwrap_or_default();
    format!("{}: {}{remedy}", finding.name, finding.what)
}

/// Load libcufile and say what came of it, for the doctor.
#[derive(Debug, clap::Args)]
pub(super) struct ProbeArgs {}

pub(super) fn answer(_: &ProbeArgs) -> Done {
    probe::answer();
    Ok(())
}
