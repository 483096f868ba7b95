//! The frontend with a test core, which gives control over memory, room, time and the owner. Whole
//! engines are tested in `tests/tcp_protocol.rs`.

mod abort;
mod admit;
mod bad_input;
mod blame;
mod cost;
mod discovery;
mod failover;
mod fused;
mod hostile;
mod inherit;
mod late;
mod queues;
mod reserve;
mod restrictions;
mod rig;
mod several_r2ts;
mod take_over;
mod take_over_hosts;
mod take_over_pairs;
mod take_over_reserve;
mod write_protected;

use super::*;
use crate::core::staging::StagingBuffer;
use crate::frontend::Frontend;
use crate::lane::LaneIndex;
use crate::upcall::Upcall;
use forebay_nvme::Sqe;
use forebay_nvme::Status;
use forebay_nvme::fabrics::{ConnectCommand, PropertyCommand};
use forebay_nvme::tcp::{self, Pdu};
use forebay_xlate::ExtentRange;
use forebay_xlate::boundary::message::FaultFailure;
use forebay_xlate::boundary::region::{CommandState, QueueIdentity, queue_use};
use forebay_xlate::reactor_side::Answer;
use rig::{Host, SECOND_NS, V, rig, rig_on, rw, write_in_capsule};
use rustix::net::SendFlags;
use std::sync::atomic::Ordering::Relaxed;

#[test]
fn a_host_that_does_not_read_holds_its_share_and_no_more() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut slow = rig.io(cntlid, 1, 128);
    let mut quick = rig.io(cntlid, 2, 32);
    for cid in 0..128 {
        slow.say(&rw(2, cid, 0, 64), &[]);
    }
    rig.turns(50);
    let charge = rig.held_bytes();
    assert!(
        charge > conn::MAX_CHARGED_BYTES / 2 && charge <= conn::MAX_CHARGED_BYTES,
        "{charge}"
    );
    assert!(rig.is_idle(), "only the host can carry this on");
    quick.say(&rw(2, 1, 0, 8), &[]);
    rig.turns(2);
    assert!(matches!(quick.hear(), Some((Pdu::C2hData(_), data)) if data.len() == 8 * 4096));
    let mut got = [false; 128];
    for _ in crate::patience::patiently() {
        while let Some((pdu, data)) = slow.hear() {
            let Pdu::C2hData(c) = pdu else {
                panic!("{pdu:?}")
            };
            assert_eq!(data.len(), 64 * 4096);
            assert!(!std::mem::replace(&mut got[usize::from(c.cid)], true));
        }
        rig.turns(1);
        if got.iter().all(|g| *g) && rig.held_bytes() == 0 && rig.core.staging.out() == 0 {
            break;
        }
    }
    assert!(got.iter().all(|g| *g));
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
}

#[test]
fn a_host_that_never_reads_is_given_up() {
    let mut rig = rig();
    rig.map_all();
    let (mut admin, cntlid) = rig.admin();
    let mut slow = rig.io(cntlid, 1, 128);
    for cid in 0..100 {
        slow.say(&rw(2, cid, 0, 64), &[]);
    }
    rig.turns(20);
    let deadline = rig.frontend.next_deadline_ns().unwrap();
    assert!(deadline <= rig.core.now_ns() + BLOCKED_LIMIT_NS);
    rig.pass(BLOCKED_LIMIT_NS - SECOND_NS);
    assert!(rig.held_bytes() > 0);
    rig.pass(2 * SECOND_NS);
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
    assert_eq!(rig.frontend.count(), 1);
    admin.say(&PropertyCommand::get(9, 0x1c, false).to_sqe(), &[]);
    rig.turns(1);
    assert_eq!(admin.response().unwrap().result(), 1);
    rig.io(cntlid, 1, 32);
}

