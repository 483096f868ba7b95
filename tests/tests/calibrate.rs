//! `forebay calibrate` on a small pool: costs are measured over every frontend, stored, and nothing else is left of it.
//!
//! Not here: what the figures are; only that they can be costs at all.

use anyhow::{Context, Result};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use serde_json::Value;

#[test]
fn calibrate_stores_costs_and_leaves_nothing() -> Result<()> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "1G"])?;
    let before = daemon.cli(&["scheduling", "costs"])?;
    assert_eq!(before["calibrated"], false, "{before}");
    // What a run left that was killed: its process is no more.
    daemon.cli(&["tenant", "create", "forebay-calibrate"])?;
    let left = "forebay-calibrate/p999999999-nvme-tcp";
    daemon.cli(&["volume", "create", left, "--size", "64M"])?;
    daemon.cli(&["export", "create", left, "--any-host"])?;

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
            // Whatever the machine: not nothing, and not ten seconds.
            assert!(times[0] >= least && times[5] < 1e10, "{profile}");
        }
    }
    let tenants = daemon.cli(&["tenant", "list"])?;
    assert_eq!(tenants, serde_json::json!([]), "nothing is left");
    let exports = daemon.cli(&["export", "list"])?;
    assert_eq!(exports, serde_json::json!([]));
    Ok(())
}
