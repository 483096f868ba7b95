//! Controllers and their drivers: good, hostile, and with dying engines.

mod admit;
mod cost;
mod declared;
mod driver;
mod hostile;
mod remote;
mod reported;
mod rig;
mod take_over;
mod write_protected;

use driver::*;
use forebay_nvme::opcode::{admin, nvm};
use forebay_nvme::{SglDescriptor, Sqe, Status};
use forebay_vfio_user::wire::{command, pci_irq, pci_region};
use rig::*;
use std::sync::atomic::Ordering::Relaxed;
use zerocopy::FromZeros;
use zerocopy::little_endian::{U32, U64};

const DATA: u64 = BASE + 0x20_0000;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Doorbells {
    Trapped,
    Shadow,
    Mapped,
}

fn ready(kind: &str, doorbells: Doorbells) -> (Rig, Driver, Pair) {
    let mut rig = Rig::new(kind, 1, doorbells == Doorbells::Mapped);
    let mut driver = rig.connect(0);
    driver.begin(&mut rig);
    match doorbells {
        Doorbells::Trapped => {}
        Doorbells::Shadow => driver.use_shadow(&mut rig),
        Doorbells::Mapped => driver.map_page(&mut rig),
    }
    let pair = driver.make_pair(&mut rig, 1, 64);
    (rig, driver, pair)
}

/// Commands that complete within one turn take some time, too.
#[test]
fn latency_is_never_zero() {
    for kind in ["null", "ram", "file"] {
        let (mut rig, mut driver, mut pair) = ready(kind, Doorbells::Mapped);
        rig.let_clock_run();
        for (opcode, lba) in [
            (nvm::WRITE, 1),
            (nvm::READ, 1),
            (nvm::FLUSH, 0),
            (nvm::READ, 2),
        ] {
            let status = driver.run(&mut rig, &mut pair, &io(opcode, 1, lba, DATA));
            assert_eq!(status, Status::SUCCESS);
        }
        crate::lane::assert_times(rig.lane_record(0), 4);
    }
}

#[test]
fn a_driver_finds_what_it_wrote_by_every_kind_of_doorbell_and_nothing_is_copied() {
    for doorbells in [Doorbells::Trapped, Doorbells::Shadow, Doorbells::Mapped] {
        for kind in ["ram", "file"] {
            let (mut rig, mut driver, mut pair) = ready(kind, doorbells);
            // Several laps, in steps of several commands.
            for lap in 0u64..40 {
                for n in 0..7 {
                    driver.put(
                        DATA + n * BLOCK,
                        &[((lap * 7 + n) % 200) as u8 + 1; BLOCK as usize],
                    );
                    driver.queue(&mut pair, &io(nvm::WRITE, n as u16, n, DATA + n * BLOCK));
                }
                driver.ring(8, pair.tail);
                let mut seen = 0u32;
                for _ in 0..7 {
                    let cqe = driver.completion(&mut rig, &mut pair);
                    assert!(cqe.status().is_success(), "{:?}", cqe.status());
                    seen |= 1 << cqe.cid();
                }
                assert_eq!(seen, 0x7F);
                let at = DATA + 0x10_0000;
                let block = lap % 7;
                let status = driver.run(&mut rig, &mut pair, &io(nvm::READ, 9, block, at));
                assert_eq!(status, Status::SUCCESS);
                let expected = ((lap * 7 + block) % 200) as u8 + 1;
                assert_eq!(
                    driver.get(at, BLOCK as usize),
                    vec![expected; BLOCK as usize]
                );
            }
            assert!(driver.raised(1) > 0);
            assert_eq!(rig.lane_record(0).copied_bytes.load(Relaxed), 0, "{kind}");
            assert_eq!(driver.next(&mut pair), None);
        }
    }
}

