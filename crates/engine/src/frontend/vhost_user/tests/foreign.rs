//! The behaviour of other clients: Cloud Hypervisor, crosvm, SPDK, QEMU, drivers of every age.
//!
//! **Not here:** User Mode Linux, which kicks by messages ([`super::in_band`]).

use super::guest::{ALL, Data, Guest, MEMORY_BYTES, PLAIN, SIZE, Way, table};
use super::rig::Rig;
use super::{GET_ID, IN, OUT, WAYS, is_closed, segment};
use forebay_virtio::model::{Driver, GUEST_ADDRESS, Layout, Offered};
use forebay_virtio::ring::RingFeatures;
use forebay_virtio::vhost_user::message::request;
use forebay_virtio::vhost_user::protocol_feature;
use forebay_virtio::{feature, vhost_user::MAX_CONFIG_BYTES};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsFd;

fn state(index: u32, num: u32) -> [u8; 8] {
    (u64::from(index) | u64::from(num) << 32).to_le_bytes()
}

#[test]
fn a_driver_goes_and_another_comes_with_other_features_and_rings() {
    // Cloud Hypervisor only disables the rings when its guest resets the device.
    for way in WAYS {
        for dies in [false, true] {
            let mut rig = Rig::new(4);
            let mut guest = rig.guest(way);
            for _ in 0..3 {
                guest.offer(0, IN, 0, Data::In(512));
                guest.end(&mut rig, 0);
            }
            rig.gate.hold();
            let last = guest.offer(0, IN, 0, Data::In(512));
            rig.until("it is at the device", |rig| rig.gate.held() == 1);
            guest.begin(request::SET_VRING_ENABLE, &state(0, 0), &[]);
            rig.turns();
            assert!(!guest.has_answer(), "something is in flight");
            if dies {
                rig.die(None);
                rig.fence();
            }
            rig.gate.release();
            assert_eq!(guest.reported(&mut rig), 0);
            assert_eq!(guest.collect(0), Some((last, 0, 513)));
            for index in 1..u32::from(way.queues) {
                guest.ok(&mut rig, request::SET_VRING_ENABLE, &state(index, 0), &[]);
            }
            // A refusal changes nothing.
            let none = guest.report(&mut rig, request::SET_VRING_NUM, &state(0, 1025), &[]);
            assert_eq!(none, 1);
            guest.ok(&mut rig, request::SET_VRING_ENABLE, &state(0, 1), &[]);
            guest.offer(0, IN, 0, Data::In(512));
            guest.kick(0);
            guest.end(&mut rig, 0);
            guest.ok(&mut rig, request::SET_VRING_ENABLE, &state(0, 0), &[]);
            another(&mut rig, &mut guest, dies);
            assert!(rig.left.is_empty(), "{way:?}");
        }
    }
}

/// A driver that makes new rings, in Cloud Hypervisor's order of messages.
fn another(rig: &mut Rig, guest: &mut Guest, dies: bool) {
    let way = Way {
        packed: !guest.way.packed,
        event_idx: !guest.way.event_idx,
        ..guest.way
    };
    guest.way = way;
    let mut bits = feature::VERSION_1 | feature::PROTOCOL_FEATURES | feature::INDIRECT_DESC;
    if way.packed {
        bits |= feature::RING_PACKED;
    }
    if way.event_idx {
        bits |= feature::EVENT_IDX;
    }
    guest.ok(rig, request::SET_FEATURES, &bits.to_le_bytes(), &[]);
    guest.set_memory(rig);
    if dies {
        rig.die(None);
        rig.fence();
    }
    if way.inflight {
        guest.get_inflight(rig);
    }
    let layout = Layout::new(8 << 20, SIZE);
    guest.set_addresses(rig, 0, [layout.descriptors, layout.device, layout.driver]);
    let features = RingFeatures {
        event_idx: way.event_idx,
        indirect: true,
    };
    guest.drivers[0] = Driver::new(&guest.vm.all, layout, SIZE, way.packed, features);
    let base = if way.packed { 0x8000_8000 } else { 0 };
    guest.start_ring_at(rig, 0, &layout, base);
    for _ in 0..20 {
        let bytes = [0x77; 512];
        guest.offer(0, OUT, 3, Data::Out(&bytes));
        guest.kick(0);
        assert_eq!(guest.end(rig, 0).1, 0);
        let read = guest.offer(0, IN, 3, Data::In(512));
        guest.kick(0);
        assert_eq!(guest.end(rig, 0), (read, 0, 513));
        assert_eq!(guest.data(read, 512), bytes);
        rig.until_asleep();
    }
}

