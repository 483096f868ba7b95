//! The endpoint for management controllers: NVMe-MI over MCTP over a serial line.
//!
//! It runs in the daemon, so it answers without an engine and without a pool. One endpoint is one
//! NVM subsystem: this node. Controller 0 manages it; configured functions are its secondary
//! controllers; volumes are its namespaces.
//!
//! A line (`line`) turns bytes into messages and keeps the command slots of its requesters. Commands
//! run beside it, on the `ManagedNode` that all lines share: those of the Management Interface (`interface`,
//! `health`, `vpd`), and Admin commands (`admin`, `environment`,
//! `namespaces`, `firmware`, `vendor`).

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep};

use crate::config::{OutOfBand, Serial};
use crate::daemon::Handle;

mod admin;
mod answer;
mod environment;
mod firmware;
mod health;
mod identity;
mod interface;
mod line;
mod namespaces;
mod node;
mod requesters;
mod vendor;
mod vpd;
mod wire;

use identity::EndpointIdentity;
use node::ManagedNode;
use wire::{SerialWire, WireListener};

/// The CNTLID of the controller that manages the subsystem.
const MANAGEMENT: u16 = 0;
/// Connections to the socket at once; more are closed.
const CONNECTIONS: usize = 32;
/// How long a command may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);
/// How long a peer may leave an answer unread.
const WRITE_LIMIT: Duration = Duration::from_secs(30);
const FILE_LIMIT: Duration = Duration::from_secs(2);
/// A connection that has sent nothing for so long makes room for another one.
const SILENT: Duration = Duration::from_secs(30);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const RETRY: Duration = Duration::from_secs(2);
const PART: &str = "the out-of-band endpoint";

/// Serves the endpoint until it is dropped. What does not work is retried, and is in the status.
pub(crate) async fn serve(
    config: OutOfBand,
    state_dir: PathBuf,
    version: String,
    daemon: Handle,
) -> Infallible {
    let identity = loop {
        match EndpointIdentity::load(&state_dir) {
            Ok(identity) => break identity,
            Err(error) => {
                note(&daemon, Err(error)).await;
                sleep(RETRY).await;
            }
        }
    };
    let serial = config.serial.clone();
    let drops = daemon.ask(|daemon| daemon.out_of_band_drops.clone()).await;
    // Fails while the daemon stops.
    let drops = drops.unwrap_or_default();
    let node = Rc::new(ManagedNode::new(config, identity, version, daemon, drops));
    loop {
        let Err(error) = match &serial {
            Serial::Socket(path) => match WireListener::bind(path).await {
                Ok(listener) => listen(listener, &node).await,
                Err(error) => Err(error),
            },
            Serial::Terminal { path, baud } => {
                one(
                    SerialWire::terminal(path, *baud),
                    path.display().to_string(),
                    &node,
                )
                .await
            }
            Serial::Pseudoterminal(path) => {
                one(
                    SerialWire::pseudoterminal(path),
                    path.display().to_string(),
                    &node,
                )
                .await
            }
        };
        note(&node.daemon, Err(error)).await;
        sleep(RETRY).await;
    }
}

async fn note(daemon: &Handle, trouble: io::Result<()>) {
    let trouble = trouble.map_err(|error| format!("{PART} does not work: {error}"));
    // Fails while the daemon stops.
    let _ = daemon
        .ask(move |daemon| daemon.note_part(PART, trouble))
        .await;
}

/// Serves a line that is not a connection.
async fn one(
    wire: io::Result<SerialWire>,
    name: String,
    node: &Rc<ManagedNode>,
) -> io::Result<Infallible> {
    let wire = wire?;
    note(&node.daemon, Ok(())).await;
    let used = Rc::new(Cell::new(Instant::now()));
    line::serve(wire, name.into(), node.clone(), used).await?;
    Err(io::ErrorKind::UnexpectedEof.into())
}

struct Connection {
    task: AbortHandle,
    /// When it last sent something.
    used: Rc<Cell<Instant>>,
}

async fn listen(listener: WireListener, node: &Rc<ManagedNode>) -> io::Result<Infallible> {
    note(&node.daemon, Ok(())).await;
    let mut lines = JoinSet::new();
    let mut connections: Vec<Connection> = Vec::new();
    let mut number = 0u64;
    loop {
        tokio::select! {
            stream = listener.accept() => {
                let stream = match stream {
                    Ok(stream) => stream,
                    Err(error) => {
                        // Out of descriptors: wait rather than spin.
                        tracing::warn!(%error, "can't accept an out-of-band connection");
                        sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                };
                if !has_room(&mut connections) {
                    tracing::debug!("closed a connection to the out-of-band endpoint: it has {CONNECTIONS} others");
                    continue;
                }
                number += 1;
                let name: Rc<str> = format!("connection {number}").into();
                let used = Rc::new(Cell::new(Instant::now()));
                let (node, noted) = (node.clone(), used.clone());
                let task = lines.spawn_local(async move {
                    let wire = SerialWire::Socket(stream);
                    if let Err(error) = line::serve(wire, name.clone(), node, noted).await {
                        tracing::info!(line = &*name, %error, "an out-of-band connection ended");
                    }
                });
                connections.push(Connection { task, used });
            }
            Some(_) = lines.join_next() => connections.retain(|one| !one.task.is_finished()),
        }
    }
}

/// If the socket has all its connections, one that has been silent makes room.
fn has_room(connections: &mut Vec<Connection>) -> bool {
    if connections.len() < CONNECTIONS {
        return true;
    }
    let all = connections.iter().enumerate();
    let silent = all.filter(|(_, one)| one.used.get().elapsed() > SILENT);
    let Some((oldest, _)) = silent.min_by_key(|(_, one)| one.used.get()) else {
        return false;
    };
    connections.swap_remove(oldest).task.abort();
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_silent_connections_make_room() {
        let connection = || Connection {
            task: tokio::spawn(std::future::pending::<()>()).abort_handle(),
            used: Rc::new(Cell::new(Instant::now())),
        };
        let mut connections = Vec::new();
        while connections.len() < CONNECTIONS {
            assert!(has_room(&mut connections));
            connections.push(connection());
        }
        assert!(!has_room(&mut connections), "all have just begun");
        sleep(SILENT * 2).await;
        for one in connections.iter().skip(1) {
            one.used.set(Instant::now());
        }
        let silent = connections[0].task.clone();
        assert!(has_room(&mut connections));
        connections.push(connection());
        tokio::task::yield_now().await;
        assert!(silent.is_finished());
        assert!(!has_room(&mut connections), "the others are in use");
    }
}
