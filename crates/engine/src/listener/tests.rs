//! The listener with real sockets: slow hosts and many hosts.

use super::*;
use crate::takeover::counters;
use forebay_nvme::fabrics::ConnectCommand;
use forebay_nvme::tcp;
use forebay_nvme::{Nqn, SglDescriptor};
use std::collections::BTreeMap;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use zerocopy::IntoBytes;

fn listener() -> (Listener, SocketAddr) {
    let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    let region = Arc::new(Region::anonymous(5).unwrap());
    let mut listener = Listener::new(Associations::default(), epoll, 5, region);
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    listener
        .add_listener(address.to_string(), socket.into())
        .unwrap();
    (listener, address)
}

/// Holds every socket, as the daemon does.
#[derive(Default)]
struct Daemon {
    held: BTreeMap<u64, Arc<OwnedFd>>,
    #[expect(
        clippy::vec_box,
        reason = "they come boxed, and nobody looks at them here"
    )]
    routed: Vec<Box<NewConnection>>,
    refused: Vec<(RefusedHost, u32)>,
}

impl Outside for Daemon {
    fn accepted(&mut self, socket: u64, fd: &Arc<OwnedFd>) {
        assert!(self.held.insert(socket, fd.clone()).is_none());
        assert_eq!(socket >> 32, 5);
    }

    fn gone(&mut self, socket: u64) {
        let fd = self.held.remove(&socket).unwrap();
        assert_eq!(Arc::strong_count(&fd), 1, "the listener has it no more");
        // Another holder keeps the socket open, yet the host must see the end.
        std::mem::forget(fd);
    }

    fn refused(&mut self, newest: RefusedHost, count: u32) {
        self.refused.push((newest, count));
    }

    fn route(&mut self, _: usize, connection: Box<NewConnection>) {
        self.routed.push(connection);
    }
}

fn turn(listener: &mut Listener, out: &mut Daemon) {
    let mut events = Vec::with_capacity(512);
    let limit = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    epoll::wait(
        &*listener.epoll.clone(),
        rustix::buffer::spare_capacity(&mut events),
        Some(&limit),
    )
    .unwrap();
    for event in events {
        listener.ready(event.data.u64(), &ExportTable::default(), out);
    }
}

fn is_closed(socket: &mut TcpStream) -> bool {
    socket.set_nonblocking(true).unwrap();
    match socket.read(&mut [0; 8]) {
        Ok(0) => true,
        Ok(_) => panic!("it said something"),
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
    }
}

/// The close may still be on its way.
fn will_be_closed(socket: &mut TcpStream) -> bool {
    crate::patience::patiently().any(|()| is_closed(socket))
}

#[test]
fn silent_connections_are_dropped_after_ten_seconds() {
    let (mut listener, address) = listener();
    let begun = monotonic_ns();
    let mut out = Daemon::default();
    let mut silent = TcpStream::connect(address).unwrap();
    let mut slow = TcpStream::connect(address).unwrap();
    std::io::Write::write_all(&mut slow, &[0, 0, 128, 0]).unwrap();
    while listener.handshakes() < 2 {
        turn(&mut listener, &mut out);
    }
    turn(&mut listener, &mut out);
    assert!(listener.is_busy());
    listener.tick(
        begun + WELCOME_LIMIT_NS - 1,
        &ExportTable::default(),
        &mut out,
    );
    assert!(!is_closed(&mut silent) && !is_closed(&mut slow));
    listener.tick(
        monotonic_ns() + WELCOME_LIMIT_NS,
        &ExportTable::default(),
        &mut out,
    );
    assert!(will_be_closed(&mut silent) && will_be_closed(&mut slow));
    assert!(!listener.is_busy());
}

