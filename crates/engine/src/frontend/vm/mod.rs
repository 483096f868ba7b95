//! Machines: exports that a virtual machine's monitor, or a user-space driver, reaches by a Unix socket.
//!
//! **Purpose.** Both kinds (NVMe over vfio-user, vhost-user-blk) have the same needs: one client at a
//! time on one socket, descriptors of memory and interrupts, messages that must survive the engine. This
//! is their common part; a kind is a [`protocol::Protocol`].
//!
//! **Design.** One [`Vms`] for each reactor, beside its TCP connections. A client has a socket and its
//! messages ([`talk`]), memory and descriptors ([`client`]), and a file in which a successor finds all of it
//! ([`mod@file`]). A client that goes is *drained*: its socket is shut down, but the daemon keeps what it
//! deposited until its last command is back from the devices; only then may the next client come.
//!
//! How clients come is in [`arrive`], how they go in [`leave`].
//!
//! **Not here:** accepting (the control thread's [`crate::control`]), what the messages mean.

mod answer;
mod arrive;
pub(crate) mod client;
pub(crate) mod closer;
pub(crate) mod descriptor;
pub(crate) mod file;
mod leave;
mod look;
mod message;
mod peek;
pub(crate) mod protocol;
mod registered;
pub(crate) mod signal;
pub(crate) mod talk;
#[cfg(test)]
mod tests;
mod turn;

use crate::core::{Core, FrontendIndex};
use crate::frontend::Frontend;
pub(crate) use arrive::{NewMachine, blamed_of};
use client::Client;
use closer::Closer;
use forebay_xlate::boundary::region::Blame;
pub(crate) use message::VmMessage;
use protocol::{Closing, Protocol, Turn};
use registered::Registrar;
use rustix::event::epoll;
use rustix::thread::CpuSet;
use signal::Signals;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use talk::Talk;

/// How long a client may take to go when its export is removed.
pub(crate) const REMOVAL_GRACE_NS: u64 = 5_000_000_000;
/// The longest sleep while something is waited for that nobody tells of.
pub(crate) const RETRY_NS: u64 = 2_000_000;

/// What is registered in one turn: each takes a call of the kernel.
const READY_AT_ONCE: usize = 4;

/// Notes that the reactor works for a client from here on.
#[inline]
fn blame(core: &Core, client: &Client) {
    if let Some(lane) = client.own_lane(core) {
        let word = Blame::machine_itself(lane.0);
        core.record().blame.store(word, Relaxed);
    }
}

/// The epoll key of a client's socket (0) or of what it watches (its slot + 1).
fn key(frontend: FrontendIndex, index: u32, generation: u16, what: usize) -> u64 {
    frontend.key(
        u64::from(generation) << 40 | u64::from(index & 0xFF_FFFF) << 16 | (what as u64 & 0xFFFF),
    )
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Open,
    /// Its export is removed; until then it may go by itself.
    Removed(u64),
    /// It is shut out; its commands end.
    Draining(Closing),
}

struct Vm {
    client: Client,
    talk: Talk,
    frontend: Box<dyn Protocol>,
    fd: Arc<OwnedFd>,
    life: Life,
    watches_room: bool,
}

/// See the module's text.
pub(crate) struct Vms {
    /// This frontend's place among those of its reactor.
    index: FrontendIndex,
    /// Turns in which rings are not looked at.
    rest: u32,
    all: Vec<Option<Box<Vm>>>,
    generation: u16,
    epoll: Arc<OwnedFd>,
    signals: Option<Signals>,
    /// As with the first client.
    registrar: Option<Registrar>,
    /// Where what is beside the reactor runs; `None`: where the reactor does.
    cpus: Option<CpuSet>,
    closer: Closer,
    /// Breaks of mappings that were seen.
    breaks: u64,
    /// Those that are looked at between bursts' commands.
    calm: Vec<u32>,
    calm_at: usize,
    /// The one of them that was looked at last.
    calm_next: usize,
    stopping: bool,
    make: Make,
}

