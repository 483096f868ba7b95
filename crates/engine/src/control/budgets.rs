//! Admission as set by the daemon: parameters, costs, and tenants.
//!
//! **Design.** A tenant has a slot in the state region, in each reactor's scheduler and in their
//! shared ledger. New parameters make a new admission for each reactor; a budget is posted alone.
//! The ledger, and so credit, stays. A released slot is reused last, because a reactor may still
//! write its record. **Not here:** its use ([`crate::qos`]), and promises (the daemon).

use super::Control;
use crate::core::Admission;
use crate::lane::Share;
use crate::reactor::mailbox::Post;
use forebay_qos::ledger::Ledger;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{Budget, Scheduling, TenantId};
use forebay_xlate::boundary::region::{MAX_TENANTS, TenantRecord};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

pub(super) struct TenantSlots {
    on: Option<(Box<Scheduling>, Arc<Ledger>)>,
    tenants: BTreeMap<TenantId, SlotOwner>,
    free: VecDeque<u32>,
    volumes: BTreeMap<VolumeId, (TenantId, Option<Budget>)>,
}

struct SlotOwner {
    slot: u32,
    budget: Budget,
    /// The base has precedence over other tenants'.
    guaranteed: bool,
}

impl Default for TenantSlots {
    fn default() -> Self {
        Self {
            on: None,
            tenants: BTreeMap::new(),
            free: (0..MAX_TENANTS as u32).collect(),
            volumes: BTreeMap::new(),
        }
    }
}

impl TenantSlots {
    pub(super) fn share(&self, volume: VolumeId) -> Option<Share> {
        let (tenant, budget) = *self.volumes.get(&volume)?;
        let tenant = self.tenants.get(&tenant)?.slot;
        Some(Share { tenant, budget })
    }

    pub(super) fn forget(&mut self, volume: VolumeId) {
        self.volumes.remove(&volume);
    }

    fn admissions(
        &self,
        scheduling: &Scheduling,
        ledger: &Arc<Ledger>,
        reactors: usize,
    ) -> Result<Vec<Admission>, String> {
        let params = scheduling.params()?;
        let capacity = &scheduling.capacity;
        for (name, value) in [
            ("device reads", capacity.device_reads_milli),
            ("device writes", capacity.device_writes_milli),
            ("incoming bytes", capacity.link_in_bytes_s),
            ("outgoing bytes", capacity.link_out_bytes_s),
            ("operations", capacity.operations_s),
        ] {
            if value == 0 {
                return Err(format!(
                    "a node whose capacity for {name} is 0 admits no I/O"
                ));
            }
        }
        // One processor each; helpers' are added while they help.
        let per_second = capacity.capacity(1).per_second();
        let costs = scheduling.cost_table();
        let make = |_| {
            let mut admission = Admission::new(params.clone(), &per_second, &costs, ledger)
                .map_err(|bad| bad.to_string())?;
            for known in self.tenants.values() {
                admission.set_budget(known.slot, &known.budget, known.guaranteed);
            }
            Ok(admission)
        };
        (0..reactors).map(make).collect()
    }
}

fn begin(record: &TenantRecord, tenant: Option<TenantId>) {
    record.tenant.store(0, Relaxed);
    for cell in record.sums().into_iter().chain(record.gauges()) {
        cell.store(0, Relaxed);
    }
    record.tenant.store(tenant.map_or(0, |t| t.0 + 1), Release);
}

impl Control {
    /// `None` forgets tenants and shares.
    pub(super) fn set_scheduling(
        &mut self,
        scheduling: Option<Box<Scheduling>>,
    ) -> Result<(), String> {
        let budgets = &mut self.budgets;
        let Some(scheduling) = scheduling else {
            if budgets.on.take().is_some() {
                for known in std::mem::take(&mut budgets.tenants).values() {
                    begin(&self.region.tenants()[known.slot as usize], None);
                    budgets.free.push_back(known.slot);
                }
                let volumes = std::mem::take(&mut budgets.volumes);
                self.post_all(|| Post::Admission(None));
                for volume in volumes.keys() {
                    self.post_all(|| Post::Share(*volume, None));
                }
            }
            return Ok(());
        };
        let ledger = match &budgets.on {
            Some((now, _)) if *now == scheduling => return Ok(()),
            Some((_, ledger)) => ledger.clone(),
            None => Arc::new(Ledger::new(MAX_TENANTS)),
        };
        let admissions = budgets.admissions(&scheduling, &ledger, self.mailboxes.len())?;
        budgets.on = Some((scheduling, ledger));
        for (mailbox, admission) in self.mailboxes.iter_mut().zip(admissions) {
            mailbox.post(Post::Admission(Some(Box::new(admission))));
        }
        Ok(())
    }

