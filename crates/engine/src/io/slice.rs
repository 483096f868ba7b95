//! The slices in flight, and the revokes that wait for them.
//!
//! **Design.** The ring names a slice by its fixed place. Slices are numbered as they begin: a
//! revoke waits for overlapping ones below a number. **Not here:** how slices are made
//! ([`crate::io::submit`]).

use crate::io::devices::{DeviceRing, kind};
use crate::upcall::Upcall;
use forebay_device::{Errno, Finish, Op, Submitted};
use forebay_xlate::drain::{Drains, SliceSpan};
use forebay_xlate::{ExtentRange, VolumeId};
use std::collections::VecDeque;

pub(crate) const MAX_SLICES: usize = 8192;

/// The part of a command that is contiguous on one device.
#[derive(Debug)]
pub(crate) struct Slice {
    pub(crate) io: u32,
    pub(crate) device: u8,
    pub(crate) bounced: bool,
    /// Carried out by another reactor ([`crate::offload`]).
    pub(crate) remote: bool,
    /// 0 unless its delay is measured ([`crate::qos`]).
    pub(crate) begun_ns: u64,
    pub(crate) op: Op,
    pub(crate) span: SliceSpan,
}

pub(crate) struct Slices {
    table: Vec<Option<Slice>>,
    pub(crate) free: Vec<u32>,
    /// Slices whose rest found no room in the ring.
    pub(crate) again: Vec<u32>,
    /// Slices whose image was closed after their begin.
    pub(crate) not_ready: Vec<u32>,
    drains: Drains,
}

impl Slices {
    pub(crate) fn new() -> Self {
        Self {
            table: (0..MAX_SLICES).map(|_| None).collect(),
            free: (0..MAX_SLICES as u32).rev().collect(),
            again: Vec::with_capacity(MAX_SLICES),
            not_ready: Vec::with_capacity(MAX_SLICES),
            drains: Drains::default(),
        }
    }

    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.free.len()
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        MAX_SLICES - self.free.len()
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&Slice> {
        self.table.get(index)?.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut Slice> {
        self.table.get_mut(index)?.as_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Slice> {
        self.table.iter().flatten()
    }

    #[inline]
    pub(crate) fn number(&mut self) -> u64 {
        self.drains.begin()
    }

    #[inline]
    pub(crate) fn put(&mut self, index: u32, slice: Slice) {
        self.table[index as usize] = Some(slice);
    }

    #[inline]
    pub(crate) fn end(&mut self, index: usize) -> Option<Slice> {
        let slice = self.table[index].take()?;
        self.free.push(index as u32);
        Some(slice)
    }

    #[inline]
    pub(crate) fn drained(&mut self, span: &SliceSpan, upcalls: &mut VecDeque<Upcall>) {
        (self.drains).ended(span, |revoke| upcalls.push_back(Upcall::Drained { revoke }));
    }

    /// Handles a completion; `None` if the slice continues.
    #[inline]
    pub(crate) fn completed(
        &mut self,
        index: usize,
        result: i32,
        devices: &mut DeviceRing,
    ) -> Option<Result<(), Errno>> {
        let slice = self.table.get_mut(index)?.as_mut()?;
        match devices.finish(slice.device, slice.op, result)? {
            Finish::Done => Some(Ok(())),
            Finish::Failed(errno) => Some(Err(errno)),
            Finish::Again(op) => {
                slice.op = op;
                self.queue_again(index, devices)
            }
        }
    }

    /// Submits the rest. Returns the result if it ended at once.
    pub(crate) fn queue_again(
        &mut self,
        index: usize,
        devices: &mut DeviceRing,
    ) -> Option<Result<(), Errno>> {
        let slice = self.table[index].as_mut()?;
        match devices.queue(slice.device, &mut slice.op, kind::SLICE, index as u64)? {
            Submitted::Queued => {}
            Submitted::Done(result) => return Some(result),
            Submitted::RingFull => self.again.push(index as u32),
            Submitted::NotReady => self.not_ready.push(index as u32),
        }
        None
    }

    /// The next turn tries slices again whose image may be ready.
    pub(crate) fn retry_not_ready(&mut self) {
        self.again.append(&mut self.not_ready);
    }

    /// Its words are cleared, or its epoch is set. Answers once overlapping slices have ended.
    pub(crate) fn revoke(
        &mut self,
        revoke: u64,
        volume: VolumeId,
        range: ExtentRange,
        writes_only: bool,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        let in_flight = self.table.iter().flatten().map(|s| s.span);
        if self
            .drains
            .post(revoke, volume, range, writes_only, in_flight)
        {
            upcalls.push_back(Upcall::Drained { revoke });
        }
    }

    /// The owner gave up a revoke.
    pub(crate) fn abandon(&mut self, revoke: u64) {
        self.drains.abandon(revoke);
    }
}
