//! Compare and Write, the fused operation (Base 2.0, 3.4.2): two consecutive commands of a queue.
//!
//! After a *first*, the gate stays closed ([`PAIRING`]), so that the next command comes here: the
//! *second*, or the first ends with Missing Fused Command. With both halves' data, the core gets
//! them as one (`Core::start_comparing`) under the second's name. Both answers are published
//! together. Records hold two commands with FUSE in their entries and consecutive numbers; the
//! second's state says whether a compare has passed.
//!
//! A command cannot be answered while its data is in transit; until then it is *doomed*.

use super::TcpTurn;
use super::command::{self, Capsule, Judged};
use super::conn::Conn;
use super::restrictions;
use super::rx::Stop;
use super::slots::{NONE, SlotStage, Work};
use crate::core::{CommandRef, Core, DoneIo, Expected, IoOp, Issuer, NewIo};
use forebay_nvme::io::{self, FUSE_FIRST, FUSE_SECOND, IoCommand, NamespaceGeometry};
use forebay_nvme::{Sqe, Status};

/// Gate bit: the next command may be a second.
pub(super) const PAIRING: u8 = 1 << 3;

#[derive(Debug, Default)]
pub(super) struct Pairs {
    /// The last command, if it was a first.
    open: Open,
    /// Slots of firsts and their seconds.
    pairs: Vec<(u16, u16)>,
    /// Commands that end with this status as soon as they can be answered.
    doomed: Vec<(u16, Status)>,
}

#[derive(Clone, Copy, Debug, Default)]
enum Open {
    #[default]
    No,
    Taken(u16),
    Refused,
}

impl Pairs {
    pub(super) fn first_of(&self, second: u16) -> Option<u16> {
        let pair = self.pairs.iter().find(|pair| pair.1 == second);
        pair.map(|pair| pair.0)
    }

    /// For a successor: `halves` are the unanswered fused commands in order (number, slot, FUSE);
    /// `number` is the queue's.
    pub(super) fn inherit(
        &mut self,
        restrictions: &mut u8,
        halves: &[(u64, u16, u8)],
        number: u64,
    ) {
        let mut last = (0, NONE);
        for &(at, slot, fuse) in halves {
            match fuse {
                FUSE_FIRST => {
                    last = (at, slot);
                    if at == number {
                        self.open(restrictions, Open::Taken(slot));
                    } else {
                        // Until its second is found.
                        self.doomed.push((slot, Status::ABORTED_MISSING_FUSED));
                    }
                }
                FUSE_SECOND if last.1 != NONE && last.0 + 1 == at => {
                    self.doomed.retain(|doomed| doomed.0 != last.1);
                    self.pairs.push((last.1, slot));
                }
                _ => {}
            }
        }
    }

    fn open(&mut self, restrictions: &mut u8, open: Open) {
        self.open = open;
        *restrictions |= PAIRING;
    }

    fn close(&mut self, restrictions: &mut u8) -> Open {
        *restrictions &= !PAIRING;
        std::mem::take(&mut self.open)
    }

    fn second_of(&self, first: u16) -> Option<u16> {
        let pair = self.pairs.iter().find(|pair| pair.0 == first);
        pair.map(|pair| pair.1)
    }
}

impl Conn {
    #[cold]
    pub(super) fn end_lone_first(&mut self, core: &mut Core, sqe: &Sqe) {
        if sqe.fuse() == FUSE_SECOND {
            return;
        }
        if let Open::Taken(first) = self.pairs.close(&mut self.restrictions) {
            self.end_half(core, first, Status::ABORTED_MISSING_FUSED);
        }
    }

    /// Ends a half that is not in the core: now, or when its data has come.
    fn end_half(&mut self, core: &mut Core, slot: u16, status: Status) {
        let stage = self.slots.get(slot).map(|s| s.stage);
        if matches!(stage, Some(SlotStage::Paired | SlotStage::Taken)) {
            self.refuse(core, slot, status);
        } else {
            self.pairs.doomed.push((slot, status));
        }
    }

    /// Ends a half whose host lost access; false if the core has the pair.
    #[cold]
    pub(super) fn refuse_half(&mut self, core: &mut Core, slot: u16, status: Status) -> bool {
        let pairs = &self.pairs;
        let second = pairs.second_of(slot).unwrap_or(slot);
        let in_core = |s: &super::slots::Slot| s.stage == SlotStage::InFlight;
        if self.slots.get(second).is_some_and(in_core) {
            return false;
        }
        self.fail_other_half(core, slot);
        self.end_half(core, slot, status);
        true
    }

