//! Converts export records, with the connected hosts, into API answers. Reads only.

use std::collections::{BTreeMap, BTreeSet};

use forebay_pool::{ExportId, ExportRecord};
use forebay_xlate::boundary::message::FrontendKind;

use crate::base::Core;
use crate::base::show::tenant_name;
use crate::devices::api_error;
use crate::exports::export::Exports;
use crate::exports::transfers::is_internal;
use crate::link::connected_hosts;
use crate::model::error::ApiError;
use crate::model::{Export, ExportFrontend};

impl Exports {
    fn show_export(
        &self,
        core: &Core,
        export: &ExportRecord,
        connected: &mut BTreeMap<u64, BTreeSet<String>>,
        reactors: &BTreeMap<ExportId, u32>,
    ) -> Option<Export> {
        let volume = core.pool.volume(export.volume).ok()?;
        let (frontend, mapped_doorbells, queues) = match export.frontend {
            FrontendKind::NvmeTcp => (ExportFrontend::NvmeTcp, false, 0),
            FrontendKind::NvmePcie {
                mapped_doorbells, ..
            } => (ExportFrontend::NvmePcie, mapped_doorbells, 0),
            FrontendKind::VhostUser { queues, .. } => (ExportFrontend::VhostUser, false, queues),
        };
        let is_vm = export.frontend.is_vm();
        let addresses = match is_vm {
            true => Vec::new(),
            false => self.ports.addresses(),
        };
        let socket = is_vm.then(|| self.vms.socket_path(export, volume).display().to_string());
        Some(Export {
            tenant: tenant_name(core, volume),
            volume: volume.name.clone(),
            id: export.id.0,
            frontend,
            mapped_doorbells,
            queues,
            pinned_memory: export.frontend.keeps_memory(),
            socket,
            machine: is_vm.then(|| self.hosts.vm_of(export.id)).flatten(),
            shared: export.shared,
            read_only: volume.is_snapshot(),
            internal: is_internal(export),
            nqn: export.nqn.clone(),
            nsid: 1,
            hosts: export.hosts.clone(),
            any_host: export.any_host,
            addresses,
            quarantined: self.quarantine.reason(export.id),
            commands_ending: 0,
            warnings: Vec::new(),
            reactor: reactors.get(&export.id).copied(),
            connected_hosts: connected
                .remove(&export.id.0)
                .map_or_else(Vec::new, |hosts| hosts.into_iter().collect()),
        })
    }

    fn all_connected(&self) -> BTreeMap<u64, BTreeSet<String>> {
        (self.link.session()).map_or_else(BTreeMap::new, |session| connected_hosts(&session.region))
    }

    pub(crate) fn export_list(&self) -> Vec<Export> {
        let core = self.base.core.borrow();
        let mut connected = self.all_connected();
        let reactors = self.placement.reactors_of_exports();
        let mut exports: Vec<Export> = core
            .pool
            .exports()
            .iter()
            .filter_map(|export| self.show_export(&core, export, &mut connected, &reactors))
            .collect();
        exports.sort_by(|a, b| (&a.tenant, &a.volume).cmp(&(&b.tenant, &b.volume)));
        exports
    }

    pub(crate) fn export_show(&self, tenant: &str, volume: &str) -> Result<Export, ApiError> {
        self.show_one(self.export_id(tenant, volume)?)
    }

    pub(super) fn show_one(&self, id: ExportId) -> Result<Export, ApiError> {
        let core = self.base.core.borrow();
        let export = core.pool.exports().get(id).map_err(api_error)?;
        let reactors = self.placement.reactors_of_exports();
        self.show_export(&core, export, &mut self.all_connected(), &reactors)
            .ok_or_else(|| ApiError::internal(format!("{id} has no volume")))
    }
}
