//! Detects truncated, removed and renamed device files while they are used.
//!
//! A truncated file reads as zeros once something extends it, so truncation must be noticed before
//! that. The daemon's descriptors are checked once a second. A device that is too small has failed
//! for good: its grants are revoked, and `devices.json` remembers it until `--force`. A removed or
//! renamed file works until it is closed, and causes only a warning.

use forebay_device::size::format_bytes;
use forebay_xlate::DeviceIndex;

use crate::devices;
use crate::devices::PoolDevice;
use crate::model::events::EventKind;
use crate::states::DeviceStates;

impl DeviceStates {
    /// Returns the devices that were truncated since the last check.
    pub(crate) fn poll_sizes(&self) -> Vec<DeviceIndex> {
        let devices = self.base.devices.borrow().clone();
        let mut cut = Vec::new();
        for device in devices {
            let now = match device.store.0.poll_now() {
                Ok(now) => now,
                Err(error) => {
                    tracing::debug!(device = device.spec, %error, "can't read a device's size");
                    continue;
                }
            };
            let needs = self.needed_bytes(device.index);
            if now.size_bytes < needs && self.cut_short(device.index).is_none() {
                self.note_cut(&device, now.size_bytes);
                cut.push(device.index);
            }
            let lost = match (now.has_name, now.is_at_path) {
                (false, _) => Some(nameless_text(&device.spec)),
                (true, false) => Some(renamed_text(&device.spec)),
                (true, true) => None,
            };
            self.note_name(device.index, lost);
        }
        cut
    }

    fn note_name(&self, device: DeviceIndex, lost: Option<String>) {
        let mut nameless = self.watched.nameless.borrow_mut();
        let before = nameless.remove(&device);
        if let Some(text) = lost {
            nameless.insert(device, text.clone());
            if before.as_ref() != Some(&text) {
                self.base.report_device(EventKind::Warning, device, text);
            }
        }
    }

    fn needed_bytes(&self, device: DeviceIndex) -> u64 {
        let core = self.base.core.borrow();
        let extent_bytes = core.pool.info().extent_bytes;
        let record = core.pool.devices().iter().find(|r| r.index == device);
        record.map_or(0, |record| {
            let data_bytes = record.extents.saturating_mul(extent_bytes);
            record.data_offset_bytes.saturating_add(data_bytes)
        })
    }

    fn note_cut(&self, device: &PoolDevice, bytes: u64) {
        tracing::error!(
            device = %device.index,
            "device {}: {}",
            device.spec,
            devices::cut_short_text(bytes)
        );
        self.watched.cut.borrow_mut().insert(device.index, bytes);
        self.judge_health(device.index);
        let uuid = {
            let core = self.base.core.borrow();
            let record = core.pool.devices().iter().find(|r| r.index == device.index);
            record.map(|record| record.uuid)
        };
        for folder in &*self.watched.record_dirs.borrow() {
            if let Some(uuid) = uuid
                && let Err(error) = devices::mark_cut_short(folder, &uuid, bytes)
            {
                tracing::error!(%error, "can't record that a device was cut short");
            }
        }
    }

    pub(crate) fn cut_short(&self, device: DeviceIndex) -> Option<u64> {
        self.watched.cut.borrow().get(&device).copied()
    }

    pub(crate) fn is_any_cut_short(&self) -> bool {
        !self.watched.cut.borrow().is_empty()
    }

    pub(crate) fn nameless_warnings(&self) -> Vec<String> {
        self.watched.nameless.borrow().values().cloned().collect()
    }
}

fn nameless_text(spec: &str) -> String {
    format!(
        "the file of device {spec} was removed while in use: its data is lost when the daemon and its engine end; copy \
        the volumes that have data there elsewhere first"
    )
}

fn renamed_text(spec: &str) -> String {
    format!(
        "the file of device {spec} is no longer there: it was renamed or replaced while in use; put it back before the \
        next start, or then give its path: `forebay pool open --device SPEC`"
    )
}

pub(crate) fn state_text(bytes: u64) -> String {
    format!(
        "its file was cut short to {} ({bytes} bytes) while in use",
        format_bytes(bytes)
    )
}