    #[cold]
    pub(super) fn fail_other_half(&mut self, core: &mut Core, slot: u16) {
        let pairs = &mut self.pairs;
        pairs.doomed.retain(|doomed| doomed.0 != slot);
        let pair = (pairs.pairs.iter()).position(|pair| pair.0 == slot || pair.1 == slot);
        if let Some(at) = pair {
            let (first, second) = pairs.pairs.swap_remove(at);
            let other = if first == slot { second } else { first };
            self.end_half(core, other, Status::ABORTED_FAILED_FUSED);
        } else if matches!(pairs.open, Open::Taken(first) if first == slot) {
            pairs.open = Open::Refused;
        }
    }

    /// False: the core has no room for the pair.
    #[cold]
    pub(super) fn start_half(&mut self, core: &mut Core, slot: u16) -> bool {
        if let Some(at) = self.pairs.doomed.iter().position(|d| d.0 == slot) {
            let (_, status) = self.pairs.doomed.swap_remove(at);
            if let Some(s) = self.slots.get_mut(slot) {
                s.stage = SlotStage::Paired;
            }
            self.end_half(core, slot, status);
            return true;
        }
        let Some(s) = self.slots.get_mut(slot) else {
            return true;
        };
        let is_first = matches!(s.work, Work::First { .. });
        s.stage = SlotStage::Paired;
        let pair = match is_first {
            true => self.pairs.second_of(slot).map(|second| (slot, second)),
            false => self.pairs.first_of(slot).map(|first| (first, slot)),
        };
        let has_data = |slot| (self.slots.get(slot)).is_some_and(|s| s.stage == SlotStage::Paired);
        match pair {
            Some((first, second)) if has_data(first) && has_data(second) => {
                let work = |slot| self.slots.get(slot).map(|s| &s.work);
                let fits = work(first).zip(work(second));
                if !fits.is_some_and(|(first, second)| fit(first, second)) {
                    // A dead engine had begun to answer so.
                    self.pairs.pairs.retain(|pair| pair.0 != first);
                    for half in [first, second] {
                        self.end_half(core, half, Status::INVALID_FIELD.with_dnr());
                    }
                    return true;
                }
                let started = self.start_pair(core, first, second);
                if !started && is_first {
                    command::note_over_budget(self, core, second);
                    self.slots.wait_first(second);
                }
                started || is_first
            }
            Some(_) => true,
            None if is_first => true,
            None => {
                self.end_half(core, slot, Status::ABORTED_MISSING_FUSED);
                true
            }
        }
    }

    fn start_pair(&mut self, core: &mut Core, first: u16, second: u16) -> bool {
        let Some(s) = self.slots.get_mut(first) else {
            return true;
        };
        let durable = matches!(s.work, Work::First { fua: true, .. });
        let expected = s.buffer.take();
        let bytes = expected.as_ref().map_or(&[][..], |b| b.as_slice());
        let started = self.start_comparing(core, second, Expected { bytes, durable });
        if let Some(s) = self.slots.get_mut(first) {
            s.buffer = expected;
        }
        started
    }

    /// False: the core has no room.
    #[cold]
    pub(super) fn start_comparing(
        &mut self,
        core: &mut Core,
        slot: u16,
        expected: Expected<'_>,
    ) -> bool {
        let (owner, record) = (self.owner(slot), CommandRef::new(self.queue, slot));
        let (Some(lane), Some(s)) = (self.lane, self.slots.get_mut(slot)) else {
            return true;
        };
        let (Work::Compare(op) | Work::Second(op)) = s.work else {
            return true;
        };
        let new = NewIo {
            owner,
            lane,
            op,
            buffer: s.buffer.take(),
            record,
            over_ns: s.over_ns,
        };
        match core.start_comparing(new, expected) {
            Ok(()) => {
                s.stage = SlotStage::InFlight;
                s.over_ns = None;
                self.in_flight += 1;
                true
            }
            Err(new) => {
                s.buffer = new.buffer;
                false
            }
        }
    }

    #[cold]
    pub(super) fn pair_ended(&mut self, core: &mut Core, slot: u16, done: DoneIo, status: Status) {
        let of_first = match done.op {
            // The compare passed.
            IoOp::Write { .. } => Status::SUCCESS,
            _ => status,
        };
        let of_second = match (of_first, status) {
            (Status::SUCCESS, status) => status,
            _ => Status::ABORTED_FAILED_FUSED,
        };
        let pairs = &mut self.pairs.pairs;
        if let Some(at) = pairs.iter().position(|pair| pair.1 == slot) {
            let (first, _) = pairs.swap_remove(at);
            self.answer(core, first, of_first, 0, None, 0);
        }
        self.answer(core, slot, of_second, 0, done.buffer, 0);
        // From here on no successor repeats it.
        self.publish();
        core.recovered
            .pair_answered(CommandRef::new(self.queue, slot));
    }
}

/// [`Capsule::judge`] for a fused command, or one of a dead engine.
pub(super) fn judge(conn: &Conn, core: &Core, capsule: &Capsule<'_>) -> Result<Judged, Status> {
    if let Some(status) = restrictions::refusal(conn.restrictions, capsule.sqe) {
        return Err(status);
    }
    let geometry = command::geometry(conn, core)?;
    match capsule.sqe.fuse() {
        0 => capsule.judge(&geometry),
        _ => judge_half(capsule, &geometry),
    }
}