/// What makes the frontend of a client.
pub(crate) type Make = fn(&mut Turn<'_>) -> Result<Box<dyn Protocol>, Closing>;

impl Vms {
    /// None yet. Their sockets are watched in `epoll`, and `make` makes their protocols.
    pub(crate) fn new(
        index: FrontendIndex,
        epoll: Arc<OwnedFd>,
        closer: Closer,
        make: Make,
    ) -> Self {
        Self {
            index,
            rest: 0,
            all: Vec::new(),
            generation: 0,
            epoll,
            signals: None,
            registrar: None,
            cpus: None,
            closer,
            breaks: 0,
            calm: Vec::with_capacity(look::MOST),
            calm_at: 0,
            calm_next: 0,
            stopping: false,
            make,
        }
    }

    /// Has what is beside the reactor, which has a processor of its own, run on these.
    pub(crate) fn beside(self, cpus: Option<CpuSet>) -> Self {
        Self { cpus, ..self }
    }

    /// It is as if the process had been killed: nothing is put in order, but what the kernel has few of.
    #[cfg(test)]
    pub(crate) fn die(mut self) {
        drop(self.signals.take());
        std::mem::forget(self);
    }

    /// Serves all clients that have something; true if there was anything.
    pub(crate) fn poll_all(&mut self, core: &mut Core) -> bool {
        if self.all.is_empty() {
            return false;
        }
        self.register(core);
        self.note_calm(core);
        let any = self.pass(core);
        if core.has_ended(self.index) {
            // What devices ended at once is shown in the same turn.
            self.pass(core);
        }
        any
    }

    /// Has the ring know what of clients' memory is held since the last turn.
    #[inline]
    fn register(&mut self, core: &mut Core) {
        for _ in 0..READY_AT_ONCE {
            let Some(ready) = self.registrar.as_ref().and_then(Registrar::next) else {
                return;
            };
            let (index, generation) = ready.who;
            match self.get(index, generation) {
                Some(machine) if !matches!(machine.life, Life::Draining(_)) => {
                    machine.client.register(core, ready);
                }
                _ => self.closer.close(ready.pinned),
            }
        }
    }

    fn pass(&mut self, core: &mut Core) -> bool {
        let mut any = false;
        while let Some(done) = core.next_ended(self.index) {
            any = true;
            let owner = done.owner;
            if let Some(machine) = self.get(owner.conn, owner.conn_generation as u16) {
                let Vm {
                    client, frontend, ..
                } = machine;
                frontend.done(&mut Turn { core, client }, done);
            }
        }
        let breaks = forebay_guest::guard::breaks();
        let look_at_memory = breaks != std::mem::replace(&mut self.breaks, breaks);
        for at in 0..self.all.len() {
            let Some(machine) = &mut self.all[at] else {
                continue;
            };
            if matches!(machine.life, Life::Draining(_)) {
                continue;
            }
            if look_at_memory && machine.client.memory.is_broken() {
                machine.client.fail(CUT_OFF);
            }
            if machine.talk.is_active() || machine.asks() {
                blame(core, &machine.client);
                let talked = machine.talk(core);
                any |= talked;
                if talked {
                    machine.show(core);
                }
            }
            if machine.frontend.is_active() {
                blame(core, &machine.client);
                let Vm {
                    client, frontend, ..
                } = &mut **machine;
                let polled = frontend.poll(&mut Turn { core, client });
                core.blame(None);
                if polled {
                    any = true;
                    self.poll_between(core);
                }
            }
            let Some(machine) = &mut self.all[at] else {
                continue;
            };
            if machine.client.interrupts.any()
                && let Some(signals) = &mut self.signals
            {
                machine.client.flush(core, signals);
            }
            if !machine.client.upcalls.is_empty() {
                for upcall in machine.client.upcalls.drain(..) {
                    core.upcalls.push_back(upcall);
                }
            }
            if let Some(mut why) = machine.client.closing {
                any = true;
                // Whatever made no sense was read as zeros.
                if machine.client.memory.is_broken() {
                    why = CUT_OFF;
                }
                // What is to be rung is known by its number, which is another's as soon as it is let go of.
                if let Some(signals) = &mut self.signals {
                    signals.flush();
                }
                self.close(core, at, why);
            }
        }
        if let Some(signals) = &mut self.signals
            && signals.any()
        {
            signals.flush();
        }
        any
    }

    fn get(&mut self, conn: u32, generation: u16) -> Option<&mut Vm> {
        let at = conn as usize;
        let machine = self.all.get_mut(at)?.as_mut()?;
        (machine.client.generation() == generation).then_some(machine)
    }

    /// The daemon holds a client's deposits up to this one, or doesn't.
    pub(crate) fn deposited(&mut self, socket: u64, last: u32, kept: bool) {
        let machine = (self.all.iter_mut().flatten()).find(|m| m.client.socket == socket);
        match machine {
            Some(machine) if kept => machine.talk.deposited(last),
            Some(machine) => {
                let why = "the daemon has no room for its descriptors";
                machine.client.fail(Closing(why));
            }
            None => {}
        }
    }
}

impl Vm {
    /// Whether its frontend has something to say, and the socket has room.
    fn asks(&self) -> bool {
        !self.client.request.bytes.is_empty() && !self.talk.blocked
    }

    /// Says in its lane's record what there is of it. A message may change that, and an Admin command.
    fn show(&self, core: &Core) {
        let Some(lane) = self.client.lane.and_then(|lane| core.lane(lane)) else {
            return;
        };
        let record = lane.record();
        let regions = self.client.memory.regions().iter();
        let bytes = regions.map(|region| region.len_bytes()).sum();
        record
            .machine_since_s
            .store(self.client.file.since_s(), Relaxed);
        record.machine_memory_bytes.store(bytes, Relaxed);
        record
            .machine_queues
            .store(self.frontend.queues() as u64, Relaxed);
        record.connections.store(1, Relaxed);
    }

    /// Nobody is there any more.
    fn hide(&self, core: &Core) {
        if let Some(lane) = self.client.lane.and_then(|lane| core.lane(lane)) {
            let record = lane.record();
            record.connections.store(0, Relaxed);
            record.machine_memory_bytes.store(0, Relaxed);
            record.machine_queues.store(0, Relaxed);
        }
    }

    /// Goes on with its messages.
    fn talk(&mut self, core: &mut Core) -> bool {
        let Vm {
            client,
            frontend,
            talk,
            ..
        } = self;
        let any = match talk.step(core, client, &mut **frontend) {
            Ok(any) => any,
            Err(why) => {
                client.fail(match why == talk::HUNG_UP {
                    true => frontend.hung_up(),
                    false => why,
                });
                true
            }
        };
        if talk.blocked != self.watches_room {
            self.watches_room = talk.blocked;
            let mut flags =
                epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
            flags.set(epoll::EventFlags::OUT, talk.blocked);
            client.watch_socket(&self.fd, flags);
        }
        any
    }
}

const REMOVED: Closing = Closing("its export was removed");
const CUT_OFF: Closing = Closing("its memory's file was cut off");
