//! What tenants and volumes may use of the node.
//!
//! **Design.** A budget is a record beside its tenant or volume, in a table of its own, and goes with it; there is none
//! where nothing is stated. A version of Forebay that does not know the table opens the pool as ever and limits nobody:
//! no byte depends on a budget. What it deletes meanwhile leaves its budget behind, which is dropped at the next opening;
//! ids are never given out twice. A volume's base is part of its tenant's, so those of a tenant's volumes are together at
//! most that; a base of the least that can be stated counts as none, for volumes that are only limited.
//! Which parts people stated is a record of its own, for the next change. Where it does not give the budget, because an
//! earlier version changed that, it is guessed.
//! **Not here:** whether a node has it all (the daemon asks `forebay_burst::admission`), keeping anybody to it (the
//! engine).

use crate::{
    batch::Table,
    error::{PoolError, Result},
    pool::Pool,
    records::TenantId,
};
use forebay_burst::budget::{BadBudget, Budget, Field, LEAST, Rate};
use forebay_burst::stated::Stated;
use forebay_xlate::types::VolumeId;
use std::collections::BTreeMap;

/// What a record takes in the catalog at most, roughly.
const RECORD_BYTES: u64 = 256;
const NOTHING: Rate = Rate { iops: 0, bytes: 0 };
/// The second half of a tenant's key, and of a volume's.
const OF_TENANT: u64 = 0;
const OF_VOLUME: u64 = 1;

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Budgets {
    tenants: BTreeMap<TenantId, Budget>,
    volumes: BTreeMap<VolumeId, Budget>,
    stated: BTreeMap<(u64, u64), Stated>,
}

impl Budgets {
    /// The parts that were stated at a key.
    pub(crate) fn stored_stated(&self, a: u64, b: u64) -> Option<&Stated> {
        self.stored(a, b).and(self.stated.get(&(a, b)))
    }

    /// Takes in a record of what was stated.
    pub(crate) fn load_stated(&mut self, a: u64, b: u64, stated: Stated) {
        self.stated.insert((a, b), stated);
    }

    fn stated(&self, a: u64, b: u64) -> Stated {
        let Some(budget) = self.stored(a, b) else {
            return Stated::default();
        };
        let stated = self.stated.get(&(a, b)).copied();
        stated
            .filter(|stated| stated.budget() == Ok(*budget))
            .unwrap_or_else(|| Stated::of(budget))
    }

    /// The record at a key.
    pub(crate) fn stored(&self, a: u64, b: u64) -> Option<&Budget> {
        match b {
            OF_TENANT => self.tenants.get(&TenantId(a)),
            OF_VOLUME => self.volumes.get(&VolumeId(a)),
            _ => None,
        }
    }

    /// Takes a record in; false if there can be no such one.
    pub(crate) fn load(&mut self, a: u64, b: u64, budget: Budget) -> bool {
        if budget.check().is_err() {
            return false;
        }
        match b {
            OF_TENANT => _ = self.tenants.insert(TenantId(a), budget),
            OF_VOLUME => _ = self.volumes.insert(VolumeId(a), budget),
            _ => return false,
        }
        true
    }
}

fn budget_of(stated: Option<Stated>) -> Result<Option<Budget>> {
    let budget = stated.map(|stated| stated.budget()).transpose();
    budget.map_err(|bad| PoolError::invalid(bad.to_string()))
}

/// What counts of a volume's base.
fn counted(budget: &Budget) -> Rate {
    let count = |value: u64, least: u64| if value > least { value } else { 0 };
    Rate {
        iops: count(budget.base.iops, LEAST.iops),
        bytes: count(budget.base.bytes, LEAST.bytes),
    }
}

impl Pool {
    /// What a tenant may use, if that is stated.
    pub fn tenant_budget(&self, tenant: TenantId) -> Option<&Budget> {
        self.budgets.tenants.get(&tenant)
    }

    /// Which parts of a tenant's budget were stated.
    pub fn tenant_stated(&self, tenant: TenantId) -> Stated {
        self.budgets.stated(tenant.0, OF_TENANT)
    }

    /// Which parts of a volume's budget were stated.
    pub fn volume_stated(&self, volume: VolumeId) -> Stated {
        self.budgets.stated(volume.0, OF_VOLUME)
    }

    /// What a volume may use of its tenant's, if that is stated.
    pub fn volume_budget(&self, volume: VolumeId) -> Option<&Budget> {
        self.budgets.volumes.get(&volume)
    }

    /// Tenants for which something is stated, oldest first.
    pub fn tenant_budgets(&self) -> impl Iterator<Item = (TenantId, &Budget)> {
        self.budgets
            .tenants
            .iter()
            .map(|(id, budget)| (*id, budget))
    }

    /// Volumes for which something is stated, oldest first.
    pub fn volume_budgets(&self) -> impl Iterator<Item = (VolumeId, &Budget)> {
        self.budgets
            .volumes
            .iter()
            .map(|(id, budget)| (*id, budget))
    }

