//! Tests of a daemon that finds unflushed writes of an earlier engine.

use std::collections::BTreeSet;

use forebay_device::{power, volatile};
use forebay_xlate::boundary::message::{Job, ToEngine};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Word};

use super::*;

const MARK: [u8; 512] = [0xa5; 512];

impl Life {
    /// A write in the device's cache, known to the engine only.
    fn write_through_engine(&self, word: Word) -> (usize, u64) {
        let offset = {
            let core = self.owner.base.core.borrow();
            let device = &core.pool.devices()[usize::from(word.device().0)];
            device.data_offset_bytes + word.extent().0 * EXTENT
        };
        let devices = self.owner.base.devices.borrow();
        let device = devices.iter().find(|d| d.index == word.device()).unwrap();
        device.store.0.write_at(offset, &MARK).unwrap();
        (usize::from(word.device().0), offset)
    }

    /// 64 extents over all devices, durably mapped and written since.
    async fn written(&mut self) -> (VolumeId, Vec<(usize, u64)>) {
        let volume = self.volume("a", 16 << 20).await;
        for extent in 0..64 {
            self.fake.write(volume, extent).await;
        }
        let sequence = self.fake.highest_sequence(volume);
        assert!(self.fake.flush(volume, sequence).await);
        let words = (0..64).map(|extent| self.fake.grants[&(volume, extent)]);
        let places = words.map(|word| self.write_through_engine(word));
        (volume, places.collect())
    }

    fn flush_covers(&self, volume: VolumeId) -> BTreeSet<u8> {
        let grants = self.fake.log.iter().flat_map(|message| match message {
            ToEngine::Grants { grants } => &grants[..],
            _ => &[],
        });
        let words = grants
            .filter(|grant| grant.volume == volume)
            .map(|grant| Word::from_bits(grant.word))
            .filter(|word| word.writable());
        words.map(|word| word.device().0).collect()
    }

    /// As if a daemon was killed between a release's commit and the removal of the entry.
    async fn release_but_list(&mut self, volume: VolumeId, first: u64, count: u64) {
        let released = self.owner.base.core.borrow_mut().pool.release(
            volume,
            ExtentIndex(first),
            count,
            &BTreeSet::new(),
        );
        released.unwrap();
        self.owner.base.commit().await.unwrap();
    }

    fn revoked(&self) -> Vec<ExtentRange> {
        let revokes = self.fake.log.iter().filter_map(|m| match m {
            ToEngine::Revoke { range, .. } => Some(*range),
            _ => None,
        });
        revokes.collect()
    }

    fn listed(&self, volume: VolumeId) -> Vec<ExtentRange> {
        let core = self.owner.base.core.borrow();
        let all = core.grants.granted(volume, ExtentRange::new(0, 256));
        all.iter().map(|grant| grant.range).collect()
    }

    async fn next_takes_over(self, place: &Place, begin: Begin, prepare: fn(&mut Fake)) -> Self {
        let mut fake = self.kill().await;
        (fake.answer_jobs, fake.answer_revokes) = (false, false);
        fake.take_the_rest();
        fake.open_jobs.clear();
        (fake.answer_jobs, fake.answer_revokes) = (true, true);
        fake.log.clear();
        prepare(&mut fake);
        Self::take_over(place, begin, fake).await
    }
}

/// Returns how many of these writes survived, by device.
fn kept(place: &Place, places: &[(usize, u64)], seed: u64) -> Vec<usize> {
    let on = |device: usize| {
        power::cut(&place.path(device), seed).unwrap();
        let image = std::fs::read(place.path(device)).unwrap();
        let is_kept = |offset: u64| image[offset as usize..][..512] == MARK;
        let here = places.iter().filter(|(d, _)| *d == device);
        here.filter(|(_, offset)| is_kept(*offset)).count()
    };
    (0..place.devices).map(on).collect()
}

fn written_on(places: &[(usize, u64)], devices: usize) -> Vec<usize> {
    let on = |device| places.iter().filter(|(d, _)| *d == device).count();
    (0..devices).map(on).collect()
}

fn generation(generation: u64) -> Begin {
    Begin {
        generation,
        ..Begin::default()
    }
}

#[test]
fn a_stop_leaves_nothing_that_only_the_grant_table_knows() {
    for seed in 0..3 {
        run(async move {
            let place = Place::with_volatile_devices(3);
            // The third device has no catalog, whose commits would flush it.
            let mut life = Life::first(&place, Begin::default()).await;
            let (_, places) = life.written().await;
            assert_eq!(
                life.owner
                    .base
                    .core
                    .borrow()
                    .pool
                    .volumes()
                    .uncommitted_extents(),
                0
            );
            life.owner
                .pool_owner
                .flusher
                .sync_all_without_engine()
                .await
                .unwrap();
            assert!(!life.owner.pool_owner.flusher.lists_missing());
            life.kill().await;
            assert_eq!(kept(&place, &places, seed), written_on(&places, 3));
        });
    }
}

