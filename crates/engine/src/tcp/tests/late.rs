//! Time limits are judged after a look at the input.

use super::*;
use forebay_nvme::opcode;
use rig::Rig;

const KATO_NS: u64 = 5 * SECOND_NS;

/// An admin queue whose host has to be heard of every [`KATO_NS`].
fn timed(rig: &mut Rig) -> (Host, u16) {
    let (mut admin, cntlid) = rig.admin();
    // Set Features, Keep Alive Timer.
    let set = Sqe::new(opcode::admin::SET_FEATURES, 3)
        .with_cdw(10, 0x0f)
        .with_cdw(11, 5_000);
    admin.say(&set, &[]);
    rig.turns(1);
    assert_eq!(admin.response().unwrap().status(), Status::SUCCESS);
    (admin, cntlid)
}

fn keep_alive(cid: u16) -> Sqe {
    Sqe::new(opcode::admin::KEEP_ALIVE, cid)
}

#[test]
fn keep_alive_in_the_socket_counts() {
    let mut rig = rig();
    let mut hosts: Vec<Host> = (0..8).map(|_| timed(&mut rig).0).collect();
    // They are quiet, so that only epoll would tell of them.
    rig.turns(QUIET_TURNS as usize);
    for round in 0..3 {
        for host in &mut hosts {
            host.say(&keep_alive(10 + round), &[]);
        }
        // The machine stands still, and the first thing that is looked at is the time.
        rig.pass(2 * KATO_NS);
        for host in &mut hosts {
            assert_eq!(host.response().unwrap().status(), Status::SUCCESS);
        }
        assert_eq!(rig.frontend.connections(), hosts.len());
        rig.pass(KATO_NS - SECOND_NS);
    }
    // Who has said nothing is late.
    rig.pass(2 * SECOND_NS);
    assert_eq!(rig.frontend.connections(), 0);
    assert!(hosts.iter_mut().all(Host::ended));
}

#[test]
fn data_in_the_socket_counts() {
    for came in [true, false] {
        let mut rig = rig();
        rig.map_all();
        let (_admin, cntlid) = rig.admin();
        let mut host = rig.io(cntlid, 1, 32);
        host.say(&rw(1, 1, 0, 16), &[]);
        rig.turns(2);
        let Some((Pdu::R2t(r2t), _)) = host.hear() else {
            panic!("no R2T")
        };
        rig.turns(QUIET_TURNS as usize);
        if came {
            let data = tcp::H2cData {
                cid: 1,
                ttag: r2t.ttag,
                offset_bytes: 0,
                length_bytes: r2t.length_bytes,
                last: true,
            };
            let mut out = vec![0; tcp::MAX_HEADER_BYTES];
            let n = tcp::put_h2c_data(&mut out, &host.params, &data);
            out.truncate(n);
            out.resize(n + r2t.length_bytes as usize, 7);
            rustix::net::send(&host.fd, &out, SendFlags::NOSIGNAL).unwrap();
        }
        rig.pass(2 * DATA_LIMIT_NS);
        assert_eq!(rig.frontend.connections(), 1 + usize::from(came));
    }
}

#[test]
fn room_in_the_socket_counts() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut slow = rig.io(cntlid, 1, 128);
    for cid in 0..100 {
        slow.say(&rw(2, cid, 0, 64), &[]);
    }
    rig.turns(20);
    assert!(rig.held_bytes() > 0);
    while slow.hear().is_some() {}
    rig.pass(2 * BLOCKED_LIMIT_NS);
    assert_eq!(rig.frontend.connections(), 2);
    assert!(slow.hear().is_some());
}
