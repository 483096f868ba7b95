//! A Linux guest under QEMU 11 with an NVMe disk over vfio-user: filesystem, verified I/O, resets,
//! growth, hot-plug, doorbells, and deaths of engine and QEMU. At the end the guest's log has no
//! complaints.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::guest::{Guest, GuestOptions, Job, VmDisk};
use forebay_tests::lab;
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
/// Bytes checked on the other disk.
const OTHER_BYTES: u64 = 4 << 20;

fn boot() -> Result<(Daemon, Guest, String)> {
    let daemon = vm::serve(&DaemonOptions::default(), "2G")?;
    let target = vm::export(&daemon, "disk", "256M", Frontend::NvmePcie)?;
    let disk = VmDisk::VfioUser(vm::socket(&target).clone());
    let options = GuestOptions {
        disks: vec![disk],
        ..GuestOptions::default()
    };
    let (guest, disk) = boot_with(&daemon, &options)?;
    Ok((daemon, guest, disk))
}

fn boot_with(daemon: &Daemon, options: &GuestOptions) -> Result<(Guest, String)> {
    let guest = Guest::boot(options).map_err(|error| daemon.with_logs(error))?;
    guest.check("modprobe nvme", MINUTE)?;
    let disk = guest.wait_disk().map_err(|error| daemon.with_logs(error))?;
    guest.check("dmesg --clear", MINUTE)?;
    Ok((guest, disk))
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_nvme_pcie() -> Result<()> {
    let (mut daemon, guest, disk) = boot()?;
    let volume = daemon.cli(&["volume", "show", "t/disk"])?;
    let nguid = guest.check("cat /sys/block/nvme0n1/uuid", MINUTE)?;
    ensure!(Some(nguid.trim()) == volume["uuid"].as_str(), "{nguid}");

    guest.check(&format!("mkfs.ext4 -q {disk}"), 2 * MINUTE)?;
    guest.check(&format!("mount -t ext4 {disk} /mnt"), MINUTE)?;
    guest.check(&fio("--bsrange=4k-256k --fsync=64 --size=24m"), 5 * MINUTE)?;
    guest.check("fstrim /mnt", MINUTE)?;
    reset_under_load(&daemon, &guest)?;
    let of_resets = [
        "resetting controller",
        "queues",
        "no usable path",
        "callbacks suppressed",
        "mounted",
    ];
    no_complaints(&guest, &of_resets)?;

    daemon.cli(&["volume", "resize", "t/disk", "--size", "384M"])?;
    wait::until("the guest sees the new size", MINUTE, || {
        let size = guest.check(&format!("blockdev --getsize64 {disk}"), MINUTE)?;
        Ok((size.trim() == (384u64 << 20).to_string()).then_some(()))
    })?;
    guest.check(&format!("resize2fs {disk}"), 2 * MINUTE)?;
    guest.check("umount /mnt", MINUTE)?;
    guest.check(&format!("e2fsck -fn {disk}"), 2 * MINUTE)?;

    hot_unplug(&daemon, &guest)?;
    guest.power_off()?;
    daemon.cli(&["export", "delete", "t/disk", "--disconnect-hosts"])?;
    daemon.pool_check()?;
    daemon.stop()
}

fn fio(how: &str) -> String {
    format!(
        "fio --name=verify --directory=/mnt --rw=randwrite --ioengine=libaio --iodepth=16 --direct=1 \
         --verify=crc32c --do_verify=1 --verify_fatal=1 {how} && rm /mnt/verify*"
    )
}

/// Runs fio with verification in a loop.
fn endless(guest: &Guest, fio: &str) -> Result<Job> {
    guest.spawn(&format!(
        "rm -f /tmp/stop; while [ ! -e /tmp/stop ]; do {fio} || exit 1; done"
    ))
}

fn more_writes(daemon: &Daemon, load: &Job, what: &str) -> Result<()> {
    let writes = || -> Result<u64> {
        let stats = daemon.cli(&["stats"])?;
        let lanes = stats["lanes"].as_array().context("no lanes")?;
        let writes = lanes
            .iter()
            .filter_map(|lane| lane["write"]["ops"].as_u64());
        Ok(writes.sum::<u64>())
    };
    let before = writes()?;
    wait::until(what, 2 * MINUTE, || {
        ensure!(!load.has_ended(), "fio ended instead of {what}");
        Ok((writes()? > before + 100).then_some(()))
    })
    .map_err(|error| daemon.with_logs(error))
}

fn reset_under_load(daemon: &Daemon, guest: &Guest) -> Result<()> {
    let function = "/sys/class/nvme/nvme0/device";
    let set_level = format!("echo flr > {function}/reset_method && cat {function}/reset_method");
    let level = guest.check(&set_level, MINUTE)?;
    ensure!(level.trim() == "flr", "it is reset by {level}");
    let load = endless(guest, &fio("--bs=16k --size=8m"))?;
    for how in [
        "nvme reset /dev/nvme0",
        &format!("echo 1 > {function}/reset"),
        "nvme reset /dev/nvme0",
        &format!("echo 1 > {function}/reset"),
    ] {
        more_writes(daemon, &load, &format!("writes before {how}"))?;
        guest.check(how, 2 * MINUTE)?;
    }
    more_writes(daemon, &load, "writes after the last reset")?;
    finish(guest, load).context("fio under resets")
}

/// Deletes the export under load, and plugs a new one in, with its data. Another VM's disk is
/// unaffected.
fn hot_unplug(daemon: &Daemon, guest: &Guest) -> Result<()> {
    let other = vm::export(daemon, "other", "64M", Frontend::NvmePcie)?;
    vm::fill(&other, OTHER_BYTES, 7)?;
    let content = |disk: &str| {
        let sum = format!("head -c 32M {disk} | md5sum");
        guest.check(&sum, 2 * MINUTE)
    };
    let disk = guest.wait_disk()?;
    let before = content(&disk)?;

    let load = beyond_content(daemon, guest, &disk)?;
    daemon.cli(&["export", "delete", "t/disk", "--disconnect-hosts"])?;
    gone(guest, load).map_err(|error| daemon.with_logs(error))?;
    vm::poll(&other, OTHER_BYTES, 7)?;
    // A controller without namespace and peer is left.
    let remove = "echo 1 > /sys/class/nvme/nvme0/device/remove && ! ls /dev/nvme0";
    guest.check(remove, 2 * MINUTE)?;

    daemon.cli(&["export", "create", "t/disk", "--nvme-pcie"])?;
    let export = daemon.cli(&["export", "show", "t/disk"])?;
    let socket = export["socket"].as_str().context("no socket")?;
    guest.plug(1, &VmDisk::VfioUser(socket.into()))?;
    let disk = guest.wait_disk().map_err(|error| daemon.with_logs(error))?;
    ensure!(content(&disk)? == before, "another content");
    let load = beyond_content(daemon, guest, &disk)?;
    finish(guest, load)?;
    vm::poll(&other, OTHER_BYTES, 7)?;
    let hung = "dmesg | grep -c 'blocked for more than' | grep -qx 0";
    guest.check(hung, MINUTE)?;
    Ok(())
}

fn beyond_content(daemon: &Daemon, guest: &Guest, disk: &str) -> Result<Job> {
    let load = endless(
        guest,
        &format!(
            "fio --name=verify --filename={disk} --offset=64m --size=8m --rw=randwrite --bsrange=4k-64k --direct=1 \
             --ioengine=libaio --iodepth=16 --verify=crc32c --do_verify=1 --verify_fatal=1"
        ),
    )?;
    more_writes(daemon, &load, "writes before the disk goes")?;
    Ok(load)
}

fn gone(guest: &Guest, load: Job) -> Result<()> {
    let vanished = "for try in $(seq 600); do ls /dev/nvme*n1 > /dev/null 2>&1 || exit 0; sleep 0.1; done; exit 1";
    guest.check(vanished, 2 * MINUTE)?;
    let output = load.wait(2 * MINUTE)?;
    ensure!(output.code != 0, "fio did not notice:\n{}", output.text);
    Ok(())
}

fn finish(guest: &Guest, load: Job) -> Result<()> {
    guest.check("touch /tmp/stop", MINUTE)?;
    let output = load.wait(5 * MINUTE)?;
    ensure!(output.code == 0, "{}", output.text);
    Ok(())
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_pcie_survives_kill9() -> Result<()> {
    let kills = lab::count_from("FOREBAY_GUEST_KILLS", 10);
    let (mut daemon, guest, disk) = boot()?;
    let load = endless(&guest, &on_disk(&disk))?;
    for death in 1..=kills {
        more_writes(&daemon, &load, &format!("writes before death {death}"))?;
        let dead = daemon.kill_engine()?;
        daemon.wait_engine_after(dead.generation, MINUTE)?;
    }
    more_writes(&daemon, &load, "writes after the last death")?;
    finish(&guest, load).map_err(|error| daemon.with_logs(error))?;
    no_complaints(&guest, &[])?;
    let takeover = daemon.cli(&["stats"])?["takeover"].clone();
    ensure!(takeover["takeovers"] == kills, "{takeover}");
    mapped_doorbells(&mut daemon, &guest)?;
    let guest = qemu_dies(&daemon, guest, &disk)?;
    guest.power_off()?;
    daemon.pool_check()?;
    daemon.stop()
}

fn on_disk(disk: &str) -> String {
    format!(
        "fio --name=verify --filename={disk} --size=8m --rw=randwrite --bsrange=4k-64k --direct=1 \
         --ioengine=libaio --iodepth=16 --verify=crc32c --do_verify=1 --verify_fatal=1 --fsync=100"
    )
}

/// Plugs in a disk with mapped doorbells, and kills the engine.
fn mapped_doorbells(daemon: &mut Daemon, guest: &Guest) -> Result<()> {
    let target = vm::export(daemon, "mapped", "64M", Frontend::MappedPcie)?;
    guest.plug(1, &VmDisk::VfioUser(vm::socket(&target).clone()))?;
    let disk = "/dev/nvme1n1";
    let find =
        format!("for try in $(seq 300); do [ -b {disk} ] && exit 0; sleep 0.1; done; exit 1");
    let found = guest.check(&find, MINUTE);
    found.map_err(|error| daemon.with_logs(error))?;
    let load = endless(guest, &on_disk(disk))?;
    more_writes(daemon, &load, "writes by mapped doorbells")?;
    let dead = daemon.kill_engine()?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    more_writes(daemon, &load, "writes by mapped doorbells after a death")?;
    finish(guest, load).map_err(|error| daemon.with_logs(error))?;
    no_complaints(guest, &["pci function", "enabling device", "queues"])
}

/// The new QEMU is started as `export show` prints.
fn qemu_dies(daemon: &Daemon, guest: Guest, disk: &str) -> Result<Guest> {
    let content = |guest: &Guest, disk: &str| {
        let part = "bs=64k skip=512 count=128 iflag=direct 2> /dev/null";
        guest.check(&format!("dd if={disk} {part} | md5sum"), MINUTE)
    };
    let kept = format!(
        "dd if=/dev/urandom of={disk} bs=64k seek=512 count=128 oflag=direct conv=fsync 2> /dev/null"
    );
    guest.check(&kept, MINUTE)?;
    let kept = content(&guest, disk)?;
    let load = endless(&guest, &on_disk(disk))?;
    more_writes(daemon, &load, "writes before QEMU dies")?;
    // As `kill -9`.
    drop((load, guest));
    let options = GuestOptions {
        given: vm::printed_arguments(daemon, "t/disk")?,
        ..GuestOptions::default()
    };
    let (guest, disk) = boot_with(daemon, &options)?;
    let found = content(&guest, &disk)?;
    ensure!(found == kept, "{found} instead of {kept}");
    guest.check(&on_disk(&disk), 2 * MINUTE)?;
    no_complaints(&guest, &[])?;
    Ok(guest)
}

/// Allows only `expected` messages about disks.
fn no_complaints(guest: &Guest, expected: &[&str]) -> Result<()> {
    let log = guest.check("dmesg", MINUTE)?;
    let ours = |line: &&str| {
        ["nvme", "I/O", "blk", "EXT4-fs error", "hung"]
            .iter()
            .any(|subject| line.contains(subject))
            && !expected.iter().any(|words| line.contains(words))
    };
    let said: Vec<&str> = log.lines().filter(ours).collect();
    ensure!(said.is_empty(), "the kernel says:\n{}", said.join("\n"));
    Ok(())
}
