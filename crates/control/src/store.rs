//! The pool's [`BlockStore`] on a device's label and catalog area, with time limits.
//!
//! A device that does not answer fails ([`BoundedStore`]). Failures of other flushes are reported
//! here too, because the kernel reports an error only once. Nothing is written to a device that
//! another node took over (`ownership`).

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forebay_device::sync_io::SyncDevice;
use forebay_pool::{BlockStore, BoundedStore};

use crate::ownership::Tenure;

/// The limit of one request to a label or catalog area.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct SyncStore(
    pub(crate) Arc<SyncDevice>,
    BoundedStore,
    OnceLock<Arc<Tenure>>,
);

impl SyncStore {
    pub(crate) fn new(device: SyncDevice) -> Self {
        let device = Arc::new(device);
        let store = BoundedStore::new(device.clone(), ANSWER_LIMIT);
        Self(device, store, OnceLock::new())
    }

    /// A new store of this device, without its past failures.
    pub(crate) fn anew(&self) -> BoundedStore {
        BoundedStore::new(self.0.clone(), ANSWER_LIMIT)
    }

    /// `limit` bounds all requests together, until [`Self::opened`].
    pub(crate) fn opening(device: SyncDevice, limit: Duration) -> Self {
        let store = Self::new(device);
        store.1.set_total(Some(limit));
        store
    }

    pub(crate) fn opened(&self) {
        self.1.set_total(None);
    }

    pub(crate) fn is_too_slow(&self) -> bool {
        self.1.is_used_up()
    }

    pub(crate) fn is_waited_for(&self) -> bool {
        self.1.is_waited_for()
    }

    /// From now on, writes need the pool to be still this daemon's.
    pub(crate) fn guard(&self, tenure: Arc<Tenure>) {
        // A device never leaves its pool.
        let _ = self.2.set(tenure);
    }

    pub(crate) fn tenure(&self) -> Option<&Arc<Tenure>> {
        self.2.get()
    }

    /// Includes other processes' writes. Without a time limit.
    pub(crate) fn flush(&self) -> io::Result<()> {
        self.0
            .sync()
            .inspect_err(|error| self.1.note_failure(error))
    }
}

impl BlockStore for SyncStore {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.1.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if let Some(tenure) = self.2.get() {
            tenure.check(&self.1)?;
        }
        self.1.write_at(offset, data)
    }

    fn sync(&self) -> io::Result<()> {
        self.1.sync()
    }

    fn begin_sync(&self) -> u64 {
        self.1.begin_sync()
    }

    fn end_sync(&self, begun: u64) -> io::Result<()> {
        self.1.end_sync(begun)
    }

    fn is_stuck(&self) -> bool {
        self.1.is_stuck()
    }

    fn capacity(&self) -> io::Result<u64> {
        self.1.capacity()
    }

    fn will_read(&self, offset: u64, bytes: u64) {
        self.1.will_read(offset, bytes);
    }
}
