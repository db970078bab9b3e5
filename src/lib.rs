//! warpfs mounts a directory so that the files in it can also be had in GPU memory, by path.
//!
//! The map of the house; each room knows only those below it:
//!
//! | room | what it does |
//! |---|---|
//! | [`cli`] | the command line: one file a command |
//! | [`client`] | the Rust client, on which the command line is built |
//! | [`doctor`] | what works on this machine, and what to do about the rest |
//! | [`mod@bench`] | what this machine can do, and what loads make of it |
//! | [`daemon`] | puts the rooms together, runs them, supervises, stops them |
//! | [`filesystem`] | the mount: names, attributes and data of the source, and the triggers (ioctl, xattr, `.warpfs`) |
//! | [`channel`] | how clients ask beside the mount: the socket and its sessions |
//! | [`cache`] | what is resident, for whom, until when |
//! | [`loader`] | the child process that does a device's work, and the daemon's end of its socket |
//! | [`transfer`] | file to device, used in the loader |
//! | [`device`] | memory that other processes can map |
//! | [`source`] | the real files |
//! | [`config`] | everything that can be set |
//! | [`mounts`] | what is mounted where |
//! | [`socket`] | frames and descriptors over the channel's socket, for both ends |
//! | [`metrics`], [`size`], [`failure`] | counters, sizes as people write them, what went wrong in one shape |
//! | [`protocol`] | every struct and number that crosses a process boundary |

pub mod bench;
pub mod cache;
pub mod channel;
pub mod cli;
pub mod client;
pub mod config;
pub mod daemon;
pub mod device;
pub mod doctor;
pub mod failure;
pub mod filesystem;
pub mod loader;
pub mod metrics;
pub mod mounts;
pub mod protocol;
pub mod size;
pub mod socket;
pub mod source;
pub mod transfer;
