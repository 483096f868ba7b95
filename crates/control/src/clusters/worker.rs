//! A cluster's helper thread.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_rbd::{ClientConfig, Library, RadosClient, RbdError};
use rustix::io::Errno;

use crate::config::ClusterConfig;
use crate::model::error::{ApiError, ErrorKind};

/// Requests that wait for a thread.
const QUEUE: usize = 32;
/// A client without requests ends after this.
const PAUSE: Duration = Duration::from_secs(60);
/// Below the API's limit, with time for the request itself.
const MONITOR_LIMIT: Duration = Duration::from_secs(15);
const OSD_LIMIT: Duration = Duration::from_secs(30);

pub(super) type Work = Box<dyn FnOnce(&mut Session) + Send>;

/// Ends its thread when dropped, after the requests that wait.
#[derive(Debug)]
pub(super) struct Worker(SyncSender<Work>);

impl Worker {
    pub(super) fn start(session: Session, first: Work) -> io::Result<(Self, JoinHandle<()>)> {
        let (sender, queue) = sync_channel(QUEUE);
        // The queue is empty.
        let _ = sender.try_send(first);
        let name = format!("ceph {}", session.name);
        let thread = thread::Builder::new().name(name);
        let thread = thread.spawn(move || work(session, &queue))?;
        Ok((Self(sender), thread))
    }

    pub(super) fn send(&self, work: Work) -> Result<(), TrySendError<Work>> {
        self.0.try_send(work)
    }
}

fn work(mut session: Session, queue: &Receiver<Work>) {
    while let Ok(work) = queue.recv_timeout(PAUSE) {
        work(&mut session);
    }
}

/// A client that connects at its first use.
pub(super) struct Session {
    /// In the daemon's configuration.
    name: String,
    config: ClusterConfig,
    libraries: Option<PathBuf>,
    client: Option<Arc<RadosClient>>,
}

impl Session {
    pub(super) fn new(name: &str, config: ClusterConfig, libraries: Option<PathBuf>) -> Self {
        Self {
            name: name.to_owned(),
            config,
            libraries,
            client: None,
        }
    }

    pub(super) fn run<T>(
        &mut self,
        work: impl FnOnce(&Arc<RadosClient>) -> Result<T, RbdError>,
    ) -> Result<T, ApiError> {
        let client = self.client()?;
        work(&client).map_err(|error| {
            if error.errno == Errno::SHUTDOWN {
                self.client = None;
            }
            self.error(&error)
        })
    }

    fn client(&mut self) -> Result<Arc<RadosClient>, ApiError> {
        if let Some(client) = &self.client {
            return Ok(client.clone());
        }
        let library = Library::load(self.libraries.as_deref()).map_err(|error| {
            ApiError::unavailable(format!("Ceph cluster {}: {error}", self.name))
        })?;
        let config = ClientConfig {
            cluster: self.config.cluster.clone(),
            file: Some(self.config.config.clone()),
            keyring: self.config.keyring.clone(),
            monitor_limit: MONITOR_LIMIT,
            osd_limit: OSD_LIMIT,
            ..ClientConfig::new(&self.config.user)
        };
        let client = RadosClient::connect(&library, &config).map_err(|error| ApiError {
            // A missing keyring is not a missing image.
            kind: ErrorKind::Unavailable,
            ..self.error(&error)
        })?;
        self.client = Some(client.clone());
        Ok(client)
    }

    fn error(&self, error: &RbdError) -> ApiError {
        let kind = match error.errno {
            Errno::NOENT => ErrorKind::NotFound,
            Errno::EXIST => ErrorKind::Exists,
            Errno::BUSY | Errno::NOTEMPTY | Errno::ROFS => ErrorKind::InUse,
            Errno::INVAL | Errno::DOM | Errno::RANGE => ErrorKind::Invalid,
            Errno::NOSPC | Errno::DQUOT => ErrorKind::NoSpace,
            _ => ErrorKind::Unavailable,
        };
        // The error has Ceph's name of the cluster, which is `ceph` nearly everywhere.
        ApiError::new(kind, format!("Ceph cluster {}: {error}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ClientFor;

    #[test]
    fn errors_name_the_configured_cluster_and_have_a_kind() {
        let config = ClusterConfig {
            config: PathBuf::new(),
            user: "admin".to_owned(),
            keyring: None,
            cluster: "ceph".to_owned(),
            client: ClientFor::Tenant,
            capacity: None,
        };
        let session = Session::new("east", config, None);
        for (errno, kind, part) in [
            (Errno::NOENT, ErrorKind::NotFound, "check the names"),
            (Errno::PERM, ErrorKind::Unavailable, "capability"),
            (Errno::TIMEDOUT, ErrorKind::Unavailable, "`ceph health`"),
            (Errno::BUSY, ErrorKind::InUse, "another client"),
            (Errno::NOTEMPTY, ErrorKind::InUse, "ceph/rbd/db"),
            (Errno::DQUOT, ErrorKind::NoSpace, "quota"),
        ] {
            let error = session.error(&RbdError {
                doing: "open",
                what: "image ceph/rbd/db".to_owned(),
                errno,
            });
            assert_eq!(error.kind, kind, "{error}");
            assert!(
                error
                    .message
                    .starts_with("Ceph cluster east: cannot open image ceph/rbd/db")
            );
            assert!(error.message.contains(part), "{error}");
        }
    }
}
