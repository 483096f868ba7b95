//! A throttled host: its commands wait in order, can be aborted, and end with their connection.

use super::abort::{ABORTED, abort, answers};
use super::*;
use crate::frontend::Frontend;
use forebay_device::OpKind;
use forebay_nvme::tcp::{H2cData, Pdu, R2t};
use forebay_qos::budget::Budget;
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::boundary::region::{Times, TimesOf};
use rustix::event::epoll;
use std::sync::atomic::Ordering::Relaxed;

const WINDOW_NS: u64 = 1_000_000;

fn pass_window(rig: &mut rig::Rig) {
    let now_ns = rig.core.now_ns();
    rig.core.clock.set_clock_ns(now_ns + WINDOW_NS);
    rig.core.begin_turn();
}

fn send_data(host: &Host, r2t: &R2t) {
    let data = H2cData {
        cid: r2t.cid,
        ttag: r2t.ttag,
        offset_bytes: r2t.offset_bytes,
        length_bytes: r2t.length_bytes,
        last: true,
    };
    let mut out = vec![0; tcp::MAX_HEADER_BYTES];
    let n = tcp::put_h2c_data(&mut out, &host.params, &data);
    out.truncate(n);
    out.resize(n + r2t.length_bytes as usize, 7);
    let sent = rustix::net::send(&host.fd, &out, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(sent, out.len());
}

#[test]
fn throttled_commands_end_by_abort_or_with_their_connection() {
    let mut rig = rig();
    rig.map_all();
    let (mut admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    let now_ns = rig.core.now_ns();
    rig.core.clock.set_clock_ns(now_ns);
    rig.core.admit_all_by(&Budget::fixed(2000));
    let good = |cid: u16| (cid, Status::SUCCESS);
    for cid in 1..=4 {
        host.say(&rw(2, cid, u64::from(cid), 1), &[]);
    }
    host.say(&write_in_capsule(5, 5, 1), &[5; 4096]);
    host.say(&Sqe::new(0, 6).with_nsid(1), &[]);
    for cid in 7..=12 {
        host.say(&rw(2, cid, u64::from(cid), 1), &[]);
    }
    assert_eq!(answers(&mut rig, &mut host), [good(1), good(2)]);
    assert_eq!(abort(&mut rig, &mut admin, 1, 4), 0);
    assert_eq!(answers(&mut rig, &mut host), [(4, ABORTED)]);
    pass_window(&mut rig);
    assert_eq!(answers(&mut rig, &mut host), [good(3), good(5)]);
    pass_window(&mut rig);
    assert_eq!(answers(&mut rig, &mut host), [good(6), good(7)]);
    let lane = rig.core.lanes.of_export(ExportId(1)).unwrap();
    let throttled = |rig: &rig::Rig| {
        let record = rig.core.lane(lane).unwrap().record();
        record.throttled.load(Relaxed)
    };
    assert_eq!(throttled(&rig), 5);
    drop(host);
    rig.turns(10 + SKIPPED_TURNS as usize);
    assert_eq!((throttled(&rig), rig.core.slab.busy()), (0, 0));
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
    pass_window(&mut rig);
    rig.turns(2);
    assert_eq!(rig.core.slab.busy(), 0);
}

/// Refused commands count against the quantum, too, so that they delay no one, on any number of
/// connections.
#[test]
fn refused_commands_count_against_the_quantum() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut hosts = [1, 2].map(|qid| rig.io(cntlid, qid, 32));
    let now_ns = rig.core.now_ns();
    rig.core.clock.set_clock_ns(now_ns);
    rig.core.admit_all_by(&Budget::fixed(1_000_000));
    for host in &mut hosts {
        for cid in 0..20 {
            host.say(&rw(2, cid, 1 << 40, 1), &[]);
        }
    }
    let (mut refused, mut most) = (0, 0);
    for _ in 0..40 {
        rig.core.begin_turn();
        rig.turns(1);
        let before = refused;
        for host in &mut hosts {
            while let Some(cqe) = host.response() {
                assert_eq!(cqe.status(), Status::LBA_OUT_OF_RANGE.with_dnr());
                refused += 1;
            }
        }
        most = most.max(refused - before);
    }
    // One quantum, by the assumed costs.
    assert_eq!((refused, most), (40, 11));
}

/// Commands beyond the lane's room wait in their connection, in order and without memory, and the
/// reactor can sleep.
#[test]
fn deep_queues_over_budget_wait_in_their_connections() {
    let mut rig = rig();
    rig.map_all();
    let (mut admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 128);
    let now_ns = rig.core.now_ns();
    rig.core.clock.set_clock_ns(now_ns);
    rig.core.admit_all_by(&Budget::fixed(2000));
    for cid in 0..40 {
        host.say(&rw(2, cid, u64::from(cid), 1), &[]);
    }
    // In-capsule data stops the stream, and all behind it.
    for cid in 40..46 {
        host.say(&write_in_capsule(cid, u64::from(cid), 1), &[5; 4096]);
    }
    for cid in 46..60 {
        host.say(&Sqe::new(0, cid).with_nsid(1), &[]);
    }
    let mut ended: Vec<u16> = Vec::new();
    let mut next = |rig: &mut rig::Rig, host: &mut Host| {
        let more = answers(rig, host);
        assert!(more.iter().all(|(_, status)| *status == Status::SUCCESS));
        ended.extend(more.iter().map(|(cid, _)| *cid));
        ended.len()
    };
    assert_eq!(next(&mut rig, &mut host), 2);
    let charge = |rig: &rig::Rig| (rig.core.slab.busy(), rig.core.staging.out());
    assert_eq!(charge(&rig), (24, 24));
    rig.core.begin_turn();
    rig.turns(1);
    assert!(rig.frontend.is_idle() && !rig.core.must_turn());
    assert!(rig.core.qos.window_ends_ns().is_some());
    // One that waits in its connection.
    assert_eq!(abort(&mut rig, &mut admin, 1, 38), 0);
    assert_eq!(answers(&mut rig, &mut host), [(38, ABORTED)]);
    for _ in 0..40 {
        pass_window(&mut rig);
        let before = next(&mut rig, &mut host);
        assert!(before <= 59 && charge(&rig).0 <= 32);
    }
    let all: Vec<u16> = (0..60).filter(|cid| *cid != 38).collect();
    assert_eq!(ended, all);
    assert_eq!((rig.held_bytes(), charge(&rig)), (0, (0, 0)));
    for cid in 0..60 {
        host.say(&rw(2, cid, u64::from(cid), 1), &[]);
    }
    rig.turns(5);
    drop((host, admin));
    rig.turns(10);
    assert_eq!((rig.frontend.count(), charge(&rig)), (0, (0, 0)));
}

/// All throttled time of deep queues counts as throttled time only.
#[test]
fn throttled_time_in_a_connection_is_counted() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 128);
    let now_ns = rig.core.now_ns();
    rig.core.clock.set_clock_ns(now_ns);
    rig.core.admit_all_by(&Budget::fixed(2000));
    // Two are writes with R2Ts: sent at once, and when there is room.
    for cid in 0..=40 {
        let opcode = if matches!(cid, 10 | 40) { 1 } else { 2 };
        host.say(&rw(opcode, cid, u64::from(cid), 1), &[]);
    }
    // Two more groups: those that stop the stream, and those behind them.
    for cid in 41..46 {
        host.say(&write_in_capsule(cid, u64::from(cid), 1), &[5; 4096]);
    }
    for cid in 46..60 {
        host.say(&Sqe::new(0, cid).with_nsid(1), &[]);
    }
    let mut ended = 0;
    for _ in crate::patience::patiently() {
        rig.turns(3);
        while let Some((pdu, _)) = host.hear() {
            match pdu {
                Pdu::R2t(r2t) => send_data(&host, &r2t),
                _ => ended += 1,
            }
        }
        if ended == 60 {
            break;
        }
        pass_window(&mut rig);
    }
    let lane = rig.core.lanes.of_export(ExportId(1)).unwrap();
    let record = rig.core.lane(lane).unwrap().record();
    let counted = |times: &Times| times.buckets.iter().map(|b| b.load(Relaxed)).sum::<u64>();
    let times = &record.throttled_times;
    // Two begin in each window.
    let expected = (2..60).map(|n| n / 2 * WINDOW_NS).sum::<u64>();
    assert_eq!((counted(times), times.sum_ns.load(Relaxed)), (58, expected));
    assert_eq!(record.throttled_ops.load(Relaxed), 58);
    // It counts in no other time but the total.
    let sum = |of: TimesOf| {
        let ops = record.ops.iter();
        ops.map(|ops| ops.times[of as usize].sum_ns.load(Relaxed))
            .sum::<u64>()
    };
    assert_eq!(sum(TimesOf::Total), expected);
    assert_eq!((sum(TimesOf::Waiting), sum(TimesOf::Device)), (0, 0));
    rig.core.set_admission(None);
    let tenant = &rig.core.region.tenants()[0];
    let (ops, ns) = (&tenant.throttled_ops, &tenant.throttled_ns);
    assert_eq!((ops.load(Relaxed), ns.load(Relaxed)), (58, expected));
}

