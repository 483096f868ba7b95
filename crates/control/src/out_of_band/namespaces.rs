//! Namespaces are volumes: create, delete, attach to functions, erase.
//!
//! All goes through the functions of the API, so the same rules hold and the same events follow.

use std::rc::Rc;

use forebay_nvme::Status;
use forebay_nvme::management::{FormatNvm, NamespaceAttachment, NamespaceManagement};
use forebay_nvme::mi::{AdminCommand, MiStatus};
use forebay_xlate::VolumeId;

use super::answer::CommandAnswer;
use super::environment::nsid_of;
use super::node::{Caller, ManagedNode};
use crate::base::show::tenant_name;
use crate::config::{Function, Right};
use crate::model::ExportCreate;
use crate::model::error::{ApiError, ErrorKind};
use crate::model::rbd::VolumeDelete;
use crate::owner::Owner;

/// Hosts of a function are not cut off.
const DISCONNECT_HOSTS: bool = false;

/// A namespace's volume.
#[derive(Debug, Clone)]
pub(super) struct Named {
    pub(super) tenant: String,
    pub(super) volume: String,
}

pub(super) fn find(owner: &Owner, nsid: u32) -> Option<Named> {
    let core = owner.base.core.borrow();
    let volume = core.pool.volume(VolumeId(nsid.into())).ok()?;
    nsid_of(volume)?;
    Some(Named {
        tenant: tenant_name(&core, volume),
        volume: volume.name.clone(),
    })
}

pub(super) fn no_namespace(nsid: u32) -> ApiError {
    ApiError::not_found(format!("there is no namespace {nsid}"))
}

/// Whether each of the functions has the namespace.
fn functions_of(owner: &Owner, nsid: u32) -> Vec<(u16, u64)> {
    let core = owner.base.core.borrow();
    let functions = core.pool.exports().functions();
    let own = functions.filter(|(_, export)| export.volume == VolumeId(nsid.into()));
    own.map(|(number, export)| (number, export.id.0)).collect()
}

impl ManagedNode {
    /// Namespace Management (Base 2.0, 5.23).
    pub(super) async fn namespace_management(
        &self,
        command: &AdminCommand<'_>,
        caller: &Caller,
    ) -> CommandAnswer {
        if !self.may(Right::Namespaces) {
            return CommandAnswer::status(MiStatus::ACCESS_DENIED);
        }
        match NamespaceManagement::decode(&command.sqe, command.data) {
            Ok(NamespaceManagement::Create(new)) => {
                let request = format!(
                    "Namespace Management, create: {} bytes in blocks of {}",
                    new.size_bytes, new.block_bytes
                );
                let made = self.create(new.size_bytes, new.block_bytes).await;
                let result = made.as_ref().map(|nsid| format!("done: ns-{nsid}"));
                self.audit_result(caller, "create a volume", request, false, &result)
                    .await;
                self.changed(made.as_ref().ok().copied());
                answer(
                    made.map(u64::from),
                    Status::NAMESPACE_IDENTIFIER_UNAVAILABLE,
                )
            }
            Ok(NamespaceManagement::Delete { nsid }) => {
                let request = format!("Namespace Management, delete: namespace {nsid}");
                let deleted = self.delete(nsid).await;
                let result = deleted.as_ref().map(|()| "done".to_owned());
                self.audit_result(caller, "delete a volume", request, true, &result)
                    .await;
                self.changed(deleted.as_ref().ok().map(|()| nsid));
                answer(deleted.map(|()| 0), Status::INVALID_NAMESPACE_OR_FORMAT)
            }
            Err(status) => CommandAnswer::admin(status, 0, Vec::new()),
        }
    }

