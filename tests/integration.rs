//! Everything over the outside: mount, command line, ioctl, xattr, control files, socket. One binary, so that it can be
//! carried to a machine with a GPU. `WARPFS_TEST_DEVICE` chooses the device (default: host), `WARPFS_BIN` the program,
//! `WARPFS_ROOT` the source tree (for the C sources) where they are not where they were at compile time.

#[path = "integration/harness.rs"]
mod harness;
#[path = "integration/namespace.rs"]
mod namespace;

#[path = "integration/bad_input.rs"]
mod bad_input;
#[path = "integration/bench.rs"]
mod bench;
#[path = "integration/cases.rs"]
mod cases;
#[path = "integration/channel.rs"]
mod channel;
#[path = "integration/doctor.rs"]
mod doctor;
#[path = "integration/fake_gpu.rs"]
mod fake_gpu;
#[path = "integration/fstab.rs"]
mod fstab;
#[path = "integration/gpu.rs"]
mod gpu;
#[path = "integration/header.rs"]
mod header;
#[path = "integration/life.rs"]
mod life;
#[path = "integration/loader.rs"]
mod loader;
#[path = "integration/log.rs"]
mod log;
#[path = "integration/materialize.rs"]
mod materialize;
#[path = "integration/mount.rs"]
mod mount;
#[path = "integration/parity.rs"]
mod parity;
#[path = "integration/programs.rs"]
mod programs;
#[path = "integration/readme.rs"]
mod readme;
#[path = "integration/seeing.rs"]
mod seeing;
#[path = "integration/semantics.rs"]
mod semantics;
#[path = "integration/sources.rs"]
mod sources;
#[path = "integration/stale.rs"]
mod stale;
#[path = "integration/stop.rs"]
mod stop;
#[path = "integration/triggers.rs"]
mod triggers;
