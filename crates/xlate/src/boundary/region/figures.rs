//! Figures that an engine leaves in its region: of devices and of lanes.
//!
//! **Design.** Counters; the daemon reads them while they change, and a number that is a moment old does
//! no harm. **Not here:** anything that a successor relies on.

use crate::cells;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::*;

/// Latency buckets: four to each doubling, from 1 ns on.
pub const LATENCY_BUCKETS: usize = 160;

cells! {
    /// A device. Its errors: every reactor adds to them, the internal lane too.
    pub struct DeviceRecord {
        /// Reads that failed.
        pub read_errors: AtomicU64,
        /// Writes, zeroings and punches that failed, but for want of room below the device.
        pub write_errors: AtomicU64,
        /// Flushes that failed.
        pub flush_errors: AtomicU64,
        /// Writes for which there was no room below the device.
        pub no_room_errors: AtomicU64,
        /// The last one's errno.
        pub last_errno: AtomicU64,
        /// Where on the device it began, in bytes; 0 for a flush.
        pub last_offset_bytes: AtomicU64,
        /// CLOCK_MONOTONIC when it ended, ns; stored last.
        pub last_ns: AtomicU64,
        /// Which device the reactors serve here: [`device_mark`]; 0: none, so nothing of this engine is
        /// there. Stored before any of them hears of it.
        pub served: AtomicU64,
    }
}

/// A device's mark in the word `served`: of its unique id, and not 0.
pub fn device_mark(uuid: &[u8; 16]) -> u64 {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&uuid[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    word(0).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word(8) | 1
}

/// What failed on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceOp {
    /// A read.
    Read,
    /// A write, a zeroing, a punch.
    Write,
    /// A flush.
    Flush,
}

impl DeviceRecord {
    /// Counts an operation that failed. `is_no_room`: there was no room for it below the device.
    #[cold]
    pub fn record(
        &self,
        op: DeviceOp,
        errno: i32,
        is_no_room: bool,
        offset_bytes: u64,
        now_ns: u64,
    ) {
        let counter = match op {
            DeviceOp::Read => &self.read_errors,
            DeviceOp::Write if is_no_room => &self.no_room_errors,
            DeviceOp::Write => &self.write_errors,
            DeviceOp::Flush => &self.flush_errors,
        };
        self.last_errno
            .store(u64::from(errno.unsigned_abs()), Relaxed);
        self.last_offset_bytes.store(offset_bytes, Relaxed);
        counter.fetch_add(1, Relaxed);
        self.last_ns.store(now_ns, Release);
    }
}

cells! {
    /// Figures of one kind of command.
    pub struct OpStats {
        /// Commands ended.
        pub ops: AtomicU64,
        /// Bytes moved.
        pub bytes: AtomicU64,
        /// Commands ended with an error status.
        pub errors: AtomicU64,
        /// By [`TimesOf`].
        pub times: [Times; 4],
    }
}

cells! {
    /// How long something took.
    pub struct Times {
        /// The sum, ns.
        pub sum_ns: AtomicU64,
        /// See [`latency_bucket`].
        pub buckets: [AtomicU64; LATENCY_BUCKETS],
    }
}

/// Of what a command's times are counted: indexes into [`OpStats::times`].
///
/// Every command counts in the first. Of its parts only those are counted that took any time, as the turns of its
/// reactor tell it: what begins and ends in one turn took none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum TimesOf {
    /// From the command's last byte that was taken, to its answer.
    Total = 0,
    /// Until the core began it: for memory, for its data, for room.
    Waiting = 1,
    /// For an answer of the owner's about where bytes of it lie; each wait counts.
    Translating = 2,
    /// From there on to its end, without the waits for the owner: at the devices, and for them.
    Device = 3,
}

impl OpStats {
    /// Counts a command that took `ns` (one writer: the lane's reactor).
    #[inline]
    pub fn record(&self, bytes: u64, ns: u64, error: bool) {
        bump(&self.ops, 1);
        bump(&self.bytes, bytes);
        bump(&self.errors, u64::from(error));
        self.times[TimesOf::Total as usize].record(ns);
    }

