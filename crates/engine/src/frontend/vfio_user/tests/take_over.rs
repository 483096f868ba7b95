//! Engines die; their VMs do not notice.

use super::*;
use forebay_nvme::Cqe;

const POINTS: [&str; 5] = [
    "pcie.taken",
    "pcie.fetched",
    "pcie.completing",
    "pcie.posted",
    "pcie.freed",
];

/// One turn; a dead engine gets a successor.
fn serve(rig: &mut Rig) {
    if !rig.turn() {
        succeed(rig);
    }
}

fn succeed(rig: &mut Rig) {
    while !rig.succeed(None) {}
    rig.fence();
}

fn gather(rig: &mut Rig, driver: &mut Driver, pair: &mut Pair, count: usize) -> Vec<Cqe> {
    let mut all = Vec::new();
    for () in crate::patience::patiently() {
        while let Some(cqe) = driver.next(pair) {
            all.push(cqe);
        }
        if all.len() >= count {
            break;
        }
        serve(rig);
    }
    for _ in 0..64 {
        serve(rig);
    }
    while let Some(cqe) = driver.next(pair) {
        all.push(cqe);
    }
    all
}

#[test]
fn an_engine_that_dies_at_any_point_of_a_command_is_not_noticed() {
    for doorbells in [Doorbells::Trapped, Doorbells::Shadow, Doorbells::Mapped] {
        for kind in ["ram", "file"] {
            for point in POINTS {
                for count in [1, 2, 5] {
                    let (mut rig, mut driver, mut pair) = ready(kind, doorbells);
                    // More than a lap, so that phases change.
                    for lap in 0u64..4 {
                        if lap == 3 {
                            rig.arm(point, count);
                        }
                        for n in 0..24u64 {
                            let at = DATA + n * BLOCK;
                            driver.put(at, &[(lap * 24 + n) as u8; BLOCK as usize]);
                            driver.queue(&mut pair, &io(nvm::WRITE, n as u16, n, at));
                        }
                        driver.queue(&mut pair, &io(0x7E, 24, 0, DATA));
                        driver.ring(8, pair.tail);
                        let all = gather(&mut rig, &mut driver, &mut pair, 25);
                        let mut cids: Vec<u16> = all.iter().map(Cqe::cid).collect();
                        cids.sort_unstable();
                        let wanted: Vec<u16> = (0..25).collect();
                        assert_eq!(cids, wanted, "{doorbells:?} {kind} {point} {count} {lap}");
                        for cqe in &all {
                            assert_eq!(cqe.status().is_success(), cqe.cid() != 24);
                        }
                    }
                    rig.arm(point, 0);
                    for n in 0..24 {
                        let at = DATA + 0x10_0000;
                        let read = io(nvm::READ, 1, n, at);
                        assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
                        assert_eq!(driver.get(at, 1)[0], (72 + n) as u8);
                    }
                    assert!(rig.left.is_empty(), "{:?}", rig.left);
                }
            }
        }
    }
}

#[test]
fn recovered_commands_and_a_reset_wait_for_the_fence() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Trapped);
    rig.gate.hold();
    driver.submit(&mut pair, &io(nvm::READ, 1, 0, DATA));
    rig.until("a read at the device", |rig| rig.gate.held() >= 1);
    rig.kill();
    rig.gate.release();
    assert!(rig.succeed(None));
    rig.turns();
    assert_eq!(
        driver.next(&mut pair),
        None,
        "its predecessor may still be under way"
    );
    assert!(driver.raised(1) > 0, "every interrupt is raised");
    let mut payload = Driver::access(pci_region::BAR0, 0x14, 4);
    payload.extend(0x0046_0000u32.to_le_bytes());
    let id = driver.send(command::REGION_WRITE, &payload, &[]);
    driver.answered(&mut rig, id);
    rig.turns();
    assert_eq!(
        driver.register(&mut rig, 0x1C),
        1,
        "a dead engine's read may still write into memory"
    );
    rig.kill();
    assert!(rig.succeed(None));
    rig.turns();
    assert_eq!(driver.register(&mut rig, 0x1C), 1, "it still may");
    rig.fence();
    driver.wait_register(&mut rig, 0x1C, 0);
    driver.enable(&mut rig);
    let mut pair = driver.make_pair(&mut rig, 1, 64);
    assert_eq!(
        driver.run(&mut rig, &mut pair, &io(nvm::WRITE, 1, 0, DATA)),
        Status::SUCCESS
    );
}

