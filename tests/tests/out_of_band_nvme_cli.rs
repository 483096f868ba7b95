//! The out-of-band endpoint with Debian's unmodified `nvme-cli`.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use forebay_nvme::mi::vendor::{LOG_NAMESPACE_BUDGET, NamespaceBudget, SET_NAMESPACE_BUDGET};
use forebay_tests::book::{self, Place};
use forebay_tests::daemon::{self, Daemon};
use forebay_tests::mctp::Peer;
use forebay_tests::nvme_cli::{NvmeCli, Version};
use forebay_tests::out_of_band;
use serde_json::{Value, json};
use zerocopy::IntoBytes;

const EID: u8 = 9;
/// Set Endpoint ID (DSP0236, 12.3).
const SET_EID: u8 = 1;
/// Of Identify Controller, an Administrative controller.
const ADMINISTRATIVE: u64 = 3;
/// The key that signs firmware, in the daemon's folder.
const KEY: &str = "key";
/// The version of an image.
const IMAGE_VERSION: &str = "9.8.7";
const LIMIT: Duration = Duration::from_secs(60);
const HOST: &str = "nqn.2026-01.test:host";

/// A daemon with an endpoint and two functions, a key for firmware, a pool of 256 MiB, and a volume.
fn start(allow: &str) -> Result<(Daemon, PathBuf)> {
    let functions = format!(
        "[firmware]\nkeys = [\"{KEY}.pub\"]\n\
         [[out_of_band.function]]\nnumber = 1\nany_host = true\n\
         [[out_of_band.function]]\nnumber = 2\nhosts = [\"{HOST}\"]\n"
    );
    let daemon = out_of_band::daemon(allow, &functions)?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    let key = daemon.folder().join(KEY);
    daemon.cli(&["firmware", "new-key", &key.display().to_string()])?;
    let line = out_of_band::socket(&daemon);
    Ok((daemon, line))
}

/// A number; old versions of `nvme-cli` print large ones as text.
fn number(value: &Value) -> Result<u64> {
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    number.with_context(|| format!("{value} is no number"))
}

fn list<'a>(value: &'a Value, field: &str) -> Result<&'a Vec<Value>> {
    let list = value[field].as_array();
    list.with_context(|| format!("no list {field} in {value}"))
}

/// One field of all entries.
fn numbers(entries: &[Value], field: &str) -> Result<Vec<u64>> {
    entries.iter().map(|entry| number(&entry[field])).collect()
}

/// What `forebay volume list` shows.
fn volumes(daemon: &Daemon) -> Result<Vec<Value>> {
    let volumes = daemon.cli(&["volume", "list"])?;
    Ok(volumes.as_array().context("a list")?.clone())
}

/// What `forebay export list` shows.
fn exports(daemon: &Daemon) -> Result<Vec<Value>> {
    let exports = daemon.cli(&["export", "list"])?;
    Ok(exports.as_array().context("a list")?.clone())
}

#[test]
fn nvme_cli_over_mctp_without_kernel() -> Result<()> {
    let (mut daemon, line) = start(out_of_band::ALL_RIGHTS)?;
    Peer::connect(&line, 0)?.control(SET_EID, &[0, EID])?;
    for version in Version::ALL {
        let with_context =
            |error: anyhow::Error| daemon.with_logs(error.context(format!("{version:?}")));
        let client = NvmeCli::prepare(version, &line, EID, 0)?;
        identifies(&client, &daemon).map_err(with_context)?;
        namespaces_are_volumes(&client, &daemon).map_err(with_context)?;
        let nsid = creates(&client, version, &daemon).map_err(with_context)?;
        attaches(&client, nsid, &daemon).map_err(with_context)?;
        formats(&client, nsid).map_err(with_context)?;
        has_budgets(&client, nsid, &daemon).map_err(with_context)?;
        deletes(&client, nsid, &daemon).map_err(with_context)?;
        upgrades(&client, &daemon).map_err(with_context)?;
    }
    audits_name_commands(&daemon)?;
    daemon.pool_check()?;
    daemon.stop()
}

