//! Who holds how much of the reactor's staging memory, so that one tenant can't hold all of it.
//!
//! **Design.** Every buffer is counted for its connection, for its lane (the export), and for its lane's tenant, where
//! that is known: where tenants have budgets. A lane that
//! holds something already gets no more than its share of the memory for large transfers; the share
//! shrinks with the number of lanes that hold any, and never below two of the longest transfers. A tenant, and a lane
//! that is nobody's, gets no more than it leaves to all others, of buffers for such a transfer: whatever its hosts
//! ask for, by however many volumes and connections, and whether or not they send what they are asked for. The
//! same for R2Ts that hosts have not answered.
//!
//! **Not here:** budgets; this only keeps the others going.

use super::Frontend;
use super::shared::Shared;
use crate::core::Core;
use crate::core::staging::{MAX_TRANSFER_BYTES, Staging};
use crate::lane::LaneIndex;
use std::cell::Cell;
use std::rc::Rc;

/// What lanes share among them: about the memory in each class of large buffers.
const SHARED_BYTES: u64 = 32 << 20;
/// Who holds no more is left alone.
const LEAST_BYTES: u64 = 2 * MAX_TRANSFER_BYTES as u64;
/// R2Ts that hosts may have open: fewer than there are staging buffers larger than a capsule's data.
const MAX_R2TS: u32 = 768;
/// Those of one lane.
const MAX_R2TS_OF_LANE: u32 = 192;
/// No tenant's number.
const NOBODY: u32 = u32::MAX;

/// What a lane or a tenant holds.
#[derive(Debug, Default)]
pub(super) struct Use {
    bytes: Cell<u64>,
    r2ts: Cell<u32>,
}

impl Use {
    #[inline]
    fn take(&self, len_bytes: u64) {
        self.bytes.set(self.bytes.get() + len_bytes);
    }

    #[inline]
    fn give(&self, len_bytes: u64) {
        self.bytes.set(self.bytes.get() - len_bytes);
    }
}

/// A lane's.
#[derive(Debug)]
pub(super) struct LaneUse {
    own: Use,
    tenant: Cell<u32>,
}

impl Default for LaneUse {
    fn default() -> Self {
        Self {
            own: Use::default(),
            tenant: Cell::new(NOBODY),
        }
    }
}

impl Shared {
    /// A lane has connections, or is another tenant's: what they hold is that one's.
    pub(super) fn is_of(&self, lane: LaneIndex, core: &Core) {
        if let Some(of) = self.lanes.borrow().get(&lane.0) {
            self.give_to(
                of,
                core.lane(lane).and_then(|lane| Some(lane.share?.tenant)),
            );
        }
    }

    fn give_to(&self, lane: &LaneUse, tenant: Option<u32>) {
        let tenant = tenant.unwrap_or(NOBODY);
        let before = lane.tenant.replace(tenant);
        let (bytes, r2ts) = (lane.own.bytes.get(), lane.own.r2ts.get());
        if let Some(old) = self.tenants.get(before as usize) {
            old.give(bytes);
            old.r2ts.set(old.r2ts.get() - r2ts);
        }
        if let Some(new) = self.tenants.get(tenant as usize) {
            new.take(bytes);
            new.r2ts.set(new.r2ts.get() + r2ts);
        }
    }
}

impl Frontend {
    /// Volumes may be other tenants' than they were.
    pub(crate) fn shares_changed(&self, core: &Core) {
        for (lane, of) in self.shared.lanes.borrow().iter() {
            let lane = core.lane(LaneIndex(*lane));
            (self.shared).give_to(of, lane.and_then(|lane| Some(lane.share?.tenant)));
        }
    }
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

    #[inline]
    fn tenant(&self) -> Option<&Use> {
        self.shared.tenants.get(self.lane.tenant.get() as usize)
    }

    /// Whether the lane may have so much more.
    #[inline]
    pub(super) fn may_take(&self, len_bytes: u32, staging: &Staging) -> bool {
        let len = u64::from(len_bytes);
        let held = self.lane.own.bytes.get();
        let all = self.tenant().unwrap_or(&self.lane.own).bytes.get();
        let lanes = u64::from(self.shared.lanes_holding.get());
        (held == 0 || held + len <= (SHARED_BYTES / (lanes + 1)).max(LEAST_BYTES))
            && (all + len <= LEAST_BYTES || all + len <= staging.left_bytes_for(len_bytes))
    }

    /// Whether the lane may ask a host for more data.
    #[inline]
    pub(super) fn may_ask(&self) -> bool {
        let (own, left) = (
            &self.lane.own,
            MAX_R2TS.saturating_sub(self.shared.r2ts.get()),
        );
        own.r2ts.get() < MAX_R2TS_OF_LANE && self.tenant().unwrap_or(own).r2ts.get() < left
    }

    #[inline]
    pub(super) fn take(&mut self, len_bytes: usize) {
        let len = len_bytes as u64;
        if self.lane.own.bytes.get() == 0 {
            self.shared
                .lanes_holding
                .set(self.shared.lanes_holding.get() + 1);
        }
        self.bytes += len;
        self.lane.own.take(len);
        if let Some(tenant) = self.tenant() {
            tenant.take(len);
        }
    }

