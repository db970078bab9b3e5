//! Random sequences of operations on the mount, with a native directory as the model: every result has to be the same,
//! and at the end both trees. A failure is shrunk to a short sequence. `PROPTEST_CASES` and `PROPTEST_RNG_SEED` change
//! how many there are and which.

use super::operations::{Op, World, op};
use super::stage::{Side, mounted, stage};
use super::tree;
use crate::harness::DEADLINE;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Some twenty seconds on two cores.
const CASES: u32 = 500;
/// The same sequences in each run, unless told otherwise.
const SEED: u64 = 1;

/// A thread that works in one directory, a fresh folder of it for each sequence.
struct Worker {
    orders: Sender<(String, Arc<Vec<Op>>)>,
    results: Receiver<Vec<String>>,
}

impl Worker {
    fn start(folder: PathBuf) -> Worker {
        let (orders, inbox) = channel::<(String, Arc<Vec<Op>>)>();
        let (outbox, results) = channel();
        // Nobody waits for the thread itself: it ends with the orders.
        let _ = stage(move || {
            rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
            for (name, operations) in inbox {
                let place = folder.join(name);
                std::fs::create_dir(&place).expect("created");
                rustix::process::chdir(&place).expect("entered");
                let mut world = World::furnished();
                let said = operations.iter().map(|op| world.apply(op)).collect();
                drop(world);
                rustix::process::chdir("/").expect("left");
                let _ = outbox.send(said);
            }
        });
        Worker { orders, results }
    }

    fn result(&self) -> Result<Vec<String>, TestCaseError> {
        self.results.recv_timeout(DEADLINE).map_err(|e| TestCaseError::fail(format!("no answer: {e}")))
    }
}

/// Runs random sequences on one side and on a native directory.
pub fn sequences(side: Side) {
    let Some((_, mounted)) = mounted(side) else {
        return;
    };
    let native = mounted.source.with_file_name("native");
    std::fs::create_dir(&native).expect("created");
    let (model, mount) = (Worker::start(native.clone()), Worker::start(mounted.mountpoint.clone()));

    let mut config = Config { failure_persistence: None, max_shrink_iters: 4000, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = CASES;
    }
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(SEED);
    }
    let seed = config.rng_seed;
    let mut runs = 0;
    let run = std::cell::RefCell::new(|operations: Vec<Op>| {
        runs += 1;
        let name = format!("s{runs}");
        let operations = Arc::new(operations);
        let order = (name.clone(), operations.clone());
        for worker in [&model, &mount] {
            worker.orders.send(order.clone()).map_err(|e| TestCaseError::fail(e.to_string()))?;
        }
        let (expected, seen) = (model.result()?, mount.result()?);
        let (expected_tree, seen_tree) = (native.join(&name), mounted.mountpoint.join(&name));
        let mut differences =
            tree::compare(("native", &tree::facts(&expected_tree, false)), ("mount", &tree::facts(&seen_tree, false)));
        differences.extend(tree::differences(&seen_tree, &mounted.source.join(&name)));
        tree::remove(&expected_tree);
        tree::remove(&seen_tree);
        if expected == seen && differences.is_empty() {
            return Ok(());
        }
        Err(TestCaseError::fail(report(&operations, &expected, &seen, &differences)))
    });
    // Written by the kernel or by an ordinary user's daemon, a file loses the bits although its mapping was stored to.
    let set_id = side == Side::ThroughDaemon && rustix::process::geteuid().is_root();
    let sequence = proptest::collection::vec(op(set_id), 1..=40);
    match TestRunner::new(config).run(&sequence, |operations| (run.borrow_mut())(operations)) {
        Ok(()) => {}
        Err(TestError::Fail(reason, _)) => panic!("{side:?}, {seed:?}: shrunk to\n{reason}"),
        Err(other) => panic!("{side:?}, {seed:?}: {other}"),
    }
}

fn report(operations: &[Op], expected: &[String], seen: &[String], differences: &[String]) -> String {
    let mut text = String::new();
    for ((op, native), mount) in operations.iter().zip(expected).zip(seen) {
        let _ = if native == mount {
            writeln!(text, "  {op:?} -> {native}")
        } else {
            writeln!(text, "! {op:?}\n    native: {native}\n    mount:  {mount}")
        };
    }
    for line in differences {
        let _ = writeln!(text, "! at the end: {line}");
    }
    text
}
