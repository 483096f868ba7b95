//! Limits on staging memory and R2Ts, so that one tenant cannot hold everything.
//!
//! A buffer counts for its connection, its lane, and the lane's tenant if tenants have budgets, by
//! its real size and size class. A lane gets at most its part of the memory for large transfers.
//! That part shrinks with the number of lanes that hold any, to two of the longest transfers. A
//! tenant gets at most as many buffers of each size class as it leaves to others. So many small
//! buffers cannot use up the large ones, nor the reverse. R2Ts and in-capsule data follow the same
//! rule ([`ConnectionCharge::may_have`]).
//!
//! **Not here:** budgets; this only keeps other lanes working.

use super::NvmeTcp;
use super::shared::Shared;
use crate::core::Core;
use crate::core::staging::{MAX_TRANSFER_BYTES, SIZE_CLASSES, Staging, Taken};
use crate::lane::LaneIndex;
use std::cell::Cell;
use std::rc::Rc;

/// Memory that lanes share: about that of each class of large buffers.
const SHARED_BYTES: u64 = 32 << 20;
/// No limit below this.
const LEAST_BYTES: u64 = 2 * MAX_TRANSFER_BYTES as u64;
/// Open R2Ts per reactor: fewer than staging buffers that are larger than in-capsule data.
const MAX_R2TS: u32 = 768;
const MAX_R2TS_OF_LANE: u32 = 192;
const NOBODY: u32 = u32::MAX;

#[derive(Debug, Default)]
pub(super) struct Use {
    bytes: Cell<u64>,
    buffers: [Cell<u32>; SIZE_CLASSES],
    r2ts: Cell<u32>,
}

impl Use {
    #[inline]
    fn charge(&self, taken: Taken) {
        self.bytes.set(self.bytes.get() + taken.bytes);
        if let Some(buffers) = self.buffers.get(taken.class) {
            buffers.set(buffers.get() + 1);
        }
    }

    #[inline]
    fn release(&self, taken: Taken) {
        self.bytes.set(self.bytes.get() - taken.bytes);
        if let Some(buffers) = self.buffers.get(taken.class) {
            buffers.set(buffers.get() - 1);
        }
    }

    /// Adds a part's use to this sum (`true`), or subtracts it.
    fn move_all(&self, part: &Self, joins: bool) {
        let moved = |all: u64, part: u64| if joins { all + part } else { all - part };
        self.bytes.set(moved(self.bytes.get(), part.bytes.get()));
        let pairs = self.buffers.iter().zip(&part.buffers);
        for (all, part) in pairs.chain([(&self.r2ts, &part.r2ts)]) {
            all.set(moved(all.get().into(), part.get().into()) as u32);
        }
    }
}

#[derive(Debug)]
pub(super) struct LaneUse {
    own: Use,
    tenant: Cell<u32>,
    /// The tenant in whose sum it counts, if that tenant has other lanes.
    sum: Cell<u32>,
}

impl Default for LaneUse {
    fn default() -> Self {
        Self {
            own: Use::default(),
            tenant: Cell::new(NOBODY),
            sum: Cell::new(NOBODY),
        }
    }
}

impl Shared {
    /// A lane gets connections or another tenant.
    pub(super) fn is_of(&self, lane: LaneIndex, core: &Core) {
        if let Some(of) = self.lanes.borrow().get(&lane.0) {
            self.give_to(
                of,
                core.lane(lane).and_then(|lane| Some(lane.share?.tenant)),
            );
        }
    }

    pub(super) fn give_to(&self, lane: &LaneUse, tenant: Option<u32>) {
        let tenant = tenant.unwrap_or(NOBODY);
        if lane.tenant.get() == tenant {
            return;
        }
        self.count_in(lane, NOBODY);
        if tenant != NOBODY {
            let others = self.lanes.borrow();
            for other in others.values().filter(|one| one.tenant.get() == tenant) {
                self.count_in(other, tenant);
                self.count_in(lane, tenant);
            }
        }
        lane.tenant.set(tenant);
    }

