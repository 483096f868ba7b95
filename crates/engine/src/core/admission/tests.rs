//! Budgets for tests of cores and frontends.

use super::super::Core;
use crate::lane::Share;
use crate::qos::Admission;
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::{self, CostTable, Profile};
use forebay_qos::ledger::Ledger;
use forebay_qos::params::Params;
use std::sync::Arc;

impl Core {
    /// One tenant with this budget, in windows of 1 ms.
    pub(crate) fn admit_all_by(&mut self, budget: &Budget) {
        self.admit_all_at(budget, &cost::CostTable::new(cost::default_profiles()));
    }

    pub(crate) fn routes_of(&self, tenant: usize) -> Option<forebay_qos::cost::Routes> {
        Some(self.qos.admission.as_ref()?.routes(tenant))
    }

    /// One tenant each, in windows of 1 ms.
    pub(crate) fn admit_each_by(&mut self, budgets: &[Budget]) {
        let costs = cost::CostTable::new(cost::default_profiles());
        self.admit_each_at(budgets, &costs);
    }

    pub(crate) fn begin_admission(&mut self) {
        let (record, now_ns) = (self.records.reactor, self.clock.now_ns);
        self.qos.begin_turn(now_ns, record, &self.region);
    }

    fn admit_all_at(&mut self, budget: &Budget, costs: &forebay_qos::cost::CostTable) {
        self.admit_each_at(std::slice::from_ref(budget), costs);
    }

    /// The last budget is for all remaining lanes.
    fn admit_each_at(&mut self, budgets: &[Budget], costs: &forebay_qos::cost::CostTable) {
        let params = Params {
            window_ns: 1_000_000,
            saved_windows: 1,
            ..Params::default()
        };
        let capacity = forebay_xlate::boundary::message::NodeCapacity::UNLIMITED.capacity(1);
        // One more for tests.
        let ledger = Arc::new(Ledger::new(budgets.len() + 1));
        let mut admission = Admission::new(params, &capacity.per_second(), costs, &ledger).unwrap();
        for (tenant, budget) in (0..).zip(budgets) {
            admission.set_budget(tenant, budget, false);
        }
        for (at, lane) in self.lanes.iter_mut().enumerate() {
            lane.share = Some(Share {
                tenant: at.min(budgets.len() - 1) as u32,
                budget: None,
            });
        }
        self.set_admission(Some(Box::new(admission)));
        self.begin_admission();
    }

    /// For cost measurements: ample budgets, refilled before each eighth round. Eight I/Os are at
    /// most a turn's part.
    pub(crate) fn admit_plenty(&mut self, round: u64) {
        if !round.is_multiple_of(8) {
            return;
        }
        if self.qos.admission.is_none() {
            let rate = Rate {
                iops: 1_000_000,
                bytes: 4 << 30,
            };
            let budget = Budget {
                base: rate,
                burst: rate,
                how: Burst::Metered,
            };
            let profile = Profile::line((400.0, 0.05), (150.0, 0.015), 96);
            self.admit_all_at(&budget, &CostTable::new([[profile; 3]; 3]));
        }
        for ends_ns in [self.clock.now_ns, u64::MAX] {
            if let Some(admission) = &mut self.qos.admission {
                admission.ends_ns = ends_ns;
            }
            self.begin_admission();
        }
    }

    pub(crate) fn active_tenants(&self) -> usize {
        self.qos
            .admission
            .as_ref()
            .map_or(0, |a| a.scheduler.active())
    }
}
