//! Each message: success, refused, malformed.

use super::*;

/// What a responder makes of a request.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// The command is passed on.
    Executed,
    /// The responder answers by itself.
    Answered,
    Refused(MiRefusal),
}

use Outcome::{Answered, Executed, Refused};

const OPCODE: Outcome = Refused(MiRefusal::Status(MiStatus::INVALID_OPCODE));
const SIZE: Outcome = Refused(MiRefusal::Status(MiStatus::INVALID_SIZE));
const INPUT: Outcome = Refused(MiRefusal::Status(MiStatus::INVALID_INPUT_SIZE));

const fn parameter(byte: u16, bit: u8) -> Outcome {
    Refused(MiRefusal::Parameter { byte, bit })
}

fn outcome(bytes: &[u8]) -> Outcome {
    let message = sealed(bytes);
    let step = Responder::new().receive((), &message);
    assert_eq!(step.dropped, None, "{bytes:x?}");
    if step.execute.is_some() {
        assert!(step.send.is_empty());
        return Executed;
    }
    let (_, response) = step.send.first().expect("an answer");
    let (header, response) = MiResponse::decode(response).unwrap();
    // ROR is set, NMIMT and CSI are the request's (3.1.1).
    let (asked, _) = open(&message).unwrap();
    assert_eq!((header.kind, header.slot), (asked.kind, asked.slot));
    match response {
        MiResponse::Refused(refusal) => Refused(refusal),
        _ => Answered,
    }
}

/// A command of the Management Interface.
fn command(opcode: u8, nmd0: u32, nmd1: u32, data: usize) -> Vec<u8> {
    let (nmd0, nmd1) = (nmd0.to_le_bytes(), nmd1.to_le_bytes());
    let head = [0x84, 0x08, 0, 0, opcode, 0, 0, 0];
    [&head, &nmd0[..], &nmd1[..], &vec![0; data]].concat()
}

fn control(slot: u8, opcode: u8, parameter: u8) -> Vec<u8> {
    vec![0x84, slot, 0, 0, opcode, 0, parameter, 0]
}

fn admin(opcode: u8, offset: u32, length: u32, data: usize) -> Vec<u8> {
    let mut message = vec![0x84, 0x10, 0, 0, opcode];
    message.resize(68 + data, 0);
    message[28..32].copy_from_slice(&offset.to_le_bytes());
    message[32..36].copy_from_slice(&length.to_le_bytes());
    message
}

#[test]
fn control_primitives() {
    let cases = [
        (control(0, 0, 0), Answered),
        // The slot of Pause is reserved (4.2.1.1).
        (control(1, 0, 0), parameter(1, 0)),
        (control(0, 1, 0), Answered),
        (control(1, 1, 0), Answered),
        (control(0, 2, 0), Answered),
        (control(0, 3, 0), Answered),
        (control(0, 4, 0), Answered),
        (control(0, 4, 1), parameter(6, 0)),
        (control(0, 5, 0), OPCODE),
        (control(0, 0xFF, 0), OPCODE),
        (control(0, 3, 0)[..7].to_vec(), SIZE),
        ([&control(0, 3, 0)[..], &[0]].concat(), SIZE),
        (vec![0x84, 0, 0, 0], SIZE),
    ];
    for (bytes, expected) in cases {
        assert_eq!(outcome(&bytes), expected, "{bytes:x?}");
    }
}

