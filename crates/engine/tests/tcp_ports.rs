//! Ports and their states, discovery, and access lists, with raw hosts and a whole engine.
#![allow(missing_docs)]

mod common;

use common::host::{PLAIN, READ, RawHost, admin, attach, connect_data, rw};
use common::{HOST, TestEngine};
use forebay_nvme::fabrics::ConnectCommand;
use forebay_nvme::tcp::Pdu;
use forebay_nvme::{SglDescriptor, Sqe, Status};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{ExportConfig, ExportId, PathState, PortConfig, ToEngine};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
const STRANGER: &str = "nqn.2014-08.org.example:stranger";

fn engine() -> TestEngine {
    let mut engine = TestEngine::start("ram", 64 * MIB, 2);
    engine.volume(1, 16 * MIB, 4096);
    engine.volume(2, 16 * MIB, 4096);
    engine
}

fn set_port(engine: &mut TestEngine, port_id: u16, ana: PathState, changes: u64) {
    let address = engine.address.to_string();
    engine.order(|request| ToEngine::SetPort {
        request,
        port: PortConfig {
            address,
            port_id,
            ana,
            changes,
        },
    });
}

fn log(host: &mut RawHost, page: u32, bytes: u32) -> Vec<u8> {
    let dwords = bytes / 4 - 1;
    let (data, cqe) = host.fetch(Sqe::new(2, 0).with_cdw(10, dwords << 16 | page), bytes);
    assert!(cqe.is_none_or(|cqe| cqe.status().is_success()));
    data
}

/// Enables events, and leaves a request for one.
fn listen(host: &mut RawHost, events: u32) {
    let enable = Sqe::new(9, 0).with_cdw(10, 0x0b).with_cdw(11, events);
    assert_eq!(host.command(enable).status(), Status::SUCCESS);
    host.capsule(&Sqe::new(0x0c, 9000), &[]);
}

/// Nothing unrequested came: the next PDU answers the next command.
fn is_quiet(host: &mut RawHost) -> bool {
    let cid = host.next_cid();
    host.capsule(&Sqe::new(0x18, cid), &[]);
    host.response().cid() == cid
}

