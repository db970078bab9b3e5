//! Threads for the few requests that may have to wait for somebody outside (a lease that has to be broken), so that no
//! FUSE worker does. Their number is bounded: whoever comes when all are taken hears EAGAIN, and nobody else waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Requests that may wait at once.
const MOST: usize = 256;

#[derive(Clone, Default)]
pub(crate) struct Waiting {
    now: Arc<AtomicUsize>,
}

/// Gives the place back, also when the work panics.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Waiting {
    /// Runs `work` on a thread of its own, with `true`; with `false`, here and at once, where there are too many.
    pub(crate) fn run(&self, work: impl FnOnce(bool) + Send + 'static) {
        let full = self.now.fetch_add(1, Ordering::Relaxed) >= MOST;
        let place = Place(Arc::clone(&self.now));
        if full {
            drop(place);
            return work(false);
        }
        let waits = std::thread::Builder::new().name("waiting".into());
        let started = waits.spawn(move || {
            let _place = place;
            work(true);
        });
        if let Err(e) = started {
            // The request went with its work, and its caller gets EIO from the reply that was dropped.
            tracing::warn!("cannot start a thread for a request that has to wait: {e}");
        }
    }
}
