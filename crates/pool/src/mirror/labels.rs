//! Writes the catalog's epoch into the devices' labels.
//!
//! It does so after a new epoch's header is durable, and before anything else counts. So after a
//! crash labels may know less than the catalog, never more. Failed labels are retried when copies
//! are healed; no operation waits.

use super::{Mirror, State};
use crate::{
    error::Result,
    label::{Label, Stamp},
    mirror::area::NO_DEVICE,
    mirror::lineage::Epoch,
    store::BlockStore,
};
use std::sync::Arc;
use uuid::Uuid;

struct Known {
    device: Uuid,
    store: Arc<dyn BlockStore>,
    /// The last epoch written, or tried.
    given: Option<Epoch>,
    failed: bool,
}

#[derive(Default)]
pub(super) struct Labels {
    known: Vec<Known>,
    /// The last one of this opening.
    stamp: Option<Stamp>,
}

impl Labels {
    pub(super) fn failed(&self) -> Vec<(Uuid, Arc<dyn BlockStore>)> {
        let failed = self.known.iter().filter(|known| known.failed);
        failed
            .map(|known| (known.device, known.store.clone()))
            .collect()
    }

    /// Marks these labels to be written once more.
    pub(super) fn try_again(&mut self, devices: &[Uuid]) {
        for known in self
            .known
            .iter_mut()
            .filter(|known| devices.contains(&known.device))
        {
            known.given = None;
        }
    }
}

impl Mirror {
    /// Includes this device's label from the next sync on.
    pub(crate) fn add_label(&self, device: Uuid, store: &Arc<dyn BlockStore>) {
        let labels = &mut self.lock().labels.known;
        if labels.iter().all(|known| known.device != device) {
            labels.push(Known {
                device,
                store: store.clone(),
                given: None,
                failed: false,
            });
        }
    }

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

    /// Writes outdated labels. The epoch must be durable.
    pub(super) fn publish_labels(&mut self) {
        let epoch = self.epoch();
        let mut repaired = Vec::new();
        for known in &mut self.labels.known {
            if known.given != Some(epoch) {
                known.given = Some(epoch);
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
