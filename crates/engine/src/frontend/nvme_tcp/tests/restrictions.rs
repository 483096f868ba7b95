//! Inaccessible ports and reservations: which commands are refused, and what hosts learn.

use super::*;
use crate::exports::Port;
use crate::frontend::Frontend;
use crate::lane::VolumeStatistics;
use forebay_nvme::controller::{Ana, AnaState};
use forebay_nvme::opcode::nvm;
use forebay_nvme::reservation::{ReservationCommand, Reservations};
use forebay_xlate::boundary::message::Past;

const ANA_CHANGED: u64 = 0x0C_0302;
const RESERVATION_LOG: u64 = 0x80_0006;
const OPTIMIZED: AnaState = AnaState::Optimized;
const INACCESSIBLE: AnaState = AnaState::Inaccessible;

fn ports(rig: &mut rig::Rig, first: AnaState, second: AnaState) {
    let port = |address: &str, id, state| Port {
        address: address.parse().unwrap(),
        id,
        ana: Ana { state, changes: 3 },
    };
    let ports = [
        port("127.0.0.1:4420", 1, first),
        port("0.0.0.0:4421", 2, second),
    ];
    (rig.frontend).set_ports(&mut rig.core, Arc::new(ports.to_vec()));
}

/// Sends two event requests, and enables these events.
fn listen(rig: &mut rig::Rig, admin: &mut Host, events: u32) {
    admin.say(
        &Sqe::new(9, 70).with_cdw(10, 0x0b).with_cdw(11, events),
        &[],
    );
    admin.say(&Sqe::new(0x0c, 71), &[]);
    admin.say(&Sqe::new(0x0c, 72), &[]);
    rig.turns(2);
    assert_eq!(admin.response().unwrap().status(), Status::SUCCESS);
}

/// The status of each kind of command: Read, Write, Flush, Write Zeroes.
pub(super) fn tried(rig: &mut rig::Rig, io: &mut Host) -> [Status; 4] {
    let read = |cid| rw(2, cid, 0, 1);
    let commands = [
        (read(1), vec![]),
        (write_in_capsule(2, 0, 1), vec![5; 4096]),
        (Sqe::new(0, 3).with_nsid(1), vec![]),
        (rw(8, 4, 0, 1), vec![]),
    ];
    commands.map(|(sqe, data)| {
        io.say(&sqe, &data);
        for _ in crate::patience::patiently() {
            rig.turns(1);
            match io.hear() {
                Some((Pdu::C2hData(_), _)) => return Status::SUCCESS,
                Some((Pdu::CapsuleResp(cqe), _)) => return cqe.status(),
                Some((other, _)) => panic!("{other:?}"),
                None => {}
            }
        }
        panic!("no answer to {sqe:?}");
    })
}

#[test]
fn an_inaccessible_port_refuses_and_says_so() {
    let mut rig = rig();
    rig.map_all();
    ports(&mut rig, OPTIMIZED, OPTIMIZED);
    let (mut admin, cntlid) = rig.admin();
    let mut io = rig.io(cntlid, 1, 32);
    rig.local = "10.0.0.3:4421";
    let (mut other_admin, other) = rig.admin();
    let mut other_io = rig.io(other, 1, 32);
    for admin in [&mut admin, &mut other_admin] {
        listen(&mut rig, admin, 1 << 11);
    }
    assert_eq!(tried(&mut rig, &mut io), [Status::SUCCESS; 4]);
    ports(&mut rig, INACCESSIBLE, OPTIMIZED);
    let cqe = admin.response().unwrap();
    assert_eq!((cqe.cid(), cqe.result()), (71, ANA_CHANGED));
    assert!(other_admin.hear().is_none(), "its port is as it was");
    let gone = [Status::ASYMMETRIC_ACCESS_INACCESSIBLE; 4];
    assert_eq!(tried(&mut rig, &mut io), gone, "and may be tried elsewhere");
    assert_eq!(tried(&mut rig, &mut other_io), [Status::SUCCESS; 4]);
    rig.local = "127.0.0.1:4420";
    let mut late = rig.io(cntlid, 2, 32);
    assert_eq!(tried(&mut rig, &mut late), gone);
    // The controller still answers; the namespace does not.
    let log = Sqe::new(2, 80).with_cdw(10, 0x0c | 15 << 16);
    admin.say(
        &log.with_sgl(forebay_nvme::SglDescriptor::transport(64)),
        &[],
    );
    admin.say(&Sqe::new(10, 81).with_nsid(1).with_cdw(10, 0x82), &[]);
    rig.turns(2);
    let (pdu, data) = admin.hear().unwrap();
    assert!(matches!(pdu, Pdu::C2hData(_)), "{pdu:?}");
    assert_eq!((data[0], data[32]), (3, 3));
    assert_eq!(admin.response().unwrap().status(), Status::SUCCESS);
    assert_eq!(admin.response().unwrap().status(), gone[0]);
    ports(&mut rig, OPTIMIZED, OPTIMIZED);
    assert_eq!(admin.response().unwrap().result(), ANA_CHANGED);
    assert_eq!(tried(&mut rig, &mut io), [Status::SUCCESS; 4]);
}

