//! Tests of snapshots, clones, rollback and copies.

use forebay_pool::{NewClone, NewSnapshot};
use forebay_xlate::boundary::message::{FaultFailure, FromEngine, Job, ToEngine};

use super::*;
use crate::mapping::MapOwner;
use crate::mapping::snapshot::SnapshotError;

const BYTES: u64 = 16 << 20;

impl Life {
    pub(super) async fn try_snapshot(
        &mut self,
        volumes: &[VolumeId],
        name: &str,
    ) -> Result<Vec<VolumeId>, SnapshotError> {
        let new = volumes.iter().map(|volume| NewSnapshot {
            volume: *volume,
            name: name.to_owned(),
        });
        let (owner, new) = (self.owner.clone(), new.collect());
        self.with_engine(owner.pool_owner.snapshot(new)).await
    }

    pub(super) async fn snapshot(&mut self, volume: VolumeId, name: &str) -> VolumeId {
        let taken = self.try_snapshot(&[volume], name).await.unwrap()[0];
        self.tell(taken).await;
        taken
    }

    /// The engine serves a snapshot or clone from now on.
    pub(super) async fn tell(&mut self, volume: VolumeId) {
        let owner = self.owner.clone();
        let tell = async {
            let session = owner.link.wait_session().await;
            let volume = {
                let core = owner.base.core.borrow();
                let record = core.pool.volume(volume).unwrap();
                owner.base.volume_config(&core.pool, record)
            };
            let told = session.request("a volume", |request| ToEngine::SetVolume {
                request,
                volume,
            });
            { told }.ended().await.unwrap();
        };
        self.with_engine(tell).await;
    }

    async fn clone_of(&mut self, snapshot: VolumeId, name: &str) -> VolumeId {
        let owner = self.owner.clone();
        let new = NewClone {
            snapshot,
            tenant: "t".to_owned(),
            name: name.to_owned(),
            reserved_bytes: 0,
        };
        let id = owner.pool_owner.clone_snapshot(&new).unwrap();
        self.with_engine(async { owner.base.commit().await.unwrap() })
            .await;
        self.tell(id).await;
        id
    }

    async fn give_up(&mut self, volume: VolumeId) {
        let owner = self.owner.clone();
        let work = owner.pool_owner.delete_volume(volume);
        self.with_engine(work).await.unwrap();
    }

