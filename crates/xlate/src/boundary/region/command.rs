//! A command's record; the engine's `frontend::nvme_tcp::record` writes it.
//!
//! `state` is stored last when the command is taken. To the end it tells whether a device ever got
//! a part, as a successor must wait for that. A check covers entry, number and stream position.

use super::check::{BufferRef, Seed, check};
use crate::cells;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// A command's progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum CommandStage {
    /// The slot is free.
    Free = 0,
    /// Taken from the stream, with all its in-capsule data.
    Taken = 0b0011,
    /// An R2T asks for its data; its buffer exists.
    Asked = 0b0101,
    /// The controller holds it: an Asynchronous Event Request.
    Kept = 0b0110,
    /// The second of a fused pair, after a successful compare. That is not repeated: the write may
    /// have happened.
    Passed = 0b1001,
    /// As [`CommandStage::Asked`], with an R2T per part.
    AskedInParts = 0b1010,
}

/// The word `state`; 0 for a free slot.
///
/// The lower half of the command's number keeps stale words from reviving a slot. All else is
/// stored twice, and stages differ in two bits, so that a flipped bit is detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CommandState(pub u64);

const STAGE: u64 = 0xf;
const SUBMITTED_EVER: u64 = 0b11 << 4;
const MANY_DEVICES: u64 = 0b11 << 6;
const DAMAGED: u64 = 0b11 << 8;
const ATTEMPTS_SHIFT: u32 = 10;
const ATTEMPTS: u64 = 0o77 << ATTEMPTS_SHIFT;
const DEVICE_SHIFT: u32 = 16;
const DEVICE: u64 = 0xffff << DEVICE_SHIFT;
/// The highest death count.
pub const MAX_ATTEMPTS: u8 = 7;

impl CommandState {
    /// A free slot.
    pub const FREE: Self = Self(0);

    /// A new command.
    #[inline]
    pub const fn taken(number: u64) -> Self {
        Self(CommandStage::Taken as u64 | number << 32)
    }

    /// Checks a word for the command of this number.
    pub fn open(word: u64, number: u64) -> Result<Self, Damaged> {
        let twin = |bits: u64| word & bits == 0 || word & bits == bits;
        let state = Self(word);
        let good = word == 0
            || (!matches!(state.stage(), None | Some(CommandStage::Free))
                && twin(SUBMITTED_EVER)
                && twin(MANY_DEVICES)
                && twin(DAMAGED)
                && word >> ATTEMPTS_SHIFT & 7 == word >> (ATTEMPTS_SHIFT + 3) & 7
                && word >> DEVICE_SHIFT & 0xff == word >> (DEVICE_SHIFT + 8) & 0xff
                && word >> 32 == number & 0xffff_ffff);
        if good { Ok(state) } else { Err(Damaged) }
    }

    /// Its stage; `None` if invalid.
    pub const fn stage(self) -> Option<CommandStage> {
        match self.0 & STAGE {
            0 => Some(CommandStage::Free),
            0b0011 => Some(CommandStage::Taken),
            0b0101 => Some(CommandStage::Asked),
            0b0110 => Some(CommandStage::Kept),
            0b1001 => Some(CommandStage::Passed),
            0b1010 => Some(CommandStage::AskedInParts),
            _ => None,
        }
    }

    /// Changes the stage.
    #[must_use]
    pub const fn with_stage(self, stage: CommandStage) -> Self {
        Self(self.0 & !STAGE | stage as u64)
    }

    /// A data digest was wrong; the command fails once its data is complete.
    pub const fn damaged(self) -> bool {
        self.0 & DAMAGED != 0
    }

    /// Marks a wrong data digest.
    #[must_use]
    pub const fn with_damaged(self) -> Self {
        Self(self.0 | DAMAGED)
    }

    /// Some engine gave a part to some device.
    pub const fn submitted_ever(self) -> bool {
        self.0 & SUBMITTED_EVER != 0
    }

