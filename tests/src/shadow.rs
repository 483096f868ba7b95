//! The content that a volume may have, from a host's writes, flushes and deallocations.
//!
//! Each sector has a list of writes, oldest first; deallocation writes zeros. A completed flush or
//! FUA drops older writes, so a power cut may leave any in the list. While power lasts, only the
//! last completed write and newer ones are valid. A block has at most one command in flight, so its
//! writes are ordered. Sectors carry their origin ([`forebay_initiator::verify::pattern`]).

use anyhow::{Result, bail};
use forebay_initiator::verify::pattern::{self, Content, SECTOR_BYTES};

/// The data that must survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// Every completed write: only processes died.
    Acknowledged,
    /// Flushed writes: the power was cut.
    Flushed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    number: u32,
    zeros: bool,
}

#[derive(Debug, Clone)]
struct Sector {
    /// Oldest first; the first must survive anything.
    versions: Vec<Version>,
    /// The last that completed successfully.
    ended: u32,
}

/// The memory of one volume.
#[derive(Debug, Clone)]
pub struct Shadow {
    volume: u64,
    block_sectors: usize,
    sectors: Vec<Sector>,
    /// Blocks with a command in flight.
    busy: Vec<bool>,
    /// Sectors with a completed, unflushed write.
    unflushed: Vec<usize>,
    next: u32,
}

/// The writes that a flush in flight covers.
#[derive(Debug)]
pub struct Cover(Vec<(usize, u32)>);

/// A change in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
    number: u32,
}

impl Shadow {
    /// A new volume, which reads as zeros, with a unique number.
    #[must_use]
    pub fn new(volume: u64, size_bytes: u64, block_bytes: u32) -> Self {
        let zeros = Version {
            number: 0,
            zeros: true,
        };
        let sector = Sector {
            versions: vec![zeros],
            ended: 0,
        };
        Self {
            volume,
            block_sectors: block_bytes as usize / SECTOR_BYTES,
            sectors: vec![sector; size_bytes as usize / SECTOR_BYTES],
            busy: vec![false; (size_bytes / u64::from(block_bytes)) as usize],
            unflushed: Vec::new(),
            next: 0,
        }
    }

    /// Leaves out write numbers, so that a clone's writes differ from its volume's.
    pub fn skip_numbers(&mut self, numbers: u32) {
        self.next += numbers;
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.busy.len() as u64
    }

    /// Whether the range has no command in flight.
    #[must_use]
    pub fn is_quiet(&self, lba: u64, blocks: u32) -> bool {
        let from = lba as usize;
        !self.busy[from..from + blocks as usize].contains(&true)
    }

    /// Marks a range as busy during a read, or clears the mark.
    pub fn hold(&mut self, lba: u64, blocks: u32, held: bool) {
        let from = lba as usize;
        self.busy[from..from + blocks as usize].fill(held);
    }

    /// Begins a change of a quiet range; for a write, fills `data`.
    pub fn begin(&mut self, lba: u64, blocks: u32, data: Option<&mut [u8]>) -> Change {
        self.next += 1;
        let change = Change {
            lba,
            blocks,
            number: self.next,
        };
        let version = Version {
            number: self.next,
            zeros: data.is_none(),
        };
        let from = lba as usize;
        self.busy[from..from + blocks as usize].fill(true);
        for sector in self.range(lba, blocks) {
            self.sectors[sector].versions.push(version);
        }
        if let Some(data) = data {
            let first = lba * self.block_sectors as u64;
            pattern::fill(data, self.volume, first, self.next);
        }
        change
    }

    /// Ends a change. A failed one may have happened or not.
    pub fn end(&mut self, change: &Change, well: bool, durable: bool) {
        let from = change.lba as usize;
        self.busy[from..from + change.blocks as usize].fill(false);
        if !well {
            return;
        }
        for sector in self.range(change.lba, change.blocks) {
            self.sectors[sector].ended = change.number;
            if durable {
                self.sectors[sector].survives(change.number);
            } else {
                self.unflushed.push(sector);
            }
        }
    }

