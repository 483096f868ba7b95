//! What tenants and volumes may use of the node.
//!
//! **Design.** A budget is a record beside its tenant or volume, in a table of its own, and goes with it; there is none
//! where nothing is stated. A version of Forebay that does not know the table opens the pool as ever and limits nobody:
//! no byte depends on a budget. What it deletes meanwhile leaves its budget behind, which is dropped at the next opening;
//! ids are never given out twice. A volume's base is part of its tenant's, so those of a tenant's volumes are together at
//! most that; a base of the least that can be stated counts as none, for volumes that are only limited.
//! Which parts people stated is a record of its own, for the next change. Where it does not give the budget, because an
//! earlier version changed that, it is guessed.
//! **Not here:** whether a node has it all (the daemon asks `forebay_qos::admission`), keeping anybody to it (the
//! engine).

use crate::{
    batch::Table,
    error::{PoolError, Result},
    pool::Pool,
    records::TenantId,
};
use forebay_qos::budget::{BadBudget, Budget, Field, LEAST, Rate};
use forebay_qos::stated::Stated;
use forebay_xlate::types::VolumeId;
use std::collections::BTreeMap;

/// What a record takes in the catalog at most, roughly.
const RECORD_BYTES: u64 = 256;
const NOTHING: Rate = Rate { iops: 0, bytes: 0 };
/// The second half of a tenant's key, and of a volume's.
const OF_TENANT: u64 = 0;
const OF_VOLUME: u64 = 1;

/// Whose: an id, and which kind of one.
type Key = (u64, u64);

fn of_tenant(tenant: TenantId) -> Key {
    (tenant.0, OF_TENANT)
}

