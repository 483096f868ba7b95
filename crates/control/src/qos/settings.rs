//! Settings and costs of scheduling. They belong to the node, not to the pool, and are two files in
//! the state folder.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forebay_qos::cost::{Profile, default_profiles};
use forebay_qos::params::Params;
use forebay_qos::spread;
use forebay_xlate::boundary::message::{
    CostProfile as ReportedProfile, NodeCapacity as ReportedCapacity, Scheduling as Reported,
};
use forebay_xlate::boundary::scheduling::params_of;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

use crate::base::Base;
use crate::devices::now_s;
use crate::events::EventFields;
use crate::files;
use crate::model::ExportFrontend;
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::model::scheduling::{
    CostOperation, CostProfile, Costs, CostsPut, NodeCapacity, Scheduling, SchedulingUpdate, Spread,
};
use crate::qos::budgets::Budgets;

/// In the order of `forebay_qos::cost`, like `OPERATIONS`.
const FRONTENDS: [ExportFrontend; 3] = [
    ExportFrontend::NvmeTcp,
    ExportFrontend::NvmePcie,
    ExportFrontend::VhostUser,
];
const OPERATIONS: [CostOperation; 3] = [
    CostOperation::Read,
    CostOperation::Write,
    CostOperation::Other,
];
const SETTINGS: &str = "scheduling.json";
const COSTS: &str = "costs.json";
const NOTE_BYTES: usize = 1000;
/// The longest plausible time of an operation, ns.
const MOST_NS: f64 = 1e10;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Settings {
    #[serde(deserialize_with = "stored_spread")]
    pub(crate) spread: Spread,
    pub(crate) oversubscription: f64,
    pub(crate) wants_base: f64,
    capacity: NodeCapacity,
    params: BTreeMap<String, f64>,
    #[serde(skip_serializing)]
    policy: Option<String>,
}

fn stored_spread<'de, D: Deserializer<'de>>(stored: D) -> Result<Spread, D::Error> {
    let text = String::deserialize(stored)?;
    Ok(match &*text {
        "one_to_one" => Spread::OneToOne,
        _ => Spread::default(),
    })
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            spread: Spread::default(),
            oversubscription: 1.0,
            wants_base: 0.5,
            capacity: NodeCapacity {
                device_reads: 1.0,
                device_writes: 1.0,
                link_in_bytes_s: None,
                link_out_bytes_s: None,
                link_found: false,
                operations_s: None,
            },
            params: BTreeMap::new(),
            policy: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    at_s: u64,
    note: Option<String>,
    profiles: Vec<CostProfile>,
}

#[derive(Debug)]
pub(crate) struct NodeSettings {
    pub(super) base: Rc<Base>,
    pub(super) settings: RefCell<Settings>,
    pub(super) measured: RefCell<Option<Measured>>,
    folder: RefCell<Option<PathBuf>>,
    /// Of the next engine; 0: not known yet.
    pub(super) reactors: Cell<u32>,
    changing: tokio::sync::Mutex<()>,
}

impl Settings {
    pub(crate) fn spread(&self) -> spread::Spread {
        match self.spread {
            Spread::OneToOne => spread::Spread::OneToOne,
            Spread::OneToN => spread::Spread::OneToN,
        }
    }

    fn params(&self) -> Result<Params, String> {
        params_of(self.params.iter().map(|(name, value)| (&**name, *value)))
    }

    /// Returns the names of settings of an earlier version.
    fn drop_unknown(&mut self) -> Vec<String> {
        let default = Params::default();
        let is_known = |name: &str| default.values().any(|(known, _)| known == name);
        let unknown = self.params.keys().filter(|name| !is_known(name));
        let mut unknown: Vec<String> = unknown.cloned().collect();
        self.params.retain(|name, _| is_known(name));
        let policy = self.policy.take().filter(|policy| policy != "burst");
        unknown.extend(policy.map(|policy| format!("policy {policy}")));
        unknown
    }

    fn capacity(&self) -> ReportedCapacity {
        let capacity = &self.capacity;
        // `check` allows 10 000 at most.
        let milli = |devices: f64| (devices * 1000.0).round() as u64;
        ReportedCapacity {
            device_reads_milli: milli(capacity.device_reads),
            device_writes_milli: milli(capacity.device_writes),
            link_in_bytes_s: capacity.link_in_bytes_s.unwrap_or(u64::MAX),
            link_out_bytes_s: capacity.link_out_bytes_s.unwrap_or(u64::MAX),
            operations_s: capacity.operations_s.unwrap_or(u64::MAX),
        }
    }

