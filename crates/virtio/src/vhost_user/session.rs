//! The state of a vhost-user session, in the backend.
//!
//! A ring is *started* from SET_VRING_KICK or VRING_KICK until GET_VRING_BASE or a reset. It is
//! served while started *and* enabled; without VHOST_USER_F_PROTOCOL_FEATURES, a started ring is
//! enabled. A started ring can't be changed. But some front-ends (Cloud Hypervisor, User Mode
//! Linux) only disable a departing driver's rings, and then describe the next one's. So such a
//! request first stops disabled rings ([`VhostSession::stops_before`]). A successor restores the
//! state from [`VhostSession::words`], and trusts none of them.

use super::message::{
    InflightArea, MAX_TABLE_REGIONS, MemoryRegion, RingFd, VhostRequest, request as kind,
};
use super::{MAX_MEM_SLOTS, MAX_QUEUES, protocol_feature};
use crate::feature;
use crate::ring::MAX_QUEUE_SIZE;

crate::named::named_errors! {
    /// Why a request is refused. Without an acknowledgement, the connection ends.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Refusal {
        /// Unknown, or its feature is missing.
        #[error("a request that is not supported, or that needs a feature that was not acknowledged")]
        Unsupported,
        /// Features that were not offered, or can't change now.
        #[error("features that were not offered, or that can't be changed now")]
        Features,
        /// No such queue.
        #[error("a queue that does not exist: num-queues= of a disk must not exceed the queues of its export")]
        Queue,
        /// Unsupported queue size.
        #[error("a queue of a size that is not supported")]
        QueueSize,
        /// The ring is in use.
        #[error("a ring that would move while it is in use")]
        InUse,
        /// An invalid value.
        #[error("a value that is invalid")]
        Value,
    }
}

/// A ring, as described by the front-end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vring {
    /// Number of descriptors.
    pub size: u16,
    /// Front-end address of the descriptors.
    pub descriptors: u64,
    /// Front-end address of the driver area.
    pub driver: u64,
    /// Front-end address of the device area.
    pub device: u64,
    /// Start position.
    pub base: u32,
    /// SET_VRING_ENABLE.
    pub enabled: bool,
    /// From the first kick or kick descriptor until GET_VRING_BASE.
    pub started: bool,
    /// To be polled: it has no kick descriptor.
    pub polled: bool,
    /// The driver polls: don't call it.
    pub uncalled: bool,
}

/// A device's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Feature bits, without [`feature::PROTOCOL_FEATURES`].
    pub features: u64,
    /// Queues, at most [`MAX_QUEUES`].
    pub queues: u16,
}

/// What to do after a request was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
// One at a time exists, on the stack.
#[allow(clippy::large_enum_variant)]
pub enum SessionEffect<'a> {
    /// Only acknowledge, if asked.
    None,
    /// Reply with one word.
    Reply(u64),
    /// Replace all memory; one descriptor per region.
    SetMemory {
        regions: [MemoryRegion; MAX_TABLE_REGIONS],
        count: usize,
    },
    AddMemory(MemoryRegion),
    RemoveMemory(MemoryRegion),
    /// Set or remove a ring's eventfd.
    RingFd {
        which: RingFd,
        index: u16,
        has_fd: bool,
    },
    /// A ring is enabled; serve it if [`VhostSession::is_served`].
    Ring(u16),
    /// A ring was kicked, and is started now.
    Kick(u16),
    /// Disable a ring: end its chains, then call [`VhostSession::rests`].
    Disable(u16),
    /// Stop a ring: end its chains, call [`VhostSession::stopped`], reply with its base.
    Stop(u16),
    GetConfig {
        offset: u32,
        size: u32,
    },
    SetConfig {
        offset: u32,
        bytes: &'a [u8],
    },
    /// Create an inflight region and reply with its place.
    GetInflight(InflightArea),
    /// Use this inflight region.
    SetInflight(InflightArea),
    /// The channel for backend requests.
    Backend,
    /// Reset the device: serve no ring.
    Reset,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostSession {
    offer: Offer,
    features: u64,
    protocol: u64,
    status: u8,
    writeback: bool,
    vrings: [Vring; MAX_QUEUES],
}