    /// Counts `ops` commands that ended well within the turn that took them: their bytes together, and the time of each.
    #[inline]
    pub fn record_at_once(&self, ops: u64, bytes: u64, ns: u64) {
        bump(&self.ops, ops);
        bump(&self.bytes, bytes);
        let times = &self.times[TimesOf::Total as usize];
        bump(&times.sum_ns, ns.saturating_mul(ops));
        bump(&times.buckets[latency_bucket(ns)], ops);
    }

    /// All its counters.
    pub fn counters(&self) -> impl Iterator<Item = &AtomicU64> {
        let times = (self.times.iter()).flat_map(|t| std::iter::once(&t.sum_ns).chain(&t.buckets));
        [&self.ops, &self.bytes, &self.errors]
            .into_iter()
            .chain(times)
    }
}

impl Times {
    /// Counts one that took `ns`.
    #[inline]
    pub fn record(&self, ns: u64) {
        bump(&self.sum_ns, ns);
        bump(&self.buckets[latency_bucket(ns)], 1);
    }
}

/// Adds to a counter that only this thread writes: no locked instruction.
#[inline]
pub fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

/// The bucket of a time: four to each doubling.
#[inline]
pub fn latency_bucket(ns: u64) -> usize {
    let ns = ns.max(4);
    let log = 63 - ns.leading_zeros() as usize;
    let sub = (ns >> (log - 2)) as usize & 3;
    (log * 4 + sub).min(LATENCY_BUCKETS - 1)
}

/// The upper end of a bucket, in ns.
pub fn latency_bucket_end_ns(bucket: usize) -> u64 {
    let (log, sub) = (bucket / 4, (bucket % 4) as u64);
    if log < 2 { 4 } else { (5 + sub) << (log - 2) }
}

/// Kinds of command that a lane counts apart: indexes into [`LaneRecord::ops`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum OpKind {
    /// Read.
    Read = 0,
    /// Write.
    Write = 1,
    /// Flush.
    Flush = 2,
    /// Write Zeroes and Dataset Management.
    Deallocate = 3,
}

cells! {
    /// A lane: one export's path.
    pub struct LaneRecord {
        /// Export id + 1; 0 is a free slot.
        pub export: AtomicU64,
        /// The volume.
        pub volume: AtomicU64,
        /// The reactor that serves it.
        pub reactor: AtomicU64,
        /// Commands in flight now.
        pub in_flight: AtomicU64,
        /// Commands parked on a fault now.
        pub parked: AtomicU64,
        /// Faults since the start.
        pub faults: AtomicU64,
        /// Connections open now; of a machine's, 1 while it has a client.
        pub connections: AtomicU64,
        /// Bytes of data that were copied here on their way between who sent or asked for them and the devices.
        pub copied_bytes: AtomicU64,
        /// Interrupts raised for a machine.
        pub interrupts: AtomicU64,
        /// Commands that ended with an error of a device since the start.
        pub media_errors: AtomicU64,
        /// Bytes of a machine's memory that are registered with the ring now.
        pub registered_bytes: AtomicU64,
        /// When a machine's client connected, seconds since 1970.
        pub machine_since_s: AtomicU64,
        /// Bytes of memory that it shares.
        pub machine_memory_bytes: AtomicU64,
        /// Queues of its that are in use, an Admin queue not counted.
        pub machine_queues: AtomicU64,
        /// Commands that were over budget, and so had to wait, since the start.
        pub throttled_ops: AtomicU64,
        /// Of them those that wait now.
        pub throttled: AtomicU64,
        /// Its part of what its tenant was given in its newest window, as commands a second,
        pub granted_ops_s: AtomicU64,
        /// and bytes a second.
        pub granted_bytes_s: AtomicU64,
        reserved: [AtomicU64; 14],
        /// By [`OpKind`].
        pub ops: [OpStats; 4],
        /// How long those that were over budget waited for it.
        pub throttled_times: Times,
    }
}

