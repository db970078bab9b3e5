//! The ioctls: what a program that knows warpfs asks on a descriptor of the mount. The handle must be open for reading,
//! because an ioctl reaches the daemon on a descriptor without that right too. A hit is answered on the worker; the
//! answer to a load comes from another thread, after one second at most. Called by `fuse`.

use super::FileSystem;
use super::flags::is_flags;
use super::handle::Handle;
use super::origin::Origin;
use crate::cache::{Ask, Outcome};
use crate::failure::{Failure, Result};
use crate::protocol::{
    Code, EvictIoctl, IOCTL_EVICT, IOCTL_MATERIALIZE, IOCTL_STATUS, IOCTL_VERSION, MATERIALIZE_CANCEL,
    MATERIALIZE_FLAGS, MATERIALIZE_NOWAIT, MATERIALIZE_WAIT_MS, MESSAGE_SIZE, MaterializeIoctl, NONE, PROTOCOL_VERSION,
    State, StatusIoctl, VersionIoctl, Wire, message_field, text_field,
};
use crate::source::{FileId, OpenFile};
use std::time::Duration;

/// What the ioctl returns: 0 or a negative errno, and the struct, which the kernel copies out in both cases. An errno
/// without a struct is the request's own failure.
pub(crate) struct Answer {
    pub(crate) result: i32,
    pub(crate) data: Vec<u8>,
}

/// Told the answer once, from any thread.
pub(crate) type Answered = Box<dyn FnOnce(Answer) + Send>;

impl Answer {
    fn good(data: &impl Wire) -> Answer {
        Answer { result: 0, data: data.encode() }
    }

    fn bare(errno: i32) -> Answer {
        Answer { result: -errno, data: Vec::new() }
    }
}

impl FileSystem {
    pub(crate) fn ioctl(
        &self,
        origin: Origin,
        handle: u64,
        number: u32,
        input: &[u8],
        output: u32,
        answered: Answered,
    ) {
        // The size is part of the number, so a wrong size is an unknown number; the kernel's own word is checked too.
        let fits = |size: usize, takes_input: bool| output as usize == size && (!takes_input || input.len() == size);
        match number {
            IOCTL_VERSION if fits(VersionIoctl::SIZE, false) => answered(self.version_ioctl()),
            IOCTL_MATERIALIZE if fits(MaterializeIoctl::SIZE, true) => match MaterializeIoctl::decode(input) {
                Some(request) => self.materialize_ioctl(origin, handle, request, answered),
                None => answered(Answer::bare(libc::ENOTTY)),
            },
            IOCTL_STATUS if fits(StatusIoctl::SIZE, true) => answered(match StatusIoctl::decode(input) {
                Some(request) => self.status_ioctl(origin, handle, request),
                None => Answer::bare(libc::ENOTTY),
            }),
            IOCTL_EVICT if fits(EvictIoctl::SIZE, true) => answered(match EvictIoctl::decode(input) {
                Some(request) => self.evict_ioctl(origin, handle, request),
                None => Answer::bare(libc::ENOTTY),
            }),
            number if is_flags(number) => answered(match self.flags_ioctl(handle, number, input, output) {
                Ok(data) => Answer { result: 0, data },
                Err(e) => Answer::bare(e.raw_os_error()),
            }),
            _ => answered(Answer::bare(libc::ENOTTY)),
        }
    }

    fn version_ioctl(&self) -> Answer {
        Answer::good(&VersionIoctl {
            protocol: PROTOCOL_VERSION,
            pid: std::process::id(),
            devices: self.cache.devices().len() as u32,
            reserved: 0,
            socket: text_field(&self.control.socket().to_string_lossy()),
        })
    }

    /// The file behind a handle that may read it.
    fn open_file(&self, handle: u64) -> Result<(OpenFile, FileId)> {
        let handle = match self.handles.get(handle) {
            Ok(Handle::File(file)) => file,
            Ok(Handle::Directory(_)) => {
                let message = "is a directory; only regular files can be in device memory";
                return Err(Failure { errno: libc::EISDIR, ..Failure::new(Code::NotRegular, message) });
            }
            Ok(Handle::Control(_)) => {
                return Err(Failure::new(Code::NotRegular, "a file of .warpfs has no bytes of its own"));
            }
            Err(e) => return Err(Failure::system("the handle", e)),
        };
        let name = self.name_of(&handle.inode);
        if !handle.reads() {
            let message = format!("{}: the descriptor is not open for reading", name.display());
            return Err(Failure::new(Code::NotReadable, message));
        }
        Ok((OpenFile::new(handle.file.clone(), name)?, handle.inode.id))
    }

    fn materialize_ioctl(&self, origin: Origin, handle: u64, request: MaterializeIoctl, answered: Answered) {
        if request.flags & MATERIALIZE_CANCEL != 0 {
            return answered(match self.cancel(origin, handle, &request) {
                Ok(reply) => Answer::good(&reply),
                Err(failure) => failed_materialize(request, &failure),
            });
        }
        let ask = match self.ask_of(origin, handle, &request) {
            Ok(ask) => ask,
            Err(failure) => return answered(failed_materialize(request, &failure)),
        };
        self.cache.materialize(
            ask,
            Box::new(move |answer| {
                answered(match answer {
                    Ok(outcome) => Answer::good(&filled(request, &outcome)),
                    Err(failure) => failed_materialize(request, &failure),
                });
            }),
        );
    }

