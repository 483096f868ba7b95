//! Statistics of devices, lanes and tenants in the state region.
//!
//! The daemon reads the counters while they change. No successor relies on them.

use crate::cells;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::*;

/// Four buckets to each doubling, from 1 ns on.
pub const LATENCY_BUCKETS: usize = 160;

cells! {
    /// A device. All reactors add to its errors.
    pub struct DeviceRecord {
        /// Failed reads.
        pub read_errors: AtomicU64,
        /// Failed writes, zeroings and punches, except those in `no_room_errors`.
        pub write_errors: AtomicU64,
        /// Failed flushes.
        pub flush_errors: AtomicU64,
        /// Writes that found no space below the device.
        pub no_room_errors: AtomicU64,
        /// The last error's errno.
        pub last_errno: AtomicU64,
        /// Its byte offset on the device; 0 for a flush.
        pub last_offset_bytes: AtomicU64,
        /// CLOCK_MONOTONIC at its end, ns; stored last.
        pub last_ns: AtomicU64,
        /// The device served here: [`device_mark`]; 0: none, so this engine has no request there.
        /// Stored before any reactor knows the device.
        pub served: AtomicU64,
    }
}

/// A device's mark for `served`; never 0.
pub fn device_mark(uuid: &[u8; 16]) -> u64 {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&uuid[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    word(0).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word(8) | 1
}

/// A failed device operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceOp {
    /// A read.
    Read,
    /// A write, zeroing or punch.
    Write,
    /// A flush.
    Flush,
}

impl DeviceRecord {
    /// Counts a failed operation.
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
    /// Statistics of one kind of command.
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
    /// A latency histogram.
    pub struct Times {
        /// The sum, ns.
        pub sum_ns: AtomicU64,
        /// See [`latency_bucket`].
        pub buckets: [AtomicU64; LATENCY_BUCKETS],
    }
}

/// Indexes into [`OpStats::times`].
///
/// Every command counts in `Total`. A part within one reactor turn takes no measurable time and
/// does not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum TimesOf {
    /// From the command's last received byte to its response.
    Total = 0,
    /// Before the core begins it: for memory, data or space.
    Waiting = 1,
    /// Faults; each wait counts.
    Translating = 2,
    /// From the core's begin to the end, without faults.
    Device = 3,
}

impl OpStats {
    /// Counts a command. Single writer: the lane's reactor.
    #[inline]
    pub fn record(&self, bytes: u64, ns: u64, error: bool) {
        bump(&self.ops, 1);
        bump(&self.bytes, bytes);
        bump(&self.errors, u64::from(error));
        self.times[TimesOf::Total as usize].record(ns);
    }

    /// Counts `ops` successful commands of one turn; `bytes` is their sum, `ns` each one's time.
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
    /// Adds one time.
    #[inline]
    pub fn record(&self, ns: u64) {
        bump(&self.sum_ns, ns);
        bump(&self.buckets[latency_bucket(ns)], 1);
    }
}

/// Adds to a counter with a single writer, without a locked instruction.
#[inline]
pub fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

/// The bucket of a time.
#[inline]
pub fn latency_bucket(ns: u64) -> usize {
    let ns = ns.max(4);
    let log = 63 - ns.leading_zeros() as usize;
    let sub = (ns >> (log - 2)) as usize & 3;
    (log * 4 + sub).min(LATENCY_BUCKETS - 1)
}

/// The upper end of a bucket, ns.
pub fn latency_bucket_end_ns(bucket: usize) -> u64 {
    let (log, sub) = (bucket / 4, (bucket % 4) as u64);
    if log < 2 { 4 } else { (5 + sub) << (log - 2) }
}

/// Indexes into [`LaneRecord::ops`].
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
        /// Open connections; for a VM, 1 while attached.
        pub connections: AtomicU64,
        /// Bytes copied between host and devices.
        pub copied_bytes: AtomicU64,
        /// Interrupts raised for a VM.
        pub interrupts: AtomicU64,
        /// Commands that ended with a device error.
        pub media_errors: AtomicU64,
        /// Bytes of VM memory registered with the ring now.
        pub registered_bytes: AtomicU64,
        /// When the VM attached, seconds since 1970.
        pub vm_since_s: AtomicU64,
        /// Bytes of memory that the VM shares.
        pub vm_memory_bytes: AtomicU64,
        /// The VM's queues in use, without an admin queue.
        pub vm_queues: AtomicU64,
        /// Commands throttled since the start.
        pub throttled_ops: AtomicU64,
        /// Commands throttled now.
        pub throttled: AtomicU64,
        /// Its part of the tenant's newest allocation, commands per second.
        pub granted_ops_s: AtomicU64,
        /// Its bytes per second.
        pub granted_bytes_s: AtomicU64,
        reserved: [AtomicU64; 14],
        /// By [`OpKind`].
        pub ops: [OpStats; 4],
        /// How long throttled commands waited.
        pub throttled_times: Times,
    }
}

cells! {
    /// A tenant, all reactors together; each adds its part at intervals.
    pub struct TenantRecord {
        /// Tenant id + 1; 0 is a free slot.
        pub tenant: AtomicU64,
        /// Commands charged to its budget.
        pub used_ops: AtomicU64,
        /// Their bytes.
        pub used_bytes: AtomicU64,
        /// Those above its base, if it is metered.
        pub metered_ops: AtomicU64,
        /// Their bytes.
        pub metered_bytes: AtomicU64,
        /// Commands throttled by the budget.
        pub throttled_ops: AtomicU64,
        /// Their total wait, ns.
        pub throttled_ns: AtomicU64,
        /// Commands admitted from the allocation of a bursting tenant.
        pub taken_ops: AtomicU64,
        /// Other tenants' commands admitted from its allocation.
        pub lost_ops: AtomicU64,
        /// Commands admitted from the reserve.
        pub reserve_ops: AtomicU64,
        /// Credit in commands.
        pub credit_ops: AtomicU64,
        /// Credit in bytes.
        pub credit_bytes: AtomicU64,
        /// Its newest allocation, commands per second.
        pub granted_ops_s: AtomicU64,
        /// Its bytes per second.
        pub granted_bytes_s: AtomicU64,
        /// Windows with more than its base, on any reactor.
        pub burst_windows: AtomicU64,
        /// Windows with any allocation.
        pub active_windows: AtomicU64,
        /// Calibrated processor and device time of its commands, ns.
        pub cost_ns: AtomicU64,
        /// That time with corrections.
        pub corrected_ns: AtomicU64,
        /// Use in the last full window, commands per second.
        pub used_ops_s: AtomicU64,
        /// Its bytes per second.
        pub used_bytes_s: AtomicU64,
        /// Commands throttled at its end.
        pub throttled: AtomicU64,
        /// Use above base in that window, commands per second.
        pub above_ops_s: AtomicU64,
        /// Its bytes per second.
        pub above_bytes_s: AtomicU64,
        /// Calibrated processor and device time in that window, ns per second.
        pub window_cost_ns_s: AtomicU64,
        /// That time with corrections.
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
        assert_eq!(region.lanes()[0].export.load(Relaxed), 0);
        assert_eq!(region.devices()[0].read_errors.load(Relaxed), 0);
    }
}
