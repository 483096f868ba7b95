//! NVMe/TCP with a raw host and a whole engine: PDUs, transfers, digests, SGLs, and broken rules.
//! **Not here:** associations ([`tcp_association`](../tcp_association.rs)).
#![allow(missing_docs)]

mod common;
#[path = "tcp_protocol/rules.rs"]
mod rules;

use common::TestEngine;
use common::host::{
    Ask, DSM, FLUSH, PLAIN, READ, RawHost, WRITE, WRITE_ZEROES, admin, attach, ic_req, io_queue, rw,
};
use forebay_nvme::tcp::{self, FatalStatus, H2cData, Pdu};
use forebay_nvme::{SglDescriptor, Sqe, Status};

const MIB: u64 = 1 << 20;

fn engine() -> (TestEngine, String) {
    let mut engine = TestEngine::start("ram", 64 * MIB, 1);
    engine.volume(1, 16 * MIB, 4096);
    let nqn = engine.export(1, &[]);
    (engine, nqn)
}

fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i as u8).wrapping_mul(31) ^ seed ^ (i >> 8) as u8)
        .collect()
}

/// The connection still works.
fn alive(io: &mut RawHost) {
    let data = pattern(0x5a, 4096);
    assert_eq!(io.write(7, &data, 4096).status(), Status::SUCCESS);
    assert_eq!(io.read(7, 1, 4096), data);
}

#[test]
fn in_capsule_r2t_and_every_digest() {
    let (engine, nqn) = engine();
    for (i, (header_digest, data_digest, hpda, free)) in [
        (false, false, 0, false),
        (true, false, 0, true),
        (false, true, 7, false),
        (true, true, 31, true),
    ]
    .into_iter()
    .enumerate()
    {
        let ask = Ask {
            header_digest,
            data_digest,
            hpda,
        };
        let (_admin, mut io) = attach(engine.address, &nqn, ask, free);
        for (j, bytes) in [4096usize, 8192, 12_288, 128 << 10, 512 << 10]
            .into_iter()
            .enumerate()
        {
            let data = pattern((i * 8 + j) as u8, bytes);
            let lba = (i * 512 + j * 3) as u64;
            if bytes <= 8192 {
                assert_eq!(io.write(lba, &data, 4096).status(), Status::SUCCESS);
            }
            for part in [4096, 20_000, usize::MAX] {
                let cid = io.next_cid();
                let sqe = rw(WRITE, cid, lba, (bytes / 4096) as u32)
                    .with_sgl(SglDescriptor::transport(bytes as u32));
                io.capsule(&sqe, &[]);
                let r2t = io.r2t();
                assert_eq!(
                    (r2t.cid, r2t.offset_bytes, r2t.length_bytes),
                    (cid, 0, bytes as u32)
                );
                let data: Vec<u8> = data.iter().map(|b| b ^ part as u8).collect();
                io.answer_r2t(&r2t, &data, part);
                let cqe = io.response();
                assert_eq!((cqe.cid(), cqe.status()), (cid, Status::SUCCESS));
                assert_eq!(io.read(lba, (bytes / 4096) as u32, 4096), data);
            }
        }
    }
}

#[test]
fn success_replaces_the_response_only_without_flow_control() {
    let (engine, nqn) = engine();
    let (_a, mut kept) = attach(engine.address, &nqn, PLAIN, false);
    let (data, cqe) = kept.fetch(rw(READ, 0, 0, 1), 4096);
    assert_eq!(
        (data.len(), cqe.unwrap().sqhd()),
        (4096, 2),
        "the Connect was the first"
    );
    let (_b, mut free) = attach(engine.address, &nqn, PLAIN, true);
    let (data, cqe) = free.fetch(rw(READ, 0, 0, 1), 4096);
    assert_eq!((data.len(), cqe), (4096, None));
    // An error is never left out.
    let (data, cqe) = free.fetch(rw(READ, 0, 1 << 40, 1), 4096);
    assert_eq!(
        (data.len(), cqe.unwrap().status()),
        (0, Status::LBA_OUT_OF_RANGE.with_dnr())
    );
}

#[test]
fn sq_head_goes_round() {
    let (engine, nqn) = engine();
    let (_admin, cntlid) = admin(engine.address, &nqn, PLAIN);
    let mut io = io_queue(engine.address, &nqn, cntlid, 1, 5, PLAIN, false);
    let heads: Vec<u16> = (0..9)
        .map(|_| io.command(Sqe::new(FLUSH, 0).with_nsid(1)).sqhd())
        .collect();
    assert_eq!(heads, [2, 3, 4, 0, 1, 2, 3, 4, 0]);
}

