//! Carries out messages. The session decides whether a request is allowed, and its consequences.
//! Before the answer, its state is saved for a successor; every message can be repeated from the
//! start. A refusal is reported if the client asked for acknowledgements; otherwise it ends the
//! connection.

use super::area::InflightPlace;
use super::inflight::{create, wanted};
use super::{BACKEND, CALL, ERR, INFLIGHT, KICK, Vhost, area};
use crate::frontend::vm::descriptor;
use crate::frontend::vm::file::ClientRegion;
use crate::frontend::vm::protocol::{Answer, Closing, DepositedFd, Message, Turn, UNSHARED};
use forebay_guest::MapError;
use forebay_virtio::blk::{CONFIG_BYTES, CONFIG_WRITEBACK};
use forebay_virtio::vhost_user::message::{
    self, Header, InflightArea, MemoryRegion, MessageError, RingFd, VhostRequest, reply_config,
    reply_inflight, reply_u64, reply_vring_base, request,
};
use forebay_virtio::vhost_user::session::{Refusal, SessionEffect};
use forebay_virtio::vhost_user::{MAX_CONFIG_BYTES, protocol_feature};

#[derive(Clone, Copy, Debug)]
pub(super) enum PendingMessage {
    None,
    /// GET_VRING_BASE of this ring.
    Stop(u16, Header),
    /// SET_VRING_ENABLE, which disables this ring.
    Disable(u16, Header),
    Reset(Header),
    /// Memory was removed, and a dead engine may still access it.
    Memory(Header),
}

enum Fault {
    Refused(&'static str),
    Fatal(Closing),
}

impl From<Closing> for Fault {
    fn from(why: Closing) -> Self {
        Self::Fatal(why)
    }
}

const NO_DESCRIPTOR: Fault = Fault::Refused("a descriptor that does not match its message");

fn no_memory(error: MapError) -> Fault {
    Fault::Refused(match error {
        MapError::NotMemory => "memory that is neither a memfd nor on tmpfs or huge pages",
        MapError::BadRange => "a memory range that is empty or too long",
        MapError::PastEnd { .. } => "a memory range that is longer than its file",
        MapError::Overlaps => "a memory range that overlaps another",
        MapError::TooMany { .. } => "more memory ranges than it may have",
        MapError::TooLong { .. } => "more memory than it may have",
        MapError::System(_) => "memory that can't be mapped",
    })
}

fn is_unshared(message: &Message<'_>) -> bool {
    let kind = message
        .bytes
        .first_chunk()
        .map(|kind| u32::from_le_bytes(*kind));
    let is_memory = matches!(kind, Some(request::SET_MEM_TABLE | request::ADD_MEM_REG));
    is_memory && message.descriptors.is_empty()
}

impl Vhost {
    pub(super) fn handle(&mut self, turn: &mut Turn<'_>, message: &Message<'_>) -> Answer {
        self.pending = PendingMessage::None;
        if let Err(why) = self.have_inflight(turn) {
            return Answer::Close(why);
        }
        let decoded = message::decode(message.bytes, message.descriptors.len());
        let (header, request) = match decoded {
            Ok(decoded) => decoded,
            Err(MessageError::Descriptors) if is_unshared(message) => {
                return Answer::Close(Closing(UNSHARED));
            }
            Err(error) => return Answer::Close(Closing(error.text())),
        };
        self.heard_queues = request == VhostRequest::GetQueueNum;
        if let VhostRequest::VringKick { index } = request
            && self
                .session
                .has_protocol(protocol_feature::INBAND_NOTIFICATIONS)
            && let Some(Some(_)) = self.lines.get(index as usize)
        {
            // Each turn polls every ring anyway.
            self.acknowledge(turn, &header);
            return Answer::Now;
        }
        self.stop_before(turn, &request);
        let before = self.session.clone();
        let effect = match self.session.handle(&request) {
            Ok(effect) => effect,
            Err(refusal) => return self.refuse(turn, &header, Refusal::text(refusal)),
        };
        match self.act(turn, &header, effect, message.descriptors) {
            Ok(()) => self.go_on(turn),
            Err(Fault::Refused(why)) => {
                self.session = before;
                self.refuse(turn, &header, why)
            }
            Err(Fault::Fatal(why)) => Answer::Close(why),
        }
    }

