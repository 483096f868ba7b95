//! The Admin queue: one command at a time, and events.
//!
//! A command's effect is saved together with its completion, which is posted afterwards
//! ([`forebay_nvme::pcie::Function::run_admin`]). A successor posts it again, at the same place
//! with the same content. This path may allocate. **Not here:** the commands themselves
//! (`nvme::pcie`, `nvme::controller`).

use super::Pcie;
use super::memory::{ClientMemory, Env};
use super::rings::{CqLive, Shadow, SqLive};
use crate::frontend::vm::protocol::Turn;
use forebay_nvme::Sqe;
use forebay_nvme::pcie::interrupt::Gathered;
use forebay_nvme::pcie::queue::{Cq, Sq, place};
use forebay_nvme::pcie::{Change, Doorbell};
use std::sync::atomic::Ordering::Release;
use zerocopy::FromBytes;

const AT_ONCE: usize = 8;

impl Pcie {
    pub(super) fn begin_admin_queue(&mut self) {
        self.records.new_sq(0);
        self.records.new_cq(0);
        self.rings.clear_bells(0, true, true);
        self.make_sq(0, 0);
        self.make_cq(0, 0);
    }

    pub(super) fn make_sq(&mut self, qid: u16, taken: u64) {
        let state = self.function.queues().0[usize::from(qid)];
        self.rings.sqs[usize::from(qid)] = (state.entries > 0).then(|| SqLive {
            quiet: 0,
            cursor: Sq::new(state.entries, state.cqid, taken),
            ring: None,
            in_flight: 0,
        });
        self.rings.active.retain(|active| *active != qid);
        if state.entries > 0 && qid > 0 {
            self.rings.active.push(qid);
        }
    }

    pub(super) fn make_cq(&mut self, qid: u16, posted: u64) {
        let state = self.function.queues().1[usize::from(qid)];
        let vector = (state.interrupts == 1).then_some(state.vector);
        let head = match &self.rings.shadow {
            // With its doorbell missing, assume that the host has consumed nothing.
            Some(Shadow { bells: None, .. }) if qid > 0 => {
                (place(state.entries.max(2), posted).0 + 1) % state.entries.max(2)
            }
            _ => self.rings.bell(&self.records, Doorbell::Head(qid)),
        };
        self.rings.cqs[usize::from(qid)] = (state.entries > 0).then(|| CqLive {
            cursor: Cq::new(state.entries, vector, posted, head),
            ring: None,
            gathered: Gathered::default(),
            coalescing: self.function.coalescing(state.vector),
        });
    }

    /// Runs Admin commands, and sends events. True if anything was done.
    pub(super) fn poll_admin(&mut self, turn: &mut Turn<'_>) -> bool {
        let tail = self.rings.bell(&self.records, Doorbell::Tail(0));
        let Some(sq) = self.rings.sqs[0].as_mut() else {
            return false;
        };
        if tail == sq.cursor.tail() && sq.cursor.is_empty() && !self.events {
            return false;
        }
        self.run_admin(turn, tail)
    }

    #[cold]
    fn run_admin(&mut self, turn: &mut Turn<'_>, tail: u32) -> bool {
        let mut any = false;
        if let Some(sq) = self.rings.sqs[0].as_mut()
            && sq.cursor.tail() != tail
            && sq.cursor.set_tail(tail).is_err()
        {
            self.rings.mend(Doorbell::Tail(0));
            self.bad_doorbell(false, 0);
        }
        for _ in 0..AT_ONCE {
            if !self.live || !self.post_admin(turn) {
                break;
            }
            let Some(sqe) = self.next_admin(turn) else {
                break;
            };
            self.deleting = self.function.drains(&sqe);
            if let Some(qid) = self.deleting
                && self.rings.is_busy(qid)
            {
                if let Some(lane) = turn.client.lane() {
                    turn.core.begin_owing(lane);
                }
                break;
            }
            self.run_one(turn, &sqe);
            any = true;
        }
        if self.live
            && std::mem::take(&mut self.events)
            && self.function.gather_events(self.records.posted(0))
        {
            self.save();
            any = true;
        }
        // Until the host makes room for it.
        self.events |= !self.post_admin(turn);
        self.more |= any;
        any
    }

