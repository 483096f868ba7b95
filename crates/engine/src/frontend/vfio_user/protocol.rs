//! Implements [`Protocol`]. A message is answered at once, or at the end of the reset that it
//! starts. A turn takes completions first, then retried commands, then queues. **Not here:** what a
//! message does ([`super::messages`]).

use super::commands::CommandWork;
use super::messages::{RequestOutcome, closing, report_bad_map};
use super::queues::BUDGET;
use super::quiesce::Why;
use super::resume::DAMAGED;
use super::rings::Bells;
use super::{COMMANDS, LOST_LIMIT_NS, Pcie, completion, memory, messages, slot};
use crate::core::DoneIo;
use crate::frontend::vm::protocol::{Answer, Closing, Message, Protocol, StreamFrame, Turn};
use forebay_nvme::Status;
use forebay_nvme::pcie::{Function, RegisterEffect, VECTORS};
use forebay_vfio_user::wire::command;
use forebay_vfio_user::{self as vfio_user, Errno, Header, MAX_DATA_BYTES, Request, VfioSession};
use forebay_xlate::kill_point;
use std::sync::atomic::Ordering::Relaxed;

impl Protocol for Pcie {
    fn frame(&self, peeked: &[u8]) -> Result<StreamFrame, Closing> {
        match vfio_user::frame(peeked) {
            Ok(vfio_user::MessageFrame::NeedMore(bytes)) => Ok(StreamFrame::Need(bytes)),
            Ok(vfio_user::MessageFrame::Whole(bytes)) => Ok(StreamFrame::Whole(bytes)),
            Err(broken) => Err(messages::closing(broken)),
        }
    }

    fn message(&mut self, turn: &mut Turn<'_>, message: &Message<'_>) -> Answer {
        if let Some(header) = Header::read(message.bytes)
            && header.is_reply()
            && self.records.has_asked()
        {
            return self.reported(turn, &header, message.bytes);
        }
        let descriptors = message.descriptors.len();
        let judged = match self.session.judge(message.bytes, descriptors) {
            Ok(judged) => judged,
            Err(broken) => return Answer::Close(closing(broken)),
        };
        if let Ok(Request::Version(negotiated)) = judged.request
            && let Err(why) = self.agree(turn.client, negotiated)
        {
            return Answer::Close(why);
        }
        if let Err(error) = judged.request
            && Header::read(message.bytes).is_some_and(|of| of.command == command::DMA_MAP)
        {
            report_bad_map(turn.client, error);
        }
        if let Some(answer) = self.session.describe(&judged, &mut self.out) {
            let reply = self.out.get(..answer.bytes).unwrap_or_default();
            turn.client.reply.extend_from_slice(reply);
            if answer.with_region.is_some() {
                let page = turn.client.held_deposit(slot::DOORBELLS);
                turn.client.reply_descriptor = page.map(|page| page.fd);
            }
            return Answer::Now;
        }
        let mut data = [0u8; 256];
        let mut long = Vec::new();
        let mut read: &[u8] = &[];
        let outcome = match judged.request {
            Ok(Request::DmaMap(map)) => self.map(turn, &map, message.descriptors.first()),
            Ok(Request::DmaUnmap(unmap)) => self.unmap(turn, unmap),
            Ok(Request::SetIrqs(irqs)) => {
                let (device, may_raise) = (self.session.device(), self.function.is_bus_master());
                let set = (self.vectors).set(
                    &self.records,
                    device,
                    turn.client,
                    may_raise,
                    &irqs,
                    message.descriptors,
                );
                set.map_or_else(RequestOutcome::Failed, |()| RequestOutcome::Done)
            }
            Ok(Request::RegionRead(access)) => {
                let into = room_of(&mut data, &mut long, access.len_bytes);
                self.read(&access, into);
                read = into;
                RequestOutcome::Done
            }
            Ok(Request::RegionWrite(access, from)) => self.write(turn, &access, from),
            Ok(Request::Reset) => RequestOutcome::Reset,
            // The device description lacks the others.
            Ok(_) => RequestOutcome::Failed(Errno::ENOTSUP),
            Err(error) => RequestOutcome::Failed(error),
        };
        let answer = match outcome {
            RequestOutcome::Done => judged.done(read, &mut self.out),
            RequestOutcome::Failed(error) => judged.refuse(error, &mut self.out),
            RequestOutcome::Reset => {
                self.function.begin_reset();
                self.begin_quiescing(turn, Why::Reset);
                self.waiting.clear();
                self.waiting.extend_from_slice(message.bytes);
                return self.later(turn);
            }
        };
        let reply = self.out.get(..answer.bytes).unwrap_or_default();
        turn.client.reply.extend_from_slice(reply);
        Answer::Now
    }

