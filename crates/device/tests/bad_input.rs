//! Bad devices: missing, wrong, truncated, busy or full. Each gives a clear error and kills
//! nothing.

mod support;

use std::process::Command;

use forebay_device::conformance::{Driver, Rng};
use forebay_device::sync_io::{Content, SyncDevice, create_sparse_file};
use forebay_device::{Device, DeviceError, DeviceKind, DeviceSpec, Errno, Op, OpenOptions};

fn file_spec(path: &std::path::Path) -> DeviceSpec {
    DeviceSpec::new(DeviceKind::File, path.to_owned())
}

fn refused(spec: &DeviceSpec, options: &OpenOptions, words: &[&str]) {
    let direct = Device::open(spec, options).expect_err("refused");
    let buffered = SyncDevice::open(spec, options).expect_err("refused");
    for error in [direct.to_string(), buffered.to_string()] {
        let path = spec.path().display().to_string();
        assert!(error.starts_with(&path), "{error}");
        for word in words {
            assert!(error.contains(word), "{error}");
        }
    }
}

#[test]
fn open_errors_name_their_cause() {
    let dir = support::memory_dir();
    let plain = OpenOptions::default();
    let missing = dir.path().join("missing");
    refused(&file_spec(&missing), &plain, &["no such file", "create it"]);
    let ram = DeviceSpec::new(DeviceKind::Ram, missing).with_size(1 << 20);
    refused(&ram, &plain, &["no such file"]);
    refused(
        &file_spec(dir.path()),
        &plain,
        &["a directory", "a regular file"],
    );
    let null = DeviceSpec::new(DeviceKind::Block, "/dev/null");
    refused(&null, &plain, &["a character device", "a block device"]);

    let file = support::scratch_file(1 << 20);
    let larger = OpenOptions {
        min_capacity_bytes: 2 << 20,
        ..OpenOptions::default()
    };
    refused(
        &file_spec(file.path()),
        &larger,
        &["holds 1 MiB", "2 MiB", "truncated"],
    );
    let block = DeviceSpec::new(DeviceKind::Block, file.path().to_owned());
    refused(&block, &plain, &["a regular file", "a block device"]);
    let empty = support::scratch_file(0);
    refused(&file_spec(empty.path()), &plain, &["at least a block"]);
    let ram = DeviceSpec::new(DeviceKind::Ram, file.path().to_owned()).with_size(2 << 20);
    let create = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    refused(&ram, &create, &["holds 1 MiB", "2 MiB"]);
    let error = create_sparse_file(file.path(), 1).expect_err("exists");
    assert!(matches!(error, DeviceError::Exists { .. }), "{error}");
    let error = create_sparse_file(&dir.path().join("huge"), u64::MAX).expect_err("too large");
    assert!(!dir.path().join("huge").exists(), "{error}");
}

#[test]
fn a_read_only_device_says_so() {
    let Some(device) = support::Loop::new("a_read_only_device_says_so", 1 << 20, 512) else {
        return;
    };
    let spec = DeviceSpec::new(DeviceKind::Block, device.path.clone());
    let set = |flag| {
        let status = Command::new("blockdev")
            .arg(flag)
            .arg(&device.path)
            .status();
        assert!(status.expect("blockdev").success());
    };
    set("--setro");
    let opened = Device::open(&spec, &OpenOptions::default());
    set("--setrw");
    let error = opened.expect_err("read-only");
    assert!(matches!(error, DeviceError::ReadOnly { .. }), "{error}");
}

