//! The slow beat: one task that lets each module check once a second for changes of its own.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::sleep;

use crate::base::Base;
use crate::exports::hosts::Hosts;
use crate::health::reports::Reports;
use crate::mapping::MapOwner;
use crate::qos::placement::ReactorPlacement;
use crate::states::DeviceStates;
use crate::statistics::Statistics;

pub(crate) const BEAT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Watch {
    base: Rc<Base>,
    states: Rc<DeviceStates>,
    mapping: Rc<dyn MapOwner>,
    statistics: Rc<Statistics>,
    placement: Rc<ReactorPlacement>,
    hosts: Rc<Hosts>,
    reports: Rc<Reports>,
}

impl Watch {
    pub(crate) fn new(
        base: &Rc<Base>,
        mapping: &Rc<dyn MapOwner>,
        statistics: &Rc<Statistics>,
        hosts: &Rc<Hosts>,
        reports: &Rc<Reports>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            states: reports.states.clone(),
            mapping: mapping.clone(),
            statistics: statistics.clone(),
            placement: reports.placement.clone(),
            hosts: hosts.clone(),
            reports: reports.clone(),
        })
    }

    pub(crate) async fn run_watch(self: Rc<Self>) {
        self.mapping.adoption().wait_adopted().await;
        loop {
            sleep(BEAT).await;
            if self.base.core.borrow_mut().pool.return_idle_spare() > 0 {
                self.base.committer.kick();
            }
            self.reports.log_changes();
            self.states.poll_errors();
            self.states.poll_drives();
            self.hosts.poll_hosts();
            self.statistics.poll_statistics();
            self.statistics.save_statistics(false).await;
            self.placement.poll_promises();
            for device in self.states.poll_sizes() {
                self.mapping.revoke_device(device);
            }
        }
    }
}
