//! Memory for a load: inside the budget, by giving up what nobody holds, and never by failing what could have waited. What
//! cannot be had is refused with the names of those who hold the rest. Called by the thread that begins loads.

use super::budget::Charge;
use super::shelf::Shelf;
use crate::device::Allocation;
use crate::failure::{Failure, Result};
use crate::metrics::Counter;
use crate::protocol::Code;
use crate::size::Human;
use crate::source::OpenFile;
use std::time::{Duration, Instant};

/// How long the dispatcher sleeps at most before it looks again whether there is room.
const PATIENCE: Duration = Duration::from_millis(200);

/// Loads in progress are waited for as long as they move; after this time without a byte they are given up hope of. More
/// than a loader may be silent before it is killed.
const STANDSTILL: Duration = Duration::from_secs(120);

/// Looks for room that is about to be free (a copy that was given up while somebody looked at it, a slab that its loader
/// unmaps) this often.
const LAST_LOOKS: u32 = 5;

impl Shelf {
    /// Memory for `bytes` of `file`, inside the budget. Gives up what nobody holds, waits for loads in progress, and
    /// fails only where the rest is held, or when it is not wanted any more.
    pub(super) fn make_room(
        &self,
        file: &OpenFile,
        bytes: u64,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(Allocation, Charge)> {
        let needed = self.info().rounded(bytes);
        self.fits(file, bytes)?;
        let mut looks = 0;
        let mut moved = (Instant::now(), self.budget.epoch(), 0);
        loop {
            if !wanted() || self.index.lock().stopping {
                return Err(Failure::new(Code::Stopping, format!("{}: the load was cancelled", file.path.display())));
            }
            let mut epoch = self.budget.epoch();
            let refused = match self.budget.reserve(needed) {
                None => None,
                Some(charge) => match self.create(needed) {
                    Ok(allocation) => return Ok((allocation, charge)),
                    Err(failure) if failure.code == Code::OutOfMemory => {
                        // What is given back here is nobody's room, and must not wake us.
                        drop(charge);
                        epoch = self.budget.epoch();
                        Some(failure)
                    }
                    Err(failure) => return Err(failure.within(file.path.display())),
                },
            };
            if self.kept.give_up() {
                continue;
            }
            let mut index = self.index.lock();
            let victims = index.take_victims();
            if !victims.is_empty() {
                drop(index);
                self.counters.add(Counter::Evictions, victims.len() as u64);
                drop(victims);
                looks = 0;
                continue;
            }
            // Only where nothing can go: this looks at every file, which must not be once for each that goes.
            let (others, arrived) = (index.in_flight, index.arrived());
            drop(index);
            if (moved.1, moved.2) != (epoch, arrived) {
                moved = (Instant::now(), epoch, arrived);
            }
            if others > 0 && moved.0.elapsed() < STANDSTILL {
                self.budget.wait(epoch, PATIENCE);
            } else if looks < LAST_LOOKS {
                looks += 1;
                self.budget.wait(epoch, Duration::from_millis(10));
            } else {
                return Err(self.no_room(file, needed, refused));
            }
        }
    }

    /// Creates the memory, unless the system says that there is none: not every device refuses by itself.
    pub(super) fn create(&self, needed: u64) -> Result<Allocation> {
        match self.memory.free() {
            Some(free) if free < needed => {
                let message = format!("only {} are free", Human(free));
                Err(Failure::new(Code::OutOfMemory, message))
            }
            _ => self.memory.allocate(needed),
        }
    }

    /// Says who is in the way.
    fn no_room(&self, file: &OpenFile, needed: u64, refused: Option<Failure>) -> Failure {
        let (path, label) = (file.path.display(), &self.info().label);
        if let Some(refused) = refused {
            let message = format!(
                "{path}: {label} has no room for {}, though the budget would allow it: {refused}; end what uses the device, or ask for less",
                Human(needed)
            );
            return Failure::new(Code::OutOfMemory, message);
        }
        if self.budget.is_out_of_pieces() {
            let message = format!(
                "{path}: as many files are held on {label} as the daemon has descriptors for; let some go, or raise its limit of open files (ulimit -n)"
            );
            return Failure::new(Code::OutOfMemory, message);
        }
        let holders = self.sessions.holders(self.number);
        let named: Vec<String> = holders
            .iter()
            .take(3)
            .map(|h| format!("process {} of user {} ({})", h.pid, h.uid, Human(h.bytes)))
            .collect();
        let held = if named.is_empty() {
            String::from("held by nobody known")
        } else {
            format!("held by {}", named.join(", "))
        };
        let message = format!(
            "{path}: no room for {} within the budget of {label}, {}: {} are in use, {held}; try again when they let go, or mount with a larger --budget",
            Human(needed),
            Human(self.budget.limit()),
            Human(self.budget.used()),
        );
        Failure::new(Code::OutOfMemory, message)
    }
}