    /// Namespace Attachment (Base 2.0, 5.22).
    pub(super) async fn namespace_attachment(
        &self,
        command: &AdminCommand<'_>,
        caller: &Caller,
    ) -> CommandAnswer {
        if !self.may(Right::Namespaces) {
            return CommandAnswer::status(MiStatus::ACCESS_DENIED);
        }
        let attachment = match NamespaceAttachment::decode(&command.sqe, command.data) {
            Ok(attachment) => attachment,
            Err(status) => return CommandAnswer::admin(status, 0, Vec::new()),
        };
        let functions: Option<Vec<Function>> = (attachment.controllers.iter())
            .map(|number| self.function(*number).cloned())
            .collect();
        let Some(functions) = functions else {
            return CommandAnswer::admin(Status::CONTROLLER_LIST_INVALID, 0, Vec::new());
        };
        let nsid = attachment.nsid;
        let (verb, action) = match attachment.attach {
            true => ("attach", "export a volume"),
            false => ("detach", "delete an export"),
        };
        let numbers: Vec<String> = functions.iter().map(|f| f.number.to_string()).collect();
        let request = format!(
            "Namespace Attachment, {verb}: namespace {nsid}, controllers {}",
            numbers.join(", ")
        );
        let done = match attachment.attach {
            true => self.attach(nsid, functions).await,
            false => self.detach(nsid, functions).await,
        };
        if let Ok(Status::SUCCESS) | Err(_) = &done {
            let result = done.as_ref().map(|_| "done".to_owned());
            self.audit_result(caller, action, request, !attachment.attach, &result)
                .await;
        }
        self.changed(Some(nsid));
        match done {
            Ok(status) => CommandAnswer::admin(status, 0, Vec::new()),
            // Another export of the volume excludes this one.
            Err(error) => answer(Err(error), Status::NAMESPACE_IS_PRIVATE),
        }
    }

    /// Format NVM (Base 2.0, 5.14) of one namespace. It always erases.
    pub(super) async fn format(
        &self,
        command: &AdminCommand<'_>,
        caller: &Caller,
    ) -> CommandAnswer {
        if !self.may(Right::Format) {
            return CommandAnswer::status(MiStatus::ACCESS_DENIED);
        }
        let format = match FormatNvm::decode(&command.sqe) {
            Ok(format) => format,
            Err(status) => return CommandAnswer::admin(status, 0, Vec::new()),
        };
        let nsid = format.nsid;
        let request = format!("Format NVM: namespace {nsid}");
        let erased = self.daemon.change(move |owner| async move {
            let named = find(&owner, nsid).ok_or_else(|| no_namespace(nsid))?;
            let name = (&*named.tenant, &*named.volume);
            let block_bytes = owner.base.volume_show(name.0, name.1)?.block_bytes;
            if block_bytes != format.block_bytes {
                return Err(ApiError::invalid(format!(
                    "volume {}/{} keeps its blocks of {block_bytes} bytes",
                    name.0, name.1
                )));
            }
            owner
                .volumes
                .volume_erase(name.0, name.1, nsid.into())
                .await
        });
        let erased = erased.await;
        let result = erased.as_ref().map(|()| "done".to_owned());
        self.audit_result(caller, "erase a volume", request, true, &result)
            .await;
        answer(erased.map(|()| 0), Status::OPERATION_DENIED)
    }

    async fn create(&self, size_bytes: u64, block_bytes: u32) -> Result<u32, ApiError> {
        let tenant = self.config.tenant.clone();
        let made = self.daemon.change(move |owner| async move {
            let is_missing = owner.volumes.tenant_show(&tenant).is_err();
            if is_missing {
                match owner.volumes.tenant_create(tenant.clone()).await {
                    // Another command created it.
                    Err(error) if error.kind == ErrorKind::Exists => {}
                    created => _ = created?,
                }
            }
            owner
                .volumes
                .namespace_create(&tenant, size_bytes, block_bytes)
                .await
        });
        let volume = made.await?;
        u32::try_from(volume.id).map_err(|_| ApiError::internal("the volume's id is no NSID"))
    }

    async fn delete(&self, nsid: u32) -> Result<(), ApiError> {
        let deleted = self.daemon.change(move |owner| async move {
            let named = find(&owner, nsid).ok_or_else(|| no_namespace(nsid))?;
            let functions = functions_of(&owner, nsid);
            let ids: Vec<u64> = functions.iter().map(|(_, export)| *export).collect();
            owner.volumes.refuse_others(nsid.into(), &ids).await?;
            for export in ids {
                delete_export(&owner, &named, export).await?;
            }
            owner
                .volumes
                .volume_delete_as(
                    named.tenant,
                    named.volume,
                    Some(nsid.into()),
                    VolumeDelete::default(),
                )
                .await
        });
        deleted.await.map(|_| ())
    }

