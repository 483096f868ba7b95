//! The commands of one NVMe/TCP queue on the host side.
//!
//! [`HostQueue::begin`] takes a slot and chooses between in-capsule data and R2T;
//! [`HostQueue::on_pdu`] interprets headers. The caller holds the data and reports it with
//! [`HostQueue::data_received`] and [`HostQueue::r2t_answered`]. [`HostQueue::release`] comes last:
//! a controller may end a write while its data is still being sent.
//!
//! NVMe/TCP delivers commands in order, so an ended command was also fetched. Hence N entries
//! cannot overflow with N - 1 commands in flight, whatever SQHD says (Base 3.3.1).

use std::fmt;

use super::CommandSlots;
use crate::tcp::{C2hData, Frame, H2cData, Pdu, PduError, R2t, TcpParams, TermReq, field};
use crate::{Cqe, SglDescriptor, Sqe, Status};

/// A command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostTransfer {
    /// None.
    None,
    /// Bytes from the controller.
    ToHost(u32),
    /// Bytes to the controller.
    ToController(u32),
}

/// A new command, ready for [`crate::tcp::put_capsule_cmd`].
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    /// Its slot.
    pub slot: u16,
    /// The entry to send.
    pub sqe: Sqe,
    /// In-capsule bytes: all of the data or none.
    pub in_capsule_bytes: u32,
}

/// A command's end. [`HostQueue::release`] frees the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Its slot.
    pub slot: u16,
    /// Its status.
    pub status: Status,
    /// Completion dwords 0 and 1.
    pub result: u64,
}

/// Data to receive into a slot's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataIn {
    /// The slot.
    pub slot: u16,
    /// Offset in its buffer.
    pub offset_bytes: u32,
    /// Length.
    pub length_bytes: u32,
}

/// Requested data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataOut {
    /// The slot.
    pub slot: u16,
    /// See [`DataOut::pdus`].
    pub r2t: R2t,
}

impl DataOut {
    /// H2CData headers of at most `max_bytes` (TCP 3.3.2.2).
    pub fn pdus(&self, max_bytes: u32) -> impl Iterator<Item = H2cData> + use<> {
        let R2t { cid, ttag, .. } = self.r2t;
        let end = self.r2t.offset_bytes + self.r2t.length_bytes;
        let max_bytes = max_bytes.max(4);
        let mut at = self.r2t.offset_bytes;
        std::iter::from_fn(move || {
            let length_bytes = (end - at).min(max_bytes);
            let pdu = H2cData {
                cid,
                ttag,
                offset_bytes: at,
                length_bytes,
                last: at + length_bytes == end,
            };
            at += length_bytes;
            (length_bytes > 0).then_some(pdu)
        })
    }
}

/// A received PDU's meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Receive data, then call [`HostQueue::data_received`].
    DataIn(DataIn),
    /// Send data, then call [`HostQueue::r2t_answered`].
    DataOut(DataOut),
    /// A command ended.
    Completed(Completion),
    /// The controller terminates the connection.
    Terminated(TermReq),
}

/// A violation: send `error` in an H2CTermReq and close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// For the H2CTermReq.
    pub error: PduError,
    /// For people.
    pub what: &'static str,
    /// Its command identifier.
    pub cid: u16,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} (command {:#06x}): {}",
            self.what, self.cid, self.error
        )
    }
}

impl std::error::Error for Violation {}

#[derive(Clone, Copy, Debug)]
struct QueuedCommand {
    transfer: HostTransfer,
    in_capsule: bool,
    /// Received or requested.
    moved_bytes: u32,
    open_r2ts: u32,
    /// Only the response may follow.
    data_ended: bool,
    /// SUCCESS was set: no response follows.
    ends_with_data: bool,
    bad_digest: bool,
}

const IDLE: QueuedCommand = QueuedCommand {
    transfer: HostTransfer::None,
    in_capsule: false,
    moved_bytes: 0,
    open_r2ts: 0,
    data_ended: false,
    ends_with_data: false,
    bad_digest: false,
};

