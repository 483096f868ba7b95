//! Messages of QEMU and SPDK, and invalid ones.

use super::wire::{command, dma, irq_set_flags as set, pci_irq, pci_region};
use super::*;
use proptest::prelude::*;

fn device() -> Device {
    let mut device = Device {
        regions: [Region::default(); pci_region::COUNT],
        irqs: [Irq::default(); pci_irq::COUNT],
    };
    device.regions[pci_region::BAR0 as usize] = Region {
        size_bytes: 0x4000,
        readable: true,
        writable: true,
        mappable: Some(SparseArea {
            offset_bytes: 0x1000,
            len_bytes: 0x1000,
        }),
    };
    device.regions[pci_region::CONFIG as usize] = Region {
        size_bytes: 4096,
        readable: true,
        writable: true,
        mappable: None,
    };
    device.regions[1] = Region {
        size_bytes: 64,
        readable: true,
        writable: false,
        mappable: None,
    };
    device.irqs[pci_irq::MSIX as usize] = Irq {
        count: 65,
        maskable: true,
    };
    device.irqs[pci_irq::REQ as usize] = Irq {
        count: 1,
        maskable: false,
    };
    device
}

fn agreed() -> VfioSession {
    let mut session = VfioSession::new(device());
    session.agreed(Negotiated {
        minor: 0,
        client_descriptors: 8,
        client_data_bytes: 1 << 20,
    });
    session
}

