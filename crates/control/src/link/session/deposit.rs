//! The deposit of an engine: its memory and connections, which the daemon holds for a successor.
//!
//! After the engine's death, this and its state region are an [`Estate`]. A successor gets it in
//! four messages, converts it, and may act once its own session holds everything. Connections must
//! leave the daemon some descriptors, or it could not start an engine. Connections beyond that end
//! with their engine.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_xlate::boundary::message::{Blamed, ToEngine};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::boundary::socket::MAX_DESCRIPTORS;
use forebay_xlate::kill_point;
use rustix::process::{Resource, getrlimit};

use super::vms::{VmClient, VmClients};
use super::{AskError, AskKind, PendingAnswer, Session};

/// Descriptors kept from connections; half of all, if there are few.
const RESERVED_DESCRIPTORS: u64 = 512;

#[derive(Debug, Default)]
pub(super) struct Deposit {
    memory: Option<Arc<OwnedFd>>,
    sockets: BTreeMap<u64, Arc<OwnedFd>>,
    pub(super) vms: VmClients,
    /// The number of the newest client.
    pub(super) last_vm: u64,
    /// Connections refused for lack of descriptors.
    not_kept: u64,
}

/// The lowest descriptor that no connection may have. The kernel assigns the lowest free number, so
/// all other open files count too.
pub(super) fn descriptors_end() -> u64 {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    limit - (limit / 2).min(RESERVED_DESCRIPTORS)
}

#[derive(Debug)]
pub(crate) struct Estate {
    /// The dead engine's.
    pub(crate) generation: u64,
    /// Its state region.
    pub(crate) region: Rc<Region>,
    /// The work during which it crashed.
    pub(crate) blamed: Option<Blamed>,
    /// How many successors were given it.
    pub(crate) tries: u32,
    deposit: Deposit,
}

impl Estate {
    #[cfg(test)]
    pub(crate) fn empty(generation: u64) -> Self {
        Self {
            generation,
            region: Rc::new(Region::anonymous(generation).unwrap()),
            blamed: None,
            tries: 0,
            deposit: Deposit::default(),
        }
    }

    pub(crate) fn sockets(&self) -> usize {
        self.deposit.sockets.len() + self.deposit.vms.len()
    }
}

/// A successor's account of the take-over.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Conversion {
    /// Queues that go on.
    pub(crate) queues: u32,
    /// Their commands.
    pub(crate) commands: u32,
    /// VM clients that go on.
    pub(crate) vms: u32,
    /// Closed connections: reason and count.
    pub(crate) closed: Vec<(String, u32)>,
}

impl Session {
    pub(super) fn keep_memory(&self, descriptors: Vec<OwnedFd>) {
        self.deposit.borrow_mut().memory = descriptors.into_iter().next().map(Arc::new);
    }

    pub(super) fn keep_socket(&self, socket: u64, descriptors: Vec<OwnedFd>) {
        self.keep_socket_below(socket, descriptors, descriptors_end());
    }

    /// Keeps a connection, unless its descriptor is reserved.
    pub(crate) fn keep_socket_below(&self, socket: u64, descriptors: Vec<OwnedFd>, end: u64) {
        let fits = |fd: &OwnedFd| u64::from(fd.as_raw_fd().unsigned_abs()) < end;
        let mut deposit = self.deposit.borrow_mut();
        match descriptors.into_iter().next().filter(fits) {
            Some(descriptor) => {
                deposit.sockets.insert(socket, Arc::new(descriptor));
            }
            None => {
                deposit.not_kept += 1;
                // Logged at each power of two: there may be thousands.
                if deposit.not_kept.is_power_of_two() {
                    tracing::warn!(
                        connections = deposit.not_kept,
                        "too few descriptors (RLIMIT_NOFILE): some connections will end with the engine"
                    );
                }
            }
        }
    }

    pub(super) fn drop_socket(&self, socket: u64) {
        let mut deposit = self.deposit.borrow_mut();
        deposit.sockets.remove(&socket);
        if let Some(vm) = deposit.vms.remove(&socket) {
            vm.end();
        }
    }

    #[cfg(test)]
    pub(crate) fn sockets(&self) -> usize {
        self.deposit.borrow().sockets.len()
    }

    /// Takes the estate after the engine's end, including its last messages. `None` if it had no
    /// memory of its own.
    pub(crate) fn take_estate(&self, blamed: Option<Blamed>) -> Option<Estate> {
        while let Ok(Some((message, descriptors))) = self.wire.next_now() {
            self.absorb(message, descriptors);
        }
        let deposit = std::mem::take(&mut *self.deposit.borrow_mut());
        deposit.memory.is_some().then(|| Estate {
            generation: self.generation,
            region: self.region.clone(),
            blamed,
            tries: 0,
            deposit,
        })
    }

    /// Has the engine convert an estate, without any effect yet. `Err(Refused)`: it can't.
    pub(crate) async fn convert(
        &self,
        estate: &RefCell<Option<Estate>>,
        limit: Duration,
    ) -> Result<Conversion, AskError> {
        let asked = match &mut *estate.borrow_mut() {
            Some(estate) => self.send_estate(estate),
            None => return Err(AskError::Gone),
        };
        let mut asked = asked.map_err(|error| AskError::Refused(error.to_string()))?;
        asked.within(limit).await?;
        Ok(self.conversion.take().unwrap_or_default())
    }

    fn send_estate(&self, estate: &mut Estate) -> io::Result<PendingAnswer> {
        let region = Arc::new(estate.region.memory().fd().try_clone_to_owned()?);
        let memory = estate.deposit.memory.clone();
        let descriptors = std::iter::once(region).chain(memory).collect();
        let (generation, blamed) = (estate.generation, estate.blamed);
        estate.tries += 1;
        let pending = self.ask(AskKind::TakeOver, "taking over", descriptors, |request| {
            ToEngine::TakeOver {
                request,
                generation,
                blamed,
            }
        });
        let all: Vec<(&u64, &Arc<OwnedFd>)> = estate.deposit.sockets.iter().collect();
        for some in all.chunks(MAX_DESCRIPTORS) {
            let each = some.iter().map(|(socket, fd)| (**socket, Arc::clone(fd)));
            let (sockets, descriptors) = each.unzip();
            self.say_with(&ToEngine::Sockets { sockets }, descriptors);
        }
        self.send_vms(&estate.deposit.vms);
        self.say(&ToEngine::SocketsEnd);
        kill_point!("daemon.sockets");
        Ok(pending)
    }

    /// Drops everything: a later session with this engine holds it.
    pub(crate) fn forget_deposit(&self) {
        let vms = self.deposit.take().vms;
        vms.into_values().for_each(VmClient::end);
    }

    /// Takes over the estate's connections and tells the engine to act. From here on its own
    /// records count.
    pub(crate) fn resume(&self, estate: &RefCell<Option<Estate>>) -> PendingAnswer {
        if let Some(estate) = estate.take() {
            let mut deposit = self.deposit.borrow_mut();
            deposit.sockets.extend(estate.deposit.sockets);
            deposit.vms.extend(estate.deposit.vms);
        }
        self.request("resuming", |request| ToEngine::Resume { request })
    }
}
