//! Compare, and Compare and Write.

use super::*;
use forebay_nvme::SglDescriptor;
use forebay_nvme::Status;

const FIRST: u8 = 1;
const SECOND: u8 = 2;

fn half(opcode: u8, fuse: u8, cid: u16, lba: u64) -> Sqe {
    let mut sqe = write_in_capsule(cid, lba, 1);
    sqe.opcode = opcode;
    sqe.flags |= fuse;
    sqe
}

fn by_r2t(mut sqe: Sqe) -> Sqe {
    sqe = sqe.with_sgl(SglDescriptor::transport(4096));
    sqe
}

struct Pairs {
    rig: rig::Rig,
    admin: Host,
    host: Host,
}

fn pairs() -> Pairs {
    let mut rig = rig();
    rig.map_all();
    let (admin, cntlid) = rig.admin();
    let host = rig.io(cntlid, 1, 32);
    Pairs { rig, admin, host }
}

impl Pairs {
    fn say(&mut self, sqe: Sqe, byte: u8) {
        self.host.say(&sqe, &[byte; 4096]);
    }

    fn answers(&mut self) -> Vec<(u16, Status)> {
        self.rig.turns(6);
        let mut all = Vec::new();
        while let Some(cqe) = self.host.response() {
            all.push((cqe.cid(), cqe.status()));
        }
        all
    }

    fn block(&mut self, lba: u64) -> u8 {
        self.host.say(&rw(2, 99, lba, 1), &[]);
        self.rig.turns(4);
        let Some((Pdu::C2hData(_), data)) = self.host.hear() else {
            panic!("no data")
        };
        assert!(data.iter().all(|byte| *byte == data[0]));
        data[0]
    }
}

const OK: Status = Status::SUCCESS;
const FAILED: Status = Status::ABORTED_FAILED_FUSED;
const MISSING: Status = Status::ABORTED_MISSING_FUSED;

#[test]
fn compare_says_whether_it_is_the_same() {
    let mut p = pairs();
    p.say(write_in_capsule(1, 5, 1), 7);
    assert_eq!(p.answers(), [(1, OK)]);
    p.say(half(5, 0, 2, 5), 7);
    assert_eq!(p.answers(), [(2, OK)]);
    p.say(half(5, 0, 3, 5), 8);
    assert_eq!(p.answers(), [(3, Status::COMPARE_FAILURE)]);
    let fua = half(5, 0, 4, 5).with_cdw(12, 1 << 30);
    p.say(fua, 7);
    assert_eq!(p.answers(), [(4, OK)]);
    p.host.say(&by_r2t(half(5, 0, 5, 5)), &[]);
    p.rig.turns(4);
    let Some((Pdu::R2t(r2t), _)) = p.host.hear() else {
        panic!("no R2T")
    };
    data(&mut p, &r2t, 9);
    assert_eq!(p.answers(), [(5, Status::COMPARE_FAILURE)]);
    assert_eq!((p.rig.held_bytes(), p.rig.core.staging.out()), (0, 0));
}

