//! Firmware Commit: stores an image in slot 2, and replaces the engine by another slot's program.

use std::path::PathBuf;
use std::rc::Rc;

use super::Daemon;
use crate::firmware::{FirmwareError, Running, Slot, Source};
use crate::model::error::ApiError;
use crate::model::firmware::{FirmwareSlot, FirmwareSlots};
use crate::supervisor::process;

/// NVMe Base, Firmware Commit: Commit Action. A reset is an engine's start here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommitAction {
    /// 000b: store the download.
    Store,
    /// 001b: store the download, and activate it at the next start.
    StoreForNextStart,
    /// 010b: activate a slot at the next start.
    NextStart,
    /// 011b: store the download, if there is one, and activate the slot now.
    Now,
}

impl Daemon {
    /// Firmware Commit. Slot 0 means slot 2. Returns a sentence about the result. The commit goes
    /// on if the caller gives up.
    pub(crate) async fn firmware_commit(
        self: &Rc<Self>,
        action: CommitAction,
        slot: u8,
    ) -> Result<String, FirmwareError> {
        let slot = Slot::try_from(if slot == 0 {
            Slot::Downloaded.into()
        } else {
            slot
        })?;
        let stores = match action {
            CommitAction::Store | CommitAction::StoreForNextStart => true,
            CommitAction::NextStart => false,
            CommitAction::Now => slot == Slot::Downloaded && self.firmware.has_download(),
        };
        if stores && slot == Slot::Installed {
            return Err(FirmwareError::InvalidSlot(
                slot.into(),
                "has the installed program: it is read-only",
            ));
        }
        self.firmware_act(action, slot, stores.then_some(Source::Download))
            .await
    }

    /// Stores an image from a file of this node in slot 2; `now`: and activates it.
    pub(crate) async fn firmware_install(
        self: &Rc<Self>,
        path: PathBuf,
        now: bool,
    ) -> Result<String, FirmwareError> {
        let action = if now {
            CommitAction::Now
        } else {
            CommitAction::StoreForNextStart
        };
        self.firmware_act(action, Slot::Downloaded, Some(Source::File(path)))
            .await
    }

    /// Activates a slot's program without a download; `now`: at once.
    pub(crate) async fn firmware_switch(
        self: &Rc<Self>,
        slot: u8,
        now: bool,
    ) -> Result<String, FirmwareError> {
        let action = if now {
            CommitAction::Now
        } else {
            CommitAction::NextStart
        };
        self.firmware_act(action, Slot::try_from(slot)?, None).await
    }

    async fn firmware_act(
        self: &Rc<Self>,
        action: CommitAction,
        slot: Slot,
        image: Option<Source>,
    ) -> Result<String, FirmwareError> {
        let daemon = self.clone();
        let acting = tokio::task::spawn_local(async move {
            let mut done = Vec::new();
            if let Some(image) = image {
                let stored = daemon.firmware_store(image, action).await?;
                done.push(format!("firmware slot 2 has version {stored}"));
            }
            match action {
                CommitAction::Store => {}
                CommitAction::StoreForNextStart | CommitAction::NextStart => {
                    daemon.firmware.set_next(slot)?;
                    done.push(format!(
                        "the next engine starts from slot {}",
                        u8::from(slot)
                    ));
                }
                CommitAction::Now => done.push(daemon.firmware_activate(slot).await?),
            }
            Ok(done.join("; "))
        });
        let failed = |error| {
            Err(FirmwareError::NotActivated(ApiError::internal(format!(
                "{error}"
            ))))
        };
        acting.await.unwrap_or_else(failed)
    }

    async fn firmware_store(
        &self,
        image: Source,
        action: CommitAction,
    ) -> Result<String, FirmwareError> {
        let version = self
            .serving()
            .and_then(|serving| serving.supervisor.view().version);
        let recorded = process::recorded(&self.config.run_dir).ok().flatten();
        let formats = recorded
            .map(|record| record.formats)
            .filter(|formats| !formats.is_empty());
        let running = Running {
            version: version.unwrap_or_else(|| "unknown".to_owned()),
            formats: formats.unwrap_or_else(forebay_xlate::boundary::formats),
        };
        let next = action == CommitAction::StoreForNextStart;
        Ok(self.firmware.store(image, next, &running).await?.version)
    }

    async fn firmware_activate(&self, slot: Slot) -> Result<String, FirmwareError> {
        let Some(serving) = self.serving() else {
            self.firmware.set_next(slot)?;
            return Ok(format!(
                "there is no engine; the next one starts from slot {}",
                u8::from(slot)
            ));
        };
        let replaced = serving.supervisor.replace(&serving.owner, slot).await;
        replaced.map_err(FirmwareError::NotActivated)
    }

    /// The slots, for people and for the log page.
    pub(crate) fn firmware_slots(&self) -> FirmwareSlots {
        let view = self.serving().map(|serving| serving.supervisor.view());
        let running = view.filter(|view| view.pid.is_some());
        let fell_back = self.firmware.fell_back();
        FirmwareSlots {
            running: running.map(|view| view.slot.into()),
            next: self.firmware.next().into(),
            slots: vec![
                FirmwareSlot {
                    slot: Slot::Installed.into(),
                    version: self.firmware.installed_version(),
                },
                FirmwareSlot {
                    slot: Slot::Downloaded.into(),
                    version: self.firmware.image().map(|image| image.version),
                },
            ],
            fell_back: fell_back.map(|left| format!("version {}: {}", left.version, left.why)),
        }
    }
}
