//! What a controller declares is true: unsupported commands, the error log, the primary controller.

use super::*;
use forebay_device::{Errno, OpKind};

/// Error Information log entries: 64 bytes each, the newest first.
fn error_log(rig: &mut Rig, driver: &mut Driver) -> Vec<u8> {
    let sqe = Sqe::new(admin::GET_LOG_PAGE, 7).with_cdw(10, 1 | 63 << 16);
    assert_eq!(driver.admin(rig, &prps(sqe, DATA, 0)), Status::SUCCESS);
    driver.get(DATA, 256)
}

#[test]
fn a_command_that_a_device_failed_is_in_the_error_log() {
    let (mut rig, mut driver, mut pair) = ready("file", Doorbells::Trapped);
    assert_eq!(error_log(&mut rig, &mut driver), [0; 256]);
    rig.gate.fail(0..u64::MAX, &[OpKind::Write], Errno::IO, 2);
    let write = |cid, lba| io(nvm::WRITE, cid, lba, DATA);
    for (cid, lba) in [(5, 3), (6, 9)] {
        let status = driver.run(&mut rig, &mut pair, &write(cid, lba));
        assert_eq!(status.code(), Status::WRITE_FAULT);
    }
    // The log has only device faults.
    let beyond = driver.run(&mut rig, &mut pair, &write(7, u64::from(u32::MAX)));
    assert_eq!(beyond.code(), Status::LBA_OUT_OF_RANGE);
    assert_eq!(
        driver.run(&mut rig, &mut pair, &write(8, 0)),
        Status::SUCCESS
    );
    let check = |log: &[u8]| {
        let counts: Vec<u8> = log.chunks(64).map(|entry| entry[0]).collect();
        assert_eq!(counts, [2, 1, 0, 0]);
        assert_eq!(log[8..12], [1, 0, 6, 0], "queue and command");
        assert_eq!((log[16], log[24]), (9, 1), "block and namespace");
        let status = u16::from_le_bytes([log[12], log[13]]) >> 1;
        assert_eq!(Status(status).code(), Status::WRITE_FAULT);
    };
    check(&error_log(&mut rig, &mut driver));
    // A successor continues the count.
    rig.kill();
    while !rig.succeed(None) {}
    rig.fence();
    let smart = Sqe::new(admin::GET_LOG_PAGE, 7).with_cdw(10, 2 | 127 << 16);
    let smart = smart.with_nsid(u32::MAX);
    assert_eq!(
        driver.admin(&mut rig, &prps(smart, DATA, 0)),
        Status::SUCCESS
    );
    assert_eq!(driver.get(DATA + 176, 1), [2]);
}

#[test]
fn opcodes_of_reservations_are_unknown_whatever_they_say() {
    let (mut rig, mut driver, mut pair) = ready("ram", Doorbells::Trapped);
    for op in [
        nvm::RESERVATION_REGISTER,
        nvm::RESERVATION_REPORT,
        nvm::RESERVATION_ACQUIRE,
        nvm::RESERVATION_RELEASE,
        nvm::VERIFY,
    ] {
        for (nsid, cdw10) in [(1, 0), (1, u32::MAX), (2, 0), (0, 7)] {
            let sqe = Sqe::new(op, 1).with_nsid(nsid).with_cdw(10, cdw10);
            let status = driver.run(&mut rig, &mut pair, &prps(sqe, DATA, 0));
            assert_eq!(status, Status::INVALID_OPCODE.with_dnr(), "{op:#x}");
        }
    }
}

/// Whether Virtualization Management is declared (Identify, effects log), and carried out.
fn manages(rig: &mut Rig, driver: &mut Driver) -> [bool; 3] {
    let identify = prps(Sqe::new(admin::IDENTIFY, 1).with_cdw(10, 1), DATA, 0);
    assert_eq!(driver.admin(rig, &identify), Status::SUCCESS);
    let identified = driver.get(DATA + 256, 1)[0] & 1 << 7 != 0;
    let log = Sqe::new(admin::GET_LOG_PAGE, 1).with_cdw(10, 5 | 255 << 16);
    assert_eq!(driver.admin(rig, &prps(log, DATA, 0)), Status::SUCCESS);
    let op = admin::VIRTUALIZATION_MANAGEMENT;
    let logged = driver.get(DATA + u64::from(op) * 4, 1)[0] & 1 != 0;
    let status = driver.admin(rig, &Sqe::new(op, 1));
    [identified, logged, status.code() != Status::INVALID_OPCODE]
}

#[test]
fn only_the_primary_controller_says_that_it_manages() {
    let mut rig = Rig::new("ram", 2, false);
    rig.share(1, 0);
    let mut drivers = [0, 1].map(|n| {
        let mut driver = rig.connect(n);
        driver.begin(&mut rig);
        driver
    });
    let [first, second] = &mut drivers;
    assert_eq!(manages(&mut rig, first), [true; 3]);
    assert_eq!(manages(&mut rig, second), [false; 3]);
    // Without its export it does not know the others, but is no primary controller either.
    rig.remove(1);
    assert_eq!(manages(&mut rig, second), [false; 3]);
}
