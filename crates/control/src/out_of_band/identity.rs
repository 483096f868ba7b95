//! The endpoint's identity, in a file of the state folder: UUID and EID survive a restart.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use uuid::Uuid;

use crate::files;

const FILE: &str = "endpoint.json";

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct IdentityRecord {
    uuid: Uuid,
    eid: u8,
}

/// UUID and EID, the same on every line.
#[derive(Debug)]
pub(super) struct EndpointIdentity {
    path: PathBuf,
    pub(super) uuid: Uuid,
    eid: Cell<u8>,
    /// Held while the file is written.
    writing: Arc<Mutex<()>>,
}

impl EndpointIdentity {
    /// Reads the identity, or makes one.
    pub(super) fn load(state_dir: &Path) -> io::Result<Self> {
        let path = state_dir.join(FILE);
        let known = files::read_json::<IdentityRecord>(&path).or_else(|error| {
            tracing::warn!(%error, "the endpoint gets a new identity; the file is kept as {FILE}.damaged");
            files::set_aside(&path).map(|()| None)
        })?;
        let record = match known {
            Some(record) => record,
            None => {
                let record = IdentityRecord {
                    uuid: Uuid::new_v4(),
                    eid: forebay_mctp::EID_NULL,
                };
                files::write_json(&path, &record, true)?;
                record
            }
        };
        Ok(Self {
            path,
            uuid: record.uuid,
            eid: Cell::new(record.eid),
            writing: Arc::default(),
        })
    }

    pub(super) fn eid(&self) -> u8 {
        self.eid.get()
    }

    /// Sets the EID, and returns when it is durable or can't be made so.
    pub(super) async fn set_eid(&self, eid: u8) {
        self.eid.set(eid);
        let (path, uuid) = (self.path.clone(), self.uuid);
        let written = async {
            let writing = self.writing.clone().lock_owned().await;
            tokio::task::spawn_blocking(move || {
                let written = files::write_json(&path, &IdentityRecord { uuid, eid }, true);
                drop(writing);
                written
            })
            .await
        };
        match tokio::time::timeout(super::FILE_LIMIT, written).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => {
                tracing::warn!(%error, "the endpoint's EID is lost at the next start");
            }
            _ => tracing::warn!(
                "the endpoint's EID may be lost at the next start: {} is not written",
                FILE
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_survives_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let first = EndpointIdentity::load(folder.path()).unwrap();
        assert_eq!(first.eid(), 0);
        runtime.block_on(first.set_eid(9));
        let second = EndpointIdentity::load(folder.path()).unwrap();
        assert_eq!((second.uuid, second.eid()), (first.uuid, 9));
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        let third = EndpointIdentity::load(folder.path()).unwrap();
        assert_ne!(third.uuid, first.uuid);
        assert!(folder.path().join("endpoint.json.damaged").exists());
    }
}
