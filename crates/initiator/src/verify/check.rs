//! Judges data per sector, because a crash can tear a write between sectors.
//!
//! Each sector must be between the newest version that must be there and the newest issued.

use std::fmt;
use std::time::Duration;

use super::Initial;
use super::model::Model;
use super::pattern::{self, Content, SECTOR_BYTES};

/// Mismatches that are kept; the others are only counted.
const KEPT: usize = 32;

/// The kind of mismatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Zeros instead of acknowledged data.
    Lost,
    /// An older version than the acknowledged one.
    Stale,
    /// Data that was written for another sector.
    Misplaced,
    /// Data of another seed: another run or tenant.
    OtherSeed,
    /// A version that was never issued.
    NeverWritten,
    /// The right header with a wrong body.
    Damaged,
    /// Data that no verifier wrote.
    Foreign,
}

/// A wrong sector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Byte address in the namespace.
    pub address_bytes: u64,
    /// The kind of mismatch.
    pub verdict: Verdict,
    /// The content found.
    pub found: Content,
    /// The oldest correct version.
    pub oldest: u32,
    /// The newest correct version.
    pub newest: u32,
    /// The newest flushed version.
    pub flushed: u32,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sector = self.address_bytes / SECTOR_BYTES as u64;
        write!(
            f,
            "sector {sector} (byte {:#x}): {:?}: expected version {}..={} (flushed {}), found {}",
            self.address_bytes, self.verdict, self.oldest, self.newest, self.flushed, self.found
        )
    }
}

/// The result of reading back.
#[derive(Clone, Debug, Default)]
pub struct VerifyReport {
    /// Bytes read and judged.
    pub bytes: u64,
    /// Wrong sectors.
    pub wrong_sectors: u64,
    /// The first mismatches.
    pub mismatches: Vec<Mismatch>,
    /// Reads that failed for good.
    pub read_errors: Vec<String>,
    /// Lost connections that were made again.
    pub reconnects: u64,
    /// Duration.
    pub elapsed: Duration,
}

impl VerifyReport {
    /// Whether all data could be read and was right.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.wrong_sectors == 0 && self.read_errors.is_empty()
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes read back, {} sectors wrong, {} reads failed",
            self.bytes,
            self.wrong_sectors,
            self.read_errors.len()
        )?;
        for mismatch in &self.mismatches {
            write!(f, "\n  {mismatch}")?;
        }
        if self.wrong_sectors > self.mismatches.len() as u64 {
            f.write_str("\n  ...")?;
        }
        for error in &self.read_errors {
            write!(f, "\n  {error}")?;
        }
        Ok(())
    }
}

/// Records the seen version in the model.
pub(crate) fn check_block(
    report: &mut VerifyReport,
    model: &mut Model,
    seed: u64,
    initial: Initial,
    block: u32,
    buf: &[u8],
) {
    let newest = model.issued(block);
    let oldest = model.acknowledged(block);
    let address = u64::from(block) * buf.len() as u64;
    let mut seen = u32::MAX;
    let mut wrong = false;
    for (i, sector_bytes) in buf.chunks_exact(SECTOR_BYTES).enumerate() {
        let address_bytes = address + (i * SECTOR_BYTES) as u64;
        let sector = address_bytes / SECTOR_BYTES as u64;
        if newest > 0 && pattern::holds(sector_bytes, seed, sector, newest) {
            seen = seen.min(newest);
            continue;
        }
        let found = pattern::read(sector_bytes);
        match judge(&found, seed, sector, oldest, newest, initial) {
            Ok(version) => seen = seen.min(version),
            Err(verdict) => {
                wrong = true;
                report.wrong_sectors += 1;
                if report.mismatches.len() < KEPT {
                    report.mismatches.push(Mismatch {
                        address_bytes,
                        verdict,
                        found,
                        oldest,
                        newest,
                        flushed: model.flushed(block),
                    });
                }
            }
        }
    }
    report.bytes += buf.len() as u64;
    if !wrong && seen <= newest {
        model.seen(block, seen);
    }
}

