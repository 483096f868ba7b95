//! One virtqueue of a virtio-blk disk (virtio 1.2, section 5.2.6).
//!
//! Each slot has a control block (request header, range for discards, status byte), an indirect
//! table, and its data. Kicks and calls are eventfds.

use std::sync::Arc;
use std::time::Duration;

use super::super::event::EventFd;
use super::super::memory::{Allotment, MappedMemory, PAGE_BYTES};
use super::super::{DiskCompletion, DiskStatus, Error, Op, Options, Queue, Ring};
use super::ring::{AnyRing, ChainPiece, Shape};

const SECTOR_BYTES: u64 = 512;
/// Size of a control block, and offsets in it.
const CONTROL_BYTES: usize = 64;
const RANGE: usize = 16;
const STATUS: usize = 32;
/// The device must overwrite it.
const NO_STATUS: u8 = 0xff;

mod request {
    pub(super) const IN: u32 = 0;
    pub(super) const OUT: u32 = 1;
    pub(super) const FLUSH: u32 = 4;
    pub(super) const DISCARD: u32 = 11;
    pub(super) const WRITE_ZEROES: u32 = 13;
}

/// Offsets of a queue's parts in memory.
#[derive(Debug)]
pub(super) struct RingPlan {
    ring: AnyRing,
    controls: usize,
    tables: usize,
    table_bytes: usize,
    data: usize,
    slot_bytes: usize,
}

impl RingPlan {
    pub(super) fn new(options: &Options, layout: &mut Allotment) -> Self {
        let depth = usize::from(options.depth);
        let chain = 2 + options.pieces();
        let shape = Shape {
            depth: options.depth,
            chain: chain as u16,
            indirect: options.indirect,
            event_idx: options.event_idx,
        };
        let ring = AnyRing::new(options.ring == Ring::Packed, shape, layout);
        let table_bytes = 16 * chain;
        let slot_bytes = options.slot_bytes.next_multiple_of(PAGE_BYTES);
        let odd = usize::from(options.odd);
        Self {
            ring,
            controls: layout.take(depth * CONTROL_BYTES, CONTROL_BYTES),
            tables: layout.take(depth * table_bytes, 64),
            table_bytes,
            data: odd + layout.take(depth * slot_bytes + odd, PAGE_BYTES),
            slot_bytes,
        }
    }
}

/// A virtqueue.
#[derive(Debug)]
pub struct VhostQueue {
    memory: Arc<MappedMemory>,
    plan: RingPlan,
    piece_bytes: usize,
    slots: Vec<Option<Op>>,
    in_flight: u16,
    parts: Vec<ChainPiece>,
    kick: Arc<EventFd>,
    call: Arc<EventFd>,
    interrupts: bool,
}

impl VhostQueue {
    pub(super) fn new(
        memory: &Arc<MappedMemory>,
        plan: RingPlan,
        options: &Options,
        events: &(Arc<EventFd>, Arc<EventFd>),
    ) -> Self {
        let mut queue = Self {
            memory: Arc::clone(memory),
            plan,
            piece_bytes: options.piece_bytes,
            slots: vec![None; usize::from(options.depth)],
            in_flight: 0,
            parts: Vec::with_capacity(2 + options.pieces()),
            kick: Arc::clone(&events.0),
            call: Arc::clone(&events.1),
            interrupts: options.interrupts,
        };
        queue.plan.ring.disarm(memory);
        queue
    }

    pub(super) fn ring(&self) -> &AnyRing {
        &self.plan.ring
    }

    pub(super) fn submit_again(&mut self) {
        self.plan.ring.reset(&self.memory);
        self.plan.ring.disarm(&self.memory);
        for slot in 0..self.slots.len() {
            if let Some(op) = self.slots[slot] {
                self.add(slot as u16, op);
            }
        }
        let _ = self.plan.ring.publish(&self.memory);
    }

    fn control(&self, slot: u16) -> usize {
        self.plan.controls + usize::from(slot) * CONTROL_BYTES
    }

    fn data(&self, slot: u16) -> usize {
        self.plan.data + usize::from(slot) * self.plan.slot_bytes
    }

