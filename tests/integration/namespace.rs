//! Mount namespaces, in which a test changes what every program sees (`/dev`, `/etc`, `/sbin`) and no program outside does.

use crate::harness::*;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A mount namespace and a place in it to mount on, until this is dropped. `/proc/PID/root` leads into it.
pub struct Namespace {
    holder: Child,
    pub place: Mounted,
}

impl Namespace {
    /// `script` prepares it; its `$1` is the place's folder.
    #[track_caller]
    pub fn new(place: Mounted, script: &str) -> Namespace {
        let folder = place.source.parent().expect("a folder");
        // The copies of other tests' mounts would keep those alive.
        let script = format!("umount -l -a -t fuse.warpfs; {{ {script}\n}} && echo ready && read -r _");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script, "sh"]).arg(folder);
        let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let mut line = String::new();
        let _ = BufReader::new(holder.stdout.take().expect("piped")).read_line(&mut line);
        let namespace = Namespace { holder, place };
        assert_eq!(line, "ready\n", "the namespace is as it should be");
        namespace
    }

    /// The process that keeps it.
    pub fn pid(&self) -> u32 {
        self.holder.id()
    }

    /// Runs a command in it.
    #[track_caller]
    pub fn run<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Output {
        let entered = format!("--mount=/proc/{}/ns/mnt", self.pid());
        run(Command::new("nsenter").arg(entered).args(["--", "timeout", "20"]).args(words))
    }

    /// A path in the mount, as this process reaches it.
    pub fn at(&self, name: &str) -> PathBuf {
        let point = self.place.mountpoint.strip_prefix("/").expect("absolute");
        Path::new("/proc").join(self.pid().to_string()).join("root").join(point).join(name)
    }

    /// Type, source and options of each mount on the place.
    pub fn mounts(&self) -> Vec<(String, String, String)> {
        let table = std::fs::read_to_string(format!("/proc/{}/mounts", self.pid())).expect("readable");
        let lines = table.lines().map(|line| line.split(' ').map(String::from).collect::<Vec<_>>());
        let here = lines.filter(|fields| fields[1] == self.place.mountpoint.display().to_string());
        here.map(|fields| (fields[2].clone(), fields[0].clone(), fields[3].clone())).collect()
    }

    pub fn daemon(&self) -> i32 {
        let stats = std::fs::read_to_string(self.at(".warpfs/stats")).expect("stats");
        let stats: serde_json::Value = serde_json::from_str(&stats).expect("JSON");
        stats["pid"].as_i64().expect("a number") as i32
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The daemon ends with its mount, and the namespace with the last of its processes.
        while !self.mounts().is_empty() {
            if !self.run(["umount".as_ref(), "-l".as_ref(), self.place.mountpoint.as_os_str()]).status.success() {
                break;
            }
        }
        drop(self.holder.stdin.take());
        let _ = end(&mut self.holder, DEADLINE);
    }
}
