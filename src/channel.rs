//! How clients ask beside the mount: a Unix socket with a session for each client. A session gives the client its secret
//! for the ioctl, sends it the descriptors of what it holds, and ends with the client. Speaks to the cache only.

pub mod location;
mod server;
mod session;

pub use server::Server;
