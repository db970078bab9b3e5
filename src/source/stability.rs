//! Whether what is read of a file from now on is what its version says: is anyone about to change bytes without a trace?
//! A store through a shared mapping moves the file's times only where the page was clean before, so a load begins with a
//! version before which no such store can hide: nobody has the file open for writing, or its pages are clean. Blocks only
//! in [`settle`]. Called by the cache.

use super::version::Version;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use rustix::fs::FsWord;
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Once, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Times that lie so far apart differ where a file system takes them from the kernel's tick.
const TICK: Duration = Duration::from_millis(20);
/// And where it keeps whole seconds, or every second one.
const SECONDS: Duration = Duration::from_secs(2);

/// How often a file may change while it is looked at.
const TRIES: u32 = 3;

/// What a file system lets one know of stores through mappings (measured on Linux 6.18).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A lease tells whether there is a writer or a mapping of one; the first store to a clean page moves the times, and
    /// pages can be made clean without a flush of the disk.
    Local,
    /// The same, but only fdatasync is sure to make pages clean: what is compressed is written in two steps.
    Copying,
    /// In memory: a lease tells, but a page is never clean, so that stores move nothing.
    Memory,
    /// Stacked, remote or unknown: a lease proves nothing. Pages are clean after fdatasync.
    Other,
}

impl Kind {
    fn of(file: BorrowedFd<'_>) -> Kind {
        const EXT: FsWord = 0xEF53;
        const XFS: FsWord = 0x5846_5342;
        const BTRFS: FsWord = 0x9123_683E;
        const F2FS: FsWord = 0xF2F5_2010;
        const TMPFS: FsWord = 0x0102_1994;
        const RAMFS: FsWord = 0x8584_58f6;
        match rustix::fs::fstatfs(file).map(|fs| fs.f_type) {
            Ok(EXT | XFS) => Kind::Local,
            Ok(BTRFS | F2FS) => Kind::Copying,
            Ok(TMPFS | RAMFS) => Kind::Memory,
            _ => Kind::Other,
        }
    }
}

/// Who may write to a file, as a read lease tells that is taken for a microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writers {
    None,
    /// A descriptor open for writing, or a shared writable mapping, also one whose descriptor is closed.
    Some,
    /// The system does not tell us.
    Unknown,
}

/// What a version is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// Whoever changes the file from now on changes its version.
    Settled,
    /// Not before [`settle`].
    Unsettled,
    /// Somebody may be changing it at this moment, without a trace: not even an old version is worth anything.
    Hidden,
}

/// Whether the file may be changing at this moment without a trace, whatever its version says.
pub fn hides(file: impl AsFd) -> bool {
    let file = file.as_fd();
    Kind::of(file) == Kind::Memory && writers(Kind::Memory, file) == Writers::Some
}

/// What `version` is worth, which the file has had a moment ago. Takes two microseconds, and waits for nothing.
pub fn proof(file: impl AsFd, version: &Version) -> Proof {
    let file = file.as_fd();
    let kind = Kind::of(file);
    // After the version: a writer who came and stored between the two would be in it, and its next store in none.
    match (kind, writers(kind, file)) {
        (Kind::Memory, Writers::Some) => Proof::Hidden,
        (Kind::Local | Kind::Copying | Kind::Memory, Writers::None) if young(kind, version).is_zero() => Proof::Settled,
        _ => Proof::Unsettled,
    }
}

/// A version of the file that is worth something from now on, for which pages may have to be written to the disk. `Changing`
/// where there is none to be had.
pub fn settle(file: impl AsFd) -> Result<Version> {
    let file = file.as_fd();
    let kind = Kind::of(file);
    for _ in 0..TRIES {
        let before = Version::of(file)?;
        match (kind, writers(kind, file)) {
            (_, Writers::None) => {}
            (Kind::Memory, Writers::Some) => {
                let message = "is open for writing, and its file system, which is in memory, does not show each change; try again when its writer has closed it";
                return Err(Failure::new(Code::Changing, message));
            }
            (Kind::Memory, Writers::Unknown) => {}
            (Kind::Local, _) => write_pages(file)?,
            (Kind::Copying | Kind::Other, _) => match rustix::fs::fdatasync(file) {
                // It knows nothing of the kind.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(e) => return Err(Failure::system("cannot write its pages", e)),
            },
        }
        let rest = young(kind, &before);
        if !rest.is_zero() {
            std::thread::sleep(rest);
        }
        // Who stored to a page just after it was clean moved the times, and has hidden the next store.
        if Version::of(file)? == before {
            return Ok(before);
        }
    }
    Err(Failure::new(Code::Changing, "changes all the time; try again when its writer is done"))
}

fn writers(kind: Kind, file: BorrowedFd<'_>) -> Writers {
    if kind == Kind::Other {
        return Writers::Unknown;
    }
    static SIGNAL: Once = Once::new();
    SIGNAL.call_once(ignore_sigio);
    // SAFETY: both take a number and touch no memory of ours.
    let lease = |what: libc::c_int| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, what) };
    if lease(libc::F_RDLCK) == 0 {
        lease(libc::F_UNLCK);
        return Writers::None;
    }
    match Errno::from_io_error(&std::io::Error::last_os_error()) {
        Some(Errno::AGAIN) => Writers::Some,
        _ => Writers::Unknown,
    }
}

/// Who opens a file for writing while we have a lease on it has a signal sent to us, which ends a process by default.
fn ignore_sigio() {
    // SAFETY: the structure is plain and filled by the call; a disposition that somebody chose is left as it is.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGIO, std::ptr::null(), &raw mut now) == 0 && now.sa_sigaction == libc::SIG_DFL {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
        }
    }
}

