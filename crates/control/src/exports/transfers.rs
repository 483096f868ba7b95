//! Transfers of images into and out of volumes.
//!
//! A program announces its transfer and renews it every few seconds. Its host gets access through
//! the volume's NVMe/TCP export, or through an internal one, until the transfer ends. A reserved
//! host name marks a transfer, so a later daemon finds it in the catalog. Until the next renewal,
//! its connected host prevents an import.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_device::size::format_bytes;
use forebay_pool::{ExportId, ExportRecord};
use forebay_xlate::VolumeId;
use tokio::time::{Instant, sleep};

use crate::base::Base;
use crate::base::show::tenant_name;
use crate::changed::Signal;
use crate::devices::api_error;
use crate::exports::export::Exports;
use crate::exports::hosts::Hosts;
use crate::mapping::MapOwner;
use crate::model::error::ApiError;
use crate::model::{
    Export, ExportCreate, ExportFrontend, ExportUpdate, TRANSFER_HOST_PREFIX, Transfer as Shown,
    TransferKind, TransferPut,
};

/// How long an announcement holds without renewal.
const HOLDS: Duration = Duration::from_secs(30);
/// A transfer ends when its host has not been connected for this long.
const GONE: Duration = Duration::from_secs(10);
/// Likewise, when another request waits for its end.
const GONE_IN_THE_WAY: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long another request waits for a host that may be leaving, and the period of its checks.
const LEAVES: Duration = Duration::from_millis(500);
const POLL_AGAIN: Duration = Duration::from_millis(50);

#[derive(Debug)]
struct OpenTransfer {
    host: String,
    /// Unknown if an earlier daemon let the host in, until a renewal.
    kind: Option<TransferKind>,
    ends: Instant,
    /// When its host was last connected, or was let in.
    seen: Instant,
}

#[derive(Debug)]
pub(crate) struct Announced {
    of: RefCell<BTreeMap<VolumeId, Vec<OpenTransfer>>>,
    begun: Signal,
}

impl Default for Announced {
    fn default() -> Self {
        Self {
            of: RefCell::default(),
            begun: Signal::new(),
        }
    }
}

impl Announced {
    /// The first transfer of another host than `host` that `excludes`.
    fn other(
        &self,
        volume: VolumeId,
        host: &str,
        excludes: impl Fn(TransferKind) -> bool,
    ) -> Option<TransferKind> {
        let of = self.of.borrow();
        let now = Instant::now();
        let all = of.get(&volume)?.iter();
        let others = all.filter(|transfer| transfer.host != host && transfer.ends > now);
        others
            .filter_map(|transfer| transfer.kind)
            .find(|kind| excludes(*kind))
    }

    /// During an import, only its own host may be given access.
    pub(crate) fn refuse_while_importing(
        &self,
        id: VolumeId,
        name: &str,
        hosts: &[String],
        any_host: bool,
    ) -> Result<(), ApiError> {
        let host = match hosts {
            [one] if !any_host => one,
            _ => "",
        };
        let is_import = |kind| kind == TransferKind::Import;
        match self.other(id, host, is_import) {
            Some(kind) => Err(under_way(kind, name)),
            None => Ok(()),
        }
    }

    fn hosts(&self, volume: VolumeId) -> Vec<String> {
        let of = self.of.borrow();
        let all = of.get(&volume).into_iter().flatten();
        all.map(|transfer| transfer.host.clone()).collect()
    }

    fn put(&self, volume: VolumeId, host: &str, kind: Option<TransferKind>) {
        let before = self.remove(volume, host);
        let now = Instant::now();
        let transfer = OpenTransfer {
            host: host.to_owned(),
            kind,
            ends: now + HOLDS,
            seen: before.map_or(now, |before| before.seen),
        };
        let mut of = self.of.borrow_mut();
        of.entry(volume).or_default().push(transfer);
        drop(of);
        self.begun.raise();
    }

    fn remove(&self, volume: VolumeId, host: &str) -> Option<OpenTransfer> {
        let mut of = self.of.borrow_mut();
        let all = of.get_mut(&volume)?;
        let at = all.iter().position(|transfer| transfer.host == host)?;
        let removed = all.swap_remove(at);
        if all.is_empty() {
            of.remove(&volume);
        }
        Some(removed)
    }

