//! Native NVMe commands on a pool's NVMe drive bypass the kernel's block layer.
//!
//! Forebay runs inside a guest with QEMU's drives; program and test enter it as a tape. The
//! kernel's read counter omits NVMe commands by io_uring, so it stays low. The test also runs the
//! device suite on a drive with 4-KiB blocks and 128-KiB transfers. A drive with metadata is not
//! used natively. Then engines are killed under load.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_device::conformance::{Driver, Subject, run};
use forebay_device::{Device, OpenOptions};
use forebay_tests::daemon::target_folder;
use forebay_tests::guest::{Drive, Guest, GuestOptions, tape};

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// Set inside the guest: the drive to test, and whether it should be native.
const INSIDE: &str = "FOREBAY_TEST_NATIVE_INSIDE";

/// `disk NUMBER`: that drive; `tcp_disk`: Forebay's disk; `shown COMMAND`: waits until it names a
/// disk.
const DISKS: &str = "set -e
disk() {
    for controller in /sys/class/nvme/*; do
        [ \"$(tr -d ' ' < $controller/serial)\" = emulated$1 ] && echo /dev/${controller##*/}n1 && return
    done
    return 1
}
tcp_disk() {
    for controller in /sys/class/nvme/*; do
        [ \"$(cat $controller/transport)\" = tcp ] && echo /dev/${controller##*/}n1 && return
    done
    return 1
}
shown() {
    for try in $(seq 300); do
        name=$(\"$@\") && [ -b \"$name\" ] && echo $name && return
        sleep 0.1
    done
    return 1
}
export LD_LIBRARY_PATH=/tmp/forebay
";

const NVME: &str = "modprobe nvme
drive=$(shown disk 0)
generic=$(echo $drive | sed s/nvme/ng/)
for try in $(seq 300); do [ -c $generic ] && break; sleep 0.1; done
[ -c $generic ]";

const EXPORT: &str = "fb pool create --device $drive
fb tenant create t
fb volume create t/disk --size 64M
fb export create t/disk --any-host
modprobe nvme-tcp
nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn.2026-01.io.forebay:test:t.disk --nr-io-queues 1";

const LOAD: &str = "disk=$(shown tcp_disk)
fio --name=verify --filename=$disk --size=48m --bsrange=4k-256k --rw=write --ioengine=libaio --direct=1 \\
    --iodepth=8 --verify=crc32c --do_verify=1 --verify_fatal=1
blkdiscard -f $disk
cmp -n 50331648 $disk /dev/zero";

const JUDGE: &str = "cd /tmp/forebay
suite() {
    drive=$(shown disk $1)
    FOREBAY_TEST_NATIVE_INSIDE=\"$drive $2\" ./suite --ignored --exact linux_guest_native_nvme --nocapture
}
suite 2 natively
suite 3 usually";

const KILLS: &str = "cd /tmp/forebay
disk=$(shown tcp_disk)
engine() {
    for process in /proc/[0-9]*; do
        case \"$(tr '\\0' ' ' < $process/cmdline 2> /dev/null)\" in
            /tmp/forebay/forebay\\ engine*|./forebay\\ engine*) echo ${process#/proc/} ;;
        esac
    done
}
fio --name=verify --filename=$disk --size=16m --bsrange=4k-64k --rw=randwrite --ioengine=libaio --direct=1 \\
    --iodepth=8 --rate_iops=60 --verify=crc32c --do_verify=1 --verify_fatal=1 > fio.log 2>&1 &
fio=$!
for kill in 1 2 3; do
    old=$(engine)
    [ -n \"$old\" ]
    kill -9 $old
    new=
    for try in $(seq 600); do
        new=$(engine)
        [ -n \"$new\" ] && [ \"$new\" != \"$old\" ] && break
        sleep 0.1
    done
    [ -n \"$new\" ] && [ \"$new\" != \"$old\" ]
    # It serves, and its fence has passed.
    dd if=$disk of=/dev/null bs=1M count=16 iflag=direct
done
wait $fio || { cat fio.log; exit 1; }";

/// Inside the guest: tests a drive.
fn judge(what: &str) {
    let (path, way) = what.split_once(' ').expect("a drive, and how it is asked");
    let spec = path.parse().expect("a device");
    let open = || Device::open(&spec, &OpenOptions::default()).expect("opens");
    let natively = way == "natively";
    assert_eq!(open().is_native(), natively, "{:?}", open().info());
    if natively {
        run(&Subject {
            open: &open,
            from_bytes: 0,
            keeps: true,
        });
    }
    let (device, mut driver) = (open(), Driver::new());
    let bytes: Vec<u8> = (0..128 << 10).map(|at| (at / 512) as u8).collect();
    driver.write(&device, 0, &bytes);
    assert!(driver.read(&device, 0, bytes.len()) == bytes);
    assert_eq!(device.native_commands(), if natively { 2 } else { 0 });
    println!("{:?}: asked {way}, as it is to be", device.info());
}

/// Bytes read through the block layer. Writes are no measure, because zeroing counts.
fn counted(guest: &Guest) -> Result<u64> {
    let stat = inside(guest, "cat /sys/block/$(basename $(disk 0))/stat")?;
    // Documentation/block/stat.rst: the third number is sectors of 512 bytes.
    let sectors = stat.split_whitespace().nth(2).context("numbers")?;
    Ok(sectors.parse::<u64>()? * 512)
}

fn inside(guest: &Guest, script: &str) -> Result<String> {
    guest.check(&format!("{DISKS}{script}"), 5 * MINUTE)
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_native_nvme() -> Result<()> {
    if let Ok(what) = std::env::var(INSIDE) {
        judge(&what);
        return Ok(());
    }
    let parent = target_folder().join("tmp");
    std::fs::create_dir_all(&parent)?;
    let folder = tempfile::tempdir_in(parent)?;
    let (drive, tape) = (folder.path().join("drive"), folder.path().join("tape"));
    let (blocks, metadata) = (folder.path().join("blocks"), folder.path().join("metadata"));
    for (file, bytes) in [(&drive, 512), (&blocks, 16), (&metadata, 16)] {
        std::fs::File::create(file)?.set_len(bytes * MIB)?;
    }
    let suite = std::env::current_exe()?;
    tape::write(&tape, Some(&suite))?;
    let guest = Guest::boot(&GuestOptions {
        memory_mib: 1280,
        drives: vec![
            Drive::Nvme(drive),
            Drive::Tape(tape),
            Drive::OddNvme(
                blocks,
                "mdts=5",
                "logical_block_size=4096,physical_block_size=4096",
            ),
            Drive::OddNvme(metadata, "mdts=7", "ms=8,pi=1"),
        ],
        ..GuestOptions::default()
    })?;
    let log = |error: anyhow::Error| {
        let said = guest.run("tail -n 40 /tmp/forebay/serve.log", MINUTE);
        error.context(said.map(|said| said.text).unwrap_or_default())
    };
    let serve = [tape::UNPACK, NVME, tape::SERVE, EXPORT].concat();
    inside(&guest, &serve).map_err(log)?;
    let before = counted(&guest)?;
    inside(&guest, LOAD).map_err(log)?;
    let after = counted(&guest)?;
    println!(
        "of 48 MiB, {} bytes were read through the block layer",
        after - before
    );
    ensure!(after - before < 8 * MIB, "it was not asked natively");
    println!("{}", inside(&guest, JUDGE)?);
    inside(&guest, KILLS).map_err(log)?;
    guest.power_off()
}