    /// Begins a flush.
    pub fn flush_begins(&mut self) -> Cover {
        let sectors = self.unflushed.drain(..);
        let cover = sectors.map(|sector| (sector, self.sectors[sector].ended));
        Cover(cover.collect())
    }

    /// Ends a flush.
    pub fn flush_ends(&mut self, cover: Cover, well: bool) {
        for (sector, number) in cover.0 {
            match well {
                true => self.sectors[sector].survives(number),
                false => self.unflushed.push(sector),
            }
        }
    }

    /// Ends all commands in flight; they may have happened or not.
    pub fn connection_lost(&mut self) {
        self.busy.fill(false);
    }

    /// A power cut: unflushed writes may be lost.
    pub fn power_lost(&mut self) {
        self.connection_lost();
        self.unflushed.clear();
        for sector in &mut self.sectors {
            sector.ended = sector.versions.first().map_or(0, |version| version.number);
        }
    }

    /// Judges data read from a quiet range.
    pub fn judge(&self, lba: u64, data: &[u8]) -> Result<()> {
        let first = lba as usize * self.block_sectors;
        for (sector, bytes) in (first..).zip(data.chunks_exact(SECTOR_BYTES)) {
            let all = &self.sectors[sector];
            let allowed = all.since_ended();
            let last = allowed.last().copied();
            // The fast path.
            if last.is_some_and(|last| !last.zeros && self.holds(bytes, sector, last.number)) {
                continue;
            }
            self.find(sector, bytes)?;
        }
        Ok(())
    }

    /// Judges data read from a quiet range after a death; it becomes the only valid content.
    pub fn settle(&mut self, lba: u64, data: &[u8], promise: Promise) -> Result<()> {
        let first = lba as usize * self.block_sectors;
        for (sector, bytes) in (first..).zip(data.chunks_exact(SECTOR_BYTES)) {
            let found = self.find(sector, bytes)?;
            let settled = &mut self.sectors[sector];
            settled.ended = found.number;
            match promise {
                // The data is durable, so the next cut keeps it.
                Promise::Flushed => settled.survives(found.number),
                Promise::Acknowledged => {
                    let last = settled
                        .versions
                        .iter()
                        .position(|version| *version == found);
                    settled.versions.truncate(last.map_or(0, |last| last + 1));
                    if settled.versions.len() > 1 {
                        self.unflushed.push(sector);
                    }
                }
            }
            self.sectors[sector]
                .versions
                .retain(|version| version.number <= found.number);
        }
        Ok(())
    }

    fn find(&self, sector: usize, bytes: &[u8]) -> Result<Version> {
        let allowed = self.sectors[sector].since_ended();
        let found = pattern::read(bytes);
        let matches = |version: &&Version| match found {
            Content::Zeros => version.zeros,
            Content::Written {
                seed,
                sector: place,
                version: number,
            } => {
                seed == self.volume
                    && place == sector as u64
                    && number == version.number
                    && !version.zeros
            }
            _ => false,
        };
        if let Some(version) = allowed.iter().rev().find(matches) {
            return Ok(*version);
        }
        let whose = match found {
            Content::Written { seed, .. } if seed != self.volume => "ANOTHER VOLUME'S BYTES: ",
            _ => "",
        };
        bail!(
            "volume {:#x}, sector {sector}: {whose}{found}; allowed: {allowed:?} of {:?}",
            self.volume,
            self.sectors[sector].versions
        )
    }

    fn holds(&self, bytes: &[u8], sector: usize, number: u32) -> bool {
        pattern::holds(bytes, self.volume, sector as u64, number)
    }

    fn range(&self, lba: u64, blocks: u32) -> std::ops::Range<usize> {
        let first = lba as usize * self.block_sectors;
        first..first + blocks as usize * self.block_sectors
    }
}

impl Sector {
    /// Drops older writes.
    fn survives(&mut self, number: u32) {
        if let Some(at) = self.versions.iter().position(|v| v.number == number) {
            self.versions.drain(..at);
        }
    }

