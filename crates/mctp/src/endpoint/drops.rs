//! Counters of dropped packets and messages.

/// Why a packet or a message was dropped (DSP0236, 8.7 and 8.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropReason {
    /// A packet without a payload.
    ShortPacket,
    /// A packet of another header version.
    HeaderVersion,
    /// A packet for another endpoint, or a broadcast that only one endpoint can answer.
    UnknownDestination,
    /// A packet from the broadcast EID.
    BadSource,
    /// A response to no request.
    UnexpectedTag,
    /// A message of another type, or a broadcast that is not a control message.
    UnsupportedType,
    /// A first packet with less than the baseline transmission unit, but not the last.
    UnsupportedUnit,
    /// A middle or last packet without a first one.
    UnexpectedMiddle,
    /// A message by a packet that is not the next one.
    OutOfSequence,
    /// A message by a packet whose size differs from the first one's.
    IncorrectUnit,
    /// A message longer than its type's limit.
    TooLong,
    /// A message by a new first packet.
    Restarted,
    /// A message whose next packet did not come in time.
    TimedOut,
    /// A message by another one, as too many were in assembly.
    Evicted,
    /// A control message that is not a request, or that asks for no answer.
    NotARequest,
}

impl DropReason {
    /// All, in the order of their counters.
    pub const ALL: [Self; 15] = [
        Self::ShortPacket,
        Self::HeaderVersion,
        Self::UnknownDestination,
        Self::BadSource,
        Self::UnexpectedTag,
        Self::UnsupportedType,
        Self::UnsupportedUnit,
        Self::UnexpectedMiddle,
        Self::OutOfSequence,
        Self::IncorrectUnit,
        Self::TooLong,
        Self::Restarted,
        Self::TimedOut,
        Self::Evicted,
        Self::NotARequest,
    ];
}

/// Counters for each [`DropReason`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops([u64; DropReason::ALL.len()]);

impl Drops {
    /// How often `reason` occurred.
    #[must_use]
    pub fn count(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    pub(crate) fn add(&mut self, reason: DropReason) {
        self.0[reason as usize] += 1;
    }
}
