//! R2Ts: requests for hosts' data.
//!
//! Normally one R2T asks for all of a command's data. A host with MAXR2T > 0 takes several, and
//! sends the data of different R2Ts in any order (TCP 3.3.2.2). From such a host, data beyond
//! [`R2T_PART_BYTES`] (one data PDU) is asked for in parts. For limits, all R2Ts of a command count
//! as one, since they share its staging buffer. Each is published before the next is queued, so
//! that a successor knows which ones the host gets ([`super::record`]).
//!
//! **Not here:** when a command asks ([`super::command`]), the data itself ([`super::rx`]).

use super::MDTS_BYTES;
use super::conn::Conn;
use super::rx;
use super::slots::{NONE, Slot, SlotStage, Slots};
use crate::core::Core;
use crate::core::staging::StagingBuffer;
use forebay_nvme::tcp::{self, H2cData, PduError, R2t, TcpParams, field};
use forebay_xlate::boundary::region::{Asked, AskedAt, CommandStage, R2T_PART_BYTES, R2T_PARTS};

const _: () = assert!(R2T_PART_BYTES as usize * R2T_PARTS == MDTS_BYTES as usize);

/// A slot's tag if its command has several R2Ts; no TTAG half has this value.
pub(super) const SEVERAL: u16 = 0x100;
/// The tag's bits that distinguish a command's R2Ts.
const PART: u16 = R2T_PARTS as u16 - 1;

/// The TTAG's upper half for command `number`; differs from the slot's recent ones.
pub(super) fn tag_of(number: u64) -> u16 {
    ((number ^ number >> 6 ^ number >> 12) as u16 & 0x3f) << 2
}

#[derive(Clone, Copy, Default)]
struct R2tProgress {
    r2ts: u8,
    /// Dwords received per part, in whole PDUs.
    dwords: [u16; R2T_PARTS],
    /// The start offset of the current data PDU.
    begin: u32,
}

impl R2tProgress {
    fn has_all_of(&self, part: u16, len_bytes: u32) -> bool {
        let dwords = self.dwords.get(usize::from(part));
        dwords.is_some_and(|d| u32::from(*d) * 4 == part_bytes(part, len_bytes))
    }
}

fn part_bytes(part: u16, len_bytes: u32) -> u32 {
    (len_bytes.saturating_sub(u32::from(part) * R2T_PART_BYTES)).min(R2T_PART_BYTES)
}

pub(super) struct Parts {
    limit: u8,
    /// By slot; empty if the limit is 1.
    of: Vec<R2tProgress>,
}

impl Parts {
    pub(super) fn new(params: &TcpParams, entries: u16) -> Self {
        let limit = params.max_r2t.min(R2T_PARTS as u64) as u8;
        let slots = if limit > 1 { usize::from(entries) } else { 0 };
        Self {
            limit,
            of: vec![R2tProgress::default(); slots],
        }
    }

    /// Adds the current data PDU, which ends at `to`.
    #[cold]
    pub(super) fn came(&mut self, slot: u16, to: u32) -> Asked {
        let Some(p) = self.of.get_mut(usize::from(slot)) else {
            return Asked::Parts([0; R2T_PARTS]);
        };
        if let Some(Asked::Parts(dwords)) = Asked::Parts(p.dwords).up_to(p.begin, to) {
            p.dwords = dwords;
        }
        Asked::Parts(p.dwords)
    }

    /// A dead engine's command: the data that came, and the host's number of R2Ts.
    pub(super) fn inherit(&mut self, slot: u16, dwords: [u16; R2T_PARTS], r2ts: u8) {
        if let Some(p) = self.of.get_mut(usize::from(slot)) {
            *p = R2tProgress {
                r2ts,
                dwords,
                begin: 0,
            };
        }
    }

