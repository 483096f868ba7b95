//! A read-only volume's namespace: drivers read it, and cannot change it.

use super::*;

const PROTECTED: Status = Status::NAMESPACE_IS_WRITE_PROTECTED.with_dnr();
const RANGE: u64 = BASE + 0x6000;

/// A driver of a read-only volume, with 7s in block 0.
fn protected(kind: &str) -> (Rig, Driver, Pair) {
    let mut rig = Rig::new(kind, 2, false);
    let mut writer = rig.connect(0);
    writer.begin(&mut rig);
    let mut pair = writer.make_pair(&mut rig, 1, 64);
    writer.put(DATA, &[7; BLOCK as usize]);
    let write = io(nvm::WRITE, 1, 0, DATA);
    assert_eq!(writer.run(&mut rig, &mut pair, &write), Status::SUCCESS);
    rig.volumes[0] = rig.volumes[0].protected();
    rig.share(1, 0);
    let mut driver = rig.connect(1);
    driver.begin(&mut rig);
    let pair = driver.make_pair(&mut rig, 1, 64);
    (rig, driver, pair)
}

fn deallocate(driver: &Driver, cdw11: u32) -> Sqe {
    let mut range = [0; 16];
    range[4] = 1;
    driver.put(RANGE, &range);
    let dsm = Sqe::new(nvm::DATASET_MANAGEMENT, 7);
    prps(dsm.with_nsid(1).with_cdw(11, cdw11), RANGE, 0)
}

fn try_all(rig: &mut Rig, driver: &mut Driver, pair: &mut Pair) {
    driver.put(DATA, &[8; BLOCK as usize]);
    driver.put(DATA + BLOCK, &[7; BLOCK as usize]);
    let zeroes = Sqe::new(nvm::WRITE_ZEROES, 3).with_nsid(1);
    for (sqe, status) in [
        (io(nvm::WRITE, 1, 0, DATA), PROTECTED),
        (io(nvm::WRITE, 2, 0, DATA).with_cdw(12, 1 << 30), PROTECTED),
        (zeroes, PROTECTED),
        (deallocate(driver, 4), PROTECTED),
        (deallocate(driver, 3), Status::SUCCESS),
        (Sqe::new(nvm::FLUSH, 4).with_nsid(1), Status::SUCCESS),
        (io(nvm::COMPARE, 5, 0, DATA + BLOCK), Status::SUCCESS),
        (io(nvm::READ, 6, 0, DATA), Status::SUCCESS),
    ] {
        assert_eq!(driver.run(rig, pair, &sqe), status, "{sqe:?}");
    }
    assert_eq!(driver.get(DATA, BLOCK as usize), [7; BLOCK as usize]);
}

#[test]
fn no_command_changes_a_write_protected_namespace() {
    for kind in ["ram", "file"] {
        let (mut rig, mut driver, mut pair) = protected(kind);
        try_all(&mut rig, &mut driver, &mut pair);
        let identify = Sqe::new(admin::IDENTIFY, 9).with_nsid(1);
        assert_eq!(
            driver.admin(&mut rig, &prps(identify, DATA, 0)),
            Status::SUCCESS
        );
        assert_eq!(driver.get(DATA + 99, 1), [1], "NSATTR");
        rig.kill();
        assert!(rig.succeed(None));
        rig.fence();
        try_all(&mut rig, &mut driver, &mut pair);
    }
}

/// No engine can have begun such a write; the volume stands for damaged records.
#[test]
fn a_recorded_write_is_not_repeated() {
    let mut rig = Rig::new("file", 1, false);
    let mut driver = rig.connect(0);
    driver.begin(&mut rig);
    let mut pair = driver.make_pair(&mut rig, 1, 64);
    // Taken and recorded, but not begun.
    driver.put(DATA, &[8; BLOCK as usize]);
    rig.arm("pcie.taken", 1);
    driver.submit(&mut pair, &io(nvm::WRITE, 1, 0, DATA));
    while rig.turn() {}
    rig.volumes[0] = rig.volumes[0].protected();
    assert!(rig.succeed(None));
    rig.fence();
    assert_eq!(driver.completion(&mut rig, &mut pair).status(), PROTECTED);
    let read = io(nvm::READ, 2, 0, DATA);
    assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
    assert_eq!(driver.get(DATA, BLOCK as usize), [0; BLOCK as usize]);
}
