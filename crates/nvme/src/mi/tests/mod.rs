use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::data::status_change;
use super::*;
use crate::{Cqe, Sqe, Status};

mod matrix;
mod responder;

/// CRC-32C bit by bit (3.1.1.1).
fn check_of(message: &[u8]) -> [u8; 4] {
    let check = message.iter().fold(u32::MAX, |check, &byte| {
        (0..8).fold(check ^ u32::from(byte), |check, _| {
            check >> 1 ^ if check & 1 != 0 { 0x82F6_3B78 } else { 0 }
        })
    });
    (!check).to_le_bytes()
}

/// A message of these bytes, with its check.
pub(super) fn sealed(bytes: &[u8]) -> Vec<u8> {
    [bytes, &check_of(bytes)].concat()
}

/// A request's message after its type byte.
fn decode(message: &[u8]) -> Result<MiRequest<'_>, MiRefusal> {
    let (header, body) = open(message).unwrap();
    MiRequest::decode(&header, body)
}

#[test]
fn the_integrity_check_covers_the_message_type() {
    // NVM Subsystem Health Status Poll with Clear Status, slot 0 (figures 17, 56 and 91).
    let message = MiRequest::Command(MiCommand::SubsystemHealth { clear: true }).encode(0);
    assert_eq!(
        message,
        [
            0x84, 0x08, 0, 0, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0xAA, 0xEF, 0x81, 0xB4
        ]
    );
    let (header, body) = open(&message).unwrap();
    assert_eq!(
        (header.kind, header.slot, header.response),
        (MiKind::Command, 0, false)
    );
    assert_eq!(body.len(), 12);
    for byte in 0..message.len() {
        let mut bad = message.clone();
        bad[byte] ^= 0x10;
        let expected = if byte == 0 {
            BrokenMessage::Type
        } else {
            BrokenMessage::Check
        };
        assert_eq!(open(&bad), Err(expected), "byte {byte}");
    }
    for length in 0..8 {
        assert_eq!(
            open(&sealed(&message[..length.max(4) - 4])[..length]),
            Err(BrokenMessage::Short)
        );
    }
    // Without the check, as in band.
    assert_eq!(open(&sealed(&[0x04, 0x08, 0, 0])), Err(BrokenMessage::Type));
}

