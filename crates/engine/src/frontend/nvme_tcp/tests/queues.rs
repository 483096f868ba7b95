//! Queues that hosts share.

use super::*;
use forebay_nvme::Nqn;

/// Number of Queues, as a host reads it.
fn granted(rig: &mut rig::Rig, host: &mut Host) -> u64 {
    host.say(&Sqe::new(0x0A, 9).with_cdw(10, 7), &[]);
    rig.turns(2);
    let cqe = host.response().unwrap();
    assert_eq!(cqe.status(), Status::SUCCESS);
    (cqe.result() & 0xFFFF) + 1
}

#[test]
fn granted_queues_are_limited_to_the_free_ones() {
    let mut rig = rig();
    let (mut first, _) = rig.admin();
    assert_eq!(granted(&mut rig, &mut first), 64);
    let disk = Nqn::parse("nqn.2026-01.io.forebay:t.v").unwrap();
    let mut others = Vec::new();
    loop {
        let other = rig.associations.begin(0, disk, disk, [9; 16]).unwrap();
        let promised = other.promise(64);
        others.push(other);
        if promised < 64 {
            break;
        }
    }
    let (mut late, cntlid) = rig.admin();
    assert_eq!(granted(&mut rig, &mut late), 1);
    let _io = rig.io(cntlid, 1, 32);
    drop(others);
    let (mut next, cntlid) = rig.admin();
    assert_eq!(granted(&mut rig, &mut next), 64);
    let _io = rig.io(cntlid, 64, 32);
}
