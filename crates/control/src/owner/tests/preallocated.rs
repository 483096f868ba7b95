//! Tests of preallocated extents.

use std::collections::BTreeSet;

use super::*;

fn shuffled(count: u64) -> impl Iterator<Item = u64> {
    assert!(count.is_power_of_two());
    (0..count).map(move |i| (i * 2_654_435_761 + 12_345) % count)
}

/// A pool in which a window is a small part of a volume's reserved extents.
fn large() -> Begin {
    Begin {
        size_bytes: 1 << 30,
        ..Begin::default()
    }
}

impl Life {
    /// Makes every rate of faults count as fast.
    fn hurry(&self) {
        self.owner
            .pool_owner
            .revoker
            .preallocated
            .tick
            .set(Duration::from_secs(3600));
    }

    fn preallocated(&self, volume: VolumeId) -> u64 {
        let core = self.owner.base.core.borrow();
        core.pool.volumes().space_of(volume).unwrap().preallocated
    }

    /// Returns how many faults that took.
    async fn write_fast(&mut self, volume: VolumeId, extents: impl Iterator<Item = u64>) -> u64 {
        let before = self.owner.base.counters.faults.get();
        for extent in extents {
            self.fake.write(volume, extent).await;
        }
        self.owner.base.counters.faults.get() - before
    }

    async fn wait_until(&mut self, what: impl Fn(&Self) -> bool) {
        for _ in 0..1200 {
            if what(self) {
                return;
            }
            self.fake.listen(Duration::from_millis(50)).await;
        }
        panic!("{:?}", self.space());
    }
}

#[test]
fn random_first_writes_soon_ask_no_more() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, large()).await;
        life.hurry();
        let a = life.volume("a", 32 << 20).await;
        // A volume's reserved extents grow with commits.
        for part in 0..2 {
            life.write_fast(a, shuffled(512).skip(part * 40).take(40))
                .await;
            let owner = life.owner.clone();
            life.with_engine(owner.base.commit()).await.unwrap();
        }
        let asked = life.write_fast(a, shuffled(512).skip(80)).await;
        assert!(asked < 200, "{asked} questions for 432 extents");
        assert_eq!(
            life.mapped(a),
            512,
            "each has its own place; the fake looks"
        );
        assert!(life.fake.flush(a, life.fake.highest_sequence(a)).await);
    });
}

#[test]
fn slow_writes_get_what_they_ask_for() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.hurry();
        let a = life.volume("a", 32 << 20).await;
        for extent in shuffled(512).take(30) {
            life.fake.write(a, extent).await;
        }
        assert_eq!((life.mapped(a), life.preallocated(a)), (30, 0));
    });
}

#[test]
fn unwritten_preallocated_extents_return_when_writes_stop() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, large()).await;
        life.hurry();
        let a = life.volume("a", 32 << 20).await;
        let clean = life.space().clean;
        let written: BTreeSet<u64> = shuffled(512).take(220).collect();
        life.write_fast(a, written.iter().copied()).await;
        let asked = life.write_fast(a, shuffled(512).skip(220).take(60)).await;
        assert!(life.mapped(a) > 280 && asked < 60, "{asked}");
        assert!(life.preallocated(a) > 0);
        let used = life.space().used_bytes() / EXTENT;
        assert!(used < life.mapped(a), "what is ahead is not called used");
        life.wait_until(|life| life.mapped(a) == 280).await;
        assert_eq!(life.preallocated(a), 0);
        assert_eq!(life.space().used_bytes() / EXTENT, 280);
        life.wait_until(|life| life.space().dirty == 0).await;
        let space = life.space();
        assert_eq!(space.clean + space.spare, clean - 280);
        assert_eq!(life.write_fast(a, shuffled(512).take(280)).await, 0);
        life.write_fast(a, shuffled(512)).await;
        life.wait_until(|life| life.mapped(a) - life.preallocated(a) == 512)
            .await;
    });
}

