//! A frontend and a core; the test is their reactor, owner and hosts.
//!
//! It uses socket pairs, and controls turns and time.

use super::super::*;
use crate::associations::Associations;
use crate::core::staging::Staging;
use crate::core::{CommandRef, FenceSet, RecoveredSpan, ServedDevice};
use crate::exports::ExportTable;
use crate::frontend::Frontend;
use crate::lane::{Lane, LaneIndex};
use crate::listener::{ListenerTarget, NewConnection, NewKind};
use crate::memory::Memory;
use crate::volume::Volume;
use forebay_device::gate::TestGate;
use forebay_device::ring::{Ring, RingOptions};
use forebay_device::{Device, OpenOptions};
use forebay_nvme::controller::check_admin_connect;
use forebay_nvme::fabrics::{ConnectCommand, ConnectData, PropertyCommand};
use forebay_nvme::tcp::{self, Offer, Parsed, Pdu, TcpParams};
use forebay_nvme::{Cqe, Nqn, SglDescriptor, Sqe, Status};
use forebay_xlate::boundary::message::{
    DeviceConfig, DeviceFence, ExportConfig, ExportId, VolumeConfig,
};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use rustix::event::epoll;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

pub(super) const EXTENT: u64 = 64 << 10;
pub(super) const EXTENTS: u64 = 256;
pub(super) const V: VolumeId = VolumeId(9);
pub(super) const SECOND_NS: u64 = 1_000_000_000;

pub(super) struct Rig {
    pub core: Core,
    pub frontend: NvmeTcp,
    pub volume: Arc<Volume>,
    pub epoll: Arc<OwnedFd>,
    pub gate: Arc<TestGate>,
    pub host: &'static str,
    pub host_id: [u8; 16],
    /// Requested digests: headers, data.
    pub digests: (bool, bool),
    pub max_r2t: u32,
    pub export: ExportId,
    /// Use TCP instead of a socket pair.
    pub tcp: bool,
    /// Connect to this discovery service instead of an export.
    pub discovery: Option<ExportTable>,
    /// The local address that it reaches.
    pub local: &'static str,
    /// Every socket, as held by the daemon.
    pub charge: Vec<OwnedFd>,
    pub associations: Associations,
    _dir: tempfile::TempDir,
}

pub(super) struct Host {
    pub fd: OwnedFd,
    pub params: TcpParams,
    input: Vec<u8>,
}

pub(super) fn rig() -> Rig {
    rig_on("ram")
}

pub(super) fn rig_on(kind: &str) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let spec = format!("{kind}:{}?size=32M", dir.path().join("device").display())
        .parse()
        .unwrap();
    let options = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    let mut device = Device::open(&spec, &options).unwrap();
    let gate = TestGate::new();
    // A null device has nothing to hold, and its cost is measured.
    if kind != "null" {
        device.attach_gate(gate.clone());
    }
    let device = Arc::new(device);
    let region = Arc::new(Region::anonymous(1).unwrap());
    let memory = Memory::create().unwrap();
    let of_reactor = memory.reactor(0).unwrap();
    let mut core = Core::new(
        0,
        region.clone(),
        Staging::over(of_reactor.staging),
        Ring::new(&RingOptions::default()).unwrap(),
    );
    let config = Arc::new(DeviceConfig {
        device: DeviceIndex(0),
        uuid: [1; 16],
        spec: spec.to_string(),
        data_offset_bytes: 1 << 20,
        extent_bytes: EXTENT as u32,
        extents: EXTENTS,
        fence: DeviceFence::Locks,
    });
    core.set_device(ServedDevice { config, device });
    let volume = Volume::new(VolumeConfig {
        volume: V,
        uuid: [2; 16],
        read_only: false,
        size_bytes: EXTENTS * EXTENT,
        block_bytes: 4096,
        extent_bytes: EXTENT as u32,
        epoch: 0,
        image: None,
    });
    let volume = Arc::new(volume.unwrap());
    let export = ExportConfig {
        export: ExportId(1),
        volume: V,
        nqn: "nqn.2026-01.io.forebay:t.v".into(),
        serial: "s".into(),
        hosts: Default::default(),
        any_host: true,
        frontend: Default::default(),
    };
    core.set_lane(Lane::new(
        LaneIndex(3),
        volume.clone(),
        Arc::new(export),
        region.clone(),
    ));
    let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    let frontend = NvmeTcp::new(
        FrontendIndex(0),
        0,
        &region,
        epoll.clone(),
        memory,
        of_reactor.receive,
    );
    Rig {
        core,
        frontend,
        volume,
        epoll,
        gate,
        host: "nqn.2014-08.org.example:host",
        host_id: [7; 16],
        digests: (false, false),
        max_r2t: 0,
        export: ExportId(1),
        tcp: false,
        discovery: None,
        local: "127.0.0.1:4420",
        charge: Vec::new(),
        associations: Associations::default(),
        _dir: dir,
    }
}

