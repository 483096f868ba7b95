//! Connect: from two structures to an association or an I/O queue.
//!
//! Purpose: the checks that need no knowledge of who may connect. Does NOT find the subsystem or
//! the controller, and does NOT authorise the host: the caller does, with [`Refusal`]'s
//! constructors for its answers.

use super::{Controller, ControllerKind, MAX_IO_QUEUES};
use crate::fabrics::{ConnectCommand, ConnectData, invalid_parameter};
use crate::{Nqn, Status};

// Byte offsets in the Connect command (Base 2.0, 6.3).
const QID: u16 = 42;
const SQSIZE: u16 = 44;

/// A Connect that is refused: its completion's status, and dwords 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Status field.
    pub status: Status,
    /// Dwords 0 and 1 of the completion.
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
    /// No such subsystem.
    pub fn unknown_subsystem() -> Self {
        Self::parameter(true, ConnectData::OFFSET_SUBNQN)
    }
    /// No such controller (an I/O queue's Connect).
    pub fn unknown_controller() -> Self {
        Self::parameter(true, ConnectData::OFFSET_CNTLID)
    }
    /// The host may not use this subsystem.
    pub fn host_not_allowed() -> Self {
        Self::status(Status::CONNECT_INVALID_HOST.with_dnr())
    }
    /// No controller is free now; the host may try again.
    pub fn busy() -> Self {
        Self::status(Status::CONNECT_CONTROLLER_BUSY)
    }
}

/// A Connect of an Admin queue that is well formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminConnect {
    /// The subsystem asked for.
    pub subnqn: Nqn,
    /// The host, as it names itself.
    pub hostnqn: Nqn,
    /// Host Identifier.
    pub hostid: [u8; 16],
    /// Admin queue size, in entries.
    pub entries: u32,
    /// Keep Alive Timeout; 0 for none.
    pub kato_ms: u32,
    /// The host asks for no submission queue flow control.
    pub disable_sq_flow_control: bool,
}

/// A Connect of an I/O queue that was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoQueue {
    /// Queue Identifier, from 1.
    pub qid: u16,
    /// Queue size, in entries.
    pub entries: u32,
    /// The host asks for no submission queue flow control.
    pub disable_sq_flow_control: bool,
}

struct Names {
    subnqn: Nqn,
    hostnqn: Nqn,
}

/// What both kinds of Connect share: the format, a queue size of 2 to `max_entries`, the names.
fn check(command: &ConnectCommand, data: &ConnectData, max_entries: u32) -> Result<Names, Refusal> {
    if command.recfmt.get() != 0 {
        return Err(Refusal::status(
            Status::CONNECT_INCOMPATIBLE_FORMAT.with_dnr(),
        ));
    }
    // 0's based, and a queue has at least two entries (Base 2.0, 3.3.3.1).
    let sqsize = u32::from(command.sqsize.get());
    if sqsize == 0 || sqsize >= max_entries {
        return Err(Refusal::parameter(false, SQSIZE));
    }
    let subnqn = data.subnqn().map_err(|_| Refusal::unknown_subsystem())?;
    let bad_host = Refusal::parameter(true, ConnectData::OFFSET_HOSTNQN);
    let hostnqn = data.hostnqn().map_err(|_| bad_host)?;
    Ok(Names { subnqn, hostnqn })
}

/// Checks the Connect of an Admin queue of at most `max_entries` entries (Base 2.0, 6.3). Then the
/// caller looks for the subsystem, asks whether the host may use it, and makes a [`Controller`].
/// The completion's dwords 0 and 1 are the new controller's identifier.
pub fn check_admin_connect(
    command: &ConnectCommand,
    data: &ConnectData,
    max_entries: u32,
) -> Result<AdminConnect, Refusal> {
    let names = check(command, data, max_entries)?;
    if command.qid.get() != 0 {
        return Err(Refusal::parameter(false, QID));
    }
    // The dynamic controller model (FCATT bit 0 is 0) allocates, so a host can't choose.
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
    /// Connects an I/O queue to this controller (Base 2.0, 6.3). The completion's dwords 0 and 1
    /// are the controller's identifier.
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
        // The association belongs to one host.
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

    /// There is an I/O queue of this number (PCI Express), in one direction or both.
    pub(crate) fn io_queue_there(&mut self, qid: u16) {
        if (1..=MAX_IO_QUEUES).contains(&qid) {
            let (word, bit) = queue_bit(qid);
            self.state.io_queues[word] |= bit;
        }
    }

    /// The connection of an I/O queue has ended, and nothing of it is in flight.
    pub fn io_queue_gone(&mut self, qid: u16) {
        if self.io_queue_connected(qid) {
            let (word, bit) = queue_bit(qid);
            self.state.io_queues[word] &= !bit;
        }
    }

    /// How many I/O queues the host may connect.
    pub fn granted_io_queues(&self) -> u16 {
        self.state.granted_io_queues
    }
}

/// Where a queue of 1 to [`MAX_IO_QUEUES`] is in the bitmap.
fn queue_bit(qid: u16) -> (usize, u64) {
    let index = usize::from(qid - 1);
    (index / 64, 1 << (index % 64))
}