/// The subsystem, its controllers, features and logs.
fn identifies(client: &NvmeCli, daemon: &Daemon) -> Result<()> {
    let status = daemon.status()?;
    let id = client.json("id-ctrl", &[])?;
    ensure!(number(&id["cntlid"])? == 0, "{id}");
    ensure!(number(&id["cntrltype"])? == ADMINISTRATIVE, "{id}");
    ensure!(
        id["fr"].as_str().map(str::trim_end) == status["version"].as_str(),
        "{id}"
    );
    ensure!(
        id["mn"]
            .as_str()
            .is_some_and(|model| model.starts_with("Forebay")),
        "{id}"
    );
    for (field, of_status) in [("tnvmcap", "total_bytes"), ("unvmcap", "free_bytes")] {
        ensure!(
            number(&id[field])? == number(&status["capacity"][of_status])?,
            "{id}"
        );
    }
    // Sanitize would erase every tenant.
    ensure!(number(&id["sanicap"])? == 0, "{id}");

    let secondary = client.json("list-secondary", &[])?;
    let secondary = list(&secondary, "secondary-controllers")?;
    for (field, expected) in [
        ("secondary-controller-identifier", [1, 2]),
        ("primary-controller-identifier", [0, 0]),
        ("secondary-controller-state", [0, 0]),
    ] {
        ensure!(numbers(secondary, field)? == expected, "{secondary:?}");
    }

    let smart = client.json("smart-log", &[])?;
    ensure!(number(&smart["critical_warning"])? == 0, "{smart}");
    ensure!(number(&smart["avail_spare"])? == 100, "{smart}");
    let errors = client.json("error-log", &[])?;
    let count = numbers(list(&errors, "errors")?, "error_count")?;
    // The newest comes first; 0 is an empty entry.
    ensure!(
        count.len() == 4 && count.is_sorted_by(|new, old| new > old || *old == 0),
        "{errors}"
    );
    let firmware = client.json("fw-log", &[])?.to_string();
    let version = status["version"].as_str().context("a version")?;
    ensure!(firmware.contains(&format!("({version}")), "{firmware}");

    // Temperature Threshold, its default; then Number of Queues, which is prohibited out of band.
    let feature = client.text("get-feature", &["--feature-id=4", "--namespace-id=1"])?;
    ensure!(feature.contains("0x0000ffff"), "{feature}");
    let refused = client.refused("get-feature", &["--feature-id=7", "--namespace-id=1"])?;
    ensure!(refused.contains("Invalid Field"), "{refused}");
    Ok(())
}

/// Each namespace is a volume of the list, and each of these a namespace.
fn namespaces_are_volumes(client: &NvmeCli, daemon: &Daemon) -> Result<()> {
    let volumes = volumes(daemon)?;
    let namespaces = client.json("list-ns", &["--all"])?;
    let mut nsids = numbers(list(&namespaces, "nsid_list")?, "nsid")?;
    let mut ids = numbers(&volumes, "id")?;
    ids.sort_unstable();
    nsids.sort_unstable();
    ensure!(nsids == ids && !ids.is_empty(), "{namespaces}, {volumes:?}");
    for volume in &volumes {
        let nsid = format!("--namespace-id={}", volume["id"]);
        // CNS 11h: it need not be attached.
        let id = client.json("id-ns", &[&nsid, "--force"])?;
        let format = number(&id["flbas"])?;
        let shift = number(&id["lbafs"][format as usize]["ds"])?;
        ensure!(
            1 << shift == number(&volume["block_bytes"])?,
            "{id}, {volume}"
        );
        let bytes = number(&id["nsze"])? << shift;
        ensure!(bytes == number(&volume["size_bytes"])?, "{id}, {volume}");
        let uuid = volume["uuid"].as_str().context("a UUID")?.replace('-', "");
        ensure!(id["nguid"] == uuid, "{id}, {volume}");
    }
    Ok(())
}

/// The index of the format with this block size, of those that new namespaces may have.
fn format_of(client: &NvmeCli, block_bytes: u64) -> Result<usize> {
    let common = client.json("id-ns", &["--namespace-id=0xffffffff"])?;
    let shifts = numbers(list(&common, "lbafs")?, "ds")?;
    let found = shifts.iter().position(|shift| 1 << shift == block_bytes);
    found.with_context(|| format!("no format of {block_bytes} bytes: {common}"))
}

