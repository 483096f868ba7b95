//! Runs operations on a device in a ring and memory of its own, and resubmits rests.

use std::collections::HashMap;
use std::time::Duration;

pub use fastrand::Rng;
use rustix::io::Errno;

use crate::device::Device;
use crate::fixed::Pinned;
use crate::mem::{Buf, StaticRegion};
use crate::op::{Finish, Op, Submitted};
use crate::ring::{Completion, Ring, RingOptions, Wake};
use crate::vectors::Vectors;

pub(super) const HANG: Duration = Duration::from_secs(60);
pub(super) const SLOTS: u32 = 64;
pub(super) const SLOT_BYTES: u32 = 256 * 1024;
pub(super) const PIECES: usize = 64;

/// Runs operations on one device, many at once if wanted.
#[derive(Debug)]
pub struct Driver {
    /// The ring.
    pub ring: Ring,
    region: StaticRegion,
    running: HashMap<u64, Op>,
    pub(super) lists: Vectors,
}

impl Driver {
    /// A driver with a small ring, so that it gets full.
    pub fn new() -> Self {
        Self::with_ring(&RingOptions {
            entries: 16,
            cq_entries: 64,
            ..RingOptions::default()
        })
    }

    /// A driver with another ring.
    pub fn with_ring(options: &RingOptions) -> Self {
        Self {
            ring: Ring::new(options).expect("io_uring works here"),
            region: StaticRegion::anonymous((SLOTS * SLOT_BYTES) as usize).expect("memory"),
            running: HashMap::new(),
            lists: Vectors::new(SLOTS as usize, PIECES).expect("memory"),
        }
    }

    /// A driver with registered memory; `None` before Linux 6.13.
    pub fn registered() -> Option<Self> {
        let mut driver = Self::new();
        let pinned = Pinned::of_region(&driver.region).expect("16 MiB can be held");
        driver.ring.register(pinned).ok()?;
        Some(driver)
    }

    /// The first `len_bytes` of a slot.
    pub fn buf(&self, slot: u32, len_bytes: u32) -> Buf {
        assert!(slot < SLOTS && len_bytes <= SLOT_BYTES);
        self.region
            .buf((slot * SLOT_BYTES) as usize, len_bytes)
            .expect("inside")
    }

    /// Fills a slot.
    pub fn fill(&self, slot: u32, bytes: &[u8]) -> Buf {
        assert!(self.region.copy_in((slot * SLOT_BYTES) as usize, bytes));
        self.buf(slot, bytes.len() as u32)
    }

    /// The content of a slot.
    pub fn bytes(&self, slot: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(
            self.region
                .copy_out((slot * SLOT_BYTES) as usize, &mut bytes)
        );
        bytes
    }

    /// Starts an operation; returns its result if it ended.
    pub fn start(&mut self, device: &Device, op: Op, user_data: u64) -> Option<Result<(), Errno>> {
        if device.is_native() {
            self.ring.prepare_native().expect("a second ring");
        }
        let mut op = op;
        loop {
            match device.queue(&mut self.ring, &mut op, user_data) {
                Submitted::Done(result) => return Some(result),
                Submitted::Queued => {
                    assert!(self.running.insert(user_data, op).is_none(), "mark in use");
                    return None;
                }
                Submitted::RingFull => {
                    self.ring.submit().expect("submit");
                }
                Submitted::NotReady => panic!("no image is open"),
            }
        }
    }

    /// Waits for the end of any operation.
    pub fn next(&mut self, device: &Device) -> (u64, Result<(), Errno>) {
        loop {
            let mut done = [Completion::default(); 1];
            while self.ring.drain(&mut done) == 0 {
                let wake = self.ring.wait(1, Some(HANG)).expect("wait");
                assert_ne!(wake, Wake::TimedOut, "an operation hangs");
            }
            let [Completion { user_data, result }] = done;
            let op = self.running.remove(&user_data).expect("a known mark");
            match device.finish(op, result) {
                Finish::Done => return (user_data, Ok(())),
                Finish::Failed(errno) => return (user_data, Err(errno)),
                Finish::Again(rest) => {
                    if let Some(result) = self.start(device, rest, user_data) {
                        return (user_data, result);
                    }
                }
            }
        }
    }

    /// Runs one operation to its end.
    pub fn run(&mut self, device: &Device, op: Op) -> Result<(), Errno> {
        match self.start(device, op, 0) {
            Some(result) => result,
            None => self.next(device).1,
        }
    }

    /// Reads a range that fits a slot.
    pub fn read(&mut self, device: &Device, offset_bytes: u64, len: usize) -> Vec<u8> {
        let buf = self.buf(0, len as u32);
        self.run(device, Op::read(offset_bytes, buf)).expect("read");
        self.bytes(0, len)
    }

    /// Writes a range.
    pub fn write(&mut self, device: &Device, offset_bytes: u64, bytes: &[u8]) {
        let buf = self.fill(0, bytes);
        self.run(device, Op::write(offset_bytes, buf))
            .expect("write");
    }
}

impl Default for Driver {
    fn default() -> Self {
        Self::new()
    }
}

/// `len` random bytes.
pub fn random_bytes(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}