fn data(p: &mut Pairs, r2t: &tcp::R2t, byte: u8) {
    let h2c = tcp::H2cData {
        cid: r2t.cid,
        ttag: r2t.ttag,
        offset_bytes: 0,
        length_bytes: 4096,
        last: true,
    };
    let mut out = vec![0; tcp::MAX_HEADER_BYTES];
    let n = tcp::put_h2c_data(&mut out, &p.host.params, &h2c);
    out.truncate(n);
    out.extend_from_slice(&[byte; 4096]);
    rustix::net::send(&p.host.fd, &out, SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn a_pair_is_answered_as_one() {
    let mut p = pairs();
    p.say(half(5, FIRST, 1, 5), 0);
    assert_eq!(p.answers(), [], "the first waits for the second");
    p.say(half(1, SECOND, 2, 5), 7);
    assert_eq!(p.answers(), [(1, OK), (2, OK)]);
    assert_eq!(p.block(5), 7);
    p.say(half(5, FIRST, 3, 5), 0);
    p.say(half(1, SECOND, 4, 5), 8);
    assert_eq!(p.answers(), [(3, Status::COMPARE_FAILURE), (4, FAILED)]);
    assert_eq!(p.block(5), 7);
    // R2Ts for both or one, answered in either order.
    for (order, expected, new) in [([0, 1], 7, 9), ([1, 0], 9, 10)] {
        p.host.say(&by_r2t(half(5, FIRST, 5, 5)), &[]);
        p.host.say(&by_r2t(half(1, SECOND, 6, 5)), &[]);
        p.rig.turns(4);
        let mut asked = Vec::new();
        while let Some((Pdu::R2t(r2t), _)) = p.host.hear() {
            asked.push(r2t);
        }
        assert_eq!((asked[0].cid, asked[1].cid), (5, 6));
        data(&mut p, &asked[order[0]], [expected, new][order[0]]);
        assert_eq!(p.answers(), []);
        data(&mut p, &asked[order[1]], [expected, new][order[1]]);
        assert_eq!(p.answers(), [(5, OK), (6, OK)]);
        assert_eq!(p.block(5), new);
    }
    assert_eq!((p.rig.held_bytes(), p.rig.core.staging.out()), (0, 0));
}

#[test]
fn an_incomplete_fused_pair_is_refused() {
    let mut p = pairs();
    let dnr = |status: Status| status.with_dnr();
    // A lone second; a first followed by another command; two firsts.
    p.say(half(1, SECOND, 1, 5), 7);
    assert_eq!(p.answers(), [(1, MISSING)]);
    p.say(half(5, FIRST, 2, 5), 0);
    p.say(write_in_capsule(3, 9, 1), 1);
    assert_eq!(p.answers(), [(2, MISSING), (3, OK)]);
    p.say(half(5, FIRST, 4, 5), 0);
    p.say(half(5, FIRST, 5, 5), 0);
    p.say(half(1, SECOND, 6, 5), 3);
    assert_eq!(p.answers(), [(4, MISSING), (5, OK), (6, OK)]);
    assert_eq!(p.block(5), 3);
    // Different blocks; an invalid first or second; other opcodes fused.
    p.say(half(5, FIRST, 7, 5), 3);
    p.say(half(1, SECOND, 8, 6), 4);
    let invalid = dnr(Status::INVALID_FIELD);
    assert_eq!(p.answers(), [(7, invalid), (8, invalid)]);
    p.say(half(5, FIRST, 9, 1 << 40), 3);
    p.say(half(1, SECOND, 10, 1 << 40), 4);
    let range = dnr(Status::LBA_OUT_OF_RANGE);
    assert_eq!(p.answers(), [(9, range), (10, FAILED)]);
    p.say(half(5, FIRST, 11, 5), 3);
    p.say(half(1, SECOND, 12, 1 << 40), 4);
    assert_eq!(p.answers(), [(11, FAILED), (12, range)]);
    p.say(half(1, FIRST, 13, 5), 3);
    p.say(half(1, 3, 14, 5), 3);
    assert_eq!(p.answers(), [(13, invalid), (14, invalid)]);
    let two = |opcode, fuse, cid| {
        let mut sqe = write_in_capsule(cid, 5, 2);
        (sqe.opcode, sqe.flags) = (opcode, sqe.flags | fuse);
        sqe
    };
    p.host.say(&two(5, FIRST, 15), &[0; 8192]);
    p.host.say(&two(1, SECOND, 16), &[0; 8192]);
    let exceeded = dnr(Status::ATOMIC_WRITE_UNIT_EXCEEDED);
    assert_eq!(p.answers(), [(15, exceeded), (16, FAILED)]);
    assert_eq!(p.block(5), 3);
    assert_eq!((p.rig.held_bytes(), p.rig.core.staging.out()), (0, 0));
}

/// A first with an open R2T cannot be answered before its data has come.
#[test]
fn a_half_that_is_to_end_waits_for_its_data() {
    let mut p = pairs();
    p.host.say(&by_r2t(half(5, FIRST, 1, 5)), &[]);
    p.say(write_in_capsule(2, 9, 1), 1);
    p.rig.turns(4);
    let Some((Pdu::R2t(r2t), _)) = p.host.hear() else {
        panic!("no R2T")
    };
    assert_eq!(p.answers(), [(2, OK)]);
    data(&mut p, &r2t, 0);
    assert_eq!(p.answers(), [(1, MISSING)]);
    p.say(half(5, FIRST, 3, 5), 0);
    p.host.say(&by_r2t(half(1, SECOND, 4, 5)), &[]);
    p.rig.turns(4);
    drop(p.host);
    p.rig.turns(6);
    assert_eq!((p.rig.held_bytes(), p.rig.core.staging.out()), (0, 0));
}

/// FUA on either half; during the flush, an Abort of one half ends both.
#[test]
fn a_pair_with_fua() {
    let mut p = pairs();
    p.rig.volume.may_write_to(forebay_xlate::DeviceIndex(0));
    let fua = |sqe: Sqe| sqe.with_cdw(12, 1 << 30);
    for (at, halves) in [(true, false), (false, true), (true, true)]
        .iter()
        .enumerate()
    {
        let at = at as u8;
        let with = |wanted: bool, sqe: Sqe| if wanted { fua(sqe) } else { sqe };
        p.say(with(halves.0, half(5, FIRST, 1, 5)), at);
        p.say(with(halves.1, half(1, SECOND, 2, 5)), at + 1);
        assert_eq!(p.answers(), [(1, OK), (2, OK)], "{halves:?}");
        assert_eq!(p.block(5), at + 1);
    }
    for aborted in [3, 4] {
        p.rig
            .gate
            .hold_some(0..u64::MAX, &[forebay_device::OpKind::Flush]);
        p.say(fua(half(5, FIRST, 3, 5)), 3);
        p.say(half(1, SECOND, 4, 5), 9);
        assert_eq!(p.answers(), []);
        let id = aborted << 16 | 1;
        p.admin.say(&Sqe::new(8, 90).with_cdw(10, id), &[]);
        let ends = [(3, Status::COMMAND_ABORT_REQUESTED), (4, FAILED)];
        assert_eq!(p.answers(), ends);
        assert_eq!(p.admin.response().map(|cqe| cqe.result()), Some(0));
        p.rig.gate.release();
        assert_eq!(p.block(5), 3);
    }
    assert_eq!((p.rig.held_bytes(), p.rig.core.staging.out()), (0, 0));
}

/// First halves use up the tenant's limit; their second halves are accepted all the same.
#[test]
fn second_halves_wait_for_no_share() {
    let mut rig = rig();
    rig.map_all();
    let scarce: Vec<_> = (0..1700)
        .map(|_| rig.core.staging.allocate(4096).unwrap())
        .collect();
    let (mut hosts, mut admins) = (Vec::new(), Vec::new());
    for export in 0..9 {
        rig.serve(export, 0);
        let (admin, cntlid) = rig.admin();
        for qid in 1..=30 {
            hosts.push(rig.io(cntlid, qid, 32));
        }
        admins.push(admin);
    }
    for host in &mut hosts {
        host.say(&half(5, FIRST, 1, 5), &[0; 4096]);
        rig.turns(2);
    }
    assert_eq!(rig.core.staging.out() - scarce.len(), 256);
    for host in &mut hosts {
        host.say(&half(1, SECOND, 2, 5), &[0; 4096]);
    }
    let mut answers = Vec::new();
    for _ in 0..1000 {
        rig.turns(1);
        for host in &mut hosts {
            answers.extend(std::iter::from_fn(|| host.response()).map(|cqe| cqe.status()));
        }
    }
    assert_eq!(answers, vec![OK; 2 * 270]);
    assert_eq!(rig.core.staging.out(), scarce.len());
    for buffer in scarce {
        rig.core.staging.release(buffer);
    }
}
