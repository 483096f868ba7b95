//! `forebay calibrate`: what an I/O costs on this machine.
//!
//! Purpose: measure the cost of each operation by running it.
//! Design: a client like any other. It makes volumes of its own (`scratch`), drives them over each frontend (`drive`), reads the
//! engine's counters around each load (`measure`), makes costs of the samples (`fit`), prints a table, and stores them over the
//! API. Where a frontend can't be driven, what is stored of it stays.
//! Not here: what costs are for (the crate `burst`).

mod drive;
mod fit;
mod link;
mod measure;
mod scratch;

use std::time::{Duration, Instant};

use clap::Args;
use forebay_burst::cost::{FRONTENDS, Frontend, OPERATIONS, Operation, Profile, SIZES};
use forebay_control::api::client::Client;
use forebay_control::api::model::{EngineState, ExportFrontend, Status};
use forebay_control::api::scheduling::{
    CostOperation, CostProfile, Costs, CostsPut, NodeCapacity, Scheduling, SchedulingUpdate,
};
use forebay_control::api::stats::Stats;
use forebay_device::size::format_bytes;
use serde::Serialize;

use self::fit::Rounds;
use self::measure::{LOADS, Measured, Plan};
use self::scratch::{Scratch, kind};
use crate::command::Context;
use crate::failure::{Failure, Outcome};
use crate::interrupt::Interrupt;
use crate::output::table;
use crate::progress;

#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// A few seconds: to see that it works, and what the figures are like
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// How long about
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(5..=3600))]
    seconds: u64,
    /// Even if others' exports are under load: costs will be too high
    #[arg(long)]
    anyway: bool,
    /// Show what was measured, and store nothing
    #[arg(long)]
    dry_run: bool,
}

/// Of the whole time, this part is for first writes.
const FILL_PART: f64 = 0.1;
/// And this part for loads; the rest is for what is between.
const LOAD_PART: f64 = 0.7;
/// Of a volume, in a short run and in a long one.
const BYTES: [u64; 2] = [16 << 20, 128 << 20];
/// So long an engine may take to start.
const ENGINE_LIMIT: Duration = Duration::from_secs(20);
/// Rounds further apart than this are worth a word.
const NOISY: f64 = 0.25;

/// What was found.
#[derive(Debug, Serialize)]
struct Found {
    costs: Vec<Cost>,
    /// Of the links by which hosts come, if known.
    link_bytes_per_second: Option<u64>,
    /// How far rounds were apart at most, of their median.
    noise: f64,
    /// Frontends that could not be driven, and why; what was stored of them stays.
    left_out: Vec<String>,
    /// Whether the daemon keeps it.
    stored: bool,
}

/// Of one operation of one frontend.
#[derive(Debug, Clone, Serialize)]
struct Cost {
    #[serde(flatten)]
    profile: CostProfile,
    noise: f64,
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
    let costs = costs(&frontends, reactors);
    let found = Found {
        noise: costs.iter().map(|cost| cost.noise).fold(0.0, f64::max),
        costs,
        link_bytes_per_second: link::bytes_per_second(&status.nvme_tcp),
        left_out,
        stored: !args.dry_run,
    };
    if found.stored {
        store(client, &found)?;
    }
    context.output.show(&found, text)
}

/// Has the daemon keep it: costs, and the capacity that they are measured against.
fn store(client: &Client, found: &Found) -> Outcome {
    let costs = CostsPut {
        profiles: found.costs.iter().map(|cost| cost.profile).collect(),
        note: Some(format!(
            "rounds up to {:.0} % apart{}",
            found.noise * 100.0,
            if found.left_out.is_empty() {
                ""
            } else {
                "; not every frontend could be driven"
            }
        )),
    };
    let _: Costs = client.put("/v1/scheduling/costs", &costs)?;
    let Some(link) = found.link_bytes_per_second else {
        return Ok(());
    };
    let scheduling: Scheduling = client.get("/v1/scheduling")?;
    let capacity = scheduling.capacity;
    if capacity.link_in_bytes_s.is_some() || capacity.link_out_bytes_s.is_some() {
        // Somebody has said it, and knows better.
        return Ok(());
    }
    let update = SchedulingUpdate {
        capacity: Some(NodeCapacity {
            link_in_bytes_s: Some(link),
            link_out_bytes_s: Some(link),
            ..capacity
        }),
        ..SchedulingUpdate::default()
    };
    let _: Scheduling = client.patch("/v1/scheduling", &update)?;
    Ok(())
}

