//! The frontend with a client, a guest and a device, in one thread.

mod admit;
mod cost;
mod foreign;
mod guest;
mod in_band;
mod memory;
mod read_only;
mod reported;
mod rig;

use forebay_virtio::model::{GUEST_ADDRESS, Layout, Offered, USER_ADDRESS};
use forebay_virtio::vhost_user::message::request;
use guest::{Data, PLAIN, Way, table};
use rig::Rig;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use std::os::fd::AsFd;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const WAYS: [Way; 6] = [
    PLAIN,
    Way {
        packed: true,
        ..PLAIN
    },
    Way {
        event_idx: true,
        queues: 3,
        inflight: true,
        ..PLAIN
    },
    Way {
        packed: true,
        event_idx: true,
        queues: 2,
        inflight: true,
        ..PLAIN
    },
    Way {
        event_idx: true,
        queues: 2,
        in_band: true,
        ..PLAIN
    },
    Way {
        packed: true,
        in_band: true,
        ..PLAIN
    },
];

fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// Requests that complete within one turn take some time, too.
#[test]
fn latency_is_never_zero() {
    for kind in ["null", "ram", "file"] {
        let mut rig = Rig::on(kind, 1);
        let mut guest = rig.guest(PLAIN);
        for sector in [0, 8] {
            for (what, data) in [(OUT, Data::Out(&[7; 512])), (IN, Data::In(512))] {
                guest.offer(0, what, sector, data);
                guest.kick(0);
                assert_eq!(guest.end(&mut rig, 0).1, 0);
            }
        }
        let lane = rig.core.lane(crate::lane::LaneIndex(3)).unwrap();
        crate::lane::assert_times(lane.record(), 4);
    }
}

#[test]
fn every_request_of_every_ring() {
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        for queue in 0..usize::from(way.queues) {
            let sector = 128 * queue as u64 + 3;
            let bytes: Vec<u8> = (0..1024u32).map(|i| (i * 7 + queue as u32) as u8).collect();
            let wrote = guest.offer(queue, OUT, sector, Data::Out(&bytes));
            assert_eq!(guest.end(&mut rig, queue), (wrote, 0, 1));
            let read = guest.offer(queue, IN, sector, Data::In(1024));
            assert_eq!(guest.end(&mut rig, queue), (read, 0, 1025));
            assert_eq!(guest.data(read, 1024), bytes);
            let flush = guest.offer(queue, FLUSH, 0, Data::None);
            assert_eq!(guest.end(&mut rig, queue), (flush, 0, 1));
            let id = guest.offer(queue, GET_ID, 0, Data::In(20));
            assert_eq!(guest.end(&mut rig, queue).1, 0);
            assert_eq!(guest.data(id, 20), *b"serial-number\0\0\0\0\0\0\0");
            let zero = segment(sector, 1, 0);
            guest.offer(queue, WRITE_ZEROES, 0, Data::Out(&zero));
            assert_eq!(guest.end(&mut rig, queue).1, 0);
            let read = guest.offer(queue, IN, sector, Data::In(1024));
            guest.end(&mut rig, queue);
            assert_eq!(guest.data(read, 512), [0; 512]);
            assert_eq!(guest.data(read, 1024)[512..], bytes[512..]);
            let discard = segment(sector + 1, 1, 0);
            guest.offer(queue, DISCARD, 0, Data::Out(&discard));
            assert_eq!(guest.end(&mut rig, queue).1, 0);
            for (kind, data, status) in [
                (99, Data::None, 2),
                (IN, Data::In(100), 1),
                (DISCARD, Data::Out(&segment(0, 1, 1)), 2),
                (WRITE_ZEROES, Data::Out(&segment(u64::MAX, 1, 0)), 1),
            ] {
                guest.offer(queue, kind, 0, data);
                assert_eq!(guest.end(&mut rig, queue).1, status);
            }
            let beyond = guest.offer(queue, OUT, 100 * 128, Data::Out(&bytes));
            assert_eq!(guest.end(&mut rig, queue), (beyond, 1, 1));
        }
        assert!(rig.left.is_empty());
    }
}