#[test]
fn long_transfers_and_sgls_reach_every_byte() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Trapped);
    // 128 blocks by a PRP list, in reverse.
    let list = BASE + 0x6000;
    let pages: Vec<u64> = (0..128).map(|n| DATA + (127 - n) * BLOCK).collect();
    for (n, page) in pages.iter().enumerate() {
        driver.put(*page, &[n as u8; BLOCK as usize]);
        if n > 0 {
            driver.put(list + (n as u64 - 1) * 8, &page.to_le_bytes());
        }
    }
    let whole = |opcode| {
        let sqe = Sqe::new(opcode, 5).with_nsid(1).with_cdw(12, 127);
        prps(sqe, pages[0], list)
    };
    assert_eq!(
        driver.run(&mut rig, &mut pair, &whole(nvm::WRITE)),
        Status::SUCCESS
    );
    // Back, by an SGL segment of odd lengths.
    let block = |address: u64, length: u32| SglDescriptor {
        address: U64::new(address),
        length: U32::new(length),
        ..SglDescriptor::new_zeroed()
    };
    let into = BASE + 0x30_0000;
    let lengths = [5000, 500_000, (512 << 10) - 505_000];
    let mut at = into;
    for (n, length) in lengths.into_iter().enumerate() {
        use zerocopy::IntoBytes;
        driver.put(list + n as u64 * 16, block(at, length).as_bytes());
        at += u64::from(length);
    }
    let mut segment = block(list, 48);
    segment.kind = SglDescriptor::LAST_SEGMENT;
    let sqe = Sqe::new(nvm::READ, 6)
        .with_nsid(1)
        .with_cdw(12, 127)
        .with_sgl(segment);
    assert_eq!(driver.run(&mut rig, &mut pair, &sqe), Status::SUCCESS);
    let got = driver.get(into, 512 << 10);
    for (n, block) in got.chunks(BLOCK as usize).enumerate() {
        assert!(block.iter().all(|b| *b == n as u8), "block {n}");
    }
    let flush = Sqe::new(nvm::FLUSH, 7).with_nsid(1);
    assert_eq!(driver.run(&mut rig, &mut pair, &flush), Status::SUCCESS);
    let zeroes = Sqe::new(nvm::WRITE_ZEROES, 7)
        .with_nsid(1)
        .with_cdw64(10, 3);
    assert_eq!(driver.run(&mut rig, &mut pair, &zeroes), Status::SUCCESS);
    let compare = io(nvm::COMPARE, 7, 4, into + 4 * BLOCK);
    assert_eq!(driver.run(&mut rig, &mut pair, &compare), Status::SUCCESS);
    let compare = io(nvm::COMPARE, 7, 3, into + 4 * BLOCK).with_cdw(12, 1 << 30);
    let status = driver.run(&mut rig, &mut pair, &compare);
    assert_eq!(status.code(), Status::COMPARE_FAILURE);
    let durable = io(nvm::READ, 7, 3, DATA).with_cdw(12, 1 << 30);
    assert_eq!(driver.run(&mut rig, &mut pair, &durable), Status::SUCCESS);
    assert_eq!(driver.get(DATA, 4096), [0; 4096]);
    let mut range = [0u8; 16];
    range[4] = 2;
    range[8] = 6;
    driver.put(list, &range);
    let dsm = prps(
        Sqe::new(nvm::DATASET_MANAGEMENT, 7)
            .with_nsid(1)
            .with_cdw(11, 4),
        list,
        0,
    );
    assert_eq!(driver.run(&mut rig, &mut pair, &dsm), Status::SUCCESS);
    range[8] = 0xFF;
    range[9] = 0xFF;
    driver.put(list, &range);
    let status = driver.run(&mut rig, &mut pair, &dsm);
    assert_eq!(status.code(), Status::LBA_OUT_OF_RANGE);
}

