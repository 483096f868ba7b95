//! The data devices, with a cache that a power cut loses, reorders and tears.
//!
//! An extent is two sectors; each is zero or one write of one tenant's block.

use crate::common::Choices;
use std::collections::{BTreeMap, BTreeSet};

/// An extent of a device.
pub(crate) type Place = (u8, u64);

/// A sector's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bytes {
    pub(crate) volume: u64,
    pub(crate) logical: u64,
    pub(crate) version: u64,
}

/// An extent's sectors; `None` for zeros.
pub(crate) type Sectors = [Option<Bytes>; 2];

#[derive(Clone, Default, Debug)]
pub(crate) struct Disk {
    now: BTreeMap<Place, Sectors>,
    durable: BTreeMap<Place, Sectors>,
    /// Writes since the last flush, in order.
    unsynced: Vec<(Place, Sectors)>,
}

impl Disk {
    pub(crate) fn read(&self, place: Place) -> Sectors {
        self.now.get(&place).copied().unwrap_or_default()
    }

    pub(crate) fn write(&mut self, place: Place, content: Sectors) {
        self.now.insert(place, content);
        self.unsynced.push((place, content));
    }

    pub(crate) fn flush(&mut self, device: u8) {
        for (place, content) in &self.unsynced {
            if place.0 == device {
                self.durable.insert(*place, *content);
            }
        }
        self.unsynced.retain(|(place, _)| place.0 != device);
    }

    /// Now and after any cut.
    pub(crate) fn is_zero(&self, place: Place) -> bool {
        let empty = |content: &Sectors| *content == [None; 2];
        let written = self.unsynced.iter().filter(|(at, _)| *at == place);
        self.now.get(&place).is_none_or(empty)
            && self.durable.get(&place).is_none_or(empty)
            && written.map(|(_, content)| content).all(empty)
    }

    /// Extents that are not zero, now or after a cut.
    pub(crate) fn used(&self) -> BTreeSet<Place> {
        let all = self.now.keys().chain(self.durable.keys());
        let all = all.chain(self.unsynced.iter().map(|(place, _)| place));
        all.copied().filter(|place| !self.is_zero(*place)).collect()
    }

    /// Each unflushed extent keeps the old content, gets a new one, or a mixture.
    pub(crate) fn cut(&mut self, choices: &mut Choices) {
        let mut versions: BTreeMap<Place, Vec<Sectors>> = BTreeMap::new();
        for (place, content) in self.unsynced.drain(..) {
            versions.entry(place).or_default().push(content);
        }
        let all = choices.u64(..5);
        for (place, mut versions) in versions {
            let newest = versions[versions.len() - 1];
            let old = self.durable.get(&place).copied().unwrap_or_default();
            versions.push(old);
            let mut any = || versions[choices.usize(..versions.len())];
            let kept = match all {
                0 => old,
                1 => newest,
                2 => any(),
                _ => [any()[0], any()[1]],
            };
            self.durable.insert(place, kept);
        }
        self.now = self.durable.clone();
    }
}
