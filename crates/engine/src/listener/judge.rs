//! Checks a Connect against exports and associations (Base 2.0, 6.3).
//!
//! **Design.** A pure function, so that each refusal can be tested without a socket. It assigns the
//! unique controller id; the reactor makes the controller. **Not here:** checks that need the
//! controller (whether it is enabled, and which queue ids are free).

use super::refused::RefusedHost;
use super::{ListenerTarget, NewKind};
use crate::associations::Associations;
use crate::exports::ExportTable;
use crate::frontend::nvme_tcp::MAX_ADMIN_ENTRIES;
use forebay_nvme::controller::{Refusal, check_admin_connect};
use forebay_nvme::fabrics::{self, ConnectCommand, ConnectData};
use forebay_nvme::tcp::{DataPlace, decode_sgl};
use forebay_nvme::{Sqe, Status, opcode};
use zerocopy::FromBytes;

/// Discovery controllers have no lane that names a reactor.
const DISCOVERY_REACTOR: usize = 0;
/// Byte offset of QID (Base 2.0, figure 380).
const OFFSET_QID: u16 = 42;

pub(super) struct Welcome {
    pub reactor: usize,
    pub connect: Sqe,
    pub data: Box<ConnectData>,
    pub kind: NewKind,
}

/// Checks a connection's first command. `refused` gets the names that the operator should know.
pub(super) fn judge(
    sqe: &Sqe,
    in_capsule: &[u8],
    associations: &Associations,
    exports: &ExportTable,
    refused: &mut Option<RefusedHost>,
) -> Result<Welcome, Refusal> {
    if sqe.opcode() != opcode::FABRICS || fabrics::fctype(sqe) != opcode::fctype::CONNECT {
        return Err(status(Status::COMMAND_SEQUENCE_ERROR));
    }
    let command = ConnectCommand::of(sqe);
    if command.recfmt.get() != 0 {
        return Err(status(Status::CONNECT_INCOMPATIBLE_FORMAT));
    }
    let data = Box::new(connect_data(sqe, in_capsule)?);
    let subsystem = data
        .subnqn()
        .map_err(|_| in_data(ConnectData::OFFSET_SUBNQN))?;
    let host = data
        .hostnqn()
        .map_err(|_| in_data(ConnectData::OFFSET_HOSTNQN))?;
    let served = exports.by_nqn(subsystem.as_str());
    let mut because = |why, refusal| {
        *refused = Some(RefusedHost {
            host: host.to_string(),
            subsystem: subsystem.to_string(),
            why,
        });
        Err(refusal)
    };
    let reactor = match &served {
        _ if subsystem.is_discovery() => DISCOVERY_REACTOR,
        Some(served) if served.allows(host.as_str()) => served.reactor,
        Some(_) => {
            return because(
                "it is not on the export's list",
                Refusal::host_not_allowed(),
            );
        }
        None => return because("there is no such export", Refusal::unknown_subsystem()),
    };
    if command.qid.get() != 0 {
        if subsystem.is_discovery() {
            // A discovery controller has no I/O queues (Base 2.0, 3.1.2.3).
            return Err(invalid(false, OFFSET_QID));
        }
        let cntlid = data.cntlid.get();
        let reactor = associations
            .find(cntlid, &subsystem, &host, &data.hostid)
            .ok_or(in_data(ConnectData::OFFSET_CNTLID))?;
        return Ok(Welcome {
            reactor,
            connect: *sqe,
            data,
            kind: NewKind::Io { cntlid },
        });
    }
    let connect = Box::new(check_admin_connect(command, &data, MAX_ADMIN_ENTRIES)?);
    let target = match served {
        Some(served) if !subsystem.is_discovery() => ListenerTarget::Export(served.config.export),
        _ => ListenerTarget::Discovery(exports.clone()),
    };
    let association = associations
        .begin(reactor, subsystem, host, data.hostid)
        .ok_or_else(Refusal::busy)?;
    Ok(Welcome {
        reactor,
        connect: *sqe,
        data,
        kind: NewKind::Admin {
            association,
            connect,
            target,
        },
    })
}

/// Connect's data is in the capsule (TCP 3.5).
fn connect_data(sqe: &Sqe, in_capsule: &[u8]) -> Result<ConnectData, Refusal> {
    let place = decode_sgl(sqe, in_capsule.len() as u32).map_err(status)?;
    let DataPlace::InCapsule {
        offset_bytes,
        length_bytes,
    } = place
    else {
        return Err(status(Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr()));
    };
    if length_bytes as usize != size_of::<ConnectData>() {
        return Err(status(Status::DATA_SGL_LENGTH_INVALID.with_dnr()));
    }
    let bytes = in_capsule.get(offset_bytes as usize..).unwrap_or(&[]);
    match ConnectData::read_from_prefix(bytes) {
        Ok((data, _)) => Ok(data),
        Err(_) => Err(status(Status::DATA_SGL_LENGTH_INVALID.with_dnr())),
    }
}

fn status(status: Status) -> Refusal {
    Refusal { status, result: 0 }
}

fn in_data(offset_bytes: u16) -> Refusal {
    invalid(true, offset_bytes)
}

fn invalid(in_data: bool, offset_bytes: u16) -> Refusal {
    let (status, result) = fabrics::invalid_parameter(in_data, offset_bytes);
    Refusal { status, result }
}
