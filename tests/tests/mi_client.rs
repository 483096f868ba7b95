//! `forebay mi`, and through it the vendor log pages and commands.

use anyhow::{Context, Result, ensure};
use forebay_initiator::mi::MiError;
use forebay_nvme::mi::MiStatus;
use forebay_nvme::mi::vendor::{self, NamespaceBudget};
use forebay_nvme::opcode::admin;
use forebay_nvme::{NSID_ALL, Status};
use forebay_tests::daemon::Daemon;
use forebay_tests::out_of_band::{ALL_RIGHTS, client, command, daemon, socket};
use serde_json::Value;
use zerocopy::IntoBytes;

const FUNCTIONS: &str = "tenant = \"bmc\"\n[[out_of_band.function]]\nany_host = true\n";

fn mi(daemon: &Daemon, args: &[&str]) -> Result<Value> {
    let line = socket(daemon).display().to_string();
    let mut all = vec!["mi", "--line", &line];
    all.extend(args);
    daemon.cli(&all)
}

#[test]
fn a_node_is_managed_with_the_own_client() -> Result<()> {
    let daemon = daemon(ALL_RIGHTS, FUNCTIONS)?;
    let shown = mi(&daemon, &["show"])?;
    ensure!(
        shown["functional"] == true && shown["critical_warning"] == 0,
        "{shown}"
    );
    ensure!(shown["controllers"] == serde_json::json!([0, 1]), "{shown}");
    mi(&daemon, &["set-eid", "77"])?;
    ensure!(mi(&daemon, &["show"])?["eid"] == 77);
    mi(&daemon, &["create", "--size", "16M"])?;
    let namespaces = mi(&daemon, &["namespaces"])?;
    let nsid = namespaces[0]["nsid"]
        .as_u64()
        .context("an NSID")?
        .to_string();
    let volume = format!("bmc/ns-{nsid}");
    ensure!(namespaces[0]["size_bytes"] == 16 << 20, "{namespaces}");
    ensure!(namespaces[0]["uuid"] == daemon.cli(&["volume", "show", &volume])?["uuid"]);
    mi(&daemon, &["attach", &nsid, "1"])?;
    ensure!(mi(&daemon, &["namespaces"])?[0]["controllers"] == serde_json::json!([1]));
    let statistics = mi(&daemon, &["statistics", &nsid])?;
    ensure!(
        statistics["exports"] == 1 && statistics["read"]["errors"] == 0,
        "{statistics}"
    );

    let limits = ["--burst-iops", "5000", "--burst-bandwidth", "100M"];
    let budget = mi(&daemon, &[&["budget", &nsid], &limits[..]].concat())?;
    ensure!(
        budget["burst_iops"] == 5000 && budget["base_iops"].is_null(),
        "{budget}"
    );
    let shown = daemon.cli(&["volume", "show", &volume])?;
    ensure!(shown["budget"]["burst"]["iops"] == 5000, "{shown}");
    // A base needs a tenant's.
    ensure!(mi(&daemon, &["budget", &nsid, "--base-iops", "100"]).is_err());
    daemon.cli(&["tenant", "budget", "bmc", "--base-iops", "1000"])?;
    let budget = mi(&daemon, &["budget", &nsid, "--base-iops", "100"])?;
    ensure!(
        budget["base_iops"] == 100 && budget["burst_iops"].is_null(),
        "{budget}"
    );
    mi(&daemon, &["budget", &nsid, "--none"])?;
    ensure!(daemon.cli(&["volume", "show", &volume])?["budget"].is_null());

    let second = daemon.folder().join("second.img");
    std::fs::File::create(&second)?.set_len(128 << 20)?;
    let spec = format!("file:{}", second.display());
    mi(&daemon, &["add-device", &spec])?;
    let devices = mi(&daemon, &["devices"])?;
    let added = devices.as_array().is_some_and(|devices| devices.len() == 2);
    ensure!(
        added && devices[1]["spec"] == spec && devices[1]["state"] == "online",
        "{devices}"
    );
    // It holds a pool's data now.
    ensure!(mi(&daemon, &["add-device", &spec]).is_err());

    mi(&daemon, &["--yes", "format", &nsid])?;
    mi(&daemon, &["detach", &nsid, "1"])?;
    mi(&daemon, &["--yes", "delete", &nsid])?;
    ensure!(mi(&daemon, &["namespaces"])? == serde_json::json!([]));
    let text = String::from_utf8(daemon.cli_command(&["events", "--audit"]).output()?.stdout)?;
    for command in ["Set Namespace Budget", "Add Device", "Format NVM"] {
        ensure!(text.contains(command), "{text}");
    }
    Ok(())
}

