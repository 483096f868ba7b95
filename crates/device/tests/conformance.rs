//! Every kind of device passes the conformance suite.

mod support;

use forebay_device::conformance::{Subject, run};
use forebay_device::{Device, DeviceKind, DeviceSpec, OpenOptions};

const LEN_BYTES: u64 = 16 << 20;

fn judge(spec: &DeviceSpec, options: &OpenOptions, kind: DeviceKind) {
    let open = || Device::open(spec, options).expect("opens");
    assert_eq!(open().info().kind, kind);
    eprintln!("{:?}", open().info());
    run(&Subject {
        open: &open,
        from_bytes: options.data_offset_bytes,
        keeps: kind != DeviceKind::Null,
    });
}

#[test]
fn file_conforms() {
    let file = support::scratch_file(LEN_BYTES);
    let spec = file.path().to_str().expect("UTF-8").parse().expect("spec");
    judge(&spec, &OpenOptions::default(), DeviceKind::File);
}

#[test]
fn file_on_tmpfs_conforms() {
    let dir = support::memory_dir();
    let path = dir.path().join("file");
    forebay_device::sync_io::create_sparse_file(&path, LEN_BYTES).expect("creates");
    judge(
        &DeviceSpec::new(DeviceKind::File, path),
        &OpenOptions::default(),
        DeviceKind::File,
    );
}

#[test]
fn ram_conforms() {
    let dir = support::memory_dir();
    let spec = DeviceSpec::new(DeviceKind::Ram, dir.path().join("ram")).with_size(LEN_BYTES);
    let options = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    judge(&spec, &options, DeviceKind::Ram);
}

#[test]
fn volatile_conforms() {
    let dir = support::memory_dir();
    let spec =
        DeviceSpec::new(DeviceKind::Volatile, dir.path().join("volatile")).with_size(LEN_BYTES);
    let options = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    judge(&spec, &options, DeviceKind::Volatile);
}

#[test]
fn faulty_conforms() {
    forebay_device::faulty::allow();
    let file = support::scratch_file(LEN_BYTES);
    let spec = DeviceSpec::new(DeviceKind::Faulty, file.path().to_owned())
        .with_size(LEN_BYTES)
        .with_options("seed=1");
    judge(&spec, &OpenOptions::default(), DeviceKind::Faulty);
}

#[test]
fn null_conforms() {
    let dir = support::memory_dir();
    let spec = DeviceSpec::new(DeviceKind::Null, dir.path().join("null")).with_size(64 << 30);
    let options = OpenOptions {
        create_missing: true,
        data_offset_bytes: 3 << 20,
        ..OpenOptions::default()
    };
    judge(&spec, &options, DeviceKind::Null);
}

#[test]
fn block_conforms() {
    for sector_bytes in [512, 4096] {
        let Some(device) = support::Loop::new("block_conforms", LEN_BYTES, sector_bytes) else {
            return;
        };
        let spec = DeviceSpec::bare(device.path.clone());
        judge(&spec, &OpenOptions::default(), DeviceKind::Block);
        let info = Device::open(&spec, &OpenOptions::default()).expect("opens");
        assert_eq!(info.info().block_bytes, sector_bytes);
        assert_eq!(info.info().capacity_bytes, LEN_BYTES);
    }
}