/// Creates a namespace of 8 MiB, and returns its NSID.
fn creates(client: &NvmeCli, version: Version, daemon: &Daemon) -> Result<u64> {
    let before = volumes(daemon)?;
    let format = format_of(client, 4096)?;
    let said = match version {
        Version::V2_3 => {
            let format = format!("--flbas={format}");
            client.text("create-ns", &["--nsze=2048", "--ncap=2048", &format])?
        }
        // This version's create-ns needs a device of the kernel.
        Version::V2_13 => {
            let mut id = vec![0; 4096];
            // NSZE, NCAP and FLBAS.
            id[..16].copy_from_slice([2048_u64.to_le_bytes(); 2].as_flattened());
            id[26] = format as u8;
            let file = daemon.folder().join("namespace");
            std::fs::write(&file, id)?;
            let file = format!("--input-file={}", file.display());
            let args = ["--opcode=0x0d", "--data-len=4096", "--write", &file];
            client.text("admin-passthru", &args)?
        }
    };
    let new: Vec<Value> = volumes(daemon)?
        .into_iter()
        .filter(|volume| !before.contains(volume))
        .collect();
    let [volume] = &new[..] else {
        bail!("{said}: not one new volume: {new:?}");
    };
    let nsid = number(&volume["id"])?;
    let said_nsid = match version {
        Version::V2_3 => format!("nsid:{nsid}"),
        Version::V2_13 => format!("{nsid:#010x}"),
    };
    ensure!(said.contains(&said_nsid), "{said}: {volume}");
    ensure!(volume["tenant"] == "out-of-band", "{volume}");
    ensure!(volume["name"] == format!("ns-{nsid}"), "{volume}");
    ensure!(volume["size_bytes"] == 8 << 20, "{volume}");
    ensure!(volume["block_bytes"] == 4096, "{volume}");
    namespaces_are_volumes(client, daemon)?;
    Ok(nsid)
}

/// Attaches the namespace to each function in turn.
fn attaches(client: &NvmeCli, nsid: u64, daemon: &Daemon) -> Result<()> {
    let nsid_arg = format!("--namespace-id={nsid}");
    for (function, hosts) in [(1, json!([])), (2, json!([HOST]))] {
        let args = [&*nsid_arg, &format!("--controllers={function}")];
        client.text("attach-ns", &args)?;
        let exports_now = exports(daemon)?;
        let [export] = &exports_now[..] else {
            bail!("not one export: {exports_now:?}");
        };
        let of = (&export["tenant"], &export["volume"]);
        let expected = (&json!("out-of-band"), &json!(format!("ns-{nsid}")));
        ensure!(of == expected, "{export}");
        ensure!(export["hosts"] == hosts, "{export}");
        ensure!(export["any_host"] == (function == 1), "{export}");
        // Only this function is online, and only it has the namespace.
        let secondary = client.json("list-secondary", &[])?;
        let secondary = list(&secondary, "secondary-controllers")?;
        let online = numbers(secondary, "secondary-controller-state")?;
        let expected = [1, 2].map(|other| u64::from(other == function));
        ensure!(online == expected, "{secondary:?}");
        let controllers = client.json("list-ctrl", &[&nsid_arg])?;
        let controllers = numbers(list(&controllers, "ctrl_list")?, "ctrl_id")?;
        ensure!(controllers == [function], "{controllers:?}");

        let refused = client.refused("attach-ns", &args)?;
        ensure!(refused.contains("Already Attached"), "{refused}");
        client.text("detach-ns", &args)?;
        ensure!(exports(daemon)?.is_empty());
        let refused = client.refused("detach-ns", &args)?;
        ensure!(refused.contains("Not Attached"), "{refused}");
    }
    Ok(())
}

/// Erases the namespace. What would erase more is refused.
fn formats(client: &NvmeCli, nsid: u64) -> Result<()> {
    let nsid = format!("--namespace-id={nsid}");
    let erase = ["--ses=1", "--force"];
    client.text("format", &[&erase[..], &[&nsid]].concat())?;
    let refused = client.refused(
        "format",
        &[&erase[..], &["--namespace-id=0xffffffff"]].concat(),
    )?;
    ensure!(refused.contains("Invalid Field"), "{refused}");
    // Another block size.
    let format = format!("--lbaf={}", format_of(client, 512)?);
    let refused = client.refused("format", &["--ses=1", &format, "--force", &nsid])?;
    ensure!(refused.contains("Invalid Field"), "{refused}");
    let refused = client.refused("admin-passthru", &["--opcode=0x84", "--cdw10=2"])?;
    ensure!(refused.contains("Invalid Command Opcode"), "{refused}");
    Ok(())
}

