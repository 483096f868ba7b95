//! Tenants, volumes, exports.
//!
//! **Design.** Each operation validates, then changes memory and names the records it touched; it
//! is durable with the open batch. Messages say what to do. **Not here:** extents (`owner`), devices
//! and settings (`devices`), ending a volume (`delete`), hosts' connections: an export that goes away must be closed by the caller first.

use crate::{
    batch::Table,
    error::{PoolError, Result},
    pool::{Pool, Volume},
    records::{ExportId, ExportRecord, NewExport, TenantId, TenantRecord, VolumeRecord},
    uuid::Uuid,
};
use forebay_device::size::format_bytes;
use forebay_xlate::boundary::message::{Frontend, MAX_MACHINE_QUEUES};
use forebay_xlate::types::VolumeId;

/// The largest volume, in bytes.
pub const MAX_VOLUME_BYTES: u64 = 64 << 40;
/// What an export's NQN begins with; `<node>:<tenant>.<volume>` follows.
pub const NQN_PREFIX: &str = "nqn.2026-01.io.forebay:";
/// NVMe Base 2.0, 4.5: an NQN's longest form, in bytes.
const MAX_NQN_BYTES: usize = 223;
/// The longest path of a Unix socket (sockaddr_un).
const MAX_SOCKET_BYTES: usize = 107;
const MAX_NAME_BYTES: usize = 63;
/// How much of the pool's UUID an NQN holds.
const UUID_BYTES_IN_NQN: usize = 6;
/// The most hosts that an export lists.
pub const MAX_HOSTS: usize = 256;
/// What a record takes in the catalog at most, roughly; hosts come on top.
const RECORD_BYTES: u64 = 512;

/// What a volume is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewVolume {
    /// Whose it is, by name.
    pub tenant: String,
    /// Its name, unique within the tenant.
    pub name: String,
    /// Its size in bytes, a multiple of the block.
    pub size_bytes: u64,
    /// Its logical block, 512 or 4096; none: the smallest that the devices allow.
    pub block_bytes: Option<u32>,
    /// How much of it shall find space whatever others do, in bytes.
    pub reserved_bytes: u64,
}

pub(crate) fn check_name(what: &str, name: &str) -> Result<()> {
    let sound = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        && !name.starts_with('-');
    if sound {
        return Ok(());
    }
    Err(PoolError::invalid(format!(
        "{name:?} is no name for a {what}: use 1 to {MAX_NAME_BYTES} of a-z, 0-9 and -, not first"
    )))
}

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
                "{host:?} is no host NQN: a host's is in its /etc/nvme/hostnqn"
            )));
        }
        if hosts[..at].contains(host) {
            return Err(PoolError::invalid(format!("host {host} is named twice")));
        }
    }
    Ok(())
}

impl Pool {
    fn new_id(&mut self) -> u64 {
        let id = self.info.next_id;
        self.info.next_id += 1;
        self.touch(Table::Meta, 0, 0);
        id
    }

    // Tenants.

    /// All tenants, oldest first.
    pub fn tenants(&self) -> impl Iterator<Item = &TenantRecord> {
        self.tenants.values()
    }

    /// A tenant by name.
    pub fn tenant(&self, name: &str) -> Result<&TenantRecord> {
        self.tenant_names
            .get(name)
            .and_then(|id| self.tenants.get(id))
            .ok_or_else(|| PoolError::not_found(format!("no tenant {name:?}")))
    }

    /// A tenant by id.
    pub fn tenant_by_id(&self, tenant: TenantId) -> Result<&TenantRecord> {
        self.tenants
            .get(&tenant)
            .ok_or_else(|| PoolError::not_found(format!("no {tenant}")))
    }