#[test]
fn a_block_device_in_use_is_refused() {
    let Some(device) = support::Loop::new("a_block_device_in_use_is_refused", 1 << 20, 512) else {
        return;
    };
    let spec = DeviceSpec::new(DeviceKind::Block, device.path.clone());
    let exclusive = OpenOptions {
        exclusive: true,
        ..OpenOptions::default()
    };
    let daemon = SyncDevice::open(&spec, &exclusive).expect("free");
    refused(&spec, &exclusive, &["in use", "mounted"]);
    // An engine doesn't conflict with the daemon.
    Device::open(&spec, &OpenOptions::default()).expect("opens beside");
    daemon.claim_for_daemon().expect("free");
    let second = SyncDevice::open(&spec, &OpenOptions::default()).expect("opens");
    let error = second.claim_for_daemon().expect_err("held");
    assert!(
        error.to_string().contains("a forebay daemon already holds"),
        "{error}"
    );
    drop((daemon, second));
    // A process that another test forks just now holds our descriptors for a moment.
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while let Err(error) = SyncDevice::open(&spec, &exclusive) {
        assert!(std::time::Instant::now() < limit, "not free again: {error}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn a_file_cut_short_while_open_is_an_error() {
    let file = support::scratch_file(1 << 20);
    let spec = file_spec(file.path());
    let device = Device::open(&spec, &OpenOptions::default()).expect("opens");
    let label = SyncDevice::open(&spec, &OpenOptions::default()).expect("opens");
    file.as_file().set_len(4096).expect("cut");
    let mut driver = Driver::new();
    for at in [4096, 0] {
        let read = Op::read(at, driver.buf(0, 65536));
        assert_eq!(driver.run(&device, read), Err(Errno::IO), "at {at}");
    }
    let error = label.read_at(0, &mut [0; 8192]).expect_err("cut");
    assert!(error.to_string().contains("cut short"), "{error}");
    let error = label.write_at(1 << 20, &[1]).expect_err("outside");
    assert!(error.to_string().contains("outside"), "{error}");
    assert!(label.write_at(u64::MAX, &[1]).is_err());
}

#[test]
fn labels_are_written_and_seen() {
    let file = support::scratch_file(8 << 20);
    let spec = file_spec(file.path());
    let daemon = SyncDevice::open(&spec, &OpenOptions::default()).expect("opens");
    let engine = Device::open(&spec, &OpenOptions::default()).expect("opens");
    assert_eq!(daemon.info(), engine.info());
    let check = || daemon.blank_check(b"OURS").expect("looks");
    assert_eq!(check(), Content::Blank);
    // The engine writes past the page cache that the check has filled.
    let mut driver = Driver::new();
    driver.write(&engine, (8 << 20) - 4096, &[1; 4096]);
    driver.run(&engine, Op::flush()).expect("flush");
    assert!(matches!(check(), Content::Foreign(what) if what.contains("last MiB")));
    daemon.write_at(0, b"OURS, and more").expect("writes");
    daemon.sync().expect("syncs");
    assert_eq!(check(), Content::Ours);
    let mut back = [0; 9];
    daemon.read_at(5, &mut back).expect("reads");
    assert_eq!(&back, b" and more");
    let seen = driver.read(&engine, 0, 4096);
    assert!(seen.starts_with(b"OURS, and more"));
}

#[test]
fn a_file_system_is_recognised() {
    let file = support::scratch_file(8 << 20);
    match Command::new("mkfs.ext4")
        .arg("-qF")
        .arg(file.path())
        .status()
    {
        Ok(status) if status.success() => {}
        other => {
            return support::skip(
                "a_file_system_is_recognised",
                &format!("mkfs.ext4: {other:?}"),
            );
        }
    }
    let device = SyncDevice::open(&file_spec(file.path()), &OpenOptions::default()).expect("opens");
    let content = device.blank_check(b"OURS").expect("looks");
    assert!(
        matches!(&content, Content::Foreign(what) if what.contains("ext4")),
        "{content:?}"
    );
}

const FULL_DIR: &str = "FOREBAY_TEST_FULL_DIR";

#[test]
fn a_full_file_system_below_is_an_error_and_no_death() {
    let dir = tempfile::tempdir().expect("folder");
    // A tmpfs of 2 MiB in its own mount namespace; without root, in a user namespace too.
    let mut unshare = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        unshare.args(["--user", "--map-root-user"]);
    }
    let script = r#"mount -t tmpfs -o size=2m none "$0" || exit 77; exec "$1" --exact full_child --nocapture"#;
    let output = unshare
        .args(["--mount", "sh", "-c", script])
        .arg(dir.path())
        .arg(std::env::current_exe().expect("own path"))
        .env(FULL_DIR, dir.path())
        .output();
    let said = |output: &std::process::Output| {
        let (out, err) = (&output.stdout, &output.stderr);
        format!(
            "{}{}",
            String::from_utf8_lossy(out),
            String::from_utf8_lossy(err)
        )
    };
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output)
            if matches!(output.status.code(), Some(1 | 77))
                && !said(&output).contains("full_child") =>
        {
            support::skip("a_full_file_system_below", &said(&output));
        }
        Ok(output) => panic!("{}: {}", output.status, said(&output)),
        Err(error) => support::skip("a_full_file_system_below", &format!("unshare: {error}")),
    }
}

/// The part of the test above in the namespace. Does nothing without `FULL_DIR`.
#[test]
fn full_child() {
    let Some(dir) = std::env::var_os(FULL_DIR).map(std::path::PathBuf::from) else {
        return;
    };
    let ram = DeviceSpec::new(DeviceKind::Ram, dir.join("ram")).with_size(8 << 20);
    let options = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    let ram = Device::open(&ram, &options).expect("opens");
    create_sparse_file(&dir.join("file"), 8 << 20).expect("sparse");
    let file = Device::open(&file_spec(&dir.join("file")), &OpenOptions::default()).expect("opens");
    for device in [&ram, &file] {
        let mut driver = Driver::new();
        let mut written = 0;
        let full = loop {
            let op = Op::write(written, driver.fill(0, &[5; 65536]));
            match driver.run(device, op) {
                Ok(()) => written += 65536,
                Err(errno) => break errno,
            }
        };
        assert_eq!(full, Errno::NOSPC);
        assert!((1 << 20..=2 << 20).contains(&written), "{written}");
        assert_eq!(driver.read(device, 0, 65536), [5; 65536]);
        assert_eq!(driver.read(device, 6 << 20, 65536), [0; 65536]);
        driver.run(device, Op::punch(0, 65536)).expect("punch");
        driver.write(device, 4 << 20, &[6; 4096]);
        driver.run(device, Op::punch(0, 8 << 20)).expect("punch");
    }
    // Concurrent copies and punches on a full file system: errors are fine, a signal is not.
    std::thread::scope(|scope| {
        for seed in 1..=3 {
            let ram = &ram;
            scope.spawn(move || {
                let (mut driver, mut rng) = (Driver::new(), Rng::with_seed(seed));
                for _ in 0..30_000 {
                    let at = rng.u64(..1024) * 8192;
                    let buf = driver.buf(0, 8192);
                    let op = match seed {
                        1 => Op::punch(at, 8192),
                        _ if rng.u64(..4) == 0 => Op::read(at, buf),
                        _ => Op::write(at, buf),
                    };
                    let result = driver.run(ram, op);
                    assert!(matches!(result, Ok(()) | Err(Errno::NOSPC)), "{result:?}");
                }
            });
        }
    });
}
