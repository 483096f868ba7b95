//! Opens a pool on those of its devices that are there.
//!
//! Labels count, not names. A moved device is searched for ([`find`]). Two devices with one label
//! at named or recorded places are refused, because one is a copy. Errors at places that the
//! operator names are fatal; at others they become the reason why a device is missing. If another
//! daemon serves any device, the pool is in use.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_device::DeviceSpec;
use forebay_device::size::format_bytes;
use forebay_pool::{ErrorKind, Label, OpenDevice, Opened, Pool, PoolError};
use uuid::Uuid;

use super::create::{engine_block_bytes, reserve_catalog};
use super::inspect::{self, Checked, Opening};
use super::record::Recorded;
use super::{
    MissingDevice, OPEN_LIMIT, OpenPool, PoolDevice, api_error, claim, cut_short_text, exclusive,
    find, invalid, open_device,
};
use crate::model::error::{self, ApiError};
use crate::ownership::{self, Candidate, Installation, Tenure};
use crate::store::SyncStore;

pub(crate) const OPEN_HINT: &str =
    "bring the devices back, or give their new paths: `forebay pool open --device SPEC`";

pub(super) const FORCE_HINT: &str = "put the original device back, or accept the copy as it is: \
    `forebay pool open --device SPEC --force`";

/// Where a pool may be.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places {
    /// The last seen pool. Without it, the labels at `given` say which pool is meant.
    pub(crate) recorded: Option<Recorded>,
    /// Given by the operator.
    pub(crate) given: Vec<String>,
    /// Takes devices in `given` even if they were truncated while in use.
    pub(crate) forced: bool,
    /// From the configuration; may be wrong.
    pub(crate) configured: Vec<String>,
    /// The installation that opens the pool. Without one (in tests) no owner is checked.
    pub(crate) me: Option<Arc<Installation>>,
    /// Takes the pool over from another installation.
    pub(crate) take_over: bool,
    /// Receives the progress.
    pub(crate) opening: Arc<Opening>,
}

impl Places {
    pub(crate) fn is_empty(&self) -> bool {
        self.recorded.is_none() && self.given.is_empty() && self.configured.is_empty()
    }
}

struct FoundDevice {
    label: Label,
    store: Arc<SyncStore>,
    /// Take it even if it is an older copy.
    forced: bool,
}

/// A place where no device was found.
struct Passed {
    spec: String,
    /// The expected device, if known.
    device: Option<Uuid>,
    why: String,
    is_silent: bool,
}

#[derive(Default)]
struct Search {
    /// The pool's identity and name, once known.
    pool: Option<(Uuid, String)>,
    found: Vec<FoundDevice>,
    passed: Vec<Passed>,
    /// Devices that were truncated while in use, to how many bytes.
    cut_short: BTreeMap<Uuid, u64>,
    /// Take them anyway.
    forced: bool,
    /// The results of the first read of all places.
    checked: BTreeMap<String, Result<Checked, ApiError>>,
    opening: Arc<Opening>,
}

/// Whether an error at a remembered place is fatal.
fn is_final(error: &ApiError) -> bool {
    use crate::model::error::ErrorKind::{Exists, InUse};
    // Another daemon uses it, or it is a copy of a device found elsewhere.
    matches!(error.kind, InUse | Exists)
}