    fn refuse(&mut self, turn: &mut Turn<'_>, header: &Header, why: &'static str) -> Answer {
        area(turn).save(&self.session.words());
        let reply = &mut turn.client.reply;
        reply.clear();
        if header.request == request::GET_CONFIG {
            reply_config(reply, 0, &[]);
        } else if self.session.acknowledges(header.request, header.need_reply) {
            reply_u64(reply, header.request, 1);
            let reported = || format!("one of its requests was refused: {why}");
            turn.client.report_refused(reported);
        } else {
            return Answer::Close(Closing(why));
        }
        Answer::Now
    }

    fn over(&mut self, turn: &mut Turn<'_>, header: &Header) -> Answer {
        self.pending = PendingMessage::None;
        area(turn).save(&self.session.words());
        self.acknowledge(turn, header);
        Answer::Now
    }

    fn acknowledge(&self, turn: &mut Turn<'_>, header: &Header) {
        if turn.client.reply.is_empty()
            && self.session.acknowledges(header.request, header.need_reply)
        {
            reply_u64(&mut turn.client.reply, header.request, 0);
        }
    }

    /// Continues the waiting message, or completes one that needs no wait.
    pub(super) fn go_on(&mut self, turn: &mut Turn<'_>) -> Answer {
        match self.pending {
            PendingMessage::None => Answer::Now,
            PendingMessage::Stop(index, header) => {
                if self.is_still_busy(turn, index) {
                    return Answer::Later;
                }
                self.stop(turn, index);
                let base = self.session.vrings()[usize::from(index)].base;
                reply_vring_base(&mut turn.client.reply, u32::from(index), base);
                self.over(turn, &header)
            }
            PendingMessage::Disable(index, header) => {
                if self.is_still_busy(turn, index) {
                    return Answer::Later;
                }
                self.rest(turn, index);
                self.over(turn, &header)
            }
            PendingMessage::Reset(header) => {
                let queues = self.disk.queues;
                let busy = (0..queues).any(|index| self.is_still_busy(turn, index));
                if busy || may_touch_memory(turn) {
                    return Answer::Later;
                }
                for index in 0..queues {
                    self.stop(turn, index);
                }
                self.session.reset();
                self.over(turn, &header)
            }
            PendingMessage::Memory(header) if may_touch_memory(turn) => {
                self.pending = PendingMessage::Memory(header);
                Answer::Later
            }
            PendingMessage::Memory(header) => self.over(turn, &header),
        }
    }

    /// [`Self::is_busy`], for a waiting client: throttled requests begin now.
    fn is_still_busy(&self, turn: &mut Turn<'_>, index: u16) -> bool {
        let busy = self.is_busy(index);
        if busy && let Some(lane) = turn.client.lane() {
            turn.core.begin_owing(lane);
        }
        busy
    }

    fn is_busy(&self, index: u16) -> bool {
        let line = self.lines.get(usize::from(index));
        let in_flight = line.and_then(Option::as_ref);
        in_flight.is_some_and(|line| line.queue.in_flight() > 0)
            || (self.waiting.as_ref()).is_some_and(|begun| begun.queue == index)
    }

    /// Stops disabled rings that a request would change, unless it will be refused.
    fn stop_before(&mut self, turn: &mut Turn<'_>, request: &VhostRequest<'_>) {
        let stops = self.session.stops_before(request);
        if stops == 0 {
            return;
        }
        let rings = (0..self.disk.queues).filter(|index| stops >> index & 1 == 1);
        let mut after = self.session.clone();
        rings.clone().for_each(|index| after.stopped(index, 0));
        // Disabling them has drained them.
        if after.handle(request).is_ok() && !rings.clone().any(|index| self.is_busy(index)) {
            rings.for_each(|index| self.stop(turn, index));
        }
    }

    /// Ceases to poll a drained ring: its driver may be gone, and its memory reused.
    fn rest(&mut self, turn: &mut Turn<'_>, index: u16) {
        self.publish(turn);
        if let Some(line) = self.lines[usize::from(index)].take() {
            self.session.rests(index, line.queue.base());
        }
        // Save the ring's position before forgetting the other record of it.
        area(turn).save(&self.session.words());
        if let Some(inflight) = &self.inflight {
            inflight.forget(turn, index);
        }
    }