/// Waits for the engine of a pool that was made or opened just now; how many reactors it has.
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
                Failure::new("no engine runs, so there is nothing to measure")
                    .hint("make or open a pool first; `forebay status` says how the engine is"),
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn plan(args: &CalibrateArgs) -> Plan {
    let (seconds, rounds) = if args.quick {
        (4, 1)
    } else {
        (args.seconds, 3)
    };
    let loads = rounds * LOADS * FRONTENDS.len() as u32;
    let all = Duration::from_secs(seconds);
    Plan {
        rounds,
        time: all.mul_f64(LOAD_PART) / loads,
        fill: all.mul_f64(FILL_PART) / FRONTENDS.len() as u32,
        anyway: args.anyway,
    }
}

/// Bytes of a command besides its data: of NVMe/TCP the headers of its PDUs in the direction of its data (Transport 3.6.2)
/// and those of one packet. A machine's disk has no link.
fn header_bytes(frontend: Frontend, operation: Operation) -> u32 {
    const PACKET: u32 = 78;
    const COMMAND: u32 = 72;
    const DATA: u32 = 24;
    const RESPONSE: u32 = 24;
    match (frontend, operation) {
        (Frontend::Pcie | Frontend::Vhost, _) => 0,
        (Frontend::Tcp, Operation::Read) => DATA + RESPONSE + PACKET,
        (Frontend::Tcp, Operation::Write) => COMMAND + DATA + PACKET,
        (Frontend::Tcp, Operation::Other) => COMMAND + PACKET,
    }
}

fn costs(frontends: &[(Frontend, Measured)], reactors: u32) -> Vec<Cost> {
    // Of commands without data: the dearer of the two kinds counts.
    let same = |rounds: &Rounds| -> [Rounds; 6] { std::array::from_fn(|_| rounds.clone()) };
    let device = |of: &dyn Fn(&Measured) -> [Rounds; 6]| {
        let all: Vec<[Rounds; 6]> = frontends.iter().map(|(_, m)| of(m)).collect();
        fit::device(&all.iter().collect::<Vec<_>>(), reactors)
    };
    let reads = device(&|m| m.reads.clone());
    let writes = device(&|m| m.writes.clone());
    let others = device(&|m| same(&m.flushes))[0].max(device(&|m| same(&m.deallocations))[0]);
    // A device goes on with others' commands beside a flush, however long that takes.
    let others = others.min(writes[5]);
    let mut costs = Vec::new();
    for (frontend, measured) in frontends {
        for operation in OPERATIONS {
            let header_bytes = header_bytes(*frontend, operation);
            let profile = match operation {
                Operation::Read => Profile {
                    cpu_ns: fit::cpu(&measured.reads),
                    device_ns: reads,
                    header_bytes,
                },
                Operation::Write => Profile {
                    cpu_ns: fit::cpu(&measured.writes),
                    device_ns: writes,
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
    costs
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

fn text(found: &Found) -> String {
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
    if found.noise > NOISY {
        text.push_str(&format!(
            "\nrounds were up to {:.0} % apart: something else was at work here",
            found.noise * 100.0
        ));
    }
    text.push_str(match found.stored {
        true => "\nstored: `forebay scheduling costs` shows it",
        false => "\nnothing was stored",
    });
    text
}
