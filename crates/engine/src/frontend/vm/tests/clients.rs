//! Clients' messages and their detaching.

use super::*;

#[test]
fn messages_come_in_any_pieces() {
    // Byte by byte, the descriptor with the first.
    let mut rig = Rig::new();
    let fd = memory();
    let bytes = message(Map, 1, b"more");
    for (at, byte) in bytes.iter().enumerate() {
        let fds = [fd.as_fd()];
        rig.send(&[*byte], if at == 0 { &fds } else { &[] });
        rig.run();
    }
    assert_eq!(rig.answers(), 1u32.to_le_bytes());
    // Many in one segment each, with descriptors between them.
    let mut expected = Vec::new();
    for page in 2..9 {
        let many: Vec<u8> = (0..30).flat_map(|_| message(Post, 0, b"abc")).collect();
        rig.send(&many, &[]);
        rig.send(&message(Map, page, b"zz"), &[memory().as_fd()]);
        rig.send(&message(Map, 20 + page, b""), &[memory().as_fd()]);
        rig.send(&message(Map, 100, b""), &[]);
        // A region without a descriptor is known but inaccessible; a second one at its address is
        // refused.
        let known = u32::from(page == 2);
        for answer in [1, 1, known] {
            expected.extend_from_slice(&answer.to_le_bytes());
        }
    }
    rig.run();
    assert_eq!(rig.answers(), expected);
    let pages = rig.pages();
    assert_eq!(pages.len(), 16, "{pages:?}");
    for (at, region) in rig.client().memory().regions().iter().enumerate() {
        assert_eq!(region.mapping().is_some(), at != 15);
    }
    // More than one peek takes, and a descriptor behind it.
    let many: Vec<u8> = (0..1000).flat_map(|_| message(Post, 0, b"abc")).collect();
    rig.send(&many, &[]);
    rig.send(&message(Map, 150, b""), &[memory().as_fd()]);
    rig.send(&message(Map, 151, b""), &[]);
    rig.run();
    assert_eq!(rig.answers(), [1u32.to_le_bytes(); 2].concat());
    let regions = rig.client().memory().regions();
    let reached = |page: u64| {
        let region = regions.iter().find(|r| r.guest_address() == page * 4096);
        region.unwrap().mapping().is_some()
    };
    assert!(reached(150) && !reached(151));
    rig.send(&message(Map, 200, b"rest")[..HEADER], &[]);
    rig.run();
    rig.send(b"rest", &[memory().as_fd()]);
    rig.run();
    assert_eq!(rig.answers(), 1u32.to_le_bytes());
    let reached = rig
        .client()
        .memory()
        .regions()
        .last()
        .unwrap()
        .mapping()
        .is_some();
    assert!(reached && rig.left.is_empty());
}

#[test]
fn more_messages_than_a_turn_takes_are_all_taken() {
    let mut rig = Rig::new();
    let many: Vec<u8> = (0..200).flat_map(|_| message(Post, 0, b"")).collect();
    rig.send(&many, &[]);
    rig.run();
    let [count] = rig.client().file().area::<AtomicU64>(0, 1).unwrap() else {
        panic!("one");
    };
    assert_eq!(count.load(Relaxed), 200);
}

#[test]
fn hostile_descriptors_end_their_client() {
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let inet = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let on_disk: OwnedFd = std::fs::File::open("/proc/self/status").unwrap().into();
    let flags = rustix::fs::OFlags::PATH;
    let path = rustix::fs::open("/dev/shm", flags, rustix::fs::Mode::empty()).unwrap();
    let (unix, _other) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    for fd in [pipe, inet, set, on_disk, path, unix] {
        let mut rig = Rig::new();
        rig.send(&message(Hold, 1, b""), &[fd.as_fd()]);
        rig.run();
        assert_eq!(rig.left.len(), 1, "{fd:?}");
        assert!(rig.left[0].contains("descriptor"), "{}", rig.left[0]);
        assert!(rig.deposits.is_empty());
    }
    // A full blocking eventfd is still signalled; memory without seals is accepted.
    let mut rig = Rig::new();
    let full = eventfd(0, EventfdFlags::empty()).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rig.send(&message(Hold, 1, b""), &[full.as_fd()]);
    rig.send(&message(Raise, 1, b""), &[]);
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(4096).unwrap();
    rig.send(&message(Map, 1, b""), &[file.as_fd()]);
    rig.run();
    assert_eq!(rig.answers(), [1u32.to_le_bytes(); 3].concat());
    // Reads of a shrunk file return zeros, and the client is closed.
    rig.send(&message(Use, 1, b""), &[]);
    rig.run();
    file.set_len(0).unwrap();
    let mut bytes = [1u8; 8];
    assert!(USED.take().unwrap().read(0, &mut bytes));
    assert_eq!(bytes, [0; 8]);
    rig.run();
    assert_eq!(rig.left, ["the file of its memory was truncated"]);
}

