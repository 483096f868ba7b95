//! Live queues: cursors, memory, and coalesced interrupts. A queue's memory is looked up when
//! needed, and released when the client removes memory. **Not here:** doorbells ([`super::bells`]),
//! records ([`super::record`]).

use super::record::{CommandRecords, CommandStage};
use super::slot;
use crate::frontend::vm::client::Client;
use crate::frontend::vm::protocol::Closing;
use forebay_guest::{Area, GuestMemory, Mapping};
use forebay_nvme::pcie::interrupt::{Coalescing, Gathered};
use forebay_nvme::pcie::queue::{self, Cq, Sq};
use forebay_nvme::pcie::{DOORBELLS_AT, DOORBELLS_BYTES, Doorbell, Function, QUEUES};
use std::sync::Arc;

pub(super) enum Bells {
    /// Written by messages.
    Registers,
    /// In a page of ours.
    Page(Area),
}

/// Shadow doorbells and event indexes; an inner `None`: their memory is missing.
pub(super) struct Shadow {
    pub bells: Option<Area>,
    pub event_index: Option<Area>,
}

pub(super) struct SqLive {
    pub cursor: Sq,
    /// The event index of its tail while no doorbell message is needed.
    pub quiet: u32,
    pub ring: Option<Area>,
    pub in_flight: u32,
}

pub(super) struct CqLive {
    pub cursor: Cq,
    pub ring: Option<Area>,
    pub gathered: Gathered,
    pub coalescing: Coalescing,
}

pub(super) struct Rings {
    pub sqs: Box<[Option<SqLive>]>,
    pub cqs: Box<[Option<CqLive>]>,
    pub active: Vec<u16>,
    pub bells: Bells,
    pub shadow: Option<Shadow>,
    /// The host was asked to send doorbell messages.
    pub armed: bool,
    /// Since when a queue's memory is missing.
    pub lost_ns: Option<u64>,
}

impl Rings {
    pub(super) fn new() -> Self {
        Self {
            sqs: (0..QUEUES).map(|_| None).collect(),
            cqs: (0..QUEUES).map(|_| None).collect(),
            active: Vec::with_capacity(QUEUES),
            bells: Bells::Registers,
            shadow: None,
            armed: false,
            lost_ns: None,
        }
    }

    /// Whether a driver has rung since the last poll.
    #[inline]
    pub(super) fn tail_has_moved(&self, records: &CommandRecords) -> bool {
        self.active.iter().any(|qid| {
            let sq = self.sqs[usize::from(*qid)].as_ref();
            sq.is_some_and(|sq| self.bell(records, Doorbell::Tail(*qid)) != sq.cursor.tail())
        })
    }

    /// Counts a command in flight, and reserves its completion.
    #[inline]
    pub(super) fn hold_place(&mut self, qid: u16) {
        if let Some(sq) = self.sqs[usize::from(qid)].as_mut() {
            sq.in_flight += 1;
            if let Some(cq) = self.cqs[usize::from(sq.cursor.cqid)].as_mut() {
                cq.cursor.reserve();
            }
        }
    }

    pub(super) fn is_busy(&self, qid: u16) -> bool {
        let sq = self.sqs[usize::from(qid)].as_ref();
        sq.is_some_and(|sq| sq.in_flight > 0)
    }

    /// False: the memory is missing.
    #[inline]
    pub(super) fn read_entries(
        &mut self,
        memory: &GuestMemory,
        base: u64,
        qid: u16,
        from: u32,
        into: &mut [u8],
    ) -> bool {
        let Some(sq) = self.sqs[usize::from(qid)].as_mut() else {
            return false;
        };
        if sq.ring.is_none() {
            sq.ring = memory.area(base, sq.cursor.entries() as usize * 64);
        }
        let ring = sq.ring.as_ref();
        ring.is_some_and(|ring| ring.read(from as usize * 64, into))
    }

    pub(super) fn inherited(
        &self,
        records: &CommandRecords,
        slot: u16,
    ) -> Option<(CommandStage, u16, u64)> {
        let state = records.state(slot);
        let stage = state.stage()?;
        let sq = self.sqs.get(usize::from(state.qid()))?.as_ref();
        match (stage, sq) {
            (CommandStage::Free, _) => Some((stage, 0, 0)),
            (_, Some(sq)) if state.qid() > 0 => {
                let number = queue::near(sq.cursor.taken(), state.number());
                let (behind, ahead) = (
                    sq.cursor.taken().wrapping_sub(number),
                    number.wrapping_sub(sq.cursor.taken()),
                );
                // Among the last commands taken, or in the batch being taken.
                let sound =
                    behind <= u64::from(u32::MAX / 2) || ahead < u64::from(sq.cursor.entries());
                sound.then_some((stage, state.qid(), number))
            }
            _ => None,
        }
    }

    pub(super) fn clear(&mut self) {
        self.sqs.iter_mut().for_each(|sq| *sq = None);
        self.cqs.iter_mut().for_each(|cq| *cq = None);
        self.active.clear();
        self.shadow = None;
        self.lost_ns = None;
        self.armed = false;
    }

    /// Maps the doorbell page, which the client maps, too.
    pub(super) fn map_page(&mut self, client: &Client) -> Result<(), Closing> {
        let failed = Closing("its doorbells can't be mapped");
        let fd = client.held(slot::DOORBELLS).ok_or(failed)?;
        let page = Mapping::new(fd, DOORBELLS_AT, DOORBELLS_BYTES, true);
        let page = Area::of(&Arc::new(page.map_err(|_| failed)?)).ok_or(failed)?;
        self.bells = Bells::Page(page);
        Ok(())
    }

    /// Raises vectors that were coalesced for long enough.
    pub(super) fn gathered(&mut self, now_ns: u64, mut raise: impl FnMut(u16)) {
        for cq in self.cqs.iter_mut().skip(1).flatten() {
            if let Some(vector) = cq.cursor.vector
                && cq.gathered.tick(&cq.coalescing, now_ns)
            {
                raise(vector);
            }
        }
    }

    #[cold]
    pub(super) fn miss_memory(&mut self, now_ns: u64) {
        self.lost_ns.get_or_insert(now_ns);
    }

    /// Releases the client's memory; it is looked up again when needed.
    pub(super) fn let_go(&mut self) {
        for sq in self.sqs.iter_mut().flatten() {
            sq.ring = None;
        }
        for cq in self.cqs.iter_mut().flatten() {
            cq.ring = None;
        }
        if let Some(shadow) = &mut self.shadow {
            *shadow = Shadow {
                bells: None,
                event_index: None,
            };
        }
    }

    pub(super) fn misses_shadow(&self) -> bool {
        self.shadow.as_ref().is_some_and(|s| s.bells.is_none())
    }

    /// Looks up missing memory of I/O queues; true if some is still missing.
    pub(super) fn find(&mut self, function: &Function, memory: &GuestMemory) -> bool {
        let (sq_states, cq_states) = function.queues();
        let mut missing = false;
        for (sq, state) in self.sqs.iter_mut().zip(sq_states).skip(1) {
            if let Some(sq) = sq.as_mut().filter(|sq| sq.ring.is_none()) {
                sq.ring = memory.area(state.base, state.entries as usize * 64);
                missing |= sq.ring.is_none();
            }
        }
        for (cq, state) in self.cqs.iter_mut().zip(cq_states).skip(1) {
            if let Some(cq) = cq.as_mut().filter(|cq| cq.ring.is_none()) {
                cq.ring = memory.area(state.base, state.entries as usize * 16);
                missing |= cq.ring.is_none();
            }
        }
        missing
    }
}
