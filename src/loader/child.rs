//! The loader process: it owns the device's context and the ring, and does what it is told over the socket that it
//! inherited. It must outlive neither the daemon nor a context that is lost, and never touch a file but through the
//! descriptors it is given. Run by the hidden subcommand `loader`.

use super::destination;
use super::packet::{self, Packet};
use crate::device;
use crate::failure::{Failure, Result};
use crate::protocol::{
    Code, DeviceKind, DeviceUuid, ErrorReply, FallbackDone, HOST_UUID, LOAD_PARTS, LoadDone, LoadId, LoadJob, LoadPart,
    LoadProgress, LoaderReady, Note, PROTOCOL_VERSION, PartDone, RouteDone, SlabId, Wire, loader_kind,
};
use crate::transfer::gds::route::Straight;
use crate::transfer::{Ended, Engine, Load, Options, Part, Request, Wanted};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The device is lost to the process: a new one may have it again.
pub const EXIT_LOST: i32 = 3;
/// The loader could not begin, and has said why.
pub const EXIT_FAILED: i32 = 1;

/// How often a load's progress is told at most, and how late a lost device is noticed.
const TICK: Duration = Duration::from_millis(50);

/// Bytes of a part's text at most, where there are several: all of them have to fit into one packet.
const TEXT: usize = 300;

/// What the subcommand is given: `loader --socket-fd N --device LABEL --uuid HEX`, and what [`words`] makes of the options.
#[derive(Clone, Debug)]
pub struct Arguments {
    /// An inherited SOCK_SEQPACKET socket, which `run` takes for itself.
    pub socket: RawFd,
    /// `host` or `cuda:N`, for people who look at the list of processes.
    pub device: String,
    pub uuid: DeviceUuid,
    pub options: Options,
}

impl Arguments {
    /// Reads the words after `loader`.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Arguments> {
        let wrong = |what: &str| Failure::new(Code::BadRequest, format!("loader: {what}"));
        let number = |value: &str| value.parse::<usize>().map_err(|_| wrong(&format!("{value} is no number")));
        let (mut socket, mut device, mut uuid) = (None, None, None);
        let mut options = Options::default();
        let mut words = words.into_iter();
        while let Some(flag) = words.next() {
            match flag.as_str() {
                "--synchronous" => {
                    options.asynchronous = false;
                    continue;
                }
                "--gds-compat" => {
                    options.gds_compat = true;
                    continue;
                }
                _ => {}
            }
            let value = words.next().ok_or_else(|| wrong(&format!("{flag} needs a value")))?;
            match flag.as_str() {
                "--socket-fd" => socket = Some(value.parse().map_err(|_| wrong("--socket-fd is no descriptor"))?),
                "--device" => device = Some(value),
                "--uuid" => uuid = Some(device::parse_hex(&value).ok_or_else(|| wrong("--uuid is no UUID"))?),
                "--readers" => options.readers = number(&value)?,
                "--slot-size" => options.slot_size = number(&value)?,
                "--slots" => options.slots = number(&value)?,
                "--route" => options.route = value.parse().map_err(|why: String| wrong(&why))?,
                "--gds-threshold" => options.gds_threshold = number(&value)? as u64,
                _ => return Err(wrong(&format!("unknown flag {flag}"))),
            }
        }
        Ok(Arguments {
            socket: socket.ok_or_else(|| wrong("--socket-fd is missing"))?,
            device: device.ok_or_else(|| wrong("--device is missing"))?,
            uuid: uuid.ok_or_else(|| wrong("--uuid is missing"))?,
            options,
        })
    }
}

/// The options as the subcommand takes them. `--synchronous` is for tests alone: where io_uring is refused, nobody has to
/// say so.
pub fn words(options: &Options) -> Vec<String> {
    let Options { readers, slot_size, slots, asynchronous, route, gds_threshold, gds_compat } = *options;
    let pairs = [
        ("--readers", readers.to_string()),
        ("--slot-size", slot_size.to_string()),
        ("--slots", slots.to_string()),
        ("--route", route.word().to_string()),
        ("--gds-threshold", gds_threshold.to_string()),
    ];
    let mut words: Vec<String> = pairs.into_iter().flat_map(|(flag, value)| [flag.to_string(), value]).collect();
    words.extend((!asynchronous).then(|| "--synchronous".to_string()));
    words.extend(gds_compat.then(|| "--gds-compat".to_string()));
    words
}

