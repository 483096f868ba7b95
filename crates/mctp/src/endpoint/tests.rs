use proptest::prelude::*;

use super::*;
use crate::packet::{HEADER_BYTES, Packet};

const OWN: u8 = 9;
const PEER: u8 = 8;
const UUID: [u8; 16] = *b"forebay endpoint";

fn config() -> EndpointConfig {
    EndpointConfig {
        uuid: UUID,
        eid: OWN,
        static_eid: EID_NULL,
        types: &[NVME_MI],
        unit_bytes: BASELINE_UNIT_BYTES,
    }
}

fn endpoint() -> Endpoint {
    Endpoint::new(config())
}

/// The packets of a request from `eid`.
fn request(eid: u8, tag: u8, message: &[u8]) -> Vec<Packet> {
    let from = Address {
        eid: OWN,
        tag,
        owner: true,
        local_eid: eid,
    };
    Packets::new(from, message, BASELINE_UNIT_BYTES).collect()
}

fn mi(bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|n| if n == 0 { 0x84 } else { n as u8 })
        .collect()
}

/// All packets but the last are fragments; what the last led to.
fn receive_all(endpoint: &mut Endpoint, packets: &[Packet]) -> Received {
    let (last, others) = packets.split_last().unwrap();
    for packet in others {
        assert_eq!(endpoint.receive(packet, 0), Received::Fragment);
    }
    endpoint.receive(last, 0)
}

/// Header with SOM, EOM, sequence, TO and tag.
fn raw(flags: u8, payload: &[u8]) -> Vec<u8> {
    [&[1, OWN, PEER, flags], payload].concat()
}

fn control(endpoint: &mut Endpoint, local_eid: u8, body: &[u8]) -> ControlAnswer {
    let packet = [&[1, local_eid, PEER, 0xCB], body].concat();
    match endpoint.receive(&packet, 0) {
        Received::Control(answer) => answer,
        other => panic!("{other:?}"),
    }
}

#[test]
fn messages_of_each_length_are_assembled() {
    let mut endpoint = endpoint();
    for bytes in [1, 63, 64, 65, 128, NVME_MI.limit_bytes] {
        let message = mi(bytes);
        let Received::Message(received) = receive_all(&mut endpoint, &request(PEER, 5, &message))
        else {
            panic!("{bytes}")
        };
        assert_eq!(received.bytes, message);
        assert_eq!((received.from.eid, received.from.tag), (PEER, 5));
        assert!(received.from.owner);
    }
    assert_eq!(endpoint.drops(), &Drops::default());
}

#[test]
fn answers_keep_the_tag_and_clear_its_owner() {
    let mut endpoint = endpoint();
    let Received::Message(Message { from, .. }) =
        receive_all(&mut endpoint, &request(PEER, 5, &mi(4)))
    else {
        panic!()
    };
    let message = mi(150);
    let packets: Vec<Vec<u8>> = endpoint
        .answer(from, &message)
        .map(|p| p.to_vec())
        .collect();
    let heads: Vec<&[u8]> = packets.iter().map(|p| &p[..HEADER_BYTES]).collect();
    assert_eq!(
        heads,
        [
            [1, PEER, OWN, 0x85],
            [1, PEER, OWN, 0x15],
            [1, PEER, OWN, 0x65]
        ]
    );
    let sizes: Vec<usize> = packets.iter().map(Vec::len).collect();
    assert_eq!(sizes, [68, 68, 26]);
    assert!(!endpoint.set_unit_bytes(63) && !endpoint.set_unit_bytes(252));
    assert!(endpoint.set_unit_bytes(251));
    assert_eq!(endpoint.answer(from, &message).count(), 1);
}

/// Packets, of which the last is dropped for the reason.
#[test]
fn packets_are_dropped_for_their_faults() {
    use DropReason as R;
    let (full, long, short) = ([0x84; 64], [0x84; 65], [0x84; 63]);
    let cases: [(R, &[Vec<u8>]); 13] = [
        (R::ShortPacket, &[vec![1, OWN, PEER]]),
        (R::ShortPacket, &[raw(0xC8, &[])]),
        (R::HeaderVersion, &[vec![2, OWN, PEER, 0xC8, 0x84]]),
        (R::UnknownDestination, &[vec![1, 77, PEER, 0xC8, 0x84]]),
        (R::BadSource, &[vec![1, OWN, 0xFF, 0xC8, 0x84]]),
        (R::UnexpectedTag, &[raw(0xC0, &[0x84])]),
        (R::UnsupportedType, &[raw(0xC8, &[0x04])]),
        (R::UnsupportedType, &[vec![1, 0xFF, PEER, 0xC8, 0x84]]),
        (R::UnsupportedUnit, &[raw(0x88, &short)]),
        (R::UnexpectedMiddle, &[raw(0x18, &full)]),
        (R::OutOfSequence, &[raw(0x88, &full), raw(0x28, &full)]),
        (R::IncorrectUnit, &[raw(0x88, &full), raw(0x18, &short)]),
        (R::IncorrectUnit, &[raw(0x88, &full), raw(0x58, &long)]),
    ];
    for (reason, packets) in cases {
        let mut endpoint = endpoint();
        let (last, others) = packets.split_last().unwrap();
        for packet in others {
            assert_eq!(
                endpoint.receive(packet, 0),
                Received::Fragment,
                "{reason:?}"
            );
        }
        assert_eq!(endpoint.receive(last, 0), Received::Dropped(reason));
        assert_eq!(endpoint.drops().count(reason), 1);
        // The message, if any, is gone.
        let end = endpoint.receive(&raw(0x58, &[0]), 0);
        assert_eq!(end, Received::Dropped(R::UnexpectedMiddle), "{reason:?}");
    }
}

