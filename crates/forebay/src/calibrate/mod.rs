//! `forebay calibrate`: measures the cost of I/O on this node.
//!
//! It makes volumes (`scratch`), drives them over each frontend (`drive`), reads the engine's
//! counters (`measure`) and computes costs (`fit`). Stored costs of frontends that cannot be driven
//! stay.

mod drive;
mod fit;
mod link;
mod measure;
mod scratch;

use std::time::{Duration, Instant};

use clap::Args;
use forebay_control::api::client::Client;
use forebay_control::model::scheduling::{
    CostOperation, CostProfile, Costs, CostsPut, NodeCapacity, Scheduling, SchedulingUpdate,
};
use forebay_control::model::stats::Stats;
use forebay_control::model::{EngineState, ExportFrontend, Status};
use forebay_device::size::format_bytes;
use forebay_qos::cost::{FRONTENDS, OPERATIONS, Operation, Profile, SIZES, Transport};
use serde::Serialize;

use self::fit::Rounds;
use self::measure::{FrontendMeasurement, LOADS, MeasurePlan};
use self::scratch::{Scratch, kind};
use crate::context::Context;
use crate::failure::{Failure, Outcome};
use crate::interrupt::Interrupt;
use crate::output::table;
use crate::progress;

#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// Measure for a few seconds only, as a trial
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// The approximate duration in seconds
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(5..=3600))]
    seconds: u64,
    /// Measure even if other exports are under load; the costs will be too high
    #[arg(long)]
    anyway: bool,
    /// Show the result without storing it
    #[arg(long)]
    dry_run: bool,
}

/// The part of the time for first writes.
const FILL_PART: f64 = 0.1;
/// The part for loads; the rest is overhead.
const LOAD_PART: f64 = 0.6;
/// Per volume, in a short and in a long run.
const BYTES: [u64; 2] = [16 << 20, 128 << 20];
const ENGINE_LIMIT: Duration = Duration::from_secs(20);
/// A greater spread of the rounds is reported.
const NOISY: f64 = 0.25;

#[derive(Debug, Serialize)]
struct Calibration {
    costs: Vec<Cost>,
    /// Known minimum speeds of devices below their limit.
    device_at_least: Vec<AtLeast>,
    /// The hosts' links, if known.
    link_bytes_per_second: Option<u64>,
    noise: f64,
    /// Frontends that were not driven, with the reason.
    left_out: Vec<String>,
    stored: bool,
}

