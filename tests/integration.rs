//! The tests over the outside: the mount, the commands, the ioctl, the socket, the header. One binary, so that it can be
//! carried to a machine with a GPU.

#[path = "integration/header.rs"]
mod header;
