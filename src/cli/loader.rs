//! `warpfs loader`: the child that the daemon starts for each device. Not for people.

use super::Done;
use crate::loader::child;

/// Do one device's work for the daemon at the other end of a socket.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    child: child::Args,
}

pub(super) fn run(args: &Args) -> Done {
    child::run(&args.child)
}
