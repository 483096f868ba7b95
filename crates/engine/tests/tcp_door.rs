//! The listener with a raw host and a whole engine: everything before Connect.
#![allow(missing_docs)]

mod common;

use common::TestEngine;
use common::host::{FLUSH, PLAIN, RawHost, attach, ic_req};
use forebay_nvme::tcp::{self, FatalStatus, Phase, TcpParams};
use forebay_nvme::{Sqe, Status};

const MIB: u64 = 1 << 20;

#[test]
fn at_the_door() {
    let mut engine = TestEngine::start("ram", 64 * MIB, 1);
    engine.volume(1, 16 * MIB, 4096);
    let nqn = engine.export(1, &[]);
    let mut host = RawHost::dial(engine.address);
    host.params = TcpParams {
        phase: Phase::Ready,
        ..host.params
    };
    let flush = host.capsule_bytes(&Sqe::new(FLUSH, 1), &[]);
    host.say(&flush);
    assert_eq!(host.end().unwrap().status, FatalStatus::SequenceError);
    // An unknown format version, and an invalid alignment.
    for (i, (pfv, hpda, status)) in [
        (1, 0, FatalStatus::UnsupportedParameter),
        (0, 32, FatalStatus::InvalidHeaderField),
    ]
    .into_iter()
    .enumerate()
    {
        let mut host = RawHost::dial(engine.address);
        let mut out = [0; 144];
        let n = tcp::put_ic_req(
            &mut out,
            &forebay_nvme::tcp::IcReq {
                pfv,
                hpda,
                ..ic_req(PLAIN)
            },
        );
        host.say(&out[..n]);
        assert_eq!(host.end().unwrap().status, status, "case {i}");
    }
    let mut host = RawHost::open(engine.address, PLAIN);
    let mut out = [0; 144];
    let n = tcp::put_ic_req(&mut out, &ic_req(PLAIN));
    host.say(&out[..n]);
    assert_eq!(host.end().unwrap().status, FatalStatus::SequenceError);
    let mut host = RawHost::open(engine.address, PLAIN);
    host.capsule(&Sqe::new(FLUSH, 3), &[]);
    assert_eq!(host.response().status(), Status::COMMAND_SEQUENCE_ERROR);
    assert!(host.end().is_none());
    let mut host = RawHost::dial(engine.address);
    host.say(b"GET / HTTP/1.1\r\n\r\n");
    assert!(host.end().is_some());
    // Many silent connections do not keep others out.
    let crowd: Vec<RawHost> = (0..400).map(|_| RawHost::dial(engine.address)).collect();
    let (_admin, mut io) = attach(engine.address, &nqn, PLAIN, true);
    assert_eq!(
        io.command(Sqe::new(FLUSH, 0).with_nsid(1)).status(),
        Status::SUCCESS
    );
    drop(crowd);
}
