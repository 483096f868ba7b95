//! The result of a load. Whole histograms are kept, so that reports can be added.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Longer latencies are recorded as this.
const MAX_NS: u64 = 300_000_000_000;

/// Results of one kind of command.
#[derive(Clone, Debug)]
pub struct OpReport {
    /// Successful commands.
    pub ops: u64,
    /// Their latencies in nanoseconds.
    pub histogram: Histogram<u64>,
}

impl OpReport {
    pub(crate) fn new() -> Self {
        Self {
            ops: 0,
            histogram: Histogram::new_with_bounds(1, MAX_NS, 3).expect("constant bounds are valid"),
        }
    }

    pub(crate) fn record(&mut self, latency_ns: u64) {
        self.ops += 1;
        self.histogram.saturating_record(latency_ns.max(1));
    }

    fn add(&mut self, other: &Self) {
        self.ops += other.ops;
        // Both have the same bounds, so this can't fail.
        let _ = self.histogram.add(&other.histogram);
    }

    /// Mean latency in microseconds.
    #[must_use]
    pub fn mean_us(&self) -> f64 {
        self.histogram.mean() / 1000.0
    }

    /// Latency in microseconds at a percentile, 0.0..=100.0.
    #[must_use]
    pub fn percentile_us(&self, percentile: f64) -> f64 {
        self.histogram.value_at_percentile(percentile) as f64 / 1000.0
    }

    /// Longest latency in microseconds.
    #[must_use]
    pub fn max_us(&self) -> f64 {
        self.histogram.max() as f64 / 1000.0
    }
}

/// The outcome of a load.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// Bytes of each command.
    pub block_bytes: u32,
    /// The longest measuring time of a worker.
    pub elapsed: Duration,
    /// Successful commands per second.
    pub iops: f64,
    /// Their bytes per second.
    pub bytes_per_second: f64,
    /// Mean latency in microseconds.
    pub mean_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// Longest latency.
    pub max_us: f64,
    /// Commands that ended with an error status.
    pub errors: u64,
    /// The first such status.
    pub first_error: Option<String>,
    /// CPU time of the worker threads, user and system.
    pub initiator_cpu: Duration,
    /// All commands.
    pub total: OpReport,
    /// Reads.
    pub reads: OpReport,
    /// Writes.
    pub writes: OpReport,
}

pub(crate) struct Outcome {
    pub(crate) elapsed: Duration,
    pub(crate) cpu: Duration,
    pub(crate) reads: OpReport,
    pub(crate) writes: OpReport,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
}

impl LoadReport {
    pub(crate) fn new(block_bytes: u32) -> Self {
        Self {
            block_bytes,
            elapsed: Duration::ZERO,
            iops: 0.0,
            bytes_per_second: 0.0,
            mean_us: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            p999_us: 0.0,
            max_us: 0.0,
            errors: 0,
            first_error: None,
            initiator_cpu: Duration::ZERO,
            total: OpReport::new(),
            reads: OpReport::new(),
            writes: OpReport::new(),
        }
    }

    pub(crate) fn add(&mut self, outcome: &Outcome) {
        self.elapsed = self.elapsed.max(outcome.elapsed);
        self.initiator_cpu += outcome.cpu;
        self.reads.add(&outcome.reads);
        self.writes.add(&outcome.writes);
        self.errors += outcome.errors;
        if self.first_error.is_none() {
            self.first_error.clone_from(&outcome.first_error);
        }
    }

    pub(crate) fn finish(&mut self) {
        self.total = self.reads.clone();
        self.total.add(&self.writes);
        let total = &self.total;
        self.iops = total.ops as f64 / self.elapsed.as_secs_f64().max(1e-9);
        self.bytes_per_second = self.iops * f64::from(self.block_bytes);
        self.mean_us = total.mean_us();
        self.p50_us = total.percentile_us(50.0);
        self.p99_us = total.percentile_us(99.0);
        self.p999_us = total.percentile_us(99.9);
        self.max_us = total.max_us();
    }

    /// Initiator CPU time per command, in microseconds.
    #[must_use]
    pub fn initiator_cpu_us_per_op(&self) -> f64 {
        self.initiator_cpu.as_secs_f64() * 1e6 / self.total.ops.max(1) as f64
    }
}
