//! Volumes in RBD images, and the RADOS clients that serve them.
//!
//! The pool has none of their extents. It knows each image's place on a client, and the addresses
//! of the client's sessions that may still write. Ceph makes snapshots, clones and other sizes;
//! the pool records them.

use super::{
    Pool,
    admin::{RECORD_BYTES, check_size, new_id},
    snapshots::snapshot_name,
    tenants::{Tenants, check_name},
};
use crate::{
    error::{PoolError, Result},
    features::IMAGES,
    journal::{Journal, batch::Table},
    records::{ClientOwner, ClientRecord, ImageRecord, Layering, TenantId, VolumeRecord},
    volumes::{
        Volumes,
        images::{ImagePlace, SPANS},
    },
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// Bytes of a name in Ceph, and of a client's address.
const MAX_NAME_BYTES: usize = 255;
/// Sessions of a client that may still write.
const MAX_ADDRESSES: usize = 1024;
/// Indexes above the pool's devices that are kept for more devices.
const DEVICES_AHEAD: usize = 8;

/// A volume to be made of an RBD image or of its snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewImageVolume {
    /// Its tenant's name.
    pub tenant: String,
    /// Its name, unique within the tenant. For a snapshot its own name, as in `db@monday`.
    pub name: String,
    /// The image's size in bytes, a multiple of the block.
    pub size_bytes: u64,
    /// Its block in bytes: 512 or 4096.
    pub block_bytes: u32,
    /// The cluster's name in the configuration.
    pub cluster: String,
    /// The Ceph pool.
    pub pool: String,
    /// The namespace in that pool; empty for none.
    pub namespace: String,
    /// The image's name.
    pub image: String,
    /// The snapshot's name in Ceph; `None` for the image itself.
    pub snapshot: Option<String>,
    /// The volume of this snapshot's image.
    pub snapshot_of: Option<VolumeId>,
    /// Whether it gets a client of its own. A snapshot has the client of its volume.
    pub own_client: bool,
}

#[cfg(any(test, fuzzing))]
impl NewImageVolume {
    pub(crate) fn example(name: &str) -> Self {
        Self {
            tenant: "t".into(),
            name: name.into(),
            size_bytes: 9 * crate::IMAGE_EXTENT_BYTES,
            block_bytes: 512,
            cluster: "c".into(),
            pool: "rbd".into(),
            namespace: String::new(),
            image: name.into(),
            snapshot: None,
            snapshot_of: None,
            own_client: false,
        }
    }
}

fn is_address(address: &str) -> bool {
    let is_sound = |byte: u8| byte.is_ascii_graphic();
    (1..=MAX_NAME_BYTES).contains(&address.len()) && address.bytes().all(is_sound)
}

fn is_name(name: &str) -> bool {
    let marks = |c: char| matches!(c, '/' | '@') || c.is_control();
    (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.contains(marks)
}

impl ImageRecord {
    pub(crate) fn place(&self) -> ImagePlace {
        ImagePlace {
            client: self.client,
            span: self.span,
        }
    }

    pub(crate) fn key(&self) -> ImageKey<'_> {
        (
            self.cluster.as_str(),
            self.pool.as_str(),
            self.namespace.as_str(),
            self.image.as_str(),
            self.snapshot.as_deref(),
        )
    }

    pub(crate) fn check(&self) -> Result<()> {
        let namespace = Some(&self.namespace).filter(|name| !name.is_empty());
        let names = [
            ("a cluster", Some(&self.cluster)),
            ("a Ceph pool", Some(&self.pool)),
            ("a namespace", namespace),
            ("an image", Some(&self.image)),
            ("a snapshot", self.snapshot.as_ref()),
        ];
        for (what, name) in names {
            if let Some(name) = name.filter(|name| !is_name(name)) {
                return Err(PoolError::invalid(format!(
                    "{name:?} is not a valid name for {what}: use 1 to {MAX_NAME_BYTES} bytes without /, @ and control characters"
                )));
            }
        }
        Ok(())
    }
}

