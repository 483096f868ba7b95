use proptest::prelude::*;

use super::*;

fn packets(mut stream: &[u8]) -> (Vec<Vec<u8>>, Faults) {
    let mut decoder = Decoder::new();
    let mut packets = Vec::new();
    while let Some(packet) = decoder.next_packet(&mut stream) {
        packets.push(packet.to_vec());
    }
    (packets, decoder.faults())
}

fn frame(packet: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    encode(&Packet::new(packet).unwrap(), &mut out);
    out
}

#[test]
fn a_frame_has_the_bytes_of_the_binding() {
    // RFC 1662's check of "123456789" is 906Eh, complemented.
    assert_eq!(!check_of(CHECK_START, b"123456789"), 0x906E);
    let packet = [0x01, 0x7E, 0x08, 0xC8, 0x7D, 0x00];
    let check = check_of(
        CHECK_START,
        &[0x01, 0x06, 0x01, 0x7E, 0x08, 0xC8, 0x7D, 0x00],
    );
    let [high, low] = check.to_be_bytes();
    assert_eq!(
        frame(&packet),
        [
            0x7E, 0x01, 0x06, 0x01, 0x7D, 0x5E, 0x08, 0xC8, 0x7D, 0x5D, 0x00, high, low, 0x7E
        ]
    );
}

#[test]
fn the_decoder_finds_the_next_frame_after_each_fault() {
    let good = frame(&[1, 2, 3, 4, 5]);
    let mut corrupt = good.clone();
    corrupt[5] ^= 1;
    let mut no_payload = vec![FLAG, 1, 4, 1, 2, 3, 4];
    no_payload.extend(check_of(CHECK_START, &no_payload[1..]).to_be_bytes());
    no_payload.push(FLAG);
    let cut_short = &good[..6];
    let no_end = [&good[..good.len() - 1], &[0]].concat();
    let cases: [(&str, &[u8], Faults); 9] = [
        (
            "noise",
            b"noise",
            Faults {
                malformed: 0,
                corrupt: 0,
            },
        ),
        (
            "another revision",
            &[FLAG, 2],
            Faults {
                malformed: 1,
                corrupt: 0,
            },
        ),
        (
            "no payload",
            &no_payload,
            Faults {
                malformed: 1,
                corrupt: 0,
            },
        ),
        (
            "wrong escape",
            &[FLAG, 1, 5, ESCAPE, 0],
            Faults {
                malformed: 1,
                corrupt: 0,
            },
        ),
        (
            "cut short",
            cut_short,
            Faults {
                malformed: 1,
                corrupt: 0,
            },
        ),
        (
            "cut in an escape",
            &[FLAG, 1, 5, ESCAPE],
            Faults {
                malformed: 1,
                corrupt: 0,
            },
        ),
        (
            "no end",
            &no_end,
            Faults {
                malformed: 1,
                corrupt: 0,
            },
        ),
        (
            "wrong check",
            &corrupt,
            Faults {
                malformed: 0,
                corrupt: 1,
            },
        ),
        (
            "flags",
            &[FLAG; 5],
            Faults {
                malformed: 0,
                corrupt: 0,
            },
        ),
    ];
    for (name, bad, faults) in cases {
        let stream = [bad, &good].concat();
        assert_eq!(
            packets(&stream),
            (vec![vec![1, 2, 3, 4, 5]], faults),
            "{name}"
        );
    }
}

#[test]
fn two_frames_may_share_a_flag() {
    let (first, second) = (frame(&[1, 2, 3, 4, 5]), frame(&[6, 7, 8, 9, 10]));
    let stream = [&first[..], &second[1..]].concat();
    assert_eq!(packets(&stream).0.len(), 2);
}

#[test]
fn mctp_serial_hostile_bytes() {
    // A byte count of 0, then more data than any frame has: `mctp-estack` 0.1.0 panics.
    let mut stream = vec![0x7E, 0x01, 0x00];
    stream.extend([0; 258]);
    stream.extend(frame(&[1, 2, 3, 4, 5]));
    assert_eq!(
        packets(&stream),
        (
            vec![vec![1, 2, 3, 4, 5]],
            Faults {
                malformed: 1,
                corrupt: 0
            }
        )
    );
    // Each byte count, with data that never ends.
    for count in 0..=255 {
        let stream = [&[0x7E, 0x01, count][..], &[0; 600]].concat();
        assert_eq!(packets(&stream).0.len(), 0, "{count}");
    }
}

/// Bytes that matter to framing, and others.
fn any_byte() -> impl Strategy<Value = u8> {
    prop_oneof![
        Just(FLAG),
        Just(ESCAPE),
        Just(0x5E),
        Just(0x5D),
        0..6_u8,
        any::<u8>()
    ]
}

proptest! {
    #[test]
    fn packets_survive_framing_in_any_pieces(
        sent in prop::collection::vec(prop::collection::vec(any_byte(), 5..=255), 1..5),
        piece in 1..300_usize,
    ) {
        let stream: Vec<u8> = sent.iter().flat_map(|packet| frame(packet)).collect();
        let mut decoder = Decoder::new();
        let mut received = Vec::new();
        for mut piece in stream.chunks(piece) {
            while let Some(packet) = decoder.next_packet(&mut piece) {
                received.push(packet.to_vec());
            }
        }
        prop_assert_eq!(received, sent);
        prop_assert_eq!(decoder.faults(), Faults::default());
    }

    #[test]
    fn any_bytes_are_decoded_without_a_panic(pieces in prop::collection::vec(any_piece(), 0..60)) {
        for packet in packets(&pieces.concat()).0 {
            prop_assert!(packet.len() > HEADER_BYTES && packet.len() <= MAX_PACKET_BYTES);
        }
    }
}

/// Special bytes, a frame's head, data of any length.
fn any_piece() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any_byte(), 0..20),
        any_byte().prop_map(|count| vec![FLAG, REVISION, count]),
        (0..600_usize).prop_map(|length| vec![0; length]),
    ]
}
