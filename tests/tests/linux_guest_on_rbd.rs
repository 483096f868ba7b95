//! Linux guests whose disks are volumes in RBD images: filesystem, verified I/O, deallocation,
//! growth elsewhere, and deaths of the engine. The guest's log has no complaints.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use forebay_tests::ceph::{self, NAME, POOL, SharedCluster, cluster};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::guest::{Guest, GuestOptions, Job, VmDisk};
use forebay_tests::lab::{MIB, MINUTE};
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;
use xtask::process;

/// Writes between two events, on each disk.
const MORE_WRITES: u64 = 40;
const FIO: &str = "fio --name=verify --ioengine=libaio --direct=1 --verify=crc32c \
    --do_verify=1 --verify_fatal=1";

fn serve(cluster: &SharedCluster) -> Result<Daemon> {
    let options = DaemonOptions {
        config: ceph::config(cluster, ""),
        environment: ceph::environment(cluster),
        ..DaemonOptions::default()
    };
    vm::serve(&options, "256M")
}

/// Creates the volume `t/NAME` in a new image. Names are unique in this file, as tests share the
/// cluster.
fn create(daemon: &Daemon, name: &str, size_mib: u64) -> Result<String> {
    let volume = format!("t/{name}");
    let image = format!("{NAME}/{POOL}/{name}");
    let size = format!("{size_mib}M");
    daemon.cli(&[
        "volume", "create", &volume, "--rbd", &image, "--size", &size,
    ])?;
    Ok(volume)
}

fn boot(disks: Vec<VmDisk>) -> Result<Guest> {
    let guest = Guest::boot(&GuestOptions {
        memory_mib: 512,
        disks,
        ..GuestOptions::default()
    })?;
    guest.check("modprobe nvme && modprobe virtio_blk", MINUTE)?;
    Ok(guest)
}

fn wait_for(guest: &Guest, disk: &str) -> Result<()> {
    let find =
        format!("for try in $(seq 300); do [ -b {disk} ] && exit 0; sleep 0.1; done; exit 1");
    guest.check(&find, MINUTE).map(drop)
}

/// Runs a command in a loop.
fn endless(guest: &Guest, command: &str) -> Result<Job> {
    guest.spawn(&format!(
        "while [ ! -e /tmp/stop ]; do {command} || exit 1; done"
    ))
}

fn finish(guest: &Guest, loads: Vec<Job>) -> Result<()> {
    guest.check("touch /tmp/stop", MINUTE)?;
    for load in loads {
        let output = load.wait(5 * MINUTE)?;
        ensure!(output.code == 0, "{}", output.text);
    }
    Ok(())
}

/// Counted writes by volume.
fn writes(daemon: &Daemon) -> Result<BTreeMap<String, u64>> {
    let stats = daemon.cli(&["stats"])?;
    let mut writes = BTreeMap::new();
    for lane in stats["lanes"].as_array().context("no lanes")? {
        let volume = lane["volume"].as_str().context("a lane's volume")?;
        let ops = lane["write"]["ops"].as_u64().context("a lane's writes")?;
        writes.insert(volume.to_owned(), ops);
    }
    Ok(writes)
}

/// Waits until each volume has been written further.
fn more_writes(daemon: &Daemon, loads: &mut Vec<Job>, what: &str) -> Result<()> {
    let before = writes(daemon)?;
    ensure!(before.len() == loads.len(), "{before:?}");
    wait::until(what, 2 * MINUTE, || {
        if let Some(ended) = loads.iter().position(Job::has_ended) {
            let output = loads.swap_remove(ended).wait(MINUTE)?;
            bail!("fio ended before {what}:\n{}", output.text);
        }
        let now = writes(daemon)?;
        let mut pairs = before.values().zip(now.values());
        let all = pairs.all(|(before, now)| *now > before + MORE_WRITES);
        Ok(all.then_some(()))
    })
}

fn engine_dies(daemon: &Daemon, loads: &mut Vec<Job>) -> Result<()> {
    more_writes(daemon, loads, "writes before the engine's death")?;
    let dead = daemon.kill_engine()?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    more_writes(daemon, loads, "writes after the engine's death")
}

fn no_complaints(guest: &Guest) -> Result<()> {
    const SUBJECTS: [&str; 6] = [
        "nvme nvme",
        "I/O error",
        "EXT4-fs error",
        "EXT4-fs warning",
        "JBD2",
        "hung",
    ];
    let log = guest.check("dmesg", MINUTE)?;
    let ours = |line: &&str| {
        SUBJECTS.iter().any(|subject| line.contains(subject))
            // The kernel says so of a resized disk.
            && !line.contains("rescanning namespaces")
    };
    let said: Vec<&str> = log.lines().filter(ours).collect();
    ensure!(said.is_empty(), "the kernel says:\n{}", said.join("\n"));
    Ok(())
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_on_rbd() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut daemon = serve(&cluster)?;
    let volume = create(&daemon, "guest", 96)?;
    let target = vm::export_as(&daemon, &volume, Frontend::NvmePcie, &[])?;
    let guest = boot(vec![VmDisk::VfioUser(vm::socket(&target).clone())])?;
    let lived = life_of_a_filesystem(&cluster, &daemon, &guest);
    lived.map_err(|error| daemon.with_logs(error))?;
    guest.power_off()?;
    daemon.pool_check()?;
    daemon.stop()
}

