//! This daemon's hold on the pool: numbers of starts and stops in catalog and labels, the engine's
//! heartbeat, and the detection of a loss.
//!
//! A number is durable in the catalog before labels have it; afterwards the catalog notes which
//! labels do (`forebay_pool::Stamped`). Labels of the old format are left out.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use forebay_pool::Stamped;
use forebay_xlate::boundary::message::ToEngine;

use crate::base::Base;
use crate::events::EventFields;
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::ownership;
use crate::ownership::{Installation, Tenure};
use crate::store::SyncStore;

#[derive(Debug, Default)]
pub(crate) struct PoolHold {
    me: Option<Arc<Installation>>,
    tenure: Option<Arc<Tenure>>,
    /// Warnings about labels.
    warnings: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct Labels {
    pub(super) base: Rc<Base>,
    pub(super) hold: RefCell<PoolHold>,
}

impl Labels {
    pub(crate) fn new(base: &Rc<Base>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            hold: Default::default(),
        })
    }

    /// Sets who serves the pool, before anything is served.
    pub(crate) fn set_hold(&self, me: Arc<Installation>, tenure: Option<Arc<Tenure>>) {
        *self.hold.borrow_mut() = PoolHold {
            me: Some(me),
            tenure,
            warnings: Vec::new(),
        };
    }

    /// The hold on the pool, if its labels have an owner.
    pub(crate) fn tenure(&self) -> Option<Arc<Tenure>> {
        self.hold.borrow().tenure.clone()
    }

    /// Writes the heartbeat to a device that joins the pool.
    pub(crate) fn hold_device(&self, store: &Arc<SyncStore>) -> Result<(), ApiError> {
        match self.tenure() {
            Some(tenure) => ownership::join(&tenure, std::slice::from_ref(store)),
            None => Ok(()),
        }
    }

    /// The devices whose labels have an owner.
    fn held(&self) -> Vec<Arc<SyncStore>> {
        let devices = self.base.devices.borrow();
        let stores = devices.iter().map(|device| device.store.clone());
        stores.filter(|store| store.tenure().is_some()).collect()
    }

    /// The message that tells the engine of the hold, if there is one.
    pub(crate) fn hold_message(&self) -> Option<ToEngine> {
        let tenure = self.tenure()?;
        let holder = tenure.holder();
        let devices = self.base.devices.borrow();
        let held = devices.iter().filter(|one| one.store.tenure().is_some());
        Some(ToEngine::Hold {
            owner: holder.owner,
            boot: holder.boot,
            host: holder.host.clone(),
            devices: held.map(|one| one.index).collect(),
        })
    }

    /// Writes a start to the labels, once the catalog has it.
    pub(crate) fn begin_stamp(self: &Rc<Self>) {
        let owner = self.clone();
        self.base.spawn(async move {
            owner.base.commit_through().await;
            let number = owner.base.core.borrow().pool.info().opens;
            owner.stamp(number, false).await;
            owner.base.commit_through().await;
            owner.poll_labels().await;
        });
    }

    pub(crate) fn label_warnings(&self) -> Vec<String> {
        self.hold.borrow().warnings.clone()
    }

    /// Renews the warnings about labels. Returns a sentence for each label whose first copy is
    /// overwritten.
    pub(crate) async fn poll_labels(&self) -> Vec<String> {
        let catalog = self.base.catalog.clone();
        let checked = tokio::task::spawn_blocking(move || catalog.label_troubles());
        let Ok((old, covered)) = checked.await else {
            return Vec::new();
        };
        let spec = |uuid| {
            let core = self.base.core.borrow();
            let record = core
                .pool
                .devices()
                .iter()
                .find(|record| record.uuid == uuid);
            record.map_or_else(String::new, |record| record.spec.clone())
        };
        let covered: Vec<String> = covered
            .into_iter()
            .map(|uuid| {
                format!(
                    "foreign data, perhaps a restored partition table, lies over the first copy of the label of device \
                    {}",
                    spec(uuid)
                )
            })
            .collect();
        let repair = "; `forebay pool check --repair` writes that label again";
        let mut warnings: Vec<String> = covered
            .iter()
            .map(|text| format!("{text}{repair}"))
            .collect();
        if !old.is_empty() {
            warnings.push(
                "the pool's labels have the format of an older version: use by another machine, older copies of \
                devices and restored partition tables can harm the pool; `forebay pool upgrade` fixes that, but older \
                versions then refuse the pool"
                    .to_owned(),
            );
        }
        for warning in &warnings {
            if !self.hold.borrow().warnings.contains(warning) {
                self.base
                    .report(EventKind::Warning, warning.clone(), EventFields::default());
            }
        }
        self.hold.borrow_mut().warnings = warnings;
        covered
    }

    /// Rewrites all copies of every label.
    pub(crate) async fn repair_labels(&self) -> Result<(), ApiError> {
        let catalog = self.base.catalog.clone();
        let repaired = tokio::task::spawn_blocking(move || catalog.repair_labels()).await;
        match repaired {
            Ok(result) => result.map_err(crate::devices::api_error)?,
            Err(error) => return Err(ApiError::unavailable(error.to_string())),
        }
        self.poll_labels().await;
        Ok(())
    }

    /// Records an orderly stop in catalog and labels, and ends the heartbeat. The engine has ended.
    pub(crate) async fn end_stamp(&self) {
        if self.hold.borrow().me.is_none() {
            return;
        }
        let number = self.base.core.borrow_mut().pool.count_stop();
        if self.base.commit().await.is_err() {
            return;
        }
        self.stamp(number, true).await;
        if let Err(error) = self.base.commit().await {
            tracing::warn!(%error, "can't record the pool's stop");
        }
        if let Some(tenure) = self.tenure() {
            let held = self.held();
            let ended = tokio::task::spawn_blocking(move || ownership::end(&tenure, &held));
            let _ = ended.await;
        }
    }

    async fn stamp(&self, number: u64, is_clean: bool) {
        let Some(me) = self.hold.borrow().me.clone() else {
            return;
        };
        let catalog = self.base.catalog.clone();
        let stamp = me.stamp(number, is_clean);
        let stamped = tokio::task::spawn_blocking(move || catalog.stamp(&stamp)).await;
        let Ok(Stamped { devices, notes, .. }) = stamped else {
            return;
        };
        for note in notes {
            tracing::warn!(note, "recording a start or a stop of the pool");
        }
        self.base
            .core
            .borrow_mut()
            .pool
            .note_stamped(&devices, number);
    }

    /// Returns a sentence if another node has taken the pool.
    pub(crate) async fn find_taker(&self) -> Option<String> {
        let tenure = self.tenure()?;
        let held = self.held();
        let checked = tokio::task::spawn_blocking(move || {
            for store in held {
                // An unreadable device tells nothing.
                let _ = tenure.poll_beat(store.as_ref());
            }
            tenure.taker()
        });
        checked.await.ok().flatten()
    }
}
