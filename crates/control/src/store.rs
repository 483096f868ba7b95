//! A device's label and catalog area, as the pool wants it.
//!
//! Purpose: the pool's [`BlockStore`] over the device crate's synchronous access.
//! Design: nothing but the translation of one into the other.
//! Not here: where label and catalog are (the pool), locks (`devices`).

use std::io;

use forebay_device::sync_io::SyncDevice;
use forebay_pool::BlockStore;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct SyncStore(pub(crate) SyncDevice);

impl BlockStore for SyncStore {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, data)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn capacity(&self) -> io::Result<u64> {
        Ok(self.0.info().capacity_bytes)
    }

    fn waits_in_sync(&self) -> bool {
        true
    }

    fn will_read(&self, offset: u64, bytes: u64) {
        self.0.will_read(offset, bytes);
    }
}