impl ClientRecord {
    /// Whether it can have been written by this version.
    pub(crate) fn is_sound(&self) -> bool {
        self.addresses.len() <= MAX_ADDRESSES && self.addresses.iter().all(|a| is_address(a))
    }
}

/// Cluster, pool, namespace, image, snapshot.
pub(crate) type ImageKey<'a> = (&'a str, &'a str, &'a str, &'a str, Option<&'a str>);

/// The RBD images of volumes, and their RADOS clients.
#[derive(Debug, Default)]
pub struct Images {
    pub(crate) by_volume: BTreeMap<VolumeId, ImageRecord>,
    pub(crate) clients: BTreeMap<DeviceIndex, ClientRecord>,
}

impl Images {
    /// A volume's image; `None` for a volume of the pool's extents.
    pub fn of(&self, volume: VolumeId) -> Option<&ImageRecord> {
        self.by_volume.get(&volume)
    }

    /// A RADOS client by its index.
    pub fn client(&self, index: DeviceIndex) -> Option<&ClientRecord> {
        self.clients.get(&index)
    }

    /// All RADOS clients, by index.
    pub fn clients(&self) -> impl Iterator<Item = &ClientRecord> {
        self.clients.values()
    }

    /// The volumes that a client serves.
    pub fn volumes_of(
        &self,
        client: DeviceIndex,
    ) -> impl Iterator<Item = (VolumeId, &ImageRecord)> {
        let all = self.by_volume.iter().map(|(id, image)| (*id, image));
        all.filter(move |(_, image)| image.client == client)
    }

    /// The volume that shows this image or snapshot.
    pub fn volume_of(
        &self,
        cluster: &str,
        pool: &str,
        namespace: &str,
        image: &str,
        snapshot: Option<&str>,
    ) -> Option<VolumeId> {
        let key = (cluster, pool, namespace, image, snapshot);
        let mut all = self.by_volume.iter();
        all.find(|(_, image)| image.key() == key).map(|(id, _)| *id)
    }

    /// Refuses an index for a device of the pool that a client has.
    pub(crate) fn check_device(&self, index: DeviceIndex) -> Result<()> {
        let Some(client) = self.client(index) else {
            return Ok(());
        };
        Err(PoolError::in_use(format!(
            "{index} can't be added: its index belongs to a client of the Ceph cluster {:?}: delete volumes in RBD images",
            client.cluster
        )))
    }

    /// The name of a new volume in an RBD image; for a snapshot, the owner of its client too.
    fn name(
        &self,
        volumes: &Volumes,
        new: &NewImageVolume,
        tenant: TenantId,
    ) -> Result<(String, Option<ClientOwner>)> {
        let Some(of) = new.snapshot_of else {
            check_name("volume", &new.name)?;
            if let Some(snapshot) = &new.snapshot {
                return Err(PoolError::invalid(format!(
                    "{snapshot:?} is a snapshot of the RBD image {:?}: name the image's volume too",
                    new.image
                )));
            }
            return Ok((new.name.clone(), None));
        };
        check_name("snapshot", &new.name)?;
        let volume = volumes.record(of)?;
        let key = (
            new.cluster.as_str(),
            new.pool.as_str(),
            new.namespace.as_str(),
            new.image.as_str(),
            None,
        );
        let image = self.of(of).filter(|image| {
            image.key() == key && new.snapshot.is_some() && volume.tenant == tenant
        });
        let client = image.and_then(|image| self.client(image.client));
        let client = client.ok_or_else(|| {
            PoolError::invalid(format!(
                "{:?} is not a snapshot of volume {:?}, which is not this tenant's, or has another image",
                new.name, volume.name
            ))
        })?;
        Ok((snapshot_name(volume, &new.name), Some(client.owner)))
    }