#[test]
fn management_interface_commands() {
    let cases = [
        (command(0, 0, 0, 0), Executed),
        (command(0, 5 << 24, 0, 0), Executed),
        (command(0, 6 << 24, 0, 0), parameter(11, 0)),
        (command(0, 0, 0, 1), INPUT),
        (command(1, 0, 1 << 31, 0), Executed),
        (command(1, 0, 0, 4), INPUT),
        (command(2, 0x00FE_0000, 0, 0), Executed),
        (command(2, 0x00FF_0000, 0, 0), parameter(10, 0)),
        (command(2, 0, 0, 1), INPUT),
        (command(3, 1, 0, 0), Executed),
        (command(3, 3, 64, 0), Executed),
        (command(3, 0, 0, 0), parameter(8, 0)),
        // Asynchronous Event.
        (command(3, 4, 0, 0), parameter(8, 0)),
        (command(3, 3, 64, 1), INPUT),
        (command(4, 2, 0, 0), Executed),
        (command(4, 4, 0, 0), parameter(8, 0)),
        (command(4, 0xC0, 0, 0), parameter(8, 0)),
        (command(4, 2, 0, 1), INPUT),
        (command(5, 0, 256, 0), Executed),
        (command(5, 0, 1, 1), INPUT),
        (command(6, 0, 16, 16), Executed),
        (command(6, 0, 0, 0), Executed),
        (command(6, 0, 16, 15), INPUT),
        (command(6, 0, 16, 17), INPUT),
        (command(7, 0, 0, 0), Executed),
        (command(7, 1 << 24, 0, 0), parameter(11, 0)),
        (command(7, 0, 0, 1), INPUT),
        // SES, the Management Endpoint Buffer, Shutdown, reserved, of the vendor.
        (command(8, 0, 0, 0), OPCODE),
        (command(0x0A, 0, 0, 0), OPCODE),
        (command(0x0C, 0, 0, 0), OPCODE),
        (command(0x0D, 0, 0, 0), OPCODE),
        (command(0xC0, 0, 0, 0), OPCODE),
        (command(0, 0, 0, 0)[..15].to_vec(), SIZE),
        (vec![0x84, 0x08, 0, 0], SIZE),
    ];
    for (bytes, expected) in cases {
        assert_eq!(outcome(&bytes), expected, "{bytes:x?}");
    }
}

#[test]
fn admin_commands() {
    let cases = [
        // Identify, Get Log Page.
        (admin(0x06, 0, 4096, 0), Executed),
        (admin(0x02, 4096, 512, 0), Executed),
        (admin(0x06, 0, 4100, 0), parameter(32, 0)),
        (admin(0x06, 0, 2, 0), parameter(32, 0)),
        (admin(0x06, 2, 4, 0), parameter(28, 0)),
        (admin(0x06, 0, 4, 4), INPUT),
        // Firmware Image Download has request data.
        (admin(0x11, 0, 4096, 4096), Executed),
        (admin(0x11, 0, 4096, 4092), INPUT),
        (admin(0x11, 0, 0, 4), INPUT),
        (admin(0x11, 4, 4, 4), parameter(28, 0)),
        // Format NVM has no data.
        (admin(0x80, 0, 0, 0), Executed),
        (admin(0x80, 0, 0, 4), INPUT),
        (admin(0x06, 0, 4, 0)[..67].to_vec(), SIZE),
    ];
    for (bytes, expected) in cases {
        assert_eq!(outcome(&bytes), expected, "{:x?}", &bytes[..36]);
    }
}

#[test]
fn messages_of_other_kinds_and_features() {
    let cases: [(&[u8], Outcome); 6] = [
        // PCIe Configuration Read (7).
        (&[0x84, 0x20, 0, 0, 0, 0, 0, 0], OPCODE),
        (&[0x84, 0x21, 0, 0], OPCODE),
        // NMIMT reserved, and Asynchronous Event.
        (&[0x84, 0x18, 0, 0, 0, 0, 0, 0], parameter(1, 3)),
        (&[0x84, 0x28, 0, 0, 0, 0, 0, 0], parameter(1, 3)),
        // Management Endpoint Buffer, Command Initiated Auto Pause.
        (
            &[0x84, 0x08, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            parameter(2, 0),
        ),
        (
            &[0x84, 0x08, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            parameter(2, 1),
        ),
    ];
    for (bytes, expected) in cases {
        assert_eq!(outcome(bytes), expected, "{bytes:x?}");
    }
}