#[derive(Debug, Clone, Serialize)]
struct Cost {
    #[serde(flatten)]
    profile: CostProfile,
    noise: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct AtLeast {
    operation: CostOperation,
    bytes: u32,
    per_second: u64,
}

pub(crate) fn calibrate(context: &Context, args: &CalibrateArgs) -> Outcome {
    let client = &context.client;
    let interrupt = Interrupt::watch()?;
    let plan = plan(args);
    let reactors = wait_for_engine(client)?;
    measure::refuse_load(client, &plan)?;
    let bytes = BYTES[usize::from(!args.quick)];
    let scratch = Scratch::make(client, bytes, FRONTENDS.len() as u64)?;
    let bar = progress::steps("measuring");
    let measured = measure::measure(client, &scratch, &plan, &interrupt, &mut |at| {
        progress::set(&bar, at);
    });
    bar.finish_and_clear();
    let (frontends, left_out) = measured?;
    scratch.remove()?;
    let status: Status = client.get("/v1/status")?;
    let (costs, device_at_least) = costs(&frontends, reactors);
    let found = Calibration {
        noise: costs.iter().map(|cost| cost.noise).fold(0.0, f64::max),
        costs,
        device_at_least,
        link_bytes_per_second: link::bytes_per_second(&status.nvme_tcp),
        left_out,
        stored: !args.dry_run,
    };
    if found.stored {
        store(client, &found)?;
    }
    context.output.show(&found, text)
}

fn note(found: &Calibration) -> String {
    let mut note = format!("the rounds differ by up to {:.0} %", found.noise * 100.0);
    if !found.left_out.is_empty() {
        note.push_str("; some frontends could not be measured");
    }
    if let Some(at_least) = at_least_text(&found.device_at_least) {
        note.push_str(&format!("; {at_least}"));
    }
    note
}

fn at_least_text(found: &[AtLeast]) -> Option<String> {
    let of = |operation: CostOperation, name: &str| {
        let of = found.iter().filter(|of| of.operation == operation);
        let sizes = of.map(|of| format!("{} of {}", of.per_second, format_bytes(of.bytes.into())));
        let sizes: Vec<String> = sizes.collect();
        (!sizes.is_empty()).then(|| format!("{name} per second: {}", sizes.join(", ")))
    };
    let all = [
        of(CostOperation::Read, "reads"),
        of(CostOperation::Write, "writes"),
    ];
    let all: Vec<String> = all.into_iter().flatten().collect();
    (!all.is_empty()).then(|| format!("the device was not saturated: at least {}", all.join("; ")))
}

fn store(client: &Client, found: &Calibration) -> Outcome {
    let costs = CostsPut {
        profiles: found.costs.iter().map(|cost| cost.profile).collect(),
        note: Some(note(found)),
    };
    let _: Costs = client.put("/v1/scheduling/costs", &costs)?;
    let scheduling: Scheduling = client.get("/v1/scheduling")?;
    let capacity = with_links(scheduling.capacity, found.link_bytes_per_second);
    if capacity == scheduling.capacity {
        return Ok(());
    }
    let update = SchedulingUpdate {
        capacity: Some(capacity),
        ..SchedulingUpdate::default()
    };
    let _: Scheduling = client.patch("/v1/scheduling", &update)?;
    Ok(())
}

/// Adds the link bandwidth, unless an operator has set one.
fn with_links(capacity: NodeCapacity, found: Option<u64>) -> NodeCapacity {
    let known = capacity.link_in_bytes_s.or(capacity.link_out_bytes_s);
    if known.is_some() && !capacity.link_found {
        return capacity;
    }
    NodeCapacity {
        link_in_bytes_s: found,
        link_out_bytes_s: found,
        link_found: found.is_some(),
        ..capacity
    }
}

/// Waits for the engine of a new pool; returns its number of reactors.
fn wait_for_engine(client: &Client) -> Outcome<u32> {
    let until = Instant::now() + ENGINE_LIMIT;
    loop {
        let status: Status = client.get("/v1/status")?;
        if status.engine_state == EngineState::Running
            && let Some(engine) = client.get::<Stats>("/v1/stats")?.engine
        {
            return Ok(engine.reactors);
        }
        if status.pool.is_none() || Instant::now() > until {
            return Err(
                Failure::new("no engine is running, so there is nothing to measure")
                    .hint("create or open a pool first; `forebay status` shows the engine's state"),
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn plan(args: &CalibrateArgs) -> MeasurePlan {
    let (seconds, rounds) = if args.quick {
        (4, 1)
    } else {
        (args.seconds, 3)
    };
    let loads = rounds * LOADS * FRONTENDS.len() as u32;
    let all = Duration::from_secs(seconds);
    MeasurePlan {
        rounds,
        time: all.mul_f64(LOAD_PART) / loads,
        fill: all.mul_f64(FILL_PART) / FRONTENDS.len() as u32,
        anyway: args.anyway,
    }
}

/// The PDU headers in the data's direction (Transport 3.6.2), and one packet's. VMs have no link.
fn header_bytes(frontend: Transport, operation: Operation) -> u32 {
    const PACKET: u32 = 78;
    const COMMAND: u32 = 72;
    const DATA: u32 = 24;
    const RESPONSE: u32 = 24;
    match (frontend, operation) {
        (Transport::Pcie | Transport::Vhost, _) => 0,
        (Transport::Tcp, Operation::Read) => DATA + RESPONSE + PACKET,
        (Transport::Tcp, Operation::Write) => COMMAND + DATA + PACKET,
        (Transport::Tcp, Operation::Other) => COMMAND + PACKET,
    }
}

fn costs(
    frontends: &[(Transport, FrontendMeasurement)],
    reactors: u32,
) -> (Vec<Cost>, Vec<AtLeast>) {
    // Of commands without data, the more expensive kind counts.
    let same = |rounds: &Rounds| -> [Rounds; 6] { std::array::from_fn(|_| rounds.clone()) };
    let device = |of: &dyn Fn(&FrontendMeasurement) -> [Rounds; 6]| {
        let all: Vec<[Rounds; 6]> = frontends.iter().map(|(_, m)| of(m)).collect();
        fit::device(&all.iter().collect::<Vec<_>>(), reactors)
    };
    let reads = device(&|m| m.reads.clone());
    let writes = device(&|m| m.writes.clone());
    let first = |of: fn(&FrontendMeasurement) -> &Rounds| device(&|m| same(of(m))).ns[0];
    let others = first(|m| &m.flushes).max(first(|m| &m.deallocations));
    // Devices serve other commands during a flush.
    let others = others.min(writes.ns[5]);
    let mut device_at_least = Vec::new();
    for (operation, of) in [(CostOperation::Read, reads), (CostOperation::Write, writes)] {
        for (bytes, at_least) in SIZES.into_iter().zip(of.at_least) {
            device_at_least.extend(at_least.map(|per_second| AtLeast {
                operation,
                bytes,
                per_second: per_second as u64,
            }));
        }
    }
    let mut costs = Vec::new();
    for (frontend, measured) in frontends {
        for operation in OPERATIONS {
            let header_bytes = header_bytes(*frontend, operation);
            let profile = match operation {
                Operation::Read => Profile {
                    cpu_ns: fit::cpu(&measured.reads),
                    device_ns: reads.ns,
                    header_bytes,
                },
                Operation::Write => Profile {
                    cpu_ns: fit::cpu(&measured.writes),
                    device_ns: writes.ns,
                    header_bytes,
                },
                Operation::Other => {
                    let of = |rounds: &Rounds| fit::cpu(&same(rounds))[0];
                    let cpu = of(&measured.flushes).max(of(&measured.deallocations));
                    fit::flat(cpu, others, header_bytes)
                }
            };
            let noise = match operation {
                Operation::Read => spread(&measured.reads),
                Operation::Write => spread(&measured.writes),
                Operation::Other => fit::spread(&measured.flushes),
            };
            let profile = CostProfile {
                frontend: kind(*frontend),
                operation: match operation {
                    Operation::Read => CostOperation::Read,
                    Operation::Write => CostOperation::Write,
                    Operation::Other => CostOperation::Other,
                },
                cpu_ns: profile.cpu_ns,
                device_ns: profile.device_ns,
                header_bytes,
            };
            costs.push(Cost { profile, noise });
        }
    }
    (costs, device_at_least)
}

fn spread(sizes: &[Rounds; 6]) -> f64 {
    fit::median(sizes.iter().map(|rounds| fit::spread(rounds)).collect())
}

fn names(profile: &CostProfile) -> [String; 2] {
    let frontend = match profile.frontend {
        ExportFrontend::NvmeTcp => "nvme-tcp",
        ExportFrontend::NvmePcie => "nvme-pcie",
        ExportFrontend::VhostUser => "vhost-user",
    };
    let operation = match profile.operation {
        CostOperation::Read => "read",
        CostOperation::Write => "write",
        CostOperation::Other => "other",
    };
    [frontend.to_owned(), operation.to_owned()]
}

fn text(found: &Calibration) -> String {
    let sizes = SIZES.map(|size| format!(">{}", format_bytes(size.into())));
    let [a, b, c, d, e, f] = sizes.each_ref().map(String::as_str);
    let mut rows = Vec::new();
    for Cost { profile, .. } in &found.costs {
        for (what, times) in [
            ("processor", &profile.cpu_ns),
            ("device", &profile.device_ns),
        ] {
            let [a, b, c, d, e, f] = times.map(|ns| format!("{:.2} us", ns / 1000.0));
            let [frontend, operation] = names(profile);
            rows.push([frontend, operation, what.to_owned(), a, b, c, d, e, f]);
        }
    }
    let header = ["FRONTEND", "OPERATION", "TIME OF", a, b, c, d, e, f];
    let mut text = table(header, rows);
    for left_out in &found.left_out {
        text.push_str(&format!("\nnot measured: {left_out}"));
    }
    if let Some(at_least) = at_least_text(&found.device_at_least) {
        text.push_str(&format!("\n{at_least}"));
    }
    if found.noise > NOISY {
        text.push_str(&format!(
            "\nthe rounds differ by up to {:.0} %: something else used this node",
            found.noise * 100.0
        ));
    }
    text.push_str(match found.stored {
        true => "\nstored: `forebay scheduling costs` shows the costs",
        false => "\nnothing was stored",
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detected_links_are_updated_and_configured_links_stay() {
        let none = NodeCapacity {
            device_reads: 1.0,
            device_writes: 1.0,
            link_in_bytes_s: None,
            link_out_bytes_s: None,
            link_found: false,
            operations_s: None,
        };
        let found = with_links(none, Some(1000));
        assert_eq!(
            (found.link_in_bytes_s, found.link_found),
            (Some(1000), true)
        );
        let again = with_links(found, Some(2500));
        assert_eq!(
            (again.link_out_bytes_s, again.link_found),
            (Some(2500), true)
        );
        assert_eq!(with_links(again, None), none);
        let said = NodeCapacity {
            link_in_bytes_s: Some(7),
            ..none
        };
        assert_eq!(with_links(said, Some(1000)), said);
        assert_eq!(with_links(said, None), said);
    }

    #[test]
    fn minimum_device_rates_are_listed_by_size() {
        assert_eq!(at_least_text(&[]), None);
        let of = |operation, bytes, per_second| AtLeast {
            operation,
            bytes,
            per_second,
        };
        let text = at_least_text(&[
            of(CostOperation::Read, 4096, 250_000),
            of(CostOperation::Read, 8192, 200_000),
            of(CostOperation::Write, 4096, 90_000),
        ]);
        assert_eq!(
            text.as_deref(),
            Some(
                "the device was not saturated: at least reads per second: 250000 of 4 KiB, 200000 of 8 KiB; \
                 writes per second: 90000 of 4 KiB"
            )
        );
        // The API's limit for notes.
        let sizes = SIZES.into_iter();
        let all = sizes.flat_map(|bytes| {
            [CostOperation::Read, CostOperation::Write]
                .map(|operation| of(operation, bytes, 20_000_000))
        });
        assert!(at_least_text(&all.collect::<Vec<_>>()).unwrap().len() < 600);
    }
}