fn life_of_a_filesystem(cluster: &SharedCluster, daemon: &Daemon, guest: &Guest) -> Result<()> {
    const DISK: &str = "/dev/nvme0n1";
    wait_for(guest, DISK)?;
    // A small filesystem's default blocks of 1 KiB have many small groups.
    guest.check(&format!("mkfs.ext4 -q -b 4096 {DISK}"), 2 * MINUTE)?;
    guest.check(&format!("mount -t ext4 {DISK} /mnt"), MINUTE)?;
    guest.check("dmesg --clear", MINUTE)?;
    let write_kept = "dd if=/dev/urandom of=/mnt/kept bs=1M count=8 conv=fsync 2> /dev/null";
    guest.check(write_kept, MINUTE)?;
    let kept = guest.check("md5sum /mnt/kept", MINUTE)?;
    fstrim_frees_objects(cluster, guest)?;

    let fio = format!(
        "{FIO} --rw=randwrite --directory=/mnt --size=8m --bsrange=4k-128k --iodepth=16 --fsync=16"
    );
    let mut loads = vec![endless(guest, &format!("{fio} && rm /mnt/verify*"))?];
    engine_dies(daemon, &mut loads)?;
    grows(cluster, daemon, guest, DISK)?;
    engine_dies(daemon, &mut loads)?;
    finish(guest, loads)?;

    guest.check("umount /mnt", MINUTE)?;
    guest.check(&format!("e2fsck -fn {DISK}"), 2 * MINUTE)?;
    guest.check(&format!("mount -t ext4 -o ro {DISK} /mnt"), MINUTE)?;
    let found = guest.check("md5sum /mnt/kept", MINUTE)?;
    ensure!(found == kept, "{found} instead of {kept}");
    guest.check("umount /mnt", MINUTE)?;
    image_is_the_disk(cluster, daemon, guest, DISK)
}

fn fstrim_frees_objects(cluster: &SharedCluster, guest: &Guest) -> Result<()> {
    const FILE_BYTES: u64 = 24 * MIB;
    // The objects at its ends hold other data too.
    const OBJECTS_BYTES: u64 = 16 * MIB;
    let used = || {
        let shown = cluster.rbd_json(&["du", &format!("{POOL}/guest")])?;
        let bytes = shown["images"][0]["used_size"].as_u64();
        bytes.with_context(|| format!("{shown}"))
    };
    let before = used()?;
    let write = format!(
        "dd if=/dev/urandom of=/mnt/big bs=1M count={} conv=fsync 2> /dev/null",
        FILE_BYTES / MIB
    );
    guest.check(&write, 2 * MINUTE)?;
    let full = used()?;
    ensure!(
        full >= before + OBJECTS_BYTES,
        "{before} bytes, then {full}"
    );
    guest.check("rm /mnt/big && sync && fstrim /mnt", 2 * MINUTE)?;
    let after = used()?;
    ensure!(
        after + OBJECTS_BYTES <= full,
        "{before} bytes, then {full}, then {after}"
    );
    Ok(())
}

/// Another client of the cluster resizes the image, under load.
fn grows(cluster: &SharedCluster, daemon: &Daemon, guest: &Guest, disk: &str) -> Result<()> {
    const GROWN_BYTES: u64 = 160 * MIB;
    let image = format!("{POOL}/guest");
    cluster.rbd(&["resize", "--no-progress", "--size", "160M", &image])?;
    wait::until("the guest sees the new size", MINUTE, || {
        let size = guest.check(&format!("blockdev --getsize64 {disk}"), MINUTE)?;
        Ok((size.trim() == GROWN_BYTES.to_string()).then_some(()))
    })?;
    let volume = daemon.cli(&["volume", "show", "t/guest"])?;
    ensure!(volume["size_bytes"] == GROWN_BYTES, "{volume}");
    guest.check(&format!("resize2fs {disk}"), 2 * MINUTE)?;
    let blocks = guest.check("stat -f -c %b /mnt", MINUTE)?;
    let blocks: u64 = blocks.trim().parse().context(blocks.clone())?;
    ensure!(blocks * 4096 > 128 * MIB, "{blocks} blocks of 4 KiB");
    // It needs the new space.
    let fill = "dd if=/dev/urandom of=/mnt/fill bs=1M count=100 conv=fsync && rm /mnt/fill";
    guest.check(fill, 2 * MINUTE).map(drop)
}

