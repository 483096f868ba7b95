//! Volumes in Ceph's RBD, for the API: creation, size, snapshots, clones, rollback, deletion.
//!
//! Ceph changes first, then the catalog, then the engine. A failure in between takes back what Ceph
//! made.

use std::rc::Rc;

use forebay_device::size::format_bytes;
use forebay_pool::{ImageRecord, NewImageVolume, Pool, SNAPSHOT_MARK};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ToEngine;

use crate::base::show::image_path;
use crate::base::volume_locks::TurnGuard;
use crate::config::ClientFor;
use crate::devices::{api_error, now_s};
use crate::exports::volumes::Volumes;
use crate::link::engine_error;
use crate::model::error::{ApiError, ErrorKind};
use crate::model::rbd::{ImagePath, ImageState};
use crate::model::{Volume, VolumeClone, VolumeCreate, VolumeRollback};

/// Other clients of an image use sectors.
const BLOCK_BYTES: u32 = 512;

/// An image, or its snapshot of this name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ImageOf {
    pub(super) path: ImagePath,
    pub(super) snapshot: Option<String>,
}

impl ImageOf {
    fn new(record: &ImageRecord) -> Self {
        Self {
            path: image_path(record),
            snapshot: record.snapshot.clone(),
        }
    }

    fn shown(&self) -> String {
        match &self.snapshot {
            None => format!("image {}", self.path),
            Some(name) => format!("Ceph's snapshot {}@{name}", self.path),
        }
    }
}

fn no_reservation() -> ApiError {
    ApiError::invalid("a volume in Ceph takes no space of the pool, so none can be reserved")
        .hint("leave the reservation out; Ceph's own quotas limit a pool's space")
}

fn check_blocks(image: &ImagePath, size_bytes: u64, block_bytes: u32) -> Result<(), ApiError> {
    if size_bytes > 0 && size_bytes.is_multiple_of(block_bytes.max(1).into()) {
        return Ok(());
    }
    Err(ApiError::invalid(format!(
        "image {image}: its size would be {size_bytes} bytes, which is no multiple of a block of {block_bytes} bytes"
    ))
    .hint("use blocks of 512 bytes, or another size (`rbd resize` changes an image's)"))
}

fn new_volume(
    tenant: &str,
    name: &str,
    of: ImageOf,
    (size_bytes, block_bytes): (u64, u32),
) -> NewImageVolume {
    NewImageVolume {
        tenant: tenant.to_owned(),
        name: name.to_owned(),
        size_bytes,
        block_bytes,
        cluster: of.path.cluster,
        pool: of.path.pool,
        namespace: of.path.namespace,
        image: of.path.image,
        snapshot: of.snapshot,
        snapshot_of: None,
        own_client: false,
    }
}

/// Before Ceph is asked for something that the catalog would refuse.
fn refuse_taken(pool: &Pool, tenant: &str, name: &str, image: &ImagePath) -> Result<(), ApiError> {
    pool.tenants().named(tenant).map_err(api_error)?;
    if pool.volume_by_name(tenant, name).is_ok() {
        return Err(ApiError::exists(format!("volume {tenant}/{name} exists")));
    }
    let ImagePath {
        cluster,
        pool: of,
        namespace,
        image: own,
    } = image;
    match pool.images().volume_of(cluster, of, namespace, own, None) {
        None => Ok(()),
        Some(id) => {
            let shown = pool
                .volume(id)
                .map_or_else(|_| id.to_string(), |shown| shown.name.clone());
            Err(ApiError::exists(format!(
                "image {image} is volume {shown} already"
            )))
        }
    }
}

impl Volumes {
    pub(super) fn image_of(&self, id: VolumeId) -> Option<ImageOf> {
        let core = self.base.core.borrow();
        core.pool.images().of(id).map(ImageOf::new)
    }

    pub(super) fn refuse_image(&self, id: VolumeId, verb: &str) -> Result<(), ApiError> {
        match self.image_of(id) {
            None => Ok(()),
            Some(of) => Err(ApiError::invalid(format!(
                "the volume is {} in Ceph, which can't be {verb}",
                of.shown()
            ))),
        }
    }

    /// Asks the cluster. Only for volumes in Ceph.
    pub(crate) async fn image_state(
        &self,
        tenant: String,
        name: String,
    ) -> Result<ImageState, ApiError> {
        let id = self.base.volume_id(&tenant, &name)?;
        let of = self.image_of(id).ok_or_else(|| {
            ApiError::not_found(format!("volume {tenant}/{name} has no image in Ceph"))
        })?;
        self.base.clusters.inspect(&of.path).await
    }

