//! Commands whose bytes lie in a VM's memory.

use super::*;
use forebay_guest::{GuestMemory, NewRegion, Pieces, Retired};
use forebay_nvme::opcode::nvm;
use forebay_nvme::reservation::{ReservationCommand, Reservations};
use proptest::prelude::*;
use std::os::fd::{AsFd, OwnedFd};

const PAGE: u64 = 4096;
/// Bytes of a VM's memory, in two regions.
pub(super) const MEMORY: u64 = 4 << 20;
const LANE: LaneIndex = LaneIndex(3);

pub(super) struct Vm {
    pub(super) memory: GuestMemory,
    file: OwnedFd,
    pieces: Pieces,
}

pub(super) fn vm() -> Vm {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("machine", flags).unwrap();
    rustix::fs::ftruncate(&file, MEMORY).unwrap();
    let mut memory = GuestMemory::default();
    for from in [0, MEMORY / 2] {
        let new = NewRegion {
            guest_address: from,
            user_address: from,
            len_bytes: MEMORY / 2,
            writable: true,
            file: Some((file.as_fd(), from)),
        };
        memory.map(&new).unwrap();
    }
    Vm {
        memory,
        file,
        pieces: Pieces::new(),
    }
}

impl Vm {
    pub(super) fn put(&self, pieces: &[(u64, u32)], bytes: &[u8]) {
        let mut rest = bytes;
        for (at, len) in pieces {
            let (now, later) = rest.split_at(*len as usize);
            assert!(self.memory.write(*at, now));
            rest = later;
        }
    }

    pub(super) fn get(&self, pieces: &[(u64, u32)]) -> Vec<u8> {
        let mut all = Vec::new();
        for (at, len) in pieces {
            let mut bytes = vec![0; *len as usize];
            assert!(self.memory.read(*at, &mut bytes));
            all.extend(bytes);
        }
        all
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Unmaps both regions, even if in use.
    pub(super) fn unmap(&mut self) -> Retired {
        self.pieces.let_go();
        self.memory.unmap(0, MEMORY).unwrap()
    }
}

pub(super) fn read(offset_bytes: u64, len_bytes: u32) -> IoOp {
    IoOp::Read {
        offset_bytes,
        len_bytes,
    }
}

pub(super) fn write(offset_bytes: u64, len_bytes: u32) -> IoOp {
    IoOp::Write {
        offset_bytes,
        len_bytes,
        fua: false,
    }
}

fn compare(offset_bytes: u64, len_bytes: u32) -> IoOp {
    IoOp::Compare {
        offset_bytes,
        len_bytes,
    }
}

impl Bench {
    pub(super) fn start_of(&mut self, m: &mut Vm, op: IoOp, pieces: &[(u64, u32)]) -> u16 {
        self.core.begin_turn();
        self.start_in_turn(m, op, pieces)
    }

    fn start_in_turn(&mut self, m: &mut Vm, op: IoOp, pieces: &[(u64, u32)]) -> u16 {
        let slot = self.next_slot;
        self.next_slot += 1;
        m.pieces.clear();
        for (at, len) in pieces {
            m.pieces.push(&m.memory, *at, *len, false).unwrap();
        }
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(1),
                conn: 0,
                conn_generation: 0,
                slot,
            },
            lane: LANE,
            op,
            buffer: None,
            record: CommandRef::vm(LANE.0, slot),
            over_ns: None,
        };
        assert!(self.core.start_vm_io(new, &mut m.pieces).is_ok());
        slot
    }

    pub(super) fn end_of_vm(&mut self) -> (u16, Status) {
        for _ in crate::patience::patiently() {
            if let Some(done) = self.core.next_ended(FrontendIndex(1)) {
                assert!(done.buffer.is_none(), "nobody would give it back");
                return (done.owner.slot, done.status);
            }
            self.turn();
        }
        panic!("no command ended");
    }

    pub(super) fn run_of(&mut self, m: &mut Vm, op: IoOp, pieces: &[(u64, u32)]) -> Status {
        let slot = self.start_of(m, op, pieces);
        let (ended, status) = self.end_of_vm();
        assert_eq!(ended, slot);
        status
    }

    pub(super) fn copied_bytes(&self) -> u64 {
        self.core
            .lane(LANE)
            .unwrap()
            .record()
            .copied_bytes
            .load(Relaxed)
    }

    /// Turns until `count` operations are held before the device.
    fn turn_until_held(&mut self, count: u64) {
        for _ in crate::patience::patiently() {
            self.turn();
            if self.gate.held() == count {
                return;
            }
        }
        panic!("nothing is held");
    }

    pub(super) fn errors(&self) -> u64 {
        let record = &self.core.region.devices()[0];
        record.read_errors.load(Relaxed) + record.write_errors.load(Relaxed)
    }

    /// Whether the device takes memory at any address.
    fn takes_anything(&self) -> bool {
        let served = self.core.devices.served[0].as_ref().unwrap();
        served.device.info().memory_align_bytes == 1
    }
}