/// The commands of one queue.
#[derive(Debug)]
pub struct HostQueue {
    slots: CommandSlots,
    commands: Vec<QueuedCommand>,
    max_in_capsule_bytes: u32,
    max_r2t: u64,
}

impl HostQueue {
    /// Allows `depth` commands in flight, one less than the queue's entries.
    #[must_use]
    pub fn new(depth: u16, params: &TcpParams) -> Self {
        let slots = CommandSlots::new(depth);
        Self {
            commands: vec![IDLE; usize::from(slots.depth())],
            slots,
            max_in_capsule_bytes: params.max_in_capsule_bytes,
            max_r2t: params.max_r2t,
        }
    }

    /// Maximum commands in flight.
    #[must_use]
    pub fn depth(&self) -> u16 {
        self.slots.depth()
    }

    /// Commands in flight or not yet released.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.slots.in_use()
    }

    /// Sets the in-capsule limit for later commands.
    pub fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.max_in_capsule_bytes = bytes;
    }

    /// Begins a command: sets identifier and data pointer. `None`: no free slot.
    pub fn begin(&mut self, sqe: Sqe, transfer: HostTransfer) -> Option<Begun> {
        let (slot, cid) = self.slots.claim()?;
        let in_capsule_bytes = match transfer {
            HostTransfer::ToController(bytes) if bytes <= self.max_in_capsule_bytes => bytes,
            _ => 0,
        };
        let in_capsule = in_capsule_bytes > 0;
        let sgl = match transfer {
            HostTransfer::ToController(bytes) if in_capsule => SglDescriptor::in_capsule(0, bytes),
            HostTransfer::ToController(bytes) | HostTransfer::ToHost(bytes) => {
                SglDescriptor::transport(bytes)
            }
            HostTransfer::None => SglDescriptor::transport(0),
        };
        let mut sqe = sqe.with_sgl(sgl);
        sqe.cid.set(cid);
        self.commands[usize::from(slot)] = QueuedCommand {
            transfer,
            in_capsule,
            ..IDLE
        };
        Some(Begun {
            slot,
            sqe,
            in_capsule_bytes,
        })
    }

    /// Handles a received PDU header.
    pub fn on_pdu(&mut self, frame: &Frame) -> Result<Event, Violation> {
        match frame.pdu {
            Pdu::C2hData(data) => self.on_data(&data),
            Pdu::R2t(r2t) => self.on_r2t(r2t),
            Pdu::CapsuleResp(cqe) => self.on_response(&cqe),
            Pdu::C2hTermReq(term) => Ok(Event::Terminated(term)),
            _ => Err(violation(
                PduError::SEQUENCE,
                "a PDU that a controller must not send at this point",
                0,
            )),
        }
    }

    fn on_data(&mut self, data: &C2hData) -> Result<Event, Violation> {
        let cid = data.cid;
        let slot = self.find(cid, "C2HData for a command that is not in flight")?;
        let command = &mut self.commands[usize::from(slot)];
        let HostTransfer::ToHost(expected_bytes) = command.transfer else {
            let error = PduError::field(field::CCCID);
            return Err(violation(
                error,
                "C2HData for a command that reads nothing",
                cid,
            ));
        };
        if command.data_ended {
            let what = "C2HData after the last one of its command";
            return Err(violation(PduError::SEQUENCE, what, cid));
        }
        if data.offset_bytes != command.moved_bytes {
            let error = PduError::field(field::DATAO);
            return Err(violation(error, "C2HData out of order", cid));
        }
        if data.length_bytes > expected_bytes - command.moved_bytes {
            let what = "C2HData past the end of its command's data";
            return Err(violation(PduError::DATA_OUT_OF_RANGE, what, cid));
        }
        command.moved_bytes += data.length_bytes;
        command.data_ended = data.last;
        command.ends_with_data = data.success;
        if data.success && command.moved_bytes != expected_bytes {
            let error = PduError::field(field::FLAGS);
            return Err(violation(error, "SUCCESS before all data was sent", cid));
        }
        Ok(Event::DataIn(DataIn {
            slot,
            offset_bytes: data.offset_bytes,
            length_bytes: data.length_bytes,
        }))
    }

    fn on_r2t(&mut self, r2t: R2t) -> Result<Event, Violation> {
        let cid = r2t.cid;
        let slot = self.find(cid, "R2T for a command that is not in flight")?;
        let command = &mut self.commands[usize::from(slot)];
        let HostTransfer::ToController(expected_bytes) = command.transfer else {
            let error = PduError::field(field::CCCID);
            return Err(violation(
                error,
                "R2T for a command that writes nothing",
                cid,
            ));
        };
        if command.in_capsule {
            let error = PduError::field(field::CCCID);
            return Err(violation(
                error,
                "R2T for data that was in the capsule",
                cid,
            ));
        }
        if u64::from(command.open_r2ts) >= self.max_r2t {
            let what = "more R2Ts at a time than MAXR2T allows";
            return Err(violation(PduError::LIMIT_EXCEEDED, what, cid));
        }
        if r2t.offset_bytes != command.moved_bytes {
            let error = PduError::field(field::DATAO);
            return Err(violation(error, "R2T out of order", cid));
        }
        if r2t.length_bytes > expected_bytes - command.moved_bytes {
            let what = "R2T past the end of its command's data";
            return Err(violation(PduError::DATA_OUT_OF_RANGE, what, cid));
        }
        command.moved_bytes += r2t.length_bytes;
        command.open_r2ts += 1;
        Ok(Event::DataOut(DataOut { slot, r2t }))
    }

    fn on_response(&mut self, cqe: &Cqe) -> Result<Event, Violation> {
        let cid = cqe.cid();
        let slot = self.find(cid, "a response for a command that is not in flight")?;
        let command = &self.commands[usize::from(slot)];
        let expected_bytes = match command.transfer {
            HostTransfer::ToHost(bytes) => bytes,
            HostTransfer::ToController(bytes) if !command.in_capsule => bytes,
            _ => 0,
        };
        if cqe.status().is_success() && command.moved_bytes != expected_bytes {
            let what = "success before all data was moved";
            return Err(violation(PduError::SEQUENCE, what, cid));
        }
        Ok(Event::Completed(self.end(slot, cqe.status(), cqe.result())))
    }

    /// A [`DataIn`] is in place. Returns the completion if no response follows.
    ///
    /// `digest_ok` is true without digest. After a wrong one the command ends with Transient
    /// Transport Error (TCP 3.3.1.2).
    pub fn data_received(&mut self, slot: u16, digest_ok: bool) -> Option<Completion> {
        let command = self.commands.get_mut(usize::from(slot))?;
        command.bad_digest |= !digest_ok;
        command
            .ends_with_data
            .then(|| self.end(slot, Status::SUCCESS, 0))
    }

    /// An R2T's data is sent. No effect on ended commands.
    pub fn r2t_answered(&mut self, slot: u16) {
        if let Some(command) = self.commands.get_mut(usize::from(slot)) {
            command.open_r2ts = command.open_r2ts.saturating_sub(1);
        }
    }

    /// Frees the slot of an ended command.
    pub fn release(&mut self, slot: u16) {
        self.slots.give_back(slot);
    }

    fn end(&mut self, slot: u16, status: Status, result: u64) -> Completion {
        let command = std::mem::replace(&mut self.commands[usize::from(slot)], IDLE);
        self.slots.end(slot);
        let status = if command.bad_digest && status.is_success() {
            Status::TRANSIENT_TRANSPORT_ERROR
        } else {
            status
        };
        Completion {
            slot,
            status,
            result,
        }
    }

    fn find(&self, cid: u16, what: &'static str) -> Result<u16, Violation> {
        self.slots
            .find(cid)
            .ok_or(violation(PduError::field(field::CCCID), what, cid))
    }
}

const fn violation(error: PduError, what: &'static str, cid: u16) -> Violation {
    Violation { error, what, cid }
}