#[test]
fn a_reset_waits_for_recovered_commands_of_a_removed_export() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Trapped);
    rig.gate.hold();
    driver.submit(&mut pair, &io(nvm::READ, 1, 0, DATA));
    rig.until("a read at the device", |rig| rig.gate.held() >= 1);
    rig.kill();
    rig.gate.release();
    assert!(rig.succeed(None));
    rig.remove(0);
    let off = 0x0046_0000u32.to_le_bytes();
    driver.write(&mut rig, pci_region::BAR0, 0x14, &off);
    rig.turns();
    assert_eq!(driver.register(&mut rig, 0x1C), 1, "it may still write");
    rig.fence();
    driver.wait_register(&mut rig, 0x1C, 0);
}

#[test]
fn completion_heads_are_not_guessed_without_shadow_doorbells() {
    let (mut rig, mut driver, _) = ready("ram", Doorbells::Trapped);
    let (near, far) = (BASE + 0x8000, BASE + (1 << 30));
    let map = Driver::map_message(far, 2 * BLOCK, near - BASE);
    let memory = driver.memfd.try_clone().unwrap();
    driver.call(&mut rig, command::DMA_MAP, &map, &[&memory]);
    driver.put(near, &[0; 2 * BLOCK as usize]);
    let config = Sqe::new(admin::DOORBELL_BUFFER_CONFIG, 3);
    let config = prps(config, far, far + BLOCK);
    assert_eq!(driver.admin(&mut rig, &config), Status::SUCCESS);
    driver.shadow = Some(near);
    let mut pair = driver.make_pair(&mut rig, 2, 8);
    for cid in 0..6 {
        let read = io(nvm::READ, cid, 0, DATA);
        assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
    }
    // Four that the host has not consumed, then as many as there is room for.
    for cids in [6..10, 10..16] {
        for cid in cids {
            driver.queue(&mut pair, &io(nvm::READ, cid, 0, DATA));
        }
        driver.ring(16, pair.tail);
        rig.turns();
        if pair.tail == 2 {
            let unmap = Driver::unmap_message(far, 2 * BLOCK);
            driver.call(&mut rig, command::DMA_UNMAP, &unmap, &[]);
            rig.kill();
            assert!(rig.succeed(None));
            rig.fence();
            rig.turns();
            driver.call(&mut rig, command::DMA_MAP, &map, &[&memory]);
        }
    }
    for cid in 6..16 {
        assert_eq!(driver.completion(&mut rig, &mut pair).cid(), cid);
    }
    assert!(rig.left.is_empty());
}

#[test]
fn a_reset_that_an_engine_dies_in_is_done_by_its_successor() {
    for point in ["pcie.quiescing", "pcie.quiesced"] {
        let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Shadow);
        driver.submit(&mut pair, &io(nvm::READ, 1, 0, DATA));
        rig.arm(point, 1);
        let mut payload = Driver::access(pci_region::BAR0, 0x14, 4);
        payload.extend(0x0046_0000u32.to_le_bytes());
        let id = driver.send(command::REGION_WRITE, &payload, &[]);
        while rig.turn() {}
        succeed(&mut rig);
        driver.answered(&mut rig, id);
        driver.wait_register(&mut rig, 0x1C, 0);
        driver.shadow = None;
        driver.enable(&mut rig);
        let mut pair = driver.make_pair(&mut rig, 1, 64);
        let status = driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA));
        assert_eq!(status, Status::SUCCESS);
    }
}

