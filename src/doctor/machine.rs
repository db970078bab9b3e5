//! The files in which the kernel and its drivers say what a machine is, below a root that tests replace by a folder of their
//! own. What cannot be read is not there: who asks says that it is unknown. Called by every check.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// A machine's file system, seen from its root. Paths are absolute, as on the real machine.
pub(super) struct Machine {
    root: PathBuf,
    options: OnceLock<Option<String>>,
}

impl Machine {
    pub(super) fn real() -> Machine {
        Machine::at("/")
    }

    pub(super) fn at(root: impl Into<PathBuf>) -> Machine {
        Machine { root: root.into(), options: OnceLock::new() }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// The content of a small file, without the white space around it.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        let bytes = std::fs::read(self.path(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_string())
    }

    pub(super) fn number(&self, path: &str) -> Option<i64> {
        self.text(path)?.parse().ok()
    }

    /// The names in a directory, sorted; none where there is no such directory.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Where a path leads through its symbolic links, as a path of the machine.
    pub(super) fn target(&self, path: &str) -> Option<String> {
        let root = self.root.canonicalize().ok()?;
        let target = self.path(path).canonicalize().ok()?;
        Some(Path::new("/").join(target.strip_prefix(root).ok()?).to_string_lossy().into_owned())
    }

    /// The kernel's release, such as `6.8.0-51-generic`.
    pub(super) fn release(&self) -> Option<String> {
        self.text("/proc/sys/kernel/osrelease")
    }

    /// Major and minor number of the kernel.
    pub(super) fn kernel(&self) -> Option<(u32, u32)> {
        numbers(&self.release()?)
    }

    /// Whether the kernel was built with an option such as `CONFIG_PCI_P2PDMA`, itself or as a module. `None` where its
    /// configuration cannot be read.
    pub(super) fn has_option(&self, name: &str) -> Option<bool> {
        let options = self.options.get_or_init(|| self.read_options()).as_ref()?;
        let value = options.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        Some(matches!(value, Some("y" | "m")))
    }

    /// The running kernel's own copy first, which cannot be another's.
    fn read_options(&self) -> Option<String> {
        if let Ok(file) = File::open(self.path("/proc/config.gz")) {
            let unpack = Command::new("gzip").arg("-dc").stdin(file).stderr(Stdio::null()).output();
            if let Some(output) = unpack.ok().filter(|output| output.status.success()) {
                return Some(String::from_utf8_lossy(&output.stdout).into_owned());
            }
        }
        let release = self.release()?;
        let places = [
            format!("/boot/config-{release}"),
            format!("/lib/modules/{release}/config"),
            format!("/lib/modules/{release}/build/.config"),
        ];
        places.iter().find_map(|place| self.text(place))
    }
}

/// The first two numbers of a version: (6, 8) of `6.8.0-51-generic`.
pub(super) fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// A machine of files and links in a folder.
#[cfg(test)]
pub(super) mod made {
    use super::Machine;
    use std::path::Path;

    pub(in crate::doctor) struct Made(tempfile::TempDir);

    impl Made {
        pub(in crate::doctor) fn new() -> Made {
            Made(tempfile::tempdir().expect("a folder"))
        }

        pub(in crate::doctor) fn file(&self, path: &str, content: impl AsRef<[u8]>) -> &Made {
            let place = self.place(path);
            std::fs::write(place, content).expect("written");
            self
        }

        /// A symbolic link, absolute on the machine.
        pub(in crate::doctor) fn link(&self, path: &str, target: &str) -> &Made {
            let target = self.0.path().join(target.trim_start_matches('/'));
            std::fs::create_dir_all(&target).expect("created");
            std::os::unix::fs::symlink(target, self.place(path)).expect("linked");
            self
        }

        pub(in crate::doctor) fn machine(&self) -> Machine {
            Machine::at(self.0.path())
        }

        fn place(&self, path: &str) -> std::path::PathBuf {
            let place = self.0.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(place.parent().unwrap_or(Path::new("/"))).expect("created");
            place
        }
    }
}

#[cfg(test)]
mod tests {
    use super::made::Made;
    use super::*;

    #[test]
    fn options_of_the_kernel_are_read_from_whichever_file_there_is() {
        let text = "CONFIG_PCI_P2PDMA=y\n# CONFIG_FUSE_PASSTHROUGH is not set\nCONFIG_FUSE_FS=m\n";
        let made = Made::new();
        made.file("/proc/sys/kernel/osrelease", "6.8.0-51-generic\n");
        assert_eq!(made.machine().has_option("CONFIG_PCI_P2PDMA"), None, "no file, no answer");
        made.file("/boot/config-6.8.0-51-generic", text);
        for machine in [made.machine(), packed(text).machine()] {
            assert_eq!(machine.has_option("CONFIG_PCI_P2PDMA"), Some(true));
            assert_eq!(machine.has_option("CONFIG_FUSE_FS"), Some(true));
            assert_eq!(machine.has_option("CONFIG_FUSE"), Some(false), "a prefix is another name");
            assert_eq!(machine.has_option("CONFIG_FUSE_PASSTHROUGH"), Some(false));
        }
    }

    fn packed(text: &str) -> Made {
        let made = Made::new();
        made.file("/config", text);
        let output = Command::new("gzip").arg("-c").arg(made.machine().path("/config")).output().expect("gzip runs");
        made.file("/proc/config.gz", output.stdout);
        made
    }

    #[test]
    fn a_link_leads_to_a_path_of_the_machine() {
        let made = Made::new();
        made.link("/sys/dev/block/8:1", "/sys/devices/pci0000:00/sda/sda1");
        assert_eq!(made.machine().target("/sys/dev/block/8:1").as_deref(), Some("/sys/devices/pci0000:00/sda/sda1"));
        assert_eq!(made.machine().target("/sys/dev/block/8:2"), None);
    }

    #[test]
    fn versions_have_two_numbers() {
        assert_eq!(numbers("6.8.0-51-generic"), Some((6, 8)));
        assert_eq!(numbers("580.65.06"), Some((580, 65)));
        assert_eq!(numbers("6"), None);
    }
}
