//! The daemon's end.
