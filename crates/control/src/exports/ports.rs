//! Ports and their ANA states, so that an operator can drain a path before maintenance.
//!
//! A port is a listener with a fixed number. The catalog has its ANA state and change count, which
//! must never fall, or a host would take news for old. So the engine gets the old state until a
//! change is durable. A new engine learns the ports before it takes over, and gets the listeners
//! after.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use forebay_pool::BatchId;
use forebay_xlate::boundary::message::{PathState, PortConfig, ToEngine};

use crate::base::Base;
use crate::devices::api_error;
use crate::events::EventFields;
use crate::link::session::{PendingAnswer, Session};
use crate::link::{Link, WelcomeItem, engine_error};
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::model::{AnaState as ShownState, Port, PortUpdate};
use crate::states::DeviceStates;

fn show(port: &PortConfig) -> Port {
    Port {
        address: port.address.clone(),
        id: port.port_id,
        ana: match port.ana {
            PathState::Optimized => ShownState::Optimized,
            PathState::NonOptimized => ShownState::NonOptimized,
            PathState::Inaccessible => ShownState::Inaccessible,
        },
        changes: port.changes,
    }
}

pub(crate) fn unserved_ports<'a>(addresses: impl Iterator<Item = &'a String>) -> Vec<Port> {
    let numbered = addresses.zip(1u16..);
    let port = |(address, id): (&String, u16)| Port {
        address: address.clone(),
        id,
        ana: ShownState::Optimized,
        changes: 0,
    };
    numbered.map(port).collect()
}

#[derive(Debug)]
pub(crate) struct Ports {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) states: Rc<DeviceStates>,
    /// The daemon's own descriptors, by address.
    pub(crate) listeners: RefCell<BTreeMap<String, OwnedFd>>,
    /// The durable state of ports with a change that is not yet durable, and the change's batch.
    pub(super) changing_ports: RefCell<BTreeMap<String, (PortConfig, BatchId)>>,
}

