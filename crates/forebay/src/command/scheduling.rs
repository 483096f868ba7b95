//! `forebay scheduling`, and how budgets are read and shown.

use std::cmp::Ordering;

use forebay_control::model::scheduling::{
    Admission, Budget, BudgetParts, Change, Costs, LARGE_BYTES, Limit, Rate, RateParts,
    SMALL_BYTES, Scheduling, SchedulingUpdate,
};
use forebay_device::size::format_bytes;
use serde::Serialize;

use crate::cli::{Amount, BudgetArgs, SchedulingArgs, SchedulingCommand};
use crate::context::Context;
use crate::failure::Outcome;
use crate::output::{bandwidth, duration_ns, pairs, table};
use crate::word::word;

pub(crate) fn scheduling(context: &Context, command: SchedulingCommand) -> Outcome {
    let client = &context.client;
    match command {
        SchedulingCommand::Show => {
            let now: Scheduling = client.get("/v1/scheduling")?;
            context.output.show(&now, show)
        }
        SchedulingCommand::Costs { reset } => {
            let costs: Costs = match reset {
                true => client.delete("/v1/scheduling/costs")?,
                false => client.get("/v1/scheduling/costs")?,
            };
            context.output.show(&costs, costs_text)
        }
        SchedulingCommand::Set(args) => {
            let before: Scheduling = client.get("/v1/scheduling")?;
            let now: Scheduling = client.patch("/v1/scheduling", &update_of(*args, &before))?;
            context.output.show(&now, show)
        }
    }
}

fn update_of(args: SchedulingArgs, before: &Scheduling) -> SchedulingUpdate {
    let mut capacity = before.capacity;
    capacity.device_reads = args.device_reads.unwrap_or(capacity.device_reads);
    capacity.device_writes = args.device_writes.unwrap_or(capacity.device_writes);
    if let Some(limit) = args.link_bandwidth {
        (capacity.link_in_bytes_s, capacity.link_out_bytes_s) = (limit.0, limit.0);
        capacity.link_found = false;
    }
    if let Some(limit) = args.iops_limit {
        capacity.operations_s = limit.0;
    }
    SchedulingUpdate {
        spread: args.spread.map(Into::into),
        oversubscription: args.oversubscription,
        wants_base: args.wants_base,
        capacity: (capacity != before.capacity).then_some(capacity),
        params: args.params.into_iter().collect(),
    }
}

/// The change of a budget; `None` removes it.
pub(crate) fn patch_of(args: &BudgetArgs, credit_s: Change<u32>) -> Option<BudgetParts> {
    let rate = |iops: Option<Amount>, bytes_s: Option<Amount>| {
        (iops.or(bytes_s).is_some()).then_some(Some(RateParts {
            iops: iops.map(|part| part.0),
            bytes_s: bytes_s.map(|part| part.0),
        }))
    };
    (!args.none).then(|| BudgetParts {
        base: match args.no_base {
            true => Some(None),
            false => rate(args.base_iops, args.base_bandwidth),
        },
        burst: rate(args.burst_iops, args.burst_bandwidth),
        credit_s,
    })
}

/// Tells which half of a base was assumed.
pub(crate) fn assumed_text(budget: &Budget) -> String {
    let Some(base) = budget.base else {
        return String::new();
    };
    let stated = budget.stated.base.flatten().unwrap_or_default();
    let (what, order, has, why) = match (stated.iops.flatten(), stated.bytes_s.flatten()) {
        (Some(_), None) => (
            "bandwidth was",
            base.bytes_s.cmp(&base.iops.saturating_mul(SMALL_BYTES)),
            format!("{}/s", format_bytes(base.bytes_s)),
            format!("{}/s for each of its IOPS", format_bytes(SMALL_BYTES)),
        ),
        (None, Some(_)) => (
            "IOPS were",
            base.iops.cmp(&(base.bytes_s / LARGE_BYTES)),
            format!("{} IOPS", base.iops),
            format!("one for every {}/s", format_bytes(LARGE_BYTES)),
        ),
        _ => return String::new(),
    };
    let why = match order {
        Ordering::Equal => &*why,
        Ordering::Less => "its burst limit",
        Ordering::Greater => "the minimum of a base",
    };
    format!("{what} not set: the base has {has}, {why}\n")
}

