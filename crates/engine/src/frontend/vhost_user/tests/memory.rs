//! Memory hot-plug during I/O, and clients that remove memory in use or name invalid memory.

use super::guest::{ALL, Data, Guest, MEMORY_BYTES, PLAIN, Region, SIZE, Way, table};
use super::rig::Rig;
use super::{IN, OUT, WAYS};
use crate::frontend::Frontend;
use crate::frontend::vm::client::MESSAGE_LIMIT_NS;
use crate::lane::LaneIndex;
use forebay_virtio::model::{Driver, GUEST_ADDRESS, Layout, USER_ADDRESS, Vm};
use forebay_virtio::ring::RingFeatures;
use forebay_virtio::vhost_user::message::request;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd};

/// The plugged region: adjacent for the guest, elsewhere for the client, and not at its file's
/// start.
const AT: u64 = GUEST_ADDRESS + MEMORY_BYTES;
const USER: u64 = USER_ADDRESS + (1 << 40);
const BYTES: u64 = 1 << 20;
const OFFSET: u64 = 2 << 20;
const PLUGGED: Region = [AT, BYTES, USER, OFFSET];
/// Sectors per extent.
const EXTENT: u64 = 128;

#[derive(Clone, Copy, PartialEq, Debug)]
enum By {
    /// ADD_MEM_REG, REM_MEM_REG
    Message,
    /// SET_MEM_TABLE
    Table,
}

struct Plugged(Vm);

impl Plugged {
    fn new() -> Self {
        Self(Vm::new(OFFSET + BYTES))
    }

    fn plug(&self, guest: &Guest, by: By) {
        let (all, new) = (guest.vm.file.as_fd(), self.0.file.as_fd());
        match by {
            By::Message => guest.begin(request::ADD_MEM_REG, &one(PLUGGED), &[new]),
            By::Table => {
                let table = table(&[ALL, PLUGGED]);
                guest.begin(request::SET_MEM_TABLE, &table, &[all, new]);
            }
        }
    }

    fn unplug(guest: &Guest, by: By) {
        match by {
            By::Message => guest.begin(request::REM_MEM_REG, &one(PLUGGED), &[]),
            By::Table => {
                let all = [guest.vm.file.as_fd()];
                guest.begin(request::SET_MEM_TABLE, &table(&[ALL]), &all);
            }
        }
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(self.0.all.read((OFFSET + at) as usize, &mut bytes));
        bytes
    }
}

/// The payload of ADD_MEM_REG and REM_MEM_REG.
fn one(region: Region) -> Vec<u8> {
    let words = [0].into_iter().chain(region);
    words.flat_map(u64::to_le_bytes).collect()
}

#[test]
fn mem_hotplug_no_lost_kick() {
    for way in WAYS {
        for by in [By::Message, By::Table] {
            let mut rig = Rig::new(4);
            let mut guest = rig.guest(way);
            let memory = Plugged::new();
            for round in 0..3 {
                comes(&mut rig, &mut guest, &memory, by);
                is_used(&mut rig, &mut guest, &memory, round);
                goes(&mut rig, &mut guest, by);
                assert!(rig.left.is_empty(), "{way:?} {by:?}");
            }
        }
    }
}

/// Plugs memory while requests run before and after the message.
fn comes(rig: &mut Rig, guest: &mut Guest, memory: &Plugged, by: By) {
    rig.until_asleep();
    let before = guest.offer(0, IN, 0, Data::In(512));
    assert!(guest.kick(0));
    rig.gate.hold();
    rig.until("it is at the device", |rig| rig.gate.held() > 0);
    memory.plug(guest, by);
    match by {
        By::Message => assert_eq!(guest.reported(rig), 0),
        By::Table => {
            rig.turns();
            assert!(!guest.has_answer(), "what it replaces is in use");
        }
    }
    let during = guest.offer(0, IN, 0, Data::In(512));
    guest.kick(0);
    rig.gate.release();
    let mut ended = vec![guest.end(rig, 0).0, guest.end(rig, 0).0];
    ended.sort_unstable();
    assert_eq!(ended, [before, during]);
    if by == By::Table {
        assert_eq!(guest.reported(rig), 0);
    }
    rig.until_asleep();
}