    pub(super) async fn create_on_image(
        self: &Rc<Self>,
        turn: TurnGuard,
        tenant: String,
        path: &str,
        body: &VolumeCreate,
    ) -> Result<Volume, ApiError> {
        let image: ImagePath = path.parse()?;
        if body.reserved_bytes > 0 {
            return Err(no_reservation());
        }
        let block_bytes = body.block_bytes.unwrap_or(BLOCK_BYTES);
        if let Some(size_bytes) = body.size_bytes {
            check_blocks(&image, size_bytes, block_bytes)?;
        }
        refuse_taken(&self.base.core.borrow().pool, &tenant, &body.name, &image)?;
        let clusters = &self.base.clusters;
        let own_client = clusters.config(&image.cluster)?.client == ClientFor::Volume;
        let found = clusters.inspect_or_create(&image, body.size_bytes).await;
        let (found, is_new) = found.map_err(|error| match (error.kind, body.size_bytes) {
            (ErrorKind::NotFound, None) => {
                error.hint("with a size, as in `--size 10G`, a missing image is created")
            }
            _ => error,
        })?;
        self.refuse_locked(&image, &found)?;
        check_blocks(&image, found.size_bytes, block_bytes)?;
        if body
            .size_bytes
            .is_some_and(|size_bytes| size_bytes != found.size_bytes)
        {
            let size_bytes = found.size_bytes;
            return Err(ApiError::exists(format!(
                "image {image} exists, with a size of {} ({size_bytes} bytes)",
                format_bytes(size_bytes)
            ))
            .hint("leave the size out to use the image as it is"));
        }
        let of = ImageOf {
            path: image.clone(),
            snapshot: None,
        };
        let sizes = (found.size_bytes, block_bytes);
        let new = NewImageVolume {
            own_client,
            ..new_volume(&tenant, &body.name, of, sizes)
        };
        let id = match self.add_image_volume(&new) {
            Ok(id) => id,
            Err(error) if is_new => return Err(self.without_image(error, &image).await),
            Err(error) => return Err(error),
        };
        self.commit_and_push(id, vec![turn]).await?;
        self.base.volume_show(&tenant, &body.name)
    }

    fn refuse_locked(&self, image: &ImagePath, found: &ImageState) -> Result<(), ApiError> {
        let core = self.base.core.borrow();
        let is_ours = |owner: &String| {
            let mut clients = core.pool.images().clients();
            clients.any(|client| client.addresses.contains(owner))
        };
        match found.lock_owners.iter().find(|owner| !is_ours(owner)) {
            None => Ok(()),
            Some(owner) => Err(ApiError::in_use(format!(
                "image {image} is locked by the client at {owner}"
            ))
            .hint("stop that client, or have it unlock the image")),
        }
    }

    fn add_image_volume(&self, new: &NewImageVolume) -> Result<VolumeId, ApiError> {
        let pool = &mut self.base.core.borrow_mut().pool;
        pool.create_image_volume(new, now_s()).map_err(api_error)
    }

    /// Removes an image that was made for a volume that can't be.
    async fn without_image(&self, error: ApiError, image: &ImagePath) -> ApiError {
        match self.base.clusters.remove(image).await {
            Ok(()) => error,
            Err(left) => error.hint(format!("image {image} was made and stays in Ceph: {left}")),
        }
    }

    pub(super) async fn resize_image(
        self: &Rc<Self>,
        id: VolumeId,
        of: ImageOf,
        size_bytes: u64,
        shrink: bool,
        turn: TurnGuard,
    ) -> Result<(), ApiError> {
        let block_bytes = {
            let core = self.base.core.borrow();
            core.pool.volume(id).map_err(api_error)?.block_bytes
        };
        check_blocks(&of.path, size_bytes, block_bytes)?;
        let now_bytes = self.base.clusters.inspect(&of.path).await?.size_bytes;
        if size_bytes < now_bytes && !shrink {
            let [now, new] = [now_bytes, size_bytes].map(format_bytes);
            return Err(ApiError::invalid(format!(
                "image {} has {now}: with {new}, it would lose the data beyond",
                of.path
            ))
            .hint("use --shrink (`shrink` in the API) if that is intended"));
        }
        self.base.clusters.resize(&of.path, size_bytes).await?;
        self.set_image_size(id, size_bytes, vec![turn]).await
    }