#[test]
fn admin_commands_and_events_are_answered_once_whenever_the_engine_dies() {
    // Deaths between a message and a later one that makes a queue.
    for turns in 0..6 {
        let (mut rig, mut driver, _) = ready("ram", Doorbells::Trapped);
        let mut queue = driver.admin;
        let aec = Sqe::new(admin::SET_FEATURES, 4)
            .with_cdw(10, 0x0B)
            .with_cdw(11, 1 << 8);
        driver.queue(&mut queue, &aec);
        driver.queue(&mut queue, &Sqe::new(admin::ASYNC_EVENT_REQUEST, 77));
        let cq = Sqe::new(admin::CREATE_IO_CQ, 1)
            .with_cdw(10, 5 | 15 << 16)
            .with_cdw(11, 1);
        driver.queue(&mut queue, &prps(cq, BASE + 0x5000, 0));
        let sq = Sqe::new(admin::CREATE_IO_SQ, 2)
            .with_cdw(10, 5 | 15 << 16)
            .with_cdw(11, 1 | 5 << 16);
        driver.queue(&mut queue, &prps(sq, BASE + 0x6000, 0));
        driver.ring(0, queue.tail);
        for _ in 0..turns {
            rig.turn();
        }
        rig.kill();
        succeed(&mut rig);
        let all = gather(&mut rig, &mut driver, &mut queue, 3);
        let cids: Vec<u16> = all.iter().map(Cqe::cid).collect();
        assert_eq!(cids, [4, 1, 2]);
        assert!(all.iter().all(|cqe| cqe.status().is_success()), "{all:?}");
        rig.kill();
        rig.region = rig.region.clone();
        succeed(&mut rig);
        rig.grow(0);
        rig.turn();
        rig.kill();
        succeed(&mut rig);
        let all = gather(&mut rig, &mut driver, &mut queue, 1);
        let events: Vec<(u16, u64)> = all.iter().map(|cqe| (cqe.cid(), cqe.result())).collect();
        assert_eq!(events, [(77, 0x04_0002)]);
        let mut pair = Pair::new(5, BASE + 0x6000, BASE + 0x5000, 16);
        let status = driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA));
        assert_eq!(status, Status::SUCCESS);
    }
}

#[test]
fn kill9_during_dma_map() {
    let points = [
        "vm.deposited",
        "vm.intent",
        "vm.applied",
        "vm.answering",
        "vm.sent",
        "vm.answered",
        "vm.consumed",
    ];
    for point in points {
        let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Trapped);
        driver.submit(&mut pair, &io(nvm::WRITE, 1, 0, DATA));
        rig.arm(point, 1);
        let far = BASE + (1 << 30);
        let memfd = driver.memfd.try_clone().unwrap();
        let payload = Driver::map_message(far, MEMORY, 0);
        let id = driver.send(command::DMA_MAP, &payload, &[&memfd]);
        while rig.turn() {}
        succeed(&mut rig);
        let reply = driver.answered(&mut rig, id);
        assert!(!reply.header.is_error(), "{point}: {:?}", reply.header);
        assert_eq!(driver.completion(&mut rig, &mut pair).cid(), 1);
        assert!(driver.reply().is_none(), "{point}: answered once");
        // It is mapped once, and can be unmapped.
        let offset = DATA - BASE;
        let status = driver.run(&mut rig, &mut pair, &io(nvm::READ, 2, 0, far + offset));
        assert_eq!(status, Status::SUCCESS, "{point}");
        let reply = driver.call(
            &mut rig,
            command::DMA_UNMAP,
            &Driver::unmap_message(far, MEMORY),
            &[],
        );
        assert!(!reply.header.is_error());
        assert!(rig.left.is_empty(), "{point}: {:?}", rig.left);
    }
}

#[test]
fn a_command_that_kills_is_given_up_at_the_third_death() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Trapped);
    rig.gate.hold();
    driver.submit(&mut pair, &io(nvm::WRITE, 1, 0, DATA));
    driver.submit(&mut pair, &io(nvm::WRITE, 2, 1, DATA));
    rig.until("writes at the device", |rig| rig.gate.held() >= 2);
    rig.gate.release();
    for _ in 0..3 {
        rig.kill();
        assert!(rig.succeed(Some(0)));
    }
    rig.fence();
    let all = gather(&mut rig, &mut driver, &mut pair, 2);
    let statuses: Vec<(u16, Status)> = all.iter().map(|c| (c.cid(), c.status().code())).collect();
    assert_eq!(statuses.len(), 2);
    assert!(
        statuses.contains(&(1, Status::INTERNAL_ERROR)),
        "{statuses:?}"
    );
    assert!(statuses.contains(&(2, Status::SUCCESS)));
}

#[test]
fn a_damaged_vm_file_ends_only_its_own_client() {
    let mut rig = Rig::new("file", 2, false);
    let mut good = rig.connect(1);
    good.begin(&mut rig);
    let mut pair = good.make_pair(&mut rig, 1, 16);
    let mut bad = rig.connect(0);
    bad.begin(&mut rig);
    bad.make_pair(&mut rig, 1, 16);
    rig.kill();
    rig.damage(0);
    succeed(&mut rig);
    rig.until("its end", |rig| !rig.left.is_empty());
    assert!(bad.is_closed());
    assert_eq!(
        good.run(&mut rig, &mut pair, &io(nvm::READ, 1, 0, DATA)),
        Status::SUCCESS
    );
    assert_eq!(rig.left.len(), 1);
}
