//! The child.
