//! Hosts that take several R2Ts per command (MAXR2T > 0): any order, wrong answers, and deaths.

use super::bad_input::Scene;
use super::rig::{Host, Rig, rig, rw};
use super::take_over::{World, run};
use super::*;
use forebay_nvme::tcp::{FatalStatus, H2cData, R2t};
use forebay_xlate::boundary::region::R2T_PART_BYTES as PART;

const BLOCK: u32 = 4096;

fn header(r2t: &R2t, offset_bytes: u32, length_bytes: u32) -> H2cData {
    H2cData {
        cid: r2t.cid,
        ttag: r2t.ttag,
        offset_bytes,
        length_bytes,
        last: offset_bytes + length_bytes == r2t.offset_bytes + r2t.length_bytes,
    }
}

/// Sends a data PDU while the engine reads; `byte` gives the content by offset.
fn say(rig: &mut Rig, host: &Host, data: &H2cData, byte: impl Fn(u32) -> u8) {
    let mut out = vec![0; tcp::MAX_HEADER_BYTES];
    let n = tcp::put_h2c_data(&mut out, &host.params, data);
    out.truncate(n);
    let from = data.offset_bytes;
    let bytes: Vec<u8> = (from..from + data.length_bytes).map(byte).collect();
    out.extend_from_slice(&bytes);
    if host.params.data_digest {
        out.extend_from_slice(&tcp::crc32c(&bytes).to_le_bytes());
    }
    for part in out.chunks(32 << 10) {
        let sent = rustix::net::send(&host.fd, part, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, part.len());
        rig.turns(1);
    }
}

fn r2ts(host: &mut Host) -> Vec<R2t> {
    let mut r2ts = Vec::new();
    while let Some((pdu, _)) = host.hear() {
        match pdu {
            Pdu::R2t(r2t) => r2ts.push(r2t),
            other => panic!("{other:?}"),
        }
    }
    r2ts
}

fn content(cid: u16, offset: u32) -> u8 {
    (offset / 251) as u8 ^ offset as u8 ^ cid as u8
}

#[test]
fn several_r2ts_are_open_at_once_and_answered_in_any_order() {
    for digests in [false, true] {
        for (max_r2t, at_once) in [(0, 1), (1, 2), (2, 3), (3, 4), (u32::MAX, 4)] {
            let mut rig = rig();
            rig.map_all();
            let (_admin, cntlid) = rig.admin();
            (rig.max_r2t, rig.digests) = (max_r2t, (digests, digests));
            let mut host = rig.io(cntlid, 1, 8);
            // Four parts, the last whole or one block; then one part: one R2T.
            for (cid, blocks) in [(1, 128), (2, 97), (3, 32)] {
                let len = blocks * BLOCK;
                host.say(&rw(1, cid, 7, blocks), &[]);
                rig.turns(1);
                let mut open = r2ts(&mut host);
                let parts = if blocks == 32 { 1 } else { at_once };
                assert_eq!(open.len(), parts, "MAXR2T {max_r2t}");
                let mut asked = open.clone();
                let mut at: Vec<u32> = open.iter().map(|r2t| r2t.offset_bytes).collect();
                let mut turn = 0;
                while !open.is_empty() {
                    // Round robin, the last first, in unaligned pieces.
                    turn += 1;
                    let which = open.len() - 1 - turn % open.len();
                    let r2t = open[which];
                    let left = r2t.offset_bytes + r2t.length_bytes - at[which];
                    let data = header(&r2t, at[which], left.min(50_004));
                    say(&mut rig, &host, &data, |at| content(cid, at));
                    at[which] += data.length_bytes;
                    if data.last {
                        open.swap_remove(which);
                        at.swap_remove(which);
                    }
                    if asked.iter().map(|r2t| r2t.length_bytes).sum::<u32>() < len {
                        for next in r2ts(&mut host) {
                            assert!(data.last, "only when there is one less");
                            asked.push(next);
                            open.push(next);
                            at.push(next.offset_bytes);
                        }
                        assert_eq!(open.len(), at_once);
                    }
                }
                rig.turns(3);
                assert!(host.response().unwrap().status().is_success());
                let mut end = 0;
                for r2t in &asked {
                    assert_eq!((r2t.cid, r2t.offset_bytes), (cid, end));
                    let same = asked.iter().filter(|other| other.ttag == r2t.ttag);
                    assert_eq!(same.count(), 1);
                    assert!(parts == 1 || r2t.length_bytes <= PART);
                    end += r2t.length_bytes;
                }
                assert_eq!(end, len);
                host.say(&rw(2, 4, 7, blocks), &[]);
                rig.turns(3);
                let mut read = Vec::new();
                for _ in 0..100 {
                    rig.turns(1);
                    while let Some((pdu, data)) = host.hear() {
                        if let Pdu::C2hData(_) = pdu {
                            read.extend_from_slice(&data[..len as usize]);
                        }
                    }
                }
                let want: Vec<u8> = (0..len).map(|at| content(cid, at)).collect();
                assert!(read == want, "{blocks} blocks, MAXR2T {max_r2t}");
            }
        }
    }
}