    fn add(&mut self, slot: u16, op: Op) {
        let (kind, sector, bytes) = match op {
            Op::Read {
                offset_bytes,
                bytes,
            } => (request::IN, offset_bytes / SECTOR_BYTES, bytes),
            Op::Write {
                offset_bytes,
                bytes,
            } => (request::OUT, offset_bytes / SECTOR_BYTES, bytes),
            Op::Flush => (request::FLUSH, 0, 0),
            Op::Discard { .. } => (request::DISCARD, 0, 0),
            Op::WriteZeroes { .. } => (request::WRITE_ZEROES, 0, 0),
        };
        let (control, data) = (self.control(slot), self.data(slot));
        let memory = &*self.memory;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        memory.write(control, &header);
        memory.write(control + STATUS, &[NO_STATUS]);
        let part = |place, bytes, device_writes| ChainPiece {
            guest: memory.guest(place),
            bytes,
            device_writes,
        };
        self.parts.clear();
        self.parts.push(part(control, 16, false));
        if let Op::Discard {
            offset_bytes,
            bytes,
        }
        | Op::WriteZeroes {
            offset_bytes,
            bytes,
        } = op
        {
            let mut range = [0; 16];
            range[..8].copy_from_slice(&(offset_bytes / SECTOR_BYTES).to_le_bytes());
            range[8..12].copy_from_slice(&(bytes / SECTOR_BYTES as u32).to_le_bytes());
            memory.write(control + RANGE, &range);
            self.parts.push(part(control + RANGE, 16, false));
        }
        let (mut at, mut left) = (data, bytes as usize);
        while left > 0 {
            let piece = left.min(self.piece_bytes);
            let is_read = kind == request::IN;
            self.parts.push(part(at, piece as u32, is_read));
            at += piece;
            left -= piece;
        }
        self.parts.push(part(control + STATUS, 1, true));
        let table = self.plan.tables + usize::from(slot) * self.plan.table_bytes;
        self.plan.ring.add(memory, slot, table, &self.parts);
    }
}

impl Queue for VhostQueue {
    fn depth(&self) -> u16 {
        self.slots.len() as u16
    }

    fn in_flight(&self) -> u16 {
        self.in_flight
    }

    fn slot_bytes(&self) -> usize {
        self.plan.slot_bytes
    }

    fn put(&self, slot: u16, data: &[u8]) {
        assert!(data.len() <= self.plan.slot_bytes, "more than a slot holds");
        self.memory.write(self.data(slot), data);
    }

    fn get(&self, slot: u16, data: &mut [u8]) {
        assert!(data.len() <= self.plan.slot_bytes, "more than a slot holds");
        self.memory.read(self.data(slot), data);
    }

    fn submit(&mut self, slot: u16, op: Op) -> Result<(), Error> {
        let fits = match op {
            Op::Read { bytes, .. } | Op::Write { bytes, .. } => {
                bytes as usize <= self.plan.slot_bytes
                    && (bytes as usize).div_ceil(self.piece_bytes) + 2 <= self.parts.capacity()
            }
            _ => true,
        };
        match self.slots.get_mut(usize::from(slot)) {
            Some(free @ None) if fits => *free = Some(op),
            _ => return Err(Error::Unusable(format!("slot {slot} can't take {op:?}"))),
        }
        self.in_flight += 1;
        self.add(slot, op);
        Ok(())
    }

    fn kick(&mut self) -> Result<(), Error> {
        if self.plan.ring.publish(&self.memory) {
            self.kick.raise();
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<DiskCompletion>) -> Result<usize, Error> {
        let mut ended = 0;
        while let Some(slot) = self.plan.ring.pop(&self.memory)? {
            let op = self.slots.get_mut(usize::from(slot)).and_then(Option::take);
            if op.is_none() {
                let what = format!("the request in slot {slot} ended but is not in flight");
                return Err(Error::Protocol(what));
            }
            let mut status = [0];
            self.memory.read(self.control(slot) + STATUS, &mut status);
            let ended_so = match status[0] {
                0 => DiskStatus::Well,
                NO_STATUS => {
                    let what = format!("the request in slot {slot} ended without a status");
                    return Err(Error::Protocol(what));
                }
                status => DiskStatus::Virtio(status),
            };
            done.push(DiskCompletion {
                slot,
                ended: ended_so,
            });
            self.in_flight -= 1;
            ended += 1;
        }
        if ended > 0 {
            // The event index follows the seen index.
            self.plan.ring.disarm(&self.memory);
        }
        Ok(ended)
    }

    fn wait(&mut self, limit: Duration) -> Result<(), Error> {
        if !self.interrupts {
            return Err(Error::Unusable("a queue without interrupts".into()));
        }
        if self.plan.ring.arm(&self.memory) {
            self.call.wait(limit)?;
        }
        self.plan.ring.disarm(&self.memory);
        Ok(())
    }
}
