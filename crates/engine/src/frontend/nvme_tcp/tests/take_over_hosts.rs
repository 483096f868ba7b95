//! Hosts for the take-over tests.
//!
//! They use only blocks without commands in flight, so that each block's content is known.

use forebay_nvme::tcp::{self, H2cData, Parsed, Pdu, R2t, TcpParams};
use forebay_nvme::{SglDescriptor, Sqe, Status};
use rustix::net::{RecvFlags, SendFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpStream;

pub(super) const BLOCK: u32 = 4096;
pub(super) const BLOCKS: u64 = 512;

/// Kill points while serving.
pub(super) const SERVING: &[&str] = &[
    "rx.base",
    "rx.intent",
    "rx.received",
    "rx.record",
    "rx.state",
    "rx.taken",
    "rx.kept",
    "rx.cleared",
    "data.header",
    "data.placed",
    "data.state",
    "r2t.recorded",
    "r2t.published",
    "core.put",
    "core.entered",
    "core.completed",
    "tx.item",
    "tx.published",
    "tx.sent",
    "tx.freed",
    "tx.first",
    "tx.reset",
    "admin.state",
    "admin.sequence",
    "admin.answered",
    "aer.kept",
    "aer.delivered",
];

pub(super) use fastrand::Rng as Dice;

#[derive(Clone, Debug)]
pub(super) enum Wanted {
    /// Expects these versions of the blocks from `lba` on.
    Read {
        lba: u64,
        want: Vec<u64>,
        have: Vec<u8>,
    },
    /// Writes this version.
    Write {
        lba: u64,
        blocks: u64,
        version: u64,
    },
    Flush,
    Admin {
        data: usize,
        have: usize,
    },
    /// Never answered.
    Event,
}

pub(super) struct Queue {
    pub socket: TcpStream,
    pub params: TcpParams,
    pub qid: u16,
    pub input: Vec<u8>,
    pub output: Vec<u8>,
    pub at: usize,
    pub flying: BTreeMap<u16, (Sqe, Wanted)>,
    /// Open R2Ts of a command with several: the next byte, and the data.
    pub open: Vec<(R2t, usize, Vec<u8>)>,
    /// Open R2Ts per command, at most.
    pub most_open: usize,
    pub next_cid: u16,
    pub done: u64,
}

pub(super) struct Blocks {
    pub versions: Vec<u64>,
    pub busy: BTreeSet<u64>,
    pub last: u64,
}

pub(super) fn content(version: u64, lba: u64, block: &mut [u8]) {
    for (i, word) in block.chunks_exact_mut(8).enumerate() {
        let value = if version == 0 {
            0
        } else {
            (version << 32 | lba << 12) ^ i as u64
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

impl Queue {
    pub(super) fn put(&mut self, sqe: &Sqe, data: &[u8]) {
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_capsule_cmd(&mut out, &self.params, sqe, data.len() as u32);
        self.output.extend_from_slice(&out[..n]);
        self.put_data(data);
    }

    pub(super) fn put_data(&mut self, data: &[u8]) {
        self.output.extend_from_slice(data);
        if !data.is_empty() && self.params.data_digest {
            let digest = tcp::crc32c(data);
            self.output.extend_from_slice(&digest.to_le_bytes());
        }
    }

    pub(super) fn fly(&mut self, make: impl FnOnce(u16) -> Sqe, data: &[u8], wanted: Wanted) {
        while self.flying.contains_key(&self.next_cid) {
            self.next_cid = (self.next_cid + 1) % 500;
        }
        let cid = self.next_cid;
        self.next_cid = (cid + 1) % 500;
        let sqe = make(cid);
        self.put(&sqe, data);
        self.flying.insert(cid, (sqe, wanted));
    }

    pub(super) fn begin(&mut self, dice: &mut Dice, blocks: &mut Blocks) {
        if self.qid == 0 {
            self.begin_admin(dice);
            return;
        }
        let most = match dice.u64(..8) {
            0 => 128,
            1 => 40,
            _ => 3,
        };
        let count = match self.params.max_r2t {
            1 => 1 + dice.u64(..most),
            // More than one R2T covers.
            _ => 33 + dice.u64(..96),
        };
        let lba = dice.u64(..BLOCKS - count);
        if dice.u64(..20) == 0 {
            self.fly(|cid| Sqe::new(0, cid).with_nsid(1), &[], Wanted::Flush);
            return;
        }
        if (lba..lba + count).any(|b| blocks.busy.contains(&b)) {
            return;
        }
        blocks.busy.extend(lba..lba + count);
        let rw = |opcode: u8, sgl: SglDescriptor, fua: bool| {
            move |cid: u16| {
                Sqe::new(opcode, cid)
                    .with_nsid(1)
                    .with_cdw64(10, lba)
                    .with_cdw(12, (count as u32 - 1) | (u32::from(fua) << 30))
                    .with_sgl(sgl)
            }
        };
        let fua = dice.u64(..8) == 0;
        let len = count as u32 * BLOCK;
        match dice.u64(..5) {
            0 | 1 => {
                let want = (lba..lba + count)
                    .map(|b| blocks.versions[b as usize])
                    .collect();
                let have = Vec::new();
                let sgl = SglDescriptor::transport(len);
                self.fly(rw(2, sgl, fua), &[], Wanted::Read { lba, want, have });
            }
            2 if dice.u64(..4) == 0 => {
                let wanted = Wanted::Write {
                    lba,
                    blocks: count,
                    version: 0,
                };
                self.fly(rw(8, SglDescriptor::transport(0), fua), &[], wanted);
            }
            _ => {
                blocks.last += 1;
                let version = blocks.last;
                let wanted = Wanted::Write {
                    lba,
                    blocks: count,
                    version,
                };
                if count <= 2 && dice.u64(..3) > 0 {
                    let data = written(lba, count, version);
                    self.fly(rw(1, SglDescriptor::in_capsule(0, len), fua), &data, wanted);
                } else {
                    self.fly(rw(1, SglDescriptor::transport(len), fua), &[], wanted);
                }
            }
        }
    }

    pub(super) fn begin_admin(&mut self, dice: &mut Dice) {
        let events = self
            .flying
            .values()
            .filter(|f| matches!(f.1, Wanted::Event));
        if events.count() == 0 {
            self.fly(|cid| Sqe::new(0x0c, cid), &[], Wanted::Event);
        }
        let (data, have) = (4096, 0);
        let sgl = SglDescriptor::transport(4096);
        let event = self.flying.iter().find(|f| matches!(f.1.1, Wanted::Event));
        let event = event.map_or(0, |(cid, _)| u32::from(*cid));
        match dice.u64(..5) {
            // Abort, so that an event request ends.
            4 => {
                let make = |cid| Sqe::new(8, cid).with_cdw(10, event << 16);
                self.fly(make, &[], Wanted::Admin { data: 0, have });
            }
            0 => {
                let make = |cid| Sqe::new(6, cid).with_cdw(10, 1).with_sgl(sgl);
                self.fly(make, &[], Wanted::Admin { data, have });
            }
            1 => self.fly(
                |cid| Sqe::new(0x18, cid),
                &[],
                Wanted::Admin { data: 0, have },
            ),
            2 => {
                // Host Behavior Support, in-capsule or by R2T.
                let in_capsule = dice.u64(..2) == 0;
                let sgl = match in_capsule {
                    true => SglDescriptor::in_capsule(0, 512),
                    false => SglDescriptor::transport(512),
                };
                let make = |cid| Sqe::new(9, cid).with_cdw(10, 0x16).with_sgl(sgl);
                let data: &[u8] = if in_capsule { &[0; 512] } else { &[] };
                self.fly(make, data, Wanted::Admin { data: 0, have });
            }
            _ => {
                let make = |cid| Sqe::new(10, cid).with_cdw(10, 7);
                self.fly(make, &[], Wanted::Admin { data: 0, have });
            }
        }
    }

    pub(super) fn pump(&mut self, dice: &mut Dice, blocks: &mut Blocks) {
        for (pdu, data) in self.exchange(dice) {
            self.hear(&pdu, &data, blocks);
        }
    }

    /// Sends and receives some; returns the received PDUs.
    pub(super) fn exchange(&mut self, dice: &mut Dice) -> Vec<(Pdu, Vec<u8>)> {
        let mut heard = Vec::new();
        if self.output.is_empty() && !self.open.is_empty() {
            self.answer_some(dice);
        }
        let left = self.output.len() - self.at;
        if left > 0 {
            let n = match dice.u64(..4) {
                0 => 1 + dice.u64(..left as u64) as usize,
                1 => left.min(1 + dice.usize(..100)),
                _ => left,
            };
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &self.output[self.at..self.at + n], flags) {
                Ok(n) => self.at += n,
                Err(rustix::io::Errno::AGAIN) => {}
                Err(e) => panic!("queue {} is lost: {e}", self.qid),
            }
            if self.at == self.output.len() {
                self.output.clear();
                self.at = 0;
            }
        }
        if dice.u64(..5) == 0 {
            return heard;
        }
        let mut more = vec![0; 1 + dice.u64(..1 << 17) as usize];
        match rustix::net::recv(&self.socket, &mut more[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => panic!("queue {} was closed", self.qid),
            Ok((_, n)) => self.input.extend_from_slice(&more[..n]),
            Err(rustix::io::Errno::AGAIN) => {}
            Err(e) => panic!("queue {} is lost: {e}", self.qid),
        }
        let mut at = 0;
        while let Parsed::Pdu(frame) = tcp::parse(&self.input[at..], &self.params).unwrap()
            && self.input.len() - at >= frame.total_bytes()
        {
            let from = at + frame.header_bytes;
            let data = self.input[from..from + frame.data_bytes].to_vec();
            if frame.data_digest {
                let digest = &self.input[from + frame.data_bytes..][..4];
                assert_eq!(tcp::crc32c(&data).to_le_bytes(), digest);
            }
            at += frame.total_bytes();
            heard.push((frame.pdu, data));
        }
        self.input.drain(..at);
        heard
    }

    pub(super) fn hear(&mut self, pdu: &Pdu, data: &[u8], blocks: &mut Blocks) {
        match pdu {
            Pdu::CapsuleResp(cqe) => self.ended(cqe.cid(), cqe.status(), blocks),
            Pdu::C2hData(c2h) => {
                let (_, wanted) = self.flying.get_mut(&c2h.cid).expect("data of a command");
                match wanted {
                    Wanted::Read { have, .. } => {
                        assert_eq!(c2h.offset_bytes as usize, have.len());
                        have.extend_from_slice(data);
                    }
                    Wanted::Admin { have, .. } => *have += data.len(),
                    other => panic!("data for {other:?}"),
                }
                if c2h.success {
                    self.ended(c2h.cid, Status::SUCCESS, blocks);
                }
            }
            Pdu::R2t(r2t) => {
                let (_, wanted) = self.flying.get(&r2t.cid).expect("an R2T of a command");
                let all = match *wanted {
                    Wanted::Write {
                        lba,
                        blocks,
                        version,
                    } => written(lba, blocks, version),
                    _ => vec![0; 512],
                };
                self.answer(r2t, &all);
            }
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn answer(&mut self, r2t: &R2t, all: &[u8]) {
        let (from, len) = (r2t.offset_bytes as usize, r2t.length_bytes as usize);
        if len < all.len() {
            let of_it = |(open, ..): &&(R2t, usize, Vec<u8>)| open.cid == r2t.cid;
            let open = 1 + self.open.iter().filter(of_it).count();
            assert!(open as u64 <= self.params.max_r2t, "{open} R2Ts");
            self.most_open = self.most_open.max(open);
            self.open.push((*r2t, from, all[from..from + len].to_vec()));
            return;
        }
        assert_eq!((from, len), (0, all.len()));
        // Sometimes smaller PDUs than allowed.
        let parts = 1 + len / BLOCK as usize % 3;
        let most = self.params.max_h2c_data_bytes as usize / parts / 4 * 4;
        let mut offset = 0;
        while offset < len {
            let n = most.min(len - offset);
            let h2c = H2cData {
                cid: r2t.cid,
                ttag: r2t.ttag,
                offset_bytes: offset as u32,
                length_bytes: n as u32,
                last: offset + n == len,
            };
            let mut out = vec![0; tcp::MAX_HEADER_BYTES];
            let header = tcp::put_h2c_data(&mut out, &self.params, &h2c);
            self.output.extend_from_slice(&out[..header]);
            self.put_data(&all[offset..offset + n]);
            offset += n;
        }
    }

    /// Sends one data PDU for a random open R2T.
    fn answer_some(&mut self, dice: &mut Dice) {
        let which = dice.usize(..self.open.len());
        let (r2t, at, data) = &mut self.open[which];
        let end = (r2t.offset_bytes + r2t.length_bytes) as usize;
        let len = match dice.u64(..3) {
            0 => end - *at,
            _ => (4 + dice.u64(..(end - *at) as u64) as usize / 4 * 4).min(end - *at),
        };
        let h2c = H2cData {
            cid: r2t.cid,
            ttag: r2t.ttag,
            offset_bytes: *at as u32,
            length_bytes: len as u32,
            last: *at + len == end,
        };
        let from = *at - r2t.offset_bytes as usize;
        let data = data[from..from + len].to_vec();
        *at += len;
        if h2c.last {
            self.open.swap_remove(which);
        }
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let header = tcp::put_h2c_data(&mut out, &self.params, &h2c);
        self.output.extend_from_slice(&out[..header]);
        self.put_data(&data);
    }

    pub(super) fn ended(&mut self, cid: u16, status: Status, blocks: &mut Blocks) {
        let (sqe, wanted) = self
            .flying
            .remove(&cid)
            .expect("one answer to each command");
        match wanted {
            Wanted::Event => assert!(!status.is_success()),
            _ => assert_eq!(status, Status::SUCCESS, "{sqe:?} {wanted:?}"),
        }
        self.done += 1;
        match wanted {
            Wanted::Read { lba, want, have } => {
                assert_eq!(have.len(), want.len() * BLOCK as usize);
                for ((lba, version), have) in
                    (lba..).zip(want).zip(have.chunks_exact(BLOCK as usize))
                {
                    let mut want = vec![0; BLOCK as usize];
                    content(version, lba, &mut want);
                    assert!(want == have, "block {lba} is not as of {version}");
                    blocks.busy.remove(&lba);
                }
            }
            Wanted::Write {
                lba,
                blocks: count,
                version,
            } => {
                for lba in lba..lba + count {
                    blocks.versions[lba as usize] = version;
                    blocks.busy.remove(&lba);
                }
            }
            Wanted::Admin { data, have } => assert_eq!(data, have),
            Wanted::Flush | Wanted::Event => {}
        }
    }
}

pub(super) fn written(lba: u64, count: u64, version: u64) -> Vec<u8> {
    let mut data = vec![0; (count * u64::from(BLOCK)) as usize];
    for (lba, block) in (lba..).zip(data.chunks_exact_mut(BLOCK as usize)) {
        content(version, lba, block);
    }
    data
}

impl Blocks {
    pub(super) fn new() -> Self {
        Self {
            versions: vec![0; BLOCKS as usize],
            busy: BTreeSet::new(),
            last: 0,
        }
    }
}

/// Sleeps after many turns: TCP has timers of its own.
pub(super) fn patience(turns: u32, what: &str) {
    assert!(turns < 600_000, "{what} does not come");
    if turns > 2000 {
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
}
