//! A function with valid and invalid drivers.

mod any;
mod data;
mod identify;

use super::*;
use crate::controller::{AdminEnv, ControllerConfig, NamespaceInfo, SubsystemController};
use crate::io::NamespaceGeometry;
use crate::opcode::admin;
use crate::{Cqe, Nqn, SglDescriptor, Sqe, Status};
use std::cell::RefCell;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromZeros, IntoBytes};

pub(crate) struct Flat(RefCell<Vec<u8>>);

impl Flat {
    fn new(bytes: usize) -> Self {
        Self(RefCell::new(vec![0; bytes]))
    }
    pub(crate) fn put(&self, address: u64, bytes: &[u8]) {
        assert!(self.write(address, bytes));
    }
    pub(crate) fn get(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut into = vec![0; bytes];
        assert!(self.read(address, &mut into));
        into
    }
}

impl Memory for Flat {
    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let memory = self.0.borrow();
        let from = usize::try_from(address).ok();
        let from = from.and_then(|at| memory.get(at..at.checked_add(into.len())?));
        from.map(|from| into.copy_from_slice(from)).is_some()
    }
    fn write(&self, address: u64, from: &[u8]) -> bool {
        let mut memory = self.0.borrow_mut();
        let to = usize::try_from(address).ok();
        let to = to.and_then(|at| memory.get_mut(at..at.checked_add(from.len())?));
        to.map(|to| to.copy_from_slice(from)).is_some()
    }
    fn holds(&self, address: u64, bytes: u64, _write: bool) -> bool {
        let end = address.checked_add(bytes);
        end.is_some_and(|end| end <= self.0.borrow().len() as u64)
    }
}

pub(crate) struct World {
    pub(crate) controllers: Vec<SubsystemController>,
}

impl Default for World {
    fn default() -> Self {
        let alone = SubsystemController {
            cntlid: 3,
            online: true,
        };
        Self {
            controllers: vec![alone],
        }
    }
}

impl AdminEnv for World {
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        (nsid == 1).then_some(NamespaceInfo {
            geometry: NamespaceGeometry {
                block_bytes: 512,
                block_count: 1 << 20,
                write_protected: false,
            },
            used_blocks: 8,
            extent_bytes: 64 << 10,
            nguid: [1; 16],
            uuid: [2; 16],
        })
    }
    fn controllers(&self) -> Vec<SubsystemController> {
        self.controllers.clone()
    }
}

fn config() -> ControllerConfig {
    let subnqn = Nqn::parse("nqn.2026-01.io.forebay:alice.db").unwrap();
    ControllerConfig::pcie(3, subnqn, "abc123")
}

const ASQ: u64 = 0x1_0000;
const ACQ: u64 = 0x2_0000;
pub(crate) const DATA: u64 = 0x10_0000;

pub(crate) struct Bench {
    function: Function,
    pub(crate) memory: Flat,
    pub(crate) world: World,
    scratch: Vec<u8>,
}

impl Bench {
    fn new() -> Self {
        Self {
            function: Function::new(config()),
            memory: Flat::new(4 << 20),
            world: World::default(),
            scratch: vec![0; 512 << 10],
        }
    }

    pub(crate) fn ready() -> Self {
        let mut bench = Self::new();
        assert_eq!(bench.enable(ASQ, ACQ, 31, 31), RegisterEffect::Enabled);
        assert!(bench.function.ready());
        bench
    }

    fn enable(&mut self, asq: u64, acq: u64, asqs: u32, acqs: u32) -> RegisterEffect {
        self.write(0x24, &(asqs | acqs << 16).to_le_bytes());
        self.write(0x28, &asq.to_le_bytes());
        self.write(0x30, &(acq as u32).to_le_bytes());
        self.write(0x34, &((acq >> 32) as u32).to_le_bytes());
        self.write(0x14, &0x0046_0001u32.to_le_bytes())
    }

    fn write(&mut self, at: u64, from: &[u8]) -> RegisterEffect {
        self.function.write_registers(at, from, &self.memory, 1)
    }