    fn check(&self) -> Result<(), String> {
        self.params()?;
        let capacity = &self.capacity;
        let numbers = [
            ("oversubscription", self.oversubscription, 1.0, 100.0),
            ("wants_base", self.wants_base, 0.0, 1.0),
            ("device_reads", capacity.device_reads, 0.001, 10_000.0),
            ("device_writes", capacity.device_writes, 0.001, 10_000.0),
        ];
        for (name, value, least, most) in numbers {
            if !(least..=most).contains(&value) {
                return Err(format!("{name} is {value}: it can be {least} to {most}"));
            }
        }
        let limits = [
            ("link_in_bytes_s", capacity.link_in_bytes_s, 1_000_000),
            ("link_out_bytes_s", capacity.link_out_bytes_s, 1_000_000),
            ("operations_s", capacity.operations_s, 1000),
        ];
        for (name, value, least) in limits {
            if value.is_some_and(|value| value < least) {
                return Err(format!("{name} is below {least}"));
            }
        }
        Ok(())
    }
}

fn index_of(profile: &CostProfile) -> usize {
    profile.frontend as usize * OPERATIONS.len() + profile.operation as usize
}

fn default_costs() -> Vec<CostProfile> {
    let mut all = Vec::new();
    for (frontend, row) in FRONTENDS.into_iter().zip(default_profiles()) {
        for (operation, profile) in OPERATIONS.into_iter().zip(row) {
            all.push(CostProfile {
                frontend,
                operation,
                cpu_ns: profile.cpu_ns,
                device_ns: profile.device_ns,
                header_bytes: profile.header_bytes,
            });
        }
    }
    all
}

fn check_costs(profiles: &[CostProfile]) -> Result<(), String> {
    if profiles.is_empty() || profiles.len() > 9 {
        return Err("give 1 to 9 profiles, for 3 frontends and 3 operations".to_owned());
    }
    for (at, profile) in profiles.iter().enumerate() {
        let what = format!("{:?} {:?}", profile.frontend, profile.operation);
        let is_time = |ns: &f64| (0.0..=MOST_NS).contains(ns);
        if !profile.cpu_ns.iter().all(is_time) || !profile.device_ns.iter().all(is_time) {
            return Err(format!("{what}: a time must be 0 to {MOST_NS} ns"));
        }
        if profile.cpu_ns.iter().any(|ns| *ns <= 0.0) {
            return Err(format!("{what}: processor times must be above 0"));
        }
        if profile.header_bytes > 1 << 20 {
            return Err(format!("{what}: too many bytes in addition to the data"));
        }
        let is_same = |other: &CostProfile| index_of(other) == index_of(profile);
        if profiles[..at].iter().any(is_same) {
            return Err(format!("{what} is given twice"));
        }
    }
    Ok(())
}

impl NodeSettings {
    pub(crate) fn new(base: &Rc<Base>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            settings: Default::default(),
            measured: Default::default(),
            folder: Default::default(),
            reactors: Default::default(),
            changing: Default::default(),
        })
    }

    pub(crate) fn folder(&self) -> Option<PathBuf> {
        self.folder.borrow().clone()
    }

    pub(crate) fn read_settings(&self, folder: &Path, reactors: u16) {
        let node = self;
        *node.folder.borrow_mut() = Some(folder.to_owned());
        node.reactors.set(reactors.into());
        let mut dropped = Vec::new();
        let instead = "the defaults apply until `forebay scheduling set`";
        let settings = self.read_record(SETTINGS, "the scheduling settings", instead, |read| {
            dropped = Settings::drop_unknown(read);
            read.check()
        });
        *node.settings.borrow_mut() = settings.unwrap_or_default();
        for name in dropped {
            let text = format!(
                "the scheduling parameter `{name}` is fixed in this version: its setting is dropped"
            );
            self.base
                .report(EventKind::Warning, text, EventFields::default());
        }
        let instead = "the defaults apply until `forebay calibrate`";
        let costs = self.read_record(COSTS, "I/O costs", instead, |read: &mut Measured| {
            check_costs(&read.profiles)
        });
        *node.measured.borrow_mut() = costs;
    }

    /// `instead` names the replacement of an unusable record.
    pub(crate) fn read_record<T: DeserializeOwned>(
        &self,
        file: &str,
        what: &str,
        instead: &str,
        check: impl FnOnce(&mut T) -> Result<(), String>,
    ) -> Option<T> {
        let path = self.folder()?.join(file);
        let read = files::read_json::<T>(&path).map_err(|error| error.to_string());
        let checked = read.and_then(|mut read| {
            let checked = read.as_mut().map_or(Ok(()), check);
            checked.map_err(|error| format!("{}: {error}", path.display()))?;
            Ok(read)
        });
        checked.unwrap_or_else(|error| {
            let text = format!("the record of {what} can't be used; {instead}: {error}");
            self.base
                .report(EventKind::Warning, text, EventFields::default());
            None
        })
    }

    /// `None` removes the record.
    pub(crate) async fn write_record<T: Serialize + Send + 'static>(
        &self,
        file: &str,
        value: Option<T>,
    ) -> Result<(), ApiError> {
        let Some(folder) = self.folder() else {
            return Ok(());
        };
        let path = folder.join(file);
        let written = tokio::task::spawn_blocking(move || match value {
            Some(value) => files::write_json(&path, &value, true),
            None => files::remove(&path),
        });
        match written.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(ApiError::unavailable(error.to_string())
                .hint("nothing was changed; free some space in the state folder")),
            Err(_) => Err(ApiError::internal("the thread that writes it failed")),
        }
    }

    fn profiles(&self) -> Vec<CostProfile> {
        let mut all = default_costs();
        if let Some(measured) = &*self.measured.borrow() {
            for profile in &measured.profiles {
                all[index_of(profile)] = *profile;
            }
        }
        all
    }

    pub(crate) fn measured(&self) -> Vec<ExportFrontend> {
        let measured = self.measured.borrow();
        let profiles = measured.as_ref().map_or(&[][..], |of| &of.profiles);
        let count = |frontend| profiles.iter().filter(|of| of.frontend == frontend).count();
        let all = FRONTENDS.into_iter();
        all.filter(|frontend| count(*frontend) == OPERATIONS.len())
            .collect()
    }

    pub(crate) fn scheduling_config(&self) -> Reported {
        let settings = self.settings.borrow();
        let all = self.profiles();
        let published = |at: usize| {
            ReportedProfile::from(&Profile {
                cpu_ns: all[at].cpu_ns,
                device_ns: all[at].device_ns,
                header_bytes: all[at].header_bytes,
            })
        };
        let params = settings.params.iter();
        Reported {
            policy: Default::default(),
            params: params
                .map(|(name, value)| (name.clone(), value.to_bits()))
                .collect(),
            capacity: settings.capacity(),
            costs: std::array::from_fn(|frontend| {
                std::array::from_fn(|operation| published(frontend * OPERATIONS.len() + operation))
            }),
        }
    }

    pub(crate) fn costs_show(&self) -> Costs {
        let measured = self.measured.borrow();
        Costs {
            calibrated: measured.is_some(),
            measured_at_s: measured.as_ref().map(|measured| measured.at_s),
            note: measured.as_ref().and_then(|measured| measured.note.clone()),
            profiles: self.profiles(),
        }
    }

    /// Whether oversubscription is set: then no base has priority.
    pub(crate) fn is_meant(&self) -> bool {
        self.settings.borrow().oversubscription > 1.0
    }
}

