//! The VM file: what a successor must know of one client, in shared memory that the daemon
//! holds.
//!
//! It is a sparse memfd per client with a versioned layout of atomics. A killed thread has carried
//! out a prefix of its stores, so the word that validates others is stored last. A region carries
//! the number of the message that made it, and of the one that removed it. A successor undoes both
//! while that message is unanswered ([`VmFile::undo`]), and treats every value as hostile.
//!
//! **Not here:** when values are stored ([`super::client`]).

use super::answer::{self, Note};
use forebay_xlate::boundary::VM_FILE_VERSION;
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::cells;
use forebay_xlate::shm::{Cells, SharedMemory};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::SystemTime;

const MAGIC: u64 = u64::from_le_bytes(*b"FBMACHIN");
pub(crate) const MAX_REGIONS: usize = 512;
pub(crate) const MAX_SLOTS: usize = 512;
pub(crate) const AREA_BYTES: usize = 4 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum MessageStage {
    /// Consumed: no message is being handled.
    Idle = 0,
    /// A successor handles it again.
    Intent = 1,
    /// Carried out, and its answer is being sent: the note shows whether it was.
    Answering = 2,
    /// Answered, if an answer is due; being consumed.
    Answered = 3,
}

impl MessageStage {
    fn of_word(word: u64) -> Self {
        match word & 3 {
            0 => Self::Idle,
            1 => Self::Intent,
            2 => Self::Answering,
            _ => Self::Answered,
        }
    }
}

cells! {
    struct Header {
        magic: AtomicU64,
        version: AtomicU64,
        /// The export + 1.
        export: AtomicU64,
        /// Which frontend ([`super::kind_word`]).
        kind: AtomicU64,
        /// The last message's number << 2 | its [`MessageStage`].
        message: AtomicU64,
        bytes: AtomicU64,
        /// The socket's peek offset when consuming began.
        peeked: AtomicU64,
        next_deposit: AtomicU64,
        /// Engines that crashed in a row over this client's message or rings.
        tries: AtomicU64,
        answer: AtomicU64,
        /// The kernel's note of sending it.
        note: Note,
        since_s: AtomicU64,
        /// The frontend's request that is being sent; 0: none.
        asking: AtomicU64,
        /// That request's bytes; `u64::MAX`: it was partly sent.
        ask: AtomicU64,
        ask_note: Note,
        /// The last request sent; 0: none.
        asked: AtomicU64,
        reserved: [AtomicU64; 482],
    }
}

cells! {
    struct RegionRecord {
        address: AtomicU64,
        len: AtomicU64,
        offset: AtomicU64,
        /// (Deposit + 1, or 0) << 1 | writable.
        deposit: AtomicU64,
        word: AtomicU64,
        /// The message that made it.
        made: AtomicU64,
        /// The message that removed it; 0: none.
        gone: AtomicU64,
        /// 1: the record is valid.
        used: AtomicU64,
    }
}

const REGIONS_AT: usize = size_of::<Header>();
const SLOTS_AT: usize = REGIONS_AT + MAX_REGIONS * size_of::<RegionRecord>();
const AREA_AT: usize = SLOTS_AT + MAX_SLOTS * size_of::<AtomicU64>();
pub(crate) const FILE_BYTES: usize = AREA_AT + AREA_BYTES;
const _: () = assert!(AREA_AT.is_multiple_of(4096));

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ClientRegion {
    pub address: u64,
    pub len: u64,
    pub offset: u64,
    /// Its file's deposit; `None`: the region is not accessible.
    pub deposit: Option<u32>,
    pub writable: bool,
    /// The frontend's (vhost: the client's own address).
    pub word: u64,
}

#[derive(Debug)]
pub(crate) struct VmFile {
    memory: SharedMemory,
}

