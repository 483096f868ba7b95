//! Figures of budgets and of scheduling: tenants, throttled commands, reactors.
//!
//! Purpose: a bill, and who is noisy and who is hurt, out of one scrape.
//! Design: as in the module above; rates are for the reader to take, but for what is stated and given as a rate.
//! Not here: gathering (the owner).

use super::{COUNTER, Exposition, GAUGE, histogram, seconds};
use crate::api::scheduling::Budget;
use crate::api::stats::{LaneStats, ReactorStats, TenantStats};

type Sum = fn(&TenantStats) -> u64;
type Stated = fn(&Budget) -> Option<u64>;

/// What adds up of a tenant.
const SUMS: [(&str, &str, Sum); 10] = [
    (
        "commands_total",
        "Commands that a tenant's budget paid for.",
        |t| t.used_ops,
    ),
    (
        "bytes_total",
        "Bytes of commands that a tenant's budget paid for.",
        |t| t.used_bytes,
    ),
    (
        "metered_commands_total",
        "Commands above the base of a tenant that is metered.",
        |t| t.metered_ops,
    ),
    (
        "metered_bytes_total",
        "Bytes above the base of a tenant that is metered.",
        |t| t.metered_bytes,
    ),
    (
        "throttled_commands_total",
        "Commands that waited because their tenant was over budget.",
        |t| t.throttled_ops,
    ),
    (
        "taken_commands_total",
        "Commands that began out of what a bursting tenant had been given.",
        |t| t.taken_ops,
    ),
    (
        "lost_commands_total",
        "Others' commands that began out of what this tenant had been given.",
        |t| t.lost_ops,
    ),
    (
        "reserve_commands_total",
        "Commands that began out of the reserve.",
        |t| t.reserve_ops,
    ),
    (
        "burst_windows_total",
        "Windows in which a tenant had more than its base.",
        |t| t.burst_windows,
    ),
    (
        "active_windows_total",
        "Windows in which a tenant had anything.",
        |t| t.active_windows,
    ),
];

/// What is of a tenant's newest window.
const NEWEST: [(&str, &str, Sum); 3] = [
    (
        "window_iops",
        "What a tenant used in the newest window that ended.",
        |t| t.window_iops,
    ),
    (
        "window_bytes_per_second",
        "What a tenant used in the newest window that ended.",
        |t| t.window_bytes_s,
    ),
    (
        "commands_throttled",
        "Commands that waited at the end of the newest window, for their budget or for a turn of their reactor.",
        |t| t.window_throttled,
    ),
];

/// What is stated of a tenant.
const STATED: [(&str, &str, Stated); 4] = [
    ("base_iops", "A tenant's base.", |b| {
        b.base.map(|base| base.iops)
    }),
    ("base_bytes_per_second", "A tenant's base.", |b| {
        b.base.map(|base| base.bytes_s)
    }),
    ("burst_iops", "A tenant's burst limit.", |b| b.burst.iops),
    ("burst_bytes_per_second", "A tenant's burst limit.", |b| {
        b.burst.bytes_s
    }),
];

/// All of tenants.
pub(super) fn tenants(out: &mut Exposition, tenants: &[TenantStats]) {
    for (name, help, sum) in SUMS {
        let name = format!("forebay_tenant_{name}");
        out.family(&name, COUNTER, help);
        for tenant in tenants {
            out.sample(&name, &[("tenant", &tenant.tenant)], sum(tenant));
        }
    }
    for (name, help, ns) in [
        (
            "forebay_tenant_throttled_seconds_total",
            "How long a tenant's commands waited because it was over budget.",
            (|t| t.throttled_ns) as Sum,
        ),
        (
            "forebay_tenant_cost_seconds_total",
            "Time of processors and devices that a tenant's commands cost, as they are calibrated.",
            |t| t.cost_ns,
        ),
        (
            "forebay_tenant_corrected_cost_seconds_total",
            "The same as it counted: corrected by what commands wait.",
            |t| t.corrected_ns,
        ),
    ] {
        out.family(name, COUNTER, help);
        for tenant in tenants {
            let labels = [("tenant", &*tenant.tenant)];
            out.sample(name, &labels, seconds(ns(tenant)));
        }
    }
    for (name, given) in [
        (
            "forebay_tenant_granted_iops",
            (|tenant| tenant.granted_iops) as fn(&TenantStats) -> Option<u64>,
        ),
        ("forebay_tenant_granted_bytes_per_second", |tenant| {
            tenant.granted_bytes_s
        }),
    ] {
        let help = "What a tenant was given in the newest window; absent: no limit.";
        out.family(name, GAUGE, help);
        for tenant in tenants {
            if let Some(given) = given(tenant) {
                out.sample(name, &[("tenant", &tenant.tenant)], given);
            }
        }
    }
    for (name, help, newest) in NEWEST {
        let name = format!("forebay_tenant_{name}");
        out.family(&name, GAUGE, help);
        for tenant in tenants {
            out.sample(&name, &[("tenant", &tenant.tenant)], newest(tenant));
        }
    }
    let name = "forebay_tenant_burst_ratio";
    let help = "Of what a tenant used in the newest window that ended, the part above its base.";
    out.family(name, GAUGE, help);
    for tenant in tenants {
        out.sample(name, &[("tenant", &*tenant.tenant)], tenant.burst_share());
    }
    let name = "forebay_tenant_cost_correction_ratio";
    let help =
        "In the newest window, a tenant's commands counted as so many times what is calibrated.";
    out.family(name, GAUGE, help);
    for tenant in tenants {
        if let Some(times) = tenant.window_correction() {
            out.sample(name, &[("tenant", &*tenant.tenant)], times);
        }
    }
    for (name, help, stated) in STATED {
        let name = format!("forebay_tenant_{name}");
        out.family(&name, GAUGE, help);
        for tenant in tenants {
            if let Some(value) = tenant.budget.as_ref().and_then(stated) {
                out.sample(&name, &[("tenant", &tenant.tenant)], value);
            }
        }
    }
    let saved = |at: usize| {
        let credits = tenants.iter().filter_map(move |tenant| {
            let credit = tenant.credit?;
            let parts = [credit.ops, credit.bytes, credit.most_ops, credit.most_bytes];
            Some((&*tenant.tenant, parts[at]))
        });
        credits.collect::<Vec<_>>()
    };
    for (at, name, help) in [
        (0, "credit_commands", "What a tenant has saved of its base."),
        (1, "credit_bytes", "What a tenant has saved of its base."),
        (
            2,
            "credit_limit_commands",
            "The most that a tenant can save.",
        ),
        (3, "credit_limit_bytes", "The most that a tenant can save."),
    ] {
        let name = format!("forebay_tenant_{name}");
        out.family(&name, GAUGE, help);
        for (tenant, value) in saved(at) {
            out.sample(&name, &[("tenant", tenant)], value);
        }
    }
}