#[test]
fn a_sleeping_reactor_is_rung_and_a_busy_one_is_left_alone() {
    let (mut rig, mut driver, mut pair) = ready("ram", Doorbells::Shadow);
    let at = driver.shadow.unwrap() + 8;
    rig.turns();
    // Awake: a driver only writes to memory.
    let index = |driver: &Driver| driver.get(at + 4096, 4);
    assert_eq!(index(&driver), 0xFFFFu32.to_le_bytes());
    driver.queue(&mut pair, &io(nvm::READ, 1, 0, DATA));
    driver.put(at, &pair.tail.to_le_bytes());
    driver.completion(&mut rig, &mut pair);
    let sent = driver.next_id;
    for cid in 0..500 {
        driver.submit(&mut pair, &io(nvm::READ, cid, 0, DATA));
        driver.completion(&mut rig, &mut pair);
    }
    assert!(driver.next_id <= sent + 1, "the head's first lap, perhaps");
    rig.turns();
    // Before a sleep: the event index is the tail, and a racing write is seen.
    assert!(rig.may_sleep());
    assert_eq!(index(&driver), pair.tail.to_le_bytes());
    driver.queue(&mut pair, &io(nvm::READ, 2, 0, DATA));
    driver.put(at, &pair.tail.to_le_bytes());
    assert!(!rig.may_sleep());
    driver.completion(&mut rig, &mut pair);
    // Mapped doorbells are always polled.
    let (mut rig, _driver, _) = ready("ram", Doorbells::Mapped);
    rig.turns();
    assert!(!rig.may_sleep());
    let (mut rig, _driver, _) = ready("ram", Doorbells::Trapped);
    rig.turns();
    assert!(rig.may_sleep());
}

#[test]
fn doorbells_in_memory_are_found_again_when_other_memory_comes_and_goes() {
    let (mut rig, mut driver, mut pair) = ready("ram", Doorbells::Shadow);
    for asleep in [false, true] {
        if asleep {
            rig.turns();
            assert!(rig.may_sleep());
        }
        let far = BASE + (1 << 30);
        let memfd = driver.memfd.try_clone().unwrap();
        let payload = Driver::map_message(far, MEMORY, 0);
        driver.call(&mut rig, command::DMA_MAP, &payload, &[&memfd]);
        let read = io(nvm::READ, 1, 0, DATA);
        assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
        let payload = Driver::unmap_message(far, MEMORY);
        driver.call(&mut rig, command::DMA_UNMAP, &payload, &[]);
        assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
    }
}

#[test]
fn doorbells_rung_before_shadow_doorbells_count() {
    let (mut rig, mut driver, mut pair) = ready("ram", Doorbells::Trapped);
    driver.submit(&mut pair, &io(nvm::READ, 5, 0, DATA));
    let at = BASE + 0x8000;
    let config = prps(Sqe::new(admin::DOORBELL_BUFFER_CONFIG, 3), at, at + 4096);
    assert_eq!(driver.admin(&mut rig, &config), Status::SUCCESS);
    driver.shadow = Some(at);
    assert_eq!(driver.completion(&mut rig, &mut pair).cid(), 5);
}

#[test]
fn a_full_completion_queue_takes_no_commands_and_loses_none() {
    let (mut rig, mut driver, _) = ready("ram", Doorbells::Trapped);
    let mut pair = driver.make_pair(&mut rig, 2, 4);
    for cid in 0..3 {
        driver.queue(&mut pair, &io(nvm::READ, cid, 0, DATA));
    }
    driver.ring(16, pair.tail);
    rig.turns();
    // All are posted, none consumed; three more wait in the submission queue.
    for cid in 3..6 {
        driver.queue(&mut pair, &io(nvm::READ, cid, 0, DATA));
    }
    driver.ring(16, pair.tail);
    rig.turns();
    assert!(
        rig.may_sleep(),
        "until its host makes room there is nothing to do"
    );
    for cid in 0..6 {
        assert_eq!(driver.completion(&mut rig, &mut pair).cid(), cid);
    }
    assert_eq!(driver.next(&mut pair), None);
}

