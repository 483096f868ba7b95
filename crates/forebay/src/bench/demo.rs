//! `forebay bench demo`: shows the whole system (`make run`).
//!
//! It starts a daemon with two tenants, verifies random writes, runs a mixed load, and prints how a
//! host attaches. It uses only the API and NVMe/TCP, and reuses objects of an earlier run.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use forebay_control::api::client::{Client, ClientError};
use forebay_control::model::error::ErrorKind;
use forebay_control::model::{
    Export, ExportCreate, ExportUpdate, Tenant, TenantCreate, Volume, VolumeCreate,
};
use forebay_device::size::{format_bytes, parse_bytes};
use forebay_initiator::load::{self, Amount, LoadReport, LoadSpec};
use serde::Serialize;

use super::daemon::OwnDaemon;
use super::load::address;
use super::report::Report;
use super::together::{BenchJob, together};
use super::verify::{self, Verified};
use crate::api_paths;
use crate::cli::names::VolumeName;
use crate::command::attach::attach_command;
use crate::failure::{Failure, Outcome};
use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::progress;

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// The daemon's folder
    #[arg(long, value_name = "DIR", default_value = crate::config::DEFAULT_DIR)]
    dir: PathBuf,
    /// The duration of the mixed load in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// The data written and verified, over both tenants
    #[arg(long, default_value = "256M", value_parser = parse_bytes)]
    verify: u64,
}

/// Linux wants a host id for each host name.
struct DemoHost {
    tenant: &'static str,
    host_id: &'static str,
}

const GUESTS: [DemoHost; 2] = [
    DemoHost {
        tenant: "blue",
        host_id: "6f0c1c50-8a0b-4c58-9a61-1d0f0b1f5a01",
    },
    DemoHost {
        tenant: "green",
        host_id: "6f0c1c50-8a0b-4c58-9a61-1d0f0b1f5a02",
    },
];

const VOLUME: &str = "disk";
const VOLUME_BYTES: u64 = 1 << 30;
const LOAD_DEPTH: u16 = 16;

impl DemoHost {
    fn host_nqn(&self) -> String {
        format!("nqn.2014-08.org.nvmexpress:uuid:{}", self.host_id)
    }

