//! A read-only volume's namespace: hosts read it, and cannot change it.

use super::super::inherit::Waiting;
use super::restrictions::tried;
use super::*;
use crate::core::FenceSet;
use crate::takeover::Next;
use forebay_nvme::SglDescriptor;
use forebay_nvme::opcode::nvm;

const OK: Status = Status::SUCCESS;
const PROTECTED: Status = Status::NAMESPACE_IS_WRITE_PROTECTED.with_dnr();

/// Block 0 holds 7s; the next hosts use a read-only volume with the same grants.
fn protected_rig() -> (rig::Rig, Host, u16) {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut writer = rig.io(cntlid, 1, 32);
    writer.say(&write_in_capsule(1, 0, 1), &[7; 4096]);
    rig.turns(4);
    assert_eq!(writer.response().unwrap().status(), OK);
    rig.volume = rig.volume.protected();
    rig.serve(0, 0);
    let (admin, cntlid) = rig.admin();
    (rig, admin, cntlid)
}

fn answer(rig: &mut rig::Rig, io: &mut Host) -> Status {
    rig.turns(6);
    let status = io.response().unwrap().status();
    assert!(io.hear().is_none(), "a single answer, and no R2T");
    status
}

fn is_unchanged(rig: &mut rig::Rig, io: &mut Host) {
    io.say(&rw(2, 99, 0, 1), &[]);
    rig.turns(4);
    let (pdu, data) = io.hear().unwrap();
    assert!(matches!(pdu, Pdu::C2hData(_)), "{pdu:?}");
    assert_eq!(data, [7; 4096]);
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
}

#[test]
fn no_command_changes_a_write_protected_namespace() {
    let (mut rig, mut admin, cntlid) = protected_rig();
    let identify = Sqe::new(6, 3)
        .with_nsid(1)
        .with_sgl(SglDescriptor::transport(4096));
    admin.say(&identify, &[]);
    rig.turns(2);
    assert_eq!(admin.hear().unwrap().1[99], 1, "NSATTR");

    let mut io = rig.io(cntlid, 1, 32);
    assert_eq!(tried(&mut rig, &mut io), [OK, PROTECTED, OK, PROTECTED]);
    let in_capsule = |sqe: Sqe, bytes| sqe.with_sgl(SglDescriptor::in_capsule(0, bytes));
    let mut range = [0; 16];
    range[4] = 1;
    let dsm = |cid, cdw11| {
        in_capsule(Sqe::new(nvm::DATASET_MANAGEMENT, cid), 16)
            .with_nsid(1)
            .with_cdw(11, cdw11)
    };
    let compare = in_capsule(rw(nvm::COMPARE, 9, 0, 1), 4096);
    let commands: [(Sqe, &[u8], Status); 6] = [
        (write_in_capsule(5, 0, 2), &[1; 8192], PROTECTED),
        (rw(nvm::WRITE, 6, 0, 64), &[], PROTECTED),
        (dsm(7, 4), &range, PROTECTED),
        (dsm(8, 3), &range, OK),
        (compare, &[7; 4096], OK),
        (compare, &[8; 4096], Status::COMPARE_FAILURE),
    ];
    for (sqe, data, status) in commands {
        io.say(&sqe, data);
        assert_eq!(answer(&mut rig, &mut io), status, "{sqe:?}");
        is_unchanged(&mut rig, &mut io);
    }
}

#[test]
fn a_fused_pair_fails_by_its_write() {
    let (mut rig, _admin, cntlid) = protected_rig();
    let mut io = rig.io(cntlid, 1, 32);
    for (opcode, fuse) in [(nvm::COMPARE, 1), (nvm::WRITE, 2)] {
        let mut half = write_in_capsule(fuse.into(), 0, 1);
        (half.opcode, half.flags) = (opcode, half.flags | fuse);
        io.say(&half, &[7; 4096]);
    }
    rig.turns(6);
    let mut status = || io.response().map(|cqe| (cqe.cid(), cqe.status()));
    let failed = Status::ABORTED_FAILED_FUSED;
    assert_eq!(
        [status(), status()],
        [Some((1, failed)), Some((2, PROTECTED))]
    );
    is_unchanged(&mut rig, &mut io);
}

/// No engine can have begun such a write; damaged records may still say so.
#[test]
fn a_recorded_write_is_not_repeated() {
    for passed in [false, true] {
        let (mut rig, _admin, cntlid) = protected_rig();
        let mut io = rig.io(cntlid, 1, 32);
        let conn = rig.frontend.conns.iter_mut().flatten().next_back().unwrap();
        let index = conn.index;
        let fenced = FenceSet::None;
        let (slots, next) = match passed {
            true => (0..2, Next::Passed { fenced }),
            false => (0..1, Next::Begin { fenced }),
        };
        let mut waiting = Vec::new();
        for slot in slots {
            let mut buffer = rig.core.staging.allocate(4096).unwrap();
            buffer.as_mut_slice().fill(8);
            conn.charge.add(buffer.taken());
            conn.slots.claim_at(slot, 10 + slot, 0).unwrap();
            let s = conn.slots.get_mut(slot).unwrap();
            s.len_bytes = 4096;
            s.buffer = Some(buffer);
            let mut sqe = rw(nvm::WRITE, 10 + slot, 0, 1);
            if passed {
                sqe.flags |= slot as u8 + 1;
                sqe.opcode = [nvm::COMPARE, nvm::WRITE][usize::from(slot)];
            }
            waiting.push(Waiting {
                taken_ns: 0,
                conn: index,
                slot,
                sqe,
                next,
            });
        }
        if passed {
            let halves = [(1, 0, 1), (2, 1, 2)];
            conn.pairs.inherit(&mut conn.restrictions, &halves, 2);
        }
        for waiting in waiting {
            rig.frontend.go_on(&mut rig.core, waiting);
        }
        rig.frontend.mark_to_send(index);
        rig.turns(6);
        let all: Vec<Status> = std::iter::from_fn(|| io.response())
            .map(|cqe| cqe.status())
            .collect();
        match passed {
            true => assert_eq!(all, [Status::ABORTED_FAILED_FUSED, PROTECTED]),
            false => assert_eq!(all, [PROTECTED]),
        }
        is_unchanged(&mut rig, &mut io);
    }
}
