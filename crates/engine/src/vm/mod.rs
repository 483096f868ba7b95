//! Machines: exports that a virtual machine's monitor, or a user-space driver, reaches by a Unix socket.
//!
//! **Purpose.** Both kinds (NVMe over vfio-user, vhost-user-blk) have the same needs: one client at a
//! time on one socket, descriptors of memory and interrupts, messages that must survive the engine. This
//! is their common part; a kind is a [`frontend::Frontend`].
//!
//! **Design.** One [`Machines`] for each reactor, beside its TCP connections. A client has a socket and its
//! messages ([`talk`]), memory and descriptors ([`client`]), and a file in which a successor finds all of it
//! ([`mod@file`]). A client that goes is *drained*: its socket is shut down, but the daemon keeps what it
//! deposited until its last command is back from the devices; only then may the next client come.
//!
//! How clients go is in [`leave`].
//!
//! **Not here:** accepting (the control thread's [`crate::control`]), what the messages mean.

mod answer;
pub(crate) mod client;
pub(crate) mod closer;
pub(crate) mod descriptor;
pub(crate) mod file;
pub(crate) mod frontend;
mod leave;
mod peek;
mod registered;
pub(crate) mod signal;
mod talk;
#[cfg(test)]
mod tests;

use crate::core::{CarriedSpan, Core, Devices};
use crate::lane::LaneIndex;
use crate::mailbox::Upcall;
use crate::vhost::Vhost;
use client::{Client, Place};
use closer::Closer;
use file::MachineFile;
use forebay_xlate::boundary::message::{Blamed, ExportConfig, ExportId, Frontend as Kind};
use forebay_xlate::boundary::region::Blame;
use forebay_xlate::kill_point;
use frontend::{Closing, Frontend, Turn};
use registered::Registrar;
use rustix::event::epoll;
use rustix::net::Shutdown;
use rustix::thread::CpuSet;
use signal::Signals;
use std::collections::BTreeMap;
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

/// The top byte of the epoll keys of machines.
pub(crate) const KEY_BYTE: u64 = 0x4D;

/// So many engines may crash in a row over what a client said or has in its rings before it is closed.
const MAX_TRIES: u64 = 2;

/// Notes that the reactor works for a client from here on.
#[inline]
fn blame(core: &Core, client: &Client) {
    if let Some(lane) = client.own_lane(core) {
        let word = Blame::machine_itself(lane.0);
        core.record().blame.store(word, Relaxed);
    }
}

/// The epoll key of a client's socket (0) or of what it watches (its slot + 1).
fn key(index: u32, generation: u16, what: usize) -> u64 {
    KEY_BYTE << 56
        | u64::from(generation) << 40
        | u64::from(index & 0xFF_FFFF) << 16
        | (what as u64 & 0xFFFF)
}

/// A client that was accepted, or that a dead engine had.
#[derive(Debug)]
pub(crate) struct NewMachine {
    /// Its socket's number.
    pub socket: u64,
    /// Its socket.
    pub fd: Arc<OwnedFd>,
    /// Its export.
    pub export: Arc<ExportConfig>,
    /// The machine file.
    pub file: MachineFile,
    /// What a dead engine's client had deposited, by number; `None`: it is new.
    pub inherited: Option<BTreeMap<u32, Arc<OwnedFd>>>,
    /// The dead engine crashed over it; over this command, if it is known.
    pub blamed: Option<Option<u16>>,
}

