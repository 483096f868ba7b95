//! The exports by id and by volume.

use crate::{
    error::{PoolError, Result},
    journal::{Journal, batch::Table},
    records::{ExportId, ExportRecord, NewExport, TenantRecord, VolumeRecord},
};
use forebay_xlate::boundary::message::{FrontendKind, MAX_VM_QUEUES};
use forebay_xlate::types::VolumeId;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// The prefix of an export's NQN; `<node>:<tenant>.<volume>` follows.
pub const NQN_PREFIX: &str = "nqn.2026-01.io.forebay:";
/// NVMe Base 2.0, 4.5: an NQN's longest form, in bytes.
const MAX_NQN_BYTES: usize = 223;
/// The longest path of a Unix socket (sockaddr_un).
const MAX_SOCKET_BYTES: usize = 107;
const UUID_BYTES_IN_NQN: usize = 6;
/// The most hosts in an export's list.
pub const MAX_HOSTS: usize = 256;

fn check_hosts(hosts: &[String]) -> Result<()> {
    if hosts.len() > MAX_HOSTS {
        return Err(PoolError::invalid(format!(
            "an export has at most {MAX_HOSTS} hosts"
        )));
    }
    for (at, host) in hosts.iter().enumerate() {
        let sound = host.starts_with("nqn.")
            && host.len() <= MAX_NQN_BYTES
            && host.bytes().all(|byte| byte.is_ascii_graphic());
        if !sound {
            return Err(PoolError::invalid(format!(
                "{host:?} is not a host NQN: a host's NQN is in its /etc/nvme/hostnqn"
            )));
        }
        if hosts[..at].contains(host) {
            return Err(PoolError::invalid(format!("host {host} is listed twice")));
        }
    }
    Ok(())
}

fn socket_bytes(new: &NewExport) -> usize {
    new.socket.as_ref().map_or(0, String::len)
}

/// Bound of an export's hosts and socket in the catalog, in bytes.
pub(super) fn record_bytes(new: &NewExport) -> u64 {
    hosts_bytes(&new.hosts) + socket_bytes(new) as u64
}

/// Bound of hosts in the catalog, in bytes.
pub(super) fn hosts_bytes(hosts: &[String]) -> u64 {
    (hosts.len() * MAX_NQN_BYTES) as u64
}

/// The NQN of a volume's first export. Names may repeat on other nodes; NQNs must not.
pub(super) fn new_nqn(
    pool: Uuid,
    tenant: &TenantRecord,
    volume: &VolumeRecord,
    node: Option<&str>,
) -> Result<String> {
    let mut node = node.unwrap_or_default().to_owned();
    if node.is_empty() {
        let digits = pool.as_bytes().iter().take(UUID_BYTES_IN_NQN);
        node = digits.map(|byte| format!("{byte:02x}")).collect();
    }
    let nqn = format!("{NQN_PREFIX}{node}:{}.{}", tenant.name, volume.name);
    if nqn.len() > MAX_NQN_BYTES {
        return Err(PoolError::invalid(format!(
            "the export's NQN has more than {MAX_NQN_BYTES} bytes: {nqn}"
        )));
    }
    Ok(nqn)
}

/// All exports of a pool.
#[derive(Debug, Default)]
pub struct Exports {
    pub(crate) by_id: BTreeMap<ExportId, ExportRecord>,
    pub(crate) by_volume: BTreeMap<VolumeId, BTreeSet<ExportId>>,
    functions: BTreeMap<u16, ExportId>,
}

