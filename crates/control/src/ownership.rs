//! Ensures that only one installation uses a pool.
//!
//! Labels and heartbeats are read before the first write. Another installation's pool is refused,
//! unless the caller asks to take it over and its heartbeat stands still. A take-over writes the
//! new owner's block to the first device, waits, and reads it back: of two, the last writer wins.
//! Later writes first read the block, at most every two seconds.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_device::heartbeat::{
    Beat, CLAIM_MS, HEARTBEAT_BYTES, HEARTBEAT_OFFSET_BYTES, Holder, PAUSE_MS, PERIOD_MS, WINDOW_MS,
};
use forebay_pool::{BlockStore, Label, LabelFormat, LabelOwner, Stamp};
use tokio::sync::Notify;
use uuid::Uuid;

use crate::files::lock_file;
use crate::model::error::{self, ApiError};
use crate::store::SyncStore;

const ID_FILE: &str = "owner-id";
/// How long a heartbeat of this installation's other boot is watched.
const OWN_WINDOW: Duration = Duration::from_millis(2 * PERIOD_MS + PERIOD_MS / 2);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The longest time between the last read of another's heartbeat and the claim.
const CLAIM_AT_MOST: Duration = Duration::from_secs(1);
const TAKE_OVER_HINT: &str = "if no other machine uses the pool, `forebay pool open --take-over` takes it over; add \
    `--device SPEC` for devices that are not recorded here";

/// One state folder on one node.
#[derive(Debug)]
pub(crate) struct Installation {
    owner: LabelOwner,
    boot: [u8; 16],
    /// `None` in a read-only folder; devices are claimed anyway.
    _lock: Option<File>,
}

fn machine() -> (String, String) {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    (host.trim().to_owned(), id.trim().to_owned())
}

