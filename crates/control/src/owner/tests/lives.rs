//! Tests of deaths of daemon, engine and node.

use std::collections::BTreeSet;

use forebay_xlate::boundary::message::{FromEngine, Held, Job, ToEngine};
use forebay_xlate::{DeviceIndex, ExtentRange};

use super::*;

fn is_revoke(message: &ToEngine) -> Option<()> {
    matches!(message, ToEngine::Revoke { .. }).then_some(())
}

#[test]
fn the_next_daemon_answers_as_the_one_before() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        let mut words = Vec::new();
        for extent in 0..40 {
            words.push(life.fake.write(a, extent).await);
        }
        let sequence = life.fake.highest_sequence(a);
        assert!(!durably_mapped(&place.file(), a, 39), "nothing was flushed");
        let before = life.kill().await;
        let mut life = Life::next(
            &place,
            Begin {
                generation: 2,
                ..Begin::default()
            },
            &before,
        )
        .await;
        assert!(durably_mapped(&place.file(), a, 39));
        assert!(matches!(life.fake.jobs[..], [Job::Flush { .. }, ..]));
        for (extent, word) in words.iter().enumerate() {
            assert_eq!(
                life.fake.fault(a, extent as u64, true).await.unwrap(),
                *word
            );
        }
        life.fake.write(a, 100).await;
        let later = life.fake.highest_sequence(a);
        assert!(
            later > sequence,
            "sequences go on: {later} after {sequence}"
        );
        assert!(life.fake.flush(a, later).await);
        assert!(durably_mapped(&place.file(), a, 100));
    });
}

#[test]
fn only_committed_extents_survive_a_reboot() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        assert!(life.fake.flush(a, life.fake.highest_sequence(a)).await);
        life.fake.write(a, 1).await;
        let before = life.kill().await;
        let begin = Begin {
            boot: [8; 16],
            generation: 2,
            ..Begin::default()
        };
        let mut life = Life::next(&place, begin, &before).await;
        assert!(!is_hole(life.fake.fault(a, 0, false).await.unwrap()));
        assert!(is_hole(life.fake.fault(a, 1, false).await.unwrap()));
        // The fake checks that the possibly written extent is zero-filled before it is granted
        // again.
        for extent in 2..200 {
            life.fake.write(a, extent).await;
        }
    });
}

#[test]
fn a_new_daemon_goes_on_with_a_live_engine() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.volume("b", 16 << 20).await;
        life.export("b").await;
        let word = life.fake.write(a, 0).await;
        let sequence = life.fake.highest_sequence(a);
        let table = life
            .owner
            .base
            .core
            .borrow()
            .grants
            .memory()
            .fd()
            .try_clone_to_owned()
            .unwrap();
        let before = life.kill().await;
        std::fs::remove_file(place.grants()).unwrap();

        let mut open = reopen(&place);
        let pool = open.pool.info().uuid.into_bytes();
        let (fake, fd) = Fake::new(1);
        let mut fake = fake.after(&before);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        fake.held = vec![(Held::Listener(address.clone()), vec![listener.into()])];
        // It still waits for a commit and a fault from the first daemon.
        fake.held.push((Held::Revoke(77), vec![]));
        let greet = Session::greet(fd, pool, None, Duration::from_secs(60));
        let (greeting, _) = tokio::join!(greet, fake.welcome(pool, Some(table)));
        let mut greeting = greeting.unwrap();
        let table = greeting
            .table
            .take()
            .expect("the engine kept the grant table");
        let grants =
            Grants::adopt(&place.grants(), &mut open.pool, Some(table), &BOOT, 64).unwrap();
        assert!(grants.same_boot());
        let begin = Begin::default();
        let devices::OpenPool {
            pool,
            catalog,
            devices,
            ..
        } = open;
        let owner = Owner::new(
            pool,
            Arc::new(catalog),
            devices,
            grants,
            begin.limits,
            Rc::default(),
            Rc::default(),
        );
        fake.say(&FromEngine::CommitWanted {
            volume: a,
            sequence,
        });
        fake.ask_fault(a, 0, true);
        fake.answer_revokes = false;
        let mut life = Life {
            owner: owner.clone(),
            fake,
        };
        life.owner
            .base
            .spawn(async move { owner.serve(greeting, &RefCell::default(), |_| {}).await });
        assert_eq!(life.fake.answer_to(a, 0, true).await.unwrap(), word);
        let reported = |sequence: u64| move |m: &ToEngine| matches!(m, ToEngine::Committed { sequence: s, .. } if *s >= sequence);
        if !life.fake.log.iter().any(reported(sequence)) {
            life.fake
                .until(|m| reported(sequence)(m).then_some(()))
                .await;
        }
        assert!(durably_mapped(&place.file(), a, 0));
        assert_eq!(
            life.owner.ports.addresses(),
            [address],
            "the listener was taken back"
        );
        let again = life
            .fake
            .log
            .iter()
            .any(|m| matches!(m, ToEngine::SetListener { .. }));
        assert!(!again, "and not given again");
    });
}

