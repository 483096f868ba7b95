//! What a load gave.
//!
//! Design: whole histograms are kept (3 significant digits, nanoseconds), so that any percentile can be read and
//! reports of several loads can be added up.
//! What it does *not* do: print; tables and JSON are the caller's.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Latencies above this are recorded as this.
const MAX_NS: u64 = 300_000_000_000;

/// One kind of command.
#[derive(Clone, Debug)]
pub struct OpReport {
    /// Commands that ended well.
    pub ops: u64,
    /// Their latencies in nanoseconds.
    pub histogram: Histogram<u64>,
}

impl OpReport {
    pub(crate) fn new() -> Self {
        Self {
            ops: 0,
            // The bounds are constants that the library accepts.
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

    /// Mean latency.
    #[must_use]
    pub fn mean_us(&self) -> f64 {
        self.histogram.mean() / 1000.0
    }

    /// A percentile, 0.0..=100.0.
    #[must_use]
    pub fn percentile_us(&self, percentile: f64) -> f64 {
        self.histogram.value_at_percentile(percentile) as f64 / 1000.0
    }

    /// The longest.
    #[must_use]
    pub fn max_us(&self) -> f64 {
        self.histogram.max() as f64 / 1000.0
    }
}

/// The outcome of a load.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// Size of each command.
    pub block_bytes: u32,
    /// The longest time that a worker measured over.
    pub elapsed: Duration,
    /// Commands per second that ended well.
    pub iops: f64,
    /// Bytes per second that they moved.
    pub bytes_per_second: f64,
    /// Mean latency.
    pub mean_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
    /// Commands that ended with an error status.
    pub errors: u64,
    /// The first such status, in words.
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

/// What one worker saw.
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

    /// CPU time of the initiator per command.
    #[must_use]
    pub fn initiator_cpu_us_per_op(&self) -> f64 {
        self.initiator_cpu.as_secs_f64() * 1e6 / self.total.ops.max(1) as f64
    }
}
