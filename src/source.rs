//! The real files behind the mount: who may open them, how they are opened, and which version of a file's bytes is at
//! hand. Called by the filesystem and the cache; knows nothing of devices.

pub mod identity;
pub mod open;
pub mod stability;
pub mod version;

pub use identity::{Caller, Domain, Identity};
pub use open::OpenFile;
pub use stability::Proof;
pub use version::{FileId, Version};
