//! What only a GPU can show: the driver's own guard around a copy. Without one, these tests have nothing to ask.

use crate::harness::*;
use crate::warpfs;
use std::process::Command;
use warpfs::client::Session;

#[test]
fn a_kernels_store_ends_its_own_process_only() {
    if on_host() {
        return; // the host device's guard is in materialize.rs
    }
    let mounted = Mounted::new();
    let content = noise(77, 3 << 20);
    let path = mounted.file("f", &content);
    let folder = tempfile::tempdir().expect("a folder");
    let program = compiled("tests/gpu/kernel.c", folder.path());
    let session = Session::of_path(&path).expect("a session");
    let ours = session.open(&path).expect("opened");
    let first_word = u32::from_le_bytes(content[..4].try_into().expect("four bytes"));
    let kernel = |mode: &str| run(Command::new(&program).arg(&path).arg(mode)).ok().text();
    // The control: a kernel that loads sees the file.
    assert_eq!(kernel("load"), format!("mapped {}\nkernel 0\nafterwards 0 {first_word}\n", content.len()));
    let said = kernel("store");
    assert!(
        said.contains("kernel 700\nafterwards 700 "),
        "CUDA_ERROR_ILLEGAL_ADDRESS, and the context is gone: {said}"
    );
    // Nobody else noticed: not this process, not the copy, not the next client.
    let mut bytes = vec![0; content.len()];
    ours.read(0, &mut bytes).expect("our context lives");
    assert_eq!(bytes, content);
    warpfs!("verify", path).ok();
    assert_eq!(kernel("load").lines().nth(1), Some("kernel 0"));
    assert_eq!(mounted.counter("loads"), 1);
}
