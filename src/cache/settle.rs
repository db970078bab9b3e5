//! Loads whose file may be changing without a trace: they wait, on a thread of their own, until they have a version behind
//! which no change can hide. For most files the request has found one already. Called by the thread that begins loads.

use super::copy::Key;
use super::dispatch::Flight;
use super::shelf::Shelf;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use crate::source::{OpenFile, Version};
use parking_lot::Mutex;
use std::sync::Arc;

type Waiting = Vec<(Key, u64, OpenFile)>;

impl Shelf {
    /// Settles the files one after the other and puts their loads back into the queue. Their pages may have to be written to
    /// the disk, so the caller does not wait.
    pub(super) fn settle(self: &Arc<Self>, waiting: Waiting) {
        let flight = Flight::begin(self);
        let both = Arc::new(Mutex::new(Some((flight, waiting))));
        let theirs = Arc::clone(&both);
        let settle = move || {
            let Some((flight, waiting)) = theirs.lock().take() else { return };
            for (key, number, file) in waiting {
                flight.0.settled(&key, number, file.settle());
            }
        };
        if let Err(e) = std::thread::Builder::new().name("settles".into()).spawn(settle)
            && let Some((_flight, waiting)) = both.lock().take()
        {
            let failure = Failure::system("cannot start a thread", e);
            for (key, number, file) in waiting {
                self.fail(&key, number, failure.clone().within(file.path.display()));
            }
        }
    }

    fn settled(&self, key: &Key, number: u64, version: Result<Version>) {
        let version = match version {
            Ok(version) => version,
            Err(failure) => return self.fail(key, number, failure),
        };
        let mut index = self.index.lock();
        if index.stopping {
            drop(index);
            return self.fail(key, number, Failure::new(Code::Stopping, "the daemon is shutting down"));
        }
        let Some(load) = index.revise(key, number, version) else { return };
        load.settled = true;
        index.queue.push_back((*key, number));
        drop(index);
        self.work.notify_one();
    }
}
