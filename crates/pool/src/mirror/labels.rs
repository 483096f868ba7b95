//! Telling the labels of the pool's devices which epoch the catalog is in.
//!
//! **Design.** After the header of a new epoch is durable, and before anything counts that was done in it,
//! every label that can be written says so. So a cut leaves labels that know less than the catalog, never
//! more. A label that can't be written is tried again when copies are healed; nobody waits for it.
//! **Not here:** what opening makes of it (`copies`).

use super::{Mirror, State};
use crate::{area::NO_DEVICE, label::Label, lineage::Epoch, store::BlockStore, uuid::Uuid};
use std::sync::Arc;

/// The labels that are to be told.
#[derive(Default)]
pub(super) struct Labels {
    known: Vec<(Uuid, Arc<dyn BlockStore>)>,
    /// What each of them was told last, or was to be told.
    told: Vec<Option<Epoch>>,
    /// Some could not be written.
    failed: bool,
}

impl Labels {
    /// Those that could not be written are told once more.
    pub(super) fn try_again(&mut self) {
        if std::mem::take(&mut self.failed) {
            self.told.fill(None);
        }
    }
}

impl Mirror {
    /// From the next sync on, the label of this device of the pool is told too.
    pub(crate) fn add_label(&self, device: Uuid, store: &Arc<dyn BlockStore>) {
        let mut state = self.lock();
        let labels = &mut state.labels;
        if labels.known.iter().all(|(known, _)| *known != device) {
            labels.known.push((device, store.clone()));
            labels.told.push(None);
        }
    }

    /// The epoch as labels note it.
    pub(crate) fn epoch(&self) -> Epoch {
        self.lock().epoch()
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
        let labels = &mut self.labels;
        for ((device, store), told) in labels.known.iter().zip(&mut labels.told) {
            if *told != Some(epoch) {
                *told = Some(epoch);
                labels.failed |= Label::note_epoch(store.as_ref(), *device, epoch).is_err();
            }
        }
    }
}