    /// Refuses an image that a volume shows.
    fn check_new(&self, volumes: &Volumes, tenants: &Tenants, image: &ImageRecord) -> Result<()> {
        let (cluster, pool, namespace, name, snapshot) = image.key();
        let Some(volume) = self.volume_of(cluster, pool, namespace, name, snapshot) else {
            return Ok(());
        };
        let record = volumes.record(volume)?;
        let tenant = tenants.get(record.tenant)?;
        Err(PoolError::exists(format!(
            "the RBD image {name:?} is already volume {:?} of tenant {:?}",
            record.name, tenant.name
        )))
    }

    /// The client for an owner's images in a cluster, and its lowest free span. `devices` is the
    /// number of the pool's devices.
    fn choose(&self, cluster: &str, owner: ClientOwner, devices: usize) -> Result<ImagePlace> {
        let is_it = |client: &&ClientRecord| client.cluster == cluster && client.owner == owner;
        if let Some(client) = self.clients().find(is_it) {
            let used: BTreeSet<u32> = self.volumes_of(client.index).map(|(_, i)| i.span).collect();
            let free = (0..SPANS).find(|span| !used.contains(span));
            let span = free.ok_or_else(|| {
                PoolError::no_space(format!(
                    "a client of the Ceph cluster {cluster:?} serves {SPANS} images, the maximum: use more tenants, or a client for each volume"
                ))
            })?;
            return Ok(ImagePlace {
                client: client.index,
                span,
            });
        }
        let mut indexes = (0..=u8::MAX).rev().map(DeviceIndex);
        let free = indexes.find(|index| !self.clients.contains_key(index));
        let free = free.filter(|index| usize::from(index.0) >= devices + DEVICES_AHEAD);
        let client = free.ok_or_else(|| {
            PoolError::no_space(format!(
                "the pool has {devices} devices and {} clients of Ceph clusters, the maximum: use one client for each tenant, not for each volume",
                self.clients.len()
            ))
        })?;
        Ok(ImagePlace { client, span: 0 })
    }

    fn insert(
        &mut self,
        journal: &mut Journal,
        volume: VolumeId,
        image: ImageRecord,
        owner: ClientOwner,
    ) {
        let (index, cluster) = (image.client, image.cluster.clone());
        self.clients.entry(index).or_insert_with(|| {
            journal.touch(Table::Clients, u64::from(index.0), 0);
            ClientRecord {
                index,
                uuid: Uuid::new_v4(),
                cluster,
                owner,
                addresses: Vec::new(),
            }
        });
        self.by_volume.insert(volume, image);
        journal.touch(Table::Images, volume.0, 0);
        // Earlier versions refuse the pool from now on.
        journal.touch(Table::Features, IMAGES.class as u64, u64::from(IMAGES.bit));
    }

    /// Forgets a deleted volume's image.
    pub(super) fn forget(&mut self, journal: &mut Journal, volume: VolumeId) {
        if let Some(image) = self.by_volume.remove(&volume) {
            journal.touch(Table::Images, volume.0, 0);
            self.forget_unused(journal, image.client);
        }
    }

    /// Forgets a client without images, unless a session of it may still write.
    fn forget_unused(&mut self, journal: &mut Journal, index: DeviceIndex) {
        let has_images = self.volumes_of(index).next().is_some();
        let has_sessions = |client: &ClientRecord| !client.addresses.is_empty();
        if !has_images && !self.client(index).is_some_and(has_sessions) {
            self.clients.remove(&index);
            journal.touch(Table::Clients, u64::from(index.0), 0);
        }
    }
}