/// What of an export a dead engine crashed over: a command, or what its client said or has in its rings.
pub(crate) fn blamed_of(blamed: Option<Blamed>, export: ExportId) -> Option<Option<u16>> {
    match blamed {
        Some(Blamed::Machine { export: of, slot }) if of == export => Some(slot),
        _ => None,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Open,
    /// Its export is removed; until then it may go by itself.
    Removed(u64),
    /// It is shut out; its commands end.
    Draining(Closing),
}

struct Machine {
    client: Client,
    talk: Talk,
    frontend: Box<dyn Frontend>,
    fd: Arc<OwnedFd>,
    life: Life,
    watches_room: bool,
}

/// See the module's text.
pub(crate) struct Machines {
    all: Vec<Option<Box<Machine>>>,
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
    stopping: bool,
    make: Make,
}

/// What makes the frontend of a client.
type Make = fn(&mut Turn<'_>) -> Result<Box<dyn Frontend>, Closing>;

impl Machines {
    /// None yet. Their sockets are watched in `epoll`, with keys of [`KEY_BYTE`].
    pub(crate) fn new(epoll: Arc<OwnedFd>, closer: Closer) -> Self {
        Self {
            all: Vec::new(),
            generation: 0,
            epoll,
            signals: None,
            registrar: None,
            cpus: None,
            closer,
            breaks: 0,
            stopping: false,
            make,
        }
    }

    /// Has what is beside the reactor, which has a processor of its own, run on these.
    pub(crate) fn beside(self, cpus: Option<CpuSet>) -> Self {
        Self { cpus, ..self }
    }

    /// With frontends of a test's own.
    #[cfg(test)]
    fn with(epoll: Arc<OwnedFd>, closer: Closer, make: Make) -> Self {
        Self {
            make,
            ..Self::new(epoll, closer)
        }
    }

    /// It is as if the process had been killed: nothing is put in order, but what the kernel has few of.
    #[cfg(test)]
    pub(crate) fn die(mut self) {
        drop(self.signals.take());
        std::mem::forget(self);
    }

    /// Takes a client. One that can't be served is told of as gone.
    pub(crate) fn adopt(&mut self, core: &mut Core, new: NewMachine) {
        let (socket, fd, export) = (new.socket, new.fd.clone(), new.export.clone());
        let lane = core.lane_of_export(export.export);
        let inherited = new.inherited.is_some();
        if let Err(why) = self.take(core, new, lane) {
            if inherited {
                // What it had at devices, nobody knows any more.
                self.carry_unknown(core, lane);
            }
            let _ = rustix::net::shutdown(&*fd, Shutdown::Both);
            self.closer.close_suspect(fd);
            core.upcall(Upcall::MachineLeft(socket, export.export, why));
        }
    }

    /// Has everything that a client's lost commands may change wait for the fence.
    fn carry_unknown(&self, core: &mut Core, lane: Option<LaneIndex>) {
        let known = lane.and_then(|lane| Some((lane, core.lane(lane)?.volume.id())));
        if let Some((lane, volume)) = known {
            let span = CarriedSpan {
                volume,
                bytes: 0..u64::MAX,
                write: true,
                devices: Devices::ALL,
                command: None,
            };
            core.carry_machine(lane, &[span]);
        }
    }

    fn take(
        &mut self,
        core: &mut Core,
        new: NewMachine,
        lane: Option<LaneIndex>,
    ) -> Result<(), Closing> {
        if self.stopping {
            return Err(Closing("the engine stops"));
        }
        if self.signals.is_none() {
            // Each costs the kernel something, and most reactors have no machine.
            let made = Signals::new();
            self.signals =
                Some(made.map_err(|_| {
                    Closing("the kernel has no room for interrupts (fs.aio-max-nr)")
                })?);
        }
        let at = self.all.iter().position(Option::is_none);
        let at = at.unwrap_or(self.all.len());
        self.generation = self.generation.wrapping_add(1);
        if self.registrar.is_none() {
            // Without, memory is served unregistered.
            self.registrar = Registrar::start(self.cpus).ok();
        }
        // Others may take pages out of their memory, and put new ones there.
        let keeps = new.export.frontend.keeps_memory();
        let registrar = self.registrar.as_ref().filter(|_| keeps);
        let place = Place {
            index: at as u32,
            generation: self.generation,
            epoll: self.epoll.clone(),
            closer: self.closer.clone(),
            asker: registrar.map(|r| r.for_client((at as u32, self.generation))),
        };
        let (fd, closer) = (new.fd, self.closer.clone());
        let mut client = Client::new(new.socket, new.export, lane, new.file, place);
        let begun = begin(
            core,
            &mut client,
            &fd,
            (new.inherited, new.blamed),
            closer,
            self.make,
        );
        let data = epoll::EventData::new_u64(key(at as u32, self.generation, 0));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let begun = begun.and_then(|begun| match epoll::add(&*self.epoll, &fd, data, flags) {
            Ok(()) => Ok(begun),
            Err(_) => Err(Closing("its socket can't be watched")),
        });
        let (talk, frontend) = match begun {
            Ok(begun) => begun,
            Err(why) => {
                client.leave();
                client.end();
                return Err(why);
            }
        };
        client.withdraw_unused();
        let machine = Machine {
            client,
            talk,
            frontend,
            fd,
            life: Life::Open,
            watches_room: false,
        };
        machine.show(core);
        match self.all.get_mut(at) {
            Some(free) => *free = Some(Box::new(machine)),
            None => self.all.push(Some(Box::new(machine))),
        }
        Ok(())
    }

    /// One turn; true if anything was done.
    pub(crate) fn poll(&mut self, core: &mut Core) -> bool {
        if self.all.is_empty() {
            return false;
        }
        self.register(core);
        let any = self.pass(core);
        if !core.next_machine_done_is_none() {
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
        while let Some(done) = core.next_machine_done() {
            any = true;
            let owner = done.owner;
            if let Some(machine) = self.get(owner.conn, owner.conn_generation as u16) {
                let Machine {
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
                let Machine {
                    client, frontend, ..
                } = &mut **machine;
                blame(core, client);
                any |= frontend.poll(&mut Turn { core, client });
            }
            core.blame_nobody();
            if machine.client.any_raised
                && let Some(signals) = &mut self.signals
            {
                machine.client.flush(core, signals);
            }
            if !machine.client.upcalls.is_empty() {
                for upcall in machine.client.upcalls.drain(..) {
                    core.upcall(upcall);
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

    fn get(&mut self, conn: u32, generation: u16) -> Option<&mut Machine> {
        let at = (conn & !crate::core::Owner::MACHINE) as usize;
        let machine = self.all.get_mut(at)?.as_mut()?;
        (machine.client.generation() == generation).then_some(machine)
    }

    /// Sockets or watched descriptors of these keys have something to say.
    pub(crate) fn ready(&mut self, core: &mut Core, keys: &[u64]) {
        for key in keys.iter().filter(|key| *key >> 56 == KEY_BYTE) {
            let (index, generation) = ((key >> 16) as u32 & 0xFF_FFFF, (key >> 40) as u16);
            let Some(machine) = self.get(index, generation) else {
                continue;
            };
            match (key & 0xFFFF) as usize {
                0 => machine.talk.ready(),
                _ if matches!(machine.life, Life::Draining(_)) => {}
                what => {
                    let Machine {
                        client, frontend, ..
                    } = machine;
                    frontend.ready(&mut Turn { core, client }, what - 1);
                }
            }
        }
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

    /// Clients, those that are draining too.
    pub(crate) fn count(&self) -> usize {
        self.all.iter().flatten().count()
    }

    /// Whether there is nothing to do that would not be told of.
    pub(crate) fn is_idle(&self) -> bool {
        let busy = |m: &Machine| {
            !matches!(m.life, Life::Draining(_))
                && (m.client.closing.is_some()
                    || m.client.any_raised
                    || m.asks()
                    || m.talk.is_active() && !m.talk.must_retry())
        };
        !self.all.iter().flatten().any(|m| busy(m))
    }

    /// Whether something is waited for that nobody tells of.
    pub(crate) fn must_retry(&self) -> bool {
        let retries = |m: &Machine| !matches!(m.life, Life::Draining(_)) && m.talk.must_retry();
        self.all.iter().flatten().any(|m| retries(m))
    }

    /// Whether commands of a client that is gone are waited for.
    pub(crate) fn is_draining(&self) -> bool {
        let mut all = self.all.iter().flatten();
        all.any(|m| matches!(m.life, Life::Draining(_)))
    }

    /// The reactor is about to sleep: has the guests ring. False: it must not sleep.
    pub(crate) fn arm(&mut self, core: &mut Core) -> bool {
        let mut may = true;
        for machine in self.all.iter_mut().flatten() {
            if matches!(machine.life, Life::Draining(_)) {
                continue;
            }
            let Machine {
                client, frontend, ..
            } = &mut **machine;
            may &= frontend.arm(&mut Turn { core, client });
        }
        may && core.next_machine_done_is_none()
    }

    /// When [`Machines::tick`] has something to do at the latest.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        let of = |m: &Machine| {
            let removed = match m.life {
                Life::Open => None,
                Life::Removed(until) => Some(until),
                Life::Draining(_) => return None,
            };
            let deadlines = [removed, m.talk.deadline_ns(), m.frontend.deadline_ns()];
            deadlines.into_iter().flatten().min()
        };
        self.all.iter().flatten().filter_map(|m| of(m)).min()
    }

    /// Looks at time limits.
    pub(crate) fn tick(&mut self, core: &mut Core) {
        let now = core.now_ns();
        for at in 0..self.all.len() {
            let Some(machine) = &mut self.all[at] else {
                continue;
            };
            match machine.life {
                Life::Draining(why) => {
                    self.drained(core, at, why);
                    continue;
                }
                Life::Removed(until) if now >= until => machine.client.fail(REMOVED),
                _ => {}
            }
            if machine.talk.deadline_ns().is_some_and(|limit| now >= limit) {
                let why = machine.talk.overdue();
                machine.client.fail(why);
            }
            machine.client.is_heard = machine.talk.hears();
            let Machine {
                client, frontend, ..
            } = &mut **machine;
            frontend.tick(&mut Turn { core, client });
            machine.show(core);
        }
    }

    /// An export's volume grew, or something else of it changed.
    pub(crate) fn export_changed(&mut self, core: &mut Core, export: ExportId) {
        for machine in self.all.iter_mut().flatten() {
            if machine.client.export.export == export && machine.life == Life::Open {
                let Machine {
                    client, frontend, ..
                } = &mut **machine;
                frontend.changed(&mut Turn { core, client });
            }
        }
    }
}

impl Machine {
    /// Whether its frontend has something to say, and the socket has room.
    fn asks(&self) -> bool {
        !self.client.request.is_empty() && !self.talk.blocked
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
        let Machine {
            client,
            frontend,
            talk,
            ..
        } = self;
        let any = match talk.step(core, client, &mut **frontend) {
            Ok(any) => any,
            Err(why) => {
                client.fail(why);
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

/// What a client has deposited, by number.
type Deposits = BTreeMap<u32, Arc<OwnedFd>>;

/// Begins with a client, or goes on with a dead engine's.
fn begin(
    core: &mut Core,
    client: &mut Client,
    fd: &Arc<OwnedFd>,
    (inherited, blamed): (Option<Deposits>, Option<Option<u16>>),
    closer: Closer,
    make: Make,
) -> Result<(Talk, Box<dyn Frontend>), Closing> {
    let Some(deposits) = inherited else {
        let talk = Talk::new(fd.clone(), closer)?;
        return Ok((talk, make(&mut Turn { core, client })?));
    };
    if blamed == Some(None) {
        let tries = client.file().tries();
        if tries + 1 >= MAX_TRIES {
            return Err(Closing(
                "engines crashed over what it said, or over its rings",
            ));
        }
        client.file().set_tries(tries + 1);
    }
    let (talk, again) = Talk::resume(fd.clone(), client, closer)?;
    client.inherit(deposits, again)?;
    blame(core, client);
    let mut frontend = make(&mut Turn { core, client })?;
    frontend.resume(&mut Turn { core, client }, blamed.flatten())?;
    core.blame_nobody();
    kill_point!("vm.resumed");
    Ok((talk, frontend))
}

const REMOVED: Closing = Closing("its export was removed");
const CUT_OFF: Closing = Closing("its memory's file was cut off");

/// The frontend of a client, for its export.
fn make(turn: &mut Turn<'_>) -> Result<Box<dyn Frontend>, Closing> {
    match turn.client.export().frontend {
        Kind::NvmeTcp => Err(Closing("its export is none of a machine")),
        Kind::NvmePcie { .. } => Ok(Box::new(crate::pcie::Pcie::new(turn)?)),
        Kind::VhostUser { queues, .. } => Ok(Box::new(Vhost::new(turn, queues)?)),
    }
}