pub(super) fn numbers(len: u64) -> Vec<u8> {
    (0..len).map(|i| (i / 512) as u8 ^ i as u8).collect()
}

/// Whole pages and blocks, none adjacent to the one before.
pub(super) fn scattered() -> Vec<(u64, u32)> {
    let pages = [
        (9, 1),
        (3, 2),
        (400, 16),
        (100, 1),
        (501, 30),
        (20, 3),
        (600, 47),
    ];
    pages.map(|(at, n)| (at * PAGE, n * PAGE as u32)).to_vec()
}

#[test]
fn zero_copy_counters() {
    for kind in ["file", "ram"] {
        let (mut b, mut m) = (bench_with(kind), vm());
        for (extent, at) in [(0, 50), (1, 51), (2, 10), (3, 90), (4, 91), (5, 92), (6, 7)] {
            b.grant(extent, at, Rights::ReadWrite, 1);
        }
        let pieces = scattered();
        let len: u32 = pieces.iter().map(|p| p.1).sum();
        let data = numbers(u64::from(len));
        m.put(&pieces, &data);
        let at = 3 * PAGE;
        assert_eq!(b.run_of(&mut m, write(at, len), &pieces), Status::SUCCESS);
        assert!(b.read(at, len) == data, "{kind}: written from memory");
        m.put(&pieces, &vec![0; data.len()]);
        assert_eq!(b.run_of(&mut m, read(at, len), &pieces), Status::SUCCESS);
        assert!(m.get(&pieces) == data, "{kind}: read into memory");
        let mut fua = write(at, len);
        if let IoOp::Write { fua, .. } = &mut fua {
            *fua = true;
        }
        assert_eq!(b.run_of(&mut m, fua, &pieces), Status::SUCCESS);
        assert_eq!((b.copied_bytes(), b.core.staging.out()), (0, 0), "{kind}");
        assert!(m.unmap().is_free());
    }
}

#[test]
fn unaligned_buffers_are_copied_and_counted() {
    let (mut b, mut m) = (bench(), vm());
    for (extent, at) in [(0, 50), (1, 10)] {
        b.grant(extent, at, Rights::ReadWrite, 1);
    }
    // The first slice is aligned, the second is not.
    let pieces = [
        (0, EXTENT as u32),
        (MEMORY / 2 - 12, 4096),
        (EXTENT + 4, 512),
        (2 * EXTENT, 3584),
    ];
    let len: u32 = pieces.iter().map(|p| p.1).sum();
    let data = numbers(u64::from(len));
    m.put(&pieces, &data);
    assert_eq!(b.run_of(&mut m, write(0, len), &pieces), Status::SUCCESS);
    assert!(b.read(0, len) == data);
    m.put(&pieces, &vec![0; data.len()]);
    assert_eq!(b.run_of(&mut m, read(0, len), &pieces), Status::SUCCESS);
    assert!(m.get(&pieces) == data);
    let copied = if b.takes_anything() { 0 } else { 2 * 8192 };
    assert_eq!((b.copied_bytes(), b.core.staging.out()), (copied, 0));
    // After an error, nothing is copied into the VM's memory.
    m.put(&pieces, &vec![9; data.len()]);
    b.gate.fail(0..u64::MAX, &[OpKind::Read], Errno::IO, 2);
    let status = b.run_of(&mut m, read(0, len), &pieces);
    assert_eq!(status, Status::UNRECOVERED_READ_ERROR);
    assert!(m.get(&pieces[1..]).iter().all(|byte| *byte == 9));
    assert_eq!(b.core.staging.out(), 0);
}

