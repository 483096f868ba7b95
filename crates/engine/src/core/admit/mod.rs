//! Who may begin a command now: the crate `qos` in a reactor.
//!
//! **Design.** Each command is charged when it would begin ([`Core::begin`], [`Core::at_once`]), whichever frontend it came by.
//! One that is not admitted waits in its lane's queue, which runs through the slab ([`Stage::Throttled`]); what is younger in
//! its lane waits behind it, so nothing is overtaken. At a window's end everything is given out anew, and in each
//! turn what waits is asked again, lane after lane.
//!
//! A lane begins only a quantum of commands in a turn ([`gates`]); the rest goes on in the next. So turns stay short, and whoever is
//! within its base waits for no neighbour's whole queue. This is not over budget, and not counted as such.
//!
//! What counts as time over budget is counted by lane ([`Core::over_ns`]): while the first that waits there was refused, all wait for
//! that, those too for which there is no place here. Each notes when it begins to wait, and when it doesn't any more.
//!
//! A machine's commands stay in its ring while its lane has enough that wait ([`Core::may_fetch`]).
//!
//! What waits is ended by whatever ends waiting commands ([`Core::end_waiting`]); for the budget alone it waits without end.
//! Commands that a dead engine had begun are not charged, nor is what the internal lane does.
//!
//! **Not here:** what is given to whom (`forebay_qos`), what the daemon says of it ([`crate::control`]).

mod costs;
mod delays;
mod gates;
#[cfg(test)]
mod tests;

use super::io::{CommandRef, IoOp, Stage, Token};
use super::{Core, OWNER_WAIT_LIMIT_NS};
use crate::lane::{LaneIndex, Share};
use forebay_nvme::Status;
use forebay_qos::budget::Budget;
use forebay_qos::cost::Operation;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::region::{MAX_LANES, bump};

#[cfg(test)]
pub(super) use gates::ALONE_WINDOWS;
pub use gates::Admission;
pub(super) use gates::TURN_NS;

/// So many windows later than they end, who sleeps says that nobody uses anything any more, where others don't wait for that.
const RECKONED_WINDOWS: u64 = 8;

impl Core {
    /// I/O is admitted by this from now on; `None`: all of it is. What waits begins.
    pub fn set_admission(&mut self, admission: Option<Box<Admission>>) {
        let old = std::mem::replace(&mut self.admission, admission);
        if let Some(admission) = &mut self.admission {
            for lane in self.lanes.iter().flatten() {
                admission.attach(lane, &self.ios);
            }
            if let Some(old) = &old {
                admission.go_on_counting(old, self.now_ns);
            }
        }
        self.note_devices();
        let Some(mut old) = old else {
            return;
        };
        let mut waited = std::mem::take(&mut self.scratch);
        old.give_up(&mut self.ios, &mut waited);
        for index in waited.drain(..) {
            // Who still has to wait does so again, in the same order.
            let token = Token::take(index);
            let io = &self.ios[token.index()];
            let (lane, op, record) = (io.lane, io.op, io.record);
            if self.is_admitted(lane, &op, record) {
                self.waited(index, &mut old);
                self.ios[token.index()].deadline_ns = self.now_ns + OWNER_WAIT_LIMIT_NS;
                self.blame(Some(index));
                self.begin_admitted(token);
            } else if let Some(admission) = &mut self.admission {
                admission.push(token.entrust(), &mut self.ios, self.now_ns);
            }
        }
        self.blame(None);
        self.scratch = waited;
        old.record_all(self.record, &self.region);
    }

    /// A tenant is another from now on.
    pub fn begin_tenant(&mut self, tenant: u32) {
        if let Some(admission) = &mut self.admission {
            admission.begin_tenant(tenant);
        }
    }

    /// A tenant has this budget from now on; `guaranteed`: its base comes first, where bases come to more than there is.
    pub fn set_budget(&mut self, tenant: u32, budget: &Budget, guaranteed: bool) {
        if let Some(admission) = &mut self.admission {
            admission.set_budget(tenant, budget, guaranteed);
        }
    }

    /// A volume is this tenant's from now on; `None`: nobody's.
    pub fn set_share(&mut self, volume: VolumeId, share: Option<Share>) {
        for lane in self.lanes.iter_mut().flatten() {
            if lane.volume.id() == volume {
                lane.share = share;
                if let Some(admission) = &mut self.admission {
                    admission.attach(lane, &self.ios);
                }
            }
        }
    }