    /// Adds a tenant.
    pub fn create_tenant(&mut self, name: &str, now_s: u64) -> Result<TenantId> {
        check_name("tenant", name)?;
        if self.tenant_names.contains_key(name) {
            return Err(PoolError::exists(format!("tenant {name:?} exists")));
        }
        self.admit(RECORD_BYTES)?;
        let id = TenantId(self.new_id());
        self.tenants.insert(
            id,
            TenantRecord {
                id,
                name: name.to_owned(),
                created_s: now_s,
            },
        );
        self.tenant_names.insert(name.to_owned(), id);
        self.touch(Table::Tenants, id.0, 0);
        Ok(id)
    }

    /// Removes a tenant that has no volume.
    pub fn delete_tenant(&mut self, name: &str) -> Result<()> {
        let id = self.tenant(name)?.id;
        let volumes = self.volumes_of(id).count();
        if volumes > 0 {
            return Err(PoolError::in_use(format!(
                "tenant {name:?} has {volumes} volumes: delete them first"
            )));
        }
        self.tenants.remove(&id);
        self.tenant_names.remove(name);
        self.forget_tenant_budget(id);
        self.touch(Table::Tenants, id.0, 0);
        Ok(())
    }

    // Volumes.

    /// All volumes, oldest first.
    pub fn volumes(&self) -> impl Iterator<Item = &VolumeRecord> {
        self.volumes.values().map(|volume| &volume.record)
    }

    /// A tenant's volumes, by name.
    pub fn volumes_of(&self, tenant: TenantId) -> impl Iterator<Item = &VolumeRecord> {
        self.volume_names
            .range((tenant, String::new())..)
            .take_while(move |((of, _), _)| *of == tenant)
            .filter_map(|(_, id)| self.volumes.get(id).map(|volume| &volume.record))
    }

    /// A volume by id.
    pub fn volume(&self, volume: VolumeId) -> Result<&VolumeRecord> {
        self.volume_ref(volume).map(|volume| &volume.record)
    }

    /// A volume by its tenant's and its own name.
    pub fn volume_by_name(&self, tenant: &str, name: &str) -> Result<&VolumeRecord> {
        let id = self.tenant(tenant)?.id;
        self.volume_names
            .get(&(id, name.to_owned()))
            .and_then(|id| self.volumes.get(id))
            .map(|volume| &volume.record)
            .ok_or_else(|| {
                PoolError::not_found(format!("tenant {tenant:?} has no volume {name:?}"))
            })
    }

    fn check_size(size_bytes: u64, block_bytes: u32) -> Result<()> {
        if size_bytes == 0 {
            return Err(PoolError::invalid(format!(
                "a volume of 0 bytes: the least is one block, {block_bytes} bytes"
            )));
        }
        if !size_bytes.is_multiple_of(u64::from(block_bytes)) {
            return Err(PoolError::invalid(format!(
                "a volume of {size_bytes} bytes: the size must be a multiple of its block, {block_bytes}"
            )));
        }
        if size_bytes > MAX_VOLUME_BYTES {
            return Err(PoolError::invalid(format!(
                "a volume of {size_bytes} bytes: the most is {} ({MAX_VOLUME_BYTES} bytes)",
                format_bytes(MAX_VOLUME_BYTES)
            )));
        }
        Ok(())
    }

