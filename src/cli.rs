//! The command line: one file a command. Exit codes: 0 done, 1 failed (the message is on stderr), 2 usage.

/// `println!`, for a stdout that may end or be full.
macro_rules! say {
    ($($words:tt)*) => {
        crate::cli::print_line(format_args!($($words)*))
    };
}

mod attach_time;
mod bench;
mod doctor;
mod evict;
mod explain;
mod loader;
mod mount;
mod options;
mod paths;
mod preload;
mod read;
mod status;
mod umount;
mod verify;

use crate::failure::Failure;
use clap::{CommandFactory, Parser, Subcommand};
use std::io::Write;
use std::process::ExitCode;

/// Mount a directory so that its files can also be had in GPU memory, by path, as one copy shared by every process.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 110, after_help = EXAMPLES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  warpfs mount /data /mnt/data        front /data; copies go to the GPU if there is one
  warpfs preload /mnt/data/model      bring every file of a directory into device memory
  warpfs status /mnt/data/model       what is resident
  setfattr -n user.warpfs.preload -v 1 /mnt/data/f
                                      ask from a tool that knows nothing of warpfs
  warpfs umount /mnt/data

Exit codes: 0 done; 1 failed, and stderr says what, why and what to do; 2 wrong usage";

#[derive(Debug, Subcommand)]
enum Command {
    Mount(mount::Args),
    Umount(umount::Args),
    Preload(preload::Args),
    Evict(evict::Args),
    Explain(explain::Args),
    Bench(bench::Args),
    Status(status::Args),
    Verify(verify::Args),
    Read(read::Args),
    Doctor(doctor::Args),
    #[command(hide = true)]
    Loader(loader::Args),
    #[command(hide = true)]
    AttachTime(attach_time::Args),
    #[command(hide = true, name = crate::doctor::probe::COMMAND)]
    ProbeCufile(doctor::ProbeArgs),
}

/// What every command returns.
type Done = Result<(), Failure>;

impl Cli {
    pub fn run(self) -> ExitCode {
        let done = match self.command {
            Command::Mount(args) => mount::run(&args),
            Command::Umount(args) => umount::run(&args),
            Command::Preload(args) => preload::run(&args),
            Command::Evict(args) => evict::run(&args),
            Command::Explain(args) => explain::run(&args),
            Command::Bench(args) => bench::run(&args),
            Command::Status(args) => status::run(&args),
            Command::Verify(args) => verify::run(&args),
            Command::Read(args) => read::run(&args),
            Command::Doctor(args) => doctor::run(&args),
            Command::Loader(args) => loader::run(args),
            Command::AttachTime(args) => attach_time::run(&args),
            Command::ProbeCufile(args) => doctor::answer(&args),
        };
        match done {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                // Commands that have told everything already end with an empty failure.
                if !failure.message.is_empty() {
                    complain(&failure);
                }
                ExitCode::FAILURE
            }
        }
    }
}

/// One line on stdout. Who reads it may have gone, and a disk may be full: neither is a defect of ours.
fn print_line(line: std::fmt::Arguments<'_>) {
    if let Err(e) = writeln!(std::io::stdout(), "{line}") {
        if e.kind() != std::io::ErrorKind::BrokenPipe {
            complain(&Failure::system("cannot write to stdout", e));
        }
        std::process::exit(1);
    }
}

/// One line on stderr. Who reads it may have gone; then nobody can be told.
fn complain(line: &impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "warpfs: {line}");
}

/// Ends with the usage's exit code, where clap could not see what is wrong.
fn usage(message: &str) -> ! {
    Cli::command().error(clap::error::ErrorKind::ArgumentConflict, message).exit()
}

/// Some of several things failed, and each has been complained about.
fn some_failed() -> Failure {
    Failure::new(crate::protocol::Code::Io, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_has_words_for_every_argument() {
        let cli = Cli::command();
        let shown: Vec<_> = cli.get_subcommands().filter(|command| !command.is_hide_set()).collect();
        assert_eq!(shown.len(), 10);
        for command in shown {
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{}: {}", command.get_name(), argument.get_id());
            }
        }
        assert!(EXAMPLES.lines().all(|line| line.len() <= 100), "a terminal of 100 columns wraps none");
    }
}