    /// Records an image's size, which another client may have changed too, and tells the engine.
    pub(crate) async fn set_image_size(
        self: &Rc<Self>,
        id: VolumeId,
        size_bytes: u64,
        turns: Vec<TurnGuard>,
    ) -> Result<(), ApiError> {
        let before_bytes = {
            let core = self.base.core.borrow();
            core.pool.volume(id).map_err(api_error)?.size_bytes
        };
        self.set_size(id, |pool| pool.set_image_size(id, size_bytes))
            .map_err(api_error)?;
        let mut revoked = Ok(());
        if size_bytes < before_bytes {
            // Nothing beyond the new end may stay granted; the rest is granted again when used.
            revoked = self.mapping.revoke_volume(id).await;
        }
        self.commit_and_push(id, turns).await?;
        revoked.map_err(|error| engine_error(&error))
    }

    /// `name`: of the snapshot, as `db@monday`.
    pub(super) async fn snapshot_image(
        &self,
        tenant: &str,
        name: &str,
        id: VolumeId,
        of: ImageOf,
    ) -> Result<Volume, ApiError> {
        let (_, own) = name.split_once(SNAPSHOT_MARK).unwrap_or(("", name));
        let block_bytes = {
            let core = self.base.core.borrow();
            if core.pool.volume_by_name(tenant, name).is_ok() {
                return Err(ApiError::exists(format!("snapshot {tenant}/{name} exists"))
                    .hint("`forebay volume snapshots` lists the snapshots"));
            }
            core.pool.volume(id).map_err(api_error)?.block_bytes
        };
        let clusters = &self.base.clusters;
        let size_bytes = clusters.take_snapshot(&of.path, own).await?;
        let taken = ImageOf {
            snapshot: Some(own.to_owned()),
            ..of.clone()
        };
        let new = NewImageVolume {
            snapshot_of: Some(id),
            ..new_volume(tenant, own, taken, (size_bytes, block_bytes))
        };
        if let Err(error) = self.add_image_volume(&new) {
            return Err(match clusters.remove_snapshot(&of.path, own).await {
                Ok(()) => error,
                Err(left) => error.hint(format!("Ceph's snapshot {}@{own} stays: {left}", of.path)),
            });
        }
        self.base.commit_for_api().await?;
        self.base.volume_show(tenant, name)
    }

    /// `to`: the clone's tenant. `of` is a snapshot.
    pub(super) async fn clone_image(
        self: &Rc<Self>,
        shown: &Volume,
        of: ImageOf,
        to: &str,
        body: &VolumeClone,
        turns: Vec<TurnGuard>,
    ) -> Result<(), ApiError> {
        let Some(snapshot) = &of.snapshot else {
            return Err(ApiError::invalid(format!(
                "volume {}/{} is no snapshot",
                shown.tenant, shown.name
            ))
            .hint(format!(
                "take a snapshot first: `forebay volume snapshot {}/{}@NAME`",
                shown.tenant, shown.name
            )));
        };
        if body.reserved_bytes > 0 {
            return Err(no_reservation());
        }
        let image = match &body.rbd {
            Some(path) => path.parse()?,
            // No two volumes have this name.
            None => ImagePath {
                image: format!("{to}.{}", body.name),
                ..of.path.clone()
            },
        };
        if image.cluster != of.path.cluster {
            return Err(ApiError::invalid(format!(
                "a clone of {} must be in the same cluster, not at {image}",
                of.shown()
            )));
        }
        refuse_taken(&self.base.core.borrow().pool, to, &body.name, &image)?;
        let clusters = &self.base.clusters;
        let own_client = clusters.config(&image.cluster)?.client == ClientFor::Volume;
        let cloned = clusters.clone_snapshot(&of.path, snapshot, &image).await;
        cloned.map_err(|error| match error.kind {
            ErrorKind::Exists => error.hint(
                "name another image: --rbd CLUSTER/POOL[/NAMESPACE]/IMAGE (`rbd` in the API)",
            ),
            _ => error,
        })?;
        let clone = ImageOf {
            path: image.clone(),
            snapshot: None,
        };
        let new = NewImageVolume {
            own_client,
            ..new_volume(to, &body.name, clone, (shown.size_bytes, shown.block_bytes))
        };
        match self.add_image_volume(&new) {
            Ok(id) => self.commit_and_push(id, turns).await,
            Err(error) => Err(self.without_image(error, &image).await),
        }
    }