    /// The only device that got a part, if there is exactly one.
    pub const fn device(self) -> Option<u8> {
        match (self.submitted_ever(), self.0 & MANY_DEVICES) {
            (true, 0) => Some((self.0 >> DEVICE_SHIFT) as u8),
            _ => None,
        }
    }

    /// The devices that got a part, as bits of their numbers modulo 8.
    pub const fn devices(self) -> u8 {
        let word = (self.0 >> DEVICE_SHIFT) as u8;
        match (self.submitted_ever(), self.0 & MANY_DEVICES) {
            (false, _) => 0,
            (true, 0) => 1 << (word % 8),
            (true, _) => word,
        }
    }

    /// Adds a device that got a part.
    #[must_use]
    #[inline]
    pub const fn with_device(self, device: u8) -> Self {
        let one = SUBMITTED_EVER | (device as u64 * 0x101) << DEVICE_SHIFT;
        match self.0 & (SUBMITTED_EVER | MANY_DEVICES | DEVICE) {
            0 => Self(self.0 | one),
            same if same == one => self,
            _ => self.with_another(device),
        }
    }

    #[cold]
    const fn with_another(self, device: u8) -> Self {
        let devices = self.devices() | 1 << (device % 8);
        let many = SUBMITTED_EVER | MANY_DEVICES | (devices as u64 * 0x101) << DEVICE_SHIFT;
        Self(self.0 & !DEVICE | many)
    }

    /// The number of engines that died of it.
    pub const fn attempts(self) -> u8 {
        (self.0 >> ATTEMPTS_SHIFT & 7) as u8
    }

    /// Sets the death count, at most [`MAX_ATTEMPTS`].
    #[must_use]
    pub const fn with_attempts(self, attempts: u8) -> Self {
        let attempts = if attempts > MAX_ATTEMPTS {
            MAX_ATTEMPTS
        } else {
            attempts
        };
        Self(self.0 & !ATTEMPTS | (attempts as u64 * 0o11) << ATTEMPTS_SHIFT)
    }
}

cells! {
    /// A command in flight: 128 bytes.
    pub struct CommandRecord {
        /// [`CommandState`]; stored last when a command is taken.
        pub state: AtomicU64,
        /// Its number on this queue; the Connect is 1.
        pub number: AtomicU64,
        /// The received stream's position after its capsule.
        pub end: AtomicU64,
        /// CLOCK_MONOTONIC when it was taken, ns.
        pub taken_ns: AtomicU64,
        /// The submission queue entry; without words 1 to 3 and 7 of I/O commands.
        pub sqe: [AtomicU64; 8],
        /// See [`CommandRecord::is_sound`].
        pub check: AtomicU64,
        /// The [`BufferRef`] of the host's data; 0: none.
        pub buffer: AtomicU64,
        /// Data received for R2Ts: [`Asked`].
        pub asked: AtomicU64,
        /// The last of these R2Ts: [`AskedAt`].
        pub asked_at: AtomicU64,
    }
}
const _: () = assert!(size_of::<CommandRecord>() == 128);

/// Data per R2T, if the host accepts several R2Ts.
pub const R2T_PART_BYTES: u32 = 128 << 10;
/// R2Ts of the longest transfer.
pub const R2T_PARTS: usize = 4;

/// Data received for R2Ts, in whole PDUs; the stage selects the variant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asked {
    /// One R2T: bytes received.
    Whole(u32),
    /// An R2T per [`R2T_PART_BYTES`]: dwords received for each.
    Parts([u16; R2T_PARTS]),
}

impl Asked {
    /// As a word.
    #[inline]
    pub fn word(self) -> u64 {
        match self {
            Self::Whole(bytes) => u64::from(bytes),
            Self::Parts(dwords) => (dwords.iter().rev()).fold(0, |w, d| w << 16 | u64::from(*d)),
        }
    }