    /// The bases of a tenant's volumes together, but for one.
    fn volumes_base(&self, tenant: TenantId, but: Option<VolumeId>) -> Rate {
        let mut sum = NOTHING;
        for volume in self.volumes_of(tenant) {
            if Some(volume.id) == but {
                continue;
            }
            if let Some(budget) = self.volume_budget(volume.id) {
                let base = counted(budget);
                sum.iops = sum.iops.saturating_add(base.iops);
                sum.bytes = sum.bytes.saturating_add(base.bytes);
            }
        }
        sum
    }

    /// States what a tenant may use, or takes that back; false if it is so already.
    pub fn set_tenant_budget(&mut self, tenant: TenantId, stated: Option<Stated>) -> Result<bool> {
        self.tenant_by_id(tenant)?;
        let budget = budget_of(stated)?;
        if self.tenant_budget(tenant) == budget.as_ref()
            && self.tenant_stated(tenant) == stated.unwrap_or_default()
        {
            return Ok(false);
        }
        let promised = self.volumes_base(tenant, None);
        let base = match &budget {
            Some(budget) => budget.base,
            None => NOTHING,
        };
        for (what, base, promised) in [
            ("IOPS", base.iops, promised.iops),
            ("bytes/s", base.bytes, promised.bytes),
        ] {
            if base < promised {
                return Err(PoolError::invalid(match budget {
                    Some(_) => format!(
                        "base {what} of {base} is less than the bases of the tenant's volumes together: at least {promised} fits"
                    ),
                    None => format!(
                        "the tenant's volumes have bases out of its own, of {promised} {what} together: take theirs away first"
                    ),
                }));
            }
        }
        match budget {
            Some(budget) => {
                self.admit(RECORD_BYTES)?;
                self.budgets.tenants.insert(tenant, budget);
            }
            None => _ = self.budgets.tenants.remove(&tenant),
        }
        self.keep_stated(tenant.0, OF_TENANT, stated);
        Ok(true)
    }

    /// Whether a volume's base fits its tenant's beside the other volumes'.
    fn check_volume_budget(
        &self,
        tenant: TenantId,
        volume: VolumeId,
        budget: &Budget,
    ) -> std::result::Result<(), BadBudget> {
        budget.check()?;
        let base = counted(budget);
        let whole = self.tenant_budget(tenant).map(counted).unwrap_or(NOTHING);
        let taken = self.volumes_base(tenant, Some(volume));
        for (field, value, whole, taken) in [
            (Field::BaseIops, base.iops, whole.iops, taken.iops),
            (Field::BaseBytes, base.bytes, whole.bytes, taken.bytes),
        ] {
            let left = whole.saturating_sub(taken);
            if value > left {
                return Err(BadBudget::VolumesOverTenant { field, value, left });
            }
        }
        Ok(())
    }

    /// States what a volume may use of its tenant's, or takes that back; false if it is so already.
    pub fn set_volume_budget(&mut self, volume: VolumeId, stated: Option<Stated>) -> Result<bool> {
        let tenant = self.volume(volume)?.tenant;
        let budget = budget_of(stated)?;
        if self.volume_budget(volume) == budget.as_ref()
            && self.volume_stated(volume) == stated.unwrap_or_default()
        {
            return Ok(false);
        }
        match budget {
            Some(budget) => {
                self.check_volume_budget(tenant, volume, &budget)
                    .map_err(|bad| PoolError::invalid(bad.to_string()))?;
                self.admit(RECORD_BYTES)?;
                self.budgets.volumes.insert(volume, budget);
            }
            None => _ = self.budgets.volumes.remove(&volume),
        }
        self.keep_stated(volume.0, OF_VOLUME, stated);
        Ok(true)
    }

    fn keep_stated(&mut self, a: u64, b: u64, stated: Option<Stated>) {
        match stated {
            Some(stated) => _ = self.budgets.stated.insert((a, b), stated),
            None => _ = self.budgets.stated.remove(&(a, b)),
        }
        self.touch(Table::Budgets, a, b);
        self.touch(Table::StatedBudgets, a, b);
    }

    pub(crate) fn forget_tenant_budget(&mut self, tenant: TenantId) {
        if self.budgets.tenants.remove(&tenant).is_some() {
            self.keep_stated(tenant.0, OF_TENANT, None);
        }
    }

    pub(crate) fn forget_volume_budget(&mut self, volume: VolumeId) {
        if self.budgets.volumes.remove(&volume).is_some() {
            self.keep_stated(volume.0, OF_VOLUME, None);
        }
    }

    /// Drops budgets of what is not there.
    pub(crate) fn forget_lost_budgets(&mut self) {
        let tenants = self.budgets.tenants.keys();
        let lost: Vec<TenantId> = tenants
            .filter(|id| !self.tenants.contains_key(id))
            .copied()
            .collect();
        lost.into_iter()
            .for_each(|id| self.forget_tenant_budget(id));
        let volumes = self.budgets.volumes.keys();
        let lost: Vec<VolumeId> = volumes
            .filter(|id| !self.volumes.contains_key(id))
            .copied()
            .collect();
        lost.into_iter()
            .for_each(|id| self.forget_volume_budget(id));
        let budgets = &self.budgets;
        let without = |key: &(u64, u64)| budgets.stored(key.0, key.1).is_none();
        let lost: Vec<_> = budgets.stated.keys().copied().filter(without).collect();
        lost.into_iter()
            .for_each(|(a, b)| self.keep_stated(a, b, None));
    }
}
