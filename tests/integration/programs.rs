//! Programs that people run every day, on the mount: git, sqlite3 and cargo here, what copies and compares trees in
//! `copies`. Each runs with passthrough and without, and the source has what the program believes it wrote. An ordinary
//! user's round of the same tests is `tests/as-user.sh`.

use crate::harness::*;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Each test on a mount with passthrough and on one without.
macro_rules! on_each_mount {
    ($($test:ident),* $(,)?) => {
        mod passthrough {
            $(#[test]
            fn $test() {
                $crate::programs::with_mount(&[], super::$test);
            })*
        }
        mod no_passthrough {
            $(#[test]
            fn $test() {
                $crate::programs::with_mount(&["--no-passthrough"], super::$test);
            })*
        }
    };
}

#[path = "programs/copies.rs"]
mod copies;
#[path = "programs/tree.rs"]
mod tree;

on_each_mount! {
    git_commits_clones_and_collects,
    sqlite_has_two_writers_and_a_reader_in_wal_mode,
    cargo_builds_a_crate_that_runs,
}

/// A build on two busy cores takes more than the usual deadline allows.
const PATIENCE: Duration = Duration::from_secs(240);

fn with_mount(options: &[&str], test: fn(&Mounted)) {
    let mounted = Mounted::with(options);
    assert_eq!(mounted.passes_through(), options.is_empty() && has_passthrough(), "mounted with {options:?}");
    test(&mounted);
}

/// Whether a program is here, which it must be where everything was installed.
fn have(program: &str) -> bool {
    let found = run(Command::new("sh").args(["-c", "command -v \"$0\"", program])).status.success();
    assert!(found || !on_host(), "{program} is missing: mount-scripts/install-dependencies.sh test installs it");
    found
}

/// Runs a script in a folder, with no settings of the person who runs the tests. It has to succeed.
#[track_caller]
fn script(folder: &Path, script: &str) -> String {
    let mut command = Command::new("sh");
    command.args(["-euc", script]).current_dir(folder).env("LC_ALL", "C");
    for (name, value) in [
        ("GIT_CONFIG_NOSYSTEM", "1"),
        ("GIT_CONFIG_GLOBAL", "/dev/null"),
        ("GIT_AUTHOR_NAME", "A"),
        ("GIT_AUTHOR_EMAIL", "a@example.org"),
        ("GIT_COMMITTER_NAME", "C"),
        ("GIT_COMMITTER_EMAIL", "c@example.org"),
    ] {
        command.env(name, value);
    }
    run_within(&mut command, PATIENCE).ok().text()
}

#[test]
fn the_daemon_is_who_runs_the_tests() {
    let mounted = Mounted::new();
    let uid = rustix::process::geteuid().as_raw();
    if let Ok(expected) = std::env::var("WARPFS_TEST_UID") {
        assert_eq!(expected, uid.to_string(), "these tests were to run as somebody else");
    }
    let status = fs::read_to_string(format!("/proc/{}/status", mounted.daemon())).expect("alive");
    let field = |name: &str| -> Vec<String> {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field");
        line.split_whitespace().map(str::to_string).collect()
    };
    assert_eq!(field("Uid:"), vec![uid.to_string(); 4]);
    let table = fs::read_to_string("/proc/self/mounts").expect("readable");
    let line = table.lines().find(|line| line.contains(mounted.mountpoint.to_str().expect("text"))).expect("listed");
    assert!(line.contains(&format!("user_id={uid},")), "{line}");
    assert_eq!(mounted.passes_through(), has_passthrough());
    if uid != 0 {
        // Without one capability it cannot have called mount(2): fusermount3 did.
        assert_eq!(field("CapEff:"), ["0000000000000000"]);
        assert!(!mounted.passes_through());
    }
}

/// A few hundred files: empty, small and large, in folders, some of them programs, some links.
fn generate(folder: &Path) {
    for i in 0..300 {
        let inner = folder.join(format!("d{}/e{}", i % 7, i % 5));
        fs::create_dir_all(&inner).expect("made");
        let content = noise(i, ((i as usize * 997) % 40_000) >> (i % 4 * 3));
        let path = inner.join(format!("f{i}"));
        fs::write(&path, content).expect("written");
        if i % 10 == 0 {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
            symlink(format!("f{i}"), inner.join(format!("l{i}"))).expect("linked");
        }
    }
}

