//! A machine that is over its budget: what it may not begin stays in its rings, and the reactor sleeps meanwhile.

use super::*;

const WINDOW_NS: u64 = 1_000_000;

/// How many ended, all well.
fn ended(driver: &mut Driver, pair: &mut Pair) -> u16 {
    let mut count = 0;
    while let Some(cqe) = driver.next(pair) {
        assert!(cqe.status().is_success());
        count += 1;
    }
    count
}

#[test]
fn what_is_over_budget_stays_in_the_ring() {
    for kind in ["ram", "file"] {
        let (mut rig, mut driver, mut pair) = ready(kind, Doorbells::Shadow);
        let bell = driver.shadow.unwrap() + 8;
        rig.admit(2);
        for n in 0..40 {
            driver.queue(&mut pair, &io(nvm::READ, n, u64::from(n), DATA));
        }
        driver.put(bell, &pair.tail.to_le_bytes());
        let mut done = 0;
        rig.until("what a window has", |_| {
            done += ended(&mut driver, &mut pair);
            done >= 2
        });
        rig.turns();
        assert_eq!(done + ended(&mut driver, &mut pair), 2, "{kind}");
        // Some wait here; the others nobody has looked at, and nobody looks until the window ends.
        assert_eq!(rig.throttled(0)[..2], [8, 8], "{kind}");
        assert!(rig.may_sleep_for_a_window(), "{kind}");
        let mut windows = 0;
        while done < 40 {
            rig.pass_time(WINDOW_NS);
            let before = done;
            rig.until("a window's", |_| {
                done += ended(&mut driver, &mut pair);
                done >= before + 2
            });
            rig.turns();
            done += ended(&mut driver, &mut pair);
            assert_eq!(done, before + 2, "{kind}");
            windows += 1;
        }
        assert_eq!(windows, 19, "{kind}");
        assert_eq!(rig.throttled(0)[..2], [0, 0], "{kind}");
        assert!(rig.left.is_empty());
    }
}

#[test]
fn a_reset_ends_what_is_over_budget() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Trapped);
    rig.admit(1);
    for n in 0..20 {
        driver.queue(&mut pair, &io(nvm::WRITE, n, u64::from(n), DATA));
    }
    driver.ring(8, pair.tail);
    rig.until("some wait", |rig| rig.throttled(0)[1] >= 8);
    let mut payload = Driver::access(pci_region::BAR0, 0x14, 4);
    payload.extend(0x0046_0000u32.to_le_bytes());
    let id = driver.send(command::REGION_WRITE, &payload, &[]);
    driver.answered(&mut rig, id);
    // No window has passed.
    driver.wait_register(&mut rig, 0x1C, 0);
    assert_eq!(rig.throttled(0)[..2], [0, 0]);
    driver.enable(&mut rig);
    let mut pair = driver.make_pair(&mut rig, 1, 64);
    rig.pass_time(20 * WINDOW_NS);
    let status = driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 5, DATA));
    assert_eq!(status, Status::SUCCESS);
}

/// Whoever takes memory away or shuts down waits for no window.
#[test]
fn nobody_waits_long_for_what_is_over_budget() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Trapped);
    rig.admit(1);
    for n in 0..20 {
        driver.queue(&mut pair, &io(nvm::WRITE, n, u64::from(n), DATA));
    }
    driver.ring(8, pair.tail);
    rig.until("some wait", |rig| rig.throttled(0)[1] >= 8);
    let mut payload = Driver::access(pci_region::BAR0, 0x14, 4);
    payload.extend(0x0046_4001u32.to_le_bytes());
    let id = driver.send(command::REGION_WRITE, &payload, &[]);
    driver.answered(&mut rig, id);
    // No window has passed. CSTS.SHST: complete.
    driver.wait_register(&mut rig, 0x1C, 0b1001);
    assert_eq!(rig.throttled(0)[..2], [0, 0]);
}

/// Its successor has it begin again, and charges nothing for it.
#[test]
fn a_death_over_budget() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Mapped);
    rig.admit(1);
    for n in 0..5 {
        driver.put(DATA + u64::from(n) * BLOCK, &[n as u8 + 1; 4096]);
        let at = DATA + u64::from(n) * BLOCK;
        driver.queue(&mut pair, &io(nvm::WRITE, n, u64::from(n), at));
    }
    driver.ring(8, pair.tail);
    rig.until("some wait", |rig| rig.throttled(0)[1] == 4);
    rig.kill();
    assert!(rig.succeed(None));
    rig.admit(1);
    rig.fence();
    let mut done = 0;
    rig.until("all of them, in no window", |_| {
        done += ended(&mut driver, &mut pair);
        done == 5
    });
    rig.turns();
    for n in 0..5 {
        rig.pass_time(2 * WINDOW_NS);
        let read = io(nvm::READ, 9, n, DATA + 8 * BLOCK);
        assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
        assert_eq!(driver.get(DATA + 8 * BLOCK, 4096), [n as u8 + 1; 4096]);
    }
}
