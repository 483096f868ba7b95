//! A throttled VM: its commands stay in its rings, and the reactor can sleep.

use super::*;
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::{Route, Routes, Transport};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, Word};

const WINDOW_NS: u64 = 1_000_000;

fn ended(driver: &mut Driver, pair: &mut Pair) -> u16 {
    let mut count = 0;
    while let Some(cqe) = driver.next(pair) {
        assert!(cqe.status().is_success());
        count += 1;
    }
    count
}

#[test]
fn commands_over_budget_stay_in_the_ring() {
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
        // Some are in the core; the others stay unread until the window ends.
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
fn a_reset_ends_throttled_commands() {
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
    // Within the same window.
    driver.wait_register(&mut rig, 0x1C, 0);
    assert_eq!(rig.throttled(0)[..2], [0, 0]);
    driver.enable(&mut rig);
    let mut pair = driver.make_pair(&mut rig, 1, 64);
    rig.pass_time(20 * WINDOW_NS);
    let status = driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 5, DATA));
    assert_eq!(status, Status::SUCCESS);
}

/// Unmapping and shutdown wait for no window.
#[test]
fn unmap_and_shutdown_do_not_wait_for_throttled_commands() {
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
    driver.wait_register(&mut rig, 0x1C, 0b1001);
    assert_eq!(rig.throttled(0)[..2], [0, 0]);
}

/// A base of `base_iops`, with practically unlimited burst.
fn metered(base_iops: u64) -> Budget {
    let rate = |iops| Rate {
        iops,
        bytes: iops * BLOCK,
    };
    Budget {
        base: rate(base_iops),
        burst: rate(1_000_000),
        how: Burst::Metered,
    }
}

/// Two VMs whose volumes share blocks, so that each sees the other's progress; the first bursts.
fn beside_a_burst(doorbells: Doorbells) -> (Rig, [(Driver, Pair); 2]) {
    let mut rig = Rig::new("ram", 2, doorbells == Doorbells::Mapped);
    let word = Word::new(DeviceIndex(0), ExtentIndex(0), Rights::ReadWrite).unwrap();
    rig.volumes[1]
        .table
        .install(ExtentRange::new(0, EXTENTS), word);
    let mut both = [0, 1].map(|n| {
        let mut driver = rig.connect(n);
        driver.begin(&mut rig);
        match doorbells {
            Doorbells::Mapped => driver.map_page(&mut rig),
            _ => driver.use_shadow(&mut rig),
        }
        let pair = driver.make_pair(&mut rig, 1, 64);
        (driver, pair)
    });
    rig.admit_each(&[metered(1000), metered(100_000)]);
    let (driver, pair) = &mut both[0];
    for _ in 0..8 {
        for n in 0..32 {
            driver.queue(pair, &io(nvm::READ, n, u64::from(n), DATA));
        }
        ring(driver, pair);
        let mut done = 0;
        rig.pass_time(WINDOW_NS);
        rig.until("they end", |_| {
            done += ended(driver, pair);
            done == 32
        });
    }
    (rig, both)
}

/// Rings by a store, without a turn.
fn ring(driver: &mut Driver, pair: &Pair) {
    match driver.shadow {
        Some(shadow) => driver.put(shadow + 8, &pair.tail.to_le_bytes()),
        None => driver.ring(8, pair.tail),
    }
}

/// A lane within its base waits for one quantum of a burst, at most.
#[test]
fn a_lane_within_its_base_runs_between_the_quanta_of_a_burst() {
    for doorbells in [Doorbells::Shadow, Doorbells::Mapped] {
        let (mut rig, [mut burst, mut calm]) = beside_a_burst(doorbells);
        burst.0.put(DATA, &[7; 4096]);
        for n in 0..32 {
            let write = io(nvm::WRITE, n, u64::from(n), DATA);
            burst.0.queue(&mut burst.1, &write);
        }
        // How many of the burst's commands are done by then?
        let into = |n: u64| DATA + (1 + n) * BLOCK;
        for n in 0..32 {
            let read = io(nvm::READ, n as u16, n, into(n));
            calm.0.queue(&mut calm.1, &read);
        }
        ring(&mut burst.0, &burst.1);
        ring(&mut calm.0, &calm.1);
        let mut done = [0, 0];
        rig.until("all end", |_| {
            done[0] += ended(&mut burst.0, &mut burst.1);
            done[1] += ended(&mut calm.0, &mut calm.1);
            done == [32, 32]
        });
        let seen = (0..32).filter(|n| calm.0.get(into(*n), 1)[0] == 7).count();
        assert!((1..24).contains(&seen), "{doorbells:?}: {seen}");
    }
}

/// A network's costs would make a VM's base many times dearer.
#[test]
fn a_vm_base_is_priced_by_its_own_frontend() {
    let (mut rig, ..) = ready("ram", Doorbells::Shadow);
    rig.admit(1);
    let vms = Routes::of([Route::local(Transport::Pcie)].into_iter());
    assert_eq!(rig.routes_of(0), Some(vms));
    // The second has no lane here: any frontend may come.
    assert_eq!(rig.routes_of(1), Some(Routes::LOCAL));
}

/// Refused commands count against the quantum, too.
#[test]
fn refused_commands_count_against_the_quantum() {
    let (mut rig, mut driver, mut pair) = ready("ram", Doorbells::Shadow);
    rig.admit(1000);
    for n in 0..60 {
        driver.queue(&mut pair, &io(nvm::READ, n, 1 << 40, DATA));
    }
    ring(&mut driver, &pair);
    let mut refused = 0;
    let mut most = 0;
    for _ in 0..64 {
        rig.turn();
        let before = refused;
        while let Some(cqe) = driver.next(&mut pair) {
            assert_eq!(cqe.status(), Status::LBA_OUT_OF_RANGE.with_dnr());
            refused += 1;
        }
        most = most.max(refused - before);
    }
    // One quantum, by the assumed costs.
    assert_eq!((refused, most), (60, 15));
}

/// A successor repeats commands without another charge.
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
