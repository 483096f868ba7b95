//! The report of a load, as a table or JSON: one line per load and kind of command.

use forebay_device::size::format_bytes;
use forebay_initiator::load::{LoadReport, OpReport};
use serde::Serialize;

use crate::output::table;

#[derive(Debug, Serialize)]
pub(super) struct ReportLine {
    pub(super) name: String,
    pub(super) op: &'static str,
    pub(super) ops: u64,
    pub(super) iops: f64,
    pub(super) bytes_per_second: f64,
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p90_us: f64,
    pub(super) p99_us: f64,
    pub(super) p999_us: f64,
    pub(super) p9999_us: f64,
    pub(super) max_us: f64,
    pub(super) engine_cpu_us_per_op: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) seconds: f64,
    pub(super) block_bytes: u32,
    pub(super) lines: Vec<ReportLine>,
    pub(super) errors: u64,
    pub(super) first_error: Option<String>,
    /// Successful commands.
    pub(super) ops: u64,
    pub(super) initiator_cpu_us_per_op: Option<f64>,
}

fn line(name: &str, op: &'static str, report: &LoadReport, ops: &OpReport) -> ReportLine {
    let iops = ops.ops as f64 / report.elapsed.as_secs_f64().max(1e-9);
    ReportLine {
        name: name.to_owned(),
        op,
        ops: ops.ops,
        iops,
        bytes_per_second: iops * f64::from(report.block_bytes),
        mean_us: ops.mean_us(),
        p50_us: ops.percentile_us(50.0),
        p90_us: ops.percentile_us(90.0),
        p99_us: ops.percentile_us(99.0),
        p999_us: ops.percentile_us(99.9),
        p9999_us: ops.percentile_us(99.99),
        max_us: ops.max_us(),
        engine_cpu_us_per_op: None,
    }
}

impl Report {
    /// `engine_cpu_s`: the engine's CPU time, if it is ours.
    pub(super) fn new(loads: &[(String, LoadReport)], engine_cpu_s: Option<f64>) -> Self {
        let mut report = Self {
            seconds: 0.0,
            block_bytes: loads.first().map_or(0, |(_, load)| load.block_bytes),
            lines: Vec::new(),
            errors: 0,
            first_error: None,
            ops: 0,
            initiator_cpu_us_per_op: None,
        };
        let mut initiator_cpu_s = 0.0;
        for (name, load) in loads {
            for (op, ops) in [("read", &load.reads), ("write", &load.writes)] {
                if ops.ops > 0 {
                    report.lines.push(line(name, op, load, ops));
                }
            }
            report.seconds = report.seconds.max(load.elapsed.as_secs_f64());
            report.errors += load.errors;
            report.first_error = report.first_error.or_else(|| load.first_error.clone());
            initiator_cpu_s += load.initiator_cpu.as_secs_f64();
        }
        if let Some(mut total) = total(loads) {
            let per_op = |seconds: f64| (total.ops > 0).then(|| seconds * 1e6 / total.ops as f64);
            report.ops = total.ops;
            report.initiator_cpu_us_per_op = per_op(initiator_cpu_s);
            total.engine_cpu_us_per_op = engine_cpu_s.and_then(per_op);
            report.lines.push(total);
        }
        report
    }

    pub(super) fn text(&self) -> String {
        let rows = self.lines.iter().map(|line| {
            [
                line.name.clone(),
                line.op.to_owned(),
                format!("{:.0}", line.iops),
                format!("{:.1}", line.bytes_per_second / 1e6),
                format!("{:.1}", line.mean_us),
                format!("{:.1}", line.p50_us),
                format!("{:.1}", line.p99_us),
                format!("{:.1}", line.p999_us),
                line.engine_cpu_us_per_op
                    .map_or_else(String::new, |us| format!("{us:.2}")),
            ]
        });
        let mut text = table(
            [
                "LOAD",
                "OP",
                ">IOPS",
                ">MB/S",
                ">MEAN US",
                ">P50 US",
                ">P99 US",
                ">P99.9 US",
                ">CPU US PER I/O",
            ],
            rows,
        );
        text.push_str(&format!(
            "\n\n{} per command, {:.1} s; {}\n",
            format_bytes(self.block_bytes.into()),
            self.seconds,
            self.initiator_cpu_us_per_op.map_or_else(
                || "no command completed".to_owned(),
                |us| format!("the initiator used {us:.2} us of CPU time per command")
            )
        ));
        if self.errors > 0 {
            text.push_str(&format!(
                "{} commands failed, the first: {}\n",
                self.errors,
                self.first_error.as_deref().unwrap_or("unknown")
            ));
        }
        text
    }
}

/// Sums the rates, and merges the latencies of all commands.
fn total(loads: &[(String, LoadReport)]) -> Option<ReportLine> {
    let (first, rest) = loads.split_first()?;
    let mut all = first.1.total.clone();
    for (_, load) in rest {
        all.ops += load.total.ops;
        // Equal bounds, so this cannot fail.
        let _ = all.histogram.add(&load.total.histogram);
    }
    let mut line = line("all", "all", &first.1, &all);
    line.iops = loads.iter().map(|(_, load)| load.iops).sum();
    line.bytes_per_second = loads.iter().map(|(_, load)| load.bytes_per_second).sum();
    Some(line)
}