/// The base of an unused packed ring: both wrap counters are 1.
const FRESH_PACKED_BASE: u32 = 0x8000_8000;

/// Size of the state for a successor.
pub const SESSION_WORDS: usize = 4 + MAX_QUEUES * VRING_WORDS;
const VRING_WORDS: usize = 5;

impl VhostSession {
    /// A new session.
    #[must_use]
    pub fn new(offer: Offer) -> Self {
        Self {
            offer: Offer {
                queues: offer.queues.min(MAX_QUEUES as u16),
                ..offer
            },
            features: 0,
            protocol: 0,
            status: 0,
            writeback: true,
            vrings: [Vring::default(); MAX_QUEUES],
        }
    }

    /// Acknowledged feature bits.
    pub const fn features(&self) -> u64 {
        self.features
    }

    /// Whether the front-end acknowledged a protocol feature.
    pub const fn has_protocol(&self, bit: u64) -> bool {
        self.protocol & bit != 0
    }

    /// Whether the driver sees a volatile write cache (VIRTIO 5.2.6.2), made durable by FLUSH.
    /// Without FLUSH there is none: each write is durable.
    pub const fn writeback(&self) -> bool {
        let chooses = self.features & feature::BLK_CONFIG_WCE != 0;
        self.features & feature::BLK_FLUSH != 0 && (self.writeback || !chooses)
    }

    /// `writeback` in the configuration space. QEMU reads it before the driver acknowledges
    /// features. So it must not promise less than [`Self::writeback`] will.
    pub const fn config_writeback(&self) -> bool {
        let refused = feature::BLK_CONFIG_WCE | feature::BLK_FLUSH;
        self.writeback && self.features & refused != feature::BLK_CONFIG_WCE
    }

    /// Stores the driver's choice.
    pub fn set_writeback(&mut self, on: bool) {
        self.writeback = on;
    }

    /// All possible rings.
    pub fn vrings(&self) -> &[Vring] {
        &self.vrings[..usize::from(self.offer.queues)]
    }

    /// Whether to serve a ring.
    pub fn is_served(&self, index: u16) -> bool {
        (self.vrings().get(usize::from(index))).is_some_and(|v| v.started && v.enabled)
    }

    /// Whether a ring without a call descriptor is called by message.
    pub fn calls_in_band(&self, index: u16) -> bool {
        let both = protocol_feature::INBAND_NOTIFICATIONS | protocol_feature::BACKEND_REQ;
        self.protocol & both == both
            && (self.vrings().get(usize::from(index))).is_some_and(|v| v.started && !v.uncalled)
    }