fn git_commits_clones_and_collects(mounted: &Mounted) {
    if !have("git") {
        return;
    }
    let repository = mounted.mountpoint.join("repository");
    fs::create_dir(&repository).expect("made");
    generate(&repository);
    let clean = |folder: &str| {
        script(&mounted.mountpoint.join(folder), "git fsck --full --strict 2>&1; git status --porcelain")
    };
    script(&repository, "git init -q -b main . && git add -A && git commit -q -m first");
    assert_eq!(clean("repository"), "");
    // The control: it does see a change.
    fs::write(repository.join("d0/e0/f0"), "changed").expect("written");
    assert_eq!(clean("repository"), " M d0/e0/f0\n");
    script(
        &repository,
        "git commit -q -a -m second
         git checkout -q -b other HEAD~ && git mv d1 moved && git rm -q -r d2 && git commit -q -m third
         git checkout -q main && git merge -q -m merged other
         git gc -q --prune=now && test -z \"$(find .git/objects -name '??')\"",
    );
    assert_eq!(clean("repository"), "");
    assert_eq!(script(&repository, "git rev-list --count HEAD").trim(), "4");

    let head = script(&repository, "git rev-parse HEAD");
    script(&mounted.mountpoint, "git clone -q repository linked && git clone -q --no-hardlinks repository copied");
    // Only one of the two shares the objects with the repository.
    for (clone, links) in [("linked", 2), ("copied", 1)] {
        assert_eq!(clean(clone), "", "{clone}");
        let folder = mounted.mountpoint.join(clone);
        assert_eq!(script(&folder, "git rev-parse HEAD"), head, "{clone}");
        assert_eq!(script(&mounted.mountpoint, &format!("diff -r -x .git repository {clone}")), "", "{clone}");
        let pack = script(&folder, "ls .git/objects/pack/*.pack");
        assert_eq!(fs::metadata(folder.join(pack.trim())).expect("stat").nlink(), links, "{clone}");
    }
    // What the mount shows is what the source has.
    assert_eq!(script(&mounted.source.join("copied"), "git fsck --full --strict 2>&1; git status --porcelain"), "");
}

/// A running sqlite3 that is told what to do, and whose answers are read line by line.
struct Sqlite {
    child: Child,
    answers: std::sync::mpsc::Receiver<String>,
}

