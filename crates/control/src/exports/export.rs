//! Exports, as the API changes them.
//!
//! Purpose: show a volume to hosts, change who may connect, stop showing it.
//! Design: the catalog first, then the engine; an export that the engine refuses is taken out of the
//! catalog again. Hosts that may no longer connect are disconnected by the engine, and nobody is answered
//! before that has happened; what they have at devices may take as long as the devices do.
//! Not here: host NQNs' syntax (checked before), connecting (the engine).

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::{ExportId, ExportRecord, NewExport, SocketOwner, VolumeRecord};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{
    ExportConfig, ExportId as EngineExportId, Frontend, ToEngine,
};
use forebay_xlate::boundary::region::MAX_LANES;
use tokio::time::timeout;

use crate::base::Base;
use crate::base::show::serial;
use crate::devices::{api_error, now_s};
use crate::events::News;
use crate::exports::hosts::Hosts;
use crate::exports::ports::Ports;
use crate::exports::quarantine::Quarantine;
use crate::exports::transfers::{Announced, is_internal, is_transfer_host};
use crate::exports::vms::VmSockets;
use crate::link::session::AskError;
use crate::link::{Link, engine_error};
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::model::{Export, ExportCreate, ExportFrontend, ExportUpdate};
use crate::qos::budgets::Budgets;
use crate::qos::placement::ReactorPlacement;

/// How long a new export waits for an engine that begins or is taken over. Without one, the next is told of it.
const ENGINE_WAIT: Duration = Duration::from_secs(2);

/// Each host to be removed must be listed: a wrong name would leave the right one connected.
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

/// Exports: who may connect to which volume.
#[derive(Debug)]
pub(crate) struct Exports {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) hosts: Rc<Hosts>,
    pub(crate) vms: Rc<VmSockets>,
    pub(super) ports: Rc<Ports>,
    pub(super) budgets: Rc<Budgets>,
    pub(crate) placement: Rc<ReactorPlacement>,
    pub(super) transfers: Rc<Announced>,
    pub(super) quarantine: Rc<Quarantine>,
    /// What NQNs of new exports say of this node, if it is configured.
    pub(crate) node_name: RefCell<Option<String>>,
}

