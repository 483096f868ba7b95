//! `forebay bench load`: the initiator's load generator, on any NVMe/TCP target.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use forebay_control::model::{Export, ExportFrontend};
use forebay_device::size::parse_bytes;
use forebay_initiator::load::{self, Access, Amount, LoadSpec, Pace};
use forebay_initiator::{Options, Wait};

use super::report::Report;
use crate::api_paths;
use crate::cli::names::{self, VolumeName};
use crate::context::Context;
use crate::failure::{Failure, Outcome, While};
use crate::output::Output;
use crate::progress;

#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// An export of this node, whose address and NQN the daemon knows
    #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::exports(), conflicts_with_all = ["addr", "nqn"])]
    export: Option<VolumeName>,
    /// Another target's address, e.g. 127.0.0.1:4420
    #[arg(long, requires = "nqn", required_unless_present = "export")]
    addr: Option<SocketAddr>,
    /// The NQN of that target's subsystem
    #[arg(long, requires = "addr", required_unless_present = "export")]
    nqn: Option<String>,
    /// The NQN to connect with
    #[arg(long, default_value = "nqn.2026-01.io.forebay:bench")]
    hostnqn: String,
    /// The namespace
    #[arg(long, default_value_t = 1)]
    nsid: u32,
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
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    qd: u16,
    /// Number of I/O queues
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    queues: u16,
    /// The duration in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Use only this much of the namespace, from its start
    #[arg(long, value_parser = parse_bytes)]
    span: Option<u64>,
    /// Access the first block of each span of this size once, in random order, then end
    #[arg(long, value_parser = parse_bytes)]
    once_per: Option<u64>,
    /// The rate of new commands on each queue
    #[arg(long, value_name = "PER_SECOND", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    rate: Option<u32>,
    /// With --rate: the number of commands started together
    #[arg(long, default_value_t = 1, requires = "rate", value_parser = clap::value_parser!(u16).range(1..))]
    burst: u16,
    /// Use header and data digests
    #[arg(long)]
    digests: bool,
    /// Drive all queues from one thread on this CPU
    #[arg(long)]
    cpu: Option<usize>,
    /// Poll for completions instead of sleeping
    #[arg(long)]
    spin: bool,
    /// The seed of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Pattern {
    Read,
    Write,
    Randread,
    Randwrite,
    Randrw,
}

impl Pattern {
    /// The share of reads; `mixed` applies to [`Pattern::Randrw`].
    pub(super) fn read_percent(self, mixed: u8) -> u8 {
        match self {
            Self::Read | Self::Randread => 100,
            Self::Write | Self::Randwrite => 0,
            Self::Randrw => mixed,
        }
    }
}

impl LoadArgs {
    fn target(&self, context: impl FnOnce() -> Outcome<Context>) -> Outcome<(SocketAddr, String)> {
        if let (Some(addr), Some(nqn)) = (self.addr, &self.nqn) {
            return Ok((addr, nqn.clone()));
        }
        let export = self.export.as_ref();
        let name = export.ok_or_else(|| Failure::new("no target was given"))?;
        let export: Export = context()?.client.get(&api_paths::export(name))?;
        if export.frontend != ExportFrontend::NvmeTcp {
            return Err(Failure::new(format!(
                "{name} is exported to a VM, not over NVMe/TCP"
            )));
        }
        Ok((address(&export)?, export.nqn))
    }

    fn spec(&self, addr: SocketAddr, nqn: &str) -> Outcome<LoadSpec> {
        let block_bytes = u32::try_from(self.bs)
            .map_err(|_| Failure::new(format!("--bs {} is too large", self.bs)))?;
        Ok(LoadSpec {
            nsid: self.nsid,
            read_percent: self.rw.read_percent(self.read_percent),
            access: match self.rw {
                _ if self.once_per.is_some() => Access::Once {
                    stride_bytes: self.once_per.unwrap_or_default(),
                },
                Pattern::Read | Pattern::Write => Access::Sequential,
                _ => Access::Random,
            },
            block_bytes,
            queue_depth: self.qd,
            queues: self.queues,
            amount: Amount::Duration(Duration::from_secs(self.seconds)),
            span_bytes: self.span,
            pace: self.rate.map(|rate| Pace {
                burst: self.burst,
                every: Duration::from_secs(1) * u32::from(self.burst) / rate,
            }),
            options: Options {
                header_digest: self.digests,
                data_digest: self.digests,
                ..Options::default()
            },
            seed: self.seed,
            cpu: self.cpu,
            wait: if self.spin { Wait::Spin } else { Wait::Block },
            ..LoadSpec::new(addr, nqn, &self.hostnqn)
        })
    }
}

