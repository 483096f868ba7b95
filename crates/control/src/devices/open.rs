//! Opening a pool on whatever of its devices is there.
//!
//! Purpose: from what is recorded, configured or told to an open pool, degraded if need be.
//! Design: labels decide, not names. Each place is looked at without touching it; what carries the
//! pool's label is then opened for this daemon alone. A device that is not where it was last found is
//! looked for by its label ([`find`]). Two devices with one label, each at a place that is told, configured or
//! recorded, are refused: one is a copy, and may be an old one. What is told by a person must be right; what is only
//! remembered may be wrong, and then the reason is kept for whoever asks why a device is missing. A
//! device that another daemon serves ends it all: that pool is in use, however much of it is left.
//! Not here: whether what was found is enough (the pool decides), making pools (`create`).

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_device::DeviceSpec;
use forebay_device::size::format_bytes;
use forebay_pool::{ErrorKind, Label, OpenDevice, Opened, Pool, PoolError, Uuid};

use super::create::{engine_block_bytes, reserve_catalog};
use super::look::{self, Looked, Opening};
use super::record::Recorded;
use super::{
    MissingDevice, OPEN_LIMIT, OpenPool, PoolDevice, api_error, claim, cut_short_text, exclusive,
    find, invalid, open_device,
};
use crate::model::error::{self, ApiError};
use crate::ownership::{self, Candidate, Installation, Tenure};
use crate::store::SyncStore;

/// What to do when devices are missing.
pub(crate) const OPEN_HINT: &str =
    "bring them back, or say where they are now: `forebay pool open --device SPEC`";

/// What to do about an older copy of a device.
pub(super) const FORCE_HINT: &str = "put the device itself back, or take the copy as it is: `forebay pool open --device SPEC --force`";

/// Where a pool may be.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places {
    /// The pool as it was last seen. Without it, the labels of what is told say which pool is meant.
    pub(crate) recorded: Option<Recorded>,
    /// Told by a person, now.
    pub(crate) told: Vec<String>,
    /// What is told of is taken even if it was cut short while in use.
    pub(crate) forced: bool,
    /// Written in the configuration: they may be there.
    pub(crate) configured: Vec<String>,
    /// The installation that opens the pool. Without one (in tests) no owner is checked.
    pub(crate) me: Option<Arc<Installation>>,
    /// It becomes this installation's if it is another one's.
    pub(crate) take_over: bool,
    /// Who asks how far it is.
    pub(crate) opening: Arc<Opening>,
}

impl Places {
    /// Whether there is any.
    pub(crate) fn is_empty(&self) -> bool {
        self.recorded.is_none() && self.told.is_empty() && self.configured.is_empty()
    }
}

/// A device of the pool, found and taken.
struct FoundDevice {
    label: Label,
    store: Arc<SyncStore>,
    /// It is taken even if it is an older copy.
    forced: bool,
}

/// A place where a device was not.
struct Passed {
    spec: String,
    /// Which device it is, if that is known.
    device: Option<Uuid>,
    why: String,
    is_silent: bool,
}

#[derive(Default)]
struct Search {
    /// The pool's identity and name, once they are known.
    pool: Option<(Uuid, String)>,
    found: Vec<FoundDevice>,
    passed: Vec<Passed>,
    /// Devices that were cut short while in use, to how many bytes.
    cut_short: BTreeMap<Uuid, u64>,
    /// They are taken all the same.
    forced: bool,
    /// The places that were looked at in the beginning.
    looked: BTreeMap<String, Result<Looked, ApiError>>,
    opening: Arc<Opening>,
}

/// Whether a place that is only remembered may be passed over for this.
fn is_final(error: &ApiError) -> bool {
    use crate::model::error::ErrorKind::{Exists, InUse};
    // In use by another daemon; a copy of what was found elsewhere.
    matches!(error.kind, InUse | Exists)
}

