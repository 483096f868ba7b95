//! The records of RBD images and of their clients.

use super::{Loader, wrong};
use crate::{
    codec,
    error::Result,
    pool::admin::MAX_VOLUME_BYTES,
    records::{ClientRecord, ImageRecord, Layering},
    volumes::{PoolVolume, images::SPANS},
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::collections::BTreeSet;

impl Loader {
    pub(super) fn image_record(&mut self, a: u64, value: &[u8]) -> Result<()> {
        let record: ImageRecord = codec::decode(value)?;
        let id = VolumeId(a);
        record.check().map_err(wrong)?;
        if record.span >= SPANS {
            return Err(wrong(format!(
                "the image of {id} is beyond the end of its client"
            )));
        }
        let volume = self.volumes.get_mut(&id);
        let volume = volume.filter(|volume| !volume.record.name.is_empty());
        let volume = volume
            .ok_or_else(|| wrong(format!("an image belongs to {id}, which does not exist")))?;
        volume.image = Some(record.place());
        self.images.by_volume.insert(id, record);
        Ok(())
    }

    pub(super) fn client_record(&mut self, a: u64, value: &[u8]) -> Result<()> {
        let record: ClientRecord = codec::decode(value)?;
        if u64::from(record.index.0) != a || !record.is_sound() {
            return Err(wrong(format!(
                "client {a} has another number, or its addresses are invalid"
            )));
        }
        self.images.clients.insert(record.index, record);
        Ok(())
    }

    /// Images among each other, and with clients, volumes and devices.
    pub(super) fn check_images(&self) -> Result<()> {
        let devices = self.devices.len();
        let collides = |index: &&DeviceIndex| usize::from(index.0) < devices;
        if let Some(index) = self.images.clients.keys().find(collides) {
            return Err(wrong(format!("{index} is also a client")));
        }
        let (mut places, mut names) = (BTreeSet::new(), BTreeSet::new());
        for (id, image) in &self.images.by_volume {
            let client = self.images.client(image.client);
            if client.is_none_or(|client| client.cluster != image.cluster) {
                return Err(wrong(format!(
                    "{id} is an image of client {}, which does not exist or has another cluster",
                    image.client.0
                )));
            }
            if !places.insert(image.place()) {
                return Err(wrong(format!(
                    "{id} has the same place on its client as another image"
                )));
            }
            if !names.insert(image.key()) {
                return Err(wrong(format!("{id} and another volume show one image")));
            }
            let volume = self.volumes.get(id);
            if !volume.is_some_and(|volume| is_alone(volume, image)) {
                return Err(wrong(format!(
                    "{id} is an image, but is too large, or has something of the pool"
                )));
            }
        }
        Ok(())
    }
}

/// Whether the volume has no extents of the pool, and no layers.
fn is_alone(volume: &PoolVolume, image: &ImageRecord) -> bool {
    let record = &volume.record;
    let layering = Layering {
        snapshot_of: record.layering.snapshot_of,
        freezes: record.layering.freezes,
        ..Layering::default()
    };
    record.layering == layering
        && record.is_snapshot() == image.snapshot.is_some()
        && record.size_bytes <= MAX_VOLUME_BYTES
        && record.reserved_bytes == 0
        && volume.map.mapped() == 0
        && volume.hidden.is_empty()
        && volume.spare.extents() == 0
}
