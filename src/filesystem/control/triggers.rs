//! The `user.warpfs.*` attributes: a way to ask for a file, and to ask about it, with nothing but setfattr and getfattr.
//! They start loads and do not wait for them, and they need what reading the file needs. Called by `fuse` for the names
//! that begin with `user.warpfs.`.

use crate::cache::{Ask, Outcome, Standing};
use crate::failure::{Failure, Result};
use crate::filesystem::FileSystem;
use crate::filesystem::inode::is_virtual;
use crate::filesystem::origin::Origin;
use crate::protocol::{Code, NONE, State};
use crate::source::OpenFile;
use std::time::Duration;

/// Told what the attribute's value is, once, from any thread.
pub(crate) type Answered = Box<dyn FnOnce(Result<Vec<u8>>) + Send>;

impl FileSystem {
    pub(crate) fn get_trigger(&self, origin: Origin, node: u64, name: &str, answered: Answered) {
        match name {
            "preload" => self.preload_trigger(origin, node, answered),
            "state" => answered(self.standing_of(origin, node).map(|s| s.state.word().into())),
            "explain" => answered(self.explained(origin, node)),
            "status" => answered(self.standing_of(origin, node).map(|s| self.status_text(&s))),
            _ => answered(Err(unknown(name, libc::ENODATA))),
        }
    }

    pub(crate) fn set_trigger(&self, origin: Origin, node: u64, name: &str, answered: Answered) {
        match name {
            "preload" => self.preload_trigger(origin, node, answered),
            "evict" => answered(self.evict_trigger(origin, node).map(|()| Vec::new())),
            _ => answered(Err(unknown(name, libc::EOPNOTSUPP))),
        }
    }

    fn asked_file(&self, origin: Origin, node: u64) -> Result<OpenFile> {
        if is_virtual(node) {
            return Err(Failure { errno: libc::ENODATA, ..Failure::new(Code::NotRegular, "a file of .warpfs") });
        }
        let inode = self.inodes.get(node).map_err(|e| Failure::system("a forgotten inode", e))?;
        self.readable(&inode, &origin)
    }

    fn preload_trigger(&self, origin: Origin, node: u64, answered: Answered) {
        let file = match self.asked_file(origin, node) {
            Ok(file) => file,
            Err(failure) => return answered(Err(failure)),
        };
        let ask = Ask {
            file,
            device: NONE,
            offset: 0,
            length: 0,
            caller: origin.caller(),
            session: None,
            wait: Duration::ZERO,
        };
        self.cache.materialize(
            ask,
            Box::new(move |answer| {
                answered(answer.map(|outcome| match outcome {
                    Outcome::Resident(_) => State::Resident.word().into(),
                    Outcome::Loading { .. } => State::Loading.word().into(),
                }));
            }),
        );
    }

    fn evict_trigger(&self, origin: Origin, node: u64) -> Result<()> {
        let file = self.asked_file(origin, node)?;
        let id = file.version()?.file;
        self.cache.evict(id, NONE, origin.caller().domain).map(|_| ())
    }

    fn standing_of(&self, origin: Origin, node: u64) -> Result<Standing> {
        let file = self.asked_file(origin, node)?;
        self.cache.standing(&file, NONE, origin.caller().domain)
    }

    fn explained(&self, origin: Origin, node: u64) -> Result<Vec<u8>> {
        let file = self.asked_file(origin, node)?;
        Ok(self.cache.explain(&file, origin.caller().domain)?.to_string().into_bytes())
    }

    fn status_text(&self, standing: &Standing) -> Vec<u8> {
        let device = self.cache.devices().first().map(|d| d.label.as_str());
        let status = serde_json::json!({
            "state": standing.state.word(),
            "size": standing.size,
            "loaded": standing.loaded,
            "generation": standing.generation,
            "holders": standing.holders,
            "device": device,
            "error": standing.failure.as_ref().map(|f| f.message.as_str()),
        });
        status.to_string().into_bytes()
    }
}

fn unknown(name: &str, errno: i32) -> Failure {
    Failure { errno, ..Failure::new(Code::Unsupported, format!("user.warpfs.{name}: no such attribute")) }
}
