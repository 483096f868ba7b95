use super::message::{self, *};
use super::session::{Offer, Refusal, SessionEffect, VhostSession};
use super::*;
use crate::feature;
use proptest::prelude::*;

const OFFER: Offer = Offer {
    features: feature::VERSION_1 | feature::BLK_FLUSH | feature::BLK_CONFIG_WCE,
    queues: 2,
};

fn bytes(kind: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    for word in [kind, 1 | flags, payload.len() as u32] {
        all.extend(word.to_le_bytes());
    }
    all.extend(payload);
    all
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn state(index: u32, num: u32) -> Vec<u8> {
    words(&[u64::from(index) | u64::from(num) << 32])
}

/// The error of such a message.
fn wrong(kind: u32, payload: &[u8], fds: usize) -> Option<MessageError> {
    decode(&bytes(kind, 0, payload), fds).err()
}

fn take(
    session: &mut VhostSession,
    kind: u32,
    payload: &[u8],
    fds: usize,
) -> Result<String, Refusal> {
    let message = bytes(kind, 0, payload);
    let (_, request) = decode(&message, fds).expect("sound");
    session.handle(&request).map(|effect| format!("{effect:?}"))
}

fn session() -> VhostSession {
    let mut session = VhostSession::new(OFFER);
    let features = OFFER.features | feature::PROTOCOL_FEATURES;
    take(
        &mut session,
        request::SET_PROTOCOL_FEATURES,
        &words(&[protocol_feature::ALL]),
        0,
    )
    .expect("offered");
    take(&mut session, request::SET_FEATURES, &words(&[features]), 0).expect("offered");
    session
}

#[test]
fn a_message_ends_where_its_header_says() {
    let whole = bytes(request::SET_FEATURES, 8, &[0; 8]);
    for n in 0..whole.len() {
        let need = if n < 12 { 12 } else { 20 };
        assert_eq!(frame(&whole[..n]), Ok(Frame::Need(need)));
    }
    assert_eq!(frame(&whole), Ok(Frame::Whole(20)));
    let (header, what) = decode(&whole, 0).expect("sound");
    assert!(header.need_reply && what == VhostRequest::SetFeatures(0));
    let mut other = whole.clone();
    other[4] = 2;
    assert_eq!(frame(&other), Err(MessageError::Version));
    other[4] = 5;
    assert_eq!(frame(&other), Err(MessageError::Reply));
    let mut long = whole;
    long[8..12].copy_from_slice(&(MAX_MESSAGE_BYTES as u32).to_le_bytes());
    assert_eq!(frame(&long), Err(MessageError::TooLong));
}

#[test]
fn lengths_and_descriptors_are_each_kinds() {
    let table = |count: usize| {
        let mut payload = words(&[count as u64]);
        payload.resize(8 + 32 * count, 1);
        payload
    };
    let config = |size: u32, bytes: usize| {
        let mut payload = words(&[u64::from(size) << 32]);
        payload.resize(12 + bytes, 0);
        payload
    };
    let sound = [
        (request::GET_FEATURES, vec![], 0),
        (request::SET_MEM_TABLE, table(3), 3),
        (request::SET_MEM_TABLE, table(32), 32),
        (request::SET_VRING_ADDR, vec![0; 40], 0),
        (request::SET_VRING_KICK, words(&[1]), 1),
        (request::SET_VRING_KICK, words(&[0x101]), 0),
        (request::GET_CONFIG, config(256, 256), 0),
        (request::GET_INFLIGHT_FD, vec![0; 20], 0),
        (request::SET_INFLIGHT_FD, vec![0; 24], 1),
        (request::ADD_MEM_REG, vec![0; 40], 1),
        (request::REM_MEM_REG, vec![0; 40], 0),
        (request::REM_MEM_REG, vec![0; 40], 1),
        (request::SET_BACKEND_REQ_FD, vec![], 1),
        (request::SET_STATUS, words(&[3]), 0),
        (request::VRING_KICK, state(1, 0), 0),
        (99, vec![1; 77], 5),
    ];
    for (kind, payload, fds) in sound {
        assert_eq!(wrong(kind, &payload, fds), None, "{kind}");
        if kind == 99 {
            continue;
        }
        let longer = [&payload[..], &[0]].concat();
        assert_eq!(
            wrong(kind, &longer, fds),
            Some(MessageError::Size),
            "{kind}"
        );
        if let Some((_, shorter)) = payload.split_last() {
            assert!(wrong(kind, shorter, fds).is_some(), "{kind}");
        }
        let more = wrong(kind, &payload, fds + 2);
        assert_eq!(more, Some(MessageError::Descriptors), "{kind}");
    }
    let more = wrong(request::SET_MEM_TABLE, &table(33), 33);
    assert_eq!(more, Some(MessageError::Regions));
    for (size, bytes) in [(257, 257), (1, 257), (61, 60), (u32::MAX, 0)] {
        let wrong = wrong(request::GET_CONFIG, &config(size, bytes), 0);
        assert_eq!(wrong, Some(MessageError::Size), "{size} {bytes}");
    }
    // Some front-ends send their whole array.
    let message = bytes(request::SET_CONFIG, 0, &config(1, 256));
    let (_, request) = decode(&message, 0).expect("sound");
    let one = VhostRequest::SetConfig {
        offset: 0,
        bytes: &[0],
    };
    assert_eq!(request, one);
}

#[test]
fn a_ring_is_served_while_started_and_enabled_and_does_not_move() {
    let mut s = session();
    let kick = words(&[1]);
    take(&mut s, request::SET_VRING_NUM, &state(1, 256), 0).expect("idle");
    take(&mut s, request::SET_VRING_BASE, &state(1, 5), 0).expect("idle");
    let mut address = vec![0; 40];
    address[0] = 1;
    address[8] = 16;
    take(&mut s, request::SET_VRING_ADDR, &address, 0).expect("idle");
    take(&mut s, request::SET_VRING_KICK, &kick, 1).expect("idle");
    assert!(!s.is_served(1));
    take(&mut s, request::SET_VRING_ENABLE, &state(1, 1), 0).expect("there");
    assert!(s.is_served(1) && !s.is_served(0) && !s.is_served(2));
    take(&mut s, request::SET_VRING_ADDR, &address, 0).expect("the same");
    take(&mut s, request::SET_VRING_NUM, &state(1, 256), 0).expect("the same");
    address[8] = 32;
    let moved = take(&mut s, request::SET_VRING_ADDR, &address, 0);
    assert_eq!(moved, Err(Refusal::InUse));
    let resized = take(&mut s, request::SET_VRING_NUM, &state(1, 128), 0);
    assert_eq!(resized, Err(Refusal::InUse));
    let rebased = take(&mut s, request::SET_VRING_BASE, &state(1, 0), 0);
    assert_eq!(rebased, Err(Refusal::InUse));
    let refeatured = take(&mut s, request::SET_FEATURES, &words(&[0]), 0);
    assert_eq!(refeatured, Err(Refusal::Features));
    let inflight = words(&[0, 0, 1 | 256 << 16]);
    let inflight = take(&mut s, request::GET_INFLIGHT_FD, &inflight, 0);
    assert_eq!(inflight, Err(Refusal::InUse));
    let stop = take(&mut s, request::GET_VRING_BASE, &state(1, 0), 0);
    assert_eq!(stop, Ok("Stop(1)".into()));
    s.stopped(1, 9);
    assert!(!s.is_served(1) && s.vrings()[1].base == 9);
    take(&mut s, request::SET_VRING_ADDR, &address, 0).expect("idle again");
}

#[test]
fn a_change_of_disabled_rings_stops_them() {
    let mut s = session();
    let mut address = vec![0; 40];
    address[8] = 16;
    for index in [0, 1] {
        take(&mut s, request::SET_VRING_NUM, &state(index, 256), 0).expect("idle");
        address[0] = index as u8;
        take(&mut s, request::SET_VRING_ADDR, &address, 0).expect("idle");
        let kick = words(&[u64::from(index)]);
        take(&mut s, request::SET_VRING_KICK, &kick, 1).expect("idle");
    }
    let features = s.features();
    let stops = |s: &VhostSession, kind, payload: &[u8]| {
        let message = bytes(kind, 0, payload);
        s.stops_before(&decode(&message, 0).expect("sound").1)
    };
    let moved = [&address[..8], &[32], &address[9..]].concat();
    let inflight = words(&[0, 0, 1 | 256 << 16]);
    let cases = [
        (request::SET_VRING_NUM, state(1, 256), 0),
        (request::SET_VRING_NUM, state(1, 128), 2),
        (request::SET_VRING_ADDR, address, 0),
        (request::SET_VRING_ADDR, moved, 2),
        (request::SET_VRING_BASE, state(0, 0), 1),
        (request::SET_VRING_BASE, state(7, 0), 0),
        (request::SET_FEATURES, words(&[features]), 0),
        (request::SET_FEATURES, words(&[0]), 3),
        (request::GET_INFLIGHT_FD, inflight, 3),
        (request::GET_QUEUE_NUM, vec![], 0),
    ];
    for (kind, payload, rings) in &cases {
        assert_eq!(stops(&s, *kind, payload), *rings, "{kind}");
    }
    let enabled = take(&mut s, request::SET_VRING_ENABLE, &state(1, 1), 0);
    assert_eq!(enabled, Ok("Ring(1)".into()));
    for (kind, payload, rings) in &cases {
        let left = if rings & 2 == 0 { *rings } else { 0 };
        assert_eq!(stops(&s, *kind, payload), left, "{kind}");
    }
    let disabled = take(&mut s, request::SET_VRING_ENABLE, &state(1, 0), 0);
    assert_eq!(disabled, Ok("Disable(1)".into()));
    // Without enabled and disabled rings, none is changed.
    let mut bare = VhostSession::new(OFFER);
    take(&mut bare, request::SET_VRING_KICK, &words(&[0]), 1).expect("there");
    assert_eq!(stops(&bare, request::SET_VRING_NUM, &state(0, 8)), 0);
}

#[test]
fn kicks_and_calls_may_be_messages() {
    let mut s = session();
    take(&mut s, request::SET_VRING_ENABLE, &state(1, 1), 0).expect("there");
    assert!(!s.is_served(1) && !s.calls_in_band(1));
    let kick = take(&mut s, request::VRING_KICK, &state(1, 0), 0);
    assert_eq!(kick, Ok("Kick(1)".into()));
    assert!(s.is_served(1) && s.calls_in_band(1) && !s.calls_in_band(0));
    // A driver that polls is not called, until it sends a descriptor again.
    take(&mut s, request::SET_VRING_CALL, &words(&[0x101]), 0).expect("there");
    assert!(!s.calls_in_band(1));
    let again = VhostSession::of_words(OFFER, &s.words()).expect("its own");
    assert!(!again.calls_in_band(1) && again.is_served(1));
    take(&mut s, request::SET_VRING_CALL, &words(&[1]), 1).expect("there");
    assert!(s.calls_in_band(1));
    take(&mut s, request::SET_VRING_KICK, &words(&[0x100]), 0).expect("there");
    take(&mut s, request::VRING_KICK, &state(0, 0), 0).expect("there");
    assert!(s.vrings()[0].polled);
    s.stopped(1, 3);
    assert!(!s.calls_in_band(1));
    take(&mut s, request::VRING_KICK, &state(1, 0), 0).expect("there");
    assert!(s.is_served(1) && s.vrings()[1].base == 3);
    let without = protocol_feature::ALL & !protocol_feature::BACKEND_REQ;
    take(
        &mut s,
        request::SET_PROTOCOL_FEATURES,
        &words(&[without]),
        0,
    )
    .expect("offered");
    assert!(!s.calls_in_band(1));
    assert_eq!(
        message::vring_call(3).to_vec(),
        bytes(request::BACKEND_VRING_CALL, 0, &state(3, 0))
    );
}

#[test]
fn a_fresh_packed_ring_of_a_front_end_that_kicks_in_band() {
    for (protocol, expected) in [
        (protocol_feature::ALL, 0x8000_8000),
        (
            protocol_feature::ALL & !protocol_feature::INBAND_NOTIFICATIONS,
            0,
        ),
    ] {
        let mut s = VhostSession::new(Offer {
            features: OFFER.features | feature::RING_PACKED,
            ..OFFER
        });
        let bits = OFFER.features | feature::RING_PACKED | feature::PROTOCOL_FEATURES;
        take(
            &mut s,
            request::SET_PROTOCOL_FEATURES,
            &words(&[protocol]),
            0,
        )
        .expect("offered");
        take(&mut s, request::SET_FEATURES, &words(&[bits]), 0).expect("offered");
        take(&mut s, request::SET_VRING_BASE, &state(0, 0), 0).expect("idle");
        assert_eq!(s.vrings()[0].base, expected);
        take(&mut s, request::SET_VRING_BASE, &state(0, 5), 0).expect("idle");
        assert_eq!(s.vrings()[0].base, 5);
    }
}

#[test]
fn invalid_vhost_user_messages_are_refused() {
    let mut s = session();
    for (kind, payload, why) in [
        (request::SET_FEATURES, words(&[1 << 40]), Refusal::Features),
        (
            request::SET_PROTOCOL_FEATURES,
            words(&[1 << 1]),
            Refusal::Features,
        ),
        (request::SET_VRING_NUM, state(2, 8), Refusal::Queue),
        (request::SET_VRING_NUM, state(0, 0), Refusal::QueueSize),
        (request::SET_VRING_NUM, state(0, 1025), Refusal::QueueSize),
        (request::SET_VRING_NUM, state(0, 65537), Refusal::QueueSize),
        (request::GET_VRING_BASE, state(u32::MAX, 0), Refusal::Queue),
        (request::SET_VRING_ENABLE, state(0, 2), Refusal::Value),
        (
            request::GET_INFLIGHT_FD,
            words(&[0, 0, 3 | 8 << 16]),
            Refusal::Queue,
        ),
        (
            request::GET_INFLIGHT_FD,
            words(&[0, 0, 1]),
            Refusal::QueueSize,
        ),
        (6, vec![0; 16], Refusal::Unsupported),
        (request::VRING_KICK, state(2, 0), Refusal::Queue),
        (33, vec![0; 8], Refusal::Unsupported),
    ] {
        assert_eq!(take(&mut s, kind, &payload, 0), Err(why), "{kind}");
    }
    let mut bare = VhostSession::new(OFFER);
    for (kind, payload) in [
        (request::GET_CONFIG, vec![0; 12]),
        (request::GET_MAX_MEM_SLOTS, vec![]),
        (request::RESET_DEVICE, vec![]),
        (request::GET_STATUS, vec![]),
        (request::VRING_KICK, state(0, 0)),
        (request::GET_INFLIGHT_FD, words(&[0, 0, 1 | 8 << 16])),
    ] {
        let refused = take(&mut bare, kind, &payload, 0);
        assert_eq!(refused, Err(Refusal::Unsupported), "{kind}");
    }
    // Without protocol features, started rings are enabled.
    take(&mut bare, request::SET_VRING_KICK, &words(&[0]), 1).expect("there");
    assert!(bare.is_served(0));
}

#[test]
fn answers_follow_the_negotiated_features() {
    let s = session();
    assert!(s.acknowledges(request::SET_FEATURES, true));
    assert!(!s.acknowledges(request::SET_FEATURES, false));
    assert!(
        !s.acknowledges(request::GET_FEATURES, true)
            && VhostSession::replies(request::GET_FEATURES)
    );
    assert!(!VhostSession::new(OFFER).acknowledges(request::SET_FEATURES, true));
    let mut out = Vec::new();
    reply_vring_base(&mut out, 3, 4);
    assert_eq!(
        out,
        [bytes(request::GET_VRING_BASE, 4, &state(3, 4))].concat()
    );
    out.clear();
    reply_config(&mut out, 2, &[7, 8]);
    let payload = [&state(2, 2)[..], &[0; 4], &[7, 8]].concat();
    assert_eq!(out, bytes(request::GET_CONFIG, 4, &payload));
    assert_eq!(message::config_changed().to_vec(), bytes(2, 0, &[]));
}

#[test]
fn write_back_follows_the_negotiation() {
    let both = feature::BLK_FLUSH | feature::BLK_CONFIG_WCE;
    // Before any acknowledgement: as for a driver that takes both.
    assert!(VhostSession::new(OFFER).config_writeback());
    let mut s = session();
    assert!(s.writeback() && s.config_writeback());
    s.set_writeback(false);
    assert!(!s.writeback() && !s.config_writeback());
    // A front-end may have cached it, so it survives a reset.
    take(&mut s, request::SET_STATUS, &words(&[0]), 0).expect("a reset");
    assert!(!s.writeback() && !s.config_writeback());
    let cases = [
        (both, false, false),
        (both, true, true),
        // Without the driver's choice, FLUSH decides.
        (feature::BLK_FLUSH, false, true),
        (feature::BLK_FLUSH, true, true),
        (feature::BLK_CONFIG_WCE, true, false),
        (0, true, false),
    ];
    for (bits, chosen, expected) in cases {
        take(&mut s, request::SET_FEATURES, &words(&[bits]), 0).expect("offered");
        s.set_writeback(chosen);
        assert_eq!(s.writeback(), expected, "{bits:x} {chosen}");
        if bits & feature::BLK_CONFIG_WCE != 0 {
            assert_eq!(s.config_writeback(), expected, "{bits:x} {chosen}");
        }
    }
}

#[test]
fn a_reset_device_is_as_new() {
    let mut s = session();
    take(&mut s, request::SET_VRING_NUM, &state(0, 8), 0).expect("idle");
    take(&mut s, request::SET_VRING_KICK, &words(&[0]), 1).expect("there");
    let reset = take(&mut s, request::SET_STATUS, &words(&[0]), 0);
    assert_eq!(reset, Ok(format!("{:?}", SessionEffect::Reset)));
    assert_eq!(s.vrings()[0], session().vrings()[0]);
    assert_eq!(s.features(), session().features());
}

proptest! {
    #[test]
    fn a_successor_has_the_same_session(
        messages in proptest::collection::vec((1u32..42, proptest::collection::vec(any::<u8>(), 0..64), 0usize..2), 0..60),
    ) {
        let mut s = session();
        for (kind, payload, fds) in messages {
            let message = bytes(kind, 0, &payload);
            if let Ok((_, request)) = decode(&message, fds) {
                let before = s.clone();
                if s.handle(&request).is_err() {
                    prop_assert_eq!(&s, &before);
                }
            }
        }
        prop_assert_eq!(VhostSession::of_words(OFFER, &s.words()), Some(s));
    }

    #[test]
    fn damaged_words_make_a_sound_session_or_none(at in 0usize..session::SESSION_WORDS, word in any::<u64>()) {
        let mut words = session().words();
        words[at] = word;
        if let Some(s) = VhostSession::of_words(OFFER, &words) {
            prop_assert!(s.vrings().iter().all(|v| v.size <= crate::ring::MAX_QUEUE_SIZE));
            prop_assert_eq!(s.features() & !(OFFER.features | feature::PROTOCOL_FEATURES), 0);
        }
    }
}
