//! The state region: what an engine records as it works, in shared memory that outlives it.
//!
//! **Purpose.** A successor takes an engine's place after its death at any instruction, from this and
//! from the bytes in the engine's memory file alone.
//!
//! **Design.** One file for each engine generation, made by the engine, mapped by the daemon, with a
//! versioned layout of fixed tables: devices and lanes (their figures, [`figures`]), controllers
//! ([`controller`]), queues ([`queue`]), and for each queue the commands in flight ([`command`]); and
//! lists of what is to be sent ([`item`]). The file is sparse, so room costs nothing until it is used.
//! Only atomics lie in it. A thread that is killed has carried out a prefix of its program, so records
//! need no more order than the compiler's: the word that makes others count is stored last (`Release`).
//! Whoever reads the region of a dead engine takes every value for hostile and bounds it; checks
//! ([`check`]) tell damage from truth.
//!
//! **Not here:** when the engine stores what (the engine's `tcp::record`), and what a successor makes of it.

pub mod check;
pub mod command;
pub mod controller;
pub mod figures;
pub mod item;
pub mod queue;

pub use command::{
    Asked, AskedAt, CommandRecord, CommandStage, CommandState, R2T_PART_BYTES, R2T_PARTS,
};
pub use controller::{ControllerConstants, ControllerContent, ControllerCopy, ControllerRecord};
pub use figures::{
    DeviceOp, DeviceRecord, LATENCY_BUCKETS, LaneRecord, OpKind, OpStats, TenantRecord, Times,
    TimesOf, bump, device_mark, latency_bucket, latency_bucket_end_ns,
};
pub use item::{Item, ItemRecord, Span};
pub use queue::{QueueConstants, QueueIdentity, QueueRecord, queue_use};

use crate::cells;
use crate::shm::SharedMemory;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::*};

const MAGIC: u64 = u64::from_le_bytes(*b"FBREGION");
/// Layout version.
pub const REGION_VERSION: u64 = 7;
/// Lanes (exports) that a region has room for.
pub const MAX_LANES: usize = 1024;
/// Controllers (hosts attached).
pub const MAX_CONTROLLERS: usize = 2048;
/// Queues (TCP connections), admin queues included.
pub const MAX_QUEUES: usize = 4096;
/// Lists of transmit items: never more are in use than there are queues.
pub const MAX_LISTS: usize = MAX_QUEUES;
/// Commands in flight on one queue: the most entries that a queue may have.
pub const MAX_QUEUE_ENTRIES: usize = 256;
/// Tenants that have volumes which are served.
pub const MAX_TENANTS: usize = MAX_LANES;
/// Reactors.
pub const MAX_REACTORS: usize = 64;
/// Devices: as many as a pool may have.
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
        /// CLOCK_MONOTONIC when it started, ns.
        pub started_ns: AtomicU64,
        /// How many reactors run.
        pub reactors: AtomicU64,
        /// Random: the checks of this region begin with it.
        pub key: AtomicU64,
        /// How it crashed: signal << 32 | reactor + 1 (0: another thread). Its signal handler's.
        pub crash: AtomicU64,
        /// The reactor + 1 that was stuck, or one more than there may be: the control thread. The daemon's,
        /// before it kills the engine.
        pub stuck: AtomicU64,
        /// 1 from its taking over on: what it does has effects.
        pub resumed: AtomicU64,
        /// The socket's number of the newcomer that the control thread is busy with; 0: none.
        pub newcomer: AtomicU64,
        /// CLOCK_MONOTONIC when the control thread woke up, ns; 0 while it waits for something to do.
        pub control_since_ns: AtomicU64,
        reserved: [AtomicU64; 500],
    }
}

cells! {
    /// A reactor's own words: one writer.
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
        /// What it is working on: [`Blame`]; 0: nobody's.
        pub blame: AtomicU64,
        /// Whose bytes are received, or were last: [`rx_word`]; 0: nobody's.
        pub rx_queue: AtomicU64,
        /// The position in that queue's stream of the first byte received ([`RECEIVE_AT`]).
        pub rx_base: AtomicU64,
        /// Not 0: something of an earlier engine may still be at a device, and no command's record
        /// says so any more.
        pub orphans: AtomicU64,
        /// How long turns with something to do took, ns.
        pub busy_ns: AtomicU64,
        /// Windows of its scheduler that ended.
        pub windows: AtomicU64,
        /// How long their ends took, ns.
        pub scheduling_ns: AtomicU64,
        /// So many times what is calibrated costs count now, in thousandths, by shared resource of
        /// [`forebay_qos::resources`]; 0: there is no scheduler.
        pub corrections_milli: [AtomicU64; 6],
        /// Commands that other reactors were given to carry out.
        pub handed_over: AtomicU64,
        /// Commands that it carried out for others.
        pub carried_out: AtomicU64,
        /// Bytes of staging memory that stay at hand for its lanes.
        pub staging_own_bytes: AtomicU64,
        /// Bytes of it that bursts have borrowed, until they end.
        pub staging_borrowed_bytes: AtomicU64,
        reserved: [AtomicU64; 10],
    }
}

