//! The state region: shared memory in which an engine records what its successor needs.
//!
//! Each engine makes a sparse file of fixed tables, made of atomics. A successor can continue from
//! any instruction with it and the engine's memory file. A killed thread has executed a prefix of
//! its program, so compiler ordering suffices: the word that validates others is stored last
//! (`Release`). Readers treat values as hostile and bound them; checks ([`check`]) detect damage.

pub mod check;
pub mod command;
pub mod controller;
pub mod item;
pub mod queue;
pub mod statistics;

pub use command::{
    Asked, AskedAt, CommandRecord, CommandStage, CommandState, R2T_PART_BYTES, R2T_PARTS,
};
pub use controller::{ControllerConstants, ControllerContent, ControllerCopy, ControllerRecord};
pub use item::{Item, ItemRecord, Span};
pub use queue::{QueueConstants, QueueIdentity, QueueRecord, queue_use};
pub use statistics::{
    DeviceOp, DeviceRecord, LATENCY_BUCKETS, LaneRecord, OpKind, OpStats, TenantRecord, Times,
    TimesOf, bump, device_mark, latency_bucket, latency_bucket_end_ns,
};

use crate::cells;
use crate::shm::SharedMemory;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::*};

const MAGIC: u64 = u64::from_le_bytes(*b"FBREGION");
/// Layout version.
pub const REGION_VERSION: u64 = 7;
/// Capacity for lanes (exports).
pub const MAX_LANES: usize = 1024;
/// Capacity for controllers (hosts attached).
pub const MAX_CONTROLLERS: usize = 2048;
/// Capacity for queues (TCP connections), admin queues included.
pub const MAX_QUEUES: usize = 4096;
/// Lists of transmit items, at most one per queue.
pub const MAX_LISTS: usize = MAX_QUEUES;
/// Commands in flight on one queue, at most.
pub const MAX_QUEUE_ENTRIES: usize = 256;
/// Capacity for tenants with served volumes.
pub const MAX_TENANTS: usize = MAX_LANES;
/// Capacity for reactors.
pub const MAX_REACTORS: usize = 64;
/// As many devices as a pool may have.
pub const MAX_DEVICES: usize = 256;

cells! {
    /// The first page.
    pub struct RegionHeader {
        magic: AtomicU64,
        version: AtomicU64,
        /// The engine's generation.
        pub generation: AtomicU64,
        /// The engine's process.
        pub engine_pid: AtomicU64,
        /// CLOCK_MONOTONIC at the start, ns.
        pub started_ns: AtomicU64,
        /// Number of reactors.
        pub reactors: AtomicU64,
        /// Random seed of this region's checks.
        pub key: AtomicU64,
        /// The crash: signal << 32 | reactor + 1 (0: another thread), from the signal handler.
        pub crash: AtomicU64,
        /// The stuck reactor + 1 (maximum + 1: the control thread), from the daemon before it kills
        /// the engine.
        pub stuck: AtomicU64,
        /// 1 after the take-over: the engine acts.
        pub resumed: AtomicU64,
        /// The number of the socket in handshake; 0: none.
        pub handshake: AtomicU64,
        /// CLOCK_MONOTONIC when the control thread woke, ns; 0: idle.
        pub control_since_ns: AtomicU64,
        reserved: [AtomicU64; 500],
    }
}

cells! {
    /// A reactor's record; only the reactor writes it.
    pub struct ReactorRecord {
        /// CLOCK_MONOTONIC of its last turn, ns, for the watchdog.
        pub last_turn_ns: AtomicU64,
        /// Times that it went to sleep.
        pub sleeps: AtomicU64,
        /// Turns with work.
        pub busy_turns: AtomicU64,
        /// 1 while asleep.
        pub asleep: AtomicU64,
        /// Commands that waited for staging memory.
        pub staging_waits: AtomicU64,
        /// Its current work: [`Blame`]; 0: none.
        pub blame: AtomicU64,
        /// The queue of the received bytes: [`rx_word`]; 0: none.
        pub rx_queue: AtomicU64,
        /// The stream position of the first received byte ([`RECEIVE_AT`]).
        pub rx_base: AtomicU64,
        /// Not 0: an earlier engine's requests without a record may still be at a device.
        pub orphans: AtomicU64,
        /// Duration of turns with work, ns.
        pub busy_ns: AtomicU64,
        /// Scheduler windows that ended.
        pub windows: AtomicU64,
        /// Duration of the refills, ns.
        pub scheduling_ns: AtomicU64,
        /// Cost corrections in thousandths, by shared resource of [`forebay_qos::resources`]; 0: no
        /// scheduler.
        pub corrections_milli: [AtomicU64; 6],
        /// Commands offloaded to other reactors.
        pub handed_over: AtomicU64,
        /// Remote operations carried out for others.
        pub carried_out: AtomicU64,
        /// Staging memory reserved for its lanes, bytes.
        pub staging_own_bytes: AtomicU64,
        /// Staging memory lent to bursts, bytes.
        pub staging_borrowed_bytes: AtomicU64,
        reserved: [AtomicU64; 10],
    }
}