    fn stop(&mut self, turn: &mut Turn<'_>, index: u16) {
        let at = usize::from(index);
        self.session.stopped(index, self.session.vrings()[at].base);
        self.rest(turn, index);
        turn.client.hold(KICK + at, None);
    }

    fn act(
        &mut self,
        turn: &mut Turn<'_>,
        header: &Header,
        effect: SessionEffect<'_>,
        descriptors: &[DepositedFd],
    ) -> Result<(), Fault> {
        match effect {
            SessionEffect::None => {}
            SessionEffect::Reply(value) => reply_u64(&mut turn.client.reply, header.request, value),
            SessionEffect::SetMemory { regions, count } => {
                self.set_memory(turn, &regions[..count], descriptors)?;
                self.pending = PendingMessage::Memory(*header);
            }
            SessionEffect::AddMemory(region) => self.add_memory(turn, &region, descriptors)?,
            SessionEffect::RemoveMemory(region) => {
                self.remove_memory(turn, &region)?;
                self.pending = PendingMessage::Memory(*header);
            }
            SessionEffect::RingFd {
                which,
                index,
                has_fd,
            } => {
                let deposit = descriptors.first().filter(|_| has_fd);
                self.set_ring_fd(turn, which, index, deposit)?;
            }
            SessionEffect::Ring(index) | SessionEffect::Kick(index) => {
                self.start_ring(turn, index)?
            }
            SessionEffect::Stop(index) => self.pending = PendingMessage::Stop(index, *header),
            SessionEffect::Disable(index) => self.pending = PendingMessage::Disable(index, *header),
            SessionEffect::Reset => self.pending = PendingMessage::Reset(*header),
            SessionEffect::GetConfig { offset, size } => self.get_config(turn, offset, size)?,
            SessionEffect::SetConfig { offset, bytes } => self.set_config(offset, bytes)?,
            SessionEffect::GetInflight(asked) => self.get_inflight(turn, header, &asked)?,
            SessionEffect::SetInflight(area) => self.take_inflight(turn, area, descriptors)?,
            SessionEffect::Backend => {
                let deposit = descriptors.first().ok_or(NO_DESCRIPTOR)?;
                if !descriptor::is_unix_stream(&*deposit.fd) {
                    return Err(NO_DESCRIPTOR);
                }
                turn.client.hold(BACKEND, Some(deposit));
                self.notices.has_channel();
                self.call_again(turn);
            }
        }
        if matches!(self.pending, PendingMessage::None) {
            self.over(turn, header);
        }
        Ok(())
    }

    fn set_memory(
        &mut self,
        turn: &mut Turn<'_>,
        regions: &[MemoryRegion],
        descriptors: &[DepositedFd],
    ) -> Result<(), Fault> {
        let mut all = Vec::new();
        for (region, deposit) in regions.iter().zip(descriptors) {
            if !descriptor::is_file(&*deposit.fd) {
                return Err(NO_DESCRIPTOR);
            }
            let region = ClientRegion {
                address: region.guest_address,
                len: region.size,
                offset: region.mmap_offset,
                deposit: Some(deposit.number),
                writable: true,
                word: region.user_address,
            };
            all.push((Some(deposit), region));
        }
        let replaced = turn.client.replace_memory(&all);
        replaced.map_err(no_memory)?;
        Ok(self.memory_changed(turn)?)
    }

    fn add_memory(
        &mut self,
        turn: &mut Turn<'_>,
        region: &MemoryRegion,
        descriptors: &[DepositedFd],
    ) -> Result<(), Fault> {
        let deposit = descriptors.first().ok_or(NO_DESCRIPTOR)?;
        if !descriptor::is_file(&*deposit.fd) {
            return Err(NO_DESCRIPTOR);
        }
        let mapped = turn.client.map(
            Some(deposit),
            region.guest_address,
            region.size,
            region.mmap_offset,
            true,
            region.user_address,
        );
        mapped.map_err(no_memory)
    }

    fn remove_memory(&mut self, turn: &mut Turn<'_>, region: &MemoryRegion) -> Result<(), Fault> {
        let mut regions = turn.client.memory().regions().iter();
        let known = regions.any(|r| {
            r.guest_address() == region.guest_address
                && r.len_bytes() == region.size
                && r.user_address() == region.user_address
        });
        if !known {
            return Err(Fault::Refused("memory that does not exist"));
        }
        turn.client.unmap(region.guest_address, region.size);
        Ok(self.memory_changed(turn)?)
    }