    /// Adds a thin volume: it takes no space before it is written.
    pub fn create_volume(&mut self, new: &NewVolume, now_s: u64) -> Result<VolumeId> {
        check_name("volume", &new.name)?;
        let tenant = self.tenant(&new.tenant)?.id;
        let name = (tenant, new.name.clone());
        if self.volume_names.contains_key(&name) {
            return Err(PoolError::exists(format!(
                "tenant {:?} has a volume {:?}",
                new.tenant, new.name
            )));
        }
        let smallest = self
            .devices
            .iter()
            .map(|device| device.block_bytes)
            .max()
            .unwrap_or(512);
        let block_bytes = new.block_bytes.unwrap_or(smallest);
        if !matches!(block_bytes, 512 | 4096) {
            return Err(PoolError::invalid(format!(
                "a block of {block_bytes} bytes: a volume's is 512 or 4096"
            )));
        }
        if block_bytes < smallest {
            return Err(PoolError::invalid(format!(
                "a block of {block_bytes} bytes: the pool's devices have {smallest}, use that"
            )));
        }
        Self::check_size(new.size_bytes, block_bytes)?;
        self.admit(RECORD_BYTES)?;
        self.make_room_for_reservation(None, new.reserved_bytes, new.size_bytes)?;
        let uuid = Uuid::random()?;
        let id = VolumeId(self.new_id());
        self.volumes.insert(
            id,
            Volume::new(VolumeRecord {
                id,
                uuid,
                tenant,
                name: new.name.clone(),
                size_bytes: new.size_bytes,
                block_bytes,
                reserved_bytes: new.reserved_bytes,
                created_s: now_s,
            }),
        );
        self.volume_names.insert(name, id);
        self.settle_account(id);
        self.touch(Table::Volumes, id.0, 0);
        Ok(id)
    }

    /// Makes a volume larger. Hosts are told by the caller, once it is durable.
    pub fn grow_volume(&mut self, volume: VolumeId, size_bytes: u64) -> Result<()> {
        let record = &mut self.volume_mut(volume)?.record;
        if size_bytes < record.size_bytes {
            return Err(PoolError::invalid(format!(
                "volume {:?} has {} already and can only grow",
                record.name,
                format_bytes(record.size_bytes)
            )));
        }
        Self::check_size(size_bytes, record.block_bytes)?;
        record.size_bytes = size_bytes;
        self.settle_account(volume);
        self.touch(Table::Volumes, volume.0, 0);
        Ok(())
    }

    // Exports.

    /// All exports, oldest first.
    pub fn exports(&self) -> impl Iterator<Item = &ExportRecord> {
        self.exports.values()
    }

    /// An export by id.
    pub fn export(&self, export: ExportId) -> Result<&ExportRecord> {
        self.exports
            .get(&export)
            .ok_or_else(|| PoolError::not_found(format!("no {export}")))
    }

    /// The exports that show a volume, oldest first.
    pub fn exports_of(&self, volume: VolumeId) -> impl Iterator<Item = &ExportRecord> {
        let ids = self.volume_exports.get(&volume).into_iter().flatten();
        ids.filter_map(|id| self.exports.get(id))
    }

    /// The first of these.
    pub fn export_of(&self, volume: VolumeId) -> Option<&ExportRecord> {
        self.exports_of(volume).next()
    }

    /// Shows a volume to hosts.
    pub fn create_export(
        &mut self,
        volume: VolumeId,
        hosts: Vec<String>,
        any_host: bool,
        now_s: u64,
    ) -> Result<ExportId> {
        let new = NewExport {
            hosts,
            any_host,
            ..NewExport::default()
        };
        self.create_export_as(volume, new, now_s)
    }

