//! Receives a connection's PDUs in place, and its data into staging buffers.
//!
//! Bytes arrive in the reactor's one large buffer, at [`RECEIVE_AT`], so that kept bytes fit in
//! front of them. R2T data goes to its staging buffer at once; if much is missing, the socket is
//! read directly into it. The rest is kept in the connection's two buffers alternately, so that
//! bytes named by a record never move. Before a receive the reactor records the connection and the
//! stream position; the kernel knows whether bytes came.
//!
//! Checks the order and place of data (TCP 3.3.2, 3.6.2.8); the codec checks a PDU's fields. **Not
//! here:** commands ([`super::command`], [`super::admin`]).

use super::conn::Conn;
use super::r2t::Parts;
use super::record::QueueRecords;
use super::slots::{Slot, SlotStage, Slots};
use super::{TcpTurn, admin, command, r2t};
use crate::memory::Keep;
use forebay_nvme::tcp::{
    self, DIGEST_BYTES, DataDigest, Frame, H2cData, Parsed, Pdu, PduError, field,
};
use forebay_nvme::{Sqe, Status};
use forebay_xlate::boundary::region::queue::{InData, Kept};
use forebay_xlate::boundary::region::{Asked, RECEIVE_AT, RECEIVE_BYTES};
use forebay_xlate::kill_point;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;

/// Commands taken before completions are polled again.
const BATCH: u32 = 8;
/// If this many bytes are missing, the socket is read directly into the staging buffer.
const DIRECT_BYTES: u32 = 16 * 1024;
/// Bytes received behind such data: the next header and little more, since they are copied.
const BEHIND_BYTES: usize = 4 * 1024;
/// After a data PDU of this length, limit a receive so that little of the next PDU's data is
/// copied.
const LARGE_BYTES: u32 = 64 * 1024;
const BETWEEN_LARGE_BYTES: usize = 16 * 1024;

#[derive(Debug)]
enum Expect {
    Header,
    Data { slot: u16, left: u32, digest: bool },
    Digest { slot: u16 },
}

pub(super) struct Rx {
    expect: Expect,
    digest: DataDigest,
    /// The stream position up to which PDUs and data are taken.
    at: u64,
    /// `None` while the kept bytes are lent.
    keep: Option<Keep>,
    kept: Kept,
    /// The kept bytes begin with a whole PDU that waits for memory.
    stalled: bool,
    /// Commands taken from one receive.
    taken: u32,
    /// The last data PDU was a large one.
    large: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// No whole PDU is left.
    Dry,
    /// Poll completions first; there may be more.
    Batch,
    Stalled,
    /// Close the connection without a TermReq.
    Close,
    Terminate(PduError),
}

pub(super) enum Received {
    Nothing,
    /// A range of the reactor's buffer, kept bytes included. Empty if all were data that is in
    /// place.
    Bytes {
        from: usize,
        to: usize,
    },
    Ended,
}

pub(super) struct Inbound<'a> {
    pub slots: &'a mut Slots,
    pub parts: &'a mut Parts,
    pub records: &'a QueueRecords,
}

impl Inbound<'_> {
    /// Records how much of a command's data is there once the current data PDU is.
    fn ends_data_pdu(&mut self, slot: u16, damaged: bool) {
        if let Some(s) = self.slots.get(slot) {
            let asked = match s.tag & r2t::SEVERAL {
                0 => Asked::Whole(s.received_bytes),
                _ => self.parts.came(slot, s.received_bytes),
            };
            self.records.data_pdu_ends(slot, asked, damaged);
        }
    }
}

impl Rx {
    pub(super) fn new(at: u64, keep: Keep) -> Self {
        Self {
            expect: Expect::Header,
            digest: DataDigest::new(),
            at,
            keep: Some(keep),
            kept: Kept::default(),
            stalled: false,
            taken: 0,
            large: false,
        }
    }

    /// For a successor: `kept` may hold whole PDUs; `data` is the data PDU that the stream is
    /// within.
    pub(super) fn inherit(at: u64, keep: Keep, kept: Kept, data: Option<&InData>) -> Self {
        let expect = match data {
            None => Expect::Header,
            Some(data) => {
                let left = data.end.saturating_sub(at) as u32;
                match (data.digest, left.checked_sub(DIGEST_BYTES as u32)) {
                    (true, Some(0) | None) => Expect::Digest { slot: data.slot },
                    (true, Some(left)) => Expect::Data {
                        slot: data.slot,
                        left,
                        digest: true,
                    },
                    (false, _) => Expect::Data {
                        slot: data.slot,
                        left,
                        digest: false,
                    },
                }
            }
        };
        Self {
            expect,
            kept,
            stalled: kept.bytes > 0,
            ..Self::new(at, keep)
        }
    }

