//! `forebay engine`: the data plane as a process.
//!
//! Purpose: what the daemon starts; not for people.
//! Design: options to an engine configuration, and wait for its end. What it says goes to stderr,
//! which the daemon has made a file.
//! Not here: the engine.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use clap::Args;
use forebay_engine::{Engine, EngineConfig};

use crate::failure::{Failure, Outcome, While};
use crate::limits;

/// How long an engine waits for its daemon's first word.
const ORPHAN_LIMIT_S: u64 = 30;

#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// Where to listen for the daemon
    #[arg(long)]
    socket: PathBuf,
    /// This engine's generation
    #[arg(long)]
    generation: u64,
    /// How many reactors
    #[arg(long)]
    reactors: usize,
    /// Where to live: it outlives whoever started it, keeps no other folder busy, and a core dump
    /// lands there
    #[arg(long)]
    run_dir: Option<PathBuf>,
    /// The first conversation with the daemon is what is standard input now
    #[arg(long)]
    daemon_on_stdin: bool,
    /// Start with everything that is made before a daemon speaks, print the formats, and end
    #[arg(long)]
    check: bool,
    /// CPUs to pin them to, in turn
    #[arg(long, value_delimiter = ',')]
    cpus: Vec<usize>,
}

/// What standard input is, which is nothing from then on.
fn take_stdin() -> Outcome<OwnedFd> {
    let take = || -> std::io::Result<OwnedFd> {
        let taken = std::io::stdin().as_fd().try_clone_to_owned()?;
        rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
        Ok(taken)
    };
    take().while_doing("take the conversation with the daemon from standard input")
}

pub(crate) fn engine(args: EngineArgs) -> Outcome {
    forebay_engine::signals::reset().while_doing("forget inherited signals")?;
    limits::raise();
    #[cfg(feature = "test-device")]
    forebay_xlate::kill::arm_from_environment().map_err(Failure::new)?;
    if let Some(run_dir) = &args.run_dir {
        std::env::set_current_dir(run_dir)
            .while_doing(format!("go to the folder {}", run_dir.display()))?;
    }
    // Its daemon names the devices, and has asked for leave.
    #[cfg(feature = "test-device")]
    forebay_device::faulty::allow();
    let config = EngineConfig {
        socket: args.socket,
        generation: args.generation,
        // Without a name: the daemon keeps its descriptor.
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
