//! Tests of the codec: known bytes, broken rules, round trips and arbitrary bytes.

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;
use crate::{SglDescriptor, Status};

fn params(role: Role) -> TcpParams {
    TcpParams {
        phase: Phase::Ready,
        max_data_bytes: 1 << 20,
        max_h2c_data_bytes: 1 << 20,
        ..TcpParams::before(role)
    }
}

/// The peer's parameters.
fn flip(params: &TcpParams) -> TcpParams {
    let role = match params.role {
        Role::Host => Role::Controller,
        Role::Controller => Role::Host,
    };
    TcpParams { role, ..*params }
}

fn whole(buf: &[u8], params: &TcpParams) -> Frame {
    match parse(buf, params) {
        Ok(Parsed::Pdu(frame)) => frame,
        other => panic!("expected a PDU, got {other:?}"),
    }
}

fn refused(buf: &[u8], params: &TcpParams) -> PduError {
    parse(buf, params).expect_err("must be refused")
}

#[test]
fn crc32c_known_vectors() {
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    let mut parts = DataDigest::new();
    parts.update(&[0; 5]);
    parts.update(&[0; 27]);
    assert_eq!(parts.finish(), 0x8a91_36aa);
}

#[test]
fn ic_req_bytes_are_the_specifications() {
    let req = IcReq {
        pfv: 0,
        hpda: 3,
        header_digest: true,
        data_digest: false,
        max_r2t: 0x0102_0304,
    };
    let mut out = [0xaa; MAX_HEADER_BYTES];
    assert_eq!(put_ic_req(&mut out, &req), 128);
    assert_eq!(
        out[..16],
        [0, 0, 128, 0, 128, 0, 0, 0, 0, 0, 3, 1, 4, 3, 2, 1]
    );
    assert!(out[16..128].iter().all(|&b| b == 0));
    let frame = whole(&out, &TcpParams::before(Role::Controller));
    assert_eq!(frame.pdu, Pdu::IcReq(req));
    assert_eq!(frame.total_bytes(), 128);
}

#[test]
fn negotiation_takes_the_smaller_of_both_and_agrees() {
    let req = IcReq {
        pfv: 0,
        hpda: 31,
        header_digest: true,
        data_digest: true,
        max_r2t: 0,
    };
    let offer = Offer {
        data_digest: false,
        alignment_bytes: 64,
        max_h2c_data_bytes: 5000,
        ..Offer::default()
    };
    let (controller, resp) = TcpParams::accept(&req, &offer).unwrap();
    let host = TcpParams::connected(&req, &resp).unwrap();
    assert!(controller.header_digest && !controller.data_digest);
    assert_eq!((resp.cpda, resp.max_h2c_data_bytes), (15, 5000));
    assert_eq!(controller.tx_alignment_bytes(), 128);
    assert_eq!(controller.rx_alignment_bytes(), 64);
    assert_eq!(host.tx_alignment_bytes(), 64);
    assert_eq!(host.rx_alignment_bytes(), 128);
    assert_eq!((host.max_r2t, controller.max_r2t), (1, 1));
}

#[test]
fn negotiation_refuses_values_out_of_range() {
    let req = IcReq {
        pfv: 0,
        hpda: 0,
        header_digest: false,
        data_digest: false,
        max_r2t: 0,
    };
    let offer = Offer::default();
    let bad = IcReq { pfv: 1, ..req };
    assert_eq!(
        TcpParams::accept(&bad, &offer),
        Err(PduError::unsupported(8))
    );
    let bad = IcReq { hpda: 32, ..req };
    assert_eq!(TcpParams::accept(&bad, &offer), Err(PduError::field(10)));
    let resp = TcpParams::accept(&req, &offer).unwrap().1;
    for (resp, at) in [
        (IcResp { cpda: 32, ..resp }, 10),
        (
            IcResp {
                data_digest: true,
                ..resp
            },
            11,
        ),
        (
            IcResp {
                max_h2c_data_bytes: 4092,
                ..resp
            },
            12,
        ),
        (
            IcResp {
                max_h2c_data_bytes: 4098,
                ..resp
            },
            12,
        ),
    ] {
        assert_eq!(TcpParams::connected(&req, &resp), Err(PduError::field(at)));
    }
}