/// What the subcommand's libraries are told. cuFile writes a log into whatever directory it finds itself in, unless somebody
/// said where.
pub fn environment() -> Vec<(String, String)> {
    const LOG: &str = "CUFILE_LOGFILE_PATH";
    if std::env::var_os(LOG).is_some() { Vec::new() } else { vec![(LOG.into(), "/dev/null".into())] }
}

/// The life of a loader: it ends the process, and without exit handlers, for those of the libraries would meet threads and
/// contexts that are gone (kvikio 497).
pub fn run(arguments: &Arguments) -> ! {
    vanish(live(arguments))
}

fn live(arguments: &Arguments) -> i32 {
    settle(arguments);
    // SAFETY: the descriptor was inherited for this purpose, and nothing else in this process uses the number. If it is not
    // open, the first call on it says so.
    let socket = Arc::new(unsafe { OwnedFd::from_raw_fd(arguments.socket) });
    if rustix::io::fcntl_setfd(&*socket, rustix::io::FdFlags::CLOEXEC).is_err() {
        eprintln!("warpfs loader: --socket-fd {} is not open", arguments.socket);
        return EXIT_FAILED;
    }
    match start(arguments, &socket) {
        Ok(engine) => {
            let ready = LoaderReady { version: PROTOCOL_VERSION, pid: std::process::id() };
            if packet::send(socket.as_fd(), loader_kind::READY, &ready, "", true).is_err() {
                return EXIT_FAILED;
            }
            Child { socket, engine, loads: Arc::default(), told: Instant::now() }.serve()
        }
        Err(failure) => {
            let reply = ErrorReply { code: failure.code as u32, errno: failure.errno };
            let _ = packet::send(socket.as_fd(), loader_kind::FAILED, &reply, &failure.message, true);
            EXIT_FAILED
        }
    }
}

/// The process's own affairs: signals, limits, its name.
fn settle(arguments: &Arguments) {
    // A terminal sends Ctrl-C and hang-ups to the daemon's whole group; the daemon decides when its loaders end.
    for signal in [libc::SIGINT, libc::SIGHUP] {
        // SAFETY: ignoring a signal runs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // Also one that is stopped, or waits for a disk, ends with its daemon.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // What the daemon keeps from its own threads must reach this process.
    // SAFETY: an empty set, initialised by sigemptyset; the mask of this thread, the only one yet, is ours to change.
    unsafe {
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
    // A descriptor that the driver made in the daemon, just before this process was started, would keep its memory.
    let first = arguments.socket.max(2) as u32 + 1;
    // SAFETY: nothing in this process has opened a descriptor above the standard ones and the socket yet.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0_u32) };
    // Every load holds two descriptors.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
    let name = format!("loader {}", arguments.device);
    if let Ok(name) = std::ffi::CString::new(name.as_bytes().get(..15).unwrap_or(name.as_bytes())) {
        let _ = rustix::thread::set_name(&name);
    }
    // A reader that panics would leave its load without an end: let the daemon see that the process is gone.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        vanish(101);
    }));
}

fn start(arguments: &Arguments, socket: &Arc<OwnedFd>) -> Result<Engine> {
    let kind = if arguments.uuid == HOST_UUID { DeviceKind::Host } else { DeviceKind::Cuda };
    let importer = device::importer(&arguments.uuid, kind)?;
    let straight = (kind == DeviceKind::Cuda && arguments.options.route != Wanted::Posix).then(|| {
        let socket = Arc::clone(socket);
        let note = Box::new(move |text: &str| {
            let note = Note { reserved: 0 };
            // A daemon that is gone is noticed elsewhere.
            let _ = packet::send(socket.as_fd(), loader_kind::NOTE, &note, text, true);
        });
        Straight::new(&arguments.options, Arc::clone(&importer), arguments.uuid, note)
    });
    Engine::start_with(importer, arguments.options, straight)
}

/// One part of a load.
struct Running {
    load: Arc<Load>,
    part: usize,
    told: u64,
}

struct Child {
    socket: Arc<OwnedFd>,
    engine: Engine,
    /// What is queued or under way, by the daemon's number.
    loads: Arc<Mutex<HashMap<u64, Running>>>,
    /// When the progress of all that was looked at: not for each packet, for there may be thousands.
    told: Instant,
}