    #[inline]
    pub(super) fn give(&mut self, len_bytes: usize) {
        let len = len_bytes as u64;
        self.bytes -= len;
        self.lane.own.give(len);
        if let Some(tenant) = self.tenant() {
            tenant.give(len);
        }
        if self.lane.own.bytes.get() == 0 {
            self.shared
                .lanes_holding
                .set(self.shared.lanes_holding.get() - 1);
        }
    }

    /// An R2T was sent.
    pub(super) fn asked(&self) {
        for r2ts in self.r2ts() {
            r2ts.set(r2ts.get() + 1);
        }
    }

    /// An R2T is answered, or given up.
    pub(super) fn answered(&self) {
        for r2ts in self.r2ts() {
            r2ts.set(r2ts.get() - 1);
        }
    }

    /// Where an R2T counts.
    fn r2ts(&self) -> impl Iterator<Item = &Cell<u32>> {
        let tenant = self.tenant().map(|tenant| &tenant.r2ts);
        [&self.lane.own.r2ts, &self.shared.r2ts]
            .into_iter()
            .chain(tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::staging::StagingBuffer;
    use crate::memory::Memory;
    use forebay_xlate::boundary::region::Region;
    use std::sync::Arc;

    struct Rig {
        shared: Rc<Shared>,
        staging: Staging,
        taken: Vec<StagingBuffer>,
    }

    fn rig() -> Rig {
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
        let region = Arc::new(Region::anonymous(1).unwrap());
        let memory = Memory::create().unwrap();
        Rig {
            shared: Rc::new(Shared::new(&region, memory, Arc::new(epoll.unwrap()))),
            staging: Staging::over(memory.reactor(0).unwrap().staging),
            taken: Vec::new(),
        }
    }

    impl Rig {
        fn lane(&self, lane: u32, tenant: Option<u32>) -> Held {
            let held = Held::new(&self.shared, Some(LaneIndex(lane)));
            self.shared.give_to(&held.lane, tenant);
            held
        }

        fn may_take(&self, held: &Held) -> bool {
            held.may_take(MAX_TRANSFER_BYTES, &self.staging)
        }

        /// Takes as many of the longest buffers as it gets.
        fn fill(&mut self, held: &mut Held) -> u64 {
            while self.may_take(held)
                && let Some(buffer) = self.staging.take(MAX_TRANSFER_BYTES)
            {
                held.take(buffer.len());
                self.taken.push(buffer);
            }
            held.bytes
        }

        fn empty(&mut self, held: &mut Held) {
            while held.bytes > 0 {
                held.give(MAX_TRANSFER_BYTES as usize);
                self.staging.give(self.taken.pop().unwrap());
            }
        }
    }

    #[test]
    fn a_greedy_lane_leaves_something_for_others() {
        let mut rig = rig();
        // Two connections of one lane share its share.
        let mut greedy = rig.lane(1, None);
        let mut more = rig.lane(1, None);
        let first = rig.fill(&mut greedy);
        assert_eq!((first, rig.fill(&mut more)), (SHARED_BYTES / 2, 0));
        let mut other = rig.lane(2, None);
        let second = rig.fill(&mut other);
        assert!(second >= LEAST_BYTES && first + second < SHARED_BYTES);
        while greedy.may_ask() {
            greedy.asked();
        }
        assert!(!more.may_ask() && other.may_ask());
        rig.empty(&mut greedy);
        assert_eq!(rig.shared.lanes_holding.get(), 1);
        assert!(rig.may_take(&more));
    }

    #[test]
    fn a_tenant_of_many_volumes_leaves_as_much_to_others_as_it_has() {
        let mut rig = rig();
        let mut greedy: Vec<Held> = (0..100).map(|lane| rig.lane(lane, Some(7))).collect();
        for held in &mut greedy {
            rig.fill(held);
            while held.may_ask() {
                held.asked();
            }
        }
        let of = |rig: &Rig, tenant: usize| {
            let tenant = &rig.shared.tenants[tenant];
            (tenant.bytes.get(), tenant.r2ts.get())
        };
        assert_eq!(of(&rig, 7), (SHARED_BYTES / 2, MAX_R2TS / 2));
        let mut other = rig.lane(200, Some(8));
        let nobodys = rig.lane(201, None);
        assert!(other.may_ask() && nobodys.may_ask());
        assert!(rig.fill(&mut other) >= LEAST_BYTES && rig.may_take(&nobodys));
        // A volume becomes another tenant's with all that it has.
        let (bytes, r2ts) = of(&rig, 7);
        rig.shared.give_to(&greedy[0].lane, Some(9));
        let (held, asked) = of(&rig, 9);
        assert!(held > 0 && asked > 0);
        assert_eq!(of(&rig, 7), (bytes - held, r2ts - asked));
        for held in &mut greedy {
            rig.empty(held);
            while held.lane.own.r2ts.get() > 0 {
                held.answered();
            }
        }
        assert_eq!((of(&rig, 7), of(&rig, 9)), ((0, 0), (0, 0)));
    }
}
