//! One client: says hello, fetches what it holds, gives it back. The service ends when the connection closes, when the
//! client's process dies (a forked child may keep the connection open), or at the first message that makes no sense. The
//! session ends with it, unless the client was sent memory that it has not given back: then with its process.

use crate::cache::{Cache, SessionId};
use crate::failure::{Failure, Result};
use crate::protocol::{
    Code, DeviceEntry, ErrorReply, Fetch, FetchReply, HELLO_MAGIC, Hello, HelloReply, PROTOCOL_VERSION, Release, Wire,
    kind, text_field,
};
use crate::socket::{self, Frame};
use crate::source::Caller;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A client that does not say hello, finish a message or take its replies for this long is dropped.
const PATIENCE: Duration = Duration::from_secs(5);

/// Serves one client to its end.
pub(super) fn serve(socket: &UnixStream, stop: &OwnedFd, cache: &Cache) {
    let owner = match peer(socket) {
        Ok(owner) => owner,
        Err(failure) => return refuse(socket.as_fd(), 0, &failure),
    };
    // Where the client's process cannot be seen from here, its connection has to do.
    let process = match Pid::from_raw(owner.pid as i32).map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Some(Ok(process)) => Some(process),
        // It has ended already; somebody else has its connection.
        Some(Err(rustix::io::Errno::SRCH)) => return,
        Some(Err(_)) | None => None,
    };
    let mut session = None;
    let pid = owner.pid;
    loop {
        match next(socket, process.as_ref(), stop, session.is_some()) {
            Ok(Some(frame)) if !frame.descriptors.is_empty() => {
                tracing::warn!(pid, "dropped a client that sent descriptors");
                break;
            }
            Ok(Some(frame)) => {
                let id = frame.id;
                let done = match session {
                    None => greet(socket, cache, &owner, &frame).map(|begun| session = Some(begun)),
                    Some(session) => answer(socket, cache, session, &frame),
                };
                match done {
                    Ok(()) => {}
                    Err(Refusal::Request(failure)) => refuse(socket.as_fd(), id, &failure),
                    Err(Refusal::Connection(failure)) => {
                        tracing::warn!(pid, "dropped a client: {failure}");
                        refuse(socket.as_fd(), id, &failure);
                        break;
                    }
                }
            }
            Ok(None) => break,
            Err(failure) => {
                tracing::warn!(pid, "dropped a client: {failure}");
                refuse(socket.as_fd(), 0, &failure);
                break;
            }
        }
    }
    if let Some(session) = session {
        // What the client still has mapped takes memory until it is gone, connection or not.
        if let Some(process) = process.filter(|_| cache.has_fetched(session)) {
            wait_for_end(&process, stop);
        }
        cache.close_session(session);
    }
}

/// Returns when the client's process, or the daemon's service, has ended.
fn wait_for_end(process: &OwnedFd, stop: &OwnedFd) {
    let mut ends = [PollFd::new(process, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
    while poll(&mut ends, None).is_err() {}
}

/// Why a message was not done.
enum Refusal {
    /// The client may go on.
    Request(Failure),
    /// It may not.
    Connection(Failure),
}

/// The next message; `None` where the session is over. Who has greeted may be silent for as long as it likes.
fn next(socket: &UnixStream, process: Option<&OwnedFd>, stop: &OwnedFd, greeted: bool) -> Result<Option<Frame>> {
    let hello = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let timeout = (!greeted).then_some(hello);
    loop {
        let mut ready = vec![PollFd::new(socket, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        ready.extend(process.map(|process| PollFd::new(process, PollFlags::IN)));
        match poll(&mut ready, timeout.as_ref()) {
            Ok(0) => return Err(Failure::new(Code::BadRequest, "a client that does not say hello")),
            Ok(_) => {}
            Err(_) => continue,
        }
        if ready[1..].iter().any(|fd| !fd.revents().is_empty()) {
            return Ok(None);
        }
        return socket::receive(socket, Instant::now() + PATIENCE);
    }
}

fn peer(socket: &UnixStream) -> Result<Caller> {
    let failed = |e| Failure::system("cannot tell who connected", e);
    socket.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    let (uid, gid, pid) = socket::peer(socket)?;
    Ok(Caller::of_process(uid, gid, pid))
}

fn greet(socket: &UnixStream, cache: &Cache, owner: &Caller, frame: &Frame) -> std::result::Result<SessionId, Refusal> {
    let bad = |message: &str| Refusal::Connection(Failure::new(Code::BadRequest, message));
    let hello = Hello::decode(&frame.body).filter(|hello| frame.kind == kind::HELLO && hello.magic == HELLO_MAGIC);
    let hello = hello.ok_or_else(|| bad("the first message is no hello of a warpfs client"))?;
    if hello.version != PROTOCOL_VERSION {
        let message = format!(
            "the client speaks version {} of the protocol and the daemon version {PROTOCOL_VERSION}: update the older one",
            hello.version
        );
        return Err(Refusal::Connection(Failure::new(Code::WrongVersion, message)));
    }
    let (session, secret) = cache.open_session(owner.clone()).map_err(Refusal::Connection)?;
    let devices = cache.devices();
    let mut body =
        HelloReply { version: PROTOCOL_VERSION, devices: devices.len() as u32, capabilities: 0, secret }.encode();
    for device in devices {
        let (kind, ordinal) = (device.kind as u32, device.ordinal);
        body.extend(DeviceEntry { uuid: device.uuid, kind, ordinal, label: text_field(&device.label) }.encode());
    }
    if let Err(failure) = reply(socket, frame, &body, &[]) {
        cache.close_session(session);
        return Err(failure);
    }
    Ok(session)
}

fn answer(socket: &UnixStream, cache: &Cache, session: SessionId, frame: &Frame) -> std::result::Result<(), Refusal> {
    let short = || Refusal::Connection(Failure::new(Code::BadRequest, "a message is too short for its kind"));
    match frame.kind {
        kind::FETCH => {
            let fetch = Fetch::decode(&frame.body).ok_or_else(short)?;
            let (hold, device) = cache.fetch(session, fetch.allocation).map_err(Refusal::Request)?;
            let allocation = hold.block().allocation();
            let body =
                FetchReply { allocation: fetch.allocation, size: allocation.size(), device: device.uuid }.encode();
            reply(socket, frame, &body, &[allocation.descriptor()])
        }
        kind::RELEASE => {
            let release = Release::decode(&frame.body).ok_or_else(short)?;
            cache.release(session, release.allocation, release.grants).map_err(Refusal::Request)?;
            reply(socket, frame, &[], &[])
        }
        other => {
            let message = format!("unknown kind of message: {other}");
            Err(Refusal::Connection(Failure::new(Code::BadRequest, message)))
        }
    }
}

fn reply(
    socket: &UnixStream,
    frame: &Frame,
    body: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> std::result::Result<(), Refusal> {
    socket::send(socket, frame.kind | kind::REPLY, frame.id, body, descriptors).map_err(Refusal::Connection)
}

/// Tells the client why not, if it still listens.
pub(super) fn refuse(socket: BorrowedFd<'_>, id: u64, failure: &Failure) {
    let mut body = ErrorReply { code: failure.code as u32, errno: failure.errno }.encode();
    body.extend_from_slice(failure.message.as_bytes());
    body.truncate(crate::protocol::FRAME_LIMIT as usize);
    let _ = socket::send(socket, kind::ERROR, id, &body, &[]);
}
