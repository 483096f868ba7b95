//! Tenants and volumes, as the API changes them.
//!
//! Purpose: create, grow, reserve, delete.
//! Design: the pool is changed and the change committed; then the engine is told. Growing is told
//! after the commit, so that no host sees a size that a crash takes back. Deleting first takes every
//! extent back from the data path.
//! Not here: names' syntax (checked before), answers' shape (`show`).

use std::rc::Rc;

use forebay_device::size::format_bytes;
use forebay_pool::{ErrorKind, NewVolume, Pool, PoolError, VolumeRecord};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ToEngine;
use tokio::time::timeout;

use super::Owner;
use super::release::ReleaseError;
use super::session::AskError;
use super::turns::Turn;
use crate::api::error::ApiError;
use crate::api::model::{Tenant, Volume, VolumeCreate, VolumeUpdate};
use crate::devices::{api_error, now_s};

pub(super) fn engine_error(error: &AskError) -> ApiError {
    match error {
        AskError::Refused(_) => ApiError::internal(error.to_string()),
        _ => ApiError::unavailable(error.to_string())
            .hint("see `forebay status`; what was asked for is recorded and is told to the engine again when it restarts"),
    }
}

/// An error of something that may have promised space to a volume of a size.
fn reservation_error(
    pool: &Pool,
    error: PoolError,
    reserved_bytes: u64,
    size_bytes: u64,
) -> ApiError {
    let kind = error.kind;
    let told = api_error(error);
    let is_reserve = told.message.contains("can't be reserved");
    if is_reserve && reserved_bytes > size_bytes {
        return told.hint(
            "reserve less, or `full` for all of the volume; `forebay volume resize` makes it larger",
        );
    }
    if kind != ErrorKind::NoSpace {
        return told;
    }
    let left = pool.reservable_bytes(None);
    told.hint(format!(
        "reserve less ({} can be promised now), add a device (`forebay device add`), or take other \
         volumes' reservations back (`forebay volume set --reserve`)",
        format_bytes(left)
    ))
}

impl Owner {
    /// Makes everything changed so far durable, for the API.
    pub(super) async fn commit_for_api(&self) -> Result<(), ApiError> {
        self.commit().await.map_err(|error| {
            ApiError::unavailable(error.to_string())
                .hint("the change is kept in memory and tried again; see the daemon's log")
        })
    }

    /// Makes a tenant.
    pub(crate) async fn tenant_create(&self, name: String) -> Result<Tenant, ApiError> {
        self.refuse_its_name(&name)?;
        self.core
            .borrow_mut()
            .pool
            .create_tenant(&name, now_s())
            .map_err(api_error)?;
        // Another request may delete it before this one is answered.
        let made = self.tenant_show(&name)?;
        self.commit_for_api().await?;
        Ok(self.tenant_show(&name).unwrap_or(made))
    }

    /// Ends a tenant without volumes.
    pub(crate) async fn tenant_delete(&self, name: String) -> Result<(), ApiError> {
        self.core
            .borrow_mut()
            .pool
            .delete_tenant(&name)
            .map_err(api_error)?;
        self.commit_for_api().await?;
        // What was kept for it is others' now; what goes wrong is logged.
        let _ = self.push_budgets().await;
        Ok(())
    }

    /// Makes a volume.
    pub(crate) async fn volume_create(
        self: &Rc<Self>,
        tenant: String,
        body: VolumeCreate,
    ) -> Result<Volume, ApiError> {
        let turn = self.turn_for_api(&tenant, &body.name).await?;
        let new = NewVolume {
            tenant: tenant.clone(),
            name: body.name.clone(),
            size_bytes: body.size_bytes,
            block_bytes: Some(body.block_bytes.unwrap_or(4096)),
            reserved_bytes: body.reserved_bytes,
        };
        let create = || self.core.borrow_mut().pool.create_volume(&new, now_s());
        let id = self.with_space_taken_back(create).await;
        let id = id.map_err(|error| {
            let pool = &self.core.borrow().pool;
            reservation_error(pool, error, body.reserved_bytes, body.size_bytes)
        })?;
        self.commit_and_push(id, turn).await?;
        self.volume_show(&tenant, &body.name)
    }

    /// Does something that may find no space; if so, again once what was never written is taken back.
    async fn with_space_taken_back<T>(
        &self,
        attempt: impl Fn() -> Result<T, PoolError>,
    ) -> Result<T, PoolError> {
        match attempt() {
            Err(error) if error.kind == ErrorKind::NoSpace => {
                if self.take_back_for_space().await {
                    attempt()
                } else {
                    Err(error)
                }
            }
            done => done,
        }
    }

    async fn push_volume(&self, id: VolumeId) -> Result<(), ApiError> {
        let volume = {
            let core = self.core.borrow();
            let record = core.pool.volume(id).map_err(api_error)?;
            self.volume_config(&core.pool, record)
        };
        self.push("a volume", |request| ToEngine::SetVolume {
            request,
            volume,
        })
        .await
        .map_err(|error| engine_error(&error))
    }

