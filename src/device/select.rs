//! From the words of `--device` to devices, and one line that says what was taken and why. Called by the daemon when it
//! starts; it must never take another device than the one that was named.

use super::cuda::{self, CudaMemory};
use super::host::HostMemory;
use super::{Info, Memory, format_uuid, parse_uuid};
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use std::sync::Arc;

/// The devices that a daemon serves, the default first.
pub struct Selection {
    pub memories: Vec<Arc<dyn Memory>>,
    /// One line for the log: what was taken, and why where that was not asked for.
    pub line: String,
}

/// Takes what `spec` names: `auto`, `host`, `cuda:N[,cuda:M]`, `cuda:all` or `GPU-UUID`. Fails with `BadRequest` where it
/// names nothing, and with `NoDevice` where it names what is not there; `auto` falls back to the host instead.
pub fn select(spec: &str) -> Result<Selection> {
    match spec {
        "auto" => Ok(match all() {
            // One device, unless more are asked for: the others are somebody's.
            Ok(mut memories) => {
                memories.truncate(1);
                taken(memories)
            }
            Err(why) => {
                Selection { memories: vec![Arc::new(HostMemory::new()?)], line: format!("took host memory: {why}") }
            }
        }),
        "host" => Ok(taken(vec![Arc::new(HostMemory::new()?)])),
        "cuda:all" => Ok(taken(all().map_err(|failure| without(spec, failure))?)),
        _ => some(spec),
    }
}

fn all() -> Result<Vec<Arc<dyn Memory>>> {
    cuda::list()?.iter().map(open).collect()
}

fn open(info: &Info) -> Result<Arc<dyn Memory>> {
    Ok(Arc::new(CudaMemory::new(&info.uuid)?))
}

/// Why there is no GPU, and what to do.
fn without(spec: &str, failure: Failure) -> Failure {
    let message = format!(
        "--device {spec}: {failure}; `warpfs doctor --device cuda:0` says what to do, and --device host needs no GPU"
    );
    Failure { message, ..failure }
}

fn some(spec: &str) -> Result<Selection> {
    let mut wanted: Vec<&str> = Vec::new();
    for name in spec.split(',').map(str::trim) {
        let ordinal = name.strip_prefix("cuda:").is_some_and(|n| n.parse::<u32>().is_ok());
        if !ordinal && parse_uuid(name).is_none() {
            let message = if ["auto", "host", "cuda:all"].contains(&name) {
                format!("--device {spec}: {name} goes with no other device")
            } else {
                format!("--device {spec}: `{name}` is none of auto, host, cuda:N[,cuda:M], cuda:all and a GPU's UUID")
            };
            return Err(Failure::new(Code::BadRequest, message));
        }
        if wanted.contains(&name) {
            return Err(Failure::new(Code::BadRequest, format!("--device {spec}: {name} is named twice")));
        }
        wanted.push(name);
    }
    let devices = cuda::list().map_err(|failure| without(spec, failure))?;
    let mut infos: Vec<&Info> = Vec::new();
    for name in wanted {
        let uuid = parse_uuid(name);
        let ordinal: Option<u32> = name.strip_prefix("cuda:").and_then(|n| n.parse().ok());
        let found = devices.iter().find(|d| Some(d.uuid) == uuid || Some(d.ordinal) == ordinal);
        let Some(found) = found else {
            let there: Vec<String> = devices.iter().map(describe).collect();
            let message = format!("--device {spec}: there is no {name}; there is {}", there.join(", "));
            return Err(Failure::new(Code::NoDevice, message));
        };
        if infos.iter().any(|i| i.uuid == found.uuid) {
            return Err(Failure::new(Code::BadRequest, format!("--device {spec}: {} is named twice", found.label)));
        }
        infos.push(found);
    }
    Ok(taken(infos.into_iter().map(open).collect::<Result<_>>()?))
}

fn taken(memories: Vec<Arc<dyn Memory>>) -> Selection {
    let names: Vec<String> = memories.iter().map(|m| describe(m.info())).collect();
    Selection { line: format!("took {}", names.join(", ")), memories }
}

fn describe(info: &Info) -> String {
    let gib = info.total as f64 / f64::from(1u32 << 30);
    match info.kind {
        crate::protocol::DeviceKind::Host => format!("host memory ({gib:.1} GiB)"),
        crate::protocol::DeviceKind::Cuda => {
            format!("{} ({}, {gib:.1} GiB, {})", info.label, info.name, format_uuid(&info.uuid))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_always_there() {
        let selection = select("host").expect("host memory");
        assert_eq!(selection.memories.len(), 1);
        assert_eq!(selection.memories[0].info().label, "host");
        assert!(selection.line.starts_with("took host memory ("), "{}", selection.line);
    }

    #[test]
    fn what_is_no_device_is_said_to_be_none() {
        for spec in ["", "gpu", "cuda", "cuda:", "cuda:x", "cuda:-1", "GPU-12", "cuda:0,cuda:0", "host,cuda:0"] {
            let failure = select(spec).err().expect(spec);
            assert_eq!(failure.code, Code::BadRequest, "{spec}: {failure}");
        }
    }
}
