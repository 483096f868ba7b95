//! The frontend with a core in hand: what needs control over memory, room, time and the owner.
//!
//! Sockets are socket pairs, turns are made by the test, and the owner's answers are the test's. What a
//! whole engine shows is in `tests/tcp_protocol.rs`.

use super::*;
use crate::associations::Associations;
use crate::core::ServedDevice;
use crate::core::staging::StagingBuffer;
use crate::door::{NewKind, Target};
use crate::lane::{Lane, LaneIndex};
use crate::volume::Volume;
use forebay_device::ring::{Ring, RingOptions};
use forebay_device::{Device, OpenOptions};
use forebay_nvme::controller::check_admin_connect;
use forebay_nvme::fabrics::{ConnectCommand, ConnectData, PropertyCommand};
use forebay_nvme::tcp::{self, Offer, Parsed, Pdu, TcpParams};
use forebay_nvme::{Cqe, Nqn, SglDescriptor, Sqe};
use forebay_xlate::boundary::message::{
    DeviceConfig, ExportConfig, ExportId, FaultFailure, VolumeConfig,
};
use forebay_xlate::boundary::region::progress;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use rustix::event::epoll;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::sync::atomic::Ordering::Relaxed;

const EXTENT: u64 = 64 << 10;
const EXTENTS: u64 = 256;
const V: VolumeId = VolumeId(9);
const SECOND_NS: u64 = 1_000_000_000;

struct Rig {
    core: Core,
    frontend: Frontend,
    volume: Arc<Volume>,
    epoll: Arc<OwnedFd>,
    associations: Associations,
    _dir: tempfile::TempDir,
}

/// The host's end of one connection.
struct Host {
    fd: OwnedFd,
    params: TcpParams,
    input: Vec<u8>,
}

fn rig() -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let spec = format!("ram:{}?size=32M", dir.path().join("device").display())
        .parse()
        .unwrap();
    let options = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    let device = Arc::new(Device::open(&spec, &options).unwrap());
    let region = Arc::new(Region::anonymous(1).unwrap());
    let mut core = Core::new(
        0,
        region.clone(),
        Ring::new(&RingOptions::default()).unwrap(),
    )
    .unwrap();
    let config = Arc::new(DeviceConfig {
        device: DeviceIndex(0),
        uuid: [1; 16],
        spec: spec.to_string(),
        data_offset_bytes: 1 << 20,
        extent_bytes: EXTENT as u32,
        extents: EXTENTS,
    });
    core.set_device(ServedDevice { config, device });
    let volume = Volume::new(VolumeConfig {
        volume: V,
        uuid: [2; 16],
        size_bytes: EXTENTS * EXTENT,
        block_bytes: 4096,
        extent_bytes: EXTENT as u32,
    });
    let volume = Arc::new(volume.unwrap());
    let export = ExportConfig {
        export: ExportId(1),
        volume: V,
        nqn: "nqn.2026-01.io.forebay:t.v".into(),
        serial: "s".into(),
        hosts: vec![],
        any_host: true,
    };
    core.set_lane(Lane::new(
        LaneIndex(3),
        volume.clone(),
        Arc::new(export),
        region.clone(),
    ));
    let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    let frontend = Frontend::new(0, region, epoll.clone());
    Rig {
        core,
        frontend,
        volume,
        epoll,
        associations: Associations::default(),
        _dir: dir,
    }
}

impl Rig {
    fn map_all(&self) {
        let word = Word::new(DeviceIndex(0), ExtentIndex(0), Rights::ReadWrite).unwrap();
        self.volume
            .table
            .install(ExtentRange::new(0, EXTENTS), word);
    }

    fn connect(&mut self, command: ConnectCommand, cntlid: u16) -> Host {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let request = tcp::IcReq {
            pfv: 0,
            hpda: 0,
            header_digest: false,
            data_digest: false,
            max_r2t: 0,
        };
        let (params, response) = TcpParams::accept(&request, &Offer::default()).unwrap();
        let subsystem = Nqn::parse("nqn.2026-01.io.forebay:t.v").unwrap();
        let name = Nqn::parse("nqn.2014-08.org.example:host").unwrap();
        let data = ConnectData::new([7; 16], cntlid, &subsystem, &name);
        let kind = match command.qid.get() {
            0 => NewKind::Admin {
                association: self
                    .associations
                    .begin(0, subsystem, name, [7; 16])
                    .unwrap(),
                connect: Box::new(check_admin_connect(&command, &data, MAX_ADMIN_ENTRIES).unwrap()),
                target: Target::Export(ExportId(1)),
            },
            _ => NewKind::Io { cntlid },
        };
        let local = "127.0.0.1:4420".parse().unwrap();
        let new = NewConnection {
            fd: ours,
            params,
            connect: command.to_sqe(),
            data: Box::new(data),
            kind,
            local,
        };
        self.frontend.adopt(&mut self.core, new);
        let params = TcpParams::connected(&request, &response).unwrap();
        Host {
            fd: theirs,
            params,
            input: Vec::new(),
        }
    }