/// No R2T for throttled commands while buffers are short.
#[test]
fn over_budget_data_is_asked_for_while_half_of_the_buffers_are_left() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    let now_ns = rig.core.now_ns();
    rig.core.clock.set_clock_ns(now_ns);
    rig.core.admit_all_by(&Budget::fixed(1000));
    let long = 512 << 10;
    let others: Vec<_> = (0..40).map(|_| rig.core.staging.allocate(long)).collect();
    let is_asked = |host: &mut Host| matches!(host.hear(), Some((Pdu::R2t(_), _)));
    let write = |cid| rw(1, cid, 0, 128);
    host.say(&write(1), &[]);
    rig.turns(2);
    assert!(is_asked(&mut host));
    for cid in [2, 3] {
        host.say(&rw(2, cid, 0, 1), &[]);
    }
    rig.turns(2);
    while host.hear().is_some() {}
    host.say(&write(4), &[]);
    rig.turns(3);
    assert!(!is_asked(&mut host));
    for buffer in others.into_iter().flatten() {
        rig.core.staging.release(buffer);
    }
    rig.turns(2);
    assert!(is_asked(&mut host));
}

/// A shutdown's flush belongs to no tenant.
#[test]
fn a_shutdown_waits_for_no_budget() {
    let mut rig = rig();
    rig.map_all();
    let (mut admin, _) = rig.admin();
    let (_other, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 128);
    let now_ns = rig.core.now_ns();
    rig.core.clock.set_clock_ns(now_ns);
    rig.core.admit_all_by(&Budget::fixed(1000));
    for cid in 0..60 {
        host.say(&rw(2, cid, u64::from(cid), 1), &[]);
    }
    assert_eq!(answers(&mut rig, &mut host).len(), 1);
    let shutdown = PropertyCommand::set(1, 0x14, false, 0x46_4001);
    admin.say(&shutdown.to_sqe(), &[]);
    rig.turns(5);
    rig.frontend.tick(&mut rig.core);
    rig.turns(5);
    assert_eq!(admin.response().map(|c| c.status()), Some(Status::SUCCESS));
    admin.say(&PropertyCommand::get(2, 0x1c, false).to_sqe(), &[]);
    rig.turns(2);
    assert_eq!(admin.response().unwrap().result() >> 2 & 3, 2);
}

