//! Refuses changes that would disconnect hosts or VMs, unless the request says so.
//!
//! Uses the engine's records, or the last look while an engine is replaced. Clients that are just
//! leaving get a moment.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::{ExportId, ExportRecord};
use forebay_xlate::VolumeId;
use tokio::time::{Instant, sleep};

use crate::base::show::tenant_name;
use crate::exports::hosts::Hosts;
use crate::link::connected_hosts;
use crate::link::session::Session;
use crate::model::error::ApiError;

/// How long to wait for clients that are leaving, or for an engine that starts.
const LEAVE_LIMIT: Duration = Duration::from_secs(2);
const NAMED_MAX: usize = 8;

impl Hosts {
    /// Waits 2 s for a host (its NQN) or VM (`None`) to leave. `what`: the object in use.
    pub(crate) async fn refuse_cutting_off(
        &self,
        what: &str,
        is_cut_off: impl Fn(&ExportRecord, Option<&str>) -> bool,
    ) -> Result<(), ApiError> {
        self.refuse_in_use(what, is_cut_off).await.map_err(|error| {
            error.hint(
                "disconnect them first, or use --disconnect-hosts (`disconnect_hosts` in the API): they then lose the \
                disk while they use it",
            )
        })
    }

    /// Waits 2 s for hosts and VMs for which `is_used` holds.
    pub(crate) async fn refuse_in_use(
        &self,
        what: &str,
        is_used: impl Fn(&ExportRecord, Option<&str>) -> bool,
    ) -> Result<(), ApiError> {
        let end = Instant::now() + LEAVE_LIMIT;
        loop {
            let is_over = Instant::now() >= end;
            if self.link.session().is_some() || is_over {
                let users = self.users(&is_used);
                if users.is_empty() {
                    return Ok(());
                }
                if is_over {
                    return Err(refusal(what, &users));
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Does not wait.
    pub(crate) fn refuse_in_use_now(
        &self,
        what: &str,
        is_used: impl Fn(&ExportRecord, Option<&str>) -> bool,
    ) -> Result<(), ApiError> {
        match self.users(&is_used) {
            users if users.is_empty() => Ok(()),
            users => Err(refusal(what, &users)),
        }
    }

    pub(crate) fn is_connected(&self, id: VolumeId, host: &str) -> bool {
        let is_it =
            |export: &ExportRecord, user: Option<&str>| export.volume == id && user == Some(host);
        !self.users(&is_it).is_empty()
    }

    /// Without host `but`.
    pub(crate) fn names_of_users(&self, id: VolumeId, but: &str) -> Vec<String> {
        self.users(&|export: &ExportRecord, user: Option<&str>| {
            export.volume == id && user != Some(but)
        })
    }

    fn users(&self, is_cut_off: &impl Fn(&ExportRecord, Option<&str>) -> bool) -> Vec<String> {
        let session = self.link.session();
        let acts = |session: &Rc<Session>| self.link.acting.get() == session.generation;
        let mut hosts: BTreeSet<(ExportId, String)> = BTreeSet::new();
        // An engine that takes over does not have its hosts yet.
        if !session.as_ref().is_some_and(acts) {
            hosts.extend(self.last_poll());
        }
        for region in self.link.regions_in_use() {
            let connected = connected_hosts(&region).into_iter();
            hosts.extend(connected.flat_map(|(export, hosts)| {
                hosts.into_iter().map(move |host| (ExportId(export), host))
            }));
        }
        let core = self.base.core.borrow();
        let name = |export: &ExportRecord| {
            let volume = core.pool.volume(export.volume).ok();
            volume.map_or_else(String::new, |volume| {
                format!("{}/{}", tenant_name(&core, volume), volume.name)
            })
        };
        let hosts = hosts.into_iter().filter_map(|(export, host)| {
            let export = core.pool.exports().get(export).ok()?;
            let text = || format!("host {host} uses {}", name(export));
            is_cut_off(export, Some(&host)).then(text)
        });
        let vms = core.pool.exports().iter().filter_map(|export| {
            let is_used = export.frontend.is_vm()
                && is_cut_off(export, None)
                && self.is_used_by_vm(export.id);
            is_used.then(|| format!("a VM uses {}", name(export)))
        });
        hosts.chain(vms).collect()
    }
}

fn refusal(what: &str, users: &[String]) -> ApiError {
    let more = match users.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let users = users[..users.len().min(NAMED_MAX)].join(", ");
    ApiError::in_use(format!("{what} is in use: {users}{more}"))
}
