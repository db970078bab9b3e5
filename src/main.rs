//! Parse, then call one command.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    warpfs::cli::Cli::parse().run()
}
