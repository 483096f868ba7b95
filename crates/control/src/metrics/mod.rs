//! The daemon's metrics for Prometheus, in the text exposition format 0.0.4: a family is a name, a
//! type, a help text and its samples.
//!
//! Histograms have a bound at each power of four from 4 us to 17 s; each is the end of one of the
//! engine's buckets. Empty histograms are left out.

mod budgets;

use std::fmt::Write as _;

use crate::model::stats::{Histogram, LaneStats, OpStats, Stats};
use crate::model::{DeviceState, DriveHealth, EngineState, PoolInfo, Status, Volume};

#[derive(Debug)]
pub(crate) struct MetricSource<'a> {
    pub status: &'a Status,
    pub stats: &'a Stats,
    pub pool: Option<&'a PoolInfo>,
    pub volumes: &'a [Volume],
    /// What the out-of-band endpoint has dropped.
    pub out_of_band_drops: u64,
}

pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The powers of two, in ns, at which histograms have a bound.
const BOUNDS: std::ops::RangeInclusive<u32> = 12..=34;

#[must_use]
pub(crate) fn text(source: &MetricSource<'_>) -> String {
    let mut out = Exposition::default();
    engine(&mut out, source);
    if let Some(pool) = source.pool {
        space(&mut out, pool);
        devices(&mut out, pool);
        let known = pool.devices.iter().filter_map(|device| {
            let drive = device.drive.as_ref()?;
            Some((device.index.to_string(), drive))
        });
        drives(&mut out, &known.collect::<Vec<_>>());
    }
    if let Some(pool) = &source.stats.pool {
        out.one(
            "forebay_pool_grants",
            GAUGE,
            "Grants that engines hold.",
            pool.grants,
        );
        for (name, help, value) in [
            (
                "forebay_faults_total",
                "Faults answered since the daemon started.",
                pool.faults,
            ),
            (
                "forebay_revokes_total",
                "Revokes completed since the daemon started.",
                pool.revokes,
            ),
            (
                "forebay_catalog_commits_total",
                "Catalog transactions made durable since the daemon started.",
                pool.catalog_commits,
            ),
        ] {
            out.one(name, COUNTER, help, value);
        }
    }
    let help = "Frames, packets and messages that the out-of-band endpoint dropped.";
    let name = "forebay_out_of_band_dropped_total";
    out.one(name, COUNTER, help, source.out_of_band_drops);
    volumes(&mut out, source.volumes);
    exports(&mut out, &source.stats.lanes);
    budgets::tenants(&mut out, &source.stats.tenants);
    budgets::throttled(&mut out, &source.stats.lanes);
    budgets::reactors(&mut out, &source.stats.reactors);
    out.0
}

const COUNTER: &str = "counter";
const GAUGE: &str = "gauge";

#[derive(Default)]
struct Exposition(String);

impl Exposition {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            let before = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{before}{label}=\"{}\"", escaped(text));
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }
}

fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"");
    text.replace('\n', "\\n")
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn engine(out: &mut Exposition, source: &MetricSource<'_>) {
    let (status, stats) = (source.status, source.stats);
    out.family("forebay_info", GAUGE, "The program's version; always 1.");
    out.sample("forebay_info", &[("version", &status.version)], 1);
    let up = u8::from(status.engine_state == EngineState::Running);
    out.one("forebay_engine_up", GAUGE, "Whether an engine serves.", up);
    let help = "Number of the engine, counted from the first on this pool.";
    out.one("forebay_engine_generation", GAUGE, help, status.generation);
    if let Some(engine) = &stats.engine {
        let help = "Memory that the engine uses.";
        out.one(
            "forebay_engine_resident_bytes",
            GAUGE,
            help,
            engine.resident_bytes,
        );
        let name = "forebay_staging_bytes";
        let help = "Memory for the data of commands: owned by lanes, and borrowed for bursts until they end.";
        out.family(name, GAUGE, help);
        out.sample(name, &[("tier", "own")], engine.staging_own_bytes);
        out.sample(name, &[("tier", "borrowed")], engine.staging_borrowed_bytes);
    }
    let help = "Number of warnings in `forebay status`.";
    out.one("forebay_warnings", GAUGE, help, status.warnings.len());
    let takeover = &stats.takeover;
    let help = "Engines that died since the daemon started.";
    out.one(
        "forebay_engine_deaths_total",
        COUNTER,
        help,
        takeover.deaths,
    );
    let help = "Engines that took over from a dead one since the daemon started.";
    out.one("forebay_takeovers_total", COUNTER, help, takeover.takeovers);
    if let Some(pause_ns) = takeover.last_pause_ns {
        let help = "How long the last take-over kept hosts waiting.";
        out.one(
            "forebay_takeover_last_pause_seconds",
            GAUGE,
            help,
            seconds(pause_ns),
        );
    }
    let name = "forebay_takeover_connections_closed_total";
    out.family(
        name,
        COUNTER,
        "Connections that take-overs closed, by reason.",
    );
    for closed in &takeover.connections_closed {
        out.sample(name, &[("reason", &closed.reason)], closed.count);
    }
}

