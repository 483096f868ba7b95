//! Announcements of waits.
//!
//! Purpose: whoever waits for something that may hang says so, so that people can be told of a long wait.
//! Design: an announcement holds as long as its guard. What people are told of it is kept with it.
//! Not here: finding causes, telling people (`health::wait_reports`).

use forebay_xlate::DeviceIndex;
use forebay_xlate::VolumeId;
use forebay_xlate::owner_side::TakingId;
use std::cell::Cell;
use std::cell::RefCell;
use std::collections::BTreeMap;
use tokio::time::Instant;

/// A wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wait {
    /// The engine has not got its fence on a device.
    Device(DeviceIndex),
    /// What an earlier daemon granted is not taken over.
    Adoption,
    /// A batch is being written to the catalog.
    Commit,
    /// Rights are being taken back.
    Revoke(TakingId, VolumeId),
    /// A job of the internal lane is under way at a device.
    Job(DeviceIndex, &'static str),
}

/// A wait that may be reported.
#[derive(Debug)]
pub(crate) struct ReportedWait {
    pub(crate) since: Instant,
    pub(crate) looked: Option<Instant>,
    /// The warning, once it is reported.
    pub(crate) text: Option<String>,
}

/// The waits that are under way.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// Waits that calls have announced.
    pub(crate) begun: RefCell<BTreeMap<u64, Wait>>,
    next: Cell<u64>,
    /// By the announcement's number; 0: seen in the state.
    pub(crate) seen: RefCell<BTreeMap<(Wait, u64), ReportedWait>>,
}

/// Ends the announcement when it is dropped.
pub(crate) struct WaitGuard<'a>(&'a Waits, u64);

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        self.0.begun.borrow_mut().remove(&self.1);
    }
}

impl Waits {
    /// Announces a wait. It ends when the returned guard is dropped.
    pub(crate) fn begin(&self, wait: Wait) -> WaitGuard<'_> {
        let number = self.next.get() + 1;
        self.next.set(number);
        self.begun.borrow_mut().insert(number, wait);
        WaitGuard(self, number)
    }

    /// What people are told.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let seen = self.seen.borrow();
        seen.values().filter_map(|one| one.text.clone()).collect()
    }

    /// Whether people are told of a device that is not served yet.
    pub(crate) fn is_any_device_told(&self) -> bool {
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
