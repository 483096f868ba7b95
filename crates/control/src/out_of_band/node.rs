//! What all lines share: the configuration, the identity, and the state of the controllers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use forebay_nvme::mi::{MiRequest, MiStatus, open};

use super::admin::Controllers;
use super::answer::CommandAnswer;
use super::health::Changes;
use super::identity::EndpointIdentity;
use crate::config::{OutOfBand, Right};
use crate::daemon::Handle;
use crate::model::error::ApiError;
use crate::model::events::Audit;

/// No user id: the wire has none.
const NOBODY: u32 = u32::MAX;
/// Commands at once. An aborted one counts until it has ended.
const COMMANDS: usize = 64;
const EID_EVENT_PAUSE: Duration = Duration::from_secs(60);
/// How long an event may take.
const AUDIT_LIMIT: Duration = Duration::from_secs(2);

/// Who sent a command.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    /// The line's name.
    pub(super) line: Rc<str>,
    pub(super) eid: u8,
    /// The line's transmission unit.
    pub(super) unit_bytes: u16,
    /// The largest that it may have.
    pub(super) max_unit_bytes: u16,
}

pub(super) struct ManagedNode {
    pub(super) config: OutOfBand,
    pub(super) identity: EndpointIdentity,
    pub(super) daemon: Handle,
    /// Frames, packets and messages that were dropped since the daemon started.
    pub(super) drops: Arc<AtomicU64>,
    pub(super) changes: RefCell<Changes>,
    pub(super) controllers: Controllers,
    /// Commands that may be carried out at once, over all lines.
    pub(super) permits: Arc<Semaphore>,
    /// The last event of a new EID.
    eid_event: Cell<Option<Instant>>,
    /// The daemon's version.
    pub(super) version: String,
}

impl ManagedNode {
    pub(super) fn new(
        config: OutOfBand,
        identity: EndpointIdentity,
        version: String,
        daemon: Handle,
        drops: Arc<AtomicU64>,
    ) -> Self {
        Self {
            config,
            identity,
            daemon,
            drops,
            changes: RefCell::default(),
            controllers: Controllers::default(),
            permits: Arc::new(Semaphore::new(COMMANDS)),
            eid_event: Cell::new(None),
            version,
        }
    }

    /// Carries out a request that a command slot has accepted.
    pub(super) async fn execute(&self, message: &[u8], caller: &Caller) -> CommandAnswer {
        let Ok((header, body)) = open(message) else {
            return CommandAnswer::status(MiStatus::INTERNAL_ERROR);
        };
        match MiRequest::decode(&header, body) {
            Ok(MiRequest::Command(command)) => self.command(command, caller).await,
            Ok(MiRequest::Admin(command)) => self.admin(&command, caller).await,
            // Command slots answer these themselves.
            Ok(MiRequest::Control(..)) => CommandAnswer::status(MiStatus::INVALID_OPCODE),
            Err(refusal) => refusal.into(),
        }
    }

    pub(super) fn may(&self, right: Right) -> bool {
        self.config.allow.contains(&right)
    }

    /// Keeps a line's EID, which later lines begin with. It needs no right, as a bus owner must be
    /// able to give EIDs.
    pub(super) async fn set_eid(&self, eid: u8, caller: &Caller) {
        if eid == self.identity.eid() {
            return;
        }
        self.identity.set_eid(eid).await;
        tracing::info!(
            line = &*caller.line,
            eid,
            "the management endpoint has a new EID"
        );
        // No flood of these may displace other events.
        let last = self.eid_event.get();
        if last.is_some_and(|last| last.elapsed() < EID_EVENT_PAUSE) {
            return;
        }
        self.eid_event.set(Some(Instant::now()));
        let request = format!("Set Endpoint ID: {eid}");
        self.audit(
            caller,
            "change the management endpoint",
            request,
            false,
            "done",
        )
        .await;
    }

    /// Records a change; `request` names the command.
    pub(super) async fn audit(
        &self,
        caller: &Caller,
        action: &str,
        request: String,
        destructive: bool,
        result: &str,
    ) {
        let audit = Audit {
            uid: NOBODY,
            user: format!("endpoint {} at {}", caller.eid, caller.line),
            login: None,
            pid: None,
            program: "nvme-mi".to_owned(),
            action: action.to_owned(),
            request,
            destructive,
            result: result.to_owned(),
            before: None,
            after: None,
        };
        let entry = audit.clone();
        let recorded = self.daemon.run(move |daemon| async move {
            let generation = daemon.condition().generation;
            daemon.events.audit(generation, entry).await;
            Ok(())
        });
        let recorded = tokio::time::timeout(AUDIT_LIMIT, recorded).await;
        if !matches!(recorded, Ok(Ok(()))) {
            tracing::warn!(?audit, "a change could not be recorded");
        }
    }

    /// Records a change unless it was refused.
    pub(super) async fn audit_result(
        &self,
        caller: &Caller,
        action: &str,
        request: String,
        destructive: bool,
        result: &Result<String, &ApiError>,
    ) {
        match result {
            Ok(result) => {
                self.audit(caller, action, request, destructive, result)
                    .await
            }
            // Something may have happened.
            Err(error) if error.kind.status().is_server_error() => {
                let result = format!("{}: {error}", error.kind.status());
                self.audit(caller, action, request, destructive, &result)
                    .await;
            }
            // A part of it may have happened.
            Err(error) if destructive => {
                let result = format!("refused: {error}");
                self.audit(caller, action, request, destructive, &result)
                    .await;
            }
            Err(_) => {}
        }
    }
}
