//! A vhost-user frontend with a virtio-blk driver and one memory region.
//!
//! A queue's events survive [`Vhost::reconnect`]. With the in-flight region, a restarted backend
//! continues its commands; otherwise they are submitted again. Event index and indirect descriptors
//! are optional; packed ring and number of queues are not.

mod message;
mod queue;
mod ring;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::event::{EventFd, is_open};
use super::memory::{Allotment, MappedMemory};
use super::socket::Socket;
use super::{Disk, Error, Geometry, Options, Queue, Ring};
use message::{VhostFrontend, longs, protocol, request, u16_at, u32_at, u64_at, words};
pub use queue::VhostQueue;

/// Virtio 5.2.3 and 6.
mod feature {
    pub(super) const RO: u64 = 1 << 5;
    pub(super) const SEG_MAX: u64 = 1 << 2;
    pub(super) const BLK_SIZE: u64 = 1 << 6;
    pub(super) const FLUSH: u64 = 1 << 9;
    pub(super) const CONFIG_WCE: u64 = 1 << 11;
    pub(super) const MQ: u64 = 1 << 12;
    pub(super) const DISCARD: u64 = 1 << 13;
    pub(super) const WRITE_ZEROES: u64 = 1 << 14;
    pub(super) const INDIRECT_DESC: u64 = 1 << 28;
    pub(super) const EVENT_IDX: u64 = 1 << 29;
    pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(super) const VERSION_1: u64 = 1 << 32;
    pub(super) const RING_PACKED: u64 = 1 << 34;
}

/// Features that are accepted if offered.
const WELCOME: u64 = feature::RO
    | feature::SEG_MAX
    | feature::BLK_SIZE
    | feature::FLUSH
    | feature::CONFIG_WCE
    | feature::MQ
    | feature::DISCARD
    | feature::WRITE_ZEROES
    | feature::PROTOCOL_FEATURES
    | feature::VERSION_1;
const WELCOME_PROTOCOL: u64 = protocol::MQ
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::STATUS;
/// virtio_blk_config up to write_zeroes_may_unmap.
const CONFIG_BYTES: usize = 60;
/// ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK.
const STATUS_RUNNING: u64 = 0x0f;
const REPLY_FLAG: u32 = 1 << 2;
const NEED_REPLY_FLAG: u32 = 1 << 3;

/// A backend records its commands in flight here.
#[derive(Debug)]
struct Inflight {
    fd: OwnedFd,
    payload: Vec<u8>,
}

/// A vhost-user-blk disk.
#[derive(Debug)]
pub struct Vhost {
    path: PathBuf,
    options: Options,
    frontend: VhostFrontend,
    features: u64,
    protocol: u64,
    memory: Arc<MappedMemory>,
    events: Vec<(Arc<EventFd>, Arc<EventFd>)>,
    queues: Vec<VhostQueue>,
    inflight: Option<Inflight>,
    /// Our end of the backend's request channel.
    backend: Option<Socket>,
    geometry: Geometry,
}

impl Vhost {
    /// Connects, negotiates, and starts all queues.
    pub fn connect(path: &Path, options: &Options) -> Result<Self, Error> {
        let frontend = VhostFrontend::connect(path, options.limit)?;
        let offered = frontend.ask_u64(request::GET_FEATURES)?;
        let options = &Options {
            indirect: options.indirect && offered & feature::INDIRECT_DESC != 0,
            event_idx: options.event_idx && offered & feature::EVENT_IDX != 0,
            ..options.clone()
        };
        let mut layout = Allotment::default();
        let plans: Vec<_> = (0..options.queues)
            .map(|_| queue::RingPlan::new(options, &mut layout))
            .collect();
        let memory = MappedMemory::new(layout.bytes(), options.huge_pages)
            .map_err(Error::system("create the VM's memory"))?;
        let memory = Arc::new(memory);
        let mut events = Vec::new();
        for _ in 0..options.queues {
            events.push((Arc::new(EventFd::new()?), Arc::new(EventFd::new()?)));
        }
        let queues = plans.into_iter().zip(&events);
        let queues = queues.map(|(plan, events)| VhostQueue::new(&memory, plan, options, events));
        let mut this = Self {
            queues: queues.collect(),
            path: path.to_owned(),
            options: options.clone(),
            frontend,
            features: 0,
            protocol: 0,
            memory,
            events,
            inflight: None,
            backend: None,
            geometry: Geometry {
                size_bytes: 0,
                block_bytes: 512,
                max_transfer_bytes: None,
                max_queues: 1,
                can_flush: false,
                can_discard: false,
                can_write_zeroes: false,
                read_only: false,
            },
        };
        this.negotiate()?;
        let queues = std::mem::take(&mut this.queues);
        this.start(&queues)?;
        this.queues = queues;
        Ok(this)
    }

