//! Whole trees: what stat, readlink, the content and the attributes say of every name in them.

use super::sys::{self, R};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Everything that can be said of one name and has to be equal.
pub type Facts = BTreeMap<&'static str, String>;

/// The names below `root` with their facts; with `numbers` also those that only two views of one directory share.
pub fn facts(root: &Path, numbers: bool) -> BTreeMap<String, Facts> {
    let mut found = BTreeMap::new();
    let mut first_of = BTreeMap::new();
    visit(root, "", numbers, &mut first_of, &mut found);
    found
}

fn visit(
    root: &Path,
    below: &str,
    numbers: bool,
    first_of: &mut BTreeMap<u64, String>,
    found: &mut BTreeMap<String, Facts>,
) {
    let folder = root.join(below);
    let mut entries: Vec<_> = match std::fs::read_dir(&folder) {
        Ok(entries) => entries.flatten().collect(),
        Err(e) => {
            found.insert(format!("{below}/"), Facts::from([("listing", format!("{e}"))]));
            return;
        }
    };
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name();
        let path = entry.path();
        // What is no text can still be told apart.
        let shown = format!("{below}{}", name.as_bytes().escape_ascii());
        let Ok(meta) = std::fs::symlink_metadata(&path) else {
            found.insert(shown, Facts::from([("stat", "fails".into())]));
            continue;
        };
        let mut facts = Facts::new();
        facts.insert("stat", format!("{:?}", sys::lstat(&path)));
        let first = first_of.entry(meta.ino()).or_insert_with(|| shown.clone());
        facts.insert("is the same as", first.clone());
        facts.insert("type", format!("{:?}", entry.file_type().map_err(sys::Errno::from)));
        if numbers {
            use std::os::unix::fs::DirEntryExt;
            facts.insert("number", format!("{} listed as {}", meta.ino(), entry.ino()));
            // Not the access time, which looking at the other view moves.
            let times = sys::times_of(&path).map(|[_, modified, changed]| (modified, changed));
            facts.insert("times", format!("{times:?}"));
        }
        if meta.is_symlink() {
            facts.insert("target", format!("{:?}", sys::readlink(&path, 4096)));
        }
        if meta.is_file() {
            facts.insert("content", format!("{:?}", sys::content(&path)));
        }
        facts.insert("attributes", format!("{:?}", attributes(&path)));
        found.insert(shown.clone(), facts);
        if meta.is_dir() {
            visit(root, &format!("{shown}/"), numbers, first_of, found);
        }
    }
}

fn attributes(path: &Path) -> R<Vec<(String, R<sys::Bytes>)>> {
    let names = sys::listxattr(path)?;
    Ok(names.into_iter().map(|name| (name.clone(), sys::getxattr(path, name, 65536))).collect())
}

/// What the mount says of the tree in other words than its source does.
pub fn differences(mount: &Path, source: &Path) -> Vec<String> {
    compare(("mount", &facts(mount, true)), ("source", &facts(source, true)))
}

/// A line for everything in which two trees differ.
pub fn compare(one: (&str, &BTreeMap<String, Facts>), two: (&str, &BTreeMap<String, Facts>)) -> Vec<String> {
    let mut lines = Vec::new();
    let names: std::collections::BTreeSet<_> = one.1.keys().chain(two.1.keys()).collect();
    for name in names {
        let (Some(left), Some(right)) = (one.1.get(name), two.1.get(name)) else {
            let only = if one.1.contains_key(name) { one.0 } else { two.0 };
            lines.push(format!("{name}: only in the {only}"));
            continue;
        };
        for (fact, ours) in left {
            let theirs = right.get(fact);
            if theirs != Some(ours) {
                lines.push(format!("{name}: {fact}: {}: {ours}; {}: {theirs:?}", one.0, two.0));
            }
        }
    }
    lines
}

/// Removes a tree, also where its folders forbid it.
pub fn remove(root: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let _ = std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700));
        let entries = std::fs::read_dir(&folder).expect("listed").flatten();
        folders.extend(entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
    }
    std::fs::remove_dir_all(root).expect("removed");
}
