//! All stores to a controller's part of the VM file, for a successor.
//!
//! Stores stay in program order, and the last one validates the rest. A command's record is one
//! cache line. The function's state is stored whole, alternately in two copies
//! ([`CommandRecords::save`]). [`super::resume`] treats every value as hostile. **Not here:** the
//! file's other parts ([`crate::frontend::vm::file`]).

use crate::frontend::vm::file::VmFile;
use forebay_nvme::Sqe;
use forebay_nvme::pcie::{Doorbell, FunctionState, QUEUES};
use forebay_vfio_user::Negotiated;
use forebay_xlate::cells;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use zerocopy::{FromBytes, IntoBytes};

pub(crate) const COMMANDS: usize = 1024;
/// The VM file's version covers this layout.
const VERSION: u64 = forebay_xlate::boundary::VM_FILE_VERSION;
const STATE_WORDS: usize = size_of::<FunctionState>() / 8;

cells! {
    struct Snapshot {
        words: [AtomicU64; STATE_WORDS],
    }
}

cells! {
    struct QueueCells {
        /// Commands taken since the submission queue was made.
        taken: AtomicU64,
        /// Completions posted since the completion queue was made.
        posted: AtomicU64,
        /// The doorbells, as written to their registers.
        tail: AtomicU64,
        head: AtomicU64,
        reserved: [AtomicU64; 4],
    }
}

cells! {
    struct CommandCells {
        state: AtomicU64,
        /// Dwords 0 and 1 of its entry, then 6 to 9, then 10 to 13.
        sqe: [AtomicU64; 5],
        /// The completion's place and status, while it is posted.
        completion: AtomicU64,
        reserved: AtomicU64,
    }
}
const _: () = assert!(size_of::<CommandCells>() == 64);

