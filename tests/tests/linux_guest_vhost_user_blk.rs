//! Linux guests with a vhost-user disk, in User Mode Linux and QEMU 11: filesystem, verified I/O,
//! deallocation, growth, and deaths of engine and guest.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::vm::Target;
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::guest::uml::Uml;
use forebay_tests::guest::{Guest, GuestOptions, VmDisk};
use forebay_tests::lab;
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
const FIO: &str = "fio --name=verify --directory=/mnt --rw=randwrite --bsrange=4k-64k --ioengine=libaio \
    --iodepth=16 --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1";
/// Kernel messages about a bad disk.
const COMPLAINTS: [&str; 3] = ["I/O error", "EXT4-fs error", "hung"];
/// The size after growth.
const GROWN_BYTES: u64 = 384 << 20;
/// Hot-plugged memory.
const SPARE_MIB: u32 = 128;

fn set_up() -> Result<(Daemon, Target)> {
    let daemon = vm::serve(&DaemonOptions::default(), "2G")?;
    let target = vm::export(&daemon, "disk", "256M", Frontend::VhostUser)?;
    Ok((daemon, target))
}

fn writes(daemon: &Daemon) -> Result<u64> {
    let lane = vm::lane(daemon)?;
    lane["write"]["ops"].as_u64().context("no writes counted")
}

/// Waits until the engine has counted 50 further writes.
fn more_writes(daemon: &Daemon, mut ended: impl FnMut() -> Result<Option<String>>) -> Result<()> {
    let before = writes(daemon)?;
    wait::until("the guest's writes", 2 * MINUTE, || {
        if let Some(said) = ended()? {
            anyhow::bail!("the guest ended: {said}");
        }
        Ok((writes(daemon)? > before + 50).then_some(()))
    })
    .map_err(|error| daemon.with_logs(error))
}

fn more_writes_of(daemon: &Daemon, uml: &mut Uml) -> Result<()> {
    more_writes(daemon, || Ok(uml.has_ended()?.then(|| uml.said())))
}

#[test]
#[ignore = "boots Linux guests: cargo xtask test guest"]
fn linux_guest_vhost_user_blk() -> Result<()> {
    let (mut daemon, target) = set_up()?;
    in_user_mode_linux(&mut daemon, vm::socket(&target))?;
    daemon.pool_check()?;
    daemon.stop()?;

    let (mut daemon, _) = set_up()?;
    in_qemu(&mut daemon)?;
    daemon.pool_check()?;
    daemon.stop()
}

fn in_user_mode_linux(daemon: &mut Daemon, socket: &Path) -> Result<()> {
    let complaints = COMPLAINTS.map(|words| format!("-e '{words}'")).join(" ");
    let job = format!(
        "set -e
        mkfs.ext4 -q /dev/vda
        mount -t ext4 -o discard /dev/vda /mnt
        while [ ! -e /host/stop ]; do {FIO} --size=16m --fsync=32; rm /mnt/verify*; done
        touch /host/stopped
        until [ $(blockdev --getsize64 /dev/vda) = {GROWN_BYTES} ]; do sleep 0.1; done
        resize2fs /dev/vda
        {FIO} --size=16m
        rm /mnt/verify*
        fstrim /mnt
        umount /mnt
        e2fsck -fn /dev/vda
        # The driver goes and comes: rings are set up anew on the same connection.
        rmmod virtio_blk
        modprobe virtio_blk
        e2fsck -fn /dev/vda
        if dmesg | grep {complaints}; then exit 1; fi"
    );
    let mut uml = Uml::start(socket, &job)?;
    for _ in 0..lab::count_from("FOREBAY_GUEST_KILLS", 5) {
        more_writes_of(daemon, &mut uml)?;
        let dead = daemon.kill_engine()?;
        daemon.wait_engine_after(dead.generation, MINUTE)?;
    }
    more_writes_of(daemon, &mut uml)?;
    uml.make_file("stop")?;
    let stopped = uml.wait_file("stopped", 5 * MINUTE);
    stopped.map_err(|error| daemon.with_logs(error))?;
    daemon.cli(&["volume", "resize", "t/disk", "--size", "384M"])?;
    let output = uml.wait(5 * MINUTE);
    let output = output.map_err(|error| daemon.with_logs(error))?;
    ensure!(output.code == 0, "{}", output.text);
    Ok(())
}

fn in_qemu(daemon: &mut Daemon) -> Result<()> {
    // As an operator would start it.
    let guest = boot(&GuestOptions {
        given: vm::printed_arguments(daemon, "t/disk")?,
        plugs_memory: true,
        ..GuestOptions::default()
    })?;
    guest.check("mkfs.ext4 -q /dev/vda", 2 * MINUTE)?;
    guest.check("mount -t ext4 /dev/vda /mnt", MINUTE)?;
    let load = guest.spawn(&format!("{FIO} --size=24m --fsync=64"))?;
    more_writes(daemon, || Ok(load.has_ended().then(String::new)))?;
    let dead = daemon.kill_engine()?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    let output = load.wait(5 * MINUTE)?;
    ensure!(output.code == 0, "{}", output.text);
    guest.check("rm /mnt/verify* && fstrim /mnt", MINUTE)?;

    daemon.cli(&["volume", "resize", "t/disk", "--size", "384M"])?;
    wait::until("the guest sees the new size", MINUTE, || {
        let size = guest.check("blockdev --getsize64 /dev/vda", MINUTE)?;
        Ok((size.trim() == GROWN_BYTES.to_string()).then_some(()))
    })?;
    guest.check("resize2fs /dev/vda", 2 * MINUTE)?;
    memory_comes_and_goes(daemon, &guest)?;
    guest.check("umount /mnt && e2fsck -fn /dev/vda", 2 * MINUTE)?;
    let log = guest.check("dmesg", MINUTE)?;
    for words in COMPLAINTS {
        ensure!(!log.contains(words), "the kernel says:\n{log}");
    }
    guest.power_off()
}

