//! The control thread: the engine's side of the boundary.
//!
//! **Design.** One thread that sleeps in epoll: the daemon's socket, the door's sockets, the
//! reactors' bell. It alone writes translation tables and keeps what is unanswered (faults, commits,
//! releases, revokes, jobs), so that a new daemon can be told all of it again. Without a daemon
//! everything granted goes on. **Not here:** commands of tenants ([`crate::core`]); the daemon's
//! messages one by one ([`messages`]); opening and fencing devices ([`devices`]).

mod devices;
mod messages;

use crate::associations::Associations;
use crate::config::EngineConfig;
use crate::core::{ServedDevice, monotonic_ns};
use crate::door::Door;
use crate::exports::Exports;
use crate::lane::LaneIndex;
use crate::mailbox::{Post, ToReactor, Upcall, quiet_bell};
use crate::volume::Volume;
use forebay_xlate::boundary::message::{
    DeviceConfig, ExportConfig, ExportId, FaultAsk, FromEngine, Held, Job, MAX_BATCH, ToEngine,
};
use forebay_xlate::boundary::region::{MAX_LANES, Region};
use forebay_xlate::boundary::socket::{self, Channel};
use forebay_xlate::drain::{Acks, MAX_DRAINS};
use forebay_xlate::fault::FaultTable;
use forebay_xlate::{DeviceIndex, ExtentRange, Rights, VolumeId};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};

const KEY_LISTENER: u64 = 0xC0 << 56;
const KEY_CHANNEL: u64 = 0xC1 << 56;
const KEY_BELL: u64 = 0xC2 << 56;
/// How often the door's time limits are looked at, and full mailboxes are tried again, in ms.
const TICK_MS: i64 = 200;
const IDLE_TICK_MS: i64 = 5_000;

/// A device that the daemon configured.
struct KnownDevice {
    config: Arc<DeviceConfig>,
    served: Option<ServedDevice>,
}

/// An export and its lane.
struct KnownExport {
    config: Arc<ExportConfig>,
    reactor: usize,
    lane: LaneIndex,
}

/// A tenant's deallocation that the daemon has not carried out.
struct OpenRelease {
    reactor: usize,
    io: u32,
    generation: u32,
    volume: VolumeId,
    range: ExtentRange,
    /// The daemon has begun to carry it out: its revoke has come in the present conversation.
    begun: bool,
}

struct PendingRevoke {
    revoke: u64,
    volume: VolumeId,
    range: ExtentRange,
    keep: Option<Rights>,
}

/// See the module's text.
pub struct Control {
    generation: u64,
    region: Arc<Region>,
    epoll: Arc<OwnedFd>,
    listener: OwnedFd,
    channel: Option<Channel>,
    channel_wants_write: bool,
    /// Whether `Hello` came on this channel.
    greeted: bool,
    pool: [u8; 16],
    /// The grant table's descriptor, kept for the next daemon.
    grant_table: Option<OwnedFd>,
    mailboxes: Vec<ToReactor>,
    bell: Arc<OwnedFd>,
    door: Door,
    exports: Exports,
    devices: BTreeMap<DeviceIndex, KnownDevice>,
    device_news: mpsc::Receiver<devices::News>,
    device_sender: mpsc::Sender<devices::News>,
    volumes: BTreeMap<VolumeId, Arc<Volume>>,
    known_exports: BTreeMap<ExportId, KnownExport>,
    lanes_used: Vec<bool>,
    /// Lanes on their way out, and the request that waits for that.
    lanes_leaving: BTreeMap<u32, Option<u64>>,
    faults: FaultTable,
    commits: BTreeMap<VolumeId, u64>,
    releases: BTreeMap<u64, OpenRelease>,
    next_release: u64,
    /// Faults to ask at the turn's end.
    asks: Vec<FaultAsk>,
    acks: Acks,
    /// Reactors that have not answered a [`Job::Settle`].
    settles: Acks,
    /// Revokes that wait until fewer are being drained.
    revokes_held: VecDeque<PendingRevoke>,
    jobs: BTreeMap<u64, Job>,
    stopping: bool,
    stopped: usize,
    orphan_at_ns: u64,
}