    fn next_admin(&mut self, turn: &mut Turn<'_>) -> Option<Sqe> {
        if self.function.outbox_room(self.records.posted(0)) == 0 {
            return None;
        }
        let sq = self.rings.sqs[0]
            .as_ref()
            .filter(|sq| !sq.cursor.is_empty())?;
        let base = self.function.queues().0[0].base;
        let at = base + u64::from(sq.cursor.head()) * 64;
        let mut bytes = [0; 64];
        if !turn.client.memory().read(at, &mut bytes) {
            self.rings.miss_memory(turn.core.now_ns());
            return None;
        }
        Sqe::read_from_bytes(&bytes).ok()
    }

    fn run_one(&mut self, turn: &mut Turn<'_>, sqe: &Sqe) {
        let env = Env::new(turn.core, turn.client.lane());
        let memory = ClientMemory(turn.client.memory());
        let now_ns = turn.core.now_ns();
        let run = (self.function).run_admin(sqe, &memory, &env, &mut self.scratch, now_ns);
        self.deleting = None;
        // Records of a new queue precede the queue.
        match run.change {
            Change::SqCreated(qid) => {
                self.records.new_sq(qid);
                self.rings.clear_bells(qid, true, false);
                self.make_sq(qid, 0);
            }
            Change::CqCreated(qid) => {
                self.records.new_cq(qid);
                self.rings.clear_bells(qid, false, true);
                self.make_cq(qid, 0);
            }
            Change::SqDeleted(qid) => self.make_sq(qid, 0),
            Change::CqDeleted(qid) => self.make_cq(qid, 0),
            Change::Shadow => {
                self.rings.read_all(&self.records);
                self.rings
                    .place_shadow(self.function.shadow(), turn.client.memory());
                self.rings.fill_shadow();
            }
            Change::Features => {
                for cq in self.rings.cqs.iter_mut().flatten() {
                    if let Some(vector) = cq.cursor.vector {
                        cq.coalescing = self.function.coalescing(vector);
                    }
                }
            }
            Change::None => {}
        }
        self.events = true;
        self.save();
        if let Some(sq) = self.rings.sqs[0].as_mut() {
            sq.cursor.consume(1);
        }
        self.post_admin(turn);
    }

    /// Posts the outbox as far as there is room. False: some is left.
    pub(super) fn post_admin(&mut self, turn: &mut Turn<'_>) -> bool {
        let completed = self.function.admin_completed();
        let mut posted = self.records.posted(0);
        if posted >= completed {
            return true;
        }
        let head = self.rings.bell(&self.records, Doorbell::Head(0));
        let base = self.function.queues().1[0].base;
        let Some(cq) = self.rings.cqs[0].as_mut() else {
            return true;
        };
        let mut bad = cq.cursor.set_head(head).is_err();
        while posted < completed && cq.cursor.room() > 0 {
            let (index, phase) = place(cq.cursor.entries(), posted);
            let cqe = self.function.completion(posted).with_phase(phase);
            let at = base + u64::from(index) * 16;
            // The last word has the phase tag, and is written last.
            let memory = turn.client.memory();
            let area = memory.area(at, 16);
            let words: [[u8; 8]; 2] = zerocopy::transmute!(cqe);
            let [first, last] = words.map(u64::from_ne_bytes);
            let written = area.is_some_and(|area| {
                area.store_u64(0, first, Release) && area.store_u64(8, last, Release)
            });
            if !written {
                self.rings.lost_ns.get_or_insert(turn.core.now_ns());
                break;
            }
            cq.cursor.post();
            posted += 1;
            self.records.set_posted(0, posted);
            if let Some(vector) = cq.cursor.vector {
                self.vectors.raise(&self.records, turn.client, vector);
            }
        }
        if std::mem::take(&mut bad) {
            self.rings.mend(Doorbell::Head(0));
            self.bad_doorbell(false, 0);
        }
        posted >= completed
    }
}