fn memory_comes_and_goes(daemon: &Daemon, guest: &Guest) -> Result<()> {
    let memory = || {
        let shown = daemon.cli(&["export", "show", "t/disk"])?;
        let bytes = shown["machine"]["memory_bytes"].as_u64();
        bytes.with_context(|| format!("no memory in {shown}"))
    };
    let before = memory()?;
    // Only for movable pages, so that the memory can be unplugged.
    let policy = "echo online_movable > /sys/devices/system/memory/auto_online_blocks";
    guest.check(policy, MINUTE)?;
    let load = guest.spawn(&format!("{FIO} --size=16m --fsync=64"))?;
    more_writes(daemon, || Ok(load.has_ended().then(String::new)))?;
    guest.plug_memory(SPARE_MIB)?;
    wait::until("the engine has the memory", MINUTE, || {
        Ok((memory()? == before + (u64::from(SPARE_MIB) << 20)).then_some(()))
    })?;
    let online = "awk '/zone  *Movable/ { movable = 1 } movable && /managed/ { print $2; exit }' /proc/zoneinfo";
    wait::until("the guest has the memory", MINUTE, || {
        let pages = guest.check(online, MINUTE)?;
        Ok((pages.trim().parse::<u64>().unwrap_or(0) > 0).then_some(()))
    })?;
    let output = load.wait(5 * MINUTE)?;
    ensure!(output.code == 0, "{}", output.text);
    let load = guest.spawn(&format!("{FIO} --size=16m --fsync=64"))?;
    more_writes(daemon, || Ok(load.has_ended().then(String::new)))?;
    guest.unplug_memory()?;
    wait::until("the memory is out", 2 * MINUTE, || {
        Ok((memory()? == before).then_some(()))
    })?;
    let output = load.wait(5 * MINUTE)?;
    ensure!(output.code == 0, "{}", output.text);
    guest.check("rm /mnt/verify*", MINUTE)?;
    Ok(())
}

/// Boots QEMU and waits for the disk.
fn boot(options: &GuestOptions) -> Result<Guest> {
    let guest = Guest::boot(options)?;
    guest.check("modprobe virtio_blk", MINUTE)?;
    wait::until("the disk", MINUTE, || {
        Ok((guest.run("[ -b /dev/vda ]", MINUTE)?.code == 0).then_some(()))
    })?;
    // Otherwise its writes would not be durable.
    let cache = guest.check("cat /sys/block/vda/cache_type", MINUTE)?;
    ensure!(cache.trim() == "write back", "the guest's disk is {cache}");
    guest.check("dmesg --clear", MINUTE)?;
    Ok(guest)
}

/// The next guest finds a filesystem that can be repaired.
#[test]
#[ignore = "boots Linux guests: cargo xtask test guest"]
fn client_kill_and_restart_guests() -> Result<()> {
    let (mut daemon, target) = set_up()?;
    let socket = vm::socket(&target);
    let work = "while true; do dd if=/dev/urandom of=/mnt/file bs=64k count=64 oflag=direct; done";
    let poll = "e2fsck -fy /dev/vda; [ $? -le 1 ] && mount -t ext4 /dev/vda /mnt && { [ ! -e /mnt/file ] || cat /mnt/file >/dev/null; }";

    let uml = Uml::start(
        socket,
        "mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /mnt && umount /mnt",
    )?;
    let output = uml.wait(5 * MINUTE);
    let output = output.map_err(|error| daemon.with_logs(error))?;
    ensure!(output.code == 0, "{}", output.text);
    for kill in 0..lab::count_from("FOREBAY_CLIENT_KILLS", 3) {
        let mut uml = Uml::start(socket, &format!("{poll} && {work}"))?;
        let worked = more_writes_of(&daemon, &mut uml);
        worked.with_context(|| format!("User Mode Linux after kill {kill}: {}", uml.said()))?;
    }
    let guest = boot(&GuestOptions {
        disks: vec![VmDisk::VhostUser(socket.into())],
        ..GuestOptions::default()
    })?;
    guest.check(poll, 5 * MINUTE)?;
    let load = guest.spawn(work)?;
    more_writes(&daemon, || Ok(load.has_ended().then(String::new)))?;
    // As `kill -9`.
    drop((load, guest));
    let uml = Uml::start(socket, poll)?;
    let output = uml.wait(5 * MINUTE);
    let output = output.map_err(|error| daemon.with_logs(error))?;
    ensure!(output.code == 0, "{}", output.text);
    daemon.pool_check()?;
    ensure!(daemon.processes()?.generation == 1, "the engine died of it");
    daemon.stop()
}
