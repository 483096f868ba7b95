//! Each error that a host can make in a PDU: the C2HTermReq, and that neighbours, data and
//! resources are unaffected.

use super::rig::{Host, Rig, rig, rw, write_in_capsule};
use super::*;
use crate::frontend::Frontend;
use forebay_nvme::tcp::{DIGEST_BYTES, FatalStatus, H2cData, TermReq};

/// Byte offsets of the common header's fields (TCP 3.6.1).
const HLEN: u32 = 2;
const PDO: u32 = 3;
const PLEN: u32 = 4;
const DATAL: u32 = 16;

/// A rig with a neighbour, whose block 9 holds sevens, and a controller for misbehaving hosts.
pub(super) struct Scene {
    pub rig: Rig,
    _admin: Host,
    cntlid: u16,
    neighbour: Host,
}

fn scene(digests: (bool, bool)) -> Scene {
    let mut rig = rig();
    rig.map_all();
    let (admin, cntlid) = rig.admin();
    let mut neighbour = rig.io(cntlid, 60, 32);
    neighbour.say(&write_in_capsule(1, 9, 1), &[7; 4096]);
    rig.turns(2);
    assert!(neighbour.response().unwrap().status().is_success());
    rig.digests = digests;
    Scene {
        rig,
        _admin: admin,
        cntlid,
        neighbour,
    }
}

impl Scene {
    pub(super) fn host(&mut self) -> Host {
        self.rig.io(self.cntlid, 1, 32)
    }

    /// Returns the C2HTermReq that the host gets. Nothing may be left or written.
    pub(super) fn end(&mut self, mut host: Host) -> Option<TermReq> {
        let mut reported = None;
        for _ in 0..4 {
            self.rig.turns(1);
            while let Some((pdu, _)) = host.hear() {
                match pdu {
                    Pdu::C2hTermReq(term) => reported = Some(term),
                    Pdu::CapsuleResp(cqe) => assert!(!cqe.status().is_success(), "{cqe:?}"),
                    other => panic!("{other:?}"),
                }
            }
        }
        drop(host);
        self.rig.turns(4);
        self.clean();
        reported
    }

    fn clean(&mut self) {
        assert_eq!(self.rig.frontend.count(), 2, "and no connection is left");
        assert_eq!((self.rig.held_bytes(), self.rig.core.staging.out()), (0, 0));
        assert_eq!(self.rig.frontend.shared.r2ts.get(), 0);
        assert!(!self.rig.core.recovered.any());
        self.neighbour.say(&rw(2, 2, 9, 1), &[]);
        self.rig.turns(2);
        let (pdu, data) = self.neighbour.hear().expect("the neighbour is served");
        assert!(matches!(pdu, Pdu::C2hData(_)), "{pdu:?}");
        assert_eq!(data, [7; 4096]);
    }
}

/// A capsule with a write of block 9, or data for R2T `ttag`.
fn pdu_bytes(host: &Host, data_pdu: Option<u16>) -> Vec<u8> {
    let mut out = vec![0; tcp::MAX_HEADER_BYTES];
    let n = match data_pdu {
        None => {
            let sqe = write_in_capsule(5, 9, 1);
            tcp::put_capsule_cmd(&mut out, &host.params, &sqe, 4096)
        }
        Some(ttag) => {
            let header = H2cData {
                cid: 5,
                ttag,
                offset_bytes: 0,
                length_bytes: 4096,
                last: true,
            };
            tcp::put_h2c_data(&mut out, &host.params, &header)
        }
    };
    out.truncate(n);
    out.resize(n + 4096, 1);
    if host.params.data_digest {
        out.extend_from_slice(&tcp::crc32c(&[1; 4096]).to_le_bytes());
    }
    out
}

/// Corrects the header digest, so that it does not hide the error.
fn sign(host: &Host, bytes: &mut [u8], header: usize) {
    if host.params.header_digest {
        let digest = tcp::crc32c(&bytes[..header]).to_le_bytes();
        bytes[header..header + DIGEST_BYTES].copy_from_slice(&digest);
    }
}

