//! A virtqueue with its inflight region.
//!
//! A chain in flight has a unique *tag* below [`Queue::size`]. Returned chains become visible
//! together ([`Queue::publish`]). On a dead device's region, a queue begins with the outstanding
//! chains ([`Queue::next_left`]).

use crate::inflight::packed::{PackedRegion, Taken};
use crate::inflight::split::SplitRegion;
use crate::ring::packed::{Packed, Position};
use crate::ring::split::Split;
use crate::ring::{Chain, MAX_QUEUE_SIZE, RingError, RingFeatures, Window, Windows};
use forebay_guest::GuestMemory;
use std::collections::VecDeque;

/// The parts of a queue.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// The ring.
    pub windows: Windows,
    /// Number of descriptors.
    pub size: u16,
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    /// Negotiated ring features.
    pub features: RingFeatures,
    /// Start position, as in SET_VRING_BASE; a used inflight region overrides it.
    pub base: u32,
    /// Its inflight region; all zeros if new.
    pub inflight: Window,
}

/// See the module.
pub struct Queue {
    ring: QueueRing,
    /// Outstanding chains of a dead device, oldest first.
    left: VecDeque<u16>,
    in_flight: u16,
}

enum QueueRing {
    Split {
        ring: Split,
        region: SplitRegion,
        busy: Box<[bool]>,
        batch: Vec<u16>,
    },
    Packed {
        ring: Packed,
        region: PackedRegion,
        /// By the region's entry.
        taken: Box<[Option<Taken>]>,
        batch: Vec<Taken>,
    },
}

impl Queue {
    /// A new queue, or one that continues after a dead device.
    pub fn new(config: &QueueConfig) -> Result<Self, RingError> {
        if config.size == 0 || config.size > MAX_QUEUE_SIZE {
            return Err(RingError::Size);
        }
        if config.packed {
            Self::packed(config)
        } else {
            Self::split(config)
        }
    }

    fn split(config: &QueueConfig) -> Result<Self, RingError> {
        let size = config.size;
        let had_one = config.inflight.load_u16(8) != 0;
        let mut ring = Split::new(
            config.windows.clone(),
            size,
            config.features,
            config.base as u16,
        )?;
        let mut region = SplitRegion::new(config.inflight.clone(), size)?;
        let left = VecDeque::from(region.recover(ring.published()));
        let mut busy = vec![false; usize::from(size)].into_boxed_slice();
        for head in &left {
            busy[usize::from(*head)] = true;
        }
        if had_one {
            // Each taken chain is either used or in flight.
            ring.set_next_available(ring.published().wrapping_add(left.len() as u16));
        }
        Ok(Self {
            in_flight: left.len() as u16,
            left,
            ring: QueueRing::Split {
                ring,
                region,
                busy,
                batch: Vec::with_capacity(usize::from(size)),
            },
        })
    }

    fn packed(config: &QueueConfig) -> Result<Self, RingError> {
        let size = config.size;
        let available = Position::of_word(config.base as u16);
        let used = Position::of_word((config.base >> 16) as u16);
        let mut ring = Packed::new(
            config.windows.clone(),
            size,
            config.features,
            available,
            used,
        )?;
        let had_one = config.inflight.load_u16(8) != 0;
        let mut region = PackedRegion::new(config.inflight.clone(), size, used)?;
        let chains = region.recover(|at| ring.is_used(at))?;
        if had_one {
            let used = region.used();
            let descriptors: u16 = chains.iter().map(|taken| taken.descriptors).sum();
            ring.set_positions(used.plus(descriptors, size), used);
        }
        let mut taken: Box<[Option<Taken>]> = vec![None; usize::from(size)].into_boxed_slice();
        for chain in &chains {
            taken[usize::from(chain.head)] = Some(*chain);
        }
        Ok(Self {
            in_flight: chains.len() as u16,
            left: chains.iter().map(|taken| taken.head).collect(),
            ring: QueueRing::Packed {
                ring,
                region,
                taken,
                batch: Vec::with_capacity(usize::from(size)),
            },
        })
    }

    /// Remaps the ring; its content is unchanged.
    pub fn move_to(&mut self, windows: Windows) -> Result<(), RingError> {
        match &mut self.ring {
            QueueRing::Split { ring, .. } => ring.move_to(windows),
            QueueRing::Packed { ring, .. } => ring.move_to(windows),
        }
    }

    /// Number of descriptors, and so the most chains.
    pub const fn size(&self) -> u16 {
        match &self.ring {
            QueueRing::Split { ring, .. } => ring.size(),
            QueueRing::Packed { ring, .. } => ring.size(),
        }
    }

    /// Number of chains in flight.
    pub const fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Whether no chain is available.
    #[inline]
    pub fn is_empty(&self) -> bool {
        match &self.ring {
            QueueRing::Split { ring, .. } => ring.is_empty(),
            QueueRing::Packed { ring, .. } => !ring.has_available(),
        }
    }

