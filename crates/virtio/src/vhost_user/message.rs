//! Encodes and decodes vhost-user messages.
//!
//! Only version, sizes and numbers of descriptors are checked here. Words are little-endian, as on
//! every supported host.

use super::MAX_CONFIG_BYTES;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 12;
/// The longest message.
pub const MAX_MESSAGE_BYTES: usize = HEADER_BYTES + 4096;
/// More than VHOST_MEMORY_BASELINE_NREGIONS (8): rust-vmm's front-ends send as many as fit.
pub const MAX_TABLE_REGIONS: usize = 32;
/// The most descriptors of a message.
pub const MAX_DESCRIPTORS: usize = MAX_TABLE_REGIONS;

const VERSION_MASK: u32 = 3;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Request numbers.
pub mod request {
    #![allow(missing_docs)]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const VRING_KICK: u32 = 35;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    /// From the backend: VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
    pub const BACKEND_CONFIG_CHANGE: u32 = 2;
    /// From the backend: VHOST_USER_BACKEND_VRING_CALL.
    pub const BACKEND_VRING_CALL: u32 = 4;
}

crate::named::named_errors! {
    /// Why a message is bad. The connection must end.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum MessageError {
        /// Its version isn't 1.
        #[error("a message of another protocol version")]
        Version,
        /// An unexpected reply.
        #[error("a reply without a request")]
        Reply,
        /// Too long.
        #[error("a message that is too long")]
        TooLong,
        /// A wrong length for its kind.
        #[error("a message whose length does not match its kind")]
        Size,
        /// A wrong number of descriptors for its kind.
        #[error("a message with more or fewer descriptors than its kind needs")]
        Descriptors,
        /// Too many memory regions.
        #[error("a table with too many memory regions")]
        Regions,
    }
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Its [`request`] number.
    pub request: u32,
    /// Whether it asks for an acknowledgement.
    pub need_reply: bool,
    /// Length of the payload.
    pub size: u32,
}

/// The extent of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// At least this many bytes are needed.
    Need(usize),
    /// The message has this length.
    Whole(usize),
}

/// Finds the end of the first message. After an error, nothing more can be parsed.
pub fn frame(peeked: &[u8]) -> Result<Frame, MessageError> {
    let Some(header) = header(peeked)? else {
        return Ok(Frame::Need(HEADER_BYTES));
    };
    let whole = HEADER_BYTES + header.size as usize;
    Ok(if peeked.len() < whole {
        Frame::Need(whole)
    } else {
        Frame::Whole(whole)
    })
}

/// Parses a header, if complete.
pub fn header(bytes: &[u8]) -> Result<Option<Header>, MessageError> {
    if bytes.len() < HEADER_BYTES {
        return Ok(None);
    }
    let mut words = Words(bytes);
    let (request, flags, size) = (words.u32(), words.u32(), words.u32());
    if flags & VERSION_MASK != VERSION {
        return Err(MessageError::Version);
    }
    if flags & REPLY != 0 {
        return Err(MessageError::Reply);
    }
    if size as usize > MAX_MESSAGE_BYTES - HEADER_BYTES {
        return Err(MessageError::TooLong);
    }
    Ok(Some(Header {
        request,
        need_reply: flags & NEED_REPLY != 0,
        size,
    }))
}

/// A region of guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Guest address.
    pub guest_address: u64,
    /// Length.
    pub size: u64,
    /// Front-end address.
    pub user_address: u64,
    /// Offset in its file.
    pub mmap_offset: u64,
}

/// A file descriptor of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingFd {
    /// For kicks by the driver.
    Kick,
    /// For calls by the device.
    Call,
    /// For reporting a broken ring.
    Err,
}