#[test]
fn a_copy_waits_for_staging_memory() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(0, 5, Rights::ReadWrite, 1);
    // All but one buffer, which is too short.
    let mut all = Vec::new();
    while let Some(buffer) = b.core.staging.allocate(4097) {
        all.push(buffer);
    }
    let pieces = [(4, 8192)];
    m.put(&pieces, &[7; 8192]);
    b.start_of(&mut m, write(0, 8192), &pieces);
    if !b.takes_anything() {
        for _ in 0..20 {
            b.turn();
            assert!(b.core.next_ended(FrontendIndex(1)).is_none());
        }
    }
    for buffer in all {
        b.core.staging.release(buffer);
    }
    assert_eq!(b.end_of_vm().1, Status::SUCCESS);
    assert_eq!(b.read(0, 8192), [7; 8192]);
}

#[test]
fn copies_take_no_more_than_their_share_of_staging_memory() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(0, 0, Rights::ReadWrite, 100);
    b.gate.hold();
    let len = 512 << 10;
    for _ in 0..40 {
        b.start_of(&mut m, read(0, len), &[(4, len)]);
        b.turn();
    }
    if !b.takes_anything() {
        // Parts of 64 KiB each.
        for _ in 0..20 {
            b.turn();
        }
        assert_eq!(b.core.staging.out(), 64);
    }
    b.gate.release();
    for _ in 0..40 {
        assert_eq!(b.end_of_vm().1, Status::SUCCESS);
    }
    assert_eq!(b.core.staging.out(), 0);
}

#[test]
fn holes_read_as_zeros_where_they_are() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(1, 3, Rights::ReadWrite, 1);
    b.write(EXTENT, &numbers(EXTENT));
    b.grant(0, 0, Rights::Hole, 1);
    b.grant(2, 0, Rights::Hole, 1);
    let pieces = scattered();
    let len = 2 * EXTENT as u32;
    m.put(
        &pieces,
        &vec![0xee; pieces.iter().map(|p| p.1 as usize).sum()],
    );
    // Extents 0, 1, 2: the end of a hole, stored data, the start of a hole.
    let at = EXTENT / 2;
    assert_eq!(b.run_of(&mut m, read(at, len), &pieces), Status::SUCCESS);
    let found = m.get(&pieces);
    let half = EXTENT as usize / 2;
    assert!(found[..half].iter().all(|byte| *byte == 0));
    assert!(found[half..3 * half] == numbers(EXTENT));
    assert!(found[3 * half..4 * half].iter().all(|byte| *byte == 0));
    assert!(
        found[4 * half..].iter().all(|byte| *byte == 0xee),
        "too much"
    );
    b.grant(50, 0, Rights::Hole, 4);
    m.put(&pieces, &vec![0xee; found.len()]);
    assert_eq!(
        b.run_of(&mut m, read(50 * EXTENT, len), &pieces),
        Status::SUCCESS
    );
    assert!(m.get(&pieces)[..len as usize].iter().all(|byte| *byte == 0));
    assert_eq!((b.copied_bytes(), b.core.staging.out()), (0, 0));
}

#[test]
fn a_turn_moves_only_so_much() {
    for (kind, rights) in [("file", Rights::Hole), ("ram", Rights::ReadWrite)] {
        let (mut b, mut m) = (bench_with(kind), vm());
        b.grant(0, 0, rights, 100);
        b.core.begin_turn();
        for _ in 0..13 {
            b.start_in_turn(&mut m, read(0, 512 << 10), &[(0, 512 << 10)]);
        }
        let mut ended = || {
            let done = std::iter::from_fn(|| b.core.next_ended(FrontendIndex(1)));
            let count = done.filter(|done| done.status == Status::SUCCESS).count();
            let more = b.core.must_turn();
            b.turn();
            (count, more)
        };
        for expected in [2, 2, 2, 2, 2, 2] {
            assert_eq!(ended(), (expected, true), "{kind}");
        }
        assert_eq!(ended(), (1, false), "{kind}");
    }
}

