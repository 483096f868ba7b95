//! The driver's side of split and packed virtqueues (virtio 1.2, sections 2.7 and 2.8).
//!
//! A slot owns a part of a split ring's table, and its number is the packed buffer id. So there is
//! no free list, and used chains are checked against the slots in flight.

use std::sync::atomic::{Ordering, fence};

use super::super::Error;
use super::super::memory::{Allotment, MappedMemory};

const DESCRIPTOR_BYTES: usize = 16;
const NEXT: u16 = 1;
const DEVICE_WRITES: u16 = 2;
const INDIRECT: u16 = 4;
/// Of a packed descriptor.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Of a packed ring's event suppression.
const EVENTS_OFF: u16 = 1;
const EVENTS_AT: u16 = 2;

#[derive(Clone, Copy, Debug)]
pub(super) struct ChainPiece {
    pub(super) guest: u64,
    pub(super) bytes: u32,
    pub(super) device_writes: bool,
}

impl ChainPiece {
    fn flags(self, more: bool) -> u16 {
        let writes = if self.device_writes { DEVICE_WRITES } else { 0 };
        writes | if more { NEXT } else { 0 }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) depth: u16,
    /// Descriptors of the longest chain.
    pub(super) chain: u16,
    pub(super) indirect: bool,
    pub(super) event_idx: bool,
}

impl Shape {
    /// Ring descriptors of a slot.
    fn stride(self) -> u16 {
        if self.indirect { 1 } else { self.chain }
    }

    fn entries(self) -> u16 {
        (self.depth * self.stride()).next_power_of_two().max(2)
    }
}

#[derive(Debug)]
pub(super) enum AnyRing {
    Split(Split),
    Packed(Packed),
}

impl AnyRing {
    pub(super) fn new(packed: bool, shape: Shape, layout: &mut Allotment) -> Self {
        if packed {
            Self::Packed(Packed::new(shape, layout))
        } else {
            Self::Split(Split::new(shape, layout))
        }
    }

    pub(super) fn entries(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.entries,
            Self::Packed(ring) => ring.entries,
        }
    }

    /// Offsets of descriptor, driver and device areas.
    pub(super) fn places(&self) -> [usize; 3] {
        match self {
            Self::Split(ring) => [ring.table, ring.avail, ring.used],
            Self::Packed(ring) => [ring.table, ring.driver, ring.device],
        }
    }

    /// For SET_VRING_BASE: the position of a device that completed everything it marked as used.
    pub(super) fn base(&self, memory: &MappedMemory) -> u32 {
        match self {
            Self::Split(ring) => memory.load16(ring.used + 2).into(),
            Self::Packed(ring) => {
                let at = u32::from(ring.seen) | u32::from(ring.seen_wrap) << 15;
                at | at << 16
            }
        }
    }

    pub(super) fn reset(&mut self, memory: &MappedMemory) {
        match self {
            Self::Split(ring) => ring.reset(memory),
            Self::Packed(ring) => ring.reset(memory),
        }
    }

    /// `table` is the slot's place for an indirect table.
    pub(super) fn add(
        &mut self,
        memory: &MappedMemory,
        slot: u16,
        table: usize,
        parts: &[ChainPiece],
    ) {
        match self {
            Self::Split(ring) => ring.add(memory, slot, table, parts),
            Self::Packed(ring) => ring.add(memory, slot, table, parts),
        }
    }

    /// True: the device wants a kick.
    pub(super) fn publish(&mut self, memory: &MappedMemory) -> bool {
        match self {
            Self::Split(ring) => ring.publish(memory),
            Self::Packed(ring) => ring.publish(memory),
        }
    }

    /// The slot of a used chain.
    pub(super) fn pop(&mut self, memory: &MappedMemory) -> Result<Option<u16>, Error> {
        match self {
            Self::Split(ring) => ring.pop(memory),
            Self::Packed(ring) => ring.pop(memory),
        }
    }

    /// False: a chain is used already.
    pub(super) fn arm(&mut self, memory: &MappedMemory) -> bool {
        match self {
            Self::Split(ring) => ring.arm(memory),
            Self::Packed(ring) => ring.arm(memory),
        }
    }

    pub(super) fn disarm(&mut self, memory: &MappedMemory) {
        match self {
            Self::Split(ring) => ring.disarm(memory),
            Self::Packed(ring) => ring.disarm(memory),
        }
    }
}

