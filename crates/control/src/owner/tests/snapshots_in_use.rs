//! Tests of snapshots, rollback and deletion while hosts connect and copies hang.

use std::sync::atomic::Ordering::Relaxed;

use forebay_pool::{ExportRecord, NewExport};
use forebay_xlate::boundary::message::{FaultFailure, FrontendKind, Job, ToEngine};
use forebay_xlate::boundary::region::ControllerContent;
use forebay_xlate::boundary::region::controller::STATE_WORDS;

use super::*;
use crate::mapping::MapOwner;
use crate::model::VolumeRollback;
use crate::model::error::ErrorKind;

const BYTES: u64 = 16 << 20;
const HUNG: u8 = 1;

impl Fake {
    /// A host connects to an export.
    fn host_connects(&self, export: u64, name: &str) {
        let mut state = [0; STATE_WORDS];
        for (word, bytes) in state.iter_mut().zip(name.as_bytes().chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(padded);
        }
        let content = ControllerContent {
            sequence: 1,
            valid_from: 0,
            blocks: 0,
            state,
        };
        let (lane, controller) = (&self.region.lanes()[0], &self.region.controllers()[0]);
        lane.export.store(export + 1, Relaxed);
        lane.connections.store(1, Relaxed);
        controller.lane.store(0, Relaxed);
        let key = self.region.header().key.load(Relaxed);
        controller.put_state(key, 0, &content);
        controller.used.store(1, Relaxed);
    }
}

fn is_copy(message: &ToEngine) -> Option<()> {
    let work = match message {
        ToEngine::Job { work, .. } => work,
        _ => return None,
    };
    matches!(work, Job::Copy { .. }).then_some(())
}

impl Life {
    /// A write to a shared extent whose copy the engine does not end. Returns the extent.
    async fn copy_on_hung(&mut self, volume: VolumeId) -> u64 {
        let mut on_hung = None;
        for extent in 0..64 {
            self.fake.put(volume, extent).await;
            let word = self.fake.effective(volume, extent).unwrap();
            if word.device().0 == HUNG {
                on_hung = Some(extent);
            }
        }
        let extent = on_hung.expect("it lies on both");
        self.snapshot(volume, "s").await;
        self.fake.answer_jobs = false;
        self.fake.ask_fault(volume, extent, true);
        self.fake.until(is_copy).await;
        extent
    }

    fn names_hung(&self, error: &str) {
        assert!(error.contains("pool1.img has not ended"), "{error}");
    }
}

fn begin(job: u64, others: u64) -> Begin {
    let mut begin = Begin::default();
    begin.limits.job = Duration::from_millis(job);
    begin.limits.revoke = Duration::from_millis(others);
    begin.limits.freeze = Duration::from_millis(others);
    begin
}

#[test]
fn a_running_copy_delays_a_deletion_and_a_snapshot_only_for_their_limits() {
    run(async {
        let place = Place::with_devices(2);
        let mut life = Life::first(&place, begin(60_000, 500)).await;
        let a = life.volume("a", BYTES).await;
        let extent = life.copy_on_hung(a).await;
        let owner = life.owner.clone();
        let deleted = owner.volumes.volume_delete("t".into(), "a".into());
        let error = life.with_engine(deleted).await.unwrap_err();
        life.names_hung(&error.message);
        // Only the copy's job is not answered.
        life.fake.answer_jobs = true;
        let taken = life.try_snapshot(&[a], "later").await;
        life.names_hung(&taken.unwrap_err().to_string());
        life.fake.answer_all_jobs();
        life.fake.answer_to(a, extent, true).await.unwrap();
        life.snapshot(a, "later").await;
        life.check().await;
    });
}

#[test]
fn a_copy_that_hangs_refuses_a_snapshot_before_writes_stop() {
    run(async {
        let place = Place::with_devices(2);
        let mut life = Life::first(&place, begin(400, 5000)).await;
        let a = life.volume("a", BYTES).await;
        let extent = life.copy_on_hung(a).await;
        let failed = life.fake.answer_to(a, extent, true).await;
        assert_eq!(failed, Err(FaultFailure::Device));
        life.fake.settle().await;
        let copy = life
            .fake
            .open_jobs
            .iter()
            .position(|(_, job)| matches!(job, Job::Copy { .. }));
        let copy = life.fake.open_jobs.remove(copy.unwrap()).unwrap();
        life.fake.answer_jobs = true;
        life.fake.answer_all_jobs();
        let own = life.fake.write(a, 100).await;
        let epoch = life.fake.epoch(a);
        let taken = life.try_snapshot(&[a], "later").await;
        life.names_hung(&taken.unwrap_err().to_string());
        assert_eq!(life.fake.effective(a, 100), Some(own));
        let owner = life.owner.clone();
        let snapshot = owner.base.volume_id("t", "a@s").unwrap();
        let rolled = owner.pool_owner.roll_back(a, Some(snapshot), &|| Ok(()));
        let rolled = life.with_engine(rolled).await;
        life.names_hung(&rolled.unwrap_err().to_string());
        assert_eq!(life.fake.effective(a, 100), Some(own));
        let froze = |m: &&ToEngine| {
            matches!(
                m,
                ToEngine::Revoke {
                    freeze: Some(_),
                    ..
                }
            )
        };
        assert_eq!(
            life.fake.log.iter().filter(froze).count(),
            1,
            "the first snapshot's"
        );
        assert_eq!(life.fake.epoch(a), epoch);
        life.fake.open_jobs.push_back(copy);
        life.fake.answer_all_jobs();
        life.fake.settle().await;
        life.snapshot(a, "later").await;
        life.check().await;
    });
}