cells! {
    /// A tenant, of all reactors together. Sums are since the start, and added to by each reactor now and then.
    pub struct TenantRecord {
        /// Tenant id + 1; 0 is a free slot.
        pub tenant: AtomicU64,
        /// Commands that its budget paid for.
        pub used_ops: AtomicU64,
        /// Their bytes.
        pub used_bytes: AtomicU64,
        /// Of them those above its base, if it is metered.
        pub metered_ops: AtomicU64,
        /// Their bytes.
        pub metered_bytes: AtomicU64,
        /// Commands that had to wait because it was over budget.
        pub throttled_ops: AtomicU64,
        /// How long they waited together, ns.
        pub throttled_ns: AtomicU64,
        /// Commands that began out of what a bursting tenant had been given.
        pub taken_ops: AtomicU64,
        /// Others' commands that began out of what this one had been given.
        pub lost_ops: AtomicU64,
        /// Commands that began out of the reserve.
        pub reserve_ops: AtomicU64,
        /// What it has saved: commands.
        pub credit_ops: AtomicU64,
        /// What it has saved: bytes.
        pub credit_bytes: AtomicU64,
        /// What it was given in the newest window, of all reactors together, as commands a second,
        pub granted_ops_s: AtomicU64,
        /// and bytes a second.
        pub granted_bytes_s: AtomicU64,
        /// Windows in which it had more than its base, on any reactor.
        pub burst_windows: AtomicU64,
        /// Windows in which it had anything.
        pub active_windows: AtomicU64,
        /// Time of processors and devices that its commands cost as they are calibrated, ns.
        pub cost_ns: AtomicU64,
        /// The same as it counted, corrected.
        pub corrected_ns: AtomicU64,
        /// What it used in the newest window that ended, of all reactors together, as commands a second,
        pub used_ops_s: AtomicU64,
        /// and bytes a second.
        pub used_bytes_s: AtomicU64,
        /// Commands that waited at its end.
        pub throttled: AtomicU64,
        /// Of what it used in that window, what was above its base, as commands a second,
        pub above_ops_s: AtomicU64,
        /// and bytes a second.
        pub above_bytes_s: AtomicU64,
        /// Time of processors and devices that its commands cost in that window as they are calibrated, ns a second.
        pub window_cost_ns_s: AtomicU64,
        /// The same as it counted, corrected.
        pub window_corrected_ns_s: AtomicU64,
        reserved: [AtomicU64; 7],
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MAX_DEVICES, Region};
    use super::*;

    #[test]
    fn buckets_hold_what_they_say() {
        for ns in [
            0u64,
            1,
            4,
            5,
            7,
            8,
            100,
            999,
            12_345,
            1_000_000,
            10_000_000_000,
        ] {
            let b = latency_bucket(ns);
            assert!(
                latency_bucket_end_ns(b) > ns.min(latency_bucket_end_ns(b) - 1),
                "{ns}"
            );
            if ns >= 8 {
                assert!(
                    ns < latency_bucket_end_ns(b) && ns >= latency_bucket_end_ns(b - 1),
                    "{ns} in {b}"
                );
            }
        }
    }

    #[test]
    fn a_device_error_is_counted_by_its_kind() {
        let region = Region::anonymous(1).unwrap();
        let record = &region.devices()[MAX_DEVICES - 1];
        record.record(DeviceOp::Read, 5, false, 4096, 10);
        record.record(DeviceOp::Write, 28, true, 8192, 11);
        record.record(DeviceOp::Write, 5, false, 12_288, 12);
        record.record(DeviceOp::Flush, 5, false, 0, 13);
        let all = [
            &record.read_errors,
            &record.write_errors,
            &record.flush_errors,
            &record.no_room_errors,
        ];
        assert_eq!(all.map(|counter| counter.load(Relaxed)), [1; 4]);
        assert_eq!(record.last_errno.load(Relaxed), 5);
        assert_eq!(record.last_ns.load(Acquire), 13);
        // Nobody else's.
        assert_eq!(region.lanes()[0].export.load(Relaxed), 0);
        assert_eq!(region.devices()[0].read_errors.load(Relaxed), 0);
    }
}