/// A decoded message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
// Only one exists at a time, on the stack.
#[allow(clippy::large_enum_variant)]
pub enum VhostRequest<'a> {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    /// With a descriptor for each region.
    SetMemTable {
        regions: [MemoryRegion; MAX_TABLE_REGIONS],
        count: usize,
    },
    SetVringNum {
        index: u32,
        num: u32,
    },
    SetVringAddr {
        index: u32,
        flags: u32,
        /// Like the others, a front-end address.
        descriptors: u64,
        device: u64,
        driver: u64,
    },
    SetVringBase {
        index: u32,
        base: u32,
    },
    GetVringBase {
        index: u32,
    },
    SetVringFd {
        which: RingFd,
        index: u8,
        /// False: the ring has no descriptor from now on.
        has_fd: bool,
    },
    /// A kick in band.
    VringKick {
        index: u32,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        index: u32,
        enable: u32,
    },
    /// With a descriptor.
    SetBackendReqFd,
    GetConfig {
        offset: u32,
        size: u32,
    },
    SetConfig {
        offset: u32,
        bytes: &'a [u8],
    },
    GetInflightFd(InflightArea),
    /// With a descriptor.
    SetInflightFd(InflightArea),
    ResetDevice,
    GetMaxMemSlots,
    /// With a descriptor.
    AddMemReg(MemoryRegion),
    RemMemReg(MemoryRegion),
    SetStatus(u64),
    GetStatus,
    Unknown(u32),
}

/// An inflight region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InflightArea {
    /// Length.
    pub mmap_size: u64,
    /// Offset in its file.
    pub mmap_offset: u64,
    /// Number of queues.
    pub num_queues: u16,
    /// Descriptors per queue.
    pub queue_size: u16,
}

/// Reads words; beyond the end it returns 0, so check lengths first.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((word, rest)) => {
                self.0 = rest;
                *word
            }
            None => [0; N],
        }
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    fn region(&mut self) -> MemoryRegion {
        MemoryRegion {
            guest_address: self.u64(),
            size: self.u64(),
            user_address: self.u64(),
            mmap_offset: self.u64(),
        }
    }

    fn inflight(&mut self) -> InflightArea {
        InflightArea {
            mmap_size: self.u64(),
            mmap_offset: self.u64(),
            num_queues: self.u16(),
            queue_size: self.u16(),
        }
    }
}

/// Decodes a message with this many descriptors.
pub fn decode(
    message: &[u8],
    descriptors: usize,
) -> Result<(Header, VhostRequest<'_>), MessageError> {
    let header = header(message)?.ok_or(MessageError::Size)?;
    let payload = &message[HEADER_BYTES..];
    if payload.len() != header.size as usize {
        return Err(MessageError::Size);
    }
    let request = body(header.request, payload, descriptors)?;
    Ok((header, request))
}

