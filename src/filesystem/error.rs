//! Every failure to one errno, in one place. The errno of the source comes through unchanged: a full disk is ENOSPC and
//! a name that is too long is ENAMETOOLONG on the mount too. Called where a result becomes a reply.

use crate::failure::Failure;
use fuser::Errno;

/// The result of an operation on the source.
pub(crate) type Result<T> = std::result::Result<T, rustix::io::Errno>;

/// What can end an operation.
pub(crate) trait Reason {
    fn errno(&self) -> Errno;
}

impl Reason for rustix::io::Errno {
    fn errno(&self) -> Errno {
        Errno::from_i32(self.raw_os_error())
    }
}

/// The errno by which a caller that can be told nothing else learns of `failure`; the sentence goes to the log.
pub(crate) fn only_errno(failure: &Failure) -> rustix::io::Errno {
    tracing::debug!(code = ?failure.code, "{failure}");
    rustix::io::Errno::from_raw_os_error(if failure.errno > 0 { failure.errno } else { libc::EIO })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Code;

    #[test]
    fn errnos_come_through_unchanged() {
        for errno in [libc::ENOSPC, libc::EDQUOT, libc::EIO, libc::EROFS, libc::ENAMETOOLONG, libc::ESTALE] {
            assert_eq!(rustix::io::Errno::from_raw_os_error(errno).errno().code(), errno);
            let failure = Failure::system("f", rustix::io::Errno::from_raw_os_error(errno));
            assert_eq!(only_errno(&failure).errno().code(), errno);
        }
    }

    #[test]
    fn a_failure_without_an_errno_is_an_input_output_error() {
        let failure = Failure { code: Code::Io, errno: 0, message: String::new() };
        assert_eq!(only_errno(&failure).errno().code(), libc::EIO);
    }
}