    fn ask_of(&self, origin: Origin, handle: u64, request: &MaterializeIoctl) -> Result<Ask> {
        if request.flags & !MATERIALIZE_FLAGS != 0 || request.reserved != 0 {
            return Err(Failure::new(Code::BadRequest, "unknown flags: is the program newer than the daemon?"));
        }
        if request.length != 0 && request.offset.checked_add(request.length).is_none() {
            return Err(Failure::new(Code::BadRequest, "the range ends beyond the largest offset"));
        }
        let (file, _) = self.open_file(handle)?;
        let caller = origin.caller();
        let session = match request.secret {
            NONE => None,
            secret => Some(self.cache.session_of(&secret, caller.domain)?),
        };
        let nowait = request.flags & MATERIALIZE_NOWAIT != 0;
        let wait = if nowait { Duration::ZERO } else { Duration::from_millis(u64::from(MATERIALIZE_WAIT_MS)) };
        let (device, offset, length) = (request.device, request.offset, request.length);
        Ok(Ask { file, device, offset, length, caller, session, wait })
    }

    fn cancel(&self, origin: Origin, handle: u64, request: &MaterializeIoctl) -> Result<MaterializeIoctl> {
        if request.flags != MATERIALIZE_CANCEL || request.reserved != 0 {
            return Err(Failure::new(Code::BadRequest, "cancelling goes with no other flag"));
        }
        let (_, file) = self.open_file(handle)?;
        let state = self.cache.cancel(file, request.device, &origin.caller())?;
        let blank = MaterializeIoctl { secret: NONE, error: 0, message: [0; MESSAGE_SIZE], ..*request };
        Ok(MaterializeIoctl { state: state as u32, ..blank })
    }

    fn status_ioctl(&self, origin: Origin, handle: u64, request: StatusIoctl) -> Answer {
        let mut reply = request;
        let standing = if request.reserved != 0 {
            Err(Failure::new(Code::BadRequest, "the reserved field is not zero"))
        } else {
            self.open_file(handle)
                .and_then(|(file, _)| self.cache.standing(&file, request.device, origin.caller().domain))
        };
        match standing {
            Ok(standing) => {
                reply.state = standing.state as u32;
                reply.holders = standing.holders;
                reply.size = standing.size;
                reply.loaded = standing.loaded;
                reply.generation = standing.generation;
                reply.error = standing.failure.as_ref().map_or(0, |f| f.code as u32);
                reply.message = message_field(standing.failure.as_ref().map_or("", |f| &f.message));
                Answer::good(&reply)
            }
            Err(failure) => {
                reply.error = failure.code as u32;
                reply.message = message_field(&failure.message);
                Answer { result: -errno_of(&failure), data: reply.encode() }
            }
        }
    }

    /// EVICT's struct has no room for words: its failure is an errno.
    fn evict_ioctl(&self, origin: Origin, handle: u64, request: EvictIoctl) -> Answer {
        let evicted =
            self.open_file(handle).and_then(|(_, id)| self.cache.evict(id, request.device, origin.caller().domain));
        match evicted {
            Ok(evicted) => Answer::good(&EvictIoctl { freed: evicted.freed, held: evicted.held, ..request }),
            Err(failure) => {
                tracing::debug!(code = ?failure.code, "{failure}");
                Answer { result: -errno_of(&failure), data: request.encode() }
            }
        }
    }
}

fn filled(request: MaterializeIoctl, outcome: &Outcome) -> MaterializeIoctl {
    // The secret is not handed back: whoever sent it has it.
    let blank = MaterializeIoctl { secret: NONE, error: 0, message: [0; MESSAGE_SIZE], ..request };
    match outcome {
        Outcome::Resident(placement) => MaterializeIoctl {
            state: State::Resident as u32,
            allocation: placement.allocation,
            allocation_size: placement.allocation_size,
            data_offset: placement.offset,
            data_length: placement.length,
            generation: placement.generation,
            loaded: placement.length,
            ..blank
        },
        Outcome::Loading { loaded, total } => {
            MaterializeIoctl { state: State::Loading as u32, data_length: *total, loaded: *loaded, ..blank }
        }
    }
}

fn failed_materialize(request: MaterializeIoctl, failure: &Failure) -> Answer {
    let mut reply =
        MaterializeIoctl { secret: NONE, state: State::Absent as u32, error: failure.code as u32, ..request };
    reply.message = message_field(&failure.message);
    Answer { result: -errno_of(failure), data: reply.encode() }
}

fn errno_of(failure: &Failure) -> i32 {
    if failure.errno > 0 { failure.errno } else { libc::EIO }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_fills_the_struct() {
        let request = MaterializeIoctl { secret: [7; 16], ..MaterializeIoctl::zeroed() };
        let answer = failed_materialize(request, &Failure::new(Code::TooLarge, "f: too large"));
        assert_eq!(answer.result, -libc::EFBIG);
        let reply = MaterializeIoctl::decode(&answer.data).expect("a whole struct");
        assert_eq!((reply.error, reply.secret), (Code::TooLarge as u32, NONE));
        assert!(reply.message.starts_with(b"f: too large\0"));
    }
}
