//! The mount does as a native directory does: each system call on a native directory, on the mount, and on the mount
//! without passthrough, by result, errno and what stat says after. Fixed cases by area, then random sequences.

#[path = "parity/attributes.rs"]
mod attributes;
#[path = "parity/data.rs"]
mod data;
#[path = "parity/known.rs"]
mod known;
#[path = "parity/mappings.rs"]
mod mappings;
#[path = "parity/names.rs"]
mod names;
#[path = "parity/process.rs"]
mod process;
#[path = "parity/stage.rs"]
mod stage;
#[path = "parity/sys.rs"]
mod sys;
#[path = "parity/tree.rs"]
mod tree;

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
