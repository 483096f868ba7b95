//! Pools with problems, through the real daemon and engine: the daemon always starts, reports the
//! problem, and continues once that is repaired.

mod common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::{Daemon, wait_until};
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn with_pool(files: &[&str]) -> Daemon {
    let daemon = Daemon::with("");
    let mut args = vec!["pool", "create", "--create", "--size", "128M"];
    for file in files {
        args.extend(["--device", file]);
    }
    daemon.json(&args);
    daemon.wait_engine();
    daemon.json(&["tenant", "create", "acme"]);
    daemon.json(&["volume", "create", "acme/disk", "--size", "16M"]);
    daemon
}

fn fill(daemon: &Daemon) -> Vec<u8> {
    let image: Vec<u8> = (0..16 * MIB)
        .map(|at| (at / 4096 % 251) as u8 + 1)
        .collect();
    std::fs::write(daemon.path("in.img"), &image).unwrap();
    daemon.json(&["volume", "import", "in.img", "acme/disk"]);
    image
}

fn holds(daemon: &Daemon, image: &[u8]) {
    daemon.json(&["volume", "export", "acme/disk", "out.img"]);
    let out = std::fs::read(daemon.path("out.img")).unwrap();
    assert!(out == image, "the volume has changed");
    std::fs::remove_file(daemon.path("out.img")).unwrap();
}

fn write_at(path: &Path, at: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

fn trouble(daemon: &Daemon) -> String {
    let status = daemon.json(&["status"]);
    assert_eq!(status["pool"], Value::Null, "{status}");
    let message = status["pool_trouble"]["message"].as_str();
    message.expect("a trouble").to_owned()
}

#[test]
fn a_pool_file_that_moved_is_found_or_asked_for() {
    let mut daemon = with_pool(&["pool.img"]);
    let image = fill(&daemon);
    daemon.stop();
    // Renamed in the same folder: found by its label.
    std::fs::rename(daemon.path("pool.img"), daemon.path("renamed.img")).unwrap();
    daemon.again();
    daemon.wait_engine();
    holds(&daemon, &image);
    let spec = daemon.json(&["device", "list"])[0]["spec"].to_string();
    assert!(spec.contains("renamed.img"), "{spec}");
    daemon.stop();
    // In another folder, which is not searched.
    std::fs::create_dir(daemon.path("away")).unwrap();
    std::fs::rename(daemon.path("renamed.img"), daemon.path("away/p.img")).unwrap();
    daemon.again();
    let said = trouble(&daemon);
    assert!(
        said.contains("renamed.img: there is no such file"),
        "{said}"
    );
    assert!(daemon.said().contains("the pool is not open"));
    let text = String::from_utf8(daemon.run(&["status"]).stdout).unwrap();
    assert!(
        text.contains("not open") && text.contains("forebay pool open --device"),
        "{text}"
    );
    daemon.refused(&["volume", "list"], "renamed.img");
    daemon.refused(
        &[
            "pool", "create", "--device", "new.img", "--create", "--size", "128M",
        ],
        "recorded here",
    );
    daemon.refused(&["pool", "open", "--device", "in.img"], "no Forebay label");
    daemon.json(&["pool", "open", "--device", "away/p.img"]);
    daemon.wait_engine();
    assert_eq!(daemon.json(&["status"])["pool_trouble"], Value::Null);
    holds(&daemon, &image);
    daemon.stop();
    daemon.again();
    daemon.wait_engine();
    holds(&daemon, &image);
}

type Case<'a> = (&'a str, &'a dyn Fn(&Path), &'a str);