impl Budgets {
    pub(crate) fn scheduling_show(&self) -> Scheduling {
        let settings = self.node.settings.borrow();
        let params = settings.params().unwrap_or_default();
        Scheduling {
            on: self.base.has_budgets(),
            spread: settings.spread,
            oversubscription: settings.oversubscription,
            wants_base: settings.wants_base,
            capacity: settings.capacity,
            reactors: self.placement.reactors(),
            params: params
                .values()
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
            admission: self.placement.admission(),
        }
    }

    pub(crate) async fn scheduling_update(
        &self,
        body: SchedulingUpdate,
    ) -> Result<Scheduling, ApiError> {
        let one = self.node.changing.lock().await;
        let mut settings = self.node.settings.borrow().clone();
        settings.spread = body.spread.unwrap_or(settings.spread);
        settings.oversubscription = body.oversubscription.unwrap_or(settings.oversubscription);
        settings.wants_base = body.wants_base.unwrap_or(settings.wants_base);
        settings.capacity = body.capacity.unwrap_or(settings.capacity);
        for (name, value) in body.params {
            match value {
                Some(value) => _ = settings.params.insert(name, value),
                None => _ = settings.params.remove(&name),
            }
        }
        settings.check().map_err(ApiError::invalid)?;
        self.node
            .write_record(SETTINGS, Some(settings.clone()))
            .await?;
        *self.node.settings.borrow_mut() = settings;
        drop(one);
        self.push_budgets_for_api().await?;
        Ok(self.scheduling_show())
    }

    /// `None` restores the defaults.
    pub(crate) async fn costs_put(&self, body: Option<CostsPut>) -> Result<Costs, ApiError> {
        let one = self.node.changing.lock().await;
        let mut measured = None;
        if let Some(body) = body {
            check_costs(&body.profiles).map_err(ApiError::invalid)?;
            if (body.note.as_ref()).is_some_and(|note| note.len() > NOTE_BYTES) {
                let most = format!("a note has at most {NOTE_BYTES} bytes");
                return Err(ApiError::invalid(most));
            }
            let before = self.node.measured.borrow().clone();
            let mut profiles = before.map_or_else(Vec::new, |before| before.profiles);
            profiles.retain(|old| {
                let is_new = |new: &CostProfile| index_of(new) == index_of(old);
                !body.profiles.iter().any(is_new)
            });
            profiles.extend(body.profiles);
            profiles.sort_by_key(index_of);
            measured = Some(Measured {
                at_s: now_s(),
                note: body.note,
                profiles,
            });
        }
        self.node.write_record(COSTS, measured.clone()).await?;
        *self.node.measured.borrow_mut() = measured;
        drop(one);
        self.push_budgets_for_api().await?;
        Ok(self.node.costs_show())
    }
}