    fn set_ring_fd(
        &mut self,
        turn: &mut Turn<'_>,
        which: RingFd,
        index: u16,
        deposit: Option<&DepositedFd>,
    ) -> Result<(), Fault> {
        if deposit.is_some_and(|deposit| !descriptor::is_eventfd(&*deposit.fd)) {
            return Err(NO_DESCRIPTOR);
        }
        let slot = usize::from(index)
            + match which {
                RingFd::Kick => KICK,
                RingFd::Call => CALL,
                RingFd::Err => ERR,
            };
        turn.client.hold(slot, deposit);
        match which {
            RingFd::Kick => {
                if deposit.is_some() && !turn.client.watch(slot) {
                    return Err(Closing("its kick descriptor can't be watched").into());
                }
                self.start_ring(turn, index)?;
            }
            // Calls for requests that completed before this descriptor.
            RingFd::Call => {
                self.notices.has_descriptor(usize::from(index));
                turn.client.raise(slot);
            }
            RingFd::Err => {}
        }
        Ok(())
    }

    fn start_ring(&mut self, turn: &mut Turn<'_>, index: u16) -> Result<(), Closing> {
        if self.lines[usize::from(index)].is_none() {
            // A dead engine may not have cleared its last stop.
            if let Some(inflight) = &self.inflight {
                inflight.forget(turn, index);
            }
            self.serve(turn, index)?;
        }
        Ok(())
    }

    fn get_config(&self, turn: &mut Turn<'_>, offset: u32, size: u32) -> Result<(), Fault> {
        let mut space = [0; MAX_CONFIG_BYTES];
        let config = self.disk.config(self.session.config_writeback());
        space[..CONFIG_BYTES].copy_from_slice(&config);
        // Some clients (Cloud Hypervisor up to v50) add the maximum configuration size to the
        // offset.
        let from = offset as usize;
        let from = from.checked_sub(MAX_CONFIG_BYTES).unwrap_or(from);
        let bytes = from
            .checked_add(size as usize)
            .and_then(|end| space.get(from..end));
        match bytes {
            Some(bytes) if !bytes.is_empty() => {
                reply_config(&mut turn.client.reply, offset, bytes);
                Ok(())
            }
            _ => Err(Fault::Refused(
                "a part of the configuration that does not exist",
            )),
        }
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Fault> {
        match bytes {
            [value @ 0..=1] if offset as usize == CONFIG_WRITEBACK => {
                self.session.set_writeback(*value == 1);
                Ok(())
            }
            _ => Err(Fault::Refused(
                "a part of the configuration that can't be changed",
            )),
        }
    }

    fn get_inflight(
        &mut self,
        turn: &mut Turn<'_>,
        header: &Header,
        asked: &InflightArea,
    ) -> Result<(), Fault> {
        let area = wanted(asked.num_queues, asked.queue_size);
        let no_file = Fault::Refused("no memory is left for its inflight region");
        let deposit = create(turn, &area).ok_or(no_file)?;
        let place = InflightPlace { area, ours: false };
        self.set_inflight(turn, Some(place), Some(&deposit))?;
        turn.client.reply_descriptor = Some(deposit.fd);
        reply_inflight(&mut turn.client.reply, &area, header.size);
        Ok(())
    }

    fn take_inflight(
        &mut self,
        turn: &mut Turn<'_>,
        area: InflightArea,
        descriptors: &[DepositedFd],
    ) -> Result<(), Fault> {
        let deposit = descriptors.first().ok_or(NO_DESCRIPTOR)?;
        if !descriptor::is_file(&*deposit.fd) {
            return Err(NO_DESCRIPTOR);
        }
        let place = InflightPlace { area, ours: false };
        self.set_inflight(turn, Some(place), Some(deposit))?;
        debug_assert!(turn.client.held(INFLIGHT).is_some());
        Ok(())
    }
}

fn may_touch_memory(turn: &Turn<'_>) -> bool {
    let lane = turn.client.lane();
    lane.is_some_and(|lane| turn.core.recovered.may_touch_memory_of(lane))
}
