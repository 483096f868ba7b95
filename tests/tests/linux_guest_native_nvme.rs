//! A device that is an NVMe namespace is asked in NVMe's own language.
//!
//! Purpose: where the pool lies on a drive of a stock kernel's NVMe driver, reads and writes go past its block layer.
//! Design: Forebay runs inside of a guest whose drive QEMU emulates, and serves a volume of it to that same guest. The
//! kernel counts what is read through the block layer, and doesn't count NVMe commands by io_uring: so after verified
//! I/O of many MiB its counter shows little. The program comes into the guest as a tape.
//! Not here: how fast that is.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::{program, target_folder};
use forebay_tests::guest::{Drive, Guest, GuestOptions};

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// The program's own library, which the guest may not have.
const LIBRARY: &str = "libgcc_s.so.1";

const SERVE: &str = "set -e
modprobe virtio_blk
for try in $(seq 300); do [ -b /dev/vda ] && break; sleep 0.1; done
mkdir /tmp/forebay
tar xf /dev/vda -C /tmp/forebay
cd /tmp/forebay
modprobe nvme
for try in $(seq 300); do [ -c /dev/ng0n1 ] && break; sleep 0.1; done
[ -b /dev/nvme0n1 ] && [ -c /dev/ng0n1 ]
printf '[listen]\nnvme_tcp = [\"127.0.0.1:4420\"]\napi = \"api.sock\"\n' > forebay.toml
export LD_LIBRARY_PATH=/tmp/forebay
./forebay serve --config /tmp/forebay/forebay.toml > serve.log 2>&1 < /dev/null &
for try in $(seq 1200); do [ -S api.sock ] && break; sleep 0.1; done
fb() { ./forebay --socket /tmp/forebay/api.sock \"$@\"; }
fb pool create --device /dev/nvme0n1
fb tenant create t
fb volume create t/disk --size 64M
fb export create t/disk --any-host
modprobe nvme-tcp
nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn.2026-01.io.forebay:t.disk --nr-io-queues 1";

const LOAD: &str = "set -e
for try in $(seq 300); do [ -b /dev/nvme1n1 ] && break; sleep 0.1; done
fio --name=verify --filename=/dev/nvme1n1 --size=48m --bsrange=4k-256k --rw=write --ioengine=libaio --direct=1 \\
    --iodepth=8 --verify=crc32c --do_verify=1 --verify_fatal=1
blkdiscard -f /dev/nvme1n1
cmp -n 50331648 /dev/nvme1n1 /dev/zero";

/// Bytes read through the block layer. (What is written is no measure: zeroing counts.)
fn counted(guest: &Guest) -> Result<u64> {
    let stat = guest.check("cat /sys/block/nvme0n1/stat", MINUTE)?;
    // Documentation/block/stat.rst: the third number is sectors of 512 bytes.
    let sectors = stat.split_whitespace().nth(2).context("numbers")?;
    Ok(sectors.parse::<u64>()? * 512)
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_native_nvme() -> Result<()> {
    let parent = target_folder().join("tmp");
    std::fs::create_dir_all(&parent)?;
    let folder = tempfile::tempdir_in(parent)?;
    let (drive, tape) = (folder.path().join("drive"), folder.path().join("tape"));
    std::fs::File::create(&drive)?.set_len(512 * MIB)?;
    let program = program();
    let from = program.parent().context("a folder")?;
    let made = Command::new("tar")
        .arg("cf")
        .arg(&tape)
        .arg("-C")
        .arg(from)
        .arg(program.file_name().context("a name")?)
        .args(["-C", "/lib/x86_64-linux-gnu", "--dereference", LIBRARY])
        .status()?;
    ensure!(made.success(), "no tape");
    let guest = Guest::boot(&GuestOptions {
        memory_mib: 1280,
        drives: vec![Drive::Nvme(drive), Drive::Tape(tape)],
        ..GuestOptions::default()
    })?;
    let log = |error: anyhow::Error| {
        let said = guest.run("tail -n 40 /tmp/forebay/serve.log", MINUTE);
        error.context(said.map(|said| said.text).unwrap_or_default())
    };
    guest.check(SERVE, 5 * MINUTE).map_err(log)?;
    let before = counted(&guest)?;
    guest.check(LOAD, 5 * MINUTE).map_err(log)?;
    let after = counted(&guest)?;
    println!(
        "of 48 MiB, {} bytes were read through the block layer",
        after - before
    );
    ensure!(after - before < 8 * MIB, "it was not asked natively");
    guest.power_off()
}
