//! What the owner looks after now and then.
//!
//! Purpose: unused reservations come back, and people hear of a pool that fills up.
//! Design: one task with a slow beat. What it warns of is said once when it comes and once when it
//! goes; [`Owner::troubles`] is what is so now. Devices' errors ([`errors`]) and sizes ([`size`]) are
//! looked at in the same beat.
//! Not here: what is shown of it (`show`), the catalog's copies (`copies`).

pub(crate) mod errors;
pub(crate) mod size;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use forebay_device::size::format_bytes;
use forebay_pool::{Space, SpaceLevel};
use forebay_xlate::DeviceIndex;
use tokio::time::sleep;

use crate::api::events::EventKind;
use crate::events::News;
use crate::owner::adopt::Adoption;
use crate::owner::base::Base;
use crate::owner::health::DeviceStates;
use crate::owner::hosts::Hosts;
use crate::owner::mapping::PoolOwner;
use crate::owner::places::Placement;
use crate::owner::stats::Statistics;
use crate::owner::warn::Reports;

/// Between two looks.
const BEAT: Duration = Duration::from_secs(1);

const FILLS_UP: &str = "the pool fills up";
const NEARLY_FULL: &str = "the pool is nearly full";
const FULL: &str = "the pool is full";
/// One of them at a time.
const LEVELS: [&str; 3] = [FILLS_UP, NEARLY_FULL, FULL];

/// What was seen.
#[derive(Debug)]
pub(crate) struct Watched {
    errors: RefCell<BTreeMap<DeviceIndex, errors::Seen>>,
    /// How long a device must give no error to be well again.
    pub(crate) quiet: Cell<Duration>,
    /// Devices that were cut short, to how many bytes.
    cut: RefCell<BTreeMap<DeviceIndex, u64>>,
    /// Devices whose file was removed or renamed, with the warning about each.
    nameless: RefCell<BTreeMap<DeviceIndex, String>>,
    /// The folders of `devices.json`.
    record_dirs: RefCell<Vec<PathBuf>>,
}

impl Default for Watched {
    fn default() -> Self {
        Self {
            errors: RefCell::default(),
            quiet: Cell::new(errors::QUIET),
            cut: RefCell::default(),
            nameless: RefCell::default(),
            record_dirs: RefCell::default(),
        }
    }
}

/// What takes the pool's space: a reservation that is not written yet does too.
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

impl DeviceStates {
    /// Says where `devices.json` is.
    pub(crate) fn set_record_dirs(&self, folders: Vec<PathBuf>) {
        *self.watched.record_dirs.borrow_mut() = folders;
    }
}

/// Looks after everything that changes by itself, once a second.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) base: Rc<Base>,
    pub(crate) states: Rc<DeviceStates>,
    pub(crate) mapping: Rc<PoolOwner>,
    pub(crate) adoption: Rc<Adoption>,
    pub(crate) statistics: Rc<Statistics>,
    pub(crate) placement: Rc<Placement>,
    pub(crate) hosts: Rc<Hosts>,
    pub(crate) reports: Rc<Reports>,
}

impl Watch {
    pub(crate) fn new(
        base: &Rc<Base>,
        mapping: &Rc<PoolOwner>,
        statistics: &Rc<Statistics>,
        hosts: &Rc<Hosts>,
        reports: &Rc<Reports>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            states: reports.states.clone(),
            mapping: mapping.clone(),
            adoption: mapping.adopter.adoption.clone(),
            statistics: statistics.clone(),
            placement: reports.placement.clone(),
            hosts: hosts.clone(),
            reports: reports.clone(),
        })
    }
}

impl Watch {
    /// The one task that looks.
    pub(crate) async fn run_watch(self: Rc<Self>) {
        self.adoption.wait_adopted().await;
        loop {
            sleep(BEAT).await;
            if self.base.core.borrow_mut().pool.return_idle_stock() > 0 {
                self.base.committer.kick();
            }
            self.reports.log_changes();
            self.states.look_at_errors();
            self.hosts.look_at_hosts();
            self.statistics.look_at_figures();
            self.statistics.save_figures(false).await;
            self.placement.look_at_promises();
            for device in self.states.look_at_sizes() {
                self.base
                    .spawn(self.mapping.revoker.clone().cut_off(device));
            }
        }
    }
}

impl Reports {
    /// What is wrong with the pool's space and with devices that hang, in sentences.
    pub(crate) fn troubles(&self) -> Vec<String> {
        let mut troubles = self
            .space_troubles()
            .into_iter()
            .map(|(_, text)| text)
            .collect::<Vec<_>>();
        troubles.extend(self.states.hang_troubles());
        troubles
    }

    /// What is wrong with the room in pool and catalog: a name for each that does not change with
    /// every byte, and the sentence.
    fn space_troubles(&self) -> Vec<(&'static str, String)> {
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let space = pool.space();
        let mut troubles = Vec::new();
        let (how, free) = (how_full(&space), format_bytes(space.free_bytes()));
        match pool.space_level() {
            _ if space.free_bytes() == 0 => troubles.push((
                FULL,
                format!("the pool is full: {how}; writes to new places fail{}: delete what is not needed, or add a device (`forebay device add SPEC`)", match space.promised {
                    0 => "",
                    _ => ", but where space was promised",
                }),
            )),
            SpaceLevel::Normal => {}
            SpaceLevel::Warn => troubles.push((
                FILLS_UP,
                format!("the pool fills up: {how}, {free} are free"),
            )),
            SpaceLevel::Critical => troubles.push((
                NEARLY_FULL,
                format!(
                    "the pool is nearly full: {how}, {free} are free; writes to new places fail when nothing is left: delete what is not needed, or add a device (`forebay device add SPEC`)"
                ),
            )),
        }
        let usage = pool.catalog_usage();
        let warn = u64::from(pool.settings().warn_percent);
        let used_percent = usage.used_bytes.saturating_mul(100) / usage.limit_bytes.max(1);
        if used_percent >= warn {
            troubles.push((
                "the pool's catalog fills up",
                format!(
                    "the pool's catalog fills up: {} of {} are used",
                    format_bytes(usage.used_bytes),
                    format_bytes(usage.limit_bytes)
                ),
            ));
        }
        troubles
    }

    fn log_changes(&self) {
        let now = self.space_troubles();
        let mut warned = self.warned.borrow_mut();
        for (name, text) in &now {
            if !warned.contains(*name) {
                self.base
                    .tell(EventKind::PoolSpace, text.clone(), News::default());
            }
        }
        let names: BTreeSet<String> = now.iter().map(|(name, _)| (*name).to_owned()).collect();
        let has_level = LEVELS.iter().any(|level| names.contains(*level));
        for gone in warned.difference(&names) {
            // It may be worse now.
            if !(has_level && LEVELS.contains(&gone.as_str())) {
                self.base.tell(
                    EventKind::PoolSpace,
                    format!("no longer: {gone}"),
                    News::default(),
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
    fn what_is_promised_is_not_called_used() {
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