/// Virtio 2.7.10.
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn put(memory: &MappedMemory, place: usize, part: ChainPiece, last: [u16; 2]) {
    let mut descriptor = [0; DESCRIPTOR_BYTES];
    descriptor[..8].copy_from_slice(&part.guest.to_le_bytes());
    descriptor[8..12].copy_from_slice(&part.bytes.to_le_bytes());
    descriptor[12..14].copy_from_slice(&last[0].to_le_bytes());
    descriptor[14..].copy_from_slice(&last[1].to_le_bytes());
    memory.write(place, &descriptor);
}

fn table_part(memory: &MappedMemory, table: usize, parts: &[ChainPiece]) -> ChainPiece {
    ChainPiece {
        guest: memory.guest(table),
        bytes: (parts.len() * DESCRIPTOR_BYTES) as u32,
        device_writes: false,
    }
}

#[derive(Debug)]
pub(super) struct Split {
    shape: Shape,
    entries: u16,
    table: usize,
    avail: usize,
    used: usize,
    /// The next available index, and the published one.
    next: u16,
    published: u16,
    /// The next used index.
    seen: u16,
}

impl Split {
    fn new(shape: Shape, layout: &mut Allotment) -> Self {
        let entries = shape.entries();
        let n = usize::from(entries);
        Self {
            shape,
            entries,
            table: layout.take(n * DESCRIPTOR_BYTES, 4096),
            avail: layout.take(6 + 2 * n, 64),
            used: layout.take(6 + 8 * n, 64),
            next: 0,
            published: 0,
            seen: 0,
        }
    }

    fn reset(&mut self, memory: &MappedMemory) {
        memory.store16(self.avail + 2, 0);
        memory.store16(self.used + 2, 0);
        (self.next, self.published, self.seen) = (0, 0, 0);
    }

    fn add(&mut self, memory: &MappedMemory, slot: u16, table: usize, parts: &[ChainPiece]) {
        let head = slot * self.shape.stride();
        let at = |index: u16| self.table + usize::from(index) * DESCRIPTOR_BYTES;
        if self.shape.indirect {
            for (i, &part) in (1..).zip(parts) {
                let place = table + (usize::from(i) - 1) * DESCRIPTOR_BYTES;
                let flags = part.flags(usize::from(i) < parts.len());
                put(memory, place, part, [flags, i]);
            }
            put(
                memory,
                at(head),
                table_part(memory, table, parts),
                [INDIRECT, 0],
            );
        } else {
            for (i, &part) in (1..).zip(parts) {
                let flags = part.flags(usize::from(i) < parts.len());
                put(memory, at(head + i - 1), part, [flags, head + i]);
            }
        }
        let entry = usize::from(self.next % self.entries);
        memory.store16(self.avail + 4 + 2 * entry, head);
        self.next = self.next.wrapping_add(1);
    }

    fn publish(&mut self, memory: &MappedMemory) -> bool {
        let (old, new) = (self.published, self.next);
        if old == new {
            return false;
        }
        memory.store16(self.avail + 2, new);
        self.published = new;
        fence(Ordering::SeqCst);
        if self.shape.event_idx {
            let event = memory.load16(self.used + 4 + 8 * usize::from(self.entries));
            passes(event, new, old)
        } else {
            memory.load16(self.used) & 1 == 0
        }
    }

    fn pop(&mut self, memory: &MappedMemory) -> Result<Option<u16>, Error> {
        if memory.load16(self.used + 2) == self.seen {
            return Ok(None);
        }
        let entry = usize::from(self.seen % self.entries);
        let id = memory.load32(self.used + 4 + 8 * entry);
        self.seen = self.seen.wrapping_add(1);
        let stride = u32::from(self.shape.stride());
        match u16::try_from(id / stride) {
            Ok(slot) if id.is_multiple_of(stride) => Ok(Some(slot)),
            _ => Err(Error::Protocol(format!(
                "descriptor {id} was returned but is not the first of a chain"
            ))),
        }
    }

