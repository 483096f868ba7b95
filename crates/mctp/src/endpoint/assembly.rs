//! Messages in assembly (DSP0236, 8.6 to 8.9).

use super::{Address, DropReason, Drops, Message};
use crate::packet::{BASELINE_UNIT_BYTES, Header};

/// The most messages in assembly at once. One more evicts the one that waits longest.
pub const MAX_ASSEMBLIES: usize = 8;

/// The longest time between two packets of a message: 6 s, as 251 bytes take 4 s at 600 baud.
pub const ASSEMBLY_TIMEOUT_NS: u64 = 6_000_000_000;

#[derive(Clone, Debug)]
struct Assembly {
    message: Message,
    limit_bytes: usize,
    /// Payload of the first packet.
    unit_bytes: usize,
    next_sequence: u8,
    last_ns: u64,
}

impl Assembly {
    /// Source EID, tag and tag owner identify a message (8.6).
    fn matches(&self, header: &Header) -> bool {
        let from = &self.message.from;
        (from.eid, from.tag, from.owner) == (header.source, header.tag, header.owner)
    }
}

/// At most [`MAX_ASSEMBLIES`].
#[derive(Clone, Debug, Default)]
pub(super) struct Assemblies(Vec<Assembly>);

impl Assemblies {
    /// Drops messages whose next packet is overdue.
    pub(super) fn expire(&mut self, now_ns: u64, drops: &mut Drops) {
        self.0.retain(|assembly| {
            let keep = now_ns.saturating_sub(assembly.last_ns) <= ASSEMBLY_TIMEOUT_NS;
            if !keep {
                drops.add(DropReason::TimedOut);
            }
            keep
        });
    }

    /// Begins a message with its first packet. Returns the message if it has no other.
    pub(super) fn start(
        &mut self,
        header: &Header,
        payload: &[u8],
        limit_bytes: usize,
        now_ns: u64,
        drops: &mut Drops,
    ) -> Result<Option<Message>, DropReason> {
        if !header.end && payload.len() < BASELINE_UNIT_BYTES {
            return Err(DropReason::UnsupportedUnit);
        }
        if self.remove(header).is_some() {
            drops.add(DropReason::Restarted);
        }
        if payload.len() > limit_bytes {
            return Err(DropReason::TooLong);
        }
        let message = Message {
            from: Address {
                eid: header.source,
                tag: header.tag,
                owner: header.owner,
                local_eid: header.destination,
            },
            bytes: payload.to_vec(),
        };
        if header.end {
            return Ok(Some(message));
        }
        self.make_room(drops);
        self.0.push(Assembly {
            message,
            limit_bytes,
            unit_bytes: payload.len(),
            next_sequence: (header.sequence + 1) % 4,
            last_ns: now_ns,
        });
        Ok(None)
    }

    /// How many messages are in assembly.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.0.len()
    }

    fn make_room(&mut self, drops: &mut Drops) {
        if self.0.len() < MAX_ASSEMBLIES {
            return;
        }
        let oldest = self.0.iter().enumerate().min_by_key(|(_, a)| a.last_ns);
        if let Some(index) = oldest.map(|(index, _)| index) {
            self.0.remove(index);
            drops.add(DropReason::Evicted);
        }
    }

    /// Adds a middle or last packet, which completes the message. After an error the message is
    /// gone.
    pub(super) fn extend(
        &mut self,
        header: &Header,
        payload: &[u8],
        now_ns: u64,
    ) -> Result<Option<Message>, DropReason> {
        // Out of the list, so that any fault drops it.
        let mut assembly = self.remove(header).ok_or(DropReason::UnexpectedMiddle)?;
        let (unit_bytes, bytes) = (assembly.unit_bytes, &mut assembly.message.bytes);
        if header.sequence != assembly.next_sequence {
            return Err(DropReason::OutOfSequence);
        }
        if payload.len() > unit_bytes || !header.end && payload.len() < unit_bytes {
            return Err(DropReason::IncorrectUnit);
        }
        if bytes.len() + payload.len() > assembly.limit_bytes {
            return Err(DropReason::TooLong);
        }
        bytes.extend_from_slice(payload);
        if header.end {
            return Ok(Some(assembly.message));
        }
        assembly.next_sequence = (header.sequence + 1) % 4;
        assembly.last_ns = now_ns;
        self.0.push(assembly);
        Ok(None)
    }

    fn remove(&mut self, header: &Header) -> Option<Assembly> {
        let index = self
            .0
            .iter()
            .position(|assembly| assembly.matches(header))?;
        Some(self.0.remove(index))
    }
}
