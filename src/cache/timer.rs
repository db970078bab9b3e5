//! Things that have to happen at a time: answers that must not be later, holds that lapse. One thread, asleep until the
//! next of them, so that an idle daemon costs nothing.

use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Action = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Agenda {
    entries: BTreeMap<(Instant, u64), Action>,
    next: u64,
    closed: bool,
}

/// The agenda and its thread, which ends when this is dropped.
pub struct Timer {
    shared: Arc<(Mutex<Agenda>, Condvar)>,
}

impl Timer {
    pub fn start() -> std::io::Result<Timer> {
        let shared = Arc::new((Mutex::new(Agenda::default()), Condvar::new()));
        let thread = Arc::clone(&shared);
        std::thread::Builder::new().name("timer".into()).spawn(move || run(&thread.0, &thread.1))?;
        Ok(Timer { shared })
    }

    /// Runs `action` on the timer's thread, `delay` from now. It must be quick.
    pub fn after(&self, delay: Duration, action: impl FnOnce() + Send + 'static) {
        let (agenda, wake) = &*self.shared;
        let mut agenda = agenda.lock();
        let key = (Instant::now() + delay, agenda.next);
        agenda.next += 1;
        agenda.entries.insert(key, Box::new(action));
        if agenda.entries.first_key_value().is_some_and(|(first, _)| *first == key) {
            wake.notify_one();
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let mut agenda = self.shared.0.lock();
        agenda.closed = true;
        self.shared.1.notify_one();
    }
}

fn run(agenda: &Mutex<Agenda>, wake: &Condvar) {
    let mut locked = agenda.lock();
    while !locked.closed {
        let now = Instant::now();
        match locked.entries.first_entry() {
            None => wake.wait(&mut locked),
            Some(first) if first.key().0 > now => {
                let wait = first.key().0 - now;
                wake.wait_for(&mut locked, wait);
            }
            Some(first) => {
                let action = first.remove();
                parking_lot::MutexGuard::unlocked(&mut locked, action);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn actions_run_in_the_order_of_their_time() {
        let timer = Timer::start().expect("a thread");
        let (send, receive) = mpsc::channel();
        for (name, delay) in [("late", 60), ("early", 10)] {
            let send = send.clone();
            timer.after(Duration::from_millis(delay), move || send.send(name).expect("heard"));
        }
        let patience = Duration::from_secs(10);
        assert_eq!(receive.recv_timeout(patience), Ok("early"));
        assert_eq!(receive.recv_timeout(patience), Ok("late"));
    }
}
