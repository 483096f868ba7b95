//! The whole system: real daemon, real engine, our initiator.

mod common;

use std::fs::File;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Stdio;

use common::{Daemon, folder, forebay, running, send, wait, wait_until};
use rustix::process::Signal;
use serde_json::Value;

const SHORT: [&str; 7] = [
    "--json",
    "bench",
    "demo",
    "--seconds",
    "1",
    "--verify",
    "8M",
];

#[test]
fn demo_works_twice_and_leaves_nothing_running() {
    let folder = folder();
    // The standard port may be taken or free.
    for _run in 0..2 {
        let output = forebay(folder.path(), &SHORT).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(summary["written_bytes"].as_u64().unwrap() >= 8 << 20);
        assert!(summary["read_bytes"].as_u64().unwrap() > 4 << 20);
        assert_eq!(summary["load"]["errors"], 0);
        assert_eq!(summary["load"]["lines"].as_array().unwrap().len(), 5);
        assert!(summary["load"]["lines"][4]["iops"].as_f64().unwrap() > 0.0);
        assert_eq!(summary["attach"].as_array().unwrap().len(), 2);
        assert_eq!(running(folder.path()), Vec::<String>::new());
    }
}

#[test]
fn demo_that_is_ended_leaves_nothing_running() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let folder = folder();
        // So that `running` finds all three processes.
        let dir = folder.path().join("var");
        let dir = dir.to_str().unwrap();
        let mut demo = forebay(
            folder.path(),
            &[
                "bench",
                "demo",
                "--dir",
                dir,
                "--seconds",
                "600",
                "--verify",
                "1M",
            ],
        )
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
        wait_until("daemon and engine", || running(folder.path()).len() == 3);
        send(&demo, signal);
        let code = wait(&mut demo);
        if signal == Signal::KILL {
            wait_until("all to end", || running(folder.path()).is_empty());
        } else {
            assert_eq!(code, 1);
            assert_eq!(running(folder.path()), Vec::<String>::new());
        }
    }
}

const MIB: u64 = 1 << 20;

/// 20 MiB with 3 MiB of data in unaligned pieces.
fn write_image(path: &Path) -> Vec<u8> {
    let mut image = vec![0_u8; 20 * MIB as usize - 512];
    let mut random = fastrand::Rng::with_seed(1);
    for (start, bytes) in [(5000, MIB), (7 * MIB + 100, 2 * MIB), (19 * MIB, 4096)] {
        random.fill(&mut image[start as usize..(start + bytes) as usize]);
    }
    File::create(path).unwrap().write_all(&image).unwrap();
    image
}

#[test]
fn images_go_in_and_come_out() {
    let daemon = Daemon::start();
    let image = write_image(&daemon.path("in.img"));
    daemon.json(&["tenant", "create", "acme"]);
    for block_size in ["512", "4096"] {
        let volume = format!("acme/v{block_size}");
        let args = [
            "volume",
            "create",
            &volume,
            "--size",
            "32M",
            "--block-size",
            block_size,
        ];
        daemon.json(&args);
        // First into a fresh volume, then over existing data.
        for _pass in 0..2 {
            daemon.json(&["volume", "import", "in.img", &volume, "--force"]);
            let shown = daemon.json(&["volume", "show", &volume]);
            assert_eq!(
                shown["exported"], false,
                "the temporary export is still there"
            );
            daemon.json(&["volume", "export", &volume, "out.img"]);
            let out = daemon.path("out.img");
            let read = std::fs::read(&out).unwrap();
            assert_eq!(read.len() as u64, 32 * MIB);
            assert!(read[..image.len()] == image, "the image changed on its way");
            assert!(read[image.len()..].iter().all(|byte| *byte == 0));
            assert!(
                std::fs::metadata(&out).unwrap().blocks() * 512 < 5 * MIB,
                "not sparse"
            );
            std::fs::remove_file(out).unwrap();
        }
    }
    assert_eq!(daemon.json(&["export", "list"]), Value::Array(Vec::new()));
}

#[test]
fn import_replaces_and_keeps_an_export_as_it_was() {
    let daemon = Daemon::start();
    daemon.json(&["tenant", "create", "acme"]);
    daemon.json(&["volume", "create", "acme/disk", "--size", "24M"]);
    daemon.json(&[
        "export",
        "create",
        "acme/disk",
        "--host",
        "nqn.2026-01.org:a",
    ]);
    let full = vec![0xee_u8; 24 * MIB as usize];
    std::fs::write(daemon.path("full.img"), &full).unwrap();
    daemon.json(&["volume", "import", "full.img", "acme/disk"]);
    let image = write_image(&daemon.path("in.img"));
    daemon.json(&["volume", "import", "in.img", "acme/disk", "--force"]);
    daemon.json(&["volume", "export", "acme/disk", "out.img"]);
    let mut wanted = image;
    wanted.resize(24 * MIB as usize, 0);
    let read = std::fs::read(daemon.path("out.img")).unwrap();
    assert!(read == wanted, "old bytes are left");
    let export = daemon.json(&["export", "show", "acme/disk"]);
    assert_eq!(export["hosts"], serde_json::json!(["nqn.2026-01.org:a"]));

    daemon.refused(&["volume", "export", "acme/disk", "out.img"], "exists");
    std::fs::write(daemon.path("large.img"), vec![1; 25 * MIB as usize]).unwrap();
    daemon.refused(
        &["volume", "import", "large.img", "acme/disk"],
        "has 25 MiB (26214400 bytes)",
    );
    daemon.refused(&["volume", "import", "in.img", "acme/none"], "none");
    daemon.refused(&["volume", "delete", "acme/disk"], "exported");
}

#[test]
fn loads_are_measured_and_strangers_refused() {
    let daemon = Daemon::start();
    daemon.json(&["tenant", "create", "acme"]);
    daemon.json(&["volume", "create", "acme/disk", "--size", "16M"]);
    let export = daemon.json(&[
        "export",
        "create",
        "acme/disk",
        "--host",
        "nqn.2026-01.test:a",
    ]);
    let address = export["addresses"][0].as_str().unwrap();
    let nqn = export["nqn"].as_str().unwrap();
    let load = [
        "bench",
        "load",
        "--addr",
        address,
        "--nqn",
        nqn,
        "--seconds",
        "1",
        "--qd",
        "4",
    ];
    let with = |more: &[&'static str]| [&load[..], more].concat();
    let report = daemon.json(&with(&[
        "--hostnqn",
        "nqn.2026-01.test:a",
        "--rw",
        "randrw",
    ]));
    assert_eq!(report["errors"], 0);
    assert_eq!(report["lines"].as_array().unwrap().len(), 3);
    daemon.refused(&with(&["--hostnqn", "nqn.2026-01.test:b"]), "host");
    let stats = daemon.json(&["stats"]);
    assert!(
        stats["lanes"][0]["read"]["ops"].as_u64().unwrap() > 0,
        "{stats}"
    );
    assert!(
        stats["lanes"][0]["write"]["bytes"].as_u64().unwrap() > 0,
        "{stats}"
    );
}

#[test]
fn a_taken_address_and_a_taken_folder_are_clear_errors() {
    let daemon = Daemon::start();
    let second = daemon.run(&["serve"]);
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("pid {}", daemon.pid())), "{said}");

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let other = folder();
    let config = format!("[listen]\nnvme_tcp = [\"{address}\"]\n");
    std::fs::write(other.path().join("forebay.toml"), config).unwrap();
    let output = forebay(other.path(), &["serve"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains(&address.to_string()) && said.contains("hint: "),
        "{said}"
    );
    assert_eq!(running(other.path()), Vec::<String>::new());
}