    /// All background work of layers is done.
    async fn merged(&mut self) {
        let owner = self.owner.clone();
        let merged = async {
            loop {
                let is_over = {
                    let pool = &mut owner.base.core.borrow_mut().pool;
                    pool.snapshots().next_merge(None).is_none()
                        && !pool.volumes().has_more_to_delete()
                };
                if is_over {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        self.with_engine(merged).await;
    }

    pub(super) async fn check(&mut self) {
        let report = self.owner.base.core.borrow_mut().pool.check().unwrap();
        assert_eq!(report.problems, []);
    }
}

#[test]
fn snapshot_under_write() {
    run(async {
        let place = Place::with_devices(2);
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", BYTES).await;
        let mut old = Vec::new();
        for extent in 0..40 {
            old.push(life.fake.put(a, extent).await);
        }
        let before = life.fake.grants.clone();
        let s = life.snapshot(a, "s").await;
        assert_eq!(life.fake.epoch(a), 1);
        for extent in 0..40 {
            let word = life.fake.effective(a, extent).unwrap();
            assert!(!word.writable(), "the write right is gone");
            let stays = before[&(a, extent)].same_place(life.fake.grants[&(a, extent)]);
            assert!(stays, "reads go on");
        }
        let jobs = life.fake.jobs.len();
        let mut new = Vec::new();
        for extent in 0..60 {
            new.push(life.fake.put(a, extent).await);
        }
        let copies = life.fake.jobs[jobs..].iter();
        let copies = copies.filter(|job| matches!(job, Job::Copy { .. })).count();
        assert_eq!(copies, 40, "what the snapshot lacks is not copied");
        for extent in 0..60u64 {
            assert_eq!(life.fake.read(a, extent).await, Some(new[extent as usize]));
            let was = old.get(extent as usize).copied();
            assert_eq!(life.fake.read(s, extent).await, was);
        }
        assert_eq!(life.mapped(a), 60);
        // A write of a whole extent needs no copy.
        life.snapshot(a, "t").await;
        let jobs = life.fake.jobs.len();
        for extent in 0..5 {
            let new = life.fake.ask_whole(a, extent);
            life.fake.answer_to(a, extent, true).await.unwrap();
            assert_eq!(life.fake.read(a, extent).await, Some(new));
            assert_eq!(life.fake.read(s, extent).await, Some(old[extent as usize]));
        }
        let is_copy = |job: &Job| matches!(job, Job::Copy { .. });
        assert!(!life.fake.jobs[jobs..].iter().any(is_copy));
        let refused = life.fake.fault(s, 3, true).await;
        assert_eq!(refused, Err(FaultFailure::Internal), "a snapshot stays");
        life.check().await;
    });
}

#[test]
fn a_clone_differs_from_its_snapshot_only_where_it_is_written() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", BYTES).await;
        let old = [life.fake.put(a, 0).await, life.fake.put(a, 1).await];
        let s = life.snapshot(a, "s").await;
        let c = life.clone_of(s, "c").await;
        let new = life.fake.put(c, 1).await;
        assert_eq!(life.fake.read(c, 0).await, Some(old[0]));
        assert_eq!(life.fake.read(c, 1).await, Some(new));
        assert_eq!(life.fake.read(a, 1).await, Some(old[1]));
        // A deallocated extent is not seen through.
        let release = life.fake.release(c, forebay_xlate::ExtentRange::new(0, 2));
        life.fake.released(release).await;
        assert_eq!(life.fake.read(c, 0).await, None);
        assert_eq!(life.fake.read(c, 1).await, None);
        assert_eq!(life.fake.read(s, 1).await, Some(old[1]));
        life.give_up(a).await;
        life.give_up(s).await;
        life.merged().await;
        assert_eq!(life.fake.read(c, 0).await, None);
        let again = life.fake.put(c, 0).await;
        assert_eq!(life.fake.read(c, 0).await, Some(again));
        assert_eq!(life.mapped(c), 1);
        life.check().await;
    });
}

#[test]
fn a_rollback_gives_the_old_content_and_keeps_later_snapshots() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let clean = life.space().clean;
        let a = life.volume("a", BYTES).await;
        let first = life.fake.put(a, 0).await;
        let s = life.snapshot(a, "s").await;
        let second = life.fake.put(a, 0).await;
        let t = life.snapshot(a, "t").await;
        life.fake.put(a, 0).await;
        life.fake.put(a, 7).await;
        let owner = life.owner.clone();
        life.with_engine(owner.pool_owner.roll_back(a, Some(s), &|| Ok(())))
            .await
            .unwrap();
        assert_eq!(life.fake.read(a, 0).await, Some(first));
        assert_eq!(life.fake.read(a, 7).await, None);
        assert_eq!(life.fake.read(t, 0).await, Some(second));
        let third = life.fake.put(a, 0).await;
        assert_eq!(life.fake.read(a, 0).await, Some(third));
        assert_eq!(life.fake.read(s, 0).await, Some(first));
        life.check().await;
        for volume in [s, a, t] {
            life.give_up(volume).await;
        }
        life.merged().await;
        life.check().await;
        let owner = life.owner.clone();
        let all_clean = async {
            while owner.base.core.borrow().pool.space().clean != clean {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        life.with_engine(all_clean).await;
    });
}

#[test]
fn a_group_is_frozen_before_any_of_it_goes_on() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let volumes = [
            life.volume("a", BYTES).await,
            life.volume("b", BYTES).await,
            life.volume("c", BYTES).await,
        ];
        for volume in volumes {
            life.fake.put(volume, 0).await;
        }
        life.fake.answer_revokes = false;
        let owner = life.owner.clone();
        let new = volumes.map(|volume| NewSnapshot {
            volume,
            name: "s".to_owned(),
        });
        let taken =
            tokio::task::spawn_local(async move { owner.pool_owner.snapshot(new.to_vec()).await });
        while life.fake.open_revokes.len() < 3 {
            life.fake
                .until(|m| matches!(m, ToEngine::Revoke { .. }).then_some(()))
                .await;
        }
        life.fake.ask_fault(volumes[1], 1, true);
        life.fake.settle().await;
        life.fake.answer_revoke();
        life.fake.answer_revoke();
        life.fake.settle().await;
        assert_eq!(
            life.fake.effective(volumes[1], 1),
            None,
            "a volume went on alone"
        );
        life.fake.answer_revoke();
        life.fake.answer_revokes = true;
        life.fake.answer_to(volumes[1], 1, true).await.unwrap();
        let taken = life.with_engine(taken).await.unwrap().unwrap();
        assert_eq!(taken.len(), 3);
        assert!(volumes.iter().all(|volume| life.fake.epoch(*volume) == 1));
        life.check().await;
    });
}