fn space(out: &mut Exposition, pool: &PoolInfo) {
    for (name, help, value) in [
        (
            "forebay_pool_capacity_bytes",
            "Size of all extents together.",
            pool.capacity_bytes,
        ),
        (
            "forebay_pool_used_bytes",
            "Space that volumes use, and quarantined space.",
            pool.used_bytes,
        ),
        (
            "forebay_pool_promised_bytes",
            "Space that reservations will take beyond the used space.",
            pool.promised_bytes,
        ),
        (
            "forebay_pool_free_bytes",
            "Space that any volume may still take.",
            pool.free_bytes,
        ),
        (
            "forebay_pool_dirty_bytes",
            "Freed space that is not zero-filled yet.",
            pool.dirty_bytes,
        ),
        (
            "forebay_pool_quarantined_bytes",
            "Space that was freed while a device hung, and is not usable yet.",
            pool.quarantined_bytes,
        ),
        (
            "forebay_pool_provisioned_bytes",
            "The sizes of all volumes together.",
            pool.provisioned_bytes,
        ),
        (
            "forebay_catalog_used_bytes",
            "Size of the catalog's records.",
            pool.catalog.used_bytes,
        ),
        (
            "forebay_catalog_limit_bytes",
            "Largest size of the catalog's records.",
            pool.catalog.limit_bytes,
        ),
    ] {
        out.one(name, GAUGE, help, value);
    }
    let good = pool
        .catalog
        .copies
        .iter()
        .filter(|copy| copy.is_good)
        .count();
    let help = "Current copies of the catalog; two if all is well.";
    out.one("forebay_catalog_good_copies", GAUGE, help, good);
}

fn devices(out: &mut Exposition, pool: &PoolInfo) {
    let indexes: Vec<String> = pool.devices.iter().map(|d| d.index.to_string()).collect();
    let devices = || pool.devices.iter().zip(&indexes);
    let name = "forebay_device_up";
    out.family(name, GAUGE, "Whether a device is online.");
    for (device, index) in devices() {
        let up = u8::from(device.state == DeviceState::Online);
        out.sample(name, &[("device", index), ("spec", &device.spec)], up);
    }
    for (name, help, value) in [
        (
            "forebay_device_used_bytes",
            "Space on a device that volumes use, and quarantined space.",
            (|device| device.used_bytes) as fn(&crate::model::DeviceInfo) -> u64,
        ),
        (
            "forebay_device_free_bytes",
            "Unallocated space on a device.",
            |device| device.free_bytes,
        ),
    ] {
        out.family(name, GAUGE, help);
        for (device, index) in devices() {
            out.sample(name, &[("device", index)], value(device));
        }
    }
    let name = "forebay_device_errors";
    out.family(
        name,
        GAUGE,
        "Operations that a device failed since its engine or the daemon started.",
    );
    for (device, index) in devices() {
        let errors = &device.errors;
        for (op, count) in [
            ("read", errors.reads),
            ("write", errors.writes),
            ("flush", errors.flushes),
        ] {
            out.sample(name, &[("device", index), ("op", op)], count);
        }
    }
}

fn ratio(percent: u8) -> f64 {
    f64::from(percent) / 100.0
}

fn drives(out: &mut Exposition, drives: &[(String, &DriveHealth)]) {
    for (name, kind, help, value) in [
        (
            "forebay_device_temperature_celsius",
            GAUGE,
            "Temperature of the drive below a device.",
            (|drive| drive.temperature_c.map(f64::from)) as fn(&DriveHealth) -> Option<f64>,
        ),
        (
            "forebay_device_spare_ratio",
            GAUGE,
            "Spare capacity that the drive below a device has left.",
            |drive| drive.spare_percent.map(ratio),
        ),
        (
            "forebay_device_used_ratio",
            GAUGE,
            "Life that the drive below a device has used; may exceed 1.",
            |drive| drive.used_percent.map(ratio),
        ),
        (
            "forebay_device_media_errors_total",
            COUNTER,
            "Media errors that the drive below a device could not correct.",
            |drive| drive.media_errors.map(|errors| errors as f64),
        ),
    ] {
        out.family(name, kind, help);
        for (index, drive) in drives {
            if let Some(value) = value(drive) {
                out.sample(name, &[("device", index)], value);
            }
        }
    }
}

fn volumes(out: &mut Exposition, volumes: &[Volume]) {
    for (name, help, value) in [
        (
            "forebay_volume_size_bytes",
            "A volume's size.",
            (|volume| volume.size_bytes) as fn(&Volume) -> u64,
        ),
        (
            "forebay_volume_allocated_bytes",
            "Space that a volume owns or has set aside.",
            |volume| volume.allocated_bytes,
        ),
    ] {
        out.family(name, GAUGE, help);
        for volume in volumes {
            let labels = [("tenant", &*volume.tenant), ("volume", &*volume.name)];
            out.sample(name, &labels, value(volume));
        }
    }
}

