//! What each extent of each volume may hold, while writes, deallocations, snapshots, clones and
//! rollbacks go on, and daemons die.

use std::collections::{BTreeMap, BTreeSet};

use forebay_pool::{FaultAnswer, Pool};
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::{ExtentIndex, ExtentRange};

use super::*;

/// Possible contents; `None` for zeros.
type Possible = BTreeSet<Option<u64>>;
type Content = BTreeMap<u64, Possible>;

fn possible(content: &Content, extent: u64) -> Possible {
    let there = content.get(&extent).cloned();
    there.unwrap_or_else(|| Possible::from([None]))
}

/// A deallocation or rollback that may take effect at any moment until its end.
struct Change {
    volume: String,
    range: ExtentRange,
    becomes: Content,
    /// Other changes or writes came meanwhile.
    doubtful: BTreeSet<u64>,
}

/// Volumes are known by name, because a later daemon may reuse a lost number.
#[derive(Default)]
pub(super) struct Contents {
    by_name: BTreeMap<String, Content>,
    /// Also of volumes that are deleted.
    names: BTreeMap<VolumeId, String>,
    /// The snapshot that each clone is made of.
    clone_of: BTreeMap<String, String>,
    changes: BTreeMap<u64, Change>,
    next_change: u64,
    releases: BTreeMap<u64, u64>,
    /// Messages to the engine that have been looked at.
    heard: usize,
}

impl Contents {
    pub(super) fn will_clone(&mut self, snapshot: &str, clone: &str) {
        self.clone_of.insert(clone.to_owned(), snapshot.to_owned());
    }

    /// Call it before each write and each change's end, so that a new snapshot has what its volume
    /// has now.
    pub(super) fn see_new(&mut self, pool: &Pool) {
        for record in pool.volumes().records() {
            self.names.insert(record.id, record.name.clone());
            if self.by_name.contains_key(&record.name) {
                continue;
            }
            let of = match record.layering.snapshot_of {
                Some(volume) => self.names.get(&volume).cloned(),
                None => self.clone_of.get(&record.name).cloned(),
            };
            let content = of.map_or_else(Content::new, |of| self.by_name[&of].clone());
            self.by_name.insert(record.name.clone(), content);
        }
    }

    fn set(&mut self, volume: &str, extent: u64, possible: Possible) {
        let content = self.by_name.entry(volume.to_owned()).or_default();
        content.insert(extent, possible);
    }

    pub(super) fn wrote(&mut self, volume: &str, extent: u64, content: u64) {
        let mut now = Possible::from([Some(content)]);
        let changes = self.changes.values_mut();
        for change in changes.filter(|c| c.volume == volume && c.range.contains(extent)) {
            change.doubtful.insert(extent);
            now.extend(possible(&change.becomes, extent));
        }
        self.set(volume, extent, now);
    }

    fn begin(&mut self, volume: &str, range: ExtentRange, becomes: Content) -> u64 {
        let mut doubtful = BTreeSet::new();
        for other in self.changes.values_mut().filter(|c| c.volume == volume) {
            let both = (range.first..range.end()).filter(|extent| other.range.contains(*extent));
            let both: Vec<u64> = both.collect();
            other.doubtful.extend(&both);
            doubtful.extend(&both);
        }
        for extent in range.first..range.end() {
            let mut now = self.may_be(volume, extent);
            now.extend(possible(&becomes, extent));
            self.set(volume, extent, now);
        }
        let change = Change {
            volume: volume.to_owned(),
            range,
            becomes,
            doubtful,
        };
        self.next_change += 1;
        self.changes.insert(self.next_change, change);
        self.next_change
    }

    /// Returns the change's number, for [`Contents::ended`].
    pub(super) fn rolls_back(&mut self, volume: &str, snapshot: &str, extents: u64) -> u64 {
        let becomes = self.by_name[snapshot].clone();
        self.begin(volume, ExtentRange::new(0, extents), becomes)
    }

    pub(super) fn releases(&mut self, volume: &str, range: ExtentRange, release: u64) {
        let change = self.begin(volume, range, Content::new());
        self.releases.insert(release, change);
    }

    pub(super) fn ended(&mut self, change: u64, succeeded: bool) {
        let Some(change) = self.changes.remove(&change) else {
            return;
        };
        for extent in change.range.first..change.range.end() {
            if succeeded && !change.doubtful.contains(&extent) {
                let now = possible(&change.becomes, extent);
                self.set(&change.volume, extent, now);
            }
        }
    }

    /// Learns of the ends of deallocations.
    pub(super) fn hear(&mut self, log: &[ToEngine]) {
        for message in log.get(self.heard..).unwrap_or_default() {
            let (release, succeeded) = match message {
                ToEngine::ReleaseDone { release } => (release, true),
                ToEngine::ReleaseFailed { release } => (release, false),
                _ => continue,
            };
            if let Some(change) = self.releases.remove(release) {
                self.ended(change, succeeded);
            }
        }
        self.heard = log.len();
    }

    /// The daemon died: nothing takes effect from now on.
    pub(super) fn all_ended(&mut self) {
        self.changes.clear();
        self.releases.clear();
        self.heard = 0;
    }

    pub(super) fn may_be(&self, volume: &str, extent: u64) -> Possible {
        let content = self.by_name.get(volume);
        content.map_or_else(
            || Possible::from([None]),
            |content| possible(content, extent),
        )
    }

    /// Compares every extent with the pool. Later comparisons expect the content found here.
    pub(super) fn compare(&mut self, pool: &mut Pool, fake: &Fake, extents: u64, seed: u64) {
        let volumes = pool.volumes().records();
        let volumes: Vec<_> = volumes.map(|one| (one.id, one.name.clone())).collect();
        for (id, name) in volumes {
            assert!(self.by_name.contains_key(&name), "seed {seed}: {name}");
            for extent in 0..extents {
                let found = match pool.fault(id, ExtentIndex(extent), false).unwrap() {
                    FaultAnswer::Hole { .. } => None,
                    FaultAnswer::Mapped {
                        device, extent: at, ..
                    }
                    | FaultAnswer::Shared {
                        device, extent: at, ..
                    } => fake.contents.get(&(device.0, at.0)).copied(),
                    other => panic!("seed {seed}: {name} {extent}: {other:?}"),
                };
                let possible = self.may_be(&name, extent);
                assert!(
                    possible.contains(&found),
                    "seed {seed}: {name} {extent} has {found:?}, not one of {possible:?}"
                );
                self.set(&name, extent, Possible::from([found]));
            }
        }
    }
}