#[test]
fn a_command_that_parks_goes_on_where_it_was() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(0, 20, Rights::ReadWrite, 1);
    b.grant(2, 60, Rights::ReadWrite, 1);
    let pieces = scattered();
    let len = 3 * EXTENT as u32 - PAGE as u32;
    let data = numbers(400 * 1024);
    m.put(&pieces, &data[..pieces.iter().map(|p| p.1 as usize).sum()]);
    b.start_of(&mut m, write(PAGE / 2 * 2, len), &pieces);
    assert!(b.upcall().contains("extent: 1, write: true"));
    b.grant(1, 40, Rights::ReadWrite, 1);
    assert_eq!(b.end_of_vm().1, Status::SUCCESS);
    assert!(b.read(PAGE, len) == data[..len as usize]);
}

#[test]
fn compared_memory_is_read_once() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(0, 1, Rights::ReadWrite, 4);
    let data = numbers(3 * EXTENT);
    b.write(0, &data);
    let pieces = scattered();
    m.put(
        &pieces,
        &[&data[..], &vec![0; 400 * PAGE as usize]].concat()[..100 * PAGE as usize],
    );
    b.gate.hold();
    b.start_of(&mut m, compare(0, data.len() as u32), &pieces);
    b.turn_until_held(1);
    // The VM may change its memory meanwhile.
    m.put(&pieces, &vec![1; 100 * PAGE as usize]);
    assert!(m.unmap().is_free());
    b.gate.release();
    assert_eq!(b.end_of_vm().1, Status::SUCCESS);
    assert_eq!(
        (b.copied_bytes(), b.core.staging.out()),
        (data.len() as u64, 0)
    );
    let mut m = vm();
    let status = b.run_of(&mut m, compare(0, 512), &[(8, 512)]);
    assert_eq!(status, Status::COMPARE_FAILURE);
    // The ranges of a Deallocate: 2 blocks at 1.
    let mut range = [0; 16];
    range[4..8].copy_from_slice(&2_u32.to_le_bytes());
    range[8..].copy_from_slice(&1_u64.to_le_bytes());
    let pieces = [(PAGE - 5, 16)];
    m.put(&pieces, &range);
    let slot = b.start_of(&mut m, IoOp::Deallocate { ranges: 1 }, &pieces);
    m.put(&pieces, &[0xff; 16]);
    assert_eq!(b.end_of_vm(), (slot, Status::SUCCESS));
    let found = b.read(0, 4 * PAGE as u32);
    assert!(
        found[PAGE as usize..3 * PAGE as usize]
            .iter()
            .all(|byte| *byte == 0)
    );
    assert!(found[..PAGE as usize] == data[..PAGE as usize]);
    assert!(found[3 * PAGE as usize..] == data[3 * PAGE as usize..4 * PAGE as usize]);
    assert_eq!(b.core.staging.out(), 0);
}

#[test]
fn memory_is_let_go_when_the_device_is_done_and_not_before() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(0, 1, Rights::ReadWrite, 4);
    b.write(0, &[5; 8192]);
    for way in [
        "it ends",
        "its machine leaves",
        "its time is over",
        "its export goes",
    ] {
        let pieces = [(0, 4096), (MEMORY / 2, 4096)];
        b.gate.hold();
        let slot = b.start_of(&mut m, read(0, 8192), &pieces);
        b.turn_until_held(1);
        let gone = m.unmap();
        let which = |owner: &Issuer, _: &IoOp, _: LaneIndex| owner.frontend == FrontendIndex(1);
        match way {
            "its machine leaves" => b.core.recovered.orphan_vm(LANE),
            "its time is over" => b
                .core
                .clock
                .set_now_ns(b.core.now_ns() + 2 * OWNER_WAIT_LIMIT_NS),
            "its export goes" => b.core.remove_lane(LANE),
            _ => {}
        }
        b.core.tick();
        b.nothing_ends();
        assert_eq!(b.core.end_waiting(Status::COMMAND_INTERRUPTED, which), 1);
        assert!(b.core.next_ended(FrontendIndex(1)).is_none());
        assert!(!gone.is_free(), "{way}");
        b.gate.release();
        assert_eq!(b.end_of_vm().0, slot);
        assert!(gone.is_free(), "{way}");
        assert_eq!(b.core.end_waiting(Status::COMMAND_INTERRUPTED, which), 0);
        m = vm();
    }
    let slot = b.start_of(&mut m, read(0, 4096), &[(0, 4096)]);
    let ended = (slot, Status::INVALID_NAMESPACE_OR_FORMAT);
    assert_eq!(b.end_of_vm(), ended);
    assert!(m.unmap().is_free());
}

