//! A Linux host uses Forebay over NVMe/TCP: discovery, connect, filesystem, verified I/O,
//! deallocation, growth, reconnection. At the end its log has no complaints.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::guest::{Guest, GuestOptions, HOST_ADDRESS};
use forebay_tests::system::allocated_bytes;
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// The discovery service may list itself.
const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// The allowed host, and another.
const HOST: Host = Host {
    nqn: "nqn.2014-08.org.nvmexpress:uuid:5d3f9a52-1c7b-4a0e-9a55-6d1f0d3c2b11",
    id: "5d3f9a52-1c7b-4a0e-9a55-6d1f0d3c2b11",
};
const STRANGER: Host = Host {
    nqn: "nqn.2014-08.org.nvmexpress:uuid:0b7ad0fe-8f0c-4c43-8a0a-6a3f1f0f7e22",
    id: "0b7ad0fe-8f0c-4c43-8a0a-6a3f1f0f7e22",
};

struct Host {
    nqn: &'static str,
    id: &'static str,
}

struct Lab {
    daemon: Daemon,
    guest: Guest,
    pool_file: PathBuf,
    /// The NQN of the host's export.
    nqn: String,
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_nvme_tcp() -> Result<()> {
    let lab = step("set up", set_up)?;
    step("discovery", || discovery_shows_what_the_host_may_use(&lab))?;
    step("a stranger", || a_stranger_is_refused(&lab))?;
    lab.guest.check("dmesg --clear", MINUTE)?;

    let disk = step("connect", || connect(&lab))?;
    step("zeros", || a_new_volume_reads_as_zeros(&lab, &disk))?;
    step("verified I/O", || verified_io_on_ext4(&lab, &disk))?;
    step("fstrim", || fstrim_gives_space_back(&lab))?;
    step("growth", || growth_is_seen(&lab, &disk))?;
    step("reconnection", || data_survives_reconnection(&lab, &disk))?;
    step("pages", || every_page_and_feature_answers(&lab, &disk))?;
    step("disconnect", || disconnect(&lab))?;
    step("digests and 512-byte blocks", || {
        digests_and_small_blocks(&lab)
    })?;

    the_kernel_has_no_complaints(&lab)?;
    let Lab {
        mut daemon, guest, ..
    } = lab;
    step("power off", || guest.power_off())?;
    step("stop", || daemon.stop())
}

/// Prints the duration of a step (`--nocapture` shows it at once).
fn step<T>(name: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let result = run();
    println!("{name}: {:.1} s", start.elapsed().as_secs_f64());
    result.with_context(|| name.to_owned())
}

fn set_up() -> Result<Lab> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    let pool_file = daemon.folder().join("pool.img");
    let device = format!("file:{}", pool_file.display());
    daemon.create_pool(&["--device", &device, "--size", "2G"])?;
    for (tenant, host) in [("acme", HOST.nqn), ("other", "nqn.2026-01.test:other")] {
        let volume = format!("{tenant}/disk");
        daemon.cli(&["tenant", "create", tenant])?;
        daemon.cli(&["volume", "create", &volume, "--size", "256M"])?;
        daemon.cli(&["export", "create", &volume, "--host", host])?;
    }
    let export = daemon.cli(&["export", "show", "acme/disk"])?;
    let nqn = export["nqn"].as_str().context("an export has an NQN")?;
    Ok(Lab {
        nqn: nqn.to_owned(),
        pool_file,
        guest: Guest::boot(&GuestOptions::default())?,
        daemon,
    })
}

fn discovery_shows_what_the_host_may_use(lab: &Lab) -> Result<()> {
    lab.guest.check("modprobe nvme-tcp", MINUTE)?;
    for (host, expected) in [(HOST, lab.nqn.as_str()), (STRANGER, "")] {
        let command = format!(
            "nvme discover {} | sed -n 's/^subnqn: *//p' | grep -v '{DISCOVERY}'",
            lab.where_to(&host)
        );
        let said = lab.guest.run(&command, MINUTE)?.text;
        ensure!(
            said.trim() == expected,
            "discovery shows {said:?} to {}",
            host.nqn
        );
    }
    Ok(())
}

