//! A client's session: the connection, the secret, and the allocations that are mapped now. An allocation is mapped
//! once however many buffers lie in it, and given back with the last of them.

use super::ask::{self, Device, Progress};
use super::buffer::Buffer;
use crate::device::{self, Access, Importer, Mapping};
use crate::failure::{Failure, Result};
use crate::protocol::{
    Code, DeviceEntry, DeviceKind, DeviceUuid, ErrorReply, Fetch, FetchReply, HELLO_MAGIC, Hello, HelloReply,
    PROTOCOL_VERSION, Release, Secret, Wire, field_text, kind,
};
use crate::socket::{self, Frame};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A daemon that does not answer for this long is taken for gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection to one daemon. Cheap to clone; what was opened keeps it alive.
#[derive(Clone)]
pub struct Session {
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    connection: Mutex<Connection>,
    secret: Secret,
    devices: Vec<DeviceEntry>,
    importers: Mutex<HashMap<DeviceUuid, Arc<dyn Importer>>>,
    mapped: Mutex<HashMap<u64, Mapped>>,
}

struct Connection {
    socket: UnixStream,
    last_id: u64,
}

/// One allocation in this process.
struct Mapped {
    mapping: Arc<dyn Mapping>,
    importer: Arc<dyn Importer>,
    /// Buffers that lie in it.
    users: u64,
    /// Grants to be given back with the last of them.
    grants: u64,
}

impl Session {
    /// A session with the daemon of the mount on which `path` (a file or a directory) is.
    pub fn of_path(path: &Path) -> Result<Session> {
        if let Some(socket) = socket::overridden() {
            return Session::connect(&socket);
        }
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
        let file = if path.is_dir() {
            let opened = rustix::fs::open(path, flags, rustix::fs::Mode::empty());
            File::from(opened.map_err(|e| Failure::system(path.display(), e))?)
        } else {
            ask::open(path)?
        };
        let version = ask::version(&file, path)?;
        if version.protocol != PROTOCOL_VERSION {
            let message = format!(
                "{}: the daemon speaks version {} of the protocol and this program version {PROTOCOL_VERSION}: update the older one",
                path.display(),
                version.protocol
            );
            return Err(Failure::new(Code::WrongVersion, message));
        }
        Session::connect(&PathBuf::from(field_text(&version.socket)))
    }

    /// A session with the daemon that listens at `path`.
    pub fn connect(path: &Path) -> Result<Session> {
        let shown = path.display();
        let socket = UnixStream::connect(path).map_err(|e| {
            let code = match e.kind() {
                std::io::ErrorKind::PermissionDenied => Code::Permission,
                _ => Code::NotRunning,
            };
            let what = match code {
                Code::Permission => "may not connect (mount with --allow-other to let other users in)",
                _ => "no daemon listens there",
            };
            let errno = e.raw_os_error().unwrap_or(libc::ECONNREFUSED);
            Failure { code, errno, message: format!("{shown}: {what}: {}", crate::failure::describe(errno)) }
        })?;
        let failed = |e| Failure::system(&shown, e);
        socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        socket.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        let mut connection = Connection { socket, last_id: 0 };
        let hello = Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, capabilities: 0 };
        let reply = connection.ask(kind::HELLO, &hello.encode())?;
        let hello = HelloReply::decode(&reply.body).ok_or_else(nonsense)?;
        let entries = reply.body[HelloReply::SIZE..].chunks(DeviceEntry::SIZE);
        let devices: Vec<_> = entries.filter_map(DeviceEntry::decode).collect();
        if devices.len() != hello.devices as usize || devices.is_empty() {
            return Err(nonsense());
        }
        let shared = Shared {
            connection: Mutex::new(connection),
            secret: hello.secret,
            devices,
            importers: Mutex::default(),
            mapped: Mutex::default(),
        };
        Ok(Session { shared: Arc::new(shared) })
    }

    /// Labels of the daemon's devices, the default first.
    pub fn devices(&self) -> Vec<String> {
        self.shared.devices.iter().map(|device| field_text(&device.label)).collect()
    }

    /// The device with this label, `host` or `cuda:N`.
    pub fn device(&self, label: &str) -> Result<Device> {
        let found = self.shared.devices.iter().find(|device| field_text(&device.label) == label);
        found.map(|device| Device::Uuid(device.uuid)).ok_or_else(|| {
            let message = format!("this mount does not serve {label}; it serves {}", self.devices().join(", "));
            Failure::new(Code::NoDevice, message)
        })
    }

    /// Takes the device's context now, so that the first [`Session::open`] does not have to.
    pub fn prepare(&self, device: Device) -> Result<()> {
        let uuid = match device {
            Device::Default => self.shared.devices.first().ok_or_else(nonsense)?.uuid,
            Device::Uuid(uuid) => uuid,
        };
        self.shared.importer(uuid).map(drop)
    }

    /// The file at `path` in the default device's memory, loaded now if it is not there.
    pub fn open(&self, path: &Path) -> Result<Buffer> {
        self.open_file(&ask::open(path)?, path, Device::Default, &mut |_| {})
    }

    /// The same for an open file of the mount, on `device`; `watch` hears about once a second how far the load is.
    pub fn open_file(
        &self,
        file: &File,
        path: &Path,
        device: Device,
        watch: &mut dyn FnMut(Progress),
    ) -> Result<Buffer> {
        let mut tries = 0;
        loop {
            let granted = ask::materialize(file, path, &self.shared.secret, device, watch)?;
            let (offset, length, generation) = (granted.data_offset, granted.data_length, granted.generation);
            if granted.allocation == 0 {
                return Ok(Buffer::new(None, offset, length, generation));
            }
            match self.shared.enter(granted.allocation) {
                Ok((mapping, importer)) => {
                    let (shared, allocation) = (Arc::clone(&self.shared), granted.allocation);
                    let lease = Lease { shared, allocation, mapping: Some(mapping), importer };
                    return Ok(Buffer::new(Some(lease), offset, length, generation));
                }
                // It lapsed between the two steps (this process was stopped, say): once more.
                Err(failure) if failure.code == Code::NotHeld && tries < 3 => tries += 1,
                Err(failure) => return Err(failure.within(path.display())),
            }
        }
    }
}

