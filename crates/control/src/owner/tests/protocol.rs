//! Tests of faults, flushes and messages to the engine.

use forebay_xlate::boundary::message::{FromEngine, Job, ToEngine};
use forebay_xlate::{DeviceIndex, ExtentRange, Rights, VolumeId};

use super::*;
use crate::model::VolumeCreate;

#[test]
fn reads_of_nothing_are_holes_and_writes_get_extents_of_their_own() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        let b = life.volume("b", 16 << 20).await;
        let fake = &mut life.fake;
        assert!(is_hole(fake.fault(a, 5, false).await.unwrap()));
        let range = fake.last_grant().range;
        assert_eq!(
            range,
            ExtentRange::new(5, 256 - 5),
            "one grant for the whole hole"
        );
        // The fake checks that no extent is granted twice.
        for extent in 0..100 {
            fake.write(a, extent).await;
            fake.write(b, 255 - extent).await;
        }
        let first = fake.write(a, 7).await;
        assert_eq!(
            fake.fault(a, 7, true).await.unwrap(),
            first,
            "asking again changes nothing"
        );
        assert_eq!(fake.fault(a, 7, false).await.unwrap(), first);
        assert!(is_hole(fake.fault(a, 100, false).await.unwrap()));
        let core = life.owner.base.core.borrow();
        assert!(
            core.grants
                .covers(a, ExtentRange::new(0, 100), Rights::ReadWrite)
        );
        assert!(
            core.grants
                .covers(a, ExtentRange::new(100, 156), Rights::Hole)
        );
    });
}

#[test]
fn an_unknown_volume_or_extent_is_refused() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", EXTENT).await;
        assert!(life.fake.fault(VolumeId(999), 0, true).await.is_err());
        assert!(life.fake.fault(a, 1, false).await.is_err());
        assert!(life.fake.fault(a, u64::MAX - 1, true).await.is_err());
        life.fake.fault(a, 0, true).await.unwrap();
    });
}

#[test]
fn committed_is_said_after_the_commit() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.write(a, 3).await;
        let sequence = life.fake.highest_sequence(a);
        assert!(sequence > 0, "a fresh mapping waits for a commit");
        assert!(!durably_mapped(&place.file(), a, 3));
        life.fake.write(a, 4).await;
        assert!(life.fake.flush(a, sequence).await);
        assert!(durably_mapped(&place.file(), a, 3));
        assert!(
            !durably_mapped(&place.file(), a, 4),
            "its content may not be flushed"
        );
        assert!(
            life.fake.jobs.is_empty(),
            "the engine has flushed before it asked"
        );
        assert!(
            life.fake.flush(a, sequence).await,
            "asked again, it is answered at once"
        );
    });
}

#[test]
fn the_background_commit_flushes_first() {
    run(async {
        let place = Place::new();
        let mut begin = Begin::default();
        begin.limits.sync_every = Duration::from_millis(20);
        let mut life = Life::first(&place, begin).await;
        let a = life.volume("a", 16 << 20).await;
        life.fake.answer_jobs = false;
        life.fake.write(a, 0).await;
        let sequence = life.fake.highest_sequence(a);
        while life.fake.open_jobs.is_empty() {
            life.fake
                .until(|m| matches!(m, ToEngine::Job { .. }).then_some(()))
                .await;
        }
        assert_eq!(
            life.fake.jobs,
            [Job::Flush {
                device: DeviceIndex(0)
            }]
        );
        assert!(!durably_mapped(&place.file(), a, 0));
        life.fake.answer_job();
        let committed = ToEngine::Committed {
            volume: a,
            sequence,
        };
        life.fake.until(|m| (*m == committed).then_some(())).await;
        assert!(durably_mapped(&place.file(), a, 0));
    });
}

#[test]
fn the_engine_gets_all_objects_and_their_changes() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        life.export("a").await;
        let owner = life.owner.clone();
        let grow = owner.volumes.volume_update(
            "t".to_owned(),
            "a".to_owned(),
            crate::model::VolumeUpdate {
                size_bytes: Some(32 << 20),
                reserved_bytes: None,
                shrink: false,
            },
        );
        assert_eq!(life.with_engine(grow).await.unwrap().size_bytes, 32 << 20);
        let sizes: Vec<u64> = life
            .fake
            .log
            .iter()
            .filter_map(|m| match m {
                ToEngine::SetVolume { volume, .. } if volume.volume == a => Some(volume.size_bytes),
                _ => None,
            })
            .collect();
        assert_eq!(sizes, [16 << 20, 32 << 20]);
        let delete = owner.volumes.volume_delete("t".to_owned(), "a".to_owned());
        assert_eq!(
            life.with_engine(delete).await.unwrap_err().kind,
            crate::model::error::ErrorKind::InUse
        );
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        let reported: Vec<&str> = life
            .fake
            .log
            .iter()
            .map(|m| match m {
                ToEngine::SetDevice { .. } => "device",
                ToEngine::SetVolume { .. } => "volume",
                ToEngine::SetSpread { .. } => "spread",
                ToEngine::SetExport { .. } => "export",
                ToEngine::VolumeStatistics { .. } => "figures",
                _ => "other",
            })
            .collect();
        assert_eq!(
            reported,
            ["device", "volume", "spread", "export", "figures"]
        );
        let unexport = owner
            .exports
            .export_delete("t".to_owned(), "a".to_owned(), true);
        life.with_engine(unexport).await.unwrap();
        assert!(matches!(
            life.fake.log.last(),
            Some(ToEngine::RemoveExport { .. })
        ));
    });
}