fn judge_half(capsule: &Capsule<'_>, geometry: &NamespaceGeometry) -> Result<Judged, Status> {
    let half = io::decode_fused(capsule.sqe, command::NSID, geometry, command::MDTS_BYTES)?;
    let bytes = |lba: u64| lba * u64::from(geometry.block_bytes);
    let len_bytes = geometry.block_bytes;
    let work = match half {
        IoCommand::Compare { lba, fua, .. } => {
            let op = IoOp::Compare {
                offset_bytes: bytes(lba),
                len_bytes,
            };
            Work::First { op, fua }
        }
        IoCommand::Write { lba, fua, .. } => Work::Second(IoOp::CompareAndWrite {
            offset_bytes: bytes(lba),
            len_bytes,
            fua,
        }),
        _ => return Err(Status::INVALID_FIELD.with_dnr()),
    };
    Ok(Judged {
        work,
        len_bytes,
        source: command::source(capsule, half.transfer(geometry), true)?,
    })
}

fn fit(first: &Work, second: &Work) -> bool {
    match (first, second) {
        (
            Work::First {
                op: IoOp::Compare { offset_bytes, .. },
                ..
            },
            Work::Second(
                IoOp::CompareAndWrite {
                    offset_bytes: at, ..
                }
                | IoOp::Write {
                    offset_bytes: at, ..
                },
            ),
        ) => offset_bytes == at,
        _ => false,
    }
}

/// `Err`: why the stream must stop; then nothing was taken.
#[cold]
pub(super) fn receive_half(
    conn: &mut Conn,
    turn: &mut TcpTurn<'_>,
    slot: u16,
    capsule: &Capsule<'_>,
) -> Result<(), Stop> {
    let judged = judge(conn, turn.core, capsule);
    match capsule.sqe.fuse() {
        FUSE_FIRST => match judged {
            Ok(judged) => {
                command::accept(conn, turn, slot, capsule, judged)?;
                conn.pairs.open(&mut conn.restrictions, Open::Taken(slot));
            }
            Err(status) => {
                command::refuse(conn, turn, slot, capsule, status);
                conn.pairs.open(&mut conn.restrictions, Open::Refused);
            }
        },
        FUSE_SECOND => {
            let (first, judged) = match (conn.pairs.open, judged) {
                (Open::No, _) => {
                    command::refuse(conn, turn, slot, capsule, Status::ABORTED_MISSING_FUSED);
                    return Ok(());
                }
                (Open::Refused, _) => {
                    conn.pairs.close(&mut conn.restrictions);
                    command::refuse(conn, turn, slot, capsule, Status::ABORTED_FAILED_FUSED);
                    return Ok(());
                }
                (Open::Taken(first), judged) => (first, judged),
            };
            let half = conn.slots.get(first).map(|s| &s.work);
            let (judged, of_first) = match judged {
                Ok(judged) if half.is_some_and(|half| fit(half, &judged.work)) => {
                    (Ok(judged), Status::SUCCESS)
                }
                Ok(_) => {
                    let status = Status::INVALID_FIELD.with_dnr();
                    (Err(status), status)
                }
                Err(status) => (Err(status), Status::ABORTED_FAILED_FUSED),
            };
            match judged {
                Ok(judged) => {
                    conn.pairs.pairs.push((first, slot));
                    if let Err(stop) = command::accept(conn, turn, slot, capsule, judged) {
                        conn.pairs.pairs.pop();
                        return Err(stop);
                    }
                    conn.pairs.close(&mut conn.restrictions);
                }
                Err(status) => {
                    conn.pairs.close(&mut conn.restrictions);
                    conn.end_half(turn.core, first, of_first);
                    command::refuse(conn, turn, slot, capsule, status);
                }
            }
        }
        _ => {
            let status = Status::INVALID_FIELD.with_dnr();
            command::refuse(conn, turn, slot, capsule, status);
        }
    }
    Ok(())
}

/// The owner of this half's pair, if it is in the core.
pub(super) fn in_core(conn: &Conn, slot: u16) -> Option<Issuer> {
    let second = conn.pairs.second_of(slot).unwrap_or(slot);
    let s = conn.slots.get(second)?;
    let is_there = s.stage == SlotStage::InFlight && matches!(s.work, Work::Second(_));
    is_there.then(|| conn.owner(second))
}

/// If the compare passed in a dead engine, only the write is left.
pub(super) fn passed(work: &mut Work) {
    if let Work::Second(op) = work
        && let IoOp::CompareAndWrite {
            offset_bytes,
            len_bytes,
            fua,
        } = *op
    {
        *op = IoOp::Write {
            offset_bytes,
            len_bytes,
            fua,
        };
    }
}
