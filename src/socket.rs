//! Frames and descriptors over the channel's Unix socket, for both ends. A frame is a header and a body; descriptors
//! travel with a frame's first byte. Whoever sends garbage gets an error here and loses the connection, nothing more.

use crate::failure::{Failure, Result};
use crate::protocol::{Code, FRAME_LIMIT, FrameHeader, Wire};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

/// Overrides the place of the socket, for the daemon and for clients.
pub const VARIABLE: &str = "WARPFS_SOCKET";

/// The path that WARPFS_SOCKET asks for.
pub fn overridden() -> Option<PathBuf> {
    let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
    // A daemon leaves its directory.
    Some(std::path::absolute(&path).unwrap_or_else(|_| PathBuf::from(path)))
}

/// Descriptors that one frame may carry.
pub const DESCRIPTORS: usize = 4;

/// One message.
#[derive(Debug)]
pub struct Frame {
    pub kind: u16,
    pub id: u64,
    pub body: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

/// Sends one frame whole. Fails where the peer is gone or does not read for longer than the socket's time limit.
pub fn send(socket: impl AsFd, kind: u16, id: u64, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    let length = u32::try_from(body.len()).expect("a body is small");
    let mut bytes = FrameHeader { length, kind, reserved: 0, id }.encode();
    bytes.extend_from_slice(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)), "a frame carries a few descriptors");
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let sent = rustix::net::sendmsg(&socket, &[IoSlice::new(rest)], &mut ancillary, SendFlags::NOSIGNAL);
        match sent {
            Ok(sent) => {
                rest = &rest[sent..];
                // They left with the first byte.
                ancillary.clear();
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(Failure::system("cannot send on the channel's socket", e)),
        }
    }
    Ok(())
}

/// Receives one frame. `None`: the peer closed the connection between two frames. Once begun, a frame has to be there
/// whole by `deadline`, however its bytes trickle.
pub fn receive(socket: impl AsFd, deadline: Instant) -> Result<Option<Frame>> {
    let mut descriptors = Vec::new();
    let mut header = vec![0; FrameHeader::SIZE];
    if !fill(&socket, &mut header, &mut descriptors, deadline)? {
        return Ok(None);
    }
    let header = FrameHeader::decode(&header).expect("the size was just read");
    if header.length > FRAME_LIMIT || header.reserved != 0 {
        return Err(Failure::new(Code::BadRequest, "that is no frame of warpfs' channel"));
    }
    let mut body = vec![0; header.length as usize];
    if !body.is_empty() && !fill(&socket, &mut body, &mut descriptors, deadline)? {
        return Err(cut_off());
    }
    Ok(Some(Frame { kind: header.kind, id: header.id, body, descriptors }))
}

/// Fills `buffer`. False: the peer closed before the first byte.
fn fill(socket: impl AsFd, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>, deadline: Instant) -> Result<bool> {
    let mut done = 0;
    while done < buffer.len() {
        if Instant::now() > deadline {
            return Err(Failure::new(Code::BadRequest, "a message that does not end"));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut buffer[done..])];
        match rustix::net::recvmsg(&socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) => {
                for received in ancillary.drain() {
                    if let RecvAncillaryMessage::ScmRights(received) = received {
                        descriptors.extend(received);
                        if descriptors.len() > DESCRIPTORS {
                            return Err(Failure::new(Code::BadRequest, "more descriptors than a frame may carry"));
                        }
                    }
                }
                match message.bytes {
                    0 if done == 0 => return Ok(false),
                    0 => return Err(cut_off()),
                    bytes => done += bytes,
                }
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(Failure::system("cannot receive from the channel's socket", e)),
        }
    }
    Ok(true)
}

/// Who is at the other end, as the kernel says: user, group and process (0 where it is in a PID namespace that cannot
/// be seen from here).
pub fn peer(socket: impl AsFd) -> Result<(u32, u32, u32)> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers name a live ucred and its size, which is all that the kernel writes.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut size,
        )
    };
    if done != 0 {
        return Err(Failure::system("cannot tell who connected", std::io::Error::last_os_error()));
    }
    Ok((credentials.uid, credentials.gid, credentials.pid as u32))
}

fn cut_off() -> Failure {
    Failure::new(Code::BadRequest, "the connection ended in the middle of a message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    fn receive(socket: &UnixStream) -> Result<Option<Frame>> {
        super::receive(socket, Instant::now() + std::time::Duration::from_secs(20))
    }

    #[test]
    fn a_frame_arrives_with_its_descriptor() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        (&file).write_all(b"through").expect("written");
        send(&ours, 7, 42, b"body", &[file.as_fd()]).expect("sent");
        drop(ours);
        let frame = receive(&theirs).expect("no error").expect("a frame");
        assert_eq!((frame.kind, frame.id, &frame.body[..]), (7, 42, &b"body"[..]));
        let mut content = [0; 7];
        rustix::io::pread(&frame.descriptors[0], &mut content, 0).expect("readable");
        assert_eq!(&content, b"through");
        assert!(receive(&theirs).expect("no error").is_none(), "then the end");
    }

    #[test]
    fn garbage_and_half_messages_are_errors() {
        for garbage in [&b"\xff\xff\xff\xff garbage garbage"[..], b"short", b"\x08\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0half"]
        {
            let (mut ours, theirs) = UnixStream::pair().expect("a pair");
            ours.write_all(garbage).expect("written");
            drop(ours);
            let failure = receive(&theirs).expect_err("no frame");
            assert_eq!(failure.code, Code::BadRequest, "{garbage:?}");
        }
    }
}