    fn volume(&self) -> VolumeName {
        VolumeName {
            tenant: self.tenant.to_owned(),
            volume: VOLUME.to_owned(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Summary {
    /// Written at random locations in all volumes.
    written_bytes: u64,
    /// Read back and compared, each location once.
    read_bytes: u64,
    load: Report,
    serve: String,
    attach: Vec<String>,
}

pub(crate) fn demo(output: Output, args: &DemoArgs) -> Outcome {
    let interrupt = Interrupt::watch()?;
    let mut daemon = OwnDaemon::start(&args.dir, &interrupt)?;
    let summary = run(&mut daemon, args, &interrupt).map_err(|failure| {
        failure.or_hint(format!(
            "the daemon's log is in {}; is the disk below it full?",
            args.dir.join("state/log").display()
        ))
    })?;
    daemon.stop()?;
    output.show(&summary, text)
}

fn run(daemon: &mut OwnDaemon, args: &DemoArgs, interrupt: &Interrupt) -> Outcome<Summary> {
    let client = daemon.client().clone();
    let exports = GUESTS
        .iter()
        .map(|guest| prepare(&client, guest))
        .collect::<Outcome<Vec<_>>>()?;
    let targets = GUESTS
        .iter()
        .zip(&exports)
        .map(|(guest, export)| Ok((guest, address(export)?, export.nqn.clone())))
        .collect::<Outcome<Vec<_>>>()?;

    let share_bytes = args.verify / GUESTS.len() as u64;
    let jobs = targets.iter().map(|(guest, addr, nqn)| {
        let target = verify::VerifyTarget {
            addr: *addr,
            nqn: nqn.clone(),
            host_nqn: guest.host_nqn(),
        };
        let job: BenchJob<Verified> =
            Box::new(move |share| verify::verify(&target, share_bytes, share));
        job
    });
    let bar = progress::steps("writing, verifying");
    let verified = together(jobs.collect(), &bar, &mut || {
        interrupt.check()?;
        daemon.check("during the writes and their verification")
    });
    bar.finish_and_clear();
    let verified = verified?;
    let written_bytes = verified.iter().map(|part| part.written_bytes).sum();
    let read_bytes = verified.iter().map(|part| part.read_bytes).sum();

    let jobs = targets.iter().map(|(guest, addr, nqn)| {
        let spec = LoadSpec {
            queue_depth: LOAD_DEPTH,
            amount: Amount::Duration(Duration::from_secs(args.seconds)),
            ..LoadSpec::new(*addr, nqn, &guest.host_nqn())
        };
        let job: BenchJob<LoadReport> = Box::new(move |share| {
            load::run(&spec, &mut |at| share.set(at.fraction))
                .map_err(|error| Failure::new(error.to_string()))
        });
        job
    });
    let bar = progress::steps("mixed load");
    let cpu_before = engine_cpu_s(daemon);
    let reports = together(jobs.collect(), &bar, &mut || {
        interrupt.check()?;
        daemon.check("during the mixed load")
    });
    let cpu_after = engine_cpu_s(daemon);
    bar.finish_and_clear();
    let names = GUESTS.iter().map(|guest| guest.volume().to_string());
    let reports: Vec<_> = names.zip(reports?).collect();
    let cpu_s = cpu_before
        .zip(cpu_after)
        .map(|(before, after)| after - before);
    let load = Report::new(&reports, cpu_s);
    if load.errors > 0 {
        return Err(Failure::new(format!(
            "{} commands of the mixed load failed, the first: {}",
            load.errors,
            load.first_error.as_deref().unwrap_or("unknown")
        )));
    }
    let attach = GUESTS.iter().zip(&exports).filter_map(|(guest, export)| {
        let command = attach_command(export, Some(&guest.host_nqn()))?;
        Some(format!("{command} --hostid {}", guest.host_id))
    });
    Ok(Summary {
        written_bytes,
        read_bytes,
        load,
        serve: daemon.command.clone(),
        attach: attach.collect(),
    })
}

fn prepare(client: &Client, guest: &DemoHost) -> Outcome<Export> {
    let name = guest.volume();
    let tenant_path = format!("/v1/tenants/{}", guest.tenant);
    if found(client.get::<Tenant>(&tenant_path))?.is_none() {
        let body = TenantCreate {
            name: guest.tenant.to_owned(),
        };
        client.post::<_, Tenant>("/v1/tenants", &body)?;
    }
    if found(client.get::<Volume>(&api_paths::volume(&name)))?.is_none() {
        let body = VolumeCreate {
            name: VOLUME.to_owned(),
            size_bytes: Some(VOLUME_BYTES),
            block_bytes: None,
            reserved_bytes: 0,
            rbd: None,
        };
        client.post::<_, Volume>(&format!("{tenant_path}/volumes"), &body)?;
    }
    let host = guest.host_nqn();
    match found(client.get::<Export>(&api_paths::export(&name)))? {
        Some(export) if export.hosts.contains(&host) => Ok(export),
        Some(_) => {
            let body = ExportUpdate {
                add_hosts: vec![host],
                ..ExportUpdate::default()
            };
            Ok(client.patch(&api_paths::export(&name), &body)?)
        }
        None => {
            let body = ExportCreate {
                tenant: name.tenant,
                volume: name.volume,
                hosts: vec![host],
                any_host: false,
                ..ExportCreate::default()
            };
            Ok(client.post("/v1/exports", &body)?)
        }
    }
}

fn found<T>(answer: Result<T, ClientError>) -> Outcome<Option<T>> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(ClientError::Refused(error)) if error.kind == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// See proc_pid_stat(5): utime is field 14, stime 15, in ticks.
fn engine_cpu_s(daemon: &OwnDaemon) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.engine_pid()?)).ok()?;
    // Field 2, the name, ends with the last parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(14 - 3);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some((user + system) as f64 / rustix::param::clock_ticks_per_second() as f64)
}

fn text(summary: &Summary) -> String {
    let mut text = format!(
        "{} of random data were written to random offsets of {} volumes; {} were read back and are as written\n\n",
        format_bytes(summary.written_bytes),
        GUESTS.len(),
        format_bytes(summary.read_bytes)
    );
    text.push_str(&summary.load.text());
    text.push_str(&format!(
        "\nTo use the volumes from a Linux host, keep a daemon running:\n  {}\nand on the host, as \
         root, with nvme-cli:\n  modprobe nvme-tcp\n",
        summary.serve
    ));
    for command in &summary.attach {
        text.push_str(&format!("  {command}\n"));
    }
    text
}