/// Sets and reads the namespace's budget, by vendor-specific commands.
fn has_budgets(client: &NvmeCli, nsid: u64, daemon: &Daemon) -> Result<()> {
    let nsid_arg = format!("--namespace-id={nsid}");
    let mut budget = NamespaceBudget::none();
    budget.burst_iops = 5000.into();
    let file = daemon.folder().join("budget");
    std::fs::write(&file, budget.as_bytes())?;
    let opcode = format!("--opcode={SET_NAMESPACE_BUDGET}");
    let input = format!("--input-file={}", file.display());
    let args = [&*opcode, &nsid_arg, "--data-len=64", "--write", &input];
    client.text("admin-passthru", &args)?;
    let volume = daemon.cli(&["volume", "show", &format!("out-of-band/ns-{nsid}")])?;
    ensure!(
        volume["budget"]["stated"]["burst"]["iops"] == 5000,
        "{volume}"
    );

    let log = format!("--log-id={LOG_NAMESPACE_BUDGET}");
    let args = [&*log, &nsid_arg, "--log-len=64", "--raw-binary"];
    let read = client.bytes("get-log", &args)?;
    ensure!(read == budget.as_bytes(), "{read:x?}");
    Ok(())
}

/// A small image of another version, which runs this program.
fn wrapped_image(daemon: &Daemon) -> Result<String> {
    let path = |name: &str| daemon.folder().join(name).display().to_string();
    let (key, wrapper, image) = (path(KEY), path("wrapper"), path("image"));
    let program = daemon::program().display().to_string();
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo forebay {IMAGE_VERSION}\n\
         exec '{program}' \"$@\"\n"
    );
    std::fs::write(&wrapper, script)?;
    std::fs::set_permissions(&wrapper, Permissions::from_mode(0o700))?;
    daemon.cli(&[
        "firmware",
        "sign",
        "--key",
        &key,
        "--program",
        &wrapper,
        &image,
    ])?;
    Ok(image)
}

/// Installs an image, which replaces the engine, and returns to the installed program.
fn upgrades(client: &NvmeCli, daemon: &Daemon) -> Result<()> {
    let image = wrapped_image(daemon)?;
    let before = daemon.processes()?;
    client.text("fw-download", &[&format!("--fw={image}")])?;
    client.text("fw-commit", &["--slot=2", "--action=3"])?;
    let after = daemon.wait_engine_after(before.generation, LIMIT)?;
    ensure!(after.engine != before.engine, "{before:?}, {after:?}");
    let log = client.json("fw-log", &[])?.to_string();
    ensure!(log.contains("(afi)\":2,"), "{log}");
    ensure!(log.contains(&format!("({IMAGE_VERSION}")), "{log}");

    client.text("fw-commit", &["--slot=1", "--action=3"])?;
    daemon.wait_engine_after(after.generation, LIMIT)?;
    let log = client.json("fw-log", &[])?.to_string();
    ensure!(log.contains("(afi)\":1,"), "{log}");

    // A changed image has no valid signature.
    let mut damaged = std::fs::read(&image)?;
    damaged[3] ^= 1;
    std::fs::write(&image, damaged)?;
    client.text("fw-download", &[&format!("--fw={image}")])?;
    let refused = client.refused("fw-commit", &["--slot=2", "--action=3"])?;
    ensure!(refused.contains("Invalid Firmware Image"), "{refused}");
    Ok(())
}

fn deletes(client: &NvmeCli, nsid: u64, daemon: &Daemon) -> Result<()> {
    let refused = client.refused("delete-ns", &["--namespace-id=0xffffffff"])?;
    ensure!(refused.contains("Invalid Field"), "{refused}");
    client.text("delete-ns", &[&format!("--namespace-id={nsid}")])?;
    let left = numbers(&volumes(daemon)?, "id")?;
    ensure!(left.len() == 1 && !left.contains(&nsid), "{left:?}");
    namespaces_are_volumes(client, daemon)
}

