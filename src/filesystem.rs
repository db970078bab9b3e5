//! The mount.
