//! The served exports: their reactors and lanes. A lane's slot is in use until its reactor reports
//! that it is gone. **Not here:** the lane ([`crate::lane`]).

use super::translate::ServedVolumes;
use crate::lane::LaneIndex;
use crate::takeover::{ServedLane, ServedLanes};
use forebay_xlate::boundary::message::{ExportConfig, ExportId};
use forebay_xlate::boundary::region::{LaneRecord, MAX_LANES};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub(super) struct KnownExport {
    pub config: Arc<ExportConfig>,
    pub reactor: usize,
    pub lane: LaneIndex,
}

pub(super) struct Lanes {
    pub exports: BTreeMap<ExportId, KnownExport>,
    /// Slots in use.
    pub used: Vec<bool>,
}

impl Default for Lanes {
    fn default() -> Self {
        Self {
            exports: BTreeMap::new(),
            used: vec![false; MAX_LANES],
        }
    }
}

impl Lanes {
    pub(super) fn idlest_reactor(&self, reactors: usize) -> usize {
        let mut exports = vec![0u32; reactors];
        for known in self.exports.values() {
            exports[known.reactor] += 1;
        }
        let all = 0..exports.len();
        all.min_by_key(|reactor| exports[*reactor]).unwrap_or(0)
    }

    /// Exports whose volumes are served.
    pub(super) fn served(&self, volumes: &ServedVolumes) -> ServedLanes {
        let lane = |known: &KnownExport| {
            Some(ServedLane {
                served: crate::exports::Served {
                    config: known.config.clone(),
                    reactor: known.reactor,
                },
                lane: known.lane,
                volume: volumes.0.get(&known.config.volume)?.clone(),
            })
        };
        let known = self.exports.iter();
        known
            .filter_map(|(export, known)| Some((*export, lane(known)?)))
            .collect()
    }

    pub(super) fn of_vm(&self, export: ExportId) -> Option<(Arc<ExportConfig>, usize)> {
        let known = self.exports.get(&export)?;
        let is_vm = known.config.frontend.is_vm();
        is_vm.then(|| (known.config.clone(), known.reactor))
    }
}

pub(super) fn clear(record: &LaneRecord) {
    for gauge in [
        &record.in_flight,
        &record.parked,
        &record.faults,
        &record.connections,
        &record.media_errors,
        &record.copied_bytes,
        &record.registered_bytes,
        &record.interrupts,
        &record.vm_since_s,
        &record.vm_memory_bytes,
        &record.vm_queues,
        &record.throttled_ops,
        &record.throttled,
        &record.granted_ops_s,
        &record.granted_bytes_s,
    ] {
        gauge.store(0, Relaxed);
    }
    let times = &record.throttled_times;
    for counter in times.buckets.iter().chain([&times.sum_ns]) {
        counter.store(0, Relaxed);
    }
    for op in &record.ops {
        for counter in op.counters() {
            counter.store(0, Relaxed);
        }
    }
}
