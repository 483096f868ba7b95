//! What a connection receives: PDUs in place, and data to where it belongs.
//!
//! **Design.** Bytes are received into one large buffer of the reactor, and whole PDUs are taken there.
//! Data of an R2T's PDU goes to its staging buffer as it comes, whole or not (and when much of it is
//! still to come, the socket is read right into the staging buffer). What is left, the beginning of a
//! PDU or, when memory has run out, PDUs that must wait, is kept in a buffer of the reactor's pool that
//! the connection has for so long.
//!
//! Which data may come, and where in a transfer, is checked here (TCP 3.3.2, 3.6.2.8); the fields of a
//! PDU were checked by the codec.
//!
//! **Not here:** commands ([`super::command`], [`super::admin`]).

use super::conn::Conn;
use super::pool::Pool;
use super::slots::Stage;
use super::{Turn, admin, command};
use forebay_nvme::tcp::{
    self, DIGEST_BYTES, DataDigest, Frame, H2cData, Parsed, Pdu, PduError, field,
};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::cell::RefCell;
use std::io::IoSliceMut;

/// Bytes of the reactor's receive buffer; a connection keeps at most as many.
pub(super) const RECEIVE_BYTES: usize = 256 * 1024;
/// Commands taken before completions are looked at again.
const BATCH: u32 = 8;
/// From so many missing bytes on, the socket is read into the staging buffer itself.
const DIRECT_BYTES: u32 = 16 * 1024;

/// What comes next in the stream.
#[derive(Debug)]
enum Expect {
    /// A PDU's header.
    Header,
    /// Data of a PDU.
    Data { slot: u16, left: u32, digest: bool },
    /// Its digest.
    Digest {
        slot: u16,
        have: u8,
        bytes: [u8; DIGEST_BYTES],
    },
}

/// See the module's text.
pub(super) struct Rx {
    expect: Expect,
    digest: DataDigest,
    /// Received, not yet taken.
    kept: Vec<u8>,
    /// `kept` begins with a whole PDU that must wait for memory.
    stalled: bool,
    /// Commands taken of what one receive brought.
    taken: u32,
}

/// Why taking PDUs came to a stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// What is left is no whole PDU.
    Dry,
    /// Completions should be looked at; there may be more.
    Batch,
    /// The next PDU needs memory that there is not.
    Stalled,
    /// The connection must end, in silence.
    Close,
    /// The connection must end with these words; the PDU begins where taking stopped.
    Terminate(PduError),
}

/// What a receive brought.
pub(super) enum Received {
    /// Nothing is there.
    Nothing,
    /// So many bytes in the reactor's buffer, kept ones included.
    Bytes(usize),
    /// Only data, which is in its place.
    Data,
    /// The connection has ended.
    Ended,
}

impl Rx {
    pub(super) fn new() -> Self {
        Self {
            expect: Expect::Header,
            digest: DataDigest::new(),
            kept: Vec::new(),
            stalled: false,
            taken: 0,
        }
    }

    pub(super) fn stalled(&self) -> bool {
        self.stalled
    }

    /// Drops what was received; nothing more will be taken.
    pub(super) fn forget(&mut self, pool: &RefCell<Pool>) {
        pool.borrow_mut()
            .give_buffer(std::mem::take(&mut self.kept));
        self.stalled = false;
        self.expect = Expect::Header;
    }
}

/// Receives once. `buffer` is longer than what a connection may keep.
pub(super) fn receive(conn: &mut Conn, buffer: &mut [u8]) -> Received {
    let Some(fd) = &conn.fd else {
        return Received::Ended;
    };
    let have = conn.rx.kept.len();
    let result = match direct(&conn.rx.expect) {
        // Then nothing is kept: everything that came was data.
        Some((slot, left)) => {
            let place = conn.slots.get_mut(slot).and_then(|s| {
                let from = s.received_bytes as usize;
                s.buffer
                    .as_mut()?
                    .as_mut_slice()
                    .get_mut(from..from + left as usize)
            });
            let Some(place) = place else {
                return Received::Ended;
            };
            match rustix::io::readv(fd, &mut [IoSliceMut::new(place), IoSliceMut::new(buffer)]) {
                Ok(n) if n > 0 => {
                    let placed = n.min(left as usize);
                    placed_data(conn, placed as u32);
                    return match n - placed {
                        0 => Received::Data,
                        more => {
                            conn.rx.taken = 0;
                            Received::Bytes(more)
                        }
                    };
                }
                other => other,
            }
        }
        None => {
            let room = &mut buffer[have..];
            let room_bytes = room.len().min(RECEIVE_BYTES.saturating_sub(have));
            if room_bytes == 0 {
                return Received::Nothing;
            }
            rustix::net::recv(fd, &mut room[..room_bytes], RecvFlags::DONTWAIT).map(|(_, n)| n)
        }
    };
    match result {
        Ok(0) => Received::Ended,
        Ok(n) => {
            if have > 0 {
                let kept = std::mem::take(&mut conn.rx.kept);
                buffer[..have].copy_from_slice(&kept);
                conn.shared.pool.borrow_mut().give_buffer(kept);
            }
            conn.rx.taken = 0;
            Received::Bytes(have + n)
        }
        Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
        Err(_) => Received::Ended,
    }
}

