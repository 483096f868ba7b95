//! The tables that reactors read, as a trait for the protocol's model.

use crate::boundary::message::GrantOf;
use crate::types::{ExtentRange, VolumeId};
use crate::word::Word;

/// The translations that reactors read.
pub trait Words {
    /// An extent's translation; `None` for an unknown volume.
    fn lookup(&self, volume: VolumeId, extent: u64) -> Option<Word>;
    /// Records a grant's commit and device for FLUSH, then stores its words. False: unknown volume.
    fn install(&mut self, grant: &GrantOf) -> bool;
    /// Removes translations ([`crate::table::Table::clear`]).
    fn clear(&mut self, volume: VolumeId, range: ExtentRange);
    /// Revokes the write right of the whole volume ([`crate::table::Table::set_epoch`]).
    fn freeze(&mut self, volume: VolumeId, epoch: u16);
    /// Takes back preallocated extents ([`crate::table::Table::take_back`]) and returns the runs.
    fn take_back(&mut self, volume: VolumeId, range: ExtentRange) -> Vec<ExtentRange>;
    /// The number of preallocated extents.
    fn count_preallocated(&self, volume: VolumeId, range: ExtentRange) -> u64;
    /// Everything up to `sequence` is durable.
    fn committed(&mut self, volume: VolumeId, sequence: u64);
    /// Whether `sequence` is durable.
    fn is_committed(&self, volume: VolumeId, sequence: u64) -> bool;
}