impl Exports {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        hosts: &Rc<Hosts>,
        vms: &Rc<VmSockets>,
        ports: &Rc<Ports>,
        budgets: &Rc<Budgets>,
        quarantine: &Rc<Quarantine>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            hosts: hosts.clone(),
            vms: vms.clone(),
            ports: ports.clone(),
            budgets: budgets.clone(),
            placement: budgets.placement.clone(),
            transfers: Rc::default(),
            quarantine: quarantine.clone(),
            node_name: Default::default(),
        })
    }

    /// Exports a volume.
    pub(crate) async fn export_create(
        self: &Rc<Self>,
        body: ExportCreate,
    ) -> Result<Export, ApiError> {
        let _turn = self.base.turn_for_api(&body.tenant, &body.volume).await?;
        self.export_create_in_turn(body).await
    }

    pub(crate) async fn export_create_in_turn(
        self: &Rc<Self>,
        body: ExportCreate,
    ) -> Result<Export, ApiError> {
        let (tenant, volume) = (body.tenant.clone(), body.volume.clone());
        let id = self.base.volume_id(&tenant, &volume)?;
        let new = self.new_export(body);
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
        let named = format!("{volume}@{}", export.0);
        self.vms.making.borrow_mut().insert(export);
        let begun = self.begin_export(export).await;
        self.vms.making.borrow_mut().remove(&export);
        begun?;
        let text = match is_internal {
            true => format!("{name} is exported from now on (internal: an image is moved)"),
            false => format!("{name} is exported from now on"),
        };
        self.tell_export(EventKind::ExportCreated, name, text);
        let mut shown = self.export_show(&tenant, &named)?;
        // It may be served elsewhere than it was to be.
        let _ = self.budgets.push_budgets().await;
        shown.warnings = self.placement.say_lacking(&lacking);
        Ok(shown)
    }

    /// What the pool is asked to make.
    fn new_export(&self, body: ExportCreate) -> NewExport {
        let frontend = match body.frontend {
            ExportFrontend::NvmeTcp => Frontend::NvmeTcp,
            ExportFrontend::NvmePcie => Frontend::NvmePcie {
                mapped_doorbells: body.mapped_doorbells,
                pinned_memory: body.pinned_memory,
            },
            ExportFrontend::VhostUser => Frontend::VhostUser {
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
        }
    }

    /// Has an export that was made be served; if that can't be, it is taken back.
    async fn begin_export(self: &Rc<Self>, export: ExportId) -> Result<(), ApiError> {
        self.base.commit_for_api().await?;
        // An engine that is just being taken over, or begins, has hosts at its port: they are to find this export as well.
        let _ = timeout(ENGINE_WAIT, self.link.wait_session()).await;
        let known = self.budgets.push_budgets().await;
        known.map_err(|error| engine_error(&error))?;
        let error = match self.push_export(export).await {
            Ok(_) => match self.vms.listen_for_machine(export).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            },
            // It is taken back below. An engine that still ends another export may have no place for this one.
            Err(error @ AskError::Refused(_)) => {
                ApiError::unavailable(error.to_string()).hint("nothing was changed; try again")
            }
            // The next engine is told of it.
            Err(error) => return Err(engine_error(&error)),
        };
        let path = self.vms.machine_path(export);
        let taken_back = self.base.core.borrow_mut().pool.delete_export(export);
        taken_back.map_err(api_error)?;
        self.base.commit_for_api().await?;
        let of_engine = EngineExportId(export.0);
        let message = |request| ToEngine::RemoveExport {
            request,
            export: of_engine,
        };
        let _ = self.link.push_settled("removing an export", message).await;
        let _ = self.budgets.push_budgets().await;
        // One that could not be made may be another's.
        if let Some(path) = path
            && self.vms.has_machine_listener(export)
        {
            self.vms.remove_machine_listener(export, &path).await;
        }
        Err(error)
    }

    fn tell_export(&self, kind: EventKind, name: String, text: String) {
        let news = News {
            export: Some(name),
            ..News::default()
        };
        self.base.tell(kind, text, news);
    }

    /// Has the engine serve an export as it is now. Gives back how many commands of hosts that are shut
    /// out by that are still at devices.
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

    pub(crate) fn export_id(&self, tenant: &str, volume: &str) -> Result<ExportId, ApiError> {
        // Several exports of a volume are told apart by their numbers.
        let (name, number) = match volume.split_once('@') {
            Some((name, number)) => (name, Some(number)),
            None => (volume, None),
        };
        let id = self.base.volume_id(tenant, name)?;
        let core = self.base.core.borrow();
        let is_named = |export: &&ExportRecord| number.is_none_or(|n| export.id.0.to_string() == n);
        let mut found = core.pool.exports().of_volume(id).filter(is_named);
        match (found.next(), found.next()) {
            (Some(one), None) => Ok(one.id),
            (Some(_), Some(_)) => {
                let all = core.pool.exports().of_volume(id);
                let all: Vec<String> = all
                    .map(|e| format!("{tenant}/{name}@{} ({})", e.id.0, e.frontend.name()))
                    .collect();
                Err(
                    ApiError::invalid(format!("volume {tenant}/{name} has several exports"))
                        .hint(format!("name one: {}", all.join(", "))),
                )
            }
            (None, _) => Err(ApiError::not_found(format!(
                "volume {tenant}/{volume} is not exported"
            ))
            .hint("`forebay export list` shows what is")),
        }
    }

    fn export_volume(&self, id: ExportId) -> Result<VolumeId, ApiError> {
        let core = self.base.core.borrow();
        core.pool
            .exports()
            .get(id)
            .map(|export| export.volume)
            .map_err(api_error)
    }

    /// Changes who may connect.
    pub(crate) async fn export_update(
        &self,
        tenant: String,
        volume: String,
        body: ExportUpdate,
    ) -> Result<Export, ApiError> {
        let _turn = self.base.turn_for_api(&tenant, &volume).await?;
        self.export_update_in_turn(tenant, volume, body).await
    }

    pub(crate) async fn export_update_in_turn(
        &self,
        tenant: String,
        volume: String,
        body: ExportUpdate,
    ) -> Result<Export, ApiError> {
        let id = self.export_id(&tenant, &volume)?;
        {
            let core = self.base.core.borrow();
            let export = core.pool.exports().get(id).map_err(api_error)?;
            refuse_unlisted(export, &format!("{tenant}/{volume}"), &body.remove_hosts)?;
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
            self.transfers.refuse_while_importing(
                of,
                &format!("{tenant}/{volume}"),
                &body.add_hosts,
                any_host,
            )?;
        }
        if !body.disconnect_hosts {
            let what = format!("export {tenant}/{volume}");
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
        let mut shown = self.export_show(&tenant, &volume)?;
        shown.commands_ending = at_devices.into();
        let who = match (shown.any_host, shown.hosts.len()) {
            (true, _) => "every host".to_owned(),
            (false, 1) => "one host".to_owned(),
            (false, hosts) => format!("{hosts} hosts"),
        };
        let name = format!("{tenant}/{volume}");
        let changed = body.add_hosts.iter().chain(&body.remove_hosts);
        let text = match changed.clone().next().is_some()
            && changed.clone().all(|h| is_transfer_host(h))
        {
            true => format!("export {name} is for {who} from now on (internal: an image is moved)"),
            false => format!("export {name} is for {who} from now on"),
        };
        self.tell_export(EventKind::ExportChanged, name, text);
        Ok(shown)
    }

    /// Ends an export. Refused while hosts or a machine are connected, unless they are to be disconnected. Gives back how
    /// many commands of theirs are still at devices.
    pub(crate) async fn export_delete(
        self: &Rc<Self>,
        tenant: String,
        volume: String,
        disconnect_hosts: bool,
    ) -> Result<u64, ApiError> {
        let _turn = self.base.turn_for_api(&tenant, &volume).await?;
        self.export_delete_in_turn(tenant, volume, disconnect_hosts)
            .await
    }

    pub(crate) async fn export_delete_in_turn(
        self: &Rc<Self>,
        tenant: String,
        volume: String,
        disconnect_hosts: bool,
    ) -> Result<u64, ApiError> {
        let id = self.export_id(&tenant, &volume)?;
        if !disconnect_hosts {
            let what = format!("export {tenant}/{volume}");
            self.hosts
                .refuse_cutting_off(&what, |export, _| export.id == id)
                .await?;
        }
        let was_internal = self
            .base
            .core
            .borrow()
            .pool
            .exports()
            .get(id)
            .is_ok_and(is_internal);
        let socket = self.vms.machine_path(id);
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
            self.vms.remove_machine_listener(id, &path).await;
        }
        // A tenant that has no exports any more takes no place, however that went; what goes wrong is logged.
        let _ = self.budgets.push_budgets().await;
        let at_devices = pushed.map_err(|error| engine_error(&error))?;
        let name = format!("{tenant}/{volume}");
        let text = match was_internal {
            true => format!("{name} is not exported any more (internal: an image was moved)"),
            false => format!("{name} is not exported any more"),
        };
        self.tell_export(EventKind::ExportDeleted, name, text);
        Ok(at_devices.into())
    }

    /// Refuses one more export than an engine serves.
    pub(crate) fn refuse_too_many_exports(&self) -> Result<(), ApiError> {
        if self.base.core.borrow().pool.exports().iter().count() < MAX_LANES {
            return Ok(());
        }
        Err(
            ApiError::no_space(format!("there are {MAX_LANES} exports, the most of a node"))
                .hint("delete one that nobody uses: `forebay export list`"),
        )
    }
}

/// An export as the engine is told of it.
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