    /// Checks an H2CData against one of several R2Ts.
    #[cold]
    pub(super) fn begin_data(&mut self, slots: &mut Slots, data: &H2cData) -> Result<(), PduError> {
        let (slot, tag) = (data.ttag & 0xff, data.ttag >> 8);
        let part = tag & PART;
        let s = slots.get_mut(slot);
        let p = self.of.get_mut(usize::from(slot));
        let (s, p) = (s.zip(p))
            .filter(|(s, p)| {
                s.stage == SlotStage::Receiving
                    && s.tag == SEVERAL | tag & !PART
                    && part < u16::from(p.r2ts)
                    && !p.has_all_of(part, s.len_bytes)
            })
            .ok_or(PduError::field(field::TTAG))?;
        let begin = u32::from(part) * R2T_PART_BYTES;
        let end = begin + part_bytes(part, s.len_bytes);
        let next = begin + u32::from(p.dwords[usize::from(part)]) * 4;
        rx::judge(data, s.cid, next, end)?;
        // The next one would have to begin at a multiple of dwords.
        if !data.length_bytes.is_multiple_of(4) {
            return Err(PduError::field(field::DATAL));
        }
        p.begin = data.offset_bytes;
        s.received_bytes = data.offset_bytes;
        Ok(())
    }

    pub(super) fn began(&mut self, slot: u16, offset_bytes: u32) {
        if let Some(p) = self.of.get_mut(usize::from(slot)) {
            p.begin = offset_bytes;
        }
    }
}

/// Asks the host for a command's data, which has a staging buffer (TCP 3.3.2.2).
pub(super) fn ask(conn: &mut Conn, core: &Core, slot: u16) {
    conn.charge.asked();
    let Some(s) = conn.slots.get_mut(slot) else {
        return;
    };
    s.stage = SlotStage::Receiving;
    s.asked_ns = core.now_ns();
    s.tag = tag_of(conn.records.number_of(slot));
    if conn.parts.limit > 1 && s.len_bytes > R2T_PART_BYTES {
        s.tag |= SEVERAL;
        conn.parts.inherit(slot, [0; R2T_PARTS], 0);
        go_on(conn, slot);
        return;
    }
    let r2t = R2t {
        cid: s.cid,
        ttag: s.tag << 8 | slot,
        offset_bytes: 0,
        length_bytes: s.len_bytes,
    };
    push_first(conn, slot, &r2t, CommandStage::Asked);
}

fn push_first(conn: &mut Conn, slot: u16, r2t: &R2t, stage: CommandStage) {
    let params = conn.params;
    conn.push(NONE, None, |out| tcp::put_r2t(out, &params, r2t));
    let buffer = conn.slots.get(slot).and_then(|s| s.buffer.as_ref());
    if let Some(buffer) = buffer.map(StagingBuffer::reference) {
        let at = AskedAt {
            at: conn.tx.at(),
            r2ts: 1,
        };
        conn.records.asked(slot, buffer, stage, at);
    }
}

/// Sends as many further R2Ts as the host may get; false when all data has come.
#[cold]
pub(super) fn go_on(conn: &mut Conn, slot: u16) -> bool {
    let limit = u16::from(conn.parts.limit);
    loop {
        let at = usize::from(slot);
        let (Some(s), Some(p)) = (conn.slots.get(slot), conn.parts.of.get_mut(at)) else {
            return true;
        };
        let (len, next) = (s.len_bytes, u16::from(p.r2ts));
        let open = (0..next).filter(|part| !p.has_all_of(*part, len)).count() as u16;
        let length_bytes = part_bytes(next, len);
        if length_bytes == 0 || open >= limit {
            return length_bytes > 0 || open > 0;
        }
        p.r2ts += 1;
        let r2ts = p.r2ts;
        let r2t = R2t {
            cid: s.cid,
            ttag: (s.tag & !SEVERAL | next) << 8 | slot,
            offset_bytes: u32::from(next) * R2T_PART_BYTES,
            length_bytes,
        };
        if next == 0 {
            push_first(conn, slot, &r2t, CommandStage::AskedInParts);
        } else {
            let params = conn.params;
            conn.push(NONE, None, |out| tcp::put_r2t(out, &params, &r2t));
            let at = conn.tx.at();
            conn.records.asked_next(slot, AskedAt { at, r2ts });
        }
        conn.publish();
    }
}

/// Sends the R2Ts that a dead engine would have sent next.
pub(super) fn inherited(conn: &mut Conn) {
    for slot in 0..conn.parts.of.len() as u16 {
        let several = |s: &Slot| s.stage == SlotStage::Receiving && s.tag & SEVERAL != 0;
        if conn.slots.get(slot).is_some_and(several) {
            go_on(conn, slot);
        }
    }
}
