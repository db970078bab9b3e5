//! Least recently used first.

use super::Policy;
use crate::cache::copy::Key;

pub struct Lru {
    order: lru::LruCache<Key, ()>,
}

impl Default for Lru {
    fn default() -> Lru {
        Lru { order: lru::LruCache::unbounded() }
    }
}

impl Policy for Lru {
    fn admit(&mut self, key: Key, _bytes: u64) {
        self.order.put(key, ());
    }

    fn touch(&mut self, key: &Key) {
        self.order.promote(key);
    }

    fn remove(&mut self, key: &Key) {
        self.order.pop(key);
    }

    fn victim(&mut self, may_go: &dyn Fn(&Key) -> bool) -> Option<Key> {
        // What may not go is in use: it moves to the recent end, so that the next search does not meet it again.
        for _ in 0..self.order.len() {
            let (key, ()) = self.order.peek_lru()?;
            let key = *key;
            if may_go(&key) {
                return Some(key);
            }
            self.order.promote(&key);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Domain, FileId};

    fn key(inode: u64) -> Key {
        let domain = Domain { uid: 0, user_namespace: 0, mount_namespace: 0 };
        Key { file: FileId { device: 1, inode }, domain }
    }

    #[test]
    fn the_longest_unused_goes_first_and_what_is_held_stays() {
        let mut lru = Lru::default();
        for inode in 1..=3 {
            lru.admit(key(inode), 1);
        }
        lru.touch(&key(1));
        assert_eq!(lru.victim(&|_| true), Some(key(2)));
        assert_eq!(lru.victim(&|k| *k != key(2)), Some(key(3)));
        assert_eq!(lru.victim(&|_| false), None);
        for inode in 1..=3 {
            lru.remove(&key(inode));
        }
        assert_eq!(lru.victim(&|_| true), None);
    }
}