/// Requests beside their bytes without the check.
#[test]
fn requests_have_the_bytes_of_the_specification() {
    let command = |opcode: u8, nmd0: [u8; 4], nmd1: [u8; 4]| {
        [&[0x84, 0x09, 0, 0, opcode, 0, 0, 0], &nmd0[..], &nmd1[..]].concat()
    };
    let mi = MiRequest::Command;
    let structure = |structure| mi(MiCommand::ReadDataStructure(structure));
    let control = |opcode: u8, parameter: u8| vec![0x84, 0x01, 0, 0, opcode, 0x5A, parameter, 0];
    let poll = ControllerHealthPoll {
        first: 0x0102,
        entries: 3,
        functions: 0b101,
        all: true,
        changes: 0b1_0001,
        clear: true,
    };
    let cases: Vec<(MiRequest<'_>, Vec<u8>)> = vec![
        // 4.2.1, figure 31.
        (
            MiRequest::Control(ControlPrimitive::Pause, 0x5A),
            control(0, 0),
        ),
        (
            MiRequest::Control(ControlPrimitive::Resume, 0x5A),
            control(1, 0),
        ),
        (
            MiRequest::Control(ControlPrimitive::Abort, 0x5A),
            control(2, 0),
        ),
        (
            MiRequest::Control(ControlPrimitive::GetState { clear_errors: true }, 0x5A),
            control(3, 1),
        ),
        (
            MiRequest::Control(ControlPrimitive::Replay { first_packet: 7 }, 0x5A),
            control(4, 7),
        ),
        // 5.7: DTYP in byte 11, PORTID in byte 10, CTRLID in bytes 9:8, IOCSI in byte 12.
        (
            structure(DataStructure::Subsystem),
            command(0, [0, 0, 0, 0], [0; 4]),
        ),
        (
            structure(DataStructure::Port(2)),
            command(0, [0, 0, 2, 1], [0; 4]),
        ),
        (
            structure(DataStructure::Controllers { from: 0x0102 }),
            command(0, [2, 1, 0, 2], [0; 4]),
        ),
        (
            structure(DataStructure::Controller(0x0102)),
            command(0, [2, 1, 0, 3], [0; 4]),
        ),
        (
            structure(DataStructure::OptionalCommands {
                controller: 1,
                command_set: 9,
            }),
            command(0, [1, 0, 0, 4], [9, 0, 0, 0]),
        ),
        (
            structure(DataStructure::BufferCommands),
            command(0, [0, 0, 0, 5], [0; 4]),
        ),
        // 5.6.
        (
            mi(MiCommand::SubsystemHealth { clear: false }),
            command(1, [0; 4], [0; 4]),
        ),
        // 5.3: SCTLID, MAXRENT counted from 0, functions and ALL; changes and CCF.
        (
            mi(MiCommand::ControllerHealth(poll)),
            command(2, [2, 1, 2, 0x85], [0x11, 0, 0, 0x80]),
        ),
        // 5.2.
        (
            mi(MiCommand::SetConfiguration(
                SetConfiguration::SmbusFrequency {
                    port: 4,
                    frequency: 2,
                },
            )),
            command(3, [1, 2, 0, 4], [0; 4]),
        ),
        (
            mi(MiCommand::SetConfiguration(
                SetConfiguration::HealthStatusChange { clear: 0x1FF7 },
            )),
            // Bits 11:0, without the reserved bit of the status.
            command(3, [2, 0, 0, 0], [0xFF, 0x0F, 0, 0]),
        ),
        (
            mi(MiCommand::SetConfiguration(
                SetConfiguration::HealthStatusChange {
                    clear: status_change::SUBSYSTEM_RESET | status_change::SHUTDOWN,
                },
            )),
            command(3, [2, 0, 0, 0], [0x0C, 0, 0, 0]),
        ),
        (
            mi(MiCommand::SetConfiguration(
                SetConfiguration::TransmissionUnit {
                    port: 4,
                    bytes: 250,
                },
            )),
            command(3, [3, 0, 0, 4], [250, 0, 0, 0]),
        ),
        // 5.1.
        (
            mi(MiCommand::GetConfiguration(
                GetConfiguration::SmbusFrequency { port: 4 },
            )),
            command(4, [1, 0, 0, 4], [0; 4]),
        ),
        (
            mi(MiCommand::GetConfiguration(
                GetConfiguration::HealthStatusChange,
            )),
            command(4, [2, 0, 0, 0], [0; 4]),
        ),
        (
            mi(MiCommand::GetConfiguration(
                GetConfiguration::TransmissionUnit { port: 4 },
            )),
            command(4, [3, 0, 0, 4], [0; 4]),
        ),
        // 5.12, 5.13, 5.8.
        (
            mi(MiCommand::ReadVpd {
                offset: 0x0102,
                bytes: 256,
            }),
            command(5, [2, 1, 0, 0], [0, 1, 0, 0]),
        ),
        (
            mi(MiCommand::WriteVpd {
                offset: 8,
                data: &[7; 3],
            }),
            [&command(6, [8, 0, 0, 0], [3, 0, 0, 0])[..], &[7; 3]].concat(),
        ),
        (mi(MiCommand::Reset), command(7, [0; 4], [0; 4])),
    ];
    for (request, bytes) in cases {
        let message = sealed(&bytes);
        assert_eq!(request.encode(1), message, "{request:?}");
        assert_eq!(decode(&message), Ok(request));
    }
}

/// 6.1, figure 116: each dword has its own place.
#[test]
fn admin_commands_have_the_bytes_of_the_specification() {
    let mut body = vec![0x02, 3, 0x34, 0x12];
    for dword in [1_u8, 2, 3, 4, 5] {
        body.extend([dword; 4]);
    }
    body.extend([0, 16, 0, 0]);
    body.extend([0, 2, 0, 0]);
    body.extend([0; 8]);
    for dword in [10_u8, 11, 12, 13, 14, 15] {
        body.extend([dword; 4]);
    }
    let message = sealed(&[&[0x84, 0x10, 0, 0], &body[..]].concat());
    let Ok(MiRequest::Admin(command)) = decode(&message) else {
        panic!()
    };
    assert_eq!(
        (command.controller, command.offset, command.length),
        (0x1234, 4096, 512)
    );
    let dwords: Vec<u32> = (0..16).map(|n| command.sqe.cdw(n)).collect();
    let same = |n: u32| n * 0x0101_0101;
    let expected = [2, same(1), same(2), same(3), same(4), same(5), 0, 0, 0, 0];
    assert_eq!(dwords[..10], expected);
    assert_eq!(dwords[10..], [10, 11, 12, 13, 14, 15].map(same));
    assert_eq!(MiRequest::Admin(command).encode(0), message);
}

