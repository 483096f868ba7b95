//! A hostile MCTP peer.
//!
//! The first byte selects a serial stream, or packets with lengths and delays. No panic; messages
//! and answers are within limits; the decoder finds each encoded packet.

#![no_main]

use forebay_mctp::serial::{Decoder, encode};
use forebay_mctp::{
    BASELINE_UNIT_BYTES, Endpoint, EndpointConfig, HEADER_BYTES, MAX_PACKET_BYTES, NVME_MI,
    Received,
};
use libfuzzer_sys::fuzz_target;

const EID: u8 = 9;
const SECOND_NS: u64 = 1_000_000_000;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, mut stream)) = bytes.split_first() else {
        return;
    };
    let mut endpoint = Endpoint::new(EndpointConfig {
        uuid: [0; 16],
        eid: EID,
        static_eid: choice & 2,
        types: &[NVME_MI],
        unit_bytes: BASELINE_UNIT_BYTES,
    });
    if choice & 1 == 0 {
        let mut decoder = Decoder::new();
        while let Some(packet) = decoder.next_packet(&mut stream) {
            assert!(packet.len() > HEADER_BYTES && packet.len() <= MAX_PACKET_BYTES);
            receive(&mut endpoint, &packet, 0);
        }
        return;
    }
    let mut now_ns = 0;
    while let [delay_s, length, rest @ ..] = stream {
        now_ns += u64::from(*delay_s) * SECOND_NS;
        let (packet, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        receive(&mut endpoint, packet, now_ns);
        stream = rest;
    }
});

fn receive(endpoint: &mut Endpoint, packet: &[u8], now_ns: u64) {
    let (to, bytes) = match endpoint.receive(packet, now_ns) {
        Received::Message(message) => {
            assert!(message.bytes.len() <= NVME_MI.limit_bytes && message.bytes[0] == 0x84);
            (message.from, message.bytes)
        }
        Received::Control(answer) => {
            assert!(answer.bytes.len() <= BASELINE_UNIT_BYTES);
            (answer.to, answer.bytes)
        }
        Received::Fragment | Received::Dropped(_) => return,
    };
    let mut line = Vec::new();
    let sent: Vec<_> = endpoint.answer(to, &bytes).collect();
    for packet in &sent {
        encode(packet, &mut line);
    }
    let (mut decoder, mut line) = (Decoder::new(), &line[..]);
    for packet in &sent {
        assert_eq!(decoder.next_packet(&mut line).as_deref(), Some(&packet[..]));
    }
}
