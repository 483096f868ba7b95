//! The lanes of a reactor: which there are, and what they show.
//!
//! **Design.** A lane has its place in a fixed table, by its number. One that is removed stays until its commands have ended.
//! **Not here:** what a lane is ([`crate::lane`]), and what its commands wait for ([`super::waiting`]).

use super::Core;
use crate::lane::{Figures, Lane, LaneIndex};
use crate::upcall::Upcall;
use crate::volume::Volume;
use forebay_nvme::reservation::Reservations;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ExportId;
use std::sync::Arc;

impl Core {
    /// A lane that is served here.
    pub fn lane(&self, index: LaneIndex) -> Option<&Lane> {
        self.lanes.get(index.0 as usize)?.as_ref()
    }

    /// The lane of an export.
    pub fn lane_of_export(&self, export: ExportId) -> Option<LaneIndex> {
        self.lanes
            .iter()
            .flatten()
            .find(|l| l.export.export == export && !l.removed)
            .map(|l| l.index)
    }

    /// Adds a lane, or changes what an existing one shows.
    pub fn set_lane(&mut self, lane: Lane) {
        let index = lane.index;
        let at = index.0 as usize;
        match self.lanes[at].as_mut() {
            Some(old) if old.export.export == lane.export.export => {
                old.export = lane.export;
                old.volume = lane.volume;
                old.share = lane.share;
            }
            _ => self.lanes[at] = Some(lane),
        }
        self.attach(index);
    }

    /// The exports of a volume that are served here.
    pub fn exports_of(&self, volume: VolumeId) -> Vec<ExportId> {
        let lanes = self.lanes.iter().flatten();
        lanes
            .filter(|l| l.volume.id() == volume)
            .map(|l| l.export.export)
            .collect()
    }

    /// A volume grew.
    pub fn set_volume(&mut self, volume: &Arc<Volume>) {
        for lane in self
            .lanes
            .iter_mut()
            .flatten()
            .filter(|l| l.volume.id() == volume.id())
        {
            lane.volume = volume.clone();
        }
    }

    /// The reservations of a volume are these now.
    pub fn set_reservations(&mut self, volume: VolumeId, reservations: &Arc<Reservations>) {
        let lanes = self.lanes.iter_mut().flatten();
        for lane in lanes.filter(|l| l.volume.id() == volume) {
            lane.set_reservations(reservations);
        }
    }

    /// The owner says something of a volume.
    pub fn set_figures(&mut self, volume: VolumeId, figures: Figures) {
        let lanes = self.lanes.iter_mut().flatten();
        for lane in lanes.filter(|l| l.volume.id() == volume) {
            lane.figures = figures;
        }
    }

    /// Removes a lane as soon as its commands have ended, and tells the control thread. What isn't at
    /// a device yet ends now and never gets there.
    pub fn remove_lane(&mut self, index: LaneIndex) {
        if let Some(lane) = self.lanes[index.0 as usize].as_mut() {
            lane.removed = true;
            if lane.in_flight == 0 {
                self.lane_gone(index);
            } else {
                self.end_waiting_of(index);
            }
        }
    }

    pub(super) fn lane_gone(&mut self, index: LaneIndex) {
        self.lanes[index.0 as usize] = None;
        self.detach(index);
        self.upcalls.push_back(Upcall::LaneGone { lane: index });
    }
}