#[test]
fn snapshot_of_a_hung_device_fails_cleanly() {
    run(async {
        let place = Place::with_devices(2);
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", BYTES).await;
        let b = life.volume("b", BYTES).await;
        life.fake.put(b, 0).await;
        let mut on_hung = None;
        for extent in 0..64 {
            life.fake.put(a, extent).await;
            let word = life.fake.effective(a, extent).unwrap();
            if word.device().0 == 1 {
                on_hung = Some(extent);
            }
        }
        let on_hung = on_hung.unwrap();
        // Flushes end before the device hangs; writes in flight do not.
        life.fake.answer_revokes = false;
        let owner = life.owner.clone();
        let new = [a, b].map(|volume| NewSnapshot {
            volume,
            name: "s".to_owned(),
        });
        let new = new.to_vec();
        let taken = tokio::task::spawn_local(async move { owner.pool_owner.snapshot(new).await });
        let revoke = |m: &ToEngine| matches!(m, ToEngine::Revoke { .. }).then_some(());
        while life.fake.open_revokes.len() < 2 {
            life.fake.until(revoke).await;
        }
        assert!(!life.fake.effective(a, on_hung).unwrap().writable());
        life.fake.ask_fault(a, on_hung, true);
        let failed = life.with_engine(taken).await.unwrap();
        assert!(
            matches!(failed, Err(SnapshotError::Freeze(_))),
            "{failed:?}"
        );
        assert_eq!((life.fake.epoch(a), life.fake.epoch(b)), (0, 0));
        assert!(
            life.fake.effective(a, on_hung).unwrap().writable(),
            "rights return"
        );
        assert_eq!(life.fake.open_revokes, [], "nothing takes up a drain");
        life.fake.answer_revokes = true;
        assert!(
            life.owner
                .base
                .core
                .borrow()
                .pool
                .volumes()
                .records()
                .count()
                == 2
        );
        life.fake.put(a, 100).await;
        life.snapshot(a, "s").await;
        life.check().await;
    });
}

#[test]
fn a_successor_gets_no_write_right_back() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", BYTES).await;
        let old = life.fake.put(a, 0).await;
        let s = life.snapshot(a, "s").await;
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        assert_eq!(life.fake.epoch(a), 1);
        assert!(!life.fake.effective(a, 0).unwrap().writable());
        let new = life.fake.put(a, 0).await;
        assert_ne!(old, new);
        // Nor does the engine of the next daemon.
        let before = life.kill().await;
        let begin = Begin {
            generation: 5,
            ..Begin::default()
        };
        let mut life = Life::next(&place, begin, &before).await;
        assert_eq!(life.fake.epoch(a), 1);
        assert_eq!(life.fake.read(s, 0).await, Some(old));
        assert_eq!(life.fake.read(a, 0).await, Some(new));
        life.check().await;
    });
}

#[test]
fn snapshot_epoch_wraps() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", BYTES).await;
        life.fake.put(a, 0).await;
        life.snapshot(a, "first").await;
        life.owner
            .base
            .core
            .borrow_mut()
            .pool
            .snapshots()
            .skip_epochs(a, 8190);
        life.tell(a).await;
        assert_eq!(life.fake.epoch(a), 8191);
        life.fake.put(a, 1).await;
        assert!(life.fake.effective(a, 0).is_some(), "an old word is there");
        let s = life.snapshot(a, "last").await;
        assert_eq!(life.fake.epoch(a), 0);
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        life.tell(s).await;
        for extent in 0..2 {
            let word = life.fake.effective(a, extent);
            assert!(word.is_none_or(|word| !word.writable()), "{word:?}");
            let old = life.fake.read(s, extent).await;
            assert_ne!(Some(life.fake.put(a, extent).await), old);
            assert_eq!(life.fake.read(s, extent).await, old);
        }
        life.check().await;
    });
}

