//! Tests of space: releases, zero-fill, a full pool, a full grant table.

use forebay_xlate::ExtentRange;
use forebay_xlate::boundary::message::{FaultFailure, Job, ToEngine};

use super::*;

fn is_revoke(message: &ToEngine) -> Option<()> {
    matches!(message, ToEngine::Revoke { .. }).then_some(())
}

#[test]
fn a_release_waits_for_the_revoke() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        for extent in 0..10 {
            life.fake.write(a, extent).await;
        }
        life.fake.answer_revokes = false;
        let before = life.space();
        let release = life.fake.release(a, ExtentRange::new(2, 4));
        life.fake.until(is_revoke).await;
        life.fake.ask_fault(a, 3, true);
        life.fake.fault(a, 20, true).await.unwrap();
        assert_eq!(
            life.mapped(a),
            11,
            "nothing changes before the engine lets go"
        );
        assert_eq!(life.space().dirty, before.dirty);
        assert!(!life.fake.log.iter().any(is_release_done));
        life.fake.answer_revoke();
        // The fake rejects a grant in the range before this, and an extent that was not
        // zero-filled.
        life.fake.released(release).await;
        let word = life.fake.answer_to(a, 3, true).await.unwrap();
        assert!(word.writable());
        assert_eq!(life.mapped(a), 8);
        assert!(is_hole(life.fake.fault(a, 2, false).await.unwrap()));
    });
}

/// Only mapped extents cost work: one request and one revoke cover the rest.
#[test]
fn deallocate_of_holes_is_free() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 40).await;
        let extents = (16 << 40) / EXTENT;
        for extent in [0, extents / 2, extents - 1] {
            life.fake.write(a, extent).await;
        }
        for mapped in [3, 0] {
            assert_eq!(life.mapped(a), mapped);
            life.fake.log.clear();
            let release = life.fake.release(a, ExtentRange::new(0, extents));
            life.fake.released(release).await;
            let revokes = life.fake.log.iter().filter(|m| is_revoke(m).is_some());
            assert_eq!(revokes.count(), 1);
        }
    });
}

#[test]
fn freed_extents_are_zeroed_flushed_and_only_then_clean() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        for extent in 0..4 {
            life.fake.write(a, extent).await;
        }
        life.fake.answer_jobs = false;
        let clean = life.space().clean;
        let release = life.fake.release(a, ExtentRange::new(0, 4));
        life.fake.released(release).await;
        while life.fake.open_jobs.is_empty() {
            life.fake
                .until(|m| matches!(m, ToEngine::Job { .. }).then_some(()))
                .await;
        }
        let zero_fills = |jobs: &[Job]| {
            jobs.iter()
                .map(|job| match job {
                    Job::ZeroFill { extents, .. } => extents.count,
                    Job::Flush { .. }
                    | Job::Copy { .. }
                    | Job::Overwrite { .. }
                    | Job::Settle { .. } => 0,
                })
                .sum::<u64>()
        };
        assert_eq!(zero_fills(&life.fake.jobs), 4);
        while matches!(life.fake.open_jobs.front(), Some((_, Job::ZeroFill { .. }))) {
            life.fake.answer_job();
        }
        life.fake
            .until(|m| matches!(m, ToEngine::Job { .. }).then_some(()))
            .await;
        assert!(matches!(life.fake.jobs.last(), Some(Job::Flush { .. })));
        assert_eq!(
            life.space().clean,
            clean,
            "zeros that are not flushed are not clean"
        );
        life.fake.answer_job();
        let owner = life.owner.clone();
        life.with_engine(
            owner
                .pool_owner
                .zero_fill
                .zero_filled
                .until(|| (owner.base.core.borrow().pool.space().dirty == 0).then_some(())),
        )
        .await;
        assert!(life.space().clean >= clean + 4);
    });
}