    /// Takes the next chain; returns its tag.
    #[inline]
    pub fn pop(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<u16>, RingError> {
        // Otherwise a returned chain's place could be taken before the driver sees it.
        self.publish();
        let tag = match &mut self.ring {
            QueueRing::Split {
                ring, region, busy, ..
            } => {
                let Some(head) = ring.pop(memory, chain)? else {
                    return Ok(None);
                };
                let busy = busy
                    .get_mut(usize::from(head))
                    .ok_or(RingError::DescriptorIndex)?;
                if std::mem::replace(busy, true) {
                    return Err(RingError::InUse);
                }
                region.taken(head);
                head
            }
            QueueRing::Packed {
                ring,
                region,
                taken,
                ..
            } => {
                region.begin();
                let room = region.room();
                if (ring.pop(memory, room, chain, |raw| region.note(raw))?).is_none() {
                    return Ok(None);
                }
                let chain = region.taken().ok_or(RingError::Inflight)?;
                *taken
                    .get_mut(usize::from(chain.head))
                    .ok_or(RingError::Inflight)? = Some(chain);
                chain.head
            }
        };
        self.in_flight += 1;
        Ok(Some(tag))
    }

    /// Returns a dead device's next outstanding chain, which is in flight already.
    pub fn next_left(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<u16>, RingError> {
        let Some(tag) = self.left.pop_front() else {
            return Ok(None);
        };
        self.again(tag, memory, chain)?;
        Ok(Some(tag))
    }

    /// Remaining chains of a dead device.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// The remaining chains, oldest first.
    pub fn all_left(&self) -> impl Iterator<Item = u16> {
        self.left.iter().copied()
    }

    /// Rereads a chain in flight. Fails if the guest has changed it.
    pub fn again(
        &mut self,
        tag: u16,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        match &mut self.ring {
            QueueRing::Split { ring, .. } => ring.walk(tag, memory, chain),
            QueueRing::Packed {
                ring,
                region,
                taken,
                ..
            } => match taken.get(usize::from(tag)) {
                Some(Some(taken)) => ring.walk(region.raws(taken), memory, chain),
                _ => Err(RingError::Inflight),
            },
        }
    }

    /// Returns a chain with the number of bytes written; ignores a tag that isn't in flight.
    #[inline]
    pub fn put(&mut self, tag: u16, written_bytes: u32) {
        match &mut self.ring {
            QueueRing::Split {
                ring,
                region,
                busy,
                batch,
            } => {
                let Some(busy) = busy.get_mut(usize::from(tag)) else {
                    return;
                };
                if !std::mem::replace(busy, false) {
                    return;
                }
                ring.put(tag, written_bytes);
                region.put(tag);
                batch.push(tag);
            }
            QueueRing::Packed {
                ring,
                region,
                taken,
                batch,
            } => {
                let Some(chain) = taken.get_mut(usize::from(tag)).and_then(Option::take) else {
                    return;
                };
                ring.put(chain.id, chain.descriptors, written_bytes);
                region.put(&chain);
                batch.push(chain);
            }
        }
        self.in_flight -= 1;
    }

    /// Shows returned chains to the driver; true if there were any.
    #[inline]
    pub fn publish(&mut self) -> bool {
        match &mut self.ring {
            QueueRing::Split {
                ring,
                region,
                batch,
                ..
            } => {
                if batch.is_empty() {
                    return false;
                }
                ring.publish();
                region.published(batch, ring.published());
                batch.clear();
            }
            QueueRing::Packed {
                ring,
                region,
                batch,
                ..
            } => {
                if batch.is_empty() {
                    return false;
                }
                region.close_batch();
                ring.publish();
                region.published(batch);
                batch.clear();
            }
        }
        true
    }

    /// Whether the driver wants a call for chains published since the last check.
    #[inline]
    pub fn wants_call(&mut self) -> bool {
        match &mut self.ring {
            QueueRing::Split { ring, .. } => ring.wants_call(),
            QueueRing::Packed { ring, .. } => ring.wants_call(),
        }
    }

    /// Asks for kicks; true if a chain is available already.
    pub fn arm(&mut self) -> Result<bool, RingError> {
        match &mut self.ring {
            QueueRing::Split { ring, .. } => ring.arm(),
            QueueRing::Packed { ring, .. } => Ok(ring.arm()),
        }
    }

    /// Asks for no kicks while the ring is polled.
    pub fn disarm(&mut self) {
        match &mut self.ring {
            QueueRing::Split { ring, .. } => ring.disarm(),
            QueueRing::Packed { ring, .. } => ring.disarm(),
        }
    }

    /// The position for GET_VRING_BASE, for a queue with nothing in flight.
    pub const fn base(&self) -> u32 {
        match &self.ring {
            QueueRing::Split { ring, .. } => ring.next_available() as u32,
            QueueRing::Packed { ring, .. } => {
                ring.next_available().word() as u32 | (ring.next_used().word() as u32) << 16
            }
        }
    }
}

#[cfg(test)]
mod tests;
