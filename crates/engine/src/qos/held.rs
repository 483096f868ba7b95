//! Limits on memory held by commands that wait for a budget.
//!
//! **Design.** A lane has at most [`MAX_THROTTLED`] of them and a second's budget, all lanes
//! together a part of the slab; each lane may have one. Others stay in their connection or ring. If
//! a monitor or a shutdown waits for them, they begin as debt. **Not here:** their choice
//! ([`crate::qos`]).

use super::Qos;
use crate::io::command::Io;
use crate::io::lanes::Lanes;
use crate::io::slab::MAX_IOS;
use crate::io::staging::Staging;
use crate::lane::LaneIndex;
use forebay_xlate::boundary::region::MAX_LANES;
use std::sync::atomic::Ordering::Relaxed;

/// About two quanta; with more, buffers leave the processor's cache.
const MAX_THROTTLED: u32 = 24;
/// Throttled commands of all lanes; the first of each lane is always allowed.
const MAX_ALL: usize = MAX_IOS / 8;
const MAX_ALL_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(crate) struct Throttled {
    pub(crate) count: usize,
    pub(crate) bytes: usize,
    of_lane: Box<[u32]>,
}

impl Qos {
    #[inline]
    pub(crate) fn is_throttled(&self, lane: LaneIndex) -> bool {
        self.throttled.of(lane) > 0
    }

    #[inline]
    pub(crate) fn may_hold(&self, lane: LaneIndex) -> bool {
        let all = &self.throttled;
        let of_lane = all.of(lane);
        of_lane == 0
            || of_lane < MAX_THROTTLED
                && all.count < MAX_ALL
                && all.bytes < MAX_ALL_BYTES
                && (self.admission.as_ref()).is_none_or(|a| a.may_hold(lane))
    }

    /// To ask a host for data. Lanes over budget leave half of the buffers to others.
    pub(crate) fn may_ask(&self, staging: &Staging, lane: LaneIndex, len_bytes: u32) -> bool {
        !self.is_throttled(lane) || staging.is_half_left_for(len_bytes)
    }
}

impl Throttled {
    pub(crate) fn new() -> Self {
        Self {
            count: 0,
            bytes: 0,
            of_lane: vec![0; MAX_LANES].into(),
        }
    }

    #[inline]
    fn of(&self, lane: LaneIndex) -> u32 {
        self.of_lane[lane.0 as usize % MAX_LANES]
    }

    pub(crate) fn count(&mut self, io: &Io, lanes: &Lanes, waits: bool) {
        let bytes = io.buffer.as_ref().map_or(0, |buffer| buffer.len());
        let by = if waits { 1 } else { -1 };
        self.count = self.count.wrapping_add_signed(by);
        self.bytes = self.bytes.wrapping_add_signed(by * bytes as isize);
        let of_lane = &mut self.of_lane[io.lane.0 as usize % MAX_LANES];
        *of_lane = of_lane.wrapping_add_signed(by as i32);
        if let Some(lane) = lanes.get(io.lane) {
            lane.record().throttled.store((*of_lane).into(), Relaxed);
        }
    }
}