    /// A dead engine's data PDU is in place up to stream position `taken`. False: no such place.
    pub(super) fn inherit_data(&mut self, of: Inbound<'_>, data: &InData, taken: u64) -> bool {
        let Some(slot) = of.slots.get_mut(data.slot) else {
            return true;
        };
        let digest = if data.digest { DIGEST_BYTES as u64 } else { 0 };
        let end = data.end.saturating_sub(digest).min(taken);
        let placed = end.saturating_sub(data.begin);
        slot.received_bytes = data.offset_bytes.saturating_add(placed as u32);
        of.parts.began(data.slot, data.offset_bytes);
        let range = data.offset_bytes as usize..slot.received_bytes as usize;
        let bytes = slot.buffer.as_ref().and_then(|b| b.as_slice().get(range));
        bytes.map(|bytes| self.digest_again(bytes)).is_some()
    }

    fn digest_again(&mut self, bytes: &[u8]) {
        self.digest = DataDigest::new();
        self.digest.update(bytes);
    }

    pub(super) fn stalled(&self) -> bool {
        self.stalled
    }

    pub(super) fn forget(&mut self) {
        self.kept.bytes = 0;
        self.stalled = false;
        self.expect = Expect::Header;
    }

    pub(super) fn kept(&self) -> usize {
        self.kept.bytes as usize
    }