#[test]
fn memory_that_is_gone_fails_its_command_and_no_device() {
    for kind in ["file", "ram"] {
        let (mut b, mut m) = (bench_with(kind), vm());
        b.grant(0, 1, Rights::ReadWrite, 4);
        b.write(0, &[5; 16384]);
        let lost = [(0, 4096), (MEMORY - 8192, 8192)];
        let kept = [(8192, 12288)];
        rustix::fs::ftruncate(&m.file, MEMORY / 2).unwrap();
        for op in [read(0, 12288), write(0, 12288)] {
            let status = b.run_of(&mut m, op, &lost);
            match kind {
                "file" => assert_eq!(status, Status::DATA_TRANSFER_ERROR),
                // The processor copies, so it stores zeros.
                _ => assert!(status == Status::SUCCESS && m.memory.is_broken()),
            }
            assert_eq!(b.run_of(&mut m, op, &kept), Status::SUCCESS);
        }
        assert_eq!(
            (b.errors(), b.copied_bytes(), b.core.staging.out()),
            (0, 0, 0)
        );
    }
}

#[test]
fn a_command_without_memory_for_it_fails() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(0, 1, Rights::ReadWrite, 4);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&m.file));
    let only_read = std::fs::File::open(path).unwrap();
    let new = NewRegion {
        guest_address: MEMORY,
        user_address: MEMORY,
        len_bytes: MEMORY,
        writable: false,
        file: Some((only_read.as_fd(), 0)),
    };
    m.memory.map(&new).unwrap();
    for (op, pieces) in [
        (read(0, 8192), [(0, 4096)]),
        (write(0, 8192), [(0, 4096)]),
        (read(0, 4096), [(MEMORY, 4096)]),
        // Longer than a command may be.
        (read(0, 516 << 10), [(0, 516 << 10)]),
        (write(0, 516 << 10), [(0, 516 << 10)]),
        (compare(0, 8192), [(0, 4096)]),
        (compare(0, 516 << 10), [(0, 516 << 10)]),
        (IoOp::Deallocate { ranges: 2 }, [(0, 16)]),
        (IoOp::Deallocate { ranges: u16::MAX }, [(0, 1 << 20)]),
    ] {
        assert_eq!(b.run_of(&mut m, op, &pieces), Status::INTERNAL_ERROR);
    }
    let status = b.run_of(&mut m, write(0, 4096), &[(MEMORY, 4096)]);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!((b.errors(), b.core.slab.busy()), (0, 0));
}

