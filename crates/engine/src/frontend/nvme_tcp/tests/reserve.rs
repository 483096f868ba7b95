//! Reservation commands, and a preempted host's commands in flight.

use super::*;
use crate::core::{FenceSet, RecoveredSpan};
use crate::frontend::Frontend;
use forebay_device::OpKind;
use forebay_nvme::SglDescriptor;
use forebay_nvme::opcode::nvm;
use forebay_nvme::reservation::{ReservationCommand, Reservations};
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::ReserveAsk;
use std::sync::Arc;

const OK: Status = Status::SUCCESS;
const WRITE_EXCLUSIVE: u32 = 1;
const EXCLUSIVE_ACCESS: u32 = 2;
/// Command Interrupted for a host without ACRE.
const INTERRUPTED: Status = Status::NAMESPACE_NOT_READY;

fn conflict() -> Status {
    Status::RESERVATION_CONFLICT.with_dnr()
}

struct World {
    rig: rig::Rig,
    a: Host,
    b: Host,
    admin: Host,
    _other_admin: Host,
    state: Reservations,
    asked: Vec<ReserveAsk>,
}

fn world() -> World {
    world_of(32)
}

fn world_of(entries: u32) -> World {
    let mut rig = rig();
    rig.map_all();
    let (admin, cntlid) = rig.admin();
    let a = rig.io(cntlid, 1, entries);
    (rig.host, rig.host_id) = ("nqn.2014-08.org.example:other", [8; 16]);
    let (other_admin, cntlid) = rig.admin();
    let b = rig.io(cntlid, 1, 32);
    World {
        rig,
        a,
        b,
        admin,
        _other_admin: other_admin,
        state: Reservations::default(),
        asked: Vec::new(),
    }
}

fn command(opcode: u8, cid: u16, cdw10: u32, keys: [u64; 2]) -> (Sqe, Vec<u8>) {
    let data: Vec<u8> = keys.into_iter().flat_map(u64::to_le_bytes).collect();
    let len = if opcode == nvm::RESERVATION_RELEASE {
        8
    } else {
        16
    };
    let sqe = Sqe::new(opcode, cid)
        .with_nsid(1)
        .with_cdw(10, cdw10)
        .with_sgl(SglDescriptor::in_capsule(0, len));
    (sqe, data[..len as usize].to_vec())
}

fn register(cid: u16, key: u64) -> (Sqe, Vec<u8>) {
    command(nvm::RESERVATION_REGISTER, cid, 0, [0, key])
}

fn acquire(cid: u16, what: u32, rtype: u32, keys: [u64; 2]) -> (Sqe, Vec<u8>) {
    command(nvm::RESERVATION_ACQUIRE, cid, what | rtype << 8, keys)
}

