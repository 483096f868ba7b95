//! Committing mappings: content first, then map.
//!
//! Purpose: makes granted but uncommitted mappings durable, when a FLUSH waits for it and now and
//! then on its own.
//! Design: a mapping is committed only after the devices were flushed, by the engine before it asks
//! ([`Owner::commit_wanted`]) or by jobs of its internal lane ([`Owner::sync_all`]). Sequences are
//! noted before the flush, so what is granted meanwhile waits for the next round.
//! Not here: the flush itself.

use std::rc::Rc;

use forebay_pool::PoolError;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{Job, ToEngine};
use tokio::time::sleep;

use super::Owner;
use super::commit::CommitError;
use super::session::AskError;

/// Why mappings are not durable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SyncError {
    /// A device could not be flushed.
    #[error("flushing the devices: {0}")]
    Flush(AskError),
    /// A device could not be flushed.
    #[error("flushing the devices: {0}")]
    Device(std::io::Error),
    /// The pool refused.
    #[error("{0}")]
    Pool(#[from] PoolError),
    /// The catalog failed.
    #[error("{0}")]
    Commit(#[from] CommitError),
}

impl Owner {
    /// A FLUSH or FUA waits; the engine has flushed the devices.
    pub(super) async fn commit_wanted(self: Rc<Self>, volume: VolumeId, sequence: u64) {
        self.wait_open().await;
        let answer = match self.commit_up_to(volume, sequence).await {
            Ok(()) => ToEngine::Committed { volume, sequence },
            Err(error) => {
                tracing::error!(%volume, sequence, %error, "a flush fails");
                ToEngine::CommitFailed { volume, sequence }
            }
        };
        self.say(&answer);
    }

    async fn commit_up_to(&self, volume: VolumeId, sequence: u64) -> Result<(), SyncError> {
        if self.adoption.is_uncommitted() {
            // Adopted mappings may carry later sequences than the engine knows them by: all of them.
            self.sync_all().await?;
        }
        {
            let mut core = self.core.borrow_mut();
            if core.pool.durable_seq(volume) >= sequence {
                return Ok(());
            }
            core.pool.commit_mappings(volume, sequence)?;
        }
        Ok(self.commit().await?)
    }

    /// What is uncommitted: each volume with its highest sequence.
    fn uncommitted(&self) -> Vec<(VolumeId, u64)> {
        let core = self.core.borrow();
        let volumes = core.pool.volumes();
        volumes
            .into_iter()
            .filter_map(|volume| Some((volume.id, core.pool.uncommitted(volume.id)?)))
            .collect()
    }

    /// Has the engine flush the devices, and commits every mapping that was granted before.
    pub(crate) async fn sync_all(&self) -> Result<(), SyncError> {
        let _one_at_a_time = self.syncing.lock().await;
        let wanted = self.uncommitted();
        if !wanted.is_empty() {
            self.flush_devices().await.map_err(SyncError::Flush)?;
        }
        self.commit_flushed(&wanted).await
    }

    /// The same when there is no engine (any more): the daemon's own descriptors reach the same
    /// files and devices.
    pub(crate) async fn sync_all_without_engine(&self) -> Result<(), SyncError> {
        let _one_at_a_time = self.syncing.lock().await;
        let wanted = self.uncommitted();
        if !wanted.is_empty() {
            for device in &self.devices {
                let store = device.store.clone();
                tokio::task::spawn_blocking(move || store.0.sync())
                    .await
                    .map_err(std::io::Error::other)
                    .and_then(|result| result)
                    .map_err(SyncError::Device)?;
            }
        }
        self.commit_flushed(&wanted).await
    }

    async fn commit_flushed(&self, wanted: &[(VolumeId, u64)]) -> Result<(), SyncError> {
        {
            let mut core = self.core.borrow_mut();
            for (volume, sequence) in wanted {
                match core.pool.commit_mappings(*volume, *sequence) {
                    Ok(_) => {}
                    // Deleted meanwhile.
                    Err(error) if error.kind == forebay_pool::ErrorKind::NotFound => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        self.commit().await?;
        self.adoption.set_committed();
        for &(volume, sequence) in wanted {
            self.say(&ToEngine::Committed { volume, sequence });
        }
        Ok(())
    }

    /// Has the engine flush every device; waits for it.
    pub(super) async fn flush_devices(&self) -> Result<(), AskError> {
        let devices = self.device_indexes();
        let session = self.session().ok_or(AskError::Gone)?;
        tokio::time::timeout(self.limits.job, session.devices_ready(&devices))
            .await
            .unwrap_or(Err(AskError::TimedOut(
                self.limits.job,
                "the devices' fence",
            )))?;
        let jobs: Vec<_> = devices
            .iter()
            .map(|&device| session.job(Job::Flush { device }))
            .collect();
        for mut job in jobs {
            job.within(self.limits.job).await?;
        }
        Ok(())
    }

    /// Commits in the background, so that little is ever uncommitted.
    pub(super) async fn run_syncer(self: Rc<Self>) {
        self.wait_open().await;
        loop {
            sleep(self.limits.sync_every).await;
            if self.session().is_none() || self.uncommitted().is_empty() {
                continue;
            }
            match self.sync_all().await {
                Ok(()) | Err(SyncError::Flush(AskError::Gone)) => {}
                Err(error) => tracing::warn!(%error, "committing mappings in the background"),
            }
        }
    }
}