#[test]
fn a_host_reservation_applies_to_vms() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(0, 1, Rights::ReadWrite, 4);
    let page = [(0, 4096)];
    let conflict = Status::RESERVATION_CONFLICT.with_dnr();
    let zeroes = IoOp::WriteZeroes {
        offset_bytes: 0,
        len_bytes: 4096,
        deallocate: false,
        fua: false,
    };
    let statuses = |b: &mut Bench, m: &mut Vm| {
        let all = [read(0, 4096), compare(0, 4096), write(0, 4096), zeroes];
        let mut of = all.map(|op| b.run_of(m, op, &page)).to_vec();
        of.push(b.run_of(m, IoOp::Deallocate { ranges: 1 }, &[(8192, 16)]));
        of.push(b.run_of(m, IoOp::Flush, &[]));
        of
    };
    let good = Status::SUCCESS;
    assert_eq!(statuses(&mut b, &mut m), [good; 6]);
    for (rtype, may_read) in [
        (1, good),
        (2, conflict),
        (3, good),
        (4, conflict),
        (5, good),
    ] {
        let mut state = Reservations::default();
        let run = |state: &mut Reservations, opcode, low: u32, keys| {
            let sqe = forebay_nvme::Sqe::new(opcode, 0).with_cdw(10, low);
            let action = forebay_nvme::reservation::action_of(&sqe);
            let command = ReservationCommand::new(action, keys).unwrap();
            state.apply([7; 16], &command).unwrap();
        };
        run(&mut state, nvm::RESERVATION_REGISTER, 0, [0, 5]);
        run(&mut state, nvm::RESERVATION_ACQUIRE, rtype << 8, [5, 0]);
        b.core.lanes.set_reservations(V, &Arc::new(state));
        let expected = [may_read, may_read, conflict, conflict, conflict, good];
        assert_eq!(statuses(&mut b, &mut m), expected, "type {rtype}");
    }
    b.core.lanes.set_reservations(V, &Arc::default());
    assert_eq!(statuses(&mut b, &mut m), [good; 6]);
    assert_eq!(
        (b.errors(), b.core.slab.busy(), b.core.staging.out()),
        (0, 0, 0)
    );
}

#[test]
fn commands_of_a_departed_vm_are_not_overtaken() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(0, 1, Rights::ReadWrite, 1);
    m.put(&[(0, 8192)], &[7; 8192]);
    b.gate.hold();
    let at_device = b.start_of(&mut m, write(0, 4096), &[(0, 4096)]);
    b.turn_until_held(1);
    let parked = b.start_of(&mut m, write(EXTENT, 4096), &[(4096, 4096)]);
    b.core.recovered.orphan_vm(LANE);
    b.turn();
    let ended = (parked, Status::COMMAND_INTERRUPTED);
    assert_eq!(b.end_of_vm(), ended);
    // A new client's write, over one at the device.
    let mut next = vm();
    next.put(&[(0, 4096)], &[8; 4096]);
    let younger = b.start_of(&mut next, write(0, 4096), &[(0, 4096)]);
    b.nothing_ends();
    assert_eq!(b.gate.held(), 1);
    b.gate.release();
    assert_eq!(b.end_of_vm().0, at_device);
    assert_eq!(b.end_of_vm(), (younger, Status::SUCCESS));
    assert_eq!(b.read(0, 4096), [8; 4096]);
    assert!(!b.core.recovered.any() && next.unmap().is_free() && m.unmap().is_free());
}