    /// An enabled admin queue, and the controller's id.
    fn admin(&mut self) -> (Host, u16) {
        let mut host = self.connect(ConnectCommand::new(0, 0, 32, 0), 0xffff);
        let cqe = host.response().unwrap();
        assert_eq!(cqe.status(), Status::SUCCESS);
        host.say(
            &PropertyCommand::set(1, 0x14, false, 0x46_0001).to_sqe(),
            &[],
        );
        host.say(
            &Sqe::new(9, 2).with_cdw(10, 7).with_cdw(11, 63 << 16 | 63),
            &[],
        );
        self.turns(2);
        for _ in 0..2 {
            assert_eq!(host.response().unwrap().status(), Status::SUCCESS);
        }
        (host, cqe.result() as u16)
    }

    fn io(&mut self, cntlid: u16, qid: u16, entries: u32) -> Host {
        let mut command = ConnectCommand::new(0, qid, entries, 0);
        command.cattr = ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL;
        let mut host = self.connect(command, cntlid);
        assert_eq!(host.response().unwrap().status(), Status::SUCCESS);
        host
    }

    /// As a reactor does it.
    fn turns(&mut self, turns: usize) {
        for _ in 0..turns {
            let mut events = Vec::with_capacity(64);
            let none = rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            epoll::wait(
                &*self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                Some(&none),
            )
            .unwrap();
            let keys: Vec<u64> = events.iter().map(|e| e.data.u64()).collect();
            self.frontend.sockets_ready(&keys);
            self.core.reap();
            self.frontend.poll(&mut self.core);
            self.core.submit();
        }
    }

    fn pass(&mut self, ns: u64) {
        self.core.set_now_ns(self.core.now_ns() + ns);
        self.frontend.tick(&mut self.core);
    }

    fn held_bytes(&self) -> u64 {
        self.frontend
            .conns
            .iter()
            .flatten()
            .map(|c| c.held_bytes)
            .sum()
    }
}

impl Host {
    fn say(&mut self, sqe: &Sqe, data: &[u8]) {
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_capsule_cmd(&mut out, &self.params, sqe, data.len() as u32);
        out.truncate(n);
        out.extend_from_slice(data);
        let sent = rustix::net::send(&self.fd, &out, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, out.len());
    }

    /// What is there now.
    fn hear(&mut self) -> Option<(Pdu, Vec<u8>)> {
        loop {
            if let Parsed::Pdu(frame) = tcp::parse(&self.input, &self.params).unwrap()
                && self.input.len() >= frame.total_bytes()
            {
                let pdu: Vec<u8> = self.input.drain(..frame.total_bytes()).collect();
                return Some((frame.pdu, pdu[frame.header_bytes..].to_vec()));
            }
            let mut more = vec![0; 256 << 10];
            match rustix::net::recv(&self.fd, &mut more[..], RecvFlags::DONTWAIT) {
                Ok((_, n)) if n > 0 => self.input.extend_from_slice(&more[..n]),
                _ => return None,
            }
        }
    }

    fn response(&mut self) -> Option<Cqe> {
        match self.hear()?.0 {
            Pdu::CapsuleResp(cqe) => Some(cqe),
            other => panic!("{other:?}"),
        }
    }

    fn ended(&mut self) -> bool {
        matches!(
            rustix::net::recv(&self.fd, &mut [0; 16][..], RecvFlags::DONTWAIT),
            Ok((_, 0))
        )
    }
}

fn rw(opcode: u8, cid: u16, lba: u64, blocks: u32) -> Sqe {
    let sqe = Sqe::new(opcode, cid)
        .with_nsid(1)
        .with_cdw64(10, lba)
        .with_cdw(12, blocks - 1);
    sqe.with_sgl(SglDescriptor::transport(blocks * 4096))
}

fn write_in_capsule(cid: u16, lba: u64, blocks: u32) -> Sqe {
    rw(1, cid, lba, blocks).with_sgl(SglDescriptor::in_capsule(0, blocks * 4096))
}

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
    let held = rig.held_bytes();
    assert!(
        held > conn::MAX_HELD_BYTES / 2 && held <= conn::MAX_HELD_BYTES,
        "{held}"
    );
    assert!(rig.frontend.is_idle(), "only the host can carry this on");
    quick.say(&rw(2, 1, 0, 8), &[]);
    rig.turns(2);
    assert!(matches!(quick.hear(), Some((Pdu::C2hData(_), data)) if data.len() == 8 * 4096));
    // Now it reads, and gets all.
    let mut got = [false; 128];
    for _ in 0..5000 {
        while let Some((pdu, data)) = slow.hear() {
            let Pdu::C2hData(c) = pdu else {
                panic!("{pdu:?}")
            };
            assert_eq!(data.len(), 64 * 4096);
            assert!(!std::mem::replace(&mut got[usize::from(c.cid)], true));
        }
        rig.turns(1);
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
    assert_eq!(rig.frontend.connections(), 1);
    // Its queue is free again.
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
    let mut all: Vec<StagingBuffer> = std::iter::from_fn(|| rig.core.staging.take(4096)).collect();
    for cid in 0..20u16 {
        host.say(
            &write_in_capsule(cid, u64::from(cid), 1),
            &vec![cid as u8; 4096],
        );
    }
    // Then a read, and half a capsule.
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
    assert!(!rig.frontend.is_idle(), "it must be tried again");
    assert!(rig.core.record().staging_waits.load(Relaxed) > 0);
    // One buffer, of the smallest, is enough to get on.
    rig.core.staging.give(all.swap_remove(0));
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
        rig.core.staging.give(buffer);
    }
    rig.turns(3);
    assert_eq!(host.response().unwrap().cid(), 21);
    assert!(rig.frontend.is_idle());
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
}