impl Sqlite {
    fn start(database: &Path) -> Sqlite {
        let mut child = Command::new("sqlite3")
            .args(["-batch", "-init", "/dev/null"])
            .arg(database)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let (send, answers) = std::sync::mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).all(|line| send.send(line).is_ok()));
        let mut sqlite = Sqlite { child, answers };
        // Every commit waits for its turn, and no statement's error goes unseen.
        sqlite.tell(".timeout 50000\n.bail on\n");
        sqlite
    }

    fn tell(&mut self, text: &str) {
        self.child.stdin.as_mut().expect("piped").write_all(text.as_bytes()).expect("told");
    }

    fn answer(&self) -> String {
        self.answers.recv_timeout(DEADLINE).expect("an answer in time")
    }

    fn ask(&mut self, text: &str) -> String {
        self.tell(text);
        self.answer()
    }

    fn finish(mut self) {
        drop(self.child.stdin.take());
        let status = end(&mut self.child, DEADLINE).expect("it ends");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn sqlite_has_two_writers_and_a_reader_in_wal_mode(mounted: &Mounted) {
    // Each row is a transaction; in a round both writers want to write at once.
    const ROUNDS: u64 = 20;
    const ROWS: u64 = 15;
    if !have("sqlite3") {
        return;
    }
    let database = mounted.mountpoint.join("db");
    let mut reader = Sqlite::start(&database);
    assert_eq!(reader.ask("PRAGMA journal_mode=WAL;\n"), "wal");
    reader.tell("CREATE TABLE t (writer INTEGER, number INTEGER, content BLOB);\n");
    assert_eq!(reader.ask("SELECT count(*) FROM t;\n"), "0");
    let mut writers = [Sqlite::start(&database), Sqlite::start(&database)];
    for writer in &mut writers {
        assert_eq!(writer.ask("SELECT count(*) FROM t;\n"), "0");
    }
    // The processes meet in a shared mapping of this file.
    let maps = fs::read_to_string(format!("/proc/{}/maps", writers[0].child.id())).expect("alive");
    let shared = format!("{}/db-shm", mounted.mountpoint.display());
    assert!(maps.lines().any(|line| line.contains("rw-s") && line.ends_with(&shared)), "{maps}");

    let mut seen = vec![0];
    for round in 0..ROUNDS {
        for (number, writer) in writers.iter_mut().enumerate() {
            let rows = (round * ROWS..(round + 1) * ROWS)
                .map(|i| format!("INSERT INTO t VALUES ({number}, {i}, randomblob({}));\n", i * 7 + 1));
            writer.tell(&(rows.collect::<String>() + "SELECT 'done';\n"));
        }
        let begun = std::time::Instant::now();
        while seen.last() != Some(&(2 * (round + 1) * ROWS)) {
            assert!(begun.elapsed() < DEADLINE, "{seen:?}");
            let count = reader.ask("SELECT count(*) FROM t;\n").parse().expect("a number");
            assert!(*seen.last().expect("one") <= count, "a row that was there is gone: {seen:?}, {count}");
            seen.push(count);
        }
        for writer in &writers {
            assert_eq!(writer.answer(), "done");
        }
    }
    assert!(seen.iter().any(|count| count % (2 * ROWS) != 0), "the control: it read while they wrote");
    assert!(fs::metadata(mounted.mountpoint.join("db-wal")).expect("there").len() > 0);
    let whole =
        "SELECT count(*) || ' ' || count(DISTINCT number) || ' ' || min(length(content) = number * 7 + 1) FROM t;\n";
    assert_eq!(reader.ask(whole), format!("{} {} 1", 2 * ROUNDS * ROWS, ROUNDS * ROWS));
    assert_eq!(reader.ask("PRAGMA integrity_check;\n"), "ok");
    for sqlite in writers.into_iter().chain([reader]) {
        sqlite.finish();
    }
    // The last to close it puts the log into the database, whose every byte is in the source.
    assert!(!mounted.source.join("db-wal").exists() && !mounted.source.join("db-shm").exists());
    let mut behind = Sqlite::start(&mounted.source.join("db"));
    assert_eq!(behind.ask(whole), format!("{} {} 1", 2 * ROUNDS * ROWS, ROUNDS * ROWS));
    assert_eq!(behind.ask("PRAGMA integrity_check;\n"), "ok");
    behind.finish();
}

fn cargo_builds_a_crate_that_runs(mounted: &Mounted) {
    // cargo's own name for itself: what PATH finds may be rustup, which needs a home of the person who runs it.
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    if !Command::new(&cargo).arg("--version").output().is_ok_and(|output| output.status.success()) {
        // The toolchain is in the home of whoever installed it, and that may be closed to others.
        assert!(!is_root() || !on_host(), "no cargo");
        eprintln!("not shown here: this user cannot run {cargo}");
        return;
    }
    let package = mounted.mountpoint.join("package");
    fs::create_dir_all(package.join("src/bin")).expect("made");
    let write = |name: &str, content: &str| fs::write(package.join(name), content).expect("written");
    write("Cargo.toml", "[package]\nname = \"small\"\nversion = \"1.0.0\"\nedition = \"2021\"\n");
    write(
        "build.rs",
        r#"fn main() {
            let out = std::env::var("OUT_DIR").unwrap();
            std::fs::write(format!("{out}/word.txt"), "built").unwrap();
            println!("cargo:rerun-if-changed=build.rs");
        }"#,
    );
    write("src/lib.rs", "pub fn word() -> &'static str { include_str!(concat!(env!(\"OUT_DIR\"), \"/word.txt\")) }\n");
    write("src/bin/small.rs", "fn main() { println!(\"first {}\", small::word()) }\n");
    let build = || {
        let mut command = Command::new(&cargo);
        command.args(["build", "--offline", "--target-dir"]).arg(package.join("target")).current_dir(&package);
        command.env("CARGO_HOME", mounted.mountpoint.join("home")).env("CARGO_TERM_COLOR", "never");
        for of_the_tests in ["CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
            command.env_remove(of_the_tests);
        }
        run_within(&mut command, PATIENCE).ok().stderr
    };
    let runs = || run(&mut Command::new(package.join("target/debug/small"))).ok().text();
    assert!(build().contains("Compiling small"));
    assert_eq!(runs(), "first built\n");
    // It tells what is fresh by times and numbers of files.
    assert!(!build().contains("Compiling"));
    write("src/bin/small.rs", "fn main() { println!(\"second {}\", small::word()) }\n");
    assert!(build().contains("Compiling small"));
    assert_eq!(runs(), "second built\n");
    assert_eq!(run(&mut Command::new(mounted.source.join("package/target/debug/small"))).ok().text(), "second built\n");
}
