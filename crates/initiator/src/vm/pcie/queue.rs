//! A queue pair of an NVMe controller: Base 4 (queues), 3.1.3.4 (doorbells), 5.8 (Doorbell Buffer
//! Config).
//!
//! A command identifier is the slot's number below a use count, which detects repeated or late
//! completions. Each slot has a page for a PRP list or SGL.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_nvme::host::command;
use forebay_nvme::{Cqe, SglDescriptor, Sqe};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::super::event::EventFd;
use super::super::memory::{Allotment, MappedMemory, PAGE_BYTES};
use super::super::{DiskCompletion, DiskStatus, Error, Op, Options, Queue};
use super::message::{VfioClient, region};

/// Bits of a command identifier that hold the slot.
const SLOT_BITS: u32 = 10;
const SQE_BYTES: usize = 64;
const CQE_BYTES: usize = 16;
/// Offset of the doorbells in BAR 0 (Base 3.1.2).
pub(super) const DOORBELLS: u64 = 0x1000;
const NSID: u32 = 1;

/// Offsets of a queue's parts in memory.
#[derive(Debug)]
pub(super) struct QueuePlan {
    pub(super) entries: u16,
    pub(super) submission: usize,
    pub(super) completion: usize,
    lists: usize,
    ranges: usize,
    data: usize,
    slot_bytes: usize,
}