    fn take_ended(
        &self,
        gone: Duration,
        is_connected: impl Fn(VolumeId, &str) -> bool,
    ) -> Vec<(VolumeId, String)> {
        let now = Instant::now();
        let mut ended = Vec::new();
        for (volume, all) in &mut *self.of.borrow_mut() {
            for transfer in all {
                if is_connected(*volume, &transfer.host) {
                    transfer.seen = now;
                }
                if transfer.ends <= now || transfer.seen + gone <= now {
                    ended.push((*volume, transfer.host.clone()));
                }
            }
        }
        for (volume, host) in &ended {
            self.remove(*volume, host);
        }
        ended
    }
}

pub(crate) fn is_transfer_host(host: &str) -> bool {
    host.starts_with(TRANSFER_HOST_PREFIX)
}

/// Whether an export exists for a transfer only.
pub(crate) fn is_internal(export: &ExportRecord) -> bool {
    !export.any_host
        && !export.hosts.is_empty()
        && export.hosts.iter().all(|host| is_transfer_host(host))
}

fn under_way(kind: TransferKind, name: &str) -> ApiError {
    let what = match kind {
        TransferKind::Import => format!("an image is being imported into {name}"),
        TransferKind::Export => format!("an image of {name} is being exported"),
    };
    moved(what)
}

fn moved(what: String) -> ApiError {
    ApiError::in_use(what).hint(format!(
        "wait until it has ended, and try again; a transfer whose program died ends by itself within {} s",
        HOLDS.as_secs()
    ))
}

#[derive(Debug)]
pub(crate) struct Transfers {
    pub(super) base: Rc<Base>,
    pub(super) hosts: Rc<Hosts>,
    pub(super) exports: Rc<Exports>,
    pub(super) mapping: Rc<dyn MapOwner>,
    pub(super) transfers: Rc<Announced>,
}