/// What each export was given, and what waited of it because it was over budget.
pub(super) fn throttled(out: &mut Exposition, lanes: &[LaneStats]) {
    fn labels(lane: &LaneStats) -> [(&str, &str); 2] {
        [("tenant", &*lane.tenant), ("volume", &*lane.volume)]
    }
    for (name, given) in [
        (
            "forebay_volume_granted_iops",
            (|lane| lane.granted_iops) as fn(&LaneStats) -> Option<u64>,
        ),
        ("forebay_volume_granted_bytes_per_second", |lane| {
            lane.granted_bytes_s
        }),
    ] {
        let help =
            "An export's part of what its tenant was given in its newest window; absent: no limit.";
        out.family(name, GAUGE, help);
        for lane in lanes {
            if let Some(given) = given(lane) {
                out.sample(name, &labels(lane), given);
            }
        }
    }
    let name = "forebay_volume_throttled_commands_total";
    out.family(
        name,
        COUNTER,
        "Commands that waited because they were over budget.",
    );
    for lane in lanes {
        out.sample(name, &labels(lane), lane.throttled_ops);
    }
    let name = "forebay_volume_commands_throttled";
    out.family(
        name,
        GAUGE,
        "Commands that wait now, for their budget or for a turn of their reactor.",
    );
    for lane in lanes {
        out.sample(name, &labels(lane), lane.throttled);
    }
    let name = "forebay_volume_throttled_seconds";
    let help = "How long commands waited because they were over budget, of those that did.";
    out.family(name, "histogram", help);
    for lane in lanes {
        if lane.throttled_times.count > 0 {
            histogram(out, name, &labels(lane), &lane.throttled_times);
        }
    }
}

/// What scheduling took of each reactor.
pub(super) fn reactors(out: &mut Exposition, reactors: &[ReactorStats]) {
    let numbers: Vec<String> = reactors.iter().map(|r| r.reactor.to_string()).collect();
    let all = || reactors.iter().zip(&numbers);
    for (name, help, sum) in [
        (
            "forebay_reactor_windows_total",
            "Windows of a reactor's scheduler that ended.",
            (|r| r.windows) as fn(&ReactorStats) -> u64,
        ),
        (
            "forebay_reactor_handed_over_total",
            "Operations at devices (a command may be several) that other reactors were given to carry out.",
            |r| r.handed_over,
        ),
        (
            "forebay_reactor_carried_out_total",
            "Operations at devices that a reactor carried out for others.",
            |r| r.carried_out,
        ),
    ] {
        out.family(name, COUNTER, help);
        for (reactor, number) in all() {
            out.sample(name, &[("reactor", number)], sum(reactor));
        }
    }
    let name = "forebay_reactor_scheduling_seconds_total";
    out.family(name, COUNTER, "How long the ends of windows took.");
    for (reactor, number) in all() {
        out.sample(name, &[("reactor", number)], seconds(reactor.scheduling_ns));
    }
    let name = "forebay_reactor_cost_correction";
    let help = "So many times what is calibrated I/O counts now, of each resource.";
    out.family(name, GAUGE, help);
    for (reactor, number) in all() {
        for correction in &reactor.corrections {
            let resource = correction.resource.replace(' ', "_");
            let labels = [("reactor", &**number), ("resource", &*resource)];
            out.sample(name, &labels, correction.times);
        }
    }
}
