//! A snapshot of a mounted file system, taken while fio writes: its clone mounts and is whole.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::guest::uml::Uml;
use forebay_tests::vm::{self, Frontend};

const MINUTE: Duration = Duration::from_secs(60);
/// Files that were fsynced before the snapshot, and after it.
const BEFORE: u32 = 12;
const AFTER: u32 = 24;

const FIO: &str = "fio --name=verify --directory=/mnt --rw=randwrite --bsrange=4k-64k --ioengine=libaio \
    --iodepth=16 --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1 --size=16m";
/// `content TEXT` prints 256 KiB.
const CONTENT: &str = "content() { yes \"$1\" | head -c 262144; }";

/// Runs a job in a guest whose only disk is `name`.
fn run(daemon: &Daemon, name: &str, job: &str) -> Result<()> {
    let target = vm::export_as(daemon, name, Frontend::VhostUser, &[])?;
    let output = Uml::start(vm::socket(&target), job)?.wait(2 * MINUTE);
    let output = output.map_err(|error| daemon.with_logs(error))?;
    ensure!(output.code == 0, "{name}: {}", output.text);
    Ok(())
}

/// Writes under fio, while the snapshot is taken. `old` is overwritten after it.
fn write_and_snapshot(daemon: &Daemon) -> Result<()> {
    let target = vm::export(daemon, "disk", "256M", Frontend::VhostUser)?;
    let job = format!(
        "set -e
        {CONTENT}
        mkfs.ext4 -q /dev/vda
        mount -t ext4 /dev/vda /mnt
        content old > /mnt/old
        # Without a journal's replay, only this is sure to be there.
        umount /mnt
        mount -t ext4 /dev/vda /mnt
        while [ ! -e /host/stop ]; do {FIO} --fsync=32; done &
        number=0
        while [ ! -e /host/stop ]; do
            number=$((number + 1))
            content $number | dd of=/mnt/file.$number bs=64k conv=fsync 2>/dev/null
            touch /host/fsynced.$number
            [ ! -e /host/taken ] || content new | dd of=/mnt/old bs=64k conv=notrunc,fsync 2>/dev/null
        done
        wait $!
        content new | cmp - /mnt/old
        umount /mnt
        e2fsck -fn /dev/vda"
    );
    let mut uml = Uml::start(vm::socket(&target), &job)?;
    let written = uml.wait_file(&format!("fsynced.{BEFORE}"), 2 * MINUTE);
    written.map_err(|error| daemon.with_logs(error))?;
    daemon.cli(&["volume", "snapshot", "t/disk@s"])?;
    uml.make_file("taken")?;
    let written = uml.wait_file(&format!("fsynced.{AFTER}"), 2 * MINUTE);
    written.map_err(|error| daemon.with_logs(error))?;
    uml.make_file("stop")?;
    let output = uml.wait(2 * MINUTE);
    let output = output.map_err(|error| daemon.with_logs(error))?;
    ensure!(output.code == 0, "the volume: {}", output.text);
    Ok(())
}

#[test]
#[ignore = "boots Linux guests: cargo xtask test guest"]
fn linux_guest_clone_mounts() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "2G")?;
    write_and_snapshot(&daemon)?;
    daemon.cli(&["volume", "clone", "t/disk@s", "t/clone"])?;
    let snapshot = format!(
        "set -e
        {CONTENT}
        [ $(cat /sys/block/vda/ro) = 1 ]
        if dd if=/dev/zero of=/dev/vda bs=4k count=1 oflag=direct; then exit 1; fi
        mount -t ext4 -o ro,noload /dev/vda /mnt
        content old | cmp - /mnt/old
        umount /mnt"
    );
    run(&daemon, "t/disk@s", &snapshot)?;
    let clone = format!(
        "set -e
        {CONTENT}
        mount -t ext4 /dev/vda /mnt
        # The snapshot was taken of a file system in use.
        dmesg | grep 'recovery complete'
        umount /mnt
        e2fsck -fn /dev/vda
        mount -t ext4 /dev/vda /mnt
        content old | cmp - /mnt/old
        for number in $(seq {BEFORE}); do content $number | cmp - /mnt/file.$number; done
        [ ! -e /mnt/file.{AFTER} ]
        rm /mnt/verify*
        {FIO}
        umount /mnt
        e2fsck -fn /dev/vda
        if dmesg | grep -e 'I/O error' -e 'EXT4-fs error'; then exit 1; fi"
    );
    run(&daemon, "t/clone", &clone)?;
    // The clone's writes are not in the snapshot.
    daemon.cli(&["export", "delete", "t/disk@s"])?;
    run(&daemon, "t/disk@s", &snapshot).context("after the clone's writes")?;
    daemon.pool_check()?;
    daemon.stop()
}