    /// Decodes a word for a command at this stage.
    pub fn of_word(word: u64, stage: Option<CommandStage>) -> Self {
        match stage {
            Some(CommandStage::AskedInParts) => {
                Self::Parts(std::array::from_fn(|i| (word >> (16 * i)) as u16))
            }
            _ => Self::Whole(word as u32),
        }
    }

    /// Bytes received.
    pub fn bytes(self) -> u32 {
        match self {
            Self::Whole(bytes) => bytes,
            Self::Parts(dwords) => dwords.iter().map(|d| u32::from(*d) * 4).sum(),
        }
    }

    /// Adds a data PDU; `None` if that PDU is not allowed.
    #[must_use]
    pub fn up_to(self, from: u32, to: u32) -> Option<Self> {
        match self {
            Self::Whole(_) => Some(Self::Whole(to)),
            Self::Parts(mut dwords) => {
                let part = from / R2T_PART_BYTES;
                let bytes = to.checked_sub(part * R2T_PART_BYTES)?;
                *dwords.get_mut(part as usize)? = (bytes / 4) as u16;
                (from <= to && bytes <= R2T_PART_BYTES).then_some(Self::Parts(dwords))
            }
        }
    }
}

/// The queued R2Ts of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AskedAt {
    /// The transmitted stream's position after the last.
    pub at: u64,
    /// Their number, 1 to [`R2T_PARTS`].
    pub r2ts: u8,
}

const R2TS_SHIFT: u32 = 62;
const _: () = assert!(R2T_PARTS <= 1 << (64 - R2TS_SHIFT));

impl AskedAt {
    /// As a word.
    #[inline]
    pub const fn word(self) -> u64 {
        self.at | (self.r2ts as u64 - 1) << R2TS_SHIFT
    }

    /// Decodes a word.
    pub const fn of_word(word: u64) -> Self {
        Self {
            at: word & ((1 << R2TS_SHIFT) - 1),
            r2ts: (word >> R2TS_SHIFT) as u8 + 1,
        }
    }
}

impl CommandRecord {
    /// Its state. Read it first: it vouches for the other words.
    pub fn state(&self) -> CommandState {
        CommandState(self.state.load(Acquire))
    }

    /// The check. I/O commands use only identity, SGL length and type, and command dwords 10 to 13.
    #[inline]
    pub fn check_of(seed: Seed, slot: u16, sqe: &[u64; 8], number: u64, end: u64) -> u64 {
        check(seed, slot, [sqe[0], sqe[4], sqe[5], sqe[6], number, end])
    }

    /// The recorded submission queue entry.
    pub fn sqe_words(&self) -> [u64; 8] {
        std::array::from_fn(|i| self.sqe[i].load(Relaxed))
    }

    /// Whether entry, number and end match the check.
    pub fn is_sound(&self, seed: Seed, slot: u16) -> bool {
        let (number, end) = (self.number.load(Relaxed), self.end.load(Relaxed));
        Self::check_of(seed, slot, &self.sqe_words(), number, end) == self.check.load(Relaxed)
    }

    /// Its buffer, if any; fails if the word is another command's.
    pub fn buffer_ref(&self, seed: Seed, slot: u16) -> Result<Option<BufferRef>, Damaged> {
        match self.buffer.load(Relaxed) {
            0 => Ok(None),
            word => BufferRef::of_word(word, seed, slot, self.number.load(Relaxed))
                .map(Some)
                .ok_or(Damaged),
        }
    }

    /// The compare of its fused pair succeeded. Call it before submission.
    pub fn pass(&self) {
        let was = CommandState(self.state.load(Relaxed));
        if super::RECORDS && was != CommandState::FREE {
            let is = was.with_stage(CommandStage::Passed);
            self.state.store(is.0, Release);
        }
    }

