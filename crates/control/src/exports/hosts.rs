//! Events of hosts that connect, leave or are refused.
//!
//! The engine's state region lists connected hosts; the owner's slow beat compares it with the last
//! look. A connection that begins and ends between two looks is missed. A dead engine's hosts count
//! as connected until its successor's records say otherwise. Hosts that a new daemon finds
//! connected cause no events.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use forebay_pool::ExportId;
use forebay_xlate::boundary::region::Region;

use crate::base::Base;
use crate::base::show::tenant_name;
use crate::events::EventFields;
use crate::link::session::Session;
use crate::link::{Link, connected_hosts};
use crate::model::MachineClient;
use crate::model::events::EventKind;

/// Hosts that a look reports by name, per export and direction; more become one event with a count.
const NAMED_MAX: usize = 8;
const ENDED_MAX: usize = 1024;
/// The longest reported name of a host or subsystem (Base 2.0, 4.5: 223 bytes).
const NAME_MAX_BYTES: usize = 223;

#[derive(Debug)]
pub(crate) struct Hosts {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    known: RefCell<BTreeSet<(ExportId, String)>>,
    /// Names of ended exports, for the events of their last hosts.
    ended: RefCell<VecDeque<(ExportId, String)>>,
    /// The engine served before this daemon: the next look is the first.
    pub(crate) found: Cell<bool>,
}

impl Hosts {
    pub(crate) fn new(base: &Rc<Base>, link: &Rc<Link>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            known: Default::default(),
            ended: Default::default(),
            found: Default::default(),
        })
    }

    pub(crate) fn last_poll(&self) -> Vec<(ExportId, String)> {
        self.known.borrow().iter().cloned().collect()
    }

    pub(crate) fn remember(&self, export: ExportId, name: String) {
        let mut ended = self.ended.borrow_mut();
        if ended.len() >= ENDED_MAX {
            ended.pop_front();
        }
        ended.push_back((export, name));
    }

    pub(crate) fn ended_name(&self, export: ExportId) -> Option<String> {
        let ended = self.ended.borrow();
        let one = ended.iter().rev().find(|(id, _)| *id == export);
        one.map(|(_, name)| name.clone())
    }
}

fn reported(export: &str, hosts: &[&str], did: &str) -> Vec<(String, Option<String>, u64)> {
    if hosts.len() <= NAMED_MAX {
        let one = |host: &&str| {
            let text = format!("host {host} {did} {export}");
            (text, Some((*host).to_owned()), 1)
        };
        return hosts.iter().map(one).collect();
    }
    let text = format!("{} hosts {did} {export}", hosts.len());
    vec![(text, None, hosts.len() as u64)]
}

/// Bounds a text from outside and removes control characters, for use in a sentence.
fn clean(text: &str) -> String {
    let mut clean: String = text.chars().filter(|c| !c.is_control()).collect();
    clean.truncate(clean.floor_char_boundary(NAME_MAX_BYTES));
    clean
}

impl Hosts {
    pub(crate) fn poll_hosts(&self) {
        let session = self.link.session();
        let acting = session.filter(|session| self.link.acting.get() == session.generation);
        let Some(session) = acting else {
            return;
        };
        let found = self.found.take();
        let mut known = self.known.borrow_mut();
        // Host records are many: read only if a lane has connections or had them at the last look.
        let lanes = session.region.lanes().iter();
        let nobody = || {
            let exports = self.base.core.borrow().pool.exports().iter().count();
            lanes
                .filter(|lane| lane.export.load(Relaxed) != 0)
                .take(exports)
                .all(|lane| lane.connections.load(Relaxed) == 0)
        };
        if known.is_empty() && nobody() {
            return;
        }
        let mut now = BTreeSet::new();
        for (export, hosts) in connected_hosts(&session.region) {
            let hosts = hosts
                .into_iter()
                .map(|host| (ExportId(export), clean(&host)));
            now.extend(hosts);
        }
        if found && known.is_empty() {
            *known = now;
            return;
        }
        let came = self.by_export(now.difference(&known));
        let left = self.by_export(known.difference(&now));
        for (kind, all, did) in [
            (EventKind::HostConnected, came, "connected to"),
            (EventKind::HostDisconnected, left, "disconnected from"),
        ] {
            for (export, hosts) in all {
                let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
                for (text, host, count) in reported(&export, &hosts, did) {
                    let fields = EventFields {
                        export: Some(export.clone()),
                        host,
                        count: Some(count),
                        ..EventFields::default()
                    };
                    self.base
                        .events
                        .report(kind, session.generation, text, fields);
                }
            }
        }
        *known = now;
    }