/// The word `rx_queue`. It must match `rx_base`; else one connection's bytes could be taken for
/// another's.
#[inline]
pub const fn rx_word(queue: u32, rx_base: u64) -> u64 {
    rx_base << 16 | (queue as u64 + 1)
}

/// Off only to measure the cost of recording.
pub const RECORDS: bool = cfg!(not(feature = "no-recording"));

/// The longest sleep of a reactor, ns.
pub const MAX_SLEEP_NS: u64 = 10_000_000_000;

/// Offset of received bytes in the receive buffer, after kept bytes.
pub const RECEIVE_AT: usize = 256 * 1024;
/// The most bytes received at once, or kept for a stream.
pub const RECEIVE_BYTES: usize = 256 * 1024;

/// The word `blame` of a reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blame {
    /// The queue.
    pub queue: u32,
    /// The command; `None` while the reactor parses a PDU.
    pub slot: Option<u16>,
}

/// Marks a command; the lower bits are its index.
const OF_COMMAND: u64 = 1 << 20;
/// Marks a queue without a command.
const OF_QUEUE: u64 = OF_COMMAND << 1;
/// Marks a VM's command: lane and number.
const OF_VM: u64 = 1 << 30;
/// Marks a VM without a command.
const OF_VM_ITSELF: u64 = OF_VM << 1;
const _: () = assert!((MAX_LANES as u64) << 16 <= OF_VM);
const _: () = assert!(MAX_QUEUES * MAX_QUEUE_ENTRIES == OF_COMMAND as usize);

impl Blame {
    /// The word for a command.
    #[inline]
    pub const fn command(queue: u32, slot: u16) -> u64 {
        OF_COMMAND | Self::at(queue, slot)
    }

    /// The word while a queue's PDU is parsed.
    #[inline]
    pub const fn queue(queue: u32) -> u64 {
        OF_QUEUE | Self::at(queue, 0)
    }

    /// The word for a VM's command, by its frontend's number.
    #[inline]
    pub const fn vm(lane: u32, slot: u16) -> u64 {
        OF_VM | (lane as u64 % MAX_LANES as u64) << 16 | slot as u64
    }

    /// The word while a VM's message or rings are read.
    #[inline]
    pub const fn vm_itself(lane: u32) -> u64 {
        OF_VM_ITSELF | (lane as u64 % MAX_LANES as u64) << 16
    }

    /// The lane and command of a word that names a VM.
    #[inline]
    pub const fn vm_of_word(word: u64) -> Option<(u32, Option<u16>)> {
        let lane = ((word >> 16) % MAX_LANES as u64) as u32;
        match word >> 30 {
            1 => Some((lane, Some(word as u16))),
            2 => Some((lane, None)),
            _ => None,
        }
    }

    #[inline]
    const fn at(queue: u32, slot: u16) -> u64 {
        let queue = queue as u64 % MAX_QUEUES as u64;
        queue * MAX_QUEUE_ENTRIES as u64 + slot as u64 % MAX_QUEUE_ENTRIES as u64
    }

    /// The queue and command that a word names.
    pub const fn of_word(word: u64) -> Option<Self> {
        if word >= OF_VM {
            return None;
        }
        let at = word % OF_COMMAND;
        Some(Self {
            queue: (at / MAX_QUEUE_ENTRIES as u64) as u32,
            slot: match word - at {
                OF_COMMAND => Some((at % MAX_QUEUE_ENTRIES as u64) as u16),
                OF_QUEUE => None,
                _ => return None,
            },
        })
    }
}

const _: () = assert!(size_of::<RegionHeader>() == 4096 && size_of::<ReactorRecord>() == 256);
const _: () = assert!(size_of::<DeviceRecord>() == 64);