#[test]
fn a_full_pool_holds_only_written_extents() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.hurry();
        let [a, b] = [
            life.volume("a", 32 << 20).await,
            life.volume("b", 64 << 20).await,
        ];
        let total = life.space().total;
        life.write_fast(a, shuffled(512).take(200)).await;
        assert!(life.preallocated(a) > 0);
        life.write_fast(b, 0..total - 200).await;
        assert_eq!(life.mapped(a) + life.mapped(b), total);
        let failure = life.fake.fault(b, total, true).await.unwrap_err();
        assert_eq!(
            failure,
            forebay_xlate::boundary::message::FaultFailure::NoSpace
        );
    });
}

#[test]
fn another_daemon_takes_them_as_stored() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, large()).await;
        life.hurry();
        let a = life.volume("a", 32 << 20).await;
        life.write_fast(a, shuffled(512).take(200)).await;
        let mapped = life.mapped(a);
        assert!(life.preallocated(a) > 0);
        let mut before = life.kill().await;
        before.take_the_rest();
        let mut life = Life::take_over(&place, large(), before).await;
        assert_eq!((life.mapped(a), life.preallocated(a)), (mapped, 0));
        life.fake.settle().await;
        assert!(!life.fake.grants.values().any(|word| word.is_preallocated()));
        assert_eq!(life.write_fast(a, shuffled(512).take(200)).await, 0);
    });
}

#[test]
fn a_space_reservation_reclaims_preallocated_extents() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.hurry();
        let a = life.volume("a", 32 << 20).await;
        life.write_fast(a, shuffled(512).take(200)).await;
        let rest = (life.space().total - 200) * EXTENT;
        let owner = life.owner.clone();
        let body = VolumeCreate {
            name: "b".to_owned(),
            size_bytes: Some(rest),
            block_bytes: None,
            reserved_bytes: rest,
            rbd: None,
        };
        let create = owner.volumes.volume_create("t".to_owned(), body);
        life.with_engine(create).await.unwrap();
        assert_eq!(life.mapped(a), 200);
    });
}

#[test]
fn a_clean_shutdown_leaves_no_preallocated_extents() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, large()).await;
        life.hurry();
        let a = life.volume("a", 32 << 20).await;
        life.write_fast(a, shuffled(512).take(200)).await;
        assert!(life.preallocated(a) > 0);
        let owner = life.owner.clone();
        let used_bytes = owner.statistics.published_used(a);
        let given = (life.mapped(a) - life.preallocated(a)) * EXTENT;
        assert_eq!(used_bytes, given, "a host is told what was written");
        life.with_engine(
            owner
                .pool_owner
                .revoker
                .give_up_preallocated(Duration::from_secs(60)),
        )
        .await;
        assert_eq!((life.mapped(a), life.preallocated(a)), (200, 0));
        life.write_fast(a, shuffled(512).skip(200).take(40)).await;
        assert_eq!((life.mapped(a), life.preallocated(a)), (240, 0));
        drop(owner);
        let mut before = life.kill().await;
        before.take_the_rest();
        let mut life = Life::take_over(&place, large(), before).await;
        assert_eq!(life.mapped(a), 240);
        life.fake.settle().await;
        assert_eq!(life.write_fast(a, shuffled(512).take(240)).await, 0);
    });
}

#[test]
fn preallocated_extents_are_evicted_last() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, large()).await;
        life.hurry();
        let a = life.volume("a", 32 << 20).await;
        let b = life.volume("b", 32 << 20).await;
        life.fake.write(b, 0).await;
        life.write_fast(a, shuffled(512).take(200)).await;
        let owner = life.owner.clone();
        life.with_engine(owner.pool_owner.flusher.sync_all())
            .await
            .unwrap();
        assert!(life.preallocated(a) > 0);
        let listed = owner.base.core.borrow().grants.usage().0;
        let mut seen = BTreeSet::new();
        for _ in 0..listed {
            let grant = owner.base.core.borrow_mut().grants.victim().unwrap();
            seen.insert(grant.volume);
            assert_eq!(
                owner.pool_owner.revoker.may_leave(&grant, false),
                grant.volume == b
            );
            assert!(owner.pool_owner.revoker.may_leave(&grant, true));
        }
        assert_eq!(seen, BTreeSet::from([a, b]));
    });
}
