//! A Linux host with verified load does not notice twenty deaths of the engine: no I/O error, no
//! reconnection, no log line.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::DaemonOptions;
use forebay_tests::guest::{self, Guest, GuestOptions};
use forebay_tests::host::Dice;
use forebay_tests::lab;
use forebay_tests::vm;
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);

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
        "fio --name=verify --filename={disk} --size=24m --rw=randwrite --bsrange=4k-64k --direct=1 \
         --ioengine=libaio --iodepth=16 --verify=crc32c --verify_backlog=128 --do_verify=1 \
         --verify_fatal=1 --fsync=200"
    );
    let load = guest.spawn(&format!(
        "while [ ! -e /tmp/stop ]; do {fio} || exit 1; done"
    ))?;
    let writes = || -> Result<u64> {
        let lane = vm::lane(&daemon)?;
        lane["write"]["ops"].as_u64().context("no writes counted")
    };
    let more_writes = |what: &str| -> Result<()> {
        let before = writes()?;
        wait::until(what, 2 * MINUTE, || {
            ensure!(!load.has_ended(), "fio ended instead of {what}");
            Ok((writes()? > before + 20).then_some(()))
        })
    };
    let mut dice = Dice::with_seed(1);
    for death in 1..=kills {
        more_writes(&format!("writes before death {death}"))?;
        std::thread::sleep(Duration::from_millis(dice.u64(..800)));
        let dead = daemon.kill_engine()?;
        daemon.wait_engine_after(dead.generation, MINUTE)?;
    }
    more_writes("writes after the last death")?;
    guest.check("touch /tmp/stop", MINUTE)?;
    let output = load.wait(5 * MINUTE)?;
    ensure!(output.code == 0, "fio: {}", output.text);
    // All levels, because the kernel logs "reconnecting" as information.
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
