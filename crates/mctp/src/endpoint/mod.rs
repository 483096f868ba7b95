//! An endpoint: assembly of messages, answers to control requests (DSP0236, 8 and 12).

mod assembly;
mod control;
mod drops;
#[cfg(test)]
mod tests;

pub use assembly::{ASSEMBLY_TIMEOUT_NS, MAX_ASSEMBLIES};
pub use drops::{DropReason, Drops};

use crate::packet::{
    BASELINE_UNIT_BYTES, EID_BROADCAST, EID_NULL, Header, MAX_UNIT_BYTES, Packets,
};
use assembly::Assemblies;

/// The type of control messages, which every endpoint accepts.
const CONTROL: MessageType = MessageType {
    first_byte: 0,
    limit_bytes: BASELINE_UNIT_BYTES,
};

/// NVMe-MI messages with an integrity check: 68 bytes of a tunnelled Admin command, 4 KiB of data,
/// the check.
pub const NVME_MI: MessageType = MessageType {
    first_byte: 0x84,
    limit_bytes: 68 + 4096 + 4,
};

/// A type of message that an endpoint accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageType {
    /// Bit 7: the message ends with an integrity check; bits 6 to 0: the type (DSP0239).
    pub first_byte: u8,
    /// The longest message, with its first byte and its integrity check.
    pub limit_bytes: usize,
}

/// A new endpoint's identity and limits.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Identifies the endpoint for life. In RFC 4122's byte order.
    pub uuid: [u8; 16],
    /// The present EID, or [`EID_NULL`].
    pub eid: u8,
    /// The EID that Reset EID restores, or [`EID_NULL`] if there is none.
    pub static_eid: u8,
    /// Accepted besides control messages; at most 32 are reported.
    pub types: &'static [MessageType],
    /// The transmission unit of sent packets; see [`Endpoint::set_unit_bytes`].
    pub unit_bytes: usize,
}

/// The other end of a message, from which answers need all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The peer's EID.
    pub eid: u8,
    /// The message tag, 0 to 7.
    pub tag: u8,
    /// Of a received message: whether the peer chose the tag; the message is a request.
    pub owner: bool,
    /// The own EID that the peer used, or uses.
    pub local_eid: u8,
}

/// A message with its first byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its source.
    pub from: Address,
    /// At most its type's limit.
    pub bytes: Vec<u8>,
}

/// What a packet led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// More packets of its message must follow.
    Fragment,
    /// Nothing; the reason is counted.
    Dropped(DropReason),
    /// A whole message of one of the endpoint's types, or a control response.
    Message(Message),
    /// A control request, which has been carried out.
    Control(ControlAnswer),
}

/// The answer to a control request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlAnswer {
    /// The request's source.
    pub to: Address,
    /// To be sent with [`Endpoint::answer`].
    pub bytes: Vec<u8>,
    /// The endpoint's EID, if the request changed it. The caller keeps it.
    pub new_eid: Option<u8>,
}

/// An endpoint on one bus. Several peers may send requests at once.
#[derive(Clone, Debug)]
pub struct Endpoint {
    config: EndpointConfig,
    assemblies: Assemblies,
    /// By tag: the peer that may answer a request.
    awaited: [Option<u8>; 8],
    next_tag: u8,
    drops: Drops,
}

impl Endpoint {
    /// An endpoint without messages in assembly.
    #[must_use]
    pub fn new(config: EndpointConfig) -> Self {
        Self {
            config,
            assemblies: Assemblies::default(),
            awaited: [None; 8],
            next_tag: 0,
            drops: Drops::default(),
        }
    }

    /// The present EID.
    #[must_use]
    pub fn eid(&self) -> u8 {
        self.config.eid
    }

    /// The transmission unit of sent packets.
    #[must_use]
    pub fn unit_bytes(&self) -> usize {
        self.config.unit_bytes
    }

    /// The packets and messages dropped so far, by reason.
    #[must_use]
    pub fn drops(&self) -> &Drops {
        &self.drops
    }

    /// Sets the transmission unit of later messages: 64 to 251 bytes of payload. Returns whether
    /// it is valid. Received packets may have any.
    pub fn set_unit_bytes(&mut self, bytes: usize) -> bool {
        let valid = (BASELINE_UNIT_BYTES..=MAX_UNIT_BYTES).contains(&bytes);
        if valid {
            self.config.unit_bytes = bytes;
        }
        valid
    }

    /// The packets of the answer to a request from `to`.
    #[must_use]
    pub fn answer<'m>(&self, to: Address, message: &'m [u8]) -> Packets<'m> {
        let to = Address { owner: false, ..to };
        Packets::new(to, message, self.config.unit_bytes)
    }

    /// The packets of a request to `eid`, and the tag that its answers have. The eighth request
    /// after it reuses the tag. Any endpoint may answer a request to [`EID_NULL`].
    pub fn request<'m>(&mut self, eid: u8, message: &'m [u8]) -> (u8, Packets<'m>) {
        let tag = self.next_tag;
        self.next_tag = (tag + 1) % 8;
        self.awaited[usize::from(tag)] = Some(eid);
        let to = Address {
            eid,
            tag,
            owner: true,
            local_eid: self.config.eid,
        };
        (tag, Packets::new(to, message, self.config.unit_bytes))
    }

    /// Takes a packet.
    pub fn receive(&mut self, packet: &[u8], now_ns: u64) -> Received {
        self.assemblies.expire(now_ns, &mut self.drops);
        self.accept(packet, now_ns).unwrap_or_else(|reason| {
            self.drops.add(reason);
            Received::Dropped(reason)
        })
    }

    fn accept(&mut self, packet: &[u8], now_ns: u64) -> Result<Received, DropReason> {
        let (header, payload) = Header::split(packet)?;
        self.check_ends(&header)?;
        let message = if header.start {
            let limit_bytes = self.kind(&header, payload[0])?.limit_bytes;
            self.assemblies
                .start(&header, payload, limit_bytes, now_ns, &mut self.drops)?
        } else {
            self.assemblies.extend(&header, payload, now_ns)?
        };
        let Some(message) = message else {
            return Ok(Received::Fragment);
        };
        if header.owner && message.bytes[0] == CONTROL.first_byte {
            return control::answer(&mut self.config, &message).map(Received::Control);
        }
        Ok(Received::Message(message))
    }

    /// Whether the packet is for this endpoint, and from one (8.2 and 8.7).
    fn check_ends(&self, header: &Header) -> Result<(), DropReason> {
        let own = [self.config.eid, EID_NULL, EID_BROADCAST];
        if !own.contains(&header.destination) {
            return Err(DropReason::UnknownDestination);
        }
        if header.source == EID_BROADCAST {
            return Err(DropReason::BadSource);
        }
        let awaited = match self.awaited[usize::from(header.tag)] {
            Some(EID_NULL) => true,
            awaited => awaited == Some(header.source),
        };
        if header.owner || awaited {
            Ok(())
        } else {
            Err(DropReason::UnexpectedTag)
        }
    }

    /// The type of a message that begins with `first_byte`.
    fn kind(&self, header: &Header, first_byte: u8) -> Result<MessageType, DropReason> {
        let broadcast = header.destination == EID_BROADCAST;
        let others = if broadcast { &[] } else { self.config.types };
        [CONTROL]
            .iter()
            .chain(others)
            .find(|kind| kind.first_byte == first_byte)
            .copied()
            .ok_or(DropReason::UnsupportedType)
    }
}