#[test]
fn byte_by_byte_is_as_good_as_at_once() {
    let (engine, nqn) = engine();
    let ask = Ask {
        header_digest: true,
        data_digest: true,
        hpda: 0,
    };
    let (_admin, mut io) = attach(engine.address, &nqn, ask, true);
    let data = pattern(3, 12_288);
    let mut stream = io.capsule_bytes(
        &rw(WRITE, 1, 0, 1).with_sgl(SglDescriptor::in_capsule(0, 4096)),
        &data[..4096],
    );
    stream.extend(io.capsule_bytes(
        &rw(WRITE, 2, 1, 2).with_sgl(SglDescriptor::transport(8192)),
        &[],
    ));
    for byte in stream {
        io.say(&[byte]);
    }
    let first = io.hear().0;
    let second = io.hear().0;
    let r2t = match (first, second) {
        (Pdu::R2t(r2t), Pdu::CapsuleResp(c)) | (Pdu::CapsuleResp(c), Pdu::R2t(r2t)) => {
            assert_eq!((c.cid(), c.status()), (1, Status::SUCCESS));
            r2t
        }
        other => panic!("{other:?}"),
    };
    for (at, last) in [(0, false), (4096, true)] {
        let header = H2cData {
            cid: 2,
            ttag: r2t.ttag,
            offset_bytes: at,
            length_bytes: 4096,
            last,
        };
        let from = 4096 + at as usize;
        for byte in io.h2c_bytes(&header, &data[from..from + 4096]) {
            io.say(&[byte]);
        }
    }
    assert_eq!(io.response().status(), Status::SUCCESS);
    assert_eq!(io.read(0, 3, 4096), data);
}

#[test]
fn a_full_queue_at_once_and_more_than_that() {
    let (engine, nqn) = engine();
    let (_admin, cntlid) = admin(engine.address, &nqn, PLAIN);
    let mut io = io_queue(engine.address, &nqn, cntlid, 1, 256, PLAIN, true);
    let mut stream = Vec::new();
    for cid in 0..256u16 {
        let data = vec![cid as u8; 4096];
        let sqe = rw(WRITE, cid, u64::from(cid), 1).with_sgl(SglDescriptor::in_capsule(0, 4096));
        stream.extend(io.capsule_bytes(&sqe, &data));
    }
    io.say(&stream);
    let mut seen = [false; 256];
    for _ in 0..256 {
        let cqe = io.response();
        assert_eq!(cqe.status(), Status::SUCCESS);
        assert!(!std::mem::replace(&mut seen[usize::from(cqe.cid())], true));
    }
    // All reads at once; the host reads the answers only later.
    let reads: Vec<u8> = (0..256u16)
        .flat_map(|cid| {
            io.capsule_bytes(
                &rw(READ, cid, u64::from(cid), 1).with_sgl(SglDescriptor::transport(4096)),
                &[],
            )
        })
        .collect();
    io.say(&reads);
    for _ in 0..256 {
        match io.hear() {
            (Pdu::C2hData(c), data) => {
                assert!(data.iter().all(|b| *b == c.cid as u8), "command {}", c.cid)
            }
            other => panic!("{other:?}"),
        }
    }
    // Unanswered R2Ts keep their commands; the queue is full at its size.
    let writes: Vec<u8> = (0..257u16)
        .flat_map(|cid| {
            io.capsule_bytes(
                &rw(WRITE, cid, 0, 4).with_sgl(SglDescriptor::transport(16_384)),
                &[],
            )
        })
        .collect();
    io.say(&writes);
    while let Some((pdu, _)) = io.try_hear() {
        assert!(matches!(pdu, Pdu::R2t(_)), "{pdu:?}");
    }
    let mut other = io_queue(engine.address, &nqn, cntlid, 2, 32, PLAIN, true);
    alive(&mut other);
}