fn owner_id(state_dir: &Path) -> io::Result<Uuid> {
    let path = state_dir.join(ID_FILE);
    let damaged = |what: &dyn Display| {
        let text = format!(
            "{} holds no ID: {what}: restore the file, or remove it and take the pool over \
            (`forebay pool open --take-over`)",
            path.display()
        );
        io::Error::new(io::ErrorKind::InvalidData, text)
    };
    match std::fs::read_to_string(&path) {
        Ok(text) => return text.trim().parse().map_err(|error| damaged(&error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(damaged(&error)),
    }
    let id = Uuid::new_v4();
    let new = path.with_extension("new");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    writeln!(file, "{id}")?;
    file.sync_all()?;
    std::fs::rename(&new, &path)?;
    File::open(state_dir)?.sync_all()?;
    Ok(id)
}

impl Installation {
    pub(crate) fn claim(state_dir: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(state_dir)?;
        let does = format!("uses the state folder {}", state_dir.display());
        let lock = match lock_file(&state_dir.join("state"), &does) {
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => None,
            lock => Some(lock?),
        };
        let (host, machine) = machine();
        Ok(Self {
            owner: LabelOwner {
                id: owner_id(state_dir)?,
                machine,
                host,
            },
            boot: forebay_xlate::shm::boot_id()?,
            _lock: lock,
        })
    }

    pub(crate) fn stamp(&self, number: u64, is_clean: bool) -> Stamp {
        Stamp {
            owner: self.owner.clone(),
            number,
            is_clean,
        }
    }

    pub(crate) fn holder(&self) -> Holder {
        Holder {
            owner: self.owner.id.into_bytes(),
            boot: self.boot,
            host: self.owner.host.clone(),
        }
    }
}

/// A daemon's hold on the pool while it serves it.
#[derive(Debug)]
pub(crate) struct Tenure {
    holder: Holder,
    since: Instant,
    /// When our blocks were last read, in ms since `since`.
    seen_ms: AtomicU64,
    is_lost: AtomicBool,
    taker: Mutex<Option<String>>,
    lost: Notify,
}

impl Tenure {
    fn new(holder: Holder) -> Arc<Self> {
        Arc::new(Self {
            holder,
            since: Instant::now(),
            seen_ms: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
            taker: Mutex::new(None),
            lost: Notify::new(),
        })
    }

    pub(crate) fn holder(&self) -> &Holder {
        &self.holder
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Checks before a write that the pool is still ours; reads the block if the last read is old.
    pub(crate) fn check(&self, store: &dyn BlockStore) -> io::Result<()> {
        if !self.is_lost.load(Relaxed) {
            let now = self.now_ms();
            if now.saturating_sub(self.seen_ms.load(Relaxed)) < PAUSE_MS / 2 {
                return Ok(());
            }
            if self.poll_beat(store)? {
                self.seen_ms.store(now, Relaxed);
                return Ok(());
            }
        }
        let taker = self.taker().unwrap_or_default();
        Err(io::Error::new(io::ErrorKind::PermissionDenied, taker))
    }

    pub(crate) fn poll_beat(&self, store: &dyn BlockStore) -> io::Result<bool> {
        match read_beat(store)? {
            Some(beat) if !beat.holder.is(&self.holder) => {
                self.lose(&beat.holder.host);
                Ok(false)
            }
            _ => Ok(true),
        }
    }

    fn lose(&self, host: &str) {
        let mut taker = self.taker.lock().unwrap_or_else(PoisonError::into_inner);
        let text = format!("another Forebay, on host {host:?}, took the pool over");
        taker.get_or_insert(text);
        self.is_lost.store(true, Relaxed);
        self.lost.notify_one();
    }

    pub(crate) fn taker(&self) -> Option<String> {
        let taker = self.taker.lock().unwrap_or_else(PoisonError::into_inner);
        taker.clone()
    }

    pub(crate) async fn lost(&self) -> String {
        loop {
            if let Some(taker) = self.taker() {
                return taker;
            }
            self.lost.notified().await;
        }
    }
}

fn read_beat(store: &dyn BlockStore) -> io::Result<Option<Beat>> {
    let mut block = [0; HEARTBEAT_BYTES];
    store.read_at(HEARTBEAT_OFFSET_BYTES, &mut block)?;
    Ok(Beat::decode(&block))
}

fn write_beat(store: &dyn BlockStore, holder: &Holder, stopped: bool) -> io::Result<()> {
    let count = read_beat(store)?.map_or(0, |beat| beat.count) + 1;
    let beat = Beat {
        holder: holder.clone(),
        count,
        stopped,
    };
    store.write_at(HEARTBEAT_OFFSET_BYTES, &beat.encode())?;
    store.sync()
}

pub(crate) struct Candidate<'a> {
    pub(crate) label: &'a Label,
    pub(crate) store: &'a Arc<SyncStore>,
}

fn unreadable(error: &io::Error) -> ApiError {
    ApiError::unavailable(format!("can't read or write a device's heartbeat: {error}"))
}

/// Reads the heartbeat blocks; `None` for an unreadable one.
fn read_beats(stores: &[&Arc<SyncStore>]) -> Vec<Option<Beat>> {
    let read = |store: &&Arc<SyncStore>| {
        read_beat(store.as_ref()).unwrap_or_else(|error| {
            let device = &store.0.info().spec;
            tracing::warn!(%device, %error, "can't read a device's heartbeat");
            None
        })
    };
    stores.iter().map(read).collect()
}

/// The error names the owner. Blocks for some seconds if that must be found out. `held`: the hold
/// on devices claimed before. `None`: the labels have no owner.
pub(crate) fn claim(
    me: &Installation,
    devices: &[Candidate<'_>],
    take_over: bool,
    held: Option<Arc<Tenure>>,
) -> Result<Option<Arc<Tenure>>, ApiError> {
    let mut owned: Vec<&Candidate<'_>> = devices
        .iter()
        .filter(|one| one.label.format == LabelFormat::Current && one.store.tenure().is_none())
        .collect();
    owned.sort_by_key(|one| one.label.device_index);
    let Some(first) = owned.first() else {
        return Ok(held);
    };
    let stores: Vec<&Arc<SyncStore>> = owned.iter().map(|one| one.store).collect();
    let holder = me.holder();
    let beats = read_beats(&stores);
    let of_another = |beat: &Beat| beat.holder.owner != holder.owner;
    let is_anothers = owned
        .iter()
        .filter_map(|one| one.label.owner.as_ref())
        .any(|owner| owner.id != me.owner.id)
        || beats.iter().flatten().any(of_another);
    if is_anothers && !take_over {
        return Err(anothers(&owned, &beats, me));
    }
    let of_other_boot = |beat: &Beat| beat.holder.boot != holder.boot;
    if is_anothers || beats.iter().flatten().any(of_other_boot) {
        let pool = &first.label.pool_name;
        take(pool, &holder, &stores, &beats, is_anothers)?;
    }
    let tenure = held.unwrap_or_else(|| Tenure::new(holder.clone()));
    for (store, beat) in stores.iter().zip(&beats) {
        if beat.as_ref().is_none_or(|beat| !beat.holder.is(&holder))
            && let Err(error) = write_beat(store.as_ref(), &holder, false)
        {
            tracing::warn!(device = %store.0.info().spec, %error, "can't write a device's heartbeat");
        }
        store.guard(tenure.clone());
    }
    Ok(Some(tenure))
}

/// Claims the first device once the heartbeats stand still.
fn take(
    pool: &str,
    holder: &Holder,
    stores: &[&Arc<SyncStore>],
    beats: &[Option<Beat>],
    is_anothers: bool,
) -> Result<(), ApiError> {
    let Some(first) = stores.first() else {
        return Ok(());
    };
    let window = if is_anothers {
        Duration::from_millis(WINDOW_MS)
    } else {
        OWN_WINDOW
    };
    let begin = Instant::now();
    let mut checked = begin;
    while begin.elapsed() < window {
        std::thread::sleep(POLL_INTERVAL);
        checked = Instant::now();
        let now = read_beats(stores);
        if now != beats {
            return Err(alive(pool, now.iter().chain(beats).flatten(), holder));
        }
    }
    write_beat(first.as_ref(), holder, false).map_err(|error| unreadable(&error))?;
    if checked.elapsed() > CLAIM_AT_MOST {
        return Err(ApiError::unavailable(format!(
            "pool {pool}: {} answers too slowly to be sure that no other Forebay opens the pool",
            first.0.info().spec
        ))
        .hint("try again"));
    }
    if !is_anothers {
        return Ok(());
    }
    tracing::warn!(pool, "taking the pool over from another machine");
    std::thread::sleep(Duration::from_millis(CLAIM_MS));
    let found = read_beat(first.as_ref()).map_err(|error| unreadable(&error))?;
    match found.filter(|beat| !beat.holder.is(holder)) {
        Some(winner) => Err(alive(pool, std::iter::once(&winner), holder)),
        None => Ok(()),
    }
}

/// No flag overrides that.
pub(crate) fn refuse_alive(stores: &[Arc<SyncStore>]) -> Result<(), ApiError> {
    let stores: Vec<&Arc<SyncStore>> = stores.iter().collect();
    let before = read_beats(&stores);
    if before.iter().flatten().all(|beat| beat.stopped) {
        return Ok(());
    }
    std::thread::sleep(OWN_WINDOW);
    let after = read_beats(&stores);
    for ((store, before), after) in stores.iter().zip(before).zip(after) {
        if let Some(beat) = after.filter(|after| before.as_ref() != Some(after)) {
            return Err(ApiError::in_use(format!(
                "{} is in use now, perhaps under another name: a Forebay on host {:?} updates its heartbeat",
                store.0.info().spec,
                beat.holder.host
            ))
            .hint("`forebay device list` there shows its devices; if it is another Forebay, stop it first"));
        }
    }
    Ok(())
}

/// For devices whose labels just got an owner.
pub(crate) fn begin(me: &Installation, stores: &[Arc<SyncStore>]) -> Result<Arc<Tenure>, ApiError> {
    let tenure = Tenure::new(me.holder());
    join(&tenure, stores)?;
    Ok(tenure)
}

pub(crate) fn join(tenure: &Arc<Tenure>, stores: &[Arc<SyncStore>]) -> Result<(), ApiError> {
    for store in stores {
        let written = write_beat(store.as_ref(), tenure.holder(), false);
        written.map_err(|error| unreadable(&error))?;
        store.guard(tenure.clone());
    }
    Ok(())
}

/// After an orderly stop.
pub(crate) fn end(tenure: &Tenure, stores: &[Arc<SyncStore>]) {
    for store in stores {
        if let Err(error) = write_beat(store.as_ref(), tenure.holder(), true) {
            tracing::warn!(%error, device = %store.0.info().spec, "can't end the heartbeat");
        }
    }
}

fn anothers(devices: &[&Candidate<'_>], beats: &[Option<Beat>], me: &Installation) -> ApiError {
    let labels = devices.iter().map(|one| one.label);
    let mut others = labels.filter(|label| {
        let owner = label.owner.as_ref();
        owner.is_some_and(|owner| owner.id != me.owner.id)
    });
    let name = devices.first().map_or("", |one| &one.label.pool_name);
    let text = match others.next() {
        Some(label) => {
            let owner = label.owner.as_ref();
            let (host, machine) = owner.map_or(("", ""), |o| (&o.host, &o.machine));
            let how = if label.is_clean {
                "which closed it in good order"
            } else {
                "which may use it now"
            };
            format!(
                "pool {name} belongs to another Forebay, on host {host:?} (machine {machine}), {how}"
            )
        }
        None => {
            let mut hosts = beats.iter().flatten().map(|beat| &beat.holder.host);
            let host = hosts.next().map_or("", String::as_str);
            format!("pool {name} was taken over by another Forebay, on host {host:?}")
        }
    };
    ApiError::in_use(text).hint(TAKE_OVER_HINT)
}

fn alive<'a>(pool: &str, beats: impl Iterator<Item = &'a Beat>, me: &Holder) -> ApiError {
    let mut others = beats.filter(|beat| !beat.holder.is(me));
    let host = others.next().map_or("", |beat| &beat.holder.host);
    ApiError::new(
        error::ErrorKind::InUse,
        format!("pool {pool} is in use now: a Forebay on host {host:?} updates its heartbeat"),
    )
    .hint("stop that one first (`forebay shutdown` there); a pool in use is never taken over")
}
