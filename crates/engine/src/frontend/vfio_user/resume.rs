//! Continues a dead engine's controller from its last saved state.
//!
//! Commands that were taken are recovered until the device's fence has passed, and begin again. A
//! completion that was being posted is written again to its place. A taken command that the queue's
//! cursor lacks advances the cursor. All values are checked: a damaged file costs only its own
//! client. **Not here:** the message in flight ([`crate::frontend::vm`] repeats it).

use super::commands::{Command, CommandWork};
use super::queues::judge;
use super::record::{COMMANDS, CommandRecords, CommandStage};
use super::{Pcie, no_entry};
use crate::core::{FenceSet, IoOp, RecoveredSpan};
use crate::frontend::vm::protocol::{Closing, Turn};
use crate::lane::LaneIndex;
use forebay_nvme::pcie::{QUEUES, RegisterEffect, queue};
use forebay_nvme::{Cqe, Sqe, Status};
use std::sync::atomic::Ordering::Release;

pub(super) const DAMAGED: Closing = Closing("its saved state is damaged");

impl Pcie {
    pub(super) fn make_queues(&mut self, turn: &mut Turn<'_>) -> Result<(), Closing> {
        self.rings
            .place_shadow(self.function.shadow(), turn.client.memory());
        for qid in 0..QUEUES as u16 {
            let taken = match qid {
                0 => self.function.admin_taken(),
                _ => self.records.taken(qid),
            };
            self.make_sq(qid, taken);
            if qid == 0 {
                self.count_admin(turn);
            }
            self.make_cq(qid, self.records.posted(qid));
        }
        // The outbox has the latest completions.
        let (completed, posted) = (self.function.admin_completed(), self.records.posted(0));
        match completed.checked_sub(posted) {
            Some(left) if left <= forebay_nvme::pcie::OUTBOX as u64 => Ok(()),
            _ if self.rings.sqs[0].is_none() => Ok(()),
            _ => Err(DAMAGED),
        }
    }

    /// Counts an Admin completion that was posted but not counted; its host may have consumed it.
    fn count_admin(&mut self, turn: &Turn<'_>) {
        let cq = self.function.queues().1[0];
        let (posted, completed) = (self.records.posted(0), self.function.admin_completed());
        if cq.entries == 0 || posted >= completed {
            return;
        }
        let (index, phase) = queue::place(cq.entries, posted);
        let mut bytes = [0; 16];
        let at = cq.base + u64::from(index) * 16;
        if !turn.client.memory().read(at, &mut bytes) {
            return;
        }
        let there: Cqe = zerocopy::transmute!(bytes);
        if there == self.function.completion(posted).with_phase(phase) {
            self.records.set_posted(0, posted + 1);
        }
    }

    pub(super) fn take_over_commands(
        &mut self,
        turn: &mut Turn<'_>,
        blamed: Option<u16>,
    ) -> Result<(), Closing> {
        let mut left: Vec<(u16, u16, u64)> = Vec::new();
        let mut last = vec![None; QUEUES];
        self.commands.free.clear();
        for slot in (0..COMMANDS as u16).rev() {
            let (stage, qid, number) = self.rings.inherited(&self.records, slot).ok_or(DAMAGED)?;
            let ended = match stage {
                CommandStage::Free => true,
                CommandStage::Taken => false,
                CommandStage::Completing => {
                    self.post_again(turn, slot, qid)?;
                    self.records.free(slot);
                    true
                }
            };
            if stage != CommandStage::Free {
                let last = &mut last[usize::from(qid)];
                *last = (*last).max(Some(number));
            }
            if ended {
                self.commands.free.push(slot);
            } else {
                left.push((slot, qid, number));
            }
        }
        for (qid, last) in last.into_iter().enumerate() {
            let (Some(last), Some(sq)) = (last, &self.rings.sqs[qid]) else {
                continue;
            };
            if last >= sq.cursor.taken() {
                let taken = last + 1;
                self.make_sq(qid as u16, taken);
                self.records.set_taken(qid as u16, taken);
            }
        }
        if let Some(blamed) = blamed.filter(|b| left.iter().any(|(slot, ..)| slot == b)) {
            self.records.count_death(blamed);
        }
        self.recover(turn, left)
    }