    fn count_in(&self, lane: &LaneUse, sum: u32) {
        let before = lane.sum.replace(sum);
        if before == sum {
            return;
        }
        for (tenant, joins) in [(before, false), (sum, true)] {
            if let Some(tenant) = self.tenants.get(tenant as usize) {
                tenant.move_all(&lane.own, joins);
            }
        }
    }
}

impl NvmeTcp {}

pub(super) struct ConnectionCharge {
    pub bytes: u64,
    /// Commands that wait for their data.
    pub receiving: u32,
    lane: Rc<LaneUse>,
    shared: Rc<Shared>,
}

impl ConnectionCharge {
    /// Discovery and admin queues without a lane count alone.
    pub(super) fn new(shared: &Rc<Shared>, lane: Option<LaneIndex>) -> Self {
        let lane = lane.map(|lane| {
            let mut lanes = shared.lanes.borrow_mut();
            lanes.retain(|_, in_use| Rc::strong_count(in_use) > 1);
            lanes.entry(lane.0).or_default().clone()
        });
        Self {
            bytes: 0,
            receiving: 0,
            lane: lane.unwrap_or_default(),
            shared: shared.clone(),
        }
    }

    #[inline]
    fn tenant(&self) -> Option<&Use> {
        self.shared.tenants.get(self.lane.sum.get() as usize)
    }

    #[inline]
    pub(super) fn may_take(&self, len_bytes: u32, staging: &Staging) -> bool {
        let Some((next, left)) = staging.next_for(len_bytes) else {
            return true;
        };
        let charge = self.lane.own.bytes.get();
        let all = self.tenant().unwrap_or(&self.lane.own);
        let lanes = u64::from(self.shared.lanes_holding.get());
        let buffers = all.buffers.get(next.class).map_or(0, Cell::get);
        (charge == 0 || charge + next.bytes <= (SHARED_BYTES / (lanes + 1)).max(LEAST_BYTES))
            && (all.bytes.get() + next.bytes <= LEAST_BYTES || (buffers as usize) < left)
    }

    /// Whether the lane may have this for in-capsule data. If not, the stream behind it is not
    /// read, and may hold the very data that the tenant's other commands wait for. So commands that
    /// wait for data don't count; all others drain without the stream.
    #[inline]
    pub(super) fn may_have(&self, taken: Taken, staging: &Staging) -> bool {
        let all = self.tenant().unwrap_or(&self.lane.own);
        if all.bytes.get() + taken.bytes <= LEAST_BYTES {
            return true;
        }
        let buffers = all.buffers.get(taken.class).map_or(0, Cell::get);
        buffers.saturating_sub(all.r2ts.get()) as usize <= staging.left_of(taken.class)
    }

    #[inline]
    pub(super) fn may_ask(&self) -> bool {
        let (own, left) = (
            &self.lane.own,
            MAX_R2TS.saturating_sub(self.shared.r2ts.get()),
        );
        own.r2ts.get() < MAX_R2TS_OF_LANE && self.tenant().unwrap_or(own).r2ts.get() < left
    }

