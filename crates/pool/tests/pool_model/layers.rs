//! Snapshots, clones, copies and merges, on model and pool.

use crate::{
    common::EXTENT,
    disk::Place,
    world::{ModelVolume, OpenCopy, World, devices},
};
use forebay_pool::{
    BatchId, CopyFailure, DeviceRun, ErrorKind, FaultAnswer, NewClone, NewSnapshot, UnneededCursor,
};
use forebay_xlate::types::{ExtentIndex, VolumeId};

/// More would only slow the test down.
const SNAPSHOTS: usize = 6;

impl World {
    /// Commits a snapshot or a rollback of the volume before it is written.
    pub(crate) fn thaw(&mut self, volume: u64) {
        let batch = self.frozen.remove(&volume);
        if batch.is_some_and(|batch| batch > self.pool.journal().committed_id()) {
            self.commit_all();
        }
    }

    pub(crate) fn is_copied(&self, volume: u64, first: u64, count: u64) -> bool {
        let range = (volume, first)..(volume, first.saturating_add(count));
        self.copies.range(range).next().is_some()
    }

    pub(crate) fn take_snapshot(&mut self, volumes: u8, flushed: bool) {
        let picked = (0..4).filter(|at| volumes & (1 << at) != 0);
        let group: Vec<u64> = picked.filter_map(|at| self.nth(at)).collect();
        let taken = self.volumes.values().filter(|known| known.of.is_some());
        let is_full = taken.count() + group.len() > SNAPSHOTS;
        if group.is_empty() || is_full {
            return;
        }
        // No snapshot is taken while a device is away.
        self.bring_back();
        if flushed {
            group.iter().for_each(|volume| self.flush(*volume, 2));
        }
        self.names += 1;
        let name = format!("s{}", self.names);
        let new = |volume: &u64| NewSnapshot {
            volume: VolumeId(*volume),
            name: name.clone(),
        };
        let new: Vec<NewSnapshot> = group.iter().map(new).collect();
        let is_busy = group.iter().any(|volume| {
            let known = &self.volumes[volume];
            let pending = known.uncommitted.len() + known.committing.len();
            pending > 0 || self.is_copied(*volume, 0, u64::MAX)
        });
        let ids = match self.pool.snapshots().take(&new, 0) {
            Ok(ids) => ids,
            Err(error) if error.kind == ErrorKind::NoSpace => {
                let promises = |volume: &u64| self.volumes[volume].reserved > 0;
                return assert!(group.iter().any(promises), "{error}");
            }
            Err(error) => return assert!(error.kind == ErrorKind::InUse && is_busy, "{error}"),
        };
        assert!(!is_busy && ids.len() == group.len());
        for (volume, id) in group.into_iter().zip(ids) {
            let known = ModelVolume {
                reserved: 0,
                of: Some(volume),
                ..self.volumes[&volume].clone()
            };
            self.add_relative(volume, id.0, known);
            self.layered.insert(volume);
            let batch = self.pool.journal().open_batch_id();
            self.frozen.insert(volume, batch);
        }
    }

    fn add_relative(&mut self, of: u64, id: u64, known: ModelVolume) {
        self.add(id, known);
        self.families.insert(id, self.families[&of]);
        self.layered.insert(id);
        self.tenants.copied(of, id);
        self.tenants.flushed(id);
    }

