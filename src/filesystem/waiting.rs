//! Threads for the requests that may wait for a disk or for somebody outside (fsync, a long copy, a lease that has to be
//! broken), so that no FUSE worker does. Their number is bounded: whoever comes when all are taken is told so and does
//! the work where it is, or gives up. A thread that found nothing to do for a while ends.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Requests that may wait at once.
const MOST: usize = 256;
/// How long a thread waits for its next request.
const IDLE: Duration = Duration::from_secs(5);

type Work = Box<dyn FnOnce() + Send>;

#[derive(Clone, Default)]
pub(crate) struct Waiting {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    threads: usize,
    /// Threads that wait for work; never fewer than there is work in the queue.
    idle: usize,
    queue: VecDeque<Work>,
}

impl Waiting {
    /// Runs `work` on another thread, with `true`; with `false`, here and at once, where there are too many.
    pub(crate) fn run(&self, work: impl FnOnce(bool) + Send + 'static) {
        let mut state = self.shared.state.lock();
        if state.idle > state.queue.len() {
            state.queue.push_back(Box::new(move || work(true)));
            self.shared.more.notify_one();
            return;
        }
        if state.threads >= MOST {
            drop(state);
            return work(false);
        }
        state.threads += 1;
        drop(state);
        let shared = Arc::clone(&self.shared);
        let first: Work = Box::new(move || work(true));
        let started = std::thread::Builder::new().name("waiting".into()).spawn(move || shared.live(first));
        if let Err(e) = started {
            self.shared.state.lock().threads -= 1;
            // The request went with its work, and its caller gets EIO from the reply that was dropped.
            tracing::warn!("cannot start a thread for a request that has to wait: {e}");
        }
    }
}

/// A thread less, also when its work panics.
struct Alive<'s>(&'s Shared);

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        self.0.state.lock().threads -= 1;
    }
}

impl Shared {
    fn live(&self, first: Work) {
        let _alive = Alive(self);
        first();
        while let Some(work) = self.next() {
            work();
        }
    }

    fn next(&self) -> Option<Work> {
        let mut state = self.state.lock();
        state.idle += 1;
        if state.queue.is_empty() {
            self.more.wait_for(&mut state, IDLE);
        }
        state.idle -= 1;
        state.queue.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::mpsc::channel;

    #[test]
    fn what_waits_keeps_nobody_else_waiting_and_too_many_are_told() {
        let waiting = Waiting::default();
        let gate = Arc::new(Barrier::new(MOST + 1));
        for _ in 0..MOST {
            let gate = Arc::clone(&gate);
            waiting.run(move |may| {
                assert!(may);
                gate.wait();
            });
        }
        let (send, receive) = channel();
        let told = send.clone();
        waiting.run(move |may| told.send(may).expect("heard"));
        assert_eq!(receive.try_recv(), Ok(false), "done here and at once");
        gate.wait();
        // The threads that are free again take more.
        for _ in 0..10 * MOST {
            let told = send.clone();
            waiting.run(move |_| told.send(true).expect("heard"));
        }
        for _ in 0..10 * MOST {
            receive.recv_timeout(Duration::from_secs(30)).expect("all are done");
        }
        assert!(waiting.shared.state.lock().threads <= MOST);
    }

    #[test]
    fn a_panic_costs_no_place() {
        let waiting = Waiting::default();
        waiting.run(|_| panic!("on purpose, in a test"));
        let (send, receive) = channel();
        for _ in 0..100 {
            if waiting.shared.state.lock().threads == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(waiting.shared.state.lock().threads, 0);
        waiting.run(move |may| send.send(may).expect("heard"));
        assert_eq!(receive.recv_timeout(Duration::from_secs(10)), Ok(true));
    }
}
