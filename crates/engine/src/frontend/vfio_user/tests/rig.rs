//! A core and its VMs; the test is their reactor, daemon and drivers.
//!
//! It uses socket pairs and controls the turns. A dead engine is simply not called again; its
//! successor gets the daemon's descriptors.

use super::driver::Driver;
use crate::core::FrontendIndex;
use crate::core::staging::Staging;
use crate::core::{Core, ServedDevice};
use crate::frontend::vm::closer::Closer;
use crate::frontend::vm::file::VmFile;
use crate::frontend::vm::{NewVm, Vms};
use crate::frontend::{Frontend, vm_protocol};
use crate::lane::{Lane, LaneIndex};
use crate::memory::Memory;
use crate::patience::patiently;
use crate::upcall::Upcall;
use crate::volume::Volume;
use forebay_device::gate::TestGate;
use forebay_device::ring::{Ring, RingOptions};
use forebay_device::{Device, OpenOptions};
use forebay_qos::budget::Budget;
use forebay_qos::cost::Routes;
use forebay_xlate::boundary::message::{
    DeviceConfig, DeviceFence, ExportConfig, ExportId, FrontendKind as Kind, VolumeConfig,
};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::kill::{Killed, arm_here};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub(super) const EXTENT: u64 = 64 << 10;
pub(super) const EXTENTS: u64 = 16;
pub(super) const BLOCK: u64 = 4096;

/// The daemon's part of a client.
#[derive(Default)]
struct Held {
    sockets: BTreeMap<u64, (Arc<OwnedFd>, usize, OwnedFd)>,
    deposits: BTreeMap<u64, BTreeMap<u32, Arc<OwnedFd>>>,
}

struct Engine {
    core: Core,
    vms: Vms,
    epoll: Arc<OwnedFd>,
}

pub(super) struct Rig {
    engine: Option<Engine>,
    pub region: Arc<Region>,
    pub volumes: Vec<Arc<Volume>>,
    exports: Vec<Arc<ExportConfig>>,
    pub gate: Arc<TestGate>,
    device: Arc<Device>,
    device_config: Arc<DeviceConfig>,
    /// Cores that died: their rings stay open, and completions are not read.
    dead: Vec<Core>,
    held: Held,
    next_socket: u64,
    pub left: Vec<&'static str>,
    pub refused: Vec<String>,
    /// Time passes only when the test says so.
    now_ns: u64,
    _dir: tempfile::TempDir,
}

impl Rig {
    pub(super) fn new(kind: &str, vms: usize, mapped_doorbells: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let size = (vms as u64 * EXTENTS * EXTENT) + (2 << 20);
        let path = dir.path().join("device");
        let spec = match kind {
            "file" => {
                std::fs::File::create(&path).unwrap().set_len(size).unwrap();
                format!("file:{}", path.display())
            }
            _ => format!("{kind}:{}?size={size}", path.display()),
        };
        let spec = spec.parse().unwrap();
        let options = OpenOptions {
            create_missing: true,
            ..OpenOptions::default()
        };
        let mut device = Device::open(&spec, &options).unwrap();
        let gate = TestGate::new();
        if kind == "file" {
            device.attach_gate(gate.clone());
        }
        let device_config = Arc::new(DeviceConfig {
            device: DeviceIndex(0),
            uuid: [1; 16],
            spec: spec.to_string(),
            data_offset_bytes: 1 << 20,
            extent_bytes: EXTENT as u32,
            extents: vms as u64 * EXTENTS,
            fence: DeviceFence::Locks,
        });
        let mut volumes = Vec::new();
        let mut exports = Vec::new();
        for n in 0..vms as u64 {
            let volume = Volume::new(VolumeConfig {
                volume: VolumeId(n + 9),
                uuid: [n as u8 + 1; 16],
                read_only: false,
                size_bytes: EXTENTS * EXTENT,
                block_bytes: BLOCK as u32,
                extent_bytes: EXTENT as u32,
                epoch: 0,
                image: None,
            });
            let volume = Arc::new(volume.unwrap());
            let first = ExtentIndex(n * EXTENTS);
            let word = Word::new(DeviceIndex(0), first, Rights::ReadWrite).unwrap();
            volume.may_write_to(DeviceIndex(0));
            volume.table.install(ExtentRange::new(0, EXTENTS), word);
            exports.push(Arc::new(ExportConfig {
                export: ExportId(n + 1),
                volume: volume.id(),
                nqn: format!("nqn.2026-01.io.forebay:t.v{n}"),
                serial: "s".into(),
                hosts: Default::default(),
                any_host: false,
                frontend: Kind::NvmePcie {
                    mapped_doorbells,
                    pinned_memory: false,
                },
            }));
            volumes.push(volume);
        }
        let mut rig = Self {
            engine: None,
            region: Arc::new(Region::anonymous(1).unwrap()),
            volumes,
            exports,
            gate,
            device: Arc::new(device),
            device_config,
            dead: Vec::new(),
            held: Held::default(),
            next_socket: 1,
            left: Vec::new(),
            refused: Vec::new(),
            now_ns: 1_000_000_000_000,
            _dir: dir,
        };
        rig.begin_engine();
        rig.fence();
        rig
    }

