//! The health of the controllers, and what changed since the last poll that cleared it
//! (NVMe-MI 1.2, 5.3 and 5.6).

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use forebay_nvme::mi::ControllerHealthPoll;
use forebay_nvme::mi::data::{
    ControllerHealth, SubsystemHealth, composite_temperature, status_change as change,
};
use zerocopy::little_endian::U16;

use super::MANAGEMENT;
use crate::daemon::Daemon;
use crate::model::EngineState;

/// The Composite Controller Status has the changes of a controller from this bit on.
const CHANGES_SHIFT: u16 = 8;
/// Bits of [`ControllerHealthPoll::functions`].
const FUNCTION: u8 = 1 << 0;
const PHYSICAL_FUNCTION: u8 = 1 << 1;
const VIRTUAL_FUNCTION: u8 = 1 << 2;
/// The most entries of an answer.
const ENTRIES: usize = 255;

/// The node's health at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeHealth {
    /// Whether the pool is open and the engine serves every device.
    pub(super) is_sound: bool,
    pub(super) engine: EngineState,
    /// As in SMART / Health Information.
    pub(super) critical_warning: u8,
    pub(super) temperature_k: Option<u16>,
    pub(super) spare_percent: u8,
    pub(super) used_percent: u8,
    /// Changes whenever a namespace does.
    namespaces: u64,
    /// Changes with the engine's program.
    firmware: u64,
    /// Each function's number, and whether it serves a namespace.
    pub(super) functions: Vec<(u16, bool)>,
}

impl NodeHealth {
    pub(super) fn of(daemon: &Daemon, functions: &[u16]) -> Self {
        let condition = daemon.condition();
        let mut namespaces = DefaultHasher::new();
        let (mut critical_warning, mut spare_percent, mut used_percent) = (0, 100, 0);
        let mut temperature_k = None;
        let mut attached = Vec::new();
        if let Some(owner) = &condition.owner {
            let smart = owner.statistics.node_health();
            critical_warning = smart.critical_warning;
            let drives = owner.states.drives();
            let of_pool = smart.available_spare_percent;
            spare_percent = drives
                .spare_percent
                .map_or(of_pool, |spare| spare.min(of_pool));
            critical_warning |= drives.critical_warning;
            (temperature_k, used_percent) = (drives.temperature_k, drives.used_percent);
            let pool = &owner.base.core.borrow().pool;
            for volume in pool.volumes().records() {
                (volume.id.0, volume.size_bytes).hash(&mut namespaces);
            }
            attached.extend(pool.exports().functions().map(|(number, _)| number));
        }
        let is_served = condition.engine == EngineState::Running;
        let functions = functions.iter();
        Self {
            is_sound: condition.is_sound,
            engine: condition.engine,
            critical_warning,
            temperature_k,
            spare_percent,
            used_percent,
            namespaces: namespaces.finish(),
            firmware: condition.firmware,
            functions: functions
                .map(|number| (*number, is_served && attached.contains(number)))
                .collect(),
        }
    }

    fn controllers(&self) -> impl Iterator<Item = (u16, SeenHealth)> {
        // The management controller answers even without an engine.
        let all = [(MANAGEMENT, true)]
            .into_iter()
            .chain(self.functions.iter().copied());
        all.map(|(cntlid, is_ready)| {
            let seen = SeenHealth {
                is_ready,
                namespaces: self.namespaces,
                firmware: self.firmware,
                temperature_k: self.temperature_k,
                used_percent: self.used_percent,
                spare_percent: self.spare_percent,
                critical_warning: self.critical_warning,
            };
            (cntlid, seen)
        })
    }
}

/// A controller's health at a poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SeenHealth {
    is_ready: bool,
    namespaces: u64,
    firmware: u64,
    temperature_k: Option<u16>,
    used_percent: u8,
    spare_percent: u8,
    critical_warning: u8,
}

impl SeenHealth {
    /// Bits of [`change`].
    fn changes_since(&self, before: &Self) -> u16 {
        let bit = |differs: bool, bits: u16| if differs { bits } else { 0 };
        bit(
            self.is_ready != before.is_ready,
            change::STATUS | change::ENABLE,
        ) | bit(
            self.namespaces != before.namespaces,
            change::STATUS | change::NAMESPACE,
        ) | bit(
            self.firmware != before.firmware,
            change::STATUS | change::FIRMWARE,
        ) | bit(
            self.temperature_k != before.temperature_k,
            change::TEMPERATURE,
        ) | bit(self.used_percent != before.used_percent, change::LIFE_USED)
            | bit(self.spare_percent != before.spare_percent, change::SPARE)
            | bit(
                self.critical_warning != before.critical_warning,
                change::WARNING,
            )
    }
}

#[derive(Debug, Clone, Copy)]
struct Controller {
    seen: SeenHealth,
    /// Changes since its entry was cleared.
    changes: u16,
}

/// Changes since a client last cleared them.
#[derive(Debug, Default)]
pub(super) struct Changes {
    controllers: BTreeMap<u16, Controller>,
    /// Of any controller, since the Composite Controller Status was cleared.
    composite: u16,
}

