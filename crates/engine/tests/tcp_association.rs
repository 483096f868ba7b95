//! Associations of a raw host with a whole engine: Connect and its refusals, queues, properties,
//! keep alive, events, discovery, and their ends.
#![allow(missing_docs)]

mod common;

use common::host::{Ask, FLUSH, PLAIN, RawHost, WRITE, admin, attach, connect_data, io_queue, rw};
use common::{HANG, HOST, TestEngine};
use forebay_nvme::fabrics::{ConnectCommand, ConnectData};
use forebay_nvme::tcp::Pdu;
use forebay_nvme::{SglDescriptor, Sqe, Status};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
const STRANGER: &str = "nqn.2014-08.org.example:stranger";

fn engine() -> (TestEngine, String) {
    let mut engine = TestEngine::start("ram", 64 * MIB, 2);
    engine.volume(1, 16 * MIB, 4096);
    let nqn = engine.export(1, &[HOST]);
    (engine, nqn)
}

#[test]
fn refusals_of_connect() {
    let (engine, nqn) = engine();
    let (_admin, cntlid) = admin(engine.address, &nqn, PLAIN);
    let invalid = Status::CONNECT_INVALID_PARAMETERS.with_dnr();
    let in_data = |offset: u64| (invalid, 1 << 16 | offset);
    let in_command = |offset: u64| (invalid, offset);
    let admin_connect = ConnectCommand::new(1, 0, 32, 0);
    let queue = |qid, entries| ConnectCommand::new(1, qid, entries, 0);
    let data = |cntlid| connect_data(cntlid, &nqn, HOST);
    let names = |subsystem: &str, host: &str| connect_data(0xffff, subsystem, host);
    let broken = ConnectData {
        hostnqn: [b'x'; 256],
        ..data(0xffff)
    };
    let odd_format = ConnectCommand {
        recfmt: 1.into(),
        ..admin_connect
    };
    let cases: Vec<(&str, ConnectCommand, ConnectData, (Status, u64))> = vec![
        (
            "unknown subsystem",
            admin_connect,
            names("nqn.2026-01.io.forebay:no.one", HOST),
            in_data(256),
        ),
        (
            "host not on the list",
            admin_connect,
            names(&nqn, STRANGER),
            (Status::CONNECT_INVALID_HOST.with_dnr(), 0),
        ),
        ("host is no name", admin_connect, broken, in_data(512)),
        (
            "controller chosen by the host",
            admin_connect,
            data(3),
            in_data(16),
        ),
        (
            "queue of one entry",
            queue(0, 1),
            data(0xffff),
            in_command(44),
        ),
        (
            "admin queue too large",
            queue(0, 129),
            data(0xffff),
            in_command(44),
        ),
        (
            "record format",
            odd_format,
            data(0xffff),
            (Status::CONNECT_INCOMPATIBLE_FORMAT, 0),
        ),
        (
            "controller that is not there",
            queue(1, 32),
            data(cntlid + 1),
            in_data(16),
        ),
        (
            "another host's controller",
            queue(1, 32),
            connect_data(cntlid, &nqn, STRANGER),
            (Status::CONNECT_INVALID_HOST.with_dnr(), 0),
        ),
        (
            "another host id",
            queue(1, 32),
            ConnectData {
                hostid: [1; 16],
                ..data(cntlid)
            },
            in_data(16),
        ),
        (
            "queue id beyond what was granted",
            queue(9, 32),
            data(cntlid),
            in_command(42),
        ),
        (
            "queue too large",
            queue(1, 257),
            data(cntlid),
            in_command(44),
        ),
        (
            "I/O queue of discovery",
            queue(1, 32),
            connect_data(cntlid, DISCOVERY, HOST),
            in_command(42),
        ),
    ];
    for (what, command, data, (status, result)) in cases {
        let mut host = RawHost::open(engine.address, PLAIN);
        let cqe = host.connect(command, &data);
        assert_eq!(
            (cqe.cid(), cqe.status().code(), cqe.result()),
            (1, status.code(), result),
            "{what}"
        );
        assert!(host.end().is_none(), "{what}");
    }
    // A Connect that is cut short, and one whose data is elsewhere.
    for (sgl, bytes, status) in [
        (
            SglDescriptor::in_capsule(0, 1024),
            1000,
            Status::DATA_SGL_LENGTH_INVALID,
        ),
        (
            SglDescriptor::in_capsule(0, 512),
            1024,
            Status::DATA_SGL_LENGTH_INVALID,
        ),
        (
            SglDescriptor::transport(1024),
            0,
            Status::SGL_DESCRIPTOR_TYPE_INVALID,
        ),
    ] {
        let mut host = RawHost::open(engine.address, PLAIN);
        host.capsule(&admin_connect.to_sqe().with_sgl(sgl), &vec![0; bytes]);
        assert_eq!(host.response().status().code(), status);
    }
    let mut host = RawHost::open(
        engine.address,
        Ask {
            data_digest: true,
            ..PLAIN
        },
    );
    let sqe = admin_connect
        .to_sqe()
        .with_sgl(SglDescriptor::in_capsule(0, 1024));
    let mut bytes = host.capsule_bytes(&sqe, zerocopy::IntoBytes::as_bytes(&data(0xffff)));
    *bytes.last_mut().unwrap() ^= 1;
    host.say(&bytes);
    assert_eq!(host.response().status(), Status::TRANSIENT_TRANSPORT_ERROR);
    // The refused queue id is still free.
    let mut io = io_queue(engine.address, &nqn, cntlid, 1, 256, PLAIN, true);
    assert_eq!(
        io.command(Sqe::new(FLUSH, 0).with_nsid(1)).status(),
        Status::SUCCESS
    );
    // It can be used only once.
    let mut twice = RawHost::open(engine.address, PLAIN);
    let cqe = twice.connect(queue(1, 32), &data(cntlid));
    assert_eq!(cqe.status().code(), Status::COMMAND_SEQUENCE_ERROR);
}

