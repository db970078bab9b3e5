//! One message between daemon and loader as one packet: its kind, structs, text, and descriptors beside it. A packet must
//! never leave descriptors open that nobody asked for. Called by both ends.

use crate::protocol::{Field, LOAD_PARTS, Wire};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Bytes of the longest packet; longer text is cut.
const SIZE: usize = 64 * 1024;
/// Descriptors that a packet brings at most.
const DESCRIPTORS: usize = 1 + LOAD_PARTS;

thread_local! {
    /// Where a packet comes in before its length is known.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; SIZE]);
}

/// A packet that came.
pub(super) struct Packet {
    pub(super) kind: u32,
    body: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl Packet {
    /// The packet's struct and the text behind it.
    pub(super) fn body<T: Wire>(&self) -> Option<(T, String)> {
        let mut rest = self.rest();
        let body = take(&mut rest)?;
        Some((body, String::from_utf8_lossy(rest).into_owned()))
    }

    /// What is in it, to be read with [`take`].
    pub(super) fn rest(&self) -> &[u8] {
        &self.body
    }
}

/// The struct at the beginning of `bytes`, which then begin behind it.
pub(super) fn take<T: Wire>(bytes: &mut &[u8]) -> Option<T> {
    let value = T::decode(bytes)?;
    *bytes = &bytes[T::SIZE..];
    Some(value)
}

/// Sends one packet of one struct and text. With `wait` false a full socket is `AGAIN`.
pub(super) fn send<T: Wire>(
    socket: BorrowedFd<'_>,
    kind: u32,
    body: &T,
    text: &str,
    wait: bool,
) -> rustix::io::Result<()> {
    let mut bytes = body.encode();
    bytes.extend_from_slice(text.as_bytes());
    send_bytes(socket, kind, &bytes, &[], wait)
}

/// Sends one packet of several structs, with descriptors.
pub(super) fn send_bytes(
    socket: BorrowedFd<'_>,
    kind: u32,
    body: &[u8],
    descriptors: &[BorrowedFd<'_>],
    wait: bool,
) -> rustix::io::Result<()> {
    let head = kind.to_le_bytes();
    let body = &body[..body.len().min(SIZE - head.len())];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = if wait { SendFlags::NOSIGNAL } else { SendFlags::NOSIGNAL | SendFlags::DONTWAIT };
    loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(&head), IoSlice::new(body)], &mut beside, flags) {
            Err(Errno::INTR) => {}
            other => return other.map(drop),
        }
    }
}

/// The next packet; `None` where the other end is gone. A packet whose descriptors were lost (too many are open) is an error.
pub(super) fn receive(socket: BorrowedFd<'_>, wait: bool) -> rustix::io::Result<Option<Packet>> {
    BUFFER.with_borrow_mut(|bytes| receive_into(bytes, socket, wait))
}

fn receive_into(bytes: &mut [u8], socket: BorrowedFd<'_>, wait: bool) -> rustix::io::Result<Option<Packet>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = if wait { RecvFlags::CMSG_CLOEXEC } else { RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT };
    let received = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut beside, flags) {
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
    let mut rest = &bytes[..received.bytes];
    let kind = u32::take(&mut rest).ok_or(Errno::PROTO)?;
    Ok(Some(Packet { kind, body: rest.to_vec(), descriptors }))
}