#[test]
fn without_memory_the_stream_waits_and_loses_nothing() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 64);
    let mut all: Vec<StagingBuffer> =
        std::iter::from_fn(|| rig.core.staging.allocate(4096)).collect();
    for cid in 0..20u16 {
        host.say(
            &write_in_capsule(cid, u64::from(cid), 1),
            &vec![cid as u8; 4096],
        );
    }
    host.say(&rw(2, 20, 3, 1), &[]);
    let mut capsule = vec![0; tcp::MAX_HEADER_BYTES];
    let n = tcp::put_capsule_cmd(
        &mut capsule,
        &host.params,
        &write_in_capsule(21, 50, 2),
        8192,
    );
    capsule.truncate(n);
    capsule.resize(n + 8192, 0xee);
    rustix::net::send(&host.fd, &capsule[..4000], SendFlags::NOSIGNAL).unwrap();
    rig.turns(10);
    assert!(host.hear().is_none());
    assert!(
        rig.frontend.retry_within_ns().is_some(),
        "it must be tried again"
    );
    assert!(rig.core.record().staging_waits.load(Relaxed) > 0);
    // One small buffer is enough to make progress.
    rig.core.staging.release(all.swap_remove(0));
    rig.turns(60);
    for cid in 0..20 {
        let cqe = host.response().unwrap();
        assert_eq!((cqe.cid(), cqe.status()), (cid, Status::SUCCESS));
    }
    assert!(
        matches!(host.hear(), Some((Pdu::C2hData(c), data)) if c.cid == 20 && data == [3; 4096])
    );
    rustix::net::send(&host.fd, &capsule[4000..], SendFlags::NOSIGNAL).unwrap();
    rig.turns(10);
    assert!(host.hear().is_none(), "8 KiB don't fit into what is left");
    for buffer in all {
        rig.core.staging.release(buffer);
    }
    rig.turns(3);
    assert_eq!(host.response().unwrap().cid(), 21);
    assert!(rig.is_idle());
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
}

/// Its commands wait for memory when its socket has room again.
#[test]
fn a_host_that_reads_again_is_visited_until_nothing_waits() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 64);
    let big = rig.core.staging.allocate(64 * 4096).unwrap();
    let all: Vec<StagingBuffer> = std::iter::from_fn(|| rig.core.staging.allocate(4096)).collect();
    rig.core.staging.release(big);
    host.say(&rw(2, 0, 0, 64), &[]);
    for cid in 1..6 {
        host.say(&rw(2, cid, 0, 1), &[]);
    }
    rig.turns(1);
    let blocked = |rig: &rig::Rig| rig.frontend.conns.iter().flatten().any(|c| c.tx.blocked());
    assert!(blocked(&rig), "more than the socket takes");
    assert!(host.hear().is_none());
    // Before the socket's event arrives.
    rig.frontend.poll(&mut rig.core, &mut |_| false);
    assert!(!blocked(&rig));
    rig.turns(60);
    for cid in 0..6 {
        assert!(
            matches!(host.hear(), Some((Pdu::C2hData(c), _)) if c.cid == cid),
            "{cid}"
        );
    }
    for buffer in all {
        rig.core.staging.release(buffer);
    }
}

#[test]
fn the_longest_waiting_command_resumes_first() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 64);
    let mut all: Vec<StagingBuffer> =
        std::iter::from_fn(|| rig.core.staging.allocate(4096)).collect();
    for cid in 0..6 {
        host.say(&rw(2, cid, 0, 1), &[]);
        rig.turns(1);
    }
    rig.core.staging.release(all.swap_remove(0));
    rig.turns(20);
    let order: Vec<u16> = std::iter::from_fn(|| match host.hear()?.0 {
        Pdu::C2hData(c) => Some(c.cid),
        other => panic!("{other:?}"),
    })
    .collect();
    assert_eq!(order, [0, 1, 2, 3, 4, 5]);
    for buffer in all {
        rig.core.staging.release(buffer);
    }
}

#[test]
fn without_room_in_the_core_commands_wait_their_turn() {
    let mut rig = rig();
    let (_admin, cntlid) = rig.admin();
    let mut hosts: Vec<Host> = (1..=20).map(|qid| rig.io(cntlid, qid, 256)).collect();
    // Unmapped, with a silent owner: reads park. There is room for 4096.
    for host in &mut hosts {
        for cid in 0..256 {
            host.say(&Sqe::new(0, cid).with_nsid(1).with_cdw(10, 0), &[]);
        }
    }
    // Flushes complete at once when nothing is uncommitted.
    rig.turns(5);
    for host in &mut hosts {
        for cid in 0..256 {
            assert_eq!(host.response().map(|c| c.cid()), Some(cid));
        }
        for cid in 0..256 {
            host.say(&rw(2, cid, 0, 1), &[]);
        }
    }
    rig.turns(20);
    assert!(hosts.iter_mut().all(|h| h.hear().is_none()));
    let waiting: usize = rig
        .frontend
        .conns
        .iter()
        .flatten()
        .map(|c| c.slots.used() - c.in_flight as usize)
        .sum();
    assert!(waiting > 0, "the core took them all");
    assert!(rig.frontend.retry_within_ns().is_some());
    for _ in 0..10 {
        rig.core.fault_answered(
            V,
            ExtentRange::new(0, 1),
            Answer::Failed {
                write: false,
                reason: FaultFailure::NoSpace,
            },
        );
        rig.turns(3);
    }
    for host in &mut hosts {
        let mut seen = 0;
        while let Some(cqe) = host.response() {
            assert_eq!(cqe.status(), Status::CAPACITY_EXCEEDED);
            seen += 1;
        }
        assert_eq!(seen, 256);
    }
    assert_eq!(rig.core.staging.out(), 0);
}

