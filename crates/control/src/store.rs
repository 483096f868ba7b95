//! A device's label and catalog area, as the pool wants it.
//!
//! Purpose: the pool's [`BlockStore`] over the device crate's synchronous access, within a time limit.
//! Design: a device that does not answer fails ([`BoundedStore`]), so that it holds nobody else up. Whoever
//! flushes the device past that and fails says so here: the kernel tells of an error only once.
//! Nothing is written to a device that another machine took over (`ownership`).
//! Not here: where label and catalog are (the pool), locks (`devices`).

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forebay_device::sync_io::SyncDevice;
use forebay_pool::{BlockStore, BoundedStore};

use crate::ownership::Tenure;

/// How long a device may take for one request to its label or catalog area.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// See the module's text.
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

    /// The same device as if nothing had been asked of it: what failed before is not told of.
    pub(crate) fn anew(&self) -> BoundedStore {
        BoundedStore::new(self.0.clone(), ANSWER_LIMIT)
    }

    /// One whose device may take so long for everything together, until its pool is open.
    pub(crate) fn opening(device: SyncDevice, limit: Duration) -> Self {
        let store = Self::new(device);
        store.1.set_total(Some(limit));
        store
    }

    /// The pool is open: each request has its own limit.
    pub(crate) fn opened(&self) {
        self.1.set_total(None);
    }

    /// Whether opening it took too long.
    pub(crate) fn is_too_slow(&self) -> bool {
        self.1.is_used_up()
    }

    /// Whether a request is unanswered.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.1.is_waited_for()
    }

    /// From now on nothing is written unless the pool is still this daemon's.
    pub(crate) fn guard(&self, tenure: Arc<Tenure>) {
        // One that joined a pool stays there.
        let _ = self.2.set(tenure);
    }

    /// Whose the pool is, if its label has an owner.
    pub(crate) fn tenure(&self) -> Option<&Arc<Tenure>> {
        self.2.get()
    }

    /// Makes what anybody wrote to the device durable, however long that takes.
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