    fn by_export<'a>(
        &self,
        pairs: impl Iterator<Item = &'a (ExportId, String)>,
    ) -> Vec<(String, Vec<String>)> {
        let mut all: Vec<(String, Vec<String>)> = Vec::new();
        let mut last = None;
        for (export, host) in pairs {
            if last != Some(*export) {
                last = Some(*export);
                all.push((self.export_name(*export), Vec::new()));
            }
            if let Some((_, hosts)) = all.last_mut() {
                hosts.push(host.clone());
            }
        }
        all
    }

    pub(crate) fn host_refused(
        &self,
        session: &Session,
        host: &str,
        subsystem: &str,
        why: &str,
        count: u32,
    ) {
        let (host, subsystem, why) = (clean(host), clean(subsystem), clean(why));
        let more = match count {
            0 | 1 => String::new(),
            count => format!(" ({count} were refused; this was the last)"),
        };
        if host.is_empty()
            && let Ok(export) = subsystem.parse()
        {
            let export = self.export_name(ExportId(export));
            let text = format!("a VM at {export} was refused: {why}{more}");
            let fields = EventFields {
                export: Some(export),
                count: Some(count.max(1).into()),
                ..EventFields::default()
            };
            let kind = EventKind::HostRefused;
            return self
                .base
                .events
                .report(kind, session.generation, text, fields);
        }
        let text = format!("host {host} was refused at {subsystem}: {why}{more}");
        let fields = EventFields {
            host: Some(host),
            count: Some(count.max(1).into()),
            ..EventFields::default()
        };
        self.base
            .events
            .report(EventKind::HostRefused, session.generation, text, fields);
    }

    /// Also for an ended export; its number if nothing else is known.
    pub(crate) fn export_name(&self, export: ExportId) -> String {
        let core = self.base.core.borrow();
        let name = || {
            let volume = core
                .pool
                .volume(core.pool.exports().get(export).ok()?.volume)
                .ok()?;
            Some(format!("{}/{}", tenant_name(&core, volume), volume.name))
        };
        name()
            .or_else(|| self.ended_name(export))
            .unwrap_or_else(|| export.to_string())
    }

    pub(crate) fn vm_of(&self, export: ExportId) -> Option<MachineClient> {
        vm_in(&self.link.session()?.region, export)
    }

    /// Whether a VM has, or while engines change may have, the export.
    pub(super) fn is_used_by_vm(&self, export: ExportId) -> bool {
        let regions = self.link.regions_in_use();
        regions.iter().any(|region| vm_in(region, export).is_some())
    }
}

fn vm_in(region: &Region, export: ExportId) -> Option<MachineClient> {
    let mut lanes = region.lanes().iter();
    let lane = lanes.find(|lane| lane.export.load(Relaxed) == export.0 + 1)?;
    (lane.connections.load(Relaxed) > 0).then(|| MachineClient {
        since_unix_s: lane.vm_since_s.load(Relaxed),
        memory_bytes: lane.vm_memory_bytes.load(Relaxed),
        queues: lane.vm_queues.load(Relaxed),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_of_hosts_is_one_event() {
        let names: Vec<String> = (0..20).map(|n| format!("nqn.{n}")).collect();
        let hosts: Vec<&str> = names.iter().map(String::as_str).collect();
        let few = reported("t/a", &hosts[..NAMED_MAX], "connected to");
        assert_eq!(few.len(), NAMED_MAX);
        assert_eq!(few[3].0, "host nqn.3 connected to t/a");
        assert_eq!(few[3].1.as_deref(), Some("nqn.3"));
        let many = reported("t/a", &hosts, "connected to");
        assert_eq!(many, [("20 hosts connected to t/a".to_owned(), None, 20)]);
    }

    #[test]
    fn a_name_from_outside_is_tamed() {
        assert_eq!(clean("a\u{1b}[2J\nb"), "a[2Jb");
        assert_eq!(clean(&"é".repeat(400)).len(), 222);
    }
}
