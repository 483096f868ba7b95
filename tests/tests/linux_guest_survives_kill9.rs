//! A stock Linux host does not notice that the engine died, twenty times.
//!
//! Purpose: the take-over's promise to the one that matters: no I/O error, no reconnection, not a line in its log.
//! Design: one guest, fio writing at random and verifying as it goes, and once more over everything at the end.
//! Not here: what else a guest does (`linux_guest_nvme_tcp.rs`).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::DaemonOptions;
use forebay_tests::guest::{self, Guest, GuestOptions};
use forebay_tests::host::Dice;
use forebay_tests::lab;

const MINUTE: Duration = Duration::from_secs(60);
/// fio writes for so long.
const SECONDS: u64 = 40;

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_survives_kill9() -> Result<()> {
    let kills = lab::count_from("FOREBAY_GUEST_KILLS", 20);
    let mut daemon = guest::serve_disk(&DaemonOptions::default(), "2G", "256M")?;
    let guest = Guest::boot(&GuestOptions::default())?;
    guest.connect(daemon.port(), "")?;
    let disk = guest.wait_disk()?;
    guest.check("dmesg --clear", MINUTE)?;
    let fio = format!(
        "fio --name=verify --filename={disk} --size=96m --rw=randwrite --bsrange=4k-64k --direct=1 \
         --ioengine=libaio --iodepth=16 --verify=crc32c --verify_backlog=128 --verify_fatal=1 \
         --fsync=200 --time_based --runtime={SECONDS}"
    );
    let load = guest.spawn(&fio)?;
    let mut dice = Dice(1);
    for _ in 0..kills {
        std::thread::sleep(Duration::from_millis(300 + dice.below(1000)));
        let dead = daemon.kill_engine()?;
        daemon.wait_engine_after(dead.generation, MINUTE)?;
    }
    ensure!(!load.has_ended(), "fio ended before the last death");
    let output = load.wait(5 * MINUTE)?;
    ensure!(output.code == 0, "fio: {}", output.text);
    // Whatever the level: "reconnecting" is information to the kernel.
    let log = guest.check("dmesg", MINUTE)?;
    let ours = |line: &&str| {
        ["nvme", "I/O", "block", "hung"]
            .iter()
            .any(|s| line.contains(s))
    };
    let said: Vec<&str> = log.lines().filter(ours).collect();
    ensure!(said.is_empty(), "the kernel says:\n{}", said.join("\n"));
    let takeover = daemon.cli(&["stats"])?["takeover"].clone();
    ensure!(takeover["takeovers"] == kills, "{takeover}");
    guest
        .check("nvme disconnect-all", MINUTE)
        .context("disconnecting")?;
    guest.power_off()?;
    daemon.pool_check()?;
    daemon.stop()
}
