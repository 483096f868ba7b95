//! Questions about preallocated extents, whose answers carry data: how many are unwritten, and
//! which were taken back.

use std::time::Duration;

use crate::readiness::in_time;
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::{ExtentRange, VolumeId};
use tokio::sync::oneshot;

use super::{AskError, Session};

#[derive(Debug)]
pub(super) enum PreallocatedAnswer {
    /// This many are unwritten.
    Left(u64),
    /// These were taken back.
    Taken(Vec<ExtentRange>),
}

impl Session {
    pub(super) fn answer_preallocated(&self, number: u64, answer: PreallocatedAnswer) {
        if let Some(asker) = self.asked_preallocated.borrow_mut().remove(&number) {
            let _ = asker.send(answer);
        }
    }

    async fn ask_preallocated(
        &self,
        limit: Duration,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> Result<PreallocatedAnswer, AskError> {
        let number = self.next_number.get();
        self.next_number.set(number + 1);
        let (sender, answer) = oneshot::channel();
        if !self.ended.get() {
            self.asked_preallocated.borrow_mut().insert(number, sender);
            self.say(&message(number));
        }
        match in_time(limit, answer).await {
            Some(answer) => answer.map_err(|_| AskError::Gone),
            None => {
                self.asked_preallocated.borrow_mut().remove(&number);
                Err(AskError::TimedOut(limit, "preallocated extents"))
            }
        }
    }

    /// Takes back the unwritten preallocated extents of a range; returns them.
    pub(crate) async fn take_back(
        &self,
        volume: VolumeId,
        range: ExtentRange,
        limit: Duration,
    ) -> Result<Vec<ExtentRange>, AskError> {
        let message = |revoke| ToEngine::TakeBack {
            revoke,
            volume,
            range,
        };
        match self.ask_preallocated(limit, message).await? {
            PreallocatedAnswer::Taken(taken) => Ok(taken),
            PreallocatedAnswer::Left(_) => Err(AskError::Refused("unexpected answer".to_owned())),
        }
    }

    /// Counts the unwritten preallocated extents of a range.
    pub(crate) async fn count_preallocated(
        &self,
        volume: VolumeId,
        range: ExtentRange,
        limit: Duration,
    ) -> Result<u64, AskError> {
        let message = |count| ToEngine::CountPreallocated {
            count,
            volume,
            range,
        };
        match self.ask_preallocated(limit, message).await? {
            PreallocatedAnswer::Left(left) => Ok(left),
            PreallocatedAnswer::Taken(_) => Err(AskError::Refused("unexpected answer".to_owned())),
        }
    }
}