impl Search {
    /// Takes the device at a place, if it is the pool's.
    fn take(&mut self, text: &str) -> Result<(), ApiError> {
        let spec: DeviceSpec = text.parse().map_err(invalid)?;
        let (info, label) = match self.looked.get(text) {
            Some(looked) => looked.clone()?,
            None => look::at(text)?,
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
                "{spec} and {} carry the label of the same device: one is a copy",
                twin.store.0.info().spec
            ))
            .hint("which one is right, Forebay can't know: remove the copy, and try again"));
        }
        if let Some(bytes) = self.cut_short.get(&label.device_uuid)
            && !self.forced
        {
            return Err(refuse_cut_short(&spec, *bytes));
        }
        label
            .check_block(engine_block_bytes(&spec)?)
            .map_err(|error| {
                let mut told = api_error(error);
                told.message = format!("{spec}: {}", told.message);
                told
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

    /// The same for a place that is only remembered.
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

    /// Looks where a device was last found, and then beside all of them.
    fn remember(&mut self, devices: &[(Uuid, String)]) -> Result<(), ApiError> {
        // Those that are found already too: what lies where they were last found may be a copy.
        for (_, spec) in devices {
            self.try_take(spec)?;
        }
        let folders = find::folders(devices.iter().map(|(_, spec)| spec.as_str()));
        for (device, spec) in devices {
            // A device that is there and silent has not moved.
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

    /// Passes over devices of which opening takes too long. Whether there was any.
    fn pass_over_slow(&mut self) -> bool {
        let is_slow = |found: &mut FoundDevice| found.store.is_too_slow();
        let slow: Vec<FoundDevice> = self.found.extract_if(.., is_slow).collect();
        for found in &slow {
            let spec = found.store.0.info().spec.to_string();
            let limit = OPEN_LIMIT.as_secs();
            self.passed.push(Passed {
                why: format!("{spec}: it answers too slowly: opening it takes more than {limit} s"),
                spec,
                device: Some(found.label.device_uuid),
                is_silent: true,
            });
        }
        !slow.is_empty()
    }

    /// Why the pool could not be opened, and what was passed over.
    fn not_opened(&self, error: PoolError) -> ApiError {
        let is_partial = error.kind == ErrorKind::NotFound;
        let mut told = api_error(error);
        for passed in &self.passed {
            told.message = format!("{}; {}", told.message, passed.why);
        }
        if is_partial || !self.passed.is_empty() {
            told = told.hint(OPEN_HINT);
        } else if told.message.contains("older copy") {
            told = told.hint(FORCE_HINT);
        }
        told
    }

    /// A device that the pool misses, and why.
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

/// Opens the pool on these devices.
#[cfg(test)]
pub(crate) fn open(specs: &[String]) -> Result<OpenPool, ApiError> {
    open_at(&Places {
        told: specs.to_vec(),
        ..Places::default()
    })
}

/// Opens the pool that is to be found at these places.
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
    let all = (places.told.iter().chain(&places.configured)).chain(recorded_specs);
    search.looked = look::at_all(all, &places.opening);
    for spec in &places.told {
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

/// Opens what was found.
fn open_found(mut search: Search, places: &Places) -> Result<OpenPool, ApiError> {
    #[cfg_attr(not(feature = "test-device"), allow(unused_mut))]
    let (mut opened, tenure) = open_devices(&mut search, places)?;
    // For tests, whose volumes are too small to be deleted in slices.
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
    // A pool made before this was done, or copied as a sparse file.
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

/// Claims and opens the devices that were found. Devices that only the catalog knows of are looked for, once, and those that
/// became slow are passed over.
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

/// Makes the pool this installation's.
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

/// The devices that were cut short while in use.
pub(super) fn cut_short(recorded: &Recorded) -> impl Iterator<Item = (Uuid, u64)> + '_ {
    let devices = recorded.devices.iter();
    devices.filter_map(|device| Some((device.uuid, device.cut_short_bytes?)))
}

pub(super) fn refuse_cut_short(spec: &DeviceSpec, bytes: u64) -> ApiError {
    const HINT: &str = "`forebay pool open --device SPEC --force` takes it as it is";
    ApiError::damaged(format!("{spec}: {}; {HINT}", cut_short_text(bytes)))
        .hint("put a copy from before in its place, or say --force")
}

/// Labels say it too; this is what the catalog says.
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
            "{}: has {} ({capacity} bytes), less than the pool knows it to have: it was truncated or replaced",
            device.spec,
            format_bytes(capacity)
        ))
        .hint("restore the device before the pool is opened; nothing was changed"));
    }
    Ok(())
}