#[test]
fn a_stop_that_can_not_flush_a_device_says_so() {
    run(async {
        let place = Place::with_volatile_devices(2);
        let mut life = Life::first(&place, Begin::default()).await;
        let (_, places) = life.written().await;
        std::fs::write(volatile::fail_path(&place.path(1)), "").unwrap();
        let error = life
            .owner
            .pool_owner
            .flusher
            .sync_all_without_engine()
            .await
            .unwrap_err();
        assert!(error.to_string().contains("can't flush"), "{error}");
        life.kill().await;
        let kept = kept(&place, &places, 1);
        assert_eq!(kept[0], written_on(&places, 2)[0], "the other is flushed");
    });
}

#[test]
fn a_missing_device_that_is_listed_keeps_the_table() {
    run(async {
        let place = Place::with_devices(2);
        let mut life = Life::first(&place, Begin::default()).await;
        life.written().await;
        assert!(!life.owner.pool_owner.flusher.lists_missing());
        life.owner
            .base
            .devices
            .borrow_mut()
            .retain(|d| d.index.0 == 0);
        assert!(life.owner.pool_owner.flusher.lists_missing());
        life.owner
            .pool_owner
            .flusher
            .sync_all_without_engine()
            .await
            .unwrap();
    });
}

#[test]
fn without_a_table_every_device_is_flushed_first() {
    for seed in 0..3 {
        run(async move {
            let place = Place::with_volatile_devices(3);
            let mut life = Life::first(&place, Begin::default()).await;
            let (a, places) = life.written().await;
            let before = life.kill().await;
            std::fs::remove_file(place.grants()).unwrap();
            let life = Life::next(&place, generation(2), &before).await;
            assert_eq!(life.flush_covers(a), BTreeSet::new(), "it need not");
            life.kill().await;
            assert_eq!(kept(&place, &places, seed), written_on(&places, 3));
        });
    }
}

#[test]
fn a_device_that_could_not_be_flushed_is_covered_until_it_is() {
    run(async {
        let place = Place::with_volatile_devices(2);
        let mut life = Life::first(&place, Begin::default()).await;
        let (a, _) = life.written().await;
        let before = life.kill().await;
        std::fs::remove_file(place.grants()).unwrap();
        let fail = volatile::fail_path(&place.path(1));
        // It fails as soon as the pool is open.
        let begins_failing = |begin: &Begin| {
            let owner = owner_of(&place, begin, false);
            std::fs::write(&fail, "").unwrap();
            owner
        };
        let owner = begins_failing(&generation(2));
        let life = Life::with_fresh_engine(owner, 2, Some(&before)).await;
        assert_eq!(life.flush_covers(a), BTreeSet::from([1]));
        // The next daemon also knows, although it has a table; the internal lane flushes the device
        // now and then.
        let before = life.kill().await;
        std::fs::remove_file(&fail).unwrap();
        let mut begin = generation(3);
        begin.limits.sync_every = Duration::from_millis(30);
        let owner = begins_failing(&begin);
        assert!(owner.pool_owner.adoption.is_unflushed(DeviceIndex(1)));
        let mut life = Life::with_fresh_engine(owner, 3, Some(&before)).await;
        assert_eq!(life.flush_covers(a), BTreeSet::from([1]));
        std::fs::remove_file(&fail).unwrap();
        let owner = life.owner.clone();
        let flushed = async {
            while !owner.pool_owner.flusher.may_hold_unflushed().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            owner.base.commit().await.unwrap();
        };
        life.with_engine(flushed).await;
        drop(owner);
        let flush = Job::Flush {
            device: DeviceIndex(1),
        };
        assert!(life.fake.jobs.contains(&flush));
        life.kill().await;
        let owner = owner_of(&place, &generation(4), false);
        assert!(!owner.pool_owner.adoption.is_unflushed(DeviceIndex(1)));
        owner.close();
    });
}

#[test]
fn only_the_stale_part_of_a_grant_entry_is_removed() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        for extent in 0..16 {
            life.fake.write(a, extent).await;
        }
        assert!(life.fake.flush(a, life.fake.highest_sequence(a)).await);
        assert_eq!(life.listed(a), [ExtentRange::new(0, 16)], "one entry");
        life.release_but_list(a, 10, 2).await;
        let before = life.kill().await;
        let mut life = Life::next(&place, generation(2), &before).await;
        assert_eq!(life.revoked(), [ExtentRange::new(10, 2)]);
        let rest = [ExtentRange::new(0, 10), ExtentRange::new(12, 4)];
        assert_eq!(life.listed(a), rest);
        // The remaining entries make the next engine's FLUSH cover the device.
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        assert_eq!(life.flush_covers(a), BTreeSet::from([0]));
    });
}

