//! What the kernel offers: FUSE and its passthrough, io_uring, cachestat. A call that a check is about is made, since a
//! container may refuse what the kernel has. Called by `examine`.

use super::Finding;
use super::machine::Machine;
use rustix::thread::CapabilitySet;
use std::os::fd::{FromRawFd, OwnedFd};

const KERNEL: &str = "kernel";
const FUSE: &str = "fuse";
const PASSTHROUGH: &str = "passthrough";
const IO_URING: &str = "io_uring";
const CACHESTAT: &str = "cachestat";

/// The number of cachestat(2), the same on every architecture that warpfs runs on.
const SYS_CACHESTAT: libc::c_long = 451;
/// `struct io_uring_params`, in bytes.
const IO_URING_PARAMS: usize = 120;

pub(super) fn check(machine: &Machine) -> Vec<Finding> {
    let (seccomp, disabled) = (is_filtered(machine), machine.number("/proc/sys/kernel/io_uring_disabled"));
    vec![
        match machine.release() {
            Some(release) => Finding::ok(KERNEL, format!("Linux {release}")),
            None => Finding::unknown(KERNEL, "/proc/sys/kernel/osrelease cannot be read"),
        },
        fuse(std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").err()),
        passthrough(machine, has(CapabilitySet::SYS_ADMIN)),
        io_uring(try_io_uring(), disabled, seccomp),
        cachestat(try_cachestat(), seccomp),
    ]
}

pub(super) fn has(capability: CapabilitySet) -> bool {
    rustix::thread::capabilities(None).is_ok_and(|own| own.effective.contains(capability))
}

/// Whether a filter of system calls lies on this process, as containers have it.
fn is_filtered(machine: &Machine) -> bool {
    let status = machine.text("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"))
}

/// `refused` is the error with which `/dev/fuse` was opened.
fn fuse(refused: Option<std::io::Error>) -> Finding {
    let Some(error) = refused else { return Finding::ok(FUSE, "/dev/fuse can be opened") };
    let missing = matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO));
    let what = format!("/dev/fuse cannot be opened: {}", error_words(&error));
    Finding::wrong(FUSE, what).so(if missing {
        "`modprobe fuse`; a container needs --device /dev/fuse"
    } else {
        "ask for access to it (mode 0666 is usual); a container needs --device /dev/fuse"
    })
}

fn error_words(error: &std::io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), crate::failure::describe)
}

fn passthrough(machine: &Machine, privileged: bool) -> Finding {
    const LESS: &str = "file data goes through the daemon, which is slower";
    let Some(kernel) = machine.kernel() else { return Finding::unknown(PASSTHROUGH, "so is the kernel's version") };
    if kernel < (6, 9) {
        return Finding::note(PASSTHROUGH, format!("this kernel has none: {LESS}")).so("take Linux 6.9 or newer");
    }
    if machine.has_option("CONFIG_FUSE_PASSTHROUGH") == Some(false) {
        return Finding::note(PASSTHROUGH, format!("this kernel was built without it: {LESS}"))
            .so("take a kernel with CONFIG_FUSE_PASSTHROUGH=y");
    }
    if !privileged {
        return Finding::note(PASSTHROUGH, format!("it needs CAP_SYS_ADMIN: {LESS}"))
            .so("mount as root; --allow-other lets users in");
    }
    Finding::ok(PASSTHROUGH, "the kernel can read and write file data itself")
}