#[test]
fn a_disabled_ring_is_let_alone() {
    // Its driver is gone, and its memory reused.
    for way in WAYS {
        for dies in [false, true] {
            let mut rig = Rig::new(4);
            let mut guest = rig.guest(way);
            for _ in 0..3 {
                guest.offer(0, IN, 0, Data::In(512));
                guest.end(&mut rig, 0);
            }
            rig.until_asleep();
            for index in 0..u32::from(way.queues) {
                guest.ok(&mut rig, request::SET_VRING_ENABLE, &state(index, 0), &[]);
            }
            let theirs = vec![0xA5; 64 << 10];
            assert!(guest.vm.all.write(0, &theirs));
            let untouched = |guest: &Guest| {
                let mut now = vec![0; theirs.len()];
                assert!(guest.vm.all.read(0, &mut now));
                assert!(now == theirs, "{way:?} {dies}");
            };
            for _ in 0..3 {
                rig.until_asleep();
                rig.turns();
                if dies {
                    rig.die(None);
                    rig.fence();
                }
            }
            untouched(&guest);
            // Its memory is not looked up either: it may go.
            let [address, _, user, _] = ALL;
            let rest = [
                address + (1 << 20),
                MEMORY_BYTES - (1 << 20),
                user + (1 << 20),
                1 << 20,
            ];
            let fd = [guest.vm.file.as_fd()];
            guest.ok(&mut rig, request::SET_MEM_TABLE, &table(&[rest]), &fd);
            another(&mut rig, &mut guest, dies);
            untouched(&guest);
            assert!(rig.left.is_empty());
        }
    }
}

#[test]
fn a_disabled_ring_goes_on_where_it_was() {
    // As when a VM is paused.
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        for round in 0..30 {
            guest.offer(0, IN, 0, Data::In(512));
            guest.kick(0);
            guest.end(&mut rig, 0);
            if round % 3 == 0 {
                rig.until_asleep();
            }
            guest.ok(&mut rig, request::SET_VRING_ENABLE, &state(0, 0), &[]);
            let late = guest.offer(0, IN, 0, Data::In(512));
            guest.kick(0);
            if round % 4 == 0 {
                rig.die(None);
                rig.fence();
            }
            rig.turns();
            assert!(guest.collect(0).is_none());
            guest.ok(&mut rig, request::SET_VRING_ENABLE, &state(0, 1), &[]);
            assert_eq!(guest.end(&mut rig, 0), (late, 0, 513));
        }
        assert!(rig.left.is_empty());
    }
}

