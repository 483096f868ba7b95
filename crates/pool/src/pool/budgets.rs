//! The budgets of tenants and volumes.
//!
//! A budget is deleted with its tenant or volume. Versions without the table enforce no budgets;
//! the next opening drops those of deleted objects. A tenant's base covers its volumes' bases; the
//! least base counts as none. A second record has the values as users stated them, which are
//! derived if they contradict the budget.
//!
//! **Not here:** the node's capacity (`forebay_qos::admission`), enforcement (the engine).

use crate::{
    error::{PoolError, Result},
    journal::{Journal, batch::Table},
    records::TenantId,
    volumes::Volumes,
};
use forebay_qos::budget::{BadBudget, Budget, Field, LEAST, Rate};
use forebay_qos::stated_budget::Stated;
use forebay_xlate::types::VolumeId;
use std::collections::BTreeMap;

/// Rough bound of a catalog record.
pub(super) const RECORD_BYTES: u64 = 256;
const NOTHING: Rate = Rate { iops: 0, bytes: 0 };
/// The kinds of keys.
const OF_TENANT: u64 = 0;
const OF_VOLUME: u64 = 1;

/// An id and its kind.
pub(super) type Key = (u64, u64);

pub(super) fn of_tenant(tenant: TenantId) -> Key {
    (tenant.0, OF_TENANT)
}

pub(super) fn of_volume(volume: VolumeId) -> Key {
    (volume.0, OF_VOLUME)
}

pub(super) fn stated_budget(stated: Option<Stated>) -> Result<Option<Budget>> {
    let budget = stated.map(|stated| stated.budget()).transpose();
    budget.map_err(|bad| PoolError::invalid(bad.to_string()))
}

/// The budgets of tenants and volumes.
#[derive(Debug, Default)]
pub struct Budgets {
    all: BTreeMap<Key, Budget>,
    stated: BTreeMap<Key, Stated>,
}

/// The base; the least value counts as 0.
fn counted(budget: &Budget) -> Rate {
    let count = |value: u64, least: u64| if value > least { value } else { 0 };
    Rate {
        iops: count(budget.base.iops, LEAST.iops),
        bytes: count(budget.base.bytes, LEAST.bytes),
    }
}

impl Budgets {
    pub(crate) fn stored_stated(&self, a: u64, b: u64) -> Option<&Stated> {
        self.stored(a, b).and(self.stated.get(&(a, b)))
    }

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

    pub(crate) fn stored(&self, a: u64, b: u64) -> Option<&Budget> {
        self.all.get(&(a, b))
    }

    /// `false` if the record is invalid.
    pub(crate) fn load(&mut self, a: u64, b: u64, budget: Budget) -> bool {
        let can_be = budget.check().is_ok() && matches!(b, OF_TENANT | OF_VOLUME);
        if can_be {
            self.all.insert((a, b), budget);
        }
        can_be
    }

    fn of_kind(&self, kind: u64) -> impl Iterator<Item = (u64, &Budget)> {
        let all = self.all.iter();
        all.filter_map(move |((id, of), budget)| (*of == kind).then_some((*id, budget)))
    }

    /// A tenant's budget.
    pub fn of_tenant(&self, tenant: TenantId) -> Option<&Budget> {
        self.all.get(&of_tenant(tenant))
    }

    /// The stated values of a tenant's budget.
    pub fn stated_of_tenant(&self, tenant: TenantId) -> Stated {
        self.stated(of_tenant(tenant))
    }

    /// A volume's budget within its tenant's.
    pub fn of_volume(&self, volume: VolumeId) -> Option<&Budget> {
        self.all.get(&of_volume(volume))
    }

    /// The stated values of a volume's budget.
    pub fn stated_of_volume(&self, volume: VolumeId) -> Stated {
        self.stated(of_volume(volume))
    }

    /// Tenants with a budget, oldest first.
    pub fn tenants(&self) -> impl Iterator<Item = (TenantId, &Budget)> {
        let all = self.of_kind(OF_TENANT);
        all.map(|(id, budget)| (TenantId(id), budget))
    }