/// Data moves in both directions, also across its border.
fn is_used(rig: &mut Rig, guest: &mut Guest, memory: &Plugged, round: u8) {
    let data: Vec<u8> = (0..1024u32).map(|i| (i * 7) as u8 ^ round).collect();
    let border = (MEMORY_BYTES - 512) as usize;
    assert!(guest.vm.all.write(border, &data[..512]));
    assert!(memory.0.all.write(OFFSET as usize, &data[512..]));
    let wrote = guest.offer(0, OUT, 9, Data::At(AT - 512, 1024));
    assert!(guest.kick(0) && rig.is_woken(), "a kick was lost");
    assert_eq!(guest.end(rig, 0), (wrote, 0, 1));
    let read = guest.offer(0, IN, 9, Data::At(AT + BYTES - 1024, 1024));
    assert_eq!(guest.end(rig, 0), (read, 0, 1025));
    assert_eq!(memory.bytes(BYTES - 1024, 1024), data);
    let read = guest.offer(0, IN, 9, Data::In(1024));
    assert_eq!(guest.end(rig, 0), (read, 0, 1025));
    assert_eq!(guest.data(read, 1024), data);
}

/// Unplugs it while a device writes to it; other memory stays usable.
fn goes(rig: &mut Rig, guest: &mut Guest, by: By) {
    rig.hold_extent(1);
    let there = guest.offer(0, IN, EXTENT, Data::At(AT + 4096, 512));
    rig.until("it is at the device", |rig| rig.gate.held() == 1);
    Plugged::unplug(guest, by);
    rig.turns();
    assert!(!guest.has_answer(), "a device may still write there");
    let elsewhere = guest.offer(0, IN, 9, Data::In(512));
    guest.kick(0);
    assert_eq!(guest.end(rig, 0), (elsewhere, 0, 513));
    assert!(!guest.has_answer());
    rig.gate.release();
    assert_eq!(guest.end(rig, 0), (there, 0, 513));
    assert_eq!(guest.reported(rig), 0);
    for (kind, data) in [
        (IN, Data::At(AT, 512)),
        (OUT, Data::At(AT, 512)),
        (OUT, Data::At(AT - 512, 1024)),
        (IN, Data::At(AT - 512, 1024)),
    ] {
        let gone = guest.offer(0, kind, 9, data);
        guest.kick(0);
        assert_eq!(guest.end(rig, 0), (gone, 1, 1));
    }
    rig.until_asleep();
    let after = guest.offer(0, IN, 0, Data::In(512));
    assert!(guest.kick(0) && rig.is_woken(), "a kick was lost");
    assert_eq!(guest.end(rig, 0), (after, 0, 513));
}

#[test]
fn memory_comes_and_goes_over_deaths() {
    for way in WAYS {
        for turns in 0..4 {
            let mut rig = Rig::new(4);
            let mut guest = rig.guest(way);
            let memory = Plugged::new();
            memory.plug(&guest, By::Message);
            for _ in 0..turns {
                rig.turn();
            }
            rig.die(None);
            rig.fence();
            assert_eq!(guest.reported(&mut rig), 0);
            let read = guest.offer(0, IN, 0, Data::At(AT, 512));
            guest.kick(0);
            assert_eq!(guest.end(&mut rig, 0), (read, 0, 513));
            rig.gate.hold();
            let there = guest.offer(0, IN, 0, Data::At(AT, 512));
            rig.until("it is at the device", |rig| rig.gate.held() == 1);
            Plugged::unplug(&guest, By::Message);
            for _ in 0..turns {
                rig.turn();
            }
            rig.die(None);
            rig.turns();
            assert!(!guest.has_answer(), "a dead engine may still write there");
            rig.fence();
            assert_eq!(guest.reported(&mut rig), 0);
            // Repeated requests do not find it.
            assert_eq!(guest.end(&mut rig, 0), (there, 1, 1));
            assert!(!guest.has_answer() && rig.left.is_empty());
        }
    }
}

/// A misbehaving client, and one that must not be affected.
fn with_neighbour(kind: &str, queues: u16) -> (Rig, Guest, Guest) {
    let mut rig = Rig::on(kind, queues);
    let good = rig.guest(PLAIN);
    let bad = rig.guest(PLAIN);
    (rig, bad, good)
}

fn still_good(rig: &mut Rig, good: &mut Guest) {
    let wrote = good.offer(0, OUT, 40, Data::Out(&[0x5A; 512]));
    assert_eq!(good.end(rig, 0), (wrote, 0, 1));
    let read = good.offer(0, IN, 40, Data::In(512));
    assert_eq!(good.end(rig, 0), (read, 0, 513));
    assert_eq!(good.data(read, 512), [0x5A; 512]);
}

/// It is closed for this reason, and released once no device uses its memory.
fn is_closed(rig: &mut Rig, bad: &Guest, why: &str, good: &mut Guest) {
    rig.until("its end", |_| bad.is_shut_out());
    still_good(rig, good);
    rig.gate.release();
    rig.until("that it is let go of", |rig| {
        rig.vms.tick(&mut rig.core);
        !rig.left.is_empty()
    });
    assert_eq!(rig.left.pop().map(|left| left.0), Some(why));
    assert!(rig.left.is_empty());
    still_good(rig, good);
}

