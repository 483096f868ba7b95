//! `forebay bench vm`: a load on a VM's disk, without a VM, by the initiator's drivers.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use forebay_device::size::parse_bytes;
use forebay_initiator::load::Access;
use forebay_initiator::vm::load::{self, VmLoad};
use forebay_initiator::vm::{Doorbells, Options, Ring, Target};

use super::load::{Pattern, judge};
use super::report::Report;
use crate::failure::{Failure, Outcome};
use crate::output::Output;
use crate::progress;

#[derive(Debug, Args)]
pub(crate) struct VmArgs {
    #[command(flatten)]
    socket: VmSocket,
    /// The access pattern
    #[arg(long, value_enum, default_value_t = Pattern::Randread)]
    rw: Pattern,
    /// Share of reads with randrw, in percent
    #[arg(long, default_value_t = 70, value_parser = clap::value_parser!(u8).range(0..=100))]
    read_percent: u8,
    /// Bytes per command
    #[arg(long, default_value = "4K", value_parser = parse_bytes)]
    bs: u64,
    /// Commands in flight on each queue
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1023))]
    depth: u16,
    /// Number of queues
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: u16,
    /// The duration in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// The offset of the used part of the disk
    #[arg(long, default_value = "0", value_parser = parse_bytes)]
    first: u64,
    /// The size of the used part of the disk
    #[arg(long, value_parser = parse_bytes)]
    span: Option<u64>,
    /// Drive all queues from one thread on this CPU
    #[arg(long)]
    cpu: Option<usize>,
    /// Sleep until an interrupt instead of polling for completions
    #[arg(long)]
    interrupts: bool,
    /// Commands per second on each queue [default: unlimited]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rate: Option<u32>,
    /// Idle milliseconds after each command (with --depth 1)
    #[arg(long, value_name = "MS")]
    pause: Option<u64>,
    /// Use huge pages for the VM's memory
    #[arg(long)]
    huge_pages: bool,
    /// Packed rings instead of split ones (vhost-user)
    #[arg(long)]
    packed: bool,
    /// How doorbells reach an NVMe controller (vfio-user)
    #[arg(long, value_enum, default_value_t = Bells::Shadow)]
    doorbells: Bells,
    /// The seed of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct VmSocket {
    /// The socket of a vhost-user-blk backend
    #[arg(long, value_name = "PATH")]
    vhost_user: Option<PathBuf>,
    /// The socket of a vfio-user NVMe controller
    #[arg(long, value_name = "PATH")]
    vfio_user: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bells {
    /// In shadow doorbells, if the controller allows them
    Shadow,
    /// By one message each
    Trapped,
    /// In the shared page of the controller
    Mapped,
}

impl VmArgs {
    fn spec(&self) -> Outcome<VmLoad> {
        let target = match (&self.socket.vhost_user, &self.socket.vfio_user) {
            (Some(path), _) => Target::VhostUser(path.clone()),
            (None, Some(path)) => Target::VfioUser(path.clone()),
            (None, None) => return Err(Failure::new("no socket was given")),
        };
        let block_bytes = u32::try_from(self.bs)
            .map_err(|_| Failure::new(format!("--bs {} is too large", self.bs)))?;
        let options = Options {
            queues: self.queues,
            depth: self.depth,
            interrupts: self.interrupts,
            huge_pages: self.huge_pages,
            ring: if self.packed {
                Ring::Packed
            } else {
                Ring::Split
            },
            doorbells: match self.doorbells {
                Bells::Shadow => Doorbells::Shadow,
                Bells::Trapped => Doorbells::Trapped,
                Bells::Mapped => Doorbells::Mapped,
            },
            ..Options::default()
        };
        Ok(VmLoad {
            read_percent: self.rw.read_percent(self.read_percent),
            access: match self.rw {
                Pattern::Read | Pattern::Write => Access::Sequential,
                _ => Access::Random,
            },
            block_bytes,
            duration: Duration::from_secs(self.seconds),
            first_bytes: self.first,
            span_bytes: self.span,
            seed: self.seed,
            cpu: self.cpu,
            rate: self.rate,
            pause: self.pause.map(Duration::from_millis),
            ..VmLoad::new(target, options)
        })
    }
}

pub(crate) fn vm(output: Output, args: &VmArgs) -> Outcome {
    let spec = args.spec()?;
    let bar = progress::steps("loading");
    let report = load::run(&spec, &mut |at| progress::set(&bar, at.fraction));
    bar.finish_and_clear();
    let report = report.map_err(|error| Failure::new(error.to_string()))?;
    let name = match &spec.target {
        Target::VhostUser(path) | Target::VfioUser(path) => path.display().to_string(),
    };
    let report = Report::new(&[(name, report)], None);
    output.show(&report, Report::text)?;
    judge(&report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: VmArgs,
    }

    fn parse(line: &str) -> Option<VmArgs> {
        let line = Line::try_parse_from(line.split_whitespace());
        line.ok().map(|line| line.args)
    }

    #[test]
    fn options_become_a_load() {
        let spec = parse("bench --vhost-user /x").unwrap().spec().unwrap();
        assert_eq!(spec.target, Target::VhostUser("/x".into()));
        assert_eq!((spec.read_percent, spec.block_bytes), (100, 4096));
        let more = "--rw write --bs 128K --depth 4 --doorbells mapped --interrupts --first 1M";
        let line = format!("bench --vfio-user /x {more}");
        let spec = parse(&line).unwrap().spec().unwrap();
        assert_eq!((spec.read_percent, spec.block_bytes), (0, 131_072));
        assert_eq!(spec.access, Access::Sequential);
        assert_eq!((spec.options.depth, spec.options.interrupts), (4, true));
        assert_eq!(spec.options.doorbells, Doorbells::Mapped);
        assert_eq!(spec.first_bytes, 1 << 20);
    }

    #[test]
    fn nonsense_is_refused() {
        for line in [
            "bench",
            "bench --vhost-user /x --vfio-user /y",
            "bench --vhost-user /x --depth 0",
            "bench --vhost-user /x --queues 65",
            "bench --vhost-user /x --rate 0",
        ] {
            assert!(parse(line).is_none(), "{line}");
        }
    }
}