    /// Exports the volume for each of the functions, or for none.
    async fn attach(&self, nsid: u32, functions: Vec<Function>) -> Result<Status, ApiError> {
        let attached = self.daemon.change(move |owner| async move {
            let named = find(&owner, nsid).ok_or_else(|| no_namespace(nsid))?;
            for function in &functions {
                let core = owner.base.core.borrow();
                match core.pool.exports().of_function(function.number) {
                    Some(export) if export.volume == VolumeId(nsid.into()) => {
                        return Ok(Status::NAMESPACE_ALREADY_ATTACHED);
                    }
                    Some(_) => return Ok(Status::NAMESPACE_ATTACHMENT_LIMIT_EXCEEDED),
                    None => {}
                }
            }
            let mut exports = Vec::new();
            for function in functions {
                // A disk's host sees one namespace, so each function needs an export.
                let body = ExportCreate {
                    tenant: named.tenant.clone(),
                    volume: named.volume.clone(),
                    hosts: function.hosts,
                    any_host: function.any_host,
                    frontend: function.frontend,
                    socket: function.socket,
                    shared: true,
                    ..ExportCreate::default()
                };
                let created = owner
                    .exports
                    .export_create_for(body, VolumeId(nsid.into()), function.number)
                    .await;
                match created {
                    Ok(export) => exports.push(export.id),
                    Err(error) => {
                        for export in exports {
                            if let Err(error) = delete_export(&owner, &named, export).await {
                                tracing::warn!(%error, "an export of a failed attachment stays");
                            }
                        }
                        return Err(error);
                    }
                }
            }
            Ok(Status::SUCCESS)
        });
        attached.await
    }

    /// Ends the functions' exports of the volume. The first with connected hosts ends the command.
    async fn detach(&self, nsid: u32, functions: Vec<Function>) -> Result<Status, ApiError> {
        let detached = self.daemon.change(move |owner| async move {
            let named = find(&owner, nsid).ok_or_else(|| no_namespace(nsid))?;
            let attached = functions_of(&owner, nsid);
            let own = |function: &Function| {
                let export = attached.iter().find(|(of, _)| *of == function.number);
                export.map(|(_, export)| *export)
            };
            let exports: Option<Vec<u64>> = functions.iter().map(own).collect();
            let Some(exports) = exports else {
                return Ok(Status::NAMESPACE_NOT_ATTACHED);
            };
            for export in exports {
                delete_export(&owner, &named, export).await?;
            }
            Ok(Status::SUCCESS)
        });
        detached.await
    }

    /// Lists a namespace in the Changed Namespace List of every controller.
    fn changed(&self, nsid: Option<u32>) {
        let Some(nsid) = nsid else { return };
        let mut controllers = self
            .controllers
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        for controller in controllers.values_mut() {
            controller.namespace_changed(nsid);
        }
    }
}

async fn delete_export(owner: &Rc<Owner>, named: &Named, export: u64) -> Result<(), ApiError> {
    let of_volume = format!("{}@{export}", named.volume);
    let deleted = owner
        .exports
        .export_delete(named.tenant.clone(), of_volume, DISCONNECT_HOSTS);
    deleted.await.map(|_| ())
}

/// `conflict`: the status if the state does not fit.
pub(super) fn answer(done: Result<u64, ApiError>, conflict: Status) -> CommandAnswer {
    match done {
        Ok(result) => CommandAnswer::admin(Status::SUCCESS, result, Vec::new()),
        Err(error) => {
            tracing::warn!(%error, "an out-of-band command was refused");
            CommandAnswer::admin(status_of(&error, conflict), 0, Vec::new())
        }
    }
}

pub(super) fn status_of(error: &ApiError, conflict: Status) -> Status {
    match error.kind {
        ErrorKind::NotFound => Status::INVALID_NAMESPACE_OR_FORMAT,
        ErrorKind::Exists => conflict,
        // Hosts, snapshots or other exports use the volume.
        ErrorKind::InUse | ErrorKind::Forbidden => Status::OPERATION_DENIED,
        ErrorKind::Invalid => Status::INVALID_FIELD,
        ErrorKind::NoSpace => Status::NAMESPACE_INSUFFICIENT_CAPACITY,
        ErrorKind::Unavailable => Status::NAMESPACE_NOT_READY,
        ErrorKind::Damaged | ErrorKind::Internal => Status::INTERNAL_ERROR,
    }
}
