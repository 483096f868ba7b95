//! The owner of a pool, which decides where bytes lie and how much each tenant may use. It keeps
//! pool, grant table and engine in agreement when a process dies.
//!
//! It runs on one thread. Each module beside this one owns its state and uses only modules before
//! it: `base`, `link`, `states`, `mapping`, `statistics`, `qos`, `exports`, `health`. An operation
//! is a local task whose changes have no await in them. It awaits commits, answers of the engine,
//! and locks. Each module says where order matters:
//! - `mapping::fault`: the grant table's entry, then the grant;
//! - `mapping::revoke`, `mapping::release`: revoke and drain, the pool's change, its commit, the
//!   entry's removal; extents that do not drain are quarantined (`states::hang`);
//! - `mapping::flush`: a device's flush, then the commit of the mappings on it, then `Committed`;
//! - `mapping::zero_fill`: zeroing, flush, then *clean*;
//! - `exports::registrations`: a host's reservation, its commit, then the answer;
//! - `mapping::adopt`: adopted grants are committed before anything is granted.

mod add_device;
mod serve;
#[cfg(test)]
mod tests;
mod welcome;

use std::rc::Rc;
use std::sync::Arc;

use forebay_pool::{Catalog, Pool};

use crate::base::{Base, Core};
use crate::clusters::Clusters;
use crate::devices::PoolDevice;
use crate::events::Events;
use crate::exports::export::Exports;
use crate::exports::hosts::Hosts;
use crate::exports::image_reports::ImageReports;
use crate::exports::ports::Ports;
use crate::exports::quarantine::Quarantine;
use crate::exports::registrations::Registrations;
use crate::exports::transfers::Transfers;
use crate::exports::vms::VmSockets;
use crate::exports::volumes::Volumes;
use crate::health::copies::Copies;
use crate::health::pool_hold::Labels;
use crate::health::reports::Reports;
use crate::health::wait_reports::WaitReports;
use crate::health::watch::Watch;
use crate::link::Link;
use crate::mapping::{MapOwner, PoolOwner};
use crate::qos::budgets::Budgets;
use crate::qos::placement::ReactorPlacement;
use crate::qos::settings::NodeSettings;
use crate::states::DeviceStates;
use crate::states::clients::CephClients;
use crate::statistics::Statistics;

pub(crate) use crate::base::Limits;
pub(crate) use crate::base::commit::CommitError;
pub(crate) use crate::exports::ports::unserved_ports;
pub(crate) use crate::link::{EngineProgress, session};
pub(crate) use crate::mapping::adopt::Grants;
pub(crate) use crate::mapping::adopt::grants_capacity;

#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) base: Rc<Base>,
    pub(crate) link: Rc<Link>,
    pub(crate) labels: Rc<Labels>,
    pub(crate) copies: Rc<Copies>,
    pub(crate) states: Rc<DeviceStates>,
    pub(crate) clients: Rc<CephClients>,
    pub(crate) mapping: Rc<dyn MapOwner>,
    #[cfg(test)]
    pub(crate) pool_owner: Rc<PoolOwner>,
    pub(crate) statistics: Rc<Statistics>,
    pub(crate) node: Rc<NodeSettings>,
    pub(crate) placement: Rc<ReactorPlacement>,
    pub(crate) budgets: Rc<Budgets>,
    pub(crate) hosts: Rc<Hosts>,
    pub(crate) vms: Rc<VmSockets>,
    pub(crate) ports: Rc<Ports>,
    pub(crate) reservations: Rc<Registrations>,
    pub(crate) quarantine: Rc<Quarantine>,
    pub(crate) exports: Rc<Exports>,
    pub(crate) transfers: Rc<Transfers>,
    pub(crate) volumes: Rc<Volumes>,
    pub(crate) images: Rc<ImageReports>,
    pub(crate) reports: Rc<Reports>,
    /// Held from the first check of a new device until it is added.
    pub(crate) adding: tokio::sync::Mutex<()>,
}

impl Owner {
    /// Takes a pool and its grant table, which must have been adopted (`mapping::adopt`).
    pub(crate) fn new(
        pool: Pool,
        catalog: Arc<Catalog>,
        devices: Vec<PoolDevice>,
        grants: Grants,
        limits: Limits,
        events: Rc<Events>,
        clusters: Rc<Clusters>,
    ) -> Rc<Self> {
        let (grants, adoption) = grants.into_parts();
        let core = Core { pool, grants };
        let base = Base::new(core, catalog, devices, limits, events, clusters);
        let link = Link::new(&base);
        let labels = Labels::new(&base);
        let copies = Copies::new(&base);
        let states = DeviceStates::new(&base, &link);
        let clients = CephClients::new(&base, &states);
        let pool_owner = PoolOwner::new(&base, &link, &states, adoption);
        let mapping: Rc<dyn MapOwner> = pool_owner.clone();
        let statistics = Statistics::new(&base, &link);
        let node = NodeSettings::new(&base);
        let placement = ReactorPlacement::new(&base, &link, &node);
        let budgets = Budgets::new(&base, &link, &node, &placement, &statistics);
        let hosts = Hosts::new(&base, &link);
        let quarantine = Rc::default();
        let vms = VmSockets::new(&base, &link, &hosts, &quarantine);
        let ports = Ports::new(&base, &link, &states);
        let reservations = Registrations::new(&base, &hosts);
        let exports = Exports::new(&base, &link, &mapping, &vms, &ports, &budgets);
        let transfers = Transfers::new(&base, &hosts, &exports, &mapping);
        let volumes = Volumes::new(&base, &link, &clients, &mapping, &budgets, &transfers);
        let images = ImageReports::new(&base, &volumes);
        let reports = Reports::new(&base, &link, &states, &labels, &copies, &exports);
        let owner = Rc::new(Self {
            base,
            link,
            labels,
            copies,
            states,
            clients,
            mapping,
            #[cfg(test)]
            pool_owner,
            statistics,
            node,
            placement,
            budgets,
            hosts,
            vms,
            ports,
            reservations,
            quarantine,
            exports,
            transfers,
            volumes,
            images,
            reports,
            adding: tokio::sync::Mutex::new(()),
        });
        owner.begin();
        owner
    }

    fn begin(&self) {
        let (base, mapping) = (&self.base, &self.mapping);
        base.spawn(base.clone().run_committer());
        mapping.begin();
        let watch = Watch::new(base, mapping, &self.statistics, &self.hosts, &self.reports);
        base.spawn(watch.run_watch());
        let waits = WaitReports::new(base, &self.link, &self.copies, mapping);
        base.spawn(waits.run_waits());
        base.spawn(self.copies.clone().run_copies());
        base.spawn(self.reports.clone().run_warnings());
        base.spawn(self.transfers.clone().run_transfers());
        for device in base.device_indexes() {
            mapping.serve_device(device);
        }
    }

    pub(crate) fn close(&self) {
        self.base.close();
        self.link.close();
    }
}