    /// Shows a volume to hosts, or to a machine.
    pub fn create_export_as(
        &mut self,
        volume: VolumeId,
        new: NewExport,
        now_s: u64,
    ) -> Result<ExportId> {
        let record = self.volume(volume)?;
        let nqn = match self.exports_of(volume).next() {
            // A host refuses one namespace in two subsystems.
            Some(other) => other.nqn.clone(),
            None => self.new_nqn(record, new.node.as_deref())?,
        };
        check_hosts(&new.hosts)?;
        let for_hosts = !new.hosts.is_empty() || new.any_host;
        if for_hosts == new.frontend.is_machine() {
            return Err(PoolError::invalid(match for_hosts {
                false => "an export that no host may use: name host NQNs, or allow any host",
                true => "hosts are of NVMe/TCP: who may open a machine's socket is its client",
            }));
        }
        if let Frontend::VhostUser { queues, .. } = new.frontend
            && !(1..=MAX_MACHINE_QUEUES).contains(&queues)
        {
            return Err(PoolError::invalid(format!(
                "a vhost-user disk has 1 to {MAX_MACHINE_QUEUES} queues"
            )));
        }
        let all_share = new.shared && self.exports_of(volume).all(|export| export.shared);
        if self.volume_exports.contains_key(&volume) && !all_share && !new.only_reads {
            return Err(PoolError::exists(format!(
                "volume {:?} is exported; two exports that may write need to be shared, both of them",
                record.name
            )));
        }
        let is_tcp = |export: &ExportRecord| !export.frontend.is_machine();
        if !new.frontend.is_machine() && self.exports_of(volume).any(is_tcp) {
            return Err(PoolError::exists(format!(
                "volume {:?} is exported by NVMe/TCP, which has any number of hosts",
                record.name
            )));
        }
        let socket_bytes = new.socket.as_ref().map_or(0, String::len);
        if socket_bytes > MAX_SOCKET_BYTES {
            return Err(PoolError::invalid(format!(
                "a socket's path has at most {MAX_SOCKET_BYTES} bytes"
            )));
        }
        if new.socket.is_some() && self.exports.values().any(|e| e.socket == new.socket) {
            return Err(PoolError::exists("another export has this socket"));
        }
        self.admit(RECORD_BYTES + (new.hosts.len() * MAX_NQN_BYTES + socket_bytes) as u64)?;
        let id = ExportId(self.new_id());
        let export = ExportRecord {
            id,
            volume,
            nqn,
            hosts: new.hosts,
            any_host: new.any_host,
            created_s: now_s,
            frontend: new.frontend,
            socket: new.socket,
            socket_owner: new.socket_owner,
            shared: new.shared,
        };
        self.exports.insert(id, export);
        self.volume_exports.entry(volume).or_default().insert(id);
        self.touch(Table::Exports, id.0, 0);
        Ok(id)
    }

    /// Nodes have tenants and volumes of the same name; a host that uses two nodes tells subsystems by their NQN.
    fn new_nqn(&self, volume: &VolumeRecord, node: Option<&str>) -> Result<String> {
        let mut node = node.unwrap_or_default().to_owned();
        if node.is_empty() {
            let digits = self.info().uuid.0.iter().take(UUID_BYTES_IN_NQN);
            node = digits.map(|byte| format!("{byte:02x}")).collect();
        }
        let tenant = self.tenant_by_id(volume.tenant)?;
        let nqn = format!("{NQN_PREFIX}{node}:{}.{}", tenant.name, volume.name);
        if nqn.len() > MAX_NQN_BYTES {
            return Err(PoolError::invalid(format!(
                "the export's NQN has more than {MAX_NQN_BYTES} bytes: {nqn}"
            )));
        }
        Ok(nqn)
    }

    /// Changes who may use an export; nobody is allowed too.
    pub fn set_export_hosts(
        &mut self,
        export: ExportId,
        hosts: Vec<String>,
        any_host: bool,
    ) -> Result<()> {
        check_hosts(&hosts)?;
        if self.export(export)?.frontend.is_machine() {
            return Err(PoolError::invalid(
                "hosts are of NVMe/TCP: who may open a machine's socket is its client",
            ));
        }
        self.admit((hosts.len() * MAX_NQN_BYTES) as u64)?;
        if let Some(record) = self.exports.get_mut(&export) {
            record.hosts = hosts;
            record.any_host = any_host;
        }
        self.touch(Table::Exports, export.0, 0);
        Ok(())
    }

    /// Removes an export. Its hosts must be disconnected by the caller.
    pub fn delete_export(&mut self, export: ExportId) -> Result<()> {
        let record = self
            .exports
            .remove(&export)
            .ok_or_else(|| PoolError::not_found(format!("no {export}")))?;
        if let Some(exports) = self.volume_exports.get_mut(&record.volume) {
            exports.remove(&export);
            if exports.is_empty() {
                self.volume_exports.remove(&record.volume);
            }
        }
        self.touch(Table::Exports, export.0, 0);
        Ok(())
    }
}
