//! Two hosts share a volume by reservations, and one preempts the other during its writes.
//!
//! Host A is the guest, host B the test with raw PDUs. After B's preempt is answered, no write of A
//! may reach the volume, also across an engine's death.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_nvme::{SglDescriptor, Sqe, Status};
use forebay_tests::daemon::DaemonOptions;
use forebay_tests::guest::{self, DISK_NQN, Guest, GuestOptions};
use forebay_tests::wait;
use raw::{PLAIN, RawHost, attach};

#[allow(missing_docs, dead_code)]
#[path = "../../crates/engine/tests/common/host.rs"]
mod raw;

/// Host B.
const HOST: &str = "nqn.2026-01.test:b";
const MINUTE: Duration = Duration::from_secs(60);
const BLOCK: usize = 4096;
/// Blocks that both hosts write.
const BLOCKS: u64 = 1024;
const KEY_A: u64 = 0xa;
const KEY_B: u64 = 0xb;

// Opcodes of reservation commands (NVM Express Base Specification, I/O commands).
const REGISTER: u8 = 0x0d;
const ACQUIRE: u8 = 0x11;
const RELEASE: u8 = 0x15;
const WRITE_EXCLUSIVE: u32 = 1 << 8;

/// Host B's reservation command.
fn reserve(io: &mut RawHost, opcode: u8, action: u32, keys: [u64; 2]) -> Status {
    let mut data = [keys[0].to_le_bytes(), keys[1].to_le_bytes()].concat();
    if opcode == RELEASE {
        data.truncate(8);
    }
    let cid = io.next_cid();
    let sqe = Sqe::new(opcode, cid)
        .with_nsid(1)
        .with_cdw(10, action)
        .with_sgl(SglDescriptor::in_capsule(0, data.len() as u32));
    io.capsule(&sqe, &data);
    io.response().status()
}

fn guest_writes(guest: &Guest, disk: &str) -> Result<bool> {
    let write = format!("dd if=/dev/urandom of={disk} bs=4k count=1 oflag=direct conv=fsync");
    Ok(guest.run(&write, MINUTE)?.code == 0)
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_reservations() -> Result<()> {
    let mut daemon = guest::serve_disk(&DaemonOptions::default(), "1G", "64M")?;
    let guest = Guest::boot(&GuestOptions::default())?;
    guest.connect(daemon.port(), "")?;
    let disk = guest.wait_disk()?;
    let address = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let (_admin, mut b) = attach(address, DISK_NQN, PLAIN, true);

    // A reserves; B may read, but not write.
    ensure!(guest_writes(&guest, &disk)?, "nobody has reserved anything");
    let register = format!("nvme resv-register {disk} --nrkey={KEY_A:#x} --rrega=0 --cptpl=3");
    guest.check(&register, MINUTE)?;
    let acquire = format!("nvme resv-acquire {disk} --crkey={KEY_A:#x} --rtype=1 --racqa=0");
    guest.check(&acquire, MINUTE)?;
    let report = guest.check(&format!("nvme resv-report {disk} --eds"), MINUTE)?;
    ensure!(
        report.contains("rtype") && report.contains("regctl"),
        "{report}"
    );
    ensure!(guest_writes(&guest, &disk)?, "the holder can't write");
    let conflict = b.write(0, &[1; BLOCK], BLOCK).status();
    ensure!(
        conflict.code() == Status::RESERVATION_CONFLICT,
        "{conflict:?}"
    );
    b.read(0, 1, BLOCK as u32);

    // B preempts while A writes.
    let fio = format!(
        "fio --name=a --filename={disk} --size={} --rw=randwrite --bs=4k --direct=1 --ioengine=libaio \
         --iodepth=32 --buffer_pattern=0xaa --time_based --runtime=300",
        BLOCKS * BLOCK as u64
    );
    let load = guest.spawn(&fio)?;
    wait::until("A's writes have begun", 2 * MINUTE, || {
        let block = b.read(BLOCKS / 2, 1, BLOCK as u32);
        Ok(block.iter().all(|byte| *byte == 0xaa).then_some(()))
    })?;
    ensure!(reserve(&mut b, REGISTER, 0, [0, KEY_B]) == Status::SUCCESS);
    ensure!(!load.has_ended(), "fio has ended by itself");
    let preempt = 1 | WRITE_EXCLUSIVE;
    let status = reserve(&mut b, ACQUIRE, preempt, [KEY_B, KEY_A]);
    ensure!(status == Status::SUCCESS, "{status:?}");
    // From here only B may write.
    for lba in 0..BLOCKS {
        let status = b.write(lba, &[lba as u8 | 1; BLOCK], BLOCK).status();
        ensure!(status == Status::SUCCESS, "block {lba}: {status:?}");
    }
    let output = load.wait(2 * MINUTE)?;
    ensure!(output.code != 0, "A went on: {}", output.text);
    let b_is_there = |b: &mut RawHost| -> Result<()> {
        for lba in 0..BLOCKS {
            let block = b.read(lba, 1, BLOCK as u32);
            ensure!(
                block.iter().all(|byte| *byte == lba as u8 | 1),
                "block {lba} holds what A wrote"
            );
        }
        Ok(())
    };
    b_is_there(&mut b)?;
    ensure!(!guest_writes(&guest, &disk)?, "A writes after the preempt");
    let read = format!("dd if={disk} of=/dev/null bs=1M count=4 iflag=direct");
    guest.check(&read, MINUTE).context("A may read")?;

    // Deaths do not change that.
    let dead = daemon.kill_engine()?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    ensure!(!guest_writes(&guest, &disk)?, "A writes after a take-over");
    daemon.kill_daemon()?;
    daemon.start_again()?;
    ensure!(
        !guest_writes(&guest, &disk)?,
        "A writes after a daemon's death"
    );
    b_is_there(&mut b)?;
    let volume = daemon.cli(&["volume", "show", "t/disk"])?;
    let registrants = volume["reservation"]["registrants"].as_array();
    ensure!(registrants.is_some_and(|list| list.len() == 1), "{volume}");

    // B releases, and A may write again.
    let status = reserve(&mut b, RELEASE, WRITE_EXCLUSIVE, [KEY_B, 0]);
    ensure!(status == Status::SUCCESS, "{status:?}");
    ensure!(
        guest_writes(&guest, &disk)?,
        "A can't write though nothing is reserved"
    );
    let register = format!("nvme resv-register {disk} --nrkey=0xc --rrega=0");
    guest.check(&register, MINUTE)?;
    let clear = format!("nvme resv-release {disk} --crkey=0xc --rtype=0 --rrela=1");
    guest.check(&clear, MINUTE)?;
    guest.check("nvme disconnect-all", MINUTE)?;
    guest.power_off()?;
    daemon.pool_check()?;
    daemon.stop()
}