impl Search {
    /// Takes the device at a place, if it is the pool's.
    fn take(&mut self, text: &str) -> Result<(), ApiError> {
        let spec: DeviceSpec = text.parse().map_err(invalid)?;
        let (info, label) = match self.checked.get(text) {
            Some(checked) => checked.clone()?,
            None => inspect::at(text)?,
        };
        let identity = info.identity;
        if self
            .found
            .iter()
            .any(|found| found.store.0.info().identity == identity)
        {
            return Ok(());
        }
        match &self.pool {
            Some((pool, name)) if *pool != label.pool_uuid => {
                return Err(ApiError::invalid(format!(
                    "{spec} belongs to pool {} ({}), not to pool {name} ({pool})",
                    label.pool_name, label.pool_uuid
                ))
                .hint("one daemon serves one pool: give the devices of one pool only"));
            }
            Some(_) => {}
            None => self.pool = Some((label.pool_uuid, label.pool_name.clone())),
        }
        if let Some(twin) = self
            .found
            .iter()
            .find(|found| found.label.device_uuid == label.device_uuid)
        {
            return Err(ApiError::exists(format!(
                "{spec} and {} have the label of the same device: one is a copy",
                twin.store.0.info().spec
            ))
            .hint("Forebay can't know which one is the original: remove the copy, and try again"));
        }
        if let Some(bytes) = self.cut_short.get(&label.device_uuid)
            && !self.forced
        {
            return Err(refuse_cut_short(&spec, *bytes));
        }
        label
            .check_block(engine_block_bytes(&spec)?)
            .map_err(|error| {
                let mut given = api_error(error);
                given.message = format!("{spec}: {}", given.message);
                given
            })?;
        let device = open_device(&spec, &exclusive())?;
        claim(&device)?;
        let store = Arc::new(SyncStore::opening(device, OPEN_LIMIT));
        self.opening.took(&store);
        self.found.push(FoundDevice {
            label,
            store,
            forced: self.forced,
        });
        Ok(())
    }

