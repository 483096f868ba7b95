//! A reactor's VMs in one thread, for a vhost-user client and its guest ([`super::guest`]).
//!
//! The test is client, driver (the virtio crate's model), daemon and reactor, so nothing depends on
//! time.

use crate::core::FrontendIndex;
use crate::core::staging::Staging;
use crate::core::{Core, ServedDevice};
use crate::frontend::vm::closer::Closer;
use crate::frontend::vm::file::VmFile;
use crate::frontend::vm::protocol::Closing;
use crate::frontend::vm::{NewVm, Vms};
use crate::frontend::{Frontend, vm_protocol};
use crate::lane::{Lane, LaneIndex};
use crate::upcall::Upcall;
use crate::volume::Volume;
use forebay_device::gate::TestGate;
use forebay_device::ring::{Ring, RingOptions};
use forebay_device::{Device, DeviceKind, DeviceSpec, OpenOptions};
use forebay_xlate::boundary::message::{
    DeviceConfig, DeviceFence, ExportConfig, ExportId, FrontendKind as Kind, VolumeConfig,
};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

const EXTENT: u64 = 64 << 10;
const V: VolumeId = VolumeId(9);
pub(super) struct Rig {
    pub core: Core,
    pub vms: Vms,
    pub gate: Arc<TestGate>,
    pub volume: Arc<Volume>,
    epoll: Arc<OwnedFd>,
    export: Arc<ExportConfig>,
    spec: String,
    _dir: tempfile::TempDir,
    next_socket: u64,
    /// The daemon's part: the client's socket, its VM file, its deposits.
    kept: Option<(u64, Arc<OwnedFd>, OwnedFd)>,
    deposits: BTreeMap<u32, Arc<OwnedFd>>,
    pub left: Vec<Closing>,
    pub refused: Vec<String>,
}

fn core_of(spec: &str) -> (Core, Arc<TestGate>, Arc<Region>) {
    let options = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    let spec: DeviceSpec = spec.parse().unwrap();
    let mut device = Device::open(&spec, &options).unwrap();
    let gate = TestGate::new();
    if device.info().kind == DeviceKind::File {
        device.attach_gate(gate.clone());
    }
    let config = DeviceConfig {
        device: DeviceIndex(0),
        uuid: [1; 16],
        spec: spec.to_string(),
        data_offset_bytes: 1 << 20,
        extent_bytes: EXTENT as u32,
        extents: 200,
        fence: DeviceFence::Locks,
    };
    let region = Arc::new(Region::anonymous(1).unwrap());
    let ring = Ring::new(&RingOptions::default()).unwrap();
    let mut core = Core::new(0, region.clone(), Staging::new().unwrap(), ring);
    core.set_device(ServedDevice {
        config: Arc::new(config),
        device: Arc::new(device),
    });
    (core, gate, region)
}

fn volume(extents: u64) -> VolumeConfig {
    VolumeConfig {
        volume: V,
        uuid: [2; 16],
        read_only: false,
        size_bytes: extents * EXTENT,
        block_bytes: 512,
        extent_bytes: EXTENT as u32,
        epoch: 0,
        image: None,
    }
}

fn epoll() -> Arc<OwnedFd> {
    Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap())
}

impl Rig {
    pub(super) fn new(queues: u16) -> Self {
        Self::on("file", queues)
    }