fn a_stranger_is_refused(lab: &Lab) -> Result<()> {
    let command = format!("nvme connect {} -n {}", lab.where_to(&STRANGER), lab.nqn);
    let output = lab.guest.run(&command, MINUTE)?;
    ensure!(output.code != 0, "a stranger could connect");
    // The kernel's message for "Connect Invalid Host".
    let log = lab.guest.check("dmesg", MINUTE)?;
    ensure!(log.contains("is not allowed, hostnqn"), "{log}");
    Ok(())
}

/// Returns the disk's name in `/dev`.
fn connect(lab: &Lab) -> Result<String> {
    let command = format!("nvme connect {} -n {}", lab.where_to(&HOST), lab.nqn);
    lab.guest.check(&command, MINUTE)?;
    let find = format!(
        "for try in $(seq 300); do
            for block in /sys/block/nvme*; do
                name=${{block##*/}}
                if [ -b \"/dev/$name\" ] && [ \"$(cat $block/device/subsysnqn)\" = '{}' ]; then
                    echo $name
                    exit 0
                fi
            done
            sleep 0.1
        done
        exit 1",
        lab.nqn
    );
    let disk = lab.guest.check(&find, MINUTE)?.trim().to_owned();

    let volume = lab.daemon.cli(&["volume", "show", "acme/disk"])?;
    for (attribute, expected) in [
        ("nguid", volume["uuid"].as_str()),
        ("uuid", volume["uuid"].as_str()),
        ("device/serial", volume["serial"].as_str()),
        ("queue/logical_block_size", Some("4096")),
    ] {
        let seen = lab
            .guest
            .check(&format!("cat /sys/block/{disk}/{attribute}"), MINUTE)?;
        ensure!(
            Some(seen.trim()) == expected,
            "{attribute} is {seen:?}, the volume says {expected:?}"
        );
    }
    wait_for_hosts(lab, &[HOST.nqn])?;
    Ok(disk)
}

fn a_new_volume_reads_as_zeros(lab: &Lab, disk: &str) -> Result<()> {
    let command =
        format!("dd if=/dev/{disk} bs=1M count=32 iflag=direct status=none | tr -d '\\0' | wc -c");
    let other_bytes = lab.guest.check(&command, MINUTE)?;
    ensure!(
        other_bytes.trim() == "0",
        "{other_bytes} bytes are no zeros"
    );
    Ok(())
}

fn verified_io_on_ext4(lab: &Lab, disk: &str) -> Result<()> {
    lab.guest
        .check(&format!("mkfs.ext4 -q /dev/{disk}"), 2 * MINUTE)?;
    lab.guest
        .check(&format!("mount -t ext4 /dev/{disk} /mnt"), MINUTE)?;
    verify(lab, "--bs=4k --direct=1 --fsync=64")?;
    verify(lab, "--bsrange=4k-256k --direct=1")?;
    // Through the page cache, with a flush at the end.
    verify(lab, "--bsrange=4k-64k --end_fsync=1")
}

/// Two jobs write their whole files and verify them.
fn verify(lab: &Lab, how: &str) -> Result<()> {
    let command = format!(
        "fio --name=verify --directory=/mnt --numjobs=2 --size=24m --rw=randwrite \
         --ioengine=libaio --iodepth=16 --verify=crc32c --do_verify=1 --verify_fatal=1 {how} \
         && rm /mnt/verify*"
    );
    lab.guest.check(&command, 5 * MINUTE).map(drop)
}

fn fstrim_gives_space_back(lab: &Lab) -> Result<()> {
    const FILE_BYTES: u64 = 96 * MIB;
    // The filesystem may keep a part, at the ends of extents.
    const BACK_BYTES: u64 = 80 * MIB;
    let write = format!(
        "dd if=/dev/urandom of=/mnt/big bs=1M count={} conv=fsync",
        FILE_BYTES / MIB
    );
    lab.guest.check(&write, 3 * MINUTE)?;
    let full_pool = used_bytes(lab)?;
    let full_file = allocated_bytes(&lab.pool_file)?;
    ensure!(full_pool >= FILE_BYTES && full_file >= FILE_BYTES);

    lab.guest
        .check("rm /mnt/big && sync && fstrim -v /mnt", 2 * MINUTE)?;
    let mut back = (0, 0);
    wait::until("the pool and its file have the space back", MINUTE, || {
        let pool = full_pool.saturating_sub(used_bytes(lab)?);
        let file = full_file.saturating_sub(allocated_bytes(&lab.pool_file)?);
        back = (pool, file);
        Ok((pool >= BACK_BYTES && file >= BACK_BYTES).then_some(()))
    })
    .with_context(|| format!("of {FILE_BYTES} bytes the pool and its file have back {back:?}"))
}

fn used_bytes(lab: &Lab) -> Result<u64> {
    let pool = lab.daemon.cli(&["pool", "show"])?;
    let bytes = |key: &str| pool[key].as_u64().with_context(|| key.to_owned());
    Ok(bytes("capacity_bytes")? - bytes("clean_bytes")?)
}

fn growth_is_seen(lab: &Lab, disk: &str) -> Result<()> {
    const GROWN_BYTES: u64 = 384 * MIB;
    let size = format!("blockdev --getsize64 /dev/{disk}");
    let before = lab.guest.check(&size, MINUTE)?;
    ensure!(before.trim() == (256 * MIB).to_string(), "{before}");
    lab.daemon
        .cli(&["volume", "resize", "acme/disk", "--size", "384M"])?;
    wait::until("the guest sees the new size", MINUTE, || {
        let now = lab.guest.check(&size, MINUTE)?;
        Ok((now.trim() == GROWN_BYTES.to_string()).then_some(()))
    })?;
    lab.guest
        .check(&format!("resize2fs /dev/{disk}"), 2 * MINUTE)?;
    let blocks = lab.guest.check("stat -f -c '%b %S' /mnt", MINUTE)?;
    let numbers: Vec<u64> = blocks.split_whitespace().flat_map(str::parse).collect();
    let [blocks, block_bytes] = numbers[..] else {
        anyhow::bail!("stat said {blocks:?}");
    };
    ensure!(blocks * block_bytes > 320 * MIB, "the filesystem is small");
    // More data fits than before, and existing data is intact.
    let fill = "dd if=/dev/urandom of=/mnt/fill bs=1M count=270 conv=fsync";
    lab.guest.check(fill, 5 * MINUTE)?;
    lab.guest.check("rm /mnt/fill", MINUTE)?;
    verify(lab, "--bs=16k --direct=1")
}

fn data_survives_reconnection(lab: &Lab, disk: &str) -> Result<()> {
    let sum = "sha256sum /mnt/kept";
    lab.guest.check(
        "dd if=/dev/urandom of=/mnt/kept bs=1M count=24 conv=fsync",
        MINUTE,
    )?;
    let before = lab.guest.check(sum, MINUTE)?;
    lab.guest.check("umount /mnt", MINUTE)?;
    disconnect(lab)?;
    let gone = lab.guest.run(&format!("[ -b /dev/{disk} ]"), MINUTE)?;
    ensure!(gone.code != 0, "the disk is still there");

    let disk = connect(lab)?;
    lab.guest
        .check(&format!("e2fsck -fn /dev/{disk}"), 2 * MINUTE)?;
    lab.guest
        .check(&format!("mount -t ext4 /dev/{disk} /mnt"), MINUTE)?;
    let after = lab.guest.check(sum, MINUTE)?;
    ensure!(before == after, "before: {before}, after: {after}");
    lab.guest.check("umount /mnt", MINUTE).map(drop)
}

/// Every log page and feature is returned or refused as unsupported.
fn every_page_and_feature_answers(lab: &Lab, disk: &str) -> Result<()> {
    let ask = format!(
        "for i in $(seq 0 255); do
            nvme get-log /dev/{disk} --log-id=$i --log-len=512 -b 2>&1 >/dev/null | sed \"s/^/log $i: /\"
            nvme get-feature /dev/{disk} --feature-id=$i 2>&1 >/dev/null | sed \"s/^/feature $i: /\"
        done | grep -vi -e 'invalid' -e 'not supported' -e 'log page' || true"
    );
    let odd = lab.guest.check(&ask, 5 * MINUTE)?;
    ensure!(odd.trim().is_empty(), "answered otherwise:\n{odd}");
    let controller = lab.guest.check("ls -d /dev/nvme[0-9]", MINUTE)?;
    for command in [
        "id-ctrl",
        "smart-log",
        "error-log",
        "fw-log",
        "ana-log",
        "effects-log",
    ] {
        let read = format!("nvme {command} {}", controller.trim());
        lab.guest.check(&read, MINUTE)?;
    }
    Ok(())
}

fn digests_and_small_blocks(lab: &Lab) -> Result<()> {
    lab.daemon.cli(&[
        "volume",
        "create",
        "acme/small",
        "--size",
        "128M",
        "--block-size",
        "512",
    ])?;
    lab.daemon
        .cli(&["export", "create", "acme/small", "--host", HOST.nqn])?;
    let export = lab.daemon.cli(&["export", "show", "acme/small"])?;
    let nqn = export["nqn"].as_str().context("an export has an NQN")?;
    let connect = format!(
        "nvme connect {} -n {nqn} --hdr-digest --data-digest",
        lab.where_to(&HOST)
    );
    lab.guest.check(&connect, MINUTE)?;
    let find =
        "for try in $(seq 300); do ls /dev/nvme*n1 2>/dev/null && exit 0; sleep 0.1; done; exit 1";
    let disk = lab.guest.check(find, MINUTE)?.trim().to_owned();
    let size = lab
        .guest
        .check(&format!("blockdev --getss {disk}"), MINUTE)?;
    ensure!(size.trim() == "512", "its blocks: {size}");
    let fio = format!(
        "fio --name=digests --filename={disk} --size=32m --rw=randwrite --bsrange=512-128k --direct=1 \
         --ioengine=libaio --iodepth=16 --verify=crc32c --do_verify=1 --verify_fatal=1"
    );
    lab.guest.check(&fio, 5 * MINUTE)?;
    lab.guest
        .check(&format!("nvme disconnect -n {nqn}"), MINUTE)
        .map(drop)
}

fn disconnect(lab: &Lab) -> Result<()> {
    let command = format!("nvme disconnect -n {}", lab.nqn);
    let said = lab.guest.check(&command, MINUTE)?;
    ensure!(said.contains("disconnected 1 controller"), "{said}");
    wait_for_hosts(lab, &[])
}

fn wait_for_hosts(lab: &Lab, hosts: &[&str]) -> Result<()> {
    wait::until("the export's list of connected hosts", MINUTE, || {
        let export = lab.daemon.cli(&["export", "show", "acme/disk"])?;
        Ok((export["connected_hosts"] == serde_json::json!(hosts)).then_some(()))
    })
}

fn the_kernel_has_no_complaints(lab: &Lab) -> Result<()> {
    // Not all warnings: on a busy node, an emulated CPU has clock warnings.
    const SUBJECTS: [&str; 8] = [
        "nvme", "block", "EXT4", "JBD2", "I/O", "BUG", "WARNING", "hung",
    ];
    let log = lab
        .guest
        .check("dmesg --level=emerg,alert,crit,err,warn", MINUTE)?;
    let ours = |line: &&str| SUBJECTS.iter().any(|subject| line.contains(subject));
    let complaints: Vec<&str> = log.lines().filter(ours).collect();
    ensure!(
        complaints.is_empty(),
        "the guest's kernel says:\n{}",
        complaints.join("\n")
    );
    Ok(())
}

impl Lab {
    fn where_to(&self, host: &Host) -> String {
        format!(
            "-t tcp -a {HOST_ADDRESS} -s {} --hostnqn={} --hostid={}",
            self.daemon.port(),
            host.nqn,
            host.id
        )
    }
}
