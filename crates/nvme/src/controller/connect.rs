//! Checks Connect commands.
//!
//! The caller finds subsystem and controller and authorizes the host; [`Refusal`] has its answers.

use super::{Controller, ControllerKind, MAX_IO_QUEUES};
use crate::fabrics::{ConnectCommand, ConnectData, invalid_parameter};
use crate::{Nqn, Status};

// Byte offsets in Connect (Base 2.0, 6.3).
const QID: u16 = 42;
const SQSIZE: u16 = 44;

/// A refused Connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Status.
    pub status: Status,
    /// Completion dwords 0 and 1.
    pub result: u64,
}

impl Refusal {
    fn parameter(in_data: bool, offset_bytes: u16) -> Self {
        let (status, result) = invalid_parameter(in_data, offset_bytes);
        Self { status, result }
    }
    fn status(status: Status) -> Self {
        Self { status, result: 0 }
    }
    /// Unknown subsystem.
    pub fn unknown_subsystem() -> Self {
        Self::parameter(true, ConnectData::OFFSET_SUBNQN)
    }
    /// Unknown controller (I/O Connect).
    pub fn unknown_controller() -> Self {
        Self::parameter(true, ConnectData::OFFSET_CNTLID)
    }
    /// The host has no access.
    pub fn host_not_allowed() -> Self {
        Self::status(Status::CONNECT_INVALID_HOST.with_dnr())
    }
    /// No free controller; the host may retry.
    pub fn busy() -> Self {
        Self::status(Status::CONNECT_CONTROLLER_BUSY)
    }
}

/// A well-formed admin queue Connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminConnect {
    /// The subsystem's NQN.
    pub subnqn: Nqn,
    /// The host's NQN.
    pub hostnqn: Nqn,
    /// Host Identifier.
    pub hostid: [u8; 16],
    /// Queue size.
    pub entries: u32,
    /// Keep Alive Timeout; 0: none.
    pub kato_ms: u32,
    /// Disable SQ flow control.
    pub disable_sq_flow_control: bool,
}

/// An accepted I/O queue Connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoQueue {
    /// Queue identifier, from 1.
    pub qid: u16,
    /// Queue size.
    pub entries: u32,
    /// Disable SQ flow control.
    pub disable_sq_flow_control: bool,
}

struct Names {
    subnqn: Nqn,
    hostnqn: Nqn,
}

/// Format, queue size up to `max_entries`, names.
fn check(command: &ConnectCommand, data: &ConnectData, max_entries: u32) -> Result<Names, Refusal> {
    if command.recfmt.get() != 0 {
        return Err(Refusal::status(
            Status::CONNECT_INCOMPATIBLE_FORMAT.with_dnr(),
        ));
    }
    // 0's based; a queue has at least two entries (Base 2.0, 3.3.3.1).
    let sqsize = u32::from(command.sqsize.get());
    if sqsize == 0 || sqsize >= max_entries {
        return Err(Refusal::parameter(false, SQSIZE));
    }
    let subnqn = data.subnqn().map_err(|_| Refusal::unknown_subsystem())?;
    let bad_host = Refusal::parameter(true, ConnectData::OFFSET_HOSTNQN);
    let hostnqn = data.hostnqn().map_err(|_| bad_host)?;
    Ok(Names { subnqn, hostnqn })
}

/// Checks an admin Connect (Base 2.0, 6.3) for at most `max_entries` entries.
///
/// The caller then finds the subsystem, authorizes the host and returns the new [`Controller`]'s
/// identifier as result.
pub fn check_admin_connect(
    command: &ConnectCommand,
    data: &ConnectData,
    max_entries: u32,
) -> Result<AdminConnect, Refusal> {
    let names = check(command, data, max_entries)?;
    if command.qid.get() != 0 {
        return Err(Refusal::parameter(false, QID));
    }
    // In the dynamic model (FCATT bit 0 is 0) the host cannot choose.
    if data.cntlid.get() != ConnectData::CNTLID_DYNAMIC {
        return Err(Refusal::unknown_controller());
    }
    Ok(AdminConnect {
        subnqn: names.subnqn,
        hostnqn: names.hostnqn,
        hostid: data.hostid,
        entries: u32::from(command.sqsize.get()) + 1,
        kato_ms: command.kato.get(),
        disable_sq_flow_control: disables_flow_control(command),
    })
}

fn disables_flow_control(command: &ConnectCommand) -> bool {
    command.cattr & ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL != 0
}

impl Controller {
    /// Connects an I/O queue (Base 2.0, 6.3). The result is the controller's identifier.
    pub fn connect_io_queue(
        &mut self,
        command: &ConnectCommand,
        data: &ConnectData,
    ) -> Result<IoQueue, Refusal> {
        let names = check(command, data, self.config.max_queue_entries)?;
        if data.cntlid.get() != self.config.cntlid {
            return Err(Refusal::unknown_controller());
        }
        if names.subnqn != self.config.subnqn {
            return Err(Refusal::unknown_subsystem());
        }
        // An association has one host.
        if names.hostnqn != self.hostnqn || data.hostid != self.state.hostid {
            return Err(Refusal::parameter(true, ConnectData::OFFSET_HOSTNQN));
        }
        let qid = command.qid.get();
        let discovery = self.config.kind == ControllerKind::Discovery;
        if discovery || qid == 0 || qid > self.state.granted_io_queues {
            return Err(Refusal::parameter(false, QID));
        }
        if !self.ready() || self.io_queue_connected(qid) {
            return Err(Refusal::status(Status::COMMAND_SEQUENCE_ERROR.with_dnr()));
        }
        let (word, bit) = queue_bit(qid);
        self.state.io_queues[word] |= bit;
        Ok(IoQueue {
            qid,
            entries: u32::from(command.sqsize.get()) + 1,
            disable_sq_flow_control: disables_flow_control(command),
        })
    }

    /// Whether an I/O queue is connected.
    pub fn io_queue_connected(&self, qid: u16) -> bool {
        if qid == 0 || qid > MAX_IO_QUEUES {
            return false;
        }
        let (word, bit) = queue_bit(qid);
        self.state.io_queues[word] & bit != 0
    }

    /// Marks a PCIe I/O queue as existing in a direction.
    pub(crate) fn io_queue_there(&mut self, qid: u16) {
        if (1..=MAX_IO_QUEUES).contains(&qid) {
            let (word, bit) = queue_bit(qid);
            self.state.io_queues[word] |= bit;
        }
    }

    /// Removes an I/O queue without commands in flight.
    pub fn io_queue_gone(&mut self, qid: u16) {
        if self.io_queue_connected(qid) {
            let (word, bit) = queue_bit(qid);
            self.state.io_queues[word] &= !bit;
        }
    }

    /// I/O queues that the host may connect.
    pub fn granted_io_queues(&self) -> u16 {
        self.state.granted_io_queues
    }
}

/// Word and bit of a valid queue.
fn queue_bit(qid: u16) -> (usize, u64) {
    let index = usize::from(qid - 1);
    (index / 64, 1 << (index % 64))
}