    /// A part goes to `device`. Call it before submission.
    #[inline]
    pub fn submit_to(&self, device: u8) {
        if !super::RECORDS {
            return;
        }
        let was = CommandState(self.state.load(Relaxed));
        let is = was.with_device(device);
        // Internal commands, such as our flushes, have no record.
        if was != CommandState::FREE {
            self.state.store(is.0, Release);
        }
    }
}

/// A record that fails its check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Damaged;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_state_keeps_its_fields_and_detects_bit_flips() {
        let s = CommandState::taken(u64::MAX - 5);
        assert!(!s.submitted_ever() && s.device().is_none());
        let one = s.with_device(0).with_device(0);
        assert_eq!((one.device(), one.submitted_ever()), (Some(0), true));
        assert_eq!((s.devices(), one.devices()), (0, 1));
        let many = one.with_device(7);
        assert_eq!((many.device(), many.submitted_ever()), (None, true));
        assert_eq!(many.devices(), 0b1000_0001);
        assert_eq!(many.with_device(0b1000_0001).devices(), 0b1000_0011);
        assert_eq!(many.with_device(8), many);
        assert_eq!(s.with_device(255).device(), Some(255));
        let all = many
            .with_stage(CommandStage::Asked)
            .with_damaged()
            .with_attempts(2);
        assert!(all.submitted_ever() && all.damaged() && all.device().is_none());
        assert_eq!(all.stage(), Some(CommandStage::Asked));
        assert_eq!(all.attempts(), 2);
        assert_eq!(s.with_attempts(200).attempts(), MAX_ATTEMPTS);
        let kept = s.with_stage(CommandStage::Kept);
        let passed = one.with_stage(CommandStage::Passed);
        let in_parts = one.with_stage(CommandStage::AskedInParts);
        for state in [
            in_parts,
            s,
            one,
            many,
            all,
            kept,
            passed,
            s.with_device(255),
            CommandState::FREE,
        ] {
            assert_eq!(CommandState::open(state.0, u64::MAX - 5), Ok(state));
            for bit in 0..64 {
                let flipped = CommandState::open(state.0 ^ 1 << bit, u64::MAX - 5);
                assert!(flipped.is_err(), "{state:?} bit {bit}");
            }
        }
    }

    #[test]
    fn r2t_records_decode_as_they_were_encoded() {
        let parts = Asked::Parts([0x8000, 0, 1, 0x7fff]);
        let stage = Some(CommandStage::AskedInParts);
        assert_eq!(Asked::of_word(parts.word(), stage), parts);
        assert_eq!(parts.bytes(), R2T_PART_BYTES + 4 + R2T_PART_BYTES - 4);
        let whole = Asked::Whole(R2T_PART_BYTES * 4);
        let asked = Some(CommandStage::Asked);
        assert_eq!(Asked::of_word(whole.word(), asked), whole);
        let part = R2T_PART_BYTES;
        let more = parts.up_to(part, part + 8);
        assert_eq!(more, Some(Asked::Parts([0x8000, 2, 1, 0x7fff])));
        let all = parts.up_to(part * 3 + 4, part * 4);
        assert_eq!(all, Some(Asked::Parts([0x8000, 0, 1, 0x8000])));
        for (from, to) in [(0, part + 4), (8, 4), (part * 4, part * 4 + 4)] {
            assert_eq!(parts.up_to(from, to), None, "{from} {to}");
        }
        for r2ts in 1..=4 {
            let at = AskedAt { at: 1 << 61, r2ts };
            assert_eq!(AskedAt::of_word(at.word()), at);
        }
    }

    #[test]
    fn a_free_record_ignores_submissions() {
        let region = super::super::Region::anonymous(1).unwrap();
        let record = &region.commands(0)[0];
        record.submit_to(3);
        assert_eq!(record.state(), CommandState::FREE);
        record.state.store(CommandState::taken(1).0, Relaxed);
        record.submit_to(3);
        assert_eq!(record.state().device(), Some(3));
    }
}
