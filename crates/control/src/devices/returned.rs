//! Finds devices that can be taken back: missing ones that are there, and ones that went away and
//! returned. Only reads labels; the caller reopens the pool.

use std::collections::BTreeMap;

use forebay_device::{DeviceInfo, DeviceKind};
use forebay_pool::Label;
use uuid::Uuid;

use super::open::{FORCE_HINT, cut_short, refuse_cut_short};
use super::record::Recorded;
use super::{MissingDevice, PoolDevice, find, inspect};
use crate::model::error::ApiError;

#[derive(Debug, Default)]
pub(crate) struct Back {
    /// They were missing.
    pub(crate) missing: Vec<String>,
    /// They went away and returned: the open descriptors only fail.
    pub(crate) returned: Vec<String>,
}

/// Whether an open device no longer answers, although it can be opened anew as `now`.
fn has_died(own: &PoolDevice, now: &DeviceInfo) -> bool {
    // The open descriptor still refers to the removed disk or file system.
    let is_other = match now.kind {
        DeviceKind::Block => true,
        _ => own.store.0.info().identity != now.identity,
    };
    is_other && !own.store.0.is_waited_for() && Label::read(&own.store.anew()).is_err()
}

/// Specifications of open devices that went away and returned to the old place.
pub(crate) fn find_returned(pool: &Uuid, open: &[PoolDevice]) -> Vec<String> {
    let has_returned = |own: &&PoolDevice| {
        inspect::at(&own.spec).is_ok_and(|(info, label)| {
            label.pool_uuid == *pool && label.device_index == own.index && has_died(own, &info)
        })
    };
    let returned = open.iter().filter(has_returned);
    returned.map(|own| own.spec.clone()).collect()
}

/// Which of a pool's devices can be taken back, at `given` or where they may be; claims nothing.
/// Skips a device in `given` that is `open`, unless it no longer answers.
///
/// A truncated device is not searched for, and is refused unless `forced`.
pub(crate) fn find_missing(
    pool: &Uuid,
    recorded: Option<&Recorded>,
    open: &[PoolDevice],
    missing: &[MissingDevice],
    given: &[String],
    forced: bool,
) -> Result<Back, ApiError> {
    let cut_short: BTreeMap<Uuid, u64> = recorded.into_iter().flat_map(cut_short).collect();
    let is_open = |info: &DeviceInfo| {
        let mut stores = open.iter().map(|open| &open.store);
        stores.any(|store| store.0.info().identity == info.identity)
    };
    let mut found = Back::default();
    for text in given {
        let (info, label) = inspect::at(text)?;
        let is_pools = label.pool_uuid == *pool;
        let own = open
            .iter()
            .find(|own| is_pools && own.index == label.device_index);
        if own.is_some_and(|own| has_died(own, &info)) {
            found.returned.push(text.clone());
            continue;
        }
        let cut_bytes = cut_short.get(&label.device_uuid).filter(|_| !forced);
        if let (true, Some(bytes)) = (is_pools, cut_bytes) {
            return Err(refuse_cut_short(&info.spec, *bytes));
        }
        if is_open(&info) {
            continue;
        }
        if let Some(own) = own {
            return Err(ApiError::exists(format!(
                "{text} is not a missing device of the pool: its label is that of {}, which is open as {} and answers",
                own.index, own.spec
            ))
            .hint("one of them is a copy: remove it, or end the daemon and its engine before you replace the other one"));
        }
        if !is_pools || !missing.iter().any(|m| m.uuid == label.device_uuid) {
            return Err(ApiError::invalid(format!(
                "{text} is not a missing device of the pool: its label says pool {} ({}), {} ({})",
                label.pool_name, label.pool_uuid, label.device_index, label.device_uuid
            ))
            .hint(
                "`forebay device list` shows the missing devices; `forebay device add SPEC` adds a new device to the \
                pool",
            ));
        }
        let older = missing
            .iter()
            .find(|m| m.uuid == label.device_uuid && m.is_older);
        if let Some(older) = older
            && !forced
        {
            return Err(ApiError::damaged(older.why.clone()).hint(FORCE_HINT));
        }
        found.missing.push(text.clone());
    }
    let folders = find::folders(missing.iter().map(|m| m.spec.as_str()));
    let wanted = |m: &&MissingDevice| !m.is_older && !cut_short.contains_key(&m.uuid);
    for device in missing.iter().filter(wanted) {
        let places = std::iter::once(device.spec.clone()).chain(find::candidates(
            &device.uuid,
            &device.spec,
            &folders,
        ));
        for place in places {
            if let Ok((_, label)) = inspect::at(&place)
                && label.pool_uuid == *pool
                && label.device_uuid == device.uuid
            {
                found.missing.push(place);
            }
        }
    }
    Ok(found)
}