cells! {
    struct Area {
        version: AtomicU64,
        /// How often the state was saved; the last copy is at this number modulo 2.
        saved: AtomicU64,
        /// The negotiated version and limits; 0: none.
        negotiated: AtomicU64,
        /// The namespace size that the host was last informed of, in blocks.
        blocks: AtomicU64,
        /// Vectors that the client has masked.
        masked: [AtomicU64; 2],
        /// Vectors that were raised while masked.
        pending: [AtomicU64; 2],
        snapshots: [Snapshot; 2],
        queues: [QueueCells; QUEUES],
        commands: [CommandCells; COMMANDS],
        /// Messages made for the client.
        asks: AtomicU64,
        /// The number of the last one that it has answered.
        answered: AtomicU64,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CommandStage {
    Free,
    Taken,
    /// Its completion is being posted.
    Completing,
}

/// A command's `state` word: stage in bits 1:0, deaths in 5:2, submission queue in 15:8, the lower
/// half of its number there in 63:32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StateWord(u64);

impl StateWord {
    fn taken(qid: u16, number: u64) -> Self {
        Self(1 | u64::from(qid as u8) << 8 | number << 32)
    }

    pub(super) fn stage(self) -> Option<CommandStage> {
        match self.0 & 3 {
            0 => Some(CommandStage::Free),
            1 => Some(CommandStage::Taken),
            2 => Some(CommandStage::Completing),
            _ => None,
        }
    }

    pub(super) fn qid(self) -> u16 {
        u16::from((self.0 >> 8) as u8)
    }

    pub(super) fn number(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(super) fn deaths(self) -> u8 {
        (self.0 >> 2) as u8 & 0xF
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PostedCompletion {
    /// The lower half of its number in its queue.
    pub number: u32,
    pub status: u16,
}

pub(super) struct CommandRecords {
    /// The client's file, mapped once more.
    file: VmFile,
}

#[inline(always)]
fn put(cell: &AtomicU64, value: u64) {
    cell.store(value, Release);
}

impl CommandRecords {
    pub(super) fn new(file: VmFile) -> io::Result<Self> {
        let records = Self { file };
        match records.file.area::<Area>(0, 1) {
            Some(_) => Ok(records),
            None => Err(io::Error::other("the saved state is too short")),
        }
    }

    #[inline]
    fn area(&self) -> &Area {
        match self.file.area::<Area>(0, 1) {
            Some([area]) => area,
            _ => unreachable!("the length was checked when it was mapped"),
        }
    }

    pub(super) fn begin(&self) {
        put(&self.area().version, VERSION);
    }

    pub(super) fn is_known(&self) -> bool {
        self.area().version.load(Acquire) == VERSION
    }

    pub(super) fn save(&self, state: &FunctionState) {
        let area = self.area();
        let number = area.saved.load(Relaxed).wrapping_add(1);
        let words = state.as_bytes().chunks_exact(8);
        for (cell, word) in area.snapshots[number as usize % 2].words.iter().zip(words) {
            let word = word.first_chunk().copied().unwrap_or_default();
            cell.store(u64::from_ne_bytes(word), Relaxed);
        }
        put(&area.saved, number);
    }

    pub(super) fn saved(&self) -> Option<Box<FunctionState>> {
        let area = self.area();
        let number = area.saved.load(Acquire);
        let words = &area.snapshots[number as usize % 2].words;
        let bytes: Vec<u8> = words
            .iter()
            .flat_map(|cell| cell.load(Relaxed).to_ne_bytes())
            .collect();
        match number {
            0 => None,
            _ => FunctionState::read_from_bytes(&bytes).ok().map(Box::new),
        }
    }

    pub(super) fn set_negotiated(&self, negotiated: &Negotiated) {
        let descriptors = u64::from(negotiated.client_descriptors.min(0x7FFF));
        let word = 1 << 63
            | u64::from(negotiated.minor)
            | descriptors << 16
            | u64::from(negotiated.client_data_bytes) << 31;
        put(&self.area().negotiated, word);
    }

    pub(super) fn negotiated(&self) -> Option<Negotiated> {
        let word = self.area().negotiated.load(Relaxed);
        (word >> 63 == 1).then_some(Negotiated {
            minor: word as u16,
            client_descriptors: (word >> 16) as u32 & 0x7FFF,
            client_data_bytes: (word >> 31) as u32,
        })
    }

    pub(super) fn blocks(&self) -> u64 {
        self.area().blocks.load(Relaxed)
    }

    pub(super) fn set_blocks(&self, blocks: u64) {
        put(&self.area().blocks, blocks);
    }

    /// The next message's number, which no dead engine can have used.
    pub(super) fn next_ask(&self) -> u64 {
        let number = self.area().asks.load(Relaxed).wrapping_add(1).max(1);
        put(&self.area().asks, number);
        number
    }

    pub(super) fn set_answered(&self, number: u64) {
        put(&self.area().answered, number);
    }

    /// A dead engine's message that the client has not answered.
    pub(super) fn unanswered(&self) -> Option<u64> {
        let asked = self.file.asked();
        let answered = self.area().answered.load(Relaxed);
        (asked != 0 && asked != answered).then_some(asked)
    }

    pub(super) fn has_asked(&self) -> bool {
        self.area().asks.load(Relaxed) != 0
    }

    #[inline]
    pub(super) fn is_masked(&self, vector: u16) -> bool {
        let word = &self.area().masked[usize::from(vector / 64) % 2];
        word.load(Relaxed) & 1 << (vector % 64) != 0
    }

    pub(super) fn set_masked(&self, vector: u16, masked: bool) {
        set_bit(&self.area().masked, vector, masked);
    }

    pub(super) fn pending(&self) -> [u64; 2] {
        [0, 1].map(|word: usize| self.area().pending[word].load(Relaxed))
    }

    pub(super) fn set_pending(&self, vector: u16, pending: bool) {
        set_bit(&self.area().pending, vector, pending);
    }

    fn queue(&self, qid: u16) -> &QueueCells {
        &self.area().queues[usize::from(qid) % QUEUES]
    }

    pub(super) fn new_sq(&self, qid: u16) {
        put(&self.queue(qid).taken, 0);
        put(&self.queue(qid).tail, 0);
    }

    pub(super) fn new_cq(&self, qid: u16) {
        put(&self.queue(qid).posted, 0);
        put(&self.queue(qid).head, 0);
    }

    pub(super) fn taken(&self, qid: u16) -> u64 {
        self.queue(qid).taken.load(Relaxed)
    }

    #[inline]
    pub(super) fn set_taken(&self, qid: u16, taken: u64) {
        put(&self.queue(qid).taken, taken);
    }

    pub(super) fn posted(&self, qid: u16) -> u64 {
        self.queue(qid).posted.load(Relaxed)
    }

    #[inline]
    pub(super) fn set_posted(&self, qid: u16, posted: u64) {
        put(&self.queue(qid).posted, posted);
    }

    #[inline]
    pub(super) fn doorbell(&self, doorbell: Doorbell) -> u32 {
        let cell = match doorbell {
            Doorbell::Tail(qid) => &self.queue(qid).tail,
            Doorbell::Head(qid) => &self.queue(qid).head,
        };
        cell.load(Relaxed) as u32
    }

    pub(super) fn set_doorbell(&self, doorbell: Doorbell, value: u32) {
        let cell = match doorbell {
            Doorbell::Tail(qid) => &self.queue(qid).tail,
            Doorbell::Head(qid) => &self.queue(qid).head,
        };
        put(cell, value.into());
    }

    #[inline]
    fn command(&self, slot: u16) -> &CommandCells {
        &self.area().commands[usize::from(slot) % COMMANDS]
    }

    /// `number`: the command's number in its queue.
    #[inline]
    pub(super) fn record_fetched(&self, slot: u16, qid: u16, number: u64, sqe: &Sqe) {
        let c = self.command(slot);
        let words: &[[u8; 8]; 8] = zerocopy::transmute_ref!(sqe);
        for (cell, word) in c.sqe.iter().zip([0, 3, 4, 5, 6]) {
            cell.store(u64::from_ne_bytes(words[word]), Release);
        }
        put(&c.state, StateWord::taken(qid, number).0);
    }

    pub(super) fn sqe(&self, slot: u16) -> Sqe {
        let mut words = [[0; 8]; 8];
        let c = self.command(slot);
        for (cell, word) in c.sqe.iter().zip([0, 3, 4, 5, 6]) {
            words[word] = cell.load(Relaxed).to_ne_bytes();
        }
        zerocopy::transmute!(words)
    }

    pub(super) fn state(&self, slot: u16) -> StateWord {
        StateWord(self.command(slot).state.load(Acquire))
    }

    pub(super) fn count_death(&self, slot: u16) {
        let state = self.state(slot);
        if state.deaths() < 0xF {
            put(&self.command(slot).state, state.0 + (1 << 2));
        }
    }

    #[inline]
    pub(super) fn complete(&self, slot: u16, completion: PostedCompletion) {
        let c = self.command(slot);
        let word = u64::from(completion.number) | u64::from(completion.status) << 32;
        put(&c.completion, word);
        let state = c.state.load(Relaxed);
        put(&c.state, state & !3 | 2);
    }

    pub(super) fn completion(&self, slot: u16) -> PostedCompletion {
        let word = self.command(slot).completion.load(Relaxed);
        PostedCompletion {
            number: word as u32,
            status: (word >> 32) as u16,
        }
    }

    #[inline]
    pub(super) fn free(&self, slot: u16) {
        put(&self.command(slot).state, 0);
    }
}

fn set_bit(words: &[AtomicU64; 2], bit: u16, set: bool) {
    let word = &words[usize::from(bit / 64) % 2];
    let mask = 1 << (bit % 64);
    let was = word.load(Relaxed);
    put(word, if set { was | mask } else { was & !mask });
}
