//! Sessions and their leases. A lease begins when MATERIALIZE answers a session, and ends when the client has given back
//! every grant, when nobody fetched the allocation in time, or with the client. Grants are counted on both sides, so a
//! release cannot cross a new grant on its way.

use super::SessionId;
use super::copy::Hold;
use crate::failure::{Failure, Result};
use crate::protocol::{Code, NONE, Secret};
use crate::source::{Caller, Domain};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// A hold whose allocation was not fetched for this long lapses.
pub const FETCH_TIME: Duration = Duration::from_secs(10);

/// Every session of the daemon.
#[derive(Default)]
pub struct Sessions {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    sessions: BTreeMap<SessionId, Session>,
    by_secret: HashMap<Secret, SessionId>,
    last: u64,
    last_lease: u64,
}

struct Session {
    secret: Secret,
    owner: Caller,
    /// By the allocation's number.
    leases: HashMap<u64, Lease>,
}

struct Lease {
    hold: Hold,
    /// Answers of MATERIALIZE that the client has not given back.
    grants: u64,
    /// The client was sent the descriptor.
    fetched: bool,
    /// Tells this lease from a later one on the same allocation.
    serial: u64,
}

/// Who holds memory, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub uid: u32,
    pub pid: u32,
    pub bytes: u64,
}

impl Sessions {
    /// Begins a session for `owner`.
    pub fn open(&self, owner: Caller) -> Result<(SessionId, Secret)> {
        let secret = random_secret()?;
        let mut table = self.table.lock();
        table.last += 1;
        let id = SessionId(table.last);
        table.by_secret.insert(secret, id);
        table.sessions.insert(id, Session { secret, owner, leases: HashMap::new() });
        Ok((id, secret))
    }

    /// Ends a session and all its leases.
    pub fn close(&self, id: SessionId) {
        let mut table = self.table.lock();
        let Some(session) = table.sessions.remove(&id) else { return };
        table.by_secret.remove(&session.secret);
        drop(table);
        // The holds go outside the lock: the last one frees memory.
        drop(session);
    }

    /// The session with this secret, where it is of `domain`.
    pub fn find(&self, secret: &Secret, domain: Domain) -> Result<SessionId> {
        let table = self.table.lock();
        let id = table.by_secret.get(secret).copied();
        id.filter(|id| table.sessions[id].owner.domain == domain).ok_or_else(|| {
            let message = "the secret belongs to no session of this user here: open a session with the daemon of this mount (does WARPFS_SOCKET name another one?)";
            Failure::new(Code::BadSession, message)
        })
    }

    /// Adds one grant of `hold`'s block to a session. Where the session had none before it is a new lease, whose serial
    /// is returned: it has to be fetched in time.
    pub fn grant(&self, id: SessionId, hold: Hold) -> Result<Option<u64>> {
        let mut table = self.table.lock();
        let Table { sessions, last_lease, .. } = &mut *table;
        let session = sessions.get_mut(&id).ok_or_else(|| Failure::new(Code::BadSession, "the session has ended"))?;
        if let Some(lease) = session.leases.get_mut(&hold.block().id) {
            lease.grants += 1;
            return Ok(None);
        }
        *last_lease += 1;
        let serial = *last_lease;
        session.leases.insert(hold.block().id, Lease { hold, grants: 1, fetched: false, serial });
        Ok(Some(serial))
    }

    /// Ends the lease with this serial if it was never fetched. True: it did.
    pub fn lapse(&self, id: SessionId, allocation: u64, serial: u64) -> bool {
        let mut table = self.table.lock();
        let Some(session) = table.sessions.get_mut(&id) else { return false };
        if session.leases.get(&allocation).is_none_or(|lease| lease.fetched || lease.serial != serial) {
            return false;
        }
        let lapsed = session.leases.remove(&allocation);
        drop(table);
        drop(lapsed);
        true
    }

    /// Whether the session's client may have something mapped.
    pub fn has_fetched(&self, id: SessionId) -> bool {
        let table = self.table.lock();
        table.sessions.get(&id).is_some_and(|session| session.leases.values().any(|lease| lease.fetched))
    }

    /// The allocation that a session holds, to be sent to it. What is returned keeps it while it is sent.
    pub fn fetch(&self, id: SessionId, allocation: u64) -> Result<Hold> {
        let mut table = self.table.lock();
        let lease = table.sessions.get_mut(&id).and_then(|s| s.leases.get_mut(&allocation));
        let lease = lease.ok_or_else(|| not_held(allocation))?;
        lease.fetched = true;
        Ok(Hold::new(lease.hold.block()))
    }

    /// Takes `grants` back. With the last one the lease is over.
    pub fn release(&self, id: SessionId, allocation: u64, grants: u64) -> Result<()> {
        let mut table = self.table.lock();
        let session = table.sessions.get_mut(&id).ok_or_else(|| not_held(allocation))?;
        let lease = session.leases.get_mut(&allocation).ok_or_else(|| not_held(allocation))?;
        if grants > lease.grants {
            let message =
                format!("{grants} grants of allocation {allocation} given back, but only {} are out", lease.grants);
            return Err(Failure::new(Code::BadRequest, message));
        }
        lease.grants -= grants;
        let over = if lease.grants == 0 { session.leases.remove(&allocation) } else { None };
        drop(table);
        drop(over);
        Ok(())
    }

    /// Number of sessions.
    pub fn count(&self) -> usize {
        self.table.lock().sessions.len()
    }

    /// Who holds memory of `device`, the largest first.
    pub fn holders(&self, device: usize) -> Vec<Holder> {
        let table = self.table.lock();
        let mut holders: Vec<Holder> = table
            .sessions
            .values()
            .map(|session| {
                let blocks = session.leases.values().map(|lease| lease.hold.block());
                let bytes = blocks.filter(|block| block.device == device).map(|block| block.bytes()).sum();
                Holder { uid: session.owner.identity.uid, pid: session.owner.pid, bytes }
            })
            .filter(|holder| holder.bytes > 0)
            .collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        holders
    }
}

fn not_held(allocation: u64) -> Failure {
    let message = format!("allocation {allocation} is not held by this session (any more): ask for the file again");
    Failure::new(Code::NotHeld, message)
}

fn random_secret() -> Result<Secret> {
    let mut secret = NONE;
    while secret == NONE {
        let filled = rustix::rand::getrandom(&mut secret[..], rustix::rand::GetRandomFlags::empty());
        filled.map_err(|e| Failure::system("cannot draw a session's secret", e))?;
    }
    Ok(secret)
}
