//! Storage of label and catalog. The daemon uses the `device` crate's [`SyncDevice`] behind a time
//! limit ([`BoundedStore`](crate::BoundedStore)).
//!
//! **Not here:** opening and locking devices, tenant data.

pub(crate) mod bounded;

use crate::layout::CATALOG_OFFSET_BYTES;
use forebay_device::sync_io::SyncDevice;
use std::{
    io,
    sync::{Mutex, PoisonError},
};

/// The unit of label and catalog I/O, in bytes.
pub const BLOCK_BYTES: usize = 4096;

/// Random access to a device's label and catalog area.
///
/// Offsets and lengths are multiples of [`BLOCK_BYTES`]. Until [`BlockStore::sync`] returns, a
/// power cut may tear, lose or reorder a write.
pub trait BlockStore: Send + Sync {
    /// Fills `buf`, or fails.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    /// Writes all of `data`, or fails.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Makes all completed writes durable.
    fn sync(&self) -> io::Result<()>;
    /// The device's size in bytes.
    fn capacity(&self) -> io::Result<u64>;
    /// Begins a sync, so that several devices sync at the same time. Each needs a
    /// [`BlockStore::end_sync`].
    fn begin_sync(&self) -> u64 {
        0
    }
    /// Ends a sync; later writes may not be durable.
    fn end_sync(&self, begun: u64) -> io::Result<()> {
        let _ = begun;
        self.sync()
    }
    /// Reads without waiting for the device; `false` if incomplete.
    fn try_read_at(&self, offset: u64, buf: &mut [u8]) -> bool {
        let _ = (offset, buf);
        false
    }
    /// Whether operations fail because one timed out.
    fn is_stuck(&self) -> bool {
        false
    }
    /// A hint: this range is read soon, in pieces.
    fn will_read(&self, offset: u64, bytes: u64) {
        let _ = (offset, bytes);
    }
}

/// A device in memory for tests, lazily allocated.
#[derive(Debug)]
pub struct MemStore {
    bytes: Mutex<Vec<u8>>,
}

impl MemStore {
    /// A device of `capacity_bytes` zeros.
    pub fn new(capacity_bytes: usize) -> Self {
        Self {
            bytes: Mutex::new(vec![0; capacity_bytes]),
        }
    }

    /// Changes the capacity, like truncating a file.
    pub fn set_capacity(&self, capacity_bytes: usize) {
        self.bytes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .resize(capacity_bytes, 0);
    }

    fn range(len: usize, offset: u64, count: usize) -> io::Result<std::ops::Range<usize>> {
        usize::try_from(offset)
            .ok()
            .and_then(|from| Some(from..from.checked_add(count)?))
            .filter(|range| range.end <= len)
            .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
    }
}

impl BlockStore for MemStore {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        buf.copy_from_slice(&bytes[Self::range(bytes.len(), offset, buf.len())?]);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let range = Self::range(bytes.len(), offset, data.len())?;
        bytes[range].copy_from_slice(data);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn capacity(&self) -> io::Result<u64> {
        Ok(self
            .bytes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len() as u64)
    }
}

/// Labels and heartbeats bypass the page cache: other machines may write there.
fn is_labels(offset: u64, len: usize) -> bool {
    offset.saturating_add(len as u64) <= CATALOG_OFFSET_BYTES
}

impl BlockStore for SyncDevice {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if is_labels(offset, buf.len()) {
            return self.read_direct_at(offset, buf);
        }
        SyncDevice::read_at(self, offset, buf)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if is_labels(offset, data.len()) {
            return self.write_direct_at(offset, data);
        }
        SyncDevice::write_at(self, offset, data)
    }

    fn sync(&self) -> io::Result<()> {
        SyncDevice::sync(self)
    }

    fn capacity(&self) -> io::Result<u64> {
        Ok(self.info().capacity_bytes)
    }

    fn try_read_at(&self, offset: u64, buf: &mut [u8]) -> bool {
        !is_labels(offset, buf.len()) && SyncDevice::try_read_at(self, offset, buf)
    }

    fn will_read(&self, offset: u64, bytes: u64) {
        SyncDevice::will_read(self, offset, bytes);
    }
}