#[test]
fn command_capsule_with_digests_and_alignment() {
    let params = TcpParams {
        header_digest: true,
        data_digest: true,
        controller_alignment_bytes: 72,
        ..params(Role::Host)
    };
    let sqe = Sqe::new(0x01, 0xbeef).with_sgl(SglDescriptor::in_capsule(0, 4096));
    let mut out = [0xaa; MAX_HEADER_BYTES];
    assert_eq!(put_capsule_cmd(&mut out, &params, &sqe, 4096), 144);
    assert_eq!(out[..8], [4, 3, 72, 144, 0x94, 0x10, 0, 0]);
    assert_eq!(out[72..76], crc32c(&out[..72]).to_le_bytes());
    assert!(out[76..].iter().all(|&b| b == 0));
    let target = flip(&params);
    assert_eq!(parse(&out[..8], &target), Ok(Parsed::NeedMore(144)));
    let frame = whole(&out, &target);
    assert_eq!(frame.pdu, Pdu::CapsuleCmd(sqe));
    assert_eq!((frame.header_bytes, frame.data_bytes), (144, 4096));
    assert_eq!(frame.total_bytes(), 144 + 4096 + 4);
    assert_eq!(
        decode_sgl(&sqe, 4096),
        Ok(DataPlace::InCapsule {
            offset_bytes: 0,
            length_bytes: 4096
        })
    );
}

#[test]
fn header_digest_is_judged_before_the_fields_behind_it() {
    let params = TcpParams {
        header_digest: true,
        ..params(Role::Controller)
    };
    let mut out = [0; MAX_HEADER_BYTES];
    let r2t = R2t {
        cid: 1,
        ttag: 2,
        offset_bytes: 0,
        length_bytes: 4096,
    };
    assert_eq!(put_r2t(&mut out, &params, &r2t), 28);
    let host = flip(&params);
    assert_eq!(whole(&out, &host).pdu, Pdu::R2t(r2t));
    assert_eq!(parse(&out[..24], &host), Ok(Parsed::NeedMore(28)));
    out[12] ^= 1; // R2TO, otherwise refused as unaligned
    let error = refused(&out, &host);
    assert_eq!(error.status, FatalStatus::HeaderDigestError);
    assert_eq!(error.info.to_le_bytes(), out[24..28]);
}

#[test]
fn each_broken_rule_names_its_field() {
    let controller = params(Role::Controller);
    let host = flip(&controller);
    let mut capsule = [0; MAX_HEADER_BYTES];
    put_capsule_cmd(&mut capsule, &host, &Sqe::new(2, 1), 512);
    let check = |at: usize, value: u8, error: PduError| {
        let mut bytes = capsule;
        bytes[at] = value;
        assert_eq!(refused(&bytes, &controller), error, "byte {at} = {value}");
    };
    check(0, 0x08, PduError::field(field::PDU_TYPE)); // no such type
    check(0, 0x05, PduError::field(field::PDU_TYPE)); // the other side's
    check(0, 0x00, PduError::SEQUENCE); // ICReq again
    check(1, wire::FLAG_HDGST, PduError::field(field::FLAGS));
    check(1, wire::FLAG_DDGST, PduError::field(field::FLAGS));
    check(2, 73, PduError::field(field::HLEN));
    check(3, 74, PduError::field(field::PDO)); // unaligned
    check(3, 68, PduError::field(field::PDO)); // inside the header
    check(6, 0x01, PduError::LIMIT_EXCEEDED);
    check(7, 0xff, PduError::LIMIT_EXCEEDED);
    let mut bytes = capsule;
    bytes[4..8].copy_from_slice(&71u32.to_le_bytes());
    assert_eq!(refused(&bytes, &controller), PduError::field(field::PLEN));
    let early = TcpParams::before(Role::Controller);
    assert_eq!(refused(&capsule, &early), PduError::SEQUENCE);
}