    fn begin_engine(&mut self) {
        let of_reactor = Memory::create().unwrap().reactor(0).unwrap();
        let ring = Ring::new(&RingOptions::default()).unwrap();
        let staging = Staging::over(of_reactor.staging);
        let mut core = Core::new(0, self.region.clone(), staging, ring);
        core.set_device(ServedDevice {
            config: self.device_config.clone(),
            device: self.device.clone(),
        });
        for (n, (volume, export)) in self.volumes.iter().zip(&self.exports).enumerate() {
            core.set_lane(Lane::new(
                LaneIndex(n as u32 + 3),
                volume.clone(),
                export.clone(),
                self.region.clone(),
            ));
        }
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
        let vms = Vms::new(
            FrontendIndex(1),
            epoll.clone(),
            Closer::start().unwrap(),
            vm_protocol,
        );
        self.engine = Some(Engine { core, vms, epoll });
    }

    /// No earlier engine's commands are at the device.
    pub(super) fn fence(&mut self) {
        self.engine().core.fenced(DeviceIndex(0));
    }

    fn engine(&mut self) -> &mut Engine {
        self.engine.as_mut().expect("an engine lives")
    }

    pub(super) fn lane_record(&self, n: usize) -> &forebay_xlate::boundary::region::LaneRecord {
        &self.region.lanes()[n + 3]
    }

    pub(super) fn connect(&mut self, n: usize) -> Driver {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let pair =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let socket = self.next_socket;
        self.next_socket += 1;
        let export = self.exports[n].clone();
        let file = VmFile::create(export.export, export.frontend.word()).unwrap();
        let ours = Arc::new(pair.0);
        let file_fd = file.fd().try_clone_to_owned().unwrap();
        self.held.sockets.insert(socket, (ours.clone(), n, file_fd));
        let engine = self.engine();
        engine.vms.adopt(
            &mut engine.core,
            NewVm {
                socket,
                fd: ours,
                export,
                file,
                inherited: None,
                blamed: None,
            },
        );
        Driver::new(pair.1)
    }

