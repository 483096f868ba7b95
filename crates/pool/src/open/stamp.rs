//! The number of a pool's starts and stops, in the catalog and in every label.
//!
//! A start or stop increments `opens` and commits it, writes the labels, and then notes in the
//! catalog which labels have the number. So no label is newer than the catalog, nor older than its
//! note. A device with an older label is an outdated copy and counts as missing unless forced. A
//! label newer than the catalog shows that the catalog is outdated. Old-format labels have no
//! number.

use crate::{
    catalog::Catalog,
    error::Result,
    label::{Label, LabelFormat, Stamp},
};
use uuid::Uuid;

/// The result of a stamp.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Stamped {
    /// Devices with the stamp in their labels.
    pub devices: Vec<Uuid>,
    /// Devices with labels of the old format.
    pub old: Vec<Uuid>,
    /// Failures as sentences.
    pub notes: Vec<String>,
}

impl Catalog {
    /// Stamps the labels of the devices present. The number must be durable in the catalog. Blocks.
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

    /// Upgrades old labels; returns their number. Blocks.
    pub fn upgrade_labels(&self) -> Result<usize> {
        let mut upgraded = 0;
        for (device, store) in self.label_stores() {
            upgraded += usize::from(Label::upgrade(store.as_ref(), device)?);
        }
        Ok(upgraded)
    }

    /// Rewrites every label, even over foreign data. Blocks.
    pub fn repair_labels(&self) -> Result<()> {
        for (_, store) in self.label_stores() {
            Label::repair(store.as_ref())?;
        }
        Ok(())
    }

    /// Devices with old-format labels, and with foreign data over the first copy.
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