fn rest(rig: &mut rig::Rig) {
    for _ in 0..3 {
        rig.core.begin_turn();
        rig.turns(1);
        while rig.core.upcalls.pop_front().is_some() {}
    }
    assert!(!rig.core.must_turn() && rig.frontend.is_idle());
}

/// Whether a socket would wake a reactor that goes to sleep.
fn is_awake(rig: &mut rig::Rig) -> bool {
    assert!(rig.frontend.arm(&mut rig.core));
    let mut events = Vec::with_capacity(8);
    let none = rustix::event::Timespec::default();
    let events_of = rustix::buffer::spare_capacity(&mut events);
    epoll::wait(&*rig.epoll, events_of, Some(&none)).unwrap();
    !events.is_empty()
}

/// Data that would not be taken wakes no reactor, and is not lost. A hang-up does wake it.
#[test]
fn socket_data_over_budget_wakes_no_reactor() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let now_ns = rig.core.now_ns();
    rig.core.clock.set_clock_ns(now_ns);
    rig.core.admit_all_by(&Budget::fixed(3000));
    let mut host = rig.io(cntlid, 1, 128);
    let say = |host: &mut Host, cids: std::ops::Range<u16>| {
        for cid in cids {
            match cid % 3 {
                0 => host.say(&write_in_capsule(cid, u64::from(cid), 1), &[5; 4096]),
                _ => host.say(&rw(2, cid, u64::from(cid), 1), &[]),
            }
        }
    };
    say(&mut host, 0..40);
    let mut ended = answers(&mut rig, &mut host);
    assert_eq!(ended.len(), 3);
    say(&mut host, 40..70);
    for _ in 0..3 {
        rest(&mut rig);
        assert!(!is_awake(&mut rig), "its window has not ended");
    }
    while ended.len() < 70 {
        pass_window(&mut rig);
        let more = answers(&mut rig, &mut host);
        assert!(!more.is_empty(), "{} in time", ended.len());
        ended.extend(more);
        if ended.len() < 50 {
            rest(&mut rig);
            assert!(!is_awake(&mut rig));
        }
    }
    assert!(ended.iter().all(|(_, status)| *status == Status::SUCCESS));
    assert!(ended.is_sorted_by_key(|(cid, _)| *cid));
    // It is read again: from the active list, and after it has left that.
    for turns in [1, QUIET_TURNS as usize + 2] {
        rig.turns(turns);
        assert!(!is_awake(&mut rig));
        say(&mut host, 0..1);
        assert!(is_awake(&mut rig));
        pass_window(&mut rig);
        assert_eq!(answers(&mut rig, &mut host).len(), 1);
    }
    say(&mut host, 0..70);
    answers(&mut rig, &mut host);
    rest(&mut rig);
    assert!(!is_awake(&mut rig));
    drop(host);
    assert!(is_awake(&mut rig));
    rest(&mut rig);
    assert!(!is_awake(&mut rig) && rig.frontend.count() == 1);
    assert_eq!((rig.core.slab.busy(), rig.held_bytes()), (0, 0));
}

