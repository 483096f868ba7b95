//! The operations on model and pool.

use crate::{
    Op,
    common::EXTENT,
    disk::{Bytes, Place},
    world::{EXTENTS, ModelVolume, World, flat},
};
use forebay_pool::{
    Check, DeviceHealth, ErrorKind, FaultAnswer, NewVolume, Placement, PoolSettings,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::BTreeSet;

impl World {
    pub(crate) fn step(&mut self, op: Op) {
        let volume = match op {
            Op::Delete { volume, .. }
            | Op::RollBack { volume, .. }
            | Op::BeginCopy { volume, .. }
            | Op::Grow { volume, .. }
            | Op::Reserve { volume, .. }
            | Op::Write { volume, .. }
            | Op::WriteAround { volume, .. }
            | Op::ReservePreallocated { volume }
            | Op::Flush { volume, .. }
            | Op::Release { volume, .. } => match self.nth(volume) {
                Some(volume) => volume,
                None => return,
            },
            _ => 0,
        };
        // An added device may be used once its record is durable.
        let here = |world: &Self, device: u8| usize::from(device) < world.committed.0;
        match op {
            Op::Create { extents, reserved } => self.create(extents, reserved),
            Op::Delete { hanging, .. } => self.delete(volume, hanging),
            Op::DeleteMore => self.delete_more(),
            Op::Grow { by, .. } => self.grow(volume, by),
            Op::Reserve { extents, .. } => self.set_reservation(volume, extents),
            Op::Write {
                logical, sectors, ..
            } => drop(self.write(volume, logical, sectors)),
            Op::WriteAround {
                logical,
                window,
                sectors,
                ..
            } => self.write_around(volume, logical, window, sectors),
            Op::Read { volume, logical } => {
                if let Some(volume) = self.nth_of_all(volume) {
                    self.read(volume, logical);
                }
            }
            Op::TakeSnapshot { volumes, flushed } => self.take_snapshot(volumes, flushed),
            Op::DeleteSnapshot { pick } => {
                if let Some(snapshot) = self.nth_snapshot(pick) {
                    self.delete(snapshot, 0);
                }
            }
            Op::Clone { pick, reserved } => self.clone_snapshot(pick, reserved),
            Op::RollBack { pick, hanging, .. } => self.roll_back(volume, pick, hanging),
            Op::BeginCopy { pick, .. } => self.open_copy(volume, pick),
            Op::EndCopy {
                pick,
                fate,
                sectors,
            } => {
                let pick = pick % self.copies.len().max(1);
                if let Some(key) = self.copies.keys().nth(pick).copied() {
                    self.end_copy(key, fate, sectors);
                }
            }
            Op::PlanMerge { skip } => self.plan_merge(skip),
            Op::Merge => self.merge(false),
            Op::ReservePreallocated { .. } => {
                if let Some(count) = self.pool.wants_reserve(VolumeId(volume), false) {
                    assert!(self.pool.reserve(VolumeId(volume), count).unwrap() > 0);
                }
            }
            Op::ReturnIdle => drop(self.pool.return_idle_spare()),
            Op::Flush { part, .. } => self.flush(volume, part),
            Op::Release {
                first,
                count,
                hanging,
                ..
            } => {
                self.release(volume, first, count, hanging);
            }
            Op::Take => self.take(),
            Op::Commit => {
                if self.taken.is_empty() {
                    self.take();
                }
                self.commit_one();
            }
            Op::ZeroFill { device, max, fate } => self.zero_fill(device, max, fate),
            Op::LateWrite { pick } => {
                if pick < self.hanging.len() {
                    let (_, place, content) = self.hanging.remove(pick);
                    self.disk.write(place, content);
                }
            }
            Op::Settle { device } => {
                if self.settling.is_none() {
                    self.settling = Some((device, self.pool.allocator().quarantine_mark()));
                }
            }
            Op::EndQuarantine => self.end_quarantine(),
            Op::Away { device } if here(self, device) => {
                self.set_health(device, DeviceHealth::Failed)
            }
            Op::Back { device } if here(self, device) => {
                self.set_health(device, DeviceHealth::Online)
            }
            Op::Away { .. } | Op::Back { .. } => {}
            Op::Placement { fill } => {
                let placement = if fill {
                    Placement::Fill
                } else {
                    Placement::Stripe
                };
                let settings = PoolSettings {
                    placement,
                    ..self.pool.info().settings
                };
                self.pool.set_settings(settings).unwrap();
            }
            Op::CheckPiece { extents } => self.check_piece(extents),
            Op::AddDevice => self.add_device(),
            Op::Crash {
                same_boot,
                power,
                during_commit,
                seed,
            } => {
                self.crash(same_boot, power, during_commit, seed);
            }
        }
        self.compare();
    }

    fn create(&mut self, extents: u64, reserved: u64) {
        if self.nth(3).is_some() {
            return;
        }
        self.names += 1;
        let reserved = reserved.min(extents);
        let new = NewVolume {
            tenant: "t".into(),
            name: format!("v{}", self.names),
            size_bytes: extents * EXTENT,
            block_bytes: None,
            reserved_bytes: reserved * EXTENT,
        };
        let most = self.pool.reservable_bytes(None);
        match self.pool.create_volume(&new, 0) {
            Ok(id) => {
                assert!(new.reserved_bytes <= most);
                let known = ModelVolume {
                    extents,
                    reserved,
                    ..ModelVolume::default()
                };
                self.add(id.0, known);
                self.families.insert(id.0, id.0);
                self.layered.remove(&id.0);
            }
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::NoSpace);
                assert!(new.reserved_bytes > most);
            }
        }
    }

    pub(crate) fn add(&mut self, id: u64, known: ModelVolume) {
        // After a crash an id may be reused; old grants must not apply.
        self.table.retain(|(volume, _), _| *volume != id);
        self.tenants.forget(id);
        assert!(self.volumes.insert(id, known).is_none());
    }

    fn grow(&mut self, volume: u64, by: u64) {
        let known = self.volumes.get_mut(&volume).unwrap();
        known.extents += by;
        let bytes = known.extents * EXTENT;
        self.pool.grow_volume(VolumeId(volume), bytes).unwrap();
    }

    fn set_reservation(&mut self, volume: u64, extents: u64) {
        let known = self.volumes.get_mut(&volume).unwrap();
        let extents = extents.min(known.extents);
        let id = VolumeId(volume);
        let fits = extents * EXTENT <= self.pool.reservable_bytes(Some(id));
        match self.pool.set_volume_reservation(id, extents * EXTENT) {
            Ok(()) => {
                assert!(fits || extents <= known.reserved);
                known.reserved = extents;
            }
            Err(error) => assert_eq!((error.kind, fits), (ErrorKind::NoSpace, false)),
        }
    }

    /// Writes as owner and engine do; `false` without space or device.
    fn write(&mut self, volume: u64, logical: u64, sectors: u8) -> bool {
        self.thaw(volume);
        let known = self.volumes[&volume].clone();
        let id = VolumeId(volume);
        if logical >= known.extents {
            let error = self.pool.fault(id, ExtentIndex(logical), true).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid);
            return true;
        }
        for _ in 0..12 {
            match self.pool.fault(id, ExtentIndex(logical), true).unwrap() {
                FaultAnswer::Mapped {
                    device,
                    extent,
                    count,
                    commit_seq,
                } => {
                    let place = (device.0, extent.0);
                    self.check_own(volume, logical, place, count, commit_seq);
                    self.store(volume, logical, place, commit_seq, sectors);
                    return true;
                }
                FaultAnswer::Shared {
                    device,
                    extent,
                    count,
                } => {
                    self.check_shared(volume, logical, (device.0, extent.0), count);
                    let is_open = self.is_copied(volume, logical, 1);
                    if !is_open && !self.begin_copy(volume, logical) {
                        return false;
                    }
                    let whole = u64::from(sectors == 3);
                    self.end_copy((volume, logical), whole, sectors);
                    return true;
                }
                FaultAnswer::Allocated {
                    device,
                    extent,
                    commit_seq,
                } => {
                    let place = (device.0, extent.0);
                    assert!(!known.map.contains_key(&logical));
                    assert!(commit_seq > self.highest_seq, "a sequence came again");
                    self.highest_seq = commit_seq;
                    self.check_free(place);
                    let known = self.volumes.get_mut(&volume).unwrap();
                    known.map.insert(logical, place);
                    known.uncommitted.insert(logical, commit_seq);
                    self.held.insert(place);
                    self.store(volume, logical, place, Some(commit_seq), sectors);
                    return true;
                }
                FaultAnswer::DeviceGone { device } => {
                    assert!(self.away.contains(&device.0));
                    assert_eq!(known.map[&logical].0, device.0);
                    return false;
                }
                other => {
                    if !self.wait_for_space(volume, other) {
                        return false;
                    }
                }
            }
        }
        panic!("a write that goes in circles");
    }

    /// `false` if the pool is full.
    pub(crate) fn wait_for_space(&mut self, volume: u64, answer: FaultAnswer) -> bool {
        match answer {
            FaultAnswer::NeedReserve { count } => {
                assert!(self.pool.reserve(VolumeId(volume), count).unwrap() > 0);
                self.commit_all();
            }
            FaultAnswer::AwaitCommit { batch } => {
                assert!(
                    batch > self.pool.journal().committed_id(),
                    "nothing to wait for"
                );
                self.commit_all();
            }
            FaultAnswer::AwaitZeroFill => {
                while self.pool.volumes().has_more_to_delete() {
                    self.delete_more();
                }
                self.commit_all();
                for device in 0..EXTENTS.len() as u8 {
                    self.zero_fill(device, u64::MAX, 0);
                }
                self.commit_all();
            }
            FaultAnswer::NoSpace => {
                self.check_full(volume);
                return false;
            }
            other => panic!("a write got {other:?}"),
        }
        true
    }

    /// Also preallocates neighbours, which are later written or returned.
    fn write_around(&mut self, volume: u64, logical: u64, window: u64, sectors: u8) {
        self.thaw(volume);
        let known = self.volumes[&volume].clone();
        let from = logical - logical % window;
        let around = self
            .pool
            .map_around(VolumeId(volume), ExtentIndex(logical), from..from + window)
            .unwrap();
        if let Some(around) = around {
            let (first, end) = (around.first.0, around.first.0 + around.run.count);
            assert!((first..end).contains(&logical) && end <= known.extents);
            assert_eq!(first / window, (end - 1) / window, "out of its window");
            assert!(around.commit_seq > self.highest_seq);
            self.highest_seq = around.commit_seq;
            for (logical, place) in (first..end).zip(flat(around.run)) {
                assert!(!known.map.contains_key(&logical));
                self.check_free(place);
                let known = self.volumes.get_mut(&volume).unwrap();
                known.map.insert(logical, place);
                known.uncommitted.insert(logical, around.commit_seq);
                self.held.insert(place);
                let entry = (place, around.commit_seq);
                self.table.insert((volume, logical), entry);
            }
        }
        self.write(volume, logical, sectors);
    }

    /// A new extent has no user, even after a crash, and reads as zeros.
    pub(crate) fn check_free(&self, place: Place) {
        assert!(!self.is_away(place));
        assert!(!self.held.contains(&place), "{place:?} is in a map");
        let mut copies = self.copies.values();
        assert!(
            copies.all(|copy| copy.target != place),
            "{place:?} is in use"
        );
        assert!(self.disk.is_zero(place), "{place:?} may hold old bytes");
        assert!(!self.dirty.contains(&place) && !self.quarantined.contains(&place));
        for (_, volumes, hidden) in self.expected.values().chain([&self.committed]) {
            assert!(!hidden.contains(&place), "a deleted volume has {place:?}");
            for volume in volumes.values() {
                let there = volume.map.values().any(|at| *at == place);
                assert!(!there, "{place:?} is in the catalog");
            }
        }
    }

    /// A full pool has only promised extents.
    fn check_full(&self, volume: u64) {
        let free: u64 = (0..self.pool.devices().len() as u8)
            .filter(|device| !self.away.contains(device))
            .filter_map(|device| self.pool.allocator().device_space(DeviceIndex(device)))
            .map(|space| space.clean + space.dirty)
            .sum();
        let mut promised = 0;
        for (id, other) in self.volumes.iter().filter(|(id, _)| **id != volume) {
            let said = self.pool.volumes().space_of(VolumeId(*id)).unwrap();
            promised += said.entitlement;
            let over = (said.mapped + said.reserved).saturating_sub(other.reserved);
            let copies = self.copies.keys().filter(|(of, _)| of == id).count() as u64;
            if self.away.is_empty() {
                let stock = said.reserved - copies;
                assert_eq!(stock.min(over), 0, "{id} has stock to spare");
            }
        }
        assert!(
            free <= promised,
            "full with {free} free and {promised} promised"
        );
    }

    pub(crate) fn store(
        &mut self,
        volume: u64,
        logical: u64,
        place: Place,
        seq: Option<u64>,
        sectors: u8,
    ) {
        self.version += 1;
        let version = self.version;
        let mut content = self.disk.read(place);
        for (at, sector) in content.iter_mut().enumerate() {
            if sectors & (1 << at) != 0 {
                *sector = Some(Bytes {
                    volume,
                    logical,
                    version,
                });
            }
        }
        self.disk.write(place, content);
        self.tenants.wrote(volume, logical, sectors, version);
        let seq = seq.unwrap_or(0);
        self.table.insert((volume, logical), (place, seq));
    }

    fn check_mapped(&self, volume: u64, logical: u64, place: Place, count: u64) {
        let known = &self.volumes[&volume];
        assert!(count > 0 && !self.is_away(place));
        assert!(logical + count <= known.extents, "past the volume's end");
        for at in 0..count {
            let place = (place.0, place.1 + at);
            let logical = logical + at;
            assert_eq!(known.map.get(&logical), Some(&place), "{volume}: {logical}");
            self.tenants.reads(volume, logical, self.disk.read(place));
        }
    }

    /// Nobody else reads what may be written.
    fn check_own(&self, volume: u64, logical: u64, place: Place, count: u64, seq: Option<u64>) {
        self.check_mapped(volume, logical, place, count);
        let known = &self.volumes[&volume];
        assert!(known.of.is_none(), "a snapshot may be written");
        for at in 0..count {
            if let Some(uncommitted) = known.uncommitted.get(&(logical + at)) {
                assert!(seq.is_some_and(|seq| seq >= *uncommitted));
            }
            let place = (place.0, place.1 + at);
            for (id, other) in self.volumes.iter().filter(|(id, _)| **id != volume) {
                assert!(!other.reaches(place), "{id} shows {place:?} too");
            }
        }
    }

    fn check_shared(&self, volume: u64, logical: u64, place: Place, count: u64) {
        self.check_mapped(volume, logical, place, count);
        let known = &self.volumes[&volume];
        assert!(self.layered.contains(&volume));
        assert!((logical..logical + count).all(|logical| !known.is_pending(logical)));
    }

    pub(crate) fn read(&mut self, volume: u64, logical: u64) {
        let known = self.volumes[&volume].clone();
        if logical >= known.extents {
            return;
        }
        let answer = self
            .pool
            .fault(VolumeId(volume), ExtentIndex(logical), false);
        match answer.unwrap() {
            FaultAnswer::Mapped {
                device,
                extent,
                count,
                commit_seq,
            } => {
                self.check_own(volume, logical, (device.0, extent.0), count, commit_seq);
            }
            FaultAnswer::Shared {
                device,
                extent,
                count,
            } => self.check_shared(volume, logical, (device.0, extent.0), count),
            FaultAnswer::Hole { count } => {
                assert!(count > 0 && logical + count <= known.extents);
                assert!(known.map.range(logical..logical + count).next().is_none());
                self.tenants.reads(volume, logical, [None; 2]);
                let next = logical + count;
                // Extents that hide those of layers are a hole of their own.
                let is_whole =
                    next == known.extents || known.map.contains_key(&next) || count == 4096;
                assert!(
                    is_whole || self.layered.contains(&volume),
                    "a hole that ends early"
                );
            }
            FaultAnswer::DeviceGone { device } => {
                assert!(self.away.contains(&device.0));
                assert_eq!(known.map[&logical].0, device.0);
            }
            other => panic!("{other:?}"),
        }
    }

    /// Flushes devices and commits their mappings, all from `part` 2 on. Acknowledges if no device
    /// was away.
    pub(crate) fn flush(&mut self, volume: u64, part: u64) {
        let id = VolumeId(volume);
        let known = self.volumes.get_mut(&volume).unwrap();
        let highest = self.pool.volumes().uncommitted(id);
        let lowest = known.uncommitted.values().min().copied().unwrap_or(0);
        let up_to = match (part, highest) {
            (_, None) => u64::MAX,
            (0, Some(highest)) => lowest + (highest - lowest) / 2,
            (_, Some(highest)) => highest,
        };
        let flushed: BTreeSet<u8> = (0..EXTENTS.len() as u8)
            .filter(|device| !self.away.contains(device))
            .collect();
        flushed.iter().for_each(|device| self.disk.flush(*device));
        let batch = self.pool.journal().open_batch_id();
        let due: Vec<(u64, u64)> = known
            .uncommitted
            .iter()
            .filter(|(logical, seq)| **seq <= up_to && flushed.contains(&known.map[logical].0))
            .map(|(logical, seq)| (*logical, *seq))
            .collect();
        let waits = self.pool.volumes().pending_on(id, up_to);
        for (logical, seq) in &due {
            assert!(waits.contains(&DeviceIndex(known.map[logical].0)));
            known.uncommitted.remove(logical);
            known.shadow.remove(logical);
            known.committing.insert(*logical, (*seq, batch));
        }
        let committed = self
            .pool
            .commit_mappings(id, up_to, |device| flushed.contains(&device.0));
        assert_eq!(committed.unwrap(), due.len() as u64);
        if let Some(oldest) = due.iter().map(|(_, seq)| *seq).min() {
            assert!(
                self.pool.volumes().durable_seq(id) < oldest,
                "durable before its commit"
            );
        }
        if part > 1 {
            self.commit_all();
            let known = &self.volumes[&volume];
            if known.map.values().all(|place| flushed.contains(&place.0)) {
                let durable = self.pool.volumes().durable_seq(id);
                assert!(highest.is_none_or(|highest| durable >= highest));
                self.tenants.flushed(volume);
            }
        }
    }

    fn check_piece(&mut self, extents: u64) {
        let mut check = match self.check.take() {
            Some(check) => check,
            None => Check::begin(&mut self.pool).unwrap(),
        };
        if check.step(&self.pool, extents).unwrap() {
            assert_eq!(check.end().problems, []);
        } else {
            self.check = Some(check);
        }
    }
}