#[test]
fn a_crowd_loses_its_own_places() {
    let (mut listener, address) = listener();
    let mut out = Daemon::default();
    let mut guest = TcpStream::connect(address).unwrap();
    while listener.handshakes() < 1 {
        turn(&mut listener, &mut out);
    }
    if let Some(Some(handshake)) = listener.handshakes.first_mut() {
        handshake.peer = "192.0.2.1:1".parse().unwrap();
    }
    let mut crowd: Vec<TcpStream> = Vec::new();
    for _ in 0..MAX_HANDSHAKES + 40 {
        crowd.push(TcpStream::connect(address).unwrap());
        turn(&mut listener, &mut out);
    }
    let mut closed = 0;
    for () in crate::patience::patiently() {
        closed = crowd
            .iter_mut()
            .filter_map(|s| is_closed(s).then_some(()))
            .count();
        if closed >= 41 {
            break;
        }
        turn(&mut listener, &mut out);
    }
    assert_eq!((closed, listener.handshakes()), (41, MAX_HANDSHAKES));
    assert!(
        !is_closed(&mut guest),
        "it was the oldest, but not of the crowd"
    );
    assert!(is_closed(&mut crowd[0]));
    listener.close(&mut out);
    assert!(will_be_closed(&mut guest));
}

/// A successor knows only the kernel's counters.
#[test]
fn a_newcomer_begins_again_from_the_kernels_counters_alone() {
    let subsystem = Nqn::discovery();
    let host = Nqn::parse("nqn.2014-08.org.example:host").unwrap();
    let mut words = vec![0; tcp::MAX_HEADER_BYTES];
    let request = tcp::IcReq {
        pfv: 0,
        hpda: 1,
        header_digest: true,
        data_digest: true,
        max_r2t: 0,
    };
    let n = tcp::put_ic_req(&mut words, &request);
    words.truncate(n);
    let (_, response) = TcpParams::accept(&request, &tcp::Offer::default()).unwrap();
    let params = TcpParams::connected(&request, &response).unwrap();
    let sqe = ConnectCommand::new(7, 0, 32, 0)
        .to_sqe()
        .with_sgl(SglDescriptor::in_capsule(0, 1024));
    let data = ConnectData::new([9; 16], 0xffff, &subsystem, &host);
    let mut capsule = vec![0; tcp::MAX_HEADER_BYTES];
    let n = tcp::put_capsule_cmd(&mut capsule, &params, &sqe, 1024);
    capsule.truncate(n);
    capsule.extend_from_slice(data.as_bytes());
    capsule.extend_from_slice(&tcp::crc32c(data.as_bytes()).to_le_bytes());
    words.extend_from_slice(&capsule);
    let whole = words.len();
    words.extend_from_slice(&[4; 10]);
    for dies_at in [0, 1, 127, 128, 129, 200, 300, whole - 1] {
        let (mut first, address) = listener();
        let mut out = Daemon::default();
        let mut socket = TcpStream::connect(address).unwrap();
        socket.set_nodelay(true).unwrap();
        std::io::Write::write_all(&mut socket, &words[..dies_at]).unwrap();
        while first.handshakes() < 1 {
            turn(&mut first, &mut out);
        }
        let (number, fd) = out.held.pop_first().unwrap();
        let mut facts = None;
        for () in crate::patience::patiently() {
            turn(&mut first, &mut out);
            let now = counters::read(&fd).unwrap();
            assert_eq!(now.consumed, 0, "the listener consumes nothing");
            if now.accepted == if dies_at < 128 { 0 } else { 128 } {
                facts = Some(now);
                break;
            }
        }
        let facts = facts.expect("nothing comes of it");
        assert!(out.routed.is_empty());
        drop(first);
        let (mut second, _) = listener();
        let mut out = Daemon::default();
        out.held.insert(number, fd.clone());
        let exports = ExportTable::default();
        second.readmit(number, fd, facts.accepted == 128, &exports, &mut out);
        std::io::Write::write_all(&mut socket, &words[dies_at..]).unwrap();
        for () in crate::patience::patiently() {
            turn(&mut second, &mut out);
            if !out.routed.is_empty() {
                break;
            }
        }
        let came = out.routed.pop().unwrap();
        assert_eq!((came.consumed, came.said), (whole, 128));
        assert!(came.params.header_digest && came.params.data_digest);
        assert_eq!(
            (came.params.host_alignment_bytes, came.connect.cid()),
            (8, 7)
        );
        let facts = counters::read(&came.fd).unwrap();
        assert_eq!((facts.consumed, facts.accepted), (0, 128));
        // The host has exactly one ICResp.
        socket.read_exact(&mut [0; 128]).unwrap();
        socket.set_nonblocking(true).unwrap();
        let more = socket.read(&mut [0; 1]).map_err(|error| error.kind());
        assert_eq!(more, Err(std::io::ErrorKind::WouldBlock));
    }
}