fn tcp_pair() -> (OwnedFd, OwnedFd) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (ours, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    (ours.into(), theirs.into())
}

impl Rig {
    pub(in crate::frontend::nvme_tcp) fn map_all(&self) {
        let word = Word::new(DeviceIndex(0), ExtentIndex(0), Rights::ReadWrite).unwrap();
        self.volume
            .table
            .install(ExtentRange::new(0, EXTENTS), word);
    }

    /// The next hosts use another export of the volume, of this tenant.
    pub(in crate::frontend::nvme_tcp) fn serve(&mut self, export: u32, tenant: u32) {
        let config = &self.core.lane(LaneIndex(3)).unwrap().export;
        self.export = ExportId(100 + u64::from(export));
        let config = ExportConfig {
            export: self.export,
            ..(**config).clone()
        };
        let (index, volume) = (LaneIndex(100 + export), self.volume.clone());
        let region = self.core.region.clone();
        let mut lane = Lane::new(index, volume, Arc::new(config), region);
        lane.share = Some(crate::lane::Share {
            tenant,
            budget: None,
        });
        self.core.set_lane(lane);
    }

    pub(in crate::frontend::nvme_tcp) fn connect(
        &mut self,
        command: ConnectCommand,
        cntlid: u16,
    ) -> Host {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (ours, theirs) = match self.tcp {
            true => tcp_pair(),
            false => rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .unwrap(),
        };
        let request = tcp::IcReq {
            pfv: 0,
            hpda: 0,
            header_digest: self.digests.0,
            data_digest: self.digests.1,
            max_r2t: self.max_r2t,
        };
        let (params, response) = TcpParams::accept(&request, &Offer::default()).unwrap();
        let subsystem = match &self.discovery {
            Some(_) => Nqn::discovery(),
            None => Nqn::parse("nqn.2026-01.io.forebay:t.v").unwrap(),
        };
        let target = match &self.discovery {
            Some(exports) => ListenerTarget::Discovery(exports.clone()),
            None => ListenerTarget::Export(self.export),
        };
        let name = Nqn::parse(self.host).unwrap();
        let data = ConnectData::new(self.host_id, cntlid, &subsystem, &name);
        let kind = match command.qid.get() {
            0 => NewKind::Admin {
                association: self
                    .associations
                    .begin(0, subsystem, name, self.host_id)
                    .unwrap(),
                connect: Box::new(check_admin_connect(&command, &data, MAX_ADMIN_ENTRIES).unwrap()),
                target,
            },
            _ => NewKind::Io { cntlid },
        };
        let local = self.local.parse().unwrap();
        self.charge.push(ours.try_clone().unwrap());
        let new = NewConnection {
            socket: 1,
            fd: Arc::new(ours),
            consumed: 0,
            said: 0,
            params,
            connect: command.to_sqe(),
            data: Box::new(data),
            kind,
            local,
        };
        self.frontend.attach(&mut self.core, new);
        let params = TcpParams::connected(&request, &response).unwrap();
        Host {
            fd: theirs,
            params,
            input: Vec::new(),
        }
    }

    /// An enabled admin queue, and the controller's ID.
    pub(in crate::frontend::nvme_tcp) fn admin(&mut self) -> (Host, u16) {
        self.try_admin().unwrap()
    }

    pub(in crate::frontend::nvme_tcp) fn try_admin(&mut self) -> Result<(Host, u16), Status> {
        let mut host = self.connect(ConnectCommand::new(0, 0, 32, 0), 0xffff);
        let cqe = host.response().unwrap();
        if cqe.status() != Status::SUCCESS {
            return Err(cqe.status());
        }
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
        Ok((host, cqe.result() as u16))
    }

    pub(in crate::frontend::nvme_tcp) fn io(
        &mut self,
        cntlid: u16,
        qid: u16,
        entries: u32,
    ) -> Host {
        let mut command = ConnectCommand::new(0, qid, entries, 0);
        command.cattr = ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL;
        let mut host = self.connect(command, cntlid);
        assert_eq!(host.response().unwrap().status(), Status::SUCCESS);
        host
    }

    pub(in crate::frontend::nvme_tcp) fn is_idle(&self) -> bool {
        self.frontend.is_idle() && self.frontend.retry_within_ns().is_none()
    }