fn direct(expect: &Expect) -> Option<(u16, u32)> {
    match expect {
        Expect::Data { slot, left, .. } if *left >= DIRECT_BYTES => Some((*slot, *left)),
        _ => None,
    }
}

/// Takes PDUs from `bytes`; returns how many bytes were taken, and why it stopped.
pub(super) fn take(conn: &mut Conn, turn: &mut Turn<'_>, bytes: &[u8]) -> (usize, Stop) {
    let mut at = 0;
    let mut commands = 0;
    conn.rx.stalled = false;
    loop {
        let rest = &bytes[at..];
        match conn.rx.expect {
            Expect::Data { slot, left, .. } => {
                let n = rest.len().min(left as usize);
                let Some(s) = conn.slots.get_mut(slot) else {
                    return (at, Stop::Close);
                };
                let from = s.received_bytes as usize;
                match s
                    .buffer
                    .as_mut()
                    .and_then(|b| b.as_mut_slice().get_mut(from..from + n))
                {
                    Some(place) => place.copy_from_slice(&rest[..n]),
                    None => return (at, Stop::Close),
                }
                at += n;
                placed_data(conn, n as u32);
                match conn.rx.expect {
                    Expect::Data { left: 0, .. } => {
                        conn.rx.expect = Expect::Header;
                        if let Err(stop) = data_pdu_ended(conn, turn, slot) {
                            return (at, stop);
                        }
                    }
                    Expect::Data { .. } => return (at, Stop::Dry),
                    _ => {}
                }
            }
            Expect::Digest {
                slot,
                have,
                bytes: mut digest,
            } => {
                let n = rest.len().min(DIGEST_BYTES - usize::from(have));
                digest[usize::from(have)..usize::from(have) + n].copy_from_slice(&rest[..n]);
                at += n;
                let have = have + n as u8;
                if usize::from(have) < DIGEST_BYTES {
                    conn.rx.expect = Expect::Digest {
                        slot,
                        have,
                        bytes: digest,
                    };
                    return (at, Stop::Dry);
                }
                if u32::from_le_bytes(digest) != conn.rx.digest.finish()
                    && let Some(s) = conn.slots.get_mut(slot)
                {
                    s.damaged = true;
                }
                conn.rx.expect = Expect::Header;
                if let Err(stop) = data_pdu_ended(conn, turn, slot) {
                    return (at, stop);
                }
            }
            Expect::Header => {
                if commands == BATCH {
                    return (at, Stop::Batch);
                }
                let frame = match tcp::parse(rest, &conn.params) {
                    Ok(Parsed::Pdu(frame)) => frame,
                    Ok(Parsed::NeedMore(_)) => return (at, Stop::Dry),
                    Err(error) => return (at, Stop::Terminate(error)),
                };
                match frame.pdu {
                    Pdu::CapsuleCmd(sqe) => {
                        let Some(pdu) = rest.get(..frame.total_bytes()) else {
                            return (at, Stop::Dry);
                        };
                        let data = &pdu[frame.header_bytes..frame.header_bytes + frame.data_bytes];
                        let intact =
                            !frame.data_digest || digest_of(pdu, &frame) == tcp::crc32c(data);
                        let capsule = command::Capsule {
                            sqe: &sqe,
                            data,
                            intact,
                        };
                        let stop = if conn.qid == 0 {
                            admin::take(conn, turn, &capsule)
                        } else {
                            command::take(conn, turn, &capsule)
                        };
                        if let Err(stop) = stop {
                            conn.rx.stalled = stop == Stop::Stalled;
                            return (at, stop);
                        }
                        at += pdu.len();
                        commands += 1;
                        // All of these were sent before the host can have seen any answer to them.
                        conn.rx.taken += 1;
                        if conn.rx.taken > u32::from(conn.entries) {
                            return (at, Stop::Close);
                        }
                    }
                    Pdu::H2cData(data) => match begin_data(conn, &data, &frame) {
                        Ok(()) => at += frame.header_bytes,
                        Err(error) => return (at, Stop::Terminate(error)),
                    },
                    // The host gives up. ICReq and what only controllers send, the codec has refused.
                    _ => return (at, Stop::Close),
                }
            }
        }
    }
}