    /// One turn; false if the engine died in it.
    pub(super) fn turn(&mut self) -> bool {
        let Some(mut engine) = self.engine.take() else {
            return false;
        };
        let now_ns = self.now_ns;
        let lived = catch_unwind(AssertUnwindSafe(|| {
            let Engine { core, vms, epoll } = &mut engine;
            match now_ns {
                0 => core.clock.let_clock_run(),
                now_ns => core.clock.set_clock_ns(now_ns),
            }
            core.begin_turn();
            let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 64];
            let none = rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let (events, _) = epoll::wait(&*epoll, &mut events[..], Some(&none)).unwrap();
            let keys: Vec<u64> = events.iter().map(|e| e.data.u64()).collect();
            vms.sockets_ready(core, &keys);
            core.reap();
            vms.poll_all(core);
            core.end_turn();
            core.tick();
            vms.tick(core);
        }));
        if let Err(panic) = lived {
            if panic.downcast_ref::<Killed>().is_none() {
                resume_unwind(panic);
            }
            self.bury(engine);
            return false;
        }
        while let Some(upcall) = engine.core.upcalls.pop_front() {
            match upcall {
                Upcall::Deposits(socket, deposits) => {
                    let last = deposits.last().unwrap().number;
                    let held = self.held.deposits.entry(socket).or_default();
                    held.extend(deposits.into_iter().map(|d| (d.number, d.fd)));
                    engine.vms.deposited(socket, last, true);
                }
                Upcall::Withdrawn(socket, numbers) => {
                    let held = self.held.deposits.entry(socket).or_default();
                    held.retain(|number, _| !numbers.contains(number));
                }
                Upcall::VmDetached(socket, _, why) => {
                    self.held.sockets.remove(&socket);
                    self.held.deposits.remove(&socket);
                    self.left.push(why.0);
                }
                Upcall::VmRefused(_, why) => self.refused.push(why),
                _ => {}
            }
        }
        self.engine = Some(engine);
        true
    }

    /// A turn in which only commands come.
    pub(super) fn bare_turn(&mut self) {
        let Engine { core, vms, .. } = self.engine();
        core.begin_turn();
        core.reap();
        vms.poll_all(core);
        core.end_turn();
    }

    /// Ends a dead engine; its commands in flight end unread.
    fn bury(&mut self, engine: Engine) {
        let Engine { core, vms, .. } = engine;
        vms.die();
        self.dead.push(core);
    }

    pub(super) fn kill(&mut self) {
        let engine = self.engine.take().expect("an engine lives");
        self.bury(engine);
    }

    /// The engine dies at the `count`th passing of a point; 0: never.
    pub(super) fn arm(&self, point: &str, count: u32) {
        arm_here(point, count);
    }

    pub(super) fn is_dead(&self) -> bool {
        self.engine.is_none()
    }

    /// A successor takes over; returns whether it lives.
    pub(super) fn succeed(&mut self, blamed: Option<u16>) -> bool {
        assert!(self.is_dead());
        self.begin_engine();
        let mut engine = self.engine.take().unwrap();
        let mut taken = Vec::new();
        for (socket, (fd, n, file)) in &self.held.sockets {
            let export = self.exports[*n].clone();
            let file = file.try_clone().unwrap();
            let kind = export.frontend.word();
            let file = VmFile::adopt(file, export.export, kind).unwrap();
            let deposits = self.held.deposits.get(socket);
            taken.push(NewVm {
                socket: *socket,
                fd: fd.clone(),
                export,
                file,
                inherited: Some(deposits.cloned().unwrap_or_default()),
                blamed: blamed.map(Some),
            });
        }
        let lived = catch_unwind(AssertUnwindSafe(|| {
            for new in taken {
                engine.vms.adopt(&mut engine.core, new);
            }
        }));
        if let Err(panic) = lived {
            if panic.downcast_ref::<Killed>().is_none() {
                resume_unwind(panic);
            }
            self.bury(engine);
            return false;
        }
        self.engine = Some(engine);
        true
    }

    /// From now on the real clock runs.
    pub(super) fn let_clock_run(&mut self) {
        self.now_ns = 0;
    }

    pub(super) fn pass_time(&mut self, ns: u64) {
        self.now_ns += ns;
    }

    /// Limits each tenant to `operations` per window of 1 ms.
    pub(super) fn admit(&mut self, operations: u64) {
        let now_ns = self.now_ns;
        let core = &mut self.engine().core;
        core.clock.set_clock_ns(now_ns);
        core.admit_all_by(&Budget::fixed(operations * 1000));
    }

    /// Makes each VM a tenant of its own with this budget.
    pub(super) fn admit_each(&mut self, budgets: &[Budget]) {
        let now_ns = self.now_ns;
        let core = &mut self.engine().core;
        core.clock.set_clock_ns(now_ns);
        core.admit_each_by(budgets);
    }

    /// The frontends for which a tenant is charged.
    pub(super) fn routes_of(&mut self, tenant: usize) -> Option<Routes> {
        self.engine().core.routes_of(tenant)
    }

    /// Gives ample budgets.
    pub(super) fn admit_plenty(&mut self, round: u64) {
        self.engine().core.admit_plenty(round);
    }

    /// A VM's commands in flight, of these throttled, and ever throttled.
    pub(super) fn throttled(&self, n: usize) -> [u64; 3] {
        let record = self.lane_record(n);
        [&record.in_flight, &record.throttled, &record.throttled_ops].map(|cell| cell.load(Relaxed))
    }

    /// Whether the reactor would sleep until a window ends.
    pub(super) fn may_sleep_for_a_window(&mut self) -> bool {
        let core = &self.engine().core;
        let waits = !core.must_turn() && core.qos.window_ends_ns().is_some();
        waits && self.may_sleep()
    }

    pub(super) fn may_sleep(&mut self) -> bool {
        let engine = self.engine();
        engine.vms.is_idle() && engine.vms.arm(&mut engine.core)
    }

    #[track_caller]
    pub(super) fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        for () in patiently() {
            if is_so(self) {
                return;
            }
            assert!(self.turn(), "the engine died before {what}");
        }
        panic!("{what} did not come");
    }

    /// Enough turns for everything that can happen at once.
    pub(super) fn turns(&mut self) {
        for _ in 0..64 {
            self.turn();
        }
    }

    pub(super) fn grow(&mut self, n: usize) {
        let mut config = self.volumes[n].config.clone();
        config.size_bytes += EXTENT;
        let volume = Arc::new(self.volumes[n].resized(config).unwrap());
        self.volumes[n] = volume.clone();
        let export = self.exports[n].export;
        let engine = self.engine();
        engine.core.lanes.set_volume(&volume);
        engine.vms.export_changed(&mut engine.core, export);
    }

    /// Overwrites a client's area of the VM file with noise.
    pub(super) fn damage(&mut self, of: usize) {
        let (_, (_, _, file)) = (self.held.sockets.iter())
            .find(|(_, (_, n, _))| *n == of)
            .expect("a client");
        let area_at = crate::frontend::vm::file::FILE_BYTES - crate::frontend::vm::file::AREA_BYTES;
        let noise: Vec<u8> = (0..200_000u32)
            .map(|n| (n.wrapping_mul(2654435761) >> 13) as u8)
            .collect();
        // The version stays.
        rustix::io::pwrite(file, &noise, area_at as u64 + 8).unwrap();
    }

    /// Makes an export use another's volume.
    pub(super) fn share(&mut self, n: usize, with: usize) {
        let volume = self.volumes[with].clone();
        let export = Arc::new(ExportConfig {
            volume: volume.id(),
            nqn: self.exports[with].nqn.clone(),
            ..(*self.exports[n]).clone()
        });
        self.volumes[n] = volume.clone();
        self.exports[n] = export.clone();
        let lane = Lane::new(LaneIndex(n as u32 + 3), volume, export, self.region.clone());
        self.engine().core.set_lane(lane);
    }

    pub(super) fn remove(&mut self, n: usize) {
        let export = self.exports[n].export;
        let engine = self.engine();
        engine.vms.export_removed(&mut engine.core, export);
    }
}