#[test]
fn queues_come_after_enable() {
    let (engine, nqn) = engine();
    let mut host = RawHost::open(engine.address, PLAIN);
    let cqe = host.connect(
        ConnectCommand::new(0, 0, 32, 0),
        &connect_data(0xffff, &nqn, HOST),
    );
    let cntlid = cqe.result() as u16;
    assert_eq!((cqe.status(), cqe.sqhd()), (Status::SUCCESS, 1));
    assert_eq!(host.property_get(0, true) & 0xffff, 255, "CAP.MQES");
    assert_eq!(host.property_get(CSTS, false), 0);
    let mut early = RawHost::open(engine.address, PLAIN);
    let cqe = early.connect(
        ConnectCommand::new(0, 1, 32, 0),
        &connect_data(cntlid, &nqn, HOST),
    );
    assert_eq!(cqe.status().code(), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(
        host.command(Sqe::new(0x18, 0)).status().code(),
        Status::COMMAND_SEQUENCE_ERROR
    );
    host.enable();
    let mut io = io_queue(engine.address, &nqn, cntlid, 1, 32, PLAIN, false);
    assert_eq!(
        io.command(Sqe::new(FLUSH, 0).with_nsid(1)).status(),
        Status::SUCCESS
    );
    let (identity, cqe) = host.fetch(Sqe::new(6, 0).with_cdw(10, 1), 4096);
    assert_eq!(
        (identity.len(), cqe.unwrap().status()),
        (4096, Status::SUCCESS)
    );
    assert_eq!(
        u32::from_le_bytes(identity[1792..1796].try_into().unwrap()),
        (64 + 8192) / 16,
        "IOCCSZ"
    );
    assert_eq!(identity[77], 7, "MDTS: 512 KiB");
    // An SGL that is too short.
    let (data, cqe) = host.fetch(Sqe::new(6, 0).with_cdw(10, 1), 512);
    assert_eq!(
        (data.len(), cqe.unwrap().status().code()),
        (0, Status::DATA_SGL_LENGTH_INVALID)
    );
    // A second Connect on a queue.
    let sqe = ConnectCommand::new(40, 0, 32, 0)
        .to_sqe()
        .with_sgl(SglDescriptor::in_capsule(0, 1024));
    host.capsule(&sqe, &[0; 1024]);
    assert_eq!(
        host.response().status().code(),
        Status::COMMAND_SEQUENCE_ERROR
    );
}

#[test]
fn set_features_with_data_both_ways() {
    let (engine, nqn) = engine();
    let ask = Ask {
        header_digest: true,
        data_digest: true,
        hpda: 0,
    };
    let (mut host, _) = admin(engine.address, &nqn, ask);
    // Host Behavior Support, 512 bytes: in the capsule, and by R2T.
    for (value, by_r2t) in [(1u8, false), (0, true)] {
        let mut data = vec![0; 512];
        data[0] = value;
        let cid = host.next_cid();
        let sqe = Sqe::new(9, cid).with_cdw(10, 0x16);
        if by_r2t {
            host.capsule(&sqe.with_sgl(SglDescriptor::transport(512)), &[]);
            let r2t = host.r2t();
            host.answer_r2t(&r2t, &data, 128);
        } else {
            host.capsule(&sqe.with_sgl(SglDescriptor::in_capsule(0, 512)), &data);
        }
        assert_eq!(host.response().status(), Status::SUCCESS);
        let (got, _) = host.fetch(Sqe::new(0x0a, 0).with_cdw(10, 0x16), 512);
        assert_eq!(got[0], value);
    }
}

#[test]
fn the_end_of_the_admin_queue_is_the_end_of_all() {
    let (engine, nqn) = engine();
    let (admin_queue, cntlid) = admin(engine.address, &nqn, PLAIN);
    let first = io_queue(engine.address, &nqn, cntlid, 1, 32, PLAIN, true);
    let second = io_queue(engine.address, &nqn, cntlid, 2, 32, PLAIN, true);
    drop(admin_queue);
    assert!(first.end().is_none() && second.end().is_none());
    let mut late = RawHost::open(engine.address, PLAIN);
    let cqe = late.connect(
        ConnectCommand::new(0, 3, 32, 0),
        &connect_data(cntlid, &nqn, HOST),
    );
    assert_eq!(cqe.status().code(), Status::CONNECT_INVALID_PARAMETERS);
}

#[test]
fn commands_not_at_a_device_end_with_their_association() {
    let (engine, nqn) = engine();
    let (old_admin, mut old) = attach(engine.address, &nqn, PLAIN, true);
    // A parked write: the owner does not answer its fault.
    engine.deaf.store(true, Ordering::SeqCst);
    old.capsule(
        &rw(WRITE, 1, 0, 1).with_sgl(SglDescriptor::in_capsule(0, 4096)),
        &[0xaa; 4096],
    );
    std::thread::sleep(Duration::from_millis(200));
    drop((old_admin, old));
    // The host comes back, and is not delayed.
    let (_admin, mut back) = attach(engine.address, &nqn, PLAIN, true);
    engine.deaf.store(false, Ordering::SeqCst);
    assert_eq!(back.write(1, &[0xbb; 4096], 4096).status(), Status::SUCCESS);
    let mut now = [0xbb; 8192];
    now[..4096].fill(0);
    assert_eq!(back.read(0, 2, 4096), now, "the old write came to nothing");
}

#[test]
fn reset_closes_the_queues_and_shutdown_flushes() {
    let (engine, nqn) = engine();
    let (mut host, cntlid) = admin(engine.address, &nqn, PLAIN);
    let mut io = io_queue(engine.address, &nqn, cntlid, 1, 32, PLAIN, true);
    assert_eq!(io.write(0, &[7; 4096], 4096).status(), Status::SUCCESS);
    // An outstanding event request ends without an answer.
    let cid = host.next_cid();
    host.capsule(&Sqe::new(0x0c, cid), &[]);
    assert_eq!(host.property_set(CC, 0x0046_0000).status(), Status::SUCCESS);
    assert!(io.end().is_none());
    let wait = |host: &mut RawHost, mask: u64, value: u64| {
        let limit = Instant::now() + HANG;
        while host.property_get(CSTS, false) & mask != value {
            assert!(Instant::now() < limit, "CSTS does not become {value:#x}");
        }
    };
    wait(&mut host, 1, 0);
    host.enable();
    let mut io = io_queue(engine.address, &nqn, cntlid, 1, 32, PLAIN, true);
    assert_eq!(io.write(1, &[8; 4096], 4096).status(), Status::SUCCESS);
    let commits = engine.log.lock().unwrap().commits;
    assert_eq!(host.property_set(CC, 0x0046_4001).status(), Status::SUCCESS);
    assert!(io.end().is_none());
    wait(&mut host, 0xc, 0x8);
    assert!(
        engine.log.lock().unwrap().commits > commits,
        "a shutdown flushes"
    );
}

#[test]
fn keep_alive_that_stops_ends_the_association() {
    let (engine, nqn) = engine();
    let limit = Instant::now() + HANG;
    while !keeps_alive(&engine, &nqn) {
        assert!(Instant::now() < limit, "the machine never has the time");
    }
}

/// False if the machine was too slow for the host's keep-alive.
fn keeps_alive(engine: &TestEngine, nqn: &str) -> bool {
    const KEPT: Duration = Duration::from_secs(1);
    let mut said = Instant::now();
    let address = engine.address;
    let begun = std::panic::catch_unwind(|| {
        let mut host = RawHost::open(address, PLAIN);
        let command = ConnectCommand::new(0, 0, 32, KEPT.as_millis() as u32);
        let cntlid = host
            .connect(command, &connect_data(0xffff, nqn, HOST))
            .result() as u16;
        host.enable();
        let io = io_queue(address, nqn, cntlid, 1, 32, PLAIN, true);
        (host, io)
    });
    let (mut host, io) = match begun {
        Ok(both) => both,
        Err(_) if said.elapsed() >= KEPT => return false,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    for _ in 0..4 {
        std::thread::sleep(KEPT / 2);
        let before = std::mem::replace(&mut said, Instant::now());
        let cid = host.next_cid();
        let capsule = host.capsule_bytes(&Sqe::new(0x18, cid), &[]);
        let _ = std::io::Write::write_all(&mut host.socket, &capsule);
        match host.try_hear() {
            Some((Pdu::CapsuleResp(cqe), _)) => assert_eq!(cqe.status(), Status::SUCCESS),
            None if before.elapsed() >= KEPT => return false,
            other => panic!("it is not kept alive: {other:?}"),
        }
    }
    assert!(io.end().is_none());
    assert!(host.end().is_none());
    true
}

#[test]
fn growth_is_reported_at_once() {
    let (mut engine, nqn) = engine();
    let (mut host, mut io) = attach(engine.address, &nqn, PLAIN, true);
    let cid = host.next_cid();
    // Asynchronous Event Configuration: Namespace Attribute Notices.
    assert_eq!(
        host.command(Sqe::new(9, 0).with_cdw(10, 0xb).with_cdw(11, 1 << 8))
            .status(),
        Status::SUCCESS
    );
    host.capsule(&Sqe::new(0x0c, cid + 1000), &[]);
    let (_, past) = io.fetch(rw(2, 0, 4096, 1), 4096);
    assert_eq!(past.unwrap().status().code(), Status::LBA_OUT_OF_RANGE);
    engine.volume(1, 32 * MIB, 4096);
    let event = host.response();
    // Type Notice, Namespace Attribute Changed, log page Changed Namespace List.
    assert_eq!((event.cid(), event.result()), (cid + 1000, 0x0004_0002));
    let (list, _) = host.fetch(Sqe::new(2, 0).with_cdw(10, 1023 << 16 | 4), 4096);
    assert_eq!(list[..4], [1, 0, 0, 0]);
    let (identity, _) = host.fetch(Sqe::new(6, 0).with_nsid(1), 4096);
    assert_eq!(u64::from_le_bytes(identity[..8].try_into().unwrap()), 8192);
    assert_eq!(io.read(8191, 1, 4096), [0; 4096]);
}

#[test]
fn hosts_that_may_no_longer_are_disconnected() {
    let (mut engine, nqn) = engine();
    let (host, io) = attach(engine.address, &nqn, PLAIN, true);
    engine.export(1, &[STRANGER]);
    assert!(io.end().is_none() && host.end().is_none());
    engine.export(1, &[HOST]);
    let (host, io) = attach(engine.address, &nqn, PLAIN, true);
    engine.unexport(1);
    assert!(io.end().is_none() && host.end().is_none());
    let mut host = RawHost::open(engine.address, PLAIN);
    let cqe = host.connect(
        ConnectCommand::new(0, 0, 32, 0),
        &connect_data(0xffff, &nqn, HOST),
    );
    assert_eq!(cqe.status().code(), Status::CONNECT_INVALID_PARAMETERS);
}

#[test]
fn discovery_shows_what_a_host_may_use() {
    let (mut engine, nqn) = engine();
    engine.volume(2, MIB, 512);
    engine.export(2, &[STRANGER]);
    engine.volume(3, MIB, 512);
    let open = engine.export(3, &[]);
    let (mut host, _) = admin(engine.address, DISCOVERY, PLAIN);
    let log = |host: &mut RawHost, bytes: u32| {
        let dwords = bytes / 4 - 1;
        host.fetch(Sqe::new(2, 0).with_cdw(10, dwords << 16 | 0x70), bytes)
            .0
    };
    let page = log(&mut host, 4096);
    let count = u64::from_le_bytes(page[8..16].try_into().unwrap());
    assert_eq!(count, 3);
    let names: Vec<String> = (0..3)
        .map(|i| {
            let name = &page[1024 * (i + 1) + 256..][..256];
            let end = name.iter().position(|b| *b == 0).unwrap();
            String::from_utf8(name[..end].to_vec()).unwrap()
        })
        .collect();
    assert_eq!(names, [nqn.as_str(), open.as_str(), DISCOVERY]);
    let port = String::from_utf8_lossy(&page[1024 + 32..1024 + 64])
        .trim()
        .to_string();
    assert_eq!(port, engine.address.port().to_string());
    assert_eq!(log(&mut host, 65_536).len(), 65_536);
}

#[test]
fn sixteen_queues_and_many_hosts() {
    let (mut engine, _) = engine();
    let nqn = engine.export(1, &[]);
    let mut all = Vec::new();
    for _ in 0..20 {
        let (mut host, cntlid) = admin(engine.address, &nqn, PLAIN);
        host.number_of_queues(16);
        let queues: Vec<RawHost> = (1..=4)
            .map(|qid| io_queue(engine.address, &nqn, cntlid, qid, 64, PLAIN, true))
            .collect();
        all.push((host, queues));
    }
    for (i, (_, queues)) in all.iter_mut().enumerate() {
        for (j, io) in queues.iter_mut().enumerate() {
            let data = vec![(i * 4 + j) as u8; 4096];
            assert_eq!(
                io.write((i * 4 + j) as u64, &data, 4096).status(),
                Status::SUCCESS
            );
            assert_eq!(io.read((i * 4 + j) as u64, 1, 4096), data);
        }
    }
}
