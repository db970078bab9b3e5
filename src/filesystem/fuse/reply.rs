//! Results into replies. Called by the adapter's methods.

use super::super::attributes::{Attributes, Entry, KEEP};
use super::super::data::Opened;
use super::super::error::{Reason, Result};
use fuser::{Errno, FileHandle, FopenFlags, Generation, ReplyAttr, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyXattr};

pub(super) fn entry(reply: ReplyEntry, found: Result<Entry>) {
    match found {
        Ok(Entry { generation, attributes, .. }) => {
            reply.entry_with_ttls(&attributes.keep, &KEEP, &attributes.attr, Generation(generation))
        }
        Err(e) => reply.error(e.errno()),
    }
}

pub(super) fn attributes(reply: ReplyAttr, found: Result<Attributes>) {
    match found {
        Ok(found) => reply.attr(&found.keep, &found.attr),
        Err(e) => reply.error(e.errno()),
    }
}

pub(super) fn empty(reply: ReplyEmpty, done: Result<()>) {
    match done {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(e.errno()),
    }
}

/// A value by the rules of getxattr: its size where none was offered, ERANGE where it does not fit.
pub(super) fn value(reply: ReplyXattr, size: u32, value: Result<Vec<u8>>) {
    match value {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(e) => reply.error(e.errno()),
    }
}

pub(super) fn opened(reply: ReplyOpen, found: Result<Opened>) {
    match found {
        Ok(opened) => match &opened.backing {
            Some(backing) => reply.opened_passthrough(FileHandle(opened.handle), open_flags(&opened), backing),
            None => reply.opened(FileHandle(opened.handle), open_flags(&opened)),
        },
        Err(e) => reply.error(e.errno()),
    }
}

pub(super) fn open_flags(opened: &Opened) -> FopenFlags {
    let mut flags = FopenFlags::empty();
    flags.set(FopenFlags::FOPEN_KEEP_CACHE, opened.backing.is_none() && opened.keep_cache);
    flags.set(FopenFlags::FOPEN_NOFLUSH, opened.closes_silently);
    flags
}