impl Ports {
    pub(crate) fn new(base: &Rc<Base>, link: &Rc<Link>, states: &Rc<DeviceStates>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            states: states.clone(),
            listeners: Default::default(),
            changing_ports: Default::default(),
        })
    }

    pub(crate) fn note_ports(&self) {
        let addresses: BTreeSet<String> = self.listeners.borrow().keys().cloned().collect();
        match self.base.core.borrow_mut().pool.set_ports(&addresses) {
            Ok(true) => self.base.committer.kick(),
            Ok(false) => {}
            Err(error) => tracing::error!(%error, "can't set the ports"),
        }
    }

    pub(crate) async fn listen_also(self: &Rc<Self>, new: BTreeMap<String, OwnedFd>) {
        if new.is_empty() {
            return;
        }
        let others: HashSet<String> = self.listeners.borrow().keys().cloned().collect();
        self.listeners.borrow_mut().extend(new);
        self.note_ports();
        // An engine that does not act yet gets all listeners when it does.
        let acts = |session: &Rc<Session>| self.link.acting.get() == session.generation;
        let Some(session) = self.link.session().filter(acts) else {
            return;
        };
        let asked = |(what, pending)| WelcomeItem {
            what,
            device: None,
            pending,
        };
        let mut all: Vec<WelcomeItem> = self.say_ports(&session).into_iter().map(asked).collect();
        all.extend(self.say_hosts_listeners(&session, &others));
        self.states.carried_out(&session, all).await;
    }

    fn ports(&self) -> Vec<PortConfig> {
        let core = self.base.core.borrow();
        let listeners = self.listeners.borrow();
        let known = listeners
            .keys()
            .filter_map(|a| core.pool.hosts().port(a).cloned());
        known.collect()
    }

    pub(crate) fn say_ports(&self, session: &Session) -> Vec<(String, PendingAnswer)> {
        let committed = self.base.core.borrow().pool.journal().committed_id();
        let changing = self.changing_ports.borrow();
        let durable = |port: PortConfig| match changing.get(&port.address) {
            Some((before, batch)) if *batch > committed => before.clone(),
            _ => port,
        };
        let say = |port: PortConfig| {
            let what = format!("port {}", port.address);
            let asked = session.request("a port", |request| ToEngine::SetPort { request, port });
            (what, asked)
        };
        self.ports().into_iter().map(durable).map(say).collect()
    }

    pub(crate) fn port_list(&self) -> Vec<Port> {
        self.ports().iter().map(show).collect()
    }

    pub(crate) async fn port_update(
        self: &Rc<Self>,
        address: &str,
        body: PortUpdate,
    ) -> Result<Port, ApiError> {
        let ana = match body.ana {
            ShownState::Optimized => PathState::Optimized,
            ShownState::NonOptimized => PathState::NonOptimized,
            ShownState::Inaccessible => PathState::Inaccessible,
        };
        let ports = self.ports();
        let port = ports.iter().find(|port| port.address == address);
        let Some(before) = port.cloned() else {
            return Err(
                ApiError::not_found(format!("there is no port at {address}"))
                    .hint("`forebay port list` shows the ports"),
            );
        };
        let others = || ports.iter().filter(|port| port.address != address);
        if ana == PathState::Inaccessible
            && !body.let_hosts_wait
            && others().all(|port| port.ana == PathState::Inaccessible)
        {
            return Err(ApiError::in_use(format!(
                "no other port is accessible: hosts would wait until {address} is accessible again"
            ))
            .hint("make another port accessible first, or use --let-hosts-wait"));
        }
        {
            let pool = &mut self.base.core.borrow_mut().pool;
            if !pool.set_port_ana(address, ana).map_err(api_error)? {
                return Ok(show(&before));
            }
            let mut changing = self.changing_ports.borrow_mut();
            changing.retain(|_, (_, batch)| *batch > pool.journal().committed_id());
            // If an older change is not durable either, the state before that one is the durable
            // one.
            let entry = changing.entry(address.to_owned());
            entry.or_insert((before, pool.journal().open_batch_id())).1 =
                pool.journal().open_batch_id();
        }
        let (owner, key) = (self.clone(), address.to_owned());
        let reported = async move {
            owner.base.commit_through().await;
            let port = owner.base.core.borrow().pool.hosts().port(&key).cloned();
            match port {
                Some(port) => {
                    owner.report_port_change(&port);
                    let push = |request| ToEngine::SetPort { request, port };
                    owner.link.push("a port", push).await
                }
                None => Ok(()),
            }
        };
        // Detached: the change goes on if the caller gives up.
        let (sender, answer) = tokio::sync::oneshot::channel();
        self.base.spawn(async move {
            let _ = sender.send(reported.await);
        });
        let trouble = || {
            ApiError::unavailable("the change is not durable yet")
                .hint("the change is kept in memory and tried again; see the daemon's log")
        };
        tokio::time::timeout(self.base.limits.request * 2, answer)
            .await
            .map_err(|_| trouble())?
            .map_err(|_| trouble())?
            .map_err(|error| engine_error(&error))?;
        let port = self.base.core.borrow().pool.hosts().port(address).map(show);
        port.ok_or_else(|| ApiError::internal(format!("port {address} is gone")))
    }

    fn report_port_change(&self, port: &PortConfig) {
        let state = match port.ana {
            PathState::Optimized => "optimized",
            PathState::NonOptimized => "non-optimized",
            PathState::Inaccessible => "inaccessible",
        };
        let text = format!("port {} is now {state}", port.address);
        let generation = self.base.newest_generation.get();
        self.base.events.report(
            EventKind::PortChanged,
            generation,
            text,
            EventFields::default(),
        );
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.listeners.borrow().keys().cloned().collect()
    }

    pub(crate) fn say_hosts_listeners(
        &self,
        session: &Session,
        addresses: &HashSet<String>,
    ) -> Vec<WelcomeItem> {
        let mut asked = Vec::new();
        for (address, descriptor) in &*self.listeners.borrow() {
            if addresses.contains(address) {
                continue;
            }
            match descriptor.as_fd().try_clone_to_owned() {
                Ok(descriptor) => asked.push(WelcomeItem {
                    what: format!("listener {address}"),
                    device: None,
                    pending: session.request_with("a listener", descriptor, |request| {
                        ToEngine::SetListener {
                            request,
                            address: address.clone(),
                        }
                    }),
                }),
                Err(error) => {
                    tracing::error!(address, %error, "can't duplicate the listener's descriptor")
                }
            }
        }
        asked
    }
}
