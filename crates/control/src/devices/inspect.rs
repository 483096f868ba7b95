//! Reads labels of devices before any device is claimed.
//!
//! All places are read concurrently within one time limit, so slow devices delay the opening of a
//! pool only once. A device with an unfinished earlier request is left alone. [`Opening`] lists
//! devices that have not answered.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use forebay_device::{DeviceInfo, DeviceSpec, OpenOptions};
use forebay_pool::Label;

use super::{HANGS_HINT, OPEN_LIMIT, api_error, exclusive, invalid, open_device, refuse_hanging};
use crate::model::error::ApiError;
use crate::store::SyncStore;

const POLL_LIMIT: Duration = Duration::from_secs(5);
/// The limit for taking a silent device back: a slow one would soon be missed again.
const QUICK_LIMIT: Duration = Duration::from_secs(2);
const ENDED_EVERY: Duration = Duration::from_millis(20);

pub(super) type Checked = (DeviceInfo, Label);

/// The progress of opening a pool.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) pool: Option<String>,
    begun: Instant,
    waits: Mutex<PollWaits>,
}

#[derive(Debug, Default)]
struct PollWaits {
    checked_at: BTreeSet<String>,
    taken: Vec<Weak<SyncStore>>,
}

impl Default for Opening {
    fn default() -> Self {
        Self::of(None)
    }
}

impl Opening {
    pub(crate) fn of(pool: Option<String>) -> Self {
        Self {
            pool,
            begun: Instant::now(),
            waits: Mutex::default(),
        }
    }

    fn waits(&self) -> MutexGuard<'_, PollWaits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From here on the device's store knows whether a request waits.
    pub(super) fn took(&self, store: &Arc<SyncStore>) {
        self.waits().taken.push(Arc::downgrade(store));
    }
}

impl fmt::Display for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waits = self.waits();
        let mut devices: Vec<String> = waits.checked_at.iter().cloned().collect();
        let taken = waits.taken.iter().filter_map(Weak::upgrade);
        let taken = taken.filter(|store| store.is_waited_for());
        devices.extend(taken.map(|store| store.0.info().spec.to_string()));
        let seconds = self.begun.elapsed().as_secs();
        match devices.is_empty() {
            true => write!(f, "the pool is being opened (for {seconds} s)"),
            false => write!(
                f,
                "the pool is being opened (for {seconds} s): the daemon waits for device {}",
                devices.join(", ")
            ),
        }
    }
}

pub(super) fn at_all<'a>(
    places: impl Iterator<Item = &'a String>,
    opening: &Opening,
) -> BTreeMap<String, Result<Checked, ApiError>> {
    opening.waits().checked_at = places.cloned().collect();
    let left = opening.waits().checked_at.clone();
    let mut checked = BTreeMap::new();
    within(left, POLL_LIMIT, |place, result| {
        opening.waits().checked_at.remove(&place);
        checked.insert(place, result);
    });
    checked
}

pub(super) fn at(place: &str) -> Result<Checked, ApiError> {
    one(place, POLL_LIMIT)
}

/// Whether a silent device answers now, and fast enough to be taken.
pub(crate) fn may_answer(place: &str) -> bool {
    one(place, QUICK_LIMIT).is_ok()
}

fn one(place: &str, limit: Duration) -> Result<Checked, ApiError> {
    let mut checked = Err(silent(place, limit));
    within(BTreeSet::from([place.to_owned()]), limit, |_, result| {
        checked = result;
    });
    checked
}

fn within(
    mut left: BTreeSet<String>,
    limit: Duration,
    mut found: impl FnMut(String, Result<Checked, ApiError>),
) {
    let (sender, receiver) = mpsc::channel();
    for place in &left {
        let (sender, place) = (sender.clone(), place.clone());
        let thread = std::thread::Builder::new().name("device-look".to_owned());
        let spawned = thread.spawn(move || {
            let checked = check(&place);
            // The receiver may have given up.
            let _ = sender.send((place, checked));
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "can't start a thread to open a device");
        }
    }
    drop(sender);
    let end = Instant::now() + limit;
    while !left.is_empty() {
        let rest = end.saturating_duration_since(Instant::now());
        let Ok((place, checked)) = receiver.recv_timeout(rest) else {
            break;
        };
        left.remove(&place);
        found(place, checked);
    }
    for place in left {
        let error = silent(&place, limit);
        found(place, Err(error));
    }
}

fn silent(place: &str, limit: Duration) -> ApiError {
    ApiError::unavailable(format!(
        "{place}: opening it takes more than {} s: the device hangs, or answers too slowly",
        limit.as_secs()
    ))
    .hint(HANGS_HINT)
}

/// Reads a device's label without claiming it.
fn check(place: &str) -> Result<Checked, ApiError> {
    let spec: DeviceSpec = place.parse().map_err(invalid)?;
    let options = OpenOptions {
        exclusive: false,
        ..exclusive()
    };
    let device = open_device(&spec, &options)?;
    refuse_hanging(&device)?;
    let begin = Instant::now();
    while device.is_waited_for() {
        if begin.elapsed() >= OPEN_LIMIT {
            return Err(silent(place, OPEN_LIMIT));
        }
        std::thread::sleep(ENDED_EVERY);
    }
    let store = SyncStore::new(device);
    let label = Label::read(&store).map_err(|error| {
        let mut given = api_error(error);
        given.message = format!("{spec}: {}", given.message);
        given
    })?;
    Ok((store.0.info().clone(), label))
}