impl World {
    /// Collects messages to the control thread.
    fn hear(&mut self) {
        self.rig.turns(4);
        while let Some(upcall) = self.rig.core.upcalls.pop_front() {
            match upcall {
                Upcall::Reserve(ask) => self.asked.push(ask),
                Upcall::ReserveGone(_, token) => self.asked.retain(|ask| ask.token != token),
                Upcall::Fault { .. } | Upcall::SocketGone(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn answer(&mut self) {
        self.hear();
        let ask = self.asked.remove(0);
        let status = ReservationCommand::new(ask.action, ask.keys)
            .and_then(|command| self.state.apply(ask.host, &command))
            .map_or_else(|status| status, |_| OK);
        let state = Arc::new(self.state.clone());
        (self.rig.frontend).reserved(&mut self.rig.core, ask.token, ask.volume, status, &state);
        self.rig.turns(4);
    }

    fn a_says(&mut self, (sqe, data): (Sqe, Vec<u8>)) {
        self.a.say(&sqe, &data);
    }

    fn b_says(&mut self, (sqe, data): (Sqe, Vec<u8>)) {
        self.b.say(&sqe, &data);
    }

    fn a_hears(&mut self) -> Option<(u16, Status)> {
        self.rig.turns(4);
        self.a.response().map(|cqe| (cqe.cid(), cqe.status()))
    }

    fn b_hears(&mut self) -> Option<(u16, Status)> {
        self.rig.turns(4);
        self.b.response().map(|cqe| (cqe.cid(), cqe.status()))
    }

    fn b_hears_soon(&mut self) -> (u16, Status) {
        for _ in crate::patience::patiently() {
            if let Some(heard) = self.b_hears() {
                return heard;
            }
        }
        panic!("no answer")
    }

    /// A holds the volume with key 1; B is registered with key 2.
    fn a_holds(&mut self, rtype: u32) {
        self.a_says(register(100, 1));
        self.answer();
        assert_eq!(self.a_hears(), Some((100, OK)));
        self.b_says(register(100, 2));
        self.answer();
        assert_eq!(self.b_hears(), Some((100, OK)));
        self.a_says(acquire(101, 0, rtype, [1, 0]));
        self.answer();
        assert_eq!(self.a_hears(), Some((101, OK)));
    }

    fn report(&mut self, extended: bool) -> Result<Vec<u8>, Status> {
        let sqe = Sqe::new(nvm::RESERVATION_REPORT, 90)
            .with_nsid(1)
            .with_cdw(10, 511)
            .with_cdw(11, u32::from(extended))
            .with_sgl(SglDescriptor::transport(2048));
        self.b.say(&sqe, &[]);
        self.rig.turns(4);
        match self.b.hear() {
            Some((Pdu::C2hData(_), data)) => Ok(data),
            Some((Pdu::CapsuleResp(cqe), _)) => Err(cqe.status()),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_command_is_answered_by_the_daemon_once() {
    let mut w = world();
    w.a_says(register(1, 5));
    w.hear();
    assert_eq!((w.asked.len(), w.a_hears()), (1, None));
    assert_eq!((w.asked[0].host, w.asked[0].keys), ([7; 16], [0, 5]));
    let first = w.asked[0].token;
    w.answer();
    assert_eq!(w.a_hears(), Some((1, OK)));
    // A late answer does no harm, and brings the newest state.
    let state = Arc::new(w.state.clone());
    (w.rig.frontend).reserved(&mut w.rig.core, first, V, conflict(), &state);
    assert_eq!(w.a_hears(), None);
    // The daemon refuses, too; an invalid command is not sent to it.
    w.b_says(acquire(2, 0, WRITE_EXCLUSIVE, [9, 0]));
    w.answer();
    assert_eq!(w.b_hears(), Some((2, conflict())));
    w.b_says(acquire(3, 0, 9, [9, 0]));
    w.hear();
    assert!(w.asked.is_empty());
    assert_eq!(w.b_hears(), Some((3, Status::INVALID_FIELD.with_dnr())));
    let sqe = Sqe::new(9, 4)
        .with_nsid(1)
        .with_cdw(10, 0x83)
        .with_cdw(11, 1);
    w.admin.say(&sqe, &[]);
    w.answer();
    w.rig.turns(4);
    let cqe = w.admin.response().unwrap();
    assert_eq!((cqe.cid(), cqe.status()), (4, OK));
    assert!(w.state.ptpl());
    assert_eq!(w.rig.core.staging.out(), 0);
}

#[test]
fn a_report_is_of_the_lanes_copy() {
    let mut w = world();
    assert_eq!(
        w.report(false),
        Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT.with_dnr())
    );
    w.a_holds(EXCLUSIVE_ACCESS);
    let report = w.report(true).unwrap();
    assert_eq!((report.len(), report[4], report[5]), (2048, 2, 2));
    assert_eq!((report[66], report[130]), (1, 0));
    assert_ne!(report[64..66], [0xff, 0xff]);
    assert_eq!(report[80..96], [7; 16]);
    assert!(report[192..].iter().all(|byte| *byte == 0));
    assert_eq!(w.rig.core.staging.out(), 0);
}

/// The loser's commands at a device are waited for; others never get there.
#[test]
fn a_preemptor_is_answered_when_the_losers_writes_have_ended() {
    for abort in [false, true] {
        let mut w = world();
        w.a_holds(WRITE_EXCLUSIVE);
        w.rig.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
        // At the device, at the owner, and without its data.
        w.a.say(&write_in_capsule(1, 0, 1), &[1; 4096]);
        w.rig.volume.table.clear(ExtentRange::new(3, 1));
        w.a.say(&write_in_capsule(2, 3 * 16, 1), &[2; 4096]);
        w.a.say(&rw(1, 3, 32, 1), &[]);
        w.hear();
        let Some((Pdu::R2t(r2t), _)) = w.a.hear() else {
            panic!("no R2T")
        };
        let what = if abort { 2 } else { 1 };
        w.b_says(acquire(10, what, WRITE_EXCLUSIVE, [2, 1]));
        w.answer();
        assert_eq!(w.b_hears(), None, "a write is under way");
        let aborted = match abort {
            true => Status::COMMAND_ABORT_REQUESTED,
            false => conflict(),
        };
        assert_eq!(w.a_hears(), Some((2, aborted)));
        w.a.say(&write_in_capsule(4, 0, 1), &[4; 4096]);
        assert_eq!(w.a_hears(), Some((4, conflict())));
        w.a.say(&rw(2, 5, 0, 1), &[]);
        w.rig.turns(4);
        assert!(matches!(w.a.hear(), Some((Pdu::C2hData(_), _))));
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let h2c = tcp::H2cData {
            cid: 3,
            ttag: r2t.ttag,
            offset_bytes: 0,
            length_bytes: 4096,
            last: true,
        };
        let n = tcp::put_h2c_data(&mut out, &w.a.params, &h2c);
        out.truncate(n);
        out.extend_from_slice(&[3; 4096]);
        rustix::net::send(&w.a.fd, &out, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(w.a_hears(), Some((3, aborted)), "its data came too late");
        assert_eq!(w.b_hears(), None);
        w.rig.gate.release();
        assert_eq!(w.b_hears_soon(), (10, OK));
        assert_eq!(w.a_hears(), Some((1, OK)), "it was at the device before");
        assert_eq!(w.rig.held_bytes(), 0);
    }
}

/// A dead engine's possible commands are waited for, too.
#[test]
fn a_preemptor_waits_for_the_fence() {
    let mut w = world();
    w.a_holds(WRITE_EXCLUSIVE);
    w.rig.core.recovered.recover(&[RecoveredSpan {
        volume: V,
        bytes: 0..4096,
        write: true,
        devices: FenceSet::One(DeviceIndex(0)),
        command: None,
    }]);
    w.b_says(acquire(10, 1, WRITE_EXCLUSIVE, [2, 1]));
    w.answer();
    assert_eq!(w.b_hears(), None);
    w.b_says(command(nvm::RESERVATION_REGISTER, 11, 2, [2, 3]));
    w.answer();
    assert_eq!(w.b_hears(), Some((11, OK)));
    w.rig.core.fenced(DeviceIndex(0));
    assert_eq!(w.b_hears_soon(), (10, OK));
}

/// The loser's command waits for memory.
#[test]
fn a_preemptor_does_not_wait_for_what_it_ended() {
    let mut w = world();
    w.a_holds(WRITE_EXCLUSIVE);
    w.b_says(acquire(10, 1, WRITE_EXCLUSIVE, [2, 1]));
    w.hear();
    let all: Vec<_> = std::iter::from_fn(|| w.rig.core.staging.allocate(4096)).collect();
    w.a.say(&rw(1, 1, 0, 1), &[]);
    w.rig.turns(4);
    w.rig.recover(1);
    w.answer();
    assert_eq!(w.a_hears(), Some((1, conflict())));
    assert_eq!(w.b_hears(), Some((10, OK)));
    assert!(!w.rig.core.recovered.any());
    for buffer in all {
        w.rig.core.staging.release(buffer);
    }
    w.b_says((write_in_capsule(11, 0, 1), vec![2; 4096]));
    assert_eq!(w.b_hears_soon(), (11, OK));
}

#[test]
fn without_the_daemon_it_may_be_tried_again() {
    let mut w = world();
    w.a_says(register(1, 5));
    w.hear();
    w.rig.pass(19 * SECOND_NS);
    assert_eq!((w.a_hears(), w.asked.len()), (None, 1));
    w.rig.pass(2 * SECOND_NS);
    assert_eq!(w.a_hears(), Some((1, INTERRUPTED)));
    w.hear();
    assert!(w.asked.is_empty(), "nobody waits for it any more");
    w.a_holds(WRITE_EXCLUSIVE);
    w.rig.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    w.a.say(&write_in_capsule(1, 0, 1), &[1; 4096]);
    w.rig.turns(4);
    w.b_says(acquire(10, 1, WRITE_EXCLUSIVE, [2, 1]));
    w.answer();
    w.rig.pass(21 * SECOND_NS);
    assert_eq!(w.b_hears(), Some((10, INTERRUPTED)));
    w.a.say(&write_in_capsule(4, 0, 1), &[4; 4096]);
    assert_eq!(w.a_hears(), Some((4, conflict())));
    w.b_says(acquire(11, 1, WRITE_EXCLUSIVE, [2, 1]));
    w.answer();
    assert_eq!(w.b_hears(), None, "again it waits");
    w.rig.gate.release();
    assert_eq!(w.b_hears_soon(), (11, OK));
}

#[test]
fn a_connection_that_closes_asks_for_nothing() {
    let mut w = world();
    w.a_holds(WRITE_EXCLUSIVE);
    w.b_says(acquire(10, 1, WRITE_EXCLUSIVE, [2, 1]));
    w.hear();
    assert_eq!(w.asked.len(), 1);
    let World {
        rig,
        b,
        a,
        admin,
        _other_admin,
        state,
        asked,
    } = w;
    drop(b);
    let (mut rig, mut asked) = (rig, asked);
    rig.turns(4);
    while let Some(upcall) = rig.core.upcalls.pop_front() {
        if let Upcall::ReserveGone(_, token) = upcall {
            asked.retain(|ask| ask.token != token);
        }
    }
    assert!(asked.is_empty() && !rig.frontend.waits_for_control());
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
    drop((a, admin, _other_admin, state));
}

/// Both halves wait for their data when their host loses access.
#[test]
fn a_pair_that_waits_is_refused_once() {
    let mut w = world_of(128);
    w.b_says(register(100, 2));
    w.answer();
    assert_eq!(w.b_hears(), Some((100, OK)));
    let by_r2t = |cid| write_in_capsule(cid, 8, 1).with_sgl(SglDescriptor::transport(4096));
    for cid in 0..64 {
        w.a.say(&by_r2t(cid), &[]);
    }
    w.rig.turns(4);
    let mut asked = Vec::new();
    while let Some((Pdu::R2t(r2t), _)) = w.a.hear() {
        asked.push(r2t);
    }
    assert_eq!(asked.len(), 64);
    let (mut first, mut second) = (by_r2t(64), by_r2t(65));
    (first.opcode, first.flags) = (nvm::COMPARE, first.flags | 1);
    second.flags |= 2;
    w.a.say(&first, &[]);
    w.a.say(&second, &[]);
    w.rig.turns(4);
    w.b_says(acquire(101, 0, EXCLUSIVE_ACCESS, [2, 0]));
    w.answer();
    let mut refused = Vec::new();
    while let Some(cqe) = w.a.response() {
        refused.push((cqe.cid(), cqe.status()));
        w.rig.turns(1);
    }
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(
        refused.iter().all(|(cid, _)| *cid == 64 || *cid == 65),
        "{refused:?}"
    );
    assert_ne!(refused[0].0, refused[1].0);
}

/// The pair's flush is in flight when its host loses access.
#[test]
fn a_pair_that_flushes_is_refused() {
    let mut w = world_of(128);
    w.b_says(register(100, 2));
    w.answer();
    assert_eq!(w.b_hears(), Some((100, OK)));
    w.rig.volume.may_write_to(forebay_xlate::DeviceIndex(0));
    (w.rig.gate).hold_some(0..u64::MAX, &[forebay_device::OpKind::Flush]);
    let (mut first, mut second) = (write_in_capsule(1, 8, 1), write_in_capsule(2, 8, 1));
    (first.opcode, first.flags) = (nvm::COMPARE, first.flags | 1);
    second.flags |= 2;
    w.a.say(&first.with_cdw(12, 1 << 30), &[0; 4096]);
    w.a.say(&second, &[7; 4096]);
    w.rig.turns(4);
    assert_eq!(w.rig.gate.held(), 1);
    w.b_says(acquire(101, 0, EXCLUSIVE_ACCESS, [2, 0]));
    w.answer();
    let mut refused = Vec::new();
    while let Some(cqe) = w.a.response() {
        refused.push((cqe.cid(), cqe.status()));
        w.rig.turns(1);
    }
    let ends = [(1, conflict()), (2, Status::ABORTED_FAILED_FUSED)];
    assert_eq!(refused, ends);
    assert_eq!(
        w.b_hears(),
        Some((101, OK)),
        "and nothing is to be waited for"
    );
    w.rig.gate.release();
}
