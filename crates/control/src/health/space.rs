//! Warns when the pool or its catalog fills up, once when it begins and once when it ends.

use std::collections::BTreeSet;

use forebay_device::size::format_bytes;
use forebay_pool::{Space, SpaceLevel};

use crate::events::EventFields;
use crate::health::reports::Reports;
use crate::model::events::EventKind;

const FILLS_UP: &str = "the pool is filling up";
const NEARLY_FULL: &str = "the pool is nearly full";
const FULL: &str = "the pool is full";
/// The levels exclude each other.
const LEVELS: [&str; 3] = [FILLS_UP, NEARLY_FULL, FULL];

/// Used space includes reservations that are not written yet.
fn how_full(space: &Space) -> String {
    let percent = space.used_percent();
    let used = format_bytes(space.used_bytes());
    match space.promised_bytes() {
        0 => format!("{percent} % is used"),
        promised => format!(
            "{percent} % is used or promised ({used} used, {} promised)",
            format_bytes(promised)
        ),
    }
}

impl Reports {
    /// Problems of the pool's space, and devices that hang, in sentences.
    pub(crate) fn troubles(&self) -> Vec<String> {
        let mut troubles = self
            .space_troubles()
            .into_iter()
            .map(|(_, text)| text)
            .collect::<Vec<_>>();
        troubles.extend(self.states.hang_troubles());
        troubles
    }

    /// Problems of space in pool and catalog: a name that stays when numbers change, and a
    /// sentence.
    fn space_troubles(&self) -> Vec<(&'static str, String)> {
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let space = pool.space();
        let mut troubles = Vec::new();
        let (how, free) = (how_full(&space), format_bytes(space.free_bytes()));
        match pool.space_level() {
            _ if space.free_bytes() == 0 => troubles.push((
                FULL,
                format!("the pool is full: {how}; writes to new extents fail{}: delete unneeded volumes, or add a \
                device (`forebay device add SPEC`)", match space.promised {
                    0 => "",
                    _ => ", except where space was promised",
                }),
            )),
            SpaceLevel::Normal => {}
            SpaceLevel::Warn => troubles.push((
                FILLS_UP,
                format!("the pool is filling up: {how}, {free} are free"),
            )),
            SpaceLevel::Critical => troubles.push((
                NEARLY_FULL,
                format!(
                    "the pool is nearly full: {how}, {free} are free; writes to new extents fail when no space is \
                    left: delete unneeded volumes, or add a device (`forebay device add SPEC`)"
                ),
            )),
        }
        let usage = pool.catalog_usage();
        let warn = u64::from(pool.info().settings.warn_percent);
        let used_percent = usage.used_bytes.saturating_mul(100) / usage.limit_bytes.max(1);
        if used_percent >= warn {
            troubles.push((
                "the pool's catalog is filling up",
                format!(
                    "the pool's catalog is filling up: {} of {} are used",
                    format_bytes(usage.used_bytes),
                    format_bytes(usage.limit_bytes)
                ),
            ));
        }
        troubles
    }

    pub(crate) fn log_changes(&self) {
        let now = self.space_troubles();
        let mut warned = self.warned.borrow_mut();
        for (name, text) in &now {
            if !warned.contains(*name) {
                self.base
                    .report(EventKind::PoolSpace, text.clone(), EventFields::default());
            }
        }
        let names: BTreeSet<String> = now.iter().map(|(name, _)| (*name).to_owned()).collect();
        let has_level = LEVELS.iter().any(|level| names.contains(*level));
        for gone in warned.difference(&names) {
            // It may be worse now.
            if !(has_level && LEVELS.contains(&gone.as_str())) {
                self.base.report(
                    EventKind::PoolSpace,
                    format!("resolved: {gone}"),
                    EventFields::default(),
                );
            }
        }
        *warned = names;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promised_space_is_not_reported_as_used() {
        let mut space = Space {
            extent_bytes: 1 << 20,
            total: 100,
            clean: 100,
            promised: 81,
            ..Space::default()
        };
        assert_eq!(
            how_full(&space),
            "81 % is used or promised (0 B used, 81 MiB promised)"
        );
        (space.clean, space.owned, space.promised) = (10, 90, 0);
        assert_eq!(how_full(&space), "90 % is used");
    }
}