    fn arm(&mut self, memory: &MappedMemory) -> bool {
        memory.store16(self.avail, 0);
        self.set_used_event(memory, self.seen);
        fence(Ordering::SeqCst);
        memory.load16(self.used + 2) == self.seen
    }

    fn disarm(&mut self, memory: &MappedMemory) {
        memory.store16(self.avail, 1);
        // An index in the past, which no step passes.
        self.set_used_event(memory, self.seen.wrapping_sub(1));
    }

    fn set_used_event(&self, memory: &MappedMemory, index: u16) {
        if self.shape.event_idx {
            memory.store16(self.avail + 4 + 2 * usize::from(self.entries), index);
        }
    }
}

#[derive(Debug)]
pub(super) struct Packed {
    shape: Shape,
    entries: u16,
    table: usize,
    driver: usize,
    device: usize,
    /// The next descriptor to make available, and those added since the last publication.
    next: u16,
    wrap: bool,
    added: u16,
    /// The next descriptor to be used.
    seen: u16,
    seen_wrap: bool,
    /// Descriptors of each slot's chain.
    chains: Vec<u16>,
}

impl Packed {
    fn new(shape: Shape, layout: &mut Allotment) -> Self {
        let entries = shape.entries();
        Self {
            shape,
            entries,
            table: layout.take(usize::from(entries) * DESCRIPTOR_BYTES, 4096),
            driver: layout.take(4, 64),
            device: layout.take(4, 64),
            next: 0,
            wrap: true,
            added: 0,
            seen: 0,
            seen_wrap: true,
            chains: vec![0; usize::from(shape.depth)],
        }
    }

    fn reset(&mut self, memory: &MappedMemory) {
        for entry in 0..usize::from(self.entries) {
            memory.write(self.table + entry * DESCRIPTOR_BYTES, &[0; 16]);
        }
        (self.next, self.wrap, self.added) = (0, true, 0);
        (self.seen, self.seen_wrap) = (0, true);
    }

    fn add(&mut self, memory: &MappedMemory, slot: u16, table: usize, parts: &[ChainPiece]) {
        let indirect;
        let (parts, extra) = if self.shape.indirect {
            for (i, &part) in parts.iter().enumerate() {
                // An indirect table is in order and needs no NEXT flag.
                let flags = part.flags(false);
                put(memory, table + i * DESCRIPTOR_BYTES, part, [slot, flags]);
            }
            indirect = [table_part(memory, table, parts)];
            (&indirect[..], INDIRECT)
        } else {
            (parts, 0)
        };
        let first = self.next;
        let mut first_flags = 0;
        for (i, &part) in parts.iter().enumerate() {
            let turn = if self.wrap { AVAIL } else { USED };
            let flags = part.flags(i + 1 < parts.len()) | extra | turn;
            let place = self.table + usize::from(self.next) * DESCRIPTOR_BYTES;
            if i == 0 {
                // The first descriptor is made available last.
                first_flags = flags;
                let mut head = [0; 14];
                head[..8].copy_from_slice(&part.guest.to_le_bytes());
                head[8..12].copy_from_slice(&part.bytes.to_le_bytes());
                head[12..].copy_from_slice(&slot.to_le_bytes());
                memory.write(place, &head);
            } else {
                put(memory, place, part, [slot, flags]);
            }
            (self.next, self.wrap) = self.step(self.next, self.wrap, 1);
        }
        if let Some(chain) = self.chains.get_mut(usize::from(slot)) {
            *chain = parts.len() as u16;
        }
        self.added += parts.len() as u16;
        let place = self.table + usize::from(first) * DESCRIPTOR_BYTES;
        memory.store16(place + 14, first_flags);
    }

    fn step(&self, at: u16, wrap: bool, by: u16) -> (u16, bool) {
        let next = at + by;
        if next >= self.entries {
            (next - self.entries, !wrap)
        } else {
            (next, wrap)
        }
    }