#[test]
fn sgl_and_command_errors_end_the_command_only() {
    let (engine, nqn) = engine();
    let (_admin, mut io) = attach(engine.address, &nqn, PLAIN, true);
    let data = vec![1; 4096];
    let length = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
    let kind = Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr();
    let t = SglDescriptor::transport;
    let c = SglDescriptor::in_capsule;
    let odd = SglDescriptor {
        kind: SglDescriptor::SEGMENT,
        ..t(4096)
    };
    let write = rw(WRITE, 0, 0, 1);
    let read = rw(READ, 0, 0, 1);
    let cases: [(Sqe, &[u8], Status); 16] = [
        (write.with_sgl(t(8192)), &[], length),
        (write.with_sgl(t(0)), &[], length),
        (write.with_sgl(c(0, 4096)), &data[..512], length),
        (write.with_sgl(c(0, 512)), &data, length),
        (write.with_sgl(c(8, 4096)), &data, length),
        (
            write.with_sgl(c(u64::MAX, 4096)),
            &data,
            Status::SGL_OFFSET_INVALID.with_dnr(),
        ),
        (write.with_sgl(odd), &[], kind),
        (write, &data, Status::INVALID_FIELD.with_dnr()),
        (read.with_sgl(t(512)), &[], length),
        (read.with_sgl(c(0, 4096)), &data, kind),
        (
            rw(READ, 0, 4096, 1).with_sgl(t(4096)),
            &[],
            Status::LBA_OUT_OF_RANGE.with_dnr(),
        ),
        (
            rw(READ, 0, 0, 129).with_sgl(t(129 * 4096)),
            &[],
            Status::INVALID_FIELD.with_dnr(),
        ),
        (
            rw(WRITE, 0, u64::MAX, 1).with_sgl(t(4096)),
            &[],
            Status::LBA_OUT_OF_RANGE.with_dnr(),
        ),
        (Sqe::new(0x7f, 0), &[], Status::INVALID_OPCODE.with_dnr()),
        (
            rw(0x0c, 0, 0, 1).with_sgl(t(4096)),
            &[],
            Status::INVALID_OPCODE.with_dnr(),
        ),
        (
            read.with_nsid(2).with_sgl(t(4096)),
            &[],
            Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(),
        ),
    ];
    for (i, (sqe, data, status)) in cases.into_iter().enumerate() {
        let cid = io.next_cid();
        io.capsule(
            &Sqe {
                cid: cid.into(),
                ..sqe
            },
            data,
        );
        let cqe = io.response();
        assert_eq!((cqe.cid(), cqe.status()), (cid, status), "case {i}");
    }
    alive(&mut io);
}

#[test]
fn a_command_id_in_use_is_a_conflict_and_the_first_goes_on() {
    let (engine, nqn) = engine();
    let (_admin, mut io) = attach(engine.address, &nqn, PLAIN, true);
    let data = pattern(1, 16_384);
    let write = rw(WRITE, 77, 4, 4).with_sgl(SglDescriptor::transport(16_384));
    io.capsule(&write, &[]);
    let r2t = io.r2t();
    io.capsule(
        &rw(READ, 77, 0, 1).with_sgl(SglDescriptor::transport(4096)),
        &[],
    );
    let cqe = io.response();
    assert_eq!(
        (cqe.cid(), cqe.status()),
        (77, Status::COMMAND_ID_CONFLICT.with_dnr())
    );
    io.answer_r2t(&r2t, &data, usize::MAX);
    assert_eq!(io.response().status(), Status::SUCCESS);
    io.capsule(
        &rw(READ, 77, 4, 4).with_sgl(SglDescriptor::transport(16_384)),
        &[],
    );
    assert_eq!(io.fetched(77).0, data);
}

#[test]
fn wrong_data_digests_fail_the_command() {
    let (engine, nqn) = engine();
    let ask = Ask {
        header_digest: false,
        data_digest: true,
        hpda: 0,
    };
    let (_admin, mut io) = attach(engine.address, &nqn, ask, true);
    let data = pattern(9, 16_384);
    assert_eq!(io.write(0, &data[..4096], 4096).status(), Status::SUCCESS);
    let sqe = rw(WRITE, 100, 0, 1).with_sgl(SglDescriptor::in_capsule(0, 4096));
    let mut bytes = io.capsule_bytes(&sqe, &[0; 4096]);
    *bytes.last_mut().unwrap() ^= 1;
    io.say(&bytes);
    assert_eq!(io.response().status(), Status::TRANSIENT_TRANSPORT_ERROR);
    io.capsule(
        &rw(WRITE, 101, 0, 4).with_sgl(SglDescriptor::transport(16_384)),
        &[],
    );
    let r2t = io.r2t();
    for (at, broken) in [(0u32, true), (8192, false)] {
        let header = H2cData {
            cid: 101,
            ttag: r2t.ttag,
            offset_bytes: at,
            length_bytes: 8192,
            last: at > 0,
        };
        let mut bytes = io.h2c_bytes(&header, &[0; 8192]);
        if broken {
            bytes[30] ^= 1;
        }
        io.say(&bytes);
    }
    assert_eq!(io.response().status(), Status::TRANSIENT_TRANSPORT_ERROR);
    assert_eq!(
        io.read(0, 1, 4096),
        data[..4096],
        "nothing of it was written"
    );
    alive(&mut io);
}

