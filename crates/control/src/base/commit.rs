//! Commits catalog transactions in order, off the owner's thread.
//!
//! Callers draw tickets. One task commits all changes as a batch, and serves the tickets drawn
//! before it took the batch; later callers share the next one. A failed batch is retried forever;
//! after [`PATIENCE`] failures, callers get an error until commits work again.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_pool::{BatchId, Catalog};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::base::Base;
use crate::base::waits::Wait;
use crate::changed::Signal;
use crate::events::EventFields;
use crate::model::events::EventKind;

/// Attempts after which callers get an error.
const PATIENCE: u32 = 3;
const RETRY_AT_MOST: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the pool's catalog can't be written: {0}")]
pub(crate) struct CommitError(pub(crate) String);

#[derive(Debug)]
pub(crate) struct Committer {
    drawn: Cell<u64>,
    served: Cell<u64>,
    trouble: RefCell<Option<String>>,
    commits: Cell<u64>,
    wake: Notify,
    progress: Signal,
}

impl Committer {
    pub(crate) fn new() -> Self {
        Self {
            drawn: Cell::new(0),
            served: Cell::new(0),
            trouble: RefCell::new(None),
            commits: Cell::new(0),
            wake: Notify::new(),
            progress: Signal::new(),
        }
    }

    pub(crate) fn commits(&self) -> u64 {
        self.commits.get()
    }

    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.borrow().clone()
    }

    /// Has all changes committed soon, without waiting.
    pub(crate) fn kick(&self) {
        self.drawn.set(self.drawn.get() + 1);
        self.wake.notify_one();
    }
}

impl Base {
    /// Returns once all changes so far are durable.
    pub(crate) async fn commit(&self) -> Result<(), CommitError> {
        let committer = &self.committer;
        committer.kick();
        let ticket = committer.drawn.get();
        committer
            .progress
            .until(|| {
                if committer.served.get() >= ticket {
                    return Some(Ok(()));
                }
                committer
                    .trouble
                    .borrow()
                    .clone()
                    .map(|trouble| Err(CommitError(trouble)))
            })
            .await
    }

    /// Returns once this batch is durable.
    pub(crate) async fn commit_of(&self, batch: BatchId) -> Result<(), CommitError> {
        let is_durable = || self.core.borrow().pool.journal().committed_id() >= batch;
        if batch >= self.core.borrow().pool.journal().open_batch_id() {
            return self.commit().await;
        }
        let committer = &self.committer;
        committer
            .progress
            .until(|| {
                if is_durable() {
                    return Some(Ok(()));
                }
                let trouble = committer.trouble.borrow().clone();
                trouble.map(|trouble| Err(CommitError(trouble)))
            })
            .await
    }

    /// Returns once all changes so far are durable, however long that takes. For callers that must
    /// not go on before: otherwise a released extent would stay listed, or be given out twice.
    pub(crate) async fn commit_through(&self) {
        let committer = &self.committer;
        committer.kick();
        let ticket = committer.drawn.get();
        committer
            .progress
            .until(|| (committer.served.get() >= ticket).then_some(()))
            .await;
    }

    pub(crate) async fn run_committer(self: Rc<Self>) {
        let committer = &self.committer;
        loop {
            while committer.served.get() == committer.drawn.get() {
                committer.wake.notified().await;
            }
            let upto = committer.drawn.get();
            self.commit_once().await;
            committer.served.set(upto);
            committer.progress.raise();
        }
    }

    async fn commit_once(&self) {
        let mut attempt = 0;
        let batch = loop {
            match self.core.borrow_mut().pool.take_batch() {
                Ok(Some(batch)) => break Arc::new(batch),
                Ok(None) => return,
                Err(error) => self.note_trouble(attempt, &error.message),
            }
            self.pause(&mut attempt).await;
        };
        let _waits = self.waits.begin(Wait::Commit);
        loop {
            let (catalog, one): (Arc<Catalog>, _) = (self.catalog.clone(), batch.clone());
            let result = tokio::task::spawn_blocking(move || catalog.commit(&one)).await;
            let error = match result {
                Ok(Ok(())) => match self.core.borrow_mut().pool.committed(batch.id()) {
                    Ok(()) => break,
                    Err(error) => error.message,
                },
                Ok(Err(error)) => error.message,
                Err(_) => "the commit thread failed".to_owned(),
            };
            self.note_trouble(attempt, &error);
            self.pause(&mut attempt).await;
        }
        self.committer.commits.set(self.committer.commits.get() + 1);
        if self.core.borrow().pool.space().dirty > 0 {
            // Freed extents may be zero-filled from now on.
            self.zero_fill_wanted.raise();
        }
        if self.committer.trouble.borrow_mut().take().is_some() {
            let text = "the pool's catalog can be written again".to_owned();
            self.report(EventKind::Warning, text, EventFields::default());
        }
    }

    fn note_trouble(&self, attempt: u32, error: &str) {
        tracing::error!(attempt, error, "committing to the pool's catalog failed");
        if attempt + 1 == PATIENCE {
            let text = format!("the pool's catalog can't be written: {error}");
            self.report(EventKind::Warning, text, EventFields::default());
        }
        if attempt + 1 >= PATIENCE {
            *self.committer.trouble.borrow_mut() = Some(error.to_owned());
            self.committer.progress.raise();
        }
    }

    async fn pause(&self, attempt: &mut u32) {
        sleep(Duration::from_millis(50 << (*attempt).min(10)).min(RETRY_AT_MOST)).await;
        *attempt = attempt.saturating_add(1);
    }
}
