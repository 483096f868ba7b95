//! Volumes in RBD images.

use super::{CrashStore, new_pool, stores};
use forebay_pool::{Catalog, ClientRecord, IMAGE_EXTENT_BYTES, NewImageVolume, Pool};
use forebay_xlate::types::VolumeId;
use std::sync::Arc;

pub fn new(name: &str) -> NewImageVolume {
    NewImageVolume {
        tenant: "acme".into(),
        name: name.into(),
        size_bytes: 10 * IMAGE_EXTENT_BYTES + 4096,
        block_bytes: 512,
        cluster: "ceph".into(),
        pool: "rbd".into(),
        namespace: String::new(),
        image: name.into(),
        snapshot: None,
        snapshot_of: None,
        own_client: false,
    }
}

pub fn snapshot(of: VolumeId, image: &str, name: &str) -> NewImageVolume {
    NewImageVolume {
        name: name.into(),
        snapshot: Some(name.into()),
        snapshot_of: Some(of),
        ..new(image)
    }
}

pub fn world() -> (Vec<Arc<CrashStore>>, Pool, Catalog) {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    pool.create_tenant("acme", 0).unwrap();
    pool.create_tenant("beta", 0).unwrap();
    (stores, pool, catalog)
}

pub fn clients(pool: &Pool) -> Vec<ClientRecord> {
    pool.images().clients().cloned().collect()
}

pub fn assert_clean(pool: &mut Pool) {
    assert_eq!(pool.check().unwrap().problems, []);
}
