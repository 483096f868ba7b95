//! Metrics of budgets and scheduling: tenants, throttled commands, reactors. They show the bill,
//! and which tenants disturb others or suffer.

use std::fmt::Display;

use super::{COUNTER, Exposition, GAUGE, histogram, seconds};
use crate::model::stats::{LaneStats, ReactorStats, TenantStats};

/// Writes one metric family per row, with samples where there is a value.
macro_rules! families {
    ($out:ident, $all:expr, $labels:expr; $($kind:ident $name:literal $help:literal, $value:expr;)*) => {
        $(family($out, $all, $labels, ($name, $kind, $help), $value);)*
    };
}

fn family<T, V: Display, const N: usize>(
    out: &mut Exposition,
    all: &[T],
    labels: for<'a> fn(&'a T) -> [(&'a str, &'a str); N],
    (name, kind, help): (&str, &str, &str),
    value: impl Fn(&T) -> Option<V>,
) {
    out.family(name, kind, help);
    for one in all {
        if let Some(value) = value(one) {
            out.sample(name, &labels(one), value);
        }
    }
}

pub(super) fn tenants(out: &mut Exposition, tenants: &[TenantStats]) {
    families! { out, tenants, |t| [("tenant", &t.tenant)];
        COUNTER "forebay_tenant_commands_total" "Commands that a tenant's budget paid for.", |t| Some(t.used_ops);
        COUNTER "forebay_tenant_bytes_total" "Bytes of commands that a tenant's budget paid for.", |t| Some(t.used_bytes);
        COUNTER "forebay_tenant_metered_commands_total" "Commands above the base of a tenant that is metered.", |t| Some(t.metered_ops);
        COUNTER "forebay_tenant_metered_bytes_total" "Bytes above the base of a tenant that is metered.", |t| Some(t.metered_bytes);
        COUNTER "forebay_tenant_throttled_commands_total" "Commands that waited because their tenant was over budget.", |t| Some(t.throttled_ops);
        COUNTER "forebay_tenant_taken_commands_total" "Commands that began out of what a bursting tenant had been given.", |t| Some(t.taken_ops);
        COUNTER "forebay_tenant_lost_commands_total" "Others' commands that began out of what this tenant had been given.", |t| Some(t.lost_ops);
        COUNTER "forebay_tenant_reserve_commands_total" "Commands that began out of the reserve.", |t| Some(t.reserve_ops);
        COUNTER "forebay_tenant_burst_windows_total" "Windows in which a tenant had more than its base.", |t| Some(t.burst_windows);
        COUNTER "forebay_tenant_active_windows_total" "Windows in which a tenant had anything.", |t| Some(t.active_windows);
        COUNTER "forebay_tenant_throttled_seconds_total" "How long a tenant's commands waited because it was over budget.", |t| Some(seconds(t.throttled_ns));
        COUNTER "forebay_tenant_cost_seconds_total" "Time of processors and devices that a tenant's commands cost, as they are calibrated.", |t| Some(seconds(t.cost_ns));
        COUNTER "forebay_tenant_corrected_cost_seconds_total" "The same as it counted: corrected by what commands wait.", |t| Some(seconds(t.corrected_ns));
        GAUGE "forebay_tenant_granted_iops" "What a tenant was given in the newest window; absent: no limit.", |t| t.granted_iops;
        GAUGE "forebay_tenant_granted_bytes_per_second" "What a tenant was given in the newest window; absent: no limit.", |t| t.granted_bytes_s;
        GAUGE "forebay_tenant_window_iops" "What a tenant used in the newest window that ended.", |t| Some(t.window_iops);
        GAUGE "forebay_tenant_window_bytes_per_second" "What a tenant used in the newest window that ended.", |t| Some(t.window_bytes_s);
        GAUGE "forebay_tenant_commands_throttled" "Commands that waited at the end of the newest window, for their budget or for a turn of their reactor.", |t| Some(t.window_throttled);
        GAUGE "forebay_tenant_burst_ratio" "Of what a tenant used in the newest window that ended, the part above its base.", |t| Some(t.burst_share());
        GAUGE "forebay_tenant_cost_correction_ratio" "In the newest window, a tenant's commands counted as so many times what is calibrated.", |t| t.window_correction();
        GAUGE "forebay_tenant_base_iops" "A tenant's base.", |t| Some(t.budget?.base?.iops);
        GAUGE "forebay_tenant_base_bytes_per_second" "A tenant's base.", |t| Some(t.budget?.base?.bytes_s);
        GAUGE "forebay_tenant_burst_iops" "A tenant's burst limit.", |t| t.budget?.burst.iops;
        GAUGE "forebay_tenant_burst_bytes_per_second" "A tenant's burst limit.", |t| t.budget?.burst.bytes_s;
        GAUGE "forebay_tenant_credit_commands" "What a tenant has saved of its base.", |t| Some(t.credit?.ops);
        GAUGE "forebay_tenant_credit_bytes" "What a tenant has saved of its base.", |t| Some(t.credit?.bytes);
        GAUGE "forebay_tenant_credit_limit_commands" "The most that a tenant can save.", |t| Some(t.credit?.most_ops);
        GAUGE "forebay_tenant_credit_limit_bytes" "The most that a tenant can save.", |t| Some(t.credit?.most_bytes);
    }
}

pub(super) fn throttled(out: &mut Exposition, lanes: &[LaneStats]) {
    fn labels(lane: &LaneStats) -> [(&str, &str); 2] {
        [("tenant", &*lane.tenant), ("volume", &*lane.volume)]
    }
    families! { out, lanes, labels;
        GAUGE "forebay_volume_granted_iops" "What its volume was given in its newest window, for all its exports together; absent: no limit.", |l| l.granted_iops;
        GAUGE "forebay_volume_granted_bytes_per_second" "What its volume was given in its newest window, for all its exports together; absent: no limit.", |l| l.granted_bytes_s;
        COUNTER "forebay_volume_throttled_commands_total" "Commands that waited because they were over budget.", |l| Some(l.throttled_ops);
        GAUGE "forebay_volume_commands_throttled" "Commands that wait now, for their budget or for a turn of their reactor.", |l| Some(l.throttled);
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

pub(super) fn reactors(out: &mut Exposition, reactors: &[ReactorStats]) {
    let all = reactors.iter().map(|of| (of.reactor.to_string(), of));
    let all: Vec<(String, &ReactorStats)> = all.collect();
    families! { out, &all, |(number, _)| [("reactor", number)];
        COUNTER "forebay_reactor_windows_total" "Windows of a reactor's scheduler that ended.", |(_, r)| Some(r.windows);
        COUNTER "forebay_reactor_handed_over_total" "Operations at devices (a command may be several) that other reactors were given to carry out.", |(_, r)| Some(r.handed_over);
        COUNTER "forebay_reactor_carried_out_total" "Operations at devices that a reactor carried out for others.", |(_, r)| Some(r.carried_out);
        COUNTER "forebay_reactor_scheduling_seconds_total" "How long the ends of windows took.", |(_, r)| Some(seconds(r.scheduling_ns));
    }
    let name = "forebay_reactor_cost_correction";
    let help = "So many times what is calibrated I/O counts now, of each resource.";
    out.family(name, GAUGE, help);
    for (number, reactor) in &all {
        for correction in &reactor.corrections {
            let resource = correction.resource.replace(' ', "_");
            let labels = [("reactor", &**number), ("resource", &*resource)];
            out.sample(name, &labels, correction.times);
        }
    }
}