#[test]
fn volumes_unknown_to_the_catalog_are_removed_from_the_engine() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.replace_engine(|fake| {
            let unknown = forebay_xlate::boundary::message::VolumeConfig {
                volume: forebay_xlate::VolumeId(4242),
                uuid: [0; 16],
                read_only: false,
                size_bytes: 1 << 20,
                block_bytes: 4096,
                extent_bytes: EXTENT as u32,
                epoch: 0,
                image: None,
            };
            fake.held.push((Held::Volume(unknown), vec![]));
        })
        .await;
        let removed = |m: &ToEngine| match m {
            ToEngine::RemoveVolume { volume, .. } => Some(volume.0),
            _ => None,
        };
        assert_eq!(life.fake.until(removed).await, 4242);
    });
}

#[test]
fn a_new_engine_gets_the_sequence_a_flush_must_wait_for() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        assert!(life.fake.flush(a, life.fake.highest_sequence(a)).await);
        let word = life.fake.write(a, 9).await;
        let sequence = life.fake.highest_sequence(a);
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        assert_eq!(life.fake.highest_sequence(a), sequence);
        assert_eq!(life.fake.grants.get(&(a, 9)), Some(&word));
    });
}

#[test]
fn a_revoke_outlives_the_engine_and_waits_for_the_fence() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        for extent in 0..4 {
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
        // The next engine has no fence yet.
        life.replace_engine(|fake| {
            fake.devices_ready = false;
            fake.answer_revokes = false;
        })
        .await;
        life.fake.until(is_revoke).await;
        life.fake.answer_revoke();
        life.fake.settle().await;
        assert_eq!(life.mapped(a), 4, "not before the fence");
        assert_eq!(life.space().dirty, 0);
        life.fake.say(&FromEngine::DeviceReady {
            device: DeviceIndex(0),
        });
        life.with_engine(delete).await.unwrap().unwrap();
        assert_eq!(life.owner.base.volume_list(None).unwrap().len(), 0);
    });
}

#[test]
fn a_dead_engines_release_does_not_follow_a_later_write() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        // The range is locked when the release comes, and until another engine serves.
        let owner = life.owner.clone();
        let held = owner
            .pool_owner
            .revoker
            .locks
            .hold(a, ExtentRange::new(0, 1))
            .await;
        life.fake.release(a, ExtentRange::new(0, 1));
        life.fake.settle().await;
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        drop(held);
        life.fake.settle().await;
        life.fake.write(a, 0).await;
        assert_eq!(life.mapped(a), 1, "what the tenant writes now stays");
        assert!(!life.fake.log.iter().any(|m| is_revoke(m).is_some()));
    });
}

#[test]
fn a_dead_engines_release_is_not_asked_of_the_next_one() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        life.fake.answer_revokes = false;
        let old = life.fake.release(a, ExtentRange::new(0, 1));
        life.fake.until(is_revoke).await;
        // The next engine would take the number for one of its own.
        life.replace_engine(|fake| fake.answer_revokes = false)
            .await;
        life.fake.settle().await;
        assert!(!life.fake.log.iter().any(|m| is_revoke(m).is_some()));
        life.fake.write(a, 0).await;
        assert_eq!(life.mapped(a), 1, "what the tenant writes now stays");
        let new = life.fake.release(a, ExtentRange::new(0, 1));
        assert_eq!(new, old);
        life.fake.until(is_revoke).await;
        life.fake.answer_revoke();
        life.fake.released(new).await;
        assert_eq!(life.mapped(a), 0);
    });
}

#[test]
fn a_release_that_is_asked_again_is_done_once() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        life.fake.answer_revokes = false;
        let release = life.fake.release(a, ExtentRange::new(0, 1));
        life.fake.until(is_revoke).await;
        let again = FromEngine::Release {
            release,
            volume: a,
            range: ExtentRange::new(0, 1),
        };
        life.fake.say(&again);
        life.fake.settle().await;
        life.fake.answer_revoke();
        life.fake.released(release).await;
        life.fake.write(a, 0).await;
        life.fake.settle().await;
        assert_eq!(life.mapped(a), 1, "the write after it stays");
        let done = life.fake.log.iter().filter(|m| is_release_done(m));
        assert_eq!(done.count(), 1);
    });
}

