//! Images that go into volumes and come out of them.
//!
//! Purpose: no image is mixed with another, with what a volume holds, or with what a host writes meanwhile.
//! Design: a program that moves an image announces this and renews it every few seconds. Without renewal it expires.
//! The list is in memory: after a restart of the daemon the next renewal brings a transfer back, and until then its
//! connected host keeps an import away.
//! Not here: moving bytes (the program).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use forebay_device::size::format_bytes;
use forebay_xlate::VolumeId;
use tokio::time::Instant;

use super::Owner;
use crate::api::error::ApiError;
use crate::api::model::{TransferKind, TransferPut, Volume};

/// How long an announcement holds without being renewed.
const HOLDS: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Transfer {
    host: String,
    kind: TransferKind,
    ends: Instant,
}

/// The transfers that are under way.
#[derive(Debug, Default)]
pub(super) struct Transfers(RefCell<BTreeMap<VolumeId, Vec<Transfer>>>);

impl Transfers {
    /// The first that `excludes`, of those that have not run out and are not `host`'s.
    fn other(
        &self,
        volume: VolumeId,
        host: &str,
        excludes: impl Fn(TransferKind) -> bool,
    ) -> Option<TransferKind> {
        let mut all = self.0.borrow_mut();
        let now = Instant::now();
        all.retain(|_, some| {
            some.retain(|transfer| transfer.ends > now);
            !some.is_empty()
        });
        let mut others = all.get(&volume)?.iter().filter(|t| t.host != host);
        others.find(|t| excludes(t.kind)).map(|t| t.kind)
    }

    fn put(&self, volume: VolumeId, host: &str, kind: TransferKind) {
        self.remove(volume, host);
        let transfer = Transfer {
            host: host.to_owned(),
            kind,
            ends: Instant::now() + HOLDS,
        };
        self.0
            .borrow_mut()
            .entry(volume)
            .or_default()
            .push(transfer);
    }

    fn remove(&self, volume: VolumeId, host: &str) {
        if let Some(some) = self.0.borrow_mut().get_mut(&volume) {
            some.retain(|transfer| transfer.host != host);
        }
    }
}

fn under_way(kind: TransferKind, name: &str) -> ApiError {
    let what = match kind {
        TransferKind::Import => format!("an image is being imported into {name}"),
        TransferKind::Export => format!("an image of {name} is being exported"),
    };
    ApiError::in_use(what).hint(format!(
        "wait until it has ended; one whose program died ends by itself within {} s",
        HOLDS.as_secs()
    ))
}

impl Owner {
    /// Announces that an image goes into a volume or comes out of it, or that this goes on. The volume as it is then.
    pub(crate) async fn transfer_put(
        &self,
        tenant: String,
        volume: String,
        body: TransferPut,
    ) -> Result<Volume, ApiError> {
        let TransferPut {
            host,
            kind,
            overwrite,
            renew,
        } = body;
        let id = self.volume_id(&tenant, &volume)?;
        let name = format!("{tenant}/{volume}");
        let is_import = kind == TransferKind::Import;
        let excludes = |other| is_import || other == TransferKind::Import;
        if let Some(other) = self.transfers.other(id, &host, excludes) {
            return Err(under_way(other, &name));
        }
        // Before the first wait, so that of two at once one wins.
        self.transfers.put(id, &host, kind);
        if is_import {
            let allowed = match renew {
                false => self.may_import(id, &name, overwrite).await,
                // A host that was let in before may have connected since.
                true => self.refuse_in_use_now(&format!("volume {name}"), |export, user| {
                    export.volume == id && user != Some(&host)
                }),
            };
            if let Err(error) = allowed {
                self.transfers.remove(id, &host);
                return Err(error);
            }
        }
        self.volume_show(&tenant, &volume)
    }

    /// A transfer has ended.
    pub(crate) fn transfer_end(
        &self,
        tenant: &str,
        volume: &str,
        host: &str,
    ) -> Result<(), ApiError> {
        self.transfers.remove(self.volume_id(tenant, volume)?, host);
        Ok(())
    }

    async fn may_import(&self, id: VolumeId, name: &str, overwrite: bool) -> Result<(), ApiError> {
        let what = format!("volume {name}");
        self.refuse_in_use(&what, |export, _| export.volume == id)
            .await
            .map_err(|error| error.hint("disconnect its hosts and machines first"))?;
        // Until then an earlier daemon's grants may not be seen as mapped.
        self.wait_open_for_api().await?;
        self.count_ahead_soon().await;
        let mapped_bytes = self.mapped_bytes(id);
        if mapped_bytes > 0 && !overwrite {
            return Err(ApiError::exists(format!(
                "volume {name} holds {} of data",
                format_bytes(mapped_bytes)
            ))
            .hint(
                "import into a new volume, or use --force (`overwrite` in the API): then everything in the volume is \
                 replaced",
            ));
        }
        Ok(())
    }

    /// While an image goes into a volume, only the host that moves it may be given access.
    pub(super) fn refuse_while_importing(
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
        match self.transfers.other(id, host, is_import) {
            Some(kind) => Err(under_way(kind, name)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_transfer_that_is_not_renewed_runs_out() {
        let transfers = Transfers::default();
        let volume = VolumeId(1);
        let any = |_| true;
        transfers.put(volume, "a", TransferKind::Import);
        assert_eq!(
            transfers.other(volume, "b", any),
            Some(TransferKind::Import)
        );
        assert_eq!(transfers.other(volume, "a", any), None);
        assert_eq!(transfers.other(VolumeId(2), "b", any), None);
        for _ in 0..3 {
            tokio::time::advance(HOLDS - Duration::from_secs(1)).await;
            transfers.put(volume, "a", TransferKind::Import);
        }
        assert!(transfers.other(volume, "b", any).is_some());
        tokio::time::advance(HOLDS).await;
        assert_eq!(transfers.other(volume, "b", any), None);
        transfers.put(volume, "b", TransferKind::Export);
        transfers.remove(volume, "b");
        assert_eq!(transfers.other(volume, "a", any), None);
    }
}
