//! Announcements of waits that may hang, so that `health::wait_reports` can report long ones. An
//! announcement lasts as long as its guard.

use forebay_xlate::DeviceIndex;
use forebay_xlate::VolumeId;
use forebay_xlate::owner_side::TakingId;
use std::cell::Cell;
use std::cell::RefCell;
use std::collections::BTreeMap;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wait {
    /// For the engine's fence on a device.
    Device(DeviceIndex),
    /// For the adoption of an earlier daemon's grants.
    Adoption,
    /// For a batch that is written to the catalog.
    Commit,
    /// For a revoke.
    Revoke(TakingId, VolumeId),
    /// For a job of the internal lane at a device.
    Job(DeviceIndex, &'static str),
}

#[derive(Debug)]
pub(crate) struct ReportedWait {
    pub(crate) since: Instant,
    pub(crate) checked: Option<Instant>,
    /// The warning, once it is reported.
    pub(crate) text: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// Announced waits.
    pub(crate) begun: RefCell<BTreeMap<u64, Wait>>,
    next: Cell<u64>,
    /// By the announcement's number; 0 if found in the owner's state.
    pub(crate) seen: RefCell<BTreeMap<(Wait, u64), ReportedWait>>,
}

pub(crate) struct WaitGuard<'a>(&'a Waits, u64);

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        self.0.begun.borrow_mut().remove(&self.1);
    }
}

impl Waits {
    pub(crate) fn begin(&self, wait: Wait) -> WaitGuard<'_> {
        let number = self.next.get() + 1;
        self.next.set(number);
        self.begun.borrow_mut().insert(number, wait);
        WaitGuard(self, number)
    }

    pub(crate) fn warnings(&self) -> Vec<String> {
        let seen = self.seen.borrow();
        seen.values().filter_map(|one| one.text.clone()).collect()
    }

    /// Whether a warning exists about a device that is not served yet.
    pub(crate) fn is_any_device_published(&self) -> bool {
        let seen = self.seen.borrow();
        let is_device = |wait: &Wait| matches!(wait, Wait::Device(_));
        seen.iter()
            .any(|((wait, _), seen)| is_device(wait) && seen.text.is_some())
    }

    /// The warning about a device that is not served yet.
    pub(crate) fn about_device(&self, device: DeviceIndex) -> Option<String> {
        let seen = self.seen.borrow();
        seen.get(&(Wait::Device(device), 0))?.text.clone()
    }
}