#[test]
fn a_wrong_digest_of_one_part_ends_the_command_when_all_have_come() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    (rig.max_r2t, rig.digests) = (3, (false, true));
    let mut host = rig.io(cntlid, 1, 8);
    host.say(&rw(1, 5, 7, 64), &[]);
    rig.turns(1);
    let asked = r2ts(&mut host);
    let mut out = vec![0; tcp::MAX_HEADER_BYTES];
    let data = header(&asked[1], PART, 4096);
    let n = tcp::put_h2c_data(&mut out, &host.params, &data);
    out.truncate(n);
    out.resize(n + 4096 + 4, 0xaa);
    rustix::net::send(&host.fd, &out, SendFlags::NOSIGNAL).unwrap();
    let rest = header(&asked[1], PART + 4096, PART - 4096);
    say(&mut rig, &host, &rest, |_| 1);
    rig.turns(2);
    assert!(host.hear().is_none(), "the other part is yet to come");
    say(&mut rig, &host, &header(&asked[0], 0, PART), |_| 1);
    rig.turns(2);
    let cqe = host.response().unwrap();
    assert_eq!(cqe.status(), Status::TRANSIENT_TRANSPORT_ERROR);
}

#[test]
fn a_host_that_answers_some_of_its_r2ts_is_given_up() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    rig.max_r2t = 1;
    let mut host = rig.io(cntlid, 1, 8);
    host.say(&rw(1, 5, 7, 128), &[]);
    rig.turns(1);
    let asked = r2ts(&mut host);
    say(&mut rig, &host, &header(&asked[1], PART, PART), |_| 1);
    assert_eq!(r2ts(&mut host).len(), 1);
    rig.pass(DATA_LIMIT_NS - SECOND_NS);
    rig.turns(2);
    assert!(!host.ended());
    rig.pass(2 * SECOND_NS);
    rig.turns(4);
    assert!(host.ended());
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
    assert_eq!(rig.frontend.shared.r2ts.get(), 0);
}