    /// The engine closes the image meanwhile, because Ceph wants it for itself.
    pub(super) async fn roll_back_image(
        self: &Rc<Self>,
        (tenant, volume, id): (&str, &str, VolumeId),
        of: ImageOf,
        body: &VolumeRollback,
        turn: TurnGuard,
    ) -> Result<(), ApiError> {
        let to = self.image_of(self.base.volume_id(tenant, &body.snapshot)?);
        let to = to.filter(|to| to.path == of.path && of.snapshot.is_none());
        let Some(to) = to.and_then(|to| to.snapshot) else {
            return Err(ApiError::invalid(format!(
                "{tenant}/{} is not a snapshot of volume {tenant}/{volume}",
                body.snapshot
            )));
        };
        self.refuse_exported(id, tenant, volume)?;
        self.base.wait_open_for_api().await?;
        self.engine_closes(id).await?;
        let clusters = &self.base.clusters;
        let done = clusters.roll_back(&of.path, &to).await;
        // A rollback restores the snapshot's size too.
        let size_bytes = clusters
            .inspect(&of.path)
            .await
            .map(|found| found.size_bytes);
        let size_bytes = size_bytes.or_else(|_| {
            let core = self.base.core.borrow();
            let record = core.pool.volume(id).map_err(api_error);
            record.map(|record| record.size_bytes)
        })?;
        let opened = self.set_image_size(id, size_bytes, vec![turn]).await;
        done.and(opened)
    }

    async fn engine_closes(&self, id: VolumeId) -> Result<(), ApiError> {
        let revoked = self.mapping.revoke_volume(id).await;
        revoked.map_err(|error| engine_error(&error))?;
        let message = |request| ToEngine::RemoveVolume {
            request,
            volume: id,
        };
        let removed = self.link.push("closing an image", message).await;
        removed.map_err(|error| engine_error(&error))
    }

    /// Refuses the removal of an image that has snapshots.
    pub(super) async fn refuse_needed(&self, id: VolumeId, of: &ImageOf) -> Result<(), ApiError> {
        if of.snapshot.is_some() {
            return Ok(());
        }
        let volumes: Vec<String> = {
            let core = self.base.core.borrow();
            let all = core.pool.volumes().records().map(|record| record.id);
            let is_of = |other: &VolumeId| {
                let image = core.pool.images().of(*other).map(image_path);
                *other != id && image.as_ref() == Some(&of.path)
            };
            let others = all.filter(is_of);
            others
                .map(|other| self.base.volume_name(&core, other))
                .collect()
        };
        if !volumes.is_empty() {
            return Err(ApiError::in_use(format!(
                "image {} has snapshots that are volumes: {}",
                of.path,
                volumes.join(", ")
            ))
            .hint("delete them first, also with their snapshots in Ceph (--with-image)"));
        }
        match self.base.clusters.inspect(&of.path).await?.snapshots {
            none if none.is_empty() => Ok(()),
            some => Err(ApiError::in_use(format!(
                "image {} has snapshots in Ceph: {}",
                of.path,
                some.join(", ")
            ))
            .hint("remove them first (`rbd snap rm`), or delete the volume alone: the image then stays")),
        }
    }

    /// After the volume was deleted. Returns what became of the image, in words.
    pub(super) async fn end_image(&self, of: &ImageOf, remove: bool) -> Result<String, ApiError> {
        let shown = of.shown();
        if !remove {
            return Ok(format!("; {shown} stays"));
        }
        let clusters = &self.base.clusters;
        let removed = match &of.snapshot {
            None => clusters.remove(&of.path).await,
            Some(name) => clusters.remove_snapshot(&of.path, name).await,
        };
        match removed {
            Ok(()) => Ok(format!("; {shown} removed")),
            Err(error) => Err(ApiError {
                message: format!(
                    "the volume was deleted, but {shown} stays: {}",
                    error.message
                ),
                ..error
            }
            .hint("remove it with `rbd rm` or `rbd snap rm`")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_whole_blocks() {
        let image: ImagePath = "ceph/rbd/db".parse().unwrap();
        assert!(check_blocks(&image, 512, 512).is_ok());
        assert!(check_blocks(&image, 1 << 30, 4096).is_ok());
        for (size_bytes, block_bytes) in [(0, 512), (511, 512), (513, 512), (512, 4096)] {
            let error = check_blocks(&image, size_bytes, block_bytes).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid);
            let part = format!("image ceph/rbd/db: its size would be {size_bytes} bytes");
            assert!(error.message.contains(&part), "{error}");
        }
    }
}
