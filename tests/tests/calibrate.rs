//! `forebay calibrate` measures plausible costs over every frontend, stores them, and leaves
//! nothing else.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::wait;
use serde_json::Value;

#[test]
fn calibrate_stores_costs_and_leaves_nothing() -> Result<()> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "1G"])?;
    let before = daemon.cli(&["scheduling", "costs"])?;
    assert_eq!(before["calibrated"], false, "{before}");
    // The tenant's name is reserved, because each run deletes leftovers.
    let refused = daemon.cli(&["tenant", "create", "forebay-calibrate"]);
    let refused = refused.err().context("it is kept for calibrate")?;
    anyhow::ensure!(
        format!("{refused:#}").contains("is reserved for"),
        "{refused:#}"
    );
    let mut killed = daemon
        .cli_command(&["calibrate"])
        .stdout(Stdio::null())
        .spawn()?;
    let exports = || daemon.cli(&["export", "list"]);
    wait::until("it has exports", Duration::from_secs(20), || {
        Ok((exports()? != serde_json::json!([])).then_some(()))
    })?;
    killed.kill()?;
    killed.wait()?;

    let said = daemon.cli(&["calibrate", "--quick", "--dry-run"])?;
    assert_eq!(said["stored"], false, "{said}");
    assert_eq!(daemon.cli(&["scheduling", "costs"])?, before);
    let said = daemon.cli(&["calibrate", "--quick"])?;
    assert_eq!(said["left_out"], serde_json::json!([]), "{said}");
    let costs = daemon.cli(&["scheduling", "costs"])?;
    assert_eq!(costs["calibrated"], true, "{costs}");
    let profiles = costs["profiles"].as_array().context("profiles")?;
    assert_eq!(profiles.len(), 9, "{costs}");
    for profile in profiles {
        for (what, least) in [("cpu_ns", 1.0), ("device_ns", 1.0)] {
            let times: Vec<f64> = (profile[what].as_array().context("times")?.iter())
                .filter_map(Value::as_f64)
                .collect();
            assert_eq!(times.len(), 6, "{profile}");
            assert!(times.is_sorted(), "{profile}");
            // Plausible on any node.
            assert!(times[0] >= least && times[5] < 1e10, "{profile}");
        }
    }
    let tenants = daemon.cli(&["tenant", "list"])?;
    assert_eq!(tenants, serde_json::json!([]), "nothing is left");
    let exports = daemon.cli(&["export", "list"])?;
    assert_eq!(exports, serde_json::json!([]));
    Ok(())
}

/// Budgets must not affect the measurement.
#[test]
fn calibrate_is_not_scheduled_itself() -> Result<()> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "1G"])?;
    daemon.cli(&["tenant", "create", "acme"])?;
    daemon.cli(&["tenant", "budget", "acme", "--base-iops", "1000"])?;
    let begun = Instant::now();
    let said = daemon.cli(&["calibrate", "--quick"])?;
    assert_eq!(said["left_out"], serde_json::json!([]), "{said}");
    // With a default budget, ten commands per second, each load takes seconds.
    assert!(begun.elapsed() < Duration::from_secs(60));
    for cost in said["costs"].as_array().context("costs")? {
        let device_ns = cost["device_ns"][0].as_f64().context("a time")?;
        assert!(device_ns < 1e7, "{cost}");
    }
    let costs = daemon.cli(&["scheduling", "costs"])?;
    let note = costs["note"].as_str().context("a note")?;
    let at_least = said["device_at_least"].as_array().context("a list")?;
    assert_eq!(
        note.contains("the device was not saturated: at least"),
        !at_least.is_empty(),
        "{note}"
    );
    // After the run, budgets apply again, and the name is still reserved.
    let refused = daemon.cli(&["tenant", "create", "forebay-calibrate"]);
    assert!(refused.is_err());
    Ok(())
}