#[test]
fn a_message_over_its_limit_is_dropped_at_once() {
    let mut endpoint = endpoint();
    let packets = request(PEER, 0, &mi(NVME_MI.limit_bytes + 1));
    assert_eq!(
        receive_all(&mut endpoint, &packets),
        Received::Dropped(DropReason::TooLong)
    );
    let control = raw(0xC8, &[0; 65]);
    assert_eq!(
        endpoint.receive(&control, 0),
        Received::Dropped(DropReason::TooLong)
    );
}

#[test]
fn a_stray_packet_does_not_end_another_message() {
    let mut endpoint = endpoint();
    let packets = request(PEER, 1, &mi(128));
    assert_eq!(endpoint.receive(&packets[0], 0), Received::Fragment);
    // Another tag, another source, a response, another type, a wrong destination.
    for stray in [
        [1, OWN, PEER, 0x5A, 0],
        [1, OWN, 7, 0x59, 0],
        [1, OWN, PEER, 0x51, 0],
        [1, OWN, PEER, 0xC9, 5],
        [1, 77, PEER, 0x59, 0],
    ] {
        assert!(matches!(endpoint.receive(&stray, 0), Received::Dropped(_)));
    }
    assert!(matches!(
        endpoint.receive(&packets[1], 0),
        Received::Message(_)
    ));
}

#[test]
fn a_new_start_ends_the_message_before() {
    let mut endpoint = endpoint();
    let (first, second) = (request(PEER, 1, &mi(128)), request(PEER, 1, &mi(130)));
    endpoint.receive(&first[0], 0);
    let Received::Message(message) = receive_all(&mut endpoint, &second) else {
        panic!()
    };
    assert_eq!(message.bytes, mi(130));
    endpoint.receive(&first[0], 0);
    receive_all(&mut endpoint, &request(PEER, 1, &mi(3)));
    assert_eq!(endpoint.drops().count(DropReason::Restarted), 2);
}

#[test]
fn a_message_whose_packets_stop_is_dropped() {
    let packets = request(PEER, 1, &mi(192));
    for late_ns in [0, 1] {
        let mut endpoint = endpoint();
        endpoint.receive(&packets[0], 5);
        let second = endpoint.receive(&packets[1], 5 + ASSEMBLY_TIMEOUT_NS);
        assert_eq!(second, Received::Fragment);
        let third = endpoint.receive(&packets[2], 5 + 2 * ASSEMBLY_TIMEOUT_NS + late_ns);
        match late_ns {
            0 => assert!(matches!(third, Received::Message(_))),
            _ => assert_eq!(third, Received::Dropped(DropReason::UnexpectedMiddle)),
        }
        assert_eq!(endpoint.drops().count(DropReason::TimedOut), late_ns);
    }
}

#[test]
fn a_thousand_requesters_evict_each_other() {
    let mut endpoint = endpoint();
    let flood = (0..1000_u64).map(|n| (n, (n % 125) as u8 + 10, (n / 125) as u8));
    for (now_ns, eid, tag) in flood.clone() {
        let packets = request(eid, tag, &mi(128));
        assert_eq!(endpoint.receive(&packets[0], now_ns), Received::Fragment);
        // Whole messages need no room.
        let single = receive_all(&mut endpoint, &request(PEER, 7, &mi(10)));
        assert!(matches!(single, Received::Message(_)));
    }
    let rest = 1000 - MAX_ASSEMBLIES;
    assert_eq!(endpoint.drops().count(DropReason::Evicted), rest as u64);
    // The last ones complete.
    for (now_ns, eid, tag) in flood.skip(rest) {
        let packets = request(eid, tag, &mi(128));
        let received = endpoint.receive(&packets[1], now_ns);
        assert!(matches!(received, Received::Message(_)));
    }
}