/// After [`take`]: what was not taken of the bytes is kept for the next time.
pub(super) fn keep(conn: &mut Conn, rest: &[u8]) {
    if !rest.is_empty() {
        debug_assert!(conn.rx.kept.is_empty() && rest.len() <= RECEIVE_BYTES);
        let mut kept = conn.shared.pool.borrow_mut().take_buffer();
        kept.extend_from_slice(rest);
        conn.rx.kept = kept;
    }
}

/// The kept bytes, to be taken; [`put_back`] gets them again.
pub(super) fn lend(conn: &mut Conn) -> Vec<u8> {
    std::mem::take(&mut conn.rx.kept)
}

/// Takes back the kept bytes but for the first `taken`.
pub(super) fn put_back(conn: &mut Conn, mut kept: Vec<u8>, taken: usize) {
    kept.drain(..taken);
    if kept.is_empty() || !conn.is_open() {
        conn.shared.pool.borrow_mut().give_buffer(kept);
    } else {
        conn.rx.kept = kept;
    }
}

fn digest_of(pdu: &[u8], frame: &Frame) -> u32 {
    let at = frame.header_bytes + frame.data_bytes;
    pdu.get(at..at + DIGEST_BYTES)
        .and_then(|d| d.try_into().ok())
        .map_or(0, u32::from_le_bytes)
}

/// Checks an H2CData against the R2T that it says it answers (TCP 3.3.2.2).
fn begin_data(conn: &mut Conn, data: &H2cData, frame: &Frame) -> Result<(), PduError> {
    let slot = data.ttag & 0xff;
    let s = conn
        .slots
        .get(slot)
        .filter(|s| s.stage == Stage::Receiving && s.tag == (data.ttag >> 8) as u8)
        .ok_or(PduError::field(field::TTAG))?;
    if s.cid != data.cid {
        return Err(PduError::field(field::CCCID));
    }
    // One R2T asks for all of a command's data, and its parts come in order.
    let end = data.offset_bytes.saturating_add(data.length_bytes);
    if data.offset_bytes != s.received_bytes || end > s.len_bytes {
        return Err(PduError::DATA_OUT_OF_RANGE);
    }
    if data.last != (end == s.len_bytes) {
        return Err(PduError::field(field::FLAGS));
    }
    if frame.data_digest {
        conn.rx.digest = DataDigest::new();
    }
    conn.rx.expect = Expect::Data {
        slot,
        left: data.length_bytes,
        digest: frame.data_digest,
    };
    Ok(())
}

/// `n` more bytes of data are in their place.
fn placed_data(conn: &mut Conn, n: u32) {
    let Expect::Data { slot, left, digest } = conn.rx.expect else {
        return;
    };
    let Some(s) = conn.slots.get_mut(slot) else {
        return;
    };
    let from = s.received_bytes as usize;
    s.received_bytes += n;
    if digest && let Some(b) = &s.buffer {
        conn.rx
            .digest
            .update(&b.as_slice()[from..from + n as usize]);
    }
    conn.rx.expect = match left - n {
        0 if digest => Expect::Digest {
            slot,
            have: 0,
            bytes: [0; DIGEST_BYTES],
        },
        left => Expect::Data { slot, left, digest },
    };
}

/// A data PDU is complete; perhaps its command's data is.
fn data_pdu_ended(conn: &mut Conn, turn: &mut Turn<'_>, slot: u16) -> Result<(), Stop> {
    let Some(s) = conn.slots.get_mut(slot) else {
        return Err(Stop::Close);
    };
    if s.received_bytes < s.len_bytes {
        return Ok(());
    }
    s.stage = Stage::Taken;
    conn.count_received_all();
    if conn.qid == 0 {
        admin::data_complete(conn, turn, slot);
    } else {
        command::data_complete(conn, turn, slot);
    }
    Ok(())
}
