//! The bytes that copies and slack may take on one device, and the pieces they may come in: each is a descriptor of the
//! daemon, which its mount needs too. The limits are hard: both are reserved before memory is created and given back
//! after it is freed, so that at no instant more is in use than they say.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;

/// One device's limit.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    /// Allocations.
    pieces: u64,
    account: Mutex<Account>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Account {
    /// Reserved bytes; never above the limit.
    used: u64,
    /// Reserved pieces; never above their limit.
    pieces: u64,
    /// Raised whenever room may have appeared, so that a waiter cannot miss it.
    epoch: u64,
}

impl Budget {
    pub fn new(limit: u64, pieces: u64) -> Arc<Budget> {
        Arc::new(Budget { limit, pieces, account: Mutex::default(), changed: Condvar::new() })
    }

    /// Bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes reserved now.
    pub fn used(&self) -> u64 {
        self.account.lock().used
    }

    /// Whether every piece is taken.
    pub fn is_out_of_pieces(&self) -> bool {
        self.account.lock().pieces >= self.pieces
    }

    /// Takes one piece of `bytes` if it fits.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Charge> {
        let mut account = self.account.lock();
        let used = account.used.checked_add(bytes)?;
        if used > self.limit || account.pieces >= self.pieces {
            return None;
        }
        account.used = used;
        account.pieces += 1;
        Some(Charge { budget: Arc::clone(self), bytes })
    }

    /// Says that something which was in the way (a hold, a load) is gone, though no byte was freed yet.
    pub fn poke(&self) {
        self.account.lock().epoch += 1;
        self.changed.notify_all();
    }

    /// A number to hand to [`Budget::wait`].
    pub fn epoch(&self) -> u64 {
        self.account.lock().epoch
    }

    /// Returns when room may have appeared since `epoch`, or after `patience`.
    pub fn wait(&self, epoch: u64, patience: Duration) {
        let mut account = self.account.lock();
        if account.epoch == epoch {
            self.changed.wait_for(&mut account, patience);
        }
    }
}

/// Reserved bytes, given back when dropped.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Charge {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn budget(&self) -> &Budget {
        &self.budget
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut account = self.budget.account.lock();
        account.used -= self.bytes;
        account.pieces -= 1;
        account.epoch += 1;
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_not_reserved() {
        let budget = Budget::new(100, 10);
        let first = budget.reserve(60).expect("fits");
        assert!(budget.reserve(41).is_none());
        assert!(budget.reserve(u64::MAX).is_none());
        let second = budget.reserve(40).expect("fits exactly");
        let epoch = budget.epoch();
        drop(first);
        assert_ne!(budget.epoch(), epoch, "freeing wakes those who wait");
        assert_eq!(budget.used(), 40);
        drop(second);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn pieces_are_bounded_too() {
        let budget = Budget::new(100, 2);
        let held = [budget.reserve(1).expect("fits"), budget.reserve(1).expect("fits")];
        assert!(budget.is_out_of_pieces() && budget.reserve(1).is_none());
        drop(held);
        budget.reserve(1).expect("fits again");
    }
}
