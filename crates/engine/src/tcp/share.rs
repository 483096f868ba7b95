//! Who holds how much of the reactor's staging memory, so that one tenant can't hold all of it.
//!
//! **Design.** Every buffer is counted for its connection and for its lane (the export). A lane that
//! holds something already gets no more than its share of the memory for large transfers; the share
//! shrinks with the number of lanes that hold any, and never below two of the longest transfers. The
//! same for R2Ts that hosts have not answered.
//!
//! **Not here:** budgets; this only keeps the others going.

use super::shared::Shared;
use crate::core::staging::MAX_TRANSFER_BYTES;
use crate::lane::LaneIndex;
use std::cell::Cell;
use std::rc::Rc;

/// What lanes share among them: about the memory in each class of large buffers.
const SHARED_BYTES: u64 = 32 << 20;
const LEAST_BYTES: u64 = 2 * MAX_TRANSFER_BYTES as u64;
/// R2Ts that one lane may have open.
const MAX_R2TS_OF_LANE: u32 = 192;

/// What a lane holds.
#[derive(Debug, Default)]
pub(super) struct LaneUse {
    bytes: Cell<u64>,
    r2ts: Cell<u32>,
}

/// What a connection holds.
pub(super) struct Held {
    pub bytes: u64,
    lane: Rc<LaneUse>,
    shared: Rc<Shared>,
}

impl Held {
    /// Of a connection of this lane; discovery and admin queues without one count for themselves.
    pub(super) fn new(shared: &Rc<Shared>, lane: Option<LaneIndex>) -> Self {
        let lane = lane.map(|lane| {
            let mut lanes = shared.lanes.borrow_mut();
            // Of lanes that are gone, nobody else has the count.
            lanes.retain(|_, in_use| Rc::strong_count(in_use) > 1);
            lanes.entry(lane.0).or_default().clone()
        });
        Self {
            bytes: 0,
            lane: lane.unwrap_or_default(),
            shared: shared.clone(),
        }
    }

    /// Whether the lane may have so much more.
    #[inline]
    pub(super) fn may_take(&self, len_bytes: u64) -> bool {
        let held = self.lane.bytes.get();
        let lanes = u64::from(self.shared.lanes_holding.get());
        held == 0 || held + len_bytes <= (SHARED_BYTES / (lanes + 1)).max(LEAST_BYTES)
    }

    /// Whether the lane may ask a host for more data.
    #[inline]
    pub(super) fn may_ask(&self) -> bool {
        self.lane.r2ts.get() < MAX_R2TS_OF_LANE
    }

    #[inline]
    pub(super) fn take(&mut self, len_bytes: usize) {
        if self.lane.bytes.get() == 0 {
            self.shared
                .lanes_holding
                .set(self.shared.lanes_holding.get() + 1);
        }
        self.bytes += len_bytes as u64;
        self.lane
            .bytes
            .set(self.lane.bytes.get() + len_bytes as u64);
    }

    #[inline]
    pub(super) fn give(&mut self, len_bytes: usize) {
        self.bytes -= len_bytes as u64;
        self.lane
            .bytes
            .set(self.lane.bytes.get() - len_bytes as u64);
        if self.lane.bytes.get() == 0 {
            self.shared
                .lanes_holding
                .set(self.shared.lanes_holding.get() - 1);
        }
    }

    /// An R2T was sent.
    pub(super) fn asked(&self) {
        self.lane.r2ts.set(self.lane.r2ts.get() + 1);
        self.shared.r2ts.set(self.shared.r2ts.get() + 1);
    }

    /// An R2T is answered, or given up.
    pub(super) fn answered(&self) {
        self.lane.r2ts.set(self.lane.r2ts.get() - 1);
        self.shared.r2ts.set(self.shared.r2ts.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_xlate::boundary::region::Region;
    use std::sync::Arc;

    #[test]
    fn a_greedy_lane_leaves_something_for_others() {
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
        let region = Arc::new(Region::anonymous(1).unwrap());
        let memory = crate::memory::Memory::create().unwrap();
        let shared = Rc::new(Shared::new(&region, memory, Arc::new(epoll.unwrap())));
        let long = MAX_TRANSFER_BYTES as usize;
        let fill = |held: &mut Held| {
            while held.may_take(long as u64) {
                held.take(long);
            }
            held.bytes
        };
        // Two connections of one lane share its share.
        let mut greedy = Held::new(&shared, Some(LaneIndex(1)));
        let mut more = Held::new(&shared, Some(LaneIndex(1)));
        let first = fill(&mut greedy);
        assert_eq!((first, fill(&mut more)), (SHARED_BYTES / 2, 0));
        let mut other = Held::new(&shared, Some(LaneIndex(2)));
        let second = fill(&mut other);
        assert!(second >= LEAST_BYTES && first + second < SHARED_BYTES);
        while greedy.may_ask() {
            greedy.asked();
        }
        assert!(!more.may_ask() && other.may_ask());
        while greedy.bytes > 0 {
            greedy.give(long);
        }
        assert_eq!(shared.lanes_holding.get(), 1);
        assert!(more.may_take(long as u64));
    }
}
