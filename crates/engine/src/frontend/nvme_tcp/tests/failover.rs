//! A host's commands at the device after its association broke.

use super::*;
use crate::frontend::Frontend;
use crate::frontend::nvme_tcp::attach::MAX_DRAINING;
use forebay_device::OpKind;

fn response(rig: &mut rig::Rig, host: &mut Host) -> (Pdu, Vec<u8>) {
    for _ in crate::patience::patiently() {
        if let Some(heard) = host.hear() {
            return heard;
        }
        rig.turns(1);
    }
    panic!("no answer");
}

fn after_a_break(next_host: &'static str) {
    let mut rig = rig();
    rig.map_all();
    let (admin, cntlid) = rig.admin();
    let mut old = rig.io(cntlid, 1, 32);
    rig.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    old.say(&write_in_capsule(1, 0, 1), &[1; 4096]);
    rig.turns(2);
    assert_eq!(rig.gate.held(), 1);
    drop((admin, old));
    rig.turns(3);
    // The next host waits only for overlapping blocks.
    rig.host = next_host;
    let (_admin, cntlid) = rig.admin();
    let mut new = rig.io(cntlid, 1, 32);
    new.say(&write_in_capsule(1, 0, 1), &[2; 4096]);
    new.say(&rw(2, 2, 1, 1), &[]);
    assert!(matches!(response(&mut rig, &mut new).0, Pdu::C2hData(c) if c.cid == 2));
    rig.turns(50);
    assert!(new.hear().is_none(), "the old write may still land");
    assert_eq!(rig.gate.held(), 1, "and the new one is not on its way");
    // The device still uses the old command's buffer.
    assert_eq!(rig.core.staging.out(), 2);
    assert_eq!(rig.frontend.count(), 3);
    rig.gate.release();
    assert!(matches!(response(&mut rig, &mut new).0, Pdu::CapsuleResp(c) if c.cid() == 1));
    new.say(&rw(2, 3, 0, 1), &[]);
    let (pdu, data) = response(&mut rig, &mut new);
    assert!(matches!(pdu, Pdu::C2hData(c) if c.cid == 3));
    assert_eq!(data, [2; 4096]);
    rig.turns(2);
    assert_eq!((rig.frontend.count(), rig.core.staging.out()), (2, 0));
    assert!(!rig.core.recovered.any());
}

#[test]
fn a_host_that_reconnects_is_not_overtaken_by_its_old_write() {
    after_a_break("nqn.2014-08.org.example:host");
}

#[test]
fn failover_to_another_host_is_not_overtaken_by_the_old_ones_write() {
    after_a_break("nqn.2014-08.org.example:other");
}

#[test]
fn a_host_that_comes_back_too_often_waits() {
    let mut rig = rig();
    rig.map_all();
    rig.gate.hold();
    let mut refused = false;
    for block in 0..=MAX_DRAINING as u64 + 1 {
        let (admin, cntlid) = match rig.try_admin() {
            Ok(connected) => connected,
            Err(status) => {
                assert_eq!(status.code(), Status::CONNECT_CONTROLLER_BUSY);
                assert_eq!(block, MAX_DRAINING as u64 + 1);
                refused = true;
                break;
            }
        };
        let mut io = rig.io(cntlid, 1, 32);
        io.say(&write_in_capsule(1, block, 1), &[1; 4096]);
        rig.turns(2);
        drop((admin, io));
        rig.turns(3);
    }
    assert!(refused);
    rig.gate.release();
    for _ in crate::patience::patiently() {
        rig.turns(1);
        if rig.frontend.count() == 0 {
            break;
        }
    }
    rig.admin();
}
