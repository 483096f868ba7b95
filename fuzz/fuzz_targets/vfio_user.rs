//! A hostile vfio-user client.
//!
//! The first byte tells whether a version is negotiated; a message's last byte is its descriptor
//! count. No panic; accepted accesses are inside the device; each request gets one reply of the
//! announced length; errors have a nonzero errno.

#![no_main]

use forebay_vfio_user::{
    Device, MessageFrame, Header, Irq, MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES, Negotiated, Region, Request,
    VfioSession, SparseArea, frame,
};
use libfuzzer_sys::fuzz_target;

fn device() -> Device {
    let region = |size_bytes, mappable| Region {
        size_bytes,
        readable: true,
        writable: true,
        mappable,
    };
    let doorbells = SparseArea {
        offset_bytes: 0x1000,
        len_bytes: 0x1000,
    };
    let mut device = Device {
        regions: [Region::default(); 9],
        irqs: [Irq::default(); 5],
    };
    device.regions[0] = region(0x4000, Some(doorbells));
    device.regions[7] = region(4096, None);
    device.irqs[2] = Irq {
        count: 65,
        maskable: true,
    };
    device.irqs[4] = Irq {
        count: 1,
        maskable: false,
    };
    device
}

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, mut stream)) = bytes.split_first() else {
        return;
    };
    let agreed = Negotiated {
        minor: 0,
        client_descriptors: 1,
        client_data_bytes: 4096,
    };
    let mut session = VfioSession::resume(device(), (choice & 1 != 0).then_some(agreed));
    let mut out = vec![0; MAX_ANSWER_BYTES];
    while let Ok(MessageFrame::Whole(len)) = frame(stream) {
        assert!(len <= stream.len() && (16..=MAX_MESSAGE_BYTES).contains(&len));
        let (bytes, rest) = stream.split_at(len);
        stream = rest;
        let descriptors = usize::from(bytes[len - 1] % 18);
        let Ok(message) = session.judge(bytes, descriptors) else {
            return;
        };
        let mut data = Vec::new();
        match message.request {
            Ok(Request::Version(negotiated)) => session.agreed(negotiated),
            Ok(Request::DmaMap(map)) => {
                assert!(map.len_bytes > 0 && map.address.checked_add(map.len_bytes).is_some());
                assert!(map.offset_bytes.checked_add(map.len_bytes).is_some());
            }
            Ok(Request::SetIrqs(irqs)) if irqs.count > 0 => {
                let of = session.device().irqs[irqs.index as usize];
                assert!(irqs.start + irqs.count <= of.count);
            }
            Ok(Request::RegionRead(access)) => data.resize(access.len_bytes as usize, 7),
            Ok(Request::RegionWrite(access, data)) => {
                let of = session.device().regions[access.region as usize];
                assert_eq!(data.len(), access.len_bytes as usize);
                assert!(access.offset_bytes + u64::from(access.len_bytes) <= of.size_bytes);
            }
            _ => {}
        }
        let answer = session
            .describe(&message, &mut out)
            .unwrap_or_else(|| message.done(&data, &mut out));
        assert_eq!(answer.bytes == 0, message.header.no_reply());
        if answer.bytes > 0 {
            let header = Header::read(&out).expect("a header");
            assert!(header.is_reply() && header.size_bytes as usize == answer.bytes);
            assert_eq!(header.is_error(), header.error != 0);
        }
    }
});
