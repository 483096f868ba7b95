//! Which devices an engine takes.
#![allow(missing_docs)]

mod common;

use common::TestEngine;

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
    // Nor by another kind of access.
    let ram = format!("ram:{}?size=8M", link.display());
    let error = engine.device(4, ram).expect("one device is taken once");
    assert!(error.contains("is the same device as"), "{error}");
    let error = engine.device(5, format!("file:{}", other.display()));
    assert_eq!(error, None);
    // The same again is no other.
    let error = engine.device(5, format!("file:{}", other.display()));
    assert_eq!(error, None);
}