    fn register(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.function.read_registers(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(crate) fn admin(&mut self, sqe: &Sqe) -> Option<Status> {
        let run = self
            .function
            .run_admin(sqe, &self.memory, &self.world, &mut self.scratch, 1);
        // Continue each time from the saved state.
        let state = *self.function.state();
        let restored = Function::restore(config(), &state).expect("a state that it reached");
        self.function = restored;
        if let Some(status) = run.status {
            assert_eq!(self.last().status(), status);
            assert_eq!(self.last().cid(), sqe.cid());
        }
        run.status
    }

    fn last(&self) -> Cqe {
        let number = self.function.admin_completed() - 1;
        self.function.state.completion(number)
    }

    fn create_cq(&mut self, qid: u32, entries: u32) -> Option<Status> {
        self.admin(&create(admin::CREATE_IO_CQ, qid, entries, 3 | qid << 16))
    }

    fn create_sq(&mut self, qid: u32, entries: u32, cqid: u32) -> Option<Status> {
        self.admin(&create(admin::CREATE_IO_SQ, qid, entries, 1 | cqid << 16))
    }
}

pub(crate) fn with_prps(mut sqe: Sqe, prp1: u64, prp2: u64) -> Sqe {
    sqe.dptr[..8].copy_from_slice(&prp1.to_le_bytes());
    sqe.dptr[8..].copy_from_slice(&prp2.to_le_bytes());
    sqe
}

fn create(opcode: u8, qid: u32, entries: u32, cdw11: u32) -> Sqe {
    let sqe = Sqe::new(opcode, 9)
        .with_cdw(10, qid | (entries - 1) << 16)
        .with_cdw(11, cdw11);
    with_prps(sqe, 0x4_0000, 0)
}

fn identify(cns: u32) -> Sqe {
    with_prps(Sqe::new(admin::IDENTIFY, 5).with_cdw(10, cns), DATA, 0)
}

fn done(status: Status) -> Option<Status> {
    Some(status.with_dnr())
}

const OK: Option<Status> = Some(Status::SUCCESS);

#[test]
fn registers_are_what_the_specification_says() {
    let mut bench = Bench::new();
    let mut cap = [0; 8];
    bench.function.read_registers(0, &mut cap);
    let cap = u64::from_le_bytes(cap);
    assert_eq!(cap as u16, 1023, "MQES");
    assert_eq!(cap >> 16 & 1, 1, "CQR");
    assert_eq!((cap >> 32 & 0xF, cap >> 36 & 1, cap >> 37 & 1), (0, 0, 1));
    assert_eq!((bench.register(8), bench.register(0x1C)), (0x2_0000, 0));
    assert_eq!(bench.enable(ASQ, ACQ, 31, 15), RegisterEffect::Enabled);
    assert_eq!(
        (bench.register(0x1C), bench.register(0x24)),
        (1, 31 | 15 << 16)
    );
    assert_eq!(
        (bench.register(0x28), bench.register(0x30)),
        (ASQ as u32, ACQ as u32)
    );
    bench.write(0x28, &0u64.to_le_bytes());
    bench.write(0x24, &0u32.to_le_bytes());
    assert_eq!(
        (bench.register(0x28), bench.register(0x24)),
        (ASQ as u32, 31 | 15 << 16)
    );
    for (at, len) in [
        (0x14, 1),
        (0x14, 2),
        (0x15, 4),
        (0x12, 8),
        (0x40, 4),
        (0x3FFC, 4),
        (0x3FF8, 8),
    ] {
        assert_eq!(bench.write(at, &vec![0; len]), RegisterEffect::None);
    }
    assert_eq!(
        (
            bench.register(0x20),
            bench.register(0x38),
            bench.register(0xFFC)
        ),
        (0, 0, 0)
    );
    assert_eq!(
        bench.write(0x14, &0x0046_0000u32.to_le_bytes()),
        RegisterEffect::Reset
    );
    assert_eq!(bench.register(0x1C), 1, "not before the owner says so");
    bench.function.quiesced();
    assert_eq!(bench.register(0x1C), 0);
    assert_eq!(bench.function.state().sqs[0].entries, 0);
    assert_eq!(
        bench.register(0x28),
        ASQ as u32,
        "a controller reset leaves these"
    );
    // Function reset with commands in flight.
    bench.function.write_config(0x04, &[6, 0]);
    assert!(bench.function.is_bus_master());
    bench.enable(ASQ, ACQ, 31, 31);
    bench.function.begin_reset();
    assert!(!bench.function.is_bus_master() && !bench.function.ready());
    assert_eq!(bench.function.unfinished(), RegisterEffect::Reset);
    assert_eq!(bench.register(0x1C), 1, "not before they have ended");
    let enabling = bench.write(0x14, &0x0046_0001u32.to_le_bytes());
    assert_eq!(
        (enabling, bench.function.ready()),
        (RegisterEffect::None, false)
    );
    bench.function.quiesced();
    assert_eq!(bench.function.unfinished(), RegisterEffect::None);
    assert_eq!(bench.register(0x1C), 0);
    assert_eq!(bench.register(0x28), 0);
}

#[test]
fn a_shutdown_is_complete_when_the_owner_says_so() {
    let mut bench = Bench::ready();
    let normal = 0x0046_4001u32.to_le_bytes();
    assert_eq!(bench.write(0x14, &normal), RegisterEffect::Shutdown);
    assert_eq!(bench.register(0x1C) >> 2 & 3, 1);
    assert_eq!(bench.write(0x14, &normal), RegisterEffect::None);
    bench.function.quiesced();
    assert_eq!(bench.register(0x1C) >> 2 & 3, 2);
    assert!(!bench.function.ready());
}

#[test]
fn an_admin_queue_that_cannot_be_is_fatal() {
    for (asq, acq, asqs, acqs) in [
        (ASQ, ACQ, 0, 31),
        (ASQ, ACQ, 31, 0),
        (4 << 20, ACQ, 31, 31),
        (u64::MAX - 0xFFF, ACQ, 31, 31),
        (ASQ, (4 << 20) - 4096, 31, 4095),
    ] {
        let mut bench = Bench::new();
        assert_eq!(bench.enable(asq, acq, asqs, acqs), RegisterEffect::Enabled);
        assert_eq!(bench.register(0x1C) & 2, 2, "{asq:x} {acq:x} {asqs} {acqs}");
        assert!(!bench.function.ready());
        let off = bench.write(0x14, &0u32.to_le_bytes());
        assert_eq!(off, RegisterEffect::Reset);
        bench.function.quiesced();
        assert_eq!(bench.enable(ASQ, ACQ, 31, 31), RegisterEffect::Enabled);
        assert!(bench.function.ready());
    }
    let mut bench = Bench::new();
    // Invalid page size.
    bench.write(0x14, &0x0046_0081u32.to_le_bytes());
    assert_eq!(bench.register(0x1C) & 2, 2);
}

#[test]
fn entry_sizes_may_be_chosen_after_identify() {
    let mut bench = Bench::ready();
    bench.write(0x14, &0u32.to_le_bytes());
    bench.function.quiesced();
    bench.enable(ASQ, ACQ, 31, 31);
    bench.write(0x14, &0u32.to_le_bytes());
    bench.function.quiesced();
    // The specification enables before the host knows the sizes.
    assert_eq!(
        bench.write(0x14, &1u32.to_le_bytes()),
        RegisterEffect::Enabled
    );
    assert!(bench.function.ready());
    assert_eq!(bench.admin(&identify(1)), OK);
    assert_eq!(bench.create_cq(1, 64), done(Status::INVALID_QUEUE_SIZE));
    let none = bench.write(0x14, &0x0046_0001u32.to_le_bytes());
    assert_eq!(none, RegisterEffect::None);
    assert_eq!(bench.register(0x14), 0x0046_0001);
    assert_eq!(bench.create_cq(1, 64), OK);
    assert_eq!(bench.create_sq(1, 64, 1), OK);
    bench.write(0x14, &0x0046_3FF1u32.to_le_bytes());
    assert_eq!(bench.register(0x14), 0x0046_0001);
}

#[test]
fn queues_are_created_and_deleted_by_the_rules() {
    let mut bench = Bench::ready();
    let invalid_qid = done(Status::INVALID_QUEUE_IDENTIFIER);
    assert_eq!(
        bench.create_sq(1, 64, 1),
        done(Status::COMPLETION_QUEUE_INVALID)
    );
    for cqid in [0, 65, 500] {
        assert_eq!(bench.create_sq(1, 64, cqid), invalid_qid);
    }
    assert_eq!(bench.create_cq(0, 64), invalid_qid);
    assert_eq!(bench.create_cq(65, 64), invalid_qid);
    assert_eq!(bench.create_cq(1, 1025), done(Status::INVALID_QUEUE_SIZE));
    assert_eq!(bench.create_cq(1, 1), done(Status::INVALID_QUEUE_SIZE));
    let vector = create(admin::CREATE_IO_CQ, 1, 64, 3 | 65 << 16);
    assert_eq!(bench.admin(&vector), done(Status::INVALID_INTERRUPT_VECTOR));
    let scattered = create(admin::CREATE_IO_CQ, 1, 64, 2);
    assert_eq!(bench.admin(&scattered), done(Status::INVALID_FIELD));
    for base in [0, 0x4_0008, 0x4_0800] {
        let sqe = with_prps(create(admin::CREATE_IO_CQ, 1, 64, 3), base, 0);
        assert_eq!(bench.admin(&sqe), done(Status::PRP_OFFSET_INVALID));
    }
    for base in [4 << 20, (4 << 20) - 4096, u64::MAX - 4095] {
        let sqe = with_prps(create(admin::CREATE_IO_CQ, 1, 1024, 3), base, 0);
        assert_eq!(bench.admin(&sqe), done(Status::INVALID_FIELD));
    }
    for qid in 1..=64 {
        assert_eq!(bench.create_cq(qid, 1024), OK);
        assert_eq!(bench.create_sq(qid, 1024, qid), OK);
    }
    assert_eq!(
        (bench.create_cq(1, 64), bench.create_sq(1, 64, 1)),
        (invalid_qid, invalid_qid)
    );
    let delete = |opcode, qid| Sqe::new(opcode, 1).with_cdw(10, qid);
    let (sq, cq) = (admin::DELETE_IO_SQ, admin::DELETE_IO_CQ);
    assert_eq!(
        bench.admin(&delete(cq, 1)),
        done(Status::INVALID_QUEUE_DELETION)
    );
    assert_eq!(bench.function.drains(&delete(sq, 1)), Some(1));
    assert_eq!(bench.function.drains(&delete(sq, 0)), None);
    let number = Sqe::new(admin::SET_FEATURES, 1).with_cdw(10, 7);
    assert_eq!(bench.admin(&number), done(Status::COMMAND_SEQUENCE_ERROR));
    for qid in 1..=64 {
        assert_eq!(bench.admin(&delete(sq, qid)), OK);
        assert_eq!(bench.admin(&delete(sq, qid)), invalid_qid);
        assert_eq!(bench.admin(&delete(cq, qid)), OK);
        assert_eq!(bench.admin(&delete(cq, qid)), invalid_qid);
    }
    for qid in [0, 65, 0xFFFF] {
        assert_eq!(bench.admin(&delete(sq, qid)), invalid_qid);
        assert_eq!(bench.admin(&delete(cq, qid)), invalid_qid);
    }
    // Submission queues may share a completion queue: the larger number counts.
    assert_eq!(bench.admin(&number.with_cdw(11, 6 | 1 << 16)), OK);
    assert_eq!(bench.create_cq(2, 64), OK);
    assert_eq!(bench.create_sq(7, 64, 2), OK);
    assert_eq!(bench.create_sq(8, 64, 2), invalid_qid);
    assert_eq!(bench.create_sq(6, 64, 8), invalid_qid);
    assert_eq!(bench.admin(&delete(sq, 7)), OK);
    assert_eq!(bench.admin(&delete(cq, 2)), OK);
    assert_eq!(bench.admin(&number.with_cdw(11, 3 | 3 << 16)), OK);
    assert_eq!(bench.create_cq(5, 64), invalid_qid);
    assert_eq!(bench.create_cq(4, 64), OK);
}

#[test]
fn events_go_through_the_outbox_once() {
    let mut bench = Bench::ready();
    for _ in 0..OUTBOX {
        assert_eq!(bench.admin(&identify(1)), OK);
    }
    let config = Sqe::new(admin::SET_FEATURES, 2)
        .with_cdw(10, 0x0B)
        .with_cdw(11, 1 << 8);
    assert_eq!(bench.admin(&config), OK);
    for cid in 20..24 {
        assert_eq!(
            bench.admin(&Sqe::new(admin::ASYNC_EVENT_REQUEST, cid)),
            None
        );
    }
    let fifth = bench.admin(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 24));
    assert_eq!(fifth, done(Status::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED));
    let posted = bench.function.admin_completed();
    assert!(!bench.function.gather_events(posted));
    bench.function.controller_mut().namespace_changed(1);
    bench.function.controller_mut().invalid_doorbell(false, 7);
    assert!(!bench.function.gather_events(posted - OUTBOX as u64));
    assert!(bench.function.gather_events(posted));
    assert_eq!(bench.function.admin_completed(), posted + 2);
    let first = bench.function.state.completion(posted);
    assert_eq!((first.cid(), first.result()), (20, 0x01_0100));
    assert_eq!(bench.last().result(), 0x04_0002);
    assert!(!bench.function.gather_events(posted + 2));
    // Masked until the log page is read.
    bench.function.controller_mut().invalid_doorbell(false, 7);
    assert!(!bench.function.gather_events(posted + 2));
    let log = with_prps(
        Sqe::new(admin::GET_LOG_PAGE, 3).with_cdw(10, 1 | 15 << 16),
        DATA,
        0,
    );
    assert_eq!(bench.admin(&log), OK);
    bench.function.controller_mut().invalid_doorbell(true, 7);
    assert!(bench.function.gather_events(posted + 3));
    assert_eq!(bench.last().result(), 0x01_0000);
}

#[test]
fn coalescing_is_per_vector() {
    let mut bench = Bench::ready();
    assert!(!bench.function.coalescing(1).is_on());
    let set = |fid: u32, value: u32| {
        Sqe::new(admin::SET_FEATURES, 2)
            .with_cdw(10, fid)
            .with_cdw(11, value)
    };
    assert_eq!(bench.admin(&set(8, 3 | 2 << 8)), OK);
    assert_eq!(bench.admin(&set(9, 7 | 1 << 16)), OK);
    assert_eq!(bench.admin(&set(9, 65)), done(Status::INVALID_FIELD));
    let on = bench.function.coalescing(1);
    assert_eq!((on.threshold, on.time_ns), (4, 200_000));
    assert!(on.is_on() && !bench.function.coalescing(7).is_on());
    assert_eq!(
        bench.admin(
            &Sqe::new(admin::GET_FEATURES, 2)
                .with_cdw(10, 9)
                .with_cdw(11, 7)
        ),
        OK
    );
    assert_eq!(bench.last().result(), 7 | 1 << 16);
    let mut gathered = interrupt::Gathered::default();
    for _ in 0..3 {
        assert!(!gathered.posted(&on, 1000));
    }
    assert!(gathered.posted(&on, 1000));
    assert!(!gathered.posted(&on, 2000) && gathered.deadline_ns(&on) == Some(202_000));
    assert!(!gathered.tick(&on, 201_999) && gathered.tick(&on, 202_000));
    assert_eq!(gathered.deadline_ns(&on), None);
    assert!(interrupt::Gathered::default().posted(&interrupt::Coalescing::default(), 5));
}

#[test]
fn shadow_doorbells_are_two_pages_of_memory() {
    let mut bench = Bench::ready();
    let config = |a, b| with_prps(Sqe::new(admin::DOORBELL_BUFFER_CONFIG, 2), a, b);
    for (a, b) in [(0, DATA), (DATA, 0), (DATA + 8, DATA), (DATA, 4 << 20)] {
        assert_eq!(bench.admin(&config(a, b)), done(Status::INVALID_FIELD));
        assert_eq!(bench.function.shadow(), None);
    }
    assert_eq!(bench.admin(&config(DATA, DATA + 4096)), OK);
    assert_eq!(bench.function.shadow(), Some((DATA, DATA + 4096)));
    bench.write(0x14, &0u32.to_le_bytes());
    bench.function.quiesced();
    assert_eq!(bench.function.shadow(), None);
    assert_eq!(Doorbell::at(0x1000 + 64 * 8 + 4), Some(Doorbell::Head(64)));
    assert_eq!(Doorbell::at(0x1000 + 65 * 8), None);
    assert_eq!((Doorbell::at(0x1002), Doorbell::at(0xFF8)), (None, None));
}

#[test]
fn a_damaged_state_is_refused_and_never_panics() {
    let mut bench = Bench::ready();
    bench.create_cq(1, 64);
    bench.create_sq(1, 64, 1);
    let good = *bench.function.state();
    let refused = |change: &dyn Fn(&mut FunctionState)| {
        let mut state = good;
        change(&mut state);
        assert!(Function::restore(config(), &state).is_err());
    };
    refused(&|s| s.sqs[1].entries = 5000);
    refused(&|s| s.sqs[1].cqid = 2);
    refused(&|s| s.sqs[1].cqid = 65);
    refused(&|s| s.sqs[1].cqid = 0);
    refused(&|s| s.sqs[1].base = 7);
    refused(&|s| s.cqs[1].vector = 65);
    refused(&|s| s.cqs[1].entries = 1);
    refused(&|s| s.sqs[0].entries = 0);
    refused(&|s| s.shadow = 4096);
    refused(&|s| s.controller.granted_io_queues = 65);
    let mut state = good;
    state.space = [0xFF; space::SPACE_BYTES];
    let mut id = [0; 4];
    Function::restore(config(), &state)
        .unwrap()
        .read_config(0, &mut id);
    assert_eq!(id[..2], VENDOR_ID.to_le_bytes());
}

#[test]
fn the_msix_table_keeps_written_values() {
    let mut function = Function::new(config());
    let mut entry = [0; 16];
    function.read_msix(64 * 16, &[0; 2], &mut entry);
    assert_eq!(entry[12], 1, "masked after a reset");
    function.write_msix(64 * 16, &[0xFF; 40]);
    function.read_msix(64 * 16, &[0; 2], &mut entry);
    assert_eq!(entry[12..], [1, 0, 0, 0]);
    let mut bits = [0; 16];
    function.read_msix(PBA_AT, &[5, 1], &mut bits);
    assert_eq!((bits[0], bits[8]), (5, 1));
    function.read_msix(u64::MAX, &[!0; 2], &mut bits);
}
