//! Warns when shared limits (exports, controllers, queues) are nearly reached. `status` counts in
//! the state region; the periodic check counts only if there are many connections.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;

use forebay_xlate::boundary::region::{MAX_CONTROLLERS, MAX_LANES, MAX_QUEUES};

use crate::events::EventFields;
use crate::health::reports::Reports;
use crate::model::LimitUse;
use crate::model::events::EventKind;

/// A limit counts as nearly reached from seven eighths, until below three quarters.
const LITTLE: u64 = 7;
const ENOUGH: u64 = 6;

impl LimitUse {
    fn new(what: &str, used: usize, most: usize) -> Self {
        Self {
            what: what.to_owned(),
            used: used as u64,
            most: most as u64,
        }
    }

    fn has_eighths(&self, eighths: u64) -> bool {
        self.used.saturating_mul(8) >= self.most.saturating_mul(eighths)
    }

    fn warning(&self) -> String {
        let Self { what, used, most } = self;
        let remedy = match &**what {
            "exports" => "no more can be created at the limit; delete unused ones",
            _ => {
                "at the limit, hosts are refused; disconnect some, or use fewer queues for each host (nvme connect \
                --nr-io-queues)"
            }
        };
        format!("{used} of {most} {what} are in use: {remedy}")
    }
}

impl Reports {
    /// The shared limits with their use.
    pub(crate) fn limits(&self) -> Vec<LimitUse> {
        let exports = self.base.core.borrow().pool.exports().iter().count();
        let mut all = vec![LimitUse::new("exports", exports, MAX_LANES)];
        if let Some(session) = self.link.session() {
            let (controllers, queues) = (session.region.controllers(), session.region.queues());
            let controllers = controllers.iter().filter(|c| c.used.load(Relaxed) != 0);
            let queues = queues.iter().filter(|q| q.used.load(Relaxed) != 0);
            all.push(LimitUse::new(
                "controllers",
                controllers.count(),
                MAX_CONTROLLERS,
            ));
            all.push(LimitUse::new("queues", queues.count(), MAX_QUEUES));
        }
        all
    }

    pub(crate) fn limit_warnings(&self) -> Vec<String> {
        let limits = self.limits().into_iter();
        let little = limits.filter(|limit| limit.has_eighths(LITTLE));
        little.map(|limit| limit.warning()).collect()
    }

    /// Whether any limit can be nearly reached.
    fn may_be_little(&self) -> bool {
        let exports = self.base.core.borrow().pool.exports().iter().count();
        let connections = self.link.session().map_or(0, |session| {
            let lanes = session.region.lanes().iter();
            let served = lanes.filter(|lane| lane.export.load(Relaxed) != 0);
            let connections = served.take(exports).map(|l| l.connections.load(Relaxed));
            connections.sum::<u64>()
        });
        exports >= MAX_LANES / 2 || connections >= MAX_CONTROLLERS as u64 / 2
    }

    /// Emits events once when a limit is nearly reached, and once when it no longer is.
    pub(crate) fn log_limits(&self, warned: &mut BTreeSet<String>) {
        if warned.is_empty() && !self.may_be_little() {
            return;
        }
        for limit in self.limits() {
            if limit.has_eighths(LITTLE) && warned.insert(limit.what.clone()) {
                self.base
                    .report(EventKind::Warning, limit.warning(), EventFields::default());
            } else if !limit.has_eighths(ENOUGH) && warned.remove(&limit.what) {
                let text = format!("there are enough {} again", limit.what);
                self.base
                    .report(EventKind::Warning, text, EventFields::default());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_is_left_from_seven_eighths_on() {
        let used = |used| LimitUse::new("queues", used, 4096);
        assert!(used(3584).has_eighths(LITTLE) && !used(3583).has_eighths(LITTLE));
        assert!(used(3583).has_eighths(ENOUGH) && !used(3071).has_eighths(ENOUGH));
        assert!(used(4000).warning().starts_with("4000 of 4096 queues"));
        let exports = LimitUse::new("exports", 1000, 1024).warning();
        assert!(exports.contains("delete") && !exports.contains("queues"));
    }
}
