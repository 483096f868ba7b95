//! Engines die repeatedly, at kill points and between turns, and hosts must not notice: same
//! connections, each command answered once, all data correct.
//!
//! The test is listener, daemon and reactor. A dead engine's connections are leaked, so that no
//! destructor runs.

use super::super::*;
pub(super) use super::rig::V;
use super::rig::{EXTENT, EXTENTS};
pub(super) use super::take_over_hosts::SERVING;
use super::take_over_hosts::{BLOCK, Blocks, Dice, Queue, Wanted, patience};
use crate::associations::Associations;
use crate::core::ServedDevice;
use crate::core::staging::Staging;
use crate::exports::{ExportTable, Served};
use crate::frontend::Frontend;
use crate::lane::{Lane, LaneIndex};
use crate::listener::{ListenerTarget, NewConnection, NewKind};
use crate::memory::Memory;
use crate::takeover::{Inheritance, Pending, ServedLane, ServedLanes, Successor};
use crate::volume::Volume;
use forebay_device::ring::{Ring, RingOptions};
use forebay_device::{Device, OpenOptions};
use forebay_nvme::controller::check_admin_connect;
use forebay_nvme::fabrics::{ConnectCommand, ConnectData, PropertyCommand};
use forebay_nvme::reservation::Reservations;
use forebay_nvme::tcp::{self, Offer, Parsed, Pdu, TcpParams};
use forebay_nvme::{Nqn, Sqe, Status};
use forebay_xlate::boundary::message::{
    DeviceConfig, DeviceFence, ExportConfig, ExportId, VolumeConfig,
};
use forebay_xlate::kill::{Killed, arm_here};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, Word};
use rustix::event::epoll;
use rustix::net::{RecvFlags, SendFlags};
use std::collections::BTreeMap;
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};

const OVER: &[&str] = &[
    "over.adopted",
    "over.counted",
    "over.half",
    "over.converted",
    "over.inherited",
    "over.listening",
];
const PLACING: &[&str] = &[
    "place.taken",
    "place.live",
    "place.consumed",
    "place.answered",
];

const NQN: &str = "nqn.2026-01.io.forebay:t.v";
const HOST: &str = "nqn.2014-08.org.example:host";

pub(super) struct Engine {
    pub core: Core,
    pub frontend: NvmeTcp,
    /// Its messages about reservations.
    pub said: Vec<crate::upcall::Upcall>,
    epoll: Arc<OwnedFd>,
    region: Arc<Region>,
    memory: &'static Memory,
    associations: Associations,
    lanes: ServedLanes,
    device: Arc<Device>,
    generation: u64,
    fenced: bool,
}

pub(super) struct World {
    pub dice: Dice,
    dir: tempfile::TempDir,
    listener: TcpListener,
    pub generation: u64,
    engine: Option<Engine>,
    sockets: BTreeMap<u64, Arc<OwnedFd>>,
    next_socket: u64,
    /// The reservations that a new engine gets.
    pub reservations: Arc<Reservations>,
    /// For the next connection.
    pub host_id: [u8; 16],
    pub max_r2t: u32,
    /// Connections that the listener accepted.
    arrivals: BTreeMap<u64, Arrival>,
    deaths: BTreeMap<&'static str, u32>,
}

#[derive(Clone)]
struct Arrival {
    params: TcpParams,
    connect: Sqe,
    data: Box<ConnectData>,
    consumed: usize,
}