impl Exports {
    /// All exports, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &ExportRecord> {
        self.by_id.values()
    }

    /// An export by id.
    pub fn get(&self, export: ExportId) -> Result<&ExportRecord> {
        self.stored(export.0)
            .ok_or_else(|| PoolError::not_found(format!("no {export}")))
    }

    /// A volume's exports, oldest first.
    pub fn of_volume(&self, volume: VolumeId) -> impl Iterator<Item = &ExportRecord> {
        let ids = self.by_volume.get(&volume).into_iter().flatten();
        ids.filter_map(|id| self.by_id.get(id))
    }

    /// A volume's first export.
    pub fn first_of(&self, volume: VolumeId) -> Option<&ExportRecord> {
        self.of_volume(volume).next()
    }

    /// The functions that serve an export, by number.
    pub fn functions(&self) -> impl Iterator<Item = (u16, &ExportRecord)> {
        let all = self.functions.iter();
        all.filter_map(|(number, id)| Some((*number, self.by_id.get(id)?)))
    }

    /// The export of a function.
    pub fn of_function(&self, number: u16) -> Option<&ExportRecord> {
        self.by_id.get(self.functions.get(&number)?)
    }

    pub(super) fn stored_function(&self, number: u64) -> Option<&ExportId> {
        self.functions.get(&u16::try_from(number).ok()?)
    }

    /// A function whose export an earlier version deleted serves nothing.
    pub(crate) fn load_function(&mut self, number: u16, export: ExportId) {
        if self.by_id.contains_key(&export) {
            self.functions.insert(number, export);
        }
    }

    pub(super) fn shows(&self, volume: VolumeId) -> bool {
        self.by_volume.contains_key(&volume)
    }

    pub(super) fn stored(&self, id: u64) -> Option<&ExportRecord> {
        self.by_id.get(&ExportId(id))
    }

    pub(crate) fn load(&mut self, export: ExportRecord) {
        let exports = self.by_volume.entry(export.volume).or_default();
        exports.insert(export.id);
        self.by_id.insert(export.id, export);
    }

    /// Refuses an export that conflicts with existing ones.
    pub(super) fn check_new(&self, volume: &VolumeRecord, new: &NewExport) -> Result<()> {
        check_hosts(&new.hosts)?;
        let for_hosts = !new.hosts.is_empty() || new.any_host;
        if for_hosts == new.frontend.is_vm() {
            return Err(PoolError::invalid(match for_hosts {
                false => "no host may use this export: name host NQNs, or allow any host",
                true => {
                    "hosts apply only to NVMe/TCP: any process that may open a VM's socket can be its client"
                }
            }));
        }
        if let FrontendKind::VhostUser { queues, .. } = new.frontend
            && !(1..=MAX_VM_QUEUES).contains(&queues)
        {
            return Err(PoolError::invalid(format!(
                "a vhost-user disk has 1 to {MAX_VM_QUEUES} queues"
            )));
        }
        if let Some(number) = new.function
            && self.of_function(number).is_some()
        {
            return Err(PoolError::exists(format!(
                "function {number} already serves a volume"
            )));
        }
        let all_share = new.shared && self.of_volume(volume.id).all(|export| export.shared);
        let may_write = !new.only_reads && !volume.is_snapshot();
        if self.shows(volume.id) && !all_share && may_write {
            return Err(PoolError::exists(format!(
                "volume {:?} is exported; two exports that may write must both be shared",
                volume.name
            )));
        }
        let is_tcp = |export: &ExportRecord| !export.frontend.is_vm();
        if !new.frontend.is_vm() && self.of_volume(volume.id).any(is_tcp) {
            return Err(PoolError::exists(format!(
                "volume {:?} is already exported by NVMe/TCP, and that export can serve any number of hosts",
                volume.name
            )));
        }
        let socket_bytes = socket_bytes(new);
        if socket_bytes > MAX_SOCKET_BYTES {
            return Err(PoolError::invalid(format!(
                "a socket's path has at most {MAX_SOCKET_BYTES} bytes"
            )));
        }
        if new.socket.is_some() && self.by_id.values().any(|e| e.socket == new.socket) {
            return Err(PoolError::exists("another export uses this socket"));
        }
        Ok(())
    }

    pub(super) fn insert(
        &mut self,
        journal: &mut Journal,
        export: ExportRecord,
        function: Option<u16>,
    ) {
        journal.touch(Table::Exports, export.id.0, 0);
        if let Some(number) = function {
            journal.touch(Table::Functions, number.into(), 0);
            self.functions.insert(number, export.id);
        }
        self.load(export);
    }

    pub(super) fn check_hosts(&self, export: ExportId, hosts: &[String]) -> Result<()> {
        check_hosts(hosts)?;
        if self.get(export)?.frontend.is_vm() {
            return Err(PoolError::invalid(
                "hosts apply only to NVMe/TCP: any process that may open a VM's socket can be its client",
            ));
        }
        Ok(())
    }

    pub(super) fn set_hosts(
        &mut self,
        journal: &mut Journal,
        export: ExportId,
        hosts: Vec<String>,
        any_host: bool,
    ) {
        if let Some(record) = self.by_id.get_mut(&export) {
            record.hosts = hosts;
            record.any_host = any_host;
        }
        journal.touch(Table::Exports, export.0, 0);
    }

    pub(super) fn remove(&mut self, journal: &mut Journal, export: ExportId) -> Result<()> {
        let record = self
            .by_id
            .remove(&export)
            .ok_or_else(|| PoolError::not_found(format!("no {export}")))?;
        if let Some(exports) = self.by_volume.get_mut(&record.volume) {
            exports.remove(&export);
            if exports.is_empty() {
                self.by_volume.remove(&record.volume);
            }
        }
        let function = self.functions.iter().find(|(_, id)| **id == export);
        if let Some(number) = function.map(|(number, _)| *number) {
            journal.touch(Table::Functions, number.into(), 0);
            self.functions.remove(&number);
        }
        journal.touch(Table::Exports, export.0, 0);
        Ok(())
    }
}