fn base_text(base: Option<Rate>) -> String {
    match base {
        Some(Rate { iops, bytes_s }) => format!("a base of {iops} IOPS and {}", bandwidth(bytes_s)),
        None => "no base".to_owned(),
    }
}

fn limit_text(limit: &Limit) -> String {
    let bandwidth = limit.bytes_s.map(bandwidth);
    rates_text(limit.iops, bandwidth, "all free resources")
}

/// IOPS and bandwidth, or `endless` without limits.
pub(super) fn rates_text(iops: Option<u64>, bandwidth: Option<String>, endless: &str) -> String {
    if iops.is_none() && bandwidth.is_none() {
        return endless.to_owned();
    }
    let iops = iops.map_or_else(|| "any".to_owned(), |iops| iops.to_string());
    let bandwidth = bandwidth.unwrap_or_else(|| "any bandwidth".to_owned());
    format!("{iops} IOPS and {bandwidth}")
}

fn time_text(seconds: u32) -> String {
    match seconds {
        s if s % 86_400 == 0 => format!("{}d", s / 86_400),
        s if s % 3600 == 0 => format!("{}h", s / 3600),
        s if s % 60 == 0 => format!("{}m", s / 60),
        s => format!("{s}s"),
    }
}

pub(crate) fn budget_line(budget: &Budget) -> String {
    let (base, limit) = (base_text(budget.base), limit_text(&budget.burst));
    match budget.credit_s.map(time_text) {
        Some(time) => format!("{base}, bursts to {limit}, from at most {time} of saved base"),
        None => format!("{base}, bursts to {limit}, metered"),
    }
}

pub(crate) fn limit_line(budget: &Budget) -> String {
    let (base, limit) = (base_text(budget.base), limit_text(&budget.burst));
    format!("{base}, at most {limit}")
}

pub(crate) fn budget_cells(budget: Option<&Budget>) -> [String; 3] {
    let Some(budget) = budget else {
        return ["-", "-", "-"].map(str::to_owned);
    };
    let credit = budget.credit_s.map(time_text);
    [
        base_text(budget.base).replace("a base of ", ""),
        limit_text(&budget.burst),
        credit.unwrap_or_else(|| "metered".to_owned()),
    ]
}

/// The most tenants listed as lacking resources.
const LACKING: usize = 8;
const PLACES: &str = "  remedies: set a smaller base; delete an export and create it again, so that it is served \
     where its tenant's base fits; use several volumes, which several reactors can serve\n";

pub(crate) fn admission_text(admission: &Admission) -> String {
    let measured: Vec<String> = admission.measured.iter().map(name).collect();
    let from = match (admission.calibrated, &*measured.join(", ")) {
        (true, _) => "measurements on this machine".to_owned(),
        (false, "") => "defaults: `forebay calibrate` measures this machine".to_owned(),
        (false, measured) => format!(
            "measurements on this machine of {measured}, and defaults of other frontends: `forebay calibrate` says why"
        ),
    };
    let most = admission.promised.iter();
    let most = most.max_by(|a, b| a.percent.total_cmp(&b.percent));
    let mut promised = most.map_or_else(String::new, |most| {
        format!("; {:.1} % of {} is promised", most.percent, most.resource)
    });
    let reactors = admission.reactors.iter();
    let reactors: Vec<String> = reactors.map(|of| format!("{:.1} %", of.percent)).collect();
    if reactors.len() > 1 {
        promised.push_str(&format!("; of the reactors {}", reactors.join(", ")));
    }
    let (at_once, tenants) = (admission.at_once, admission.tenants);
    if admission.guaranteed {
        return format!("all bases are guaranteed{promised} (calculated from {from})\n");
    } else if at_once < tenants {
        let percent = admission.interference * 100.0;
        return format!(
            "bases are oversubscribed: {at_once} of {tenants} tenants can use theirs at once; the probability that \
             more need theirs is {percent:.2} %{promised} (calculated from {from})\n"
        );
    }
    let mut text = format!("not all bases are guaranteed{promised} (calculated from {from})\n");
    for base in admission.lacking.iter().take(LACKING) {
        text.push_str(&format!("  {}\n", base.text()));
    }
    if let more @ 1.. = admission.lacking.len().saturating_sub(LACKING) {
        text.push_str(&format!("  and {more} other tenants\n"));
    }
    text + PLACES
}

