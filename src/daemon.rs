//! Puts the rooms together for one mount, runs them, and stops them in the right order. The process that calls this has
//! one thread and no CUDA yet; it never gets a context.

pub mod log;
pub mod supervise;

use crate::cache::{Cache, Setup};
use crate::channel::{Server, location};
use crate::config::Config;
use crate::device;
use crate::failure::{Failure, Result};
use crate::filesystem::{self, Facts};
use crate::loader::child;
use crate::loader::parent::{ChildLoader, Settings};
use crate::protocol::Code;
use crate::size::Human;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use supervise::Signals;

/// Mounts, calls `ready` with lines for the user, and serves until it is unmounted or told to stop.
pub fn run(config: &Config, signals: Signals, ready: impl FnOnce(Vec<String>)) -> Result<()> {
    raise_limits();
    let selection = device::select(&config.device)?;
    // A quarter of the descriptors for copies; the mount's inodes, its handles and the clients share the rest.
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
    let pieces = (descriptors / 4 / selection.memories.len() as u64).max(1);
    let mut devices = Vec::new();
    let mut described = Vec::new();
    for memory in selection.memories {
        let info = memory.info().clone();
        let limit = config.limit(&info, memory.free())?;
        described.push(format!("{} ({}, budget {})", info.label, info.name, Human(limit)));
        let settings = Settings {
            arguments: child::words(&config.transfer),
            environment: child::environment(),
            ..Settings::default()
        };
        let loader = Arc::new(ChildLoader::new(&info, settings)?);
        devices.push(Setup { memory, loader, limit, pieces, transfer: config.transfer });
    }
    let labels: Vec<_> = devices.iter().map(|d| d.memory.info().label.clone()).collect();
    let cache = Cache::start(devices).map_err(|e| Failure::system("cannot start the cache's threads", e))?;
    let cache = Arc::new(cache);
    let socket = location::choose(config.socket.as_deref(), &config.mount.mountpoint, config.mount.allow_other)?;
    let server = Server::start(socket, config.mount.allow_other, Arc::clone(&cache))?;
    let facts = Facts { socket: server.path().to_path_buf(), config: config.toml(&labels) };
    let mounted = filesystem::mount(&config.mount, Arc::clone(&cache), facts)?;
    let (source, mountpoint) = (config.mount.source.display(), config.mount.mountpoint.display());
    let mut lines = vec![selection.line];
    lines.push(format!(
        "{source} is mounted on {mountpoint}; {}; {}",
        described.join(", "),
        mounted.passthrough_line()
    ));
    for line in &lines {
        tracing::info!("{line}");
    }
    let unmounter = mounted.unmounter();
    // What ends the wait for users, whichever comes first. Workers that serve somebody are not waited for: the end of
    // the process ends the kernel's connection, and them.
    let (end, ended) = std::sync::mpsc::channel();
    let cut = end.clone();
    let failed = |e| Failure::system("cannot start a thread", e);
    let counted = unmounter.clone();
    signals.on_stop(move || unmounter.unmount(), move |why| drop(cut.send(Err(why)))).map_err(failed)?;
    let serving = std::thread::Builder::new().name("serve".into());
    serving.spawn(move || mounted.serve(move |served| drop(end.send(Ok(served))))).map_err(failed)?;
    ready(lines);
    let served = ended.recv().expect("the thread that serves tells of its end").unwrap_or_else(|why| {
        let open = counted.open_files();
        let files = if open == 1 { "file" } else { "files" };
        let message =
            format!("{mountpoint} was still in use {why}: programs were cut off, which had {open} {files} open");
        Err(Failure::new(Code::Io, message))
    });
    // Clients first, so that nobody asks while the loads fail.
    drop(server);
    cache.stop();
    tracing::info!("{mountpoint} is unmounted");
    served
}

/// The limits of whoever mounts are not those of whoever uses the mount: as much as the system allows without asking.
fn raise_limits() {
    for resource in [Resource::Nofile, Resource::Fsize] {
        let limit = getrlimit(resource);
        let _ = setrlimit(resource, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
    // Who may have more descriptors takes as many as the kernel has for a process; for everybody else this fails.
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|most| most.trim().parse().ok());
    let _ = most.map(|most| setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) }));
    // What is still too large is an error of that one write, and not the end of the daemon.
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}