pub(super) fn address(export: &Export) -> Outcome<SocketAddr> {
    let address = export
        .addresses
        .first()
        .ok_or_else(|| Failure::new("the daemon has no NVMe/TCP listener"))?;
    address
        .parse()
        .while_doing(format!("use the address {address}"))
}

pub(crate) fn load(
    output: Output,
    args: &LoadArgs,
    context: impl FnOnce() -> Outcome<Context>,
) -> Outcome {
    let (addr, nqn) = args.target(context)?;
    let spec = args.spec(addr, &nqn)?;
    let bar = progress::steps("loading");
    let report = load::run(&spec, &mut |at| progress::set(&bar, at.fraction));
    bar.finish_and_clear();
    let report = report.map_err(|error| Failure::new(error.to_string()))?;
    let report = Report::new(&[(nqn, report)], None);
    output.show(&report, Report::text)?;
    judge(&report)
}

pub(super) fn judge(report: &Report) -> Outcome {
    if report.errors > 0 {
        return Err(Failure::new(format!("{} commands failed", report.errors)));
    }
    if report.ops == 0 {
        return Err(
            Failure::new(format!("no command completed in {:.1} s", report.seconds)).hint(
                "the target accepted the connection, but did not answer; if it is Forebay, `forebay status` says why",
            ),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: LoadArgs,
    }

    fn spec(more: &str) -> LoadSpec {
        let line = format!("bench --addr 127.0.0.1:4420 --nqn nqn.x {more}");
        Line::try_parse_from(line.split_whitespace())
            .unwrap()
            .args
            .spec(([127, 0, 0, 1], 4420).into(), "nqn.x")
            .unwrap()
    }

    #[test]
    fn options_become_a_load() {
        let plain = spec("");
        assert_eq!(
            (plain.read_percent, plain.block_bytes, plain.queue_depth),
            (100, 4096, 32)
        );
        assert_eq!(plain.access, Access::Random);
        let written = spec("--rw write --bs 128K --qd 4 --seconds 3 --spin --cpu 1 --span 1G");
        assert_eq!((written.read_percent, written.block_bytes), (0, 131_072));
        assert_eq!(
            (written.access, written.wait),
            (Access::Sequential, Wait::Spin)
        );
        assert_eq!((written.cpu, written.span_bytes), (Some(1), Some(1 << 30)));
        assert_eq!(written.amount, Amount::Duration(Duration::from_secs(3)));
        assert_eq!(spec("--rw randrw --read-percent 30").read_percent, 30);
        assert_eq!((plain.pace, plain.options.data_digest), (None, false));
        let paced = spec("--rate 200000 --burst 32 --digests");
        let every = Duration::from_micros(160);
        assert_eq!(paced.pace, Some(Pace { burst: 32, every }));
        assert!(paced.options.data_digest && paced.options.header_digest);
    }

    #[test]
    fn a_load_that_did_nothing_is_a_failure() {
        let report = |ops, errors| Report {
            ops,
            errors,
            ..Report::new(&[], None)
        };
        assert!(judge(&report(1, 0)).is_ok());
        let said = judge(&report(0, 0)).unwrap_err().to_string();
        assert!(said.contains("no command completed"), "{said}");
        let said = judge(&report(0, 7)).unwrap_err().to_string();
        assert!(said.contains("7 commands failed"), "{said}");
        let text = report(0, 0).text();
        assert!(
            text.contains("no command completed") && !text.contains("us of CPU"),
            "{text}"
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for more in [
            "--qd 0",
            "--queues 0",
            "--seconds 0",
            "--rw x",
            "--read-percent 101",
            "--rate 0",
            "--burst 8",
            "acme/db",
        ] {
            let line = format!("bench --addr 127.0.0.1:4420 --nqn nqn.x {more}");
            assert!(
                Line::try_parse_from(line.split_whitespace()).is_err(),
                "{more}"
            );
        }
    }
}
