//! The machine file: what a successor must know of one client, in shared memory that the daemon holds.
//!
//! **Design.** One memfd per client, made when it is accepted, of a fixed and versioned layout: which
//! message is being handled and how far that is ([`MessageStage`]), the memory regions and descriptors by the
//! numbers under which the daemon has them, and an area of the frontend's own ([`MachineFile::area`]).
//! Only atomics lie in it; a thread that is killed has carried out a prefix of its stores, so the word
//! that makes others count is stored last. It is sparse: untouched pages cost nothing.
//!
//! **Undo.** A region carries the number of the message that made it, and of the one that took it away.
//! Until that message is answered, a successor takes both back ([`MachineFile::undo`]) and handles the
//! message again.
//!
//! Whoever takes it over ([`MachineFile::adopt`]) holds every value for hostile. **Not here:** when what
//! is stored ([`super::client`]).

use super::answer::{self, Note};
use forebay_xlate::boundary::MACHINE_FILE_VERSION;
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::cells;
use forebay_xlate::shm::{Cells, SharedMemory};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::SystemTime;

const MAGIC: u64 = u64::from_le_bytes(*b"FBMACHIN");
/// Memory regions that a client may have at once.
pub(crate) const MAX_REGIONS: usize = 512;
/// Slots for descriptors that a client keeps here.
pub(crate) const MAX_SLOTS: usize = 512;
/// Bytes of the frontend's own area.
pub(crate) const AREA_BYTES: usize = 4 << 20;

/// How far the message of the header's number is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum MessageStage {
    /// It is consumed: nothing is being handled.
    Idle = 0,
    /// It is handled, and may be so again.
    Intent = 1,
    /// It is carried out for good, its answer is being sent: the note says whether it was.
    Answering = 2,
    /// Its answer, if it needs one, is sent; it is being consumed.
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
        /// Which frontend it is ([`super::kind_word`]).
        kind: AtomicU64,
        /// The number of the last message << 2 | its [`MessageStage`].
        message: AtomicU64,
        /// Its bytes.
        bytes: AtomicU64,
        /// The socket's peek offset when it began to be consumed.
        peeked: AtomicU64,
        /// The next deposit's number.
        next_deposit: AtomicU64,
        /// How many engines crashed over what this client said or has in its rings, in a row.
        tries: AtomicU64,
        /// The bytes of its answer.
        answer: AtomicU64,
        /// What the kernel notes of sending it.
        note: Note,
        /// When the client connected, seconds since 1970.
        since_s: AtomicU64,
        /// The number of the frontend's own message that is being sent to it; 0: none is.
        asking: AtomicU64,
        /// That message's bytes; `u64::MAX`: the socket took a part of it.
        ask: AtomicU64,
        /// What the kernel notes of sending it.
        ask_note: Note,
        /// The number of the last one that was sent; 0: none was.
        asked: AtomicU64,
        reserved: [AtomicU64; 482],
    }
}

cells! {
    /// A memory region.
    struct RegionRecord {
        address: AtomicU64,
        len: AtomicU64,
        offset: AtomicU64,
        /// (Its deposit + 1, or 0) << 1 | writable.
        deposit: AtomicU64,
        /// The frontend's.
        word: AtomicU64,
        /// The message that made it.
        made: AtomicU64,
        /// The message that took it away; 0: none did.
        gone: AtomicU64,
        /// 1: it counts.
        used: AtomicU64,
    }
}

const REGIONS_AT: usize = size_of::<Header>();
const SLOTS_AT: usize = REGIONS_AT + MAX_REGIONS * size_of::<RegionRecord>();
const AREA_AT: usize = SLOTS_AT + MAX_SLOTS * size_of::<AtomicU64>();
/// Bytes of a machine file (sparse).
pub(crate) const FILE_BYTES: usize = AREA_AT + AREA_BYTES;
const _: () = assert!(AREA_AT.is_multiple_of(4096));

