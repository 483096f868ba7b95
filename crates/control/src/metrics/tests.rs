//! Tests of the metrics text, line by line.

use super::*;
use crate::model::DriveSource;
use crate::model::events::TakeoverStats;
use crate::model::scheduling::{Budget, Credit, Limit, Rate};
use crate::model::stats::{Bucket, Correction, Latency, ReactorStats, TenantStats};
use forebay_xlate::boundary::region::latency_bucket_end_ns;

fn status() -> Status {
    Status {
        daemon_pid: 1,
        engine_pid: Some(2),
        generation: 7,
        version: "0.1\"\\\n".to_owned(),
        engine_version: None,
        engine_state: EngineState::Running,
        uptime_s: 3,
        nvme_tcp: Vec::new(),
        state_dir: String::new(),
        pool: None,
        pool_trouble: None,
        last_death: None,
        health: crate::model::Health::Well,
        capacity: None,
        limits: Vec::new(),
        warnings: vec!["the moon is full".to_owned()],
    }
}

fn stats() -> Stats {
    let times = Histogram {
        count: 3,
        sum_ns: 2_000_010_000,
        buckets: vec![
            Bucket {
                end_ns: 5120,
                count: 1,
            },
            Bucket {
                end_ns: 16_384,
                count: 1,
            },
            Bucket {
                end_ns: 1 << 31,
                count: 1,
            },
        ],
    };
    let read = OpStats {
        ops: 3,
        bytes: 12_288,
        errors: 1,
        latency: Latency {
            total: times,
            ..Latency::default()
        },
        ..OpStats::default()
    };
    Stats {
        at_unix_ms: 1,
        generation: 7,
        engine: None,
        pool: None,
        takeover: TakeoverStats::default(),
        lanes: vec![LaneStats {
            tenant: "acme".to_owned(),
            volume: "db".to_owned(),
            read,
            write: OpStats::default(),
            flush: OpStats::default(),
            deallocate: OpStats::default(),
            in_flight: 2,
            parked: 0,
            queues: 4,
            transport: "nvme-tcp".to_owned(),
            copied_bytes: 4096,
            registered_bytes: 0,
            interrupts: 7,
            budget: None,
            granted_iops: Some(140),
            granted_bytes_s: Some(573_440),
            throttled_ops: 1,
            throttled: 1,
            throttled_times: Histogram {
                count: 1,
                sum_ns: 3_000_000,
                buckets: vec![Bucket {
                    end_ns: 1 << 22,
                    count: 1,
                }],
            },
        }],
        tenants: vec![TenantStats {
            tenant: "acme".to_owned(),
            budget: Some(Budget {
                base: Some(Rate {
                    iops: 100,
                    bytes_s: 1 << 20,
                }),
                burst: Limit {
                    iops: Some(200),
                    bytes_s: Some(2 << 20),
                },
                credit_s: Some(60),
                ..Budget::default()
            }),
            used_ops: 3,
            metered_bytes: 9,
            throttled_ns: 1_500_000_000,
            lost_ops: 5,
            granted_iops: Some(150),
            window_iops: 100,
            above_iops: 25,
            window_cost_ns_s: 1000,
            window_corrected_ns_s: 1500,
            credit: Some(Credit {
                ops: 10,
                bytes: 20,
                most_ops: 6000,
                most_bytes: 60 << 20,
            }),
            ..TenantStats::default()
        }],
        reactors: vec![ReactorStats {
            windows: 8,
            corrections: vec![Correction {
                resource: "device reads".to_owned(),
                times: 1.25,
            }],
            ..ReactorStats::default()
        }],
    }
}