impl Pool {
    /// Adds a volume that shows an existing RBD image, or a snapshot of one.
    pub fn create_image_volume(&mut self, new: &NewImageVolume, now_s: u64) -> Result<VolumeId> {
        let tenant = self.tenants.named(&new.tenant)?.id;
        let mut image = ImageRecord {
            cluster: new.cluster.clone(),
            pool: new.pool.clone(),
            namespace: new.namespace.clone(),
            image: new.image.clone(),
            snapshot: new.snapshot.clone(),
            client: DeviceIndex(0),
            span: 0,
        };
        image.check()?;
        let (name, shared) = self.images.name(&self.volumes, new, tenant)?;
        if self.volumes.names.contains_key(&(tenant, name.clone())) {
            return Err(PoolError::exists(format!(
                "tenant {:?} already has a volume {name:?}",
                new.tenant
            )));
        }
        let (volumes, tenants) = (&self.volumes, &self.tenants);
        self.images.check_new(volumes, tenants, &image)?;
        if !matches!(new.block_bytes, 512 | 4096) {
            return Err(PoolError::invalid(format!(
                "a block of {} bytes: a volume's block is 512 or 4096 bytes",
                new.block_bytes
            )));
        }
        check_size(new.size_bytes, new.block_bytes)?;
        let names_bytes = 5 * MAX_NAME_BYTES as u64;
        self.admit(3 * RECORD_BYTES + names_bytes)?;
        let owner = match (shared, new.own_client) {
            (Some(owner), _) => owner,
            (None, true) => ClientOwner::Volume(VolumeId(self.info.next_id)),
            (None, false) => ClientOwner::Tenant(tenant),
        };
        let place = self
            .images
            .choose(&new.cluster, owner, self.devices.len())?;
        (image.client, image.span) = (place.client, place.span);
        let id = VolumeId(new_id(&mut self.info, &mut self.journal));
        self.volumes.insert(VolumeRecord {
            id,
            uuid: Uuid::new_v4(),
            tenant,
            name,
            size_bytes: new.size_bytes,
            block_bytes: new.block_bytes,
            reserved_bytes: 0,
            created_s: now_s,
            layering: Layering {
                snapshot_of: new.snapshot_of,
                ..Layering::default()
            },
        });
        self.volumes.get_mut(id)?.image = Some(place);
        self.journal.touch(Table::Volumes, id.0, 0);
        self.images.insert(&mut self.journal, id, image, owner);
        Ok(id)
    }

    /// Records the size of a volume's RBD image, which may be smaller than before. The caller
    /// revokes grants beyond the new end.
    pub fn set_image_size(&mut self, volume: VolumeId, size_bytes: u64) -> Result<()> {
        let target = self.volumes.get_mut(volume)?;
        if target.image.is_none() {
            return Err(PoolError::invalid(format!(
                "volume {:?} is not an RBD image",
                target.record.name
            )));
        }
        check_size(size_bytes, target.record.block_bytes)?;
        if target.record.size_bytes != size_bytes {
            target.record.size_bytes = size_bytes;
            self.journal.touch(Table::Volumes, volume.0, 0);
        }
        Ok(())
    }

    /// Records the address of a client's new session, which may write once this is durable.
    pub fn note_client(&mut self, index: DeviceIndex, address: &str) -> Result<()> {
        if !is_address(address) {
            return Err(PoolError::invalid(format!(
                "{address:?} is not the address of a RADOS client"
            )));
        }
        let client = self.images.client(index);
        let client =
            client.ok_or_else(|| PoolError::not_found(format!("no client {}", index.0)))?;
        if client.addresses.iter().any(|known| known == address) {
            return Ok(());
        }
        if client.addresses.len() >= MAX_ADDRESSES {
            return Err(PoolError::in_use(format!(
                "{MAX_ADDRESSES} sessions of a client of the Ceph cluster {:?} may still write: let one session start, which fences them",
                client.cluster
            )));
        }
        self.admit(address.len() as u64)?;
        if let Some(client) = self.images.clients.get_mut(&index) {
            client.addresses.push(address.to_owned());
        }
        self.journal.touch(Table::Clients, u64::from(index.0), 0);
        Ok(())
    }

    /// Forgets addresses of sessions that have ended or are fenced.
    pub fn forget_clients(&mut self, index: DeviceIndex, addresses: &[String]) {
        if let Some(client) = self.images.clients.get_mut(&index) {
            client.addresses.retain(|known| !addresses.contains(known));
            self.journal.touch(Table::Clients, u64::from(index.0), 0);
            self.images.forget_unused(&mut self.journal, index);
        }
    }
}