#[test]
fn deposits_are_bounded() {
    let mut rig = Rig::new();
    let bells: Vec<OwnedFd> = (0..client::MAX_DESCRIPTORS + 1).map(|_| bell()).collect();
    let fds: Vec<_> = bells.iter().map(AsFd::as_fd).collect();
    rig.send(&message(Post, 0, b""), &fds[1..]);
    rig.run();
    assert!(
        rig.left.is_empty() && rig.deposits.is_empty(),
        "nothing holds them"
    );
    assert!(rig.client().deposits.is_empty());
    for _ in 0..client::MAX_DEPOSITS {
        assert!(rig.client().deposit(Arc::new(bell())).is_some());
    }
    assert!(rig.client().deposit(Arc::new(bell())).is_none());
    rig.send(&message(Post, 0, b""), &fds);
    rig.run();
    assert_eq!(rig.left, ["it sent too many descriptors"]);
    let mut rig = Rig::new();
    rig.keeps = false;
    rig.send(&message(Hold, 0, b""), &fds[..1]);
    rig.run();
    assert_eq!(rig.left, ["the daemon has no room for its descriptors"]);
}

#[test]
fn memory_is_given_back_when_nothing_uses_it() {
    let mut rig = Rig::new();
    rig.send(&message(Map, 1, b""), &[memory().as_fd()]);
    rig.send(&message(Use, 1, b""), &[]);
    rig.send(&message(Unmap, 1, b""), &[]);
    rig.send(&message(Echo, 1, b""), &[]);
    for _ in 0..100 {
        rig.turn();
    }
    assert_eq!(rig.answers(), [1u32.to_le_bytes(); 2].concat());
    assert!(
        rig.vms.retry_within_ns().is_some(),
        "nobody tells when it is free"
    );
    USED.take();
    for _ in 0..100 {
        rig.turn();
    }
    let mut expected = 1u32.to_le_bytes().to_vec();
    expected.extend(message(Echo, 1, b""));
    assert_eq!(rig.answers(), expected);
    // Released too late: the client is closed.
    rig.send(&message(Map, 1, b""), &[memory().as_fd()]);
    rig.send(&message(Use, 1, b""), &[]);
    rig.send(&message(Unmap, 1, b""), &[]);
    for _ in 0..100 {
        rig.turn();
    }
    let late = rig.core.now_ns() + client::MESSAGE_LIMIT_NS;
    rig.core.clock.set_now_ns(late);
    rig.vms.tick(&mut rig.core);
    rig.turn();
    assert_eq!(
        rig.left,
        ["memory that it removed stayed in use for too long"]
    );
    USED.take();
}

#[test]
fn a_client_that_reads_no_answers_is_disconnected() {
    let mut rig = Rig::new();
    for socket in [rig.client.as_fd(), rig.ours.as_fd()] {
        rustix::net::sockopt::set_socket_send_buffer_size(socket, 64 << 10).unwrap();
    }
    let big = message(Echo, 0, &[7; 30_000]);
    for _ in 0..20 {
        let sent = rustix::net::send(&rig.client, &big, SendFlags::NOSIGNAL);
        for _ in 0..20 {
            rig.turn();
        }
        if sent != Ok(big.len()) {
            break;
        }
    }
    assert!(rig.left.is_empty() && rig.vms.is_idle(), "it waits");
    assert!(rig.vms.next_deadline_ns().is_some());
    let late = rig.core.now_ns() + client::MESSAGE_LIMIT_NS;
    rig.core.clock.set_now_ns(late);
    rig.vms.tick(&mut rig.core);
    rig.turn();
    assert_eq!(rig.left, ["it did not read an answer in time"]);
}

#[test]
fn a_client_that_hangs_up_is_removed() {
    let mut rig = Rig::new();
    rig.send(&message(Hold, 1, b""), &[bell().as_fd()]);
    rig.run();
    let (gone, _) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    drop(std::mem::replace(&mut rig.client, gone));
    rig.run();
    assert_eq!(
        (rig.left.as_slice(), rig.vms.count()),
        (&["it hung up"][..], 0)
    );
}
