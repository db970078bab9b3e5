//! Names and attributes: opening small files, stat, listings, and making and removing names. A cold row begins after the
//! kernel forgot all names, so that every question reaches the daemon; a row on what the kernel knows asks everything
//! once before the clock starts.

use crate::measure::{Noise, Plan, Site, prepared};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, mkdirat, openat, renameat, statat, unlinkat};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

const SMALL: usize = 2_000;
const SMALL_SIZE: usize = 4096;
/// How many of the small files the row about attributes that the kernel keeps looks at.
const KNOWN: usize = 1_000;
const MEDIUM: usize = 20_000;
const LARGE: usize = 100_000;
const RENAMED: usize = 500;

fn fill(folder: &Path, count: usize, size: usize) -> io::Result<()> {
    let mut noise = Noise::new(1);
    let mut content = vec![0; size];
    for number in 0..count {
        noise.fill(&mut content);
        File::create(folder.join(name(number)))?.write_all(&content)?;
    }
    Ok(())
}

fn name(number: usize) -> String {
    format!("file-{number:06}")
}

pub fn prepare_small(plan: &Plan) -> io::Result<()> {
    prepared(plan, "small", |folder| fill(folder, SMALL, SMALL_SIZE))
}

pub fn prepare_medium(plan: &Plan) -> io::Result<()> {
    prepared(plan, "medium", |folder| fill(folder, MEDIUM, 0))
}

pub fn prepare_large(plan: &Plan) -> io::Result<()> {
    prepared(plan, "large", |folder| fill(folder, LARGE, 0))
}

pub fn prepare_scratch(plan: &Plan) -> io::Result<()> {
    prepared(plan, "scratch", |folder| {
        std::fs::create_dir(folder.join("renamed"))?;
        fill(&folder.join("renamed"), RENAMED, 0)
    })
}

fn directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
}

/// The names of so many files, made before the clock starts.
fn names(count: usize, of: usize) -> Vec<CString> {
    (0..count).map(|number| CString::new(name(number % of)).expect("no NUL in it")).collect()
}

/// The files through their directory's descriptor, one after the other, again and again.
pub fn open_read_close(site: &Site<'_>, count: usize) -> io::Result<Duration> {
    let folder = directory(&site.root.join("small"))?;
    let names = names(count, SMALL);
    let mut content = [0; SMALL_SIZE + 1];
    let begun = Instant::now();
    for name in &names {
        let mut file = File::from(openat(&folder, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?);
        if file.read(&mut content)? != SMALL_SIZE {
            return Err(io::Error::other("a short read"));
        }
    }
    Ok(begun.elapsed())
}

pub fn stat_known(site: &Site<'_>, count: usize) -> io::Result<Duration> {
    let folder = directory(&site.root.join("small"))?;
    let names = names(KNOWN, KNOWN);
    let all = || -> io::Result<()> {
        for name in &names {
            statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    };
    all()?;
    let begun = Instant::now();
    for _ in 0..count / KNOWN {
        all()?;
    }
    Ok(begun.elapsed())
}

pub fn stat_cold(site: &Site<'_>, count: usize) -> io::Result<Duration> {
    let names = names(count, LARGE);
    site.drop_names()?;
    let begun = Instant::now();
    let folder = directory(&site.root.join("large"))?;
    for name in &names {
        statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(begun.elapsed())
}

/// Lists a directory as `ls -f` does, or with every entry's attributes as `ls -l` does.
#[derive(Clone, Copy)]
pub struct List {
    pub cold: bool,
    pub stats: bool,
}

impl List {
    pub fn measure(self, site: &Site<'_>, count: usize) -> io::Result<Duration> {
        if self.cold {
            site.drop_names()?;
        } else {
            self.once(site)?;
        }
        let begun = Instant::now();
        for _ in 0..count {
            self.once(site)?;
        }
        Ok(begun.elapsed())
    }

    fn once(self, site: &Site<'_>) -> io::Result<()> {
        let (folder, expected) = if self.stats { ("medium", MEDIUM) } else { ("large", LARGE) };
        let folder = directory(&site.root.join(folder))?;
        let mut buffer = vec![MaybeUninit::uninit(); 32 << 10];
        let mut listing = RawDir::new(&folder, &mut buffer);
        let mut found = 0;
        while let Some(entry) = listing.next() {
            let entry = entry?;
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            found += 1;
            if self.stats {
                let stat = statat(&folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(io::Error::other("not a file"));
                }
            }
        }
        if found == expected { Ok(()) } else { Err(io::Error::other(format!("{found} names of {expected}"))) }
    }
}

pub fn create_unlink(site: &Site<'_>, count: usize) -> io::Result<Duration> {
    let (folder, names) = (directory(&site.root.join("scratch"))?, names(count, count));
    site.sync()?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let begun = Instant::now();
    for name in &names {
        openat(&folder, name, flags, Mode::from_raw_mode(0o644))?;
    }
    for name in &names {
        unlinkat(&folder, name, AtFlags::empty())?;
    }
    Ok(begun.elapsed())
}

pub fn mkdir_rmdir(site: &Site<'_>, count: usize) -> io::Result<Duration> {
    let (folder, names) = (directory(&site.root.join("scratch"))?, names(count, count));
    site.sync()?;
    let begun = Instant::now();
    for name in &names {
        mkdirat(&folder, name, Mode::from_raw_mode(0o755))?;
    }
    for name in &names {
        unlinkat(&folder, name, AtFlags::REMOVEDIR)?;
    }
    Ok(begun.elapsed())
}

/// The same files there and back.
pub fn rename(site: &Site<'_>, count: usize) -> io::Result<Duration> {
    let folder = directory(&site.root.join("scratch/renamed"))?;
    let (here, there): (Vec<_>, Vec<_>) = (0..RENAMED)
        .map(|number| {
            let name = name(number);
            (CString::new(name.as_str()).expect("no NUL"), CString::new(format!("{name}.new")).expect("no NUL"))
        })
        .unzip();
    site.sync()?;
    let pass = |from: &[CString], to: &[CString]| -> io::Result<()> {
        Ok(from.iter().zip(to).try_for_each(|(from, to)| renameat(&folder, from, &folder, to))?)
    };
    let mut away = false;
    let begun = Instant::now();
    for _ in 0..count / RENAMED {
        if away {
            pass(&there, &here)?
        } else {
            pass(&here, &there)?
        }
        away = !away;
    }
    let took = begun.elapsed();
    if away {
        pass(&there, &here)?;
    }
    Ok(took)
}