#[test]
fn whatever_a_pool_file_holds_the_daemon_starts_and_names_it() {
    let mut daemon = with_pool(&["pool.img"]);
    let image = fill(&daemon);
    daemon.stop();
    let path = daemon.path("pool.img");
    let good = daemon.path("good");
    std::fs::rename(&path, &good).unwrap();
    let cases: [Case; 5] = [
        (
            "both labels flipped",
            &|path| {
                [40, 512 * 1024 + 40]
                    .iter()
                    .for_each(|at| write_at(path, *at, &[0xff]))
            },
            "checksum",
        ),
        (
            "another version",
            &|path| {
                [16, 512 * 1024 + 16]
                    .iter()
                    .for_each(|at| write_at(path, *at, &[9]))
            },
            "format 9",
        ),
        (
            "cut short",
            &|path| {
                let file = OpenOptions::new().write(true).open(path).unwrap();
                file.set_len(64 * MIB).unwrap();
            },
            "truncated",
        ),
        (
            "somebody else's",
            &|path| write_at(path, 0, &vec![b'x'; MIB as usize]),
            "no Forebay label",
        ),
        (
            "empty",
            &|path| std::fs::write(path, []).unwrap(),
            "pool.img",
        ),
    ];
    for (name, spoil, part) in cases {
        std::fs::copy(&good, &path).unwrap();
        // Only the damaged copy may be found.
        let hidden = daemon.path("hidden");
        std::fs::create_dir_all(&hidden).unwrap();
        std::fs::rename(&good, hidden.join("good")).unwrap();
        spoil(&path);
        daemon.again();
        let said = trouble(&daemon);
        assert!(said.contains(part), "{name}: {said}");
        assert!(daemon.said().contains(part), "{name}");
        assert!(!daemon.said().contains("panicked"), "{name}");
        std::fs::rename(hidden.join("good"), &good).unwrap();
        std::fs::copy(&good, &path).unwrap();
        daemon.json(&["pool", "open"]);
        daemon.wait_engine();
        holds(&daemon, &image);
        daemon.stop();
    }
}

#[test]
fn a_pool_is_given_up_only_by_name() {
    let mut daemon = with_pool(&["pool.img"]);
    daemon.stop();
    let path = daemon.path("pool.img");
    std::fs::write(&path, vec![0; 8192]).unwrap();
    daemon.again();
    daemon.refused(&["pool", "destroy", "other", "--forget"], "no pool other");
    daemon.refused(&["pool", "destroy", "pool"], "can't be opened");
    let done = daemon.json(&["pool", "destroy", "pool", "--forget"]);
    assert!(
        done["done"].as_str().unwrap().contains("forgotten"),
        "{done}"
    );
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192);
    daemon.json(&[
        "pool",
        "create",
        "--device",
        "other.img",
        "--create",
        "--size",
        "128M",
    ]);
    daemon.wait_engine();
}

#[test]
fn a_damaged_record_is_replaced_by_what_labels_say() {
    let mut daemon = with_pool(&["pool.img"]);
    daemon.stop();
    let record = daemon.path("var/state/devices.json");
    std::fs::write(&record, "{").unwrap();
    daemon.again();
    daemon.wait_engine();
    daemon.stop();
    std::fs::write(&record, "{").unwrap();
    std::fs::remove_file(daemon.path("var/run/devices.json")).unwrap();
    daemon.again();
    assert!(trouble(&daemon).contains("devices.json"));
    daemon.json(&["pool", "open", "--device", "pool.img"]);
    daemon.wait_engine();
    daemon.stop();
    daemon.again();
    daemon.wait_engine();
    daemon.json(&["volume", "show", "acme/disk"]);
}

#[test]
fn a_fresh_pool_has_no_warnings() {
    let daemon = with_pool(&["pool.img"]);
    let status = daemon.json(&["status"]);
    assert_eq!(status["warnings"], serde_json::json!([]), "{status}");
}