/// Hosts that ask to write much, through many volumes and queues, and send nothing.
#[test]
fn a_tenant_that_sends_no_data_takes_nothing_from_others() {
    for (blocks, queues, others) in [(3, 3, 12), (128, 1, 16)] {
        let mut rig = rig();
        rig.map_all();
        let now_ns = rig.core.now_ns();
        rig.core.clock.set_clock_ns(now_ns);
        let mut asked = 0;
        let mut hosts = Vec::new();
        for export in 0..others {
            rig.serve(export, 0);
            let (admin, cntlid) = rig.admin();
            hosts.push(admin);
            for qid in 1..=queues {
                let mut host = rig.io(cntlid, qid, 128);
                for cid in 0..64 {
                    host.say(&rw(1, cid, 0, blocks), &[]);
                }
                rig.turns(3);
                asked += std::iter::from_fn(|| host.hear()).count();
                hosts.push(host);
            }
        }
        assert!(asked >= 32, "{asked}");
        rig.serve(others, 1);
        let (_admin, cntlid) = rig.admin();
        let mut quiet = rig.io(cntlid, 1, 32);
        for cid in 0..4 {
            quiet.say(&rw(1, cid, 0, blocks), &[]);
            quiet.say(&rw(2, 4 + cid, 0, blocks), &[]);
        }
        let mut heard = Vec::new();
        for _ in 0..100 {
            rig.turns(1);
            heard.extend(std::iter::from_fn(|| quiet.hear()).map(|pdu| pdu.0));
        }
        let asks = heard
            .iter()
            .filter(|pdu| matches!(pdu, Pdu::R2t(_)))
            .count();
        assert_eq!(
            (asks, heard.len()),
            (4, 8),
            "{blocks} blocks: {asked} before"
        );
    }
}

/// In-capsule data waits in its connection, too, however many exports are used.
#[test]
fn data_in_capsules_takes_no_more_buffers_than_are_left_to_others() {
    let mut rig = rig();
    rig.map_all();
    let scarce: Vec<_> = (0..1700)
        .map(|_| rig.core.staging.allocate(4096).unwrap())
        .collect();
    let out = |rig: &rig::Rig| rig.core.staging.out() - scarce.len();
    rig.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    let mut hosts = Vec::new();
    for export in 0..12 {
        rig.serve(export, 0);
        let (admin, cntlid) = rig.admin();
        let mut host = rig.io(cntlid, 1, 128);
        for cid in 0..30 {
            host.say(&write_in_capsule(cid, u64::from(cid), 1), &[5; 4096]);
        }
        rig.turns(10);
        hosts.push((host, admin));
    }
    // A tenant's minimum: 1 MiB.
    assert_eq!(out(&rig), 256);
    rig.serve(12, 1);
    let (_admin, cntlid) = rig.admin();
    let mut quiet = rig.io(cntlid, 1, 32);
    quiet.say(&write_in_capsule(0, 0, 1), &[5; 4096]);
    rig.turns(2);
    assert_eq!(out(&rig), 257);
    rig.gate.release();
    let mut ends = |host: &mut Host, wanted: usize| {
        let mut all = 0;
        for _ in crate::patience::patiently() {
            rig.turns(1);
            all += answers(&mut rig, host).len();
            if all >= wanted {
                break;
            }
        }
        assert_eq!(all, wanted);
    };
    ends(&mut quiet, 1);
    for (host, _) in &mut hosts {
        ends(host, 30);
    }
    assert_eq!((rig.held_bytes(), out(&rig)), (0, 0));
    for buffer in scarce {
        rig.core.staging.release(buffer);
    }
}
