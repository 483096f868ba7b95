//! Kicks and calls by messages. (Other tests show the normal case.)

use super::guest::{Data, PLAIN, SIZE, Way};
use super::rig::Rig;
use super::{IN, is_closed};
use forebay_virtio::model::{Driver, Layout};
use forebay_virtio::ring::RingFeatures;
use forebay_virtio::vhost_user::message::request;
use forebay_virtio::vhost_user::protocol_feature;
use rustix::net::SendFlags;
use std::os::fd::AsFd;

const IN_BAND: Way = Way {
    queues: 2,
    in_band: true,
    ..PLAIN
};

fn state(index: u32, num: u32) -> [u8; 8] {
    (u64::from(index) | u64::from(num) << 32).to_le_bytes()
}

#[test]
fn a_ring_starts_with_its_first_kick_and_again_after_a_stop() {
    let mut rig = Rig::new(2);
    let mut guest = rig.guest(IN_BAND);
    guest.offer(0, IN, 0, Data::In(512));
    guest.end(&mut rig, 0);
    let base = guest.ask(&mut rig, request::GET_VRING_BASE, &state(0, 0));
    assert_eq!(base[4..8], 1u32.to_le_bytes());
    let late = guest.offer(0, IN, 0, Data::In(512));
    rig.until_asleep();
    assert!(guest.collect(0).is_none());
    // A kick continues it where it was, also after a death.
    rig.die(None);
    rig.fence();
    rig.until_asleep();
    assert!(guest.collect(0).is_none());
    guest.ok(&mut rig, request::VRING_KICK, &state(0, 0), &[]);
    assert_eq!(guest.end(&mut rig, 0).0, late);
    assert!(rig.left.is_empty());
}

#[test]
fn a_driver_goes_and_another_sets_its_rings_up_on_the_same_connection() {
    for dies in [false, true] {
        let mut rig = Rig::new(2);
        let mut guest = rig.guest(IN_BAND);
        for _ in 0..3 {
            guest.offer(0, IN, 0, Data::In(512));
            guest.end(&mut rig, 0);
        }
        rig.gate.hold();
        guest.offer(0, IN, 0, Data::In(512));
        rig.until("it is at the device", |rig| rig.gate.held() == 1);
        guest.send(request::SET_VRING_ENABLE, &state(0, 0), &[]);
        guest.send(request::GET_QUEUE_NUM, &[], &[]);
        for _ in 0..50 {
            rig.turn();
        }
        assert!(!guest.has_answer(), "something is in flight");
        if dies {
            rig.die(None);
            rig.fence();
        }
        rig.gate.release();
        assert_eq!(guest.answer(&mut rig), 2u64.to_le_bytes());
        assert!(guest.collect(0).is_some());
        let layout = Layout::new(1 << 20, SIZE);
        guest.drivers[0] = Driver::new(&guest.vm.all, layout, SIZE, false, RingFeatures::default());
        guest.start_ring_at(&mut rig, 0, &layout, 0);
        guest.offer(0, IN, 0, Data::In(512));
        guest.end(&mut rig, 0);
        assert!(rig.left.is_empty());
    }
}

