//! Time limits are checked after a read of the input.

use super::*;
use crate::frontend::Frontend;
use forebay_nvme::opcode;
use rig::Rig;
use rustix::net::sockopt;

const KATO_NS: u64 = 5 * SECOND_NS;

/// An admin queue with Keep Alive Timeout [`KATO_NS`].
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
    // Idle, so that only epoll would report them.
    rig.turns(QUIET_TURNS as usize);
    for round in 0..3 {
        for host in &mut hosts {
            host.say(&keep_alive(10 + round), &[]);
        }
        // As after a suspended machine: time has passed, and the clock is checked first.
        rig.pass(2 * KATO_NS);
        for host in &mut hosts {
            assert_eq!(host.response().unwrap().status(), Status::SUCCESS);
        }
        assert_eq!(rig.frontend.count(), hosts.len());
        rig.pass(KATO_NS - SECOND_NS);
    }
    rig.pass(2 * SECOND_NS);
    assert_eq!(rig.frontend.count(), 0);
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
        assert_eq!(rig.frontend.count(), 1 + usize::from(came));
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
    assert_eq!(rig.frontend.count(), 2);
    assert!(slow.hear().is_some());
}

fn rig_of_kato(kato_ms: u32) -> (Rig, Host) {
    let mut rig = rig();
    rig.tcp = true;
    let mut connect = ConnectCommand::new(0, 0, 32, 0);
    connect.kato = kato_ms.into();
    let host = rig.connect(connect, 0xffff);
    (rig, host)
}

/// The kernel ends the connection of a vanished host, but not before its Keep Alive Timeout.
#[test]
fn vanished_host_is_dropped() {
    let mut rig = rig();
    rig.tcp = true;
    let mut admin = rig.connect(ConnectCommand::new(0, 0, 32, 0), 0xffff);
    let enable = PropertyCommand::set(1, 0x14, false, 0x46_0001);
    admin.say(&enable.to_sqe(), &[]);
    let enabled = crate::patience::patiently().any(|()| {
        rig.turns(1);
        rig.frontend
            .controllers
            .get(0)
            .unwrap()
            .controller
            .cc()
            .en()
    });
    assert!(enabled);
    let _io = rig.connect(ConnectCommand::new(0, 1, 32, 0), 1);
    let timeouts = |rig: &Rig| -> Vec<u32> {
        let conns = rig.frontend.conns.iter().flatten();
        let sockets = conns.map(|conn| conn.socket.fd.clone().unwrap());
        let timeout = |socket: Arc<OwnedFd>| {
            assert!(sockopt::socket_keepalive(&socket).unwrap());
            assert!(sockopt::tcp_keepidle(&socket).unwrap().as_secs() <= 60);
            sockopt::tcp_user_timeout(&socket).unwrap()
        };
        sockets.map(timeout).collect()
    };
    assert_eq!(timeouts(&rig), [60_000; 2]);
    for (kato_ms, timeout_ms) in [
        (120_000, 150_000),
        (5_000, 60_000),
        (u32::MAX, i32::MAX as u32),
    ] {
        let set = Sqe::new(opcode::admin::SET_FEATURES, 3)
            .with_cdw(10, 0x0f)
            .with_cdw(11, kato_ms);
        admin.say(&set, &[]);
        let set = crate::patience::patiently().any(|()| {
            rig.turns(1);
            timeouts(&rig) == [timeout_ms; 2]
        });
        assert!(set, "{kato_ms}: {:?}", timeouts(&rig));
    }
    let (mut rig, _host) = rig_of_kato(120_000);
    assert_eq!(timeouts(&rig), [150_000]);
    // As when the host has vanished: the kernel's error ends both.
    let conns = rig.frontend.conns.iter().flatten();
    for socket in conns.map(|conn| conn.socket.fd.clone().unwrap()) {
        rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).unwrap();
    }
    let over = crate::patience::patiently().any(|()| {
        rig.turns(1);
        rig.frontend.count() == 0
    });
    assert!(over);
}