fn packet(code: u16, payload: &[u8]) -> Vec<u8> {
    let size = (wire::HEADER_BYTES + payload.len()) as u32;
    let mut bytes = Header::command(7, code, size, false).to_bytes().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn longs(flags: u32, argsz: u32, rest: &[u64]) -> Vec<u8> {
    let mut bytes = words(&[argsz, flags]);
    bytes.extend(rest.iter().flat_map(|w| w.to_le_bytes()));
    bytes
}

fn version(data: &[u8]) -> Vec<u8> {
    let mut payload = vec![0, 0, 0, 0];
    payload.extend_from_slice(data);
    packet(command::VERSION, &payload)
}

fn judged(session: &VfioSession, bytes: &[u8], descriptors: usize) -> Result<(), Errno> {
    let message = session.judge(bytes, descriptors).expect("a command");
    message.request.map(|_| ())
}

#[test]
fn qemus_version_is_agreed_to_and_bad_ones_are_refused() {
    let session = VfioSession::new(device());
    let qemu = b"{\"capabilities\": {\"max_msg_fds\": 8, \"max_data_xfer_size\": 1048576, \
        \"pgsizes\": 4096, \"max_dma_maps\": 65535, \"write_multiple\": true, \
        \"migration\": {\"pgsize\": 4096}}}\0";
    let bytes = version(qemu);
    assert_eq!(frame(&bytes), Ok(MessageFrame::Whole(bytes.len())));
    let message = session.judge(&bytes, 0).unwrap();
    let Ok(Request::Version(negotiated)) = message.request else {
        panic!("{:?}", message.request);
    };
    assert_eq!((negotiated.minor, negotiated.client_descriptors), (0, 8));
    let mut out = [0; MAX_ANSWER_BYTES];
    let answer = session.describe(&message, &mut out).unwrap();
    let header = Header::read(&out).unwrap();
    assert_eq!(header.size_bytes as usize, answer.bytes);
    assert!(header.is_reply() && !header.is_error() && header.id == 7);
    let json = std::str::from_utf8(&out[20..answer.bytes]).unwrap();
    assert!(
        json.ends_with('\0') && json.contains("\"max_msg_fds\":16"),
        "{json}"
    );
    let parsed: serde_json::Value = serde_json::from_str(&json[..json.len() - 1]).unwrap();
    assert_eq!(parsed["capabilities"]["pgsizes"], 4096);
    assert!(!json.contains("twin") && !json.contains("write_multiple"));

    let bad: [&[u8]; 9] = [
        b"{}",
        b"{\0",
        b"[]\0",
        b"{\"capabilities\": 3}\0",
        b"{\"capabilities\": {\"max_msg_fds\": \"x\"}}\0",
        b"{\"capabilities\": {\"max_data_xfer_size\": -1}}\0",
        b"{\"capabilities\": {\"pgsizes\": 512}}\0",
        b"\xff\xfe\0",
        &[b'['; 4000],
    ];
    for data in bad {
        assert_eq!(judged(&session, &version(data), 0), Err(Errno::EINVAL));
    }
    let deep = [vec![b'['; 4000], vec![0]].concat();
    assert_eq!(judged(&session, &version(&deep), 0), Err(Errno::EINVAL));
    for short in 0..4 {
        let bytes = message_of(command::VERSION, short);
        assert_eq!(judged(&session, &bytes, 0), Err(Errno::EINVAL));
    }
    assert_eq!(judged(&session, &version(b""), 0), Ok(()));
    assert_eq!(judged(&session, &version(b"{}\0"), 0), Ok(()));
    let major = packet(command::VERSION, &[1, 0, 0, 0]);
    assert_eq!(judged(&session, &major, 0), Err(Errno::ENOTSUP));
    assert_eq!(judged(&agreed(), &version(b"{}\0"), 0), Err(Errno::EINVAL));
    let info = packet(command::DEVICE_GET_INFO, &words(&[16, 0, 0, 0]));
    assert_eq!(session.judge(&info, 0), Err(Broken::Version));
}

fn message_of(code: u16, payload_bytes: usize) -> Vec<u8> {
    packet(code, &vec![0; payload_bytes])
}

#[test]
fn frames_that_lie_about_their_length_break_the_stream() {
    assert_eq!(frame(&[0; 15]), Ok(MessageFrame::NeedMore(16)));
    let bytes = message_of(command::REGION_WRITE, 40);
    assert_eq!(frame(&bytes[..20]), Ok(MessageFrame::NeedMore(56)));
    assert_eq!(frame(&bytes), Ok(MessageFrame::Whole(56)));
    let mut short = bytes.clone();
    short[4..8].copy_from_slice(&15u32.to_le_bytes());
    assert_eq!(frame(&short), Err(Broken::Short));
    let mut long = bytes.clone();
    long[4..8].copy_from_slice(&(MAX_MESSAGE_BYTES as u32 + 1).to_le_bytes());
    assert_eq!(frame(&long), Err(Broken::Long));
    let mut reply = bytes;
    reply[8] = 1;
    assert_eq!(agreed().judge(&reply, 0), Err(Broken::NotACommand));
}

#[test]
fn memory_maps_are_within_what_can_be_mapped() {
    let session = agreed();
    let map = |flags, rest: [u64; 3]| packet(command::DMA_MAP, &longs(flags, 32, &rest));
    let both = dma::READABLE | dma::WRITABLE;
    let good = map(both, [0x2000, 0x10_0000, 0x4000]);
    let message = session.judge(&good, 1).unwrap();
    let expected = DmaMap {
        address: 0x10_0000,
        len_bytes: 0x4000,
        offset_bytes: 0x2000,
        readable: true,
        writable: true,
        has_descriptor: true,
    };
    assert_eq!(message.request, Ok(Request::DmaMap(expected)));
    assert_eq!(judged(&session, &good, 0), Ok(()));
    let page = 0x1000;
    let last = u64::MAX - 0xfff;
    for (flags, rest, descriptors) in [
        (both, [0, 0, 0], 1),
        (both, [0, last, page], 1),
        (both, [last, 0, page], 1),
        (both, [0, 1, page], 1),
        (both, [1, 0, page], 1),
        (both, [0, 0, 5], 1),
        (0, [0, 0, page], 1),
        (4 | both, [0, 0, page], 1),
        (both, [0, 0, page], 2),
    ] {
        let bytes = map(flags, rest);
        assert_eq!(judged(&session, &bytes, descriptors), Err(Errno::EINVAL));
    }
    let unmap = |flags, rest: [u64; 2]| packet(command::DMA_UNMAP, &longs(flags, 24, &rest));
    let one = unmap(0, [0x10_0000, 0x4000]);
    let message = session.judge(&one, 0).unwrap();
    let mut out = [0; 64];
    assert!(session.describe(&message, &mut out).is_none());
    assert_eq!(message.done(&[], &mut out).bytes, 16 + 24);
    assert_eq!(out[16..40], one[16..40]);
    assert_eq!(judged(&session, &unmap(dma::UNMAP_ALL, [0, 0]), 0), Ok(()));
    for (flags, rest) in [
        (dma::UNMAP_ALL, [0, page]),
        (1, [0, page]),
        (0, [page, 0]),
        (0, [last, page]),
    ] {
        let bytes = unmap(flags, rest);
        assert_eq!(judged(&session, &bytes, 0), Err(Errno::EINVAL));
    }
}

#[test]
fn regions_are_described_with_what_may_be_mapped() {
    let session = agreed();
    let ask = |index, argsz| {
        let payload = words(&[argsz, 0, index, 0, 0, 0, 0, 0]);
        packet(command::DEVICE_GET_REGION_INFO, &payload)
    };
    let mut out = [0; 256];
    let mut reported = |session: &VfioSession, index, argsz| {
        let bytes = ask(index, argsz);
        let message = session.judge(&bytes, 0).unwrap();
        let answer = session.describe(&message, &mut out).unwrap();
        (answer, out[16..answer.bytes].to_vec())
    };
    let (answer, info) = reported(&session, 0, 32);
    assert_eq!((answer.with_region, info.len(), info[0]), (None, 32, 64));
    // QEMU rejects a device that announces a missing capability.
    assert_eq!(wire::u32_at(&info, 4), Some(7));
    assert_eq!(wire::u32_at(&info, 12), Some(0));
    let (answer, info) = reported(&session, 0, 64);
    assert_eq!((answer.with_region, info.len()), (Some(0), 64));
    assert_eq!(wire::u64_at(&info, 16), Some(0x4000));
    assert_eq!(wire::u32_at(&info, 4), Some(0xF));
    assert_eq!(wire::u64_at(&info, 48), Some(0x1000));
    assert_eq!(reported(&session, 7, 64).1.len(), 32);
    // A client without descriptors gets nothing to map.
    let mut shy = session.clone();
    shy.agreed(Negotiated {
        minor: 0,
        client_descriptors: 0,
        client_data_bytes: 4096,
    });
    let (answer, info) = reported(&shy, 0, 64);
    assert_eq!((answer.with_region, info.len()), (None, 32));
    for (index, argsz) in [(9, 64), (u32::MAX, 64), (0, 31)] {
        assert_eq!(judged(&session, &ask(index, argsz), 0), Err(Errno::EINVAL));
    }
    let irq = packet(command::DEVICE_GET_IRQ_INFO, &words(&[16, 0, 2, 0]));
    let message = session.judge(&irq, 0).unwrap();
    let answer = session.describe(&message, &mut out).unwrap();
    assert_eq!(answer.bytes, 32);
    assert_eq!(wire::u32_at(&out, 28), Some(65));
}

#[test]
fn interrupts_come_in_chunks_and_never_beyond_their_number() {
    let session = agreed();
    let irqs = |flags, index, start, count, data: &[u8]| {
        let mut payload = words(&[20 + data.len() as u32, flags, index, start, count]);
        payload.extend_from_slice(data);
        packet(command::DEVICE_SET_IRQS, &payload)
    };
    let eventfds = set::DATA_EVENTFD | set::ACTION_TRIGGER;
    let none = set::DATA_NONE | set::ACTION_TRIGGER;
    for (bytes, descriptors, expected) in [
        (irqs(eventfds, 2, 0, 16, &[]), 16, Ok(())),
        (irqs(eventfds, 2, 48, 17, &[]), 0, Ok(())),
        (irqs(eventfds, 2, 64, 1, &[]), 1, Ok(())),
        (irqs(eventfds, 2, 65, 1, &[]), 1, Err(Errno::EINVAL)),
        (irqs(eventfds, 2, 0, 16, &[]), 15, Err(Errno::EINVAL)),
        (irqs(eventfds, 2, u32::MAX, 2, &[]), 2, Err(Errno::EINVAL)),
        (irqs(eventfds, 5, 0, 1, &[]), 1, Err(Errno::EINVAL)),
        (irqs(eventfds, 0, 0, 1, &[]), 1, Err(Errno::EINVAL)),
        (irqs(none, 2, 0, 0, &[]), 0, Ok(())),
        (irqs(none, 0, 0, 0, &[]), 0, Ok(())),
        (irqs(none, 2, 0, 0, &[]), 1, Ok(())),
        (irqs(none, 2, 3, 2, &[]), 0, Ok(())),
        (irqs(none, 2, 3, 0, &[]), 0, Err(Errno::EINVAL)),
        (
            irqs(set::DATA_BOOL | set::ACTION_MASK, 2, 3, 2, &[1, 0]),
            0,
            Ok(()),
        ),
        (
            irqs(set::DATA_BOOL | set::ACTION_MASK, 2, 3, 2, &[1]),
            0,
            Err(Errno::EINVAL),
        ),
        (
            irqs(set::DATA_NONE | set::ACTION_UNMASK, 4, 0, 1, &[]),
            0,
            Err(Errno::ENOTSUP),
        ),
        (
            irqs(set::DATA_EVENTFD | set::ACTION_MASK, 2, 0, 1, &[]),
            1,
            Err(Errno::ENOTSUP),
        ),
        (irqs(set::DATA_NONE, 2, 0, 1, &[]), 0, Err(Errno::EINVAL)),
        (irqs(set::ACTION_MASK, 2, 0, 1, &[]), 0, Err(Errno::EINVAL)),
        (
            irqs(eventfds | set::DATA_NONE, 2, 0, 1, &[]),
            1,
            Err(Errno::EINVAL),
        ),
        (irqs(eventfds | 1 << 9, 2, 0, 1, &[]), 1, Err(Errno::EINVAL)),
    ] {
        assert_eq!(judged(&session, &bytes, descriptors), expected, "{bytes:?}");
    }
}

#[test]
fn regions_are_accessed_inside_and_in_the_right_direction() {
    let session = agreed();
    let access = |code, offset: u64, region: u32, count: u32, data: &[u8]| {
        let mut payload = offset.to_le_bytes().to_vec();
        payload.extend(words(&[region, count]));
        payload.extend_from_slice(data);
        packet(code, &payload)
    };
    let read = |offset, region, count| access(command::REGION_READ, offset, region, count, &[]);
    assert_eq!(judged(&session, &read(0x3ffc, 0, 4), 0), Ok(()));
    for (offset, region, count) in [
        (0x3ffd, 0, 4),
        (u64::MAX, 0, 4),
        (0, 0, 0),
        (0, 0, u32::MAX),
        (0, 9, 4),
        (0, 2, 4),
    ] {
        let bytes = read(offset, region, count);
        assert_eq!(judged(&session, &bytes, 0), Err(Errno::EINVAL));
    }
    assert_eq!(judged(&session, &read(0, 0, 4), 1), Ok(()));
    let write = |count, data: &[u8]| access(command::REGION_WRITE, 0x14, 0, count, data);
    assert_eq!(judged(&session, &write(4, &[1, 2, 3, 4]), 0), Ok(()));
    assert_eq!(
        judged(&session, &write(4, &[1, 2, 3]), 0),
        Err(Errno::EINVAL)
    );
    assert_eq!(judged(&session, &write(4, &[0; 5]), 0), Err(Errno::EINVAL));
    let bytes = access(command::REGION_WRITE, 0, 1, 1, &[0]);
    assert_eq!(judged(&session, &bytes, 0), Err(Errno::EACCES));

    let bytes = read(0x14, 0, 4);
    let message = session.judge(&bytes, 0).unwrap();
    let mut out = [0; 64];
    let answer = message.done(&[1, 2, 3, 4], &mut out);
    assert_eq!((answer.bytes, &out[32..36]), (36, &[1, 2, 3, 4][..]));
    assert_eq!(out[16..32], bytes[16..32]);
    // A short read is an error.
    message.done(&[1], &mut out);
    assert!(Header::read(&out).unwrap().is_error());
}

#[test]
fn unsupported_requests_fail_with_a_nonzero_errno() {
    let session = agreed();
    for code in [0, 6, 11, 12, 14, 15, 16, 17, 18, 99, u16::MAX] {
        let bytes = message_of(code, 48);
        assert_eq!(frame(&bytes), Ok(MessageFrame::Whole(64)));
        let message = session.judge(&bytes, 0).unwrap();
        assert_eq!(message.request, Err(Errno::ENOTSUP));
        let mut out = [0; 64];
        assert_eq!(session.describe(&message, &mut out).unwrap().bytes, 16);
        let header = Header::read(&out).unwrap();
        assert!(header.is_error() && header.error == 95 && header.size_bytes == 16);
    }
    assert_eq!(Errno::of_os(0), Errno::EIO);
    assert_eq!(Errno::of_os(-12), Errno::EIO);
    assert_eq!(Errno::of_os(12), Errno::ENOMEM);
}

#[test]
fn a_message_flagged_no_reply_gets_no_reply() {
    let session = agreed();
    let mut bytes = message_of(command::DEVICE_RESET, 0);
    bytes[8] |= 1 << 4;
    let message = session.judge(&bytes, 0).unwrap();
    assert_eq!(message.request, Ok(Request::Reset));
    let mut out = [0; 64];
    assert_eq!(message.done(&[], &mut out).bytes, 0);
    assert_eq!(message.refuse(Errno::EIO, &mut out).bytes, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_payload_is_judged_within_the_device(
        code in 0u16..20,
        payload in proptest::collection::vec(any::<u8>(), 0..128),
        descriptors in 0usize..18,
        no_reply: bool,
        is_agreed: bool,
    ) {
        let session = if is_agreed { agreed() } else { VfioSession::new(device()) };
        let mut bytes = packet(code, &payload);
        bytes[8] |= u8::from(no_reply) << 4;
        let mut out = [0; MAX_ANSWER_BYTES];
        if let Ok(message) = session.judge(&bytes, descriptors) {
            check(&message, descriptors);
            let answer = session.describe(&message, &mut out)
                .unwrap_or_else(|| message.done(&[], &mut out));
            prop_assert_eq!(answer.bytes == 0, no_reply);
            if !no_reply {
                let header = Header::read(&out).unwrap();
                prop_assert!(header.is_reply());
                prop_assert_eq!(header.size_bytes as usize, answer.bytes);
                prop_assert_eq!(header.is_error(), header.error != 0);
            }
        }
    }
}

fn check(message: &Message<'_>, descriptors: usize) {
    let device = device();
    match message.request {
        Ok(Request::DmaMap(map)) => {
            assert!(map.len_bytes > 0 && map.address.checked_add(map.len_bytes).is_some());
            assert_eq!(map.has_descriptor, descriptors == 1);
        }
        Ok(Request::SetIrqs(irqs)) if irqs.count > 0 => {
            let of = device.irqs[irqs.index as usize];
            assert!(irqs.start + irqs.count <= of.count);
        }
        Ok(Request::RegionRead(access) | Request::RegionWrite(access, _)) => {
            let of = device.regions[access.region as usize];
            let end = access.offset_bytes + u64::from(access.len_bytes);
            assert!(access.len_bytes > 0 && end <= of.size_bytes);
        }
        _ => {}
    }
}
