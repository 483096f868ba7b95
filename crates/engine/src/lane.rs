//! A lane: one export's private path through a reactor.
//!
//! **Design.** All connections of an export live on one reactor, so a lane has one writer and needs
//! no lock. Its statistics are in the state region. **Not here:** budgets (they come with admission).

use crate::volume::Volume;
use forebay_nvme::reservation::Reservations;
use forebay_xlate::boundary::message::{ExportConfig, Past};
use forebay_xlate::boundary::region::{LaneRecord, Region};
use std::sync::Arc;

/// A lane's slot: the same number in the state region and in its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LaneIndex(pub u32);

/// What only the owner knows of a volume, for its hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Figures {
    /// Bytes that have space; `None`: not known, as much as its size.
    pub used_bytes: Option<u64>,
    /// How much of the space that it may take is left, per cent.
    pub spare_percent: u8,
    /// From which on that is little.
    pub spare_threshold_percent: u8,
    /// Critical Warning bits of the SMART / Health Information log page (Base 2.0, 5.16.1.3).
    pub warnings: u8,
    /// What its export has behind it.
    pub past: Past,
}

impl Default for Figures {
    /// Nothing to worry about.
    fn default() -> Self {
        Self {
            used_bytes: None,
            spare_percent: 100,
            spare_threshold_percent: 0,
            warnings: 0,
            past: Past::default(),
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Lane {
    /// Its slot.
    pub index: LaneIndex,
    /// What is shown.
    pub volume: Arc<Volume>,
    /// Who is registered with it, and who may do what.
    pub reservations: Arc<Reservations>,
    /// What the owner says of it.
    pub figures: Figures,
    /// To whom and as what.
    pub export: Arc<ExportConfig>,
    /// Commands in flight; the lane goes only when there are none.
    pub in_flight: u32,
    /// Slices of them at devices.
    pub slices: u32,
    /// The export is removed; the lane waits for its commands.
    pub removed: bool,
    /// The highest commit that the owner was asked for.
    pub commit_asked: u64,
    region: Arc<Region>,
}

impl Lane {
    /// A lane at `index`, whose record is made ready.
    pub fn new(
        index: LaneIndex,
        volume: Arc<Volume>,
        export: Arc<ExportConfig>,
        region: Arc<Region>,
    ) -> Self {
        Self {
            index,
            volume,
            reservations: Arc::default(),
            figures: Figures::default(),
            export,
            in_flight: 0,
            slices: 0,
            removed: false,
            commit_asked: 0,
            region,
        }
    }

    /// Its record in the state region.
    pub fn record(&self) -> &LaneRecord {
        &self.region.lanes()[self.index.0 as usize]
    }
}
