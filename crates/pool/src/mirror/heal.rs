//! How the copies are, and bringing those back that failed while the catalog was in use.
//!
//! **Design.** Each copy that was left behind is first asked whether it takes a write, with no lock held: a
//! device that hangs, or takes half a minute for an error, must not hold up commits. That write removes the
//! copy's headers, which are of no use any more. Those that took it are then made anew while commits wait.
//! In place of one that does not come back another device gets a copy; what is left on the first is removed
//! as soon as it can be. Labels that could not be written are told again once they can be read.
//! **Not here:** making a copy (`copies`), when that is tried (the caller).

use super::{CatalogCopy, CopyState, Mirror, MirrorHealth, State, sync::sync_areas};
use crate::{
    label::Label,
    mirror::area::{Area, NO_DEVICE},
    uuid::Uuid,
};
use forebay_xlate::types::DeviceIndex;
use std::{
    io,
    sync::{MutexGuard, PoisonError},
};

/// Who answers of those that are to be brought back.
#[derive(Default)]
pub(crate) struct Probed {
    areas: Vec<Area>,
    labels: Vec<Uuid>,
}

impl Mirror {
    /// Taken by whoever brings copies back or moves them, before anything that commits wait for.
    pub(crate) fn take_care(&self) -> MutexGuard<'_, ()> {
        self.care.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks those that failed whether they work again; nobody waits for that.
    /// What counts now must not need them: a sync comes first.
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
            // The first sync tells what became of earlier writes.
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

    /// Brings back the copies that failed while running, those that answer; where that does not work, another
    /// device gets one.
    pub(crate) fn heal(&self, probed: &Probed) -> io::Result<()> {
        let mut state = self.lock();
        state.labels.try_again(&probed.labels);
        let answers = |area: &Area| probed.areas.iter().any(|probed| probed.is(area));
        state.removed(&answers);
        if state.lost.is_empty() {
            state.tell_labels();
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

    /// A store tells everybody of a write that was not carried out, until a sync has said so. Where that is
    /// every copy's, nothing gets as far as a sync: here they say it, and what they lost is written once more.
    pub(crate) fn hear_failures(&self) {
        let mut state = self.lock();
        let areas: Vec<&Area> = state.replicas.iter().map(|replica| &replica.area).collect();
        let _ = sync_areas(&areas);
        state.sync_failed = true;
    }

    /// Whether no copy that is in use answers.
    pub(crate) fn is_stuck(&self) -> bool {
        let state = self.lock();
        let mut replicas = state.replicas.iter();
        replicas.all(|replica| replica.area.store.is_stuck())
    }

    /// The copies, how many blocks were repaired, and what happened.
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
    /// Gives another device the copy that one has lost; whether there is one that takes it.
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
                    "{} has a copy of the catalog now, in place of {}",
                    area.device, lost.device
                ));
                self.replicas.push(replica);
                self.note_devices();
                return true;
            }
        }
        false
    }

    /// What failed and was replaced is removed, or was already.
    fn retire_lost(&mut self, area: Area, answers: &impl Fn(&Area) -> bool) {
        if answers(&area) {
            self.note_removed(area.device);
        } else {
            self.stale.push(area);
        }
    }

    /// These were removed by the question.
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

    /// Makes an area no copy any more; if that fails, it is tried again later.
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