impl Child {
    fn serve(mut self) -> i32 {
        loop {
            if self.engine.is_lost() {
                // What has begun says how it went; what has not is the next process's.
                self.engine.finish();
                return EXIT_LOST;
            }
            if let Err(e) = self.wait() {
                eprintln!("warpfs loader: cannot wait: {e}");
                return EXIT_FAILED;
            }
            if self.told.elapsed() >= TICK {
                self.tell();
                self.told = Instant::now();
            }
            match packet::receive(self.socket.as_fd(), false) {
                Ok(Some(packet)) => self.handle(packet),
                Ok(None) => return self.leave(),
                Err(rustix::io::Errno::AGAIN) => {}
                Err(e) => {
                    // A job that came without its descriptors has no end otherwise.
                    eprintln!("warpfs loader: cannot receive: {e}");
                    return EXIT_FAILED;
                }
            }
        }
    }

    /// Until something comes, or, while there are loads, for a tick.
    fn wait(&self) -> rustix::io::Result<()> {
        let tick = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        let idle = self.loads.lock().is_empty();
        match poll(&mut [PollFd::new(&*self.socket, PollFlags::IN)], if idle { None } else { Some(&tick) }) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// The daemon sends no more: finish, unless it is gone altogether.
    fn leave(mut self) -> i32 {
        let mut ends = [PollFd::new(&*self.socket, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let gone = poll(&mut ends, Some(&now)).is_ok() && ends[0].revents().contains(PollFlags::HUP);
        if gone {
            // Nobody waits for the loads; their memory goes with the daemon's and ours.
            vanish(0);
        }
        self.engine.finish();
        if self.engine.is_lost() { EXIT_LOST } else { 0 }
    }

    fn handle(&self, packet: Packet) {
        match packet.kind {
            loader_kind::LOAD => self.load(packet),
            loader_kind::CANCEL => {
                if let Some((LoadId { id }, _)) = packet.body()
                    && let Some(running) = self.loads.lock().get(&id)
                {
                    running.load.cancel(running.part);
                }
            }
            loader_kind::FORGET => {
                if let Some((slab, _)) = packet.body::<SlabId>() {
                    self.engine.forget(slab.slab);
                    if packet::send(self.socket.as_fd(), loader_kind::FORGOTTEN, &slab, "", true).is_err() {
                        vanish(0);
                    }
                }
            }
            // Both ends are the same program: this cannot happen, and hurts nobody.
            kind => eprintln!("warpfs loader: unknown message {kind}"),
        }
    }

    fn load(&self, packet: Packet) {
        let Some((job, wanted)) = read_job(&packet) else {
            eprintln!("warpfs loader: a job that makes no sense");
            return;
        };
        let ids: Vec<u64> = wanted.iter().map(|part| part.id).collect();
        let mut descriptors = packet.descriptors.into_iter();
        let allocation = descriptors.next().filter(|_| descriptors.len() == wanted.len());
        let Some(allocation) = allocation else {
            done(&self.socket, &ids, failed(&ids, "a job needs a descriptor for its memory and one for each part"));
            return;
        };
        let part = |(p, file): (LoadPart, OwnedFd)| Part { file, offset: p.offset, length: p.length, place: p.place };
        let coming = job.coming != 0;
        let request = Request {
            allocation: Box::new(move || if coming { destination::wait_for(&allocation) } else { Ok(allocation) }),
            allocation_size: job.allocation_size,
            slab: (job.slab != 0).then_some(job.slab),
            parts: wanted.into_iter().zip(descriptors).map(part).collect(),
        };
        // Held until the load is in the table, so that its end finds it there.
        let mut loads = self.loads.lock();
        let (socket, table) = (Arc::clone(&self.socket), Arc::clone(&self.loads));
        let numbers = ids.clone();
        let over = Box::new(move |ended| {
            let mut table = table.lock();
            numbers.iter().for_each(|id| drop(table.remove(id)));
            drop(table);
            done(&socket, &numbers, ended);
        });
        match self.engine.submit(request, over) {
            Ok(load) => {
                let running = |part| Running { load: Arc::clone(&load), part, told: 0 };
                loads.extend(ids.into_iter().enumerate().map(|(part, id)| (id, running(part))));
            }
            Err(failure) => done(&self.socket, &ids, failed(&ids, &failure.message)),
        }
    }

    /// Tells the progress that was not told yet.
    fn tell(&self) {
        for (id, running) in self.loads.lock().iter_mut() {
            let loaded = running.load.loaded(running.part);
            if loaded != running.told {
                let progress = LoadProgress { id: *id, loaded };
                // A full socket: the next tick says it.
                if packet::send(self.socket.as_fd(), loader_kind::PROGRESS, &progress, "", false).is_ok() {
                    running.told = loaded;
                }
            }
        }
    }
}

/// A job and its parts; `None` where the packet is cut short or names too many.
fn read_job(packet: &Packet) -> Option<(LoadJob, Vec<LoadPart>)> {
    let mut rest = packet.rest();
    let job: LoadJob = packet::take(&mut rest)?;
    let parts = usize::try_from(job.parts).ok().filter(|parts| *parts <= LOAD_PARTS)?;
    let parts = (0..parts).map(|_| packet::take(&mut rest)).collect::<Option<Vec<LoadPart>>>()?;
    Some((job, parts))
}

/// A load that could not begin.
fn failed(ids: &[u64], why: &str) -> Ended {
    let failure = Failure::new(Code::BadRequest, why);
    Ended { parts: ids.iter().map(|_| Err(failure.clone())).collect(), report: Default::default() }
}

fn done(socket: &OwnedFd, ids: &[u64], ended: Ended) {
    let Ended { parts, report } = ended;
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let (routes, fallbacks) = (report.routes.len() as u32, report.fallbacks.len() as u32);
    let mut body = LoadDone { routes, fallbacks, parts: ids.len() as u32, reserved: 0 }.encode();
    for work in report.routes {
        let (operations, bytes, errors) = (work.operations, work.bytes, work.errors);
        let route = RouteDone { operations, bytes, nanoseconds: nanoseconds(work.busy), errors };
        body.extend(route.encode());
    }
    for count in report.fallbacks {
        body.extend(FallbackDone { count }.encode());
    }
    let limit = if ids.len() == 1 { usize::MAX } else { TEXT };
    let mut texts = String::new();
    for (id, part) in ids.iter().zip(parts) {
        let mut done = PartDone { id: *id, ..PartDone::zeroed() };
        match part {
            Ok(loaded) => {
                [done.buffered, done.direct, done.gds, done.cufile] = loaded.bytes;
                done.nanoseconds = nanoseconds(loaded.duration);
            }
            Err(failure) => {
                (done.code, done.errno) = (failure.code as u32, failure.errno);
                let mut end = failure.message.len().min(limit);
                while !failure.message.is_char_boundary(end) {
                    end -= 1;
                }
                done.text = end as u64;
                texts.push_str(&failure.message[..end]);
            }
        }
        body.extend(done.encode());
    }
    body.extend(texts.bytes());
    if packet::send_bytes(socket.as_fd(), loader_kind::DONE, &body, &[], true).is_err() {
        // The daemon is gone, and nobody is left to work for.
        vanish(0);
    }
}

/// Ends the process while its readers work: without exit handlers, for the driver's would pull the context from under
/// running copies. The system takes everything back.
fn vanish(status: i32) -> ! {
    // SAFETY: it does not return, and nothing of this process is needed after it.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_subcommand() {
        let words = |text: &str| text.split(' ').map(str::to_string).collect::<Vec<_>>();
        let hex = "7761727066732d686f73742d6d656d00";
        let good = format!("--socket-fd 0 --device host --uuid {hex} --readers 2");
        let arguments = Arguments::parse(words(&good)).expect("complete");
        assert_eq!((arguments.socket, arguments.uuid, arguments.options.readers), (0, HOST_UUID, 2));
        let all = Options {
            readers: 3,
            slot_size: 5,
            slots: 7,
            asynchronous: false,
            route: crate::transfer::Wanted::Gds,
            gds_threshold: 9,
            gds_compat: true,
        };
        let both = [words(&good), super::words(&all)].concat();
        assert_eq!(Arguments::parse(both).expect("complete").options, all, "what is written is read");
        for wrong in ["--socket-fd 0", "--socket-fd", "--what 1", "--socket-fd x --device host", "--uuid 12"] {
            assert_eq!(Arguments::parse(words(wrong)).expect_err(wrong).code, Code::BadRequest);
        }
    }
}