#[test]
fn an_uncommitted_part_of_a_stale_entry_outlives_the_next_daemons_too() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        for extent in 0..8 {
            life.fake.write(a, extent).await;
        }
        assert!(life.fake.flush(a, life.fake.highest_sequence(a)).await);
        for extent in 8..16 {
            life.fake.write(a, extent).await;
        }
        assert_eq!(life.listed(a), [ExtentRange::new(0, 16)], "one entry");
        life.release_but_list(a, 2, 2).await;
        let word = life.fake.grants[&(a, 12)];
        let mut begin = Begin::default();
        begin.limits.adoption = Duration::from_secs(1);
        let prepare = |fake: &mut Fake| fake.fail_flushes = true;
        let mut life = life.next_takes_over(&place, begin, prepare).await;
        let owner = life.owner.clone();
        life.with_engine(owner.pool_owner.adoption.wait_settled_on(DeviceIndex(0)))
            .await;
        drop(owner);
        assert_eq!(life.revoked(), [ExtentRange::new(2, 2)]);
        assert_eq!(
            life.owner
                .base
                .core
                .borrow()
                .pool
                .volumes()
                .uncommitted_extents(),
            8
        );
        let mut life = life.next_takes_over(&place, Begin::default(), |_| {}).await;
        assert_eq!(life.mapped(a), 14);
        assert_eq!(life.fake.fault(a, 12, true).await, Ok(word));
    });
}

#[test]
fn a_rewritten_extent_is_not_taken_for_stale() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        for extent in 0..8 {
            life.fake.write(a, extent).await;
        }
        assert!(life.fake.flush(a, life.fake.highest_sequence(a)).await);
        life.release_but_list(a, 2, 4).await;
        // Without an answer to the revoke, faults are answered before this is settled.
        let mut begin = Begin::default();
        begin.limits.adoption = Duration::from_millis(100);
        begin.limits.revoke = Duration::from_millis(200);
        begin.limits.settle = Duration::from_millis(50);
        let prepare = |fake: &mut Fake| fake.answer_revokes = false;
        let mut life = life.next_takes_over(&place, begin, prepare).await;
        assert_eq!(life.revoked()[0], ExtentRange::new(2, 4));
        // A written extent is revoked at its old place and gets a new one.
        life.fake.ask_fault(a, 3, true);
        life.fake.answer_revokes = true;
        life.fake.answer_all_revokes();
        let word = life.fake.answer_to(a, 3, true).await.unwrap();
        let owner = life.owner.clone();
        life.with_engine(owner.pool_owner.adoption.wait_settled_on(DeviceIndex(0)))
            .await;
        life.fake.settle().await;
        let mine = owner
            .base
            .core
            .borrow()
            .grants
            .granted(a, ExtentRange::new(3, 1));
        assert_eq!(mine.len(), 1, "{mine:?}");
        assert_eq!(mine[0].word, word);
        assert_eq!(life.fake.grants.get(&(a, 3)), Some(&word));
    });
}

#[test]
fn a_failed_flush_does_not_block_revoking_stale_grants() {
    run(async {
        let place = Place::with_devices(2);
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        let b = life.volume("b", 16 << 20).await;
        for extent in 0..64 {
            life.fake.write(a, extent).await;
            life.fake.write(b, extent).await;
        }
        assert!(life.fake.flush(b, life.fake.highest_sequence(b)).await);
        let uncommitted = life
            .owner
            .base
            .core
            .borrow()
            .pool
            .volumes()
            .uncommitted_extents();
        life.release_but_list(b, 0, 64).await;
        let mut begin = Begin::default();
        begin.limits.adoption = Duration::from_secs(1);
        let prepare = |fake: &mut Fake| fake.fail_flushes = true;
        let mut life = life.next_takes_over(&place, begin, prepare).await;
        let owner = life.owner.clone();
        for device in 0..2 {
            life.with_engine(
                owner
                    .pool_owner
                    .adoption
                    .wait_settled_on(DeviceIndex(device)),
            )
            .await;
        }
        assert_eq!(life.listed(b), []);
        assert_eq!(
            owner
                .base
                .core
                .borrow()
                .pool
                .volumes()
                .uncommitted_extents(),
            uncommitted
        );
        let held = life.fake.grants.keys().filter(|(volume, _)| *volume == a);
        assert_eq!(held.count(), 64);
    });
}