#[test]
fn a_newcomer_that_hangs_up_half_way_is_gone() {
    for said in [0, 5, 128] {
        let (mut listener, address) = listener();
        let mut out = Daemon::default();
        let mut socket = TcpStream::connect(address).unwrap();
        std::io::Write::write_all(&mut socket, &vec![0; said]).unwrap();
        while listener.handshakes() < 1 {
            turn(&mut listener, &mut out);
        }
        drop(socket);
        while listener.handshakes() > 0 {
            turn(&mut listener, &mut out);
        }
        assert!(out.held.is_empty());
    }
}

/// The bytes may kill an engine: its successor must know the socket.
#[test]
fn the_socket_being_parsed_is_recorded_in_the_region() {
    use std::sync::atomic::Ordering::Relaxed;
    let (mut listener, address) = listener();
    let mut out = Daemon::default();
    let mut socket = TcpStream::connect(address).unwrap();
    // ICReq (3.6.2.2), no digests.
    let mut words = [0; 128];
    (words[2], words[4]) = (128, 128);
    while listener.handshakes() < 1 {
        turn(&mut listener, &mut out);
    }
    let number = *out.held.first_key_value().unwrap().0;
    let region = listener.region.clone();
    let named = || region.header().handshake.load(Relaxed);
    assert_eq!(named(), 0);
    std::io::Write::write_all(&mut socket, &words).unwrap();
    forebay_xlate::kill::arm_here("door.answered", 1);
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        for () in crate::patience::patiently() {
            turn(&mut listener, &mut out);
        }
    }));
    assert!(died.is_err(), "it is answered");
    assert_eq!(named(), number);
}

#[test]
fn refused_hosts_are_named() {
    let (mut listener, address) = listener();
    let mut out = Daemon::default();
    let subsystem = Nqn::parse("nqn.2026-01.io.forebay:no.one").unwrap();
    let host = Nqn::parse("nqn.2014-08.org.example:host").unwrap();
    let data = ConnectData::new([9; 16], 0xffff, &subsystem, &host);
    let mut request = vec![0; tcp::MAX_HEADER_BYTES];
    let n = tcp::put_ic_req(
        &mut request,
        &tcp::IcReq {
            pfv: 0,
            hpda: 0,
            header_digest: false,
            data_digest: false,
            max_r2t: 0,
        },
    );
    request.truncate(n);
    let mut capsule = vec![0; tcp::MAX_HEADER_BYTES];
    let sqe = ConnectCommand::new(7, 0, 32, 0).to_sqe();
    let sqe = sqe.with_sgl(SglDescriptor::in_capsule(0, 1024));
    let params = TcpParams::before(tcp::Role::Host);
    let n = tcp::put_capsule_cmd(&mut capsule, &params, &sqe, 1024);
    capsule.truncate(n);
    capsule.extend_from_slice(data.as_bytes());
    request.extend_from_slice(&capsule);
    let mut sockets = Vec::new();
    for _ in 0..3 {
        let mut socket = TcpStream::connect(address).unwrap();
        std::io::Write::write_all(&mut socket, &request).unwrap();
        sockets.push(socket);
    }
    while !listener
        .handshakes
        .iter()
        .flatten()
        .filter(|n| n.leaving())
        .count()
        .eq(&3)
    {
        turn(&mut listener, &mut out);
    }
    listener.tick(
        monotonic_ns() + 1_000_000_000,
        &ExportTable::default(),
        &mut out,
    );
    let refused = RefusedHost {
        host: host.to_string(),
        subsystem: subsystem.to_string(),
        why: "there is no such export",
    };
    assert!(out.refused.iter().all(|(who, _)| *who == refused));
    assert_eq!(out.refused.iter().map(|(_, count)| count).sum::<u32>(), 3);
    assert!(out.routed.is_empty());
}
