//! `forebay bench`: options and reports of loads; the initiator generates and verifies them.

mod daemon;
mod demo;
mod load;
mod report;
mod together;
mod verify;
mod vm;

use clap::Subcommand;

use crate::context::Context;
use crate::failure::Outcome;
use crate::output::Output;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Start a daemon with two tenants, write and verify data, run a load, report
    Demo(demo::DemoArgs),
    /// Run a load on an NVMe/TCP target
    Load(load::LoadArgs),
    #[command(hide = true)]
    /// Run a load on a VM's disk: vhost-user-blk, or NVMe over vfio-user
    Machine(vm::VmArgs),
}

pub(crate) fn bench(
    output: Output,
    command: &BenchCommand,
    context: impl FnOnce() -> Outcome<Context>,
) -> Outcome {
    match command {
        BenchCommand::Demo(args) => demo::demo(output, args),
        BenchCommand::Load(args) => load::load(output, args, context),
        BenchCommand::Machine(args) => vm::vm(output, args),
    }
}
