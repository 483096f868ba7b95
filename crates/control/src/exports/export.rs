//! Creates, changes and deletes exports for the API: in the catalog first, then in the engine.
//!
//! An export that the engine refuses is removed from the catalog again. A request that removes
//! hosts is answered after the engine has disconnected them; their commands at devices may take
//! longer.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::{ExportId, ExportRecord, NewExport, SocketOwner, VolumeRecord};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{
    ExportConfig, ExportId as EngineExportId, FrontendKind, ToEngine,
};
use forebay_xlate::boundary::region::MAX_LANES;
use tokio::time::timeout;

use crate::base::Base;
use crate::base::show::serial;
use crate::devices::{api_error, now_s};
use crate::events::EventFields;
use crate::exports::hosts::Hosts;
use crate::exports::ports::Ports;
use crate::exports::quarantine::Quarantine;
use crate::exports::transfers::{Announced, is_internal, is_transfer_host};
use crate::exports::vms::VmSockets;
use crate::link::session::AskError;
use crate::link::{Link, engine_error};
use crate::mapping::MapOwner;
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::model::{Export, ExportCreate, ExportFrontend, ExportUpdate};
use crate::qos::budgets::Budgets;
use crate::qos::placement::ReactorPlacement;

/// How long a new export waits for an engine. The next one is told of it anyway.
const ENGINE_WAIT: Duration = Duration::from_secs(2);

/// A mistyped name would leave the right host connected.
fn refuse_unlisted(export: &ExportRecord, name: &str, remove: &[String]) -> Result<(), ApiError> {
    let unlisted: Vec<&str> = (remove.iter().map(String::as_str))
        .filter(|host| !export.hosts.iter().any(|listed| listed == host))
        .collect();
    if unlisted.is_empty() {
        return Ok(());
    }
    Err(ApiError::not_found(format!(
        "export {name} does not list {}; nothing was changed",
        unlisted.join(", ")
    ))
    .hint(format!("`forebay export show {name}` lists its hosts")))
}

#[derive(Debug)]
pub(crate) struct Exports {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) mapping: Rc<dyn MapOwner>,
    pub(super) hosts: Rc<Hosts>,
    pub(crate) vms: Rc<VmSockets>,
    pub(super) ports: Rc<Ports>,
    pub(super) budgets: Rc<Budgets>,
    pub(crate) placement: Rc<ReactorPlacement>,
    pub(super) transfers: Rc<Announced>,
    pub(super) quarantine: Rc<Quarantine>,
    /// The node's name in NQNs of new exports, if configured.
    pub(crate) node_name: RefCell<Option<String>>,
}

