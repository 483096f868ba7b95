//! Tenants, budgets and shares of a reactor's lanes, as the daemon sets them. **Not here:** the
//! effect ([`super`]).

use super::super::costs::cost_of;
use super::records::grant;
use super::{Admission, FREE};
use crate::io::command::Io;
use crate::lane::Lane;
use forebay_qos::budget::{Budget, Rate};
use forebay_qos::cost::{Route, Routes, Transport};
use forebay_qos::resources::ResourceVector;
use forebay_qos::scheduler::Scheduler;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::FrontendKind as ExportFrontend;
use forebay_xlate::boundary::region::MAX_LANES;

impl Admission {
    pub(in crate::qos) fn begin_tenant(&mut self, tenant: u32) {
        if (tenant as usize) < self.tenants.len() {
            self.scheduler.begin_tenant(tenant as usize);
        }
    }

    /// Sets a tenant's budget; a `guaranteed` base has precedence.
    pub(crate) fn set_budget(&mut self, tenant: u32, budget: &Budget, guaranteed: bool) {
        if let Some(one) = self.tenants.get_mut(tenant as usize) {
            (self.scheduler).set_guaranteed(tenant as usize, guaranteed);
            one.budget = Some(*budget);
            let (costs, routes) = (&self.costs, one.routes);
            (self.scheduler).set_budget(tenant as usize, budget, costs, routes);
        }
    }

    /// Over a network, an I/O takes many times the processor time, and the links' bandwidth.
    fn note_routes(&mut self, tenant: u32) {
        let lane_states = self.lane_states[..self.lanes].iter();
        let own = lane_states.filter(|lane_state| lane_state.tenant == tenant);
        let routes = Routes::of(own.map(|lane_state| lane_state.route));
        let one = &mut self.tenants[tenant as usize];
        if std::mem::replace(&mut one.routes, routes) != routes
            && let Some(budget) = one.budget
        {
            let costs = &self.costs;
            (self.scheduler).set_routes(tenant as usize, &budget, costs, routes);
        }
    }

    #[cfg(test)]
    pub(crate) fn routes(&self, tenant: usize) -> Routes {
        self.tenants[tenant].routes
    }

    pub(crate) fn attach(&mut self, lane: &Lane, ios: &[Io]) {
        let at = lane.index.0 as usize % MAX_LANES;
        let volume = lane.volume.id();
        let lane_state = &mut self.lane_states[at];
        let frontend = match lane.export.frontend {
            ExportFrontend::NvmeTcp => Transport::Tcp,
            ExportFrontend::NvmePcie { .. } => Transport::Pcie,
            ExportFrontend::VhostUser { .. } => Transport::Vhost,
        };
        lane_state.route = match lane.volume.config.image {
            Some(_) => Route::remote(frontend),
            None => Route::local(frontend),
        };
        let share = lane
            .share
            .filter(|share| (share.tenant as usize) < self.tenants.len());
        let Some(share) = share else {
            self.detach(at, ios);
            grant(lane.record(), Rate { iops: 0, bytes: 0 });
            return;
        };
        let of = (volume, share.tenant);
        if lane_state.tenant == u32::MAX || self.units[lane_state.unit].of != Some(of) {
            self.detach(at, ios);
            self.join(at, of, ios);
        }
        let unit = self.lane_states[at].unit;
        (self.scheduler).set_volume(unit, share.budget.as_ref());
        self.note_routes(share.tenant);
    }

    fn join(&mut self, at: usize, of: (VolumeId, u32), ios: &[Io]) {
        self.lanes = self.lanes.max(at + 1);
        let find = |of| self.units.iter().position(|unit| unit.of == of);
        // Units in use never exceed lanes.
        let unit = find(Some(of)).or_else(|| find(None)).unwrap_or(at);
        let tenant = of.1;
        let lane_state = &mut self.lane_states[at];
        (lane_state.unit, lane_state.tenant) = (unit, tenant);
        lane_state.closer &= !FREE;
        lane_state.turn = 0;
        self.tenants[tenant as usize].lanes += 1;
        self.units[unit].of = Some(of);
        self.units[unit].lanes += 1;
        if self.units[unit].lanes == 1 {
            self.scheduler.attach(unit, tenant as usize);
        }
        // Its waiting commands now wait for this tenant's budget.
        self.each_waiting(at, ios, Scheduler::wait);
    }

    fn each_waiting(
        &mut self,
        at: usize,
        ios: &[Io],
        what: fn(&mut Scheduler, usize, &ResourceVector),
    ) {
        let lane_state = &self.lane_states[at];
        let mut next = lane_state.first;
        while let Some(io) = ios.get(next as usize) {
            let cost = cost_of(&self.costs, lane_state.route, &io.op);
            what(&mut self.scheduler, lane_state.unit, &cost);
            next = io.link;
        }
    }

    pub(in crate::qos) fn detach(&mut self, at: usize, ios: &[Io]) {
        let lane_state = &mut self.lane_states[at];
        lane_state.closer |= FREE;
        let (tenant, unit) = (lane_state.tenant, lane_state.unit);
        let Some(one) = self.tenants.get_mut(tenant as usize) else {
            return;
        };
        one.lanes -= 1;
        self.units[unit].lanes -= 1;
        if self.units[unit].lanes == 0 {
            self.units[unit].of = None;
            self.scheduler.detach(unit);
        } else {
            self.each_waiting(at, ios, Scheduler::cancel);
        }
        self.lane_states[at].tenant = u32::MAX;
        self.note_routes(tenant);
    }
}
