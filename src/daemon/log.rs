//! Where the daemon's words go: stderr in the foreground, the system's log in the background. That is the socket
//! `/dev/log`, at which journald listens as every syslogd does, so that one way serves both. `WARPFS_LOG` filters, in the
//! syntax of tracing's EnvFilter.

use crate::failure::Failure;
use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixDatagram;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// What is logged where `WARPFS_LOG` says nothing: our own notes, and only warnings of the libraries.
const DEFAULT_FILTER: &str = "warn,warpfs=info";
/// Where every syslogd listens, and journald.
const DEV_LOG: &str = "/dev/log";
/// Facility "daemon" of syslog(3), where it stands in a priority.
const FACILITY: u8 = 3 << 3;

/// Starts logging, to the system's log or else to stderr. Called once in a process. What the user should hear about it:
/// that the words go nowhere, or that the filter is none.
pub fn start(background: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let filter = match std::env::var("WARPFS_LOG").ok().filter(|filter| !filter.is_empty()) {
        None => EnvFilter::new(DEFAULT_FILTER),
        Some(wanted) => EnvFilter::try_new(&wanted).unwrap_or_else(|e| {
            notes.push(format!("WARPFS_LOG={wanted} is no filter ({e}); it is ignored"));
            EnvFilter::new(DEFAULT_FILTER)
        }),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_target(false);
    // fuser speaks to the `log` crate; without this its warnings would be lost.
    let started = if background {
        let syslog = Syslog::new();
        if let Err(e) = syslog.connect() {
            let why = Failure::system(DEV_LOG, e);
            notes.push(format!("nothing is logged until a syslogd listens ({why}); --foreground logs to stderr"));
        }
        // The level stays in the text, because a syslogd's usual file does not show the severity.
        builder.without_time().with_ansi(false).with_writer(syslog).try_init()
    } else {
        builder.with_ansi(io::stderr().is_terminal()).with_writer(io::stderr).try_init()
    };
    started.expect("logging is started once");
    if background {
        // The usual words go to stderr, which is not there.
        std::panic::set_hook(Box::new(|panic| {
            tracing::error!(thread = std::thread::current().name(), "{panic}");
        }));
    }
    notes
}

/// The system's log. Words are lost while nobody listens, as there is no terminal to write to.
struct Syslog {
    /// Nothing where no socket could be had at all.
    socket: Option<UnixDatagram>,
}

impl Syslog {
    fn new() -> Syslog {
        let socket = UnixDatagram::unbound();
        Syslog { socket: socket.and_then(|socket| socket.set_nonblocking(true).map(|()| socket)).ok() }
    }

    fn connect(&self) -> io::Result<()> {
        let socket = self.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        socket.connect(DEV_LOG)
    }

    fn send(&self, entry: &[u8]) {
        let Some(socket) = &self.socket else { return };
        match socket.send(entry) {
            Ok(_) => {}
            // Its queue is full: the daemon does not wait for a log.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            // A syslogd that was restarted listens on another socket.
            Err(_) => drop(self.connect().and_then(|()| socket.send(entry))),
        }
    }

    /// The head of an entry, as syslog(3) writes it; its time is when it arrives.
    fn entry(&self, level: Level) -> Entry<'_> {
        let severity = match level {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        let head = format!("<{}>warpfs[{}]: ", FACILITY | severity, std::process::id());
        Entry { syslog: self, text: head.into_bytes() }
    }
}

impl<'a> MakeWriter<'a> for Syslog {
    type Writer = Entry<'a>;

    fn make_writer(&'a self) -> Entry<'a> {
        self.entry(Level::INFO)
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Entry<'a> {
        self.entry(*meta.level())
    }
}

/// One entry, sent when it is complete.
struct Entry<'a> {
    syslog: &'a Syslog,
    text: Vec<u8>,
}

impl Write for Entry<'_> {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.syslog.send(self.text.trim_ascii_end());
    }
}