#[test]
fn rings_are_started_enabled_and_stopped_in_any_order() {
    for way in WAYS.into_iter().filter(|way| !way.in_band) {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        guest.offer(0, IN, 0, Data::In(512));
        guest.end(&mut rig, 0);
        let base = guest.ask(&mut rig, request::GET_VRING_BASE, &state(0, 0));
        let again = guest.ask(&mut rig, request::GET_VRING_BASE, &state(0, 0));
        assert_eq!(base, again);
        let kick = [guest.vm.file.as_fd()];
        let reported = guest.report(&mut rig, request::SET_VRING_KICK, &[0; 8], &kick);
        assert_eq!(reported, 1);
        guest.ok(&mut rig, request::SET_VRING_NUM, &state(0, 16), &[]);
        guest.ok(
            &mut rig,
            request::SET_VRING_NUM,
            &state(0, SIZE.into()),
            &[],
        );
        // Enabled before started, and the reverse; earlier requests and kicks are found.
        let first = guest.offer(0, IN, 0, Data::In(512));
        guest.ok(&mut rig, request::SET_VRING_ENABLE, &state(0, 1), &[]);
        rig.turns();
        assert!(guest.collect(0).is_none());
        let kick = eventfd(1, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let kick = [kick.as_fd()];
        guest.ok(&mut rig, request::SET_VRING_KICK, &[0; 8], &kick);
        assert_eq!(guest.end(&mut rig, 0).0, first);
        for _ in 0..2 {
            guest.ok(&mut rig, request::SET_VRING_ENABLE, &state(0, 0), &[]);
        }
        let second = guest.offer(0, IN, 0, Data::In(512));
        rustix::io::write(kick[0], &1u64.to_ne_bytes()).unwrap();
        rig.until_asleep();
        assert!(guest.collect(0).is_none());
        guest.ok(&mut rig, request::SET_VRING_ENABLE, &state(0, 1), &[]);
        assert_eq!(guest.end(&mut rig, 0).0, second);
        // RESET_DEVICE allows other features; the obsolete RESET_OWNER changes nothing.
        guest.ok(&mut rig, request::RESET_OWNER, &[], &[]);
        guest.ok(&mut rig, request::RESET_DEVICE, &[], &[]);
        another(&mut rig, &mut guest, false);
        assert!(rig.left.is_empty());
    }
}

#[test]
fn rings_of_any_size() {
    // (size, packed, valid)
    for (size, packed, good) in [
        (5, true, true),
        (7, true, true),
        (1024, true, true),
        (1024, false, true),
        (4, false, true),
        (6, false, false),
    ] {
        let mut rig = Rig::new(1);
        let mut guest = rig.guest(Way { packed, ..PLAIN });
        guest.ok(&mut rig, request::RESET_DEVICE, &[], &[]);
        guest.way.size = size;
        let layout = Layout::new(8 << 20, size);
        let features = RingFeatures {
            event_idx: false,
            indirect: true,
        };
        guest.drivers[0] = Driver::new(&guest.vm.all, layout, size, packed, features);
        let base = if packed { 0x8000_8000 } else { 0 };
        if !good {
            let queue = state(0, size.into());
            guest.ok(&mut rig, request::SET_VRING_NUM, &queue, &[]);
            guest.set_addresses(
                &mut rig,
                0,
                [layout.descriptors, layout.device, layout.driver],
            );
            let kick = [guest.kicks[0].as_fd()];
            guest.ok(&mut rig, request::SET_VRING_KICK, &[0; 8], &kick);
            guest.send(request::SET_VRING_ENABLE, &state(0, 1), &[]);
            is_closed(&mut rig, "a queue of a size that is not supported");
            continue;
        }
        guest.start_ring_at(&mut rig, 0, &layout, base);
        for _ in 0..40 {
            let read = guest.offer(0, IN, 0, Data::In(512));
            guest.kick(0);
            assert_eq!(guest.end(&mut rig, 0), (read, 0, 513), "{size} {packed}");
        }
        assert!(rig.left.is_empty());
    }
}

/// Where a request of parts is.
const PARTS: usize = 4 << 20;

/// Offers these pieces (offset from [`PARTS`], bytes, writable); returns the bytes written.
fn parts(rig: &mut Rig, guest: &mut Guest, pieces: &[(u64, u32, bool)]) -> u32 {
    let pieces: Vec<Offered> = (pieces.iter())
        .map(|(from, len, writable)| Offered {
            address: GUEST_ADDRESS + PARTS as u64 + from,
            len: *len,
            writable: *writable,
        })
        .collect();
    guest.drivers[0].offer(&pieces, true).expect("room");
    let mut ended = None;
    rig.until("its end", |_| {
        ended = guest.drivers[0].collect();
        ended.is_some()
    });
    ended.expect("it ended").1
}

fn header(guest: &Guest, kind: u32, sector: u64) {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend(0u32.to_le_bytes());
    header.extend(sector.to_le_bytes());
    assert!(guest.vm.all.write(PARTS, &header));
}

fn bytes(guest: &Guest, from: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert!(guest.vm.all.read(PARTS + from, &mut bytes));
    bytes
}

#[test]
fn requests_of_any_shape() {
    for way in [
        PLAIN,
        Way {
            packed: true,
            ..PLAIN
        },
    ] {
        let mut rig = Rig::new(1);
        let mut guest = rig.guest(way);
        let (r, g) = (&mut rig, &mut guest);
        let data: Vec<u8> = (0..512u32).map(|i| (i * 3) as u8).collect();
        assert!(g.vm.all.write(PARTS + 16, &data));
        // Header and data in one piece, cut anywhere; the status alone.
        for pieces in [
            &[(0, 528, false), (600, 1, true)][..],
            &[(0, 3, false), (3, 525, false), (600, 1, true)],
            &[
                (0, 15, false),
                (15, 2, false),
                (17, 511, false),
                (600, 1, true),
            ],
        ] {
            header(g, OUT, 11);
            assert!(g.vm.all.write(PARTS + 600, &[9]));
            assert_eq!(parts(r, g, pieces), 1);
            assert_eq!(bytes(g, 600, 1), [0]);
        }
        // The status behind the data in one piece, or in the last of several.
        for (pieces, written) in [
            (&[(0, 16, false), (4096, 513, true)][..], 513),
            (
                &[
                    (0, 16, false),
                    (4096, 1, true),
                    (4097, 510, true),
                    (4607, 2, true),
                ],
                513,
            ),
        ] {
            header(g, IN, 11);
            assert!(g.vm.all.write(PARTS + 4096, &[9; 513]));
            assert_eq!(parts(r, g, pieces), written);
            assert_eq!(bytes(g, 4096, 512), data);
            assert_eq!(bytes(g, 4608, 1), [0]);
        }
        // The identifier, with buffers of any size.
        let id = *b"serial-number\0\0\0\0\0\0\0";
        for room in [0, 1, 5, 20, 64] {
            header(g, GET_ID, 0);
            assert!(g.vm.all.write(PARTS + 4096, &[9; 65]));
            let pieces = [(0, 16, false), (4096, room + 1, true)];
            let fits = room.min(20);
            assert_eq!(parts(r, g, &pieces), fits + 1);
            let fits = fits as usize;
            assert_eq!(bytes(g, 4096, fits), id[..fits]);
            assert_eq!(bytes(g, 4096 + room as usize, 1), [0]);
        }
        for (kind, more) in [(IN, 0), (IN, 511), (OUT, 0), (OUT, 100)] {
            header(g, kind, 0);
            let pieces = match kind {
                IN => [(0, 16, false), (4096, more + 1, true)],
                _ => [(0, 16 + more, false), (4096, 1, true)],
            };
            assert_eq!(parts(r, g, &pieces), 1);
            let status = if kind == IN { more as usize } else { 0 };
            assert_eq!(bytes(g, 4096 + status, 1), [1]);
        }
        assert!(rig.left.is_empty());
    }
}

#[test]
fn unsupported_requests_get_an_error_status() {
    let mut rig = Rig::new(1);
    let mut guest = rig.guest(PLAIN);
    let two = [segment(0, 1, 0), segment(8, 1, 0)].concat();
    let (unmap, odd) = (segment(0, 1, 1), segment(0, 1, 2));
    let none = segment(0, 0, 0);
    let long = segment(0, u32::MAX, 0);
    // SCSI commands, lifetime, secure erase, zones, undefined types; then segments.
    let mut cases: Vec<(u32, Data<'_>, u8)> = [2, 3, 10, 14, 15, 16, 17, 18, 20, 22, 24, 1 << 31]
        .map(|kind| (kind, Data::In(512), 2))
        .into();
    cases.extend([
        (super::DISCARD, Data::Out(&two), 1),
        (super::DISCARD, Data::Out(&unmap), 2),
        (super::DISCARD, Data::Out(&none), 1),
        (super::DISCARD, Data::Out(&long), 1),
        (super::DISCARD, Data::Out(&unmap[..15]), 1),
        (super::DISCARD, Data::None, 1),
        (super::WRITE_ZEROES, Data::Out(&unmap), 0),
        (super::WRITE_ZEROES, Data::Out(&odd), 2),
        (super::WRITE_ZEROES, Data::Out(&two), 1),
        (super::FLUSH, Data::Out(&[0; 512]), 0),
    ]);
    for (kind, data, status) in cases {
        let request = guest.offer(0, kind, 0, data);
        assert_eq!(guest.end(&mut rig, 0), (request, status, 1), "{kind}");
    }
    assert!(rig.left.is_empty());
}

#[test]
fn messages_that_are_not_served_are_refused() {
    let mut rig = Rig::new(1);
    let mut guest = rig.guest(PLAIN);
    let offered = guest.ask(&mut rig, request::GET_FEATURES, &[]);
    let offered = u64::from_le_bytes(offered.try_into().unwrap());
    assert_eq!(offered & (1 << 26 | 1 << 33), 0);
    let protocol = guest.ask(&mut rig, request::GET_PROTOCOL_FEATURES, &[]);
    assert_eq!(protocol, protocol_feature::ALL.to_le_bytes());
    // The log, network packets, IOMMU, endianness, crypto, post-copy, GPU, shared objects, device
    // state, and crosvm's own.
    for kind in (6..8)
        .chain(19..21)
        .chain([22, 23])
        .chain(26..31)
        .chain([33])
        .chain(41..50)
        .chain(1000..1005)
    {
        for payload in [&[][..], &[0; 8], &[0; 40]] {
            assert_eq!(guest.report(&mut rig, kind, payload, &[]), 1, "{kind}");
        }
    }
    let fd = [guest.vm.file.as_fd()];
    assert_eq!(guest.report(&mut rig, 6, &[0; 16], &fd), 1);
    for bits in [1u64 << 26, 1 << 33, 1 << 63] {
        let payload = bits.to_le_bytes();
        for kind in [request::SET_FEATURES, request::SET_PROTOCOL_FEATURES] {
            assert_eq!(guest.report(&mut rig, kind, &payload, &[]), 1);
        }
    }
    let read = guest.offer(0, IN, 0, Data::In(512));
    assert_eq!(guest.end(&mut rig, 0), (read, 0, 513));
    guest.send(6, &[0; 8], &[]);
    is_closed(&mut rig, "a request that is not supported");
}

#[test]
fn the_configuration_is_read_in_pieces() {
    let mut rig = Rig::new(2);
    let guest = rig.guest(PLAIN);
    let ask = |rig: &mut Rig, offset: u32, size: u32| {
        let mut ask = offset.to_le_bytes().to_vec();
        ask.extend(size.to_le_bytes());
        ask.resize(12 + size as usize, 0);
        guest.ask(rig, request::GET_CONFIG, &ask)
    };
    let most = MAX_CONFIG_BYTES as u32;
    let all = ask(&mut rig, 0, most)[12..].to_vec();
    assert_eq!(all[..8], (100u64 * 128).to_le_bytes());
    assert!(all[60..].iter().all(|byte| *byte == 0));
    for (offset, size) in [(0, 8), (4, 4), (20, 4), (32, 1), (34, 2), (59, 2), (255, 1)] {
        let answer = ask(&mut rig, offset, size);
        assert_eq!(answer[..4], offset.to_le_bytes());
        assert_eq!(answer[4..8], size.to_le_bytes());
        let part = offset as usize..(offset + size) as usize;
        assert_eq!(answer[12..], all[part]);
    }
    for (offset, size) in [
        (512, 1),
        (257, 256),
        (255, 2),
        (1, 256),
        (u32::MAX, 2),
        (0, 0),
    ] {
        assert!(ask(&mut rig, offset, size).is_empty(), "{offset} {size}");
    }
    // With the offset of Cloud Hypervisor.
    let answer = ask(&mut rig, 256, 96);
    assert_eq!(answer[..4], 256u32.to_le_bytes());
    assert_eq!(answer[12..], all[..96]);
    // Only the cache mode may be set, also with SPDK's length.
    for (offset, value, bytes, reported) in [
        (32u32, 0u8, 1, 0),
        (32, 1, 256, 0),
        (32, 2, 1, 1),
        (0, 1, 1, 1),
        (33, 0, 1, 1),
        (u32::MAX, 0, 1, 1),
    ] {
        let mut set = offset.to_le_bytes().to_vec();
        set.extend(1u32.to_le_bytes());
        set.extend(0u32.to_le_bytes());
        set.push(value);
        set.resize(12 + bytes, 0);
        assert_eq!(
            guest.report(&mut rig, request::SET_CONFIG, &set, &[]),
            reported
        );
    }
    assert_eq!(ask(&mut rig, 0, most)[12..], all);
    assert!(rig.left.is_empty());
}
