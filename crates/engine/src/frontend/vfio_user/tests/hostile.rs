//! Hostile guests and clients lose only their own controller or connection.

use super::*;

/// With a neighbour on the same reactor, which must not be affected.
fn with_neighbour() -> (Rig, Driver, Pair, Driver, Pair) {
    let mut rig = Rig::new("file", 2, false);
    let mut good = rig.connect(1);
    good.begin(&mut rig);
    let good_pair = good.make_pair(&mut rig, 1, 16);
    let mut bad = rig.connect(0);
    bad.begin(&mut rig);
    let bad_pair = bad.make_pair(&mut rig, 1, 64);
    (rig, bad, bad_pair, good, good_pair)
}

fn still_good(rig: &mut Rig, good: &mut Driver, pair: &mut Pair) {
    good.put(DATA, &[0x5A; 4096]);
    assert_eq!(
        good.run(rig, pair, &io(nvm::WRITE, 1, 0, DATA)),
        Status::SUCCESS
    );
    assert_eq!(
        good.run(rig, pair, &io(nvm::READ, 2, 0, DATA + 8192)),
        Status::SUCCESS
    );
    assert_eq!(good.get(DATA + 8192, 4096), [0x5A; 4096]);
}

/// The content of the next event.
fn event(rig: &mut Rig, driver: &mut Driver) -> u64 {
    let mut queue = driver.admin;
    driver.submit(&mut queue, &Sqe::new(admin::ASYNC_EVENT_REQUEST, 77));
    let cqe = driver.completion(rig, &mut queue);
    driver.admin = queue;
    let log = Sqe::new(admin::GET_LOG_PAGE, 3).with_cdw(10, 1 | 15 << 16);
    assert_eq!(driver.admin(rig, &prps(log, DATA, 0)), Status::SUCCESS);
    cqe.result()
}

#[test]
fn hostile_guest_rings_doorbells_that_are_not_there() {
    let (mut rig, mut bad, mut pair, mut good, mut good_pair) = with_neighbour();
    for (offset, value, expected) in [
        (8, 64, 0x01_0100),
        (8, u32::MAX, 0x01_0100),
        (12, 5, 0x01_0100),
        (16, 1, 0x01_0000),
        (64 * 8 + 4, 1, 0x01_0000),
        (65 * 8, 1, 0x01_0000),
        (0xFFC, 1, 0x01_0000),
    ] {
        bad.ring(offset, value);
        rig.turns();
        assert_eq!(event(&mut rig, &mut bad), expected, "{offset} {value}");
    }
    assert_eq!(
        bad.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA)),
        Status::SUCCESS
    );
    still_good(&mut rig, &mut good, &mut good_pair);
}

#[test]
fn hostile_guest_writes_nonsense_into_shadow_and_mapped_doorbells() {
    for doorbells in [Doorbells::Shadow, Doorbells::Mapped] {
        let (mut rig, mut driver, mut pair) = ready("ram", doorbells);
        for value in [64, 0xFFFF, u32::MAX] {
            match (&driver.page, driver.shadow) {
                (Some(page), _) => assert!(page.write(0x1008, &value.to_le_bytes())),
                (_, shadow) => driver.put(shadow.unwrap() + 8, &value.to_le_bytes()),
            }
            rig.turns();
            assert_eq!(event(&mut rig, &mut driver), 0x01_0100);
        }
        assert_eq!(
            driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA)),
            Status::SUCCESS
        );
    }
}

#[test]
fn hostile_guest_names_memory_that_it_has_not() {
    let (mut rig, mut bad, mut pair, mut good, mut good_pair) = with_neighbour();
    let nowhere = [0, BASE - 4096, BASE + MEMORY, u64::MAX - 4095, 1 << 63];
    for at in nowhere {
        for opcode in [nvm::READ, nvm::WRITE] {
            let status = bad.run(&mut rig, &mut pair, &io(opcode, 1, 0, at));
            assert_eq!(status, Status::DATA_TRANSFER_ERROR.with_dnr(), "{at:x}");
        }
        let long = prps(
            Sqe::new(nvm::READ, 1).with_nsid(1).with_cdw(12, 3),
            DATA,
            at,
        );
        let status = bad.run(&mut rig, &mut pair, &long);
        assert_eq!(status, Status::DATA_TRANSFER_ERROR.with_dnr());
        let cq = Sqe::new(admin::CREATE_IO_CQ, 1)
            .with_cdw(10, 5 | 63 << 16)
            .with_cdw(11, 1);
        let status = bad.admin(&mut rig, &prps(cq, at, 0));
        assert!(!status.is_success());
        let identify = Sqe::new(admin::IDENTIFY, 1).with_cdw(10, 1);
        assert!(!bad.admin(&mut rig, &prps(identify, at, 0)).is_success());
    }
    let odd = bad.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA + 2));
    assert_eq!(odd, Status::PRP_OFFSET_INVALID.with_dnr());
    let fused = bad.run(&mut rig, &mut pair, &{
        let mut sqe = io(nvm::COMPARE, 1, 0, DATA);
        sqe.flags |= 1;
        sqe
    });
    assert_eq!(fused, Status::INVALID_FIELD.with_dnr());
    let reserve = bad.run(
        &mut rig,
        &mut pair,
        &io(nvm::RESERVATION_REGISTER, 1, 0, DATA),
    );
    assert_eq!(reserve, Status::INVALID_OPCODE.with_dnr());
    still_good(&mut rig, &mut good, &mut good_pair);
}