    pub(crate) fn clone_snapshot(&mut self, pick: usize, reserved: u64) {
        let Some(snapshot) = self.nth_snapshot(pick) else {
            return;
        };
        if self.nth(5).is_some() {
            return;
        }
        let known = ModelVolume {
            of: None,
            reserved: reserved.min(self.volumes[&snapshot].extents),
            ..self.volumes[&snapshot].clone()
        };
        self.names += 1;
        let new = NewClone {
            snapshot: VolumeId(snapshot),
            tenant: if pick == 0 { "u" } else { "t" }.into(),
            name: format!("c{}", self.names),
            reserved_bytes: known.reserved * EXTENT,
        };
        let most = self.pool.reservable_bytes(None);
        match self.pool.snapshots().clone_snapshot(&new, 0) {
            Ok(id) => self.add_relative(snapshot, id.0, known),
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::NoSpace);
                assert!(new.reserved_bytes > most);
            }
        }
    }

    pub(crate) fn roll_back(&mut self, volume: u64, pick: usize, hanging: u8) {
        let (id, hung) = (VolumeId(volume), devices(hanging));
        let its = self
            .volumes
            .iter()
            .filter(|(_, known)| known.of == Some(volume));
        let its: Vec<u64> = its.map(|(id, _)| *id).collect();
        let to = its.get(pick % its.len().max(1)).copied();
        match (to, self.nth_snapshot(pick)) {
            (Some(_), _) => {
                let refused = self.pool.snapshots().roll_back(id, None, &hung);
                assert_eq!(refused.unwrap_err().kind, ErrorKind::InUse);
            }
            (None, Some(other)) => {
                let other = Some(VolumeId(other));
                let refused = self.pool.snapshots().roll_back(id, other, &hung);
                assert_eq!(refused.unwrap_err().kind, ErrorKind::Invalid);
            }
            (None, None) => {}
        }
        // Without a snapshot, the volume is erased.
        let result = self.pool.snapshots().roll_back(id, to.map(VolumeId), &hung);
        if self.is_copied(volume, 0, u64::MAX) {
            assert_eq!(result.unwrap_err().kind, ErrorKind::InUse);
            return;
        }
        let map = to.map_or_else(Default::default, |to| self.volumes[&to].map.clone());
        let known = self.volumes.get_mut(&volume).unwrap();
        let now = ModelVolume {
            extents: known.extents,
            reserved: known.reserved,
            map,
            ..ModelVolume::default()
        };
        let old = std::mem::replace(known, now);
        self.drop_map(volume, old, hanging, &result.unwrap());
        if let Some(snapshot) = to {
            self.tenants.copied(snapshot, volume);
        }
        let batch = self.pool.journal().open_batch_id();
        self.frozen.insert(volume, batch);
    }

    /// A write that waits for the copy of a shared extent.
    pub(crate) fn open_copy(&mut self, volume: u64, pick: usize) {
        let map = &self.volumes[&volume].map;
        let Some(logical) = map.keys().nth(pick % map.len().max(1)).copied() else {
            return;
        };
        // No copy begins before the opening is durable.
        if self.pool.journal().committed_id() == BatchId(0) {
            self.commit_all();
        }
        let id = VolumeId(volume);
        match self.pool.fault(id, ExtentIndex(logical), true).unwrap() {
            FaultAnswer::Shared { .. } if self.is_copied(volume, logical, 1) => {
                let again = self.pool.snapshots().begin_copy(id, ExtentIndex(logical));
                assert_eq!(again.unwrap_err().kind, ErrorKind::InUse);
            }
            FaultAnswer::Shared { .. } => _ = self.begin_copy(volume, logical),
            FaultAnswer::Mapped { .. } => {
                let own = self.pool.snapshots().begin_copy(id, ExtentIndex(logical));
                assert_eq!(own.unwrap_err().kind, ErrorKind::Invalid);
            }
            other => assert!(matches!(other, FaultAnswer::DeviceGone { .. }), "{other:?}"),
        }
    }

    /// `false` without space.
    pub(crate) fn begin_copy(&mut self, volume: u64, logical: u64) -> bool {
        self.thaw(volume);
        for _ in 0..12 {
            let begun = self
                .pool
                .snapshots()
                .begin_copy(VolumeId(volume), ExtentIndex(logical));
            let copy = match begun.unwrap() {
                Ok(copy) => copy,
                Err(answer) if self.wait_for_space(volume, answer) => continue,
                Err(_) => return false,
            };
            let place = |run: DeviceRun| {
                assert_eq!(run.count, 1);
                (run.device.0, run.first.0)
            };
            let (source, target) = (place(copy.source), place(copy.target));
            assert_eq!(self.volumes[&volume].map[&logical], source);
            self.check_free(target);
            // A part is there.
            self.disk.write(target, [self.disk.read(source)[0], None]);
            let copy = OpenCopy { source, target };
            self.copies.insert((volume, logical), copy);
            return true;
        }
        panic!("a copy that goes in circles");
    }

    /// Ends a copy: 2 it failed, 3 it hangs, 1 nothing was copied, as all is written.
    pub(crate) fn end_copy(&mut self, (volume, logical): (u64, u64), fate: u64, sectors: u8) {
        let copy = self.copies.remove(&(volume, logical)).unwrap();
        let (id, at) = (VolumeId(volume), ExtentIndex(logical));
        let batch = self.pool.journal().open_batch_id();
        self.ended.push((batch, volume, copy.target));
        let is_gone = self.is_away(copy.source) || self.is_away(copy.target);
        if is_gone || matches!(fate, 2 | 3) {
            let failure = match fate {
                3 => CopyFailure::Hangs,
                _ => CopyFailure::Ended,
            };
            self.pool.snapshots().fail_copy(id, at, failure).unwrap();
            if fate == 3 {
                let content = self.disk.read(copy.source);
                return self.hang(copy.target, content);
            }
            self.dirty.insert(copy.target);
            self.freed_in.insert(copy.target, batch);
            return;
        }
        let FaultAnswer::Allocated {
            device,
            extent,
            commit_seq,
        } = self.pool.snapshots().end_copy(id, at).unwrap()
        else {
            panic!("a copy ends as an allocation")
        };
        assert_eq!((device.0, extent.0), copy.target);
        assert!(commit_seq > self.highest_seq, "a sequence came again");
        self.highest_seq = commit_seq;
        let known = self.volumes.get_mut(&volume).unwrap();
        let below = known.map.insert(logical, copy.target);
        assert_eq!(below, Some(copy.source));
        known.shadow.insert(logical, copy.source);
        known.uncommitted.insert(logical, commit_seq);
        self.held.insert(copy.target);
        if fate != 1 {
            self.disk.write(copy.target, self.disk.read(copy.source));
        }
        let sectors = if fate == 1 { 3 } else { sectors };
        self.store(volume, logical, copy.target, Some(commit_seq), sectors);
    }

    pub(crate) fn plan_merge(&mut self, skip: u8) {
        let mut step = self.pool.snapshots().next_merge(None);
        for _ in 0..skip {
            let after = step.as_ref().map(|step| step.layer);
            if let Some(next) = self.pool.snapshots().next_merge(after) {
                step = Some(next);
            }
        }
        self.planned = step;
    }

    /// Does a planned step, or the next one. Volumes show the same extents as before.
    /// Frees the extents that one search finds unused by all volumes.
    pub(crate) fn free_unneeded(&mut self) {
        let mut cursor = UnneededCursor::default();
        if let Some(unneeded) = self.pool.volumes().next_unneeded(&mut cursor) {
            let released = self.pool.snapshots().free_unneeded(&unneeded).unwrap();
            assert!(released.extents > 0);
            let mut runs = released.runs.iter();
            assert!(runs.all(|run| unneeded.devices.contains(&run.device)));
            self.freed(&released);
        }
    }

    /// What each volume alone holds.
    pub(crate) fn check_alone(&self) {
        for (id, volume) in &self.volumes {
            let (mut said, mut from) = (0, Some(0));
            while let Some(chunk) = from {
                let (extents, next) = self.pool.volumes().alone(VolumeId(*id), chunk).unwrap();
                (said, from) = (said + extents, next);
            }
            let others = || self.volumes.iter().filter(|(other, _)| *other != id);
            let alone = |place: &&Place| !others().any(|(_, other)| other.reaches(**place));
            let shown = volume.map.values().chain(volume.shadow.values());
            assert_eq!(said, shown.filter(alone).count() as u64, "{id} alone");
        }
    }

    pub(crate) fn merge(&mut self, flush: bool) {
        self.free_unneeded();
        let was_planned = self.planned.is_some();
        let step = self
            .planned
            .take()
            .or_else(|| self.pool.snapshots().next_merge(None));
        let Some(step) = step else {
            return;
        };
        let volume = step.volume().map(|volume| volume.0);
        let known = volume.and_then(|volume| self.volumes.get(&volume));
        let is_busy = known.is_some_and(|known| {
            let (first, end) = (step.range.first, step.range.end());
            (known.uncommitted.range(first..end).next().is_some())
                || known.committing.range(first..end).next().is_some()
        }) || volume.is_some_and(|volume| self.is_copied(volume, 0, u64::MAX));
        match self.pool.snapshots().merge(&step) {
            Ok(released) => {
                let mut runs = released.runs.iter();
                assert!(runs.all(|run| step.devices.contains(&run.device)));
                self.freed(&released);
            }
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::InUse);
                assert!(is_busy || was_planned, "{error}");
                if let Some(volume) =
                    volume.filter(|volume| flush && self.volumes.contains_key(volume))
                {
                    self.flush(volume, 2);
                }
            }
        }
    }
}
