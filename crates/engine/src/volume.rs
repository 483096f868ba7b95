//! A volume in the data path: geometry, translation table, commits, written devices.
//!
//! **Design.** The control thread (the only writer) and reactors share it. Another size makes a new value
//! with shared counters and leaves. A device counts as written for good, from the first grant that
//! allows writes. A new engine gets every outstanding grant again, so its set covers a dead
//! engine's writes.

use forebay_nvme::io::NamespaceGeometry;
use forebay_xlate::boundary::message::VolumeConfig;
use forebay_xlate::table::Table;
use forebay_xlate::{DeviceIndex, VolumeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

#[derive(Debug, Default)]
struct Commits {
    granted: AtomicU64,
    /// Everything up to this sequence is durable.
    committed: AtomicU64,
    /// Bit by device: a grant has allowed writes to it.
    devices: [AtomicU64; 4],
}

#[derive(Debug)]
pub(crate) struct Volume {
    pub config: VolumeConfig,
    pub table: Table,
    /// log2 of an extent's bytes.
    pub extent_shift: u32,
    commits: Arc<Commits>,
}

impl Volume {
    /// `None` if the geometry is invalid.
    pub(crate) fn new(config: VolumeConfig) -> Option<Self> {
        let valid = config.extent_bytes.is_power_of_two()
            && config.block_bytes.is_power_of_two()
            && (512..=config.extent_bytes).contains(&config.block_bytes)
            && config.size_bytes > 0
            && config
                .size_bytes
                .is_multiple_of(u64::from(config.block_bytes));
        let extents = config
            .size_bytes
            .div_ceil(u64::from(config.extent_bytes.max(1)));
        let volume = valid.then(|| Self {
            table: Table::new(extents),
            extent_shift: config.extent_bytes.trailing_zeros(),
            commits: Arc::default(),
            config,
        })?;
        volume.table.set_epoch(volume.config.epoch);
        Some(volume)
    }

    /// The volume with another size; `None` for any other change. Only an image may shrink, and the
    /// table keeps its extents then.
    pub(crate) fn resized(&self, config: VolumeConfig) -> Option<Self> {
        let same = config.read_only == self.config.read_only
            && config.block_bytes == self.config.block_bytes
            && config.extent_bytes == self.config.extent_bytes
            && config.image == self.config.image
            && (config.size_bytes >= self.config.size_bytes || config.image.is_some())
            && config.size_bytes > 0
            && config
                .size_bytes
                .is_multiple_of(u64::from(config.block_bytes));
        let extents = config.size_bytes.div_ceil(u64::from(config.extent_bytes));
        same.then(|| Self {
            table: self.table.grown(extents.max(self.table.extents())),
            extent_shift: self.extent_shift,
            commits: self.commits.clone(),
            config,
        })
    }

    /// The configuration with the present epoch, which a freeze changes.
    pub(crate) fn present_config(&self) -> VolumeConfig {
        VolumeConfig {
            epoch: self.table.epoch(),
            ..self.config.clone()
        }
    }

    pub(crate) fn id(&self) -> VolumeId {
        self.config.volume
    }

    #[cfg(test)]
    pub(crate) fn whole(&self) -> forebay_xlate::ExtentRange {
        forebay_xlate::ExtentRange::new(0, self.table.extents())
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.config.size_bytes / u64::from(self.config.block_bytes)
    }

    #[inline]
    pub(crate) fn geometry(&self) -> NamespaceGeometry {
        NamespaceGeometry {
            block_bytes: self.config.block_bytes,
            block_count: self.blocks(),
            write_protected: self.config.read_only,
        }
    }

    /// The volume, write-protected, with all its grants.
    #[cfg(test)]
    pub(crate) fn protected(&self) -> Arc<Self> {
        Arc::new(Self {
            config: VolumeConfig {
                read_only: true,
                ..self.config.clone()
            },
            table: self.table.grown(self.table.extents()),
            extent_shift: self.extent_shift,
            commits: self.commits.clone(),
        })
    }

    /// Call it before the grant (0: durable) is installed.
    pub(crate) fn granted(&self, sequence: u64) {
        self.commits.granted.fetch_max(sequence, SeqCst);
    }

    /// Call it before the grant is installed.
    pub(crate) fn may_write_to(&self, device: DeviceIndex) {
        let bit = 1u64 << (device.0 % 64);
        let set = &self.commits.devices[usize::from(device.0 / 64)];
        if set.load(Acquire) & bit == 0 {
            set.fetch_or(bit, SeqCst);
        }
    }

    /// A FLUSH that begins now must cover these.
    pub(crate) fn written_devices(&self) -> impl Iterator<Item = DeviceIndex> + Clone + use<> {
        let sets: [u64; 4] = std::array::from_fn(|i| self.commits.devices[i].load(Acquire));
        (0..=u8::MAX)
            .filter(move |d| sets[usize::from(d / 64)] & 1 << (d % 64) != 0)
            .map(DeviceIndex)
    }

    pub(crate) fn committed(&self, sequence: u64) {
        self.commits.committed.fetch_max(sequence, SeqCst);
    }

    /// A FLUSH that begins now must wait for this; 0: none.
    pub(crate) fn uncommitted(&self) -> u64 {
        let granted = self.commits.granted.load(Acquire);
        if granted > self.commits.committed.load(Acquire) {
            granted
        } else {
            0
        }
    }

    pub(crate) fn is_committed(&self, sequence: u64) -> bool {
        self.commits.committed.load(Acquire) >= sequence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_only_grows() {
        let config = VolumeConfig {
            volume: VolumeId(1),
            uuid: [1; 16],
            read_only: false,
            size_bytes: 1 << 20,
            block_bytes: 4096,
            extent_bytes: 64 << 10,
            epoch: 0,
            image: None,
        };
        let volume = Volume::new(config.clone()).unwrap();
        let changed = |change: fn(&mut VolumeConfig)| {
            let mut config = config.clone();
            change(&mut config);
            volume.resized(config).map(|volume| volume.blocks())
        };
        assert_eq!(changed(|config| config.size_bytes += 4096), Some(257));
        assert_eq!(changed(|config| config.size_bytes -= 4096), None);
        assert_eq!(changed(|config| config.block_bytes = 512), None);
        assert_eq!(changed(|config| config.read_only = true), None);
    }
}
