//! The fence of every kind. Devices that are opened several times in this process play the engines.

use std::time::Duration;

use super::Subject;
use super::driver::{Driver, HANG};
use crate::fence::{FenceError, Holder};
use crate::kind::OpenOptions;
use crate::sync_io::SyncDevice;

pub(super) fn fence_is_kept(subject: &Subject<'_>) {
    let (old, new) = ((subject.open)(), (subject.open)());
    let daemon = SyncDevice::open(&old.info().spec, &OpenOptions::default()).expect("opens");
    assert_eq!(daemon.info().identity, old.info().identity);
    assert_eq!(old.info().identity, new.info().identity);
    old.take_fence(5).expect("free");
    let again = new.take_fence(5).expect_err("held");
    assert!(matches!(again, FenceError::Held { .. }), "{again}");
    new.take_fence(6)
        .expect("a younger generation starts beside");
    assert!(!new.predecessors_gone(6).expect("ask"));
    let late = new.wait_for_predecessors(6, Duration::ZERO);
    assert!(
        matches!(late, Err(FenceError::TimedOut { predecessor: 5, .. })),
        "{late:?}"
    );
    let older = (subject.open)().take_fence(4).expect_err("too old");
    assert!(matches!(older, FenceError::NewerEngine { .. }), "{older}");
    assert_eq!(
        daemon.holders().expect("ask"),
        [5, 6].map(|generation| Holder::Engine { generation })
    );
    let mut driver = Driver::new();
    for device in [&old, &new] {
        driver.read(device, subject.from_bytes, 65536);
    }
    drop(old);
    new.wait_for_predecessors(6, HANG).expect("alone");
    drop(driver);
    drop(new);
    let next = (subject.open)();
    next.take_fence(7).expect("free");
    next.wait_for_predecessors(7, HANG).expect("alone");
}