#[test]
fn a_sleeping_reactor_is_kicked_and_a_waiting_driver_is_called() {
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        for _ in 0..20 {
            guest.drivers[0].want_call(true);
            rig.until_asleep();
            assert!(!rig.is_woken());
            guest.calls(0);
            guest.offer(0, IN, 0, Data::In(512));
            assert!(guest.kick(0), "a kick was not asked for: {way:?}");
            assert!(rig.is_woken(), "a kick woke nobody: {way:?}");
            guest.end(&mut rig, 0);
            rig.until("a call", |_| guest.calls(0) > 0);
        }
    }
}

#[test]
fn a_stopped_ring_has_nothing_in_flight() {
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        guest.offer(0, IN, 0, Data::In(512));
        guest.end(&mut rig, 0);
        rig.gate.hold();
        guest.offer(0, IN, 0, Data::In(512));
        rig.until("it is at the device", |rig| rig.gate.held() == 1);
        guest.send(request::GET_VRING_BASE, &[0; 8], &[]);
        for _ in 0..50 {
            rig.turn();
        }
        assert!(!guest.has_answer());
        let late = guest.offer(0, IN, 0, Data::In(512));
        rig.gate.release();
        let answer = guest.answer(&mut rig);
        let base = u32::from_le_bytes(answer[4..8].try_into().unwrap());
        assert_eq!(base, if way.packed { 0x8006_8006 } else { 2 });
        assert!(
            guest
                .collect(0)
                .is_some_and(|(request, ..)| request != late)
        );
        for _ in 0..50 {
            rig.turn();
        }
        assert!(guest.collect(0).is_none());
        assert!(rig.left.is_empty());
    }
}

#[test]
fn inflight_first_io_survives_restart() {
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        let bytes = [0x5A; 512];
        rig.gate.hold();
        // The very first request: no counter or index has moved.
        let first = guest.offer(0, OUT, 7, Data::Out(&bytes));
        rig.until("it is at the device", |rig| rig.gate.held() == 1);
        guest.calls(0);
        rig.die(None);
        for _ in 0..50 {
            rig.turn();
        }
        assert!(guest.collect(0).is_none(), "before the fence: {way:?}");
        rig.until("a call", |_| guest.calls(0) > 0);
        rig.fence();
        assert_eq!(guest.end(&mut rig, 0), (first, 0, 1));
        assert!(guest.collect(0).is_none());
        let read = guest.offer(0, IN, 7, Data::In(512));
        guest.kick(0);
        assert_eq!(guest.end(&mut rig, 0).0, read);
        assert_eq!(guest.data(read, 512), bytes);
        assert!(rig.left.is_empty());
    }
}

#[test]
fn an_engine_dies_between_any_two_turns() {
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        let mut ended = std::collections::BTreeSet::new();
        let mut offered = 0;
        for round in 0..40u64 {
            for queue in 0..usize::from(way.queues) {
                while let Some((request, status, _)) = guest.collect(queue) {
                    assert_eq!(status, 0);
                    assert!(ended.insert(request), "returned twice");
                }
                if guest.drivers[queue].outstanding() < 2 {
                    let bytes = [round as u8; 512];
                    guest.offer(queue, OUT, round, Data::Out(&bytes));
                    offered += 1;
                }
            }
            for _ in 0..round % 5 {
                rig.turn();
            }
            rig.die(None);
            for _ in 0..round % 3 {
                rig.turn();
            }
            rig.fence();
        }
        for queue in 0..usize::from(way.queues) {
            while guest.drivers[queue].outstanding() > 0 {
                let (request, status, _) = guest.end(&mut rig, queue);
                assert_eq!(status, 0);
                assert!(ended.insert(request), "returned twice");
            }
        }
        assert_eq!(ended.len(), offered);
        assert!(rig.left.is_empty());
    }
}