    fn later(&mut self, turn: &mut Turn<'_>) -> Answer {
        let client_alone = self.remote.may_write() && !self.commands.are_at_devices(turn);
        let error = match &self.quiesce {
            None => None,
            Some(q) if q.is_late(turn.core.now_ns(), client_alone) => Some(Errno::ETIMEDOUT),
            Some(_) => return Answer::Later,
        };
        self.answer_waiting(turn, error);
        Answer::Now
    }

    #[inline]
    fn poll(&mut self, turn: &mut Turn<'_>) -> bool {
        if !self.live {
            return self.quiesce.is_some() && self.go_on_quiescing(turn);
        }
        self.more = false;
        if !self.commands.over.is_empty() {
            self.answer_over(turn);
        }
        if self.rings.armed {
            self.rings.be_quiet();
        }
        if !self.commands.held.is_empty() || self.rings.lost_ns.is_some() {
            self.find_memory(turn);
        }
        let mut any = false;
        if !self.commands.again.is_empty() {
            any |= self.begin_again(turn);
        }
        if self.remote.busy {
            any |= self.move_remote(turn);
        }
        any |= self.poll_admin(turn);
        self.budget = BUDGET;
        let queues = self.rings.active.len();
        for at in 0..queues {
            // Round robin when a turn cannot serve all queues.
            let at = (self.first + at) % queues;
            let Some(qid) = self.rings.active.get(at).copied() else {
                break;
            };
            if self.budget == 0 {
                self.first = at;
                self.more = true;
                break;
            }
            any |= self.fetch(turn, qid);
        }
        any
    }

    #[inline]
    fn has_rung(&self) -> bool {
        self.live && self.rings.tail_has_moved(&self.records)
    }

    fn queues(&self) -> usize {
        self.rings.sqs.iter().skip(1).flatten().count()
    }

    #[inline]
    fn is_active(&self) -> bool {
        self.live || self.quiesce.is_some() || !self.commands.held.is_empty()
    }

    fn arm(&mut self, turn: &mut Turn<'_>) -> bool {
        // A throttled lane needs no doorbells: the window's end wakes the reactor.
        let lane = turn.client.lane();
        let held_back = lane.is_some_and(|lane| turn.core.qos.is_held_back(lane));
        if !self.live {
            return true;
        }
        !self.more && !self.rings.must_be_polled() && self.rings.arm(&self.records, held_back)
    }

