//! What a lane may begin in a round, under `wild`.
//!
//! **Design.** A weighted round robin, by the processor's time: in each round a lane may begin a *batch*
//! ([`Params::batch_ns`]), more or less of it as its tenant's base is more or less than the mean of those at work. What its last
//! I/O took more, its next batch has less (deficit round robin, Shreedhar and Varghese 1995), so sizes don't matter. A batch is
//! a lane's, not its tenant's: as with what this stands for, who has more queues has more.
//! **Not here:** when a round begins; burst limits, which hold as ever.
//!
//! [`Params::batch_ns`]: crate::params::Params::batch_ns

use super::Scheduler;
use crate::units::{PLENTY, Resource};

/// However small its base is, so much more is a lane's in each round, ns: rounds in which it begins nothing are not many.
const LEAST_NS: f32 = 500.0;

impl Scheduler {
    /// A round begins for this lane: its part ([`Self::part_ns`]) is a batch.
    pub fn begin_batch(&mut self, lane: usize) {
        let batch_ns = self.batch_ns(lane);
        let purse = &mut self.lanes[lane].purse;
        purse.set_part_ns(purse.part_ns().min(0).saturating_add(batch_ns));
    }

    fn batch_ns(&self, lane: usize) -> i32 {
        let mean_ns = self.params.batch_ns as f32;
        let tenant = self.tenants.get(self.lanes[lane].tenant as usize);
        let weight = tenant.map_or(0.0, |one| one.shared_base.0[Resource::Cpu as usize]);
        // Before the first window's end, all are alike.
        let batch_ns = match self.mean_weight > 0.0 {
            true => mean_ns * weight / self.mean_weight,
            false => mean_ns,
        };
        batch_ns.clamp(LEAST_NS, PLENTY as f32) as i32
    }
}
