//! `forebay engine`: the engine's process, started by the daemon, which has redirected stderr to a
//! file.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use clap::Args;
use forebay_engine::{Engine, EngineConfig};

use crate::failure::{Failure, Outcome, While};
use crate::limits;

/// The limit for the daemon's first message.
const ORPHAN_LIMIT_S: u64 = 30;

#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// The socket for the daemon
    #[arg(long)]
    socket: PathBuf,
    /// This engine's generation
    #[arg(long)]
    generation: u64,
    /// The number of reactors
    #[arg(long)]
    reactors: usize,
    /// The working directory: it outlives the parent, keeps no other folder busy, and gets core
    /// dumps
    #[arg(long)]
    run_dir: Option<PathBuf>,
    /// Use standard input as the first connection to the daemon
    #[arg(long)]
    daemon_on_stdin: bool,
    /// Initialize without a daemon, print the formats, and exit
    #[arg(long)]
    check: bool,
    /// CPUs for the reactors, in turn
    #[arg(long, value_delimiter = ',')]
    cpus: Vec<usize>,
}

/// Takes standard input and replaces it by `/dev/null`.
fn take_stdin() -> Outcome<OwnedFd> {
    let take = || -> std::io::Result<OwnedFd> {
        let taken = std::io::stdin().as_fd().try_clone_to_owned()?;
        rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
        Ok(taken)
    };
    take().while_doing("take the connection to the daemon from standard input")
}

pub(crate) fn engine(args: EngineArgs) -> Outcome {
    forebay_engine::signals::reset().while_doing("reset inherited signals")?;
    limits::raise();
    #[cfg(feature = "test-device")]
    forebay_xlate::kill::arm_from_environment().map_err(Failure::new)?;
    if let Some(run_dir) = &args.run_dir {
        std::env::set_current_dir(run_dir)
            .while_doing(format!("change to the folder {}", run_dir.display()))?;
    }
    // The daemon names the devices and has permission.
    #[cfg(feature = "test-device")]
    forebay_device::faulty::allow();
    let config = EngineConfig {
        socket: args.socket,
        generation: args.generation,
        // Without a path: the daemon keeps its descriptor.
        region: None,
        reactors: args.reactors,
        cpus: args.cpus,
        orphan_limit_s: ORPHAN_LIMIT_S,
    };
    let channel = args.daemon_on_stdin.then(take_stdin).transpose()?;
    let socket = config.socket.clone();
    let engine =
        Engine::start_with(config, channel).map_err(|error| Failure::new(error.to_string()))?;
    if args.check {
        let _ = std::fs::remove_file(&socket);
        println!("{}", forebay_xlate::boundary::formats());
        std::process::exit(0);
    }
    engine.join();
    Ok(())
}