/// The word `rx_queue` of a reactor: the queue, and again where its bytes begin. If only one of both words is as it
/// was stored, nobody's bytes are there: else those of one connection could be taken for another's.
#[inline]
pub const fn rx_word(queue: u32, rx_base: u64) -> u64 {
    rx_base << 16 | (queue as u64 + 1)
}

/// Whether what an I/O needs is recorded at all: always, but in a measurement of what that costs.
pub const RECORDS: bool = cfg!(not(feature = "no-recording"));

/// The longest that a reactor sleeps without a turn, in ns.
pub const MAX_SLEEP_NS: u64 = 10_000_000_000;

/// Where in a reactor's receive buffer bytes are received: before it, there is room for as many
/// that were kept.
pub const RECEIVE_AT: usize = 256 * 1024;
/// The most bytes received at once, and the most kept of one stream.
pub const RECEIVE_BYTES: usize = 256 * 1024;

/// The word `blame` of a reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blame {
    /// The queue.
    pub queue: u32,
    /// The command; `None` while a PDU is looked at.
    pub slot: Option<u16>,
}

/// The bit of a word that names a command; below it is its place among the commands of all queues.
const OF_COMMAND: u64 = 1 << 20;
/// The bit of one that names but a queue.
const OF_QUEUE: u64 = OF_COMMAND << 1;
/// The bit of one that names a machine's command: its lane and its number.
const OF_MACHINE: u64 = 1 << 30;
/// The bit of one that names but a machine.
const OF_MACHINE_ITSELF: u64 = OF_MACHINE << 1;
const _: () = assert!((MAX_LANES as u64) << 16 <= OF_MACHINE);
const _: () = assert!(MAX_QUEUES * MAX_QUEUE_ENTRIES == OF_COMMAND as usize);

impl Blame {
    /// The word of a command.
    #[inline]
    pub const fn command(queue: u32, slot: u16) -> u64 {
        OF_COMMAND | Self::at(queue, slot)
    }

    /// The word while a PDU of a queue is looked at.
    #[inline]
    pub const fn queue(queue: u32) -> u64 {
        OF_QUEUE | Self::at(queue, 0)
    }

    /// The word of a machine's command: its lane, and its frontend's number for it.
    #[inline]
    pub const fn machine(lane: u32, slot: u16) -> u64 {
        OF_MACHINE | (lane as u64 % MAX_LANES as u64) << 16 | slot as u64
    }

    /// The word while a message of a machine's client, or its rings, are looked at.
    #[inline]
    pub const fn machine_itself(lane: u32) -> u64 {
        OF_MACHINE_ITSELF | (lane as u64 % MAX_LANES as u64) << 16
    }

    /// The lane of a word that names a machine, and its command's number, if it names one.
    #[inline]
    pub const fn machine_of_word(word: u64) -> Option<(u32, Option<u16>)> {
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

    /// What a word says.
    pub const fn of_word(word: u64) -> Option<Self> {
        if word >= OF_MACHINE {
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
/// Bytes of a region (sparse).
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
        header.key.store(random(), Relaxed);
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

    /// By tenant slot.
    pub fn tenants(&self) -> &[TenantRecord] {
        self.table(TENANTS_AT, MAX_TENANTS)
    }

    /// By controller slot.
    pub fn controllers(&self) -> &[ControllerRecord] {
        self.table(CONTROLLERS_AT, MAX_CONTROLLERS)
    }

    /// What a dead reactor was working on. While it takes PDUs, it names but the queue: the command is the
    /// one, if any, that is recorded and that the queue does not count as taken yet.
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

    /// A queue's commands, by command slot; empty for a slot out of range.
    pub fn commands(&self, queue: usize) -> &[CommandRecord] {
        self.all_commands(queue).map_or(&[], |commands| commands)
    }

    /// The same as an array; `None` for a slot out of range.
    pub fn all_commands(&self, queue: usize) -> Option<&[CommandRecord; MAX_QUEUE_ENTRIES]> {
        self.commands_of_all().get(queue)
    }

    /// The same in a row.
    pub fn commands_in_a_row(&self) -> &[CommandRecord; MAX_QUEUES * MAX_QUEUE_ENTRIES] {
        let all = self.table(COMMANDS_AT, 1);
        &all[0]
    }

    /// The commands of all queues.
    pub fn commands_of_all(&self) -> &[[CommandRecord; MAX_QUEUE_ENTRIES]] {
        self.table(COMMANDS_AT, MAX_QUEUES)
    }

    /// The items of a list; empty for a list out of range.
    pub fn items(&self, list: usize) -> &[ItemRecord] {
        self.all_items(list).map_or(&[], |items| items)
    }

    /// The same as an array; `None` for a list out of range.
    pub fn all_items(&self, list: usize) -> Option<&[ItemRecord; item::MAX_ITEMS]> {
        self.table(ITEMS_AT, MAX_LISTS).get(list)
    }

    /// The mapping, for passing its descriptor on.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }
}

/// A number that nobody guesses, and that is another each time.
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