fn ops(lane: &LaneStats) -> [(&'static str, &OpStats); 4] {
    [
        ("read", &lane.read),
        ("write", &lane.write),
        ("flush", &lane.flush),
        ("deallocate", &lane.deallocate),
    ]
}

fn exports(out: &mut Exposition, lanes: &[LaneStats]) {
    lane_gauges(out, lanes);
    lane_transports(out, lanes);
    lane_operations(out, lanes);
    lane_latencies(out, lanes);
}

fn lane_gauges(out: &mut Exposition, lanes: &[LaneStats]) {
    for (name, help, value) in [
        (
            "forebay_volume_commands_in_flight",
            "Commands in flight now.",
            (|lane| lane.in_flight) as fn(&LaneStats) -> u64,
        ),
        (
            "forebay_volume_commands_parked",
            "Commands in flight that wait for the daemon's answer to a fault.",
            |lane| lane.parked,
        ),
        (
            "forebay_volume_connections",
            "Connections (queues) open now.",
            |lane| lane.queues,
        ),
    ] {
        out.family(name, GAUGE, help);
        for lane in lanes {
            let labels = [("tenant", &*lane.tenant), ("volume", &*lane.volume)];
            out.sample(name, &labels, value(lane));
        }
    }
}

fn lane_transports(out: &mut Exposition, lanes: &[LaneStats]) {
    for (name, kind, help, value) in [
        (
            "forebay_volume_copied_bytes_total",
            COUNTER,
            "Bytes of data copied on their way between the network, or a VM's memory, and the devices.",
            (|lane| lane.copied_bytes) as fn(&LaneStats) -> u64,
        ),
        (
            "forebay_volume_registered_bytes",
            GAUGE,
            "Bytes of a VM's memory that are registered with the kernel now.",
            |lane| lane.registered_bytes,
        ),
        (
            "forebay_volume_interrupts_total",
            COUNTER,
            "Interrupts raised for a VM.",
            |lane| lane.interrupts,
        ),
    ] {
        out.family(name, kind, help);
        for lane in lanes {
            let labels = [
                ("tenant", &*lane.tenant),
                ("volume", &*lane.volume),
                ("transport", &*lane.transport),
            ];
            out.sample(name, &labels, value(lane));
        }
    }
}

fn lane_operations(out: &mut Exposition, lanes: &[LaneStats]) {
    for (name, help, value) in [
        (
            "forebay_volume_commands_total",
            "Commands completed, failed ones included.",
            (|ops| ops.ops) as fn(&OpStats) -> u64,
        ),
        (
            "forebay_volume_bytes_total",
            "Bytes moved, or covered (deallocate).",
            |ops| ops.bytes,
        ),
        (
            "forebay_volume_errors_total",
            "Commands that ended with an error status.",
            |ops| ops.errors,
        ),
    ] {
        out.family(name, COUNTER, help);
        for lane in lanes {
            for (op, ops) in ops(lane) {
                let (tenant, volume) = (&*lane.tenant, &*lane.volume);
                out.sample(
                    name,
                    &[("tenant", tenant), ("volume", volume), ("op", op)],
                    value(ops),
                );
            }
        }
    }
}

fn lane_latencies(out: &mut Exposition, lanes: &[LaneStats]) {
    out.family(
        "forebay_volume_latency_seconds",
        "histogram",
        "Latency of commands: total, waiting to begin, waiting for the daemon's answer (translating), at the device. A \
        part counts only commands that spent time there.",
    );
    for lane in lanes {
        for (op, ops) in ops(lane) {
            let latency = &ops.latency;
            for (part, times) in [
                ("total", &latency.total),
                ("waiting", &latency.waiting),
                ("translating", &latency.translating),
                ("device", &latency.device),
            ] {
                if times.count > 0 {
                    let labels = [
                        ("tenant", &*lane.tenant),
                        ("volume", &*lane.volume),
                        ("op", op),
                        ("part", part),
                    ];
                    histogram(out, "forebay_volume_latency_seconds", &labels, times);
                }
            }
        }
    }
}

fn histogram(out: &mut Exposition, name: &str, labels: &[(&str, &str)], times: &Histogram) {
    let mut bucket = |bound: &str, count: u64| {
        let mut labels = labels.to_vec();
        labels.push(("le", bound));
        out.sample(&format!("{name}_bucket"), &labels, count);
    };
    for power in BOUNDS.step_by(2) {
        let end_ns = 1 << power;
        bucket(&seconds(end_ns).to_string(), times.below(end_ns));
    }
    bucket("+Inf", times.count);
    out.sample(&format!("{name}_sum"), labels, seconds(times.sum_ns));
    out.sample(&format!("{name}_count"), labels, times.count);
}

#[cfg(test)]
mod tests;
