//! Firmware Commit: stores an image in slot 2, and replaces the engine by another slot's program.

use std::path::PathBuf;
use std::rc::Rc;

use super::{Daemon, Serving};
use crate::firmware::{Firmware, FirmwareError, ImageSource, Running, Slot};
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

/// Commands for the firmware slots of a daemon. They go on if their caller gives up.
pub(crate) struct FirmwareCommands {
    firmware: Rc<Firmware>,
    serving: Option<Rc<Serving>>,
    run_dir: PathBuf,
}

impl Daemon {
    pub(crate) fn firmware_commands(&self) -> FirmwareCommands {
        FirmwareCommands {
            firmware: self.firmware.clone(),
            serving: self.serving(),
            run_dir: self.config.run_dir.clone(),
        }
    }
}

impl FirmwareCommands {
    /// Firmware Commit. Slot 0 means slot 2. Returns a sentence about the result.
    pub(crate) async fn commit(
        self,
        action: CommitAction,
        slot: u8,
    ) -> Result<String, FirmwareError> {
        let slot = match slot {
            0 => Slot::Downloaded,
            slot => Slot::try_from(slot)?,
        };
        let stores = match action {
            CommitAction::Store | CommitAction::StoreForNextStart => true,
            CommitAction::NextStart => false,
            CommitAction::Now => slot == Slot::Downloaded && self.firmware.has_download(),
        };
        if stores && slot == Slot::Installed {
            let why = "has the installed program: it is read-only";
            return Err(FirmwareError::InvalidSlot(slot.into(), why));
        }
        let runs = self.slots().running == Some(slot.into()) && self.firmware.next() == slot;
        if action == CommitAction::Now && !stores && runs {
            // Repeated commits must not keep replacing the engine.
            return Ok(format!("slot {} runs already", u8::from(slot)));
        }
        self.act(action, slot, stores.then_some(ImageSource::Download))
            .await
    }

    /// Stores an image from a file of this node in slot 2, and activates it.
    pub(crate) async fn install(
        self,
        path: PathBuf,
        at_next_start: bool,
    ) -> Result<String, FirmwareError> {
        let action = match at_next_start {
            true => CommitAction::StoreForNextStart,
            false => CommitAction::Now,
        };
        self.act(action, Slot::Downloaded, Some(ImageSource::File(path)))
            .await
    }

    /// Activates a slot's program, without a download.
    pub(crate) async fn activate(
        self,
        slot: u8,
        at_next_start: bool,
    ) -> Result<String, FirmwareError> {
        let action = match at_next_start {
            true => CommitAction::NextStart,
            false => CommitAction::Now,
        };
        self.act(action, Slot::try_from(slot)?, None).await
    }

    async fn act(
        self,
        action: CommitAction,
        slot: Slot,
        image: Option<ImageSource>,
    ) -> Result<String, FirmwareError> {
        let acting = tokio::task::spawn_local(async move {
            let _one_at_a_time = self.firmware.begin_commit()?;
            let mut done = Vec::new();
            if let Some(image) = image {
                // An active slot 2 can't keep the former image, so the new one is next at once.
                let next = match action {
                    CommitAction::StoreForNextStart => true,
                    CommitAction::Now => self.firmware.next() == Slot::Downloaded,
                    CommitAction::Store | CommitAction::NextStart => false,
                };
                let stored = self.firmware.store(image, next, &self.running()).await?;
                done.push(format!("firmware slot 2 has version {}", stored.version));
            }
            match (action, &self.serving) {
                (CommitAction::Store, _) => {}
                (CommitAction::Now, Some(serving)) => {
                    let replaced = serving.supervisor.replace(&serving.owner, slot).await;
                    done.push(replaced.map_err(FirmwareError::NotActivated)?);
                }
                _ => {
                    self.firmware.set_next(slot).await?;
                    done.push(format!(
                        "the next engine starts from slot {}",
                        u8::from(slot)
                    ));
                }
            }
            Ok(done.join("; "))
        });
        acting.await.unwrap_or_else(|error| {
            let error = ApiError::internal(error.to_string());
            Err(FirmwareError::NotActivated(error))
        })
    }

    fn running(&self) -> Running {
        let view = self
            .serving
            .as_ref()
            .map(|serving| serving.supervisor.view());
        let version = view.and_then(|view| view.version);
        let recorded = process::recorded(&self.run_dir).ok().flatten();
        let formats = recorded
            .map(|record| record.formats)
            .filter(|formats| !formats.is_empty());
        Running {
            version: version.unwrap_or_else(|| "unknown".to_owned()),
            formats: formats.unwrap_or_else(forebay_xlate::boundary::formats),
        }
    }

    /// The slots, for people and for the log page.
    pub(crate) fn slots(&self) -> FirmwareSlots {
        let view = self
            .serving
            .as_ref()
            .map(|serving| serving.supervisor.view());
        let running = view.filter(|view| view.pid.is_some());
        let fell_back = self.firmware.fell_back();
        let slot = |slot: Slot, version| FirmwareSlot {
            slot: slot.into(),
            version,
        };
        FirmwareSlots {
            running: running.map(|view| view.slot.into()),
            next: self.firmware.next().into(),
            slots: vec![
                slot(Slot::Installed, self.firmware.installed_version()),
                slot(
                    Slot::Downloaded,
                    self.firmware.image().map(|image| image.version),
                ),
            ],
            fell_back: fell_back.map(|left| format!("version {}: {}", left.version, left.why)),
        }
    }
}