impl Control {
    /// Listens for the daemon.
    pub fn new(
        config: &EngineConfig,
        region: Arc<Region>,
        mailboxes: Vec<ToReactor>,
        bell: Arc<OwnedFd>,
        exports: Exports,
    ) -> io::Result<Self> {
        let set = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let listener = socket::listen(&config.socket)?;
        let watch = |fd: std::os::fd::BorrowedFd<'_>, key| {
            epoll::add(
                &*set,
                fd,
                epoll::EventData::new_u64(key),
                epoll::EventFlags::IN,
            )
        };
        watch(listener.as_fd(), KEY_LISTENER)?;
        watch(bell.as_fd(), KEY_BELL)?;
        let (device_sender, device_news) = mpsc::channel();
        Ok(Self {
            generation: config.generation,
            region,
            listener,
            channel: None,
            channel_wants_write: false,
            greeted: false,
            pool: [0; 16],
            grant_table: None,
            mailboxes,
            bell,
            door: Door::new(Associations::default(), set.clone()),
            epoll: set,
            exports,
            devices: BTreeMap::new(),
            device_news,
            device_sender,
            volumes: BTreeMap::new(),
            known_exports: BTreeMap::new(),
            lanes_used: vec![false; MAX_LANES],
            lanes_leaving: BTreeMap::new(),
            faults: FaultTable::default(),
            commits: BTreeMap::new(),
            releases: BTreeMap::new(),
            next_release: 1,
            asks: Vec::new(),
            acks: Acks::default(),
            settles: Acks::default(),
            revokes_held: VecDeque::new(),
            jobs: BTreeMap::new(),
            stopping: false,
            stopped: 0,
            orphan_at_ns: monotonic_ns() + config.orphan_limit_s.saturating_mul(1_000_000_000),
        })
    }

    /// Runs until the daemon says stop and every reactor has ended.
    pub fn run(mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
        while self.stopped < self.mailboxes.len() {
            events.clear();
            let soon = self.door.is_busy() || self.mailboxes.iter().any(ToReactor::is_behind);
            let wait_ms = if soon { TICK_MS } else { IDLE_TICK_MS };
            let limit = rustix::event::Timespec {
                tv_sec: wait_ms / 1000,
                tv_nsec: wait_ms % 1000 * 1_000_000,
            };
            let _ = epoll::wait(&*self.epoll, spare_capacity(&mut events), Some(&limit));
            for event in &events {
                match event.data.u64() {
                    KEY_LISTENER => self.accept_daemon(),
                    KEY_CHANNEL => self.hear_daemon(),
                    KEY_BELL => quiet_bell(&*self.bell),
                    key => {
                        let mailboxes = &mut self.mailboxes;
                        self.door
                            .ready(key, &self.exports, &mut |reactor, connection| {
                                if let Some(mailbox) = mailboxes.get_mut(reactor) {
                                    mailbox.post(Post::Connection(connection));
                                }
                            });
                    }
                }
            }
            self.take_device_news();
            self.take_upcalls();
            for mailbox in &mut self.mailboxes {
                mailbox.flush();
            }
            let now = monotonic_ns();
            self.door.tick(now);
            self.settle_channel();
            if now > self.orphan_at_ns && self.pool == [0; 16] && !self.stopping {
                self.stop();
            }
        }
    }

    fn stop(&mut self) {
        if !std::mem::replace(&mut self.stopping, true) {
            self.door.close();
            for mailbox in &mut self.mailboxes {
                mailbox.post(Post::Stop);
            }
        }
    }

    fn accept_daemon(&mut self) {
        while let Ok(Some(fd)) = socket::accept(self.listener.as_fd()) {
            // The daemon's lock sees to it that there is one; the newest is the living one.
            self.drop_channel();
            let Ok(channel) = Channel::new(fd) else {
                continue;
            };
            let data = epoll::EventData::new_u64(KEY_CHANNEL);
            if epoll::add(&*self.epoll, &channel, data, epoll::EventFlags::IN).is_ok() {
                self.channel = Some(channel);
            }
        }
    }

    fn drop_channel(&mut self) {
        if let Some(old) = self.channel.take() {
            let _ = epoll::delete(&*self.epoll, &old);
        }
        self.greeted = false;
        self.channel_wants_write = false;
        // Whatever that daemon went on to do, the words are cleared: a tenant's later write faults,
        // and is answered by an owner that knows how far this came. So it may be given up again.
        for release in self.releases.values_mut() {
            release.begun = false;
        }
    }

    /// Sends to the daemon if one has greeted; what it must know is repeated to the next one.
    fn say(&mut self, message: &FromEngine) {
        self.say_with(message, Vec::new());
    }

    fn say_with(&mut self, message: &FromEngine, descriptors: Vec<OwnedFd>) {
        if !self.greeted {
            return;
        }
        let Some(channel) = self.channel.as_mut() else {
            return;
        };
        if channel.send(message, descriptors).is_err() {
            self.drop_channel();
        }
    }

    fn done(&mut self, request: u64, result: Result<(), String>) {
        self.say(&FromEngine::Done {
            request,
            error: result.err(),
        });
    }

    fn settle_channel(&mut self) {
        let Some(channel) = self.channel.as_mut() else {
            return;
        };
        if channel.flush().is_err() {
            self.drop_channel();
            return;
        }
        let wants = channel.wants_to_write();
        if wants != self.channel_wants_write {
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, wants);
            let _ = epoll::modify(
                &*self.epoll,
                &*channel,
                epoll::EventData::new_u64(KEY_CHANNEL),
                flags,
            );
            self.channel_wants_write = wants;
        }
    }

    fn hear_daemon(&mut self) {
        while let Some(channel) = self.channel.as_mut() {
            match channel.receive::<ToEngine>() {
                Ok(Some((message, descriptors))) => self.hear(message, descriptors),
                Ok(None) => return,
                Err(_) => self.drop_channel(),
            }
        }
    }

    /// A daemon's first message: tells it everything.
    fn welcome(&mut self) {
        let clone = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned();
        let mut descriptors = Vec::new();
        if let Ok(fd) = clone(self.region.memory().fd()) {
            descriptors.push(fd);
        }
        if let Some(Ok(fd)) = self.grant_table.as_ref().map(|fd| clone(fd.as_fd())) {
            descriptors.push(fd);
        }
        let welcome = FromEngine::Welcome {
            version: forebay_xlate::boundary::message::BOUNDARY_VERSION,
            engine_pid: std::process::id(),
            generation: self.generation,
            pool: self.pool,
        };
        self.say_with(&welcome, descriptors);
        let mut held = Vec::new();
        for known in self.devices.values() {
            held.push(Held::Device(
                (*known.config).clone(),
                known.served.is_some(),
            ));
        }
        held.extend(
            self.volumes
                .values()
                .map(|v| Held::Volume(v.config.clone())),
        );
        held.extend(
            self.known_exports
                .values()
                .map(|e| Held::Export((*e.config).clone())),
        );
        let revokes = self
            .acks
            .unfinished()
            .chain(self.revokes_held.iter().map(|r| r.revoke));
        held.extend(revokes.map(Held::Revoke));
        held.extend(self.jobs.iter().map(|(job, work)| Held::Job(*job, *work)));
        for held in held {
            self.say(&FromEngine::Held(held));
        }
        let listeners: Vec<(String, OwnedFd)> = self
            .door
            .listeners()
            .filter_map(|(address, fd)| Some((address.to_string(), clone(fd).ok()?)))
            .collect();
        for (address, fd) in listeners {
            self.say_with(&FromEngine::Held(Held::Listener(address)), vec![fd]);
        }
        self.say(&FromEngine::HeldEnd);
        let ask = |(volume, extent, write)| FaultAsk {
            volume,
            extent,
            write,
        };
        let faults: Vec<_> = self.faults.outstanding().map(ask).collect();
        for faults in faults.chunks(MAX_BATCH) {
            let faults = faults.to_vec();
            self.say(&FromEngine::Faults { faults });
        }
        let commits: Vec<_> = self.commits.iter().map(|(v, s)| (*v, *s)).collect();
        for (volume, sequence) in commits {
            self.say(&FromEngine::CommitWanted { volume, sequence });
        }
        let releases: Vec<_> = self
            .releases
            .iter()
            .map(|(n, r)| (*n, r.volume, r.range))
            .collect();
        for (release, volume, range) in releases {
            self.say(&FromEngine::Release {
                release,
                volume,
                range,
            });
        }
    }

    fn take_upcalls(&mut self) {
        for reactor in 0..self.mailboxes.len() {
            while let Some(upcall) = self.mailboxes[reactor].next() {
                self.take_upcall(reactor, upcall);
            }
        }
        let asks = std::mem::take(&mut self.asks);
        for faults in asks.chunks(MAX_BATCH) {
            let faults = faults.to_vec();
            self.say(&FromEngine::Faults { faults });
        }
    }

    fn take_upcall(&mut self, reactor: usize, upcall: Upcall) {
        match upcall {
            Upcall::Fault {
                volume,
                extent,
                write,
            } => {
                let Some(known) = self.volumes.get(&volume) else {
                    return;
                };
                let rights = known.table.lookup(extent).rights();
                let answered = if write {
                    rights == Some(Rights::ReadWrite)
                } else {
                    rights.is_some()
                };
                if answered {
                    // The grant came while the question was on its way.
                    self.mailboxes[reactor]
                        .post(Post::Granted(volume, ExtentRange::new(extent, 1)));
                } else if self.faults.want(volume, extent, write) {
                    self.asks.push(FaultAsk {
                        volume,
                        extent,
                        write,
                    });
                }
            }
            Upcall::CommitWanted { volume, sequence } => {
                if self
                    .volumes
                    .get(&volume)
                    .is_some_and(|v| v.is_committed(sequence))
                {
                    self.mailboxes[reactor].post(Post::Committed(volume));
                    return;
                }
                let wanted = self.commits.entry(volume).or_default();
                *wanted = sequence.max(*wanted);
                self.say(&FromEngine::CommitWanted { volume, sequence });
            }
            Upcall::Release {
                io,
                generation,
                volume,
                range,
            } => {
                let release = self.next_release;
                self.next_release += 1;
                self.releases.insert(
                    release,
                    OpenRelease {
                        reactor,
                        io,
                        generation,
                        volume,
                        range,
                        begun: false,
                    },
                );
                self.say(&FromEngine::Release {
                    release,
                    volume,
                    range,
                });
            }
            Upcall::AbandonRelease { io, generation } => {
                let ours = |r: &OpenRelease| {
                    r.reactor == reactor && r.io == io && r.generation == generation
                };
                let open = self.releases.iter().find(|(_, r)| ours(r));
                if let Some((&number, release)) = open
                    && !release.begun
                {
                    self.releases.remove(&number);
                    self.mailboxes[reactor].post(Post::ReleaseAbandoned(io, generation));
                }
            }
            Upcall::Drained { revoke } => {
                if self.acks.answered(revoke) {
                    self.say(&FromEngine::RevokeDone { revoke });
                    if let Some(held) = self.revokes_held.pop_front() {
                        self.post_revoke(held);
                    }
                }
            }
            Upcall::Settled { job } => {
                if self.settles.answered(job) {
                    self.jobs.remove(&job);
                    self.say(&FromEngine::JobDone { job, errno: None });
                }
            }
            Upcall::JobDone { job, error } => {
                self.jobs.remove(&job);
                self.say(&FromEngine::JobDone {
                    job,
                    errno: error.map(|e| e.raw_os_error()),
                });
            }
            Upcall::LaneGone { lane } => {
                let slot = lane.0 as usize;
                self.region.lanes()[slot]
                    .export
                    .store(0, std::sync::atomic::Ordering::Relaxed);
                self.lanes_used[slot] = false;
                if let Some(Some(request)) = self.lanes_leaving.remove(&lane.0) {
                    self.done(request, Ok(()));
                }
            }
            Upcall::Stopped => self.stopped += 1,
        }
    }

    fn post_all(&mut self, mut post: impl FnMut() -> Post) {
        for mailbox in &mut self.mailboxes {
            mailbox.post(post());
        }
    }

    fn revoke(&mut self, pending: PendingRevoke) {
        if self.acks.len() >= MAX_DRAINS {
            self.revokes_held.push_back(pending);
        } else {
            self.post_revoke(pending);
        }
    }

    /// The owner gives a revoke up: what it waited with is free again.
    fn abandon(&mut self, revoke: u64) {
        self.revokes_held.retain(|held| held.revoke != revoke);
        if self.acks.forget(revoke) {
            self.post_all(|| Post::Abandon(revoke));
            if let Some(held) = self.revokes_held.pop_front() {
                self.post_revoke(held);
            }
        }
    }

    fn post_revoke(&mut self, pending: PendingRevoke) {
        let PendingRevoke {
            revoke,
            volume,
            range,
            keep,
        } = pending;
        if let Some(known) = self.volumes.get(&volume) {
            known.table.clear(range, keep);
        }
        self.acks.posted(revoke, self.mailboxes.len() as u32);
        self.post_all(|| Post::Revoke {
            revoke,
            volume,
            range,
            keep,
        });
    }
}
