//! The state region: what an engine records as it works, in shared memory that outlives it.
//!
//! **Design.** One file for each engine generation, made by the engine, mapped by the daemon, with a
//! versioned layout of fixed tables: devices (their errors), lanes (an export each, with its statistics),
//! controllers, queues, and for each queue the commands in flight: the 64 bytes as they came, their identity,
//! their attempts. The file is sparse, so room costs nothing until it is used. Only atomics lie in
//! it; whoever reads the region of a dead engine takes every value for hostile and bounds it.
//!
//! **What it does not do yet.** Take-over (a successor that takes up the queues): the records are
//! here from the start, so that it can come.

use crate::cells;
use crate::shm::SharedMemory;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::*};

const MAGIC: u64 = u64::from_le_bytes(*b"FBREGION");
/// Layout version.
pub const REGION_VERSION: u64 = 2;
/// Lanes (exports) that a region has room for.
pub const MAX_LANES: usize = 1024;
/// Controllers (hosts attached).
pub const MAX_CONTROLLERS: usize = 2048;
/// Queues (TCP connections), admin queues included.
pub const MAX_QUEUES: usize = 4096;
/// Commands in flight on one queue: the most entries that a queue may have.
pub const MAX_QUEUE_ENTRIES: usize = 256;
/// Reactors.
pub const MAX_REACTORS: usize = 64;
/// Devices: as many as a pool may have.
pub const MAX_DEVICES: usize = 256;
/// Latency buckets: four to each doubling, from 1 ns on.
pub const LATENCY_BUCKETS: usize = 160;

cells! {
    /// The first page.
    pub struct RegionHeader {
        magic: AtomicU64,
        version: AtomicU64,
        /// The engine's generation.
        pub generation: AtomicU64,
        /// The engine's process.
        pub engine_pid: AtomicU64,
        /// CLOCK_MONOTONIC when it started, ns.
        pub started_ns: AtomicU64,
        /// How many reactors run.
        pub reactors: AtomicU64,
        reserved: [AtomicU64; 506],
    }
}

cells! {
    /// A reactor's own figures: one writer.
    pub struct ReactorRecord {
        /// CLOCK_MONOTONIC of its last turn, ns (a watchdog's food).
        pub last_turn_ns: AtomicU64,
        /// Times that it went to sleep.
        pub sleeps: AtomicU64,
        /// Turns with something to do.
        pub busy_turns: AtomicU64,
        /// 1 while asleep.
        pub asleep: AtomicU64,
        /// Commands that waited for staging memory.
        pub staging_waits: AtomicU64,
        reserved: [AtomicU64; 3],
    }
}

cells! {
    /// A device's errors: every reactor adds to it, the internal lane too.
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
        reserved: AtomicU64,
    }
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
        /// Sum of their times, ns.
        pub total_ns: AtomicU64,
        /// See [`latency_bucket`].
        pub latency: [AtomicU64; LATENCY_BUCKETS],
    }
}

impl OpStats {
    /// Counts a command that took `ns` (one writer: the lane's reactor).
    #[inline]
    pub fn record(&self, bytes: u64, ns: u64, error: bool) {
        bump(&self.ops, 1);
        bump(&self.bytes, bytes);
        bump(&self.errors, u64::from(error));
        bump(&self.total_ns, ns);
        bump(&self.latency[latency_bucket(ns)], 1);
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
        /// Connections open now.
        pub connections: AtomicU64,
        reserved: [AtomicU64; 25],
        /// By [`OpKind`].
        pub ops: [OpStats; 4],
    }
}

cells! {
    /// A controller: a host's association with an export.
    pub struct ControllerRecord {
        /// 1 while in use.
        pub used: AtomicU64,
        /// Lane slot; `u64::MAX` for a discovery controller.
        pub lane: AtomicU64,
        /// Controller id.
        pub cntlid: AtomicU64,
        /// The controller's registers and features, as its state machine exports them.
        pub state: [AtomicU64; 29],
        /// Host NQN, zero padded.
        pub host_nqn: [AtomicU64; 32],
    }
}

cells! {
    /// A queue: a TCP connection.
    pub struct QueueRecord {
        /// 1 while in use.
        pub used: AtomicU64,
        /// Controller slot.
        pub controller: AtomicU64,
        /// Queue id, 0 for admin.
        pub qid: AtomicU64,
        /// Entries.
        pub entries: AtomicU64,
        /// Submission queue head: commands taken, modulo entries.
        pub sq_head: AtomicU64,
        /// Bytes of the stream consumed since the queue was connected.
        pub received_bytes: AtomicU64,
        /// The reactor that serves it.
        pub reactor: AtomicU64,
        reserved: AtomicU64,
    }
}

/// A command's progress, as its record says it.
pub mod progress {
    /// The slot is free.
    pub const FREE: u64 = 0;
    /// Taken from the queue, not yet submitted to a device.
    pub const TAKEN: u64 = 1;
    /// Parked on a fault.
    pub const PARKED: u64 = 2;
    /// Slices are at a device.
    pub const SUBMITTED: u64 = 3;
    /// Ended; its completion is on its way to the host.
    pub const ENDED: u64 = 4;
}

cells! {
    /// A command in flight: 128 bytes.
    pub struct CommandRecord {
        /// [`progress`]; stored last when a command is taken.
        pub progress: AtomicU64,
        /// Its number on this queue, rising.
        pub number: AtomicU64,
        /// Times that an engine began it.
        pub attempts: AtomicU64,
        /// CLOCK_MONOTONIC when it was taken, ns.
        pub taken_ns: AtomicU64,
        /// The submission queue entry.
        pub sqe: [AtomicU64; 8],
        reserved: [AtomicU64; 4],
    }
}