/// Has dirty pages written and made clean, without the disk's caches' being flushed: 0.5 us where there are none.
fn write_pages(file: BorrowedFd<'_>) -> Result<()> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: takes numbers only. A length of 0 is to the end of the file.
    if unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, all) } == 0 {
        return Ok(());
    }
    Err(Failure::system("cannot write its pages", std::io::Error::last_os_error()))
}

/// How long it takes until a change is sure to get another time than this version has.
fn young(kind: Kind, version: &Version) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let age = now.as_nanos() as i128 - version.ctime;
    rest(kind != Kind::Other && has_fine_times(), version.ctime, age)
}

/// `fine`: a change gets a time of its own whenever the last was looked at. `ctime` and `age` in nanoseconds.
fn rest(fine: bool, ctime: i128, age: i128) -> Duration {
    let step = match ctime % 1_000_000_000 {
        0 => SECONDS,
        _ if fine => Duration::ZERO,
        _ => TICK,
    };
    // A time of the future, by another clock: nothing follows from it but that one step has to pass.
    let age = u64::try_from(age.max(0)).unwrap_or(u64::MAX);
    step.saturating_sub(Duration::from_nanos(age))
}

/// From Linux 6.13 on, ext4, XFS, btrfs and tmpfs have multigrain timestamps.
fn has_fine_times() -> bool {
    static FINE: OnceLock<bool> = OnceLock::new();
    *FINE.get_or_init(|| {
        let uname = rustix::system::uname();
        let release = uname.release().to_string_lossy();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse::<u32>().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 13)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags};
    use std::fs::File;
    use std::path::Path;

    /// A shared writable mapping of a file whose descriptor is closed.
    struct Mapped(*mut u8);

    impl Mapped {
        fn of(path: &Path) -> Mapped {
            let file = File::options().read(true).write(true).open(path).expect("opened");
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: the kernel chooses the address.
            let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, MapFlags::SHARED, &file, 0) };
            Mapped(at.expect("mapped").cast())
        }

        fn store(&self, byte: u8) {
            // SAFETY: the page is mapped, and as long as the file.
            unsafe { self.0.write_volatile(byte) }
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: exactly the mapping.
            let _ = unsafe { rustix::mm::munmap(self.0.cast(), 4096) };
        }
    }

    fn page(folder: &Path) -> (tempfile::TempPath, File) {
        let path = tempfile::NamedTempFile::new_in(folder).expect("a file").into_temp_path();
        std::fs::write(&path, [7; 4096]).expect("written");
        let file = File::open(&path).expect("opened");
        (path, file)
    }

    fn look(file: &File) -> Proof {
        proof(file, &Version::of(file).expect("a version"))
    }

    #[test]
    fn a_file_without_a_writer_is_settled_at_once() {
        let (path, file) = page(&std::env::temp_dir());
        if Kind::of(file.as_fd()) != Kind::Local {
            eprintln!("skipped: temporary files are on a stacked or unknown file system");
            return;
        }
        assert_eq!(look(&file), Proof::Settled);
        let writer = File::options().write(true).open(&path).expect("opened");
        assert_eq!(look(&file), Proof::Unsettled);
        drop(writer);
        assert_eq!(look(&file), Proof::Settled);
    }

    #[test]
    fn after_settling_each_store_of_a_mapping_shows() {
        let (path, file) = page(&std::env::temp_dir());
        let mapped = Mapped::of(&path);
        mapped.store(1);
        let before = Version::of(&file).expect("a version");
        mapped.store(2);
        // The control: the page was dirty, so the second store is hidden.
        assert_eq!(Version::of(&file).expect("a version"), before);
        let settled = settle(&file).expect("settled");
        mapped.store(3);
        assert_ne!(Version::of(&file).expect("a version"), settled);
    }

    #[test]
    fn a_writer_of_a_file_in_memory_is_refused_while_it_is_there() {
        let folder = Path::new("/dev/shm");
        let (path, file) = page(folder);
        if Kind::of(file.as_fd()) != Kind::Memory {
            eprintln!("skipped: /dev/shm is no tmpfs");
            return;
        }
        assert_eq!(look(&file), Proof::Settled, "the control");
        let mapped = Mapped::of(&path);
        mapped.store(1);
        let before = Version::of(&file).expect("a version");
        mapped.store(2);
        assert_eq!(Version::of(&file).expect("a version"), before, "that is why");
        assert_eq!((look(&file), hides(&file)), (Proof::Hidden, true));
        assert_eq!(settle(&file).expect_err("hidden").code, Code::Changing);
        drop(mapped);
        settle(&file).expect("settled");
        assert!(!hides(&file));
    }

    #[test]
    fn a_change_within_a_step_of_the_clock_is_waited_for() {
        let (odd, whole) = (1_700_000_000_123_456_789, 1_700_000_000_000_000_000);
        let milli = 1_000_000;
        assert_eq!(rest(true, odd, 0), Duration::ZERO);
        assert_eq!(rest(false, odd, 5 * milli), Duration::from_millis(15));
        assert_eq!(rest(false, odd, 20 * milli), Duration::ZERO);
        assert_eq!(rest(true, whole, 500 * milli), Duration::from_millis(1500), "a file system of whole seconds");
        assert_eq!(rest(false, whole, 3000 * milli), Duration::ZERO);
        assert_eq!(rest(false, odd, -5_000 * milli), TICK, "a time of the future");
    }
}
