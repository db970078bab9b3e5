//! What went wrong, in the one shape that travels from the place where it happened to the person who reads it: a stable
//! code, the system's errno and a sentence that names the file, what was tried, why it failed and what to do.

use crate::protocol::Code;
use std::fmt;

/// One failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: Code,
    /// The errno that a system call on the mount returns for this failure, positive.
    pub errno: i32,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure with its code's usual errno.
    pub fn new(code: Code, message: impl Into<String>) -> Failure {
        Failure { code, errno: usual_errno(code), message: message.into() }
    }

    /// A failed system call on `what`: its code follows from the errno.
    pub fn system(what: impl fmt::Display, error: impl Into<std::io::Error>) -> Failure {
        let error = error.into();
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        let code = match errno {
            libc::ENOENT | libc::ENOTDIR => Code::NotFound,
            libc::EACCES | libc::EPERM => Code::Permission,
            libc::EISDIR => Code::NotRegular,
            libc::ENOMEM => Code::OutOfMemory,
            _ => Code::Io,
        };
        Failure { code, errno, message: format!("{what}: {}", describe(errno)) }
    }

    /// The same failure with `context` (a file, a step) before its message.
    pub fn within(mut self, context: impl fmt::Display) -> Failure {
        self.message = format!("{context}: {}", self.message);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// The system's own words for an errno, without the number.
pub fn describe(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    match text.rfind(" (os error") {
        Some(end) => text[..end].to_string(),
        None => text,
    }
}

/// The errno that stands for a code where no system call gave one.
pub fn usual_errno(code: Code) -> i32 {
    match code {
        Code::NotFound => libc::ENOENT,
        Code::Permission | Code::BadSession => libc::EACCES,
        Code::NotRegular => libc::EINVAL,
        Code::TooLarge => libc::EFBIG,
        Code::OutOfMemory => libc::ENOMEM,
        Code::Changing => libc::EAGAIN,
        Code::Io | Code::Loader | Code::Device => libc::EIO,
        Code::NoDevice => libc::ENODEV,
        Code::BadRequest => libc::EINVAL,
        Code::WrongVersion => libc::EPROTO,
        Code::NotReadable => libc::EBADF,
        Code::Unsupported => libc::EOPNOTSUPP,
        Code::Stopping => libc::ESHUTDOWN,
        Code::NotHeld => libc::ENOLCK,
        Code::NotRunning => libc::ECONNREFUSED,
        Code::NotWarpfs => libc::ENOTTY,
    }
}
