//! The engine's Ceph clients, one for each tenant or volume with images.
//!
//! A client's address is durable in the catalog before it writes. A successor has the addresses of
//! earlier clients blocklisted before its own first write, so no late write of theirs can land. They
//! are forgotten after that.

use std::rc::Rc;

use forebay_pool::ClientRecord;
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::{DeviceFence, ToEngine};

use crate::base::Base;
use crate::link::WelcomeItem;
use crate::link::session::{DeviceState, Session};
use crate::states::DeviceStates;

#[derive(Debug)]
pub(crate) struct CephClients {
    base: Rc<Base>,
    states: Rc<DeviceStates>,
}

impl CephClients {
    pub(crate) fn new(base: &Rc<Base>, states: &Rc<DeviceStates>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            states: states.clone(),
        })
    }

    /// Tells an engine of all clients whose clusters are configured.
    pub(crate) fn say_clients(&self, session: &Session) -> Vec<WelcomeItem> {
        let core = self.base.core.borrow();
        let clients = core.pool.images().clients();
        clients
            .filter_map(|client| self.item(session, client))
            .collect()
    }

    /// Tells an engine of a new client.
    pub(crate) fn begin(&self, session: &Rc<Session>, device: DeviceIndex) {
        if session.device(device).is_some() {
            return;
        }
        let core = self.base.core.borrow();
        let client = core.pool.images().client(device);
        let Some(item) = client.and_then(|client| self.item(session, client)) else {
            return;
        };
        let (states, session) = (self.states.clone(), session.clone());
        self.base.spawn(async move {
            states.carried_out(&session, vec![item]).await;
        });
    }

    fn item(&self, session: &Session, client: &ClientRecord) -> Option<WelcomeItem> {
        let device = self.base.client_config(client, DeviceFence::Unnoted)?;
        if session.device(client.index) != Some(DeviceState::Ready) {
            session.set_device(client.index, DeviceState::Opening);
        }
        let message = |request| ToEngine::SetDevice { request, device };
        Some(WelcomeItem {
            what: format!("the client of Ceph cluster {}", client.cluster),
            device: Some(client.index),
            pending: session.request("connecting a Ceph client", message),
        })
    }

    /// Notes a connected client, and lets it write once its predecessors are blocklisted.
    pub(crate) fn connected(
        self: &Rc<Self>,
        session: &Rc<Session>,
        device: DeviceIndex,
        address: String,
    ) {
        let (owner, session) = (self.clone(), session.clone());
        self.base.spawn(async move {
            owner.let_write(&session, device, &address).await;
        });
    }

    async fn let_write(&self, session: &Session, device: DeviceIndex, address: &str) {
        let noted = {
            let pool = &mut self.base.core.borrow_mut().pool;
            pool.note_client(device, address)
        };
        if let Err(error) = noted {
            tracing::error!(%device, address, %error, "can't note a Ceph client");
            return;
        }
        self.base.commit_through().await;
        let config = {
            let core = self.base.core.borrow();
            let client = core.pool.images().client(device);
            client.and_then(|client| {
                let addresses = client.addresses.iter();
                let others = addresses.filter(|other| *other != address).cloned();
                let fence = DeviceFence::Blocklist(others.collect());
                self.base.client_config(client, fence)
            })
        };
        let Some(device) = config else {
            // It was removed meanwhile.
            return;
        };
        let index = device.device;
        let message = |request| ToEngine::SetDevice { request, device };
        let mut pending = session.request("letting a Ceph client write", message);
        // `DeviceReady` or `DeviceFailed` follows.
        if let Err(error) = pending.within(self.base.limits.request).await {
            tracing::warn!(device = %index, %error, "can't let a Ceph client write");
        }
    }

    /// The earlier clients are blocklisted: only the last one still writes.
    pub(crate) fn fenced(&self, device: DeviceIndex) {
        let pool = &mut self.base.core.borrow_mut().pool;
        let Some(client) = pool.images().client(device) else {
            return;
        };
        // Addresses are in the order of their connection.
        let Some((_, earlier)) = client.addresses.split_last() else {
            return;
        };
        let earlier = earlier.to_vec();
        if !earlier.is_empty() {
            pool.forget_clients(device, &earlier);
            self.base.committer.kick();
        }
    }
}
