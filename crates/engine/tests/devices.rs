//! Which devices an engine takes.
#![allow(missing_docs)]

mod common;

use common::TestEngine;
use forebay_device::{Device, OpenOptions};
use forebay_xlate::DeviceIndex;

fn wait_for(engine: &TestEngine, device: u8) {
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while !engine
        .log
        .lock()
        .unwrap()
        .ready
        .contains(&DeviceIndex(device))
    {
        assert!(
            std::time::Instant::now() < limit,
            "device {device} is not ready"
        );
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn a_device_is_ready_when_no_earlier_engine_has_anything_there() {
    let mut engine = TestEngine::start("file", 8 << 20, 1);
    let path = |name: &str| engine.device_path().with_file_name(name);
    let specs = ["held", "free"].map(|name| {
        let file = std::fs::File::create(path(name)).unwrap();
        file.set_len(8 << 20).unwrap();
        format!("file:{}", path(name).display())
    });
    let earlier = Device::open(&specs[0].parse().unwrap(), &OpenOptions::default()).unwrap();
    earlier.take_fence(0).unwrap();
    assert_eq!(engine.device(1, specs[0].clone()), None);
    assert_eq!(engine.device(2, specs[1].clone()), None);
    wait_for(&engine, 2);
    assert!(!engine.log.lock().unwrap().ready.contains(&DeviceIndex(1)));
    // A second request does not make it ready sooner.
    assert_eq!(engine.device(1, specs[0].clone()), None);
    assert_eq!(engine.device(2, specs[1].clone()), None);
    assert!(!engine.log.lock().unwrap().ready.contains(&DeviceIndex(1)));
    drop(earlier);
    wait_for(&engine, 1);
}

#[test]
fn two_devices_that_are_one_are_refused() {
    let mut engine = TestEngine::start("file", 8 << 20, 1);
    let device = engine.device_path();
    let [link, symbolic, other] = ["link", "symbolic", "other"].map(|n| device.with_file_name(n));
    std::fs::hard_link(&device, &link).unwrap();
    std::os::unix::fs::symlink(&device, &symbolic).unwrap();
    std::fs::copy(&device, &other).unwrap();
    for (index, path) in (1..).zip([&device, &link, &symbolic]) {
        let error = engine.device(index, format!("file:{}", path.display()));
        let error = error.expect("one device is taken once");
        assert!(error.contains("is the same device as file:"), "{error}");
    }
    // It is not taken by another kind of access either.
    let ram = format!("ram:{}?size=8M", link.display());
    let error = engine.device(4, ram).expect("one device is taken once");
    assert!(error.contains("is the same device as"), "{error}");
    let error = engine.device(5, format!("file:{}", other.display()));
    assert_eq!(error, None);
    // A repetition is no second device.
    let error = engine.device(5, format!("file:{}", other.display()));
    assert_eq!(error, None);
}
