//! The command slots of a management endpoint (4.2).
//!
//! A slot is idle, or carries out a command, or holds a response back while it is paused. A
//! response counts as sent when the caller gets it. Its last one can be replayed until the slot's
//! next command.

use super::control::{ControlPrimitive, endpoint_state as state};
use super::message::{BrokenMessage, MiHeader, open};
use super::{MiKind, MiRefusal, MiRequest, MiResponse, SLOTS};

/// CPSR of Pause: both bits are obsolete, and set.
const PAUSE_VALUE: u16 = 3;
/// CPAS: the command ended before the abort, or there was none.
const ABORTED_NOTHING: u16 = 0;
/// CPAS: the command may have had effects.
const ABORTED_PARTIALLY: u16 = 2;
/// The place of the Command Slot Identifier.
const SLOT_AT: MiRefusal = MiRefusal::at(1);
/// The place of the Response Replay Offset.
const REPLAY_OFFSET_AT: MiRefusal = MiRefusal::at(6);

/// A command that is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MiTicket {
    slot: usize,
    serial: u64,
}

/// Why a message had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MiDrop {
    /// The message is broken.
    Broken(BrokenMessage),
    /// It is a response.
    Response,
    /// Its command slot is not idle.
    SlotBusy,
}

/// What follows a received message. `A` is an address to answer to.
#[derive(Debug)]
pub struct MiStep<'m, A> {
    /// Messages to send, in order: up to three.
    pub send: Vec<(A, Vec<u8>)>,
    /// A command to carry out, and then to [`Responder::complete`].
    pub execute: Option<(MiTicket, MiRequest<'m>)>,
    /// An aborted command, whose response [`Responder::complete`] ignores.
    pub abandoned: Option<MiTicket>,
    /// Set if nothing else is.
    pub dropped: Option<MiDrop>,
}

impl<A> Default for MiStep<'_, A> {
    fn default() -> Self {
        Self {
            send: Vec::new(),
            execute: None,
            abandoned: None,
            dropped: None,
        }
    }
}

/// The slots of one endpoint. Memory: a response of each slot.
#[derive(Clone, Debug)]
pub struct Responder<A> {
    slots: [Slot<A>; SLOTS],
    /// Error flags of Get State.
    errors: u16,
    next_serial: u64,
}

#[derive(Clone, Debug)]
struct Slot<A> {
    work: Work<A>,
    paused: bool,
    /// The last response, or that of a slot that waits for a resume.
    response: Option<Vec<u8>>,
}

#[derive(Clone, Debug)]
enum Work<A> {
    Idle,
    Process {
        to: A,
        kind: MiKind,
        serial: u64,
        /// Whether the slot's response is More Processing Required.
        more: bool,
    },
    /// The response is held back.
    Transmit {
        to: A,
    },
}

impl<A: Copy> Slot<A> {
    fn state(&self) -> u16 {
        let paused = if self.paused { state::PAUSED } else { 0 };
        paused
            | match self.work {
                Work::Idle => state::IDLE,
                Work::Process { .. } => state::PROCESS,
                Work::Transmit { .. } => state::TRANSMIT,
            }
    }

    fn is_idle(&self) -> bool {
        matches!(self.work, Work::Idle)
    }

    /// The response that was held back.
    fn resume(&mut self) -> Option<(A, Vec<u8>)> {
        self.paused = false;
        let Work::Transmit { to } = self.work else {
            return None;
        };
        self.work = Work::Idle;
        Some((to, self.response.clone()?))
    }
}

impl<A: Copy> Default for Responder<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Copy> Responder<A> {
    /// Idle slots without a response.
    #[must_use]
    pub fn new() -> Self {
        let slot = || Slot {
            work: Work::Idle,
            paused: false,
            response: None,
        };
        Self {
            slots: [slot(), slot()],
            errors: 0,
            next_serial: 0,
        }
    }