fn soon<T>(what: &str, find: impl Fn() -> Option<T>) -> T {
    let limit = Instant::now() + Duration::from_secs(60);
    while Instant::now() < limit {
        if let Some(found) = find() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{what}: not seen");
}

#[test]
fn a_ports_state_reaches_its_hosts_under_load() {
    let mut engine = engine();
    let nqn = engine.export(1, &[]);
    set_port(&mut engine, 7, PathState::Optimized, 0);
    let (mut host, mut io) = attach(engine.address, &nqn, PLAIN, false);
    listen(&mut host, 1 << 11);
    let address = engine.address;
    // Commands done, and refused.
    let counts = Arc::new([const { AtomicU64::new(0) }; 2]);
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, counted) = (stop.clone(), counts.clone());
    let load = std::thread::spawn(move || {
        while !stopped.load(Relaxed) {
            for cid in 0..16 {
                let sqe = rw(READ, cid, u64::from(cid), 1);
                io.capsule(&sqe.with_sgl(SglDescriptor::transport(4096)), &[]);
            }
            for _ in 0..16 {
                match io.hear() {
                    (Pdu::C2hData(_), _) => {
                        assert_eq!(io.response().status(), Status::SUCCESS);
                        counted[0].fetch_add(1, Relaxed);
                    }
                    (Pdu::CapsuleResp(cqe), _) => {
                        assert_eq!(cqe.status(), Status::ASYMMETRIC_ACCESS_INACCESSIBLE);
                        counted[1].fetch_add(1, Relaxed);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    });
    for round in 0..20u64 {
        let (state, number) = match round % 2 {
            0 => (PathState::Inaccessible, 3),
            _ => (PathState::NonOptimized, 2),
        };
        set_port(&mut engine, 7, state, round + 1);
        let reported = host.response();
        assert_eq!(
            (reported.cid(), reported.result()),
            (9000, 0x0C_0302),
            "round {round}"
        );
        let page = log(&mut host, 0x0c, 48);
        assert_eq!(page[..8], (round + 1).to_le_bytes());
        assert_eq!((page[16], page[32]), (1, number));
        // The load has seen the state.
        let of = &counts[usize::from(number == 3)];
        let before = of.load(Relaxed);
        soon("a command in this state", || {
            (of.load(Relaxed) > before).then_some(())
        });
        host.capsule(&Sqe::new(0x0c, 9000), &[]);
    }
    // A repetition is no change.
    set_port(&mut engine, 7, PathState::NonOptimized, 20);
    assert!(is_quiet(&mut host));
    stop.store(true, Relaxed);
    load.join().unwrap();
    // A host can ask for the state of a port in any state.
    set_port(&mut engine, 7, PathState::Inaccessible, 21);
    let (mut late, mut late_io) = attach(address, &nqn, PLAIN, true);
    assert_eq!(log(&mut late, 0x0c, 48)[32], 3);
    let (_, cqe) = late_io.fetch(rw(READ, 0, 0, 1), 4096);
    let gone = Status::ASYMMETRIC_ACCESS_INACCESSIBLE;
    assert_eq!(cqe.unwrap().status(), gone);
}

fn entries(page: &[u8]) -> Vec<(String, u16)> {
    let count = u64::from_le_bytes(page[8..16].try_into().unwrap()) as usize;
    let entry = |i: usize| {
        let entry = &page[1024 * (i + 1)..][..1024];
        let name = String::from_utf8_lossy(&entry[256..512]);
        let port = u16::from_le_bytes([entry[4], entry[5]]);
        (name.trim_end_matches('\0').to_string(), port)
    };
    let mut entries: Vec<_> = (0..count).map(entry).collect();
    // The last is the service itself, at the only port.
    let (name, port) = entries.pop().unwrap();
    assert_eq!((name.as_str(), port), (DISCOVERY, 7));
    let last = &page[1024 * count..];
    assert_eq!((last[2], last[10]), (3, 3), "SUBTYPE and EFLAGS");
    entries
}

#[test]
fn discovery_tells_each_host_of_its_own_alone() {
    let mut engine = engine();
    let ours = engine.export(1, &[HOST]);
    set_port(&mut engine, 7, PathState::Inaccessible, 1);
    let (mut host, _) = admin(engine.address, DISCOVERY, PLAIN);
    listen(&mut host, 1 << 31);
    let page = log(&mut host, 0x70, 8192);
    // The port is listed in any state.
    assert_eq!(entries(&page), [(ours.clone(), 7)]);
    let generation = page[..8].to_vec();
    // Another host's export does not concern it.
    engine.export(2, &[STRANGER]);
    set_port(&mut engine, 7, PathState::Optimized, 2);
    assert!(is_quiet(&mut host));
    assert_eq!(log(&mut host, 0x70, 1024)[..8], generation);
    let both = engine.export(2, &[STRANGER, HOST]);
    let reported = host.response();
    assert_eq!((reported.cid(), reported.result()), (9000, 0x70_F002));
    let page = log(&mut host, 0x70, 8192);
    assert_ne!(page[..8], generation);
    assert_eq!(entries(&page), [(ours.clone(), 7), (both, 7)]);
    host.capsule(&Sqe::new(0x0c, 9000), &[]);
    engine.unexport(2);
    assert_eq!(host.response().result(), 0x70_F002);
    let page = log(&mut host, 0x70, 8192);
    assert_eq!(page[..8], generation, "the list is what it was");
    assert_eq!(entries(&page), [(ours, 7)]);
}

/// Waits for an entry of the engine's log.
fn logged<T>(engine: &TestEngine, find: impl Fn(&common::Log) -> Option<T>) -> T {
    soon("the engine says it", || find(&engine.log.lock().unwrap()))
}

#[test]
fn hosts_off_the_list_are_out_once_the_change_settles() {
    let mut engine = engine();
    let nqn = engine.export(1, &[HOST]);
    let (host, mut io) = attach(engine.address, &nqn, PLAIN, true);
    assert_eq!(io.write(3, &[1; 4096], 4096).status(), Status::SUCCESS);
    let settled = |engine: &TestEngine, request| {
        logged(engine, |log| {
            let mut of = log.settled.iter().filter(|(of, _)| *of == request);
            of.next().map(|(_, at_devices)| *at_devices)
        })
    };
    let nqn_of = nqn.clone();
    let request = engine.order(|request| ToEngine::SetExport {
        request,
        export: ExportConfig {
            export: ExportId(1),
            volume: VolumeId(1),
            nqn: nqn_of,
            serial: "serial1".into(),
            hosts: [STRANGER.into()].into(),
            any_host: false,
            frontend: Default::default(),
        },
        reactor: None,
    });
    assert_eq!(settled(&engine, request), 0);
    // Its commands now have no effect.
    let mut socket = &io.socket;
    let command = io.capsule_bytes(
        &rw(READ, 5, 3, 1).with_sgl(SglDescriptor::transport(4096)),
        &[],
    );
    let _ = std::io::Write::write_all(&mut socket, &command);
    assert!(io.end().is_none() && host.end().is_none());
    let mut again = RawHost::open(engine.address, PLAIN);
    let command = ConnectCommand::new(0, 0, 32, 0);
    let refused = again.connect(command, &connect_data(0xffff, &nqn, HOST));
    assert_eq!(refused.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    let name = logged(&engine, |log| log.refused.first().cloned());
    assert_eq!(name, HOST);
    // An unused or unknown export is settled too.
    for export in [ExportId(1), ExportId(77)] {
        let request = engine.order(|request| ToEngine::RemoveExport { request, export });
        assert_eq!(settled(&engine, request), 0);
    }
}