#[test]
fn an_io_queue_comes_by_the_port_of_its_admin_queue() {
    let mut rig = rig();
    ports(&mut rig, OPTIMIZED, OPTIMIZED);
    let (_admin, cntlid) = rig.admin();
    rig.local = "127.0.0.1:4421";
    let mut refused = rig.connect(ConnectCommand::new(0, 1, 32, 0), cntlid);
    let cqe = refused.response().unwrap();
    let unknown = forebay_nvme::controller::Refusal::unknown_controller();
    assert_eq!(
        (cqe.status(), cqe.result()),
        (unknown.status, unknown.result)
    );
    assert!(refused.ended());
    rig.local = "127.0.0.1:4420";
    rig.io(cntlid, 1, 32);
}

fn change(rig: &mut rig::Rig, state: &mut Reservations, host: u8, action: u32, keys: [u64; 2]) {
    let command = ReservationCommand::new(action, keys).unwrap();
    state.apply([host; 16], &command).unwrap();
    rig.core.lanes.set_reservations(V, &Arc::new(state.clone()));
    rig.frontend.volume_changed(&mut rig.core, V);
}

#[test]
fn a_reservation_keeps_others_out_and_tells_them() {
    let mut rig = rig();
    rig.map_all();
    let mut state = Reservations::default();
    let register = u32::from(nvm::RESERVATION_REGISTER) << 16;
    let acquire = u32::from(nvm::RESERVATION_ACQUIRE) << 16;
    // A host hears nothing about changes before its attach.
    change(&mut rig, &mut state, 7, register, [0, 1]);
    change(&mut rig, &mut state, 8, register, [0, 2]);
    change(&mut rig, &mut state, 8, acquire | 0x0101, [2, 1]);
    let (mut admin, cntlid) = rig.admin();
    let mut io = rig.io(cntlid, 1, 32);
    listen(&mut rig, &mut admin, 0);
    assert_eq!(tried(&mut rig, &mut io), [Status::SUCCESS; 4]);
    change(&mut rig, &mut state, 8, acquire | 0x0100, [2, 0]);
    let conflict = Status::RESERVATION_CONFLICT.with_dnr();
    assert_eq!(
        tried(&mut rig, &mut io),
        [Status::SUCCESS, conflict, conflict, conflict]
    );
    // Exclusive Access, by preempting itself.
    change(&mut rig, &mut state, 8, acquire | 0x0201, [2, 2]);
    assert_eq!(tried(&mut rig, &mut io), [conflict; 4]);
    (rig.host, rig.host_id) = ("nqn.2014-08.org.example:other", [8; 16]);
    let (_other_admin, other) = rig.admin();
    let mut other_io = rig.io(other, 1, 32);
    assert_eq!(tried(&mut rig, &mut other_io), [Status::SUCCESS; 4]);
    // Registrants have access, until one is preempted and informed.
    change(&mut rig, &mut state, 7, register, [0, 1]);
    change(&mut rig, &mut state, 8, acquire | 0x0301, [2, 2]);
    assert_eq!(tried(&mut rig, &mut io), [Status::SUCCESS; 4]);
    let reported = admin.response().unwrap();
    assert_eq!(reported.result(), RESERVATION_LOG);
    change(&mut rig, &mut state, 8, acquire | 0x0301, [2, 1]);
    assert_eq!(
        tried(&mut rig, &mut io),
        [Status::SUCCESS, conflict, conflict, conflict]
    );
    assert!(admin.hear().is_none(), "once, until the log is read");
}

