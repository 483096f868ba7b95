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

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

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
    line::serve(wire, name.into(), node.clone()).await?;
    Err(io::ErrorKind::UnexpectedEof.into())
}

async fn listen(listener: WireListener, node: &Rc<ManagedNode>) -> io::Result<Infallible> {
    note(&node.daemon, Ok(())).await;
    let mut lines = JoinSet::new();
    let mut number = 0u64;
    loop {
        tokio::select! {
            stream = listener.accept() => {
                let stream = stream?;
                if lines.len() >= CONNECTIONS {
                    tracing::debug!("closed a connection to the out-of-band endpoint: it has {CONNECTIONS} others");
                    continue;
                }
                number += 1;
                let name: Rc<str> = format!("connection {number}").into();
                let node = node.clone();
                lines.spawn_local(async move {
                    if let Err(error) = line::serve(SerialWire::Socket(stream), name.clone(), node).await {
                        tracing::info!(line = &*name, %error, "an out-of-band connection ended");
                    }
                });
            }
            Some(_) = lines.join_next() => {}
        }
    }
}