    /// Valid content while power lasts.
    fn since_ended(&self) -> &[Version] {
        let at = self.versions.iter().position(|v| v.number == self.ended);
        &self.versions[at.unwrap_or(0)..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 1024;

    fn shadow() -> Shadow {
        Shadow::new(7, 64 << 10, BLOCK as u32)
    }

    fn write(shadow: &mut Shadow, lba: u64) -> (Change, Vec<u8>) {
        let mut data = vec![0; BLOCK];
        let change = shadow.begin(lba, 1, Some(&mut data));
        (change, data)
    }

    #[test]
    fn after_a_cut_a_block_is_flushed_or_newer() {
        let mut shadow = shadow();
        let (first, old) = write(&mut shadow, 3);
        shadow.end(&first, true, false);
        let cover = shadow.flush_begins();
        let (second, new) = write(&mut shadow, 3);
        shadow.flush_ends(cover, true);
        shadow.end(&second, true, false);
        assert!(shadow.judge(3, &new).is_ok());
        assert!(shadow.judge(3, &old).is_err());
        let (_, newest) = write(&mut shadow, 3);
        assert!(shadow.judge(3, &newest).is_ok());
        shadow.power_lost();
        for allowed in [&old, &new, &newest] {
            assert!(shadow.judge(3, allowed).is_ok());
        }
        assert!(shadow.judge(3, &[0; BLOCK]).is_err());
        let torn = [&old[..512], &newest[512..]].concat();
        assert!(shadow.settle(3, &torn, Promise::Flushed).is_ok());
        assert!(shadow.judge(3, &torn).is_ok());
        assert!(shadow.judge(3, &old).is_err());
        let mut damaged = torn;
        damaged[1000] ^= 1;
        assert!(shadow.judge(3, &damaged).is_err());
    }

    #[test]
    fn zeros_are_writes_and_durable_ones_stay() {
        let mut shadow = shadow();
        let (first, data) = write(&mut shadow, 0);
        shadow.end(&first, true, true);
        let zeroed = shadow.begin(0, 2, None);
        shadow.power_lost();
        assert!(shadow.judge(0, &data).is_ok());
        assert!(shadow.judge(0, &[0; BLOCK]).is_ok());
        let zeroed_again = shadow.begin(0, 2, None);
        shadow.end(&zeroed_again, true, false);
        assert!(shadow.judge(0, &data).is_err());
        let cover = shadow.flush_begins();
        shadow.flush_ends(cover, true);
        shadow.power_lost();
        assert!(shadow.judge(0, &data).is_err());
        assert!(zeroed != zeroed_again);
    }

    #[test]
    fn another_volumes_bytes_are_named() {
        let mut other = Shadow::new(8, 64 << 10, BLOCK as u32);
        let (_, data) = write(&mut other, 3);
        let error = shadow().judge(3, &data).unwrap_err().to_string();
        assert!(error.contains("ANOTHER VOLUME"), "{error}");
        let mut own = shadow();
        let (_, data) = write(&mut own, 3);
        assert!(own.judge(4, &data).is_err());
        assert!(own.judge(3, &data).is_ok());
    }

    #[test]
    fn a_death_of_processes_loses_nothing_that_ended() {
        let mut shadow = shadow();
        let (first, old) = write(&mut shadow, 5);
        shadow.end(&first, true, false);
        let (_, new) = write(&mut shadow, 5);
        shadow.connection_lost();
        assert!(
            shadow
                .clone()
                .settle(5, &[0; BLOCK], Promise::Acknowledged)
                .is_err()
        );
        shadow.settle(5, &old, Promise::Acknowledged).unwrap();
        assert!(
            shadow.judge(5, &new).is_err(),
            "it landed after it was seen missing"
        );
        // It is not flushed, so a power cut may still take it.
        shadow.power_lost();
        assert!(shadow.judge(5, &[0; BLOCK]).is_ok());
    }
}