    #[inline]
    pub(super) fn add(&mut self, taken: Taken) {
        if self.lane.own.bytes.get() == 0 {
            self.shared
                .lanes_holding
                .set(self.shared.lanes_holding.get() + 1);
        }
        self.bytes += taken.bytes;
        self.lane.own.charge(taken);
        if let Some(tenant) = self.tenant() {
            tenant.charge(taken);
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, taken: Taken) {
        self.bytes -= taken.bytes;
        self.lane.own.release(taken);
        if let Some(tenant) = self.tenant() {
            tenant.release(taken);
        }
        if self.lane.own.bytes.get() == 0 {
            self.shared
                .lanes_holding
                .set(self.shared.lanes_holding.get() - 1);
        }
    }

    pub(super) fn asked(&mut self) {
        self.receiving += 1;
        for r2ts in self.r2ts() {
            r2ts.set(r2ts.get() + 1);
        }
    }

    pub(super) fn answered(&mut self) {
        self.receiving -= 1;
        for r2ts in self.r2ts() {
            r2ts.set(r2ts.get() - 1);
        }
    }

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
            shared: Rc::new(Shared::new(
                crate::core::FrontendIndex(0),
                &region,
                memory,
                Arc::new(epoll.unwrap()),
            )),
            staging: Staging::over(memory.reactor(0).unwrap().staging),
            taken: Vec::new(),
        }
    }

    impl Rig {
        fn fill_with(&mut self, charge: &mut ConnectionCharge, len_bytes: u32) -> usize {
            let before = self.taken.len();
            while charge.may_take(len_bytes, &self.staging)
                && let Some(buffer) = self.staging.allocate(len_bytes)
            {
                charge.add(buffer.taken());
                self.taken.push(buffer);
            }
            self.taken.len() - before
        }

        fn lane(&self, lane: u32, tenant: Option<u32>) -> ConnectionCharge {
            let charge = ConnectionCharge::new(&self.shared, Some(LaneIndex(lane)));
            self.shared.give_to(&charge.lane, tenant);
            charge
        }

        fn may_take(&self, charge: &ConnectionCharge) -> bool {
            charge.may_take(MAX_TRANSFER_BYTES, &self.staging)
        }

        fn of(&self, tenant: u32) -> (u64, u32) {
            let all = self.shared.lanes.borrow();
            let lanes = all.values().filter(|lane| lane.tenant.get() == tenant);
            let each = lanes.map(|lane| (lane.own.bytes.get(), lane.own.r2ts.get()));
            let each: Vec<(u64, u32)> = each.collect();
            let sum = (each.iter()).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
            let kept = &self.shared.tenants[tenant as usize];
            let kept = (kept.bytes.get(), kept.r2ts.get());
            assert_eq!(kept, if each.len() > 1 { sum } else { (0, 0) });
            sum
        }

        fn fill(&mut self, charge: &mut ConnectionCharge) -> u64 {
            self.fill_with(charge, MAX_TRANSFER_BYTES);
            charge.bytes
        }

        fn empty(&mut self, charge: &mut ConnectionCharge) {
            while charge.bytes > 0 {
                let buffer = self.taken.pop().unwrap();
                charge.remove(buffer.taken());
                self.staging.release(buffer);
            }
        }
    }

    #[test]
    fn a_greedy_lane_leaves_something_for_others() {
        let mut rig = rig();
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
    fn short_transfers_take_no_long_buffers_and_long_ones_no_short() {
        for (many, few) in [(512, MAX_TRANSFER_BYTES), (MAX_TRANSFER_BYTES, 512)] {
            let mut rig = rig();
            // The first tenant gets half of each size, the second half of the rest.
            let mut lanes: Vec<ConnectionCharge> = Vec::new();
            for tenant in [7, 8] {
                let left = rig.staging.next_for(many).unwrap().1;
                let mut sum = 0;
                for lane in 0..100 {
                    let mut charge = rig.lane(100 * tenant + lane, Some(tenant));
                    sum += rig.fill_with(&mut charge, many);
                    lanes.push(charge);
                }
                assert_eq!(sum, left / 2, "{many}: {tenant}");
            }
            let all = rig.staging.next_for(few).unwrap();
            assert_eq!(all.1, if few > many { 64 } else { 2048 });
            for tenant in [7, 9] {
                let mut charge = rig.lane(1000 + tenant, Some(tenant));
                assert!(rig.fill_with(&mut charge, few) > 0, "{tenant}");
            }
        }
    }

    /// In-capsule data: a tenant gets no more than it leaves, except for commands that wait for
    /// data behind it.
    #[test]
    fn in_capsule_data_leaves_buffers_to_other_tenants() {
        let mut rig = rig();
        let fill = |rig: &mut Rig, charge: &mut ConnectionCharge| {
            let mut sum = 0;
            while let Some(buffer) = rig.staging.allocate(512) {
                if !charge.may_have(buffer.taken(), &rig.staging) {
                    rig.staging.release(buffer);
                    break;
                }
                charge.add(buffer.taken());
                rig.taken.push(buffer);
                sum += 1;
            }
            sum
        };
        let mut greedy: Vec<ConnectionCharge> =
            (0..3).map(|lane| rig.lane(lane, Some(7))).collect();
        let had: Vec<usize> = greedy.iter_mut().map(|h| fill(&mut rig, h)).collect();
        assert_eq!(had, [1024, 0, 0]);
        greedy[0].asked();
        greedy[1].asked();
        assert_eq!(fill(&mut rig, &mut greedy[2]), 1);
        let mut other = rig.lane(10, Some(8));
        assert_eq!(fill(&mut rig, &mut other), 512);
        for charge in &mut greedy[..2] {
            charge.answered();
        }
    }

    #[test]
    fn replacing_a_buffer_by_zeros_keeps_its_charge() {
        let mut rig = rig();
        let mut charge = rig.lane(1, Some(7));
        let own = rig.staging.allocate(512).unwrap();
        charge.add(own.taken());
        assert_eq!(charge.bytes, 4096);
        let mut zeros = rig.staging.zeros(512).unwrap();
        zeros.counts_as(&own);
        rig.staging.release(own);
        assert!(zeros.is_zeros());
        charge.remove(zeros.taken());
        let all = &charge.lane.own;
        assert_eq!((charge.bytes, all.buffers[0].get()), (0, 0));
    }

    /// A tenant with one lane has no sum; it appears with the second lane.
    #[test]
    fn the_bytes_of_a_lone_lane_join_the_sum_of_its_tenant() {
        let mut rig = rig();
        let mut first = rig.lane(1, Some(7));
        let charge = rig.fill(&mut first);
        first.asked();
        assert_eq!(rig.of(7), (SHARED_BYTES / 2, 1));
        let mut second = rig.lane(2, Some(7));
        assert_eq!((rig.fill(&mut second), rig.of(7)), (0, (charge, 1)));
        // Moved to another tenant, a lane uses that one's limit, and brings its use back.
        rig.shared.give_to(&second.lane, Some(8));
        let more = rig.fill(&mut second);
        assert!(more > 0 && !rig.may_take(&first));
        let left = rig.shared.tenants[7].bytes.get();
        assert_eq!((left, rig.of(8)), (charge, (more, 0)));
        rig.shared.give_to(&second.lane, Some(7));
        assert_eq!(rig.of(7), (charge + more, 1));
        rig.shared.give_to(&first.lane, None);
        rig.shared.give_to(&second.lane, None);
        assert_eq!(rig.of(7), (0, 0));
        rig.empty(&mut second);
        rig.empty(&mut first);
        first.answered();
    }

    #[test]
    fn a_tenant_of_many_volumes_leaves_as_much_to_others_as_it_has() {
        let mut rig = rig();
        let mut greedy: Vec<ConnectionCharge> =
            (0..100).map(|lane| rig.lane(lane, Some(7))).collect();
        for charge in &mut greedy {
            rig.fill(charge);
            while charge.may_ask() {
                charge.asked();
            }
        }
        assert_eq!(rig.of(7), (SHARED_BYTES / 2, MAX_R2TS / 2));
        let mut other = rig.lane(200, Some(8));
        let nobodys = rig.lane(201, None);
        assert!(other.may_ask() && nobodys.may_ask());
        assert!(rig.fill(&mut other) >= LEAST_BYTES && rig.may_take(&nobodys));
        // A volume moves to another tenant with its use.
        let (bytes, r2ts) = rig.of(7);
        rig.shared.give_to(&greedy[0].lane, Some(9));
        let (charge, asked) = rig.of(9);
        assert!(charge > 0 && asked > 0);
        assert_eq!(rig.of(7), (bytes - charge, r2ts - asked));
        for charge in &mut greedy {
            rig.empty(charge);
            while charge.lane.own.r2ts.get() > 0 {
                charge.answered();
            }
        }
        assert_eq!((rig.of(7), rig.of(9)), ((0, 0), (0, 0)));
    }
}