    /// Whether no slot has a command or a held response.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.slots.iter().all(Slot::is_idle)
    }

    /// Sets error flags of [`super::endpoint_state`], for Get State.
    pub fn note_errors(&mut self, flags: u16) {
        self.errors |= flags & state::ERRORS;
    }

    /// Takes a message.
    pub fn receive<'m>(&mut self, from: A, message: &'m [u8]) -> MiStep<'m, A> {
        self.accept(from, message).unwrap_or_else(|dropped| {
            self.note_errors(match dropped {
                MiDrop::Broken(BrokenMessage::Check) => state::BAD_CHECK,
                MiDrop::SlotBusy => state::SLOT_BUSY,
                MiDrop::Broken(_) | MiDrop::Response => 0,
            });
            MiStep {
                dropped: Some(dropped),
                ..MiStep::default()
            }
        })
    }

    fn accept<'m>(&mut self, from: A, message: &'m [u8]) -> Result<MiStep<'m, A>, MiDrop> {
        let (header, body) = open(message).map_err(MiDrop::Broken)?;
        if header.response {
            return Err(MiDrop::Response);
        }
        let request = MiRequest::decode(&header, body);
        if header.kind == MiKind::Control {
            return Ok(self.control(from, &header, request));
        }
        let serial = self.next_serial;
        let slot = &mut self.slots[header.slot];
        if !slot.is_idle() {
            return Err(MiDrop::SlotBusy);
        }
        slot.work = Work::Process {
            to: from,
            kind: header.kind,
            serial,
            more: false,
        };
        slot.response = None;
        self.next_serial += 1;
        let ticket = MiTicket {
            slot: header.slot,
            serial,
        };
        let mut step = MiStep::default();
        match request {
            Ok(request) => step.execute = Some((ticket, request)),
            Err(refusal) => step.send.extend(self.complete(ticket, &refusal.into())),
        }
        Ok(step)
    }

    /// The response of a command that was carried out, to be sent unless the command was aborted
    /// or its slot is paused. A success must be of the request's kind.
    pub fn complete(
        &mut self,
        ticket: MiTicket,
        response: &MiResponse<'_>,
    ) -> Option<(A, Vec<u8>)> {
        let slot = &mut self.slots[ticket.slot];
        let (to, kind) = match slot.work {
            Work::Process {
                to, kind, serial, ..
            } if serial == ticket.serial => (to, kind),
            _ => return None,
        };
        let message = response.encode(kind, ticket.slot);
        slot.response = Some(message.clone());
        if slot.paused {
            slot.work = Work::Transmit { to };
            return None;
        }
        slot.work = Work::Idle;
        Some((to, message))
    }

    /// More Processing Required, for at most `time` units of 100 ms: once for each command, and
    /// not while its slot is paused.
    pub fn more_processing(&mut self, ticket: MiTicket, time: u16) -> Option<(A, Vec<u8>)> {
        let slot = &mut self.slots[ticket.slot];
        let Work::Process {
            to,
            kind,
            serial,
            more,
        } = &mut slot.work
        else {
            return None;
        };
        if *serial != ticket.serial || *more || slot.paused {
            return None;
        }
        *more = true;
        let message = MiResponse::MoreProcessing { time }.encode(*kind, ticket.slot);
        slot.response = Some(message.clone());
        Some((*to, message))
    }

    fn control<'m>(
        &mut self,
        from: A,
        header: &MiHeader,
        request: Result<MiRequest<'m>, MiRefusal>,
    ) -> MiStep<'m, A> {
        let mut step = MiStep::default();
        let response = match request {
            Ok(MiRequest::Control(primitive, tag)) => self
                .carry_out(from, header.slot, primitive, &mut step)
                .map_or_else(MiResponse::from, |value| MiResponse::Control { tag, value }),
            Ok(_) => MiRefusal::OPCODE.into(),
            Err(refusal) => refusal.into(),
        };
        let response = response.encode(MiKind::Control, header.slot);
        step.send.insert(0, (from, response));
        step
    }

    /// Returns CPSR.
    fn carry_out(
        &mut self,
        from: A,
        index: usize,
        primitive: ControlPrimitive,
        step: &mut MiStep<'_, A>,
    ) -> Result<u16, MiRefusal> {
        match primitive {
            // Pause is for both slots, and only the first may be named.
            ControlPrimitive::Pause if index != 0 => Err(SLOT_AT),
            ControlPrimitive::Pause => {
                for slot in self.slots.iter_mut().filter(|slot| !slot.is_idle()) {
                    slot.paused = true;
                }
                Ok(PAUSE_VALUE)
            }
            ControlPrimitive::Resume => {
                step.send
                    .extend(self.slots.iter_mut().filter_map(Slot::resume));
                Ok(0)
            }
            ControlPrimitive::Abort => Ok(self.abort(index, step)),
            ControlPrimitive::GetState { clear_errors } => {
                let value = self.slots[index].state() | self.errors;
                if clear_errors {
                    self.errors = 0;
                }
                Ok(value)
            }
            ControlPrimitive::Replay { first_packet: 0 } => Ok(self.replay(from, index, step)),
            // Slots hold messages, not packets.
            ControlPrimitive::Replay { .. } => Err(REPLAY_OFFSET_AT),
        }
    }

    fn abort(&mut self, index: usize, step: &mut MiStep<'_, A>) -> u16 {
        let slot = &mut self.slots[index];
        let value = match slot.work {
            Work::Process { serial, .. } => {
                step.abandoned = Some(MiTicket {
                    slot: index,
                    serial,
                });
                ABORTED_PARTIALLY
            }
            Work::Idle | Work::Transmit { .. } => ABORTED_NOTHING,
        };
        slot.work = Work::Idle;
        slot.paused = false;
        slot.response = None;
        value
    }

    /// Returns whether there is a response. A replay resumes both slots.
    fn replay(&mut self, from: A, index: usize, step: &mut MiStep<'_, A>) -> u16 {
        let slot = &mut self.slots[index];
        if let Work::Transmit { .. } = slot.work {
            slot.work = Work::Idle;
        }
        let response = slot.response.clone().map(|message| (from, message));
        let found = response.is_some();
        step.send.extend(response);
        step.send
            .extend(self.slots.iter_mut().filter_map(Slot::resume));
        u16::from(found)
    }
}