fn engine(dir: &std::path::Path, generation: u64) -> Engine {
    let spec = format!("file:{}", dir.join("device").display());
    let spec = spec.parse().unwrap();
    let device = Arc::new(Device::open(&spec, &OpenOptions::default()).unwrap());
    device.take_fence(generation).unwrap();
    let region = Arc::new(Region::anonymous(generation).unwrap());
    let memory = Memory::create().unwrap();
    let of_reactor = memory.reactor(0).unwrap();
    let ring = Ring::new(&RingOptions::default()).unwrap();
    let mut core = Core::new(0, region.clone(), Staging::over(of_reactor.staging), ring);
    let config = Arc::new(DeviceConfig {
        device: DeviceIndex(0),
        uuid: [1; 16],
        spec: spec.to_string(),
        data_offset_bytes: 1 << 20,
        extent_bytes: EXTENT as u32,
        extents: EXTENTS,
        fence: DeviceFence::Locks,
    });
    let served = ServedDevice {
        config,
        device: device.clone(),
    };
    core.set_device(served);
    let volume = Volume::new(VolumeConfig {
        volume: V,
        uuid: [2; 16],
        read_only: false,
        size_bytes: EXTENTS * EXTENT,
        block_bytes: BLOCK,
        extent_bytes: EXTENT as u32,
        epoch: 0,
        image: None,
    });
    let volume = Arc::new(volume.unwrap());
    let word = Word::new(DeviceIndex(0), ExtentIndex(0), Rights::ReadWrite).unwrap();
    volume.may_write_to(DeviceIndex(0));
    volume.table.install(ExtentRange::new(0, EXTENTS), word);
    let config = Arc::new(ExportConfig {
        export: ExportId(1),
        volume: V,
        nqn: NQN.into(),
        serial: "s".into(),
        hosts: Default::default(),
        any_host: true,
        frontend: Default::default(),
    });
    // A different lane in each generation.
    let lane = LaneIndex(generation as u32 % 7);
    core.set_lane(Lane::new(
        lane,
        volume.clone(),
        config.clone(),
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
    let served = Served { config, reactor: 0 };
    Engine {
        core,
        said: Vec::new(),
        frontend,
        epoll,
        region,
        memory,
        associations: Associations::default(),
        lanes: BTreeMap::from([(
            ExportId(1),
            ServedLane {
                served,
                lane,
                volume,
            },
        )]),
        device,
        generation,
        fenced: false,
    }
}

impl Engine {
    pub(super) fn set_reservations(&mut self, state: &Arc<Reservations>) {
        let conflict = Status::RESERVATION_CONFLICT.with_dnr();
        (self.frontend).set_reservations(&mut self.core, V, state, conflict);
    }

    /// Ends as a killed process.
    fn die(self) {
        std::mem::forget(self.frontend);
        drop((self.core, self.device));
    }

    pub(super) fn turn(&mut self, gone: &mut Vec<u64>) {
        if !self.fenced && self.device.predecessors_gone(self.generation).unwrap() {
            self.fenced = true;
            self.core.fenced(DeviceIndex(0));
        }
        let mut events = Vec::with_capacity(64);
        let none = rustix::event::Timespec::default();
        let room = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(&*self.epoll, room, Some(&none)).unwrap();
        let keys: Vec<u64> = events.iter().map(|e| e.data.u64()).collect();
        self.core.begin_turn();
        self.frontend.sockets_ready(&mut self.core, &keys);
        self.core.reap();
        self.frontend.poll(&mut self.core, &mut |_| false);
        self.core.end_turn();
        while let Some(upcall) = self.core.upcalls.pop_front() {
            match upcall {
                crate::upcall::Upcall::SocketGone(socket) => gone.push(socket),
                said @ crate::upcall::Upcall::Reserve(_) => self.said.push(said),
                other => panic!("{other:?}"),
            }
        }
    }
}

impl World {
    pub(super) fn turn(&mut self) -> Vec<crate::upcall::Upcall> {
        self.step(Engine::turn);
        self.engine
            .as_mut()
            .map_or(Vec::new(), |engine| std::mem::take(&mut engine.said))
    }

    pub(super) fn new(seed: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(dir.path().join("device")).unwrap();
        file.set_len(32 << 20).unwrap();
        let engine = engine(dir.path(), 1);
        Self {
            dice: Dice::with_seed(seed),
            dir,
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            generation: 1,
            engine: Some(engine),
            sockets: BTreeMap::new(),
            next_socket: 1 << 32,
            reservations: Arc::default(),
            host_id: [7; 16],
            max_r2t: 0,
            arrivals: BTreeMap::new(),
            deaths: BTreeMap::new(),
        }
    }

    /// Runs a step of the engine; if it dies, a successor takes over.
    pub(super) fn step(&mut self, step: impl FnOnce(&mut Engine, &mut Vec<u64>)) {
        let mut engine = self.engine.take().unwrap();
        let mut gone = Vec::new();
        let lived = catch_unwind(AssertUnwindSafe(|| step(&mut engine, &mut gone)));
        assert!(gone.is_empty(), "a connection is gone");
        match lived {
            Ok(()) => self.engine = Some(engine),
            Err(why) => {
                assert!(why.is::<Killed>(), "the engine panicked");
                self.take_over(engine);
            }
        }
    }

    fn take_over(&mut self, dead: Engine) {
        let (region, memory) = (dead.region.clone(), dead.memory);
        dead.die();
        arm_here("over.adopted", 0);
        loop {
            self.generation += 1;
            let mut next = engine(self.dir.path(), self.generation);
            next.core.lanes.set_reservations(V, &self.reservations);
            // The take-over may die, too.
            if self.dice.u64(..3) == 0 {
                let point = OVER[self.dice.usize(..OVER.len())];
                arm_here(point, 1 + self.dice.u32(..2));
            }
            let sockets: Vec<(u64, OwnedFd)> = (self.sockets.iter())
                .map(|(number, fd)| (*number, fd.try_clone().unwrap()))
                .collect();
            let converted = catch_unwind(AssertUnwindSafe(|| {
                convert(&next, &region, memory, sockets)
            }));
            let inheritance = match converted {
                Ok(inheritance) => inheritance,
                Err(why) => {
                    assert!(why.is::<Killed>());
                    arm_here("over.adopted", 0);
                    next.die();
                    continue;
                }
            };
            assert!(inheritance.closed.is_empty(), "{:?}", inheritance.closed);
            let Inheritance {
                parts, handshakes, ..
            } = inheritance;
            for queue in &parts[0].queues {
                self.sockets
                    .insert(queue.constants.socket, queue.fd.clone());
            }
            for (socket, fd) in &handshakes {
                self.sockets.insert(*socket, fd.clone());
            }
            let resumed = catch_unwind(AssertUnwindSafe(|| {
                for part in parts {
                    next.frontend.inherit(&mut next.core, part);
                }
            }));
            arm_here("over.adopted", 0);
            if let Err(why) = resumed {
                assert!(why.is::<Killed>());
                return self.take_over(next);
            }
            self.engine = Some(next);
            for (socket, _) in handshakes {
                self.adopt(socket);
            }
            return;
        }
    }

    fn adopt(&mut self, socket: u64) {
        let (arrival, fd) = (
            self.arrivals[&socket].clone(),
            self.sockets[&socket].clone(),
        );
        self.step(|engine, gone| {
            let command = ConnectCommand::of(&arrival.connect);
            let (subsystem, host) = (Nqn::parse(NQN).unwrap(), Nqn::parse(HOST).unwrap());
            let kind = match command.qid.get() {
                0 => NewKind::Admin {
                    association: (engine.associations)
                        .begin(0, subsystem, host, arrival.data.hostid)
                        .unwrap(),
                    connect: Box::new(
                        check_admin_connect(command, &arrival.data, MAX_ADMIN_ENTRIES).unwrap(),
                    ),
                    target: ListenerTarget::Export(ExportId(1)),
                },
                _ => NewKind::Io {
                    cntlid: arrival.data.cntlid.get(),
                },
            };
            let new = NewConnection {
                socket,
                fd,
                params: arrival.params,
                connect: arrival.connect,
                data: arrival.data,
                kind,
                local: "127.0.0.1:4420".parse().unwrap(),
                consumed: arrival.consumed,
                said: 128,
            };
            engine.frontend.attach(&mut engine.core, new);
            engine.turn(gone);
        });
    }

    /// Connects a queue; the engine may die meanwhile.
    fn connect(&mut self, command: &ConnectCommand, cntlid: u16, digests: bool) -> (Queue, u64) {
        let host = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        host.set_nodelay(true).unwrap();
        let (ours, _) = self.listener.accept().unwrap();
        ours.set_nodelay(true).unwrap();
        ours.set_nonblocking(true).unwrap();
        host.set_nonblocking(true).unwrap();
        // So that the socket is often full.
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 16384).unwrap();
        let request = tcp::IcReq {
            pfv: 0,
            hpda: 0,
            header_digest: digests,
            data_digest: digests,
            max_r2t: self.max_r2t,
        };
        let (params, response) = TcpParams::accept(&request, &Offer::default()).unwrap();
        let mut out = [0; 256];
        let n = tcp::put_ic_req(&mut out, &request);
        assert_eq!(
            rustix::net::send(&host, &out[..n], SendFlags::empty()),
            Ok(128)
        );
        let n = tcp::put_ic_resp(&mut out, &response);
        assert_eq!(
            rustix::net::send(&ours, &out[..n], SendFlags::empty()),
            Ok(128)
        );
        let (subsystem, name) = (Nqn::parse(NQN).unwrap(), Nqn::parse(HOST).unwrap());
        let data = ConnectData::new(self.host_id, cntlid, &subsystem, &name);
        let mut queue = Queue {
            socket: host,
            params: TcpParams::connected(&request, &response).unwrap(),
            qid: command.qid.get(),
            input: Vec::new(),
            output: Vec::new(),
            at: 0,
            flying: BTreeMap::new(),
            open: Vec::new(),
            most_open: 0,
            next_cid: 0,
            done: 0,
        };
        queue.put(&command.to_sqe(), zerocopy::IntoBytes::as_bytes(&data));
        let bytes = std::mem::take(&mut queue.output);
        rustix::net::send(&queue.socket, &bytes, SendFlags::empty()).unwrap();
        let socket = self.next_socket;
        self.next_socket += 1;
        self.sockets.insert(socket, Arc::new(ours.into()));
        let arrival = Arrival {
            params,
            connect: command.to_sqe(),
            data: Box::new(data),
            consumed: 128 + bytes.len(),
        };
        self.arrivals.insert(socket, arrival);
        if self.dice.u64(..2) == 0 {
            let point = PLACING[self.dice.usize(..PLACING.len())];
            arm_here(point, 1);
        }
        self.adopt(socket);
        arm_here("over.adopted", 0);
        // The ICResp and the Connect's answer must come exactly once.
        loop {
            self.step(Engine::turn);
            let mut more = vec![0; 512];
            if let Ok((_, n)) = rustix::net::recv(&queue.socket, &mut more[..], RecvFlags::DONTWAIT)
            {
                assert!(n > 0, "refused");
                queue.input.extend_from_slice(&more[..n]);
            }
            if queue.input.len() < 129 {
                continue;
            }
            let rest = queue.input[128..].to_vec();
            if let Parsed::Pdu(frame) = tcp::parse(&rest, &queue.params).unwrap()
                && rest.len() >= frame.total_bytes()
            {
                let Pdu::CapsuleResp(cqe) = frame.pdu else {
                    panic!("{:?}", frame.pdu)
                };
                assert_eq!(cqe.status(), Status::SUCCESS);
                queue.input = rest[frame.total_bytes()..].to_vec();
                return (queue, cqe.result());
            }
        }
    }

    pub(super) fn associate(&mut self, io_queues: u16, digests: bool) -> Vec<Queue> {
        let (mut admin, cntlid) = self.connect(&ConnectCommand::new(0, 0, 32, 0), 0xffff, digests);
        let wanted = Wanted::Admin { data: 0, have: 0 };
        let enable = PropertyCommand::set(0, 0x14, false, 0x46_0001).to_sqe();
        admin.put(&enable, &[]);
        admin.flying.insert(0, (enable, wanted.clone()));
        admin.next_cid = 1;
        let queues = |cid| Sqe::new(9, cid).with_cdw(10, 7).with_cdw(11, 63 << 16 | 63);
        admin.fly(queues, &[], wanted);
        let mut blocks = Blocks::new();
        while !admin.flying.is_empty() {
            admin.pump(&mut self.dice, &mut blocks);
            self.step(Engine::turn);
        }
        let mut all = vec![admin];
        for qid in 1..=io_queues {
            let mut command = ConnectCommand::new(0, qid, 24, 0);
            if qid % 2 == 1 {
                command.cattr = ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL;
            }
            all.push(self.connect(&command, cntlid as u16, digests).0);
        }
        all
    }

    /// Kills the engine at a point or between turns.
    pub(super) fn kill_somewhere(&mut self, point: Option<&'static str>) {
        match point {
            Some(point) => {
                let most = if self.dice.bool() { 30 } else { 3 };
                let count = self.dice.u32(1..=most);
                arm_here(point, count);
            }
            None => {
                let engine = self.engine.take().unwrap();
                self.take_over(engine);
            }
        }
        *self
            .deaths
            .entry(point.unwrap_or("between turns"))
            .or_default() += 1;
    }
}

fn convert(
    next: &Engine,
    region: &Region,
    memory: &'static Memory,
    sockets: Vec<(u64, OwnedFd)>,
) -> Inheritance {
    let fd = region.memory().fd().try_clone_to_owned().unwrap();
    let bytes = memory.fd().try_clone_to_owned().unwrap();
    let generation = region
        .header()
        .generation
        .load(std::sync::atomic::Ordering::Relaxed);
    let mut pending = Pending::new(generation, fd, Some(bytes), None).unwrap();
    for (number, fd) in sockets {
        pending.add(number, fd);
    }
    pending.convert(Successor {
        region: &next.region,
        memory: next.memory,
        reactors: 1,
        lanes: &next.lanes,
        exports: &ExportTable::default(),
        associations: &next.associations,
    })
}

/// Two hosts, one with digests, load all their queues through `deaths` deaths.
pub(super) fn run(
    mut world: World,
    deaths: u32,
    mut point: impl FnMut(u32) -> Option<&'static str>,
) -> (World, Vec<Queue>) {
    let mut queues = world.associate(2, false);
    queues.extend(world.associate(1, true));
    let mut blocks = Blocks::new();
    let mut rounds = 0;
    while rounds < deaths {
        let armed = world.generation;
        let point = point(rounds);
        world.kill_somewhere(point);
        let mut turns = 0;
        while world.generation == armed || turns < 5 {
            turns += 1;
            patience(turns, point.unwrap_or("this turn"));
            let World { dice, .. } = &mut world;
            for queue in &mut queues {
                let depth = match (queue.qid, queue.params.max_r2t) {
                    (1.., 1) => 20,
                    (1.., _) => 2,
                    _ => 4,
                };
                while queue.flying.len() < depth && dice.u64(..3) > 0 {
                    queue.begin(dice, &mut blocks);
                }
                queue.pump(dice, &mut blocks);
            }
            world.step(Engine::turn);
        }
        rounds += 1;
    }
    arm_here("over.adopted", 0);
    let mut turns = 0;
    let open = |q: &Queue| q.flying.values().any(|f| !matches!(f.1, Wanted::Event));
    while queues.iter().any(open) {
        turns += 1;
        patience(turns, "the end of every command");
        for queue in &mut queues {
            queue.pump(&mut world.dice, &mut blocks);
        }
        world.step(Engine::turn);
    }
    assert!(queues.iter().all(|q| q.done > 0));
    (world, queues)
}

#[test]
fn hosts_do_not_notice_deaths_at_any_point() {
    let (world, _) = run(World::new(1), SERVING.len() as u32 * 2, |n| {
        Some(SERVING[n as usize % SERVING.len()])
    });
    assert_eq!(world.deaths.len(), SERVING.len());
}

#[test]
fn hosts_do_not_notice_deaths_between_turns() {
    run(World::new(2), 40, |_| None);
}
