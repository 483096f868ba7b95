//! Deletions, releases, quarantine and zero-filling, on model and pool.

use crate::{
    disk::{Bytes, Place, Sectors},
    world::{ModelVolume, World, devices, flat},
};
use forebay_pool::{ErrorKind, Released};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::BTreeSet;

impl World {
    pub(crate) fn delete(&mut self, volume: u64, hanging: u8) {
        if self.is_copied(volume, 0, u64::MAX) {
            return;
        }
        let released = self
            .pool
            .delete_volume(VolumeId(volume), &devices(hanging))
            .unwrap();
        let known = self.volumes.remove(&volume).unwrap();
        self.drop_map(volume, known, hanging, &released);
    }

    /// The rest of the map is freed later, unless it is shared.
    pub(crate) fn drop_map(&mut self, volume: u64, old: ModelVolume, hanging: u8, said: &Released) {
        let now: BTreeSet<Place> = said.runs.iter().copied().flat_map(flat).collect();
        for (logical, place) in old.map.iter().filter(|(_, place)| !now.contains(place)) {
            assert!(!old.uncommitted.contains_key(logical));
            let hangs = hanging & (1 << place.0) != 0;
            assert!(
                !hangs || self.layered.contains(&volume),
                "{place:?} is freed later"
            );
        }
        self.give_up(volume, old.map.into_iter().collect(), hanging, said);
    }

    pub(crate) fn delete_more(&mut self) {
        let released = self.pool.delete_more().unwrap();
        self.freed(&released);
    }

    /// Extents that no volume shows are dirty once the open batch is durable.
    pub(crate) fn freed(&mut self, said: &Released) {
        let batch = self.pool.journal().open_batch_id();
        let places: Vec<Place> = said.runs.iter().copied().flat_map(flat).collect();
        assert_eq!((said.extents, said.quarantined), (places.len() as u64, 0));
        for place in places {
            self.leave(place);
            assert!(self.dirty.insert(place), "{place:?} freed twice");
            self.freed_in.insert(place, batch);
        }
    }

    fn leave(&mut self, place: Place) {
        assert!(self.held.remove(&place), "{place:?} was in no map");
        for (id, other) in &self.volumes {
            assert!(!other.reaches(place), "{id} still shows {place:?}");
        }
    }

    pub(crate) fn release(&mut self, volume: u64, first: u64, count: u64, hanging: u8) {
        if self.is_copied(volume, first, count) {
            return;
        }
        let id = VolumeId(volume);
        let known = self.volumes.get_mut(&volume).unwrap();
        let result = self
            .pool
            .release(id, ExtentIndex(first), count, &devices(hanging));
        if first + count > known.extents {
            assert_eq!(result.unwrap_err().kind, ErrorKind::Invalid);
            return;
        }
        let said = result.unwrap();
        let now: BTreeSet<Place> = said.runs.iter().copied().flat_map(flat).collect();
        let gone: Vec<(u64, Place)> = known
            .map
            .range(first..first + count)
            .map(|(logical, place)| (*logical, *place))
            .collect();
        for (logical, place) in &gone {
            // What a layer maps is only hidden.
            let may_stay = self.layered.contains(&volume) && !known.is_pending(*logical);
            assert!(now.contains(place) || may_stay, "{place:?} is not freed");
            known.map.remove(logical);
            known.shadow.remove(logical);
            known.uncommitted.remove(logical);
            known.committing.remove(logical);
        }
        self.give_up(volume, gone, hanging, &said);
    }

    /// Freed extents are dirty, or quarantined during a write.
    fn give_up(&mut self, volume: u64, gone: Vec<(u64, Place)>, hanging: u8, said: &Released) {
        let mut released: BTreeSet<Place> = said.runs.iter().copied().flat_map(flat).collect();
        assert_eq!(said.extents, released.len() as u64);
        let batch = self.pool.journal().open_batch_id();
        let mut quarantined = 0;
        for (logical, place) in gone {
            if released.remove(&place) {
                self.leave(place);
                if hanging & (1 << place.0) != 0 {
                    quarantined += 1;
                    self.version += 1;
                    let bytes = Bytes {
                        volume,
                        logical,
                        version: self.version,
                    };
                    self.tenants.wrote(volume, logical, 3, self.version);
                    self.hang(place, [Some(bytes); 2]);
                } else {
                    assert!(self.dirty.insert(place), "{place:?} freed twice");
                    self.freed_in.insert(place, batch);
                }
            }
            self.tenants.released(volume, logical);
            self.leaving.push((batch, (volume, logical), place));
        }
        assert_eq!((released, said.quarantined), (BTreeSet::new(), quarantined));
    }

    /// A write that hangs may still arrive.
    pub(crate) fn hang(&mut self, place: Place, content: Sectors) {
        assert!(self.quarantined.insert(place), "{place:?} given up twice");
        let since = self.pool.allocator().quarantine_mark();
        self.hanging.push((since, place, content));
    }

    /// Requests up to the mark have ended; later writes may hang.
    pub(crate) fn end_quarantine(&mut self) {
        let Some((device, mark)) = self.settling.take() else {
            return;
        };
        self.hanging
            .retain(|(since, place, _)| place.0 != device || *since > mark);
        let ended = self.pool.end_quarantine_on(DeviceIndex(device), mark);
        let batch = self.pool.journal().open_batch_id();
        let still: BTreeSet<Place> = self
            .quarantined
            .iter()
            .copied()
            .filter(|(on, extent)| {
                let run = forebay_pool::DeviceRun::new(DeviceIndex(*on), *extent, 1);
                self.pool.allocator().extent_state(run)
                    == Some(forebay_pool::ExtentState::Quarantined)
            })
            .collect();
        let gone: Vec<Place> = self.quarantined.difference(&still).copied().collect();
        assert_eq!(gone.len() as u64, ended);
        for place in gone {
            assert_eq!(place.0, device);
            self.dirty.insert(place);
            self.freed_in.insert(place, batch);
        }
        self.quarantined = still;
        assert_eq!(
            self.pool.allocator().quarantined_on(DeviceIndex(device)),
            self.quarantined
                .iter()
                .filter(|(on, _)| *on == device)
                .count() as u64
        );
    }

    pub(crate) fn zero_fill(&mut self, device: u8, max: u64, fate: u64) {
        let runs = self.pool.take_dirty(DeviceIndex(device), max);
        assert!(runs.iter().map(|run| run.count).sum::<u64>() <= max);
        for run in &runs {
            for place in flat(*run) {
                assert!(!self.is_away(place));
                assert!(
                    self.dirty.contains(&place),
                    "{place:?} laundered while not dirty"
                );
                let freed = self.freed_in.get(&place);
                assert!(
                    freed.is_none_or(|batch| *batch <= self.pool.journal().committed_id()),
                    "{place:?} laundered before it was durably free"
                );
                self.disk.write(place, [None; 2]);
            }
        }
        // Zeroed and not flushed: a cut may undo it.
        if fate == 1 {
            for run in runs {
                self.pool.zero_fill_failed(run).unwrap();
            }
            return;
        }
        // The zeroing of the first run hangs.
        let hung = runs.first().copied().filter(|_| fate == 2);
        self.disk.flush(device);
        for run in runs {
            for place in flat(run) {
                self.dirty.remove(&place);
                self.freed_in.remove(&place);
                if Some(run) == hung {
                    self.quarantined.insert(place);
                }
            }
            if Some(run) == hung {
                self.pool.quarantine(run).unwrap();
            } else {
                self.pool.zero_filled(run).unwrap();
            }
        }
    }
}
