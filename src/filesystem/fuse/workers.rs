//! How many workers wait for requests. The kernel wakes the one that has waited longest, so with many waiting each request
//! goes to a thread whose processor sleeps, which costs more than the request itself. So only a few wait in the kernel; the
//! others are parked here at the end of a request, and are called as soon as nobody waits any more. To call one costs as
//! much as a request too, so where that happens more stay, until for a while they were not needed. Called by the adapter
//! around every request; a panic in one is its own end (its reply says EIO when it is dropped), and not its worker's.

use parking_lot::{Condvar, Mutex};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Workers that wait in the kernel when there is nothing to do: one would have to be back before the next request.
const WAITING: usize = 2;
/// After so many requests that left somebody waiting one worker fewer stays.
const CALM: u32 = 256;

pub(crate) struct Workers {
    state: Mutex<State>,
    needed: Condvar,
}

struct State {
    /// Workers in the kernel, waiting for a request.
    waiting: usize,
    /// How many of them stay when there is nothing to do; `WAITING` at least.
    wanted: usize,
    /// Requests in a row that left somebody waiting.
    calm: u32,
    /// Those of them that have served, and so will be noticed when they end. While there is none nobody parks: he might
    /// never be called.
    noticed: usize,
    parked: usize,
    /// Parked ones that were called and are not on their way yet.
    called: usize,
    /// A worker has ended, so the connection has: nobody stays here.
    over: bool,
}

/// A worker that has served; tells when it ends.
struct Ends(Arc<Workers>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.state.lock().over = true;
        self.0.needed.notify_all();
    }
}

thread_local! {
    static THIS: RefCell<Option<Ends>> = const { RefCell::new(None) };
}

/// Runs `request`, which may panic.
pub(super) fn caught(request: impl FnOnce()) {
    // No lock stays locked: ours are released by unwinding.
    if catch_unwind(AssertUnwindSafe(request)).is_err() {
        tracing::error!("a request ended in a panic (see above); please report it");
    }
}

impl Workers {
    /// `count` workers are about to wait for requests.
    pub(crate) fn new(count: usize) -> Arc<Workers> {
        let state = State { waiting: count, wanted: WAITING, calm: 0, noticed: 0, parked: 0, called: 0, over: false };
        Arc::new(Workers { state: Mutex::new(state), needed: Condvar::new() })
    }

    /// Runs one request on a worker, and keeps the worker while enough others wait. Not for a part of a request.
    pub(super) fn serve(self: &Arc<Workers>, request: impl FnOnce()) {
        let noticed = THIS.with_borrow_mut(|this| {
            let noticed = this.is_some();
            this.get_or_insert_with(|| Ends(Arc::clone(self)));
            noticed
        });
        self.leave(noticed);
        caught(request);
        self.enter();
    }

    /// This worker has got a request.
    fn leave(&self, noticed: bool) {
        let mut state = self.state.lock();
        state.waiting = state.waiting.saturating_sub(1);
        state.noticed = state.noticed.saturating_sub(usize::from(noticed));
        if state.waiting > 0 {
            state.calm += 1;
            if state.calm >= CALM {
                state.calm = 0;
                state.wanted = WAITING.max(state.wanted - 1);
            }
        } else if state.parked > state.called {
            state.calm = 0;
            state.wanted += 1;
            state.called += 1;
            self.needed.notify_one();
        }
    }

    /// This worker has served it, and goes to wait for the next; or stays here until it is needed.
    fn enter(&self) {
        let mut state = self.state.lock();
        while !state.over && state.waiting >= state.wanted && state.noticed > 0 {
            state.parked += 1;
            self.needed.wait(&mut state);
            state.parked -= 1;
            // Whoever is called late finds that he is not needed any more.
            state.called = state.called.saturating_sub(1);
        }
        state.waiting += 1;
        state.noticed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::JoinHandle;
    use std::time::{Duration, Instant};

    type Request = Box<dyn FnOnce() + Send>;

    /// Gives each request to the worker that has waited longest, as the kernel does.
    #[derive(Default)]
    struct Kernel {
        waiting: Mutex<(VecDeque<Sender<Request>>, bool)>,
        more: Condvar,
    }

    impl Kernel {
        fn send(&self, request: impl FnOnce() + Send + 'static) {
            let mut waiting = self.waiting.lock();
            let worker = loop {
                if let Some(worker) = waiting.0.pop_front() {
                    break worker;
                }
                assert!(!self.more.wait_for(&mut waiting, Duration::from_secs(30)).timed_out(), "nobody takes it");
            };
            worker.send(Box::new(request)).expect("taken");
        }

        fn end(&self, threads: Vec<JoinHandle<()>>) {
            *self.waiting.lock() = (VecDeque::new(), true);
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        }

        /// The life of a worker.
        fn work(&self, workers: &Arc<Workers>) {
            loop {
                let (send, receive) = channel();
                {
                    let mut waiting = self.waiting.lock();
                    if waiting.1 {
                        return;
                    }
                    waiting.0.push_back(send);
                }
                self.more.notify_one();
                let Ok(request) = receive.recv() else { return };
                workers.serve(request);
            }
        }
    }

    fn start(count: usize) -> (Arc<Workers>, Arc<Kernel>, Vec<JoinHandle<()>>) {
        let (workers, kernel) = (Workers::new(count), Arc::new(Kernel::default()));
        let threads = (0..count).map(|_| {
            let (workers, kernel) = (Arc::clone(&workers), Arc::clone(&kernel));
            std::thread::spawn(move || kernel.work(&workers))
        });
        let threads = threads.collect();
        eventually(|| kernel.waiting.lock().0.len() == count);
        (workers, kernel, threads)
    }

    #[track_caller]
    fn eventually(condition: impl Fn() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < Duration::from_secs(30), "not in time");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn most_park_all_are_called_and_all_end() {
        let (workers, kernel, threads) = start(8);
        for _ in 0..20 {
            // One after the other: two go on waiting, the others park, in time.
            for _ in 0..8 * CALM {
                let (done, heard) = channel();
                kernel.send(move || done.send(()).expect("heard"));
                heard.recv_timeout(Duration::from_secs(30)).expect("served");
                let idle = || {
                    let state = workers.state.lock();
                    state.waiting + state.parked == 8
                };
                let begun = Instant::now();
                while !idle() {
                    assert!(begun.elapsed() < Duration::from_secs(30), "not in time");
                    std::thread::yield_now();
                }
            }
            eventually(|| {
                let state = workers.state.lock();
                (state.waiting, state.parked) == (WAITING, 8 - WAITING)
            });
            // As many at once as there are workers, each waiting for all others.
            let barrier = Arc::new(std::sync::Barrier::new(8));
            let (done, heard) = channel();
            for _ in 0..8 {
                let (barrier, done) = (Arc::clone(&barrier), done.clone());
                let together = move || {
                    barrier.wait();
                    done.send(()).expect("heard");
                };
                kernel.send(together);
            }
            for _ in 0..8 {
                heard.recv_timeout(Duration::from_secs(30)).expect("all are served at once");
            }
        }
        kernel.end(threads);
    }

    #[test]
    fn a_panic_ends_its_request_only() {
        let (workers, kernel, threads) = start(3);
        for _ in 0..10 {
            kernel.send(|| panic!("on purpose, in a test"));
        }
        let (done, heard) = channel();
        kernel.send(move || done.send(()).expect("heard"));
        heard.recv_timeout(Duration::from_secs(30)).expect("served");
        eventually(|| workers.state.lock().waiting >= WAITING);
        kernel.end(threads);
    }
}