#[test]
fn growth_is_reported_and_removal_is_requested() {
    let (mut rig, mut driver, mut pair) = ready("ram", Doorbells::Trapped);
    let aec = Sqe::new(admin::SET_FEATURES, 4)
        .with_cdw(10, 0x0B)
        .with_cdw(11, 1 << 8);
    assert_eq!(driver.admin(&mut rig, &aec), Status::SUCCESS);
    let mut queue = driver.admin;
    driver.submit(&mut queue, &Sqe::new(admin::ASYNC_EVENT_REQUEST, 77));
    rig.turns();
    assert_eq!(driver.next(&mut queue), None);
    rig.grow(0);
    let cqe = driver.completion(&mut rig, &mut queue);
    assert_eq!((cqe.cid(), cqe.result()), (77, 0x04_0002));
    driver.admin = queue;
    let identify = prps(Sqe::new(admin::IDENTIFY, 1).with_nsid(1), DATA, 0);
    assert_eq!(driver.admin(&mut rig, &identify), Status::SUCCESS);
    let blocks = (EXTENTS + 1) * EXTENT / BLOCK;
    assert_eq!(driver.get(DATA, 8), blocks.to_le_bytes());

    let req = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let payload = words(&[20, 0b10_0100, pci_irq::REQ, 0, 1]);
    let other = req.try_clone().unwrap();
    driver.call(&mut rig, command::DEVICE_SET_IRQS, &payload, &[&other]);
    let mut queue = driver.admin;
    driver.submit(&mut queue, &Sqe::new(admin::ASYNC_EVENT_REQUEST, 78));
    let changed = prps(
        Sqe::new(admin::GET_LOG_PAGE, 5)
            .with_nsid(u32::MAX)
            .with_cdw(10, 4 | 1023 << 16),
        DATA,
        0,
    );
    driver.admin = queue;
    assert_eq!(driver.admin(&mut rig, &changed), Status::SUCCESS);
    rig.remove(0);
    // If its monitor does not listen, the guest learns that the namespace is gone.
    let mut queue = driver.admin;
    let cqe = driver.completion(&mut rig, &mut queue);
    assert_eq!((cqe.cid(), cqe.result()), (78, 0x04_0002));
    driver.admin = queue;
    let list = prps(Sqe::new(admin::IDENTIFY, 1).with_cdw(10, 2), DATA, 0);
    assert_eq!(driver.admin(&mut rig, &list), Status::SUCCESS);
    assert_eq!(driver.get(DATA, 4), [0; 4]);
    assert!(rustix::io::read(&req, &mut [0; 8]).is_ok());
    assert!(rig.left.is_empty());
    // Commands are refused for some seconds; then the client is closed.
    driver.ring(8, pair.tail);
    let status = driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA));
    assert_eq!(status.code(), Status::INVALID_NAMESPACE_OR_FORMAT);
    rig.pass_time(6_000_000_000);
    rig.until("its end", |rig| !rig.left.is_empty());
    assert!(driver.is_closed());
}

#[test]
fn interrupts_are_gathered_masked_and_triggered_as_asked() {
    let (mut rig, mut driver, mut pair) = ready("ram", Doorbells::Trapped);
    let irqs =
        |flags: u32, start: u32, count: u32| words(&[20, flags, pci_irq::MSIX, start, count]);
    rig.turns();
    driver.raised(1);
    driver.call(&mut rig, command::DEVICE_SET_IRQS, &irqs(1 | 8, 1, 1), &[]);
    driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA));
    rig.turns();
    assert_eq!(driver.raised(1), 0);
    let pba = driver.read(&mut rig, pci_region::BAR4, 0x1000, 8);
    assert_eq!(pba[0], 2);
    driver.call(&mut rig, command::DEVICE_SET_IRQS, &irqs(1 | 16, 1, 1), &[]);
    rig.turns();
    assert_eq!(driver.raised(1), 1);
    driver.call(&mut rig, command::DEVICE_SET_IRQS, &irqs(1 | 32, 1, 3), &[]);
    rig.turns();
    assert_eq!(
        (driver.raised(1), driver.raised(2), driver.raised(3)),
        (1, 1, 1)
    );
    // Four completions, or 200 us.
    let gather = Sqe::new(admin::SET_FEATURES, 4)
        .with_cdw(10, 8)
        .with_cdw(11, 3 | 0xFF << 8);
    assert_eq!(driver.admin(&mut rig, &gather), Status::SUCCESS);
    for cid in 0..3 {
        driver.run(&mut rig, &mut pair, &io(nvm::READ, cid, 0, DATA));
    }
    rig.turns();
    assert_eq!(driver.raised(1), 0);
    driver.run(&mut rig, &mut pair, &io(nvm::READ, 3, 0, DATA));
    rig.turns();
    assert_eq!(driver.raised(1), 1);
    driver.run(&mut rig, &mut pair, &io(nvm::READ, 4, 0, DATA));
    rig.pass_time(30_000_000);
    rig.turns();
    assert_eq!(driver.raised(1), 1);
    // Removes all descriptors.
    driver.call(&mut rig, command::DEVICE_SET_IRQS, &irqs(1 | 32, 0, 0), &[]);
    driver.run(&mut rig, &mut pair, &io(nvm::READ, 5, 0, DATA));
    let not_an_eventfd = driver.memfd.try_clone().unwrap();
    let reply = driver.call(
        &mut rig,
        command::DEVICE_SET_IRQS,
        &irqs(4 | 32, 0, 1),
        &[&not_an_eventfd],
    );
    assert!(reply.header.is_error());
}

