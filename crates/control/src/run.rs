//! The daemon's process: joins API and daemon, and handles signals.
//!
//! The API's socket is claimed first, so that two daemons can't share it. Then the pool is opened,
//! while the API reports that. A kill leaves the engine running; `daemon` defines an orderly stop.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, LocalSet};
use tokio::time::timeout;

use crate::api;
use crate::config::{DaemonConfig, Program};
use crate::daemon::{Daemon, DaemonError, DaemonRequest, ServeMetrics, channel};
use crate::out_of_band;
use crate::ownership::Installation;
use crate::systemd;

/// How long the first requests wait for the pool; then the answer is that it is being opened.
const START_HOLD: Duration = Duration::from_secs(2);

/// What ended a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndedBy {
    /// SIGTERM or SIGINT.
    Signal,
    /// A request through the API.
    Request,
}

/// Runs the daemon until SIGTERM, SIGINT, or a request to stop. A signal leaves the engine running
/// if the configuration says so; a request never does. SIGHUP reloads the configuration.
///
/// # Errors
/// When it can't start, or when it could not commit everything at its end.
pub async fn run(config: DaemonConfig, program: Box<dyn Program>) -> Result<EndedBy, DaemonError> {
    LocalSet::new().run_until(run_here(config, program)).await
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }
}

async fn run_here(config: DaemonConfig, program: Box<dyn Program>) -> Result<EndedBy, DaemonError> {
    let hint = "use that daemon, or end it first (SIGTERM)";
    let listener = api::bind(&config.api_socket).map_err(|error| hint_if_in_use(error, hint))?;
    let signals = Signals::new()?;
    let hint = "give each daemon a state folder of its own (`state_dir` in its configuration)";
    let me = Installation::claim(&config.state_dir).map_err(|error| hint_if_in_use(error, hint))?;
    let (handle, mut requests) = channel();
    let metrics = handle.clone();
    let serve_metrics: ServeMetrics = Box::new(move |listener| {
        tokio::task::spawn_local(api::serve_metrics(listener, metrics.clone()))
    });
    let out_of_band = config.out_of_band.clone().map(|settings| {
        let (state_dir, version) = (config.state_dir.clone(), config.version.clone());
        let served = out_of_band::serve(settings, state_dir, version, handle.clone());
        tokio::task::spawn_local(served)
    });
    let daemon = Rc::new(Daemon::new(config, Arc::new(me), program, serve_metrics));
    let (stop_api, stopped) = oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    let server = tokio::task::spawn_local(api::serve(listener, handle, stopped));
    let (ended_by, checking) = obey(&daemon, signals, &mut requests).await?;
    tracing::info!("the daemon stops");
    if daemon.is_settled().await {
        checking.iter().for_each(JoinHandle::abort);
    }
    systemd::report("STOPPING=1");
    daemon.events.close_down();
    let _ = stop_api.send(());
    out_of_band.iter().for_each(JoinHandle::abort);
    // Later requests get no answer, which callers read as "stopping".
    drop(requests);
    let result = if ended_by == EndedBy::Signal && daemon.config.keep_engine {
        daemon.leave_engine().await
    } else {
        daemon.stop().await
    };
    // The server has its own time limit.
    let _ = server.await;
    daemon.clusters.close().await;
    result.map(|()| ended_by)
}

/// Also returns the task that takes devices back.
async fn obey(
    daemon: &Rc<Daemon>,
    mut signals: Signals,
    requests: &mut mpsc::Receiver<DaemonRequest>,
) -> Result<(EndedBy, Option<JoinHandle<()>>), DaemonError> {
    let mut starting = tokio::task::spawn_local(daemon.clone().start());
    let held = timeout(START_HOLD, &mut starting).await;
    let mut checking = match held {
        Ok(started) => Some(daemon.started(started)?),
        Err(_) => None,
    };
    let ended_by = loop {
        tokio::select! {
            started = &mut starting, if checking.is_none() => {
                checking = Some(daemon.started(started)?);
            }
            request = requests.recv() => match request {
                Some(DaemonRequest::Call(call)) => call(daemon),
                Some(DaemonRequest::Shutdown(reply)) => {
                    let _ = reply.send(Ok(()));
                    break EndedBy::Request;
                }
                None => break EndedBy::Request,
            },
            _ = signals.terminate.recv() => break EndedBy::Signal,
            _ = signals.interrupt.recv() => break EndedBy::Signal,
            _ = signals.hangup.recv() => daemon.reload(),
        }
    };
    Ok((ended_by, checking))
}

fn hint_if_in_use(error: io::Error, hint: &str) -> DaemonError {
    let is_in_use = error.kind() == io::ErrorKind::AddrInUse;
    let error = DaemonError::from(error);
    match is_in_use {
        true => error.with_hint(hint),
        false => error,
    }
}
