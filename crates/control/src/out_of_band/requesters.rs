//! The requesters of a line, each with its own command slots.

use forebay_mctp::{Address, DropReason, Drops};
use forebay_nvme::mi::{MiTicket, Responder, endpoint_state};
use tokio::time::{Duration, Instant};

/// Requesters of a line that are remembered.
pub(super) const REQUESTERS: usize = 8;
/// A command that takes longer is answered by More Processing Required first.
pub(super) const SOON: Duration = Duration::from_millis(80);
/// How long an unused requester with a held response keeps its place.
const FORGET_AFTER: Duration = Duration::from_secs(30);

/// A requester: an EID.
#[derive(Debug)]
pub(super) struct Requester {
    eid: u8,
    /// Unlike those of all earlier requesters of the line.
    pub(super) number: u64,
    pub(super) responder: Responder<Address>,
    used: Instant,
    /// Commands that are carried out, and when they must be answered provisionally.
    pending: Vec<(MiTicket, Instant)>,
}

/// The latest requesters of a line.
#[derive(Debug, Default)]
pub(super) struct Requesters {
    known: Vec<Requester>,
    noted: Drops,
    next_number: u64,
}

impl Requesters {
    /// The requester with an EID. A new one may replace the one idle for longest; `None` if all
    /// have commands.
    pub(super) fn get(&mut self, eid: u8, now: Instant) -> Option<&mut Requester> {
        let at = match self.known.iter().position(|known| known.eid == eid) {
            Some(at) => at,
            None => {
                if self.known.len() >= REQUESTERS {
                    let all = self.known.iter().enumerate();
                    let all = all.filter(|(_, known)| known.is_replaceable(now));
                    let (oldest, _) = all.min_by_key(|(_, known)| known.used)?;
                    self.known.swap_remove(oldest);
                }
                let number = self.next_number;
                self.next_number += 1;
                self.known.push(Requester {
                    eid,
                    number,
                    responder: Responder::new(),
                    used: now,
                    pending: Vec::new(),
                });
                self.known.len() - 1
            }
        };
        let requester = self.known.get_mut(at)?;
        requester.used = now;
        Some(requester)
    }

    /// A requester that is still known.
    pub(super) fn by_number(&mut self, number: u64) -> Option<&mut Requester> {
        self.known.iter_mut().find(|known| known.number == number)
    }

    /// Tells all requesters of dropped packets, for Get State.
    pub(super) fn note_drops(&mut self, drops: &Drops) {
        if *drops == self.noted {
            return;
        }
        let more = |reason: &&DropReason| drops.count(**reason) > self.noted.count(**reason);
        let flags = DropReason::ALL.iter().filter(more).map(|r| state_of(*r));
        let flags = flags.fold(0, |all, flag| all | flag);
        self.noted = *drops;
        self.note(flags);
    }

    /// Tells all requesters of frames with a wrong check.
    pub(super) fn note_corrupt(&mut self) {
        self.note(endpoint_state::BAD_PACKET);
    }

    fn note(&mut self, flags: u16) {
        for known in &mut self.known {
            known.responder.note_errors(flags);
        }
    }

    /// When the next command must be answered provisionally.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let all = self.known.iter().flat_map(|known| &known.pending);
        all.map(|(_, due)| *due).min()
    }

    /// The provisional answers that are due.
    pub(super) fn due(&mut self, now: Instant, units: u16) -> Vec<(Address, Vec<u8>)> {
        let mut answers = Vec::new();
        for known in &mut self.known {
            for (ticket, due) in &mut known.pending {
                if *due <= now {
                    answers.extend(known.responder.more_processing(*ticket, units));
                    // Once for each command; the limit of every command is much shorter.
                    *due = now + Duration::from_secs(86_400);
                }
            }
        }
        answers
    }
}

impl Requester {
    /// One that paused its slots and went away must not keep its place.
    fn is_replaceable(&self, now: Instant) -> bool {
        let is_old = now.duration_since(self.used) > FORGET_AFTER;
        self.pending.is_empty() && (is_old || self.responder.is_idle())
    }

    pub(super) fn began(&mut self, ticket: MiTicket, now: Instant) {
        self.pending.push((ticket, now + SOON));
    }

    pub(super) fn ended(&mut self, ticket: MiTicket) {
        self.pending.retain(|(pending, _)| *pending != ticket);
    }
}

/// The flag of Get State for a dropped packet.
fn state_of(reason: DropReason) -> u16 {
    match reason {
        DropReason::HeaderVersion => endpoint_state::BAD_HEADER_VERSION,
        DropReason::UnknownDestination => endpoint_state::UNKNOWN_DESTINATION,
        DropReason::UnexpectedTag => endpoint_state::BAD_TAG,
        DropReason::UnsupportedUnit => endpoint_state::UNSUPPORTED_UNIT,
        DropReason::UnexpectedMiddle => endpoint_state::UNEXPECTED_MIDDLE,
        DropReason::OutOfSequence => endpoint_state::OUT_OF_SEQUENCE,
        DropReason::IncorrectUnit => endpoint_state::INCORRECT_UNIT,
        DropReason::TimedOut => endpoint_state::TIMEOUT,
        DropReason::ShortPacket
        | DropReason::BadSource
        | DropReason::UnsupportedType
        | DropReason::TooLong
        | DropReason::Restarted
        | DropReason::Evicted
        | DropReason::NotARequest => 0,
    }
}