#[test]
fn hostile_guest_takes_memory_away_under_flight() {
    let (mut rig, mut bad, mut pair, mut good, mut good_pair) = with_neighbour();
    rig.gate
        .hold_some(1 << 20..(1 << 20) + EXTENTS * EXTENT, &[]);
    bad.submit(&mut pair, &io(nvm::READ, 1, 0, DATA));
    rig.until("a read at the device", |rig| rig.gate.held() >= 1);
    let id = bad.send(
        command::DMA_UNMAP,
        &Driver::unmap_message(BASE, MEMORY),
        &[],
    );
    rig.turns();
    assert!(bad.reply().is_none(), "a device may still write there");
    rig.gate.release();
    assert!(!bad.answered(&mut rig, id).header.is_error());
    // The completion waits until its queue's memory is back.
    rig.turns();
    bad.map(&mut rig);
    assert_eq!(
        bad.completion(&mut rig, &mut pair).status(),
        Status::SUCCESS
    );
    bad.call(
        &mut rig,
        command::DMA_UNMAP,
        &Driver::unmap_message(BASE, MEMORY),
        &[],
    );
    bad.ring(8, (pair.tail + 1) % 64);
    rig.turns();
    assert_eq!(bad.register(&mut rig, 0x1C) & 2, 0);
    rig.pass_time(6_000_000_000);
    rig.turns();
    assert_eq!(bad.register(&mut rig, 0x1C) & 2, 2, "CSTS.CFS");
    bad.map(&mut rig);
    bad.write(&mut rig, pci_region::BAR0, 0x14, &0u32.to_le_bytes());
    bad.enable(&mut rig);
    let mut pair = bad.make_pair(&mut rig, 1, 64);
    assert_eq!(
        bad.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA)),
        Status::SUCCESS
    );
    still_good(&mut rig, &mut good, &mut good_pair);
}

#[test]
fn hostile_guest_cuts_off_its_memory() {
    let (mut rig, mut bad, mut pair, mut good, mut good_pair) = with_neighbour();
    // Registers and the Admin queue remain; its I/O queue is gone.
    bad.submit(&mut pair, &io(nvm::READ, 1, 0, DATA));
    rustix::fs::ftruncate(&bad.memfd, 0x2000).unwrap();
    rig.until("its end", |rig| !rig.left.is_empty());
    assert!(bad.is_closed());
    still_good(&mut rig, &mut good, &mut good_pair);
}

