//! One message between daemon and loader as one packet: its kind, a struct, text, and descriptors beside it. A packet must
//! never leave descriptors open that nobody asked for. Called by both ends.

use crate::protocol::{Field, Wire};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Bytes of the longest packet; longer text is cut.
const SIZE: usize = 4096;
/// Descriptors that a packet brings at most.
const DESCRIPTORS: usize = 2;

/// A packet that came.
pub(super) struct Packet {
    pub(super) kind: u32,
    body: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl Packet {
    /// The packet's struct and the text behind it.
    pub(super) fn body<T: Wire>(&self) -> Option<(T, String)> {
        let body = T::decode(&self.body)?;
        Some((body, String::from_utf8_lossy(&self.body[T::SIZE..]).into_owned()))
    }
}

/// Sends one packet. With `wait` false a full socket is `AGAIN`.
pub(super) fn send<T: Wire>(
    socket: BorrowedFd<'_>,
    kind: u32,
    body: &T,
    text: &str,
    descriptors: &[BorrowedFd<'_>],
    wait: bool,
) -> rustix::io::Result<()> {
    let mut bytes = Vec::with_capacity(4 + T::SIZE + text.len());
    kind.put(&mut bytes);
    bytes.extend_from_slice(&body.encode());
    bytes.extend_from_slice(text.as_bytes());
    bytes.truncate(SIZE);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = if wait { SendFlags::NOSIGNAL } else { SendFlags::NOSIGNAL | SendFlags::DONTWAIT };
    loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut beside, flags) {
            Err(Errno::INTR) => {}
            other => return other.map(drop),
        }
    }
}

/// The next packet; `None` where the other end is gone. A packet whose descriptors were lost (too many are open) is an error.
pub(super) fn receive(socket: BorrowedFd<'_>, wait: bool) -> rustix::io::Result<Option<Packet>> {
    let mut bytes = vec![0; SIZE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = if wait { RecvFlags::CMSG_CLOEXEC } else { RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT };
    let received = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut beside, flags) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            other => break other?,
        }
    };
    let descriptors: Vec<OwnedFd> = beside
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    bytes.truncate(received.bytes);
    let mut rest = bytes.as_slice();
    let kind = u32::take(&mut rest).ok_or(Errno::PROTO)?;
    Ok(Some(Packet { kind, body: rest.to_vec(), descriptors }))
}
