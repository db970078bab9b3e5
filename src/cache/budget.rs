//! The bytes that copies and slack may take on one device. The limit is hard: bytes are reserved before memory is
//! created and given back after it is freed, so that at no instant more is in use than the limit says.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;

/// One device's limit.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    account: Mutex<Account>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Account {
    /// Reserved bytes; never above the limit.
    used: u64,
    /// Raised whenever room may have appeared, so that a waiter cannot miss it.
    epoch: u64,
}

impl Budget {
    pub fn new(limit: u64) -> Arc<Budget> {
        Arc::new(Budget { limit, account: Mutex::default(), changed: Condvar::new() })
    }

    /// Bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes reserved now.
    pub fn used(&self) -> u64 {
        self.account.lock().used
    }

    /// Takes `bytes` if they fit.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Charge> {
        let mut account = self.account.lock();
        let used = account.used.checked_add(bytes)?;
        if used > self.limit {
            return None;
        }
        account.used = used;
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
        account.epoch += 1;
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_not_reserved() {
        let budget = Budget::new(100);
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
}