#[test]
fn zero_filling_waits_for_an_earlier_daemons_jobs() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        life.fake.answer_jobs = false;
        let release = life.fake.release(a, ExtentRange::new(0, 1));
        life.fake.released(release).await;
        life.fake
            .until(|m| matches!(m, ToEngine::Job { .. }).then_some(()))
            .await;
        let (job, work) = life.fake.open_jobs[0];
        life.replace_engine(|fake| fake.held.push((Held::Job(job, work), vec![])))
            .await;
        // Longer than the pause after a failed round.
        for _ in 0..5 {
            life.fake.settle().await;
        }
        assert!(
            life.fake.jobs.is_empty(),
            "its extents may still be written to"
        );
        life.fake.say(&FromEngine::JobDone { job, errno: None });
        let zero_fill = |m: &ToEngine| {
            matches!(
                m,
                ToEngine::Job {
                    work: Job::ZeroFill { .. },
                    ..
                }
            )
            .then_some(())
        };
        life.fake.until(zero_fill).await;
    });
}

#[test]
fn a_grant_that_the_pool_does_not_know_is_revoked() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        assert!(life.fake.flush(a, life.fake.highest_sequence(a)).await);
        // As if the daemon died between a release's commit and the removal of the entry.
        {
            let mut core = life.owner.base.core.borrow_mut();
            core.pool
                .release(a, forebay_xlate::ExtentIndex(0), 1, &BTreeSet::new())
                .unwrap();
        }
        life.owner.base.commit().await.unwrap();
        let before = life.kill().await;
        let life = Life::next(
            &place,
            Begin {
                generation: 2,
                ..Begin::default()
            },
            &before,
        )
        .await;
        let revoked = life.fake.log.iter().position(|m| is_revoke(m).is_some());
        assert!(revoked.is_some(), "{:#?}", life.fake.log);
        assert_eq!(life.owner.base.core.borrow().grants.usage().0, 0);
        let zero_fill = life.fake.log.iter().position(|m| {
            matches!(
                m,
                ToEngine::Job {
                    work: Job::ZeroFill { .. },
                    ..
                }
            )
        });
        assert!(zero_fill > revoked, "and laundered after that");
    });
}

#[test]
fn a_damaged_conversation_ends_alone() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        life.fake.say(&FromEngine::HeldEnd);
        life.fake.say(&FromEngine::RevokeDone { revoke: 123_456 });
        life.fake.say(&FromEngine::JobDone {
            job: 1,
            errno: Some(-1),
        });
        life.fake.say(&FromEngine::Done {
            request: u64::MAX,
            error: None,
        });
        life.fake.say(&FromEngine::Release {
            release: 9,
            volume: a,
            range: ExtentRange::new(u64::MAX, u64::MAX),
        });
        life.fake.not_released(9).await;
        life.fake.write(a, 1).await;
        life.fake.send_garbage();
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        life.fake.write(a, 2).await;
    });
}

#[test]
fn a_table_from_before_another_daemon_is_not_believed() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 0).await;
        assert!(life.fake.flush(a, life.fake.highest_sequence(a)).await);
        let before = life.kill().await;
        // Meanwhile a daemon with another run folder uses the pool, and is killed too.
        let aside = place.grants().with_extension("aside");
        std::fs::rename(place.grants(), &aside).unwrap();
        let begin = Begin {
            generation: 2,
            ..Begin::default()
        };
        let mut life = Life::next(&place, begin, &before).await;
        life.fake.write(a, 7).await;
        let before = life.kill().await;
        std::fs::rename(&aside, place.grants()).unwrap();
        let begin = Begin {
            generation: 3,
            ..Begin::default()
        };
        let mut life = Life::next(&place, begin, &before).await;
        assert!(!is_hole(life.fake.fault(a, 0, false).await.unwrap()));
        assert!(
            is_hole(life.fake.fault(a, 7, false).await.unwrap()),
            "never flushed, and not in this table"
        );
        // The fake checks that the extent written for 7 is zero-filled before its next use.
        for extent in 20..200 {
            life.fake.write(a, extent).await;
        }
    });
}

#[test]
fn a_listed_place_that_is_wrong_is_revoked_before_the_right_one_is_granted() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        for extent in 4..12 {
            life.fake.write(a, extent).await;
        }
        assert!(life.fake.flush(a, life.fake.highest_sequence(a)).await);
        // As if a release's commit failed: only the pool has released the range.
        {
            let mut core = life.owner.base.core.borrow_mut();
            core.pool
                .release(a, forebay_xlate::ExtentIndex(4), 2, &BTreeSet::new())
                .unwrap();
        }
        assert!(is_hole(life.fake.fault(a, 0, false).await.unwrap()));
        let range = life.fake.last_grant().range;
        assert_eq!(range, ExtentRange::new(0, 4));
        let revoked = |life: &Life| {
            let revokes = life.fake.log.iter().filter_map(|m| match m {
                ToEngine::Revoke { range, .. } => Some(*range),
                _ => None,
            });
            revokes.collect::<Vec<_>>()
        };
        assert!(revoked(&life).is_empty());
        assert!(is_hole(life.fake.fault(a, 4, false).await.unwrap()));
        assert_eq!(revoked(&life), [ExtentRange::new(4, 2)]);
        assert!(
            !durably_mapped(&place.file(), a, 4),
            "the list forgets it only once that is durable"
        );
    });
}