#[test]
fn hostile_client_sends_messages_that_make_no_sense() {
    let version = b"\0\0\0\0{}\0";
    let cases: [&dyn Fn(&mut Driver); 6] = [
        &|d| d.send_raw(&[0; 16], &[]),
        &|d| d.send_raw(&[0xFF; 64], &[]),
        &|d| {
            d.send(command::DEVICE_GET_INFO, &[0; 16], &[]);
        },
        &|d| d.send_raw(&[1, 0, 1, 0, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[]),
        &|d| {
            d.send(command::VERSION, version, &[]);
            d.send_raw(&[1, 0, 9, 0, 16, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], &[]);
        },
        &|d| {
            d.send(command::VERSION, version, &[]);
            d.send_raw(
                &[1, 0, 10, 0, 0xFF, 0xFF, 0xFF, 0x7F, 0, 0, 0, 0, 0, 0, 0, 0],
                &[],
            );
        },
    ];
    for (n, case) in cases.into_iter().enumerate() {
        let mut rig = Rig::new("ram", 1, false);
        let mut driver = rig.connect(0);
        case(&mut driver);
        rig.until("its end", |rig| !rig.left.is_empty());
        let mut next = rig.connect(0);
        next.begin(&mut rig);
        assert_eq!(rig.left.len(), 1, "case {n}");
    }
}

#[test]
fn hostile_client_is_refused_unsupported_requests_and_continues() {
    let (mut rig, mut driver, mut pair) = ready("ram", Doorbells::Trapped);
    for code in [0, 6, 11, 12, 14, 15, 16, 17, 18, 4711] {
        let reply = driver.call(&mut rig, code, &[7; 300], &[]);
        assert!(reply.header.is_error() && reply.header.error == 95);
    }
    let memfd = driver.memfd.try_clone().unwrap();
    // Overlapping, or past the file's end.
    for (address, len, offset, fd, errno) in [
        (BASE, MEMORY, 0, &memfd, 17),
        (BASE + MEMORY - 4096, 8192, 0, &memfd, 17),
        (BASE + (1 << 40), MEMORY, 4096, &memfd, 22),
    ] {
        let payload = Driver::map_message(address, len, offset);
        let reply = driver.call(&mut rig, command::DMA_MAP, &payload, &[fd]);
        assert_eq!(reply.header.error, errno, "{address:x} {len:x} {offset:x}");
    }
    // Memory without a descriptor is accepted (`super::remote`), but not for queues.
    let payload = Driver::map_message(BASE + (1 << 40), 1 << 20, 0);
    assert!(
        !driver
            .call(&mut rig, command::DMA_MAP, &payload, &[])
            .header
            .is_error()
    );
    let cq = Sqe::new(admin::CREATE_IO_CQ, 1)
        .with_cdw(10, 9 | 15 << 16)
        .with_cdw(11, 1);
    let status = driver.admin(&mut rig, &prps(cq, BASE + (1 << 40), 0));
    assert_eq!(status, Status::INVALID_FIELD.with_dnr());
    let payload = Driver::unmap_message(BASE, 4096);
    assert_eq!(
        driver
            .call(&mut rig, command::DMA_UNMAP, &payload, &[])
            .header
            .error,
        2
    );
    assert_eq!(
        driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA)),
        Status::SUCCESS
    );
    // Neither a memory file nor an eventfd: the client is closed.
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    driver.send(command::DMA_MAP, &payload, &[&pipe]);
    rig.until("its end", |rig| !rig.left.is_empty());
}

#[test]
fn stale_dma_map_after_disconnect() {
    let mut rig = Rig::new("file", 1, false);
    let mut driver = rig.connect(0);
    driver.begin(&mut rig);
    let mut pair = driver.make_pair(&mut rig, 1, 64);
    rig.gate.hold();
    driver.submit(&mut pair, &io(nvm::READ, 1, 0, DATA));
    rig.until("a read at the device", |rig| rig.gate.held() >= 1);
    let old = driver.memory;
    drop(driver.fd);
    rig.turns();
    assert!(rig.left.is_empty(), "its memory is still a device's");
    rig.gate.release();
    rig.until("its end", |rig| !rig.left.is_empty());
    // The next client inherits no memory, queues or interrupts.
    let mut next = rig.connect(0);
    let reply = next.call(&mut rig, command::VERSION, b"\0\0\0\0{}\0", &[]);
    assert!(!reply.header.is_error());
    assert_eq!(next.register(&mut rig, 0x1C), 0);
    next.write(
        &mut rig,
        pci_region::BAR0,
        0x24,
        &0x1F_001Fu32.to_le_bytes(),
    );
    next.write(&mut rig, pci_region::BAR0, 0x28, &BASE.to_le_bytes());
    next.write(
        &mut rig,
        pci_region::BAR0,
        0x30,
        &(BASE + 0x1000).to_le_bytes(),
    );
    next.write(
        &mut rig,
        pci_region::BAR0,
        0x14,
        &0x0046_0001u32.to_le_bytes(),
    );
    assert_eq!(
        next.register(&mut rig, 0x1C) & 2,
        2,
        "there is no such memory"
    );
    next.write(&mut rig, pci_region::BAR0, 0x14, &0u32.to_le_bytes());
    next.map(&mut rig);
    next.take_vectors(&mut rig);
    next.enable(&mut rig);
    let mut pair = next.make_pair(&mut rig, 1, 64);
    let mut before = vec![0; 4096];
    assert!(old.write(DATA, &[0xEE; 4096]) && old.read(DATA, &mut before));
    assert_eq!(
        next.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA)),
        Status::SUCCESS
    );
    let mut after = vec![0; 4096];
    assert!(
        old.read(DATA, &mut after) && after == before,
        "somebody else's memory"
    );
}