impl Changes {
    fn note(&mut self, node: &NodeHealth) {
        for (cntlid, seen) in node.controllers() {
            let known = self
                .controllers
                .entry(cntlid)
                .or_insert(Controller { seen, changes: 0 });
            let changes = seen.changes_since(&known.seen);
            known.seen = seen;
            known.changes |= changes;
            self.composite |= changes;
        }
    }

    /// Clears bits of the Composite Controller Status.
    pub(super) fn clear(&mut self, bits: u16) {
        self.composite &= !bits;
    }

    /// NVM Subsystem Health Status Poll.
    pub(super) fn subsystem(&mut self, node: &NodeHealth, clear: bool) -> SubsystemHealth {
        self.note(node);
        let mut status = SubsystemHealth::NO_RESET_REQUIRED;
        if node.is_sound {
            status |= SubsystemHealth::FUNCTIONAL;
        }
        let ready = node.controllers().all(|(_, seen)| seen.is_ready);
        let health = SubsystemHealth {
            status,
            no_warnings: !node.critical_warning,
            temperature: composite_temperature(node.temperature_k),
            life_used: node.used_percent,
            changes: U16::new(self.composite | if ready { change::READY } else { 0 }),
            reserved: [0; 2],
        };
        if clear {
            self.clear(u16::MAX);
        }
        health
    }

    /// Controller Health Status Poll.
    pub(super) fn controllers(
        &mut self,
        node: &NodeHealth,
        poll: &ControllerHealthPoll,
    ) -> Vec<ControllerHealth> {
        self.note(node);
        let is_wanted = |cntlid: u16| {
            let own = match cntlid {
                MANAGEMENT => PHYSICAL_FUNCTION,
                _ => VIRTUAL_FUNCTION,
            };
            poll.functions & (FUNCTION | own) != 0 && cntlid >= poll.first
        };
        let most = usize::from(poll.entries).min(ENTRIES);
        let mut entries = Vec::new();
        for (cntlid, known) in &mut self.controllers {
            let changed = (known.changes >> CHANGES_SHIFT) as u8 & poll.changes != 0;
            if entries.len() == most || !is_wanted(*cntlid) || !poll.all && !changed {
                continue;
            }
            let ready = if known.seen.is_ready {
                change::READY
            } else {
                0
            };
            entries.push(ControllerHealth {
                controller: U16::new(*cntlid),
                status: U16::new(ready | known.changes & !change::STATUS & 0xFF),
                temperature_k: U16::new(known.seen.temperature_k.unwrap_or(0)),
                life_used: known.seen.used_percent,
                spare: known.seen.spare_percent,
                warnings: known.seen.critical_warning,
                changes: U16::new(known.changes),
                reserved: [0; 5],
            });
            if poll.clear {
                known.changes = 0;
            }
        }
        entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeHealth {
        NodeHealth {
            is_sound: true,
            engine: EngineState::Running,
            critical_warning: 0,
            temperature_k: Some(300),
            spare_percent: 100,
            used_percent: 1,
            namespaces: 1,
            firmware: 1,
            functions: vec![(1, true), (7, false)],
        }
    }

    fn poll(first: u16, all: bool) -> ControllerHealthPoll {
        ControllerHealthPoll {
            first,
            entries: 255,
            functions: FUNCTION,
            all,
            changes: 0x1F,
            clear: false,
        }
    }

    #[test]
    fn changes_stay_until_they_are_cleared() {
        let mut changes = Changes::default();
        let mut node = node();
        let first = changes.subsystem(&node, false);
        assert_eq!((first.changes.get(), first.status), (0, 0x30));
        assert_eq!((first.no_warnings, first.temperature), (0xFF, 27));
        node.functions[1].1 = true;
        node.namespaces = 2;
        let now = change::READY | change::STATUS | change::ENABLE | change::NAMESPACE;
        assert_eq!(changes.subsystem(&node, true).changes.get(), now);
        assert_eq!(changes.subsystem(&node, false).changes.get(), change::READY);
        // Each controller's own flags are cleared by the other poll.
        let entries = changes.controllers(&node, &poll(0, false));
        assert_eq!(entries.len(), 3);
        assert_eq!(entries[0].changes.get(), change::STATUS | change::NAMESPACE);
        assert_eq!(entries[2].changes.get(), now & !change::READY);
        let clear = ControllerHealthPoll {
            clear: true,
            ..poll(7, false)
        };
        assert_eq!(changes.controllers(&node, &clear).len(), 1);
        assert_eq!(changes.controllers(&node, &poll(0, false)).len(), 2);
        assert_eq!(changes.controllers(&node, &poll(1, true)).len(), 2);
        assert_eq!(changes.controllers(&node, &clear).len(), 0);
    }

    #[test]
    fn controllers_are_selected_by_their_kind() {
        let mut changes = Changes::default();
        for (functions, expected) in [(0, 0), (1, 3), (2, 1), (4, 2), (6, 3)] {
            let poll = ControllerHealthPoll {
                functions,
                ..poll(0, true)
            };
            assert_eq!(changes.controllers(&node(), &poll).len(), expected);
        }
        let one = ControllerHealthPoll {
            entries: 1,
            ..poll(1, true)
        };
        let entries = changes.controllers(&node(), &one);
        assert_eq!((entries.len(), entries[0].controller.get()), (1, 1));
        assert_eq!(entries[0].status.get(), change::READY);
    }
}