#[test]
fn a_host_that_connects_during_a_rollback_keeps_its_content() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", BYTES).await;
        life.export("a").await;
        let export = {
            let core = life.owner.base.core.borrow();
            core.pool.exports().first_of(a).unwrap().id.0
        };
        let old = life.fake.put(a, 0).await;
        life.snapshot(a, "s").await;
        let new = life.fake.put(a, 0).await;
        life.fake.answer_revokes = false;
        let roll_back = |owner: Rc<Owner>, while_connected| async move {
            let body = VolumeRollback {
                snapshot: "a@s".to_owned(),
                while_connected,
            };
            owner
                .volumes
                .volume_roll_back("t".into(), "a".into(), body)
                .await
        };
        let rolled = tokio::task::spawn_local(roll_back(life.owner.clone(), false));
        life.fake
            .until(|m| matches!(m, ToEngine::Revoke { .. }).then_some(()))
            .await;
        life.fake.host_connects(export, "nqn.host");
        life.fake.answer_revokes = true;
        life.fake.answer_all_revokes();
        let refused = life.with_engine(rolled).await.unwrap().unwrap_err();
        assert_eq!(refused.kind, ErrorKind::InUse, "{refused:?}");
        assert!(refused.message.contains("nqn.host"), "{refused:?}");
        assert_eq!(life.fake.read(a, 0).await, Some(new));
        // An engine that takes over does not have its hosts yet.
        life.owner.hosts.poll_hosts();
        life.fake.region.controllers()[0].used.store(0, Relaxed);
        let acting = life.owner.link.acting.replace(0);
        let owner = life.owner.clone();
        let refused = life.with_engine(roll_back(owner, false)).await;
        assert_eq!(refused.unwrap_err().kind, ErrorKind::InUse);
        life.owner.link.acting.set(acting);
        let owner = life.owner.clone();
        life.with_engine(roll_back(owner, true)).await.unwrap();
        assert_eq!(life.fake.read(a, 0).await, Some(old));
        life.check().await;
    });
}

#[test]
fn the_engine_forgets_a_snapshot_with_its_last_export() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", BYTES).await;
        let old = life.fake.put(a, 0).await;
        let s = life.snapshot(a, "s").await;
        life.fake.put(a, 0).await;
        for _ in 0..2 {
            life.export("a@s").await;
            assert_eq!(life.fake.read(s, 0).await, Some(old));
            assert!(life.fake.epochs.contains_key(&s));
            let owner = life.owner.clone();
            let deleted = owner.exports.export_delete("t".into(), "a@s".into(), false);
            life.with_engine(deleted).await.unwrap();
            // The fake checks that no grant is left.
            assert!(!life.fake.epochs.contains_key(&s));
            let core = life.owner.base.core.borrow();
            assert!(core.grants.iter().all(|grant| grant.volume != s));
        }
        life.check().await;
    });
}

#[test]
fn a_vm_is_seen_while_engines_change() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", BYTES).await;
        let export = {
            let new = NewExport {
                frontend: FrontendKind::VhostUser {
                    queues: 1,
                    pinned_memory: false,
                },
                ..NewExport::default()
            };
            let pool = &mut life.owner.base.core.borrow_mut().pool;
            pool.create_export_as(a, new, 0).unwrap()
        };
        let is_used = || {
            let of_it = |used: &ExportRecord, _: Option<&str>| used.id == export;
            life.owner.hosts.refuse_in_use_now("it", of_it).is_err()
        };
        assert!(!is_used());
        let lane = &life.fake.region.lanes()[0];
        lane.export.store(export.0 + 1, Relaxed);
        lane.connections.store(1, Relaxed);
        assert!(is_used());
        // The engine's death: its records stay.
        life.owner.link.close();
        assert!(is_used());
    });
}