#[test]
fn a_request_that_kills_ends_with_an_error() {
    let mut rig = Rig::new(1);
    let mut guest = rig.guest(PLAIN);
    rig.gate.hold();
    let killer = guest.offer(0, IN, 0, Data::In(512));
    let tag = 0;
    rig.until("it is at the device", |rig| rig.gate.held() == 1);
    for death in 1..=3 {
        rig.die(Some(tag));
        rig.gate.hold();
        rig.fence();
        if death < 3 {
            rig.until("it is tried again", |rig| rig.gate.held() == 1);
        }
    }
    assert_eq!(guest.end(&mut rig, 0), (killer, 1, 1));
    rig.gate.release();
    guest.offer(0, IN, 0, Data::In(512));
    assert_eq!(guest.end(&mut rig, 0).1, 0);
}

#[test]
fn two_deaths_before_the_first_ones_fence() {
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        rig.gate.hold();
        let one = guest.offer(0, OUT, 7, Data::Out(&[1; 512]));
        rig.until("it is at the device", |rig| rig.gate.held() == 1);
        for _ in 0..3 {
            rig.die(None);
            for _ in 0..5 {
                rig.turn();
            }
        }
        let two = guest.offer(0, IN, 40, Data::In(512));
        guest.kick(0);
        // Requests without overlap continue at once.
        assert_eq!(guest.end(&mut rig, 0).0, two);
        rig.fence();
        assert_eq!(guest.end(&mut rig, 0), (one, 0, 1));
    }
}

#[test]
fn a_ring_is_stopped_over_a_death_and_goes_on() {
    for way in WAYS {
        for turns in 0..5 {
            let mut rig = Rig::new(4);
            let mut guest = rig.guest(way);
            for _ in 0..3 {
                guest.offer(0, IN, 0, Data::In(512));
                guest.end(&mut rig, 0);
            }
            guest.send(request::GET_VRING_BASE, &[0; 8], &[]);
            for _ in 0..turns {
                rig.turn();
            }
            rig.die(None);
            rig.fence();
            let answer = guest.answer(&mut rig);
            let base = u32::from_le_bytes(answer[4..8].try_into().unwrap());
            // Nine descriptors in a ring of eight.
            assert_eq!(base, if way.packed { 0x0001_0001 } else { 3 });
            guest.start_ring_at(&mut rig, 0, &Layout::new(0, guest::SIZE), base);
            rig.die(None);
            rig.fence();
            let request = guest.offer(0, IN, 0, Data::In(512));
            assert_eq!(guest.end(&mut rig, 0), (request, 0, 513));
            assert!(guest.collect(0).is_none() && rig.left.is_empty());
        }
    }
}

#[test]
fn a_reset_waits_for_requests_in_flight() {
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        rig.gate.hold();
        guest.offer(0, IN, 0, Data::In(512));
        rig.until("it is at the device", |rig| rig.gate.held() == 1);
        guest.send(request::RESET_DEVICE, &[], &[]);
        guest.send(request::GET_STATUS, &[], &[]);
        for _ in 0..50 {
            rig.turn();
        }
        assert!(!guest.has_answer());
        rig.gate.release();
        assert_eq!(guest.answer(&mut rig), [0; 8]);
        assert!(guest.collect(0).is_some());
        guest.offer(0, IN, 0, Data::In(512));
        for _ in 0..50 {
            rig.turn();
        }
        assert!(guest.collect(0).is_none() && rig.left.is_empty());
    }
}