    pub(in crate::frontend::nvme_tcp) fn turns(&mut self, turns: usize) {
        for _ in 0..turns {
            let mut events = Vec::with_capacity(64);
            let none = rustix::event::Timespec::default();
            epoll::wait(
                &*self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                Some(&none),
            )
            .unwrap();
            let keys: Vec<u64> = events.iter().map(|e| e.data.u64()).collect();
            for key in &keys {
                let conn = self.frontend.conns.get(*key as u32 as usize);
                let alive = conn
                    .and_then(Option::as_ref)
                    .is_some_and(|c| c.socket.key == *key);
                assert!(alive, "a socket is watched whose connection is gone");
            }
            self.frontend.sockets_ready(&mut self.core, &keys);
            self.core.reap();
            self.frontend.poll(&mut self.core, &mut |_| false);
            self.core.end_turn();
            let mut listed = self.frontend.active.clone();
            listed.sort_unstable();
            listed.dedup();
            assert_eq!(
                listed.len(),
                self.frontend.active.len(),
                "nobody is visited twice a turn"
            );
        }
    }

    /// Turns a command into a recovered one, on the volume's first block.
    pub(in crate::frontend::nvme_tcp) fn recover(&mut self, cid: u16) {
        let mut conns = self.frontend.conns.iter().flatten();
        let found = conns.find_map(|conn| Some((conn.queue, conn.slots.by_cid(cid)?)));
        let (queue, slot) = found.unwrap();
        self.core.recovered.recover(&[RecoveredSpan {
            volume: V,
            bytes: 0..4096,
            write: true,
            devices: FenceSet::None,
            command: Some(CommandRef::new(queue, slot)),
        }]);
    }

    pub(in crate::frontend::nvme_tcp) fn pass(&mut self, ns: u64) {
        self.core.clock.set_now_ns(self.core.now_ns() + ns);
        self.frontend.tick(&mut self.core);
    }

    pub(in crate::frontend::nvme_tcp) fn held_bytes(&self) -> u64 {
        self.frontend
            .conns
            .iter()
            .flatten()
            .map(|c| c.charge.bytes)
            .sum()
    }
}

impl Host {
    pub(in crate::frontend::nvme_tcp) fn say(&mut self, sqe: &Sqe, data: &[u8]) {
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_capsule_cmd(&mut out, &self.params, sqe, data.len() as u32);
        out.truncate(n);
        out.extend_from_slice(data);
        if self.params.data_digest && !data.is_empty() {
            out.extend_from_slice(&tcp::crc32c(data).to_le_bytes());
        }
        let sent = rustix::net::send(&self.fd, &out, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, out.len());
    }

    /// The next received PDU.
    pub(in crate::frontend::nvme_tcp) fn hear(&mut self) -> Option<(Pdu, Vec<u8>)> {
        loop {
            if let Parsed::Pdu(frame) = tcp::parse(&self.input, &self.params).unwrap()
                && self.input.len() >= frame.total_bytes()
            {
                let pdu: Vec<u8> = self.input.drain(..frame.total_bytes()).collect();
                return Some((frame.pdu, pdu[frame.header_bytes..].to_vec()));
            }
            self.input.reserve(256 << 10);
            let room = rustix::buffer::spare_capacity(&mut self.input);
            match rustix::net::recv(&self.fd, room, RecvFlags::DONTWAIT) {
                Ok((_, n)) if n > 0 => {}
                _ => return None,
            }
        }
    }

    pub(in crate::frontend::nvme_tcp) fn response(&mut self) -> Option<Cqe> {
        match self.hear()?.0 {
            Pdu::CapsuleResp(cqe) => Some(cqe),
            other => panic!("{other:?}"),
        }
    }

    pub(in crate::frontend::nvme_tcp) fn ended(&mut self) -> bool {
        matches!(
            rustix::net::recv(&self.fd, &mut [0; 16][..], RecvFlags::DONTWAIT),
            Ok((_, 0))
        )
    }
}

pub(super) fn rw(opcode: u8, cid: u16, lba: u64, blocks: u32) -> Sqe {
    let sqe = Sqe::new(opcode, cid)
        .with_nsid(1)
        .with_cdw64(10, lba)
        .with_cdw(12, blocks - 1);
    sqe.with_sgl(SglDescriptor::transport(blocks * 4096))
}

pub(super) fn write_in_capsule(cid: u16, lba: u64, blocks: u32) -> Sqe {
    rw(1, cid, lba, blocks).with_sgl(SglDescriptor::in_capsule(0, blocks * 4096))
}
