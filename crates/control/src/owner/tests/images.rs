//! Volumes in Ceph, as far as they need no cluster.

use std::collections::BTreeMap;

use forebay_pool::NewImageVolume;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ToEngine;

use super::{Begin, Life, Place, run};
use crate::config::{ClientFor, ClusterConfig};
use crate::model::error::{ApiError, ErrorKind};
use crate::model::rbd::VolumeDelete;
use crate::model::{VolumeClone, VolumeCreate, VolumeUpdate};

const SIZE: u64 = 10 << 20;

impl Life {
    /// As if it had been created on an existing image.
    fn image_volume(&self, name: &str, snapshot_of: Option<VolumeId>) -> VolumeId {
        let pool = &mut self.owner.base.core.borrow_mut().pool;
        let new = NewImageVolume {
            tenant: "t".to_owned(),
            name: name.to_owned(),
            size_bytes: SIZE,
            block_bytes: 512,
            cluster: "east".to_owned(),
            pool: "rbd".to_owned(),
            namespace: String::new(),
            image: "db".to_owned(),
            snapshot: snapshot_of.map(|_| name.to_owned()),
            snapshot_of,
            own_client: false,
        };
        pool.create_image_volume(&new, 1).unwrap()
    }
}

fn create(rbd: Option<&str>, size_bytes: Option<u64>, reserved_bytes: u64) -> VolumeCreate {
    VolumeCreate {
        name: "new".to_owned(),
        size_bytes,
        block_bytes: None,
        reserved_bytes,
        rbd: rbd.map(ToOwned::to_owned),
    }
}

fn is(error: &ApiError, kind: ErrorKind, part: &str) {
    assert_eq!(error.kind, kind, "{error:?}");
    assert!(error.message.contains(part), "{error:?}");
}

#[test]
fn an_image_takes_no_space_and_is_named() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        let before = life.owner.base.tenant_list();
        let db = life.image_volume("db", None);
        life.image_volume("monday", Some(db));
        let base = &life.owner.base;
        let shown = base.volume_show("t", "db").unwrap();
        assert_eq!(shown.rbd.unwrap().path, "east/rbd/db");
        assert_eq!((shown.mapped_bytes, shown.allocated_bytes), (SIZE, 0));
        let shown = base.volume_show("t", "db@monday").unwrap();
        let rbd = shown.rbd.unwrap();
        assert_eq!((&*rbd.path, rbd.client), ("east/rbd/db@monday", 255));
        assert_eq!(rbd.client_addresses, Vec::<String>::new());
        let after = base.tenant_list();
        assert_eq!(before[0].allocated_bytes, after[0].allocated_bytes);
        assert_eq!(base.volume_show("t", "a").unwrap().rbd, None);
        life.kill().await;
    });
}

#[test]
fn wrong_requests_for_images_are_refused_in_words() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        let db = life.image_volume("db", None);
        let owner = life.owner.clone();
        let config = ClusterConfig {
            config: "/nowhere/ceph.conf".into(),
            user: "forebay".to_owned(),
            keyring: None,
            cluster: "ceph".to_owned(),
            client: ClientFor::Tenant,
            capacity: None,
        };
        let clusters = BTreeMap::from([("east".to_owned(), config)]);
        owner.base.clusters.configure(clusters);
        for (body, kind, part) in [
            (create(None, None, 0), ErrorKind::Invalid, "needs a size"),
            (
                create(Some("rbd/db"), None, 0),
                ErrorKind::Invalid,
                "names no RBD image",
            ),
            (
                create(Some("west/rbd/x"), None, 0),
                ErrorKind::NotFound,
                "`west`",
            ),
            (
                create(Some("east/rbd/x"), Some(512), 512),
                ErrorKind::Invalid,
                "reserved",
            ),
            (
                create(Some("east/rbd/x"), Some(513), 0),
                ErrorKind::Invalid,
                "513 bytes",
            ),
            (
                create(Some("east/rbd/db"), None, 0),
                ErrorKind::Exists,
                "is volume db already",
            ),
        ] {
            let made = owner.volumes.volume_create("t".to_owned(), body);
            is(&life.with_engine(made).await.unwrap_err(), kind, part);
        }
        let together = vec!["a@x".to_owned(), "db@x".to_owned()];
        let taken = owner.volumes.snapshots_take("t".to_owned(), together);
        let error = life.with_engine(taken).await.unwrap_err();
        is(&error, ErrorKind::Invalid, "t/db is in Ceph");
        assert!(owner.base.volume_show("t", "a@x").is_err(), "one was taken");
        let reserve = VolumeUpdate {
            reserved_bytes: Some(1 << 20),
            ..VolumeUpdate::default()
        };
        let set = owner
            .volumes
            .volume_update("t".to_owned(), "db".to_owned(), reserve);
        is(
            &life.with_engine(set).await.unwrap_err(),
            ErrorKind::Invalid,
            "RBD image",
        );
        let erased = owner.volumes.volume_erase("t", "db", db.0);
        is(
            &life.with_engine(erased).await.unwrap_err(),
            ErrorKind::Invalid,
            "erased",
        );
        let clone = VolumeClone {
            name: "c".to_owned(),
            ..VolumeClone::default()
        };
        let cloned = owner
            .volumes
            .snapshot_clone("t".to_owned(), "db".to_owned(), clone);
        is(
            &life.with_engine(cloned).await.unwrap_err(),
            ErrorKind::Invalid,
            "no snapshot",
        );
        drop(owner);
        life.kill().await;
    });
}

#[test]
fn deletion_forgets_the_volume_and_keeps_the_image() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        let db = life.image_volume("db", None);
        life.image_volume("monday", Some(db));
        let owner = life.owner.clone();
        let with_image = VolumeDelete { with_image: true };
        let delete = |name: &str, query| {
            let (tenant, name) = ("t".to_owned(), name.to_owned());
            let owner = owner.clone();
            async move {
                owner
                    .volumes
                    .volume_delete_as(tenant, name, None, query)
                    .await
            }
        };
        let error = life.with_engine(delete("a", with_image)).await.unwrap_err();
        is(&error, ErrorKind::Invalid, "no image");
        let error = life
            .with_engine(delete("db", with_image))
            .await
            .unwrap_err();
        is(&error, ErrorKind::InUse, "t/db@monday");
        let said = life
            .with_engine(delete("db", VolumeDelete::default()))
            .await;
        let said = said.unwrap();
        assert_eq!(
            said,
            "; image east/rbd/db stays; its snapshot t/db@monday stays"
        );
        let removed = |message: &ToEngine| matches!(message, ToEngine::RemoveVolume { volume, .. } if *volume == db);
        assert!(life.fake.log.iter().any(removed));
        let said = life
            .with_engine(delete("db@monday", VolumeDelete::default()))
            .await;
        let stays = "; Ceph's snapshot east/rbd/db@monday stays";
        assert_eq!(said.unwrap(), stays);
        assert!(
            owner
                .base
                .core
                .borrow()
                .pool
                .images()
                .clients()
                .next()
                .is_none()
        );
        drop(owner);
        life.kill().await;
    });
}
