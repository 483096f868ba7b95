//! The copies' health, and the repair of failed copies.
//!
//! Each failed copy is first tested with a write that erases its headers, without a lock: a hanging
//! device must not delay commits. Those that work are rewritten while commits wait. Others are
//! replaced on another device, and their remains erased when possible. Failed labels are retried.

use super::{CatalogCopy, CopyState, Mirror, MirrorHealth, State, sync::sync_areas};
use crate::{
    label::Label,
    mirror::area::{Area, NO_DEVICE},
};
use forebay_xlate::types::DeviceIndex;
use std::{
    io,
    sync::{MutexGuard, PoisonError},
};
use uuid::Uuid;

/// Failed areas and labels whose devices answer.
#[derive(Default)]
pub(crate) struct Probed {
    areas: Vec<Area>,
    labels: Vec<Uuid>,
}

impl Mirror {
    /// Held while copies are repaired or moved. Lock order: before any lock that commits wait for.
    pub(crate) fn take_care(&self) -> MutexGuard<'_, ()> {
        self.care.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tests without the lock. The state in use must not need these copies, so a sync comes first.
    pub(crate) fn probe(&self) -> Probed {
        let (mut areas, mut labels) = {
            let state = self.lock();
            if state.new_epoch {
                return Probed::default();
            }
            let lost = state.lost.iter().map(|lost| lost.area.clone());
            let areas: Vec<Area> = lost.chain(state.stale.iter().cloned()).collect();
            (areas, state.labels.failed())
        };
        areas.retain(|area| {
            // The first sync reports earlier writes.
            !area.store.is_stuck()
                && (area.store.sync().is_ok() || area.store.sync().is_ok())
                && area.retire().is_ok()
        });
        labels.retain(|(_, store)| Label::read(store.as_ref()).is_ok());
        Probed {
            areas,
            labels: labels.into_iter().map(|(device, _)| device).collect(),
        }
    }

    /// Repairs the failed copies that answer, or replaces them.
    pub(crate) fn heal(&self, probed: &Probed) -> io::Result<()> {
        let mut state = self.lock();
        state.labels.try_again(&probed.labels);
        let answers = |area: &Area| probed.areas.iter().any(|probed| probed.is(area));
        state.removed(&answers);
        if state.lost.is_empty() {
            state.publish_labels();
            return Ok(());
        }
        state.sync()?;
        for lost in std::mem::take(&mut state.lost) {
            if state.replicas.len() > 1 {
                // Another one took its place.
                state.retire_lost(lost.area, &answers);
                continue;
            }
            let healed = match answers(&lost.area) {
                true => state.bring_up(&lost.area, None),
                false => Err(io::Error::other(lost.why.clone())),
            };
            match healed {
                Ok(replica) => {
                    state.note(format!(
                        "the copy of the catalog on {} works again and is up to date",
                        lost.area.device
                    ));
                    state.replicas.push(replica);
                    state.note_devices();
                }
                Err(_) if state.replace(&lost.area) => state.retire_lost(lost.area, &answers),
                Err(error) => state.leave_behind(lost.area, error.to_string()),
            }
        }
        state.sync()
    }

    /// A store reports a failed write until a sync. If every copy does, no commit reaches a sync,
    /// so sync here. Lost blocks are then rewritten.
    pub(crate) fn hear_failures(&self) {
        let mut state = self.lock();
        let areas: Vec<&Area> = state.replicas.iter().map(|replica| &replica.area).collect();
        let _ = sync_areas(&areas);
        state.sync_failed = true;
    }

    /// Whether no copy in use answers.
    pub(crate) fn is_stuck(&self) -> bool {
        let state = self.lock();
        let mut replicas = state.replicas.iter();
        replicas.all(|replica| replica.area.store.is_stuck())
    }

    pub(crate) fn health(&self) -> MirrorHealth {
        let state = self.lock();
        let used = state.replicas.iter().map(|replica| CatalogCopy {
            device: replica.area.device,
            state: match replica.area.store.is_stuck() {
                true => CopyState::Failed("its device does not answer".to_owned()),
                false => CopyState::Good,
            },
        });
        let lost = state.lost.iter().map(|lost| CatalogCopy {
            device: lost.area.device,
            state: CopyState::Failed(lost.why.clone()),
        });
        let mut copies: Vec<CatalogCopy> = used.chain(lost).collect();
        if copies.len() < 2 {
            let here: Vec<u8> = copies.iter().map(|copy| copy.device.0).collect();
            let missing = state
                .devices
                .iter()
                .filter(|device| **device != NO_DEVICE && !here.contains(device));
            copies.extend(missing.map(|device| CatalogCopy {
                device: DeviceIndex(*device),
                state: CopyState::Missing,
            }));
        }
        MirrorHealth {
            copies,
            repaired_blocks: state.repaired_blocks,
            notes: state.notes.clone(),
            is_settled: state.lost.is_empty()
                && state.stale.is_empty()
                && state.labels.failed().is_empty(),
        }
    }
}

impl State {
    /// `true` if another device took the copy.
    fn replace(&mut self, lost: &Area) -> bool {
        let Some(first) = self.replicas.first().map(|replica| replica.area.clone()) else {
            return false;
        };
        let places = self.places.clone();
        let fits = |area: &&Area| {
            area.device != lost.device
                && area.device != first.device
                && area.blocks == first.blocks
                && !area.store.is_stuck()
        };
        for area in places.iter().filter(fits) {
            if let Ok(replica) = self.bring_up(area, None) {
                self.note(format!(
                    "{} now has a copy of the catalog, in place of {}",
                    area.device, lost.device
                ));
                self.replicas.push(replica);
                self.note_devices();
                return true;
            }
        }
        false
    }

    fn retire_lost(&mut self, area: Area, answers: &impl Fn(&Area) -> bool) {
        if answers(&area) {
            self.note_removed(area.device);
        } else {
            self.stale.push(area);
        }
    }

    /// The probe erased these areas.
    fn removed(&mut self, answers: &impl Fn(&Area) -> bool) {
        let stale = std::mem::take(&mut self.stale);
        for area in stale {
            if answers(&area) {
                self.note_removed(area.device);
            } else {
                self.stale.push(area);
            }
        }
    }

    fn note_removed(&mut self, device: DeviceIndex) {
        self.note(format!(
            "an old copy of the catalog on {device} was removed"
        ));
    }

    /// Erases an area's copy, now or later.
    pub(super) fn retire(&mut self, area: &Area) -> bool {
        let device = area.device;
        match area.retire() {
            Ok(()) => {
                self.note_removed(device);
                true
            }
            Err(error) => {
                self.note(format!(
                    "an old copy of the catalog on {device} can't be removed: {error}"
                ));
                self.stale.push(area.clone());
                false
            }
        }
    }
}