    /// `credit`: of a new tenant. `None` removes the tenant and its shares.
    pub(super) fn set_tenant_budget(
        &mut self,
        tenant: TenantId,
        budget: Option<Budget>,
        credit: [u64; 2],
        guaranteed: bool,
    ) -> Result<(), String> {
        let id = tenant.0;
        let budgets = &mut self.budgets;
        let Some((_, ledger)) = &budgets.on else {
            return match budget {
                Some(_) => Err(format!(
                    "tenant {id}: a budget needs scheduling, which is off"
                )),
                None => Ok(()),
            };
        };
        let Some(budget) = budget else {
            let Some(SlotOwner { slot, .. }) = budgets.tenants.remove(&tenant) else {
                return Ok(());
            };
            budgets.free.push_back(slot);
            for credit in &ledger.entry(slot as usize).credit {
                credit.set_cap(0);
            }
            begin(&self.region.tenants()[slot as usize], None);
            let left = budgets.volumes.extract_if(.., |_, (of, _)| *of == tenant);
            for (volume, _) in left.collect::<Vec<_>>() {
                self.post_all(|| Post::Share(volume, None));
            }
            return Ok(());
        };
        budget
            .check()
            .map_err(|bad| format!("tenant {id}: {bad}"))?;
        match budgets.tenants.get_mut(&tenant) {
            Some(known) => {
                let slot = known.slot;
                let before = (known.budget, known.guaranteed);
                (known.budget, known.guaranteed) = (budget, guaranteed);
                if before != (budget, guaranteed) {
                    self.post_all(|| Post::Budget(slot, budget, guaranteed));
                }
            }
            None => {
                let slot = budgets.free.pop_front();
                let slot = slot.ok_or_else(|| {
                    format!("tenant {id}: an engine supports at most {MAX_TENANTS} tenants")
                })?;
                let known = SlotOwner {
                    slot,
                    budget,
                    guaranteed,
                };
                budgets.tenants.insert(tenant, known);
                let record = &self.region.tenants()[slot as usize];
                begin(record, Some(tenant));
                let [ops, bytes] = ledger.entry(slot as usize).save(&budget, credit);
                // A successor that starts at once needs them.
                record.credit_ops.store(ops, Relaxed);
                record.credit_bytes.store(bytes, Relaxed);
                self.post_all(|| Post::NewTenant(slot));
                self.post_all(|| Post::Budget(slot, budget, guaranteed));
            }
        }
        Ok(())
    }

    /// Sets a volume's tenant, and its own budget if any.
    pub(super) fn set_volume_budget(
        &mut self,
        volume: VolumeId,
        tenant: TenantId,
        budget: Option<Budget>,
    ) -> Result<(), String> {
        let budgets = &mut self.budgets;
        if budgets.on.is_none() {
            return Err(format!("{volume}: a budget needs scheduling, which is off"));
        }
        if !self.volumes.0.contains_key(&volume) {
            return Err(format!("{volume} is not served"));
        }
        if !budgets.tenants.contains_key(&tenant) {
            return Err(format!("{volume}: tenant {} has no budget", tenant.0));
        }
        if let Some(budget) = &budget {
            budget.check().map_err(|bad| format!("{volume}: {bad}"))?;
        }
        if budgets.volumes.insert(volume, (tenant, budget)) != Some((tenant, budget)) {
            let share = self.budgets.share(volume);
            self.post_all(|| Post::Share(volume, share));
        }
        Ok(())
    }
}