fn send(host: &Host, bytes: &[u8]) {
    let sent = rustix::net::send(&host.fd, bytes, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(sent, bytes.len());
}

/// The expected error, derived from TCP 3.6.1 and not from the decoder.
fn verdict(bytes: &[u8], header: usize, digests: (bool, bool), is_data: bool) -> Option<u32> {
    let digest = |there: bool| if there { DIGEST_BYTES } else { 0 };
    let (hlen, pdo) = (usize::from(bytes[2]), usize::from(bytes[3]));
    let plen = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) as usize;
    let bare = header + digest(digests.0);
    if hlen != header {
        Some(HLEN)
    } else if plen < bare {
        Some(PLEN)
    } else if plen == bare && !is_data {
        // No data: then the flags must announce no data digest.
        digests.1.then_some(1)
    } else if pdo < bare || pdo % 4 != 0 {
        Some(PDO)
    } else if plen <= pdo + digest(digests.1) {
        Some(PLEN)
    } else if is_data && plen - pdo - digest(digests.1) != 4096 {
        Some(DATAL)
    } else {
        None
    }
}

#[test]
fn pdu_header_len_bounds() {
    for digests in [(false, false), (true, false), (true, true)] {
        let mut scene = scene(digests);
        for is_data in [false, true] {
            let header = if is_data { 24 } else { 72 };
            let whole = {
                let host = scene.host();
                let bytes = pdu_bytes(&host, is_data.then_some(0));
                scene.end(host);
                bytes.len() as u32
            };
            // Each value of each field, with the other two correct.
            let mut cases: Vec<[u8; 6]> = Vec::new();
            let of = |hlen: u8, pdo: u8, plen: u32| {
                let p = plen.to_le_bytes();
                [hlen, pdo, p[0], p[1], p[2], p[3]]
            };
            let pdo = (whole - 4096 - if digests.1 { 4 } else { 0 }) as u8;
            cases.extend((0..=255).map(|hlen| of(hlen, pdo, whole)));
            cases.extend((0..=255).map(|pdo| of(header, pdo, whole)));
            cases.extend((0..=whole).map(|plen| of(header, pdo, plen)));
            for case in cases {
                let mut host = scene.host();
                let mut ttag = None;
                if is_data {
                    host.say(&rw(1, 5, 9, 1), &[]);
                    scene.rig.turns(1);
                    match host.hear() {
                        Some((Pdu::R2t(r2t), _)) => ttag = Some(r2t.ttag),
                        other => panic!("{other:?}"),
                    }
                }
                let mut bytes = pdu_bytes(&host, ttag);
                if bytes[2..8] == case {
                    drop(host);
                    scene.rig.turns(3);
                    continue;
                }
                bytes[2..8].copy_from_slice(&case);
                sign(&host, &mut bytes, header.into());
                let wanted = verdict(&bytes, header.into(), digests, is_data);
                // Bytes left over would begin another PDU: send only the first.
                let plen = u32::from_le_bytes([case[2], case[3], case[4], case[5]]);
                let end = (plen as usize).clamp(header.into(), bytes.len());
                send(
                    &host,
                    &bytes[..if wanted.is_some() { bytes.len() } else { end }],
                );
                let reported = scene.end(host);
                let reported = reported.map(|term| (term.status, term.info));
                let field = |info| (FatalStatus::InvalidHeaderField, info);
                assert_eq!(
                    reported,
                    wanted.map(field),
                    "{digests:?} data: {is_data} {case:?}"
                );
            }
        }
        scene.clean();
    }
}

