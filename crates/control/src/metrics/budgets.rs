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
        COUNTER "forebay_tenant_commands_total" "Commands charged to a tenant's budget.", |t| Some(t.used_ops);
        COUNTER "forebay_tenant_bytes_total" "Bytes of commands charged to a tenant's budget.", |t| Some(t.used_bytes);
        COUNTER "forebay_tenant_metered_commands_total" "Commands above the base of a metered tenant.", |t| Some(t.metered_ops);
        COUNTER "forebay_tenant_metered_bytes_total" "Bytes above the base of a metered tenant.", |t| Some(t.metered_bytes);
        COUNTER "forebay_tenant_throttled_commands_total" "Commands that waited because their tenant was over budget.", |t| Some(t.throttled_ops);
        COUNTER "forebay_tenant_taken_commands_total" "Commands admitted from a bursting tenant's allocation.", |t| Some(t.taken_ops);
        COUNTER "forebay_tenant_lost_commands_total" "Other tenants' commands admitted from this tenant's allocation.", |t| Some(t.lost_ops);
        COUNTER "forebay_tenant_reserve_commands_total" "Commands admitted from the reserve.", |t| Some(t.reserve_ops);
        COUNTER "forebay_tenant_burst_windows_total" "Windows in which a tenant used more than its base.", |t| Some(t.burst_windows);
        COUNTER "forebay_tenant_active_windows_total" "Windows in which a tenant used anything.", |t| Some(t.active_windows);
        COUNTER "forebay_tenant_throttled_seconds_total" "Time that a tenant's commands waited because the tenant was over budget.", |t| Some(seconds(t.throttled_ns));
        COUNTER "forebay_tenant_cost_seconds_total" "Processor and device time that a tenant's commands cost, as calibrated.", |t| Some(seconds(t.cost_ns));
        COUNTER "forebay_tenant_corrected_cost_seconds_total" "Processor and device time as charged: corrected by how long commands wait.", |t| Some(seconds(t.corrected_ns));
        GAUGE "forebay_tenant_granted_iops" "Allocation of a tenant in the newest window; absent: no limit.", |t| t.granted_iops;
        GAUGE "forebay_tenant_granted_bytes_per_second" "Allocation of a tenant in the newest window; absent: no limit.", |t| t.granted_bytes_s;
        GAUGE "forebay_tenant_window_iops" "Use by a tenant in the newest finished window.", |t| Some(t.window_iops);
        GAUGE "forebay_tenant_window_bytes_per_second" "Use by a tenant in the newest finished window.", |t| Some(t.window_bytes_s);
        GAUGE "forebay_tenant_commands_throttled" "Commands that waited at the end of the newest window, for their budget or for a turn of their reactor.", |t| Some(t.window_throttled);
        GAUGE "forebay_tenant_burst_ratio" "Share of a tenant's use above its base in the newest finished window.", |t| Some(t.burst_share());
        GAUGE "forebay_tenant_cost_correction_ratio" "Factor on the calibrated cost of a tenant's commands in the newest window.", |t| t.window_correction();
        GAUGE "forebay_tenant_base_iops" "A tenant's base.", |t| Some(t.budget?.base?.iops);
        GAUGE "forebay_tenant_base_bytes_per_second" "A tenant's base.", |t| Some(t.budget?.base?.bytes_s);
        GAUGE "forebay_tenant_burst_iops" "A tenant's burst limit.", |t| t.budget?.burst.iops;
        GAUGE "forebay_tenant_burst_bytes_per_second" "A tenant's burst limit.", |t| t.budget?.burst.bytes_s;
        GAUGE "forebay_tenant_credit_commands" "Unused base that a tenant has saved.", |t| Some(t.credit?.ops);
        GAUGE "forebay_tenant_credit_bytes" "Unused base that a tenant has saved.", |t| Some(t.credit?.bytes);
        GAUGE "forebay_tenant_credit_limit_commands" "The most credit that a tenant can save.", |t| Some(t.credit?.most_ops);
        GAUGE "forebay_tenant_credit_limit_bytes" "The most credit that a tenant can save.", |t| Some(t.credit?.most_bytes);
    }
}

pub(super) fn throttled(out: &mut Exposition, lanes: &[LaneStats]) {
    fn labels(lane: &LaneStats) -> [(&str, &str); 2] {
        [("tenant", &*lane.tenant), ("volume", &*lane.volume)]
    }
    families! { out, lanes, labels;
        GAUGE "forebay_volume_granted_iops" "Allocation of the volume in its newest window, for all its exports together; absent: no limit.", |l| l.granted_iops;
        GAUGE "forebay_volume_granted_bytes_per_second" "Allocation of the volume in its newest window, for all its exports together; absent: no limit.", |l| l.granted_bytes_s;
        COUNTER "forebay_volume_throttled_commands_total" "Commands that waited because they were over budget.", |l| Some(l.throttled_ops);
        GAUGE "forebay_volume_commands_throttled" "Commands that wait now, for their budget or for a turn of their reactor.", |l| Some(l.throttled);
    }
    let name = "forebay_volume_throttled_seconds";
    let help = "How long throttled commands waited because they were over budget.";
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
        COUNTER "forebay_reactor_windows_total" "Finished windows of a reactor's scheduler.", |(_, r)| Some(r.windows);
        COUNTER "forebay_reactor_handed_over_total" "Device operations (a command may need several) offloaded to other reactors.", |(_, r)| Some(r.handed_over);
        COUNTER "forebay_reactor_carried_out_total" "Device operations that a reactor carried out for other reactors.", |(_, r)| Some(r.carried_out);
        COUNTER "forebay_reactor_scheduling_seconds_total" "Time that refills at the ends of windows took.", |(_, r)| Some(seconds(r.scheduling_ns));
    }
    let name = "forebay_reactor_cost_correction";
    let help = "Current factor on the calibrated cost of I/O, for each resource.";
    out.family(name, GAUGE, help);
    for (number, reactor) in &all {
        for correction in &reactor.corrections {
            let resource = correction.resource.replace(' ', "_");
            let labels = [("reactor", &**number), ("resource", &*resource)];
            out.sample(name, &labels, correction.times);
        }
    }
}
