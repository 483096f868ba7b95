//! Tests of the controller, by behaviour.

mod ana;
mod connect;
mod declared;
mod discovery;
mod events;
mod features;
mod hostile;
mod identify;
mod keep_alive;
mod log_pages;
mod management;
mod notices;
mod property_abuse;
mod registers;

use super::*;
use crate::fabrics::{ConnectCommand, ConnectData, DiscoveryLogEntry};
use crate::io::NamespaceGeometry;
use crate::register::{self, Csts};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

pub(super) const MS: u64 = 1_000_000;

pub(super) fn host() -> Nqn {
    Nqn::parse("nqn.2014-08.org.nvmexpress:uuid:0c4f5a43-5f4a-4f6e-b0d0-2a6fe4a8b7f1").unwrap()
}

pub(super) fn subsystem() -> Nqn {
    Nqn::parse("nqn.2026-01.io.forebay:alice.db").unwrap()
}

pub(super) struct World {
    pub(super) block_count: Cell<u64>,
    pub(super) write_protected: Cell<bool>,
    pub(super) present: Cell<bool>,
    pub(super) generation: Cell<u64>,
    pub(super) entries: Cell<u64>,
    pub(super) ana: Cell<Ana>,
    pub(super) persistent: Cell<bool>,
    /// The rest is for management controllers: the addressed one, if any.
    pub(super) addressed: Cell<Option<u16>>,
    pub(super) block_bytes: Cell<u32>,
    /// Namespaces with their controllers.
    pub(super) volumes: RefCell<BTreeMap<u32, Vec<u16>>>,
    pub(super) controllers: RefCell<Vec<SubsystemController>>,
    pub(super) firmware: Cell<Option<Firmware>>,
}

impl World {
    pub(super) fn new() -> Self {
        Self {
            block_count: Cell::new(1 << 20),
            write_protected: Cell::new(false),
            present: Cell::new(true),
            generation: Cell::new(7),
            entries: Cell::new(3),
            ana: Cell::default(),
            persistent: Cell::new(false),
            addressed: Cell::new(None),
            block_bytes: Cell::new(512),
            volumes: RefCell::default(),
            controllers: RefCell::default(),
            firmware: Cell::new(None),
        }
    }
}

impl AdminEnv for World {
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        let there = match self.addressed.get() {
            Some(_) => self.volumes.borrow().contains_key(&nsid),
            None => nsid == 1 && self.present.get(),
        };
        there.then(|| NamespaceInfo {
            geometry: NamespaceGeometry {
                block_bytes: self.block_bytes.get(),
                block_count: self.block_count.get(),
                write_protected: self.write_protected.get(),
            },
            used_blocks: 384,
            extent_bytes: 64 << 10,
            nguid: [0xA1; 16],
            uuid: [0xB2; 16],
        })
    }
    fn health(&self) -> Health {
        Health {
            temperature_kelvin: 310,
            bytes_read: 512_001,
            host_writes: 9,
            ..Health::default()
        }
    }
    fn ana(&self) -> Ana {
        self.ana.get()
    }
    fn persistent_reservations(&self) -> bool {
        self.persistent.get()
    }
    fn discovery_generation(&self, _: &Nqn) -> u64 {
        self.generation.get()
    }
    fn discovery_count(&self, _: &Nqn) -> u64 {
        self.entries.get()
    }
    fn discovery_entry(&self, who: &Nqn, index: u64) -> Option<DiscoveryLogEntry> {
        assert_eq!(*who, host());
        let nqn = Nqn::parse(&format!("nqn.2026-01.io.forebay:alice.v{index}")).unwrap();
        let address = "127.0.0.1:4420".parse().unwrap();
        (index < self.entries.get())
            .then(|| DiscoveryLogEntry::tcp(DiscoveryLogEntry::SUBTYPE_NVM, &nqn, address, 1, 32))
    }
    fn controllers(&self) -> Vec<SubsystemController> {
        self.controllers.borrow().clone()
    }
    fn allocated_after(&self, nsid: u32) -> Vec<u32> {
        let volumes = self.volumes.borrow();
        let after = volumes.range(nsid + 1..);
        after.map(|(nsid, _)| *nsid).take(1024).collect()
    }
    fn attached_after(&self, nsid: u32) -> Vec<u32> {
        let volumes = self.volumes.borrow();
        let addressed = self.addressed.get().unwrap();
        let after = volumes.range(nsid + 1..);
        let attached = after.filter(|(_, controllers)| controllers.contains(&addressed));
        attached.map(|(nsid, _)| *nsid).take(1024).collect()
    }
    fn controllers_of(&self, nsid: u32) -> Vec<u16> {
        self.volumes
            .borrow()
            .get(&nsid)
            .cloned()
            .unwrap_or_default()
    }
    fn capacity(&self) -> (u128, u128) {
        (3 << 70, 5 << 40)
    }
    fn firmware(&self) -> Option<Firmware> {
        self.firmware.get()
    }
    fn vendor_logs(&self) -> &[u8] {
        self.addressed.get().map_or(&[], |_| &[0xC0, 0xC3])
    }
    fn vendor_commands(&self) -> &[u8] {
        self.addressed.get().map_or(&[], |_| &[0xC1, 0xC6])
    }
}

pub(super) struct Bench {
    pub(super) controller: Controller,
    pub(super) world: World,
    pub(super) now_ns: u64,
    pub(super) out: Vec<u8>,
}

pub(super) fn connect_with(kato_ms: u32) -> AdminConnect {
    let command = ConnectCommand::new(1, 0, 32, kato_ms);
    let data = ConnectData::new([5; 16], 0xFFFF, &subsystem(), &host());
    check_admin_connect(&command, &data, 4096).unwrap()
}

