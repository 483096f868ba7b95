//! Engine and daemon see one device: each reads the other's flushed writes.

use super::Subject;
use super::driver::{Driver, Rng, random_bytes};
use crate::device::Device;
use crate::kind::OpenOptions;
use crate::op::Op;
use crate::sync_io::SyncDevice;

pub(super) fn both_see_one_device(driver: &mut Driver, subject: &Subject<'_>, device: &Device) {
    let daemon = SyncDevice::open(&device.info().spec, &OpenOptions::default()).expect("opens");
    assert_eq!(daemon.info().identity, device.info().identity);
    assert_eq!(daemon.info().block_bytes, device.info().block_bytes);
    let (mut rng, from) = (Rng::with_seed(77), subject.from_bytes);
    let bytes = random_bytes(&mut rng, 8192);
    driver.write(device, from, &bytes);
    driver.run(device, Op::flush()).expect("flush");
    let mut found = vec![0; bytes.len()];
    daemon.read_direct_at(from, &mut found).expect("reads");
    assert!(found == bytes, "the engine's bytes");
    let bytes = random_bytes(&mut rng, 8192);
    daemon.write_at(from, &bytes).expect("writes");
    daemon.sync().expect("flushes");
    assert!(driver.read(device, from, bytes.len()) == bytes);
    let bytes = random_bytes(&mut rng, 8192);
    daemon.write_direct_at(from, &bytes).expect("writes");
    assert!(driver.read(device, from, bytes.len()) == bytes);
    daemon.read_at(u64::MAX, &mut [0]).expect_err("outside");
}