impl QueuePlan {
    pub(super) fn new(options: &Options, layout: &mut Allotment) -> Self {
        let depth = usize::from(options.depth);
        let entries = depth + 1;
        let slot_bytes = options.slot_bytes.next_multiple_of(PAGE_BYTES);
        Self {
            entries: entries as u16,
            submission: layout.take(entries * SQE_BYTES, PAGE_BYTES),
            completion: layout.take(entries * CQE_BYTES, PAGE_BYTES),
            lists: layout.take(depth * PAGE_BYTES, PAGE_BYTES),
            ranges: layout.take(depth * command::DSM_RANGE_BYTES, 16),
            data: layout.take(depth * slot_bytes, PAGE_BYTES),
            slot_bytes,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Bell {
    Message,
    /// The controller's event index says when it needs a message.
    Shadow {
        doorbells: usize,
        events: usize,
    },
    /// The controller polls this page.
    Mapped(Arc<MappedMemory>),
}

#[derive(Clone, Debug)]
pub(super) struct Wire {
    pub(super) client: Arc<Mutex<VfioClient>>,
    pub(super) memory: Arc<MappedMemory>,
    pub(super) bell: Bell,
    /// Bytes between doorbells.
    pub(super) stride: usize,
}

impl Wire {
    pub(super) fn client(&self) -> std::sync::MutexGuard<'_, VfioClient> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `index` is twice the queue's number, plus one for completion queues.
    fn ring(&self, index: usize, old: u16, new: u16) -> Result<(), Error> {
        let at = index * self.stride;
        match &self.bell {
            Bell::Mapped(page) => {
                page.store32(at, new.into());
                return Ok(());
            }
            Bell::Shadow { doorbells, events } => {
                self.memory.store32(doorbells + at, new.into());
                fence(Ordering::SeqCst);
                let event = self.memory.load32(events + at) as u16;
                let passes = new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old);
                if !passes {
                    return Ok(());
                }
            }
            Bell::Message => {}
        }
        let offset = DOORBELLS + at as u64;
        self.client().post(region::BAR0, offset, new.into())
    }
}

/// Rings without slots, as admin queues are.
#[derive(Debug)]
pub(super) struct Pair {
    wire: Wire,
    qid: u16,
    entries: u16,
    submission: usize,
    completion: usize,
    tail: u16,
    rung: u16,
    head: u16,
    phase: bool,
}

impl Pair {
    pub(super) fn new(wire: Wire, qid: u16, entries: u16, places: (usize, usize)) -> Self {
        Self {
            wire,
            qid,
            entries,
            submission: places.0,
            completion: places.1,
            tail: 0,
            rung: 0,
            head: 0,
            phase: true,
        }
    }

    pub(super) fn push(&mut self, sqe: &Sqe) {
        let place = self.submission + usize::from(self.tail) * SQE_BYTES;
        self.wire.memory.write(place, sqe.as_bytes());
        self.tail = (self.tail + 1) % self.entries;
    }

    pub(super) fn ring(&mut self) -> Result<(), Error> {
        if self.tail == self.rung {
            return Ok(());
        }
        let old = std::mem::replace(&mut self.rung, self.tail);
        fence(Ordering::Release);
        self.wire.ring(2 * usize::from(self.qid), old, self.tail)
    }

    /// [`Pair::ring_completions`] frees the entry.
    pub(super) fn pop(&mut self) -> Option<Cqe> {
        let place = self.completion + usize::from(self.head) * CQE_BYTES;
        let last = self.wire.memory.load32(place + 12);
        if (last >> 16 & 1 != 0) != self.phase {
            return None;
        }
        let mut bytes = [0; CQE_BYTES];
        self.wire.memory.read(place, &mut bytes);
        self.head += 1;
        if self.head == self.entries {
            self.head = 0;
            self.phase = !self.phase;
        }
        Cqe::read_from_bytes(&bytes).ok()
    }

    pub(super) fn ring_completions(&mut self, old: u16) -> Result<(), Error> {
        self.wire
            .ring(2 * usize::from(self.qid) + 1, old, self.head)
    }

    pub(super) fn head(&self) -> u16 {
        self.head
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct QueueSlot {
    cid: u16,
    busy: bool,
}

/// A pair of I/O queues.
#[derive(Debug)]
pub struct PcieQueue {
    pair: Pair,
    memory: Arc<MappedMemory>,
    plan: QueuePlan,
    block_bytes: u32,
    slots: Vec<QueueSlot>,
    in_flight: u16,
    event: Option<EventFd>,
    sgl: bool,
}

impl PcieQueue {
    pub(super) fn new(
        wire: Wire,
        qid: u16,
        plan: QueuePlan,
        block_bytes: u32,
        options: &Options,
        event: Option<EventFd>,
    ) -> Self {
        let depth = options.depth;
        let memory = Arc::clone(&wire.memory);
        let places = (plan.submission, plan.completion);
        let slots = (0..depth).map(|cid| QueueSlot { cid, busy: false });
        Self {
            pair: Pair::new(wire, qid, plan.entries, places),
            memory,
            plan,
            block_bytes,
            slots: slots.collect(),
            in_flight: 0,
            event,
            sgl: options.sgl,
        }
    }

    fn data(&self, slot: u16) -> usize {
        self.plan.data + usize::from(slot) * self.plan.slot_bytes
    }

    /// The SGL of the slot's data (Base 4.1.2): one block, or a segment of three.
    fn scattered(&self, slot: u16, bytes: u32) -> SglDescriptor {
        let data = self.data(slot);
        let block = |at: u32, length: u32| SglDescriptor {
            address: U64::new(self.memory.guest(data + at as usize)),
            length: U32::new(length),
            reserved: [0; 3],
            kind: SglDescriptor::DATA_BLOCK_ADDRESS,
        };
        let page = PAGE_BYTES as u32;
        if bytes <= 3 * page {
            return block(0, bytes);
        }
        let list = self.plan.lists + usize::from(slot) * PAGE_BYTES;
        let blocks = [
            block(0, page),
            block(page, 2 * page),
            block(3 * page, bytes - 3 * page),
        ];
        self.memory.write(list, blocks.as_bytes());
        SglDescriptor {
            address: U64::new(self.memory.guest(list)),
            length: U32::new(size_of_val(&blocks) as u32),
            reserved: [0; 3],
            kind: SglDescriptor::LAST_SEGMENT,
        }
    }

    /// PRP 1 and 2 of the slot's data (Base 4.1.1).
    fn prps(&self, slot: u16, bytes: u32) -> [u64; 2] {
        let data = self.data(slot);
        let pages = (bytes as usize).div_ceil(PAGE_BYTES);
        let page = |i: usize| self.memory.guest(data + i * PAGE_BYTES);
        match pages {
            0 => [0, 0],
            1 => [page(0), 0],
            2 => [page(0), page(1)],
            _ => {
                let list = self.plan.lists + usize::from(slot) * PAGE_BYTES;
                for i in 1..pages {
                    self.memory
                        .write(list + (i - 1) * 8, &page(i).to_le_bytes());
                }
                [page(0), self.memory.guest(list)]
            }
        }
    }
}

impl Queue for PcieQueue {
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
        let block = self.block_bytes;
        let (lba, bytes) = match op {
            Op::Flush => (0, block),
            Op::Read {
                offset_bytes,
                bytes,
            }
            | Op::Write {
                offset_bytes,
                bytes,
            }
            | Op::Discard {
                offset_bytes,
                bytes,
            }
            | Op::WriteZeroes {
                offset_bytes,
                bytes,
            } => (offset_bytes / u64::from(block), bytes),
        };
        let blocks = bytes / block;
        let has_data = matches!(op, Op::Read { .. } | Op::Write { .. });
        let fits = bytes.is_multiple_of(block)
            && blocks > 0
            && (!has_data || bytes as usize <= self.plan.slot_bytes);
        let free = self
            .slots
            .get_mut(usize::from(slot))
            .filter(|s| fits && !s.busy);
        let Some(free) = free else {
            return Err(Error::Unusable(format!("slot {slot} can't take {op:?}")));
        };
        free.busy = true;
        let cid = free.cid;
        self.in_flight += 1;
        let (mut sqe, prps) = match op {
            Op::Read { .. } => (command::read(NSID, lba, blocks), self.prps(slot, bytes)),
            Op::Write { .. } => (
                command::write(NSID, lba, blocks, false),
                self.prps(slot, bytes),
            ),
            Op::Flush => (command::flush(NSID), [0, 0]),
            Op::WriteZeroes { .. } => (command::write_zeroes(NSID, lba, blocks, false), [0, 0]),
            Op::Discard { .. } => {
                let place = self.plan.ranges + usize::from(slot) * command::DSM_RANGE_BYTES;
                self.memory.write(place, &command::dsm_range(lba, blocks));
                (command::deallocate(NSID, 1), [self.memory.guest(place), 0])
            }
        };
        sqe.cid = U16::new(cid);
        sqe.dptr = data_pointer(prps);
        if has_data && self.sgl {
            sqe = sqe.with_sgl(self.scattered(slot, bytes));
        }
        self.pair.push(&sqe);
        Ok(())
    }

    fn kick(&mut self) -> Result<(), Error> {
        self.pair.ring()
    }

    fn poll(&mut self, done: &mut Vec<DiskCompletion>) -> Result<usize, Error> {
        let before = self.pair.head();
        let mut ended = 0;
        while let Some(cqe) = self.pair.pop() {
            let number = cqe.cid() & ((1 << SLOT_BITS) - 1);
            let slot = self.slots.get_mut(usize::from(number));
            let Some(slot) = slot.filter(|slot| slot.busy && slot.cid == cqe.cid()) else {
                return Err(Error::Protocol(format!(
                    "command {:#x} ended but is not in flight",
                    cqe.cid()
                )));
            };
            slot.busy = false;
            slot.cid = slot.cid.wrapping_add(1 << SLOT_BITS);
            let status = cqe.status();
            done.push(DiskCompletion {
                slot: number,
                ended: if status.is_success() {
                    DiskStatus::Well
                } else {
                    DiskStatus::Nvme(status)
                },
            });
            ended += 1;
            self.in_flight -= 1;
            if ended == usize::from(self.plan.entries) - 1 {
                break;
            }
        }
        if ended > 0 {
            self.pair.ring_completions(before)?;
        }
        Ok(ended)
    }

    fn wait(&mut self, limit: Duration) -> Result<(), Error> {
        let event = self.event.as_ref();
        let event = event.ok_or_else(|| Error::Unusable("a queue without interrupts".into()))?;
        event.wait(limit).map(drop)
    }
}

pub(super) fn data_pointer(prps: [u64; 2]) -> [u8; 16] {
    let mut pointer = [0; 16];
    pointer[..8].copy_from_slice(&prps[0].to_le_bytes());
    pointer[8..].copy_from_slice(&prps[1].to_le_bytes());
    pointer
}