#[test]
fn data_pdus_are_bounded_and_consistent() {
    let host = params(Role::Host);
    let controller = TcpParams {
        max_data_bytes: 4096,
        ..flip(&host)
    };
    let data = H2cData {
        cid: 1,
        ttag: 7,
        offset_bytes: 4096,
        length_bytes: 4096,
        last: true,
    };
    let put = |data: &H2cData| {
        let mut out = [0; MAX_HEADER_BYTES];
        assert_eq!(put_h2c_data(&mut out, &host, data), 24);
        out
    };
    assert_eq!(whole(&put(&data), &controller).pdu, Pdu::H2cData(data));
    let long = H2cData {
        length_bytes: 4100,
        ..data
    };
    assert_eq!(refused(&put(&long), &controller), PduError::LIMIT_EXCEEDED);
    let odd = H2cData {
        offset_bytes: 2,
        ..data
    };
    assert_eq!(refused(&put(&odd), &controller), PduError::field(12));
    let far = H2cData {
        offset_bytes: u32::MAX - 3,
        ..data
    };
    assert_eq!(
        refused(&put(&far), &controller),
        PduError::DATA_OUT_OF_RANGE
    );
    let mut lying = put(&data);
    lying[16] = 1; // DATAL differs from PLEN
    assert_eq!(refused(&lying, &controller), PduError::field(16));
    let mut out = [0; MAX_HEADER_BYTES];
    put_c2h_data(
        &mut out,
        &controller,
        &C2hData {
            cid: 1,
            offset_bytes: 0,
            length_bytes: 512,
            last: false,
            success: true,
        },
    );
    assert_eq!(refused(&out, &host), PduError::field(field::FLAGS));
}

#[test]
fn term_req_echoes_at_most_128_bytes() {
    let mut out = [0; MAX_TERM_REQ_BYTES];
    let error = PduError::field(field::PLEN);
    let n = put_term_req(&mut out, Role::Controller, &error, &[0x5a; 200]);
    assert_eq!(n, 152);
    let frame = whole(&out, &params(Role::Host));
    assert_eq!(
        frame.pdu,
        Pdu::C2hTermReq(TermReq {
            status: FatalStatus::InvalidHeaderField,
            info: 4
        })
    );
    assert_eq!((frame.header_bytes, frame.data_bytes), (24, 128));
    out[4] += 1;
    assert_eq!(refused(&out, &params(Role::Host)), PduError::field(4));
    // Also before the handshake.
    let n = put_term_req(&mut out, Role::Host, &error, &[]);
    assert_eq!(n, 24);
    whole(&out, &TcpParams::before(Role::Controller));
}

#[test]
fn sgl_descriptors_and_their_statuses() {
    let base = Sqe::new(1, 1);
    let with = |sgl| decode_sgl(&base.with_sgl(sgl), 4096);
    assert_eq!(
        with(SglDescriptor::transport(8192)),
        Ok(DataPlace::Transport { length_bytes: 8192 })
    );
    assert_eq!(
        with(SglDescriptor::in_capsule(4095, 1)).map(|p| p.length_bytes()),
        Ok(1)
    );
    assert_eq!(
        with(SglDescriptor::in_capsule(1, 4096)),
        Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr())
    );
    assert_eq!(
        with(SglDescriptor::in_capsule(u64::MAX, 0)),
        Err(Status::SGL_OFFSET_INVALID.with_dnr())
    );
    for kind in [0x00, 0x20, 0x30, 0x40, 0x50, 0x5b, 0x0a, 0xff] {
        let sgl = SglDescriptor {
            kind,
            ..SglDescriptor::transport(512)
        };
        assert_eq!(
            with(sgl),
            Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr())
        );
    }
    let prp = Sqe {
        flags: 0,
        ..base.with_sgl(SglDescriptor::transport(1))
    };
    assert_eq!(decode_sgl(&prp, 0), Err(Status::INVALID_FIELD.with_dnr()));
}

