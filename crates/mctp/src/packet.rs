//! Packets (DSP0236, 8.1 and 8.4), and the cutting of messages into them.

use std::ops::Deref;

use crate::endpoint::{Address, DropReason};

/// The transport header's length.
pub const HEADER_BYTES: usize = 4;
/// The transmission unit that each endpoint accepts (8.4.2): payload without the header.
pub const BASELINE_UNIT_BYTES: usize = 64;
/// The longest packet: a serial frame counts its bytes in 8 bits.
pub const MAX_PACKET_BYTES: usize = 255;
/// The largest transmission unit.
pub const MAX_UNIT_BYTES: usize = MAX_PACKET_BYTES - HEADER_BYTES;
/// The EID of an endpoint that has none (8.2).
pub const EID_NULL: u8 = 0x00;
/// The EID of all endpoints on a bus (8.2).
pub const EID_BROADCAST: u8 = 0xFF;

const VERSION: u8 = 1;

/// A packet with its header, at most [`MAX_PACKET_BYTES`].
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    bytes: [u8; MAX_PACKET_BYTES],
    length: u8,
}

impl Packet {
    /// `None` without a payload, or if it is too long.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let (header, payload) = bytes.split_first_chunk()?;
        if payload.is_empty() || payload.len() > MAX_UNIT_BYTES {
            return None;
        }
        Some(Self::join(header, payload))
    }

    /// `payload` must not exceed [`MAX_UNIT_BYTES`].
    fn join(header: &[u8; HEADER_BYTES], payload: &[u8]) -> Self {
        let mut packet = Self {
            bytes: [0; MAX_PACKET_BYTES],
            length: (HEADER_BYTES + payload.len()) as u8,
        };
        packet.bytes[..HEADER_BYTES].copy_from_slice(header);
        packet.bytes[HEADER_BYTES..][..payload.len()].copy_from_slice(payload);
        packet
    }
}

impl Deref for Packet {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

/// A received packet's header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) destination: u8,
    pub(crate) source: u8,
    /// SOM.
    pub(crate) start: bool,
    /// EOM.
    pub(crate) end: bool,
    /// 0 to 3.
    pub(crate) sequence: u8,
    /// TO: the source chose the tag.
    pub(crate) owner: bool,
    /// 0 to 7.
    pub(crate) tag: u8,
}

impl Header {
    /// Header and payload. Reserved bits are ignored.
    pub(crate) fn split(packet: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let [version, destination, source, flags, payload @ ..] = packet else {
            return Err(DropReason::ShortPacket);
        };
        if version & 0x0F != VERSION {
            return Err(DropReason::HeaderVersion);
        }
        if payload.is_empty() {
            return Err(DropReason::ShortPacket);
        }
        let header = Self {
            destination: *destination,
            source: *source,
            start: flags & 0x80 != 0,
            end: flags & 0x40 != 0,
            sequence: flags >> 4 & 3,
            owner: flags & 0x08 != 0,
            tag: flags & 7,
        };
        Ok((header, payload))
    }
}

/// The packets of a message: all but the last have the same size.
#[derive(Clone, Debug)]
pub struct Packets<'m> {
    to: Address,
    unit_bytes: usize,
    rest: &'m [u8],
    start: bool,
    sequence: u8,
}

impl<'m> Packets<'m> {
    pub(crate) fn new(to: Address, message: &'m [u8], unit_bytes: usize) -> Self {
        Self {
            to,
            unit_bytes: unit_bytes.clamp(BASELINE_UNIT_BYTES, MAX_UNIT_BYTES),
            rest: message,
            start: true,
            sequence: 0,
        }
    }
}

impl Iterator for Packets<'_> {
    type Item = Packet;

    fn next(&mut self) -> Option<Packet> {
        if self.rest.is_empty() {
            return None;
        }
        let (payload, rest) = self.rest.split_at(self.rest.len().min(self.unit_bytes));
        let flags = u8::from(self.start) << 7
            | u8::from(rest.is_empty()) << 6
            | self.sequence << 4
            | u8::from(self.to.owner) << 3
            | self.to.tag;
        let header = [VERSION, self.to.eid, self.to.local_eid, flags];
        self.rest = rest;
        self.start = false;
        self.sequence = (self.sequence + 1) % 4;
        Some(Packet::join(&header, payload))
    }
}
