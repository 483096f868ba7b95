//! The health of drives below a pool's devices, with QEMU's NVMe and SATA drives.
//!
//! Forebay runs inside a guest. One device is a namespace, whose drive has a critical warning; one
//! is a file on a SATA disk's partition; one is in memory.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::target_folder;
use forebay_tests::guest::{Drive, Guest, GuestOptions, tape};
use serde_json::{Value, json};

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

const DRIVES: &str = "modprobe nvme
modprobe ahci
modprobe sd_mod
for try in $(seq 300); do [ -b /dev/nvme0n1 ] && [ -b /dev/sda1 ] && break; sleep 0.1; done
mkfs.ext4 -q /dev/sda1
mount -t ext4 /dev/sda1 /mnt";

const POOL: &str = "
fb pool create --create --size 128M --device /dev/nvme0n1 --device /mnt/pool.img --device ram:/tmp/pool.ram >&2
for try in $(seq 300); do
    fb pool show --json > pool.json
    [ $(grep -c -e '\"path\": \"/dev/' -e '\"drive_note\": \"' pool.json) = 3 ] && break
    sleep 0.1
done";

/// The shell function `fb` of [`tape::SERVE`], in another shell.
const AGAIN: &str = "cd /tmp/forebay
export LD_LIBRARY_PATH=.
fb() { ./forebay --socket api.sock \"$@\"; }
";

/// A partition table with one partition of the rest of the disk (UEFI 2.10, 5.2.1).
fn partition_table(bytes: u64) -> Result<Vec<u8>> {
    const FIRST: u32 = 2048;
    let mut sector = vec![0; 512];
    let linux = 0x83;
    sector[450] = linux;
    sector[454..458].copy_from_slice(&FIRST.to_le_bytes());
    let blocks = u32::try_from(bytes / 512)? - FIRST;
    sector[458..462].copy_from_slice(&blocks.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xAA]);
    Ok(sector)
}

/// Compares the named members only.
fn has(found: &Value, wanted: &Value) -> Result<()> {
    for (name, value) in wanted.as_object().context("an object")? {
        ensure!(found[name] == *value, "{name} is not {value}: {found:#}");
    }
    Ok(())
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_drive_health() -> Result<()> {
    let parent = target_folder().join("tmp");
    std::fs::create_dir_all(&parent)?;
    let folder = tempfile::tempdir_in(parent)?;
    let [nvme, sata, program] = ["nvme", "sata", "tape"].map(|name| folder.path().join(name));
    std::fs::File::create(&nvme)?.set_len(256 * MIB)?;
    std::fs::write(&sata, partition_table(256 * MIB)?)?;
    std::fs::File::options()
        .write(true)
        .open(&sata)?
        .set_len(256 * MIB)?;
    tape::write(&program, None)?;
    let guest = Guest::boot(&GuestOptions {
        memory_mib: 1280,
        drives: vec![
            // Bit 2: its reliability is degraded.
            Drive::OddNvme(nvme, "smart_critical_warning=4", "logical_block_size=512"),
            Drive::Sata(sata),
            Drive::Tape(program),
        ],
        ..GuestOptions::default()
    })?;
    let inside = |script: &str| {
        let said = guest.check(&format!("set -e\n{script}"), 2 * MINUTE);
        said.map_err(|error| {
            let log = guest.run("tail -n 40 /tmp/forebay/serve.log; dmesg | tail", MINUTE);
            error.context(log.map(|log| log.text).unwrap_or_default())
        })
    };
    inside(&[tape::UNPACK, DRIVES, tape::SERVE, POOL].concat())?;
    let pool: Value = serde_json::from_str(&inside("cat /tmp/forebay/pool.json")?)?;
    let drive = |device: usize| &pool["devices"][device]["drive"];
    let warning = "is degraded in its reliability, by media errors or internal errors";
    has(
        drive(0),
        &json!({
            "path": "/dev/nvme0n1",
            "source": "nvme",
            "model": "QEMU NVMe Ctrl",
            "serial": "emulated0",
            "critical_warning": 4,
            "warnings": [warning],
            "temperature_c": 50,
            "spare_percent": 0,
            "media_errors": 0,
            "pending_sectors": null,
        }),
    )?;
    has(
        drive(1),
        &json!({
            "path": "/dev/sda",
            "source": "ata",
            "model": "QEMU HARDDISK",
            "serial": "emulated1",
            "warnings": [],
            "temperature_c": 31,
            "spare_percent": null,
            "power_on_hours": 1,
            "reallocated_sectors": 0,
        }),
    )?;
    let note = "it lies in a file system without a block device of its own";
    has(
        &pool["devices"][2],
        &json!({ "drive": null, "drive_note": note }),
    )?;

    let status: Value = serde_json::from_str(&inside(&format!("{AGAIN}fb status --json"))?)?;
    let text =
        format!("the drive /dev/nvme0n1 (QEMU NVMe Ctrl, serial number emulated0) {warning}");
    let text = format!("device block:/dev/nvme0n1: {text}");
    let warnings = status["warnings"].as_array().context("warnings")?;
    let is_it = |warning: &Value| warning.as_str().is_some_and(|said| said.starts_with(&text));
    ensure!(
        warnings.iter().filter(|warning| is_it(warning)).count() == 1,
        "{status:#}"
    );
    let events = inside(&format!("{AGAIN}fb events --json --after 0"))?;
    ensure!(events.matches(&text).count() == 1, "{events}");
    let shown = inside(&format!("{AGAIN}fb pool show"))?;
    ensure!(
        shown.contains("QEMU HARDDISK") && shown.contains("50 C"),
        "{shown}"
    );
    println!("{shown}");

    // The same out of band.
    let devices = inside(&format!("{AGAIN}fb mi --line mctp.sock --json devices"))?;
    let devices: Value = serde_json::from_str(&devices)?;
    has(
        &devices[0]["drive"],
        &json!({
            "model": "QEMU NVMe Ctrl",
            "serial": "emulated0",
            "critical_warning": 4,
            "temperature_c": 50,
            "spare_percent": 0,
            "media_errors": 0,
        }),
    )?;
    has(
        &devices[1]["drive"],
        &json!({
            "model": "QEMU HARDDISK",
            "temperature_c": 31,
            "spare_percent": null,
            "power_on_hours": 1,
        }),
    )?;
    has(&devices[2], &json!({ "drive": null, "state": "online" }))?;
    let node = inside(&format!("{AGAIN}fb mi --line mctp.sock --json show"))?;
    has(
        &serde_json::from_str(&node)?,
        &json!({ "critical_warning": 4, "temperature_c": 50 }),
    )?;
    guest.power_off()
}