    /// Records where a disabled ring continues.
    pub fn rests(&mut self, index: u16, base: u32) {
        if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
            vring.base = base;
        }
    }

    /// Records that a ring has stopped, and where it continues.
    pub fn stopped(&mut self, index: u16, base: u32) {
        self.rests(index, base);
        if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
            vring.started = false;
        }
    }

    /// Whether a request always has a reply.
    #[must_use]
    pub const fn replies(request: u32) -> bool {
        matches!(
            request,
            kind::GET_FEATURES
                | kind::GET_PROTOCOL_FEATURES
                | kind::GET_QUEUE_NUM
                | kind::GET_VRING_BASE
                | kind::GET_CONFIG
                | kind::GET_INFLIGHT_FD
                | kind::GET_MAX_MEM_SLOTS
                | kind::GET_STATUS
        )
    }

    /// Whether to acknowledge a request.
    #[must_use]
    pub const fn acknowledges(&self, request: u32, need_reply: bool) -> bool {
        need_reply && self.protocol & protocol_feature::REPLY_ACK != 0 && !Self::replies(request)
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring, Refusal> {
        let vrings = &mut self.vrings[..usize::from(self.offer.queues)];
        vrings.get_mut(index as usize).ok_or(Refusal::Queue)
    }

    fn idle_vring(&mut self, index: u32) -> Result<&mut Vring, Refusal> {
        let vring = self.vring(index)?;
        if vring.started {
            return Err(Refusal::InUse);
        }
        Ok(vring)
    }

    fn demand(&self, bit: u64) -> Result<(), Refusal> {
        if self.has_protocol(bit) {
            Ok(())
        } else {
            Err(Refusal::Unsupported)
        }
    }

    /// Bit mask of disabled rings that must stop before this request. Zero if it would also stop an
    /// enabled ring.
    #[must_use]
    pub fn stops_before(&self, request: &VhostRequest<'_>) -> u64 {
        let changes = |at: usize, v: &Vring| match *request {
            VhostRequest::SetVringNum { index, num } => {
                index as usize == at && u32::from(v.size) != num
            }
            VhostRequest::SetVringAddr {
                index,
                descriptors,
                device,
                driver,
                ..
            } => {
                index as usize == at
                    && (descriptors, device, driver) != (v.descriptors, v.device, v.driver)
            }
            VhostRequest::SetVringBase { index, .. } => index as usize == at,
            VhostRequest::SetFeatures(bits) => bits != self.features,
            VhostRequest::GetInflightFd(_) | VhostRequest::SetInflightFd(_) => true,
            _ => false,
        };
        let mut stops = 0;
        for (at, vring) in self.vrings().iter().enumerate() {
            if vring.started && changes(at, vring) {
                if vring.enabled || self.features & feature::PROTOCOL_FEATURES == 0 {
                    return 0;
                }
                stops |= 1 << at;
            }
        }
        stops
    }

    /// Takes a request; the rings of [`VhostSession::stops_before`] have stopped. A refusal changes
    /// nothing.
    pub fn handle<'a>(&mut self, request: &VhostRequest<'a>) -> Result<SessionEffect<'a>, Refusal> {
        let effect = match *request {
            VhostRequest::GetFeatures => {
                SessionEffect::Reply(self.offer.features | feature::PROTOCOL_FEATURES)
            }
            VhostRequest::SetFeatures(bits) => self.set_features(bits)?,
            VhostRequest::SetOwner | VhostRequest::ResetOwner => SessionEffect::None,
            VhostRequest::GetProtocolFeatures => SessionEffect::Reply(protocol_feature::ALL),
            VhostRequest::SetProtocolFeatures(bits) => {
                if bits & !protocol_feature::ALL != 0 {
                    return Err(Refusal::Features);
                }
                self.protocol = bits;
                SessionEffect::None
            }
            VhostRequest::GetQueueNum => SessionEffect::Reply(u64::from(self.offer.queues)),
            VhostRequest::SetMemTable { regions, count } => {
                SessionEffect::SetMemory { regions, count }
            }
            VhostRequest::GetMaxMemSlots => {
                self.demand(protocol_feature::CONFIGURE_MEM_SLOTS)?;
                SessionEffect::Reply(MAX_MEM_SLOTS)
            }
            VhostRequest::AddMemReg(region) => {
                self.demand(protocol_feature::CONFIGURE_MEM_SLOTS)?;
                SessionEffect::AddMemory(region)
            }
            VhostRequest::RemMemReg(region) => {
                self.demand(protocol_feature::CONFIGURE_MEM_SLOTS)?;
                SessionEffect::RemoveMemory(region)
            }
            VhostRequest::SetBackendReqFd => {
                self.demand(protocol_feature::BACKEND_REQ)?;
                SessionEffect::Backend
            }
            VhostRequest::GetConfig { offset, size } => {
                self.demand(protocol_feature::CONFIG)?;
                SessionEffect::GetConfig { offset, size }
            }
            VhostRequest::SetConfig { offset, bytes } => {
                self.demand(protocol_feature::CONFIG)?;
                SessionEffect::SetConfig { offset, bytes }
            }
            VhostRequest::GetInflightFd(area) => {
                self.inflight(&area)?;
                SessionEffect::GetInflight(area)
            }
            VhostRequest::SetInflightFd(area) => {
                self.inflight(&area)?;
                SessionEffect::SetInflight(area)
            }
            VhostRequest::ResetDevice => {
                self.demand(protocol_feature::RESET_DEVICE)?;
                self.reset();
                SessionEffect::Reset
            }
            VhostRequest::SetStatus(status) => {
                self.demand(protocol_feature::STATUS)?;
                self.status = status as u8;
                if self.status == 0 {
                    self.reset();
                    SessionEffect::Reset
                } else {
                    SessionEffect::None
                }
            }
            VhostRequest::GetStatus => {
                self.demand(protocol_feature::STATUS)?;
                SessionEffect::Reply(u64::from(self.status))
            }
            VhostRequest::Unknown(_) => return Err(Refusal::Unsupported),
            _ => self.handle_vring(request)?,
        };
        Ok(effect)
    }

    fn handle_vring<'a>(
        &mut self,
        request: &VhostRequest<'a>,
    ) -> Result<SessionEffect<'a>, Refusal> {
        match *request {
            VhostRequest::SetVringNum { index, num } => {
                let size = u16::try_from(num).unwrap_or(0);
                if size == 0 || size > MAX_QUEUE_SIZE {
                    return Err(Refusal::QueueSize);
                }
                if self.vring(index)?.size != size {
                    self.idle_vring(index)?.size = size;
                }
                Ok(SessionEffect::None)
            }
            VhostRequest::SetVringAddr {
                index,
                descriptors,
                device,
                driver,
                ..
            } => {
                let vring = self.vring(index)?;
                let changed = Vring {
                    descriptors,
                    device,
                    driver,
                    ..*vring
                };
                if *vring != changed {
                    *self.idle_vring(index)? = changed;
                }
                Ok(SessionEffect::None)
            }
            VhostRequest::SetVringBase { index, base } => {
                let base = self.base(base);
                self.idle_vring(index)?.base = base;
                Ok(SessionEffect::None)
            }
            VhostRequest::GetVringBase { index } => {
                self.vring(index)?;
                Ok(SessionEffect::Stop(index as u16))
            }
            VhostRequest::SetVringFd {
                which,
                index,
                has_fd,
            } => self.set_ring_fd(which, index, has_fd),
            VhostRequest::VringKick { index } => {
                self.demand(protocol_feature::INBAND_NOTIFICATIONS)?;
                let always = self.features & feature::PROTOCOL_FEATURES == 0;
                let vring = self.vring(index)?;
                vring.started = true;
                vring.enabled |= always;
                Ok(SessionEffect::Kick(index as u16))
            }
            VhostRequest::SetVringEnable { index, enable } => {
                if enable > 1 {
                    return Err(Refusal::Value);
                }
                self.vring(index)?.enabled = enable == 1;
                Ok(match enable {
                    1 => SessionEffect::Ring(index as u16),
                    _ => SessionEffect::Disable(index as u16),
                })
            }
            _ => Err(Refusal::Unsupported),
        }
    }

    fn set_ring_fd<'a>(
        &mut self,
        which: RingFd,
        index: u8,
        has_fd: bool,
    ) -> Result<SessionEffect<'a>, Refusal> {
        let always = self.features & feature::PROTOCOL_FEATURES == 0;
        let vring = self.vring(u32::from(index))?;
        match which {
            RingFd::Kick => {
                vring.started = true;
                vring.polled = !has_fd;
                vring.enabled |= always;
            }
            RingFd::Call => vring.uncalled = !has_fd,
            RingFd::Err => {}
        }
        Ok(SessionEffect::RingFd {
            which,
            index: u16::from(index),
            has_fd,
        })
    }

    /// User Mode Linux, which kicks in band, always sends base 0. For a packed ring that would mean
    /// an odd number of passes, but it means none.
    fn base(&self, base: u32) -> u32 {
        let packed = self.features & feature::RING_PACKED != 0;
        if base == 0 && packed && self.has_protocol(protocol_feature::INBAND_NOTIFICATIONS) {
            FRESH_PACKED_BASE
        } else {
            base
        }
    }

    fn set_features(&mut self, bits: u64) -> Result<SessionEffect<'static>, Refusal> {
        if bits & !(self.offer.features | feature::PROTOCOL_FEATURES) != 0 {
            return Err(Refusal::Features);
        }
        if bits != self.features && self.vrings().iter().any(|v| v.started) {
            return Err(Refusal::Features);
        }
        self.features = bits;
        Ok(SessionEffect::None)
    }

    fn inflight(&self, area: &InflightArea) -> Result<(), Refusal> {
        self.demand(protocol_feature::INFLIGHT_SHMFD)?;
        if area.num_queues == 0 || area.num_queues > self.offer.queues {
            return Err(Refusal::Queue);
        }
        if area.queue_size == 0 || area.queue_size > MAX_QUEUE_SIZE {
            return Err(Refusal::QueueSize);
        }
        if self.vrings().iter().any(|v| v.started) {
            return Err(Refusal::InUse);
        }
        Ok(())
    }

    /// Resets the device. Negotiated features stay. So does the driver's choice of a cache: a
    /// front-end may have cached it, and no driver may wrongly take writes for durable.
    pub fn reset(&mut self) {
        for vring in &mut self.vrings {
            *vring = Vring::default();
        }
        self.status = 0;
    }

    /// The state for a successor.
    #[must_use]
    pub fn words(&self) -> [u64; SESSION_WORDS] {
        let mut words = [0; SESSION_WORDS];
        words[0] = self.features;
        words[1] = self.protocol;
        words[2] = u64::from(self.status) | u64::from(self.writeback) << 8;
        for (vring, words) in self.vrings.iter().zip(words[4..].chunks_mut(VRING_WORDS)) {
            words[0] = u64::from(vring.size)
                | u64::from(vring.enabled) << 16
                | u64::from(vring.started) << 17
                | u64::from(vring.polled) << 18
                | u64::from(vring.uncalled) << 19;
            words[1] = vring.descriptors;
            words[2] = vring.driver;
            words[3] = vring.device;
            words[4] = u64::from(vring.base);
        }
        words
    }

    /// Restores a dead backend's state; `None` if a value is impossible.
    #[must_use]
    pub fn of_words(offer: Offer, words: &[u64; SESSION_WORDS]) -> Option<Self> {
        let mut session = Self::new(offer);
        let known = words[0] & !(offer.features | feature::PROTOCOL_FEATURES) == 0
            && words[1] & !protocol_feature::ALL == 0
            && words[2] < 1 << 9;
        if !known {
            return None;
        }
        session.features = words[0];
        session.protocol = words[1];
        session.status = words[2] as u8;
        session.writeback = words[2] & 1 << 8 != 0;
        for (vring, words) in (session.vrings.iter_mut()).zip(words[4..].chunks(VRING_WORDS)) {
            let size = words[0] as u16;
            if size > MAX_QUEUE_SIZE || words[0] >= 1 << 20 || words[4] > u64::from(u32::MAX) {
                return None;
            }
            *vring = Vring {
                size,
                enabled: words[0] & 1 << 16 != 0,
                started: words[0] & 1 << 17 != 0,
                polled: words[0] & 1 << 18 != 0,
                uncalled: words[0] & 1 << 19 != 0,
                descriptors: words[1],
                driver: words[2],
                device: words[3],
                base: words[4] as u32,
            };
        }
        Some(session)
    }
}