    fn post_again(&mut self, turn: &mut Turn<'_>, slot: u16, qid: u16) -> Result<(), Closing> {
        let noted = self.records.completion(slot);
        let sq = self.rings.sqs[usize::from(qid)].as_ref().ok_or(DAMAGED)?;
        let (cqid, head) = (sq.cursor.cqid, sq.cursor.head());
        let posted = self.records.posted(cqid);
        let number = queue::near(posted, noted.number);
        if number.wrapping_add(1) == posted {
            return Ok(());
        }
        let entries = match &self.rings.cqs[usize::from(cqid)] {
            Some(cq) if number == posted => cq.cursor.entries(),
            _ => return Err(DAMAGED),
        };
        let (index, phase) = queue::place(entries, number);
        let cid = self.records.sqe(slot).cid();
        let cqe = Cqe::new(0, head, qid, cid, Status(noted.status)).with_phase(phase);
        let words: [[u8; 8]; 2] = zerocopy::transmute!(cqe);
        let [first, last] = words.map(u64::from_ne_bytes);
        let base = self.function.queues().1[usize::from(cqid)].base;
        let area = turn.client.memory().area(base, entries as usize * 16);
        if let Some(area) = area {
            let at = index as usize * 16;
            let _ = area.store_u64(at, first, Release);
            let _ = area.store_u64(at + 8, last, Release);
        }
        self.records.set_posted(cqid, posted + 1);
        self.make_cq(cqid, posted + 1);
        Ok(())
    }

    /// Recovers commands in flight, and queues them to begin again.
    fn recover(
        &mut self,
        turn: &mut Turn<'_>,
        mut left: Vec<(u16, u16, u64)>,
    ) -> Result<(), Closing> {
        // The oldest first, as far as known.
        left.sort_by_key(|(slot, _, number)| (*number, *slot));
        for (slot, qid, _) in &left {
            let sqe = self.records.sqe(*slot);
            self.commands.all[usize::from(*slot)] = Command {
                sqid: *qid,
                cid: sqe.cid(),
                work: CommandWork::Io(IoOp::Flush),
                taken_ns: turn.core.now_ns(),
            };
            self.rings.hold_place(*qid);
            self.commands.again.push_back(*slot);
        }
        if let Some(lane) = turn.client.lane() {
            let spans: Vec<RecoveredSpan> = left
                .iter()
                .filter_map(|(slot, ..)| span(&self.records, turn, lane, *slot))
                .collect();
            turn.core.recovered.recover_vm(lane, &spans);
        }
        let resets = self.function.unfinished() == RegisterEffect::Reset;
        if !resets && self.function.is_bus_master() {
            self.begin_again(turn);
        }
        Ok(())
    }
}

/// The bytes of the volume that a command may touch.
fn span(
    records: &CommandRecords,
    turn: &Turn<'_>,
    lane: LaneIndex,
    slot: u16,
) -> Option<RecoveredSpan> {
    let of = turn.core.lane(lane)?;
    let sqe: Sqe = match records.state(slot).stage() {
        Some(CommandStage::Taken) => records.sqe(slot),
        _ => no_entry(),
    };
    let (CommandWork::Io(op) | CommandWork::Durable(op)) = judge(&sqe, &of.geometry()).ok()?.0?;
    let whole = of.volume.config.size_bytes;
    let (bytes, write) = match op {
        IoOp::Read {
            offset_bytes,
            len_bytes,
        }
        | IoOp::Compare {
            offset_bytes,
            len_bytes,
        } => (offset_bytes..offset_bytes + u64::from(len_bytes), false),
        IoOp::Write {
            offset_bytes,
            len_bytes,
            ..
        }
        | IoOp::CompareAndWrite {
            offset_bytes,
            len_bytes,
            ..
        } => (offset_bytes..offset_bytes + u64::from(len_bytes), true),
        IoOp::WriteZeroes {
            offset_bytes,
            len_bytes,
            ..
        } => (offset_bytes..offset_bytes + len_bytes, true),
        // Its ranges were in host memory, which may have changed.
        IoOp::Deallocate { .. } => (0..whole, true),
        IoOp::Flush => return None,
    };
    Some(RecoveredSpan {
        volume: of.volume.id(),
        bytes,
        write,
        devices: FenceSet::ALL,
        command: Some(turn.client.command_ref(lane, slot)),
    })
}