/// Responses beside their bytes without the check.
#[test]
fn responses_have_the_bytes_of_the_specification() {
    let cqe = Cqe::new(
        0x0807_0605_0403_0201,
        0,
        0,
        0,
        Status::INVALID_FIELD.with_dnr(),
    );
    let cases: Vec<(MiKind, MiResponse<'_>, Vec<u8>)> = vec![
        // Figure 33.
        (
            MiKind::Control,
            MiResponse::Control {
                tag: 9,
                value: 0x8002,
            },
            vec![0x81, 0, 0, 0, 9, 2, 0x80],
        ),
        // Figure 61: status, NMRESP, data.
        (
            MiKind::Command,
            MiResponse::Command {
                value: 0x03_0201,
                data: &[7, 8],
            },
            vec![0x89, 0, 0, 0, 1, 2, 3, 7, 8],
        ),
        // Figure 118: CQE dwords 0, 1 and 3, without the command identifier.
        (
            MiKind::Admin,
            MiResponse::Admin { cqe, data: &[7, 8] },
            vec![
                0x91, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0x04, 0x80, 7, 8,
            ],
        ),
        // Figure 30: the time is in bytes 7:6.
        (
            MiKind::Admin,
            MiResponse::MoreProcessing { time: 0x0102 },
            vec![0x91, 0, 0, 1, 0, 2, 1],
        ),
        // Figure 29: bit, then byte.
        (
            MiKind::Command,
            MiResponse::Refused(MiRefusal::Parameter {
                byte: 0x0102,
                bit: 3,
            }),
            vec![0x89, 0, 0, 4, 3, 2, 1],
        ),
        // Figure 27.
        (
            MiKind::Admin,
            MiResponse::Refused(MiRefusal::Status(MiStatus::ACCESS_DENIED)),
            vec![0x91, 0, 0, 7, 0, 0, 0],
        ),
    ];
    for (kind, response, bytes) in cases {
        let message = sealed(&[&[0x84], &bytes[..]].concat());
        assert_eq!(response.encode(kind, 1), message, "{response:?}");
        let (header, decoded) = MiResponse::decode(&message).unwrap();
        assert_eq!((header.kind, header.slot, decoded), (kind, 1, response));
    }
}

#[test]
fn incomplete_responses_are_broken() {
    let cases: [&[u8]; 6] = [
        // A request.
        &[0x84, 0x08, 0, 0, 0, 0, 0, 0],
        &[0x84, 0x88, 0, 0, 0, 0, 0],
        // An Admin response without a whole entry.
        &[0x84, 0x90, 0, 0, 0, 0, 0, 0],
        &[
            0x84, 0x90, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0,
        ],
        // A PCIe response, and one of a reserved kind.
        &[0x84, 0xA0, 0, 0, 0, 0, 0, 0],
        &[0x84, 0x98, 0, 0, 0, 0, 0, 0],
    ];
    for bytes in cases {
        assert_eq!(
            MiResponse::decode(&sealed(bytes)).unwrap_err(),
            BrokenMessage::Body,
            "{bytes:?}"
        );
    }
}

#[test]
fn a_part_of_response_data_is_chosen() {
    let whole: Vec<u8> = (0..64).collect();
    let part = |offset, length| {
        let sqe = Sqe::new(0x06, 0);
        let command = AdminCommand {
            controller: 0,
            sqe,
            offset,
            length,
            data: &[],
        };
        command.part(&whole)
    };
    assert_eq!(part(0, 64), Ok(&whole[..]));
    assert_eq!(part(60, 4), Ok(&whole[60..]));
    assert_eq!(part(64, 0), Ok(&[][..]));
    assert_eq!(part(68, 0), Err(MiRefusal::at(28)));
    assert_eq!(part(60, 8), Err(MiRefusal::at(32)));
    assert_eq!(part(u32::MAX, 4), Err(MiRefusal::at(28)));
}