#[test]
fn a_call_that_finds_no_room_is_made_when_there_is_some() {
    for dies in [false, true] {
        let mut rig = Rig::new(2);
        let mut guest = rig.guest(IN_BAND);
        let (full, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        let mut filled = 0;
        while let Ok(n) = rustix::net::send(&theirs, &[0; 20], SendFlags::DONTWAIT) {
            filled += n;
        }
        let fd = [theirs.as_fd()];
        guest.ok(&mut rig, request::SET_BACKEND_REQ_FD, &[], &fd);
        drop(theirs);
        guest.channel = Some(full);
        for queue in 0..2 {
            guest.drivers[queue].want_call(true);
            guest.offer(queue, IN, 0, Data::In(512));
            guest.end(&mut rig, queue);
        }
        if dies {
            rig.die(None);
            rig.fence();
        }
        rig.until_asleep();
        let channel = guest.channel.as_ref().expect("it has one");
        let mut bytes = vec![0; filled];
        let mut read = 0;
        while read < filled {
            read += rustix::io::read(channel, &mut bytes[read..]).unwrap();
        }
        assert!(bytes.iter().all(|byte| *byte == 0), "nothing between");
        for queue in 0..2 {
            rig.until("a call", |_| guest.calls(queue) > 0);
        }
        assert!(rig.left.is_empty());
    }
}

#[test]
fn calls_wait_for_a_channel_and_are_not_made_for_who_polls() {
    let mut rig = Rig::new(2);
    let mut guest = rig.guest(IN_BAND);
    guest.ok(&mut rig, request::SET_VRING_CALL, &state(0x101, 0), &[]);
    for queue in [1, 0] {
        guest.drivers[queue].want_call(true);
        guest.offer(queue, IN, 0, Data::In(512));
        guest.end(&mut rig, queue);
    }
    rig.until("a call", |_| guest.calls(0) > 0);
    assert_eq!(guest.calls(1), 0);
    // The channel's other end is closed; the disk still works.
    guest.channel = None;
    guest.drivers[0].want_call(true);
    guest.offer(0, IN, 0, Data::In(512));
    guest.end(&mut rig, 0);
    guest.open_channel(&mut rig);
    rig.until("the call that was lost", |_| guest.calls(0) > 0);
    assert_eq!(guest.calls(1), 0);
    guest.drivers[0].want_call(true);
    guest.offer(0, IN, 0, Data::In(512));
    rig.until("a call", |_| guest.calls(0) > 0);
    assert!(rig.left.is_empty());
}

#[test]
fn hostile_guest_kicks_what_there_is_not() {
    let mut rig = Rig::new(2);
    let guest = rig.guest(IN_BAND);
    for index in [2, 64, u32::MAX] {
        let kick = state(index, 0);
        assert_eq!(guest.report(&mut rig, request::VRING_KICK, &kick, &[]), 1);
    }
    guest.send(request::VRING_KICK, &state(7, 0), &[]);
    is_closed(&mut rig, "a queue that does not exist");
}

#[test]
fn hostile_guest_kicks_a_ring_that_lies_nowhere() {
    let mut rig = Rig::new(3);
    let guest = rig.guest(IN_BAND);
    guest.ok(&mut rig, request::SET_VRING_NUM, &state(2, 8), &[]);
    guest.ok(&mut rig, request::VRING_KICK, &state(2, 0), &[]);
    guest.send(request::SET_VRING_ENABLE, &state(2, 1), &[]);
    is_closed(&mut rig, "a part of the ring is not in the guest's memory");
}

#[test]
fn hostile_guest_kicks_in_band_without_having_agreed_to() {
    let mut rig = Rig::new(1);
    let guest = rig.guest(PLAIN);
    let without = protocol_feature::ALL & !protocol_feature::INBAND_NOTIFICATIONS;
    guest.send(request::SET_PROTOCOL_FEATURES, &without.to_le_bytes(), &[]);
    assert_eq!(
        guest.report(&mut rig, request::VRING_KICK, &state(0, 0), &[]),
        1
    );
    assert_eq!(guest.report(&mut rig, request::VRING_KICK, &[0; 8], &[]), 1);
    guest.send(request::VRING_KICK, &[0; 4], &[]);
    is_closed(&mut rig, "a message whose length does not match its kind");
}

#[test]
fn hostile_guest_kicks_without_end() {
    let mut rig = Rig::new(2);
    let mut guest = rig.guest(IN_BAND);
    for _ in 0..40 {
        for _ in 0..100 {
            guest.send(request::VRING_KICK, &state(1, 9), &[]);
        }
        guest.offer(0, IN, 0, Data::In(512));
        assert_eq!(guest.end(&mut rig, 0).1, 0);
        rig.until_asleep();
    }
    assert!(rig.left.is_empty());
}