/// Where a copy dies.
#[derive(Clone, Copy, Debug)]
enum Death {
    /// The daemon, while the job is open; it ends before the next daemon asks.
    DaemonInJob,
    /// The daemon, while the job is open; it ends later.
    DaemonBeforeEnd,
    /// The daemon, between the job's end and the grant.
    DaemonAfterJob,
    /// The engine, in the job.
    EngineInJob,
    /// Both, in the job.
    Both,
    /// The copy fails.
    Error,
}

#[test]
fn copy_job_dies_at_each_point() {
    use Death::*;
    let deaths = [
        DaemonInJob,
        DaemonBeforeEnd,
        DaemonAfterJob,
        EngineInJob,
        Both,
        Error,
    ];
    for (death, whole) in deaths.iter().flat_map(|d| [(*d, false), (*d, true)]) {
        run(async move {
            let place = Place::new();
            let mut life = Life::first(&place, Begin::default()).await;
            let a = life.volume("a", BYTES).await;
            let old = life.fake.put(a, 0).await;
            let s = life.snapshot(a, "s").await;
            life.fake.put(a, 1).await;
            life.fake.answer_jobs = false;
            let written = match whole {
                true => life.fake.ask_whole(a, 0),
                false => {
                    life.fake.ask_fault(a, 0, true);
                    old
                }
            };
            let copy = |m: &ToEngine| match m {
                ToEngine::Job {
                    work: Job::Copy { to, target, .. },
                    ..
                } if !whole => Some((to.0, target.0)),
                ToEngine::Job {
                    work: Job::Overwrite { to, target, .. },
                    ..
                } if whole => Some((to.0, target.0)),
                _ => None,
            };
            let target = life.fake.until(copy).await;
            let begin = || Begin {
                generation: 7,
                ..Begin::default()
            };
            let mut life = match death {
                DaemonInJob | DaemonBeforeEnd => {
                    let mut before = life.kill().await;
                    before.take_the_rest();
                    if matches!(death, DaemonInJob) {
                        before.contents.insert(target, u64::MAX);
                        before.open_jobs.clear();
                    }
                    let mut life = Life::take_over(&place, begin(), before).await;
                    life.fake.contents.insert(target, u64::MAX);
                    life.fake.answer_jobs = true;
                    life.fake.answer_all_jobs();
                    life
                }
                DaemonAfterJob => {
                    let end = life.fake.open_jobs.pop_front().unwrap();
                    life.fake.contents.insert(target, written);
                    life.fake.say(&FromEngine::JobDone {
                        job: end.0,
                        errno: None,
                    });
                    let mut before = life.kill().await;
                    before.take_the_rest();
                    before.answer_jobs = true;
                    Life::take_over(&place, begin(), before).await
                }
                EngineInJob => {
                    life.fake.contents.insert(target, u64::MAX);
                    life.replace_engine(|_| {}).await;
                    life
                }
                Both => {
                    life.fake.contents.insert(target, u64::MAX);
                    let before = life.kill().await;
                    Life::next(&place, begin(), &before).await
                }
                Error => {
                    life.fake.fail_copies = true;
                    life.fake.answer_jobs = true;
                    life.fake.answer_all_jobs();
                    let failed = life.fake.answer_to(a, 0, true).await;
                    assert_eq!(failed, Err(FaultFailure::Device));
                    life.fake.fail_copies = false;
                    life
                }
            };
            life.tell(s).await;
            assert_eq!(life.fake.read(s, 0).await, Some(old), "{death:?}");
            let word = life.fake.write(a, 0).await;
            let content = life.fake.contents[&(word.device().0, word.extent().0)];
            assert_eq!(content, old, "{death:?}: the copy is whole");
            let new = life.fake.put(a, 0).await;
            assert_eq!(life.fake.read(s, 0).await, Some(old), "{death:?}");
            assert_eq!(life.fake.read(a, 0).await, Some(new), "{death:?}");
            // New extents are zeros, whatever the copy left.
            for extent in 10..60 {
                let word = life.fake.write(a, extent).await;
                let there = life.fake.contents.get(&(word.device().0, word.extent().0));
                assert_eq!(there, None, "{death:?}");
            }
            life.fake.settle().await;
            life.check().await;
        });
    }
}