#[test]
fn driver_reset_under_load() {
    for how in ["controller", "function", "bus", "bus, and the device hangs"] {
        let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Trapped);
        rig.gate.hold();
        for n in 0..20 {
            driver.queue(&mut pair, &io(nvm::WRITE, n, u64::from(n), DATA));
        }
        driver.ring(8, pair.tail);
        rig.until("writes at the device", |rig| rig.gate.held() >= 20);
        let id = match how {
            "controller" => {
                let mut payload = Driver::access(pci_region::BAR0, 0x14, 4);
                payload.extend(0x0046_0000u32.to_le_bytes());
                driver.send(command::REGION_WRITE, &payload, &[])
            }
            "function" => {
                let mut payload = Driver::access(pci_region::CONFIG, 0x58, 2);
                payload.extend(0x8000u16.to_le_bytes());
                driver.send(command::REGION_WRITE, &payload, &[])
            }
            _ => driver.send(command::DEVICE_RESET, &[], &[]),
        };
        rig.turns();
        if how == "controller" {
            let reply = driver.answered(&mut rig, id);
            assert!(!reply.header.is_error());
        } else {
            assert!(driver.reply().is_none(), "{how}: not over");
            if how == "bus, and the device hangs" {
                // Later the client would drop the connection.
                rig.pass_time(3_100_000_000);
                let reply = driver.answered(&mut rig, id);
                assert!(reply.header.is_error());
            }
        }
        if how != "function" && how != "bus" {
            assert_eq!(
                driver.register(&mut rig, 0x1C),
                1,
                "{how}: old commands are still at the device"
            );
            rig.gate.release();
            driver.wait_register(&mut rig, 0x1C, 0);
        } else {
            rig.gate.release();
            let reply = driver.answered(&mut rig, id);
            assert!(!reply.header.is_error());
            assert_eq!(driver.register(&mut rig, 0x1C), 0, "{how}");
        }
        assert_eq!(driver.next(&mut pair), None, "{how}: nobody is answered");
        driver.enable(&mut rig);
        let mut pair = driver.make_pair(&mut rig, 1, 64);
        let status = driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 5, DATA));
        assert_eq!(status, Status::SUCCESS);
    }
}