#[test]
fn hostile_guest_memory_that_is_used_for_too_long() {
    let (mut rig, mut bad, mut good) = with_neighbour("file", 1);
    let memory = Plugged::new();
    memory.plug(&bad, By::Message);
    assert_eq!(bad.reported(&mut rig), 0);
    rig.hold_extent(1);
    bad.offer(0, IN, EXTENT, Data::At(AT, 512));
    rig.until("it is at the device", |rig| rig.gate.held() == 1);
    Plugged::unplug(&bad, By::Message);
    rig.turns();
    still_good(&mut rig, &mut good);
    let late = rig.core.now_ns() + MESSAGE_LIMIT_NS;
    rig.core.clock.set_now_ns(late);
    rig.vms.tick(&mut rig.core);
    let why = "memory that it removed stayed in use for too long";
    is_closed(&mut rig, &bad, why, &mut good);
}

#[test]
fn hostile_guest_names_memory_that_can_not_be() {
    let (mut rig, mut bad, mut good) = with_neighbour("file", 1);
    let memory = Plugged::new();
    let fd = memory.0.file.as_fd();
    let no_file = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let [address, len, user, _] = ALL;
    let cases: [(u32, Region, Option<BorrowedFd<'_>>); 11] = [
        (request::ADD_MEM_REG, ALL, Some(fd)),
        (request::ADD_MEM_REG, [AT - 1, 4096, USER, 0], Some(fd)),
        (
            request::ADD_MEM_REG,
            [address - 4096, 8192, USER, 0],
            Some(fd),
        ),
        (request::ADD_MEM_REG, [AT, 0, USER, 0], Some(fd)),
        (
            request::ADD_MEM_REG,
            [u64::MAX - 4095, 8192, USER, 0],
            Some(fd),
        ),
        (request::ADD_MEM_REG, [AT, BYTES, u64::MAX, 0], Some(fd)),
        (
            request::ADD_MEM_REG,
            [AT, BYTES, USER, OFFSET + 4096],
            Some(fd),
        ),
        (request::ADD_MEM_REG, PLUGGED, Some(no_file.as_fd())),
        (request::REM_MEM_REG, PLUGGED, None),
        (request::REM_MEM_REG, [address, len / 2, user, 0], None),
        (request::REM_MEM_REG, [address, len, USER, 0], None),
    ];
    for (kind, region, fd) in cases {
        let reported = bad.report(&mut rig, kind, &one(region), fd.as_slice());
        assert_eq!(reported, 1, "{kind} {region:x?}");
    }
    let fds = [bad.vm.file.as_fd(), fd];
    for regions in [[ALL, ALL], [PLUGGED, [AT, BYTES + 1, USER, OFFSET]]] {
        let reported = bad.report(&mut rig, request::SET_MEM_TABLE, &table(&regions), &fds);
        assert_eq!(reported, 1);
    }
    let mut regions = 1;
    let add = |rig: &mut Rig, n: u64| {
        let region = [AT + n * 8192, 4096, USER + n * 8192, OFFSET];
        bad.report(rig, request::ADD_MEM_REG, &one(region), &[fd])
    };
    while regions < 300 && add(&mut rig, regions) == 0 {
        regions += 1;
    }
    let most = bad.ask(&mut rig, request::GET_MAX_MEM_SLOTS, &[]);
    assert_eq!(regions.to_le_bytes().to_vec(), most);
    let read = bad.offer(0, IN, 0, Data::In(512));
    assert_eq!(bad.end(&mut rig, 0), (read, 0, 513));
    bad.send(request::REM_MEM_REG, &one([1, 2, 3, 4]), &[]);
    is_closed(&mut rig, &bad, "memory that does not exist", &mut good);
}

#[test]
fn hostile_guest_takes_the_memory_of_a_ring() {
    for by in [By::Message, By::Table] {
        let (mut rig, mut bad, mut good) = with_neighbour("file", 2);
        let memory = Plugged::new();
        memory.plug(&bad, by);
        assert_eq!(bad.reported(&mut rig), 0);
        let layout = Layout::new(OFFSET as usize, SIZE);
        let features = RingFeatures::default();
        let driver = Driver::new(&memory.0.all, layout, SIZE, false, features);
        bad.drivers.push(driver);
        // By the client's addresses.
        let layout = Layout::new((USER - USER_ADDRESS) as usize, SIZE);
        bad.start_ring_at(&mut rig, 1, &layout, 0);
        let read = bad.offer(1, IN, 0, Data::In(512));
        assert_eq!(bad.end(&mut rig, 1), (read, 0, 513));
        rig.hold_extent(1);
        bad.offer(1, IN, EXTENT, Data::At(AT + (512 << 10), 512));
        rig.until("it is at the device", |rig| rig.gate.held() == 1);
        Plugged::unplug(&bad, by);
        let why = "a part of the ring is not in the guest's memory";
        is_closed(&mut rig, &bad, why, &mut good);
    }
}

#[test]
fn hostile_guest_shrinks_its_memory_under_flight() {
    let (mut rig, mut bad, mut good) = with_neighbour("file", 1);
    let far = GUEST_ADDRESS + MEMORY_BYTES / 2;
    rig.hold_extent(1);
    let there = bad.offer(0, IN, EXTENT, Data::At(far, 512));
    rig.until("it is at the device", |rig| rig.gate.held() == 1);
    let [address, len, user, offset] = ALL;
    let less = table(&[[address, len / 4, user, offset]]);
    bad.begin(request::SET_MEM_TABLE, &less, &[bad.vm.file.as_fd()]);
    rig.turns();
    assert!(!bad.has_answer(), "a device may still write there");
    still_good(&mut rig, &mut good);
    rig.gate.release();
    assert_eq!(bad.end(&mut rig, 0), (there, 0, 513));
    assert_eq!(bad.reported(&mut rig), 0);
    let gone = bad.offer(0, IN, 0, Data::At(far, 512));
    assert_eq!(bad.end(&mut rig, 0), (gone, 1, 1));
    assert!(rig.left.is_empty());
    still_good(&mut rig, &mut good);
}

#[test]
fn hostile_guest_cuts_off_its_memory() {
    // Truncates below its rings, its requests, or a read's copied data.
    for (kind, left) in [("file", 0), ("file", 64 << 10), ("ram", MEMORY_BYTES / 2)] {
        let (mut rig, mut bad, mut good) = with_neighbour(kind, 1);
        good.offer(0, OUT, 0, Data::Out(&[1; 512]));
        good.end(&mut rig, 0);
        bad.offer(0, IN, 0, Data::At(AT - 4096, 512));
        rustix::fs::ftruncate(&bad.vm.file, left).unwrap();
        let why = "the file of its memory was truncated";
        is_closed(&mut rig, &bad, why, &mut good);
    }
    // Truncates a read's data under the kernel's access.
    let (mut rig, mut bad, mut good) = with_neighbour("file", 1);
    rig.hold_extent(1);
    let there = bad.offer(0, IN, EXTENT, Data::At(AT - 4096, 512));
    rig.until("it is at the device", |rig| rig.gate.held() == 1);
    rustix::fs::ftruncate(&bad.vm.file, MEMORY_BYTES / 2).unwrap();
    rig.gate.release();
    assert_eq!(bad.end(&mut rig, 0), (there, 1, 1));
    assert!(rig.left.is_empty());
    still_good(&mut rig, &mut good);
}

#[test]
fn hostile_guest_hides_its_requests_in_flight() {
    for packed in [false, true] {
        let mut rig = Rig::new(1);
        let mut guest = rig.guest(Way {
            packed,
            inflight: true,
            ..PLAIN
        });
        // Its own inflight region, which it modifies.
        let region = Vm::new(1 << 20);
        guest.ok(&mut rig, request::RESET_DEVICE, &[], &[]);
        let mut area = (1u64 << 20).to_le_bytes().to_vec();
        area.extend(0u64.to_le_bytes());
        area.extend(1u16.to_le_bytes());
        area.extend(SIZE.to_le_bytes());
        let fd = [region.file.as_fd()];
        guest.ok(&mut rig, request::SET_INFLIGHT_FD, &area, &fd);
        let layout = Layout::new(8 << 20, SIZE);
        let features = RingFeatures::default();
        guest.drivers[0] = Driver::new(&guest.vm.all, layout, SIZE, packed, features);
        let base = if packed { 0x8000_8000 } else { 0 };
        guest.start_ring_at(&mut rig, 0, &layout, base);
        rig.gate.hold();
        guest.offer(0, OUT, 7, Data::Out(&[1; 512]));
        rig.until("it is at the device", |rig| rig.gate.held() == 1);
        assert!(region.all.write(0, &vec![0; 1 << 20]));
        rig.die(None);
        rig.until("its end", |rig| !rig.left.is_empty());
        let why = rig.left.pop().map(|left| left.0);
        assert_eq!(why, Some("its saved state is damaged"));
        // Device I/O is still waited for.
        assert!(rig.core.recovered.may_touch_memory_of(LaneIndex(3)));
        rig.fence();
        let mut next = rig.guest(PLAIN);
        let wrote = next.offer(0, OUT, 7, Data::Out(&[2; 512]));
        assert_eq!(next.end(&mut rig, 0), (wrote, 0, 1));
        assert!(rig.left.is_empty());
    }
}
