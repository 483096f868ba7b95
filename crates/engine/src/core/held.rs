//! What commands hold that wait for a budget.
//!
//! **Design.** They wait in a place of the slab and with a buffer, which others then lack. So a lane has no more than
//! [`MAX_THROTTLED`] of them, and no more than its budget brings in a second, and all lanes together a part of what there is; but one
//! each, so that every lane goes on. What is beyond that waits where it came from: in its connection, without place and buffer, or
//! in its machine's rings. It is tried again each turn, and when a window's end begins some there is room for as many.
//!
//! Where somebody else waits for them who may not wait so long (a machine's monitor that takes memory away, or stops a ring; a
//! shutdown), they begin at once ([`Core::begin_owing`]), and what they cost is owed: later windows give their tenant less. As
//! a lane has no more than may be owed at once, only who does that again before it is paid waits for it, a second or so.
//!
//! **Not here:** who waits ([`super::admit`]).

use super::{Core, MAX_IOS};
use crate::lane::LaneIndex;
use std::sync::atomic::Ordering::Relaxed;

/// Commands of a lane that may wait for its budget: about two quanta. With more, their buffers leave the processor's cache.
const MAX_THROTTLED: u32 = 24;
/// Those of all lanes, but for the first of each.
const MAX_ALL: usize = MAX_IOS / 8;
/// The same of their buffers' bytes: half of what there is of the longest.
const MAX_ALL_BYTES: usize = 16 << 20;

/// Commands that wait for budgets.
#[derive(Default)]
pub(super) struct Throttled {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

impl Core {
    /// Whether a lane may have one more command that would have to wait for its budget.
    #[inline]
    pub(super) fn may_hold(&self, lane: LaneIndex) -> bool {
        match self.lanes.get(lane.0 as usize) {
            Some(Some(lane)) if lane.throttled > 0 => {
                let all = &self.throttled;
                let admission = self.admission.as_ref();
                lane.throttled < MAX_THROTTLED
                    && all.count < MAX_ALL
                    && all.bytes < MAX_ALL_BYTES
                    && admission.is_none_or(|a| a.may_hold(lane.index))
            }
            _ => true,
        }
    }

    /// Whether a host may be asked for data of a lane's command that would have to wait for its budget with it. Over budget, all
    /// lanes together leave half of what there is of buffers to others.
    pub(crate) fn may_ask(&self, lane: LaneIndex, len_bytes: u32) -> bool {
        match self.lane(lane) {
            Some(lane) if lane.throttled > 0 => self.staging.is_half_left_for(len_bytes),
            _ => true,
        }
    }

    /// A command begins to wait for its budget (`true`), or waits no more.
    pub(super) fn count_throttled(&mut self, index: usize, waits: bool) {
        let io = &self.ios[index];
        let bytes = io.buffer.as_ref().map_or(0, |buffer| buffer.len());
        let (all, by) = (&mut self.throttled, if waits { 1 } else { -1 });
        all.count = all.count.wrapping_add_signed(by);
        all.bytes = all.bytes.wrapping_add_signed(by * bytes as isize);
        if let Some(lane) = self.lanes[io.lane.0 as usize].as_mut() {
            lane.throttled = lane.throttled.wrapping_add_signed(by as i32);
            let now = u64::from(lane.throttled);
            lane.record().throttled.store(now, Relaxed);
        }
    }

    /// Begins what waits for a lane's budget, whatever that says. It is charged all the same, and where a tenant owes a second's
    /// worth already, who has it begin waits as well: or to do so again and again would be a way around its budget.
    pub(crate) fn begin_owing(&mut self, lane: LaneIndex) {
        if self.lane(lane).is_none_or(|lane| lane.throttled == 0) {
            return;
        }
        while let Some(index) =
            (self.admission.as_mut()).and_then(|a| a.take_owing(lane, &mut self.ios))
        {
            self.begin_waited(index);
        }
        self.blame(None);
    }
}
