//! Tests through the outside: the binary, its processes, its devices.

#[path = "integration/loader.rs"]
mod loader;