#[test]
fn flush_zeroes_and_deallocate() {
    let (engine, nqn) = engine();
    let (_admin, mut io) = attach(engine.address, &nqn, PLAIN, false);
    let data = pattern(2, 8192);
    assert_eq!(io.write(0, &data, 4096).status(), Status::SUCCESS);
    assert_eq!(
        io.command(Sqe::new(FLUSH, 0).with_nsid(1)).status(),
        Status::SUCCESS
    );
    assert!(engine.log.lock().unwrap().commits > 0, "a flush commits");
    assert_eq!(
        io.command(rw(WRITE_ZEROES, 0, 1, 1)).status(),
        Status::SUCCESS
    );
    assert_eq!(
        io.read(0, 2, 4096),
        [&data[..4096], &[0; 4096][..]].concat()
    );
    let range = |lba: u64, blocks: u32| {
        let mut bytes = [0; 16];
        bytes[4..8].copy_from_slice(&blocks.to_le_bytes());
        bytes[8..].copy_from_slice(&lba.to_le_bytes());
        bytes
    };
    let dsm = |io: &mut RawHost, ranges: &[[u8; 16]], sgl: SglDescriptor| {
        let cid = io.next_cid();
        let sqe = Sqe::new(DSM, cid)
            .with_nsid(1)
            .with_cdw(10, ranges.len() as u32 - 1)
            .with_cdw(11, 4)
            .with_sgl(sgl);
        match sgl.kind {
            SglDescriptor::DATA_BLOCK_OFFSET => io.capsule(&sqe, &ranges.concat()),
            _ => {
                io.capsule(&sqe, &[]);
                let r2t = io.r2t();
                io.answer_r2t(&r2t, &ranges.concat(), usize::MAX);
            }
        }
        io.response().status()
    };
    assert_eq!(
        dsm(&mut io, &[range(0, 16)], SglDescriptor::in_capsule(0, 16)),
        Status::SUCCESS
    );
    assert_eq!(io.read(0, 1, 4096), [0; 4096]);
    assert_eq!(
        engine.log.lock().unwrap().releases.len(),
        1,
        "a whole extent went back"
    );
    let many: Vec<[u8; 16]> = (0..256).map(|i| range(i * 16, 1)).collect();
    assert_eq!(
        dsm(&mut io, &many, SglDescriptor::transport(4096)),
        Status::SUCCESS
    );
    // As Linux does: 4 KiB of ranges, of which one counts.
    let padded = [&range(16, 16)[..], &[0xff; 4080]].concat();
    let sqe = Sqe::new(DSM, io.next_cid())
        .with_nsid(1)
        .with_cdw(10, 0)
        .with_cdw(11, 4)
        .with_sgl(SglDescriptor::in_capsule(0, 4096));
    io.capsule(&sqe, &padded);
    assert_eq!(io.response().status(), Status::SUCCESS);
    let past = [range(0, 1), range(4095, 2)];
    let refused = dsm(&mut io, &past, SglDescriptor::in_capsule(0, 32));
    assert_eq!(refused, Status::LBA_OUT_OF_RANGE.with_dnr());
    // A read and a write with FUA.
    let (data, _) = io.fetch(rw(READ, 0, 0, 1).with_cdw(12, 1 << 30), 4096);
    assert_eq!(data.len(), 4096);
    let fua = rw(WRITE, 900, 3, 1)
        .with_cdw(12, 1 << 30)
        .with_sgl(SglDescriptor::in_capsule(0, 4096));
    io.capsule(&fua, &pattern(8, 4096));
    assert_eq!(io.response().status(), Status::SUCCESS);
    assert_eq!(io.read(3, 1, 4096), pattern(8, 4096));
}

/// Commands with all their data must not wait behind those that need the memory they hold.
#[test]
fn more_large_writes_at_once_than_a_connection_may_hold() {
    use forebay_initiator::load::{Amount, LoadSpec, run};
    let (engine, nqn) = engine();
    for read_percent in [0, 50] {
        let spec = LoadSpec {
            read_percent,
            block_bytes: 512 << 10,
            queue_depth: 64,
            amount: Amount::Bytes(128 * MIB),
            ..LoadSpec::new(engine.address, &nqn, common::HOST)
        };
        let report = run(&spec, &mut |_| {}).expect("no command is overdue");
        assert_eq!(report.errors, 0);
    }
}
