//! Aborted commands, and those of hosts that lose access to an export.

use super::*;
use crate::frontend::Frontend;
use crate::lane::Lane;
use forebay_device::OpKind;
use forebay_xlate::boundary::message::{ExportConfig, ExportId};
use forebay_xlate::reactor_side::Answer;

pub(super) const ABORTED: Status = Status::COMMAND_ABORT_REQUESTED;

/// Aborts command `cid` of queue `sqid`; returns 1 if it was not aborted.
pub(super) fn abort(rig: &mut rig::Rig, admin: &mut Host, sqid: u16, cid: u16) -> u64 {
    let id = u32::from(cid) << 16 | u32::from(sqid);
    admin.say(&Sqe::new(8, 90).with_cdw(10, id), &[]);
    for _ in 0..10 {
        rig.turns(1);
        if let Some(cqe) = admin.response() {
            assert_eq!((cqe.cid(), cqe.status()), (90, Status::SUCCESS));
            return cqe.result();
        }
    }
    panic!("no answer to the Abort");
}

pub(super) fn answers(rig: &mut rig::Rig, host: &mut Host) -> Vec<(u16, Status)> {
    let mut all = Vec::new();
    for _ in 0..20 {
        rig.turns(1);
        while let Some((pdu, _)) = host.hear() {
            match pdu {
                Pdu::CapsuleResp(cqe) => all.push((cqe.cid(), cqe.status())),
                Pdu::C2hData(c) => all.push((c.cid, Status::SUCCESS)),
                Pdu::R2t(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    all
}

/// Faults that the owner got and does not answer.
fn faults(rig: &mut rig::Rig) -> usize {
    let mut count = 0;
    while let Some(upcall) = rig.core.upcalls.pop_front() {
        count += usize::from(matches!(upcall, Upcall::Fault { .. }));
    }
    count
}

#[test]
fn commands_that_wait_for_the_owner_are_aborted() {
    let mut rig = rig();
    let (mut admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    // Unmapped: both wait for the owner.
    host.say(&write_in_capsule(1, 0, 1), &[1; 4096]);
    host.say(&write_in_capsule(2, 1, 1), &[2; 4096]);
    rig.turns(2);
    assert_eq!(faults(&mut rig), 1);
    assert_eq!(abort(&mut rig, &mut admin, 1, 1), 0);
    assert_eq!(answers(&mut rig, &mut host), [(1, ABORTED)]);
    rig.map_all();
    rig.core
        .fault_answered(V, ExtentRange::new(0, 1), Answer::Granted);
    assert_eq!(answers(&mut rig, &mut host), [(2, Status::SUCCESS)]);
    host.say(&rw(2, 3, 0, 1), &[]);
    rig.turns(2);
    assert!(matches!(host.hear(), Some((Pdu::C2hData(_), data)) if data == [0; 4096]));
    // An ended or unknown command, or one of another queue, is not aborted.
    for (sqid, cid) in [(1, 1), (1, 77), (2, 3), (0, 3), (0xFFFF, 0xFFFF)] {
        assert_eq!(abort(&mut rig, &mut admin, sqid, cid), 1);
    }
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
}

#[test]
fn an_abort_ends_commands_without_a_buffer_not_at_a_device() {
    let mut rig = rig();
    rig.map_all();
    let (mut admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    rig.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    host.say(&write_in_capsule(1, 0, 1), &[1; 4096]);
    rig.turns(2);
    assert_eq!(rig.gate.held(), 1);
    let all: Vec<StagingBuffer> = std::iter::from_fn(|| rig.core.staging.allocate(4096)).collect();
    for cid in 2..6 {
        host.say(&rw(2, cid, 5, 1), &[]);
    }
    rig.turns(2);
    for cid in [3, 5, 2] {
        assert_eq!(abort(&mut rig, &mut admin, 1, cid), 0);
        assert_eq!(answers(&mut rig, &mut host), [(cid, ABORTED)]);
    }
    assert_eq!(abort(&mut rig, &mut admin, 1, 1), 1);
    for buffer in all {
        rig.core.staging.release(buffer);
    }
    assert_eq!(answers(&mut rig, &mut host), [(4, Status::SUCCESS)]);
    rig.gate.release();
    let mut done = Vec::new();
    for _ in crate::patience::patiently() {
        done.extend(answers(&mut rig, &mut host));
        if !done.is_empty() {
            break;
        }
    }
    assert_eq!(done, [(1, Status::SUCCESS)]);
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
}

/// A dead engine had begun it, so others wait for it.
#[test]
fn an_aborted_recovered_command_blocks_no_other_command() {
    let mut rig = rig();
    rig.map_all();
    let (mut admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    let all: Vec<StagingBuffer> = std::iter::from_fn(|| rig.core.staging.allocate(4096)).collect();
    host.say(&rw(1, 1, 0, 1), &[]);
    rig.turns(2);
    rig.recover(1);
    assert_eq!(abort(&mut rig, &mut admin, 1, 1), 0);
    assert_eq!(answers(&mut rig, &mut host), [(1, ABORTED)]);
    assert!(!rig.core.recovered.any());
    for buffer in all {
        rig.core.staging.release(buffer);
    }
    host.say(&write_in_capsule(2, 0, 1), &[2; 4096]);
    assert_eq!(answers(&mut rig, &mut host), [(2, Status::SUCCESS)]);
}

#[test]
fn a_host_taken_off_the_list_is_out_with_what_it_had_waiting() {
    let mut rig = rig();
    let (mut admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    rig.host = "nqn.2014-08.org.example:other";
    let (mut other_admin, other) = rig.admin();
    let mut other_host = rig.io(other, 1, 32);
    // One write at the device, one at the owner, one without its data.
    rig.map_all();
    rig.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    host.say(&write_in_capsule(1, 0, 1), &[1; 4096]);
    rig.turns(2);
    assert_eq!(rig.gate.held(), 1);
    let all = ExtentRange::new(1, rig::EXTENTS - 1);
    rig.volume.table.clear(all);
    host.say(&write_in_capsule(2, 100, 1), &[2; 4096]);
    host.say(&rw(1, 3, 200, 1), &[]);
    rig.turns(2);
    let lane = rig.core.lane(LaneIndex(3)).unwrap();
    let export = ExportConfig {
        hosts: [rig.host.into()].into(),
        any_host: false,
        ..(*lane.export).clone()
    };
    let region = rig.core.region.clone();
    let volume = rig.volume.clone();
    let lane = Lane::new(LaneIndex(3), volume, Arc::new(export), region);
    rig.core.set_lane(lane);
    let at_devices = rig.frontend.export_changed(&mut rig.core, ExportId(1));
    assert_eq!(at_devices, 1);
    rig.turns(2);
    assert!(matches!(host.hear(), Some((Pdu::R2t(_), _))) && host.hear().is_none());
    assert!(host.ended() && admin.ended());
    let word = forebay_xlate::Word::new(
        forebay_xlate::DeviceIndex(0),
        forebay_xlate::ExtentIndex(1),
        forebay_xlate::Rights::ReadWrite,
    );
    rig.volume.table.install(all, word.unwrap());
    rig.core.fault_answered(V, all, Answer::Granted);
    rig.turns(4);
    assert_eq!(rig.gate.held(), 1, "only what was there before");
    rig.gate.release();
    for _ in crate::patience::patiently() {
        rig.turns(1);
        if rig.frontend.count() == 2 {
            break;
        }
    }
    assert_eq!(rig.frontend.count(), 2);
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
    other_host.say(&rw(2, 1, 100, 1), &[]);
    rig.turns(2);
    assert!(matches!(other_host.hear(), Some((Pdu::C2hData(_), data)) if data == [0; 4096]));
    other_admin.say(&PropertyCommand::get(9, 0x1c, false).to_sqe(), &[]);
    rig.turns(1);
    assert_eq!(other_admin.response().unwrap().result(), 1);
}