fn limit(value: Option<u64>, text: impl Fn(u64) -> String) -> String {
    value.map_or_else(|| "no limit".to_owned(), text)
}

fn show(now: &Scheduling) -> String {
    let found = match now.capacity.link_found {
        true => ", found by `forebay calibrate`",
        false => "",
    };
    let link = |value| limit(value, |bytes| format!("{}{found}", bandwidth(bytes)));
    let on = match now.on {
        true => "yes",
        false => "no: no budget is set",
    };
    let mut text = pairs([
        ("scheduled", on.to_owned()),
        ("spread", name(&now.spread)),
        ("oversubscription", now.oversubscription.to_string()),
        ("wants base", now.wants_base.to_string()),
        ("reactors", now.reactors.to_string()),
        ("device reads", now.capacity.device_reads.to_string()),
        ("device writes", now.capacity.device_writes.to_string()),
        ("link in", link(now.capacity.link_in_bytes_s)),
        ("link out", link(now.capacity.link_out_bytes_s)),
        (
            "software limit",
            limit(now.capacity.operations_s, |n| format!("{n} IOPS")),
        ),
    ]);
    text.push_str(&admission_text(&now.admission));
    for (name, value) in &now.params {
        // `f32` hides rounding digits.
        text.push_str(&format!("{name} = {}\n", *value as f32));
    }
    text
}

fn name(value: &impl Serialize) -> String {
    word(value).replace('_', "-")
}

fn costs_text(costs: &Costs) -> String {
    let mut text = match (costs.calibrated, &costs.note) {
        (true, Some(note)) => format!("measured on this machine: {note}\n"),
        (true, None) => "measured on this machine\n".to_owned(),
        (false, _) => "defaults: `forebay calibrate` measures this machine\n".to_owned(),
    };
    let time = |ns: f64| duration_ns(ns.round() as u64);
    let rows = costs.profiles.iter().map(|profile| {
        [
            name(&profile.frontend),
            word(&profile.operation),
            time(profile.cpu_ns[0]),
            time(profile.cpu_ns[5]),
            time(profile.device_ns[0]),
            time(profile.device_ns[5]),
            profile.header_bytes.to_string(),
        ]
    });
    text.push_str(&table(
        [
            "FRONTEND",
            "OPERATION",
            ">CPU 4K",
            ">CPU 128K",
            ">DEVICE 4K",
            ">DEVICE 128K",
            ">HEADERS",
        ],
        rows,
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assumed_budget_values_are_explained() {
        let stated = |iops: Option<u64>, bytes_s: Option<u64>| BudgetParts {
            base: Some(Some(RateParts {
                iops: iops.map(Some),
                bytes_s: bytes_s.map(Some),
            })),
            ..BudgetParts::default()
        };
        let text = |stated: BudgetParts, iops: u64, bytes_s: u64| {
            assumed_text(&Budget {
                base: Some(Rate { iops, bytes_s }),
                stated,
                ..Budget::default()
            })
        };
        let iops = stated(Some(2000), None);
        let each = text(iops, 2000, 2000 * 4096);
        assert!(each.contains("4 KiB/s for each"), "{each}");
        let clipped = text(iops, 2000, 5_000_000);
        assert!(clipped.ends_with("/s, its burst limit\n"), "{clipped}");
        let raised = text(stated(Some(10), None), 10, 64 << 10);
        assert!(raised.ends_with("64 KiB/s, the minimum of a base\n"));
        let bytes = stated(None, Some(64 << 20));
        let one = text(bytes, 512, 64 << 20);
        assert!(
            one.ends_with("512 IOPS, one for every 128 KiB/s\n"),
            "{one}"
        );
        let clipped = text(bytes, 100, 64 << 20);
        assert!(clipped.ends_with("100 IOPS, its burst limit\n"));
        assert_eq!(text(stated(Some(1), Some(1)), 1, 1), "");
    }
}
