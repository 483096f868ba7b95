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
    batch::Table,
    catalog::Catalog,
    error::{PoolError, Result},
    extents::ExtentState,
    label::{Label, LabelFormat, Stamp},
    pool::Pool,
    runs::DeviceRun,
    uuid::Uuid,
};
use forebay_xlate::types::{DeviceIndex, VolumeId};

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

impl Pool {
    /// The number of the pool's last start or stop.
    pub fn number(&self) -> u64 {
        self.info.opens
    }

    /// Counts a stop in good order: the number is that of the open batch.
    pub fn count_stop(&mut self) -> u64 {
        self.info.opens += 1;
        self.touch(Table::Meta, 0, 0);
        self.info.opens
    }

    /// The number that the catalog knows a device's label to have; 0: none.
    pub(crate) fn device_number(&self, device: DeviceIndex) -> u64 {
        self.device_numbers.get(&device).copied().unwrap_or(0)
    }

    /// Notes which labels have a number, durably with the open batch.
    pub fn note_stamped(&mut self, devices: &[Uuid], number: u64) {
        let known: Vec<DeviceIndex> = self
            .devices
            .iter()
            .filter(|record| devices.contains(&record.uuid))
            .map(|record| record.index)
            .collect();
        for device in known {
            self.device_numbers.insert(device, number);
            self.touch(Table::DeviceNumbers, u64::from(device.0), 0);
        }
    }

    /// Everything on a device that no volume maps is to be zeroed before its next use: it may hold what another tenant
    /// deleted. Only while adopting.
    pub(crate) fn distrust(&mut self, device: DeviceIndex) -> Result<()> {
        if !self.adopting {
            return Err(PoolError::invalid(
                "a device is distrusted while it is opened",
            ));
        }
        let volumes: Vec<VolumeId> = self.volumes.keys().copied().collect();
        let mut doubtful = Vec::new();
        for id in volumes {
            let volume = self.volume_mut(id)?;
            for run in volume.stock.drain() {
                if run.device == device {
                    doubtful.push(run);
                } else {
                    volume.stock.insert(run);
                }
            }
        }
        for run in doubtful {
            self.free_extents(run);
        }
        let clean: Vec<DeviceRun> = self.extents.runs_in(ExtentState::Clean);
        for run in clean.into_iter().filter(|run| run.device == device) {
            self.set_extents(run, ExtentState::Dirty);
        }
        Ok(())
    }
}