/// A memory region of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ClientRegion {
    /// Where it begins for the guest.
    pub address: u64,
    /// Its bytes.
    pub len: u64,
    /// Where it begins in its file.
    pub offset: u64,
    /// Its file's deposit; none: it is known, and can't be reached.
    pub deposit: Option<u32>,
    /// Whether it may be written.
    pub writable: bool,
    /// A word of the frontend's (vhost: where it begins for the process that has the guest).
    pub word: u64,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct MachineFile {
    memory: SharedMemory,
}

impl MachineFile {
    /// A new one.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn create(export: ExportId, kind: u64) -> io::Result<Self> {
        let file = Self {
            memory: SharedMemory::anonymous("forebay-machine", FILE_BYTES)?,
        };
        let header = file.header();
        header.version.store(MACHINE_FILE_VERSION, Relaxed);
        header.export.store(export.0 + 1, Relaxed);
        header.kind.store(kind, Relaxed);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let since_s = since.map_or(0, |since| since.as_secs());
        header.since_s.store(since_s, Relaxed);
        header.magic.store(MAGIC, Release);
        Ok(file)
    }

    /// Takes one that a dead engine left.
    ///
    /// # Errors
    /// It is none, or another export's, or another version's.
    pub(crate) fn adopt(fd: OwnedFd, export: ExportId, kind: u64) -> io::Result<Self> {
        let memory = SharedMemory::from_fd(fd)?;
        if memory.len() != FILE_BYTES {
            return Err(io::Error::other("its length is another version's"));
        }
        let file = Self { memory };
        let header = file.header();
        if header.magic.load(Acquire) != MAGIC
            || header.version.load(Relaxed) != MACHINE_FILE_VERSION
        {
            return Err(io::Error::other("its layout is another version's"));
        }
        if header.export.load(Relaxed) != export.0.wrapping_add(1)
            || header.kind.load(Relaxed) != kind
        {
            return Err(io::Error::other("it is another export's"));
        }
        Ok(file)
    }

    /// Its descriptor.
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

    /// The frontend's own area: `count` values from byte `offset` of it on; `None` when they don't fit
    /// or aren't aligned. All zeros at first.
    pub(crate) fn area<T: Cells>(&self, offset: usize, count: usize) -> Option<&[T]> {
        let bytes = count.checked_mul(size_of::<T>())?;
        if offset.checked_add(bytes)? > AREA_BYTES {
            return None;
        }
        self.memory.cells(AREA_AT + offset, count)
    }

    /// The number of the last message, and how far it is.
    pub(crate) fn message(&self) -> (u64, MessageStage) {
        let word = self.header().message.load(Relaxed);
        (word >> 2, MessageStage::of_word(word))
    }

    /// The message is as far as this.
    pub(crate) fn set_message(&self, number: u64, stage: MessageStage) {
        let word = number << 2 | stage as u64;
        self.header().message.store(word, Release);
    }

    /// A message of so many bytes is about to be consumed, when the socket's peek offset is this.
    pub(crate) fn set_consuming(&self, bytes: u64, peeked: u64) {
        self.header().bytes.store(bytes, Relaxed);
        self.header().peeked.store(peeked, Relaxed);
    }

    /// An answer of so many bytes is about to be sent.
    pub(super) fn begin_answer(&self, bytes: u64) {
        self.header().answer.store(bytes, Relaxed);
        answer::clear(&self.header().note);
    }

    /// Where the kernel is to note what is sent.
    pub(super) fn note(&self) -> &Note {
        &self.header().note
    }

    /// What was sent of the last answer, and how long it is.
    pub(super) fn sent(&self) -> (u64, u64) {
        let header = self.header();
        (answer::sent(&header.note), header.answer.load(Relaxed))
    }

    /// A message of the frontend's own, of this number and so many bytes, is about to be sent.
    pub(super) fn begin_ask(&self, number: u64, bytes: u64) {
        let header = self.header();
        header.ask.store(bytes, Relaxed);
        answer::clear(&header.ask_note);
        header.asking.store(number, Release);
    }

    /// Where the kernel is to note what of it is sent.
    pub(super) fn ask_note(&self) -> &Note {
        &self.header().ask_note
    }

    /// The socket took a part of it: another engine can't go on with that.
    pub(super) fn tear_ask(&self) {
        self.header().ask.store(u64::MAX, Release);
    }

    /// It is sent.
    pub(super) fn end_ask(&self) {
        let header = self.header();
        let number = header.asking.load(Relaxed);
        header.asked.store(number, Release);
        header.asking.store(0, Release);
    }

    /// What a dead engine was sending is sent, or was not. False: a part of it is.
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

    /// The number of the last message of the frontend's own that the client has, or will have; 0: none was sent.
    pub(crate) fn asked(&self) -> u64 {
        self.header().asked.load(Relaxed)
    }

    /// What [`MachineFile::set_consuming`] said last.
    pub(crate) fn consuming(&self) -> (u64, u64) {
        let header = self.header();
        (header.bytes.load(Relaxed), header.peeked.load(Relaxed))
    }

    /// When the client connected, seconds since 1970.
    pub(super) fn since_s(&self) -> u64 {
        self.header().since_s.load(Relaxed)
    }

    /// How many engines crashed in a row over what this client said or has in its rings.
    pub(crate) fn tries(&self) -> u64 {
        self.header().tries.load(Relaxed)
    }

    /// It is as many.
    pub(crate) fn set_tries(&self, tries: u64) {
        self.header().tries.store(tries, Release);
    }

    /// The number of the next deposit; each call gives another.
    pub(crate) fn take_deposit(&self) -> Option<u32> {
        let next = self.header().next_deposit.load(Relaxed);
        let number = u32::try_from(next).ok()?;
        self.header().next_deposit.store(next + 1, Relaxed);
        Some(number)
    }

    /// Records a region that the message of this number made; its place. `None`: there are too many.
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

    /// The message of this number takes away the region at this place.
    pub(crate) fn take_region(&self, message: u64, at: usize) {
        if let Some(record) = self.regions_table().get(at) {
            record.gone.store(message, Release);
        }
    }

    /// The message is answered: what it took away is gone for good.
    pub(crate) fn settle(&self) {
        for record in self.regions_table() {
            if record.used.load(Relaxed) != 0 && record.gone.load(Relaxed) != 0 {
                record.used.store(0, Release);
            }
        }
    }

    /// Takes back what the message of this number did to the regions: it will be handled again.
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

    /// The regions there are, with their places.
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

    /// Which deposit a slot holds.
    pub(crate) fn slot(&self, slot: usize) -> Option<u32> {
        let word = self.slots_table().get(slot)?.load(Relaxed);
        u32::try_from(word.checked_sub(1)?).ok()
    }

    /// A slot holds this deposit from now on. False: there is no such slot.
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

    fn file() -> MachineFile {
        MachineFile::create(ExportId(4), 1).unwrap()
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
        assert!(MachineFile::adopt(fd(), ExportId(4), 1).is_ok());
        assert!(MachineFile::adopt(fd(), ExportId(5), 1).is_err());
        assert!(MachineFile::adopt(fd(), ExportId(4), 2).is_err());
        let other = SharedMemory::anonymous("x", FILE_BYTES).unwrap();
        let other = other.fd().try_clone_to_owned().unwrap();
        assert!(MachineFile::adopt(other, ExportId(4), 1).is_err());
        let short = SharedMemory::anonymous("x", 4096).unwrap();
        let short = short.fd().try_clone_to_owned().unwrap();
        assert!(MachineFile::adopt(short, ExportId(4), 1).is_err());
    }

    #[test]
    fn a_message_that_is_not_answered_has_done_nothing() {
        let file = file();
        let kept = file.add_region(1, &region(0)).unwrap();
        file.settle();
        file.add_region(2, &region(4096)).unwrap();
        file.take_region(2, kept);
        let here = |file: &MachineFile| file.regions().map(|(_, r)| r.address).collect::<Vec<_>>();
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