impl Transfers {
    pub(crate) fn new(
        base: &Rc<Base>,
        hosts: &Rc<Hosts>,
        exports: &Rc<Exports>,
        mapping: &Rc<dyn MapOwner>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            hosts: hosts.clone(),
            exports: exports.clone(),
            mapping: mapping.clone(),
            transfers: exports.transfers.clone(),
        })
    }

    /// Returns how the host connects, and the volume as it was before.
    pub(crate) async fn transfer_put(
        self: &Rc<Self>,
        tenant: String,
        volume: String,
        body: TransferPut,
    ) -> Result<Shown, ApiError> {
        let TransferPut {
            host,
            kind,
            overwrite,
            renew,
        } = body;
        if !is_transfer_host(&host) {
            return Err(ApiError::invalid(format!(
                "the host of a transfer must be named {TRANSFER_HOST_PREFIX}NAME"
            )));
        }
        // A renewal changes nothing.
        let turn = match renew {
            true => None,
            false => {
                let id = self.base.volume_id(&tenant, &volume)?;
                self.end_dead_transfers(id).await;
                Some(self.base.turn_for_api(&tenant, &volume).await?)
            }
        };
        let id = self.base.volume_id(&tenant, &volume)?;
        let name = format!("{tenant}/{volume}");
        let is_import = kind == TransferKind::Import;
        if is_import {
            self.base.refuse_snapshot(id, &tenant, &volume)?;
        }
        let excludes = |other| is_import || other == TransferKind::Import;
        if let Some(other) = self.transfers.other(id, &host, excludes) {
            return Err(under_way(other, &name));
        }
        // Before the first await, so that one of two concurrent imports wins.
        self.transfers.put(id, &host, Some(kind));
        let allowed = match (is_import, renew) {
            (true, false) => self.may_import(id, &name, overwrite).await,
            // Another host that had access before may have connected since.
            (true, true) => self
                .hosts
                .refuse_in_use_now(&format!("volume {name}"), |export, user| {
                    export.volume == id && user != Some(&host)
                }),
            (false, _) => Ok(()),
        };
        let shown = self.base.volume_show(&tenant, &volume);
        let opened = match (allowed, self.tcp_export(id)) {
            (Ok(()), Some(export)) if renew => self.exports.show_one(export),
            (Ok(()), export) if !renew => {
                self.let_in(&tenant, &volume, export, &host, is_import)
                    .await
            }
            (Ok(()), _) => Err(ApiError::not_found(format!(
                "this transfer no longer has access to {name}"
            ))),
            (Err(error), _) => Err(error),
        };
        if !renew && opened.is_ok() {
            // The time limit to connect begins now, because giving access may have taken long.
            self.transfers.remove(id, &host);
            self.transfers.put(id, &host, Some(kind));
        }
        match opened {
            Ok(export) => Ok(Shown {
                volume: shown?,
                nqn: export.nqn,
                addresses: export.addresses,
                in_use_by: self.hosts.names_of_users(id, &host),
            }),
            Err(error) => {
                self.transfers.remove(id, &host);
                drop(turn);
                self.shut_out(id, &host).await;
                Err(error)
            }
        }
    }

    fn tcp_export(&self, id: VolumeId) -> Option<ExportId> {
        let core = self.base.core.borrow();
        let mut exports = core.pool.exports().of_volume(id);
        exports
            .find(|export| !export.frontend.is_vm())
            .map(|export| export.id)
    }

    async fn let_in(
        self: &Rc<Self>,
        tenant: &str,
        volume: &str,
        export: Option<ExportId>,
        host: &str,
        is_import: bool,
    ) -> Result<Export, ApiError> {
        let hosts = vec![host.to_owned()];
        if let Some(export) = export {
            self.refuse_without_hosts(export, &format!("{tenant}/{volume}"))?;
            let body = ExportUpdate {
                add_hosts: hosts,
                ..ExportUpdate::default()
            };
            return self
                .exports
                .export_update_in_turn(export, format!("{tenant}/{volume}"), body)
                .await;
        }
        let id = self.base.volume_id(tenant, volume)?;
        if is_import
            && self
                .base
                .core
                .borrow()
                .pool
                .exports()
                .first_of(id)
                .is_some()
        {
            return Err(ApiError::in_use(format!(
                "volume {tenant}/{volume} is exported to a VM"
            ))
            .hint(format!(
                "delete that export, and create it again afterwards: `forebay export delete {tenant}/{volume}`"
            )));
        }
        let body = ExportCreate {
            tenant: tenant.to_owned(),
            volume: volume.to_owned(),
            frontend: ExportFrontend::NvmeTcp,
            hosts,
            ..ExportCreate::default()
        };
        self.exports.export_create_in_turn(body, None).await
    }

    /// With only a transfer's host, the export would look internal and be deleted at the end.
    fn refuse_without_hosts(&self, export: ExportId, name: &str) -> Result<(), ApiError> {
        let core = self.base.core.borrow();
        let export = core.pool.exports().get(export).map_err(api_error)?;
        if export.any_host || !export.hosts.is_empty() {
            return Ok(());
        }
        Err(
            ApiError::in_use(format!("the export of {name} lists no host")).hint(format!(
                "add one (`forebay export set {name} --add-host NQN`), or delete the export \
                (`forebay export delete {name}`)"
            )),
        )
    }

    pub(crate) async fn transfer_end(
        self: &Rc<Self>,
        tenant: &str,
        volume: &str,
        host: &str,
    ) -> Result<(), ApiError> {
        let id = self.base.volume_id(tenant, volume)?;
        self.transfers.remove(id, host);
        if is_transfer_host(host) {
            self.shut_out(id, host).await;
        }
        Ok(())
    }

    async fn shut_out(self: &Rc<Self>, id: VolumeId, host: &str) {
        let name = {
            let core = self.base.core.borrow();
            let volume = core.pool.volume(id);
            volume.map(|volume| (tenant_name(&core, volume), volume.name.clone()))
        };
        let Ok((tenant, name)) = name else {
            return;
        };
        let _turn = self.base.turn(&tenant, &name).await;
        let place = {
            let core = self.base.core.borrow();
            let lists = |export: &&ExportRecord| export.hosts.iter().any(|listed| listed == host);
            let export = core.pool.exports().of_volume(id).find(lists);
            export.map(|export| {
                let is_last = is_internal(export) && export.hosts.len() == 1;
                (export.id, is_last)
            })
        };
        let name = format!("{tenant}/{name}");
        let Some((export, is_last)) = place else {
            return;
        };
        let ended = if is_last {
            let ended = self.exports.export_delete_in_turn(export, name, true);
            ended.await.map(drop)
        } else {
            let body = ExportUpdate {
                remove_hosts: vec![host.to_owned()],
                disconnect_hosts: true,
                ..ExportUpdate::default()
            };
            let ended = self.exports.export_update_in_turn(export, name, body);
            ended.await.map(drop)
        };
        if let Err(error) = ended {
            tracing::warn!(host, %error, "can't revoke the access of a transfer");
        }
    }

    /// Waits for transfers of this volume whose program is gone, unless their hosts are connected.
    pub(crate) async fn end_dead_transfers(self: &Rc<Self>, id: VolumeId) {
        let begun = Instant::now();
        loop {
            self.end_transfers(GONE_IN_THE_WAY).await;
            let hosts = self.transfers.hosts(id);
            let is_live = hosts.iter().any(|host| self.hosts.is_connected(id, host));
            let limit = if is_live {
                LEAVES
            } else {
                GONE_IN_THE_WAY + LEAVES
            };
            if hosts.is_empty() || begun.elapsed() >= limit {
                return;
            }
            sleep(POLL_AGAIN).await;
        }
    }

    pub(crate) fn refuse_transferred(&self, id: VolumeId, name: &str) -> Result<(), ApiError> {
        let core = self.base.core.borrow();
        let mut exports = core.pool.exports().of_volume(id).peekable();
        if exports.peek().is_none() || !exports.all(is_internal) {
            return Ok(());
        }
        let kind = self.transfers.other(id, "", |_| true);
        Err(match kind {
            Some(kind) => under_way(kind, name),
            // An earlier daemon let it in.
            None => moved(format!(
                "an image is being imported into {name} or exported from it"
            )),
        })
    }

    async fn end_transfers(self: &Rc<Self>, gone: Duration) {
        let is_connected = |id, host: &str| self.hosts.is_connected(id, host);
        for (id, host) in self.transfers.take_ended(gone, is_connected) {
            tracing::info!(host, volume = %id, "a transfer has ended without notice");
            self.shut_out(id, &host).await;
        }
    }

    pub(crate) async fn run_transfers(self: Rc<Self>) {
        let left: Vec<(VolumeId, String)> = {
            let core = self.base.core.borrow();
            let hosts = |export: &ExportRecord| {
                let volume = export.volume;
                let hosts = export.hosts.iter().filter(|host| is_transfer_host(host));
                hosts.map(|host| (volume, host.clone())).collect::<Vec<_>>()
            };
            core.pool.exports().iter().flat_map(hosts).collect()
        };
        for (id, host) in left {
            self.transfers.put(id, &host, None);
        }
        loop {
            let transfers = &self.transfers;
            let some = || (!transfers.of.borrow().is_empty()).then_some(());
            transfers.begun.until(some).await;
            sleep(POLL_INTERVAL).await;
            self.end_transfers(GONE).await;
        }
    }

    async fn may_import(&self, id: VolumeId, name: &str, overwrite: bool) -> Result<(), ApiError> {
        let what = format!("volume {name}");
        self.hosts
            .refuse_in_use(&what, |export, _| export.volume == id)
            .await
            .map_err(|error| error.hint("disconnect its hosts and VMs first"))?;
        // Until then mappings from an earlier daemon's grants may be missing.
        self.base.wait_open_for_api().await?;
        self.mapping.count_preallocated_soon().await;
        let held = match (self.base.mapped_bytes(id), self.base.has_shared_data(id)) {
            _ if overwrite => return Ok(()),
            (0, false) => return Ok(()),
            (0, true) => "data of a snapshot".to_owned(),
            (mapped_bytes, _) => format!("{} of data", format_bytes(mapped_bytes)),
        };
        Err(
            ApiError::exists(format!("volume {name} holds {held}")).hint(
                "import into a new volume, or use --force (`overwrite` in the API), which replaces everything in the \
                volume",
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_transfer_ends_without_renewal_or_host() {
        let transfers = Announced::default();
        let volume = VolumeId(1);
        let (any, import) = (|_| true, Some(TransferKind::Import));
        transfers.put(volume, "a", import);
        assert_eq!(transfers.other(volume, "b", any), import);
        assert_eq!(transfers.other(volume, "a", any), None);
        assert_eq!(transfers.other(VolumeId(2), "b", any), None);
        for _ in 0..3 {
            tokio::time::advance(HOLDS - Duration::from_secs(1)).await;
            transfers.put(volume, "a", import);
            assert!(transfers.take_ended(GONE, |_, _| true).is_empty());
        }
        assert!(transfers.other(volume, "b", any).is_some());
        tokio::time::advance(HOLDS).await;
        assert_eq!(transfers.other(volume, "b", any), None);
        let ended = [(volume, "a".to_owned())];
        assert_eq!(transfers.take_ended(GONE, |_, _| true), ended);
        transfers.put(volume, "a", import);
        assert!(transfers.take_ended(GONE, |_, _| true).is_empty());
        tokio::time::advance(GONE - Duration::from_secs(1)).await;
        assert!(transfers.take_ended(GONE, |_, _| false).is_empty());
        assert_eq!(transfers.take_ended(GONE_IN_THE_WAY, |_, _| false), ended);
        transfers.put(volume, "b", None);
        assert_eq!(transfers.other(volume, "a", any), None);
        assert!(transfers.remove(volume, "b").is_some());
    }
}
