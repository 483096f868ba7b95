//! The tenants, by id and by name.

use crate::{
    error::{PoolError, Result},
    journal::{Journal, batch::Table},
    records::{TenantId, TenantRecord},
};
use std::collections::BTreeMap;

const MAX_NAME_BYTES: usize = 63;

/// Names of pools, tenants and volumes.
pub(crate) fn check_name(what: &str, name: &str) -> Result<()> {
    let sound = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        && !name.starts_with('-');
    if sound {
        return Ok(());
    }
    Err(PoolError::invalid(format!(
        "{name:?} is not a valid name for a {what}: use 1 to {MAX_NAME_BYTES} of a-z, 0-9 and -, but no - first"
    )))
}

/// All tenants of a pool.
#[derive(Debug, Default)]
pub struct Tenants {
    by_id: BTreeMap<TenantId, TenantRecord>,
    by_name: BTreeMap<String, TenantId>,
}

impl Tenants {
    /// All tenants, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &TenantRecord> {
        self.by_id.values()
    }

    /// A tenant by name.
    pub fn named(&self, name: &str) -> Result<&TenantRecord> {
        self.by_name
            .get(name)
            .and_then(|id| self.by_id.get(id))
            .ok_or_else(|| PoolError::not_found(format!("no tenant {name:?}")))
    }

    /// A tenant by id.
    pub fn get(&self, tenant: TenantId) -> Result<&TenantRecord> {
        self.stored(tenant.0)
            .ok_or_else(|| PoolError::not_found(format!("no {tenant}")))
    }

    pub(super) fn stored(&self, id: u64) -> Option<&TenantRecord> {
        self.by_id.get(&TenantId(id))
    }

    pub(super) fn check_new(&self, name: &str) -> Result<()> {
        check_name("tenant", name)?;
        if self.by_name.contains_key(name) {
            return Err(PoolError::exists(format!("tenant {name:?} already exists")));
        }
        Ok(())
    }

    pub(crate) fn load(&mut self, record: TenantRecord) {
        self.by_name.insert(record.name.clone(), record.id);
        self.by_id.insert(record.id, record);
    }

    pub(super) fn insert(&mut self, journal: &mut Journal, record: TenantRecord) {
        journal.touch(Table::Tenants, record.id.0, 0);
        self.load(record);
    }

    pub(super) fn remove(&mut self, journal: &mut Journal, tenant: TenantId) {
        if let Some(record) = self.by_id.remove(&tenant) {
            self.by_name.remove(&record.name);
        }
        journal.touch(Table::Tenants, tenant.0, 0);
    }
}