#[test]
fn an_endpoint_id_is_set_forced_and_reset() {
    let mut endpoint = endpoint();
    let answer = control(&mut endpoint, EID_NULL, &[0, 0x95, 1, 0, 20]);
    assert_eq!(answer.bytes, [0, 0x15, 1, 0, 0, 20, 0]);
    assert_eq!((answer.new_eid, endpoint.eid()), (Some(20), 20));
    assert_eq!(
        (answer.to.eid, answer.to.tag, answer.to.local_eid),
        (PEER, 3, 20)
    );
    // The answer comes from the EID that the peer used.
    let answer = control(&mut endpoint, 20, &[0, 0x80, 1, 1, 21]);
    assert_eq!((answer.new_eid, answer.to.local_eid), (Some(21), 20));
    let answer = control(&mut endpoint, 21, &[0, 0x80, 1, 0, 21]);
    assert_eq!(answer.new_eid, None);
    // Invalid EIDs, no static EID, no Discovered flag, wrong lengths.
    let refused: [(&[u8], u8); 6] = [
        (&[0, 0], 2),
        (&[1, 0xFF], 2),
        (&[2, 0], 2),
        (&[3, 30], 2),
        (&[0], 3),
        (&[0, 30, 0], 3),
    ];
    for (data, code) in refused {
        let answer = control(&mut endpoint, 21, &[&[0, 0x80, 1], data].concat());
        assert_eq!(answer.bytes, [0, 0, 1, code], "{data:?}");
        assert_eq!((answer.new_eid, endpoint.eid()), (None, 21));
    }
    let broadcast = endpoint.receive(&[1, 0xFF, PEER, 0xC8, 0, 0x80, 1, 0, 30], 0);
    assert_eq!(broadcast, Received::Dropped(DropReason::UnknownDestination));
}

#[test]
fn a_static_endpoint_id_is_restored() {
    let mut endpoint = Endpoint::new(EndpointConfig {
        static_eid: 40,
        ..config()
    });
    let get = [0, 0x80, 2];
    assert_eq!(
        control(&mut endpoint, OWN, &get).bytes,
        [0, 0, 2, 0, OWN, 3, 0]
    );
    let answer = control(&mut endpoint, OWN, &[0, 0x80, 1, 2, 0]);
    assert_eq!(
        (answer.bytes, answer.new_eid),
        (vec![0, 0, 1, 0, 0, 40, 0], Some(40))
    );
    assert_eq!(
        control(&mut endpoint, 40, &get).bytes,
        [0, 0, 2, 0, 40, 2, 0]
    );
}

#[test]
fn an_endpoint_describes_itself() {
    let mut endpoint = endpoint();
    let cases: [(&[u8], Vec<u8>); 12] = [
        (&[2], vec![2, 0, OWN, 0, 0]),
        (&[2, 0], vec![2, 3]),
        (&[3], [&[3, 0], &UUID[..]].concat()),
        (&[3, 0], vec![3, 3]),
        (&[4, 0xFF], [&[4, 0, 4], VERSIONS].concat()),
        (&[4, 0x00], [&[4, 0, 4], VERSIONS].concat()),
        (&[4, 0x04], vec![4, 0, 1, 0xF1, 0xF0, 0xFF, 0]),
        (&[4, 0x05], vec![4, 0x80]),
        (&[4], vec![4, 3]),
        (&[5], vec![5, 0, 1, 4]),
        (&[5, 0], vec![5, 3]),
        (&[6, 0], vec![6, 5]),
    ];
    for (request, response) in cases {
        for local_eid in [OWN, EID_NULL, EID_BROADCAST] {
            let answer = control(&mut endpoint, local_eid, &[&[0, 0x9F], request].concat());
            assert_eq!(answer.bytes, [&[0, 0x1F], &response[..]].concat());
            assert_eq!(answer.to.local_eid, OWN);
        }
    }
}

const VERSIONS: &[u8] = &[
    0xF1, 0xF0, 0xFF, 0, 0xF1, 0xF1, 0xFF, 0, 0xF1, 0xF2, 0xFF, 0, 0xF1, 0xF3, 0xFF, 0,
];

#[test]
fn control_messages_that_ask_nothing_are_dropped() {
    let mut endpoint = endpoint();
    // A response, a datagram.
    for flags in [0x00, 0xC0] {
        let dropped = endpoint.receive(&raw(0xC8, &[0, flags, 2]), 0);
        assert_eq!(dropped, Received::Dropped(DropReason::NotARequest));
    }
    let dropped = endpoint.receive(&raw(0xC8, &[0, 0x80]), 0);
    assert_eq!(dropped, Received::Dropped(DropReason::ShortPacket));
}