#[test]
fn a_shutdown_and_a_queue_deletion_wait_for_commands_in_flight() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Shadow);
    rig.gate.hold();
    driver.submit(&mut pair, &io(nvm::WRITE, 1, 0, DATA));
    rig.until("a write at the device", |rig| rig.gate.held() >= 1);
    let mut queue = driver.admin;
    driver.submit(
        &mut queue,
        &Sqe::new(admin::DELETE_IO_SQ, 9).with_cdw(10, 1),
    );
    rig.turns();
    assert_eq!(driver.next(&mut queue), None);
    rig.gate.release();
    assert_eq!(
        driver.completion(&mut rig, &mut pair).status(),
        Status::SUCCESS
    );
    assert_eq!(
        driver.completion(&mut rig, &mut queue).status(),
        Status::SUCCESS
    );
    driver.admin = queue;
    let mut pair = driver.make_pair(&mut rig, 2, 64);
    rig.gate.hold();
    driver.submit(&mut pair, &io(nvm::WRITE, 1, 0, DATA));
    rig.until("a write at the device", |rig| rig.gate.held() >= 1);
    let mut payload = Driver::access(pci_region::BAR0, 0x14, 4);
    payload.extend(0x0046_4001u32.to_le_bytes());
    let id = driver.send(command::REGION_WRITE, &payload, &[]);
    driver.answered(&mut rig, id);
    assert_eq!(driver.register(&mut rig, 0x1C), 1 << 2 | 1, "under way");
    rig.gate.release();
    driver.wait_register(&mut rig, 0x1C, 2 << 2 | 1);
    assert!(
        driver.next(&mut pair).is_some(),
        "a shutdown answers everybody"
    );
    assert!(rig.left.is_empty());
}

#[test]
fn a_function_that_may_not_be_bus_master_leaves_memory_alone() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Shadow);
    rig.gate.hold();
    driver.submit(&mut pair, &io(nvm::WRITE, 1, 0, DATA));
    rig.until("a write at the device", |rig| rig.gate.held() >= 1);
    rig.turns();
    driver.raised(1);
    driver.set_master(&mut rig, false);
    rig.gate.release();
    driver.submit(&mut pair, &io(nvm::READ, 2, 1, DATA));
    rig.turns();
    assert_eq!((driver.next(&mut pair), driver.raised(1)), (None, 0));
    // A successor obeys that, too.
    rig.kill();
    while !rig.succeed(None) {}
    rig.fence();
    rig.turns();
    assert_eq!((driver.next(&mut pair), driver.raised(1)), (None, 0));
    rig.pass_time(60_000_000_000);
    rig.turns();
    assert_eq!(driver.register(&mut rig, 0x1C), 1, "it has not failed");
    driver.set_master(&mut rig, true);
    assert!(driver.raised(1) > 0, "what was held back");
    // The write may complete after the read.
    let mut ended = [0; 2].map(|_| {
        let cqe = driver.completion(&mut rig, &mut pair);
        (cqe.cid(), cqe.status())
    });
    ended.sort_by_key(|(cid, _)| *cid);
    assert_eq!(ended, [1, 2].map(|cid| (cid, Status::SUCCESS)));
    // The function mask in the MSI-X capability.
    let control = |driver: &mut Driver, rig: &mut Rig, bits: u16| {
        let control = (bits << 14).to_le_bytes();
        driver.write(rig, pci_region::CONFIG, 0x92, &control);
    };
    control(&mut driver, &mut rig, 0b11);
    rig.turns();
    driver.raised(1);
    driver.run(&mut rig, &mut pair, &io(nvm::READ, 3, 0, DATA));
    rig.turns();
    assert_eq!(driver.raised(1), 0);
    let pba = driver.read(&mut rig, pci_region::BAR4, 0x1000, 8);
    assert_eq!(pba[0] & 2, 2);
    control(&mut driver, &mut rig, 0b10);
    rig.turns();
    assert_eq!(driver.raised(1), 1);
    let pba = driver.read(&mut rig, pci_region::BAR4, 0x1000, 8);
    assert_eq!(pba[0] & 2, 0);
}