#[test]
fn an_export_refused_by_the_engine_is_reported() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 16 << 20).await;
        let owner = life.owner.clone();
        let body = ExportCreate {
            tenant: "t".to_owned(),
            volume: "a".to_owned(),
            hosts: Vec::new(),
            any_host: true,
            ..ExportCreate::default()
        };
        let create =
            tokio::task::spawn_local(async move { owner.exports.export_create(body).await });
        let (message, request) = loop {
            let found = life.fake.next_unanswered().await;
            if let ToEngine::SetExport { request, .. } = found {
                break (found, request);
            }
        };
        let error = Some("no room for another lane".to_owned());
        life.fake.say(&FromEngine::Done { request, error });
        let refused = create.await.unwrap().unwrap_err();
        assert!(
            refused.message.contains("no room"),
            "{refused} to {message:?}"
        );
        assert!(
            life.owner.exports.export_list().is_empty(),
            "and it is not left in the catalog"
        );
    });
}

#[test]
fn catalog_operations_go_on_without_an_engine() {
    run(async {
        let place = Place::new();
        let owner = owner_of(&place, &Begin::default(), true);
        owner.pool_owner.adopter.finish_adoption(None).await;
        owner.volumes.tenant_create("t".to_owned()).await.unwrap();
        let body = VolumeCreate {
            name: "a".to_owned(),
            size_bytes: Some(1 << 20),
            block_bytes: None,
            reserved_bytes: 0,
            rbd: None,
        };
        owner
            .volumes
            .volume_create("t".to_owned(), body)
            .await
            .unwrap();
        let body = ExportCreate {
            tenant: "t".to_owned(),
            volume: "a".to_owned(),
            hosts: vec!["nqn.2014-08.org.nvmexpress:uuid:1".to_owned()],
            any_host: false,
            ..ExportCreate::default()
        };
        let export = owner.exports.export_create(body).await.unwrap();
        assert!(export.nqn.ends_with(":t.a"), "{}", export.nqn);
        let life = Life::with_fresh_engine(owner, 1, None).await;
        let reported = life
            .fake
            .log
            .iter()
            .any(|m| matches!(m, ToEngine::SetExport { export: e, .. } if e.nqn == export.nqn));
        assert!(reported);
    });
}

/// The sequence numbers mean nothing to a later engine.
#[test]
fn an_answer_to_a_commit_is_said_only_in_the_conversation_that_asked() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let unknown = VolumeId(999);
        assert!(!life.fake.flush(unknown, 1).await, "it fails");
        let before = life.owner.link.session().unwrap();
        life.replace_engine(|_| {}).await;
        life.opened().await;
        let flusher = life.owner.pool_owner.flusher.clone();
        flusher.commit_wanted(before, unknown, 1).await;
        life.fake.settle().await;
        let failed = |m: &ToEngine| matches!(m, ToEngine::CommitFailed { .. });
        assert!(!life.fake.log.iter().any(failed));
    });
}

#[test]
fn a_growth_is_shown_only_once_it_is_durable() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let id = life.volume("a", 16 << 20).await;
        let owner = life.owner.clone();
        let shown = || {
            let core = owner.base.core.borrow();
            let record = core.pool.volume(id).unwrap();
            owner.base.volume_config(&core.pool, record).size_bytes
        };
        owner.volumes.grow(id, 32 << 20).unwrap();
        assert_eq!(shown(), 16 << 20);
        owner.volumes.grow(id, 48 << 20).unwrap();
        assert_eq!(shown(), 16 << 20);
        owner.base.commit().await.unwrap();
        assert_eq!(shown(), 48 << 20);
        owner.volumes.grow(id, 64 << 20).unwrap();
        assert_eq!(shown(), 48 << 20);
        owner.base.commit().await.unwrap();
        assert_eq!(shown(), 64 << 20);
    });
}

#[test]
fn volume_creation_errors_state_their_cause() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        let owner = life.owner.clone();
        for (name, size_bytes, reserved_bytes, message, hint) in [
            ("a", 1 << 20, 1 << 30, "has a volume \"a\"", None),
            (
                "b",
                1 << 20,
                1 << 30,
                "can't be reserved",
                Some("reserve less"),
            ),
            ("b", 0, 0, "the minimum is one block, 4096 bytes", None),
            ("b", 1000, 1 << 30, "a multiple of its block", None),
            (
                "b",
                70_400_000_004_096,
                0,
                "70400000004096 bytes: the maximum is 64 TiB (70368744177664 bytes)",
                None,
            ),
        ] {
            let body = VolumeCreate {
                name: name.to_owned(),
                size_bytes: Some(size_bytes),
                block_bytes: None,
                reserved_bytes,
                rbd: None,
            };
            let error = owner
                .volumes
                .volume_create("t".to_owned(), body)
                .await
                .unwrap_err();
            assert!(error.message.contains(message), "{error:?}");
            match (hint, &error.hint) {
                (None, None) => {}
                (Some(part), Some(hint)) => assert!(hint.contains(part), "{error:?}"),
                _ => panic!("{error:?}"),
            }
        }
    });
}