#[test]
fn only_the_asked_peer_may_respond() {
    let mut client = endpoint();
    let (tag, packets) = client.request(PEER, &[0, 0x80, 2]);
    let heads: Vec<u8> = packets.map(|packet| packet[3]).collect();
    assert_eq!(heads, [0xC8 | tag]);
    let respond = |source, tag| [1, OWN, source, 0xC0 | tag, 0, 0, 2, 0, PEER, 0, 0];
    for (source, tag) in [(PEER, 1), (7, 0)] {
        let dropped = client.receive(&respond(source, tag), 0);
        assert_eq!(dropped, Received::Dropped(DropReason::UnexpectedTag));
    }
    // Several responses may come: More Processing Required, and the last one.
    for _ in 0..2 {
        let Received::Message(response) = client.receive(&respond(PEER, 0), 0) else {
            panic!()
        };
        assert_eq!(response.bytes, [0, 0, 2, 0, PEER, 0, 0]);
        assert!(!response.from.owner);
    }
    let (tag, _) = client.request(EID_NULL, &[0, 0x80, 2]);
    assert!(matches!(
        client.receive(&respond(77, tag), 0),
        Received::Message(_)
    ));
}

proptest! {
    #[test]
    fn requests_and_answers_survive_any_unit(
        asked in prop::collection::vec(any::<u8>(), 0..4167),
        answered in prop::collection::vec(any::<u8>(), 0..4167),
        unit in 64..=251_usize,
    ) {
        let (mut client, mut server) = (Endpoint::new(EndpointConfig { eid: PEER, ..config() }), endpoint());
        client.set_unit_bytes(unit);
        server.set_unit_bytes(315 - unit);
        let (asked, answered) = ([&[0x84], &asked[..]].concat(), [&[0x84], &answered[..]].concat());
        let (_, packets) = client.request(OWN, &asked);
        let packets: Vec<Packet> = packets.collect();
        let Received::Message(request) = receive_all(&mut server, &packets) else { panic!() };
        prop_assert_eq!(&request.bytes, &asked);
        let packets: Vec<Packet> = server.answer(request.from, &answered).collect();
        let Received::Message(response) = receive_all(&mut client, &packets) else { panic!() };
        prop_assert_eq!(&response.bytes, &answered);
        prop_assert_eq!((response.from.eid, response.from.owner), (OWN, false));
    }

    /// Packets of several messages, shuffled, lost and repeated: a message is whole or absent.
    /// Messages have at most five packets, as the sequence number counts to four.
    #[test]
    fn a_message_is_whole_or_absent(
        lengths in prop::collection::vec(1..=255_usize, 1..12),
        picks in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..8), 0..200),
    ) {
        let message = |n: usize| [&[0x84][..], &vec![n as u8; lengths[n]]].concat();
        let sent: Vec<Vec<Packet>> = (0..lengths.len())
            .map(|n| request(10 + n as u8, n as u8 % 8, &message(n)))
            .collect();
        let mut next = vec![0; lengths.len()];
        let mut endpoint = endpoint();
        for (pick, other, action) in picks {
            let n = pick.index(lengths.len());
            let packets = &sent[n];
            let in_order = next[n] % packets.len();
            let packet = match action {
                0 => &packets[other.index(packets.len())],
                _ => &packets[in_order],
            };
            next[n] += usize::from(action > 0) + usize::from(action == 1);
            if let Received::Message(received) = endpoint.receive(packet, 0) {
                prop_assert_eq!(received.bytes, message(n));
            }
            prop_assert!(endpoint.assemblies.held() <= MAX_ASSEMBLIES);
        }
    }

    #[test]
    fn any_packets_are_received_without_a_panic(
        packets in prop::collection::vec(any_packet(), 0..200),
        step_ns in 0..ASSEMBLY_TIMEOUT_NS,
    ) {
        let mut endpoint = endpoint();
        for (n, packet) in packets.iter().enumerate() {
            match endpoint.receive(packet, n as u64 * step_ns) {
                Received::Message(message) => prop_assert!(message.bytes.len() <= NVME_MI.limit_bytes),
                Received::Control(answer) => prop_assert!(answer.bytes.len() <= BASELINE_UNIT_BYTES),
                Received::Fragment | Received::Dropped(_) => {}
            }
        }
    }
}

fn any_packet() -> impl Strategy<Value = Vec<u8>> {
    let head = (
        0..3_u8,
        prop_oneof![Just(OWN), Just(0), any::<u8>()],
        0..3_u8,
        any::<u8>(),
    );
    let kind = prop_oneof![Just(0_u8), Just(0x84), any::<u8>()];
    let payload = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..8),
        prop::collection::vec(any::<u8>(), 63..66),
    ];
    let length = prop_oneof![9 => Just(usize::MAX), 1 => 0..6_usize];
    (head, kind, payload, length).prop_map(|((version, to, from, flags), kind, payload, length)| {
        let mut packet = [&[version, to, from, flags, kind], &payload[..]].concat();
        packet.truncate(length);
        packet
    })
}
