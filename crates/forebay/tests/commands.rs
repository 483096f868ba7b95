//! The real binary against a fake daemon.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

#[path = "common/fake.rs"]
mod fake;
#[path = "common/samples.rs"]
mod samples;

use fake::Daemon;

impl Daemon {
    fn run(&self, args: &[&str]) -> Output {
        forebay(&self.socket(), args)
    }

    fn text(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        assert!(output.stderr.is_empty(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        let mut all = vec!["--json"];
        all.extend(args);
        serde_json::from_str(&self.text(&all)).unwrap()
    }
}

fn forebay(socket: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(args)
        .env("FOREBAY_SOCKET", socket)
        .output()
        .unwrap()
}

#[test]
fn tables_for_people_and_json_for_programs() {
    let daemon = Daemon::start();
    let text = daemon.text(&["volume", "list"]);
    let mut lines = text.lines();
    assert!(lines.next().unwrap().starts_with("VOLUME"), "{text}");
    let line = lines.next().unwrap();
    assert!(line.contains("acme/disk") && line.contains("1 GiB") && line.contains("64 KiB"));
    let json = daemon.json(&["volume", "list"]);
    assert_eq!(json[0]["size_bytes"], 1 << 30);
    assert_eq!(daemon.json(&["tenant", "list"]), Value::Array(Vec::new()));
    let text = daemon.text(&["export", "list"]);
    let states: Vec<_> = text
        .lines()
        .map(|line| line.split_whitespace().last())
        .collect();
    assert_eq!(
        states,
        [Some("STATE"), Some("served"), Some("quarantined")],
        "{text}"
    );
    let text = daemon.text(&["export", "show", "acme/disk"]);
    let attach = "nvme connect -t tcp -a ::1 -s 4420 -n nqn.2026-01.io.forebay:acme.disk";
    assert!(text.contains(attach), "{text}");
}

#[test]
fn snapshots_are_listed_apart_by_volume() {
    let daemon = Daemon::start();
    let text = daemon.text(&["volume", "snapshots"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[1].starts_with("acme/disk@monday"), "{text}");
    assert!(lines[1].contains("2001-09-09T01:46:40"), "{text}");
    assert!(lines[1].contains("3 MiB"), "{text}");
    let of = |of: &str| daemon.json(&["volume", "snapshots", of]);
    assert_eq!(of("acme/disk")[0]["name"], "disk@monday");
    assert_eq!(of("acme/log"), Value::Array(Vec::new()));
    let text = daemon.text(&["volume", "snapshot", "acme/disk@tuesday"]);
    assert_eq!(text.trim_end(), "snapshot acme/disk@tuesday taken");
}

#[test]
fn an_image_in_ceph_is_named_with_its_clients() {
    let daemon = Daemon::start();
    let text = daemon.text(&["volume", "show", "acme/ceph"]);
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<String> = text.lines().map(words).collect();
    for line in [
        "rbd east/rbd/ceph",
        "client device 255, 10.0.0.1:0/7",
        "features layering exclusive-lock",
        "parent rbd/golden@v1",
        "locked by 10.0.0.2:0/8",
        "mapped -",
    ] {
        assert!(lines.iter().any(|shown| shown == line), "{line}: {text}");
    }
    assert_eq!(text.matches("locked by").count(), 1, "{text}");
    let json = daemon.json(&["volume", "show", "acme/ceph"]);
    assert_eq!(json["image"]["lock_owners"][1], "10.0.0.2:0/8");
    assert_eq!(json["rbd"]["path"], "east/rbd/ceph");
    // A silent cluster hides nothing else.
    let text = daemon.text(&["volume", "show", "acme/silent"]);
    assert!(text.contains("Ceph cluster east does not answer"), "{text}");
    assert!(text.contains("1 GiB"), "{text}");
    let text = daemon.text(&["volume", "show", "acme/disk"]);
    assert!(!text.contains("rbd"), "{text}");
}

#[test]
fn typed_commands_become_api_requests() {
    let daemon = Daemon::start();
    for (args, expected) in [
        (
            &[
                "volume",
                "create",
                "acme/disk",
                "--size",
                "10G",
                "--block-size",
                "512",
            ][..],
            "POST /v1/tenants/acme/volumes VolumeCreate { name: \"disk\", \
             size_bytes: Some(10737418240), block_bytes: Some(512), reserved_bytes: 0, rbd: None }",
        ),
        (
            &["volume", "create", "acme/disk", "--rbd", "east/rbd/team/db"],
            "size_bytes: None, block_bytes: None, reserved_bytes: 0, rbd: Some(\"east/rbd/team/db\") }",
        ),
        (
            &[
                "volume",
                "create",
                "acme/disk",
                "--rbd",
                "east/rbd/db",
                "--size",
                "1MB",
            ],
            "size_bytes: Some(1000448), block_bytes: None",
        ),
        (
            &["volume", "resize", "acme/ceph", "--size", "1T", "--shrink"],
            "shrink: true, reserved_bytes: None }",
        ),
        (
            &[
                "volume",
                "clone",
                "acme/ceph@a",
                "acme/b",
                "--rbd",
                "east/rbd/b",
            ],
            "reserved_bytes: 0, rbd: Some(\"east/rbd/b\") }",
        ),
        (
            &["volume", "delete", "acme/ceph", "--with-image"],
            "DELETE /v1/tenants/acme/volumes/ceph?with_image=true",
        ),
        (
            &["volume", "resize", "acme/disk", "--size", "2T"],
            "PATCH /v1/tenants/acme/volumes/disk VolumeUpdate { size_bytes: Some(2199023255552), \
             shrink: false, reserved_bytes: None }",
        ),
        (
            &[
                "volume",
                "create",
                "acme/disk",
                "--size",
                "1M",
                "--reserve",
                "full",
            ],
            "reserved_bytes: 1048576",
        ),
        (
            &["volume", "set", "acme/disk", "--reserve", "64K"],
            "VolumeUpdate { size_bytes: None, shrink: false, reserved_bytes: Some(65536) }",
        ),
        (
            &["volume", "snapshot", "acme/disk@monday", "acme/log@monday"],
            "POST /v1/tenants/acme/snapshots SnapshotsTake { snapshots: [\"disk@monday\", \"log@monday\"] }",
        ),
        (
            &["volume", "clone", "acme/disk@monday", "other/disk"],
            "POST /v1/tenants/acme/volumes/disk@monday/clone VolumeClone { tenant: Some(\"other\"), name: \"disk\", \
             reserved_bytes: 0, rbd: None }",
        ),
        (
            &["volume", "clone", "a/b@c", "a/d", "--reserve", "full"],
            "reserved_bytes: 1048576",
        ),
        (
            &["volume", "rollback", "acme/disk@monday"],
            "POST /v1/tenants/acme/volumes/disk/rollback VolumeRollback { snapshot: \"disk@monday\", \
             while_connected: false }",
        ),
        (
            &["volume", "rollback", "a/b@c", "--while-connected"],
            "while_connected: true",
        ),
        (
            &["pool", "set", "--placement", "fill", "--warn-percent", "70"],
            "PoolUpdate { placement: Some(Fill), warn_percent: Some(70), critical_percent: None }",
        ),
        (&["pool", "check", "--repair"], "PoolCheck { repair: true }"),
        (&["device", "show", "1"], "GET /v1/devices/1"),
        (
            &["device", "add", "/b", "--create", "--size", "1G", "--force"],
            "DeviceAdd { spec: \"/b\", force: true, create: true, size_bytes: Some(1073741824) }",
        ),
        (&["volume", "list", "acme"], "GET /v1/tenants/acme/volumes"),
        (
            &["volume", "delete", "acme/disk"],
            "DELETE /v1/tenants/acme/volumes/disk",
        ),
        (
            &[
                "export",
                "create",
                "acme/disk",
                "--host",
                "nqn.2026-01.org:a",
                "--host",
                "nqn.2026-01.org:b",
            ],
            "hosts: [\"nqn.2026-01.org:a\", \"nqn.2026-01.org:b\"], any_host: false",
        ),
        (
            &["export", "create", "acme/disk", "--any-host"],
            "hosts: [], any_host: true",
        ),
        (
            &[
                "export",
                "set",
                "acme/disk",
                "--add-host",
                "nqn.2026-01.org:a",
                "--remove-host",
                "nqn.2026-01.org:b",
            ],
            "ExportUpdate { add_hosts: [\"nqn.2026-01.org:a\"], remove_hosts: [\"nqn.2026-01.org:b\"], any_host: None, disconnect_hosts: false }",
        ),
        (
            &["export", "set", "acme/disk", "--any-host"],
            "any_host: Some(true)",
        ),
        (
            &["export", "set", "acme/disk", "--listed-hosts"],
            "any_host: Some(false)",
        ),
        (
            &[
                "port",
                "set",
                "[::1]:4420",
                "inaccessible",
                "--let-hosts-wait",
            ],
            "PATCH /v1/ports/[::1]:4420 PortUpdate { ana: Inaccessible, let_hosts_wait: true }",
        ),
        (
            &["events", "--after", "7"],
            "GET /v1/events?wait_s=0&after=7",
        ),
        (
            &[
                "pool",
                "create",
                "--device",
                "/a",
                "--device",
                "ram:/b?size=1G",
                "--size",
                "16G",
            ],
            "devices: [\"/a\", \"ram:/b?size=1G\"], force: false, extent_bytes: None, \
             create: false, size_bytes: Some(17179869184), placement: None, warn_percent: None, \
             critical_percent: None",
        ),
        (
            &["pool", "open", "--device", "/a"],
            "POST /v1/pool/open PoolOpen { devices: [\"/a\"], force: false, take_over: false }",
        ),
        (
            &["pool", "open", "--device", "/a", "--force"],
            "force: true",
        ),
        (
            &["pool", "open"],
            "PoolOpen { devices: [], force: false, take_over: false }",
        ),
        (
            &["pool", "destroy", "pool", "--delete-volumes"],
            "DELETE /v1/pool?name=pool&delete_volumes=true&disconnect_hosts=false&forget=false",
        ),
    ] {
        daemon.text(args);
        daemon.was_asked(expected);
    }
    // Relative paths are the caller's, not the daemon's.
    let output = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["--socket", daemon.socket().to_str().unwrap()])
        .args(["pool", "create", "--device", "file:here.img"])
        .current_dir(daemon.folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let here = daemon
        .folder
        .path()
        .canonicalize()
        .unwrap()
        .join("here.img");
    daemon.was_asked(&format!("file:{}", here.display()));
}

#[test]
fn sizes_are_rounded_up_and_the_answer_says_so() {
    let daemon = Daemon::start();
    for (args, expected) in [
        (
            &[
                "volume",
                "create",
                "acme/disk",
                "--size",
                "10MB",
                "--block-size",
                "4K",
                "--reserve",
                "1MB",
            ][..],
            "size_bytes: Some(10002432), block_bytes: Some(4096), reserved_bytes: 1003520",
        ),
        (
            &["volume", "resize", "acme/disk", "--size", "0.01GB"],
            "size_bytes: Some(10002432)",
        ),
        (
            &["volume", "set", "acme/disk", "--reserve", "1.04M"],
            "reserved_bytes: Some(1093632)",
        ),
        (
            &["device", "add", "ram:/b", "--create", "--size", "10MB"],
            "DeviceAdd { spec: \"ram:/b?size=9768K\", force: false, create: true, size_bytes: Some(10002432) }",
        ),
        (
            &["pool", "create", "--device", "ram:/b?size=10MB"],
            "devices: [\"ram:/b?size=9768K\"]",
        ),
    ] {
        let text = daemon.text(args);
        daemon.was_asked(expected);
        // The fake always reserves 1 MiB.
        if !args.contains(&"set") {
            assert!(text.contains("rounded up"), "{args:?}: {text}");
        }
    }
    let text = daemon.text(&["volume", "create", "acme/disk", "--size", "10M"]);
    assert!(!text.contains("rounded"), "{text}");
}

#[test]
fn a_negative_size_is_named() {
    let daemon = Daemon::start();
    for args in [
        &["volume", "create", "acme/disk", "--size", "-1"][..],
        &["volume", "resize", "acme/disk", "--size", "-1G"],
        &["volume", "set", "acme/disk", "--reserve", "-5MB"],
        &["device", "add", "/b", "--create", "--size", "-1"],
        &["tenant", "budget", "acme", "--burst-bandwidth", "-5M"],
    ] {
        let output = daemon.run(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains("a size has no sign"), "{args:?}: {said}");
    }
}

#[test]
fn an_image_for_a_closed_standard_output_is_refused() {
    let daemon = Daemon::start();
    let output = Command::new("sh")
        .args(["-c", "exec \"$0\" volume export acme/disk - >&-"])
        .arg(env!("CARGO_BIN_EXE_forebay"))
        .env("FOREBAY_SOCKET", daemon.socket())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("standard output is closed"), "{said}");
    assert!(!said.contains("exported"), "{said}");
}

#[test]
fn full_is_all_of_the_volume() {
    let daemon = Daemon::start();
    daemon.text(&["volume", "set", "acme/disk", "--reserve", "full"]);
    daemon.was_asked("reserved_bytes: Some(1048576)");
}

#[test]
fn pool_show_reports_faults_and_warnings() {
    let daemon = Daemon::start();
    let text = daemon.text(&["pool", "show"]);
    for part in [
        "degraded",
        "256 MiB (25 % with promised space)",
        "80 % and 95 %",
        "1 MiB of 32 MiB used",
        "2 MiB for each copy",
        "good on device 0; device 1: it was left behind; 2 blocks repaired",
        "block 7 of device 1 was repaired",
        "missing: no such file",
        "warning: the moon is full",
        "/dev/nvme0n1  Model 1",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = daemon.text(&["device", "show", "0"]);
    assert!(
        text.contains("acme/disk") && text.contains("online"),
        "{text}"
    );
    assert_eq!(daemon.json(&["device", "show", "0"])["state"], "online");
}

#[test]
fn a_check_that_finds_something_fails_unless_it_repaired_it() {
    let daemon = Daemon::start();
    let output = daemon.run(&["pool", "check"]);
    assert_eq!(output.status.code(), Some(1));
    let (shown, said) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    );
    assert!(shown.contains("3 extents of device 0 leak"), "{shown}");
    assert!(said.contains("error: the pool has problems"), "{said}");
    assert!(said.contains("--repair"), "{said}");
    let json = daemon.run(&["--json", "pool", "check"]);
    assert_eq!(json.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["leaked_extents"], 3);
    let text = daemon.text(&["pool", "check", "--repair"]);
    assert!(text.contains("all problems are repaired"), "{text}");
}

#[test]
fn refusals_go_to_stderr_with_a_hint() {
    let daemon = Daemon::start();
    let cases: [(&[&str], i32, &[&str]); 8] = [
        (
            &["tenant", "create", "taken"],
            5,
            &[
                "error: tenant taken exists\n",
                "hint: choose another name\n",
            ],
        ),
        (
            &["tenant", "create", "Acme"],
            1,
            &["error: `Acme` can't be", "hint: names have"],
        ),
        (
            &["tenant", "delete", "../x"],
            1,
            &["error: `../x` can't be"],
        ),
        (
            &["export", "create", "acme/disk"],
            1,
            &["error: no host could", "hint: ", "--any-host"],
        ),
        (&["status"], 1, &["error: the daemon is stopping\n"]),
        (&["tenant"], 2, &["Usage"]),
        (
            &["volume", "snapshot", "a/b@c", "d/b@c"],
            1,
            &["error: these snapshots are of several tenants", "hint: "],
        ),
        (&["volume", "create", "acme"], 2, &["TENANT/VOLUME"]),
    ];
    for (args, code, parts) in cases {
        let output = daemon.run(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(output.stdout.is_empty(), "{args:?}");
        for part in parts {
            assert!(said.contains(part), "{args:?}: {said}");
        }
    }
}

#[test]
fn no_daemon_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let output = forebay(&folder.path().join("none.sock"), &["status"]);
    assert_eq!(output.status.code(), Some(3));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("error: no daemon answers at"), "{said}");
    assert!(
        said.contains("hint: start one with `forebay serve`"),
        "{said}"
    );
}

#[test]
fn images_are_checked_before_anything_is_touched() {
    let daemon = Daemon::start();
    let image = daemon.folder.path().join("image");
    let path = image.to_str().unwrap();
    let refused = |code: i32, args: &[&str], part: &str| {
        let output = daemon.run(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(part), "{said}");
    };
    refused(4, &["volume", "import", path, "acme/disk"], "can't open");
    std::fs::write(&image, []).unwrap();
    refused(1, &["volume", "import", path, "acme/disk"], "is empty");
    std::fs::write(&image, vec![1; (1 << 20) + 1]).unwrap();
    refused(
        1,
        &["volume", "import", path, "acme/disk"],
        "has 1 MiB (1048577 bytes), but the volume acme/disk has only 1 MiB (1048576 bytes)",
    );
    refused(5, &["volume", "export", "acme/disk", path], "can't create");
    assert_eq!(std::fs::metadata(&image).unwrap().len(), (1 << 20) + 1);
    assert!(
        daemon
            .asked
            .try_iter()
            .all(|asked| !asked.contains("ExportUpdate"))
    );
}