#[test]
fn recovered_vm_commands_wait_for_the_fence() {
    let (mut b, mut m) = (unfenced("file"), vm());
    b.grant(0, 0, Rights::ReadWrite, 10);
    m.put(&[(0, 4096)], &[7; 4096]);
    let recovered = |slot, block: u64, write| RecoveredSpan {
        volume: V,
        bytes: block * PAGE..(block + 1) * PAGE,
        write,
        devices: FenceSet::ALL,
        command: slot,
    };
    let command = |slot| Some(CommandRef::vm(LANE.0, slot));
    let spans = [
        recovered(command(0), 0, true),
        recovered(command(1), 1, false),
        // This command is not repeated.
        recovered(None, 2, false),
    ];
    b.core.recovered.recover_vm(LANE, &spans);
    assert!(
        b.core.recovered.may_touch_memory_of(LANE)
            && !b.core.recovered.may_touch_memory_of(LaneIndex(4))
    );
    b.start_of(&mut m, write(0, 4096), &[(0, 4096)]);
    b.start_of(&mut m, read(PAGE, 4096), &[(8192, 4096)]);
    // Others continue, unless they overlap.
    let other = b.start_of(&mut m, read(9 * PAGE, 4096), &[(4096, 4096)]);
    assert_eq!(b.end_of_vm(), (other, Status::SUCCESS));
    let younger = b.start_of(&mut m, write(PAGE, 4096), &[(0, 4096)]);
    // The third command was revoked by its VM.
    b.nothing_ends();
    assert!(
        b.core.next_ended(FrontendIndex(1)).is_none() && b.core.recovered.may_touch_memory_of(LANE)
    );
    b.core.fenced(DeviceIndex(0));
    assert!(!b.core.recovered.may_touch_memory_of(LANE));
    let mut ended: Vec<_> = (0..3).map(|_| b.end_of_vm()).collect();
    ended.sort_by_key(|(slot, _)| *slot);
    let slots = [0, 1, younger];
    assert_eq!(ended, slots.map(|slot| (slot, Status::SUCCESS)));
    assert_eq!(b.read(0, 8192), [7; 8192]);
    assert!(!b.core.recovered.any());
    // A client that leaves before the fence leaves its spans.
    let (mut b, mut m) = (unfenced("file"), vm());
    b.grant(0, 0, Rights::ReadWrite, 10);
    b.core.recovered.recover_vm(LANE, &spans);
    b.start_of(&mut m, write(0, 4096), &[(0, 4096)]);
    b.core.recovered.orphan_vm(LANE);
    let ended = (0, Status::COMMAND_INTERRUPTED);
    assert_eq!(b.end_of_vm(), ended);
    assert!(b.core.recovered.may_touch_memory_of(LANE) && m.unmap().is_free());
    b.start(super::guest::write(0, 4096), Some(&[3; 4096]));
    b.nothing_ends();
    b.core.fenced(DeviceIndex(0));
    assert_eq!(b.end().1, Status::SUCCESS);
    assert!(!b.core.recovered.may_touch_memory_of(LANE));
}