impl VmFile {
    pub(crate) fn create(export: ExportId, kind: u64) -> io::Result<Self> {
        let file = Self {
            memory: SharedMemory::anonymous("forebay-machine", FILE_BYTES)?,
        };
        let header = file.header();
        header.version.store(VM_FILE_VERSION, Relaxed);
        header.export.store(export.0 + 1, Relaxed);
        header.kind.store(kind, Relaxed);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let since_s = since.map_or(0, |since| since.as_secs());
        header.since_s.store(since_s, Relaxed);
        header.magic.store(MAGIC, Release);
        Ok(file)
    }

    pub(crate) fn adopt(fd: OwnedFd, export: ExportId, kind: u64) -> io::Result<Self> {
        let memory = SharedMemory::from_fd(fd)?;
        if memory.len() != FILE_BYTES {
            return Err(io::Error::other("its length is that of another version"));
        }
        let file = Self { memory };
        let header = file.header();
        if header.magic.load(Acquire) != MAGIC || header.version.load(Relaxed) != VM_FILE_VERSION {
            return Err(io::Error::other("its layout is that of another version"));
        }
        if header.export.load(Relaxed) != export.0.wrapping_add(1)
            || header.kind.load(Relaxed) != kind
        {
            return Err(io::Error::other("it belongs to another export"));
        }
        Ok(file)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    fn table<T: Cells>(&self, at: usize, count: usize) -> &[T] {
        self.memory
            .cells(at, count)
            .expect("the length was checked when mapped")
    }

    fn header(&self) -> &Header {
        &self.table(0, 1)[0]
    }

    fn regions_table(&self) -> &[RegionRecord] {
        self.table(REGIONS_AT, MAX_REGIONS)
    }

    fn slots_table(&self) -> &[AtomicU64] {
        self.table(SLOTS_AT, MAX_SLOTS)
    }

    /// `count` values from byte `offset` of the frontend's area; `None` if out of range or
    /// unaligned. Initially zero.
    pub(crate) fn area<T: Cells>(&self, offset: usize, count: usize) -> Option<&[T]> {
        let bytes = count.checked_mul(size_of::<T>())?;
        if offset.checked_add(bytes)? > AREA_BYTES {
            return None;
        }
        self.memory.cells(AREA_AT + offset, count)
    }

    pub(crate) fn message(&self) -> (u64, MessageStage) {
        let word = self.header().message.load(Relaxed);
        (word >> 2, MessageStage::of_word(word))
    }

    pub(crate) fn set_message(&self, number: u64, stage: MessageStage) {
        let word = number << 2 | stage as u64;
        self.header().message.store(word, Release);
    }

    /// Recorded before a message is consumed.
    pub(crate) fn set_consuming(&self, bytes: u64, peeked: u64) {
        self.header().bytes.store(bytes, Relaxed);
        self.header().peeked.store(peeked, Relaxed);
    }

    pub(super) fn begin_answer(&self, bytes: u64) {
        self.header().answer.store(bytes, Relaxed);
        answer::clear(&self.header().note);
    }

    /// Where the kernel notes how much is sent.
    pub(super) fn note(&self) -> &Note {
        &self.header().note
    }

    pub(super) fn sent(&self) -> (u64, u64) {
        let header = self.header();
        (answer::sent(&header.note), header.answer.load(Relaxed))
    }

    pub(super) fn begin_ask(&self, number: u64, bytes: u64) {
        let header = self.header();
        header.ask.store(bytes, Relaxed);
        answer::clear(&header.ask_note);
        header.asking.store(number, Release);
    }

    pub(super) fn ask_note(&self) -> &Note {
        &self.header().ask_note
    }

    /// The request was partly sent: another engine cannot continue it.
    pub(super) fn tear_ask(&self) {
        self.header().ask.store(u64::MAX, Release);
    }

    pub(super) fn end_ask(&self) {
        let header = self.header();
        let number = header.asking.load(Relaxed);
        header.asked.store(number, Release);
        header.asking.store(0, Release);
    }

    /// Settles a dead engine's request: sent or not. False: it was partly sent.
    pub(super) fn settle_ask(&self) -> bool {
        let header = self.header();
        if header.asking.load(Relaxed) == 0 {
            return true;
        }
        let all = header.ask.load(Relaxed);
        match answer::sent(&header.ask_note) {
            _ if all == u64::MAX => return false,
            0 => header.asking.store(0, Release),
            sent if sent == all => self.end_ask(),
            _ => return false,
        }
        true
    }

    /// The number of the last request that the client has or will get; 0: none.
    pub(crate) fn asked(&self) -> u64 {
        self.header().asked.load(Relaxed)
    }

    pub(crate) fn consuming(&self) -> (u64, u64) {
        let header = self.header();
        (header.bytes.load(Relaxed), header.peeked.load(Relaxed))
    }

    pub(super) fn since_s(&self) -> u64 {
        self.header().since_s.load(Relaxed)
    }

    pub(crate) fn tries(&self) -> u64 {
        self.header().tries.load(Relaxed)
    }

    pub(crate) fn set_tries(&self, tries: u64) {
        self.header().tries.store(tries, Release);
    }

    pub(crate) fn take_deposit(&self) -> Option<u32> {
        let next = self.header().next_deposit.load(Relaxed);
        let number = u32::try_from(next).ok()?;
        self.header().next_deposit.store(next + 1, Relaxed);
        Some(number)
    }

    /// Returns the region's index; `None`: there are too many.
    pub(crate) fn add_region(&self, message: u64, region: &ClientRegion) -> Option<usize> {
        let table = self.regions_table();
        let at = table.iter().position(|r| r.used.load(Relaxed) == 0)?;
        let record = &table[at];
        record.address.store(region.address, Relaxed);
        record.len.store(region.len, Relaxed);
        record.offset.store(region.offset, Relaxed);
        let deposit = region.deposit.map_or(0, |deposit| u64::from(deposit) + 1);
        let deposit = deposit << 1 | u64::from(region.writable);
        record.deposit.store(deposit, Relaxed);
        record.word.store(region.word, Relaxed);
        record.made.store(message, Relaxed);
        record.gone.store(0, Relaxed);
        record.used.store(1, Release);
        Some(at)
    }

    pub(crate) fn take_region(&self, message: u64, at: usize) {
        if let Some(record) = self.regions_table().get(at) {
            record.gone.store(message, Release);
        }
    }

    /// The message is answered: removals are final.
    pub(crate) fn settle(&self) {
        for record in self.regions_table() {
            if record.used.load(Relaxed) != 0 && record.gone.load(Relaxed) != 0 {
                record.used.store(0, Release);
            }
        }
    }

    /// Undoes a message's changes to the regions, since it will be handled again.
    pub(crate) fn undo(&self, message: u64) {
        for record in self.regions_table() {
            if record.used.load(Relaxed) == 0 {
                continue;
            }
            if record.made.load(Relaxed) == message {
                record.used.store(0, Release);
            } else if record.gone.load(Relaxed) == message {
                record.gone.store(0, Release);
            }
        }
    }

    pub(crate) fn regions(&self) -> impl Iterator<Item = (usize, ClientRegion)> {
        self.regions_table()
            .iter()
            .enumerate()
            .filter_map(|(at, r)| {
                let there = r.used.load(Acquire) == 1 && r.gone.load(Relaxed) == 0;
                let deposit = r.deposit.load(Relaxed);
                there.then(|| {
                    let region = ClientRegion {
                        address: r.address.load(Relaxed),
                        len: r.len.load(Relaxed),
                        offset: r.offset.load(Relaxed),
                        deposit: (deposit >> 1).checked_sub(1).map(|deposit| deposit as u32),
                        writable: deposit & 1 != 0,
                        word: r.word.load(Relaxed),
                    };
                    (at, region)
                })
            })
    }

    pub(crate) fn slot(&self, slot: usize) -> Option<u32> {
        let word = self.slots_table().get(slot)?.load(Relaxed);
        u32::try_from(word.checked_sub(1)?).ok()
    }

    /// False: no such slot.
    pub(crate) fn set_slot(&self, slot: usize, deposit: Option<u32>) -> bool {
        let word = deposit.map_or(0, |deposit| u64::from(deposit) + 1);
        match self.slots_table().get(slot) {
            Some(place) => {
                place.store(word, Release);
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> VmFile {
        VmFile::create(ExportId(4), 1).unwrap()
    }

    fn region(address: u64) -> ClientRegion {
        ClientRegion {
            address,
            len: 4096,
            offset: 0,
            deposit: Some(7),
            writable: true,
            word: 9,
        }
    }

    #[test]
    fn only_its_own_export_takes_it_over() {
        let fd = || file().fd().try_clone_to_owned().unwrap();
        assert!(VmFile::adopt(fd(), ExportId(4), 1).is_ok());
        assert!(VmFile::adopt(fd(), ExportId(5), 1).is_err());
        assert!(VmFile::adopt(fd(), ExportId(4), 2).is_err());
        let other = SharedMemory::anonymous("x", FILE_BYTES).unwrap();
        let other = other.fd().try_clone_to_owned().unwrap();
        assert!(VmFile::adopt(other, ExportId(4), 1).is_err());
        let short = SharedMemory::anonymous("x", 4096).unwrap();
        let short = short.fd().try_clone_to_owned().unwrap();
        assert!(VmFile::adopt(short, ExportId(4), 1).is_err());
    }

    #[test]
    fn a_message_that_is_not_answered_has_done_nothing() {
        let file = file();
        let kept = file.add_region(1, &region(0)).unwrap();
        file.settle();
        file.add_region(2, &region(4096)).unwrap();
        file.take_region(2, kept);
        let here = |file: &VmFile| file.regions().map(|(_, r)| r.address).collect::<Vec<_>>();
        assert_eq!(here(&file), [4096]);
        file.undo(2);
        assert_eq!(here(&file), [0]);
        file.take_region(3, kept);
        file.settle();
        file.undo(3);
        assert_eq!(here(&file), [0; 0]);
        for at in 0..MAX_REGIONS as u64 {
            assert!(file.add_region(4, &region(at << 12)).is_some());
        }
        assert!(file.add_region(4, &region(1 << 40)).is_none());
        assert_eq!(file.regions().next().unwrap().1, region(0));
    }

    #[test]
    fn a_message_of_ours_was_sent_or_not() {
        let file = file();
        assert!(file.settle_ask() && file.asked() == 0);
        file.begin_ask(1, 100);
        assert!(file.settle_ask() && file.asked() == 0, "nothing went");
        let noted = |bytes| {
            let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            answer::send(&ours, &vec![0; bytes], None, file.ask_note()).unwrap();
            drop(theirs);
        };
        file.begin_ask(2, 100);
        noted(100);
        assert!(file.settle_ask() && file.asked() == 2, "all of it went");
        assert!(file.settle_ask() && file.asked() == 2);
        file.begin_ask(3, 100);
        noted(40);
        assert!(!file.settle_ask(), "a part went");
        file.tear_ask();
        answer::clear(file.ask_note());
        assert!(!file.settle_ask(), "and nothing of the rest");
        file.end_ask();
        assert!(file.settle_ask() && file.asked() == 3);
    }

    #[test]
    fn slots_and_the_area_are_bounded() {
        let file = file();
        assert!(file.set_slot(MAX_SLOTS - 1, Some(3)) && !file.set_slot(MAX_SLOTS, Some(3)));
        assert_eq!((file.slot(MAX_SLOTS - 1), file.slot(0)), (Some(3), None));
        assert!(file.area::<AtomicU64>(AREA_BYTES - 8, 1).is_some());
        assert!(file.area::<AtomicU64>(AREA_BYTES - 8, 2).is_none());
        assert!(file.area::<AtomicU64>(usize::MAX, 1).is_none());
        assert!(file.area::<AtomicU64>(4, 1).is_none());
    }
}
