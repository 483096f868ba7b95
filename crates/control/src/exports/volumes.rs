//! Creates, changes and deletes tenants and volumes for the API.
//!
//! A change is committed before the engine is told, so no host sees a size that a crash takes back.
//! A deletion first revokes all of the volume's extents.

use std::rc::Rc;

use forebay_device::size::format_bytes;
use forebay_pool::{ErrorKind, ExportRecord, NewVolume, Pool, PoolError};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ToEngine;

use crate::base::Base;
use crate::base::show::show_tenant;
use crate::base::volume_locks::TurnGuard;
use crate::devices::{api_error, now_s};
use crate::exports::transfers::Transfers;
use crate::link::{Link, engine_error};
use crate::mapping::MapOwner;
use crate::mapping::release::ReleaseError;
use crate::model::error::ApiError;
use crate::model::rbd::VolumeDelete;
use crate::model::{Tenant, Volume, VolumeCreate, VolumeUpdate};
use crate::qos::budgets::Budgets;
use crate::states::clients::CephClients;
use crate::statistics::Statistics;

/// How often a new namespace tries to get its id.
const NAME_ATTEMPTS: u32 = 16;

pub(super) fn reservation_error(
    pool: &Pool,
    error: PoolError,
    reserved_bytes: u64,
    size_bytes: u64,
) -> ApiError {
    let kind = error.kind;
    let reported = api_error(error);
    let is_reserve = reported.message.contains("can't be reserved");
    if is_reserve && reserved_bytes > size_bytes {
        return reported.hint(
            "reserve less, or `full` for the whole volume; `forebay volume resize` makes the volume larger",
        );
    }
    if kind != ErrorKind::NoSpace {
        return reported;
    }
    let left = pool.reservable_bytes(None);
    reported.hint(format!(
        "reserve less ({} can be promised now), add a device (`forebay device add`), or reduce other volumes' \
        reservations (`forebay volume set --reserve`)",
        format_bytes(left)
    ))
}

#[derive(Debug)]
pub(crate) struct Volumes {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) clients: Rc<CephClients>,
    pub(super) mapping: Rc<dyn MapOwner>,
    pub(super) budgets: Rc<Budgets>,
    pub(super) statistics: Rc<Statistics>,
    pub(super) transfers: Rc<Transfers>,
}