impl Exports {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        mapping: &Rc<dyn MapOwner>,
        vms: &Rc<VmSockets>,
        ports: &Rc<Ports>,
        budgets: &Rc<Budgets>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            mapping: mapping.clone(),
            hosts: vms.hosts.clone(),
            vms: vms.clone(),
            ports: ports.clone(),
            budgets: budgets.clone(),
            placement: budgets.placement.clone(),
            transfers: Rc::default(),
            quarantine: vms.quarantine.clone(),
            node_name: Default::default(),
        })
    }

    pub(crate) async fn export_create(
        self: &Rc<Self>,
        body: ExportCreate,
    ) -> Result<Export, ApiError> {
        let _turn = self.base.turn_for_api(&body.tenant, &body.volume).await?;
        self.export_create_in_turn(body, None).await
    }

    /// For an out-of-band function. `volume`: the one that must still have the name.
    pub(crate) async fn export_create_for(
        self: &Rc<Self>,
        body: ExportCreate,
        volume: VolumeId,
        function: u16,
    ) -> Result<Export, ApiError> {
        let _turn = self.base.turn_for_api(&body.tenant, &body.volume).await?;
        self.base.refuse_other(&body.tenant, &body.volume, volume)?;
        self.export_create_in_turn(body, Some(function)).await
    }

    /// `function`: the out-of-band function that the export belongs to.
    pub(crate) async fn export_create_in_turn(
        self: &Rc<Self>,
        body: ExportCreate,
        function: Option<u16>,
    ) -> Result<Export, ApiError> {
        let (tenant, volume) = (body.tenant.clone(), body.volume.clone());
        let id = self.base.volume_id(&tenant, &volume)?;
        let new = self.new_export(body, function);
        let is_internal = new.only_reads;
        self.transfers.refuse_while_importing(
            id,
            &format!("{tenant}/{volume}"),
            &new.hosts,
            new.any_host,
        )?;
        self.refuse_too_many_exports()?;
        let lacking = self.placement.lacking_now();
        let export = {
            let mut core = self.base.core.borrow_mut();
            core.pool
                .create_export_as(id, new, now_s())
                .map_err(api_error)?
        };
        let name = format!("{tenant}/{volume}");
        self.vms.making.borrow_mut().insert(export);
        let begun = self.begin_export(export).await;
        self.vms.making.borrow_mut().remove(&export);
        begun?;
        let text = match is_internal {
            true => format!("{name} is now exported (internal: an image is transferred)"),
            false => format!("{name} is now exported"),
        };
        self.report_export(EventKind::ExportCreated, name, text);
        let mut shown = self.show_one(export)?;
        // Another reactor than the planned one may serve it.
        let _ = self.budgets.push_budgets().await;
        shown.warnings = self.placement.say_lacking(&lacking);
        Ok(shown)
    }

    fn new_export(&self, body: ExportCreate, function: Option<u16>) -> NewExport {
        let frontend = match body.frontend {
            ExportFrontend::NvmeTcp => FrontendKind::NvmeTcp,
            ExportFrontend::NvmePcie => FrontendKind::NvmePcie {
                mapped_doorbells: body.mapped_doorbells,
                pinned_memory: body.pinned_memory,
            },
            ExportFrontend::VhostUser => FrontendKind::VhostUser {
                queues: body.queues.unwrap_or(1),
                pinned_memory: body.pinned_memory,
            },
        };
        let mut hosts = body.hosts;
        let only_reads = hosts.iter().any(|host| is_transfer_host(host));
        hosts.sort_unstable();
        hosts.dedup();
        NewExport {
            hosts,
            any_host: body.any_host,
            frontend,
            socket: body.socket,
            socket_owner: SocketOwner {
                user: body.socket_user,
                group: body.socket_group,
            },
            shared: body.shared,
            node: self.node_name.borrow().clone(),
            only_reads,
            function,
        }
    }

    /// Takes the export back on failure.
    async fn begin_export(self: &Rc<Self>, export: ExportId) -> Result<(), ApiError> {
        self.base.commit_for_api().await?;
        // Hosts at the port of an engine that starts or is taken over must find this export too.
        let _ = timeout(ENGINE_WAIT, self.link.wait_session()).await;
        self.push_snapshot(export).await?;
        let known = self.budgets.push_budgets().await;
        known.map_err(|error| engine_error(&error))?;
        let error = match self.push_export(export).await {
            Ok(_) => match self.vms.listen_for_vm(export).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            },
            // Taken back below. The engine may have no lane left until another export has ended.
            Err(error @ AskError::Refused(_)) => {
                ApiError::unavailable(error.to_string()).hint("nothing was changed; try again")
            }
            Err(error) => return Err(engine_error(&error)),
        };
        let path = self.vms.vm_path(export);
        let volume = self.export_volume(export)?;
        let taken_back = self.base.core.borrow_mut().pool.delete_export(export);
        taken_back.map_err(api_error)?;
        self.base.commit_for_api().await?;
        let of_engine = EngineExportId(export.0);
        let message = |request| ToEngine::RemoveExport {
            request,
            export: of_engine,
        };
        let _ = self.link.push_settled("removing an export", message).await;
        self.drop_snapshot(volume).await;
        let _ = self.budgets.push_budgets().await;
        // If the socket could not be made, the path may be another's.
        if let Some(path) = path
            && self.vms.has_vm_listener(export)
        {
            self.vms.remove_vm_listener(export, &path).await;
        }
        Err(error)
    }

    /// The engine learns of a snapshot with its first export.
    async fn push_snapshot(&self, id: ExportId) -> Result<(), ApiError> {
        let volume = {
            let core = self.base.core.borrow();
            let export = core.pool.exports().get(id).map_err(api_error)?;
            let record = core.pool.volume(export.volume).map_err(api_error)?;
            if !record.is_snapshot() {
                return Ok(());
            }
            self.base.volume_config(&core.pool, record)
        };
        let message = |request| ToEngine::SetVolume { request, volume };
        let pushed = self.link.push("a snapshot", message).await;
        pushed.map_err(|error| engine_error(&error))
    }

    /// The engine forgets a snapshot after its last export. Otherwise it keeps the snapshot's
    /// translations, which does no harm.
    async fn drop_snapshot(&self, volume: VolumeId) {
        let is_unused = {
            let core = self.base.core.borrow();
            let record = core.pool.volume(volume);
            record.is_ok_and(VolumeRecord::is_snapshot)
                && core.pool.exports().first_of(volume).is_none()
                // The engine would forget hosts' registrations too.
                && core.pool.hosts().reservations_of(volume).is_none()
        };
        if !is_unused {
            return;
        }
        let dropped = async {
            self.mapping.revoke_volume(volume).await?;
            let message = |request| ToEngine::RemoveVolume { request, volume };
            self.link.push("removing a snapshot", message).await
        };
        if let Err(error) = dropped.await {
            tracing::warn!(%volume, %error, "the engine keeps a snapshot that is not exported");
        }
    }

    fn report_export(&self, kind: EventKind, name: String, text: String) {
        let fields = EventFields {
            export: Some(name),
            ..EventFields::default()
        };
        self.base.report(kind, text, fields);
    }

    /// Returns how many commands of hosts that this shuts out are still at devices.
    pub(crate) async fn push_export(&self, id: ExportId) -> Result<u32, AskError> {
        if self.quarantine.has(id) {
            return Ok(0);
        }
        let export = {
            let core = self.base.core.borrow();
            let Ok(record) = core.pool.exports().get(id) else {
                return Ok(0);
            };
            let Ok(volume) = core.pool.volume(record.volume) else {
                return Ok(0);
            };
            export_config(record, volume)
        };
        let reactor = self.placement.reactor_for(id);
        self.link
            .push_settled("an export", |request| ToEngine::SetExport {
                request,
                export,
                reactor,
            })
            .await
    }

    fn export_volume(&self, id: ExportId) -> Result<VolumeId, ApiError> {
        let core = self.base.core.borrow();
        core.pool
            .exports()
            .get(id)
            .map(|export| export.volume)
            .map_err(api_error)
    }

    pub(crate) async fn export_update(
        &self,
        tenant: String,
        volume: String,
        body: ExportUpdate,
    ) -> Result<Export, ApiError> {
        let _turn = self.base.turn_for_api(&tenant, &volume).await?;
        let id = self.export_id(&tenant, &volume)?;
        let name = format!("{tenant}/{volume}");
        self.export_update_in_turn(id, name, body).await
    }

    /// `name`: as the caller knows the export.
    pub(crate) async fn export_update_in_turn(
        &self,
        id: ExportId,
        name: String,
        body: ExportUpdate,
    ) -> Result<Export, ApiError> {
        {
            let core = self.base.core.borrow();
            let export = core.pool.exports().get(id).map_err(api_error)?;
            refuse_unlisted(export, &name, &body.remove_hosts)?;
        }
        let may_connect = |record: &ExportRecord| {
            let any_host = body.any_host.unwrap_or(record.any_host);
            let mut hosts = record.hosts.clone();
            hosts.retain(|host| !body.remove_hosts.contains(host));
            for host in &body.add_hosts {
                if !hosts.contains(host) {
                    hosts.push(host.clone());
                }
            }
            (hosts, any_host)
        };
        if !body.add_hosts.is_empty() || body.any_host == Some(true) {
            let any_host = body.any_host == Some(true);
            let of = self.export_volume(id)?;
            self.transfers
                .refuse_while_importing(of, &name, &body.add_hosts, any_host)?;
        }
        if !body.disconnect_hosts {
            let what = format!("export {name}");
            let is_cut_off = |export: &ExportRecord, host: Option<&str>| {
                let (hosts, any_host) = may_connect(export);
                let stays = |host| any_host || hosts.iter().any(|listed| listed == host);
                export.id == id && host.is_some_and(|host| !stays(host))
            };
            self.hosts.refuse_cutting_off(&what, is_cut_off).await?;
        }
        {
            let mut core = self.base.core.borrow_mut();
            let (hosts, any_host) = may_connect(core.pool.exports().get(id).map_err(api_error)?);
            core.pool
                .set_export_hosts(id, hosts, any_host)
                .map_err(api_error)?;
        }
        self.base.commit_for_api().await?;
        let pushed = self.push_export(id).await;
        let at_devices = pushed.map_err(|error| engine_error(&error))?;
        let mut shown = self.show_one(id)?;
        shown.commands_ending = at_devices.into();
        let who = match (shown.any_host, shown.hosts.len()) {
            (true, _) => "every host".to_owned(),
            (false, 1) => "one host".to_owned(),
            (false, hosts) => format!("{hosts} hosts"),
        };
        let changed = body.add_hosts.iter().chain(&body.remove_hosts);
        let text = match changed.clone().next().is_some()
            && changed.clone().all(|h| is_transfer_host(h))
        {
            true => format!("export {name} now admits {who} (internal: an image is transferred)"),
            false => format!("export {name} now admits {who}"),
        };
        self.report_export(EventKind::ExportChanged, name, text);
        Ok(shown)
    }

    /// Refuses while hosts or a VM are connected, unless `disconnect_hosts` is set. Returns how
    /// many of their commands are still at devices.
    pub(crate) async fn export_delete(
        self: &Rc<Self>,
        tenant: String,
        volume: String,
        disconnect_hosts: bool,
    ) -> Result<u64, ApiError> {
        let _turn = self.base.turn_for_api(&tenant, &volume).await?;
        let id = self.export_id(&tenant, &volume)?;
        let name = format!("{tenant}/{volume}");
        self.export_delete_in_turn(id, name, disconnect_hosts).await
    }

    /// `name`: as the caller knows the export.
    pub(crate) async fn export_delete_in_turn(
        self: &Rc<Self>,
        id: ExportId,
        name: String,
        disconnect_hosts: bool,
    ) -> Result<u64, ApiError> {
        if !disconnect_hosts {
            let what = format!("export {name}");
            self.hosts
                .refuse_cutting_off(&what, |export, _| export.id == id)
                .await?;
        }
        let (volume, was_internal) = {
            let core = self.base.core.borrow();
            let export = core.pool.exports().get(id).map_err(api_error)?;
            (export.volume, is_internal(export))
        };
        let socket = self.vms.vm_path(id);
        self.hosts.remember(id, self.hosts.export_name(id));
        self.base
            .core
            .borrow_mut()
            .pool
            .delete_export(id)
            .map_err(api_error)?;
        self.base.commit_for_api().await?;
        self.quarantine.lift(id);
        let export = EngineExportId(id.0);
        let message = |request| ToEngine::RemoveExport { request, export };
        let pushed = self.link.push_settled("removing an export", message).await;
        if let Some(path) = socket {
            self.vms.remove_vm_listener(id, &path).await;
        }
        // Frees the tenant's placement if this was its last export. Errors are logged.
        let _ = self.budgets.push_budgets().await;
        let at_devices = pushed.map_err(|error| engine_error(&error))?;
        if at_devices == 0 {
            self.drop_snapshot(volume).await;
        }
        let text = match was_internal {
            true => format!("{name} is no longer exported (internal: an image was transferred)"),
            false => format!("{name} is no longer exported"),
        };
        self.report_export(EventKind::ExportDeleted, name, text);
        Ok(at_devices.into())
    }

    pub(crate) fn refuse_too_many_exports(&self) -> Result<(), ApiError> {
        if self.base.core.borrow().pool.exports().iter().count() < MAX_LANES {
            return Ok(());
        }
        Err(ApiError::no_space(format!(
            "there are {MAX_LANES} exports, the most that a node can have"
        ))
        .hint("delete an unused one; `forebay export list` shows them"))
    }
}

pub(crate) fn export_config(record: &ExportRecord, volume: &VolumeRecord) -> ExportConfig {
    ExportConfig {
        export: EngineExportId(record.id.0),
        volume: record.volume,
        nqn: record.nqn.clone(),
        serial: serial(volume),
        hosts: record.hosts.iter().cloned().collect(),
        any_host: record.any_host,
        frontend: record.frontend,
    }
}
