//! Creates and destroys pools while the daemon runs, one change at a time.
//!
//! The end of a pool waits until its engine has released the devices' locks, because the next
//! pool's generations begin at 1 again.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::requests::changing;
use super::stop::STOP_LIMIT;
use super::{Daemon, DaemonError, blocking};
use crate::devices::{self, OpenPool, Opening, Places, PoolDevice};
use crate::files;
use crate::model::error::ApiError;
use crate::model::{DeviceAdd, DeviceInfo, PoolCreate, PoolDestroy, PoolInfo};
use crate::owner::{Grants, Limits, Owner, grants_capacity};
use crate::supervisor::process;

/// How long a command waits for the daemon's own attempt: less than an API client waits.
const POLL_LIMIT: Duration = Duration::from_secs(40);

impl Daemon {
    /// The configured pool in a file, created if missing.
    pub(super) async fn embedded(&self) -> Result<Option<OpenPool>, DaemonError> {
        let Some(embedded) = &self.config.embedded_pool else {
            return Ok(None);
        };
        let spec = format!("file:{}", embedded.path.display());
        let body = PoolCreate {
            name: "pool".to_owned(),
            devices: vec![spec.clone()],
            size_bytes: Some(embedded.size_bytes),
            ..PoolCreate::default()
        };
        let (there, me) = (embedded.path.exists(), self.me.clone());
        let opening = Arc::new(Opening::of(Some(body.name.clone())));
        let opens = opening.clone();
        let open = self.open_given(opening, move || {
            if there && devices::has_pool(&spec)? {
                return devices::open_at(&Places {
                    given: vec![spec],
                    me: Some(me),
                    opening: opens,
                    ..Places::default()
                });
            }
            let mut open = devices::create_embedded(&body)?;
            open.tenure = Some(devices::hold(&me, &open.devices)?);
            Ok(open)
        });
        let open = open.await.map_err(|error| {
            let reported = DaemonError::new(format!("can't open the embedded pool: {error}"));
            match error.hint {
                // The configuration has no --force.
                Some(hint) if hint == devices::OVERWRITE_HINT => reported.with_hint(format!(
                    "remove {} if you need nothing in it",
                    embedded.path.display()
                )),
                Some(hint) => reported.with_hint(hint),
                None => reported,
            }
        })?;
        tracing::info!(path = %embedded.path.display(), made = !there, "opened the embedded pool");
        Ok(Some(open))
    }

    pub(crate) async fn pool_create(
        self: Rc<Self>,
        body: PoolCreate,
    ) -> Result<PoolInfo, ApiError> {
        let _only_one = self.change_pool().await?;
        if let Some(serving) = self.serving() {
            return Err(ApiError::exists(format!(
                "this daemon already serves pool {}",
                serving.owner.base.pool_name()
            ))
            .hint("one daemon serves one pool: destroy that pool first, or start another daemon"));
        }
        if let Some(trouble) = &*self.trouble.borrow() {
            return Err(ApiError::in_use(format!(
                "the pool that is recorded here is not open: {}",
                trouble.message
            ))
            .hint(
                "repair it and open it (`forebay pool open`), or forget it first: `forebay pool destroy NAME --forget`",
            ));
        }
        let me = self.me.clone();
        let open = blocking(move || {
            let mut open = devices::create(&body)?;
            open.tenure = Some(devices::hold(&me, &open.devices)?);
            Ok(open)
        });
        let open = open.await?;
        devices::record(&self.config.state_dir, &open.pool)
            .map_err(|error| ApiError::unavailable(error.to_string()))?;
        self.record_devices(&open.pool);
        let OpenPool {
            pool,
            catalog,
            devices,
            tenure,
            ..
        } = open;
        let unavailable = |error: io::Error| ApiError::unavailable(error.to_string());
        let boot_id = forebay_xlate::shm::boot_id().map_err(unavailable)?;
        let grants = Grants::fresh(&self.grants_path(), &pool, &boot_id, grants_capacity())
            .map_err(unavailable)?;
        let (catalog, limits) = (Arc::new(catalog), Limits::default());
        let (events, clusters) = (self.events.clone(), self.clusters.clone());
        let owner = Owner::new(pool, catalog, devices, grants, limits, events, clusters);
        owner.labels.set_hold(self.me.clone(), tenure);
        owner.mapping.finish_adoption(None).await;
        let info = owner.reports.pool_show();
        self.begin(owner, None);
        Ok(info)
    }

