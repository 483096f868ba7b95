//! A reactor's side of translation.
//!
//! A command is translated when it is submitted, before the reactor takes its next message. So a
//! revoke's drain ([`crate::drain`]) counts each slice, or the slice saw the cleared words. An
//! answer or a claim makes a command look the word up again ([`Parked::hear`]).

use crate::boundary::message::FaultFailure;
use crate::table::Table;
use crate::types::{ExtentRange, Rights, VolumeId};
use crate::word::Word;

/// What an access may do with an extent now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lookup {
    /// Go to the device.
    Device(Word),
    /// It reads as zeros.
    Zeros,
    /// Claim the preallocated extent ([`claim`]), and look again.
    Claim,
    /// Ask the owner and park.
    Park,
}

/// What a translation allows.
#[inline]
pub fn access(word: Word, write: bool) -> Lookup {
    match word.rights() {
        Some(Rights::ReadWrite) => Lookup::Device(word),
        Some(Rights::Read) if !write => Lookup::Device(word),
        Some(Rights::Hole) if !write => Lookup::Zeros,
        Some(Rights::Hole) if word.is_preallocated() => Lookup::Claim,
        _ => Lookup::Park,
    }
}

/// Claims every preallocated extent before a write; together, so that neighbours form one slice.
#[cold]
pub fn claim(table: &Table, range: ExtentRange) {
    for extent in range.first..range.end() {
        let seen = table.lookup(extent);
        if seen.is_preallocated() {
            table.claim(extent, seen);
        }
    }
}

/// The number of contiguous extents from `extent` on, at most `limit`; `word` is the first's.
#[inline]
pub fn run(table: &Table, extent: u64, word: Word, limit: u64) -> u64 {
    let mut count = 1;
    while count < limit && table.lookup(extent + count) == word.advance(count) {
        count += 1;
    }
    count
}

/// The owner's answer to a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Granted.
    Granted,
    /// The faults failed.
    Failed {
        /// Whether the faults for writing failed, or those for reading.
        write: bool,
        /// The reason.
        reason: FaultFailure,
    },
}

/// What an answer means to a parked command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heard {
    /// It stays parked.
    Stay,
    /// It is translated again, from where it parked.
    Translate,
    /// It fails.
    Fail(FaultFailure),
}

/// What a parked command waits for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Parked {
    /// The volume.
    pub volume: VolumeId,
    /// The extent.
    pub extent: u64,
    /// Whether it will be written.
    pub write: bool,
}

impl Parked {
    /// What an answer means to it.
    #[inline]
    pub fn hear(&self, volume: VolumeId, range: ExtentRange, answer: Answer) -> Heard {
        if self.volume != volume || !range.contains(self.extent) {
            return Heard::Stay;
        }
        match answer {
            Answer::Granted => Heard::Translate,
            Answer::Failed { write, reason } if write == self.write => Heard::Fail(reason),
            Answer::Failed { .. } => Heard::Stay,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DeviceIndex, ExtentIndex};

    #[test]
    fn rights_decide() {
        let stored = Word::new(DeviceIndex(1), ExtentIndex(7), Rights::ReadWrite).unwrap();
        let shared = stored.read_only();
        assert_eq!(access(stored, true), Lookup::Device(stored));
        assert_eq!(access(shared, false), Lookup::Device(shared));
        assert_eq!(access(shared, true), Lookup::Park);
        assert_eq!(access(Word::HOLE, false), Lookup::Zeros);
        assert_eq!(access(Word::HOLE, true), Lookup::Park);
        assert_eq!(access(Word::MISS, false), Lookup::Park);
        let preallocated = Word::preallocated(DeviceIndex(1), ExtentIndex(7)).unwrap();
        assert_eq!(access(preallocated, false), Lookup::Zeros);
        assert_eq!(access(preallocated, true), Lookup::Claim);
    }

    #[test]
    fn a_run_ends_where_the_place_does() {
        let table = Table::new(8);
        let word = Word::new(DeviceIndex(0), ExtentIndex(20), Rights::ReadWrite).unwrap();
        table.install(ExtentRange::new(1, 3), word);
        table.install(ExtentRange::new(4, 1), word);
        assert_eq!(run(&table, 1, word, 8), 3);
        assert_eq!(run(&table, 1, word, 2), 2);
        assert_eq!(run(&table, 4, word, 8), 1);
    }

    #[test]
    fn extents_claimed_together_form_one_run() {
        let table = Table::new(8);
        let preallocated = Word::preallocated(DeviceIndex(0), ExtentIndex(20)).unwrap();
        table.install(ExtentRange::new(1, 6), preallocated);
        claim(&table, ExtentRange::new(2, 3));
        assert_eq!(run(&table, 2, preallocated.claimed().advance(1), 8), 3);
        assert_eq!(table.lookup(1), preallocated);
        assert_eq!(table.lookup(5), preallocated.advance(4));
    }

    #[test]
    fn an_answer_concerns_what_asked() {
        let v = VolumeId(1);
        let write = Parked {
            volume: v,
            extent: 4,
            write: true,
        };
        let read = Parked {
            write: false,
            ..write
        };
        let (range, reason) = (ExtentRange::new(3, 2), FaultFailure::NoSpace);
        let failed = Answer::Failed {
            write: true,
            reason,
        };
        assert_eq!(write.hear(v, range, Answer::Granted), Heard::Translate);
        assert_eq!(write.hear(v, range, failed), Heard::Fail(reason));
        assert_eq!(
            read.hear(v, range, failed),
            Heard::Stay,
            "no room for a write says nothing about a read"
        );
        assert_eq!(write.hear(VolumeId(2), range, Answer::Granted), Heard::Stay);
        assert_eq!(write.hear(v, ExtentRange::new(5, 9), failed), Heard::Stay);
    }
}
