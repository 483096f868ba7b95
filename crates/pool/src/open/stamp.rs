//! The number of a pool's starts and stops, in the catalog and in every label.
//!
//! **Design.** A start counts up the pool's record (`opens`) and commits it, then writes the number into the labels, then
//! notes in the catalog which labels have it; a stop does the same. So a crash leaves labels that are not newer than the
//! catalog, and not older than what it notes of their device. A device whose label is older than that was replaced by an
//! earlier copy: it is missing until somebody insists. A label newer than the catalog says that of the catalog.
//!
//! A label of the old format has no number, and nothing is noted of it.
//!
//! **Not here:** who the owner is, and whether another one may have the pool (the daemon).

use crate::{
    catalog::Catalog,
    error::Result,
    label::{Label, LabelFormat, Stamp},
    uuid::Uuid,
};

/// What became of a stamp.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Stamped {
    /// The devices whose labels have it.
    pub devices: Vec<Uuid>,
    /// The devices whose labels have the old format.
    pub old: Vec<Uuid>,
    /// What could not be written, in sentences.
    pub notes: Vec<String>,
}

impl Catalog {
    /// Writes a stamp into the labels of the pool's devices that are here. Its number must be durable in the catalog.
    /// Blocks.
    pub fn stamp(&self, stamp: &Stamp) -> Stamped {
        let mut stamped = Stamped::default();
        for (device, result) in self.stamp_labels(stamp) {
            match result {
                Ok(true) => stamped.devices.push(device),
                Ok(false) => stamped.old.push(device),
                Err(error) => stamped
                    .notes
                    .push(format!("the label of device {device}: {error}")),
            }
        }
        stamped
    }

    /// Gives every label the current format; how many had the old one. Blocks.
    pub fn upgrade_labels(&self) -> Result<usize> {
        let mut upgraded = 0;
        for (device, store) in self.label_stores() {
            upgraded += usize::from(Label::upgrade(store.as_ref(), device)?);
        }
        Ok(upgraded)
    }

    /// Writes every copy of every label anew, over whatever lies there. Blocks.
    pub fn repair_labels(&self) -> Result<()> {
        for (_, store) in self.label_stores() {
            Label::repair(store.as_ref())?;
        }
        Ok(())
    }

    /// Of the devices here, those whose label has the old format, and those with something foreign over the first copy.
    pub fn label_troubles(&self) -> (Vec<Uuid>, Vec<Uuid>) {
        let (mut old, mut covered) = (Vec::new(), Vec::new());
        for (device, store) in self.label_stores() {
            let Ok(found) = Label::read_copies(store.as_ref()) else {
                continue;
            };
            if found.label.format == LabelFormat::Old {
                old.push(device);
            }
            if found.is_first_foreign {
                covered.push(device);
            }
        }
        (old, covered)
    }
}