fn of_volume(volume: VolumeId) -> Key {
    (volume.0, OF_VOLUME)
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Budgets {
    all: BTreeMap<Key, Budget>,
    stated: BTreeMap<Key, Stated>,
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

    fn stated(&self, key: Key) -> Stated {
        let Some(budget) = self.all.get(&key) else {
            return Stated::default();
        };
        let stated = self.stated.get(&key).copied();
        stated
            .filter(|stated| stated.budget() == Ok(*budget))
            .unwrap_or_else(|| Stated::of(budget))
    }

    /// The record at a key.
    pub(crate) fn stored(&self, a: u64, b: u64) -> Option<&Budget> {
        self.all.get(&(a, b))
    }

    /// Takes a record in; false if there can be no such one.
    pub(crate) fn load(&mut self, a: u64, b: u64, budget: Budget) -> bool {
        let can_be = budget.check().is_ok() && matches!(b, OF_TENANT | OF_VOLUME);
        if can_be {
            self.all.insert((a, b), budget);
        }
        can_be
    }

    /// Those of a kind, oldest first.
    fn of_kind(&self, kind: u64) -> impl Iterator<Item = (u64, &Budget)> {
        let all = self.all.iter();
        all.filter_map(move |((id, of), budget)| (*of == kind).then_some((*id, budget)))
    }
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
        self.budgets.all.get(&of_tenant(tenant))
    }

    /// Which parts of a tenant's budget were stated.
    pub fn tenant_stated(&self, tenant: TenantId) -> Stated {
        self.budgets.stated(of_tenant(tenant))
    }

    /// Which parts of a volume's budget were stated.
    pub fn volume_stated(&self, volume: VolumeId) -> Stated {
        self.budgets.stated(of_volume(volume))
    }

    /// What a volume may use of its tenant's, if that is stated.
    pub fn volume_budget(&self, volume: VolumeId) -> Option<&Budget> {
        self.budgets.all.get(&of_volume(volume))
    }

    /// Tenants for which something is stated, oldest first.
    pub fn tenant_budgets(&self) -> impl Iterator<Item = (TenantId, &Budget)> {
        let all = self.budgets.of_kind(OF_TENANT);
        all.map(|(id, budget)| (TenantId(id), budget))
    }

    /// Volumes for which something is stated, oldest first.
    pub fn volume_budgets(&self) -> impl Iterator<Item = (VolumeId, &Budget)> {
        let all = self.budgets.of_kind(OF_VOLUME);
        all.map(|(id, budget)| (VolumeId(id), budget))
    }

    /// The bases of a tenant's volumes together, but for one.
    fn volumes_base(&self, tenant: TenantId, but: Option<VolumeId>) -> Rate {
        let others = self.volumes_of(tenant).map(|volume| volume.id);
        let others = others.filter(|id| Some(*id) != but);
        let bases = others.filter_map(|id| self.volume_budget(id).map(counted));
        bases.fold(NOTHING, |sum, base| Rate {
            iops: sum.iops.saturating_add(base.iops),
            bytes: sum.bytes.saturating_add(base.bytes),
        })
    }

    /// States what a tenant may use, or takes that back; false if it is so already.
    pub fn set_tenant_budget(&mut self, tenant: TenantId, stated: Option<Stated>) -> Result<bool> {
        self.tenant_by_id(tenant)?;
        self.set_budget(of_tenant(tenant), stated, |pool, budget| {
            let promised = pool.volumes_base(tenant, None);
            let base = budget.map_or(NOTHING, |budget| budget.base);
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
            Ok(())
        })
    }

    /// States what a volume may use of its tenant's, or takes that back; false if it is so already.
    pub fn set_volume_budget(&mut self, volume: VolumeId, stated: Option<Stated>) -> Result<bool> {
        let tenant = self.volume(volume)?.tenant;
        self.set_budget(of_volume(volume), stated, |pool, budget| {
            let base = budget.map_or(NOTHING, counted);
            let whole = pool.tenant_budget(tenant).map_or(NOTHING, counted);
            let taken = pool.volumes_base(tenant, Some(volume));
            for (field, value, whole, taken) in [
                (Field::BaseIops, base.iops, whole.iops, taken.iops),
                (Field::BaseBytes, base.bytes, whole.bytes, taken.bytes),
            ] {
                let left = whole.saturating_sub(taken);
                if value > left {
                    let bad = BadBudget::VolumesOverTenant { field, value, left };
                    return Err(PoolError::invalid(bad.to_string()));
                }
            }
            Ok(())
        })
    }

    /// `fits`: whether it is beside the others.
    fn set_budget(
        &mut self,
        key: Key,
        stated: Option<Stated>,
        fits: impl FnOnce(&Self, Option<&Budget>) -> Result<()>,
    ) -> Result<bool> {
        let budget = stated.map(|stated| stated.budget()).transpose();
        let budget = budget.map_err(|bad| PoolError::invalid(bad.to_string()))?;
        let is_so = self.budgets.all.get(&key) == budget.as_ref();
        if is_so && self.budgets.stated(key) == stated.unwrap_or_default() {
            return Ok(false);
        }
        fits(self, budget.as_ref())?;
        match budget {
            Some(budget) => {
                self.admit(RECORD_BYTES)?;
                self.budgets.all.insert(key, budget);
            }
            None => _ = self.budgets.all.remove(&key),
        }
        self.keep_stated(key, stated);
        Ok(true)
    }

    fn keep_stated(&mut self, key: Key, stated: Option<Stated>) {
        match stated {
            Some(stated) => _ = self.budgets.stated.insert(key, stated),
            None => _ = self.budgets.stated.remove(&key),
        }
        self.touch(Table::Budgets, key.0, key.1);
        self.touch(Table::StatedBudgets, key.0, key.1);
    }

    pub(crate) fn forget_tenant_budget(&mut self, tenant: TenantId) {
        self.forget_budget(of_tenant(tenant));
    }

    pub(crate) fn forget_volume_budget(&mut self, volume: VolumeId) {
        self.forget_budget(of_volume(volume));
    }

    fn forget_budget(&mut self, key: Key) {
        if self.budgets.all.remove(&key).is_some() {
            self.keep_stated(key, None);
        }
    }

    /// Drops budgets of what is not there.
    pub(crate) fn forget_lost_budgets(&mut self) {
        let is_there = |(id, kind): Key| match kind {
            OF_TENANT => self.tenants.contains_key(&TenantId(id)),
            _ => self.volumes.contains_key(&VolumeId(id)),
        };
        let all = self.budgets.all.keys().copied();
        let lost: Vec<Key> = all.filter(|key| !is_there(*key)).collect();
        lost.into_iter().for_each(|key| self.forget_budget(key));
        let stated = self.budgets.stated.keys().copied();
        let without = |key: &Key| !self.budgets.all.contains_key(key);
        let lost: Vec<Key> = stated.filter(without).collect();
        lost.into_iter().for_each(|key| self.keep_stated(key, None));
    }
}