#[test]
fn data_that_never_comes_ends_the_connection() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    for cid in 0..4 {
        host.say(&rw(1, cid, 0, 128), &[]);
    }
    rig.turns(2);
    let Some((Pdu::R2t(r2t), _)) = host.hear() else {
        panic!()
    };
    assert_eq!(rig.frontend.shared.r2ts.get(), 4);
    let header = tcp::H2cData {
        cid: 0,
        ttag: r2t.ttag,
        offset_bytes: 0,
        length_bytes: 65_536,
        last: false,
    };
    let mut out = vec![0; tcp::MAX_HEADER_BYTES];
    let n = tcp::put_h2c_data(&mut out, &host.params, &header);
    out.truncate(n);
    out.resize(40_000, 1);
    rustix::net::send(&host.fd, &out, SendFlags::NOSIGNAL).unwrap();
    rig.turns(3);
    assert!(rig.is_idle(), "half a PDU keeps nobody awake");
    assert_eq!(rig.held_bytes(), 4 * (512 << 10));
    assert!(rig.frontend.next_deadline_ns().unwrap() <= rig.core.now_ns() + DATA_LIMIT_NS);
    rig.pass(DATA_LIMIT_NS);
    assert_eq!(
        (rig.frontend.shared.r2ts.get(), rig.core.staging.out()),
        (0, 0)
    );
    while host.hear().is_some() {}
    assert!(host.ended());
    assert_eq!(rig.frontend.count(), 1);
}

#[test]
fn a_terminated_host_has_two_seconds_to_close() {
    let mut rig = rig();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    host.say(&rw(2, 1, 0, 1), &[]);
    rustix::net::send(&host.fd, &[9, 0, 24, 0, 24, 0, 0, 0], SendFlags::NOSIGNAL).unwrap();
    rig.turns(2);
    assert!(matches!(host.hear(), Some((Pdu::C2hTermReq(_), _))));
    assert!(host.ended());
    rig.pass(SECOND_NS);
    rig.turns(1);
    assert!(rustix::net::send(&host.fd, &[0; 64], SendFlags::NOSIGNAL).is_ok());
    rig.turns(1);
    rig.pass(SECOND_NS);
    assert!(rustix::net::send(&host.fd, &[0; 64], SendFlags::NOSIGNAL).is_err());
    assert_eq!(rig.frontend.count(), 2, "the core has its command still");
    rig.core.fault_answered(
        V,
        ExtentRange::new(0, 1),
        Answer::Failed {
            write: false,
            reason: FaultFailure::Internal,
        },
    );
    rig.turns(1);
    assert_eq!((rig.frontend.count(), rig.core.staging.out()), (1, 0));
}

#[test]
fn the_state_region_records_commands_in_flight() {
    let mut rig = rig();
    let region = rig.core.region.clone();
    let (admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 5, 32);
    let (c, q) = (&region.controllers()[0], &region.queues()[1]);
    assert_eq!(
        (
            c.used.load(Relaxed),
            c.lane.load(Relaxed),
            c.cntlid.load(Relaxed)
        ),
        (1, 3, u64::from(cntlid))
    );
    let key = region.header().key.load(Relaxed);
    let state = c.state(key, 0, u64::MAX).unwrap();
    assert_eq!(state.state[0].to_le_bytes(), *b"nqn.2014");
    let identity = QueueIdentity {
        qid: 5,
        entries: 32,
        no_flow_control: true,
    };
    assert_eq!(q.used.load(Relaxed), queue_use::LIVE);
    assert_eq!(q.constants(key, 1).map(|c| c.identity), Some(identity));
    assert_eq!(q.number.load(Relaxed), 1);
    let sqe = rw(2, 0x1234, 77, 1);
    host.say(&sqe, &[]);
    rig.turns(1);
    let record = &region.commands(1)[0];
    let words: [u64; 8] = std::array::from_fn(|i| record.sqe[i].load(Relaxed));
    let came: [u64; 8] = zerocopy::transmute!(sqe);
    assert_eq!(words, came);
    assert_eq!(record.number.load(Relaxed), 2);
    assert_eq!(
        CommandState::open(record.state.load(Relaxed), 2),
        Ok(CommandState::taken(2))
    );
    assert_eq!(q.number.load(Relaxed), 2);
    let lane = rig.core.lane(LaneIndex(3)).unwrap().record();
    assert_eq!(
        (lane.connections.load(Relaxed), lane.in_flight.load(Relaxed)),
        (2, 1)
    );
    // The host leaves; commands that never reached a device end.
    drop((admin, host));
    rig.turns(3);
    let lane = rig.core.lane(LaneIndex(3)).unwrap().record();
    assert_eq!(lane.connections.load(Relaxed), 0);
    assert_eq!(
        (record.state(), q.used.load(Relaxed), c.used.load(Relaxed)),
        (CommandState::FREE, 0, 0)
    );
    assert_eq!(rig.frontend.count(), 0);
}