    /// Likewise for a remembered place, where only [`is_final`] errors count.
    fn try_take(&mut self, text: &str) -> Result<(), ApiError> {
        match self.take(text) {
            Err(error) if is_final(&error) => Err(error),
            Err(error) => {
                self.passed.push(Passed {
                    spec: text.to_owned(),
                    device: None,
                    is_silent: error.kind == error::ErrorKind::Unavailable,
                    why: error.message,
                });
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn has(&self, device: &Uuid) -> bool {
        self.found
            .iter()
            .any(|found| found.label.device_uuid == *device)
    }

    /// Checks where each device was last found, and then the folders of all.
    fn remember(&mut self, devices: &[(Uuid, String)]) -> Result<(), ApiError> {
        // Includes devices already found: there may be a copy at the old place.
        for (_, spec) in devices {
            self.try_take(spec)?;
        }
        let folders = find::folders(devices.iter().map(|(_, spec)| spec.as_str()));
        for (device, spec) in devices {
            // A silent device has not moved.
            if self.has(device) || self.passed(device, spec).is_some_and(|p| p.is_silent) {
                continue;
            }
            for candidate in find::candidates(device, spec, &folders) {
                if !self.has(device) {
                    self.try_take(&candidate)?;
                }
                if self.has(device) {
                    tracing::info!(
                        was = spec,
                        now = candidate,
                        "a device of the pool has moved"
                    );
                }
            }
        }
        Ok(())
    }

    fn passed(&self, device: &Uuid, spec: &str) -> Option<&Passed> {
        let is_it = |p: &&Passed| p.device.as_ref() == Some(device) || p.spec == spec;
        self.passed.iter().find(is_it)
    }

    /// Drops devices that are too slow to open; true if there were any.
    fn pass_over_slow(&mut self) -> bool {
        let is_slow = |found: &mut FoundDevice| found.store.is_too_slow();
        let slow: Vec<FoundDevice> = self.found.extract_if(.., is_slow).collect();
        for found in &slow {
            let spec = found.store.0.info().spec.to_string();
            let limit = OPEN_LIMIT.as_secs();
            self.passed.push(Passed {
                why: format!(
                    "{spec}: the device answers too slowly: opening it takes more than {limit} s"
                ),
                spec,
                device: Some(found.label.device_uuid),
                is_silent: true,
            });
        }
        !slow.is_empty()
    }

    /// The error, with the places that had no device.
    fn not_opened(&self, error: PoolError) -> ApiError {
        let is_partial = error.kind == ErrorKind::NotFound;
        let mut given = api_error(error);
        for passed in &self.passed {
            given.message = format!("{}; {}", given.message, passed.why);
        }
        if is_partial || !self.passed.is_empty() {
            given = given.hint(OPEN_HINT);
        } else if given.message.contains("older copy") {
            given = given.hint(FORCE_HINT);
        }
        given
    }

    fn missing(&self, missing: forebay_pool::MissingDevice) -> MissingDevice {
        let passed = self.passed(&missing.uuid, &missing.spec);
        MissingDevice {
            why: match (missing.why.clone(), passed) {
                (Some(why), _) => format!("{why}: {FORCE_HINT}"),
                (None, Some(passed)) => passed.why.clone(),
                (None, None) => format!("{}: not looked for", missing.spec),
            },
            is_silent: passed.is_some_and(|passed| passed.is_silent),
            is_older: missing.why.is_some(),
            index: missing.index,
            uuid: missing.uuid,
            spec: missing.spec,
        }
    }

    fn nothing_found(&self) -> ApiError {
        let name = self
            .pool
            .as_ref()
            .map_or_else(|| "the pool".to_owned(), |(_, name)| format!("pool {name}"));
        let mut reasons: Vec<&str> = self.passed.iter().map(|p| p.why.as_str()).collect();
        reasons.dedup();
        ApiError::not_found(format!(
            "{name} can't be opened: {}",
            if reasons.is_empty() {
                "no device is known".to_owned()
            } else {
                reasons.join("; ")
            }
        ))
        .hint(OPEN_HINT)
    }
}

#[cfg(test)]
pub(crate) fn open(specs: &[String]) -> Result<OpenPool, ApiError> {
    open_at(&Places {
        given: specs.to_vec(),
        ..Places::default()
    })
}

pub(crate) fn open_at(places: &Places) -> Result<OpenPool, ApiError> {
    let mut search = Search {
        pool: places
            .recorded
            .as_ref()
            .map(|recorded| (recorded.pool, recorded.name.clone())),
        cut_short: places.recorded.iter().flat_map(cut_short).collect(),
        forced: places.forced,
        opening: places.opening.clone(),
        ..Search::default()
    };
    let recorded_specs = places.recorded.iter().flat_map(|r| &r.devices);
    let recorded_specs = recorded_specs.map(|device| &device.spec);
    let all = (places.given.iter().chain(&places.configured)).chain(recorded_specs);
    search.checked = inspect::at_all(all, &places.opening);
    for spec in &places.given {
        search.take(spec)?;
    }
    search.forced = false;
    for spec in &places.configured {
        search.try_take(spec)?;
    }
    let recorded = places
        .recorded
        .iter()
        .flat_map(|recorded| &recorded.devices);
    let recorded: Vec<(Uuid, String)> = recorded
        .map(|device| (device.uuid, device.spec.clone()))
        .collect();
    search.remember(&recorded)?;
    if search.found.is_empty() {
        return Err(search.nothing_found());
    }
    open_found(search, places)
}

fn open_found(mut search: Search, places: &Places) -> Result<OpenPool, ApiError> {
    #[cfg_attr(not(feature = "test-device"), allow(unused_mut))]
    let (mut opened, tenure) = open_devices(&mut search, places)?;
    // Test volumes are too small to be deleted in slices.
    #[cfg(feature = "test-device")]
    if let Ok(extents) = std::env::var("FOREBAY_DELETE_SLICE")
        .unwrap_or_default()
        .parse()
    {
        opened.pool.set_delete_slice(extents);
    }
    let mut devices: Vec<PoolDevice> = search
        .found
        .iter()
        .zip(&opened.indexes)
        .filter_map(|(found, index)| {
            Some(PoolDevice {
                index: (*index)?,
                spec: found.store.0.info().spec.to_string(),
                store: found.store.clone(),
            })
        })
        .collect();
    devices.sort_by_key(|device| device.index);
    for device in &devices {
        refuse_shrunk(&opened.pool, device)?;
    }
    let missing = opened.missing.into_iter();
    let missing: Vec<MissingDevice> = missing.map(|device| search.missing(device)).collect();
    for device in &missing {
        tracing::error!(
            device = device.spec,
            why = device.why,
            "a device of the pool is missing"
        );
    }
    for note in &opened.notes {
        tracing::warn!(note, "opening the pool");
    }
    // For a pool created by an older release, or copied as a sparse file.
    if let Err(error) = reserve_catalog(&devices) {
        tracing::warn!(%error, "the pool's catalog may not be able to grow");
    }
    for device in &devices {
        device.store.opened();
    }
    Ok(OpenPool {
        pool: opened.pool,
        catalog: opened.catalog,
        devices,
        missing,
        tenure,
        is_new: false,
    })
}

/// Claims and opens the devices found. Searches once for devices that only the catalog knows, and
/// drops those that became slow.
fn open_devices(
    search: &mut Search,
    places: &Places,
) -> Result<(Opened, Option<Arc<Tenure>>), ApiError> {
    let mut asked_catalog = false;
    let mut tenure = None;
    loop {
        if search.found.is_empty() {
            return Err(search.nothing_found());
        }
        let devices: Vec<OpenDevice> = search
            .found
            .iter()
            .map(|found| OpenDevice {
                spec: found.store.0.info().spec.to_string(),
                store: found.store.clone(),
                forced: found.forced,
            })
            .collect();
        if let Some(me) = &places.me {
            match claim_found(me, &search.found, places.take_over, tenure.clone()) {
                Err(_) if search.pass_over_slow() => continue,
                claimed => tenure = claimed?,
            }
        }
        let opened = forebay_pool::open(&devices);
        drop(devices);
        if search.pass_over_slow() {
            continue;
        }
        let opened = opened.map_err(|error| search.not_opened(error))?;
        let unknown: Vec<(Uuid, String)> = opened
            .missing
            .iter()
            .filter(|missing| search.passed(&missing.uuid, &missing.spec).is_none())
            .map(|missing| (missing.uuid, missing.spec.clone()))
            .collect();
        if asked_catalog || unknown.is_empty() {
            return Ok((opened, tenure));
        }
        asked_catalog = true;
        drop(opened);
        search.remember(&unknown)?;
    }
}

/// Makes this installation the pool's owner.
fn claim_found(
    me: &Installation,
    found: &[FoundDevice],
    take_over: bool,
    held: Option<Arc<Tenure>>,
) -> Result<Option<Arc<Tenure>>, ApiError> {
    let candidates = found.iter().map(|one| Candidate {
        label: &one.label,
        store: &one.store,
    });
    ownership::claim(me, &candidates.collect::<Vec<_>>(), take_over, held)
}

/// The devices that were truncated while in use.
pub(super) fn cut_short(recorded: &Recorded) -> impl Iterator<Item = (Uuid, u64)> + '_ {
    let devices = recorded.devices.iter();
    devices.filter_map(|device| Some((device.uuid, device.cut_short_bytes?)))
}

pub(super) fn refuse_cut_short(spec: &DeviceSpec, bytes: u64) -> ApiError {
    const HINT: &str = "`forebay pool open --device SPEC --force` accepts it as it is";
    ApiError::damaged(format!("{spec}: {}; {HINT}", cut_short_text(bytes)))
        .hint("replace it with an earlier copy, or use --force")
}

/// Checks the size against the catalog, as labels do too.
fn refuse_shrunk(pool: &Pool, device: &PoolDevice) -> Result<(), ApiError> {
    let record = pool.devices().iter().find(|r| r.index == device.index);
    let needed = record.map_or(Some(0), |record| {
        record
            .extents
            .checked_mul(pool.info().extent_bytes)?
            .checked_add(record.data_offset_bytes)
    });
    let capacity = device.store.0.info().capacity_bytes;
    if needed.is_none_or(|needed| needed > capacity) {
        return Err(ApiError::damaged(format!(
            "{}: has {} ({capacity} bytes), less than the pool recorded: it was truncated or replaced",
            device.spec,
            format_bytes(capacity)
        ))
        .hint("restore the device before you open the pool; nothing was changed"));
    }
    Ok(())
}