#[test]
fn a_recovered_command_keeps_its_kind() {
    let (mut b, mut m) = (unfenced("file"), vm());
    b.grant(0, 0, Rights::ReadWrite, 10);
    let mut range = [0; 16];
    range[4..8].copy_from_slice(&1_u32.to_le_bytes());
    range[8..].copy_from_slice(&5_u64.to_le_bytes());
    let deallocate = IoOp::Deallocate { ranges: 1 };
    let zeroes = IoOp::WriteZeroes {
        offset_bytes: 7 * PAGE,
        len_bytes: PAGE,
        deallocate: false,
        fua: false,
    };
    for (slot, op, again) in [
        (0, write(PAGE, 4096), true),
        (1, IoOp::Flush, true),
        (2, deallocate, false),
        (3, zeroes, false),
        (4, read(3 * PAGE, 4096), false),
    ] {
        let command = CommandRef::vm(LANE.0, slot);
        recover_command(&mut b.core, LANE, &op, Some(&range), command, again);
    }
    b.next_slot = 10;
    // Commands that overlap a write wait, and writes that overlap a read.
    for (waits, op) in [
        (false, read(0, 4096)),
        (true, read(PAGE, 4096)),
        (false, write(2 * PAGE, 4096)),
        (false, read(3 * PAGE, 4096)),
        (true, write(3 * PAGE, 4096)),
        (false, read(4 * PAGE, 4096)),
        (true, read(5 * PAGE, 4096)),
        (true, read(6 * PAGE, 8192)),
    ] {
        let slot = b.start_of(&mut m, op, &[(0, 8192)]);
        match waits {
            false => assert_eq!(b.end_of_vm(), (slot, Status::SUCCESS)),
            true => {
                b.nothing_ends();
                assert!(b.core.next_ended(FrontendIndex(1)).is_none(), "{op:?}");
            }
        }
    }
    b.core.fenced(DeviceIndex(0));
    // All but the one that waits for the first, not yet started.
    for _ in 0..3 {
        assert_eq!(b.end_of_vm().1, Status::SUCCESS);
    }
    b.nothing_ends();
    b.next_slot = 0;
    b.start_of(&mut m, write(PAGE, 4096), &[(0, 4096)]);
    assert_eq!(b.end_of_vm(), (0, Status::SUCCESS));
    assert_eq!(b.end_of_vm().1, Status::SUCCESS);
    assert!(!b.core.recovered.any());
    // The ranges may have changed, so the whole volume counts.
    let (mut b, mut m) = (unfenced("file"), vm());
    b.grant(0, 0, Rights::ReadWrite, 10);
    recover_command(
        &mut b.core,
        LANE,
        &deallocate,
        None,
        CommandRef::vm(LANE.0, 9),
        false,
    );
    b.start_of(&mut m, read(9 * PAGE, 4096), &[(0, 4096)]);
    b.nothing_ends();
    assert!(b.core.next_ended(FrontendIndex(1)).is_none());
    b.core.fenced(DeviceIndex(0));
    assert_eq!(b.end_of_vm().1, Status::SUCCESS);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn slices_of_pieces_are_exactly_the_bytes(
        places in Just((0..100_u64).collect::<Vec<_>>()).prop_shuffle(),
        first in 0..40_u64,
        pages in prop::collection::vec((0..512_u64, 1..12_u32), 1..30),
        shift in prop::sample::select(vec![0_u64, 0, 512, 4]),
    ) {
        let (mut b, mut m) = (bench_with("ram"), vm());
        for (extent, at) in places.iter().enumerate() {
            b.grant(extent as u64, *at, Rights::ReadWrite, 1);
        }
        // No page twice, 512 KiB at most.
        let mut used = [false; 1024];
        let mut pieces: Vec<(u64, u32)> = Vec::new();
        for (page, count) in pages {
            let all = page as usize..page as usize + count as usize + 1;
            let sum: u32 = pieces.iter().map(|p| p.1).sum();
            if !used[all.clone()].contains(&true) && sum + count * 4096 <= 512 << 10 {
                used[all].fill(true);
                pieces.push((page * PAGE + shift, count * 4096));
            }
        }
        let len: u32 = pieces.iter().map(|p| p.1).sum();
        let data = numbers(u64::from(len));
        let at = first * EXTENT / 2 + PAGE;
        m.put(&pieces, &data);
        prop_assert_eq!(b.run_of(&mut m, write(at, len), &pieces), Status::SUCCESS);
        prop_assert!(b.read(at, len) == data);
        m.put(&pieces, &vec![0; data.len()]);
        prop_assert_eq!(b.run_of(&mut m, read(at, len), &pieces), Status::SUCCESS);
        prop_assert!(m.get(&pieces) == data);
        prop_assert_eq!(b.copied_bytes(), 0);
    }
}

/// Recovers one command of a VM, as a successor finds it recorded; oldest first, before any starts.
/// `again`: it will be started with this name ([`Core::start_vm_io`]), or the lane orphaned;
/// otherwise it is only waited for. `ranges`: a Deallocate's, if known for certain, since the VM
/// may have changed them.
fn recover_command(
    core: &mut Core,
    lane: LaneIndex,
    op: &IoOp,
    ranges: Option<&[u8]>,
    command: CommandRef,
    again: bool,
) {
    let Some((volume, block_bytes)) = core
        .lane(lane)
        .map(|l| (l.volume.id(), u64::from(l.volume.config.block_bytes)))
    else {
        return;
    };
    let span = |offset_bytes: u64, len_bytes: u64| RecoveredSpan {
        volume,
        bytes: offset_bytes..offset_bytes.saturating_add(len_bytes),
        write: op.writes(),
        devices: FenceSet::ALL,
        command: again.then_some(command),
    };
    match (*op, ranges) {
        (IoOp::Flush, _) => {}
        (IoOp::Deallocate { ranges: count }, Some(ranges)) => {
            let ranges = ranges.chunks_exact(16).take(usize::from(count));
            for (offset, len) in ranges.filter_map(|r| crate::io::zero::range_of(r, block_bytes)) {
                core.recovered.recover_vm(lane, &[span(offset, len)]);
            }
        }
        (IoOp::Deallocate { .. }, None) => core.recovered.recover_vm(lane, &[span(0, u64::MAX)]),
        _ => core
            .recovered
            .recover_vm(lane, &[span(op.offset_bytes(), op.len_bytes())]),
    }
}