/// Sets up the smallest ring, and lets it go.
fn try_io_uring() -> Result<(), i32> {
    let mut params = [0_u64; IO_URING_PARAMS / 8];
    // SAFETY: the kernel reads and writes the 120 bytes of the struct, which `params` has; all zeros is a valid one.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
    if ring < 0 {
        return Err(errno());
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else knows it.
    drop(unsafe { OwnedFd::from_raw_fd(ring as i32) });
    Ok(())
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// `disabled` is the sysctl of that name, where there is one.
fn io_uring(tried: Result<(), i32>, disabled: Option<i64>, filtered: bool) -> Finding {
    let Err(errno) = tried else { return Finding::ok(IO_URING, "a ring can be made") };
    let what = format!("no ring can be made ({}): direct reads go without it", crate::failure::describe(errno));
    let finding = Finding::note(IO_URING, what);
    match (errno, disabled) {
        (libc::EPERM, Some(1)) => finding.so("run as root, join the group of kernel.io_uring_group, or \
                                              `sysctl kernel.io_uring_disabled=0`"),
        (libc::EPERM, Some(2)) => finding.so("`sysctl kernel.io_uring_disabled=0`"),
        (libc::EPERM | libc::ENOSYS, _) if filtered => {
            finding.so("let the container's seccomp profile allow io_uring_setup, io_uring_enter and io_uring_register")
        }
        (libc::ENOSYS, _) => finding.so("take a kernel with CONFIG_IO_URING=y"),
        _ => finding.so("look at security modules and limits (ulimit -l)"),
    }
}

/// The errno of a call with a descriptor that cannot be: EBADF where the call is there.
fn try_cachestat() -> i32 {
    let nothing = std::ptr::null_mut::<u8>();
    // SAFETY: no descriptor has the number -1, and so the kernel returns before it looks at the null pointers.
    let done = unsafe { libc::syscall(SYS_CACHESTAT, -1, nothing, nothing, 0) };
    if done < 0 { errno() } else { 0 }
}

fn cachestat(errno: i32, filtered: bool) -> Finding {
    if errno == libc::EBADF {
        return Finding::ok(CACHESTAT, "the kernel tells what of a file is in its page cache");
    }
    let what = "the kernel does not tell what of a file is in its page cache: how warm a file is has to be guessed";
    let remedy =
        if filtered { "let the container's seccomp profile allow cachestat" } else { "take Linux 6.5 or newer" };
    Finding::note(CACHESTAT, what).so(remedy)
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::super::machine::made::Made;
    use super::*;

    fn remedy(finding: &Finding) -> &str {
        finding.remedy.as_deref().unwrap_or_default()
    }

    #[test]
    fn passthrough_takes_a_kernel_an_option_and_a_right() {
        let of = |release: &str, options: &str, privileged| {
            let made = Made::new();
            made.file("/proc/sys/kernel/osrelease", release);
            made.file(&format!("/boot/config-{release}"), options);
            passthrough(&made.machine(), privileged)
        };
        let on = "CONFIG_FUSE_PASSTHROUGH=y\n";
        assert_eq!(of("6.9.0", on, true).state, State::Ok);
        assert!(remedy(&of("6.8.12", on, true)).contains("6.9"));
        assert!(remedy(&of("6.9.0", "CONFIG_FUSE_FS=y\n", true)).contains("CONFIG_FUSE_PASSTHROUGH"));
        assert!(remedy(&of("6.9.0", on, false)).contains("root"));
        assert!(passthrough(&Made::new().machine(), true).what.starts_with("unknown"));
    }

    #[test]
    fn what_refuses_io_uring_decides_what_to_do() {
        assert_eq!(io_uring(Ok(()), Some(0), true).state, State::Ok);
        for (errno, disabled, filtered, words) in [
            (libc::EPERM, Some(2), true, "io_uring_disabled=0"),
            (libc::EPERM, Some(1), false, "io_uring_group"),
            (libc::EPERM, Some(0), true, "seccomp"),
            (libc::ENOSYS, None, true, "seccomp"),
            (libc::ENOSYS, None, false, "CONFIG_IO_URING"),
            (libc::ENOMEM, Some(0), false, "ulimit"),
        ] {
            let finding = io_uring(Err(errno), disabled, filtered);
            assert_eq!(finding.state, State::Note);
            assert!(remedy(&finding).contains(words), "{finding:?}");
        }
    }

    #[test]
    fn a_call_that_is_not_there_is_seen() {
        assert_eq!(cachestat(libc::EBADF, true).state, State::Ok);
        assert!(remedy(&cachestat(libc::ENOSYS, false)).contains("6.5"));
        assert!(remedy(&cachestat(libc::EPERM, true)).contains("seccomp"));
        // The real call says one of the three.
        assert!([libc::EBADF, libc::ENOSYS, libc::EPERM].contains(&try_cachestat()));
    }

    #[test]
    fn a_fuse_device_that_is_missing_or_closed_is_wrong() {
        assert_eq!(fuse(None).state, State::Ok);
        let of = |errno| fuse(Some(std::io::Error::from_raw_os_error(errno)));
        assert!(remedy(&of(libc::ENOENT)).contains("modprobe"));
        assert!(remedy(&of(libc::EACCES)).contains("access"));
        assert_eq!(of(libc::EACCES).state, State::Wrong);
    }

    #[test]
    fn a_filter_is_seen_in_the_status() {
        let of = |text: &str| {
            let made = Made::new();
            made.file("/proc/self/status", text);
            is_filtered(&made.machine())
        };
        assert!(of("Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"));
        assert!(!of("Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t2\n"));
    }
}