pub(super) fn config() -> ControllerConfig {
    ControllerConfig {
        mdts_bytes: 512 << 10,
        ..ControllerConfig::io(3, subsystem(), "abc123")
    }
}

impl Bench {
    /// Connected, not enabled.
    pub(super) fn connected(config: ControllerConfig) -> Self {
        let now_ns = 1_000 * MS;
        Self {
            controller: Controller::new(config, &connect_with(5_000), now_ns),
            world: World::new(),
            now_ns,
            out: vec![0xEE; 1 << 20],
        }
    }
    pub(super) fn ready() -> Self {
        let mut bench = Self::connected(config());
        assert_eq!(bench.set_cc(0x46_0001), Ok(Effect::Enabled));
        bench
    }
    pub(super) fn discovery() -> Self {
        let mut bench = Self::connected(ControllerConfig::discovery(4));
        assert_eq!(bench.set_cc(0x46_0001), Ok(Effect::Enabled));
        bench
    }
    /// A management controller. Controllers 0 to 2; namespace 1 is attached to 1 and 2, 70,000 to
    /// 1, and 80,000 to none. None is to 0, which is Administrative (Base 2.0, 3.1.2.2).
    pub(super) fn management(cntlid: u16) -> Self {
        let config = ControllerConfig::management(cntlid, subsystem(), "node7");
        let mut bench = Self::connected(config);
        bench.controller = Controller::management(config);
        bench.world.addressed.set(Some(cntlid));
        let volumes = [(1, vec![1, 2]), (70_000, vec![1]), (80_000, vec![])];
        bench.world.volumes.borrow_mut().extend(volumes);
        let controllers = (0..3).map(|cntlid| SubsystemController {
            cntlid,
            online: cntlid == 1,
        });
        bench.world.controllers.borrow_mut().extend(controllers);
        bench
    }
    pub(super) fn set_cc(&mut self, value: u32) -> Result<Effect, Status> {
        let now_ns = self.now_ns;
        self.controller
            .property_set(register::CC, false, value.into(), now_ns)
    }
    pub(super) fn csts(&self) -> Csts {
        Csts::from_bits(self.controller.property_get(register::CSTS, false).unwrap() as u32)
    }
    pub(super) fn run_with(&mut self, sqe: Sqe, data: &[u8]) -> AdminOutcome {
        self.controller
            .admin(&sqe, data, &mut self.out, &self.world, self.now_ns)
    }
    pub(super) fn run(&mut self, sqe: Sqe) -> AdminOutcome {
        self.run_with(sqe, &[])
    }
    pub(super) fn ok(&mut self, sqe: Sqe) -> u64 {
        match self.run(sqe) {
            AdminOutcome::Complete { status, result, .. } => {
                assert_eq!(status, Status::SUCCESS, "{sqe:?}");
                result
            }
            other => panic!("{other:?}: {sqe:?}"),
        }
    }
    pub(super) fn data(&mut self, sqe: Sqe) -> Vec<u8> {
        match self.run(sqe) {
            AdminOutcome::Complete {
                status, data_bytes, ..
            } => {
                assert_eq!(status, Status::SUCCESS, "{sqe:?}");
                assert_eq!(
                    self.controller.transfer(&sqe),
                    Ok(Transfer::ToHost(data_bytes))
                );
                self.out[..data_bytes as usize].to_vec()
            }
            other => panic!("{other:?}: {sqe:?}"),
        }
    }
    /// The status of a failure with Do Not Retry.
    pub(super) fn fails(&mut self, sqe: Sqe) -> Status {
        self.fails_with(sqe, &[])
    }
    pub(super) fn fails_with(&mut self, sqe: Sqe, data: &[u8]) -> Status {
        match self.run_with(sqe, data) {
            AdminOutcome::Complete {
                status,
                data_bytes,
                effect,
                ..
            } => {
                assert!(status.dnr() && !status.is_success(), "{status}: {sqe:?}");
                assert_eq!((data_bytes, effect), (0, Effect::None));
                status.code()
            }
            other => panic!("{other:?}: {sqe:?}"),
        }
    }
}

pub(super) fn identify(cns: u8, nsid: u32) -> Sqe {
    Sqe::new(admin::IDENTIFY, 1)
        .with_nsid(nsid)
        .with_cdw(10, cns.into())
}

pub(super) fn get_log(lid: u8, offset: u64, bytes: u32) -> Sqe {
    let numd = bytes / 4 - 1;
    Sqe::new(admin::GET_LOG_PAGE, 1)
        .with_nsid(crate::NSID_ALL)
        .with_cdw(10, u32::from(lid) | numd << 16)
        .with_cdw(11, numd >> 16)
        .with_cdw64(12, offset)
}

pub(super) fn retained(sqe: Sqe) -> Sqe {
    sqe.with_cdw(10, sqe.cdw(10) | 1 << 15)
}

pub(super) fn get_feature(fid: u8, cdw11: u32) -> Sqe {
    Sqe::new(admin::GET_FEATURES, 1)
        .with_cdw(10, fid.into())
        .with_cdw(11, cdw11)
}

pub(super) fn set_feature(fid: u8, cdw11: u32) -> Sqe {
    Sqe::new(admin::SET_FEATURES, 1)
        .with_cdw(10, fid.into())
        .with_cdw(11, cdw11)
}

pub(super) fn event_request(cid: u16) -> Sqe {
    Sqe::new(admin::ASYNC_EVENT_REQUEST, cid)
}
