//! Ceph clusters: the daemon's requests about images. The engine has clients of its own for I/O.
//!
//! Each cluster has a helper thread with one client, from the first request until a pause. Requests
//! wait in a bounded queue, and callers for a limited time. Keys are known by file name only.

mod images;
mod worker;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::TrySendError;
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_rbd::{RadosClient, RbdError};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::config::ClusterConfig;
use crate::model::error::ApiError;
use worker::{Session, Work, Worker};

/// A caller's wait for most requests, within the API's limit.
const LIMIT: Duration = Duration::from_secs(50);
/// The wait for a request that takes longer the larger an image is.
const LONG_LIMIT: Duration = Duration::from_secs(3600);
/// The wait for the last requests when the daemon ends.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(crate) struct Clusters {
    libraries: Option<PathBuf>,
    configured: RefCell<BTreeMap<String, ClusterConfig>>,
    workers: RefCell<BTreeMap<String, Worker>>,
    /// Threads that may still have a client.
    threads: RefCell<Vec<JoinHandle<()>>>,
}

impl Clusters {
    /// `libraries`: the folder of librados and librbd, if the system does not find them.
    pub(crate) fn new(libraries: Option<PathBuf>) -> Self {
        Self {
            libraries,
            ..Self::default()
        }
    }

    /// Replaces the configuration. Requests that wait are still made with the old one.
    pub(crate) fn configure(&self, clusters: BTreeMap<String, ClusterConfig>) {
        let old = self.configured.replace(clusters);
        let configured = self.configured.borrow();
        let is_same = |name: &String| old.get(name) == configured.get(name);
        self.workers.borrow_mut().retain(|name, _| is_same(name));
    }

    pub(crate) fn config(&self, cluster: &str) -> Result<ClusterConfig, ApiError> {
        let configured = self.configured.borrow();
        configured.get(cluster).cloned().ok_or_else(|| {
            let known: Vec<&str> = configured.keys().map(String::as_str).collect();
            let known = match known.is_empty() {
                true => "none is".to_owned(),
                false => known.join(", "),
            };
            ApiError::not_found(format!("no Ceph cluster `{cluster}` is configured")).hint(format!(
                "add a table [ceph.{cluster}] to forebay.toml and send the daemon SIGHUP; configured now: {known}"
            ))
        })
    }

    /// Ends all clients: Ceph aborts a process that exits with one.
    pub(crate) async fn close(&self) {
        self.workers.borrow_mut().clear();
        let threads = self.threads.take();
        let ended = async {
            while !threads.iter().all(JoinHandle::is_finished) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        if timeout(CLOSE_LIMIT, ended).await.is_err() {
            tracing::warn!("a Ceph cluster does not answer; the daemon ends without it");
        }
    }

    /// Has the cluster's thread do `work`. A caller that gives up before it begins cancels it.
    async fn ask<T: Send + 'static>(
        &self,
        cluster: &str,
        limit: Duration,
        work: impl FnOnce(&Arc<RadosClient>) -> Result<T, RbdError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(|session| {
            if !reply.is_closed() {
                let _ = reply.send(session.run(work));
            }
        });
        self.send(cluster, work)?;
        match timeout(limit, answer).await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) => Err(ApiError::internal(format!(
                "the thread for Ceph cluster {cluster} failed; see the daemon's log"
            ))),
            Err(_) => Err(ApiError::unavailable(format!(
                "Ceph cluster {cluster} has not answered within {} s",
                limit.as_secs()
            ))
            .hint(
                "what was begun may still happen: check `ceph health` and the image, and try again",
            )),
        }
    }

    fn send(&self, cluster: &str, work: Work) -> Result<(), ApiError> {
        let config = self.config(cluster)?;
        let mut workers = self.workers.borrow_mut();
        let sent = match workers.get(cluster) {
            Some(worker) => worker.send(work),
            None => Err(TrySendError::Disconnected(work)),
        };
        match sent {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => Err(ApiError::unavailable(format!(
                "too many requests wait for Ceph cluster {cluster}"
            ))
            .hint("try again; `ceph health` shows whether the cluster answers")),
            // None yet, or it has ended after a pause.
            Err(TrySendError::Disconnected(work)) => {
                let session = Session::new(cluster, config, self.libraries.clone());
                let (worker, thread) = Worker::start(session, work).map_err(|error| {
                    ApiError::unavailable(format!("can't start a thread for {cluster}: {error}"))
                })?;
                let mut threads = self.threads.borrow_mut();
                threads.retain(|thread| !thread.is_finished());
                threads.push(thread);
                workers.insert(cluster.to_owned(), worker);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ClientFor;
    use crate::model::error::ErrorKind;
    use crate::model::rbd::ImagePath;

    fn config() -> ClusterConfig {
        ClusterConfig {
            config: "/nowhere/ceph.conf".into(),
            user: "forebay".to_owned(),
            keyring: None,
            cluster: "ceph".to_owned(),
            client: ClientFor::Tenant,
            capacity: None,
        }
    }

    fn clusters(libraries: &std::path::Path) -> Clusters {
        let clusters = Clusters::new(Some(libraries.to_owned()));
        clusters.configure(BTreeMap::from([("east".to_owned(), config())]));
        clusters
    }

    #[tokio::test]
    async fn an_unknown_cluster_is_named_with_those_known() {
        let folder = tempfile::tempdir().unwrap();
        let clusters = clusters(folder.path());
        let image: ImagePath = "west/rbd/db".parse().unwrap();
        let error = clusters.inspect(&image).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound);
        assert!(error.message.contains("`west`"), "{error}");
        let hint = error.hint.unwrap();
        assert!(
            hint.contains("[ceph.west]") && hint.ends_with("east"),
            "{hint}"
        );
    }

    #[tokio::test]
    async fn without_the_library_an_error_says_how_to_install_it() {
        let folder = tempfile::tempdir().unwrap();
        let clusters = clusters(folder.path());
        let image: ImagePath = "east/rbd/db".parse().unwrap();
        for _ in 0..2 {
            let error = clusters.inspect(&image).await.unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unavailable);
            assert!(error.message.contains("apt install librbd1"), "{error}");
            assert!(error.message.contains("cluster east"), "{error}");
        }
        clusters.close().await;
        assert!(clusters.threads.borrow().is_empty());
    }

    #[tokio::test]
    async fn a_changed_configuration_ends_the_old_client() {
        let folder = tempfile::tempdir().unwrap();
        let clusters = clusters(folder.path());
        let image: ImagePath = "east/rbd/db".parse().unwrap();
        let _ = clusters.inspect(&image).await;
        let same = clusters.configured.borrow().clone();
        clusters.configure(same);
        assert_eq!(clusters.workers.borrow().len(), 1);
        let other = ClusterConfig {
            user: "other".to_owned(),
            ..config()
        };
        clusters.configure(BTreeMap::from([("east".to_owned(), other)]));
        assert!(clusters.workers.borrow().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_and_the_wait_have_limits() {
        let folder = tempfile::tempdir().unwrap();
        let clusters = clusters(folder.path());
        let (release, held) = std::sync::mpsc::channel::<()>();
        clusters
            .send("east", Box::new(move |_| _ = held.recv()))
            .unwrap();
        let image: ImagePath = "east/rbd/db".parse().unwrap();
        let late = clusters.inspect(&image).await.unwrap_err();
        assert!(late.message.contains("within 50 s"), "{late}");
        let full = (0..1000).find_map(|_| clusters.send("east", Box::new(|_| {})).err());
        assert!(full.unwrap().message.contains("too many requests"));
        drop(release);
        clusters.close().await;
    }
}
