//! Which request is whose.
//!
//! Purpose: takes a request from the API and has it carried out.
//! Design: what only reads is answered at once, or after the engine has said how much of what a volume
//! got ahead of its writes is written by now; everything else becomes a task. Tasks of a pool end with
//! it.
//! Not here: the operations.

use std::future::Future;
use std::rc::Rc;

use super::Daemon;
use crate::api::error::ApiError;
use crate::api::model::Port;
use crate::api::request::{Reply, Request};
use crate::owner::{Owner, unserved_ports};

impl Daemon {
    pub(super) fn dispatch(self: &Rc<Self>, request: Request) {
        match request {
            Request::Status(reply) => _ = reply.send(Ok(self.status())),
            Request::Stats(reply) => _ = reply.send(Ok(self.stats())),
            Request::PortList(reply) => _ = reply.send(Ok(self.port_list())),
            Request::PortUpdate {
                address,
                body,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.ports.port_update(&address.to_string(), body).await
                });
            }
            Request::Events {
                after,
                wait,
                mut reply,
            } => {
                let events = self.events.clone();
                tokio::task::spawn_local(async move {
                    tokio::select! {
                        list = events.read(after, wait) => { let _ = reply.send(Ok(list)); }
                        () = reply.closed() => {}
                    }
                });
            }
            Request::Audit { audit, reply } => {
                let (events, generation) = (self.events.clone(), self.status().generation);
                tokio::task::spawn_local(async move {
                    events.audit(generation, *audit).await;
                    let _ = reply.send(Ok(()));
                });
            }
            Request::PoolCreate { body, reply } => {
                let daemon = self.clone();
                tokio::task::spawn_local(async move {
                    let _ = reply.send(daemon.pool_create(body).await);
                });
            }
            Request::PoolDestroy { query, reply } => {
                let daemon = self.clone();
                tokio::task::spawn_local(async move {
                    let _ = reply.send(daemon.pool_destroy(query).await);
                });
            }
            Request::PoolOpen { body, reply } => {
                let daemon = self.clone();
                tokio::task::spawn_local(async move {
                    let _ = reply.send(daemon.pool_open(body).await);
                });
            }
            Request::PoolUpgrade(reply) => {
                let daemon = self.clone();
                tokio::task::spawn_local(async move {
                    let _ = reply.send(daemon.pool_upgrade().await);
                });
            }
            Request::PoolShow(reply) => {
                self.read(reply, move |owner| Ok(owner.reports.pool_show()))
            }
            Request::PoolUpdate { body, reply } => {
                self.change(reply, move |owner| async move {
                    owner.reports.pool_update(body).await
                });
            }
            Request::PoolCheck { body, reply } => {
                self.change(reply, move |owner| async move {
                    owner.reports.check(body).await
                });
            }
            Request::DeviceShow { index, reply } => {
                self.read(reply, move |owner| owner.reports.device_show(index));
            }
            Request::DeviceAdd { body, reply } => {
                let daemon = self.clone();
                self.change(reply, move |owner| async move {
                    daemon.device_add(owner, body).await
                });
            }
            Request::DeviceList(reply) => {
                self.read(reply, move |owner| Ok(owner.reports.device_list()))
            }
            Request::TenantCreate { name, reply } => {
                self.change(reply, move |owner| async move {
                    owner.volumes.tenant_create(name).await
                });
            }
            Request::TenantList(reply) => {
                self.read(reply, move |owner| Ok(owner.base.tenant_list()))
            }
            Request::TenantShow { name, reply } => {
                self.read(reply, move |owner| owner.volumes.tenant_show(&name));
            }
            Request::TenantDelete { name, reply } => {
                self.change(reply, move |owner| async move {
                    owner.volumes.tenant_delete(name).await
                });
            }
            Request::TenantBudget {
                name,
                budget,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.budgets.tenant_budget(&name, budget).await
                });
            }
            Request::VolumeBudget {
                tenant,
                volume,
                budget,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.budgets.volume_budget(&tenant, &volume, budget).await
                });
            }
            Request::SchedulingShow(reply) => {
                self.read(reply, move |owner| Ok(owner.budgets.scheduling_show()));
            }
            Request::SchedulingUpdate { body, reply } => {
                self.change(reply, move |owner| async move {
                    owner.budgets.scheduling_update(body).await
                });
            }
            Request::Calibrating { seconds, reply } => {
                self.change(reply, move |owner| async move {
                    owner.budgets.calibrating(seconds).await
                });
            }
            Request::CostsShow(reply) => self.read(reply, move |owner| Ok(owner.node.costs_show())),
            Request::CostsPut { body, reply } => {
                self.change(reply, move |owner| async move {
                    owner.budgets.costs_put(body).await
                });
            }
            Request::VolumeCreate {
                tenant,
                body,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.volumes.volume_create(tenant, body).await
                });
            }
            Request::VolumeList { tenant, reply } => {
                self.read(reply, move |owner| {
                    owner.base.volume_list(tenant.as_deref())
                });
            }
            Request::VolumeShow {
                tenant,
                volume,
                reply,
            } => {
                self.read(reply, move |owner| owner.base.volume_show(&tenant, &volume));
            }
            Request::VolumeExtents {
                tenant,
                volume,
                from_bytes,
                reply,
            } => {
                self.read(reply, move |owner| {
                    owner.base.volume_extents(&tenant, &volume, from_bytes)
                });
            }
            Request::VolumeUpdate {
                tenant,
                volume,
                body,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.volumes.volume_update(tenant, volume, body).await
                });
            }
            Request::VolumeDelete {
                tenant,
                volume,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.volumes.volume_delete(tenant, volume).await
                });
            }
            Request::TransferPut {
                tenant,
                volume,
                body,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.transfers.transfer_put(tenant, volume, body).await
                });
            }
            Request::TransferEnd {
                tenant,
                volume,
                host,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.transfers.transfer_end(&tenant, &volume, &host).await
                });
            }
            Request::ExportCreate { body, reply } => {
                self.change(reply, move |owner| async move {
                    owner.exports.export_create(body).await
                });
            }
            Request::ExportList(reply) => {
                self.read(reply, move |owner| Ok(owner.exports.export_list()))
            }
            Request::ExportShow {
                tenant,
                volume,
                reply,
            } => {
                self.read(reply, move |owner| {
                    owner.exports.export_show(&tenant, &volume)
                });
            }
            Request::ExportUpdate {
                tenant,
                volume,
                body,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.exports.export_update(tenant, volume, body).await
                });
            }
            Request::ExportDelete {
                tenant,
                volume,
                disconnect_hosts,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner
                        .exports
                        .export_delete(tenant, volume, disconnect_hosts)
                        .await
                });
            }
            Request::ExportResume {
                tenant,
                volume,
                reply,
            } => {
                self.change(reply, move |owner| async move {
                    owner.exports.export_resume(tenant, volume).await
                });
            }
            Request::EngineReplace(reply) => {
                let supervisor = self.serving().map(|serving| serving.supervisor.clone());
                let absent = self.absent();
                self.change(reply, move |owner| async move {
                    match supervisor {
                        Some(supervisor) => supervisor.replace(&owner).await,
                        None => Err(absent),
                    }
                });
            }
            // The daemon's loop takes it out.
            Request::Shutdown(reply) => _ = reply.send(Ok(())),
        }
    }

    fn port_list(&self) -> Vec<Port> {
        match self.serving() {
            Some(serving) => serving.owner.ports.port_list(),
            None => unserved_ports(self.spare_listeners.borrow().keys()),
        }
    }

    /// What is said while no pool is served.
    fn absent(&self) -> ApiError {
        // A pool that the daemon looks for again is as absent as it was.
        let is_looked_for = self.looks_again.get() && self.trouble.borrow().is_some();
        match (
            self.now_opening(),
            self.changing_pool.get() && !is_looked_for,
        ) {
            (Some(opening), _) => ApiError::unavailable(opening.to_string())
                .hint("try again in a moment; `forebay status` says what it waits for"),
            (None, true) => changing(),
            (None, false) => self.no_pool(),
        }
    }

    fn read<T: 'static>(
        &self,
        reply: Reply<T>,
        ask: impl FnOnce(&Owner) -> Result<T, ApiError> + 'static,
    ) {
        let Some(serving) = self.serving() else {
            let _ = reply.send(Err(self.absent()));
            return;
        };
        if !serving.owner.base.has_places_ahead() {
            let _ = reply.send(ask(&serving.owner));
            return;
        }
        // What was written in this moment is to be seen in what is said to be used.
        let owner = serving.owner.clone();
        serving.owner.base.spawn(async move {
            owner.mapping.revoker.count_ahead_soon().await;
            let _ = reply.send(ask(&owner));
        });
    }

    fn change<T: 'static, F: Future<Output = Result<T, ApiError>> + 'static>(
        &self,
        reply: Reply<T>,
        act: impl FnOnce(Rc<Owner>) -> F + 'static,
    ) {
        let Some(serving) = self.serving() else {
            let _ = reply.send(Err(self.absent()));
            return;
        };
        if self.changing_pool.get() {
            let _ = reply.send(Err(changing()));
            return;
        }
        let owner = serving.owner.clone();
        serving.owner.base.spawn(async move {
            let _ = reply.send(act(owner).await);
        });
    }
}

/// Something else is under way with the pool as a whole.
pub(super) fn changing() -> ApiError {
    ApiError::unavailable("the pool is being made, opened or destroyed")
        .hint("try again in a moment")
}
