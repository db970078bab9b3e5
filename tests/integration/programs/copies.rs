//! What copies, lists and compares whole trees: from the mount and to the mount, the result is the same tree, with every
//! owner, time, hole, link, attribute and ACL, and without a name of ours.

use super::tree::{SPARSE, make, same};
use super::{have, script};
use crate::harness::*;
use crate::warpfs;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

on_each_mount! {
    tar_keeps_everything,
    rsync_keeps_everything,
    cp_keeps_everything,
    find_du_and_diff_see_the_source,
}

/// A tree on the mount of which a file is in device memory, and of which names of ours were asked for: they are there, so
/// that a copy could take them along.
fn tree_on(mounted: &Mounted) -> std::path::PathBuf {
    let tree = mounted.source.join("tree");
    fs::create_dir(&tree).expect("made");
    make(&tree);
    // What was made behind the mount is seen after this time at the latest.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let tree = mounted.mountpoint.join("tree");
    let large = tree.join("d/inner/large");
    warpfs!("preload", large).ok();
    assert_eq!(getxattr(&large, "user.warpfs.state").as_deref(), Ok("resident"));
    assert!(fs::read(mounted.mountpoint.join(".warpfs/stats")).is_ok());
    tree
}

/// `copies` is a script that makes "$OUT" of "$IN". From the mount, from the whole mount, onto the mount, and on it.
fn each_way(mounted: &Mounted, copies: &str) {
    let tree = tree_on(mounted);
    let (source, native) = (mounted.source.join("tree"), tempfile::tempdir().expect("a folder"));
    let copy = |from: &Path, to: &Path| {
        let both = format!("IN='{}'; OUT='{}'; mkdir \"$OUT\"; {copies}", from.display(), to.display());
        script(native.path(), &both);
    };
    let at = |name: &str| native.path().join(name);
    copy(&tree, &at("from"));
    same(&source, &at("from"));
    copy(&mounted.mountpoint, &at("all"));
    same(&source, &at("all/tree"));
    same(&mounted.source, &at("all"));
    for (from, name) in [(at("from"), "to"), (tree.clone(), "on")] {
        copy(&from, &mounted.mountpoint.join(name));
        same(&source, &mounted.mountpoint.join(name));
        same(&source, &mounted.source.join(name));
        let blocks = fs::metadata(mounted.source.join(name).join(SPARSE.0)).expect("stat").blocks();
        assert!(blocks * 512 < (16 << 20) - SPARSE.1, "the hole was filled: {blocks} blocks");
    }
}

fn tar_keeps_everything(mounted: &Mounted) {
    if have("tar") && have("setfacl") {
        let keep = "--xattrs '--xattrs-include=*' --acls --numeric-owner";
        each_way(
            mounted,
            &format!(
                "tar -C \"$IN\" -cSf archive --format=posix {keep} .
                 tar -C \"$OUT\" -xpSf archive {keep}
                 rm archive"
            ),
        );
    }
}

fn rsync_keeps_everything(mounted: &Mounted) {
    if have("rsync") && have("setfacl") {
        each_way(
            mounted,
            "rsync -aHAXS --numeric-ids \"$IN/\" \"$OUT/\"
             test -z \"$(rsync -aHAXS --numeric-ids --checksum --itemize-changes --dry-run \"$IN/\" \"$OUT/\")\"",
        );
    }
}

fn cp_keeps_everything(mounted: &Mounted) {
    if have("setfacl") {
        each_way(mounted, "cp -a --sparse=always \"$IN/.\" \"$OUT\"");
    }
}

fn find_du_and_diff_see_the_source(mounted: &Mounted) {
    if !have("setfacl") {
        return;
    }
    let tree = tree_on(mounted);
    same(&mounted.source.join("tree"), &tree);
    for lists in [
        "find . -printf '%P|%y|%m|%U|%G|%s|%b|%n|%i|%l|%T@|%A@|%C@\\n' | sort",
        "find . -links +1 -type f | sort",
        "find . -perm /6000 | sort",
        "du -a . | sort -k 2",
        "du -s --apparent-size --bytes .",
        "ls -laR --full-time . | grep -v '^total'",
        "grep -rc n . --devices=skip | sort",
    ] {
        // The mount's root has a parent of its own, which `ls -a` shows: hence the tree below it.
        let (native, ours) = (script(&mounted.source.join("tree"), lists), script(&tree, lists));
        assert_eq!(ours, native, "{lists}");
        assert!(!ours.is_empty() && !ours.contains(".warpfs"), "{lists}: {ours}");
    }
    let diff = "diff -r --no-dereference -x fifo -x device source/tree mount/tree";
    let both = mounted.source.parent().expect("a folder");
    assert_eq!(script(both, diff), "");
    // The control: it would tell.
    script(
        both,
        &format!(
            "cp -a source/tree mount/other; printf x >> mount/other/d/f; ! {}",
            diff.replace("mount/tree", "mount/other")
        ),
    );
}