/// 5.6: a signed byte, and codes for failures.
#[test]
fn temperatures_are_coded() {
    let cases = [
        (Some(273), 0),
        (Some(318), 45),
        (Some(399), 126),
        (Some(400), 0x7F),
        (Some(u16::MAX), 0x7F),
        (Some(272), 0xFF),
        (Some(213), 0xC4),
        (Some(0), 0xC4),
        (None, 0x80),
    ];
    for (kelvins, code) in cases {
        assert_eq!(data::composite_temperature(kelvins), code, "{kelvins:?}");
    }
}

/// 5.3, 5.6 and 5.7: sizes and some places.
#[test]
fn structures_have_the_layout_of_the_specification() {
    let port = data::PortInformation {
        kind: 1,
        capabilities: 2,
        max_unit_bytes: 0x0403.into(),
        buffer_bytes: 0x0807_0605.into(),
        specific: [9; 24],
    };
    assert_eq!(port.as_bytes()[..9], [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let controller = data::ControllerInformation {
        port: 1,
        reserved: [0; 4],
        routing_valid: 5,
        routing: 0x0706.into(),
        vendor: 0x0908.into(),
        device: 0x0B0A.into(),
        subsystem_vendor: 0x0D0C.into(),
        subsystem_device: 0x0F0E.into(),
        segment: 16,
        reserved_end: [0; 15],
    };
    let expected = [1, 0, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
    assert_eq!(controller.as_bytes()[..17], expected);
    let health = data::ControllerHealth {
        controller: 0x0201.into(),
        status: 0x0403.into(),
        temperature_k: 0x0605.into(),
        life_used: 7,
        spare: 8,
        warnings: 9,
        changes: 0x0B0A.into(),
        reserved: [0; 5],
    };
    assert_eq!(health.as_bytes()[..11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    let subsystem = data::SubsystemHealth {
        status: data::SubsystemHealth::FUNCTIONAL | data::SubsystemHealth::NO_RESET_REQUIRED,
        no_warnings: 0xFF,
        temperature: 45,
        life_used: 5,
        changes: 0x0201.into(),
        reserved: [0; 2],
    };
    assert_eq!(subsystem.as_bytes(), [0x30, 0xFF, 45, 5, 1, 2, 0, 0]);
}

/// Messages near valid ones.
pub(super) fn any_message() -> impl Strategy<Value = Vec<u8>> {
    let head = (
        0..6_u8,
        any::<bool>(),
        any::<bool>(),
        prop_oneof![9 => Just(0_u8), 1 => any::<u8>()],
    );
    let body = prop_oneof![
        (0..9_u8, prop::collection::vec(any::<u8>(), 11..14)),
        (
            prop_oneof![Just(2_u8), Just(6), Just(0x11)],
            prop::collection::vec(0..8_u8, 60..80)
        ),
        (0..6_u8, prop::collection::vec(0..2_u8, 2..5)),
    ];
    (head, body).prop_map(|((kind, slot, response, flags), (opcode, body))| {
        let parameters = kind << 3 | u8::from(slot) | u8::from(response) << 7;
        sealed(&[&[0x84, parameters, flags, 0, opcode], &body[..]].concat())
    })
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_without_a_panic(
        kind in 0..6_u8,
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..8),
            prop::collection::vec(any::<u8>(), 0..100),
        ],
    ) {
        let _ = open(&bytes);
        for response in [0, 0x80] {
            let message = sealed(&[&[0x84, kind << 3 | response, 0, 0], &bytes[..]].concat());
            let (header, body) = open(&message).unwrap();
            let _ = MiRequest::decode(&header, body);
            let _ = MiResponse::decode(&message);
        }
    }

    /// Decoding ignores reserved fields, which encoding clears.
    #[test]
    fn decoded_requests_survive_encoding(message in any_message()) {
        let (header, body) = open(&message).unwrap();
        if let Ok(request) = MiRequest::decode(&header, body) {
            let again = request.encode(header.slot);
            prop_assert_eq!(decode(&again), Ok(request));
        }
    }

    #[test]
    fn decoded_responses_survive_encoding(message in any_message()) {
        if let Ok((header, response)) = MiResponse::decode(&message) {
            let again = response.encode(header.kind, header.slot);
            let (_, decoded) = MiResponse::decode(&again).unwrap();
            prop_assert_eq!(decoded, response);
        }
    }
}