/// SMART data belongs to the export: every host sees equal values, which include earlier engines.
#[test]
fn health_is_the_exports() {
    let mut rig = rig();
    rig.map_all();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let past = Past {
        reads: 100,
        bytes_read: 1,
        writes: 10,
        bytes_written: 512_000,
        media_errors: 7,
        created_s: now.unwrap().as_secs() - 5 * 3600 - 60,
    };
    rig.core.lanes.set_statistics(
        V,
        VolumeStatistics {
            past,
            ..VolumeStatistics::default()
        },
    );
    // Media errors, hours, read commands, written units.
    let smart = |rig: &mut rig::Rig, admin: &mut Host| {
        let log = Sqe::new(2, 80)
            .with_nsid(u32::MAX)
            .with_cdw(10, 2 | 127 << 16);
        let log = log.with_sgl(forebay_nvme::SglDescriptor::transport(512));
        admin.say(&log, &[]);
        rig.turns(2);
        let Some((Pdu::C2hData(_), page)) = admin.hear() else {
            panic!("no data")
        };
        assert_eq!(admin.response().unwrap().status(), Status::SUCCESS);
        let at = |at: usize| u128::from_le_bytes(page[at..at + 16].try_into().unwrap());
        [at(160), at(128), at(64), at(48)]
    };
    let (mut admin, cntlid) = rig.admin();
    let mut io = rig.io(cntlid, 1, 32);
    assert_eq!(smart(&mut rig, &mut admin), [7, 5, 100, 1]);
    rig.gate.fail(
        0..u64::MAX,
        &[forebay_device::OpKind::Write],
        forebay_device::Errno::IO,
        1,
    );
    let ends = [Status::SUCCESS, Status::WRITE_FAULT];
    assert_eq!(tried(&mut rig, &mut io)[..2], ends);
    let after = [8, 5, 101, 1];
    assert_eq!(smart(&mut rig, &mut admin), after);
    let (mut other, _) = rig.admin();
    assert_eq!(smart(&mut rig, &mut other), after);
    drop((admin, io, other));
    rig.turns(4);
    let (mut again, _) = rig.admin();
    assert_eq!(smart(&mut rig, &mut again), after);
}

/// Identify CNS 12h and 13h: the subsystem's controllers from an identifier on.
#[test]
fn controllers_are_listed() {
    let mut rig = rig();
    let (mut admin, first) = rig.admin();
    let (other, second) = rig.admin();
    let list = |rig: &mut rig::Rig, admin: &mut Host, cns: u32, nsid: u32, from: u16| {
        let sqe = Sqe::new(6, 80)
            .with_nsid(nsid)
            .with_cdw(10, cns | u32::from(from) << 16);
        admin.say(
            &sqe.with_sgl(forebay_nvme::SglDescriptor::transport(4096)),
            &[],
        );
        rig.turns(2);
        match admin.hear() {
            Some((Pdu::C2hData(_), page)) => {
                assert_eq!(admin.response().unwrap().status(), Status::SUCCESS);
                let word = |at: usize| u16::from_le_bytes([page[2 * at], page[2 * at + 1]]);
                let count = usize::from(word(0));
                assert!(page[2 + 2 * count..].iter().all(|byte| *byte == 0));
                Ok((1..=count).map(word).collect())
            }
            Some((Pdu::CapsuleResp(cqe), _)) => Err(cqe.status()),
            said => panic!("{said:?}"),
        }
    };
    for (cns, nsid) in [(0x12, 1), (0x13, 0)] {
        let both = Ok(vec![first, second]);
        assert_eq!(list(&mut rig, &mut admin, cns, nsid, 0), both);
        assert_eq!(list(&mut rig, &mut admin, cns, nsid, first), both);
        assert_eq!(
            list(&mut rig, &mut admin, cns, nsid, second),
            Ok(vec![second])
        );
        assert_eq!(
            list(&mut rig, &mut admin, cns, nsid, second + 1),
            Ok(vec![])
        );
    }
    for nsid in [0, 2] {
        let none = Status::INVALID_NAMESPACE_OR_FORMAT;
        let said = list(&mut rig, &mut admin, 0x12, nsid, 0);
        assert_eq!(said.map_err(Status::code), Err(none));
    }
    drop(other);
    rig.turns(4);
    assert_eq!(list(&mut rig, &mut admin, 0x13, 0, 0), Ok(vec![first]));
}
