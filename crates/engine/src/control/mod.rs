//! The control thread: the engine's side of the boundary to the daemon.
//!
//! **Design.** It sleeps in epoll on the daemon's socket, the listener's sockets and the reactors'
//! bell, and alone writes translation tables. [`EngineSide`] decides about grants, faults, commits,
//! releases, revokes and jobs; this module carries that out. Without a daemon, granted ranges stay
//! in use. **Not here:** tenants' commands ([`crate::core`]), other messages ([`messages`]),
//! [`devices`].

mod budgets;
mod devices;
mod handover;
mod images;
mod lanes;
mod link;
mod messages;
mod reserve;
mod translate;
mod vms;

use crate::associations::Associations;
use crate::bell::{ControlBell, quiet_bell};
use crate::config::EngineConfig;
use crate::core::monotonic_ns;
use crate::device_heartbeat::Heart;
use crate::exports::ExportTable;
use crate::frontend::vm::closer::Closer;
use crate::lane::VolumeStatistics;
use crate::listener::Listener;
use crate::memory::Memory;
use crate::reactor::mailbox::{ControlEnd, Post};
use crate::upcall::Upcall;
use devices::Devices;
use forebay_xlate::boundary::message::{FromEngine, Held, ToEngine};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::boundary::socket::{self};
use forebay_xlate::drain::MAX_DRAINS;
use forebay_xlate::engine_side::{Effect, EngineSide};
use forebay_xlate::{VolumeId, kill_point};
use handover::Handover;
use lanes::Lanes;
use link::Link;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use translate::{ServedVolumes, from_reactor};

const KEY_LISTENER: u64 = 0xC0 << 56;
const KEY_CHANNEL: u64 = 0xC1 << 56;
const KEY_BELL: u64 = 0xC2 << 56;
/// Interval of checks of time limits and full mailboxes.
const TICK_MS: i64 = 200;
const IDLE_TICK_MS: i64 = 5_000;

pub(crate) struct Control {
    generation: u64,
    region: Arc<Region>,
    memory: &'static Memory,
    epoll: Arc<OwnedFd>,
    daemons: OwnedFd,
    link: Link,
    pool: PoolHandle,
    mailboxes: Vec<ControlEnd>,
    bell: ControlBell,
    listener: Listener,
    vms: vms::VmListeners,
    exports: ExportTable,
    devices: Devices,
    volumes: ServedVolumes,
    lanes: Lanes,
    statistics: BTreeMap<VolumeId, VolumeStatistics>,
    budgets: budgets::TenantSlots,
    /// The daemon holds their sockets too.
    sockets: BTreeMap<u64, Arc<OwnedFd>>,
    handover: Handover,
    heart: Option<Heart>,
    protocol: EngineSide,
    reserves: reserve::Reserves,
    /// Work for this thread; empty between steps.
    effects: Vec<Effect>,
    next_tick_ns: u64,
    end: End,
}

#[derive(Default)]
struct PoolHandle {
    /// Pool id; zeros until a daemon has greeted.
    id: [u8; 16],
    /// Kept for the next daemon.
    grant_table: Option<OwnedFd>,
}

struct End {
    stopping: bool,
    stopped: usize,
    /// The engine stops at this time if it has no daemon.
    orphan_at_ns: u64,
}

impl Control {
    pub(crate) fn set_heart(&mut self, heart: Heart) {
        self.heart = Some(heart);
    }

