//! State that an earlier version left is read: pool, settings, budgets, records.
//!
//! `tests/fixtures/state-2026-11.tar.gz` is the folder `var` of a daemon of November 2026 (commit
//! 78822259) in `/tmp/fx`, after `forebay shutdown`. Byte `i` of its volume `t/v` is
//! `i / 512 mod 251`.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use forebay_initiator::{IoOp, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};

const LIMIT: Duration = Duration::from_secs(60);
const HOST: &str = "nqn.2026-01.test:host";

#[test]
fn state_of_an_earlier_version_is_read() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    daemon.stop()?;
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/state-2026-11.tar.gz");
    let unpacked = Command::new("tar")
        .arg("-xzf")
        .arg(fixture)
        .arg("-C")
        .arg(daemon.folder())
        .status()?;
    ensure!(unpacked.success());
    let devices = daemon.folder().join("var/state/devices.json");
    let here = daemon.folder().display().to_string();
    fs::write(
        &devices,
        fs::read_to_string(&devices)?.replace("/tmp/fx", &here),
    )?;
    daemon.start_again()?;
    daemon.wait_engine_after(0, LIMIT)?;

    let pool = daemon.cli(&["pool", "show"])?.to_string();
    ensure!(pool.contains("\"warn_percent\":77"), "{pool}");
    let tenants = daemon.cli(&["tenant", "list"])?.to_string();
    for part in ["\"iops\":50", "\"bytes_s\":204800", "\"iops\":5000"] {
        ensure!(tenants.contains(part), "{tenants}");
    }
    let volumes = daemon.cli(&["volume", "list"])?.to_string();
    ensure!(volumes.contains("\"reserved_bytes\":2097152"), "{volumes}");
    let exports = daemon.cli(&["export", "list"])?.to_string();
    ensure!(exports.contains("vhost_user"), "{exports}");
    let scheduling = daemon.cli(&["scheduling", "show"])?.to_string();
    ensure!(scheduling.contains("\"keep\":0.25"), "{scheduling}");
    let changes = daemon.cli_text(&["events", "--audit"])?;
    ensure!(changes.contains("make a volume"), "{changes}");

    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = "nqn.2026-01.io.forebay:test:t.v";
    let mut session = Session::connect(address, nqn, HOST, &Options::default())?;
    let read = IoOp::Read { lba: 0, blocks: 16 };
    let found = session
        .open_queue(1)?
        .execute(&read, vec![0; 65536], LIMIT)?;
    let written: Vec<u8> = (0..65536).map(|at| (at / 512 % 251) as u8).collect();
    ensure!(found == written);
    session.close()?;
    daemon.pool_check()?;
    daemon.stop()
}
