//! Firmware Image Download and Firmware Commit: the hot upgrade. Room `firmware` keeps the slots.

use forebay_nvme::Status;
use forebay_nvme::management::{self, FirmwareDownload};
use forebay_nvme::mi::{AdminCommand, MiStatus};

use super::answer::CommandAnswer;
use super::node::{Caller, ManagedNode};
use crate::config::Right;
use crate::daemon::CommitAction;
use crate::firmware::FirmwareError;

impl ManagedNode {
    /// Firmware Image Download (Base 2.0, 5.13).
    pub(super) async fn firmware_download(&self, command: &AdminCommand<'_>) -> CommandAnswer {
        if !self.may(Right::Firmware) {
            return CommandAnswer::status(MiStatus::ACCESS_DENIED);
        }
        let piece = match FirmwareDownload::decode(&command.sqe, command.data) {
            Ok(piece) => piece,
            Err(status) => return CommandAnswer::admin(status, 0, Vec::new()),
        };
        let data = command.data.to_vec();
        let done = self.daemon.wait(move |daemon| async move {
            daemon.firmware.download(piece.offset_bytes, data).await
        });
        match done.await {
            Ok(done) => answer(&done),
            Err(_) => CommandAnswer::status(MiStatus::INTERNAL_ERROR),
        }
    }

    /// Firmware Commit (Base 2.0, 5.12).
    pub(super) async fn firmware_commit(
        &self,
        command: &AdminCommand<'_>,
        caller: &Caller,
    ) -> CommandAnswer {
        if !self.may(Right::Firmware) {
            return CommandAnswer::status(MiStatus::ACCESS_DENIED);
        }
        let commit = match management::FirmwareCommit::decode(&command.sqe) {
            Ok(commit) => commit,
            Err(status) => return CommandAnswer::admin(status, 0, Vec::new()),
        };
        let slot = commit.slot;
        let action = match commit.action {
            management::CommitAction::Replace => CommitAction::Store,
            management::CommitAction::ReplaceAndSelect => CommitAction::StoreForNextStart,
            management::CommitAction::Select => CommitAction::NextStart,
            management::CommitAction::Activate => CommitAction::Now,
        };
        let done = self.daemon.wait(move |daemon| async move {
            daemon.firmware_commands().commit(action, slot).await
        });
        let done = match done.await {
            Ok(done) => done,
            Err(_) => return CommandAnswer::status(MiStatus::INTERNAL_ERROR),
        };
        let request = format!("Firmware Commit: slot {slot}, {action:?}");
        let result = match &done {
            Ok(done) => format!("done: {done}"),
            Err(error) => format!("refused: {error}"),
        };
        // A refused image is worth an event, too.
        self.audit(caller, "commit firmware", request, false, &result)
            .await;
        answer(&done.map(|_| ()))
    }
}

fn answer(done: &Result<(), FirmwareError>) -> CommandAnswer {
    let status = match done {
        Ok(()) => Status::SUCCESS,
        Err(error) => {
            tracing::warn!(%error, "an out-of-band firmware command was refused");
            match error {
                FirmwareError::NotConfigured
                | FirmwareError::Key { .. }
                | FirmwareError::InvalidImage(_)
                | FirmwareError::OtherFormats { .. }
                | FirmwareError::NoDownload
                | FirmwareError::Incomplete(_) => Status::INVALID_FIRMWARE_IMAGE,
                FirmwareError::InvalidSlot(..) => Status::INVALID_FIRMWARE_SLOT,
                FirmwareError::InvalidPiece => Status::INVALID_FIELD,
                FirmwareError::OverlappingRange { .. } => Status::OVERLAPPING_RANGE,
                FirmwareError::Busy | FirmwareError::NotActivated(_) => {
                    Status::FIRMWARE_ACTIVATION_PROHIBITED
                }
                FirmwareError::Io(_) => Status::INTERNAL_ERROR,
            }
        }
    };
    CommandAnswer::admin(status, 0, Vec::new())
}
