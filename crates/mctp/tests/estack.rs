//! `mctp-estack`, an independent implementation, as the peer.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use forebay_mctp::serial::{self, Decoder};
use forebay_mctp::{Drops, Endpoint, EndpointConfig, MAX_UNIT_BYTES, Message, NVME_MI, Received};
use mctp::{Eid, MsgIC, MsgType};
use mctp_estack::Stack;
use mctp_estack::fragment::SendOutput;
use mctp_estack::serial::MctpSerialHandler;

const OWN: u8 = 9;
const PEER: u8 = 8;
/// Of the peer: a transport header, and the transmission unit.
const PEER_MTU: usize = 68;

/// The serial line in one direction.
#[derive(Default)]
struct Line(Vec<u8>);

impl embedded_io_async::ErrorType for Line {
    type Error = Infallible;
}

impl embedded_io_async::Write for Line {
    async fn write(&mut self, bytes: &[u8]) -> Result<usize, Infallible> {
        self.0.extend(bytes);
        Ok(bytes.len())
    }
}

impl embedded_io_async::Read for Line {
    async fn read(&mut self, bytes: &mut [u8]) -> Result<usize, Infallible> {
        let taken = bytes.len().min(self.0.len());
        bytes[..taken].copy_from_slice(&self.0[..taken]);
        self.0.drain(..taken);
        Ok(taken)
    }
}

/// The line never waits.
fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the line waits"),
    }
}

struct Peer {
    stack: Stack,
    serial: MctpSerialHandler,
}

impl Peer {
    fn new() -> Self {
        Self {
            stack: Stack::new(Eid(PEER), PEER_MTU, 0),
            serial: MctpSerialHandler::new(),
        }
    }

    fn send(&mut self, kind: MsgType, check: MsgIC, payload: &[u8], line: &mut Line) {
        let mut fragments = self
            .stack
            .start_send(Eid(OWN), kind, None, true, check, None, None)
            .unwrap();
        let mut buffer = [0; PEER_MTU];
        while let SendOutput::Packet(packet) = fragments.fragment(payload, &mut buffer) {
            ready(self.serial.send_async(packet, line)).unwrap();
        }
        assert!(fragments.is_done());
    }

    /// The response's type and payload.
    fn receive(&mut self, line: &mut Line) -> (MsgType, MsgIC, Vec<u8>) {
        while !line.0.is_empty() {
            let packet = ready(self.serial.recv_async(line)).unwrap();
            if let Some((message, handle)) = self.stack.receive(packet).unwrap() {
                let response = (message.typ, message.ic, message.payload.to_vec());
                assert_eq!((message.source, message.dest), (Eid(OWN), Eid(PEER)));
                self.stack.finished_receive(handle);
                return response;
            }
        }
        panic!("no response");
    }
}

/// Serves all requests on the line, NVMe-MI messages by `serve`.
fn serve(endpoint: &mut Endpoint, line: &mut Line, serve: impl Fn(&Message) -> Vec<u8>) {
    let stream = std::mem::take(&mut line.0);
    let (mut decoder, mut stream) = (Decoder::new(), &stream[..]);
    while let Some(packet) = decoder.next_packet(&mut stream) {
        let (to, bytes) = match endpoint.receive(&packet, 0) {
            Received::Fragment => continue,
            Received::Message(message) => (message.from, serve(&message)),
            Received::Control(answer) => (answer.to, answer.bytes),
            Received::Dropped(reason) => panic!("{reason:?}"),
        };
        for packet in endpoint.answer(to, &bytes) {
            serial::encode(&packet, &mut line.0);
        }
    }
}

#[test]
fn mctp_estack_is_a_peer() {
    let (mut peer, mut line) = (Peer::new(), Line::default());
    let mut endpoint = Endpoint::new(EndpointConfig {
        uuid: [7; 16],
        eid: OWN,
        static_eid: 0,
        types: &[NVME_MI],
        unit_bytes: 64,
    });
    let control: [(&[u8], &[u8]); 4] = [
        (&[0x81, 2], &[1, 2, 0, OWN, 0, 0]),
        (
            &[0x82, 3],
            &[2, 3, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7],
        ),
        (&[0x83, 5], &[3, 5, 0, 1, 4]),
        (&[0x84, 9], &[4, 9, 5]),
    ];
    for (request, response) in control {
        peer.send(MsgType(0), MsgIC(false), request, &mut line);
        serve(&mut endpoint, &mut line, |_| unreachable!());
        let received = peer.receive(&mut line);
        assert_eq!(received, (MsgType(0), MsgIC(false), response.to_vec()));
    }
    // Payload has flags and escapes. The peer receives at most 1,032 bytes, but sends any length.
    let bytes = |length: usize| (0..length).map(|n| n as u8).collect::<Vec<u8>>();
    for (asked, answered, unit) in [
        (0, 0, 64),
        (63, 63, 64),
        (64, 64, 64),
        (4167, 1032, 64),
        (4167, 1032, 251),
    ] {
        assert!(endpoint.set_unit_bytes(unit) && unit <= MAX_UNIT_BYTES);
        peer.send(MsgType(4), MsgIC(true), &bytes(asked), &mut line);
        serve(&mut endpoint, &mut line, |request| {
            assert_eq!(request.bytes, [&[0x84], &bytes(asked)[..]].concat());
            [&[0x84], &bytes(answered)[..]].concat()
        });
        let received = peer.receive(&mut line);
        assert_eq!(received, (MsgType(4), MsgIC(true), bytes(answered)));
    }
    assert_eq!(endpoint.drops(), &Drops::default());
}
