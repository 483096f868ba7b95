//! Telling the labels of the pool's devices which epoch the catalog is in.
//!
//! **Design.** After the header of a new epoch is durable, and before anything counts that was done in it,
//! every label that can be written says so. So a cut leaves labels that know less than the catalog, never
//! more. A label that can't be written is tried again when copies are healed; nobody waits for it.
//! **Not here:** what opening makes of it (`copies`).

use super::{Mirror, State};
use crate::{
    error::Result,
    label::{Label, Stamp},
    mirror::area::NO_DEVICE,
    mirror::lineage::Epoch,
    store::BlockStore,
    uuid::Uuid,
};
use std::sync::Arc;

/// A device's label.
struct Known {
    device: Uuid,
    store: Arc<dyn BlockStore>,
    /// What it was told last, or was to be told.
    told: Option<Epoch>,
    /// It could not be written.
    failed: bool,
}

/// The labels that are to be told.
#[derive(Default)]
pub(super) struct Labels {
    known: Vec<Known>,
    /// The last one of this opening.
    stamp: Option<Stamp>,
}

impl Labels {
    /// Those that could not be written.
    pub(super) fn failed(&self) -> Vec<(Uuid, Arc<dyn BlockStore>)> {
        let failed = self.known.iter().filter(|known| known.failed);
        failed
            .map(|known| (known.device, known.store.clone()))
            .collect()
    }

    /// These could not be written, and are told once more.
    pub(super) fn try_again(&mut self, devices: &[Uuid]) {
        for known in self
            .known
            .iter_mut()
            .filter(|known| devices.contains(&known.device))
        {
            known.told = None;
        }
    }
}

impl Mirror {
    /// From the next sync on, the label of this device of the pool is told too.
    pub(crate) fn add_label(&self, device: Uuid, store: &Arc<dyn BlockStore>) {
        let labels = &mut self.lock().labels.known;
        if labels.iter().all(|known| known.device != device) {
            labels.push(Known {
                device,
                store: store.clone(),
                told: None,
                failed: false,
            });
        }
    }

    /// The epoch as labels note it.
    pub(crate) fn epoch(&self) -> Epoch {
        self.lock().epoch()
    }

    pub(crate) fn stamp_labels(&self, stamp: &Stamp) -> Vec<(Uuid, Result<bool>)> {
        let labels = &mut self.lock().labels;
        labels.stamp = Some(stamp.clone());
        let stamped = labels.known.iter().map(|known| {
            let result = Label::stamp(known.store.as_ref(), known.device, stamp);
            (known.device, result)
        });
        stamped.collect()
    }

    pub(crate) fn last_stamp(&self) -> Option<Stamp> {
        self.lock().labels.stamp.clone()
    }

    pub(crate) fn label_stores(&self) -> Vec<(Uuid, Arc<dyn BlockStore>)> {
        let labels = &self.lock().labels.known;
        let stores = labels.iter();
        stores
            .map(|known| (known.device, known.store.clone()))
            .collect()
    }
}

impl State {
    pub(super) fn epoch(&self) -> Epoch {
        let mut copies = [NO_DEVICE; 2];
        for (copy, replica) in copies.iter_mut().zip(&self.replicas) {
            *copy = replica.area.device.0;
        }
        Epoch {
            number: self.lineage.number(),
            name: self.lineage.name(),
            copies,
        }
    }

    /// Writes the labels that say something else. The epoch is durable.
    pub(super) fn tell_labels(&mut self) {
        let epoch = self.epoch();
        let mut repaired = Vec::new();
        for known in &mut self.labels.known {
            if known.told != Some(epoch) {
                known.told = Some(epoch);
                match Label::note_epoch(known.store.as_ref(), known.device, epoch) {
                    Ok(None) => known.failed = false,
                    Ok(Some(device)) => {
                        known.failed = false;
                        repaired.push(device);
                    }
                    Err(_) => known.failed = true,
                }
            }
        }
        for device in repaired {
            self.note_repaired_label(device);
        }
    }
}
