//! `warpfs loader`: the child that the daemon starts for each device. Not for people.

use super::Done;
use crate::loader::child::{self, Arguments};

/// Do one device's work for the daemon at the other end of a socket.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// What the daemon says: see `loader::child::Arguments`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

pub(super) fn run(args: Args) -> Done {
    let arguments = Arguments::parse(args.words)?;
    child::run(&arguments)
}