#[test]
fn settings_warnings_and_reservations() {
    let daemon = with_pool(&["pool.img"]);
    let pool = daemon.json(&["pool", "show"]);
    assert_eq!(
        (
            &pool["placement"],
            &pool["warn_percent"],
            &pool["critical_percent"]
        ),
        (&"stripe".into(), &80.into(), &95.into())
    );
    daemon.refused(&["pool", "set", "--warn-percent", "96"], "not be above");
    daemon.json(&["pool", "set", "--warn-percent", "5", "--placement", "fill"]);
    fill(&daemon);
    let pool = daemon.json(&["pool", "show"]);
    assert_eq!(
        (&pool["placement"], &pool["level"]),
        (&"fill".into(), &"warn".into())
    );
    let status = daemon.json(&["status"]);
    assert!(
        status["warnings"].to_string().contains("filling up"),
        "{status}"
    );
    daemon.json(&[
        "pool",
        "set",
        "--warn-percent",
        "4",
        "--critical-percent",
        "5",
    ]);
    assert_eq!(daemon.json(&["pool", "show"])["level"], "critical");
    daemon.json(&[
        "pool",
        "set",
        "--warn-percent",
        "80",
        "--critical-percent",
        "95",
    ]);

    let volume = daemon.json(&["volume", "show", "acme/disk"]);
    assert_eq!(
        (&volume["mapped_bytes"], &volume["reserved_bytes"]),
        (&(16 * MIB).into(), &0.into())
    );
    let volume = daemon.json(&["volume", "set", "acme/disk", "--reserve", "full"]);
    assert_eq!(volume["reserved_bytes"], 16 * MIB);
    daemon.json(&[
        "volume",
        "create",
        "acme/safe",
        "--size",
        "32M",
        "--reserve",
        "full",
    ]);
    let pool = daemon.json(&["pool", "show"]);
    assert_eq!(
        pool["promised_bytes"],
        32 * MIB,
        "what is written is promised no more"
    );
    let output = daemon.run(&["volume", "set", "acme/safe", "--reserve", "33M"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        said,
        "error: 33 MiB can't be reserved for a volume of 32 MiB: a reservation can't exceed the volume's size\n\
         hint: reserve less, or `full` for the whole volume; `forebay volume resize` makes the \
         volume larger\n"
    );
    let output = daemon.run(&[
        "volume",
        "create",
        "acme/large",
        "--size",
        "1G",
        "--reserve",
        "full",
    ]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("reserve less") && said.contains("device add"),
        "{said}"
    );
    daemon.json(&["volume", "set", "acme/safe", "--reserve", "0"]);
    assert_eq!(daemon.json(&["pool", "show"])["promised_bytes"], 0);
}

#[test]
fn a_sound_pool_is_checked_while_it_is_used() {
    let daemon = with_pool(&["a.img", "b.img"]);
    fill(&daemon);
    let found = daemon.json(&["pool", "check"]);
    assert_eq!(found["clean"], true, "{found}");
    assert_eq!(found["mappings_checked"], 256);
    assert_eq!(found["problems"], serde_json::json!([]));
}

#[test]
fn a_missing_device_affects_only_its_extents_and_returns() {
    let mut daemon = with_pool(&["a.img", "b.img"]);
    daemon.json(&["pool", "set", "--placement", "fill"]);
    let image = fill(&daemon);
    daemon.stop();
    std::fs::create_dir(daemon.path("away")).unwrap();
    std::fs::rename(daemon.path("b.img"), daemon.path("away/b.img")).unwrap();
    daemon.again();
    daemon.wait_engine();
    holds(&daemon, &image);
    let status = daemon.json(&["status"]);
    let warnings = status["warnings"].to_string();
    for part in ["b.img is missing", "no such file", "forebay pool open"] {
        assert!(warnings.contains(part), "{part}: {warnings}");
    }
    assert_eq!(daemon.json(&["pool", "show"])["state"], "degraded");
    let device = daemon.json(&["device", "show", "1"]);
    assert_eq!(
        (&device["state"], &device["volumes"]),
        (&"missing".into(), &serde_json::json!([]))
    );
    assert_eq!(
        daemon.json(&["device", "show", "0"])["volumes"],
        serde_json::json!(["acme/disk"])
    );

    daemon.refused(&["pool", "open"], "no missing device was found");
    daemon.refused(
        &["pool", "open", "--device", "a.img"],
        "no missing device was found",
    );
    std::fs::copy(daemon.path("a.img"), daemon.path("copy.img")).unwrap();
    daemon.refused(
        &["pool", "open", "--device", "copy.img"],
        "not a missing device",
    );
    std::fs::remove_file(daemon.path("copy.img")).unwrap();
    let engine = status["engine_pid"].clone();
    let back = [
        "pool",
        "open",
        "--device",
        "a.img",
        "--device",
        "away/../away/b.img",
    ];
    daemon.json(&back);
    wait_until("the device", || {
        daemon.json(&["device", "list"])[1]["state"] == "online"
    });
    let status = daemon.json(&["status"]);
    assert_eq!(status["engine_pid"], engine, "the engine lives through it");
    assert_eq!(status["last_death"], Value::Null, "{status}");
    assert_eq!(daemon.json(&["pool", "show"])["state"], "online");
    holds(&daemon, &image);
    daemon.json(&back);
    std::fs::write(daemon.path("other.img"), vec![0; 8192]).unwrap();
    daemon.refused(
        &["pool", "open", "--device", "other.img"],
        "no Forebay label",
    );
    let spec = daemon.json(&["device", "list"])[1]["spec"].to_string();
    assert!(
        spec.contains("/away/b.img") && !spec.contains(".."),
        "{spec}"
    );
    let record = std::fs::read_to_string(daemon.path("var/state/devices.json")).unwrap();
    assert!(!record.contains(".."), "{record}");
    daemon.stop();
    daemon.again();
    daemon.wait_engine();
    holds(&daemon, &image);
}

#[test]
fn a_damaged_catalog_copy_is_repaired_and_reported() {
    // Both copies on one device, or one on each of two.
    for files in [&["a.img"][..], &["a.img", "b.img"]] {
        let mut daemon = with_pool(files);
        let image = fill(&daemon);
        let copies = daemon.json(&["pool", "show"])["catalog"]["copies"].clone();
        assert_eq!(copies.as_array().unwrap().len(), 2, "{copies}");
        daemon.stop();
        // Beyond the labels and the first copy's header.
        let path = daemon.path(files[files.len() - 1]);
        write_at(&path, MIB + 64 * 1024, &[0x5a; 128 * 1024]);
        daemon.again();
        daemon.wait_engine();
        holds(&daemon, &image);
        let found = daemon.json(&["pool", "check"]);
        assert_eq!(found["clean"], true, "{found}");
        let pool = daemon.json(&["pool", "show"]);
        let catalog = &pool["catalog"];
        assert!(
            catalog["repaired_blocks"].as_u64().unwrap() > 0,
            "{catalog}"
        );
        let copies = catalog["copies"].as_array().unwrap();
        assert!(
            copies.iter().all(|copy| copy["is_good"] == true),
            "{catalog}"
        );
        assert_eq!(pool["state"], "online");
        let warnings = pool["warnings"].to_string();
        assert!(warnings.contains("have been repaired"), "{warnings}");
        daemon.stop();
        daemon.again();
        daemon.wait_engine();
        holds(&daemon, &image);
        let warnings = daemon.json(&["status"])["warnings"].to_string();
        assert!(!warnings.contains("repaired"), "it is over: {warnings}");
    }
}

#[test]
fn a_device_is_added_while_the_pool_is_used() {
    let mut daemon = with_pool(&["a.img"]);
    let image = fill(&daemon);
    daemon.refused(&["device", "add", "b.img"], "no such file");
    daemon.refused(&["device", "add", "a.img"], "a.img");
    std::fs::write(daemon.path("theirs"), vec![7; 64 * MIB as usize]).unwrap();
    daemon.refused(&["device", "add", "theirs"], "theirs");
    daemon.refused(
        &["device", "add", "small.img", "--create", "--size", "1M"],
        "small.img",
    );
    assert!(!daemon.path("small.img").exists(), "made in vain");
    let before = daemon.json(&["pool", "show"])["capacity_bytes"]
        .as_u64()
        .unwrap();
    let added = daemon.json(&["device", "add", "b.img", "--create", "--size", "128M"]);
    assert_eq!(added["index"], 1);
    let pool = daemon.json(&["pool", "show"]);
    let after = pool["capacity_bytes"].as_u64().unwrap();
    assert!(after > before, "{pool}");
    wait_until("the device", || {
        daemon.json(&["device", "list"])[1]["state"] == "online"
    });
    daemon.json(&["volume", "create", "acme/more", "--size", "112M"]);
    std::fs::write(daemon.path("more"), vec![9; 112 * MIB as usize]).unwrap();
    daemon.json(&["volume", "import", "more", "acme/more"]);
    assert!(
        daemon.json(&["device", "list"])[1]["used_bytes"]
            .as_u64()
            .unwrap()
            > 0
    );
    assert_eq!(daemon.json(&["pool", "check"])["clean"], true);
    daemon.stop();
    daemon.again();
    daemon.wait_engine();
    holds(&daemon, &image);
    assert_eq!(
        daemon.json(&["device", "list"]).as_array().unwrap().len(),
        2
    );
}

#[test]
fn memory_and_nothing_are_devices_too() {
    let daemon = with_pool(&["a.img"]);
    let added = daemon.json(&["device", "add", "ram:r", "--size", "64M"]);
    assert_eq!(added["capacity_bytes"], 64 * MIB, "{added}");
    daemon.refused(&["device", "add", "ram:s"], "?size=1G");
    let null = ["device", "add", "null:n?size=64M"];
    daemon.refused(&null, "keeps no data");
    assert!(!daemon.path("n").exists(), "made in vain");
    assert_eq!(
        daemon.json(&["device", "list"]).as_array().unwrap().len(),
        2
    );
    daemon.json(&[&null[..], &["--force"]].concat());
    let warnings = daemon.json(&["status"])["warnings"].to_string();
    assert!(warnings.contains("keeps no data"), "{warnings}");
}

#[test]
fn a_pool_of_nothing_says_so_when_it_is_made() {
    let daemon = Daemon::with("");
    let output = daemon.run(&["pool", "create", "--device", "null:n", "--size", "64M"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("warning: device null:"), "{text}");
    assert!(text.contains("keeps no data"), "{text}");
}

fn errors_of(daemon: &Daemon) -> Vec<(String, u64)> {
    let lane = daemon.json(&["stats"])["lanes"][0].clone();
    ["read", "write", "flush", "deallocate"]
        .map(|op| (op.to_owned(), lane[op]["errors"].as_u64().unwrap()))
        .to_vec()
}

#[test]
fn a_full_pool_is_called_full_and_errors_are_counted_where_they_belong() {
    let daemon = with_pool(&["a.img"]);
    daemon.json(&["volume", "create", "acme/large", "--size", "1G"]);
    let export = daemon.json(&["export", "create", "acme/large", "--any-host"]);
    let load = |more: &[&str]| {
        let (addr, nqn) = (&export["addresses"][0], &export["nqn"]);
        let to = [
            "bench",
            "load",
            "--addr",
            addr.as_str().unwrap(),
            "--nqn",
            nqn.as_str().unwrap(),
        ];
        daemon.run(&[&to[..], more].concat())
    };
    let output = load(&[
        "--rw",
        "randwrite",
        "--once-per",
        "64K",
        "--seconds",
        "60",
        "--qd",
        "4",
    ]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("commands failed"), "{said}");
    let failed = errors_of(&daemon);
    assert!(failed[1].1 > 0, "{failed:?}");
    assert!(
        failed.iter().all(|(op, n)| op == "write" || *n == 0),
        "{failed:?}"
    );
    let text = String::from_utf8(daemon.run(&["stats"]).stdout).unwrap();
    let row = |op: &str| text.lines().find(|line| line.contains(op)).unwrap();
    let count = failed[1].1.to_string();
    let has = |op: &str| row(op).split_whitespace().any(|word| word == count);
    assert!(has("write") && !has("read"), "{text}");

    let warnings = daemon.json(&["status"])["warnings"].to_string();
    for part in ["the pool is full", "delete", "forebay device add"] {
        assert!(warnings.contains(part), "{part}: {warnings}");
    }
    assert!(!warnings.contains("nearly"), "{warnings}");
}

/// A mistyped disk name must create no pool and no file.
#[test]
fn no_file_in_dev() {
    let daemon = Daemon::with("");
    let gone = |path: &str| assert!(!Path::new(path).exists(), "{path} was made");
    let at = "/dev/forebay-no-such-disk";
    for spec in [at.to_owned(), format!("file:{at}"), format!("ram:{at}")] {
        for more in [&["--size", "64M"][..], &["--create", "--size", "64M"]] {
            let args = [&["pool", "create", "--device", &spec], more].concat();
            daemon.refused(&args, "no such device");
            gone(at);
        }
    }
    let file = daemon.path("a.img");
    let path = file.to_str().unwrap();
    let create = ["pool", "create", "--device", path, "--size", "64M"];
    daemon.refused(&create, "--create");
    gone(path);
    let huge = [
        "pool", "create", "--device", path, "--create", "--size", "100T",
    ];
    daemon.refused(&huge, "100 TiB");
    daemon.refused(&huge, "are free");
    gone(path);
    daemon.json(&[&create[..], &["--create"]].concat());
    daemon.wait_engine();

    let add = ["device", "add", at, "--create", "--size", "64M"];
    daemon.refused(&add, "no such device");
    gone(at);
    daemon.refused(&["device", "add", "b.img", "--size", "64M"], "--create");
    daemon.json(&["tenant", "create", "t"]);
    daemon.json(&["volume", "create", "t/v", "--size", "1M"]);
    daemon.refused(&["volume", "export", "t/v", at], "in memory");
    gone(at);
    let ram = format!("ram:{}?size=100T", daemon.path("r").display());
    daemon.refused(&["device", "add", &ram], "are free");
    let in_memory = tempfile::Builder::new()
        .prefix("forebay-")
        .tempdir_in("/dev/shm")
        .unwrap();
    let file = in_memory.path().join("c.img");
    let add = [
        "device",
        "add",
        file.to_str().unwrap(),
        "--create",
        "--size",
        "64M",
    ];
    let added = daemon.json(&add);
    assert!(added["notes"].to_string().contains("in memory"), "{added}");
    let status = daemon.json(&["status"])["warnings"].to_string();
    assert!(status.contains("in memory"), "{status}");
}
