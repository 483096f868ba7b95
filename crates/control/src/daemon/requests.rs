//! Brings the API's requests, as closures, to the daemon's thread, and returns the answers.
//!
//! The channel is bounded: if the daemon falls behind, callers wait up to their time limit. Reads
//! are answered at once, or after a count of unwritten preallocated extents. Changes become tasks,
//! which end with the pool. If a caller gives up, the operation still happens.

use std::future::Future;
use std::rc::Rc;

use tokio::sync::{mpsc, oneshot};

use super::Daemon;
use crate::model::error::ApiError;
use crate::owner::Owner;

const QUEUE_DEPTH: usize = 64;

type Reply<T> = oneshot::Sender<Result<T, ApiError>>;

/// Runs on the daemon's thread, without an await.
type Call = Box<dyn FnOnce(&Rc<Daemon>) + Send>;

pub(crate) enum DaemonRequest {
    Call(Call),
    /// Ends the daemon; the answer comes first.
    Shutdown(Reply<()>),
}

#[derive(Clone)]
pub(crate) struct Handle {
    requests: mpsc::Sender<DaemonRequest>,
}

pub(crate) fn channel() -> (Handle, mpsc::Receiver<DaemonRequest>) {
    let (requests, receiver) = mpsc::channel(QUEUE_DEPTH);
    (Handle { requests }, receiver)
}

impl Handle {
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Daemon) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        self.call(|daemon, reply| _ = reply.send(Ok(ask(daemon))))
            .await
    }

    /// Until the caller gives up.
    pub(crate) async fn wait<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        wait: impl FnOnce(Rc<Daemon>) -> F + Send + 'static,
    ) -> Result<T, ApiError> {
        self.call(|daemon, mut reply| {
            let daemon = daemon.clone();
            tokio::task::spawn_local(async move {
                tokio::select! {
                    answer = wait(daemon) => { let _ = reply.send(Ok(answer)); }
                    () = reply.closed() => {}
                }
            });
        })
        .await
    }

    pub(crate) async fn run<
        T: Send + 'static,
        F: Future<Output = Result<T, ApiError>> + 'static,
    >(
        &self,
        act: impl FnOnce(Rc<Daemon>) -> F + Send + 'static,
    ) -> Result<T, ApiError> {
        self.call(|daemon, reply| {
            let daemon = daemon.clone();
            tokio::task::spawn_local(async move {
                let _ = reply.send(act(daemon).await);
            });
        })
        .await
    }

    pub(crate) async fn read<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Owner) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.call(|daemon, reply| daemon.read(reply, ask)).await
    }

    pub(crate) async fn change<
        T: Send + 'static,
        F: Future<Output = Result<T, ApiError>> + 'static,
    >(
        &self,
        act: impl FnOnce(Rc<Owner>) -> F + Send + 'static,
    ) -> Result<T, ApiError> {
        self.change_with(|_, owner| act(owner)).await
    }

    /// With access to the daemon.
    pub(crate) async fn change_with<
        T: Send + 'static,
        F: Future<Output = Result<T, ApiError>> + 'static,
    >(
        &self,
        act: impl FnOnce(Rc<Daemon>, Rc<Owner>) -> F + Send + 'static,
    ) -> Result<T, ApiError> {
        self.call(|daemon, reply| daemon.change(reply, act)).await
    }

    pub(crate) async fn shutdown(&self) -> Result<(), ApiError> {
        self.send(DaemonRequest::Shutdown).await
    }

    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Rc<Daemon>, Reply<T>) + Send + 'static,
    ) -> Result<T, ApiError> {
        self.send(|reply| DaemonRequest::Call(Box::new(|daemon| call(daemon, reply))))
            .await
    }

    async fn send<T>(
        &self,
        request: impl FnOnce(Reply<T>) -> DaemonRequest,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.requests.send(request(reply)).await;
        sent.map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())?
    }
}

fn stopping() -> ApiError {
    ApiError::unavailable("the daemon is stopping")
        .hint("start it again with `forebay serve` and repeat the command")
}

impl Daemon {
    fn absent(&self) -> ApiError {
        // While the daemon retries on its own, the pool stays absent.
        let is_searched_for = self.polls_again.get() && self.trouble.borrow().is_some();
        match (
            self.now_opening(),
            self.changing_pool.get() && !is_searched_for,
        ) {
            (Some(opening), _) => ApiError::unavailable(opening.to_string())
                .hint("try again in a moment; `forebay status` says what it waits for"),
            (None, true) => changing(),
            (None, false) => self.no_pool(),
        }
    }

    fn read<T: 'static>(
        &self,
        reply: Reply<T>,
        ask: impl FnOnce(&Owner) -> Result<T, ApiError> + 'static,
    ) {
        let Some(serving) = self.serving() else {
            let _ = reply.send(Err(self.absent()));
            return;
        };
        if !serving.owner.base.has_preallocated() {
            let _ = reply.send(ask(&serving.owner));
            return;
        }
        // The used space must include extents written just now.
        let owner = serving.owner.clone();
        serving.owner.base.spawn(async move {
            owner.mapping.count_preallocated_soon().await;
            let _ = reply.send(ask(&owner));
        });
    }

    fn change<T: 'static, F: Future<Output = Result<T, ApiError>> + 'static>(
        self: &Rc<Self>,
        reply: Reply<T>,
        act: impl FnOnce(Rc<Self>, Rc<Owner>) -> F + 'static,
    ) {
        let Some(serving) = self.serving() else {
            let _ = reply.send(Err(self.absent()));
            return;
        };
        if self.changing_pool.get() {
            let _ = reply.send(Err(changing()));
            return;
        }
        let (daemon, owner) = (self.clone(), serving.owner.clone());
        serving.owner.base.spawn(async move {
            let _ = reply.send(act(daemon, owner).await);
        });
    }
}

pub(super) fn changing() -> ApiError {
    ApiError::unavailable("the pool is being created, opened or destroyed")
        .hint("try again in a moment")
}
