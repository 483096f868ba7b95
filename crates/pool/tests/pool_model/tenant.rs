//! The possible values of each block. A history begins with the last flushed value and has every
//! later one. After a crash a block has any value of its history, else the newest.

use crate::disk::{Bytes, Sectors};
use std::collections::{BTreeMap, BTreeSet};

/// The values of one sector; `None` for zeros.
type History = Vec<Option<u64>>;

#[derive(Default, Debug)]
pub(crate) struct Tenants {
    /// (volume, logical) -> sectors; without an entry never written.
    blocks: BTreeMap<(u64, u64), [History; 2]>,
}

impl Tenants {
    fn block(&mut self, volume: u64, logical: u64) -> &mut [History; 2] {
        let new = || [vec![None], vec![None]];
        self.blocks.entry((volume, logical)).or_insert_with(new)
    }

    /// Removes a former volume with this id.
    pub(crate) fn forget(&mut self, volume: u64) {
        self.blocks.retain(|(other, _), _| *other != volume);
    }

    pub(crate) fn wrote(&mut self, volume: u64, logical: u64, sectors: u8, version: u64) {
        for (at, history) in self.block(volume, logical).iter_mut().enumerate() {
            if sectors & (1 << at) != 0 {
                history.push(Some(version));
            }
        }
    }

    pub(crate) fn released(&mut self, volume: u64, logical: u64) {
        if let Some(block) = self.blocks.get_mut(&(volume, logical)) {
            block.iter_mut().for_each(|history| history.push(None));
        }
    }

    pub(crate) fn flushed(&mut self, volume: u64) {
        for (_, block) in self.blocks.range_mut((volume, 0)..=(volume, u64::MAX)) {
            for history in block {
                let newest = history[history.len() - 1];
                *history = vec![newest];
            }
        }
    }

    /// A volume gets another one's newest values.
    pub(crate) fn copied(&mut self, from: u64, to: u64) {
        let logicals: BTreeSet<u64> = self.of(from).chain(self.of(to)).collect();
        for logical in logicals {
            let values = self.newest(from, logical);
            for (history, value) in self.block(to, logical).iter_mut().zip(values) {
                history.push(value);
            }
        }
    }

    fn newest(&self, volume: u64, logical: u64) -> [Option<u64>; 2] {
        let block = self.blocks.get(&(volume, logical));
        let newest = |history: &History| history[history.len() - 1];
        block.map_or([None; 2], |[a, b]| [newest(a), newest(b)])
    }

    pub(crate) fn of(&self, volume: u64) -> impl Iterator<Item = u64> + '_ {
        let blocks = self.blocks.range((volume, 0)..=(volume, u64::MAX));
        blocks.map(|((_, logical), _)| *logical)
    }

    fn check(&self, volume: u64, logical: u64, read: Sectors, any: bool) {
        let never = [vec![None], vec![None]];
        let block = self.blocks.get(&(volume, logical)).unwrap_or(&never);
        for (history, bytes) in block.iter().zip(read) {
            let version = bytes.map(|bytes| {
                let Bytes {
                    volume: of,
                    logical: at,
                    version,
                } = bytes;
                // A clone has bytes of its snapshot's volume; every version is written once.
                assert!(of <= volume && at == logical, "somebody else's bytes");
                version
            });
            let allowed = if any {
                history
            } else {
                &history[history.len() - 1..]
            };
            assert!(
                allowed.contains(&version),
                "{volume}: {logical} reads as {version:?}, not as one of {allowed:?}"
            );
        }
    }

    /// A read without a crash before.
    pub(crate) fn reads(&self, volume: u64, logical: u64, read: Sectors) {
        self.check(volume, logical, read, false);
    }

    /// A block's value after a crash, from now on; `durably` after a power cut.
    pub(crate) fn found(&mut self, volume: u64, logical: u64, read: Sectors, durably: bool) {
        self.check(volume, logical, read, true);
        for (history, bytes) in self.block(volume, logical).iter_mut().zip(read) {
            let version = bytes.map(|bytes| bytes.version);
            if durably {
                history.clear();
            }
            history.push(version);
        }
    }

    /// Drops blocks beyond the volume's end.
    pub(crate) fn cut_off(&mut self, volume: u64, extents: u64) {
        self.blocks
            .retain(|(of, logical), _| *of != volume || *logical < extents);
    }
}