#[test]
fn a_long_request_goes_in_parts_and_comes_back_as_one() {
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        let (bytes, from) = (1_300_992, 8 << 20);
        let data: Vec<u8> = (0..bytes).map(|i| (i * 31 / 512) as u8).collect();
        let piece = |at: usize, len: usize, writable| Offered {
            address: GUEST_ADDRESS + at as u64,
            len: len as u32,
            writable,
        };
        for (kind, expected) in [(OUT, 1), (IN, bytes as u32 + 1)] {
            let mut header = kind.to_le_bytes().to_vec();
            header.extend([0; 12]);
            header[8] = 9;
            assert!(guest.vm.all.write(1 << 20, &header));
            if kind == OUT {
                assert!(guest.vm.all.write(from, &data));
            } else {
                assert!(guest.vm.all.write(from, &vec![0; bytes]));
            }
            let half = 700_416;
            let pieces = [
                piece(1 << 20, 16, false),
                piece(from, half, kind == IN),
                piece(from + half, bytes - half, kind == IN),
                piece((1 << 20) + 16, 1, true),
            ];
            guest.drivers[0].offer(&pieces, true).expect("room");
            let mut ended = None;
            rig.until("its end", |_| {
                ended = guest.drivers[0].collect();
                ended.is_some()
            });
            assert_eq!(ended.map(|(_, written)| written), Some(expected));
            let mut status = [9];
            assert!(guest.vm.all.read((1 << 20) + 16, &mut status));
            assert_eq!(status, [0]);
        }
        let mut read = vec![0; bytes];
        assert!(guest.vm.all.read(from, &mut read));
        assert!(read == data, "other bytes");
    }
}