#[test]
fn a_failed_zero_fill_is_retried() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        life.fake.fail_zero_fills = 2;
        let release = life.fake.release(a, ExtentRange::new(0, 1));
        life.fake.released(release).await;
        let owner = life.owner.clone();
        life.with_engine(
            owner
                .pool_owner
                .zero_fill
                .zero_filled
                .until(|| (owner.base.core.borrow().pool.space().dirty == 0).then_some(())),
        )
        .await;
        let tries = life
            .fake
            .jobs
            .iter()
            .filter(|j| matches!(j, Job::ZeroFill { .. }))
            .count();
        assert_eq!(tries, 3);
    });
}

#[test]
fn a_deleted_volume_is_revoked_first_and_its_space_comes_back() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        for extent in 0..50 {
            life.fake.write(a, extent).await;
        }
        life.fake.answer_revokes = false;
        let owner = life.owner.clone();
        let delete = tokio::task::spawn_local(async move {
            owner
                .volumes
                .volume_delete("t".to_owned(), "a".to_owned())
                .await
        });
        life.fake.until(is_revoke).await;
        assert_eq!(
            life.owner.base.volume_list(None).unwrap().len(),
            1,
            "still there"
        );
        life.fake.answer_revoke();
        life.fake
            .until(|m| matches!(m, ToEngine::RemoveVolume { .. }).then_some(()))
            .await;
        life.with_engine(delete).await.unwrap().unwrap();
        assert!(life.owner.base.volume_list(None).unwrap().is_empty());
        assert_eq!(life.owner.base.core.borrow().grants.usage().0, 0);
        let b = life.volume("b", 16 << 20).await;
        // The fake rejects an extent that was not zero-filled.
        for extent in 0..50 {
            life.fake.write(b, extent).await;
        }
    });
}

#[test]
fn a_revoke_that_is_not_heard_changes_nothing() {
    run(async {
        let place = Place::new();
        let mut begin = Begin::default();
        begin.limits.revoke = Duration::from_millis(100);
        begin.limits.request = Duration::from_millis(100);
        let mut life = Life::first(&place, begin).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        life.fake.answer_revokes = false;
        life.fake.answer_requests = false;
        let owner = life.owner.clone();
        let delete = owner.volumes.volume_delete("t".to_owned(), "a".to_owned());
        let error = life.with_engine(delete).await.unwrap_err();
        assert_eq!(error.kind, crate::model::error::ErrorKind::Unavailable);
        assert_eq!(life.mapped(a), 1);
        // A tenant must not be told of zeros that are not there.
        let release = life.fake.release(a, ExtentRange::new(0, 1));
        life.fake.not_released(release).await;
        assert!(!life.fake.log.iter().any(is_release_done));
        assert_eq!(life.mapped(a), 1);
        assert_eq!((life.space().dirty, life.space().quarantined), (0, 0));
        assert!(life.fake.abandoned >= 2, "its drains are free again");
    });
}

#[test]
fn a_full_pool_says_so_and_goes_on_when_space_is_freed() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(
            &place,
            Begin {
                size_bytes: 16 << 20,
                ..Begin::default()
            },
        )
        .await;
        let a = life.volume("a", 64 << 20).await;
        let mut written = 0;
        let failure = loop {
            match life.fake.fault(a, written, true).await {
                Ok(_) => written += 1,
                Err(failure) => break failure,
            }
        };
        assert_eq!(failure, FaultFailure::NoSpace);
        let total = life.space().total;
        assert_eq!(written, total, "every extent can be written");
        assert!(
            !is_hole(life.fake.fault(a, 0, false).await.unwrap()),
            "reads go on"
        );
        assert!(is_hole(life.fake.fault(a, written, false).await.unwrap()));
        // A write waits for zero-fill instead of failing.
        let release = life.fake.release(a, ExtentRange::new(0, 8));
        life.fake.released(release).await;
        for extent in written..written + 8 {
            life.fake.fault(a, extent, true).await.unwrap();
        }
        assert_eq!(
            life.fake.fault(a, written + 8, true).await,
            Err(FaultFailure::NoSpace)
        );
    });
}