/// Wrong answers while command 5 has two of three R2Ts open, and command 6 has one.
pub(super) fn abuse(scene: &mut Scene) {
    scene.rig.max_r2t = 1;
    let field = |n| (FatalStatus::InvalidHeaderField, n);
    let range = (FatalStatus::DataOutOfRange, 0);
    const CID: u32 = 8;
    const TTAG: u32 = 10;
    const DATAL: u32 = 16;
    const FLAGS: u32 = 1;
    // R2T, offset, length: only the last is wrong.
    type Case = (
        &'static str,
        Vec<(usize, u32, u32)>,
        fn(&mut H2cData),
        (FatalStatus, u32),
    );
    let cases: [Case; 12] = [
        (
            "a part that nobody asked for",
            vec![(1, PART, PART)],
            |d| d.ttag += 0x100,
            field(TTAG),
        ),
        (
            "an old tag",
            vec![(0, 0, PART)],
            |d| d.ttag ^= 0x400,
            field(TTAG),
        ),
        (
            "another slot's tag",
            vec![(0, 0, PART)],
            |d| d.ttag ^= 1,
            field(TTAG),
        ),
        (
            "another command",
            vec![(0, 0, PART)],
            |d| d.cid = 6,
            field(CID),
        ),
        (
            "an answered R2T",
            vec![(0, 0, PART), (0, 0, PART)],
            |_| {},
            field(TTAG),
        ),
        (
            "another R2T's place",
            vec![(0, PART, PART)],
            |d| d.last = true,
            range,
        ),
        (
            "over its end",
            vec![(0, 0, 65536), (0, 65536, 65540)],
            |d| d.last = true,
            range,
        ),
        (
            "a gap",
            vec![(1, PART, 4096), (1, PART + 8192, 4096)],
            |_| {},
            range,
        ),
        (
            "overlapping",
            vec![(1, PART, 8192), (0, 0, 4096), (1, PART + 4096, 8192)],
            |_| {},
            range,
        ),
        (
            "last too early",
            vec![(0, 0, 65536), (1, PART, 4096)],
            |d| d.last = true,
            field(FLAGS),
        ),
        (
            "never last",
            vec![(1, PART, PART)],
            |d| d.last = false,
            field(FLAGS),
        ),
        ("an odd length", vec![(0, 0, 4097)], |_| {}, field(DATAL)),
    ];
    for (name, answers, change, wanted) in cases {
        let mut host = scene.host();
        host.say(&rw(1, 5, 9, 96), &[]);
        host.say(&rw(1, 6, 110, 1), &[]);
        scene.rig.turns(2);
        let asked = r2ts(&mut host);
        assert_eq!(asked.iter().filter(|r2t| r2t.cid == 5).count(), 2);
        let last = answers.len() - 1;
        for (i, (which, offset, length)) in answers.into_iter().enumerate() {
            let mut data = header(&asked[which], offset, length);
            if i == last {
                change(&mut data);
            }
            r2ts(&mut host);
            say(&mut scene.rig, &host, &data, |_| 1);
        }
        let term = scene.end(host).expect(name);
        assert_eq!((term.status, term.info), wanted, "{name}");
    }
    scene.rig.max_r2t = 0;
}

/// Kill points of a command with several R2Ts.
const POINTS: &[&str] = &[
    "r2t.recorded",
    "r2t.published",
    "r2t.recorded",
    "data.header",
    "data.placed",
    "data.state",
    "r2t.recorded",
    "rx.intent",
    "rx.received",
    "rx.kept",
    "tx.item",
    "tx.published",
    "tx.sent",
];

#[test]
fn hosts_with_several_r2ts_do_not_notice_deaths() {
    let mut several = false;
    for max_r2t in 1..=3 {
        let mut world = World::new(10 + u64::from(max_r2t));
        world.max_r2t = max_r2t;
        let (_, queues) = run(world, 3 * POINTS.len() as u32, |n| {
            Some(POINTS[n as usize % POINTS.len()])
        });
        let most = queues.iter().map(|q| q.most_open).max().unwrap_or(0);
        // At most the host's limit; how many are open at a death depends on timing.
        assert!(most <= max_r2t as usize + 1, "{most} of {max_r2t}");
        several |= most > 1;
    }
    assert!(several, "no host ever had two");
}

/// Successive deaths may lose the R2Ts that would follow the last answered ones.
#[test]
fn hosts_do_not_notice_that_r2ts_are_lost() {
    let mut world = World::new(20);
    world.max_r2t = 1;
    run(world, 60, |_| Some("r2t.recorded"));
}