#[test]
fn vendor_commands_are_checked() -> Result<()> {
    let daemon = daemon("\"namespaces\"", FUNCTIONS)?;
    let mut client = client(&daemon)?;
    let budget = NamespaceBudget::none();
    let set = |nsid| command(vendor::SET_NAMESPACE_BUDGET, nsid, 0, 0);
    let add = command(vendor::ADD_DEVICE, 0, 0, 0);
    for (sqe, data) in [(set(1), budget.as_bytes()), (add, &[b'/'; 512][..])] {
        let refused = client.admin_write(0, sqe, data);
        let is_denied = |error: &MiError| {
            matches!(
                error,
                MiError::Refused(forebay_nvme::mi::MiRefusal::Status(MiStatus::ACCESS_DENIED))
            )
        };
        ensure!(refused.as_ref().is_err_and(is_denied), "{refused:?}");
    }
    drop(daemon);
    let daemon = forebay_tests::out_of_band::daemon(ALL_RIGHTS, FUNCTIONS)?;
    let mut client = forebay_tests::out_of_band::client(&daemon)?;
    let nsid = forebay_tests::out_of_band::create(&mut client, 4096)?;
    let mut other_version = budget;
    other_version.version = 2.into();
    let mut too_much = budget;
    too_much.burst_iops = (u64::MAX - 1).into();
    for (sqe, data) in [
        (set(nsid), other_version.as_bytes()),
        (set(nsid), too_much.as_bytes()),
        (set(nsid), &budget.as_bytes()[..60]),
        (set(NSID_ALL), budget.as_bytes()),
        (set(4711), budget.as_bytes()),
        (add, &[0; 512]),
        (add, &[0xFF; 512]),
        (add, b"/dev"),
    ] {
        ensure!(client.admin_write(0, sqe, data).is_err(), "{data:?}");
    }
    client.admin_write(0, set(nsid), budget.as_bytes())?;
    let log = |lid: u8, nsid| command(admin::GET_LOG_PAGE, nsid, u32::from(lid) | 15 << 16, 0);
    for lid in vendor::LOGS {
        let (_, page) = client.admin_read(0, log(lid, nsid), 64)?;
        ensure!(page[..2] == [1, 0], "{lid:#x}: {page:?}");
    }
    for lid in [
        vendor::LOG_NAMESPACE_STATISTICS,
        vendor::LOG_NAMESPACE_BUDGET,
    ] {
        for nsid in [0, NSID_ALL, 4711] {
            let failed = client.admin_read(0, log(lid, nsid), 64);
            let is_namespace = |error: &MiError| matches!(error, MiError::Failed(status) if status.code() == Status::INVALID_NAMESPACE_OR_FORMAT);
            ensure!(
                failed.as_ref().is_err_and(is_namespace),
                "{lid:#x} {nsid}: {failed:?}"
            );
        }
    }
    // An offset behind the page.
    let mut beyond = log(vendor::LOG_DEVICE_HEALTH, 0);
    beyond.cdw10_15[2] = (1 << 20).into();
    ensure!(client.admin_read(0, beyond, 64).is_err());
    Ok(())
}