fn any_params() -> impl Strategy<Value = TcpParams> {
    (any::<[bool; 4]>(), 1u8..=32, 1u8..=32).prop_map(|([host, ready, hd, dd], h, c)| TcpParams {
        phase: if ready {
            Phase::Ready
        } else {
            Phase::Initialize
        },
        header_digest: hd,
        data_digest: dd,
        host_alignment_bytes: h * 4,
        controller_alignment_bytes: c * 4,
        ..params(if host { Role::Host } else { Role::Controller })
    })
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), params in any_params(), kind in 0u8..11, hlen in 0usize..6) {
        // Half plausible, to reach the later checks.
        if hlen < 4 && bytes.len() >= 8 {
            bytes[0] = kind;
            bytes[2] = [24, 72, 128, 24][hlen];
            bytes[1] &= 0x0f;
            bytes[6] = 0;
            bytes[7] = 0;
        }
        if let Ok(Parsed::NeedMore(n)) = parse(&bytes, &params) {
            prop_assert!(n > bytes.len() && n <= 255);
        }
        if let Ok(Parsed::Pdu(frame)) = parse(&bytes, &params) {
            prop_assert!(frame.header_bytes <= bytes.len());
            prop_assert!(frame.data_bytes <= 1 << 20);
        }
        let mut sqe = Sqe::default();
        let n = bytes.len().min(64);
        sqe.as_mut_bytes()[..n].copy_from_slice(&bytes[..n]);
        let _ = decode_sgl(&sqe, 8192);
    }

    #[test]
    fn every_pdu_survives_the_round_trip(params in any_params(), cid: u16, ttag: u16, offset in 0u32..1 << 20, length in 1u32..8192, last: bool, success: bool, sqe: [u8; 64], cqe: [u8; 16]) {
        let params = TcpParams { phase: Phase::Ready, ..params };
        let peer = flip(&params);
        let offset_bytes = offset & !3;
        let length_bytes = length;
        let mut out = [0x77; MAX_TERM_REQ_BYTES];
        let mut pdus = vec![];
        if params.role == Role::Host {
            let sqe: Sqe = zerocopy::transmute!(sqe);
            for data in [0, length] {
                let n = put_capsule_cmd(&mut out, &params, &sqe, data);
                pdus.push((out, n, Pdu::CapsuleCmd(sqe), data));
            }
            let data = H2cData { cid, ttag, offset_bytes, length_bytes, last };
            let n = put_h2c_data(&mut out, &params, &data);
            pdus.push((out, n, Pdu::H2cData(data), length));
        } else {
            let cqe: Cqe = zerocopy::transmute!(cqe);
            let n = put_capsule_resp(&mut out, &params, &cqe);
            pdus.push((out, n, Pdu::CapsuleResp(cqe), 0));
            let data = C2hData { cid, offset_bytes, length_bytes, last, success: last && success };
            let n = put_c2h_data(&mut out, &params, &data);
            pdus.push((out, n, Pdu::C2hData(data), length));
            let r2t = R2t { cid, ttag, offset_bytes, length_bytes };
            let n = put_r2t(&mut out, &params, &r2t);
            pdus.push((out, n, Pdu::R2t(r2t), 0));
        }
        for (bytes, n, pdu, data_bytes) in pdus {
            prop_assert!(n <= MAX_HEADER_BYTES);
            // Any prefix asks for more and never fails.
            let mut have = 0;
            while have < n {
                match parse(&bytes[..have], &peer) {
                    Ok(Parsed::NeedMore(more)) => { prop_assert!(more > have && more <= n); have = more; }
                    other => prop_assert!(false, "{other:?} at {have} of {n}"),
                }
            }
            let frame = whole(&bytes[..n], &peer);
            prop_assert_eq!(frame.pdu, pdu);
            prop_assert_eq!(frame.header_bytes, n);
            prop_assert_eq!(frame.data_bytes, data_bytes as usize);
            prop_assert_eq!(frame.data_digest, params.data_digest && data_bytes > 0);
            let plen = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            prop_assert_eq!(frame.total_bytes(), plen as usize);
        }
    }
}
