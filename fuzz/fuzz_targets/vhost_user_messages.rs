//! A hostile vhost-user client.
//!
//! Before each message, a byte is its descriptor count. No panic; frames and accepted values are
//! within limits; a successor restores the same session.

#![no_main]

use forebay_virtio::ring::MAX_QUEUE_SIZE;
use forebay_virtio::vhost_user::message::{
    self, Frame, MAX_MESSAGE_BYTES, MAX_TABLE_REGIONS, decode, frame,
};
use forebay_virtio::vhost_user::protocol_feature;
use forebay_virtio::vhost_user::session::{SessionEffect, Offer, VhostSession};
use libfuzzer_sys::fuzz_target;

const OFFER: Offer = Offer {
    features: u64::MAX,
    queues: 5,
};

fuzz_target!(|bytes: &[u8]| {
    let mut session = VhostSession::new(OFFER);
    let mut rest = bytes;
    let mut reply = Vec::new();
    while let Some((descriptors, stream)) = rest.split_first() {
        let whole = match frame(stream) {
            Ok(Frame::Whole(whole)) => whole,
            Ok(Frame::Need(need)) => {
                assert!(need > stream.len() && need <= MAX_MESSAGE_BYTES);
                break;
            }
            Err(_) => break,
        };
        assert!(whole <= MAX_MESSAGE_BYTES && whole <= stream.len());
        rest = &stream[whole..];
        let Ok((header, request)) = decode(&stream[..whole], usize::from(descriptors % 10)) else {
            continue;
        };
        let stops = session.stops_before(&request);
        for index in (0..u64::BITS as u16).filter(|index| stops >> index & 1 == 1) {
            let vring = session.vrings()[usize::from(index)];
            assert!(vring.started && !vring.enabled);
            session.stopped(index, 7);
        }
        let before = session.clone();
        match session.handle(&request) {
            Ok(SessionEffect::SetMemory { count, .. }) => assert!(count <= MAX_TABLE_REGIONS),
            Ok(SessionEffect::RingFd { index, .. } | SessionEffect::Ring(index)) => assert!(index < 5),
            Ok(SessionEffect::Kick(index)) => {
                assert!(index < 5 && session.vrings()[usize::from(index)].started);
                assert!(session.has_protocol(protocol_feature::INBAND_NOTIFICATIONS));
                let call = message::vring_call(index);
                assert_eq!(frame(&call), Ok(Frame::Whole(call.len())));
            }
            Ok(SessionEffect::Stop(index)) => {
                assert!(index < 5);
                session.stopped(index, 7);
                assert!(!session.is_served(index));
            }
            Ok(SessionEffect::Disable(index)) => assert!(index < 5 && !session.is_served(index)),
            Ok(SessionEffect::GetInflight(area) | SessionEffect::SetInflight(area)) => {
                assert!(area.num_queues <= 5 && area.queue_size <= MAX_QUEUE_SIZE);
                reply.clear();
                message::reply_inflight(&mut reply, &area, header.size);
                assert_eq!(reply.len(), message::HEADER_BYTES + header.size as usize);
            }
            Ok(SessionEffect::GetConfig { size, .. }) => assert!(size <= 256),
            Ok(_) => {}
            Err(_) => assert_eq!(session, before),
        }
        let words = session.words();
        assert_eq!(VhostSession::of_words(OFFER, &words).as_ref(), Some(&session));
    }
});