    /// Its queues with their concrete type; each can be taken once.
    pub fn take_vhost_queues(&mut self) -> Vec<VhostQueue> {
        std::mem::take(&mut self.queues)
    }

    /// Connects again after the backend has died; commands in flight continue. `queues` are all
    /// queues, polled until empty. It can be tried again.
    pub fn reconnect(&mut self, queues: &mut [VhostQueue]) -> Result<(), Error> {
        self.frontend = VhostFrontend::connect(&self.path, self.options.limit)?;
        self.negotiate()?;
        if self.inflight.is_none() {
            for queue in &mut *queues {
                queue.submit_again();
            }
        }
        self.start(queues)?;
        for (kick, _) in &self.events {
            kick.raise();
        }
        Ok(())
    }

    /// Whether the backend's record of commands survives its death.
    #[must_use]
    pub fn has_inflight_region(&self) -> bool {
        self.inflight.is_some()
    }

    fn negotiate(&mut self) -> Result<(), Error> {
        let offered = self.frontend.ask_u64(request::GET_FEATURES)?;
        let mut demanded = feature::VERSION_1 | feature::PROTOCOL_FEATURES;
        for (is_wanted, bit) in [
            (self.options.ring == Ring::Packed, feature::RING_PACKED),
            (self.options.indirect, feature::INDIRECT_DESC),
            (self.options.event_idx, feature::EVENT_IDX),
            (self.options.queues > 1, feature::MQ),
        ] {
            if is_wanted {
                demanded |= bit;
            }
        }
        if offered & demanded != demanded {
            let missing = demanded & !offered;
            let what = format!(
                "{}: the backend lacks features {missing:#x}",
                self.path.display()
            );
            return Err(Error::Unusable(what));
        }
        self.features = offered & WELCOME | demanded;
        let offered = self.frontend.ask_u64(request::GET_PROTOCOL_FEATURES)?;
        self.protocol = offered & WELCOME_PROTOCOL;
        if self.protocol & protocol::CONFIG == 0 {
            let what = "a vhost-user-blk backend must have the protocol feature CONFIG";
            return Err(Error::Unusable(what.into()));
        }
        let payload = longs(&[self.protocol]);
        self.frontend
            .tell(request::SET_PROTOCOL_FEATURES, &payload, &[])?;
        self.frontend.acknowledged = self.protocol & protocol::REPLY_ACK != 0;
        self.frontend.tell(request::SET_OWNER, &[], &[])?;
        if self.protocol & protocol::MQ != 0 {
            let queues = self.frontend.ask_u64(request::GET_QUEUE_NUM)?;
            self.geometry.max_queues = u16::try_from(queues).unwrap_or(u16::MAX);
        }
        if self.protocol & protocol::BACKEND_REQ != 0 {
            let (ours, theirs) =
                UnixStream::pair().map_err(Error::system("create a pair of sockets"))?;
            self.frontend
                .tell(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])?;
            self.backend = Some(Socket::of(ours, &self.path, self.options.limit)?);
        }
        self.read_config()?;
        if self.geometry.max_queues < self.options.queues {
            let what = format!(
                "the backend has {} queues, not {}",
                self.geometry.max_queues, self.options.queues
            );
            return Err(Error::Unusable(what));
        }
        let payload = longs(&[self.features]);
        self.frontend.tell(request::SET_FEATURES, &payload, &[])
    }

    fn read_config(&mut self) -> Result<(), Error> {
        let mut payload = words(&[0, CONFIG_BYTES as u32, 0]);
        payload.resize(12 + CONFIG_BYTES, 0);
        let mut none = Vec::new();
        let answer = self
            .frontend
            .ask(request::GET_CONFIG, &payload, &mut none)?;
        let config = answer.get(12..).unwrap_or_default();
        let has = |bit| self.features & bit != 0;
        let geometry = &mut self.geometry;
        geometry.size_bytes = u64_at(config, 0)?.saturating_mul(512);
        if has(feature::BLK_SIZE) {
            geometry.block_bytes = u32_at(config, 20)?.max(512);
        }
        if has(feature::MQ) {
            geometry.max_queues = geometry.max_queues.min(u16_at(config, 34)?);
        }
        geometry.can_flush = has(feature::FLUSH);
        geometry.can_discard = has(feature::DISCARD);
        geometry.can_write_zeroes = has(feature::WRITE_ZEROES);
        geometry.read_only = has(feature::RO);
        Ok(())
    }

    fn start(&mut self, queues: &[VhostQueue]) -> Result<(), Error> {
        let frontend = &self.frontend;
        let entries = queues.first().map_or(0, |queue| queue.ring().entries());
        if self.protocol & protocol::INFLIGHT_SHMFD != 0 {
            if self.inflight.is_none() {
                let mut payload = longs(&[0, 0]);
                payload.extend(self.options.queues.to_le_bytes());
                payload.extend(entries.to_le_bytes());
                // Padding of QEMU's structure.
                payload.extend([0; 4]);
                let mut fds = Vec::new();
                let payload = frontend.ask(request::GET_INFLIGHT_FD, &payload, &mut fds)?;
                if u64_at(&payload, 0)? > 0 {
                    let fd = fds.pop().ok_or_else(|| {
                        Error::Protocol("an inflight region without a descriptor".into())
                    })?;
                    self.inflight = Some(Inflight { fd, payload });
                }
            }
            if let Some(inflight) = &self.inflight {
                frontend.tell(
                    request::SET_INFLIGHT_FD,
                    &inflight.payload,
                    &[inflight.fd.as_fd()],
                )?;
            }
        }
        let memory = &*self.memory;
        let mut table = words(&[1, 0]);
        table.extend(longs(&[
            memory.guest(0),
            memory.len() as u64,
            memory.user(0),
            0,
        ]));
        frontend.tell(request::SET_MEM_TABLE, &table, &[memory.fd()])?;
        for (index, (queue, (kick, call))) in (0u16..).zip(queues.iter().zip(&self.events)) {
            let ring = queue.ring();
            frontend.notify_ring(request::SET_VRING_NUM, index, ring.entries().into())?;
            frontend.notify_ring(request::SET_VRING_BASE, index, ring.base(memory))?;
            let [table, driver, device] = ring.places().map(|place| memory.user(place));
            let mut address = words(&[index.into(), 0]);
            address.extend(longs(&[table, device, driver, 0]));
            frontend.tell(request::SET_VRING_ADDR, &address, &[])?;
            let named = longs(&[index.into()]);
            frontend.tell(request::SET_VRING_CALL, &named, &[call.fd()])?;
            frontend.tell(request::SET_VRING_KICK, &named, &[kick.fd()])?;
        }
        for index in 0..queues.len() as u16 {
            frontend.notify_ring(request::SET_VRING_ENABLE, index, 1)?;
        }
        if self.protocol & protocol::STATUS != 0 {
            frontend.tell(request::SET_STATUS, &longs(&[STATUS_RUNNING]), &[])?;
        }
        Ok(())
    }

    /// Waits for the backend's configuration change message. False: the limit came first.
    pub fn wait_config_change(&mut self, limit: Duration) -> Result<bool, Error> {
        let Some(socket) = &self.backend else {
            return Err(Error::Unusable(
                "the backend does not report changes".into(),
            ));
        };
        let timeout = socket.stream().set_read_timeout(Some(limit));
        timeout.map_err(Error::system("set a socket's time limit"))?;
        match message::receive(socket, &mut Vec::new()) {
            Ok((message::BACKEND_CONFIG_CHANGE, flags, _)) => {
                if flags & NEED_REPLY_FLAG != 0 {
                    let mut reply = words(&[message::BACKEND_CONFIG_CHANGE, 1 | REPLY_FLAG, 8]);
                    reply.extend(longs(&[0]));
                    socket.send(&reply, &[])?;
                }
                Ok(true)
            }
            Ok((other, ..)) => Err(Error::Protocol(format!(
                "the backend sent request {other}, which was not negotiated"
            ))),
            Err(Error::TimedOut { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Disk for Vhost {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn take_queues(&mut self) -> Vec<Box<dyn Queue>> {
        let queues = self.take_vhost_queues().into_iter();
        queues
            .map(|queue| Box::new(queue) as Box<dyn Queue>)
            .collect()
    }

    fn is_open(&self) -> bool {
        is_open(self.frontend.socket.stream())
    }

    fn refresh(&mut self) -> Result<Geometry, Error> {
        self.read_config()?;
        Ok(self.geometry)
    }

    fn close(self: Box<Self>) -> Result<(), Error> {
        for index in 0..self.options.queues {
            let payload = words(&[index.into(), 0]);
            let mut none = Vec::new();
            self.frontend
                .ask(request::GET_VRING_BASE, &payload, &mut none)?;
        }
        Ok(())
    }
}