    /// On another kind of device, without a gate.
    pub(super) fn on(kind: &str, queues: u16) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device");
        let spec = match kind {
            "file" => {
                let file = std::fs::File::create(&path).unwrap();
                file.set_len(16 << 20).unwrap();
                format!("file:{}", path.display())
            }
            _ => format!("{kind}:{}?size=16M", path.display()),
        };
        let (core, gate, region) = core_of(&spec);
        let served = Arc::new(Volume::new(volume(100)).unwrap());
        let export = Arc::new(ExportConfig {
            export: ExportId(V.0),
            volume: V,
            nqn: "nqn.2026-01.io.forebay:t.v".into(),
            serial: "serial-number".into(),
            hosts: Default::default(),
            any_host: true,
            frontend: Kind::VhostUser {
                queues,
                pinned_memory: false,
            },
        });
        let epoll = epoll();
        let mut rig = Self {
            core,
            vms: Vms::new(
                FrontendIndex(1),
                epoll.clone(),
                Closer::start().unwrap(),
                vm_protocol,
            ),
            gate,
            volume: served,
            epoll,
            export,
            spec,
            _dir: dir,
            next_socket: 1,
            kept: None,
            deposits: BTreeMap::new(),
            left: Vec::new(),
            refused: Vec::new(),
        };
        rig.serve(&region);
        rig.core.fenced(DeviceIndex(0));
        rig
    }

    fn serve(&mut self, region: &Arc<Region>) {
        let (volume, export) = (self.volume.clone(), self.export.clone());
        self.core
            .set_lane(Lane::new(LaneIndex(3), volume, export, region.clone()));
        let word = Word::new(DeviceIndex(0), ExtentIndex(5), Rights::ReadWrite).unwrap();
        self.volume.may_write_to(DeviceIndex(0));
        self.volume.table.install(ExtentRange::new(0, 100), word);
    }

    /// The next clients use another export of the same volume.
    pub(super) fn export_again(&mut self) {
        let region = self.core.region.clone();
        self.export = Arc::new(ExportConfig {
            export: ExportId(V.0 + 1),
            ..ExportConfig::clone(&self.export)
        });
        let (volume, export) = (self.volume.clone(), self.export.clone());
        self.core
            .set_lane(Lane::new(LaneIndex(4), volume, export, region));
    }

    /// A client's socket; the other end is served.
    pub(super) fn accept(&mut self) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let file = VmFile::create(self.export.export, self.export.frontend.word()).unwrap();
        let socket = self.next_socket;
        self.next_socket += 1;
        let ours = Arc::new(ours);
        self.kept = Some((
            socket,
            ours.clone(),
            file.fd().try_clone_to_owned().unwrap(),
        ));
        self.deposits.clear();
        let new = NewVm {
            socket,
            fd: ours,
            export: self.export.clone(),
            file,
            inherited: None,
            blamed: None,
        };
        self.core.begin_turn();
        self.vms.adopt(&mut self.core, new);
        theirs
    }

    /// The engine dies; another takes over before the device's fence has passed.
    pub(super) fn die(&mut self, blamed: Option<u16>) {
        let (socket, fd, file) = self.kept.take().expect("a client");
        let (core, gate, region) = core_of(&self.spec);
        let epoll = epoll();
        let vms = Vms::new(
            FrontendIndex(1),
            epoll.clone(),
            Closer::start().unwrap(),
            vm_protocol,
        );
        // As after a kill: no destructor runs.
        std::mem::forget(std::mem::replace(&mut self.core, core));
        std::mem::replace(&mut self.vms, vms).die();
        (self.gate, self.epoll) = (gate, epoll);
        self.serve(&region);
        let again = file.try_clone().unwrap();
        let word = self.export.frontend.word();
        let new = NewVm {
            socket,
            fd: fd.clone(),
            export: self.export.clone(),
            file: VmFile::adopt(file, self.export.export, word).unwrap(),
            inherited: Some(self.deposits.clone()),
            blamed: blamed.map(Some),
        };
        self.kept = Some((socket, fd, again));
        self.core.begin_turn();
        self.vms.adopt(&mut self.core, new);
    }

    pub(super) fn grow(&mut self) {
        let grown = Arc::new(self.volume.resized(volume(120)).unwrap());
        self.volume = grown.clone();
        self.core.lanes.set_volume(&grown);
        self.vms.export_changed(&mut self.core, self.export.export);
    }

    /// Holds I/O at one of the volume's extents.
    pub(super) fn hold_extent(&self, number: u64) {
        let at = (1 << 20) + (5 + number) * EXTENT;
        self.gate.hold_some(at..at + EXTENT, &[]);
    }

    /// Enough turns for everything that can happen at once.
    pub(super) fn turns(&mut self) {
        for _ in 0..50 {
            self.turn();
        }
    }

    /// The dead engine's fence has passed.
    pub(super) fn fence(&mut self) {
        self.core.fenced(DeviceIndex(0));
    }

    /// One turn; true if anything was done.
    pub(super) fn turn(&mut self) -> bool {
        self.core.begin_turn();
        let mut any = self.core.reap();
        any |= self.vms.poll_all(&mut self.core);
        any |= self.core.end_turn();
        self.check();
        while let Some(upcall) = self.core.upcalls.pop_front() {
            any = true;
            match upcall {
                Upcall::Deposits(socket, deposits) => {
                    let last = deposits.last().expect("some").number;
                    for deposit in deposits {
                        self.deposits.insert(deposit.number, deposit.fd);
                    }
                    self.vms.deposited(socket, last, true);
                }
                Upcall::Withdrawn(_, numbers) => {
                    self.deposits.retain(|number, _| !numbers.contains(number));
                }
                Upcall::VmDetached(_, _, why) => self.left.push(why),
                Upcall::VmRefused(_, why) => self.refused.push(why),
                _ => {}
            }
        }
        any
    }

    /// Handles epoll events; true if there were any.
    fn check(&mut self) -> bool {
        let mut events = Vec::with_capacity(64);
        let none = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let spare = rustix::buffer::spare_capacity(&mut events);
        let _ = epoll::wait(&*self.epoll, spare, Some(&none));
        let keys: Vec<u64> = events.iter().map(|e| e.data.u64()).collect();
        self.vms.sockets_ready(&mut self.core, &keys);
        !keys.is_empty()
    }

    pub(super) fn until_asleep(&mut self) {
        for _ in crate::patience::patiently() {
            let busy = self.turn() || self.core.must_turn() || !self.vms.is_idle();
            if !busy && self.core.slab.busy() == 0 && self.vms.arm(&mut self.core) {
                return;
            }
        }
        panic!("it never slept");
    }

    /// Whether an event would wake the reactor now.
    pub(super) fn is_woken(&mut self) -> bool {
        self.check()
    }

    pub(super) fn until(&mut self, what: &str, mut so: impl FnMut(&mut Self) -> bool) {
        for _ in crate::patience::patiently() {
            if so(self) {
                return;
            }
            self.turn();
        }
        panic!("not in a minute: {what} ({:?})", self.left);
    }
}