#[test]
fn digest_errors_are_fatal_and_clean() {
    for is_data in [false, true] {
        let mut scene = scene((true, true));
        let header = if is_data { 24 } else { 72 };
        let begin = |scene: &mut Scene| {
            let mut host = scene.host();
            host.say(&rw(1, 6, 20, 4), &[]);
            host.say(&rw(1, 5, 9, 1), &[]);
            scene.rig.turns(1);
            let ttag = match (host.hear(), host.hear()) {
                (Some((Pdu::R2t(_), _)), Some((Pdu::R2t(r2t), _))) => r2t.ttag,
                other => panic!("{other:?}"),
            };
            let mut bytes = pdu_bytes(&host, is_data.then_some(ttag));
            if !is_data {
                // Not the identifier of the command that waits for data.
                bytes[10] = 8;
                sign(&host, &mut bytes, header);
            }
            (host, bytes)
        };
        for bit in 0..32 {
            let (host, mut bytes) = begin(&mut scene);
            bytes[header + bit / 8] ^= 1 << (bit % 8);
            let received = u32::from_le_bytes(bytes[header..header + 4].try_into().unwrap());
            send(&host, &bytes);
            let term = scene.end(host).expect("a C2HTermReq");
            assert_eq!(
                (term.status, term.info),
                (FatalStatus::HeaderDigestError, received)
            );
        }
        for at in 8..header {
            let (host, mut bytes) = begin(&mut scene);
            bytes[at] ^= 0x10;
            send(&host, &bytes);
            let term = scene.end(host).expect("a C2HTermReq");
            assert_eq!(term.status, FatalStatus::HeaderDigestError, "byte {at}");
        }
        // A data digest error: the command fails with a retryable status, and the connection
        // continues.
        for at in [0, 1, 4095, 4096, 4099] {
            let (mut host, mut bytes) = begin(&mut scene);
            bytes[header + DIGEST_BYTES + at] ^= 1;
            send(&host, &bytes);
            scene.rig.turns(2);
            let cqe = host.response().unwrap();
            assert_eq!(cqe.status(), Status::TRANSIENT_TRANSPORT_ERROR);
            host.say(&rw(2, 30, 9, 1), &[]);
            scene.rig.turns(2);
            let (pdu, data) = host.hear().unwrap();
            assert!(matches!(pdu, Pdu::C2hData(_)), "{pdu:?}");
            assert_eq!(data[..4096], [7; 4096], "nothing was written");
            drop(host);
            scene.rig.turns(4);
            scene.clean();
        }
    }
}

