//! What the engine's side of the protocol changes in the tables that reactors read.
//!
//! **Design.** One trait, so that the protocol's model needs no shared memory. **Not here:** the words (`word`), the
//! tables (`table`).

use crate::boundary::message::GrantOf;
use crate::types::{ExtentRange, Rights, VolumeId};
use crate::word::Word;

/// What reactors see of volumes: written by this side, read by them.
pub trait Words {
    /// The translation of an extent; `None` when there is no such volume.
    fn lookup(&self, volume: VolumeId, extent: u64) -> Option<Word>;
    /// Notes what a FLUSH must see of a grant (its commit, its device), and only then stores its words.
    /// False: there is no such volume.
    fn install(&mut self, grant: &GrantOf) -> bool;
    /// Takes rights away ([`crate::table::Table::clear`]).
    fn clear(&mut self, volume: VolumeId, range: ExtentRange, keep: Option<Rights>);
    /// Takes back the places ahead ([`crate::table::Table::take_back`]): the runs that were.
    fn take_back(&mut self, volume: VolumeId, range: ExtentRange) -> Vec<ExtentRange>;
    /// How many places are still ahead.
    fn count_ahead(&self, volume: VolumeId, range: ExtentRange) -> u64;
    /// Everything up to `sequence` is durable.
    fn committed(&mut self, volume: VolumeId, sequence: u64);
    /// Whether it is.
    fn is_committed(&self, volume: VolumeId, sequence: u64) -> bool;
}