    /// A lane is there, or shows something else.
    pub(super) fn attach(&mut self, index: LaneIndex) {
        let lane = self.lanes[index.0 as usize].as_ref();
        if let (Some(admission), Some(lane)) = (&mut self.admission, lane) {
            admission.attach(lane, &self.ios);
        }
    }

    /// A lane is gone.
    pub(super) fn detach(&mut self, index: LaneIndex) {
        if let Some(admission) = &mut self.admission {
            admission.detach(index.0 as usize % MAX_LANES, &self.ios);
        }
    }

    /// Whether a machine's lane may take commands from its rings. Who may not, goes on by itself: the
    /// reactor makes a turn, or wakes when the window ends.
    #[inline]
    pub(crate) fn may_fetch(&mut self, lane: LaneIndex) -> bool {
        let admission = self.admission.as_ref();
        if admission.is_none_or(|a| !a.stops) {
            return true;
        }
        // Without room for it, it needs no part of the turn.
        self.may_hold(lane)
            && (self.admission.as_mut()).is_none_or(|admission| admission.may_fetch(lane))
    }

    /// Whether a command of a lane that is over without having begun, as it is refused or only a hint, may be answered in this turn. If
    /// not, it stays where it is.
    #[inline]
    pub(crate) fn may_answer(&mut self, lane: Option<LaneIndex>) -> bool {
        match (&mut self.admission, lane) {
            (Some(admission), Some(lane)) => admission.may_answer(lane),
            _ => true,
        }
    }

    /// Whether a machine's lane waits for a window, so that there is no use in looking at its rings: it has enough that waits,
    /// or all lanes together have.
    #[inline]
    pub(crate) fn is_held_back(&self, lane: LaneIndex) -> bool {
        let admission = self.admission.as_ref().filter(|a| a.stops);
        admission.is_some_and(|a| a.is_full(lane) || !self.may_hold(lane))
    }

    /// Whether commands of a lane wait for a turn of theirs, and for nothing else.
    #[inline]
    pub(crate) fn waits_for_turns(&self, lane: LaneIndex) -> bool {
        let admission = self.admission.as_ref().filter(|a| a.stops);
        admission.is_some_and(|a| a.waits_for_turns(lane))
    }

    /// Whether lanes are above their base, or others wait: then it matters who is first.
    #[inline]
    pub(crate) fn somebody_bursts(&self) -> bool {
        (self.admission.as_ref()).is_some_and(|a| a.contended)
    }

    /// Whether a lane that has nothing to begin now may have something at any time, and is to be served at once then: it is within
    /// its base, and others burst.
    pub(crate) fn is_calm(&self, lane: LaneIndex) -> bool {
        (self.admission.as_ref()).is_some_and(|admission| admission.is_calm(lane))
    }

    /// Whether a command may begin; if so, it is paid for. One that a dead engine had begun may.
    pub(super) fn is_admitted(&mut self, lane: LaneIndex, op: &IoOp, record: CommandRef) -> bool {
        let is_carried = || self.carried.any() && self.carried.is_carried(record);
        self.admission.is_none() || is_carried() || self.is_new_admitted(lane, op)
    }

    /// The same of one that no dead engine had begun.
    #[inline(always)]
    pub(super) fn is_new_admitted(&mut self, lane: LaneIndex, op: &IoOp) -> bool {
        let Some(admission) = &mut self.admission else {
            return true;
        };
        match *op {
            IoOp::Read { len_bytes, .. } => admission.admit(lane, Operation::Read, len_bytes),
            IoOp::Write { len_bytes, .. } => admission.admit(lane, Operation::Write, len_bytes),
            _ => admission.admit_any(lane, op),
        }
    }

    /// How long a lane has waited for its budget so far. A frontend that sets a command aside says with it, when it comes
    /// ([`super::NewIo::over_ns`]), what this was then.
    pub(crate) fn over_ns(&self, lane: LaneIndex) -> u64 {
        let admission = self.admission.as_ref();
        admission.map_or(0, |a| a.over_ns(lane, self.now_ns))
    }

    /// Sets a command aside until it is admitted.
    #[cold]
    pub(super) fn throttle(&mut self, token: Token) {
        let io = &mut self.ios[token.index()];
        io.stage = Stage::Throttled;
        // However small a budget is, waiting for it is no failure.
        io.deadline_ns = u64::MAX;
        self.count_throttled(token.index(), true);
        let index = token.entrust();
        if let Some(admission) = &mut self.admission {
            admission.push(index, &mut self.ios, self.now_ns);
        }
    }

    /// A command waits for its budget no more.
    fn waited(&mut self, index: u32, admission: &mut Admission) {
        self.count_throttled(index as usize, false);
        self.count_over(index, admission);
        let io = &mut self.ios[index as usize];
        io.stage = Stage::Moving;
        // What is left from there on is the devices' time.
        io.started_ns = io.started_ns.max(self.now_ns);
    }

