//! File to device.
