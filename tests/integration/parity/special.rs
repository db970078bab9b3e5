//! What is more than a file: pipes, sockets and devices by name, and programs that are run.

use super::process::{child, soon};
use super::stage::{Case, case, root_case, see};
use super::sys::*;
use crate::harness::{DEADLINE, end, run};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

fn failed<T>(result: std::io::Result<T>) -> R<()> {
    result.map(|_| ()).map_err(Errno::from)
}

/// A copy of a program, made by another process: nobody here has it open for writing when it is run.
fn program(of: &str, name: &str) {
    run(Command::new("cp").args([of, name])).ok();
}

fn output(command: &mut Command) -> R<String> {
    let done = command.stdin(Stdio::null()).output()?;
    Ok(format!(
        "{:?} {}{}",
        done.status.code(),
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr)
    ))
}

pub const CASES: &[Case] = &[
    case("a pipe between processes", |s| {
        mknod("p", libc::S_IFIFO | 0o600, 0).expect("made");
        see!(s; open("p", WRONLY | libc::O_NONBLOCK));
        let mut writer = child(&[], || match open("p", WRONLY).and_then(|p| write(&p, b"through the pipe")) {
            Ok(16) => 0,
            other => other.map_or_else(|e| e.0, |_| 1),
        });
        let reader = open("p", RDONLY).expect("opened");
        see!(s; writer.wait(); read(&reader, 99); read(&reader, 99); lstat("p").map(|p| (p.mode, p.size)));
        let both = open("p", RDWR | libc::O_NONBLOCK).expect("opened");
        see!(s; read(&both, 1); write(&both, b"x"); read(&reader, 5); lseek(&both, 0, 0); pread(&both, 1, 0));
        see!(s; fstat(&both).map(|p| p.mode));
        see!(s; fchmod(&both, 0o640); mode("p"); unlink("p"); write(&both, b"y"); read(&both, 5));
    }),
    case("sockets by name", |s| {
        let listener = UnixListener::bind("s").expect("bound");
        see!(s; lstat("s").map(|s| s.mode & libc::S_IFMT); failed(UnixListener::bind("s")); open("s", RDONLY));
        see!(s; open("s", libc::O_PATH));
        let client = UnixStream::connect("s").map_err(Errno::from);
        see!(s; client.is_ok(); listener.accept().map(|_| ()).map_err(Errno::from); rename("s", "t"));
        see!(s; failed(UnixStream::connect("t")));
        see!(s; failed(UnixStream::connect("s")); link("t", "u"); failed(UnixStream::connect("u")); chmod("t", 0o600));
        see!(s; mode("u"));
        drop(listener);
        // Who was started meanwhile by another test has it until it runs its program.
        let refused = || match failed(UnixStream::connect("t")) {
            Ok(()) => Err(Errno(libc::EAGAIN)),
            other => Ok(other),
        };
        see!(s; soon(refused); unlink("t"); failed(UnixStream::connect("t")));
        let datagrams = UnixDatagram::bind("d").expect("bound");
        let sender = UnixDatagram::unbound().expect("made");
        let mut buffer = [0; 9];
        see!(s; sender.send_to(b"hello", "d").map_err(Errno::from); datagrams.recv(&mut buffer).map_err(Errno::from));
        see!(s; Bytes(buffer.to_vec()));
        see!(s; failed(UnixStream::connect("d")); file("f", b"x"); failed(UnixStream::connect("f")));
    }),
    root_case("devices by name", |s| {
        let null = libc::makedev(1, 3);
        see!(s; mknod("null", libc::S_IFCHR | 0o666, null); lstat("null"); access("null", libc::W_OK));
        see!(s; open("null", RDWR).map(|null| write(&null, b"x")));
    }),
    case("programs are run", |s| {
        program("/bin/echo", "echo");
        see!(s; output(Command::new("./echo").arg("hello")); chmod("echo", 0o644); output(&mut Command::new("./echo")));
        see!(s; chmod("echo", 0o755));
        for (name, content) in [
            ("script", "#!/bin/sh\necho script $1\n"),
            ("own", "#!./echo from\n"),
            ("none", "#!/none\n"),
            ("empty", ""),
            ("long", "#!/bin/sh -e\nexit 3\n"),
        ] {
            run(Command::new("sh").args(["-c", &format!("printf '%s' '{content}' >{name}; chmod 755 {name}")])).ok();
            see!(s; (name, output(Command::new(format!("./{name}")).arg("argument"))));
        }
        mkdir("d", 0o755).expect("made");
        symlink("echo", "l").expect("made");
        see!(s; output(&mut Command::new("./d")); output(Command::new("./l").arg("by link")); unlink("echo"));
        see!(s; output(&mut Command::new("./l")));
    }),
    case("a running program is not written to", |s| {
        program("/bin/sleep", "sleep");
        let mut sleeper = Command::new("./sleep").arg("30").stdin(Stdio::null()).spawn().expect("started");
        see!(s; open("sleep", WRONLY); open("sleep", RDWR); open("sleep", RDONLY); truncate("sleep", 0));
        see!(s; open("sleep", WRONLY | libc::O_TRUNC));
        see!(s; rename("sleep", "moved"); unlink("moved"));
        sleeper.kill().expect("killed");
        see!(s; end(&mut sleeper, DEADLINE).is_some());
        program("/bin/true", "true");
        let writer = open("true", WRONLY).expect("opened");
        see!(s; output(&mut Command::new("./true")));
        drop(writer);
        // Another thread that forks at this moment holds the descriptor until its child has run its program.
        let mut result = output(&mut Command::new("./true"));
        for _ in 0..200 {
            if result == Err(Errno(libc::ETXTBSY)) {
                std::thread::sleep(std::time::Duration::from_millis(10));
                result = output(&mut Command::new("./true"));
            }
        }
        see!(s; result);
    }),
    case("a program that is here runs from its descriptor", |s| {
        program("/bin/echo", "echo");
        let echo = open("echo", libc::O_PATH).expect("opened");
        see!(s; output(Command::new(echo.path()).arg0("echo").arg("by descriptor")); unlink("echo"));
    }),
];
