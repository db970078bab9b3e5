//! The Rust client: finds the daemon of a path, asks for files in device memory, maps what it holds, and gives it back.
//! The command line is built on this and on nothing else.
//!
//! ```no_run
//! # fn main() -> Result<(), warpfs::failure::Failure> {
//! let path = std::path::Path::new("/mnt/data/model.safetensors");
//! let session = warpfs::client::Session::of_path(path)?;
//! let buffer = session.open(path)?;
//! println!("{} bytes at device address {:#x}", buffer.len(), buffer.address());
//! # Ok(())
//! # }
//! ```

mod ask;
mod buffer;
mod session;

pub use ask::{Device, Progress, cancel, evict, materialize, open, standing, version};
pub use buffer::Buffer;
pub use session::Session;