    pub(super) fn receive(
        &mut self,
        fd: Option<&OwnedFd>,
        mut of: Inbound<'_>,
        receiving: u32,
        buffer: &mut [u8],
    ) -> Received {
        let Some(fd) = fd else {
            return Received::Ended;
        };
        let have = self.kept();
        let (front, room) = buffer.split_at_mut(RECEIVE_AT);
        let at = self.at;
        let result = match direct(&self.expect).filter(|_| have == 0) {
            Some((slot, left)) => {
                let place = of.slots.get_mut(slot).and_then(|s| {
                    let from = s.received_bytes as usize;
                    s.buffer
                        .as_mut()?
                        .as_mut_slice()
                        .get_mut(from..from + left as usize)
                });
                let Some(place) = place else {
                    return Received::Ended;
                };
                of.records.intend(at + u64::from(left));
                let parts = &mut [
                    IoSliceMut::new(place),
                    IoSliceMut::new(&mut room[..BEHIND_BYTES]),
                ];
                match rustix::io::readv(fd, parts) {
                    Ok(n) if n > 0 => {
                        kill_point!("rx.received");
                        self.taken = 0;
                        let placed = n.min(left as usize);
                        self.placed_data(&mut of, placed as u32);
                        return Received::Bytes {
                            from: RECEIVE_AT,
                            to: RECEIVE_AT + n - placed,
                        };
                    }
                    other => other,
                }
            }
            None => {
                let more_large = self.large && receiving > 0;
                let most = if more_large {
                    BETWEEN_LARGE_BYTES
                } else {
                    RECEIVE_BYTES
                };
                let room_bytes = RECEIVE_BYTES.saturating_sub(have).min(most);
                if room_bytes == 0 {
                    return Received::Nothing;
                }
                of.records.intend(at + have as u64);
                rustix::net::recv(fd, &mut room[..room_bytes], RecvFlags::DONTWAIT).map(|(_, n)| n)
            }
        };
        match result {
            Ok(0) => Received::Ended,
            Ok(n) => {
                kill_point!("rx.received");
                self.taken = 0;
                if let Some(keep) = self.keep.as_ref().filter(|_| have > 0) {
                    let kept = &keep.bytes(self.kept.which)[..have];
                    front[RECEIVE_AT - have..].copy_from_slice(kept);
                }
                Received::Bytes {
                    from: RECEIVE_AT - have,
                    to: RECEIVE_AT + n,
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                of.records.intend_no_more();
                Received::Nothing
            }
            Err(_) => Received::Ended,
        }
    }

    /// Keeps the bytes that [`parse`] left.
    pub(super) fn keep(&mut self, records: &QueueRecords, rest: &[u8]) {
        let rx = self;
        if !rest.is_empty() {
            debug_assert!(rest.len() <= RECEIVE_BYTES);
            rx.kept = Kept {
                which: rx.kept.which ^ 1,
                bytes: rest.len() as u32,
            };
            if let Some(keep) = &mut rx.keep {
                keep.put(rx.kept.which, rest);
            }
            records.keep(rx.kept, rx.at);
        } else if rx.kept.bytes > 0 {
            rx.kept.bytes = 0;
            records.keep_nothing();
        }
        records.intend_no_more();
    }

    /// `put_back` returns them.
    pub(super) fn lend(&mut self) -> Option<Keep> {
        self.keep.take()
    }

    /// `taken`: bytes to drop from the front.
    pub(super) fn put_back(&mut self, records: &QueueRecords, mut keep: Keep, taken: usize) {
        let rx = self;
        if taken > 0 {
            let rest = taken..rx.kept();
            if rest.is_empty() {
                rx.kept.bytes = 0;
                records.keep_nothing();
            } else {
                let which = rx.kept.which ^ 1;
                rx.kept = Kept {
                    which,
                    bytes: rest.len() as u32,
                };
                keep.turn(which, rest);
                records.keep(rx.kept, rx.at);
            }
        }
        rx.keep = Some(keep);
    }

    /// Checks an H2CData against its R2T (TCP 3.3.2.2).
    fn begin_data(
        &mut self,
        of: &mut Inbound<'_>,
        data: &H2cData,
        frame: &Frame,
    ) -> Result<(), PduError> {
        let slot = data.ttag & 0xff;
        let asked = |s: &&Slot| s.stage == SlotStage::Receiving && s.tag == data.ttag >> 8;
        match of.slots.get(slot).filter(asked) {
            Some(s) => judge(data, s.cid, s.received_bytes, s.len_bytes)?,
            None => of.parts.begin_data(of.slots, data)?,
        }
        if frame.data_digest {
            self.digest = DataDigest::new();
        }
        let begin = self.at + frame.header_bytes as u64;
        let digest_bytes = if frame.data_digest {
            DIGEST_BYTES as u64
        } else {
            0
        };
        of.records.begin_data(&InData {
            begin,
            end: begin + u64::from(data.length_bytes) + digest_bytes,
            slot,
            offset_bytes: data.offset_bytes,
            digest: frame.data_digest,
        });
        self.at = begin;
        self.large = data.length_bytes >= LARGE_BYTES;
        self.expect = Expect::Data {
            slot,
            left: data.length_bytes,
            digest: frame.data_digest,
        };
        Ok(())
    }

    /// A command is taken, up to `end` of the stream. Returns how many came with one receive: the
    /// host sent them before it saw an answer to any.
    #[inline]
    fn took_command(&mut self, end: u64) -> u32 {
        self.at = end;
        self.taken += 1;
        self.taken
    }

    fn place(&mut self, of: &mut Inbound<'_>, slot: u16, data: &[u8]) -> bool {
        let Some(s) = of.slots.get_mut(slot) else {
            return false;
        };
        let from = s.received_bytes as usize;
        let buffer = s.buffer.as_mut().map(|b| b.as_mut_slice());
        let Some(place) = buffer.and_then(|b| b.get_mut(from..from + data.len())) else {
            return false;
        };
        place.copy_from_slice(data);
        self.placed_data(of, data.len() as u32);
        true
    }

    fn take_digest(&mut self, of: &mut Inbound<'_>, slot: u16, bytes: &[u8]) -> bool {
        let Some(digest) = bytes.first_chunk() else {
            return false;
        };
        let good = u32::from_le_bytes(*digest) == self.digest.finish();
        if !good && let Some(s) = of.slots.get_mut(slot) {
            s.fate = Status::TRANSIENT_TRANSPORT_ERROR;
        }
        of.ends_data_pdu(slot, !good);
        self.at += DIGEST_BYTES as u64;
        of.records.placed(self.at);
        self.expect = Expect::Header;
        true
    }

    fn placed_data(&mut self, of: &mut Inbound<'_>, n: u32) {
        let Expect::Data { slot, left, digest } = self.expect else {
            return;
        };
        let Some(s) = of.slots.get_mut(slot) else {
            return;
        };
        let from = s.received_bytes as usize;
        s.received_bytes += n;
        if digest && let Some(b) = &s.buffer {
            self.digest.update(&b.as_slice()[from..from + n as usize]);
        }
        if left == n && !digest {
            of.ends_data_pdu(slot, false);
        }
        self.at += u64::from(n);
        if n > 0 {
            of.records.placed(self.at);
        }
        self.expect = match left - n {
            0 if digest => Expect::Digest { slot },
            left => Expect::Data { slot, left, digest },
        };
    }

    pub(super) fn kept_in(&self) -> u8 {
        self.kept.which
    }
}

fn direct(expect: &Expect) -> Option<(u16, u32)> {
    match expect {
        Expect::Data { slot, left, .. } if *left >= DIRECT_BYTES => Some((*slot, *left)),
        _ => None,
    }
}

/// Takes PDUs from `bytes`; returns how many bytes were taken, and why it stopped. Blame is already
/// set to the stream; a command's record narrows it (`Region::blamed`).
pub(super) fn parse(conn: &mut Conn, turn: &mut TcpTurn<'_>, bytes: &[u8]) -> (usize, Stop) {
    let mut at = 0;
    let mut commands = 0;
    conn.rx.stalled = false;
    loop {
        let rest = &bytes[at..];
        match conn.rx.expect {
            Expect::Data { slot, left, .. } => {
                let n = rest.len().min(left as usize);
                let (rx, mut of) = conn.inbound();
                if !rx.place(&mut of, slot, &rest[..n]) {
                    return (at, Stop::Close);
                }
                at += n;
                if let Some(lane) = conn.lane {
                    turn.core.lanes.count_copied(lane, n as u32);
                }
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
            Expect::Digest { slot } => {
                let (rx, mut of) = conn.inbound();
                if !rx.take_digest(&mut of, slot, rest) {
                    return (at, Stop::Dry);
                }
                at += DIGEST_BYTES;
                if let Err(stop) = data_pdu_ended(conn, turn, slot) {
                    return (at, stop);
                }
            }
            Expect::Header if commands == BATCH => return (at, Stop::Batch),
            Expect::Header => {
                let frame = match tcp::parse(rest, &conn.params) {
                    Ok(Parsed::Pdu(frame)) => frame,
                    Ok(Parsed::NeedMore(_)) => return (at, Stop::Dry),
                    Err(error) => return (at, Stop::Terminate(error)),
                };
                match &frame.pdu {
                    Pdu::CapsuleCmd(sqe) => {
                        let Some(pdu) = rest.get(..frame.total_bytes()) else {
                            return (at, Stop::Dry);
                        };
                        let capsule = capsule_of(sqe, pdu, &frame, conn.rx.at);
                        let taken = match conn.qid {
                            0 => admin::receive(conn, turn, &capsule),
                            _ => command::receive(conn, turn, &capsule),
                        };
                        if let Err(stop) = taken {
                            conn.rx.stalled = stop == Stop::Stalled;
                            return (at, stop);
                        }
                        at += pdu.len();
                        commands += 1;
                        conn.records.took_pdu(conn.number, capsule.end);
                        if conn.rx.took_command(capsule.end) > u32::from(conn.entries) {
                            return (at, Stop::Close);
                        }
                    }
                    Pdu::H2cData(data) => {
                        let (rx, mut of) = conn.inbound();
                        if let Err(error) = rx.begin_data(&mut of, data, &frame) {
                            return (at, Stop::Terminate(error));
                        }
                        at += frame.header_bytes;
                    }
                    // H2CTermReq. The codec refused ICReq and controllers' PDUs.
                    _ => return (at, Stop::Close),
                }
            }
        }
    }
}

fn capsule_of<'a>(sqe: &'a Sqe, pdu: &'a [u8], frame: &Frame, at: u64) -> command::Capsule<'a> {
    let data = &pdu[frame.header_bytes..frame.header_bytes + frame.data_bytes];
    command::Capsule {
        sqe,
        data,
        intact: !frame.data_digest || digest_of(pdu, frame) == tcp::crc32c(data),
        end: at + pdu.len() as u64,
    }
}

fn digest_of(pdu: &[u8], frame: &Frame) -> u32 {
    let at = frame.header_bytes + frame.data_bytes;
    pdu.get(at..at + DIGEST_BYTES)
        .and_then(|d| d.try_into().ok())
        .map_or(0, u32::from_le_bytes)
}

/// Checks that data is this command's next: the data of an R2T comes in order (`next` to `end` are
/// missing).
#[inline]
pub(super) fn judge(data: &H2cData, cid: u16, next: u32, end: u32) -> Result<(), PduError> {
    if cid != data.cid {
        return Err(PduError::field(field::CCCID));
    }
    let to = data.offset_bytes.saturating_add(data.length_bytes);
    if data.offset_bytes != next || to > end {
        return Err(PduError::DATA_OUT_OF_RANGE);
    }
    if data.last != (to == end) {
        return Err(PduError::field(field::FLAGS));
    }
    Ok(())
}

fn data_pdu_ended(conn: &mut Conn, turn: &mut TcpTurn<'_>, slot: u16) -> Result<(), Stop> {
    let Some(s) = conn.slots.get(slot) else {
        return Err(Stop::Close);
    };
    if s.tag & r2t::SEVERAL != 0 {
        if r2t::go_on(conn, slot) {
            return Ok(());
        }
    } else if s.received_bytes < s.len_bytes {
        return Ok(());
    }
    if let Some(s) = conn.slots.get_mut(slot) {
        s.stage = SlotStage::Taken;
    }
    conn.records.data_complete(slot);
    conn.records.blame(slot);
    conn.charge.answered();
    if conn.qid == 0 {
        admin::data_complete(conn, turn, slot);
    } else {
        command::data_complete(conn, turn, slot);
    }
    conn.records.blame_stream();
    Ok(())
}