#[test]
fn a_full_grant_table_revokes_durable_extents() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(
            &place,
            Begin {
                capacity: 128,
                ..Begin::default()
            },
        )
        .await;
        let a = life.volume("a", 64 << 20).await;
        // Every second extent, so that no entries merge.
        for extent in 0..300 {
            life.fake.write(a, extent * 2).await;
            let (used, capacity) = life.owner.base.core.borrow().grants.usage();
            assert!(used < capacity);
        }
        let (mut revoked, mut together) = (0, false);
        for message in life.fake.log.clone() {
            if let ToEngine::Revoke { volume, range, .. } = message {
                revoked += range.count;
                together |= range.count > 1;
                for extent in (range.first..range.end()).step_by(2) {
                    assert!(
                        durably_mapped(&place.file(), volume, extent),
                        "what leaves the table is durable"
                    );
                }
                if revoked > 20 {
                    break;
                }
            }
        }
        assert!(revoked > 0, "300 grants don't fit into 128 entries");
        assert!(together, "neighbours share a revoke");
        // The fake checks that evicted grants are found at the old place.
        for extent in 0..300 {
            life.fake.write(a, extent * 2).await;
        }
        assert_eq!(life.mapped(a), 300);
    });
}

#[test]
fn an_uncommitted_grant_stays_in_a_full_table() {
    run(async {
        let place = Place::new();
        let begin = Begin {
            capacity: 128,
            ..Begin::default()
        };
        let mut life = Life::first(&place, begin).await;
        let a = life.volume("a", 64 << 20).await;
        life.fake.fail_flushes = true;
        let mut written = 0;
        while life.owner.base.core.borrow().spare_entries() >= crate::mapping::fault::SPARE_ENTRIES
        {
            life.fake.write(a, written * 2).await;
            written += 1;
        }
        life.fake.ask_fault(a, written * 2, true);
        for _ in 0..5 {
            life.fake.settle().await;
        }
        assert!(!life.fake.log.iter().any(|m| is_revoke(m).is_some()));
        assert!(!life.fake.grants.contains_key(&(a, written * 2)));
        life.fake.fail_flushes = false;
        life.fake.answer_to(a, written * 2, true).await.unwrap();
    });
}

async fn full_pool(place: &Place, begin: Begin) -> (Life, VolumeId, u64) {
    let mut life = Life::first(place, begin).await;
    let a = life.volume("a", 1 << 30).await;
    let mut written = 0;
    while life.fake.fault(a, written, true).await.is_ok() {
        written += 1;
    }
    assert_eq!(written, life.space().total);
    (life, a, written)
}

async fn next_job(life: &mut Life) -> Job {
    if life.fake.open_jobs.is_empty() {
        life.fake
            .until(|m| matches!(m, ToEngine::Job { .. }).then_some(()))
            .await;
    }
    life.fake.open_jobs[0].1
}

fn failures(life: &Life) -> usize {
    let failed = |m: &&ToEngine| matches!(m, ToEngine::FaultFailed { .. });
    life.fake.log.iter().filter(failed).count()
}

