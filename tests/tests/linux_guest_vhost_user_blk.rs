//! A stock Linux guest whose disk is Forebay's over vhost-user, in QEMU.
//!
//! Purpose: Linux's own virtio driver and QEMU's frontend: a filesystem, verified I/O, a death of the engine, space given
//! back, growth.
//! Design: QEMU 11 (`guest::tools`), one guest.
//! Not here: speed, hostile guests, libblkio, User Mode Linux.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::machine::Target;
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::guest::{Guest, GuestOptions, MachineDisk};
use forebay_tests::machine::{self, Frontend};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
const FIO: &str = "fio --name=verify --directory=/mnt --rw=randwrite --bsrange=4k-64k --ioengine=libaio \
    --iodepth=16 --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1";

fn set_up() -> Result<(Daemon, Target)> {
    let daemon = machine::serve(&DaemonOptions::default(), "2G")?;
    let target = machine::export(&daemon, "disk", "256M", Frontend::VhostUser)?;
    Ok((daemon, target))
}

fn writes(daemon: &Daemon) -> Result<u64> {
    let lane = machine::lane(daemon)?;
    lane["write"]["ops"].as_u64().context("no writes counted")
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_vhost_user_blk() -> Result<()> {
    let (mut daemon, target) = set_up()?;
    let guest = Guest::boot(&GuestOptions {
        disks: vec![MachineDisk::VhostUser(machine::socket(&target).clone())],
        ..GuestOptions::default()
    })?;
    guest.check("modprobe virtio_blk", MINUTE)?;
    wait::until("the disk", MINUTE, || {
        Ok((guest.run("[ -b /dev/vda ]", MINUTE)?.code == 0).then_some(()))
    })?;
    // Else it would never flush, and what it wrote would not be durable.
    let cache = guest.check("cat /sys/block/vda/cache_type", MINUTE)?;
    ensure!(cache.trim() == "write back", "the guest's disk is {cache}");
    guest.check("dmesg --clear", MINUTE)?;
    guest.check("mkfs.ext4 -q /dev/vda", 2 * MINUTE)?;
    guest.check("mount -t ext4 /dev/vda /mnt", MINUTE)?;
    let load = guest.spawn(&format!("{FIO} --size=24m --fsync=64"))?;
    let before = writes(&daemon)?;
    wait::until("the guest's writes", 2 * MINUTE, || {
        Ok((writes(&daemon)? > before + 50).then_some(()))
    })?;
    let dead = daemon.kill_engine()?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    let output = load.wait(5 * MINUTE)?;
    ensure!(output.code == 0, "{}", output.text);
    guest.check("rm /mnt/verify* && fstrim /mnt", MINUTE)?;

    daemon.cli(&["volume", "resize", "t/disk", "--size", "384M"])?;
    wait::until("the guest sees the new size", MINUTE, || {
        let size = guest.check("blockdev --getsize64 /dev/vda", MINUTE)?;
        Ok((size.trim() == (384u64 << 20).to_string()).then_some(()))
    })?;
    guest.check("resize2fs /dev/vda", 2 * MINUTE)?;
    guest.check("umount /mnt && e2fsck -fn /dev/vda", 2 * MINUTE)?;
    let log = guest.check("dmesg", MINUTE)?;
    for words in ["I/O error", "EXT4-fs error", "hung"] {
        ensure!(!log.contains(words), "the kernel says:\n{log}");
    }
    guest.power_off()?;
    daemon.pool_check()?;
    daemon.stop()
}
