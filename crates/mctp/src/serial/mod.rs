//! Frames of a serial line (DSP0253, 5.2): flag, revision, byte count, escaped packet, check, flag.
//!
//! Neither byte count nor check is escaped. A flag inside a packet begins another frame.

#[cfg(test)]
mod tests;

use crate::packet::{HEADER_BYTES, MAX_PACKET_BYTES, Packet};

const FLAG: u8 = 0x7E;
const ESCAPE: u8 = 0x7D;
/// An escaped byte has this bit inverted.
const ESCAPE_XOR: u8 = 0x20;
const REVISION: u8 = 1;
/// Of the check before its first byte (RFC 1662, appendix C).
const CHECK_START: u16 = 0xFFFF;

/// Appends a packet's frame to `out`: at most 516 bytes.
pub fn encode(packet: &Packet, out: &mut Vec<u8>) {
    let head = [REVISION, packet.len() as u8];
    let check = check_of(check_of(CHECK_START, &head), packet);
    out.push(FLAG);
    out.extend(head);
    for &byte in packet.iter() {
        match byte {
            FLAG | ESCAPE => out.extend([ESCAPE, byte ^ ESCAPE_XOR]),
            _ => out.push(byte),
        }
    }
    out.extend(check.to_be_bytes());
    out.push(FLAG);
}

/// CRC-CCITT of RFC 1662, without the final complement.
fn check_of(check: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(check, |check, &byte| {
        (0..8).fold(check ^ u16::from(byte), |check, _| {
            check >> 1 ^ if check & 1 != 0 { 0x8408 } else { 0 }
        })
    })
}

/// Finds packets in a stream. Memory: one packet.
#[derive(Clone, Debug)]
pub struct Decoder {
    state: State,
    /// The packet so far.
    bytes: [u8; MAX_PACKET_BYTES],
    filled: usize,
    /// Its length by the frame's byte count.
    length: usize,
    /// The check in the frame.
    check: u16,
    faults: Faults,
}

/// Frames that a [`Decoder`] dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Frames of another revision, a wrong length, with a wrong escape, or cut short.
    pub malformed: u64,
    /// Frames with a wrong check.
    pub corrupt: u64,
}

/// What the next byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Anything up to a flag.
    Lost,
    Revision,
    Count,
    Data,
    Escaped,
    CheckHigh,
    CheckLow,
    End,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// A decoder that awaits a flag.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: State::Lost,
            bytes: [0; MAX_PACKET_BYTES],
            filled: 0,
            length: 0,
            check: 0,
            faults: Faults::default(),
        }
    }

    /// The frames dropped so far.
    #[must_use]
    pub fn faults(&self) -> Faults {
        self.faults
    }

    /// Takes bytes up to the end of the next packet; `None` if `stream` is used up before.
    pub fn next_packet(&mut self, stream: &mut &[u8]) -> Option<Packet> {
        while let Some((&byte, rest)) = stream.split_first() {
            *stream = rest;
            if self.ends_packet(byte) {
                return Packet::new(&self.bytes[..self.length]);
            }
        }
        None
    }

    fn ends_packet(&mut self, byte: u8) -> bool {
        self.state = match (self.state, byte) {
            (State::Lost, FLAG) | (State::Revision, FLAG) => State::Revision,
            (State::Lost, _) => State::Lost,
            (State::Revision, REVISION) => State::Count,
            (State::Count, count) if usize::from(count) > HEADER_BYTES => {
                self.length = usize::from(count);
                self.filled = 0;
                State::Data
            }
            (State::Data | State::Escaped, FLAG) => {
                self.faults.malformed += 1;
                State::Revision
            }
            (State::Data, ESCAPE) => State::Escaped,
            (State::Data, byte) => self.fill(byte),
            (State::Escaped, byte) => match byte ^ ESCAPE_XOR {
                byte @ (FLAG | ESCAPE) => self.fill(byte),
                _ => self.malformed(),
            },
            (State::CheckHigh, byte) => {
                self.check = u16::from(byte) << 8;
                State::CheckLow
            }
            (State::CheckLow, byte) => {
                self.check |= u16::from(byte);
                State::End
            }
            (State::End, FLAG) => {
                let good = self.is_intact();
                self.faults.corrupt += u64::from(!good);
                // The flag may begin the next frame, too.
                self.state = State::Revision;
                return good;
            }
            (State::Revision | State::Count | State::End, _) => self.malformed(),
        };
        false
    }

    fn fill(&mut self, byte: u8) -> State {
        self.bytes[self.filled] = byte;
        self.filled += 1;
        if self.filled == self.length {
            State::CheckHigh
        } else {
            State::Data
        }
    }

    fn malformed(&mut self) -> State {
        self.faults.malformed += 1;
        State::Lost
    }

    fn is_intact(&self) -> bool {
        let head = [REVISION, self.length as u8];
        let check = check_of(check_of(CHECK_START, &head), &self.bytes[..self.length]);
        check == self.check
    }
}
