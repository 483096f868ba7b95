//! State that a reactor's connections share. **Not here:** how much each may hold
//! ([`super::quotas`]).

use super::quotas::{LaneUse, Use};
use super::send_lists::BufferPool;
use crate::core::FrontendIndex;
use crate::core::staging::StagingBuffer;
use crate::io::records::keep_for_ever;
use crate::memory::Memory;
use forebay_nvme::tcp;
use forebay_xlate::boundary::region::{MAX_TENANTS, Region};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

pub(super) struct Shared {
    pub frontend: FrontendIndex,
    pub region: &'static Region,
    pub memory: &'static Memory,
    pub epoll: Arc<OwnedFd>,
    /// Unanswered R2Ts; each holds staging memory.
    pub r2ts: Cell<u32>,
    /// What each lane holds, and how many hold anything.
    pub lanes: RefCell<BTreeMap<u32, Rc<LaneUse>>>,
    pub lanes_holding: Cell<u32>,
    pub tenants: Box<[Use]>,
    pub pool: RefCell<BufferPool>,
    /// Reservation commands to handle: connection, its generation, slot.
    pub reserve: RefCell<Vec<(u32, u32, u16)>>,
    /// The length and digest of the last all-zero answer.
    zeros_digest: Cell<(usize, u32)>,
}

impl Shared {
    pub(super) fn new(
        frontend: FrontendIndex,
        region: &Arc<Region>,
        memory: &'static Memory,
        epoll: Arc<OwnedFd>,
    ) -> Self {
        Self {
            frontend,
            region: keep_for_ever(region),
            memory,
            epoll,
            r2ts: Cell::new(0),
            lanes: RefCell::default(),
            lanes_holding: Cell::new(0),
            tenants: (0..MAX_TENANTS).map(|_| Use::default()).collect(),
            pool: RefCell::default(),
            reserve: RefCell::default(),
            zeros_digest: Cell::new((0, tcp::crc32c(&[]))),
        }
    }

    #[inline]
    pub(super) fn digest(&self, buffer: &StagingBuffer, len: usize) -> u32 {
        let of_bytes = || tcp::crc32c(&buffer.as_slice()[..len]);
        if !buffer.is_zeros() {
            return of_bytes();
        }
        if self.zeros_digest.get().0 != len {
            self.zeros_digest.set((len, of_bytes()));
        }
        self.zeros_digest.get().1
    }
}
