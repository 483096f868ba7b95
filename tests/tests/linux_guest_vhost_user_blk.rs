//! Stock Linux guests whose disk is Forebay's over vhost-user: User Mode Linux, and QEMU.
//!
//! Purpose: Linux's own virtio drivers and two different frontends: a filesystem, verified I/O, space given back, growth,
//! deaths of the engine, and of the guest.
//! Design: User Mode Linux boots in two seconds and does one job; QEMU 11 takes commands.
//! Not here: speed, hostile guests, libblkio.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::machine::Target;
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::guest::uml::Uml;
use forebay_tests::guest::{Guest, GuestOptions, MachineDisk};
use forebay_tests::lab;
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

fn wait_writes(daemon: &Daemon, uml: &mut Uml) -> Result<()> {
    let before = writes(daemon)?;
    wait::until("the guest's writes", 2 * MINUTE, || {
        ensure!(!uml.has_ended()?, "the guest ended: {}", uml.said());
        Ok((writes(daemon)? > before + 50).then_some(()))
    })
    .map_err(|error| daemon.with_logs(error))
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_vhost_user_blk() -> Result<()> {
    let (mut daemon, target) = set_up()?;
    let socket = machine::socket(&target);

    // User Mode Linux: the engine dies under its load.
    let job = format!(
        "set -e
        mkfs.ext4 -q /dev/vda
        mount -t ext4 -o discard /dev/vda /mnt
        {FIO} --size=48m --fsync=32
        rm /mnt/verify*
        fstrim /mnt
        umount /mnt
        e2fsck -fn /dev/vda
        if dmesg | grep -e 'I/O error' -e 'EXT4-fs error'; then exit 1; fi"
    );
    let mut uml = Uml::start(socket, &job)?;
    let kills = lab::count_from("FOREBAY_GUEST_KILLS", 3);
    for _ in 0..kills {
        wait_writes(&daemon, &mut uml)?;
        let dead = daemon.kill_engine()?;
        daemon.wait_engine_after(dead.generation, MINUTE)?;
    }
    let output = uml
        .wait(5 * MINUTE)
        .map_err(|error| daemon.with_logs(error))?;
    ensure!(output.code == 0, "{}", output.text);

    // The guest dies in the middle of its work; another one finds a filesystem that can be mended.
    let job = "mount -t ext4 /dev/vda /mnt && while true; do dd if=/dev/urandom of=/mnt/file bs=64k count=64 oflag=direct; done";
    let mut uml = Uml::start(socket, job)?;
    wait_writes(&daemon, &mut uml)?;
    drop(uml);
    let job = "e2fsck -fy /dev/vda; [ $? -le 1 ] && mount -t ext4 /dev/vda /mnt && cat /mnt/file >/dev/null && umount /mnt";
    let uml = Uml::start(socket, job)?;
    let output = uml
        .wait(5 * MINUTE)
        .map_err(|error| daemon.with_logs(error))?;
    ensure!(output.code == 0, "{}", output.text);
    daemon.pool_check()?;
    daemon.stop()
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_vhost_user_blk_qemu() -> Result<()> {
    let (mut daemon, target) = set_up()?;
    let guest = Guest::boot(&GuestOptions {
        disks: vec![MachineDisk::VhostUser(machine::socket(&target).clone())],
        ..GuestOptions::default()
    })?;
    guest.check("modprobe virtio_blk", MINUTE)?;
    wait::until("the disk", MINUTE, || {
        Ok((guest.run("[ -b /dev/vda ]", MINUTE)?.code == 0).then_some(()))
    })?;
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