    fn publish(&mut self, memory: &MappedMemory) -> bool {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        fence(Ordering::SeqCst);
        let event = memory.load32(self.device);
        match (event >> 16) as u16 & 3 {
            EVENTS_OFF => false,
            EVENTS_AT => {
                let index = event as u16 & 0x7fff;
                let wrap = event & 1 << 15 != 0;
                let index = if wrap == self.wrap {
                    index
                } else {
                    index.wrapping_sub(self.entries)
                };
                passes(index, self.next, self.next.wrapping_sub(added))
            }
            _ => true,
        }
    }

    fn is_used(&self, memory: &MappedMemory) -> bool {
        let place = self.table + usize::from(self.seen) * DESCRIPTOR_BYTES;
        let flags = memory.load16(place + 14);
        let (avail, used) = (flags & AVAIL != 0, flags & USED != 0);
        avail == used && used == self.seen_wrap
    }

    fn pop(&mut self, memory: &MappedMemory) -> Result<Option<u16>, Error> {
        if !self.is_used(memory) {
            return Ok(None);
        }
        let place = self.table + usize::from(self.seen) * DESCRIPTOR_BYTES;
        let slot = memory.load16(place + 12);
        let chain = self.chains.get_mut(usize::from(slot));
        let chain = chain.map(std::mem::take).filter(|&chain| chain > 0);
        let chain = chain.ok_or_else(|| {
            Error::Protocol(format!("buffer {slot} was returned but is not in flight"))
        })?;
        (self.seen, self.seen_wrap) = self.step(self.seen, self.seen_wrap, chain);
        Ok(Some(slot))
    }

    fn arm(&mut self, memory: &MappedMemory) -> bool {
        if self.shape.event_idx {
            let at = self.seen | u16::from(self.seen_wrap) << 15;
            memory.store16(self.driver, at);
            memory.store16(self.driver + 2, EVENTS_AT);
        } else {
            memory.store16(self.driver + 2, 0);
        }
        fence(Ordering::SeqCst);
        !self.is_used(memory)
    }

    fn disarm(&mut self, memory: &MappedMemory) {
        memory.store16(self.driver + 2, EVENTS_OFF);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_passed_once() {
        assert!(passes(5, 6, 5));
        assert!(!passes(6, 6, 5));
        assert!(!passes(4, 6, 5));
        assert!(passes(u16::MAX, 0, u16::MAX));
    }

    /// The device returns everything at once, in ring order.
    #[test]
    fn a_packed_ring_wraps() {
        let mut layout = Allotment::default();
        let shape = Shape {
            depth: 3,
            chain: 2,
            indirect: false,
            event_idx: true,
        };
        let mut ring = Packed::new(shape, &mut layout);
        let memory = MappedMemory::new(layout.bytes(), false).unwrap();
        let part = ChainPiece {
            guest: 1,
            bytes: 2,
            device_writes: false,
        };
        let (mut at, mut wrap) = (0, true);
        for round in 0..50u16 {
            let slot = round % 3;
            ring.add(&memory, slot, 0, &[part, part]);
            assert!(ring.pop(&memory).unwrap().is_none());
            let place = ring.table + usize::from(at) * DESCRIPTOR_BYTES;
            let flags = memory.load16(place + 14);
            assert_eq!(flags & AVAIL != 0, wrap, "round {round}");
            assert_eq!(flags & USED != 0, !wrap, "round {round}");
            memory.store16(place + 12, slot);
            memory.store16(place + 14, if wrap { AVAIL | USED } else { 0 });
            (at, wrap) = ring.step(at, wrap, 2);
            assert_eq!(ring.pop(&memory).unwrap(), Some(slot));
        }
    }

    #[test]
    fn completions_of_unsent_requests_are_detected() {
        let mut layout = Allotment::default();
        let shape = Shape {
            depth: 4,
            chain: 3,
            indirect: false,
            event_idx: false,
        };
        let mut split = Split::new(shape, &mut layout);
        let mut packed = Packed::new(shape, &mut layout);
        let memory = MappedMemory::new(layout.bytes(), false).unwrap();
        memory.store32(split.used + 4, 4);
        memory.store16(split.used + 2, 1);
        assert!(split.pop(&memory).is_err());
        memory.store16(packed.table + 14, AVAIL | USED);
        assert!(packed.pop(&memory).is_err());
    }
}