#[test]
fn without_room_in_the_core_commands_wait_their_turn() {
    let mut rig = rig();
    let (_admin, cntlid) = rig.admin();
    let mut hosts: Vec<Host> = (1..=20).map(|qid| rig.io(cntlid, qid, 256)).collect();
    // Nothing is mapped and the owner is silent: all of these park. There is room for 4096.
    for host in &mut hosts {
        for cid in 0..256 {
            host.say(&Sqe::new(0, cid).with_nsid(1).with_cdw(10, 0), &[]);
        }
    }
    // Flushes end at once when nothing is uncommitted; reads of unmapped extents park.
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
    assert!(!rig.frontend.is_idle());
    for _ in 0..10 {
        rig.core
            .fault_failed(V, ExtentRange::new(0, 1), FaultFailure::NoSpace);
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
    // Half of one.
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
    assert!(rig.frontend.is_idle(), "half a PDU keeps nobody awake");
    assert_eq!(rig.held_bytes(), 4 * (512 << 10));
    assert!(rig.frontend.next_deadline_ns().unwrap() <= rig.core.now_ns() + DATA_LIMIT_NS);
    rig.pass(DATA_LIMIT_NS);
    assert_eq!(
        (rig.frontend.shared.r2ts.get(), rig.core.staging.out()),
        (0, 0)
    );
    while host.hear().is_some() {}
    assert!(host.ended());
    assert_eq!(rig.frontend.connections(), 1);
}

#[test]
fn who_is_told_to_go_has_two_seconds() {
    let mut rig = rig();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    // A command that is with the core meanwhile.
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
    assert_eq!(
        rig.frontend.connections(),
        2,
        "the core has its command still"
    );
    rig.core
        .fault_failed(V, ExtentRange::new(0, 1), FaultFailure::Internal);
    rig.turns(1);
    assert_eq!((rig.frontend.connections(), rig.core.staging.out()), (1, 0));
}

#[test]
fn the_state_region_says_what_is_in_flight() {
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
    assert_eq!(c.host_nqn[0].load(Relaxed).to_le_bytes(), *b"nqn.2014");
    assert_eq!(
        (
            q.used.load(Relaxed),
            q.qid.load(Relaxed),
            q.entries.load(Relaxed)
        ),
        (1, 5, 32)
    );
    assert_eq!(q.sq_head.load(Relaxed), 1);
    let sqe = rw(2, 0x1234, 77, 1);
    host.say(&sqe, &[]);
    rig.turns(1);
    let record = &region.commands(1)[0];
    let words: [u64; 8] = std::array::from_fn(|i| record.sqe[i].load(Relaxed));
    let came: [u64; 8] = zerocopy::transmute!(sqe);
    assert_eq!(words, came);
    assert_eq!(record.progress.load(Relaxed), progress::PARKED);
    assert_eq!(
        (record.number.load(Relaxed), record.attempts.load(Relaxed)),
        (2, 1)
    );
    assert_eq!(
        (q.sq_head.load(Relaxed), q.received_bytes.load(Relaxed)),
        (2, 72)
    );
    let lane = rig.core.lane(LaneIndex(3)).unwrap().record();
    assert_eq!(
        (lane.connections.load(Relaxed), lane.in_flight.load(Relaxed)),
        (2, 1)
    );
    // The host goes; what it left stays recorded until the core gives it back.
    drop((admin, host));
    rig.turns(3);
    let lane = rig.core.lane(LaneIndex(3)).unwrap().record();
    assert_eq!(lane.connections.load(Relaxed), 0);
    assert_eq!(
        (
            record.progress.load(Relaxed),
            q.used.load(Relaxed),
            c.used.load(Relaxed)
        ),
        (progress::PARKED, 1, 1)
    );
    rig.core
        .fault_failed(V, ExtentRange::new(4, 1), FaultFailure::Internal);
    rig.turns(1);
    assert_eq!(
        (
            record.progress.load(Relaxed),
            q.used.load(Relaxed),
            c.used.load(Relaxed)
        ),
        (progress::FREE, 0, 0)
    );
    assert_eq!(rig.frontend.connections(), 0);
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
            // With the next command behind it, in one receive.
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