#[test]
fn growth_is_reported_and_the_driver_sets_the_write_cache() {
    let mut rig = Rig::new(2);
    let guest = rig.guest(PLAIN);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (mine, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    guest.ok(
        &mut rig,
        request::SET_BACKEND_REQ_FD,
        &[],
        &[theirs.as_fd()],
    );
    drop(theirs);
    let mut ask = vec![0; 72];
    ask[4] = 60;
    let config = |rig: &mut Rig| guest.ask(rig, request::GET_CONFIG, &ask)[12..].to_vec();
    let before = config(&mut rig);
    assert_eq!(before[..8], (100u64 * 128).to_le_bytes());
    assert_eq!((before[32], before[34]), (1, 2));
    rig.grow();
    rig.die(None);
    rig.fence();
    let mut message = [0; 64];
    let (n, _) = rustix::net::recv(&mine, &mut message[..], RecvFlags::DONTWAIT).unwrap();
    assert_eq!(message[..12], [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    // Once by the engine; perhaps again by the successor, which cannot know.
    assert!(n == 12 || n == 24);
    assert_eq!(config(&mut rig)[..8], (120u64 * 128).to_le_bytes());
    let mut set = vec![0; 13];
    (set[0], set[4]) = (32, 1);
    guest.ok(&mut rig, request::SET_CONFIG, &set, &[]);
    assert_eq!(config(&mut rig)[32], 0);
    rig.die(None);
    rig.fence();
    assert_eq!(config(&mut rig)[32], 0);
    set[12] = 2;
    assert_eq!(guest.report(&mut rig, request::SET_CONFIG, &set, &[]), 1);
}

/// Such a guest is closed for a reason that names it; the next one is served.
fn is_closed(rig: &mut Rig, what: &str) {
    rig.until(what, |rig| !rig.left.is_empty());
    let why = rig.left.pop().expect("one");
    assert!(why.0.contains(what), "{} is not about {what}", why.0);
    let mut guest = rig.guest(PLAIN);
    guest.offer(0, IN, 0, Data::In(512));
    assert_eq!(guest.end(rig, 0).1, 0);
    assert!(rig.left.is_empty());
}

#[test]
fn hostile_guest_available_index_beyond_the_queue() {
    let mut rig = Rig::new(1);
    let guest = rig.guest(PLAIN);
    let layout = Layout::new(0, guest::SIZE);
    assert!(guest.vm.all.write(layout.driver + 2, &9u16.to_le_bytes()));
    is_closed(&mut rig, "the available index is beyond the queue");
}

#[test]
fn hostile_guest_descriptor_loop() {
    for packed in [false, true] {
        let mut rig = Rig::new(1);
        let guest = rig.guest(Way { packed, ..PLAIN });
        let layout = Layout::new(0, guest::SIZE);
        let address = GUEST_ADDRESS;
        for i in 0..usize::from(guest::SIZE) {
            // An endless chain: a circle if split, unterminated if packed.
            let mut d = address.to_le_bytes().to_vec();
            d.extend(16u32.to_le_bytes());
            let words = if packed { [0u16, 1 | 1 << 7] } else { [1, 0] };
            d.extend(words[0].to_le_bytes());
            d.extend(words[1].to_le_bytes());
            assert!(guest.vm.all.write(layout.descriptors + 16 * i, &d));
        }
        if !packed {
            assert!(guest.vm.all.write(layout.driver + 2, &1u16.to_le_bytes()));
        }
        is_closed(&mut rig, "a chain of descriptors does not end");
    }
}

#[test]
fn hostile_guest_request_without_a_status() {
    let mut rig = Rig::new(1);
    let mut guest = rig.guest(PLAIN);
    let piece = Offered {
        address: GUEST_ADDRESS,
        len: 16,
        writable: false,
    };
    guest.drivers[0].offer(&[piece], false);
    is_closed(&mut rig, "a request without a place for its status");
}

#[test]
fn hostile_guest_data_outside_memory() {
    let mut rig = Rig::new(1);
    let mut guest = rig.guest(PLAIN);
    let piece = |address, len, writable| Offered {
        address,
        len,
        writable,
    };
    let at = GUEST_ADDRESS + (1 << 20);
    assert!(guest.vm.all.write(1 << 20, &[0; 16]));
    guest.drivers[0].offer(
        &[
            piece(at, 16, false),
            piece(0x1000, 512, true),
            piece(at + 16, 1, true),
        ],
        false,
    );
    rig.until("its end", |_| guest.drivers[0].has_used());
    let mut status = [0];
    assert!(guest.vm.all.read((1 << 20) + 16, &mut status));
    assert_eq!(status, [1]);
    assert!(rig.left.is_empty());
}

#[test]
fn hostile_guest_ring_that_moves_while_in_use() {
    let mut rig = Rig::new(1);
    let guest = rig.guest(PLAIN);
    let bytes = guest.addresses(0, [4096, 8192, 12288]);
    assert_eq!(
        guest.report(&mut rig, request::SET_VRING_ADDR, &bytes, &[]),
        1
    );
    guest.send(request::SET_VRING_ADDR, &bytes, &[]);
    is_closed(&mut rig, "a ring that would move while it is in use");
}

#[test]
fn hostile_guest_ring_outside_memory() {
    let mut rig = Rig::new(1);
    let guest = rig.guest(PLAIN);
    let table = table(&[[GUEST_ADDRESS + 4096, 4096, USER_ADDRESS + 4096, 4096]]);
    guest.send(request::SET_MEM_TABLE, &table, &[guest.vm.file.as_fd()]);
    is_closed(&mut rig, "a part of the ring is not in the guest's memory");
}

#[test]
fn hostile_guest_unknown_and_malformed_messages() {
    let mut rig = Rig::new(1);
    let guest = rig.guest(PLAIN);
    assert_eq!(guest.report(&mut rig, 77, &[0; 100], &[]), 1);
    guest.send(request::SET_FEATURES, &[0; 7], &[]);
    is_closed(&mut rig, "a message whose length does not match its kind");
}

#[test]
fn hostile_guest_descriptors_that_are_not_what_they_say() {
    let mut rig = Rig::new(1);
    let guest = rig.guest(PLAIN);
    let kick = [guest.vm.file.as_fd()];
    let reported = guest.report(&mut rig, request::SET_VRING_KICK, &[0; 8], &kick);
    assert_eq!(reported, 1);
    guest.send(request::SET_VRING_KICK, &[0; 8], &[]);
    is_closed(
        &mut rig,
        "a message with more or fewer descriptors than its kind needs",
    );
}
