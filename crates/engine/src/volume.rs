//! A volume as the data path sees it: geometry, translation table, how far it is committed, and
//! which devices it may have written to.
//!
//! **Design.** Shared by the control thread (the only writer) and the reactors. Growth makes a new
//! value that shares the counters and the table's leaves. A device counts as written from the first
//! grant that allows it, and for good: every grant outstanding is told again to a new engine, so the
//! set covers what a dead one wrote. **Not here:** extents' states (the pool).

use forebay_xlate::boundary::message::VolumeConfig;
use forebay_xlate::table::Table;
use forebay_xlate::{DeviceIndex, ExtentRange, VolumeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

/// How far a volume's mappings are durable.
#[derive(Debug, Default)]
struct Commits {
    /// The highest commit sequence granted.
    granted: AtomicU64,
    /// Everything up to here is durable.
    committed: AtomicU64,
    /// A bit for each device that a grant has let it write to.
    devices: [AtomicU64; 4],
}

/// See the module's text.
#[derive(Debug)]
pub struct Volume {
    /// As the daemon configured it.
    pub config: VolumeConfig,
    /// Its translations.
    pub table: Table,
    /// log2 of the extent's bytes.
    pub extent_shift: u32,
    commits: Arc<Commits>,
}

impl Volume {
    /// A volume without translations. `None` when the geometry makes no sense.
    pub fn new(config: VolumeConfig) -> Option<Self> {
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
        valid.then(|| Self {
            table: Table::new(extents),
            extent_shift: config.extent_bytes.trailing_zeros(),
            commits: Arc::default(),
            config,
        })
    }

    /// The same volume, grown. Never smaller; block and extent size can't change.
    pub fn grown(&self, config: VolumeConfig) -> Option<Self> {
        let same = config.block_bytes == self.config.block_bytes
            && config.extent_bytes == self.config.extent_bytes
            && config.size_bytes >= self.config.size_bytes
            && config
                .size_bytes
                .is_multiple_of(u64::from(config.block_bytes));
        same.then(|| Self {
            table: self
                .table
                .grown(config.size_bytes.div_ceil(u64::from(config.extent_bytes))),
            extent_shift: self.extent_shift,
            commits: self.commits.clone(),
            config,
        })
    }

    /// Its identity.
    pub fn id(&self) -> VolumeId {
        self.config.volume
    }

    /// All of its logical extents.
    pub fn whole(&self) -> ExtentRange {
        ExtentRange::new(0, self.table.extents())
    }

    /// Blocks that hosts see.
    pub fn blocks(&self) -> u64 {
        self.config.size_bytes / u64::from(self.config.block_bytes)
    }

    /// A grant with this commit sequence is about to be installed (0: already durable).
    pub fn granted(&self, sequence: u64) {
        self.commits.granted.fetch_max(sequence, SeqCst);
    }

    /// A grant that allows writing to this device is about to be installed.
    pub fn may_write_to(&self, device: DeviceIndex) {
        let bit = 1u64 << (device.0 % 64);
        let set = &self.commits.devices[usize::from(device.0 / 64)];
        if set.load(Acquire) & bit == 0 {
            set.fetch_or(bit, SeqCst);
        }
    }

    /// The devices that a FLUSH which begins now must cover.
    pub fn written_devices(&self) -> impl Iterator<Item = DeviceIndex> + Clone + use<> {
        let sets: [u64; 4] = std::array::from_fn(|i| self.commits.devices[i].load(Acquire));
        (0..=u8::MAX)
            .filter(move |d| sets[usize::from(d / 64)] & 1 << (d % 64) != 0)
            .map(DeviceIndex)
    }

    /// The owner committed up to here.
    pub fn committed(&self, sequence: u64) {
        self.commits.committed.fetch_max(sequence, SeqCst);
    }

    /// The commit that a FLUSH which begins now must wait for; 0 when all is durable.
    pub fn uncommitted(&self) -> u64 {
        let granted = self.commits.granted.load(Acquire);
        if granted > self.commits.committed.load(Acquire) {
            granted
        } else {
            0
        }
    }

    /// Whether everything up to `sequence` is durable.
    pub fn is_committed(&self, sequence: u64) -> bool {
        self.commits.committed.load(Acquire) >= sequence
    }
}
