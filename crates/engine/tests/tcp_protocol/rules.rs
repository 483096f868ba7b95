//! Which errors end a connection, and with which codes.

use super::*;

#[test]
fn broken_rules_end_the_connection_with_the_right_words() {
    let (engine, nqn) = engine();
    let (_admin, cntlid) = admin(engine.address, &nqn, PLAIN);
    let mut other = io_queue(engine.address, &nqn, cntlid, 8, 32, PLAIN, true);
    let host = || io_queue(engine.address, &nqn, cntlid, 1, 32, PLAIN, true);
    let field = |n| (FatalStatus::InvalidHeaderField, n);
    let said = |host: RawHost| {
        let term = host.end().expect("a C2HTermReq");
        (term.status, term.info)
    };

    let mut h = host();
    let mut icreq = [0; 144];
    let n = tcp::put_ic_req(&mut icreq, &ic_req(PLAIN));
    h.say(&icreq[..n]);
    assert_eq!(said(h), (FatalStatus::SequenceError, 0));

    let mut h = host();
    h.say(&[0x08, 0, 24, 0, 24, 0, 0, 0]);
    assert_eq!(said(h), field(0));

    let mut h = host();
    let mut capsule = h.capsule_bytes(&Sqe::new(FLUSH, 1).with_nsid(1), &[]);
    capsule[2] = 71;
    h.say(&capsule);
    assert_eq!(said(h), field(2));

    let mut h = host();
    let big = h.capsule_bytes(
        &rw(WRITE, 1, 0, 3).with_sgl(SglDescriptor::in_capsule(0, 12_288)),
        &[0; 12_288],
    );
    h.say(&big);
    assert_eq!(said(h), (FatalStatus::LimitExceeded, 0));

    // Unrequested data, and every wrong answer to an R2T.
    let good = |ttag| H2cData {
        cid: 5,
        ttag,
        offset_bytes: 0,
        length_bytes: 8192,
        last: false,
    };
    type Break = fn(H2cData) -> H2cData;
    let cases: [(Break, (FatalStatus, u32)); 7] = [
        (
            |d| H2cData {
                ttag: d.ttag ^ 1,
                ..d
            },
            field(10),
        ),
        (
            |d| H2cData {
                ttag: d.ttag ^ 0x100,
                ..d
            },
            field(10),
        ),
        (|d| H2cData { cid: 6, ..d }, field(8)),
        (
            |d| H2cData {
                offset_bytes: 4096,
                ..d
            },
            (FatalStatus::DataOutOfRange, 0),
        ),
        (
            |d| H2cData {
                length_bytes: 16_388,
                ..d
            },
            (FatalStatus::DataOutOfRange, 0),
        ),
        (|d| H2cData { last: true, ..d }, field(1)),
        (
            |d| H2cData {
                length_bytes: 16_384,
                ..d
            },
            field(1),
        ),
    ];
    for (i, (break_it, words)) in cases.into_iter().enumerate() {
        let mut h = host();
        h.capsule(
            &rw(WRITE, 5, 0, 4).with_sgl(SglDescriptor::transport(16_384)),
            &[],
        );
        let data = break_it(good(h.r2t().ttag));
        let bytes = h.h2c_bytes(&data, &vec![0; data.length_bytes as usize]);
        h.say(&bytes);
        assert_eq!(said(h), words, "case {i}");
    }

    // More in one PDU than MAXH2CDATA.
    let mut h = host();
    h.capsule(
        &rw(WRITE, 5, 0, 128).with_sgl(SglDescriptor::transport(512 << 10)),
        &[],
    );
    let r2t = h.r2t();
    let length_bytes = h.params.max_h2c_data_bytes + 4;
    let header = H2cData {
        cid: 5,
        ttag: r2t.ttag,
        offset_bytes: 0,
        length_bytes,
        last: false,
    };
    let bytes = h.h2c_bytes(&header, &[]);
    h.say(&bytes);
    assert_eq!(said(h), (FatalStatus::LimitExceeded, 0));

    // No answer to a host's termination request.
    let mut h = host();
    let mut term = [0; tcp::MAX_TERM_REQ_BYTES];
    let n = tcp::put_term_req(
        &mut term,
        tcp::Role::Host,
        &tcp::PduError::field(4),
        &[1; 24],
    );
    h.say(&term[..n]);
    assert!(h.end().is_none());

    alive(&mut other);
}

#[test]
fn header_digest_errors_name_the_digest() {
    let (engine, nqn) = engine();
    let ask = Ask {
        header_digest: true,
        data_digest: false,
        hpda: 0,
    };
    let (_admin, mut io) = attach(engine.address, &nqn, ask, true);
    let mut bytes = io.capsule_bytes(&Sqe::new(FLUSH, 1).with_nsid(1), &[]);
    bytes[72..76].copy_from_slice(&0x1234_5678u32.to_le_bytes());
    io.say(&bytes);
    let term = io.end().expect("a C2HTermReq");
    assert_eq!(
        (term.status, term.info),
        (FatalStatus::HeaderDigestError, 0x1234_5678)
    );
}
