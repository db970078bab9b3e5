//! `include/warpfs.h` says what `src/protocol.rs` says: a C program prints what the compiler made of the header, and
//! each of its lines is compared with the Rust definitions.

use crate::harness;
use std::collections::BTreeSet;
use std::mem::{offset_of, size_of, size_of_val};
use std::process::Command;
use warpfs::protocol::*;

/// `NotFound` as C spells it: `NOT_FOUND`.
fn upper_snake(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.extend(c.to_uppercase());
    }
    out
}

/// The lines that a struct's size and fields give. The pattern names every field, so that a field added to the protocol
/// and forgotten here does not compile.
macro_rules! structs {
    ($lines:ident: $($c:ident = $rust:ident { $($field:ident),* })*) => {$({
        let $rust { $($field),* } = $rust::zeroed();
        $lines.insert(format!("struct {} {}", stringify!($c), size_of::<$rust>()));
        $(
            // errno is a macro in C.
            let field = match stringify!($field) { "errno" => "error_number", other => other };
            let (offset, size) = (offset_of!($rust, $field), size_of_val(&$field));
            $lines.insert(format!("struct.{}.{field} {offset} {size}", stringify!($c)));
        )*
    })*};
}

/// What the C program must print, as `protocol.rs` has it.
fn expected() -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    structs! { lines:
        warpfs_version = VersionIoctl { protocol, pid, devices, reserved, socket }
        warpfs_materialize = MaterializeIoctl {
            secret, device, offset, length, flags, state, error, reserved, allocation, allocation_size, data_offset,
            data_length, generation, loaded, message
        }
        warpfs_status = StatusIoctl { device, state, holders, size, loaded, generation, error, reserved, message }
        warpfs_evict = EvictIoctl { device, freed, held }
        warpfs_frame_header = FrameHeader { length, kind, reserved, id }
        warpfs_hello = Hello { magic, version, capabilities }
        warpfs_hello_reply = HelloReply { version, devices, capabilities, secret }
        warpfs_device_entry = DeviceEntry { uuid, kind, ordinal, label }
        warpfs_fetch = Fetch { allocation }
        warpfs_fetch_reply = FetchReply { allocation, size, device }
        warpfs_release = Release { allocation, grants }
        warpfs_error_reply = ErrorReply { code, errno }
    }
    let mut number = |name: &str, value: u64| lines.insert(format!("WARPFS_{name} {value}"));
    number("PROTOCOL_VERSION", PROTOCOL_VERSION.into());
    number("MESSAGE_SIZE", MESSAGE_SIZE as u64);
    number("IOC_TYPE", IOCTL_TYPE.into());
    number("IOC_VERSION", IOCTL_VERSION.into());
    number("IOC_MATERIALIZE", IOCTL_MATERIALIZE.into());
    number("IOC_STATUS", IOCTL_STATUS.into());
    number("IOC_EVICT", IOCTL_EVICT.into());
    number("MATERIALIZE_NOWAIT", MATERIALIZE_NOWAIT.into());
    number("MATERIALIZE_CANCEL", MATERIALIZE_CANCEL.into());
    number("MATERIALIZE_FLAGS", MATERIALIZE_FLAGS.into());
    number("MATERIALIZE_WAIT_MS", MATERIALIZE_WAIT_MS.into());
    number("KIND_HELLO", kind::HELLO.into());
    number("KIND_FETCH", kind::FETCH.into());
    number("KIND_RELEASE", kind::RELEASE.into());
    number("KIND_REPLY", kind::REPLY.into());
    number("KIND_ERROR", kind::ERROR.into());
    number("FRAME_LIMIT", FRAME_LIMIT.into());
    number("HELLO_MAGIC", HELLO_MAGIC.into());
    number("ERROR_NONE", 0);
    for code in Code::ALL {
        number(&format!("ERROR_{}", upper_snake(&format!("{code:?}"))), code as u64);
    }
    for state in [State::Absent, State::Loading, State::Resident] {
        number(&format!("STATE_{}", upper_snake(&format!("{state:?}"))), state as u64);
    }
    for kind in [DeviceKind::Host, DeviceKind::Cuda] {
        number(&format!("DEVICE_{}", upper_snake(&format!("{kind:?}"))), kind as u64);
    }
    let uuid: String = HOST_UUID.iter().map(|byte| format!("{byte:02x}")).collect();
    lines.insert(format!("WARPFS_HOST_UUID {uuid}"));
    lines
}

#[test]
fn the_c_header_is_the_protocol() {
    let directory = tempfile::tempdir().expect("a directory for the program");
    let program = harness::compiled("tests/header/layout.c", directory.path());
    let output = harness::run(&mut Command::new(program)).ok();

    let printed: BTreeSet<String> = output.text().lines().map(String::from).collect();
    let expected = expected();
    let list = |a: &BTreeSet<String>, b: &BTreeSet<String>| {
        a.difference(b).map(|line| format!("  {line}\n")).collect::<String>()
    };
    assert!(
        printed == expected,
        "include/warpfs.h and src/protocol.rs differ\nonly the header says:\n{}only the protocol says:\n{}",
        list(&printed, &expected),
        list(&expected, &printed)
    );
}