fn body(kind: u32, payload: &[u8], descriptors: usize) -> Result<VhostRequest<'_>, MessageError> {
    let exactly = |bytes: usize| {
        if payload.len() == bytes {
            Ok(Words(payload))
        } else {
            Err(MessageError::Size)
        }
    };
    let with = |fds: usize, request| {
        if descriptors == fds {
            Ok(request)
        } else {
            Err(MessageError::Descriptors)
        }
    };
    match kind {
        request::GET_FEATURES => exactly(0).and(with(0, VhostRequest::GetFeatures)),
        request::SET_FEATURES => with(0, VhostRequest::SetFeatures(exactly(8)?.u64())),
        request::SET_OWNER => exactly(0).and(with(0, VhostRequest::SetOwner)),
        request::RESET_OWNER => exactly(0).and(with(0, VhostRequest::ResetOwner)),
        request::SET_MEM_TABLE => mem_table(payload, descriptors),
        request::SET_VRING_NUM
        | request::SET_VRING_BASE
        | request::GET_VRING_BASE
        | request::SET_VRING_ENABLE
        | request::VRING_KICK => {
            let mut words = exactly(8)?;
            with(0, vring_state(kind, words.u32(), words.u32()))
        }
        request::SET_VRING_ADDR => {
            let mut words = exactly(40)?;
            let request = VhostRequest::SetVringAddr {
                index: words.u32(),
                flags: words.u32(),
                descriptors: words.u64(),
                device: words.u64(),
                driver: words.u64(),
            };
            with(0, request)
        }
        request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR => {
            let (request, fds) = vring_fd(kind, exactly(8)?.u64());
            with(fds, request)
        }
        request::GET_PROTOCOL_FEATURES => {
            exactly(0).and(with(0, VhostRequest::GetProtocolFeatures))
        }
        request::SET_PROTOCOL_FEATURES => {
            with(0, VhostRequest::SetProtocolFeatures(exactly(8)?.u64()))
        }
        request::GET_QUEUE_NUM => exactly(0).and(with(0, VhostRequest::GetQueueNum)),
        request::SET_BACKEND_REQ_FD => exactly(0).and(with(1, VhostRequest::SetBackendReqFd)),
        request::GET_CONFIG | request::SET_CONFIG => with(0, config(kind, payload)?),
        request::GET_INFLIGHT_FD | request::SET_INFLIGHT_FD => {
            // The structure has 20 bytes; most front-ends send it padded.
            let area = (exactly(20).or_else(|_| exactly(24)))?.inflight();
            match kind {
                request::GET_INFLIGHT_FD => with(0, VhostRequest::GetInflightFd(area)),
                _ => with(1, VhostRequest::SetInflightFd(area)),
            }
        }
        request::RESET_DEVICE => exactly(0).and(with(0, VhostRequest::ResetDevice)),
        request::GET_MAX_MEM_SLOTS => exactly(0).and(with(0, VhostRequest::GetMaxMemSlots)),
        request::ADD_MEM_REG | request::REM_MEM_REG => {
            let mut words = exactly(40)?;
            words.u64();
            let region = words.region();
            match kind {
                request::ADD_MEM_REG => with(1, VhostRequest::AddMemReg(region)),
                // Some front-ends send the region's descriptor again.
                _ => with(descriptors.min(1), VhostRequest::RemMemReg(region)),
            }
        }
        request::SET_STATUS => with(0, VhostRequest::SetStatus(exactly(8)?.u64())),
        request::GET_STATUS => exactly(0).and(with(0, VhostRequest::GetStatus)),
        _ => Ok(VhostRequest::Unknown(kind)),
    }
}

fn vring_fd(kind: u32, word: u64) -> (VhostRequest<'static>, usize) {
    // Bit 8: no descriptor; bits 0 to 7: the queue.
    let has_fd = word & 1 << 8 == 0;
    let request = VhostRequest::SetVringFd {
        which: match kind {
            request::SET_VRING_KICK => RingFd::Kick,
            request::SET_VRING_CALL => RingFd::Call,
            _ => RingFd::Err,
        },
        index: word as u8,
        has_fd,
    };
    (request, usize::from(has_fd))
}

fn vring_state(kind: u32, index: u32, num: u32) -> VhostRequest<'static> {
    match kind {
        request::SET_VRING_NUM => VhostRequest::SetVringNum { index, num },
        request::SET_VRING_BASE => VhostRequest::SetVringBase { index, base: num },
        request::GET_VRING_BASE => VhostRequest::GetVringBase { index },
        request::VRING_KICK => VhostRequest::VringKick { index },
        _ => VhostRequest::SetVringEnable { index, enable: num },
    }
}

fn mem_table(payload: &[u8], descriptors: usize) -> Result<VhostRequest<'_>, MessageError> {
    let mut words = Words(payload);
    let count = words.u32() as usize;
    words.u32();
    if count > MAX_TABLE_REGIONS {
        return Err(MessageError::Regions);
    }
    // Some front-ends send a whole array: User Mode Linux's has two entries.
    let places = payload.len().saturating_sub(8) / 32;
    if payload.len() != 8 + places * 32 || !(count..=MAX_TABLE_REGIONS).contains(&places) {
        return Err(MessageError::Size);
    }
    if descriptors != count {
        return Err(MessageError::Descriptors);
    }
    let mut regions = [MemoryRegion::default(); MAX_TABLE_REGIONS];
    for region in &mut regions[..count] {
        *region = words.region();
    }
    Ok(VhostRequest::SetMemTable { regions, count })
}

