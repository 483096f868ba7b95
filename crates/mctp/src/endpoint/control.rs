//! Control requests (DSP0236, 12).

use super::{Address, ControlAnswer, DropReason, EndpointConfig, Message};
use crate::packet::{EID_BROADCAST, EID_NULL};

const SET_ENDPOINT_ID: u8 = 0x01;
const GET_ENDPOINT_ID: u8 = 0x02;
const GET_ENDPOINT_UUID: u8 = 0x03;
const GET_VERSION_SUPPORT: u8 = 0x04;
const GET_MESSAGE_TYPE_SUPPORT: u8 = 0x05;

/// A completion code (table 13).
#[derive(Clone, Copy, Debug)]
enum Fault {
    InvalidData = 0x02,
    InvalidLength = 0x03,
    UnsupportedCommand = 0x05,
    /// Of Get MCTP Version Support only.
    UnsupportedType = 0x80,
}

/// DSP0236 1.0 to 1.3, in any update.
const VERSIONS: [[u8; 4]; 4] = [
    [0xF1, 0xF0, 0xFF, 0],
    [0xF1, 0xF1, 0xFF, 0],
    [0xF1, 0xF2, 0xFF, 0],
    [0xF1, 0xF3, 0xFF, 0],
];

/// Message types that are reported: a response fits into the baseline transmission unit.
const MAX_TYPES: usize = 32;

/// Carries out a request.
pub(super) fn answer(
    config: &mut EndpointConfig,
    request: &Message,
) -> Result<ControlAnswer, DropReason> {
    let [_, flags, command, data @ ..] = &request.bytes[..] else {
        return Err(DropReason::ShortPacket);
    };
    // Rq set, D clear: a request that wants an answer (11.4).
    if flags & 0xC0 != 0x80 {
        return Err(DropReason::NotARequest);
    }
    let broadcast = request.from.local_eid == EID_BROADCAST;
    if broadcast && *command == SET_ENDPOINT_ID {
        return Err(DropReason::UnknownDestination);
    }
    let before = config.eid;
    let outcome = match *command {
        SET_ENDPOINT_ID => set_endpoint_id(config, data),
        GET_ENDPOINT_ID => no_data(data).map(|()| endpoint_id(config)),
        GET_ENDPOINT_UUID => no_data(data).map(|()| config.uuid.to_vec()),
        GET_VERSION_SUPPORT => version_support(config, data),
        GET_MESSAGE_TYPE_SUPPORT => no_data(data).map(|()| message_types(config)),
        _ => Err(Fault::UnsupportedCommand),
    };
    let mut bytes = vec![0, flags & 0x1F, *command];
    match outcome {
        Ok(data) => {
            bytes.push(0);
            bytes.extend(data);
        }
        Err(fault) => bytes.push(fault as u8),
    }
    // From the EID that the peer used: it may not expect an answer from another.
    let local_eid = match request.from.local_eid {
        EID_NULL | EID_BROADCAST => config.eid,
        used => used,
    };
    Ok(ControlAnswer {
        to: Address {
            local_eid,
            ..request.from
        },
        bytes,
        new_eid: (config.eid != before).then_some(config.eid),
    })
}

fn no_data(data: &[u8]) -> Result<(), Fault> {
    if data.is_empty() {
        Ok(())
    } else {
        Err(Fault::InvalidLength)
    }
}

/// 12.3. Serial lines have no Discovered flag, so an attempt to set it is invalid.
fn set_endpoint_id(config: &mut EndpointConfig, data: &[u8]) -> Result<Vec<u8>, Fault> {
    let &[operation, eid] = data else {
        return Err(Fault::InvalidLength);
    };
    config.eid = match operation & 3 {
        // Set and force differ only on several buses.
        0 | 1 if !matches!(eid, EID_NULL | EID_BROADCAST) => eid,
        2 if config.static_eid != EID_NULL => config.static_eid,
        _ => return Err(Fault::InvalidData),
    };
    // Accepted; no pool of EIDs.
    Ok(vec![0, config.eid, 0])
}

/// 12.4: EID, type, nothing specific to the medium.
fn endpoint_id(config: &EndpointConfig) -> Vec<u8> {
    let kind = match config.static_eid {
        EID_NULL => 0,
        eid if eid == config.eid => 2,
        _ => 3,
    };
    vec![config.eid, kind, 0]
}

/// 12.6.
fn version_support(config: &EndpointConfig, data: &[u8]) -> Result<Vec<u8>, Fault> {
    let &[kind] = data else {
        return Err(Fault::InvalidLength);
    };
    let versions = match kind {
        0x00 | 0xFF => &VERSIONS[..],
        // Bindings of message types: 1.0 (NVMe-MI: DSP0235).
        _ if message_codes(config).any(|code| code == kind) => &VERSIONS[..1],
        _ => return Err(Fault::UnsupportedType),
    };
    let mut answer = vec![versions.len() as u8];
    answer.extend(versions.as_flattened());
    Ok(answer)
}

/// 12.7.
fn message_types(config: &EndpointConfig) -> Vec<u8> {
    let codes: Vec<u8> = message_codes(config).collect();
    [&[codes.len() as u8], &codes[..]].concat()
}

fn message_codes(config: &EndpointConfig) -> impl Iterator<Item = u8> {
    let types = config.types.iter().take(MAX_TYPES);
    types.map(|kind| kind.first_byte & 0x7F)
}
