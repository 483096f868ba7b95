//! Hostile NVMe-MI requests to a responder.
//!
//! Each message has a byte that selects what follows it, and its length. No panic; accepted
//! requests survive encoding; each command gets at most one response.

#![no_main]

use forebay_nvme::Cqe;
use forebay_nvme::mi::{
    MAX_MESSAGE_BYTES, MESSAGE_TYPE, MiRequest, MiResponse, MiTicket, Responder, SLOTS, open,
};
use forebay_nvme::tcp::crc32c;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = MiResponse::decode(bytes);
    let mut responder = Responder::new();
    // Tickets, and whether their commands are Admin commands.
    let mut tickets: Vec<(MiTicket, bool)> = Vec::new();
    let mut stream = bytes;
    while let [choice, length, rest @ ..] = stream {
        let (body, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        stream = rest;
        let message = seal(body);
        check_codec(&message);
        let step = responder.receive((), &message);
        assert!(step.send.len() <= 3);
        for (_, response) in &step.send {
            assert!(response.len() <= MAX_MESSAGE_BYTES && MiResponse::decode(response).is_ok());
        }
        tickets.retain(|(ticket, _)| Some(*ticket) != step.abandoned);
        tickets.extend(
            step.execute
                .map(|(ticket, request)| (ticket, matches!(request, MiRequest::Admin(_)))),
        );
        assert!(tickets.len() <= SLOTS);
        if choice & 1 != 0
            && let Some(&(ticket, _)) = tickets.first()
        {
            responder.more_processing(ticket, u16::from(*choice));
        }
        if choice & 2 != 0
            && let Some((ticket, admin)) = tickets.pop()
        {
            let response = if admin {
                MiResponse::Admin {
                    cqe: Cqe::default(),
                    data: body,
                }
            } else {
                MiResponse::Command {
                    value: 0,
                    data: body,
                }
            };
            responder.complete(ticket, &response);
            assert!(responder.complete(ticket, &response).is_none());
        }
    }
});

fn seal(body: &[u8]) -> Vec<u8> {
    let mut message = [&[MESSAGE_TYPE], body].concat();
    let check = crc32c(&message);
    message.extend(check.to_le_bytes());
    message
}

fn check_codec(message: &[u8]) {
    if let Ok((header, body)) = open(message)
        && let Ok(request) = MiRequest::decode(&header, body)
    {
        let again = request.encode(header.slot);
        let (header, body) = open(&again).unwrap();
        assert_eq!(MiRequest::decode(&header, body), Ok(request));
    }
}