    /// The time that a command waited because its lane was over budget is counted: here, and before it came.
    fn count_over(&mut self, index: u32, admission: &mut Admission) {
        let io = &mut self.ios[index as usize];
        let over_ns = admission.was_over_budget(io, self.now_ns);
        io.over_ns = None;
        let lane = self.lanes[io.lane.0 as usize].as_ref();
        if let Some(lane) = lane.filter(|_| over_ns > 0) {
            let record = lane.record();
            bump(&record.throttled_ops, 1);
            record.throttled_times.record(over_ns);
        }
    }

    /// A command that had waited in its frontend begins at once.
    #[cold]
    pub(super) fn waited_elsewhere(&mut self, index: u32) {
        if let Some(mut admission) = self.admission.take() {
            self.count_over(index, &mut admission);
            self.admission = Some(admission);
        }
    }

    /// Begins a quantum of what waited and is admitted in this turn. How many commands those were: none, if there are no more.
    #[inline]
    pub(crate) fn begin_throttled(&mut self) -> usize {
        match &self.admission {
            Some(admission) if !admission.ready.is_empty() => self.begin_ready(),
            _ => 0,
        }
    }

    #[cold]
    fn begin_ready(&mut self) -> usize {
        let mut begun = 0;
        let mut of_lane = None;
        while let Some(index) =
            (self.admission.as_mut()).and_then(|a| a.next(of_lane, &mut self.ios, self.now_ns))
        {
            begun += 1;
            of_lane = Some(self.ios[index as usize].lane);
            self.begin_waited(index);
        }
        self.blame(None);
        begun
    }

    /// Begins a command that waits no more.
    pub(super) fn begin_waited(&mut self, index: u32) {
        self.no_longer_throttled(index);
        let io = &mut self.ios[index as usize];
        io.deadline_ns = self.now_ns + OWNER_WAIT_LIMIT_NS;
        self.blame(Some(index));
        self.begin_admitted(Token::take(index));
    }

    fn no_longer_throttled(&mut self, index: u32) {
        if let Some(mut admission) = self.admission.take() {
            self.waited(index, &mut admission);
            self.admission = Some(admission);
        }
    }

    /// Ends what waits for its budget and should have ended.
    pub(super) fn tick_throttled(&mut self, now: u64) {
        let Some(admission) = self.admission.as_mut().filter(|a| a.waits()) else {
            return;
        };
        let mut overdue = std::mem::take(&mut self.scratch);
        admission.take_overdue(&mut self.ios, now, &mut overdue);
        for index in overdue.drain(..) {
            self.no_longer_throttled(index);
            self.fail(Token::take(index), Status::COMMAND_INTERRUPTED);
        }
        self.scratch = overdue;
    }

    /// A turn begins: perhaps a window has ended.
    #[inline]
    pub(super) fn begin_admission(&mut self) {
        if let Some(admission) = &mut self.admission {
            admission.begin_turn(self.now_ns, self.record, &self.region);
        }
    }

    /// A turn had nothing to do.
    #[inline]
    pub(super) fn admission_is_idle(&mut self) {
        if let Some(admission) = &mut self.admission {
            admission.is_idle(&self.region);
            admission.delays.idle();
        }
    }

    /// Whether the next turn has something to begin.
    pub(crate) fn has_ready(&self) -> bool {
        let admission = self.admission.as_ref();
        admission.is_some_and(|a| !a.ready.is_empty() || a.again)
    }

    /// When the reactor must wake for a window's end: where nobody waits for it, some windows later. To wake for each is what who
    /// sleeps while its devices work would pay. What others have a part of, they are told in time: for two windows after each pause.
    pub(crate) fn window_ends_ns(&self) -> Option<u64> {
        let admission = self.admission.as_ref()?;
        let later_ns = RECKONED_WINDOWS * admission.scheduler.params().window_ns;
        let scheduler = &admission.scheduler;
        match admission.waits() || scheduler.shares_with_others() {
            true => Some(admission.ends_ns),
            false if scheduler.is_reckoned_with() => Some(admission.ends_ns + later_ns),
            false => None,
        }
    }

    /// The reactor slept until now: unless somebody waited for it, windows that ended meanwhile are lost to nobody.
    pub(super) fn woke(&mut self) {
        if let Some(admission) = self.admission.as_mut().filter(|a| !a.waits()) {
            admission.woke_ns = self.now_ns;
        }
    }
}