/// One buffer's share of a mapped allocation.
pub(super) struct Lease {
    shared: Arc<Shared>,
    allocation: u64,
    /// There until the drop.
    mapping: Option<Arc<dyn Mapping>>,
    pub(super) importer: Arc<dyn Importer>,
}

impl Lease {
    pub(super) fn mapping(&self) -> &dyn Mapping {
        &**self.mapping.as_ref().expect("there until the drop")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // First ours, so that the table's is the last: what is given back must not be mapped any more.
        self.mapping = None;
        self.shared.leave(self.allocation);
    }
}

impl Shared {
    /// Counts one more grant of `allocation`, and maps it where it is not mapped yet.
    fn enter(&self, allocation: u64) -> Result<(Arc<dyn Mapping>, Arc<dyn Importer>)> {
        // Held while it is mapped, so that two threads do not map it twice.
        let mut mapped = self.mapped.lock();
        if let Some(known) = mapped.get_mut(&allocation) {
            known.users += 1;
            known.grants += 1;
            return Ok((Arc::clone(&known.mapping), Arc::clone(&known.importer)));
        }
        match self.map(allocation) {
            Ok((mapping, importer)) => {
                let entry =
                    Mapped { mapping: Arc::clone(&mapping), importer: Arc::clone(&importer), users: 1, grants: 1 };
                mapped.insert(allocation, entry);
                Ok((mapping, importer))
            }
            Err(failure) => {
                let _ = self.give_back(allocation, 1);
                Err(failure)
            }
        }
    }

    fn map(&self, allocation: u64) -> Result<(Arc<dyn Mapping>, Arc<dyn Importer>)> {
        let reply = self.connection.lock().ask(kind::FETCH, &Fetch { allocation }.encode())?;
        let fetched = FetchReply::decode(&reply.body).filter(|fetched| fetched.allocation == allocation);
        let fetched = fetched.ok_or_else(nonsense)?;
        let descriptor = reply.descriptors.first().ok_or_else(nonsense)?;
        let importer = self.importer(fetched.device)?;
        let mapping = importer.map(descriptor.as_fd(), fetched.size, Access::ReadOnly)?;
        Ok((Arc::from(mapping), importer))
    }

    fn importer(&self, uuid: DeviceUuid) -> Result<Arc<dyn Importer>> {
        let mut importers = self.importers.lock();
        if let Some(known) = importers.get(&uuid) {
            return Ok(Arc::clone(known));
        }
        let entry = self.devices.iter().find(|device| device.uuid == uuid).ok_or_else(nonsense)?;
        let kind = DeviceKind::from_number(entry.kind).ok_or_else(nonsense)?;
        let importer = device::importer(&uuid, kind)?;
        importers.insert(uuid, Arc::clone(&importer));
        Ok(importer)
    }

    /// One buffer less. With the last one the allocation is unmapped, and only then given back.
    fn leave(&self, allocation: u64) {
        let mut mapped = self.mapped.lock();
        let Some(entry) = mapped.get_mut(&allocation) else { return };
        entry.users -= 1;
        if entry.users > 0 {
            return;
        }
        let entry = mapped.remove(&allocation).expect("found just now");
        // The last reference: this unmaps.
        let grants = entry.grants;
        drop(entry);
        drop(mapped);
        let _ = self.give_back(allocation, grants);
    }

    fn give_back(&self, allocation: u64, grants: u64) -> Result<()> {
        let release = Release { allocation, grants };
        self.connection.lock().ask(kind::RELEASE, &release.encode()).map(drop)
    }
}

impl Connection {
    /// Sends one message and receives its answer.
    fn ask(&mut self, kind: u16, body: &[u8]) -> Result<Frame> {
        self.last_id += 1;
        let gone = |failure: Failure| Failure::new(Code::NotRunning, format!("the daemon does not answer: {failure}"));
        let sent = socket::send(&self.socket, kind, self.last_id, body, &[]);
        let closed = || Failure::new(Code::NotRunning, "the daemon closed the connection");
        let frame = loop {
            // Also where it could not be sent: a daemon that hangs up has said why.
            let frame = socket::receive(&self.socket, Instant::now() + PATIENCE);
            let frame = match (frame, &sent) {
                (Ok(Some(frame)), _) => frame,
                (_, Err(failure)) => return Err(gone(failure.clone())),
                (Err(failure), Ok(())) => return Err(gone(failure)),
                (Ok(None), Ok(())) => return Err(closed()),
            };
            // The late answer to a request that was given up, unless it is about the connection itself.
            if frame.id == self.last_id || frame.id == 0 {
                break frame;
            }
        };
        if frame.kind == kind::ERROR {
            let error = ErrorReply::decode(&frame.body).ok_or_else(nonsense)?;
            let code = Code::from_number(error.code).ok_or_else(nonsense)?;
            let message = String::from_utf8_lossy(&frame.body[ErrorReply::SIZE..]).into_owned();
            return Err(Failure { code, errno: error.errno, message });
        }
        if frame.kind != kind | kind::REPLY {
            return Err(nonsense());
        }
        Ok(frame)
    }
}

fn nonsense() -> Failure {
    Failure::new(Code::BadRequest, "the daemon's answer makes no sense to this version of warpfs")
}