/// Every byte of the disk is in the image.
fn image_is_the_disk(
    cluster: &SharedCluster,
    daemon: &Daemon,
    guest: &Guest,
    disk: &str,
) -> Result<()> {
    let file = daemon.folder().join("content");
    let image = format!("{POOL}/guest");
    cluster.rbd(&["export", "--no-progress", &image, &file.to_string_lossy()])?;
    let mut sum = std::process::Command::new("md5sum");
    let in_image = process::text(sum.arg(&file), MINUTE)?;
    let read = format!("dd if={disk} bs=1M iflag=direct 2> /dev/null | md5sum");
    let on_disk = guest.check(&read, 2 * MINUTE)?;
    let [in_image, on_disk] = [&in_image, &on_disk].map(|said| said.split_whitespace().next());
    ensure!(
        in_image == on_disk,
        "{in_image:?} in the image, {on_disk:?} on the disk"
    );
    no_complaints(guest)
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn rbd_fio_verify_each_frontend() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut daemon = serve(&cluster)?;
    let pcie = create(&daemon, "pcie", 48)?;
    let pcie = vm::export_as(&daemon, &pcie, Frontend::NvmePcie, &[])?;
    let virtio = create(&daemon, "virtio", 48)?;
    let virtio = vm::export_as(&daemon, &virtio, Frontend::VhostUser, &[])?;
    // Guests connect to this name.
    let tcp = create(&daemon, "disk", 48)?;
    daemon.cli(&["export", "create", &tcp, "--any-host"])?;
    let guest = boot(vec![
        VmDisk::VfioUser(vm::socket(&pcie).clone()),
        VmDisk::VhostUser(vm::socket(&virtio).clone()),
    ])?;
    let verified = three_disks(&daemon, &guest);
    verified.map_err(|error| daemon.with_logs(error))?;
    guest.power_off()?;
    daemon.pool_check()?;
    daemon.stop()
}

fn three_disks(daemon: &Daemon, guest: &Guest) -> Result<()> {
    const DISKS: [&str; 3] = ["/dev/nvme0n1", "/dev/nvme1n1", "/dev/vda"];
    wait_for(guest, DISKS[0])?;
    guest.connect(daemon.port(), "")?;
    wait_for(guest, DISKS[1])?;
    wait_for(guest, DISKS[2])?;
    guest.check("dmesg --clear", MINUTE)?;
    let mut loads: Vec<Job> = DISKS
        .iter()
        .map(|disk| {
            let writes = "--rw=randwrite --size=8m --bsrange=512-128k --fsync=200";
            // Each block is deallocated, then written.
            let trims = "--rw=randtrimwrite --offset=8m --size=4m --bs=16k";
            let [writes, trims] =
                [writes, trims].map(|how| format!("{FIO} {how} --filename={disk} --iodepth=64"));
            endless(guest, &format!("{writes} && {trims}"))
        })
        .collect::<Result<_>>()?;
    engine_dies(daemon, &mut loads)?;
    finish(guest, loads)?;
    for disk in DISKS {
        zeroes_what_it_should(guest, disk).context(disk)?;
    }
    no_complaints(guest)
}

/// Deallocates and zeroes parts of random data, and compares the whole with a file.
fn zeroes_what_it_should(guest: &Guest, disk: &str) -> Result<()> {
    let name = disk.trim_start_matches("/dev/");
    for limit in ["discard_max_bytes", "write_zeroes_max_bytes"] {
        let bytes = guest.check(&format!("cat /sys/block/{name}/queue/{limit}"), MINUTE)?;
        ensure!(bytes.trim() != "0", "{limit} is 0");
    }
    // Parts within an image's object of 4 MiB, over its end, and from 512 bytes in it.
    let zeroes = format!(
        "set -e
        dd if=/dev/urandom of=/tmp/expected bs=1M count=16
        dd if=/tmp/expected of={disk} bs=1M seek=16 oflag=direct
        zero() {{
            dd if=/dev/zero of=/tmp/expected bs=512 seek=$1 count=$2 conv=notrunc
            blkdiscard $3 -o $(((32768 + $1) * 512)) -l $(($2 * 512)) {disk}
        }}
        zero 0 8192 ''
        zero 9000 1 ''
        zero 12288 7001 ''
        zero 21001 5 --zeroout
        zero 22528 10000 --zeroout
        dd if={disk} of=/tmp/found bs=1M skip=16 count=16 iflag=direct
        cmp /tmp/expected /tmp/found"
    );
    guest.check(&zeroes, 2 * MINUTE).map(drop)
}