#[test]
fn vms_of_one_volume_are_primary_and_secondary_controllers() {
    let mut rig = Rig::new("ram", 4, false);
    rig.share(1, 0);
    rig.share(2, 0);
    let mut primary = rig.connect(0);
    primary.begin(&mut rig);
    let mut secondary = rig.connect(1);
    secondary.begin(&mut rig);
    let identify = |what| prps(Sqe::new(admin::IDENTIFY, 1).with_cdw(10, what), DATA, 0);
    let manage = |action: u32, cntlid: u32, number: u32| {
        Sqe::new(admin::VIRTUALIZATION_MANAGEMENT, 2)
            .with_cdw(10, action | cntlid << 16)
            .with_cdw(11, number)
    };
    let list = primary.admin(&mut rig, &identify(0x15));
    assert_eq!(list, Status::SUCCESS);
    let list = primary.get(DATA, 32 * 4);
    assert_eq!(list[0], 2, "secondary controllers");
    assert_eq!(
        (&list[32..37], &list[64..69]),
        (&[3, 0, 2, 0, 1][..], &[4, 0, 2, 0, 0][..])
    );
    let capabilities = primary.admin(&mut rig, &identify(0x14));
    assert_eq!(capabilities, Status::SUCCESS);
    assert_eq!(primary.get(DATA, 2), [2, 0]);
    let all = primary.admin(&mut rig, &identify(0x13));
    assert_eq!(all, Status::SUCCESS);
    assert_eq!(primary.get(DATA, 8), [3, 0, 2, 0, 3, 0, 4, 0]);
    for (sqe, expected) in [
        (manage(9, 3, 0), Status::SUCCESS),
        (manage(7, 3, 0), Status::INVALID_SECONDARY_CONTROLLER_STATE),
        (manage(7, 4, 0), Status::SUCCESS),
        (manage(9, 4, 0), Status::INVALID_SECONDARY_CONTROLLER_STATE),
        (manage(8, 4, 65), Status::SUCCESS),
        (
            manage(8, 4, 1),
            Status::INVALID_NUMBER_OF_CONTROLLER_RESOURCES,
        ),
        (manage(7, 5, 0), Status::INVALID_CONTROLLER_IDENTIFIER),
    ] {
        assert_eq!(primary.admin(&mut rig, &sqe).code(), expected, "{sqe:?}");
    }
    let status = secondary.admin(&mut rig, &identify(0x15));
    assert_eq!(status.code(), Status::INVALID_FIELD);
    let status = secondary.admin(&mut rig, &manage(9, 3, 0));
    assert_eq!(status.code(), Status::INVALID_OPCODE);
    drop(secondary);
    rig.until("its end", |rig| !rig.left.is_empty());
    let status = primary.admin(&mut rig, &manage(7, 3, 0));
    assert_eq!(status, Status::SUCCESS);
    let mut fourth = rig.connect(3);
    fourth.begin(&mut rig);
    assert_eq!(fourth.admin(&mut rig, &identify(0x15)), Status::SUCCESS);
    assert_eq!(fourth.get(DATA, 1), [0]);
}

#[test]
fn sixty_four_controllers() {
    let mut rig = Rig::new("file", 64, false);
    let mut drivers: Vec<(Driver, Pair)> = Vec::new();
    for n in 0..64 {
        let mut driver = rig.connect(n);
        driver.begin(&mut rig);
        let pair = driver.make_pair(&mut rig, 1, 16);
        drivers.push((driver, pair));
    }
    for (n, (driver, pair)) in drivers.iter_mut().enumerate() {
        for block in 0..8 {
            let at = DATA + block * BLOCK;
            driver.put(at, &[n as u8 ^ block as u8; BLOCK as usize]);
            driver.queue(pair, &io(nvm::WRITE, block as u16, block, at));
        }
        driver.ring(8, pair.tail);
    }
    for (driver, pair) in &mut drivers {
        for _ in 0..8 {
            assert!(driver.completion(&mut rig, pair).status().is_success());
        }
    }
    for (n, (driver, pair)) in drivers.iter_mut().enumerate() {
        let status = driver.run(&mut rig, pair, &io(nvm::READ, 1, 5, DATA + 0x10_0000));
        assert_eq!(status, Status::SUCCESS);
        assert_eq!(driver.get(DATA + 0x10_0000, 4096), [n as u8 ^ 5; 4096]);
        assert_eq!(rig.lane_record(n).copied_bytes.load(Relaxed), 0);
    }
    assert!(rig.left.is_empty());
}