    /// Volumes with a budget, oldest first.
    pub fn volumes(&self) -> impl Iterator<Item = (VolumeId, &Budget)> {
        let all = self.of_kind(OF_VOLUME);
        all.map(|(id, budget)| (VolumeId(id), budget))
    }

    /// The sum of the bases of a tenant's volumes, except `but`.
    fn volumes_base(&self, volumes: &Volumes, tenant: TenantId, but: Option<VolumeId>) -> Rate {
        let others = volumes.of_tenant(tenant).map(|volume| volume.id);
        let others = others.filter(|id| Some(*id) != but);
        let bases = others.filter_map(|id| self.of_volume(id).map(counted));
        bases.fold(NOTHING, |sum, base| Rate {
            iops: sum.iops.saturating_add(base.iops),
            bytes: sum.bytes.saturating_add(base.bytes),
        })
    }

    pub(super) fn differs(
        &self,
        key: Key,
        budget: Option<&Budget>,
        stated: Option<Stated>,
    ) -> bool {
        self.all.get(&key) != budget || self.stated(key) != stated.unwrap_or_default()
    }

    /// A tenant's base must cover its volumes' bases.
    pub(super) fn check_tenant(
        &self,
        volumes: &Volumes,
        tenant: TenantId,
        budget: Option<&Budget>,
    ) -> Result<()> {
        let promised = self.volumes_base(volumes, tenant, None);
        let base = budget.map_or(NOTHING, |budget| budget.base);
        for (what, base, promised) in [
            ("IOPS", base.iops, promised.iops),
            ("bytes/s", base.bytes, promised.bytes),
        ] {
            if base < promised {
                return Err(PoolError::invalid(match budget {
                    Some(_) => format!(
                        "base {what} of {base} is less than the sum of the bases of the tenant's volumes: give at least {promised}"
                    ),
                    None => format!(
                        "the tenant's volumes have bases out of its own, {promised} {what} in total: remove theirs first"
                    ),
                }));
            }
        }
        Ok(())
    }

    /// A volume's base must fit beside the other volumes' bases.
    pub(super) fn check_volume(
        &self,
        volumes: &Volumes,
        tenant: TenantId,
        volume: VolumeId,
        budget: Option<&Budget>,
    ) -> Result<()> {
        let base = budget.map_or(NOTHING, counted);
        let whole = self.of_tenant(tenant).map_or(NOTHING, counted);
        let taken = self.volumes_base(volumes, tenant, Some(volume));
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
    }

    pub(super) fn set(
        &mut self,
        journal: &mut Journal,
        key: Key,
        budget: Option<Budget>,
        stated: Option<Stated>,
    ) {
        match budget {
            Some(budget) => _ = self.all.insert(key, budget),
            None => _ = self.all.remove(&key),
        }
        self.keep_stated(journal, key, stated);
    }

    fn keep_stated(&mut self, journal: &mut Journal, key: Key, stated: Option<Stated>) {
        match stated {
            Some(stated) => _ = self.stated.insert(key, stated),
            None => _ = self.stated.remove(&key),
        }
        journal.touch(Table::Budgets, key.0, key.1);
        journal.touch(Table::StatedBudgets, key.0, key.1);
    }

    pub(super) fn forget(&mut self, journal: &mut Journal, key: Key) {
        if self.all.remove(&key).is_some() {
            self.keep_stated(journal, key, None);
        }
    }

    pub(crate) fn forget_lost(
        &mut self,
        journal: &mut Journal,
        has_tenant: impl Fn(TenantId) -> bool,
        has_volume: impl Fn(VolumeId) -> bool,
    ) {
        let is_there = |(id, kind): Key| match kind {
            OF_TENANT => has_tenant(TenantId(id)),
            _ => has_volume(VolumeId(id)),
        };
        let all = self.all.keys().copied();
        let lost: Vec<Key> = all.filter(|key| !is_there(*key)).collect();
        for key in lost {
            self.forget(journal, key);
        }
        let stated = self.stated.keys().copied();
        let without = |key: &Key| !self.all.contains_key(key);
        let lost: Vec<Key> = stated.filter(without).collect();
        for key in lost {
            self.keep_stated(journal, key, None);
        }
    }
}
