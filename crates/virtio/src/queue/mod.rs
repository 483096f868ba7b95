//! A virtqueue with its inflight region: what a device works with.
//!
//! **Design.** A chain that is taken has a *tag*, below [`Queue::size`] and different from those of all others in flight.
//! It is put back with its tag, in any order; what was put is shown to the driver together ([`Queue::publish`]). Made on
//! a region that another device left, a queue begins with what that one had taken and not returned
//! ([`Queue::next_left`]). Nothing here allocates once the queue is made.

use crate::inflight::packed::{PackedRegion, Taken};
use crate::inflight::split::SplitRegion;
use crate::ring::packed::{Packed, Position};
use crate::ring::split::Split;
use crate::ring::{Chain, MAX_QUEUE_SIZE, RingError, RingFeatures, Window, Windows};
use forebay_guest::GuestMemory;
use std::collections::VecDeque;

/// What a queue is made of.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Where the ring lies.
    pub windows: Windows,
    /// Descriptors.
    pub size: u16,
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    /// How the ring works.
    pub features: RingFeatures,
    /// Where it goes on, as SET_VRING_BASE has it; an inflight region that was in use knows better.
    pub base: u32,
    /// The inflight region of this queue: all zeros if nobody used it yet.
    pub inflight: Window,
}

/// See the module's text.
pub struct Queue {
    ring: QueueRing,
    /// What a dead device left, oldest first.
    left: VecDeque<u16>,
    in_flight: u16,
}

enum QueueRing {
    Split {
        ring: Split,
        region: SplitRegion,
        /// Which heads are in flight.
        busy: Box<[bool]>,
        batch: Vec<u16>,
    },
    Packed {
        ring: Packed,
        region: PackedRegion,
        /// By entry of the region.
        taken: Box<[Option<Taken>]>,
        batch: Vec<Taken>,
    },
}

impl Queue {
    /// A queue that goes on where its predecessor, if it had one, was.
    ///
    /// # Errors
    /// It can't be served.
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
            // What was taken is either used or in flight.
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

    /// The ring lies elsewhere in our address space from now on; its words are the same.
    ///
    /// # Errors
    /// It can't be served there.
    pub fn move_to(&mut self, windows: Windows) -> Result<(), RingError> {
        match &mut self.ring {
            QueueRing::Split { ring, .. } => ring.move_to(windows),
            QueueRing::Packed { ring, .. } => ring.move_to(windows),
        }
    }

    /// How many descriptors, and so how many chains at most, it has.
    pub const fn size(&self) -> u16 {
        match &self.ring {
            QueueRing::Split { ring, .. } => ring.size(),
            QueueRing::Packed { ring, .. } => ring.size(),
        }
    }

    /// Chains that are taken and not put back.
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

    /// Takes the next available chain; its tag.
    ///
    /// # Errors
    /// The queue is broken.
    #[inline]
    pub fn take(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<u16>, RingError> {
        // A place of what is put must not be taken again before the driver sees that.
        self.publish();
        let tag = match &mut self.ring {
            QueueRing::Split {
                ring, region, busy, ..
            } => {
                let Some(head) = ring.take(memory, chain)? else {
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
                if (ring.take(memory, room, chain, |raw| region.note(raw))?).is_none() {
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

    /// The next chain that a dead device left, and its pieces; it is in flight already.
    ///
    /// # Errors
    /// The queue is broken.
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

    /// How many chains a dead device left that were not asked for yet.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// They, oldest first.
    pub fn all_left(&self) -> impl Iterator<Item = u16> {
        self.left.iter().copied()
    }

    /// Reads the pieces of a chain in flight again.
    ///
    /// # Errors
    /// The queue is broken: a guest may have changed what it had made available.
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

    /// Puts a chain back, with so many bytes written to it. The driver sees it with [`Queue::publish`]. A tag that is not
    /// in flight is ignored.
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

    /// Shows the driver all that was put; true if that was anything.
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

    /// Whether the driver wants to be told of what was published since this was last asked.
    #[inline]
    pub fn wants_call(&mut self) -> bool {
        match &mut self.ring {
            QueueRing::Split { ring, .. } => ring.wants_call(),
            QueueRing::Packed { ring, .. } => ring.wants_call(),
        }
    }

    /// Asks for kicks; true if there is a chain already.
    ///
    /// # Errors
    /// The queue is broken.
    pub fn arm(&mut self) -> Result<bool, RingError> {
        match &mut self.ring {
            QueueRing::Split { ring, .. } => ring.arm(),
            QueueRing::Packed { ring, .. } => Ok(ring.arm()),
        }
    }

    /// Asks for no kicks: the ring is looked at anyway.
    pub fn disarm(&mut self) {
        match &mut self.ring {
            QueueRing::Split { ring, .. } => ring.disarm(),
            QueueRing::Packed { ring, .. } => ring.disarm(),
        }
    }

    /// Where it goes on, as GET_VRING_BASE has it. Meant for a queue with nothing in flight.
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