    pub(crate) async fn device_add(
        &self,
        owner: Rc<Owner>,
        body: DeviceAdd,
    ) -> Result<DeviceInfo, ApiError> {
        let _one_at_a_time = owner.adding.lock().await;
        let own = owner.base.device_specs();
        let open = move || {
            devices::refuse_own(&own, &body.spec)?;
            devices::open_new(&body)
        };
        let device = blocking(open).await?;
        let (store, made) = (device.store.clone(), device.made());
        let added = owner.clone().device_add(device).await;
        let index = added.inspect_err(|_| devices::remove_made(&made))?;
        self.record_devices(&owner.base.core.borrow().pool);
        let joined = PoolDevice {
            index,
            spec: store.0.info().spec.to_string(),
            store,
        };
        if let Err(error) = devices::reserve_catalog(&[joined]) {
            tracing::warn!(%error, "can't reserve space for a copy of the catalog");
        }
        Ok(owner.reports.device_show(index.0)?.device)
    }

    pub(crate) async fn pool_destroy(
        self: Rc<Self>,
        query: PoolDestroy,
    ) -> Result<String, ApiError> {
        let _only_one = self.change_pool().await?;
        let Some(serving) = self.serving() else {
            return self.forget(&query).await;
        };
        let owner = &serving.owner;
        let pool = owner.reports.pool_show();
        if query.name != pool.name && query.name != pool.uuid {
            return Err(other_pool(&query.name, &pool.name, &pool.uuid));
        }
        if query.forget {
            return Err(ApiError::invalid(format!("pool {} is open", pool.name))
                .hint("only a pool that can't be opened can be forgotten: omit --forget"));
        }
        if pool.volumes > 0 && !query.delete_volumes {
            return Err(ApiError::in_use(format!(
                "pool {} has {} volume(s)",
                pool.name, pool.volumes
            ))
            .hint("delete them first, or use --delete-volumes; their data is lost"));
        }
        if !query.disconnect_hosts {
            let what = format!("pool {}", pool.name);
            owner.hosts.refuse_cutting_off(&what, |_, _| true).await?;
        }
        serving.supervisor.stop(owner, STOP_LIMIT).await;
        if let Err(error) = owner.base.wait_unfenced(Duration::from_secs(10)).await {
            self.serving.borrow_mut().take();
            self.begin(owner.clone(), None);
            return Err(error);
        }
        self.serving.borrow_mut().take();
        owner.close();
        self.spare_listeners
            .borrow_mut()
            .append(&mut owner.ports.listeners.borrow_mut());
        let gone = |error: io::Error| ApiError::unavailable(error.to_string());
        // The record first: a pool without it is found by its labels, but not the reverse.
        for folder in self.record_dirs() {
            files::remove(&devices::record_path(folder)).map_err(gone)?;
        }
        devices::destroy(&owner.base.devices.borrow())?;
        files::remove(&process::record_path(&self.config.run_dir)).map_err(gone)?;
        files::remove(&self.grants_path()).map_err(gone)?;
        Ok("pool destroyed".to_owned())
    }

    /// Waits for the daemon's own attempt to open the pool.
    pub(super) async fn change_pool(self: &Rc<Self>) -> Result<ChangingPool, ApiError> {
        let checked = async {
            while self.polls_again.get() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let _ = timeout(POLL_LIMIT, checked).await;
        self.try_change_pool()
    }

    pub(super) fn try_change_pool(self: &Rc<Self>) -> Result<ChangingPool, ApiError> {
        if self.changing_pool.replace(true) {
            return Err(changing());
        }
        Ok(ChangingPool(self.clone()))
    }
}

pub(super) struct ChangingPool(Rc<Daemon>);

impl Drop for ChangingPool {
    fn drop(&mut self) {
        self.0.changing_pool.set(false);
        self.0.polls_again.set(false);
        self.0.opening.borrow_mut().take();
    }
}

pub(super) fn other_pool(said: &str, name: &str, uuid: &str) -> ApiError {
    ApiError::not_found(format!(
        "there is no pool {said}: this pool has the name {name} and the UUID {uuid}"
    ))
    .hint("give its name or its UUID")
}