impl Volumes {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        clients: &Rc<CephClients>,
        mapping: &Rc<dyn MapOwner>,
        budgets: &Rc<Budgets>,
        transfers: &Rc<Transfers>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            clients: clients.clone(),
            mapping: mapping.clone(),
            budgets: budgets.clone(),
            statistics: budgets.statistics.clone(),
            transfers: transfers.clone(),
        })
    }

    pub(crate) async fn tenant_create(&self, name: String) -> Result<Tenant, ApiError> {
        self.budgets.refuse_its_name(&name)?;
        self.base
            .core
            .borrow_mut()
            .pool
            .create_tenant(&name, now_s())
            .map_err(api_error)?;
        // Another request may delete it before this one is answered.
        let made = self.tenant_show(&name)?;
        self.base.commit_for_api().await?;
        Ok(self.tenant_show(&name).unwrap_or(made))
    }

    pub(crate) async fn tenant_delete(&self, name: String) -> Result<(), ApiError> {
        self.base
            .core
            .borrow_mut()
            .pool
            .delete_tenant(&name)
            .map_err(|error| match error.kind {
                ErrorKind::InUse => api_error(error).hint(format!(
                    "`forebay volume list {name}` lists its volumes and snapshots"
                )),
                _ => api_error(error),
            })?;
        self.base.commit_for_api().await?;
        // Others get its base now; errors are logged.
        let _ = self.budgets.push_budgets().await;
        Ok(())
    }

    pub(crate) async fn volume_create(
        self: &Rc<Self>,
        tenant: String,
        body: VolumeCreate,
    ) -> Result<Volume, ApiError> {
        let turn = self.base.turn_for_api(&tenant, &body.name).await?;
        self.volume_create_in_turn(turn, tenant, body).await
    }

    /// Creates a volume whose name has its id: `ns-ID`.
    pub(crate) async fn namespace_create(
        self: &Rc<Self>,
        tenant: &str,
        size_bytes: u64,
        block_bytes: u32,
    ) -> Result<Volume, ApiError> {
        let next_name = || format!("ns-{}", self.base.core.borrow().pool.info().next_id);
        for _ in 0..NAME_ATTEMPTS {
            let name = next_name();
            let turn = self.base.turn_for_api(tenant, &name).await?;
            // Other requests may have taken the id meanwhile.
            if name != next_name() {
                continue;
            }
            let body = VolumeCreate {
                name,
                size_bytes: Some(size_bytes),
                block_bytes: Some(block_bytes),
                reserved_bytes: 0,
                rbd: None,
            };
            return self
                .volume_create_in_turn(turn, tenant.to_owned(), body)
                .await;
        }
        Err(ApiError::unavailable("too many volumes are being created").hint("try again"))
    }

    async fn volume_create_in_turn(
        self: &Rc<Self>,
        turn: TurnGuard,
        tenant: String,
        body: VolumeCreate,
    ) -> Result<Volume, ApiError> {
        if let Some(path) = &body.rbd {
            return self.create_on_image(turn, tenant, path, &body).await;
        }
        let size_bytes = body.size_bytes.ok_or_else(|| {
            ApiError::invalid("a volume needs a size")
                .hint("give --size (`size_bytes` in the API), or --rbd with an existing image")
        })?;
        let new = NewVolume {
            tenant: tenant.clone(),
            name: body.name.clone(),
            size_bytes,
            block_bytes: Some(body.block_bytes.unwrap_or(4096)),
            reserved_bytes: body.reserved_bytes,
        };
        let create = || {
            self.base
                .core
                .borrow_mut()
                .pool
                .create_volume(&new, now_s())
        };
        let id = self.with_space_taken_back(create).await;
        let id = id.map_err(|error| {
            let pool = &self.base.core.borrow().pool;
            reservation_error(pool, error, body.reserved_bytes, size_bytes)
        })?;
        self.commit_and_push(id, vec![turn]).await?;
        self.base.volume_show(&tenant, &body.name)
    }

    /// Retries after taking back unwritten preallocated extents.
    pub(super) async fn with_space_taken_back<T>(
        &self,
        attempt: impl Fn() -> Result<T, PoolError>,
    ) -> Result<T, PoolError> {
        match attempt() {
            Err(error) if error.kind == ErrorKind::NoSpace => {
                if self.mapping.take_back_for_space().await {
                    attempt()
                } else {
                    Err(error)
                }
            }
            done => done,
        }
    }

    pub(super) async fn push_volume(&self, id: VolumeId) -> Result<(), ApiError> {
        let volume = {
            let core = self.base.core.borrow();
            let record = core.pool.volume(id).map_err(api_error)?;
            self.base.volume_config(&core.pool, record)
        };
        if let (Some(image), Some(session)) = (&volume.image, self.link.session()) {
            self.clients.begin(&session, image.device);
        }
        self.link
            .push("a volume", |request| ToEngine::SetVolume {
                request,
                volume,
            })
            .await
            .map_err(|error| engine_error(&error))
    }

    pub(crate) async fn volume_update(
        self: &Rc<Self>,
        tenant: String,
        name: String,
        body: VolumeUpdate,
    ) -> Result<Volume, ApiError> {
        let turn = self.base.turn_for_api(&tenant, &name).await?;
        let id = self.base.volume_id(&tenant, &name)?;
        self.base.refuse_snapshot(id, &tenant, &name)?;
        if let Some(reserved_bytes) = body.reserved_bytes {
            let set = || {
                let pool = &mut self.base.core.borrow_mut().pool;
                pool.set_volume_reservation(id, reserved_bytes)
            };
            self.with_space_taken_back(set).await.map_err(|error| {
                let core = self.base.core.borrow();
                let size_bytes = core.pool.volume(id).map_or(0, |volume| volume.size_bytes);
                reservation_error(&core.pool, error, reserved_bytes, size_bytes)
            })?;
            self.base.commit_for_api().await?;
        }
        if let Some(size_bytes) = body.size_bytes {
            match self.image_of(id) {
                Some(of) => {
                    self.resize_image(id, of, size_bytes, body.shrink, turn)
                        .await?;
                }
                None => {
                    self.grow(id, size_bytes).map_err(api_error)?;
                    self.commit_and_push(id, vec![turn]).await?;
                }
            }
        }
        self.base.volume_show(&tenant, &name)
    }

    /// If the commit fails, both happen later. Keeps the turns until then.
    pub(super) async fn commit_and_push(
        self: &Rc<Self>,
        id: VolumeId,
        turns: Vec<TurnGuard>,
    ) -> Result<(), ApiError> {
        if let Err(error) = self.base.commit_for_api().await {
            let owner = self.clone();
            self.base.spawn(async move {
                owner.base.commit_through().await;
                if let Err(error) = owner.push_volume(id).await {
                    tracing::warn!(volume = %id, %error, "can't send a volume to the engine");
                }
                drop(turns);
            });
            return Err(error);
        }
        self.push_volume(id).await
    }

    pub(crate) fn grow(&self, id: VolumeId, size_bytes: u64) -> Result<(), PoolError> {
        self.set_size(id, |pool| pool.grow_volume(id, size_bytes))
    }

    /// In memory; the API shows the new size once it is durable.
    pub(super) fn set_size(
        &self,
        id: VolumeId,
        set: impl FnOnce(&mut Pool) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let pool = &mut self.base.core.borrow_mut().pool;
        let durable_bytes = self.base.durable_size(pool, pool.volume(id)?);
        set(pool)?;
        let mut growing = self.base.growing.borrow_mut();
        growing.retain(|_, (_, batch)| *batch > pool.journal().committed_id());
        growing.insert(id, (durable_bytes, pool.journal().open_batch_id()));
        Ok(())
    }

    pub(super) fn refuse_exported(
        &self,
        id: VolumeId,
        tenant: &str,
        name: &str,
    ) -> Result<(), ApiError> {
        self.transfers
            .refuse_transferred(id, &format!("{tenant}/{name}"))?;
        if self
            .base
            .core
            .borrow()
            .pool
            .exports()
            .first_of(id)
            .is_some()
        {
            return Err(
                ApiError::in_use(format!("volume {tenant}/{name} is exported")).hint(format!(
                    "delete the export first: `forebay export delete {tenant}/{name}`"
                )),
            );
        }
        Ok(())
    }

    /// Refuses if a volume has other exports than these, or hosts that are connected.
    pub(crate) async fn refuse_others(&self, id: u64, exports: &[u64]) -> Result<(), ApiError> {
        let id = VolumeId(id);
        let what = {
            let core = self.base.core.borrow();
            let mut others = core.pool.exports().of_volume(id);
            let name = self.base.volume_name(&core, id);
            if others.any(|export| !exports.contains(&export.id.0)) {
                return Err(ApiError::in_use(format!(
                    "volume {name} is exported otherwise"
                )));
            }
            format!("volume {name}")
        };
        let is_used = |export: &ExportRecord, _: Option<&str>| export.volume == id;
        let hosts = &self.transfers.hosts;
        hosts.refuse_in_use(&what, is_used).await
    }

    #[cfg(test)]
    pub(crate) async fn volume_delete(
        self: &Rc<Self>,
        tenant: String,
        name: String,
    ) -> Result<String, ApiError> {
        let query = VolumeDelete::default();
        self.volume_delete_as(tenant, name, None, query).await
    }

    /// `expected`: the volume that must still have the name. Returns what stays of it, in words.
    pub(crate) async fn volume_delete_as(
        self: &Rc<Self>,
        tenant: String,
        name: String,
        expected: Option<u64>,
        query: VolumeDelete,
    ) -> Result<String, ApiError> {
        let id = self.base.volume_id(&tenant, &name)?;
        self.transfers.end_dead_transfers(id).await;
        let _turn = self.base.turn_for_api(&tenant, &name).await?;
        if let Some(expected) = expected {
            self.base.refuse_other(&tenant, &name, VolumeId(expected))?;
        }
        let of = self.base.volume_show(&tenant, &name)?;
        let id = VolumeId(of.id);
        self.refuse_exported(id, &tenant, &name)?;
        let image = self.image_of(id);
        match &image {
            Some(image) if query.with_image => self.refuse_needed(id, image).await?,
            None if query.with_image => {
                return Err(ApiError::invalid(format!(
                    "volume {tenant}/{name} has no image in Ceph"
                ))
                .hint("delete it without --with-image (`with_image` in the API)"));
            }
            _ => {}
        }
        self.base.wait_open_for_api().await?;
        match self.mapping.delete_volume(id).await {
            Ok(()) => {}
            Err(error @ ReleaseError::Revoke(_)) => {
                return Err(ApiError::unavailable(format!(
                    "volume {tenant}/{name} is still in use: {error}"
                ))
                .hint("nothing was changed; see `forebay status` for the engine and its devices, and try again"));
            }
            Err(ReleaseError::Pool(error)) => return Err(api_error(error)),
        }
        self.link
            .push("removing a volume", |request| ToEngine::RemoveVolume {
                request,
                volume: id,
            })
            .await
            .map_err(|error| engine_error(&error))?;
        let is_snapshot = of.snapshot.is_some();
        match image {
            None => Ok(self.what_stays(id, &tenant, is_snapshot)),
            Some(image) => {
                let ended = self.end_image(&image, query.with_image).await?;
                // A snapshot in Ceph needs no space of the pool.
                let stays = match is_snapshot {
                    true => String::new(),
                    false => self.what_stays(id, &tenant, false),
                };
                Ok(ended + &stays)
            }
        }
    }

    pub(crate) fn tenant_show(&self, name: &str) -> Result<Tenant, ApiError> {
        let core = self.base.core.borrow();
        let tenant = core.pool.tenants().named(name).map_err(api_error)?;
        let mut shown = show_tenant(&core, tenant);
        let budget = shown.budget.as_ref();
        shown.credit = budget.and_then(|budget| self.statistics.credit(tenant.id, budget));
        Ok(shown)
    }
}
