//! The lanes of a reactor, by number. A removed lane stays until its commands have ended. **Not
//! here:** the lane ([`crate::lane`]).

use crate::io::command::{Io, IoOp};
use crate::lane::{Lane, LaneIndex, VolumeStatistics};
use crate::volume::Volume;
use forebay_nvme::reservation::{Access, Reservations};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::boundary::region::{MAX_LANES, bump};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: Vec<Option<Lane>>,
}

impl Lanes {
    pub(crate) fn new() -> Self {
        Self {
            lanes: (0..MAX_LANES).map(|_| None).collect(),
        }
    }

    #[inline]
    pub(crate) fn get(&self, index: LaneIndex) -> Option<&Lane> {
        self.lanes.get(index.0 as usize)?.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: LaneIndex) -> Option<&mut Lane> {
        self.lanes.get_mut(index.0 as usize)?.as_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Lane> {
        self.lanes.iter_mut().flatten()
    }

    pub(crate) fn of_volume(&mut self, volume: VolumeId) -> impl Iterator<Item = &mut Lane> {
        self.iter_mut().filter(move |l| l.volume.id() == volume)
    }

    pub(crate) fn volume_of(&self, io: &Io) -> Option<VolumeId> {
        Some(self.get(io.lane)?.volume.id())
    }

    pub(crate) fn of_export(&self, export: ExportId) -> Option<LaneIndex> {
        self.iter()
            .find(|l| l.export.export == export && !l.removed)
            .map(|l| l.index)
    }

    pub(crate) fn exports_of(&self, volume: VolumeId) -> Vec<ExportId> {
        self.iter()
            .filter(|l| l.volume.id() == volume)
            .map(|l| l.export.export)
            .collect()
    }

    pub(crate) fn set(&mut self, lane: Lane) {
        let place = &mut self.lanes[lane.index.0 as usize];
        match place {
            Some(old) if old.export.export == lane.export.export => {
                old.export = lane.export;
                old.volume = lane.volume;
                old.share = lane.share;
            }
            place => *place = Some(lane),
        }
    }

    pub(crate) fn remove(&mut self, index: LaneIndex) {
        self.lanes[index.0 as usize] = None;
    }

    pub(crate) fn set_volume(&mut self, volume: &Arc<Volume>) {
        for lane in self.of_volume(volume.id()) {
            lane.volume = volume.clone();
        }
    }

    pub(crate) fn set_reservations(&mut self, volume: VolumeId, reservations: &Arc<Reservations>) {
        for lane in self.of_volume(volume) {
            lane.set_reservations(reservations);
        }
    }

    pub(crate) fn set_statistics(&mut self, volume: VolumeId, statistics: VolumeStatistics) {
        for lane in self.of_volume(volume) {
            lane.statistics = statistics;
        }
    }

    /// Whether a host's reservation forbids this to VMs.
    #[inline]
    pub(crate) fn keeps_vms_from(&self, lane: LaneIndex, op: &IoOp) -> bool {
        match self.get(lane) {
            Some(lane) if lane.vm_access != Access::ALL => !op.is_let_by(&lane.vm_access),
            _ => false,
        }
    }

    /// By a host's reservation, which also forbids a guest's own flush (Base 2.0, 8.19.1).
    /// [`crate::core::Core::start_vm_io`] cannot check flushes: they may be the first half of a
    /// read, or a shutdown's.
    pub(crate) fn keeps_vms_from_writing(&self, lane: LaneIndex) -> bool {
        self.get(lane).is_some_and(|lane| !lane.vm_access.write)
    }

    #[inline]
    pub(crate) fn count_copied(&self, lane: LaneIndex, bytes: u32) {
        if let Some(lane) = self.get(lane) {
            bump(&lane.record().copied_bytes, u64::from(bytes));
        }
    }
}