#[test]
fn every_line_is_as_it_should_be() {
    let text = text(&MetricSource {
        status: &status(),
        stats: &stats(),
        pool: None,
        volumes: &[],
        out_of_band_drops: 0,
    });
    for line in [
        r#"forebay_info{version="0.1\"\\\n"} 1"#,
        "forebay_engine_up 1",
        "# HELP forebay_reactor_handed_over_total Device operations (a command may need several) offloaded to other \
        reactors.",
        "# TYPE forebay_engine_generation gauge",
        "forebay_warnings 1",
        r#"forebay_volume_commands_total{tenant="acme",volume="db",op="read"} 3"#,
        r#"forebay_volume_commands_total{tenant="acme",volume="db",op="write"} 0"#,
        r#"forebay_volume_granted_iops{tenant="acme",volume="db"} 140"#,
        r#"forebay_volume_granted_bytes_per_second{tenant="acme",volume="db"} 573440"#,
        r#"forebay_volume_commands_throttled{tenant="acme",volume="db"} 1"#,
        r#"forebay_tenant_burst_ratio{tenant="acme"} 0.25"#,
        r#"forebay_tenant_cost_correction_ratio{tenant="acme"} 1.5"#,
        r#"forebay_volume_throttled_seconds_bucket{tenant="acme",volume="db",le="0.004194304"} 1"#,
        r#"forebay_volume_throttled_seconds_sum{tenant="acme",volume="db"} 0.003"#,
        r#"forebay_tenant_commands_total{tenant="acme"} 3"#,
        r#"forebay_tenant_metered_bytes_total{tenant="acme"} 9"#,
        r#"forebay_tenant_throttled_seconds_total{tenant="acme"} 1.5"#,
        r#"forebay_tenant_lost_commands_total{tenant="acme"} 5"#,
        r#"forebay_tenant_granted_iops{tenant="acme"} 150"#,
        r#"forebay_tenant_burst_bytes_per_second{tenant="acme"} 2097152"#,
        r#"forebay_tenant_credit_limit_commands{tenant="acme"} 6000"#,
        r#"forebay_reactor_windows_total{reactor="0"} 8"#,
        r#"forebay_reactor_cost_correction{reactor="0",resource="device_reads"} 1.25"#,
        r#"forebay_volume_connections{tenant="acme",volume="db"} 4"#,
        r#"forebay_volume_copied_bytes_total{tenant="acme",volume="db",transport="nvme-tcp"} 4096"#,
        r#"forebay_volume_registered_bytes{tenant="acme",volume="db",transport="nvme-tcp"} 0"#,
    ] {
        assert!(text.lines().any(|is| is == line), "{line}\n{text}");
    }
    let expected = "\
_bucket{tenant=\"acme\",volume=\"db\",op=\"read\",part=\"total\",le=\"0.000004096\"} 0
_bucket{tenant=\"acme\",volume=\"db\",op=\"read\",part=\"total\",le=\"0.000016384\"} 2
_bucket{tenant=\"acme\",volume=\"db\",op=\"read\",part=\"total\",le=\"0.000065536\"} 2";
    let lines: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("forebay_volume_latency_seconds"))
        .collect();
    assert!(lines.join("\n").starts_with(expected), "{lines:#?}");
    assert_eq!(lines.len(), 12 + 1 + 2);
    assert!(lines[12].ends_with("le=\"+Inf\"} 3"), "{}", lines[12]);
    assert!(lines[13].ends_with("} 2.00001"), "{}", lines[13]);
}

#[test]
fn a_drive_has_samples_for_what_it_reports() {
    let drive = DriveHealth {
        path: "/dev/sda".to_owned(),
        source: DriveSource::Ata,
        model: String::new(),
        serial: String::new(),
        firmware: String::new(),
        read_unix_ms: 1,
        warnings: Vec::new(),
        critical_warning: 0,
        temperature_c: Some(-5),
        spare_percent: None,
        spare_threshold_percent: None,
        used_percent: Some(12),
        media_errors: Some(3),
        power_on_hours: None,
        unsafe_shutdowns: None,
        reallocated_sectors: None,
        pending_sectors: None,
        uncorrectable_sectors: None,
    };
    let other = DriveHealth {
        spare_percent: Some(100),
        ..drive.clone()
    };
    let mut out = Exposition::default();
    drives(
        &mut out,
        &[("1".to_owned(), &drive), ("4".to_owned(), &other)],
    );
    let samples: Vec<&str> = out
        .0
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect();
    assert_eq!(
        samples,
        [
            r#"forebay_device_temperature_celsius{device="1"} -5"#,
            r#"forebay_device_temperature_celsius{device="4"} -5"#,
            r#"forebay_device_spare_ratio{device="4"} 1"#,
            r#"forebay_device_used_ratio{device="1"} 0.12"#,
            r#"forebay_device_used_ratio{device="4"} 0.12"#,
            r#"forebay_device_media_errors_total{device="1"} 3"#,
            r#"forebay_device_media_errors_total{device="4"} 3"#,
        ]
    );
}

#[test]
fn every_bound_is_the_end_of_a_bucket() {
    for power in BOUNDS.step_by(2) {
        assert!((0..160).any(|bucket| latency_bucket_end_ns(bucket) == 1 << power));
    }
}