const _: () = assert!(size_of::<RegionHeader>() == 4096 && size_of::<CommandRecord>() == 128);
const _: () = assert!(size_of::<QueueRecord>() == 64 && size_of::<ReactorRecord>() == 64);
const _: () = assert!(size_of::<ControllerRecord>() == 512 && size_of::<DeviceRecord>() == 64);

const REACTORS_AT: usize = 4096;
const DEVICES_AT: usize = REACTORS_AT + 4096;
const LANES_AT: usize = DEVICES_AT + MAX_DEVICES * size_of::<DeviceRecord>();
const CONTROLLERS_AT: usize = LANES_AT + MAX_LANES * size_of::<LaneRecord>();
const QUEUES_AT: usize = CONTROLLERS_AT + MAX_CONTROLLERS * size_of::<ControllerRecord>();
const COMMANDS_AT: usize = QUEUES_AT + MAX_QUEUES * size_of::<QueueRecord>();
/// Bytes of a region (sparse).
pub const REGION_BYTES: usize =
    COMMANDS_AT + MAX_QUEUES * MAX_QUEUE_ENTRIES * size_of::<CommandRecord>();

/// A mapped region.
#[derive(Debug)]
pub struct Region {
    memory: SharedMemory,
}

impl Region {
    /// A new region for an engine, at `path`.
    pub fn create(path: &Path, generation: u64) -> io::Result<Self> {
        Ok(Self::begin(
            SharedMemory::create(path, REGION_BYTES)?,
            generation,
        ))
    }

    /// A new region that only its descriptor names (tests).
    pub fn anonymous(generation: u64) -> io::Result<Self> {
        Ok(Self::begin(
            SharedMemory::anonymous("forebay-region", REGION_BYTES)?,
            generation,
        ))
    }

    fn begin(memory: SharedMemory, generation: u64) -> Self {
        let region = Self { memory };
        let header = region.header();
        header.version.store(REGION_VERSION, Relaxed);
        header.generation.store(generation, Relaxed);
        header
            .engine_pid
            .store(u64::from(std::process::id()), Relaxed);
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        header.started_ns.store(now_ns, Relaxed);
        header.magic.store(MAGIC, Release);
        region
    }

    /// Takes a region that an engine made.
    ///
    /// # Errors
    /// When it is too short or of a layout that this version can't read.
    pub fn adopt(memory: SharedMemory) -> io::Result<Self> {
        if memory.len() < REGION_BYTES {
            return Err(io::Error::other(
                "the state region is shorter than this version's layout",
            ));
        }
        let region = Self { memory };
        let header = region.header();
        if header.magic.load(Acquire) != MAGIC || header.version.load(Relaxed) != REGION_VERSION {
            return Err(io::Error::other(
                "the state region has another layout than this version reads",
            ));
        }
        Ok(region)
    }

    fn table<T: crate::shm::Cells>(&self, at: usize, count: usize) -> &[T] {
        self.memory
            .cells(at, count)
            .expect("the length was checked when mapped")
    }

    /// The first page.
    pub fn header(&self) -> &RegionHeader {
        &self.table(0, 1)[0]
    }

    /// By reactor number.
    pub fn reactors(&self) -> &[ReactorRecord] {
        self.table(REACTORS_AT, MAX_REACTORS)
    }

    /// By the device's index in its pool.
    pub fn devices(&self) -> &[DeviceRecord] {
        self.table(DEVICES_AT, MAX_DEVICES)
    }

    /// By lane slot.
    pub fn lanes(&self) -> &[LaneRecord] {
        self.table(LANES_AT, MAX_LANES)
    }

    /// By controller slot.
    pub fn controllers(&self) -> &[ControllerRecord] {
        self.table(CONTROLLERS_AT, MAX_CONTROLLERS)
    }

    /// By queue slot.
    pub fn queues(&self) -> &[QueueRecord] {
        self.table(QUEUES_AT, MAX_QUEUES)
    }

    /// A queue's commands, by command slot; empty for a slot out of range.
    pub fn commands(&self, queue: usize) -> &[CommandRecord] {
        let all: &[CommandRecord] = self.table(COMMANDS_AT, MAX_QUEUES * MAX_QUEUE_ENTRIES);
        all.chunks_exact(MAX_QUEUE_ENTRIES)
            .nth(queue)
            .unwrap_or(&[])
    }

    /// The mapping, for passing its descriptor on.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_region_is_found_again_and_costs_nothing_unused() {
        let region = Region::anonymous(3).unwrap();
        region.commands(MAX_QUEUES - 1)[255]
            .progress
            .store(progress::SUBMITTED, Release);
        assert!(region.commands(MAX_QUEUES).is_empty());
        let fd = region.memory().fd().try_clone_to_owned().unwrap();
        let seen = Region::adopt(SharedMemory::from_fd(fd).unwrap()).unwrap();
        assert_eq!(seen.header().generation.load(Relaxed), 3);
        assert_eq!(
            seen.commands(MAX_QUEUES - 1)[255].progress.load(Acquire),
            progress::SUBMITTED
        );
        let blocks = rustix::fs::fstat(region.memory().fd()).unwrap().st_blocks;
        assert!(blocks * 512 < 64 * 1024, "sparse: {blocks} blocks");
        assert!(Region::adopt(SharedMemory::anonymous("x", 4096).unwrap()).is_err());
    }
}
