//! What people do with trees: unpack one, remove it, ask git what changed. By the programs themselves, whose start
//! counts for every subject alike.

use crate::measure::{Noise, Plan, Site, prepared};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TAR_FILES: usize = 2_000;
const GIT_FILES: usize = 5_000;
const PER_FOLDER: usize = 50;

/// Files of some hundred bytes to some ten thousand, fifty in a folder.
fn fill(folder: &Path, count: usize) -> io::Result<()> {
    let mut noise = Noise::new(count as u64);
    for number in 0..count {
        let inside = folder.join(format!("generated-{:03}", number / PER_FOLDER));
        if number % PER_FOLDER == 0 {
            std::fs::create_dir(&inside)?;
        }
        let mut content = vec![0; 200 + (noise.next() % 12_000) as usize];
        noise.fill(&mut content);
        File::create(inside.join(format!("file-{number:05}.c")))?.write_all(&content)?;
    }
    Ok(())
}

/// Runs a program to its end; its output, if it succeeded. It ends with this process.
fn run(command: &mut Command) -> io::Result<String> {
    let output = crate::subject::ends_with_us(command).stdin(Stdio::null()).output();
    let output =
        output.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", command.get_program().to_string_lossy())))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let first = said.lines().next().unwrap_or_default();
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(io::Error::other(format!("{}: {}: {first}", command.get_program().to_string_lossy(), output.status)))
    }
}

fn tar_file(plan: &Plan) -> PathBuf {
    plan.work.join("tree.tar")
}

/// This repository's own sources, and generated files, as an archive beside the source.
pub fn prepare_tar(plan: &Plan) -> io::Result<()> {
    prepared(plan, "unpacked", |_| Ok(()))?;
    if tar_file(plan).exists() {
        return Ok(());
    }
    let tree = plan.work.join("tree");
    std::fs::create_dir(&tree)?;
    let repository = std::env::var_os("WARPFS_ROOT").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let repository = Path::new(&repository);
    run(Command::new("cp").arg("-r").args(["src", "tests", "benches"].map(|name| repository.join(name))).arg(&tree))?;
    let there: usize = run(Command::new("find").arg(&tree).args(["-type", "f"]))?.lines().count();
    fill(&tree, TAR_FILES.saturating_sub(there))?;
    run(Command::new("tar").arg("-C").arg(&plan.work).arg("-cf").arg(tar_file(plan)).arg("tree"))?;
    std::fs::remove_dir_all(&tree)
}

fn timed(command: &mut Command) -> io::Result<Duration> {
    let begun = Instant::now();
    run(command)?;
    Ok(begun.elapsed())
}

/// Unpacks and removes through the same subject.
pub fn untar_and_remove(site: &Site<'_>, _count: usize) -> io::Result<Vec<Duration>> {
    let folder = site.root.join("unpacked");
    site.sync()?;
    let unpacked = timed(Command::new("tar").arg("-C").arg(&folder).arg("-xf").arg(tar_file(site.plan)))?;
    site.sync()?;
    let removed = timed(Command::new("rm").arg("-r").arg(folder.join("tree")))?;
    Ok(vec![unpacked, removed])
}

fn git(repository: &Path) -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(repository);
    // Nobody's settings, and a repository of any owner.
    command.args(["-c", "safe.directory=*", "-c", "user.name=bench", "-c", "user.email=bench@localhost"]);
    command.envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_SYSTEM", "/dev/null")]);
    command
}

pub fn prepare_git(plan: &Plan) -> io::Result<()> {
    prepared(plan, "repository", |folder| {
        fill(folder, GIT_FILES)?;
        run(git(folder).args(["init", "-q"]))?;
        run(git(folder).args(["add", "."]))?;
        run(git(folder).args(["commit", "-q", "-m", "everything"])).map(drop)
    })
}

/// Nothing has changed, and nothing is written.
fn git_status(repository: &Path) -> io::Result<Duration> {
    let begun = Instant::now();
    let changed = run(git(repository).env("GIT_OPTIONAL_LOCKS", "0").args(["status", "--porcelain"]))?;
    let took = begun.elapsed();
    if changed.is_empty() { Ok(took) } else { Err(io::Error::other(format!("git sees changes: {changed:.60}"))) }
}

/// The index remembers what stat said of each file; a subject that says it otherwise has it read them all. So each
/// subject may first write an index of its own.
fn git_refresh(repository: &Path) -> io::Result<()> {
    run(git(repository).args(["status", "--porcelain"])).map(drop)
}

pub fn git_status_cold(site: &Site<'_>, _count: usize) -> io::Result<Duration> {
    let repository = site.root.join("repository");
    git_refresh(&repository)?;
    site.drop_names()?;
    git_status(&repository)
}

pub fn git_status_again(site: &Site<'_>, _count: usize) -> io::Result<Duration> {
    let repository = site.root.join("repository");
    git_refresh(&repository)?;
    git_status(&repository)
}