    fn ready(&mut self, _turn: &mut Turn<'_>, _slot: usize) {}

    #[inline]
    fn done(&mut self, turn: &mut Turn<'_>, done: DoneIo) {
        let slot = done.owner.slot;
        if usize::from(slot) >= COMMANDS {
            if let Some(quiesce) = &mut self.quiesce {
                quiesce.flushed();
            }
            return;
        }
        let record = turn.client.command_ref(done.lane, slot);
        turn.core.record().blame.store(record.blame(), Relaxed);
        let command = self.commands.get(slot);
        let status = match done.status {
            Status::SUCCESS => Status::SUCCESS,
            _ => self.note_failure(turn.core, &done, &command),
        };
        if let (CommandWork::Durable(op), true) = (command.work, status.is_success())
            && !self.answers_nobody()
        {
            return self.after_flush(turn, slot, op);
        }
        let (CommandWork::Io(op) | CommandWork::Durable(op)) = &command.work;
        let times = (command.taken_ns, done.started_ns);
        if let Some(lane) = turn.core.lane(done.lane) {
            completion::count(lane, &turn.core.clock, op, status, times);
        }
        if self.remote.busy && self.remote.goes_out(slot, status, self.answers_nobody()) {
            self.more = true;
            return;
        }
        self.complete(turn, slot, status);
    }

    fn resume(&mut self, turn: &mut Turn<'_>, blamed: Option<u16>) -> Result<(), Closing> {
        let device = super::messages::device(self.mapped);
        self.session = VfioSession::resume(device, self.records.negotiated());
        if self.mapped && turn.client.held(slot::DOORBELLS).is_some() {
            self.rings.map_page(turn.client)?;
        }
        if let Some(state) = self.records.saved() {
            let config = super::config(turn.client)?;
            self.function = Function::restore(config, &state).map_err(|_| DAMAGED)?;
            self.make_queues(turn)?;
        }
        self.remote.inherit_asked(&self.records, turn.core.now_ns());
        self.renew_liveness();
        self.take_over_commands(turn, blamed)?;
        match self.function.unfinished() {
            RegisterEffect::Reset => self.begin_quiescing(turn, Why::Reset),
            RegisterEffect::Shutdown => self.begin_quiescing(turn, Why::Shutdown),
            RegisterEffect::None | RegisterEffect::Enabled => {}
        }
        kill_point!("pcie.inherited");
        // The host may have missed the last interrupts.
        for vector in 0..VECTORS {
            self.records.set_pending(vector, true);
        }
        if self.function.is_bus_master() {
            self.vectors.raise_pending(&self.records, turn.client);
        }
        self.events = true;
        self.more = true;
        let lane = turn.client.lane().and_then(|lane| turn.core.lane(lane));
        if lane.is_some_and(|lane| lane.volume.blocks() != self.records.blocks()) {
            self.changed(turn);
        }
        Ok(())
    }

    fn changed(&mut self, turn: &mut Turn<'_>) {
        let lane = turn.client.lane().and_then(|lane| turn.core.lane(lane));
        let Some(lane) = lane else { return };
        let blocks = lane.volume.blocks();
        let controller = self.function.controller_mut();
        controller.warnings_are(lane.statistics.warnings);
        if blocks != self.records.blocks() {
            controller.namespace_changed(memory::NSID);
        }
        self.save();
        // Last, so that a successor repeats the event if needed.
        self.records.set_blocks(blocks);
        self.events = true;
    }

    fn removed(&mut self, turn: &mut Turn<'_>) -> bool {
        // A monitor that listens to this unplugs the device. QEMU 11 does not, so the guest is
        // informed, too.
        let tells = turn.client.held(slot::REQ).is_some();
        turn.client.raise(slot::REQ);
        if self.live {
            let controller = self.function.controller_mut();
            controller.namespace_changed(memory::NSID);
            self.events = true;
            self.save();
        }
        tells || self.live
    }

    fn close(&mut self, _turn: &mut Turn<'_>) {
        self.closed = true;
        self.renew_liveness();
        self.commands.held.clear();
        self.commands.again.clear();
        self.remote.clear();
        self.let_go_of_memory();
        self.rings.bells = Bells::Registers;
    }

    fn tick(&mut self, turn: &mut Turn<'_>) {
        let now_ns = turn.core.now_ns();
        if self.function.is_bus_master() {
            let (vectors, records) = (&self.vectors, &self.records);
            let client = &mut *turn.client;
            (self.rings).gathered(now_ns, |vector| vectors.raise(records, client, vector));
        }
        self.remote.poll_asked(turn);
        let lost = self
            .rings
            .lost_ns
            .map(|since| since.saturating_add(LOST_LIMIT_NS));
        if lost.is_some_and(|limit| now_ns >= limit) {
            self.rings.lost_ns = None;
            self.give_up_held(turn);
            self.fail();
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        let cqs = self.rings.cqs.iter().flatten();
        let gathered = cqs.filter_map(|cq| cq.gathered.deadline_ns(&cq.coalescing));
        let lost = self
            .rings
            .lost_ns
            .map(|since| since.saturating_add(LOST_LIMIT_NS));
        gathered.chain(lost).chain(self.remote.deadline_ns()).min()
    }
}

/// A buffer for an answer, on the stack if it fits.
fn room_of<'a>(short: &'a mut [u8], long: &'a mut Vec<u8>, bytes: u32) -> &'a mut [u8] {
    match short.get_mut(..bytes as usize) {
        Some(room) => room,
        None => {
            long.resize(bytes.min(MAX_DATA_BYTES) as usize, 0);
            &mut long[..]
        }
    }
}