/// The version, if it is allowed.
fn judge(
    found: &Content,
    seed: u64,
    sector: u64,
    oldest: u32,
    newest: u32,
    initial: Initial,
) -> Result<u32, Verdict> {
    // Version 0 is the content before the first write.
    let may_be_untouched = oldest == 0;
    let before = |verdict| {
        if may_be_untouched && initial == Initial::Any {
            Ok(0)
        } else {
            Err(verdict)
        }
    };
    match *found {
        Content::Zeros if may_be_untouched => Ok(0),
        Content::Zeros => Err(Verdict::Lost),
        Content::Written { seed: other, .. } if other != seed => before(Verdict::OtherSeed),
        Content::Written { sector: other, .. } if other != sector => Err(Verdict::Misplaced),
        Content::Written { version, .. } if version > newest => Err(Verdict::NeverWritten),
        Content::Written { version, .. } if version < oldest => Err(Verdict::Stale),
        Content::Written { version, .. } => Ok(version),
        Content::Damaged { .. } => Err(Verdict::Damaged),
        Content::Foreign { .. } => before(Verdict::Foreign),
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::Promise;
    use super::*;

    fn check(model: &mut Model, initial: Initial, buf: &[u8]) -> Vec<Verdict> {
        let mut report = VerifyReport::default();
        check_block(&mut report, model, 9, initial, 3, buf);
        report.mismatches.iter().map(|m| m.verdict).collect()
    }

    #[test]
    fn each_kind_of_corruption_is_distinguished() {
        let mut model = Model::new(8, Promise::Acknowledged);
        for _ in 0..3 {
            model.issue(3);
            model.end(3, true);
        }
        model.issue(3); // Version 4, in flight.
        let block = |seed, sector, version| {
            let mut buf = vec![0; 1024];
            pattern::fill(&mut buf, seed, sector, version);
            buf
        };
        let zeros = Initial::Zeros;
        assert_eq!(check(&mut model, zeros, &[0; 1024]), [Verdict::Lost; 2]);
        assert_eq!(
            check(&mut model, zeros, &block(9, 6, 2)),
            [Verdict::Stale; 2]
        );
        let wrong = check(&mut model, zeros, &block(9, 7, 3));
        assert_eq!(wrong, [Verdict::Misplaced; 2]);
        let wrong = check(&mut model, zeros, &block(8, 6, 3));
        assert_eq!(wrong, [Verdict::OtherSeed; 2]);
        let wrong = check(&mut model, zeros, &block(9, 6, 5));
        assert_eq!(wrong, [Verdict::NeverWritten; 2]);
        assert_eq!(check(&mut model, zeros, &[5; 1024]), [Verdict::Foreign; 2]);
        let mut torn = block(9, 6, 3);
        torn[..512].copy_from_slice(&block(9, 6, 4)[..512]);
        assert_eq!(check(&mut model, zeros, &torn), []);
        torn[700] ^= 1;
        assert_eq!(check(&mut model, zeros, &torn), [Verdict::Damaged]);
        // After the new version was read whole, the old one is stale.
        assert_eq!(check(&mut model, zeros, &block(9, 6, 4)), []);
        assert_eq!(
            check(&mut model, zeros, &block(9, 6, 3)),
            [Verdict::Stale; 2]
        );
    }

    #[test]
    fn unwritten_blocks_must_keep_their_initial_data() {
        let mut model = Model::new(8, Promise::Acknowledged);
        assert_eq!(check(&mut model, Initial::Zeros, &[0; 512]), []);
        assert_eq!(check(&mut model, Initial::Any, &[1; 512]), []);
        assert_eq!(
            check(&mut model, Initial::Zeros, &[1; 512]),
            [Verdict::Foreign]
        );
        let mut buf = vec![0; 512];
        pattern::fill(&mut buf, 9, 100, 1);
        assert_eq!(check(&mut model, Initial::Any, &buf), [Verdict::Misplaced]);
    }
}