#[test]
fn a_zero_fill_round_is_bounded_by_bytes() {
    run(async {
        let place = Place::new();
        let begin = Begin {
            size_bytes: 128 << 20,
            extent_bytes: 4 << 20,
            ..Begin::default()
        };
        let (mut life, a, written) = full_pool(&place, begin).await;
        assert!(written > 20, "{written}");
        life.fake.answer_jobs = false;
        let release = life.fake.release(a, ExtentRange::new(0, 20));
        life.fake.released(release).await;
        let mut zeroed = 0;
        while let Job::ZeroFill { extents, .. } = next_job(&mut life).await {
            assert_eq!(life.fake.open_jobs.len(), 1, "one piece at a time");
            zeroed += extents.count;
            life.fake.answer_job();
        }
        assert_eq!(zeroed, 16, "64 MiB, then a flush");
        life.fake.answer_job();
        // A write that needs space ends the round: the extents zeroed by then are flushed.
        next_job(&mut life).await;
        assert_eq!(life.space().clean, 16);
        for extent in 0..16 {
            life.fake.write(a, extent).await;
        }
        life.fake.ask_fault(a, 16, true);
        life.fake.settle().await;
        assert!(matches!(next_job(&mut life).await, Job::ZeroFill { .. }));
        life.fake.answer_job();
        assert!(matches!(next_job(&mut life).await, Job::Flush { .. }));
        life.fake.answer_job();
        life.fake.answer_to(a, 16, true).await.unwrap();
        // A round for a waiting write takes only one piece.
        life.fake.ask_fault(a, 17, true);
        life.fake.settle().await;
        assert!(
            matches!(next_job(&mut life).await, Job::ZeroFill { extents, .. } if extents.count == 1)
        );
        life.fake.answer_job();
        assert!(matches!(next_job(&mut life).await, Job::Flush { .. }));
        assert_eq!(life.space().dirty, 3);
    });
}

#[test]
fn a_write_waits_for_zero_filling() {
    run(async {
        let place = Place::new();
        let mut begin = Begin {
            size_bytes: 64 << 20,
            extent_bytes: 4 << 20,
            ..Begin::default()
        };
        let limit = Duration::from_millis(100);
        begin.limits.zero_fill = limit;
        let (mut life, a, written) = full_pool(&place, begin).await;
        let before = failures(&life);
        life.fake.answer_jobs = false;
        let release = life.fake.release(a, ExtentRange::new(0, 3));
        life.fake.released(release).await;
        for extent in written..written + 4 {
            life.fake.ask_fault(a, extent, true);
        }
        // Each piece takes far longer than the limit. One writer gets each clean extent; the others
        // wait.
        for more in 1..=3 {
            for _ in ["zeroing", "flush"] {
                next_job(&mut life).await;
                life.fake.listen(limit * 5).await;
                assert_eq!(failures(&life), before, "space is coming");
                life.fake.answer_job();
            }
            let granted = written + more - 3;
            let owner = life.owner.clone();
            let mapped = || {
                let core = owner.base.core.borrow();
                core.pool.volumes().space_of(a).unwrap().mapped == granted
            };
            while !mapped() {
                life.fake.listen(Duration::from_millis(10)).await;
            }
        }
        while failures(&life) == before {
            life.fake.listen(Duration::from_millis(10)).await;
        }
        assert_eq!(failures(&life), before + 1);
    });
}

#[test]
fn a_write_fails_when_dirty_extents_are_not_zero_filled() {
    run(async {
        let place = Place::new();
        let mut begin = Begin {
            size_bytes: 16 << 20,
            ..Begin::default()
        };
        begin.limits.zero_fill = Duration::from_millis(100);
        begin.limits.job = Duration::from_millis(300);
        let (mut life, a, written) = full_pool(&place, begin).await;
        life.fake.fail_zero_fills = u32::MAX;
        let release = life.fake.release(a, ExtentRange::new(0, 8));
        life.fake.released(release).await;
        let failed = life.fake.fault(a, written, true).await;
        assert_eq!(failed, Err(FaultFailure::NoSpace));
        assert_eq!(life.space().dirty, 8);
        // Until the hang is known, space is expected.
        life.fake.fail_zero_fills = 0;
        life.fake.hang(0);
        let failed = life.fake.fault(a, written, true).await;
        assert_eq!(failed, Err(FaultFailure::NoSpace));
        assert_eq!(life.space().dirty, 8);
        life.fake.hang_no_more(0);
        while life.space().dirty > 0 {
            life.fake.listen(Duration::from_millis(10)).await;
        }
        life.fake.fault(a, written, true).await.unwrap();
    });
}
