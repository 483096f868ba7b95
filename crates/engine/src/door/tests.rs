//! The door with real sockets: who waits too long, and who comes in crowds.

use super::*;
use std::collections::BTreeMap;
use std::io::Read;
use std::net::{TcpListener, TcpStream};

fn door() -> (Door, SocketAddr) {
    let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    let mut door = Door::new(Associations::default(), epoll, 5);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    door.add_listener(address.to_string(), listener.into())
        .unwrap();
    (door, address)
}

/// Holds every socket, as the daemon does.
#[derive(Default)]
struct Daemon {
    held: BTreeMap<u64, Arc<OwnedFd>>,
    routed: Vec<Box<NewConnection>>,
}

impl Outside for Daemon {
    fn accepted(&mut self, socket: u64, fd: &Arc<OwnedFd>) {
        assert!(self.held.insert(socket, fd.clone()).is_none());
        assert_eq!(socket >> 32, 5);
    }

    fn gone(&mut self, socket: u64) {
        let fd = self.held.remove(&socket).unwrap();
        assert_eq!(Arc::strong_count(&fd), 1, "the door has it no more");
        // Somebody else has it yet, and still the host must hear the end.
        std::mem::forget(fd);
    }

    fn route(&mut self, _: usize, connection: Box<NewConnection>) {
        self.routed.push(connection);
    }
}

fn turn(door: &mut Door, out: &mut Daemon) {
    let mut events = Vec::with_capacity(512);
    let limit = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    epoll::wait(
        &*door.epoll.clone(),
        rustix::buffer::spare_capacity(&mut events),
        Some(&limit),
    )
    .unwrap();
    for event in events {
        door.ready(event.data.u64(), &Exports::default(), out);
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

#[test]
fn who_says_nothing_is_dropped_after_ten_seconds() {
    let (mut door, address) = door();
    let mut out = Daemon::default();
    let mut silent = TcpStream::connect(address).unwrap();
    let mut slow = TcpStream::connect(address).unwrap();
    std::io::Write::write_all(&mut slow, &[0, 0, 128, 0]).unwrap();
    while door.newcomers() < 2 {
        turn(&mut door, &mut out);
    }
    turn(&mut door, &mut out);
    assert!(door.is_busy());
    door.tick(monotonic_ns() + WELCOME_LIMIT_NS - 1_000_000_000, &mut out);
    assert!(!is_closed(&mut silent) && !is_closed(&mut slow));
    door.tick(monotonic_ns() + WELCOME_LIMIT_NS, &mut out);
    assert!(is_closed(&mut silent) && is_closed(&mut slow));
    assert!(!door.is_busy());
}

#[test]
fn a_crowd_loses_its_own_places() {
    let (mut door, address) = door();
    let mut out = Daemon::default();
    let mut guest = TcpStream::connect(address).unwrap();
    while door.newcomers() < 1 {
        turn(&mut door, &mut out);
    }
    // As if it came from elsewhere.
    if let Some(Some(newcomer)) = door.newcomers.first_mut() {
        newcomer.peer = "192.0.2.1:1".parse().unwrap();
    }
    let mut crowd: Vec<TcpStream> = Vec::new();
    for _ in 0..MAX_NEWCOMERS + 40 {
        crowd.push(TcpStream::connect(address).unwrap());
        turn(&mut door, &mut out);
    }
    assert_eq!(door.newcomers(), MAX_NEWCOMERS);
    assert!(
        !is_closed(&mut guest),
        "it was the oldest, but not of the crowd"
    );
    assert_eq!(
        crowd
            .iter_mut()
            .filter_map(|s| is_closed(s).then_some(()))
            .count(),
        41
    );
    assert!(is_closed(&mut crowd[0]));
    door.close(&mut out);
    assert!(is_closed(&mut guest));
}
