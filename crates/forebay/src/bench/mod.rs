//! `forebay bench`: measured loads.
//!
//! Purpose: `load` puts a load on any NVMe/TCP target, `machine` on any virtual machine's disk, `demo` shows the whole system at work.
//! Design: the load generator and the verification are the initiator's; here are options, the demo's
//! own daemon, and the tables.
//! Not here: benchmarks against others (`cargo xtask bench`).

mod daemon;
mod demo;
mod load;
mod machine;
mod report;
mod together;
mod verify;

use clap::Subcommand;

use crate::context::Context;
use crate::failure::Outcome;
use crate::output::Output;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Start a daemon, make two tenants, write and verify, put on a load, show what it gave
    Demo(demo::DemoArgs),
    /// Put a load on an NVMe/TCP target
    Load(load::LoadArgs),
    #[command(hide = true)]
    /// Put a load on a virtual machine's disk: vhost-user-blk, or NVMe over vfio-user
    Machine(machine::MachineArgs),
}

pub(crate) fn bench(
    output: Output,
    command: &BenchCommand,
    context: impl FnOnce() -> Outcome<Context>,
) -> Outcome {
    match command {
        BenchCommand::Demo(args) => demo::demo(output, args),
        BenchCommand::Load(args) => load::load(output, args, context),
        BenchCommand::Machine(args) => machine::machine(output, args),
    }
}
