//! Where the daemon's words go: stderr in the foreground, the system's log in the background. `WARPFS_LOG` filters, in
//! the syntax of tracing's EnvFilter.

use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixDatagram;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// What is logged where `WARPFS_LOG` says nothing: our own notes, and only warnings of the libraries.
const DEFAULT_FILTER: &str = "warn,warpfs=info";

/// Starts logging, to the system's log or else to stderr. Called once in a process.
pub fn start(background: bool) {
    let filter = EnvFilter::try_from_env("WARPFS_LOG").unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_target(false);
    // fuser speaks to the `log` crate; without this its warnings would be lost.
    let started = if background {
        builder.without_time().with_ansi(false).with_writer(Syslog::connect()).try_init()
    } else {
        builder.with_ansi(io::stderr().is_terminal()).with_writer(io::stderr).try_init()
    };
    started.expect("logging is started once");
}

/// The system's log, if it listens at `/dev/log`; else words are lost, as there is no terminal to write to.
struct Syslog {
    socket: Option<UnixDatagram>,
}

impl Syslog {
    fn connect() -> Syslog {
        let socket = UnixDatagram::unbound().and_then(|socket| {
            socket.connect("/dev/log")?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        });
        Syslog { socket: socket.ok() }
    }
}

impl<'a> MakeWriter<'a> for Syslog {
    type Writer = Entry<'a>;

    fn make_writer(&'a self) -> Entry<'a> {
        // facility daemon (3), severity info (6); the level itself is in the text.
        let head = format!("<{}>warpfs[{}]: ", 3 * 8 + 6, std::process::id());
        Entry { socket: self.socket.as_ref(), text: head.into_bytes() }
    }
}

/// One entry, sent when it is complete.
struct Entry<'a> {
    socket: Option<&'a UnixDatagram>,
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
        if let Some(socket) = self.socket {
            let _ = socket.send(self.text.trim_ascii_end());
        }
    }
}