    /// Grows a volume, or changes how much of it is reserved.
    pub(crate) async fn volume_update(
        self: &Rc<Self>,
        tenant: String,
        name: String,
        body: VolumeUpdate,
    ) -> Result<Volume, ApiError> {
        let turn = self.turn_for_api(&tenant, &name).await?;
        let id = self.volume_id(&tenant, &name)?;
        if let Some(reserved_bytes) = body.reserved_bytes {
            let set = || {
                let pool = &mut self.core.borrow_mut().pool;
                pool.set_volume_reservation(id, reserved_bytes)
            };
            self.with_space_taken_back(set).await.map_err(|error| {
                let core = self.core.borrow();
                let size_bytes = core.pool.volume(id).map_or(0, |volume| volume.size_bytes);
                reservation_error(&core.pool, error, reserved_bytes, size_bytes)
            })?;
            self.commit_for_api().await?;
        }
        if let Some(size_bytes) = body.size_bytes {
            self.grow(id, size_bytes).map_err(api_error)?;
            self.commit_and_push(id, turn).await?;
        }
        self.volume_show(&tenant, &name)
    }

    /// Makes a volume durable as it is now, and tells the engine: later, if it can't be made durable yet. Nobody has a turn
    /// before.
    async fn commit_and_push(self: &Rc<Self>, id: VolumeId, turn: Turn) -> Result<(), ApiError> {
        if let Err(error) = self.commit_for_api().await {
            let owner = self.clone();
            self.spawn(async move {
                owner.commit_through().await;
                if let Err(error) = owner.push_volume(id).await {
                    tracing::warn!(volume = %id, %error, "telling the engine of a volume");
                }
                drop(turn);
            });
            return Err(error);
        }
        self.push_volume(id).await
    }

    /// Grows a volume in memory: nobody is shown that before it is durable.
    pub(super) fn grow(&self, id: VolumeId, size_bytes: u64) -> Result<(), PoolError> {
        let pool = &mut self.core.borrow_mut().pool;
        let durable_bytes = self.durable_size(pool, pool.volume(id)?);
        pool.grow_volume(id, size_bytes)?;
        let mut growing = self.growing.borrow_mut();
        growing.retain(|_, (_, batch)| *batch > pool.committed_id());
        growing.insert(id, (durable_bytes, pool.open_batch_id()));
        Ok(())
    }

    /// How large a volume is for as long as no crash takes it back.
    pub(super) fn durable_size(&self, pool: &Pool, record: &VolumeRecord) -> u64 {
        match self.growing.borrow().get(&record.id) {
            Some((size_bytes, batch)) if *batch > pool.committed_id() => *size_bytes,
            _ => record.size_bytes,
        }
    }

    pub(super) fn volume_id(&self, tenant: &str, name: &str) -> Result<VolumeId, ApiError> {
        let core = self.core.borrow();
        core.pool
            .volume_by_name(tenant, name)
            .map(|record| record.id)
            .map_err(api_error)
    }

    fn refuse_exported(&self, id: VolumeId, tenant: &str, name: &str) -> Result<(), ApiError> {
        self.refuse_transferred(id, &format!("{tenant}/{name}"))?;
        if self.core.borrow().pool.export_of(id).is_some() {
            return Err(
                ApiError::in_use(format!("volume {tenant}/{name} is exported")).hint(format!(
                    "remove the export first: `forebay export delete {tenant}/{name}`"
                )),
            );
        }
        Ok(())
    }

    /// Waits until adoption is through, for the API.
    pub(super) async fn wait_open_for_api(&self) -> Result<(), ApiError> {
        timeout(self.limits.request, self.wait_open())
            .await
            .map_err(|_| {
                ApiError::unavailable("the daemon is still taking over what an earlier one granted")
                    .hint("try again in a moment; see `forebay status`")
            })
    }

    /// Ends a volume that is not exported.
    pub(crate) async fn volume_delete(
        self: &Rc<Self>,
        tenant: String,
        name: String,
    ) -> Result<(), ApiError> {
        let id = self.volume_id(&tenant, &name)?;
        self.end_dead_transfers(id).await;
        let _turn = self.turn_for_api(&tenant, &name).await?;
        let id = self.volume_id(&tenant, &name)?;
        self.refuse_exported(id, &tenant, &name)?;
        self.wait_open_for_api().await?;
        match self.give_up_volume(id).await {
            Ok(()) => {}
            Err(error @ ReleaseError::Revoke(_)) => {
                return Err(ApiError::unavailable(format!(
                    "volume {tenant}/{name} is still in use: {error}"
                ))
                .hint("nothing was changed; see `forebay status` for the engine and its devices, and try again"));
            }
            Err(ReleaseError::Pool(error)) => return Err(api_error(error)),
        }
        self.push("removing a volume", |request| ToEngine::RemoveVolume {
            request,
            volume: id,
        })
        .await
        .map_err(|error| engine_error(&error))
    }
}
