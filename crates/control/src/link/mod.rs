//! The session with the engine, one at a time.
//!
//! A caller without a session waits for the next one, or does nothing, because a new engine is told
//! everything. Messages are handled in order.

pub(crate) mod session;
pub(crate) mod wire;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::boundary::region::Region;
use forebay_xlate::{DeviceIndex, kill_point};

use crate::base::Base;
use crate::changed::Signal;
use crate::link::session::{AskError, Conversion, Estate, PendingAnswer, Session};
use crate::model::error::ApiError;

/// How a new engine's session proceeds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EngineProgress {
    /// It has converted a dead engine's estate, and was told to act.
    Converted(Conversion),
    /// It acts.
    Resumed,
    /// It can't read the dead engine's estate, which is dropped; hosts connect again.
    Refused(String),
    /// It does not answer and is useless.
    Failed(String),
    /// It has everything that it needs to serve.
    Running,
}

pub(crate) fn engine_error(error: &AskError) -> ApiError {
    match error {
        AskError::Refused(_) => ApiError::internal(error.to_string()),
        _ => ApiError::unavailable(error.to_string())
            .hint("see `forebay status`; the request is recorded, and the daemon sends it again when the engine \
            restarts"),
    }
}

#[derive(Debug)]
pub(crate) struct Link {
    base: Rc<Base>,
    /// Set once the engine was told everything, until the session ends.
    session: RefCell<Option<Rc<Session>>>,
    pub(crate) session_changed: Signal,
    /// The session that is told everything; it may not have begun.
    pub(crate) greeted: RefCell<Weak<Session>>,
    /// The newest engine that has finished a take-over, or had none to do.
    pub(crate) acting: Cell<u64>,
    /// Its region. After its death it still has the hosts and VMs that were connected.
    acted: RefCell<Option<Rc<Region>>>,
}

impl Link {
    pub(crate) fn new(base: &Rc<Base>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            session: RefCell::new(None),
            session_changed: Signal::new(),
            greeted: RefCell::default(),
            acting: Cell::new(0),
            acted: RefCell::default(),
        })
    }

    /// The session's engine has finished a take-over, or had none to do.
    pub(crate) fn acts(&self, session: &Session) {
        self.acting.set(session.generation);
        self.acted.replace(Some(session.region.clone()));
    }

    /// The regions that may list connected hosts and VMs: that of the present engine, and until it
    /// acts, that of the one before.
    pub(crate) fn regions_in_use(&self) -> Vec<Rc<Region>> {
        let session = self.session();
        let acts = session
            .as_ref()
            .is_some_and(|s| self.acting.get() == s.generation);
        let before = self.acted.borrow().clone().filter(|_| !acts);
        let now = session.map(|session| session.region.clone());
        now.into_iter().chain(before).collect()
    }

    pub(crate) fn close(&self) {
        if let Some(session) = self.session.take() {
            session.end();
        }
    }

    pub(crate) fn begin(&self, session: &Rc<Session>) {
        *self.session.borrow_mut() = Some(session.clone());
        self.base.newest_generation.set(session.generation);
        self.session_changed.raise();
    }

    pub(crate) fn session(&self) -> Option<Rc<Session>> {
        self.session.borrow().clone()
    }

    pub(crate) async fn wait_session(&self) -> Rc<Session> {
        self.session_changed.until(|| self.session()).await
    }

    pub(crate) fn say(&self, message: &ToEngine) {
        if let Some(session) = self.session() {
            session.say(message);
        }
    }

    /// Hands over a dead engine's estate, if any. False if the engine is useless.
    pub(crate) async fn hand_over(
        &self,
        session: &Rc<Session>,
        estate: &RefCell<Option<Estate>>,
        progress: &impl Fn(EngineProgress),
    ) -> bool {
        if estate.borrow().is_none() {
            return true;
        }
        let limit = self.base.limits.convert;
        let failed = match session.convert(estate, limit).await {
            Ok(conversion) => {
                kill_point!("daemon.converted");
                let mut resumed = session.resume(estate);
                kill_point!("daemon.flip");
                progress(EngineProgress::Converted(conversion));
                match resumed.within(limit).await {
                    Ok(()) => {
                        progress(EngineProgress::Resumed);
                        return true;
                    }
                    Err(error) => error,
                }
            }
            Err(AskError::Refused(error)) => {
                estate.take();
                progress(EngineProgress::Refused(error));
                return true;
            }
            Err(error) => error,
        };
        if failed != AskError::Gone {
            progress(EngineProgress::Failed(failed.to_string()));
        }
        false
    }

    /// Ends a session. If `Owner::serve` is dropped, the caller must do this.
    pub(crate) fn hang_up(&self, session: &Rc<Session>) {
        session.end();
        let mut current = self.session.borrow_mut();
        if current.as_ref().is_some_and(|now| Rc::ptr_eq(now, session)) {
            *current = None;
        }
        drop(current);
        self.session_changed.raise();
    }

    /// Tells the engine, if any, of a change of an export, and waits until removed hosts are
    /// disconnected. Returns how many of their commands are still at devices.
    pub(crate) async fn push_settled(
        &self,
        what: &'static str,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> Result<u32, AskError> {
        let Some(session) = self.session() else {
            return Ok(0);
        };
        let asked = session.request_settled(what, self.base.limits.request, message);
        match asked.await {
            Err(AskError::Gone) => Ok(0),
            answer => answer,
        }
    }

    /// Sends one request to the engine and waits for the answer. Without an engine this succeeds:
    /// the next one is told everything.
    pub(crate) async fn push(
        &self,
        what: &'static str,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> Result<(), AskError> {
        let Some(session) = self.session() else {
            return Ok(());
        };
        match session
            .request(what, message)
            .within(self.base.limits.request)
            .await
        {
            Err(AskError::Gone) => Ok(()),
            answer => answer,
        }
    }

    pub(crate) fn greeted_session(&self) -> Option<Rc<Session>> {
        self.greeted.borrow().upgrade()
    }
}

/// The connected hosts by export. The engine writes the region, so every value is bounded before
/// use.
pub(crate) fn connected_hosts(region: &Region) -> BTreeMap<u64, BTreeSet<String>> {
    let lanes = region.lanes();
    let key = region.header().key.load(Relaxed);
    let mut hosts: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
    for (controller, index) in region.controllers().iter().zip(0u32..) {
        if controller.used.load(Acquire) != 1 {
            continue;
        }
        let lane = lanes.get(controller.lane.load(Relaxed) as usize);
        let export = lane.and_then(|lane| lane.export.load(Relaxed).checked_sub(1));
        let state = controller.state(key, index, u64::MAX);
        if let (Some(export), Some(state)) = (export, state) {
            // The host's name comes first.
            let bytes: Vec<u8> = state.state[..32]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .take_while(|byte| *byte != 0)
                .collect();
            let name = String::from_utf8_lossy(&bytes).into_owned();
            hosts.entry(export).or_default().insert(name);
        }
    }
    hosts
}

/// A request sent at the start of a session.
pub(crate) struct WelcomeItem {
    pub(crate) what: String,
    /// Set if it concerns a device.
    pub(crate) device: Option<DeviceIndex>,
    pub(crate) pending: PendingAnswer,
}