const REACTORS_AT: usize = 4096;
const DEVICES_AT: usize = REACTORS_AT + MAX_REACTORS * size_of::<ReactorRecord>();
const LANES_AT: usize = DEVICES_AT + MAX_DEVICES * size_of::<DeviceRecord>();
const TENANTS_AT: usize = LANES_AT + MAX_LANES * size_of::<LaneRecord>();
const CONTROLLERS_AT: usize = TENANTS_AT + MAX_TENANTS * size_of::<TenantRecord>();
const QUEUES_AT: usize = CONTROLLERS_AT + MAX_CONTROLLERS * size_of::<ControllerRecord>();
const COMMANDS_AT: usize = QUEUES_AT + MAX_QUEUES * size_of::<QueueRecord>();
const ITEMS_AT: usize = COMMANDS_AT + MAX_QUEUES * size_of::<[CommandRecord; MAX_QUEUE_ENTRIES]>();
/// Size of a (sparse) region, bytes.
pub const REGION_BYTES: usize = ITEMS_AT + MAX_LISTS * size_of::<[ItemRecord; item::MAX_ITEMS]>();
const _: () = assert!(QUEUES_AT.is_multiple_of(64) && COMMANDS_AT.is_multiple_of(4096));
const _: () = assert!(ITEMS_AT.is_multiple_of(4096));

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

    /// A new region without a path (tests).
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
        header.key.store(random(), Relaxed);
        header.magic.store(MAGIC, Release);
        region
    }

    /// Opens an engine's region; fails if it is too short or of another version.
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
                "the state region's layout is not the one that this version reads",
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

    /// By tenant slot.
    pub fn tenants(&self) -> &[TenantRecord] {
        self.table(TENANTS_AT, MAX_TENANTS)
    }

    /// By controller slot.
    pub fn controllers(&self) -> &[ControllerRecord] {
        self.table(CONTROLLERS_AT, MAX_CONTROLLERS)
    }

    /// A dead reactor's work. While it takes PDUs, `blame` names only the queue. The command is
    /// then the recorded one that the queue does not count yet.
    pub fn blamed(&self, reactor: usize) -> Option<Blame> {
        let word = self.reactors().get(reactor)?.blame.load(Relaxed);
        let blame = Blame::of_word(word)?;
        if blame.slot.is_some() {
            return Some(blame);
        }
        let next = self.queues().get(blame.queue as usize)?;
        let next = next.number.load(Relaxed).wrapping_add(1);
        let is_next = |c: &CommandRecord| {
            let word = c.state.load(Relaxed);
            c.number.load(Relaxed) == next && word != 0 && CommandState::open(word, next).is_ok()
        };
        let commands = self.commands(blame.queue as usize);
        let slot = commands.iter().position(is_next).map(|slot| slot as u16);
        Some(Blame { slot, ..blame })
    }

    /// By queue slot.
    pub fn queues(&self) -> &[QueueRecord] {
        self.table(QUEUES_AT, MAX_QUEUES)
    }

    /// A queue's commands; empty if out of range.
    pub fn commands(&self, queue: usize) -> &[CommandRecord] {
        self.all_commands(queue).map_or(&[], |commands| commands)
    }

    /// A queue's commands as an array.
    pub fn all_commands(&self, queue: usize) -> Option<&[CommandRecord; MAX_QUEUE_ENTRIES]> {
        self.commands_of_all().get(queue)
    }

    /// The commands of all queues as one array.
    pub fn commands_in_a_row(&self) -> &[CommandRecord; MAX_QUEUES * MAX_QUEUE_ENTRIES] {
        let all = self.table(COMMANDS_AT, 1);
        &all[0]
    }

    /// The commands of all queues.
    pub fn commands_of_all(&self) -> &[[CommandRecord; MAX_QUEUE_ENTRIES]] {
        self.table(COMMANDS_AT, MAX_QUEUES)
    }

    /// A list's items; empty if out of range.
    pub fn items(&self, list: usize) -> &[ItemRecord] {
        self.all_items(list).map_or(&[], |items| items)
    }

    /// A list's items as an array.
    pub fn all_items(&self, list: usize) -> Option<&[ItemRecord; item::MAX_ITEMS]> {
        self.table(ITEMS_AT, MAX_LISTS).get(list)
    }

    /// The mapping, for passing its descriptor on.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }
}

fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_found_again_and_costs_nothing_unused() {
        let region = Region::anonymous(3).unwrap();
        region.commands(MAX_QUEUES - 1)[255]
            .state
            .store(CommandState::taken(1).0, Release);
        assert!(region.commands(MAX_QUEUES).is_empty() && region.items(MAX_LISTS).is_empty());
        assert_eq!(region.items(MAX_LISTS - 1).len(), item::MAX_ITEMS);
        let fd = region.memory().fd().try_clone_to_owned().unwrap();
        let seen = Region::adopt(SharedMemory::from_fd(fd).unwrap()).unwrap();
        assert_eq!(seen.header().generation.load(Relaxed), 3);
        assert_eq!(
            seen.commands(MAX_QUEUES - 1)[255].state(),
            CommandState::taken(1)
        );
        let blocks = rustix::fs::fstat(region.memory().fd()).unwrap().st_blocks;
        assert!(blocks * 512 < 64 * 1024, "sparse: {blocks} blocks");
        assert!(Region::adopt(SharedMemory::anonymous("x", 4096).unwrap()).is_err());
    }
}
