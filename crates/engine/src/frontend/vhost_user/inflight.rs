//! The inflight region: it tells a successor which requests were taken and not returned.
//!
//! It is a memory file with a part per queue. A client that wants to keep it over its own
//! reconnection asks for it and returns it. Otherwise an internal one is made at the first message,
//! whose answer waits until the daemon has it.

use super::area::InflightPlace;
use super::{INFLIGHT, Vhost, area};
use crate::frontend::vm::protocol::{Closing, DepositedFd, Turn};
use forebay_guest::{Area, Mapping};
use forebay_virtio::inflight::queue_bytes;
use forebay_virtio::ring::{MAX_QUEUE_SIZE, Window};
use forebay_virtio::vhost_user::message::InflightArea;
use rustix::fs::{MemfdFlags, SealFlags};
use std::sync::Arc;

const NO_FILE: Closing = Closing("no memory is left for its inflight region");
pub(super) const UNFIT: Closing = Closing("its inflight region does not fit its queues");

#[derive(Clone, Copy, Debug)]
pub(super) struct Inflight {
    place: InflightPlace,
    /// Bytes from one queue's part to the next.
    stride: u64,
}

impl Inflight {
    pub(super) fn new(place: InflightPlace) -> Option<Self> {
        let queues = u64::from(place.area.num_queues);
        let stride = place.area.mmap_size.checked_div(queues)? & !7;
        place.area.mmap_offset.checked_add(place.area.mmap_size)?;
        (stride > 0).then_some(Self { place, stride })
    }

    pub(super) fn window(&self, turn: &Turn<'_>, index: u16, size: u16) -> Result<Window, Closing> {
        let part = self.part(turn, index, size).ok_or(UNFIT)?;
        Ok(part.into())
    }

    fn part(&self, turn: &Turn<'_>, index: u16, size: u16) -> Option<Area> {
        let place = self.place.area;
        let bytes = self.stride.min(queue_bytes(size) as u64);
        if index >= place.num_queues {
            return None;
        }
        let offset = place.mmap_offset + u64::from(index) * self.stride;
        let file = turn.client.held(INFLIGHT)?;
        let mapping = Mapping::new(file, offset, bytes, true).ok()?;
        Area::of(&Arc::new(mapping))
    }

    /// Clears an internal part; its ring must have no requests in flight.
    pub(super) fn forget(&self, turn: &Turn<'_>, index: u16) {
        if self.place.ours
            && let Some(part) = self.part(turn, index, MAX_QUEUE_SIZE)
        {
            let _ = part.write(0, &vec![0; part.len_bytes()]);
        }
    }
}

pub(super) fn wanted(queues: u16, size: u16) -> InflightArea {
    InflightArea {
        mmap_size: u64::from(queues) * queue_bytes(size) as u64,
        mmap_offset: 0,
        num_queues: queues,
        queue_size: size,
    }
}

pub(super) fn create(turn: &mut Turn<'_>, area: &InflightArea) -> Option<DepositedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("forebay-inflight", flags).ok()?;
    rustix::fs::ftruncate(&file, area.mmap_size).ok()?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).ok()?;
    turn.client.deposit_own(file)
}

impl Vhost {
    /// Changes the region, and records it for a successor.
    pub(super) fn set_inflight(
        &mut self,
        turn: &mut Turn<'_>,
        place: Option<InflightPlace>,
        deposit: Option<&DepositedFd>,
    ) -> Result<(), Closing> {
        let inflight = place.map(|place| Inflight::new(place).ok_or(UNFIT));
        self.inflight = inflight.transpose()?;
        turn.client.hold(INFLIGHT, deposit);
        area(turn).set_inflight(place.as_ref());
        Ok(())
    }

    pub(super) fn have_inflight(&mut self, turn: &mut Turn<'_>) -> Result<(), Closing> {
        if self.inflight.is_none() {
            let area = wanted(self.disk.queues, MAX_QUEUE_SIZE);
            let deposit = create(turn, &area).ok_or(NO_FILE)?;
            let place = InflightPlace { area, ours: true };
            self.set_inflight(turn, Some(place), Some(&deposit))?;
        }
        Ok(())
    }
}
