//! Exports that a VM's monitor, or a user-space driver, reaches by a Unix socket: the common part
//! of both protocols.
//!
//! There is one [`Vms`] per reactor. A client that leaves is *drained*: its socket is shut down,
//! but the daemon keeps its deposits until its last command has left the devices. Only then may the
//! next client come. **Not here:** accepting (the control thread's [`crate::control`]), what
//! messages mean.

mod answer;
mod attach;
mod between_quanta;
pub(crate) mod client;
pub(crate) mod closer;
pub(crate) mod descriptor;
mod detach;
pub(crate) mod file;
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
pub(crate) use attach::{NewVm, blamed_of};
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

/// How long a client may take to leave when its export is removed.
pub(crate) const REMOVAL_GRACE_NS: u64 = 5_000_000_000;
/// The longest sleep while something is pending that no event announces.
pub(crate) const RETRY_NS: u64 = 2_000_000;

/// Registrations per turn: each is a system call.
const READY_AT_ONCE: usize = 4;

/// Sets the blame for a crash from here on.
#[inline]
fn blame(core: &Core, client: &Client) {
    if let Some(lane) = client.own_lane(core) {
        let word = Blame::vm_itself(lane.0);
        core.record().blame.store(word, Relaxed);
    }
}

fn key(frontend: FrontendIndex, index: u32, generation: u16, what: usize) -> u64 {
    frontend.key(
        u64::from(generation) << 40 | u64::from(index & 0xFF_FFFF) << 16 | (what as u64 & 0xFFFF),
    )
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Open,
    /// Its export is removed; it may leave by itself until this time.
    Removed(u64),
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

pub(crate) struct Vms {
    index: FrontendIndex,
    /// Turns left in which rings are not polled.
    rest: u32,
    all: Vec<Option<Box<Vm>>>,
    generation: u16,
    epoll: Arc<OwnedFd>,
    signals: Option<Signals>,
    registrar: Option<Registrar>,
    /// Processors for the helper threads; `None`: the reactor's own.
    cpus: Option<CpuSet>,
    closer: Closer,
    /// Mapping faults seen so far.
    breaks: u64,
    /// Clients within their base, polled between quanta of bursting lanes.
    calm: Vec<u32>,
    calm_at: usize,
    /// The one that was polled last.
    calm_next: usize,
    stopping: bool,
    make: Make,
}

pub(crate) type Make = fn(&mut Turn<'_>) -> Result<Box<dyn Protocol>, Closing>;

impl Vms {
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
            calm: Vec::with_capacity(between_quanta::MOST),
            calm_at: 0,
            calm_next: 0,
            stopping: false,
            make,
        }
    }

    pub(crate) fn beside(self, cpus: Option<CpuSet>) -> Self {
        Self { cpus, ..self }
    }

    /// Ends as if killed: releases only scarce kernel resources.
    #[cfg(test)]
    pub(crate) fn die(mut self) {
        drop(self.signals.take());
        std::mem::forget(self);
    }

    pub(crate) fn poll_all(&mut self, core: &mut Core) -> bool {
        if self.all.is_empty() {
            return false;
        }
        self.register(core);
        self.note_calm(core);
        let any = self.pass(core);
        if core.has_ended(self.index) {
            // Publish in this turn what devices completed at once.
            self.pass(core);
        }
        any
    }

    #[inline]
    fn register(&mut self, core: &mut Core) {
        for _ in 0..READY_AT_ONCE {
            let Some(ready) = self.registrar.as_ref().and_then(Registrar::next) else {
                return;
            };
            let (index, generation) = ready.who;
            match self.get(index, generation) {
                Some(vm) if !matches!(vm.life, Life::Draining(_)) => {
                    vm.client.register(core, ready);
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
            if let Some(vm) = self.get(owner.conn, owner.conn_generation as u16) {
                let Vm {
                    client, frontend, ..
                } = vm;
                frontend.done(&mut Turn { core, client }, done);
            }
        }
        let breaks = forebay_guest::guard::breaks();
        let check_memory = breaks != std::mem::replace(&mut self.breaks, breaks);
        for at in 0..self.all.len() {
            let Some(vm) = &mut self.all[at] else {
                continue;
            };
            if matches!(vm.life, Life::Draining(_)) {
                continue;
            }
            if check_memory && vm.client.memory.is_broken() {
                vm.client.fail(CUT_OFF);
            }
            if vm.talk.is_active() || vm.asks() {
                blame(core, &vm.client);
                let talked = vm.talk(core);
                any |= talked;
                if talked {
                    vm.show(core);
                }
            }
            if vm.frontend.is_active() {
                blame(core, &vm.client);
                let Vm {
                    client, frontend, ..
                } = &mut **vm;
                let polled = frontend.poll(&mut Turn { core, client });
                core.blame(None);
                if polled {
                    any = true;
                    self.poll_between(core);
                }
            }
            let Some(vm) = &mut self.all[at] else {
                continue;
            };
            if vm.client.interrupts.any()
                && let Some(signals) = &mut self.signals
            {
                vm.client.flush(core, signals);
            }
            if !vm.client.upcalls.is_empty() {
                for upcall in vm.client.upcalls.drain(..) {
                    core.upcalls.push_back(upcall);
                }
            }
            if let Some(mut why) = vm.client.closing {
                any = true;
                // Bytes behind the fault were read as zeros.
                if vm.client.memory.is_broken() {
                    why = CUT_OFF;
                }
                // Flush first: signals name descriptors by number, and closing frees the numbers.
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
        let vm = self.all.get_mut(at)?.as_mut()?;
        (vm.client.generation() == generation).then_some(vm)
    }

    pub(crate) fn deposited(&mut self, socket: u64, last: u32, kept: bool) {
        let vm = (self.all.iter_mut().flatten()).find(|m| m.client.socket == socket);
        match vm {
            Some(vm) if kept => vm.talk.deposited(last),
            Some(vm) => {
                let why = "the daemon has no room for its descriptors";
                vm.client.fail(Closing(why));
            }
            None => {}
        }
    }
}

impl Vm {
    fn asks(&self) -> bool {
        !self.client.request.bytes.is_empty() && !self.talk.blocked
    }

    /// Publishes its statistics in the lane's record.
    fn show(&self, core: &Core) {
        let Some(lane) = self.client.lane.and_then(|lane| core.lane(lane)) else {
            return;
        };
        let record = lane.record();
        let regions = self.client.memory.regions().iter();
        let bytes = regions.map(|region| region.len_bytes()).sum();
        record.vm_since_s.store(self.client.file.since_s(), Relaxed);
        record.vm_memory_bytes.store(bytes, Relaxed);
        record
            .vm_queues
            .store(self.frontend.queues() as u64, Relaxed);
        record.connections.store(1, Relaxed);
    }

    fn hide(&self, core: &Core) {
        if let Some(lane) = self.client.lane.and_then(|lane| core.lane(lane)) {
            let record = lane.record();
            record.connections.store(0, Relaxed);
            record.vm_memory_bytes.store(0, Relaxed);
            record.vm_queues.store(0, Relaxed);
        }
    }

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
const CUT_OFF: Closing = Closing("the file of its memory was truncated");
