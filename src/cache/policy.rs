//! Which copy goes when room is needed. A policy keeps an order of what is resident and is asked for a victim; it knows
//! neither memory nor holds, and is told which keys must not be chosen.

pub mod lru;

use super::copy::Key;

/// An order of eviction for one device. Every key is admitted once, removed once, and named as a victim at most between.
pub trait Policy: Send {
    /// `key` became resident with `bytes`.
    fn admit(&mut self, key: Key, bytes: u64);
    /// `key` was asked for.
    fn touch(&mut self, key: &Key);
    /// `key` is not resident any more.
    fn remove(&mut self, key: &Key);
    /// The key to give up next, among those for which `may_go` says yes. It stays until it is removed.
    fn victim(&mut self, may_go: &dyn Fn(&Key) -> bool) -> Option<Key>;
}
