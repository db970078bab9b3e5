//! The mount does as a native directory does: each system call on a native directory, on the mount, and on the mount
//! without passthrough, by result, errno and what stat says after. Fixed cases by area, then random sequences.

#[path = "parity/attributes.rs"]
mod attributes;
#[path = "parity/data.rs"]
mod data;
#[path = "parity/known.rs"]
mod known;
#[path = "parity/listing.rs"]
mod listing;
#[path = "parity/locks.rs"]
mod locks;
#[path = "parity/mappings.rs"]
mod mappings;
#[path = "parity/names.rs"]
mod names;
#[path = "parity/operations.rs"]
mod operations;
#[path = "parity/process.rs"]
mod process;
#[path = "parity/random.rs"]
mod random;
#[path = "parity/special.rs"]
mod special;
#[path = "parity/stage.rs"]
mod stage;
#[path = "parity/sys.rs"]
mod sys;
#[path = "parity/tree.rs"]
mod tree;
#[path = "parity/xattrs.rs"]
mod xattrs;

#[test]
fn names_as_natively() {
    stage::compare(names::CASES);
}

#[test]
fn attributes_as_natively() {
    stage::compare(attributes::CASES);
}

#[test]
fn data_as_natively() {
    stage::compare(data::CASES);
}

#[test]
fn mappings_as_natively() {
    stage::compare(mappings::CASES);
}

#[test]
fn listing_as_natively() {
    stage::compare(listing::CASES);
}

#[test]
fn locks_as_natively() {
    stage::compare(locks::CASES);
}

#[test]
fn special_as_natively() {
    stage::compare(special::CASES);
}

#[test]
fn xattrs_as_natively() {
    stage::compare(xattrs::CASES);
}

#[test]
fn random_sequences_through_the_daemon_as_natively() {
    random::sequences(stage::Side::ThroughDaemon);
}

#[test]
fn random_sequences_with_passthrough_as_natively() {
    random::sequences(stage::Side::Passthrough);
}