    pub(crate) fn new(
        config: &EngineConfig,
        region: Arc<Region>,
        memory: &'static Memory,
        mailboxes: Vec<ControlEnd>,
        bell: ControlBell,
        exports: ExportTable,
        closer: Closer,
    ) -> io::Result<Self> {
        let set = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let daemons = socket::listen(&config.socket)?;
        let watch = |fd: std::os::fd::BorrowedFd<'_>, key| {
            epoll::add(
                &*set,
                fd,
                epoll::EventData::new_u64(key),
                epoll::EventFlags::IN,
            )
        };
        watch(daemons.as_fd(), KEY_LISTENER)?;
        watch(bell.wake.as_fd(), KEY_BELL)?;
        let devices = Devices::new(config.generation, bell.wake.clone());
        Ok(Self {
            generation: config.generation,
            region: region.clone(),
            memory,
            daemons,
            link: Link::new(set.clone()),
            pool: PoolHandle::default(),
            heart: None,
            protocol: EngineSide::new(mailboxes.len(), MAX_DRAINS),
            reserves: reserve::Reserves::default(),
            effects: Vec::new(),
            next_tick_ns: 0,
            mailboxes,
            bell,
            listener: Listener::new(
                Associations::default(),
                set.clone(),
                config.generation,
                region,
            ),
            vms: vms::VmListeners::new(closer),
            epoll: set,
            exports,
            devices,
            volumes: ServedVolumes::default(),
            lanes: Lanes::default(),
            statistics: BTreeMap::new(),
            budgets: budgets::TenantSlots::default(),
            sockets: BTreeMap::new(),
            handover: Handover::None,
            end: End {
                stopping: false,
                stopped: 0,
                orphan_at_ns: monotonic_ns() + config.orphan_limit_s.saturating_mul(1_000_000_000),
            },
        })
    }

    pub(crate) fn run(mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
        while self.end.stopped < self.mailboxes.len() {
            events.clear();
            let soon = self.listener.is_busy()
                || self.is_muted()
                || self.protocol.holds_back()
                || self.mailboxes.iter().any(ControlEnd::is_behind);
            let wait_ms = if soon { TICK_MS } else { IDLE_TICK_MS };
            let limit = rustix::event::Timespec {
                tv_sec: wait_ms / 1000,
                tv_nsec: wait_ms % 1000 * 1_000_000,
            };
            let none = || !self.mailboxes.iter().any(ControlEnd::has_upcalls);
            let limit = if self.bell.asleep.fall_asleep(none) {
                limit
            } else {
                rustix::event::Timespec::default()
            };
            self.region.header().control_since_ns.store(0, Relaxed);
            let checked_ns = monotonic_ns();
            let _ = epoll::wait(&*self.epoll, spare_capacity(&mut events), Some(&limit));
            self.bell.asleep.awake();
            let since = &self.region.header().control_since_ns;
            since.store(monotonic_ns(), Relaxed);
            for event in &events {
                match event.data.u64() {
                    KEY_LISTENER => self.accept_daemon(),
                    KEY_CHANNEL => self.hear_daemon(),
                    KEY_BELL => quiet_bell(&*self.bell.wake),
                    key if key >> 56 == vms::KEY_BYTE => self.accept_vm(key),
                    key => {
                        let (listener, exports, mut out) = self.listener_and_outside();
                        listener.ready(key, exports, &mut out);
                    }
                }
            }
            self.handle_device_events();
            self.handle_image_events();
            self.take_upcalls();
            let saw_all = events.len() < events.capacity();
            for mailbox in &mut self.mailboxes {
                mailbox.flush();
                if saw_all {
                    mailbox.heard(checked_ns);
                }
            }
            let now = monotonic_ns();
            if now >= self.next_tick_ns {
                self.next_tick_ns = now + TICK_MS as u64 * 1_000_000;
                self.tick_vms();
                self.protocol.rotate_revokes(&mut self.effects);
                self.carry_out();
            }
            let (listener, exports, mut out) = self.listener_and_outside();
            listener.tick(now, exports, &mut out);
            if !self.link.settle() {
                self.lose_channel();
            }
            if now > self.end.orphan_at_ns && self.pool.id == [0; 16] && !self.end.stopping {
                // A daemon may have come meanwhile.
                self.accept_daemon();
                self.hear_daemon();
                if self.pool.id == [0; 16] {
                    self.stop();
                }
            }
        }
    }

    fn stop(&mut self) {
        if !std::mem::replace(&mut self.end.stopping, true) {
            let (listener, _, mut out) = self.listener_and_outside();
            listener.close(&mut out);
            self.remove_vm_listeners();
            for mailbox in &mut self.mailboxes {
                mailbox.post(Post::Stop);
            }
        }
    }

    fn accept_daemon(&mut self) {
        while let Ok(Some(fd)) = socket::accept(self.daemons.as_fd()) {
            self.converse(fd);
        }
    }

    pub(crate) fn converse(&mut self, fd: OwnedFd) {
        // The daemon's lock ensures that only the newest lives.
        self.lose_channel();
        self.link.begin(fd);
    }

    fn drop_channel(&mut self) {
        let _ = self.link.end();
        self.link.forget();
        self.protocol.hung_up(&mut self.effects);
        self.carry_out();
        self.devices.forget_requests();
        self.give_up_handover();
    }

    /// Only if one has greeted; the next one gets all necessary state.
    fn say(&mut self, message: &FromEngine) {
        self.say_with(message, Vec::new());
    }

    fn say_with(&mut self, message: &FromEngine, descriptors: Vec<OwnedFd>) {
        self.say_shared(message, descriptors.into_iter().map(Arc::new).collect());
    }

    fn say_shared(&mut self, message: &FromEngine, descriptors: Vec<Arc<OwnedFd>>) {
        if !self.link.send(message, descriptors) {
            self.lose_channel();
        }
    }

    /// Closes the daemon's channel. Its earlier messages still count: one may be `Stop`.
    fn lose_channel(&mut self) {
        if let Some(mut old) = self.link.end() {
            while let Ok(Some((message, descriptors))) = old.receive() {
                self.hear(message, descriptors);
            }
        }
        self.drop_channel();
    }

    fn done(&mut self, request: u64, result: Result<(), String>) {
        self.say(&FromEngine::Done {
            request,
            error: result.err(),
        });
    }

    fn hear_daemon(&mut self) {
        while let Some(channel) = self.link.channel.as_mut() {
            match channel.receive::<ToEngine>() {
                Ok(Some((message, descriptors))) => self.hear(message, descriptors),
                Ok(None) => return,
                Err(_) => self.drop_channel(),
            }
        }
    }

    fn welcome(&mut self) {
        let clone = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned();
        let mut descriptors = Vec::new();
        if let Ok(fd) = clone(self.region.memory().fd()) {
            descriptors.push(fd);
        }
        if let Some(Ok(fd)) = self.pool.grant_table.as_ref().map(|fd| clone(fd.as_fd())) {
            descriptors.push(fd);
        }
        let welcome = FromEngine::Welcome {
            version: forebay_xlate::boundary::message::BOUNDARY_VERSION,
            engine_pid: std::process::id(),
            generation: self.generation,
            pool: self.pool.id,
            program: forebay_xlate::boundary::version().to_owned(),
        };
        self.say_with(&welcome, descriptors);
        if let Ok(fd) = clone(self.memory.fd()) {
            self.say_with(&FromEngine::Held(Held::Memory), vec![fd]);
        }
        let sockets: Vec<(u64, Arc<OwnedFd>)> = self
            .sockets
            .iter()
            .map(|(n, fd)| (*n, fd.clone()))
            .collect();
        for (socket, fd) in sockets {
            self.say_shared(&FromEngine::Held(Held::Socket(socket)), vec![fd]);
        }
        self.say_vms();
        let mut held = Vec::new();
        for known in self.devices.known.values() {
            held.push(Held::Device((*known.served.config).clone(), known.fenced));
        }
        held.extend(
            self.volumes
                .0
                .values()
                .map(|v| Held::Volume(v.present_config())),
        );
        held.extend(
            self.lanes
                .exports
                .values()
                .map(|e| Held::Export((*e.config).clone())),
        );
        held.extend(self.protocol.held());
        for held in held {
            self.say(&FromEngine::Held(held));
        }
        let listeners: Vec<(String, OwnedFd)> = self
            .listener
            .listeners()
            .filter_map(|(address, fd)| Some((address.to_string(), clone(fd).ok()?)))
            .collect();
        for (address, fd) in listeners {
            self.say_with(&FromEngine::Held(Held::Listener(address)), vec![fd]);
        }
        self.say(&FromEngine::HeldEnd);
        self.devices.images.measure_all();
        kill_point!("over.greeted");
        self.ask_reserves_again();
        self.protocol.ask_again(&mut self.effects);
        self.carry_out();
    }

    fn take_upcalls(&mut self) {
        for reactor in 0..self.mailboxes.len() {
            while let Some(upcall) = self.mailboxes[reactor].next() {
                match from_reactor(upcall) {
                    Ok(upcall) => {
                        self.protocol
                            .upcall(reactor, upcall, &self.volumes, &mut self.effects);
                    }
                    Err(other) => self.take_upcall(other),
                }
            }
        }
        self.protocol.end_turn(&mut self.effects);
        self.carry_out();
    }

    /// Posts go out at the turn's end.
    fn carry_out(&mut self) {
        let mut effects = std::mem::take(&mut self.effects);
        for effect in effects.drain(..) {
            match effect {
                Effect::Say(message) => self.say(&message),
                Effect::Post(who, post) => {
                    for reactor in who.iter() {
                        if let Some(mailbox) = self.mailboxes.get_mut(reactor) {
                            mailbox.queue(Post::Space(post));
                        }
                    }
                }
            }
        }
        // Keep the allocation.
        self.effects = effects;
    }

    fn take_upcall(&mut self, upcall: Upcall) {
        match upcall {
            Upcall::LaneGone { lane } => {
                let slot = lane.0 as usize;
                self.region.lanes()[slot].export.store(0, Relaxed);
                self.lanes.used[slot] = false;
            }
            Upcall::ExportSettled {
                request,
                at_devices,
            } => self.say(&FromEngine::ExportSettled {
                request,
                at_devices,
            }),
            Upcall::SocketGone(socket) => self.socket_gone(socket),
            Upcall::Deposits(socket, deposits) => self.vm_deposits(socket, deposits),
            Upcall::Withdrawn(socket, numbers) => self.vm_withdrawn(socket, numbers),
            Upcall::VmDetached(socket, export, why) => self.vm_detached(socket, export, why),
            Upcall::VmRefused(export, why) => self.vm_refused(export, why, 1),
            Upcall::Reserve(ask) => self.ask_reserve(ask),
            Upcall::ReserveGone(volume, token) => self.reserve_gone(volume, token),
            Upcall::Stopped => self.end.stopped += 1,
            _ => {}
        }
    }

    fn post_all(&mut self, mut post: impl FnMut() -> Post) {
        for mailbox in &mut self.mailboxes {
            mailbox.post(post());
        }
    }
}
