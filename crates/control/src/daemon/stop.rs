//! Ends the daemon, with its engine or without it, as for an update.
//!
//! A stop commits everything and ends the engine. A daemon that leaves its engine commits first,
//! and leaves the rest like a killed one. Its mark in the engine's record says that it did not die.
//! It does not leave during a take-over, whose connections only it has.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::reopen::PLACES_LIMIT;
use super::{Daemon, DaemonError, Serving};
use crate::files;
use crate::model::EngineState;
use crate::supervisor::process;

/// How long leaving waits for a serving engine.
const SERVES_LIMIT: Duration = Duration::from_secs(10);
/// How long a stop waits for a sync while the engine lives.
const SYNC_LIMIT: Duration = Duration::from_secs(10);
pub(super) const STOP_LIMIT: Duration = Duration::from_secs(15);

const CHANGE_LIMIT: Duration = Duration::from_secs(30);

impl Serving {
    async fn serves(&self) {
        while self.supervisor.view().state != EngineState::Running {
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Daemon {
    /// During a change of the pool there may be no engine to end or leave. False if it takes too
    /// long.
    pub(crate) async fn is_settled(&self) -> bool {
        let changed = async {
            while self.changing_pool.get() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(CHANGE_LIMIT, changed).await.is_ok()
    }

    pub(crate) async fn stop(&self) -> Result<(), DaemonError> {
        let Some(serving) = self.serving.borrow_mut().take() else {
            // The pool is not open, but an earlier engine may serve.
            if let Some(engine) = self.living_engine()? {
                engine.kill();
                if timeout(STOP_LIMIT, engine.ended()).await.is_err() {
                    let reported = format!("the engine (pid {}) does not end", engine.pid);
                    return Err(DaemonError::new(reported).with_hint("it waits for a device"));
                }
            }
            return Ok(());
        };
        let owner = &serving.owner;
        owner.mapping.give_up_preallocated(PLACES_LIMIT).await;
        // While the engine lives, so that little is left; failures are retried below.
        match timeout(SYNC_LIMIT, owner.mapping.sync_all()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "can't commit before the engine ends"),
            Err(_) => tracing::warn!("the commit before the engine's end takes too long"),
        }
        serving.supervisor.stop(owner, STOP_LIMIT).await;
        owner.statistics.save_statistics(true).await;
        let committed = timeout(SYNC_LIMIT, owner.mapping.sync_all_without_engine()).await;
        if matches!(committed, Ok(Ok(())))
            && timeout(SYNC_LIMIT, owner.labels.end_stamp()).await.is_err()
        {
            tracing::warn!("recording the pool's stop in its labels takes too long");
        }
        owner.close();
        let failed = match committed {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("it took too long".to_owned()),
        };
        files::remove(&process::record_path(&self.config.run_dir))?;
        if let Some(error) = failed {
            // The grant table stays: the next daemon of this boot commits its mappings, and its
            // engine's FLUSH covers the devices.
            return Err(DaemonError::new(format!(
                "the last changes could not be flushed and committed to the pool: {error}"
            ))
            .with_hint(
                "nothing is lost as long as this machine is not restarted: start the daemon again",
            ));
        }
        if owner.mapping.lists_missing() {
            tracing::info!(
                "the grant table is kept: writes to a missing device may not be durable there"
            );
        } else {
            files::remove(&self.grants_path())?;
        }
        tracing::info!("stopped in good order");
        Ok(())
    }

    pub(crate) async fn leave_engine(&self) -> Result<(), DaemonError> {
        let Some(serving) = self.serving() else {
            return Ok(());
        };
        if timeout(SERVES_LIMIT, serving.serves()).await.is_err() {
            tracing::warn!("the daemon ends while no engine serves");
        }
        self.leave(Rc::clone(&serving)).await;
        if self.left_engine.take().is_some() {
            process::set_daemon(&self.config.run_dir, 0);
        }
        tracing::info!("the daemon has ended; its engine continues");
        Ok(())
    }
}
