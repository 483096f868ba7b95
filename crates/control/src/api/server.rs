//! The API's Unix socket.
//!
//! The holder of a lock file beside it may remove a dead daemon's socket. The kernel tells the
//! caller's uid (SO_PEERCRED): only root and the daemon's user may call; others get a 403.
//! Connections are limited in number and time. An optional TCP listener serves metrics to everyone.

use std::fs::File;
use std::future::Future;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::{Router, middleware};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};

use super::audit::{self, Caller};
use super::router::{self, TIME_LIMIT};
use super::whole_body;
use crate::daemon::Handle;
use crate::files::lock_file;
use crate::model::error::ApiError;

/// Connections served at a time; others wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 64;
const METRICS_CONNECTIONS_MAX: usize = 8;
/// The limit of a metrics connection's whole duration.
const METRICS_TIME_LIMIT: Duration = Duration::from_secs(30);
/// The time limit for a request's head, and of an idle connection.
const HEAD_TIME_LIMIT: Duration = Duration::from_secs(10);
const STOP_TIME_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct ApiListener {
    listener: UnixListener,
    path: PathBuf,
    // Closing it releases the lock. The file stays, as removing it would let two daemons lock two
    // files.
    _lock: File,
}

impl Drop for ApiListener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Binds the API's socket, unless another daemon has it.
///
/// # Errors
/// `AddrInUse` when another daemon has it (the message names its pid), otherwise the system's
/// error, with the path.
pub(crate) fn bind(path: &Path) -> io::Result<ApiListener> {
    // sockaddr_un: sun_path is 108 bytes with its NUL.
    if path.as_os_str().len() > 107 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "the API socket's path is too long (at most 107 bytes): {}",
                path.display()
            ),
        ));
    }
    let lock = lock_file(path, &format!("serves {}", path.display()))?;
    let failed = |what: &str, error: io::Error| {
        io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
    };
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed("can't remove the old API socket", error));
        }
        _ => {}
    }
    let listener =
        UnixListener::bind(path).map_err(|error| failed("can't bind the API socket", error))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(|error| failed("can't set the mode of the API socket", error))?;
    Ok(ApiListener {
        listener,
        path: path.to_owned(),
        _lock: lock,
    })
}

pub(crate) async fn serve(listener: ApiListener, daemon: Handle, stop: impl Future<Output = ()>) {
    let own_uid = rustix::process::geteuid().as_raw();
    serve_those(listener, daemon, |uid| may_call(uid, own_uid), stop).await;
}

pub(super) fn may_call(uid: u32, own_uid: u32) -> bool {
    uid == 0 || uid == own_uid
}

pub(crate) async fn serve_metrics(listener: TcpListener, daemon: Handle) {
    let router = router::metrics_router(daemon, TIME_LIMIT);
    let places = Arc::new(Semaphore::new(METRICS_CONNECTIONS_MAX));
    let (_stopping, stopped) = watch::channel(());
    loop {
        let place = places.clone().acquire_owned().await.ok();
        match listener.accept().await {
            Ok((stream, _)) => {
                let (router, stopped) = (router.clone(), stopped.clone());
                tokio::spawn(async move {
                    // A client that does not read must not occupy a slot.
                    let served = connection(stream, router, stopped);
                    let _ = tokio::time::timeout(METRICS_TIME_LIMIT, served).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "can't accept a connection for metrics");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

pub(super) async fn serve_those(
    listener: ApiListener,
    daemon: Handle,
    may_call: impl Fn(u32) -> bool,
    stop: impl Future<Output = ()>,
) {
    let router = router::router(daemon.clone(), TIME_LIMIT);
    let refusing = Router::new().fallback(refuse);
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let (stopping, stopped) = watch::channel(());
    tokio::pin!(stop);
    loop {
        let accepted = async {
            let place = places.clone().acquire_owned().await.ok();
            (place, listener.listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = &mut stop => break,
            accepted = accepted => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors or memory: wait rather than spin.
                tracing::warn!(%error, "can't accept an API connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let router = match stream.peer_cred() {
            Ok(peer) if may_call(peer.uid()) => {
                let caller = Caller {
                    uid: peer.uid(),
                    pid: peer.pid(),
                };
                audit::router(router.clone(), daemon.clone(), caller)
            }
            Ok(peer) => {
                tracing::warn!(uid = peer.uid(), pid = peer.pid(), "refused an API caller");
                refusing.clone()
            }
            Err(error) => {
                tracing::warn!(%error, "refused an API caller without credentials");
                refusing.clone()
            }
        };
        let router = router.layer(middleware::from_fn(whole_body::read));
        let stopped = stopped.clone();
        tokio::spawn(async move {
            connection(stream, router, stopped).await;
            drop(place);
        });
    }
    drop(stopped);
    let _ = stopping.send(());
    // Each connection holds a receiver; when the last is gone, all are done.
    let _ = tokio::time::timeout(STOP_TIME_LIMIT, stopping.closed()).await;
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    mut stopped: watch::Receiver<()>,
) {
    let service = TowerToHyperService::new(router);
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_LIMIT)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        result = connection.as_mut() => {
            if let Err(error) = result {
                tracing::debug!(%error, "an API connection ended early");
            }
            return;
        }
        _ = stopped.changed() => {}
    }
    connection.as_mut().graceful_shutdown();
    if let Err(error) = connection.await {
        tracing::debug!(%error, "an API connection ended early");
    }
}

async fn refuse() -> ApiError {
    ApiError::forbidden("this user may not control this daemon")
        .hint("call as root, or as the user the daemon runs as")
}