/// Each change of each version is an event that names endpoint and command.
fn audits_name_commands(daemon: &Daemon) -> Result<()> {
    let events = daemon.cli(&["events", "--audit", "--since", "2h"])?;
    let events = events.as_array().context("a list")?;
    let audits = events.iter().map(|event| &event["audit"]);
    let audits: Vec<&Value> = audits
        .filter(|audit| audit["program"] == "nvme-mi")
        .collect();
    for (command, times) in [
        ("Namespace Management, create: 8388608 bytes", 1),
        ("Namespace Attachment, attach: ", 2),
        ("Namespace Attachment, detach: ", 2),
        // One of them is refused.
        ("Format NVM: ", 2),
        ("Namespace Management, delete: ", 1),
        // A refused image is recorded, too.
        ("Firmware Commit: ", 3),
    ] {
        let named = audits.iter().filter(|audit| {
            let request = audit["request"].as_str().unwrap_or_default();
            let user = audit["user"].as_str().unwrap_or_default();
            request.starts_with(command) && user.starts_with("endpoint 8 ")
        });
        let expected = times * Version::ALL.len();
        ensure!(named.count() == expected, "{command}: {audits:#?}");
    }
    Ok(())
}

/// The page's commands, as they are written. They create namespace 2.
#[test]
fn nvme_cli_commands_of_the_book() -> Result<()> {
    let (mut daemon, line) = start(out_of_band::ALL_RIGHTS)?;
    let client = NvmeCli::prepare(Version::V2_3, &line, EID, 0)?;
    Peer::connect(&line, 0)?.control(SET_EID, &[0, EID])?;
    let image = wrapped_image(&daemon)?;
    std::fs::rename(image, daemon.folder().join("forebay.image"))?;
    let mut count = 0;
    for page in book::pages()? {
        let parts = page.parts.iter().filter(|part| part.place == Place::Bmc);
        for command in parts.flat_map(|part| &part.lines) {
            client.typed(command, daemon.folder())?;
            count += 1;
        }
    }
    ensure!(count > 0, "no page has commands of nvme-cli");
    let log = client.json("fw-log", &[])?.to_string();
    ensure!(log.contains("(afi)\":2,"), "{log}");
    ensure!(volumes(&daemon)?.len() == 1 && exports(&daemon)?.is_empty());
    daemon.stop()
}

#[test]
fn nvme_cli_changes_nothing_without_rights() -> Result<()> {
    let (mut daemon, line) = start("")?;
    let before = (volumes(&daemon)?, exports(&daemon)?);
    let nsid = format!("--namespace-id={}", before.0[0]["id"]);
    let functions = [&nsid, "--controllers=1"];
    let erase = [&nsid, "--ses=1", "--lbaf=0", "--force"];
    // Temperature Threshold.
    let feature = ["--opcode=9", "--cdw10=4", "--cdw11=300"];
    let create = [
        "--opcode=0x0d",
        "--data-len=4096",
        "--write",
        "--input-file=/dev/zero",
    ];
    let budget = [
        &format!("--opcode={SET_NAMESPACE_BUDGET}"),
        &*nsid,
        "--data-len=64",
        "--write",
        "--input-file=/dev/zero",
    ];
    for version in Version::ALL {
        let client = NvmeCli::prepare(version, &line, 0, 0)?;
        identifies(&client, &daemon)?;
        namespaces_are_volumes(&client, &daemon)?;
        for (command, args) in [
            ("admin-passthru", &create[..]),
            ("admin-passthru", &feature),
            ("attach-ns", &functions),
            ("detach-ns", &functions),
            ("delete-ns", &[&nsid]),
            ("format", &erase),
            ("admin-passthru", &budget),
            ("fw-download", &["--fw=/bin/true"]),
            ("fw-commit", &["--slot=1", "--action=2"]),
        ] {
            let said = client.refused(command, args)?;
            ensure!(said.contains("Access Denied"), "{command} {args:?}: {said}");
        }
    }
    ensure!(before == (volumes(&daemon)?, exports(&daemon)?));
    daemon.stop()
}
