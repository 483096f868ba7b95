//! Quarantines exports whose commands kill the engine again and again.
//!
//! Each death blamed on an export counts (`supervisor::blame`). After too many, the next engine is
//! not told of it. An operator or a restart of the daemon lifts the quarantine.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use forebay_pool::ExportId;
use tokio::time::Instant;

use crate::events::EventFields;
use crate::exports::export::Exports;
use crate::link::engine_error;
use crate::model::Export;
use crate::model::error::ApiError;
use crate::model::events::EventKind;

/// This many deaths ...
const DEATHS: usize = 5;
/// ... within this time cause a quarantine.
const WITHIN: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    deaths: RefCell<BTreeMap<ExportId, Vec<Instant>>>,
    reasons: RefCell<BTreeMap<ExportId, String>>,
}

impl Quarantine {
    pub(crate) fn has(&self, export: ExportId) -> bool {
        self.reasons.borrow().contains_key(&export)
    }

    pub(crate) fn reason(&self, export: ExportId) -> Option<String> {
        self.reasons.borrow().get(&export).cloned()
    }

    /// Counts a death; true if it causes a quarantine.
    fn blame(&self, export: ExportId, why: &str, now: Instant) -> bool {
        let mut deaths = self.deaths.borrow_mut();
        let deaths = deaths.entry(export).or_default();
        deaths.retain(|at| now.duration_since(*at) < WITHIN);
        deaths.push(now);
        if deaths.len() < DEATHS {
            return false;
        }
        let reason = format!(
            "input from its hosts killed the engine {} times within {} minutes; the last cause: {why}",
            deaths.len(),
            WITHIN.as_secs() / 60
        );
        self.reasons.borrow_mut().insert(export, reason).is_none()
    }

    pub(crate) fn lift(&self, export: ExportId) -> bool {
        self.deaths.borrow_mut().remove(&export);
        self.reasons.borrow_mut().remove(&export).is_some()
    }
}

impl Exports {
    pub(crate) fn blame_export(&self, export: ExportId, why: &str, generation: u64) {
        if !self.quarantine.blame(export, why, Instant::now()) {
            return;
        }
        let name = self.hosts.export_name(export);
        let reason = self.quarantine.reason(export).unwrap_or_default();
        self.vms.forget_vm_listener(export);
        let text = format!(
            "export {name} is no longer served: {reason}; `forebay export resume {name}` serves it again"
        );
        let fields = EventFields {
            export: Some(name),
            ..EventFields::default()
        };
        self.base
            .events
            .report(EventKind::ExportQuarantined, generation, text, fields);
    }

    pub(crate) async fn export_resume(
        self: &std::rc::Rc<Self>,
        tenant: String,
        volume: String,
    ) -> Result<Export, ApiError> {
        let _turn = self.base.turn_for_api(&tenant, &volume).await?;
        let id = self.export_id(&tenant, &volume)?;
        if self.quarantine.lift(id) {
            let name = self.hosts.export_name(id);
            let text = format!("export {name} is served again: an operator resumed it");
            let fields = EventFields {
                export: Some(name),
                ..EventFields::default()
            };
            self.base.events.report(
                EventKind::ExportResumed,
                self.base.newest_generation.get(),
                text,
                fields,
            );
            self.push_export(id)
                .await
                .map_err(|error| engine_error(&error))?;
            self.vms.listen_for_vm(id).await?;
        }
        self.show_one(id)
    }

    pub(crate) fn quarantine_warnings(&self) -> Vec<String> {
        let reasons = self.quarantine.reasons.borrow();
        let warning = |(export, reason): (&ExportId, &String)| {
            let name = self.hosts.export_name(*export);
            format!(
                "export {name} is quarantined: {reason}; `forebay export resume {name}` serves it again"
            )
        };
        reasons.iter().map(warning).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deaths_count_for_ten_minutes() {
        let quarantine = Quarantine::default();
        let (one, other) = (ExportId(1), ExportId(2));
        let now = Instant::now();
        for _ in 0..4 {
            assert!(!quarantine.blame(one, "a", now));
        }
        assert!(!quarantine.blame(other, "a", now));
        let later = now + WITHIN;
        assert!(
            !quarantine.blame(one, "a", later),
            "the others are long ago"
        );
        for _ in 0..3 {
            assert!(!quarantine.blame(one, "a", later));
        }
        assert!(!quarantine.has(one));
        assert!(quarantine.blame(one, "command 7", later));
        assert!(quarantine.reason(one).unwrap().contains("command 7"));
        assert!(!quarantine.has(other));
        assert!(quarantine.lift(one) && !quarantine.has(one));
        assert!(!quarantine.blame(one, "a", later), "and starts anew");
    }
}
