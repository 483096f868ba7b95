//! Reports the state of the two catalog copies, and updates a stale one.
//!
//! A task asks once a second on a blocking thread, because the catalog's lock is held during I/O,
//! which may hang. Callers see the last answer.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::{CatalogCopy, CatalogHealth, CopyState};
use tokio::time::{Instant, sleep};

use crate::base::Base;
use crate::events::EventFields;
use crate::model::events::EventKind;
use crate::model::{CatalogCopyInfo, CatalogInfo};

const BEAT: Duration = Duration::from_secs(1);
/// The pause between attempts to restore copies.
const HEAL_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Copies {
    base: Rc<Base>,
    known: RefCell<CatalogHealth>,
}

impl Copies {
    pub(crate) fn new(base: &Rc<Base>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            known: RefCell::new(base.catalog.health()),
        })
    }
}

/// `None` if it is good.
fn trouble(state: &CopyState) -> Option<String> {
    match state {
        CopyState::Good => None,
        CopyState::Missing => Some("its device is missing".to_owned()),
        CopyState::Failed(why) => Some(why.clone()),
    }
}

impl Copies {
    pub(crate) async fn run_copies(self: Rc<Self>) {
        let mut healed_at = Instant::now();
        loop {
            sleep(BEAT).await;
            self.poll_copies().await;
            let is_well = {
                let health = self.known.borrow();
                health.is_whole() && health.is_settled
            };
            if is_well || healed_at.elapsed() < HEAL_EVERY {
                continue;
            }
            healed_at = Instant::now();
            let catalog = self.base.catalog.clone();
            let healed = tokio::task::spawn_blocking(move || catalog.heal()).await;
            if let Ok(Err(error)) = healed {
                tracing::debug!(%error, "can't restore a copy of the catalog");
            }
        }
    }

    pub(crate) async fn poll_copies(&self) {
        let catalog = self.base.catalog.clone();
        let Ok(now) = tokio::task::spawn_blocking(move || catalog.health()).await else {
            return;
        };
        let before = self.known.replace(now.clone());
        for note in now.notes.iter().skip(before.notes.len()) {
            tracing::warn!(note, "the pool's catalog");
        }
        let text = match (before.is_whole(), now.is_whole()) {
            (true, false) => "the pool's catalog no longer has a second copy",
            (false, true) => "the pool's catalog has two good copies again",
            _ => return,
        };
        self.base
            .report(EventKind::Warning, text.to_owned(), EventFields::default());
    }

    pub(crate) fn catalog_info(&self) -> CatalogInfo {
        let usage = self.base.core.borrow().pool.catalog_usage();
        let health = self.known.borrow();
        CatalogInfo {
            used_bytes: usage.used_bytes,
            limit_bytes: usage.limit_bytes,
            metadata_bytes: health.metadata_bytes,
            copies: health
                .copies
                .iter()
                .map(|copy| CatalogCopyInfo {
                    device: copy.device.0,
                    is_good: copy.state == CopyState::Good,
                    why: trouble(&copy.state),
                })
                .collect(),
            repaired_blocks: health.repaired_blocks,
            notes: health.notes.clone(),
        }
    }

    pub(crate) fn lacks_a_copy(&self) -> bool {
        !self.known.borrow().is_whole()
    }

    pub(crate) fn has_catalog_copy(&self, device: forebay_xlate::DeviceIndex) -> bool {
        let health = self.known.borrow();
        health.copies.iter().any(|copy| copy.device == device)
    }

    pub(crate) fn copies_warnings(&self) -> Vec<String> {
        let health = self.known.borrow();
        let mut warnings = Vec::new();
        if !health.is_whole() {
            let lost: Vec<String> = health
                .copies
                .iter()
                .filter_map(|copy| {
                    let device = self.base.spec_of(copy.device);
                    Some(format!("on device {device}: {}", trouble(&copy.state)?))
                })
                .collect();
            let lost = if lost.is_empty() {
                "there is no other".to_owned()
            } else {
                lost.join("; ")
            };
            let is_good = |copy: &CatalogCopy| copy.state == CopyState::Good;
            warnings.push(if health.copies.iter().any(is_good) {
                format!(
                    "the pool's catalog has only one good copy ({lost}): if it is lost, so is the pool; repair the \
                    device, or add another (`forebay device add`)"
                )
            } else {
                format!(
                    "no copy of the pool's catalog can be written ({lost}): changes of the pool wait"
                )
            });
        }
        if health.repaired_blocks > 0 {
            warnings.push(format!(
                "{} blocks of the pool's catalog or its labels were bad in one copy and have been repaired from the \
                other; `forebay pool show` says where; unless the power had failed, watch that device",
                health.repaired_blocks
            ));
        }
        warnings
    }
}