#[test]
fn large_data_goes_straight_to_its_place() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    host.say(&rw(1, 1, 0, 128), &[]);
    rig.turns(1);
    let Some((Pdu::R2t(r2t), _)) = host.hear() else {
        panic!()
    };
    let data: Vec<u8> = (0..512usize << 10)
        .map(|i| (i * 7 + i / 4096) as u8)
        .collect();
    let part = host.params.max_h2c_data_bytes as usize;
    for (i, chunk) in data.chunks(part).enumerate() {
        let at = i * part;
        let last = at + chunk.len() == data.len();
        let length_bytes = chunk.len() as u32;
        let header = tcp::H2cData {
            cid: 1,
            ttag: r2t.ttag,
            offset_bytes: at as u32,
            length_bytes,
            last,
        };
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_h2c_data(&mut out, &host.params, &header);
        out.truncate(n);
        out.extend_from_slice(chunk);
        if last {
            let n = out.len();
            out.resize(n + tcp::MAX_HEADER_BYTES, 0);
            let more = tcp::put_capsule_cmd(&mut out[n..], &host.params, &rw(2, 2, 0, 128), 0);
            out.truncate(n + more);
        }
        let mut sent = 0;
        for step in [30, 20_000, usize::MAX] {
            let mut left = step.min(out.len() - sent);
            while left > 0 {
                let n = rustix::net::send(&host.fd, &out[sent..sent + left], SendFlags::NOSIGNAL)
                    .unwrap_or(0);
                sent += n;
                left -= n;
                rig.turns(1);
            }
        }
    }
    let mut got = Vec::new();
    for _ in 0..100 {
        rig.turns(1);
        while let Some(pdu) = host.hear() {
            got.push(pdu);
        }
    }
    assert!(
        matches!(got[0].0, Pdu::CapsuleResp(c) if c.cid() == 1 && c.status() == Status::SUCCESS)
    );
    assert!(matches!(got[1].0, Pdu::C2hData(c) if c.cid == 2));
    assert!(got[1].1 == data);
}

/// The daemon holds every socket, too, so closing one does not end the connection.
#[test]
fn a_socket_that_others_hold_ends_for_its_host_and_is_watched_no_more() {
    let mut rig = rig();
    rig.map_all();
    let (mut admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    // Refused: such a queue exists.
    let mut command = ConnectCommand::new(0, 1, 32, 0);
    command.cattr = ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL;
    let mut refused = rig.connect(command, cntlid);
    assert!(!refused.response().unwrap().status().is_success());
    assert!(refused.ended());
    let export = rig.core.lane(LaneIndex(3)).unwrap().export.export;
    rig.frontend.export_removed(&mut rig.core, export);
    assert!(admin.ended() && host.ended());
    let gone = std::iter::from_fn(|| rig.core.upcalls.pop_front())
        .filter(|upcall| matches!(upcall, Upcall::SocketGone(_)))
        .count();
    assert_eq!((gone, rig.charge.len()), (3, 3));
    // They stay readable for ever; the rig checks that no event is reported.
    drop((admin, host, refused));
    rig.turns(5);
    assert_eq!(rig.frontend.count(), 0);
}

#[test]
fn zeros_are_sent_with_the_digest_of_their_length() {
    let mut rig = rig_on("null");
    rig.map_all();
    rig.digests = (true, true);
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    for blocks in [1, 2, 2, 1, 16] {
        host.say(&rw(2, 1, 40, blocks), &[]);
        host.say(&rw(2, 2, 0, blocks), &[]);
        rig.turns(2);
        let zeros = vec![0; blocks as usize * 4096];
        for _ in 0..2 {
            let (pdu, data) = host.hear().unwrap();
            assert!(matches!(pdu, Pdu::C2hData(_)), "{pdu:?}");
            let (data, digest) = data.split_at(zeros.len());
            assert_eq!(digest, tcp::crc32c(&zeros).to_le_bytes());
            assert_eq!(data, zeros);
        }
    }
    assert_eq!((rig.core.staging.out(), rig.held_bytes()), (0, 0));
}