fn config(kind: u32, payload: &[u8]) -> Result<VhostRequest<'_>, MessageError> {
    let mut words = Words(payload);
    let (offset, size, _flags) = (words.u32(), words.u32(), words.u32());
    // Some front-ends (SPDK's) always send the whole array.
    let bytes = payload.get(12..).ok_or(MessageError::Size)?;
    if bytes.len() > MAX_CONFIG_BYTES {
        return Err(MessageError::Size);
    }
    let bytes = bytes.get(..size as usize).ok_or(MessageError::Size)?;
    Ok(match kind {
        request::GET_CONFIG => VhostRequest::GetConfig { offset, size },
        _ => VhostRequest::SetConfig { offset, bytes },
    })
}

fn write(out: &mut Vec<u8>, kind: u32, flags: u32, payload: &[&[u8]]) {
    let size: usize = payload.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&(VERSION | flags).to_le_bytes());
    out.extend_from_slice(&(size as u32).to_le_bytes());
    for part in payload {
        out.extend_from_slice(part);
    }
}

/// Writes a reply of one word, or an acknowledgement.
pub fn reply_u64(out: &mut Vec<u8>, kind: u32, value: u64) {
    write(out, kind, REPLY, &[&value.to_le_bytes()]);
}

/// Writes the reply to GET_VRING_BASE.
pub fn reply_vring_base(out: &mut Vec<u8>, index: u32, base: u32) {
    let parts: [&[u8]; 2] = [&index.to_le_bytes(), &base.to_le_bytes()];
    write(out, request::GET_VRING_BASE, REPLY, &parts);
}

/// Writes the reply to GET_CONFIG; without bytes, it is an error.
pub fn reply_config(out: &mut Vec<u8>, offset: u32, bytes: &[u8]) {
    if bytes.is_empty() {
        write(out, request::GET_CONFIG, REPLY, &[]);
        return;
    }
    let size = bytes.len() as u32;
    let parts: [&[u8]; 4] = [
        &offset.to_le_bytes(),
        &size.to_le_bytes(),
        &0u32.to_le_bytes(),
        bytes,
    ];
    write(out, request::GET_CONFIG, REPLY, &parts);
}

/// Writes the reply to GET_INFLIGHT_FD, as long as the request; the descriptor is sent with it.
pub fn reply_inflight(out: &mut Vec<u8>, area: &InflightArea, size: u32) {
    let parts: [&[u8]; 4] = [
        &area.mmap_size.to_le_bytes(),
        &area.mmap_offset.to_le_bytes(),
        &area.num_queues.to_le_bytes(),
        &area.queue_size.to_le_bytes(),
    ];
    let mut bytes = parts.concat();
    bytes.resize(size as usize, 0);
    write(out, request::GET_INFLIGHT_FD, REPLY, &[&bytes]);
}

/// Length of a [`vring_call`].
pub const CALL_BYTES: usize = HEADER_BYTES + 8;

/// The backend's call for a ring in band; it needs no reply.
#[must_use]
pub fn vring_call(index: u16) -> [u8; CALL_BYTES] {
    let mut out = [0; CALL_BYTES];
    let words = [request::BACKEND_VRING_CALL, VERSION, 8, u32::from(index)];
    for (bytes, word) in out.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    out
}

/// The backend's notice that the configuration changed.
pub fn config_changed() -> [u8; HEADER_BYTES] {
    let mut out = Vec::with_capacity(HEADER_BYTES);
    write(&mut out, request::BACKEND_CONFIG_CHANGE, 0, &[]);
    out.try_into().unwrap_or([0; HEADER_BYTES])
}