#[test]
fn r2t_abuse() {
    let mut scene = scene((false, false));
    let data = |cid, ttag, offset_bytes, length_bytes, last| H2cData {
        cid,
        ttag,
        offset_bytes,
        length_bytes,
        last,
    };
    let say = |host: &Host, header: H2cData| {
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_h2c_data(&mut out, &host.params, &header);
        out.truncate(n);
        out.resize(n + header.length_bytes as usize, 1);
        send(host, &out);
    };
    let begin = |scene: &mut Scene| {
        let mut host = scene.host();
        host.say(&rw(1, 5, 9, 4), &[]);
        host.say(&rw(1, 6, 13, 1), &[]);
        host.say(&rw(2, 7, 9, 1), &[]);
        scene.rig.turns(2);
        let mut tags = Vec::new();
        while let Some((pdu, _)) = host.hear() {
            if let Pdu::R2t(r2t) = pdu {
                tags.push(r2t.ttag);
            }
        }
        (host, tags[0], tags[1])
    };
    const WHOLE: u32 = 4 * 4096;
    let field = |n| (FatalStatus::InvalidHeaderField, n);
    let range = (FatalStatus::DataOutOfRange, 0);
    const CID: u32 = 8;
    const TTAG: u32 = 10;
    const FLAGS: u32 = 1;
    // Takes the two tags; only the last PDU is wrong.
    type Abuse = fn(u16, u16, fn(u16, u16, u32, u32, bool) -> H2cData) -> Vec<H2cData>;
    let cases: [(&str, Abuse, (FatalStatus, u32)); 14] = [
        (
            "no such tag",
            |a, _, d| vec![d(5, a ^ 0x1f, 0, WHOLE, true)],
            field(TTAG),
        ),
        (
            "an old tag",
            |a, _, d| vec![d(5, a ^ 0x100, 0, WHOLE, true)],
            field(TTAG),
        ),
        (
            "no such command",
            |a, _, d| vec![d(99, a, 0, WHOLE, true)],
            field(CID),
        ),
        (
            "another's tag",
            |_, b, d| vec![d(5, b, 0, 4096, true)],
            field(CID),
        ),
        (
            "a read's",
            |a, _, d| vec![d(7, a, 0, WHOLE, true)],
            field(CID),
        ),
        (
            "not from its begin",
            |a, _, d| vec![d(5, a, 4096, 4096, false)],
            range,
        ),
        (
            "with a gap",
            |a, _, d| vec![d(5, a, 0, 4096, false), d(5, a, 8192, 8192, true)],
            range,
        ),
        (
            "twice",
            |a, _, d| vec![d(5, a, 0, 4096, false), d(5, a, 0, 4096, false)],
            range,
        ),
        (
            "beyond its end",
            |a, _, d| vec![d(5, a, 0, WHOLE + 4, true)],
            range,
        ),
        (
            "beyond, in parts",
            |a, _, d| vec![d(5, a, 0, 8192, false), d(5, a, 8192, 8196, true)],
            range,
        ),
        (
            "last too early",
            |a, _, d| vec![d(5, a, 0, 4096, true)],
            field(FLAGS),
        ),
        (
            "never last",
            |a, _, d| vec![d(5, a, 0, WHOLE, false)],
            field(FLAGS),
        ),
        ("nothing", |a, _, d| vec![d(5, a, 0, 0, false)], field(PDO)),
        (
            "at an odd place",
            |a, _, d| vec![d(5, a, 2, 4096, false)],
            field(12),
        ),
    ];
    for (name, abuse, wanted) in cases {
        for at_once in [true, false] {
            let (host, a, b) = begin(&mut scene);
            for header in abuse(a, b, data) {
                say(&host, header);
                if !at_once {
                    scene.rig.turns(1);
                }
            }
            let term = scene.end(host).expect(name);
            assert_eq!((term.status, term.info), wanted, "{name}");
        }
    }
    // After the answer, with and without reuse of the identifier.
    for again in [false, true] {
        let mut host = scene.host();
        host.say(&rw(1, 5, 13, 1), &[]);
        scene.rig.turns(1);
        let Some((Pdu::R2t(r2t), _)) = host.hear() else {
            panic!("an R2T")
        };
        say(&host, data(5, r2t.ttag, 0, 4096, true));
        scene.rig.turns(2);
        assert!(host.response().unwrap().status().is_success());
        if again {
            host.say(&rw(1, 5, 13, 1), &[]);
            scene.rig.turns(1);
            assert!(matches!(host.hear(), Some((Pdu::R2t(next), _)) if next.ttag != r2t.ttag));
        }
        say(&host, data(5, r2t.ttag, 0, 4096, true));
        let term = scene.end(host).expect("a C2HTermReq");
        assert_eq!((term.status, term.info), field(TTAG));
    }
    // Longer than MAXH2CDATA.
    let (host, a, _) = begin(&mut scene);
    let limit = host.params.max_h2c_data_bytes;
    let mut out = vec![0; tcp::MAX_HEADER_BYTES];
    let n = tcp::put_h2c_data(&mut out, &host.params, &data(5, a, 0, limit + 4, false));
    send(&host, &out[..n]);
    let term = scene.end(host).expect("a C2HTermReq");
    assert_eq!((term.status, term.info), (FatalStatus::LimitExceeded, 0));
    let host = scene.host();
    say(&host, data(0, 0, 0, 4096, true));
    let term = scene.end(host).expect("a C2HTermReq");
    assert_eq!((term.status, term.info), field(TTAG));
    several_r2ts::abuse(&mut scene);
}
