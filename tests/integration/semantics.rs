//! What `docs/SEMANTICS.md` says: each of its sentences names, in a comment that the page does not show, the tests that
//! check it. Those that stand nowhere else are here.

#[path = "semantics/behind.rs"]
mod behind;
#[path = "semantics/differences.rs"]
mod differences;
#[path = "semantics/limits.rs"]
mod limits;

use crate::harness::tree;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Names of all test functions below a folder.
fn tests_below(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("listed") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            tests_below(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("text");
            let functions = text.lines().filter_map(|line| line.trim_start().strip_prefix("fn ")?.split('(').next());
            names.extend(functions.map(String::from));
        }
    }
}

#[test]
fn every_sentence_names_tests_that_exist() {
    let text = fs::read_to_string(tree().join("docs/SEMANTICS.md")).expect("the page");
    let mut tests = BTreeSet::new();
    tests_below(&tree().join("tests/integration"), &mut tests);
    let (mut sentences, mut named) = (0, 0);
    // A sentence is an item of a list, perhaps over several lines.
    for item in text.split("\n- ").skip(1) {
        let item = item.split("\n\n").next().expect("the item itself");
        let (sentence, comment) = item.split_once("<!--").unwrap_or_else(|| panic!("no test is named: {item}"));
        let comment = comment.split("-->").next().expect("the comment");
        assert!(!sentence.trim().is_empty(), "{item}");
        let here: Vec<_> = comment.split_whitespace().collect();
        assert!(!here.is_empty(), "no test is named: {sentence}");
        for test in &here {
            let name = test.rsplit("::").next().expect("a name");
            assert!(tests.contains(name), "{test}, which is named for: {sentence}");
        }
        sentences += 1;
        named += here.len();
    }
    assert!(sentences > 40 && named > sentences, "{sentences} sentences, {named} tests");
}
