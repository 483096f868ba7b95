//! Exports, as the API shows and accepts them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An export: a volume served to hosts over NVMe/TCP, or to a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Export {
    /// The volume's tenant.
    pub tenant: String,
    /// The volume.
    pub volume: String,
    /// The export's number in the pool: `VOLUME@ID` names one of several exports.
    #[serde(default)]
    pub id: u64,
    /// The protocol.
    #[serde(default)]
    pub frontend: ExportFrontend,
    /// For `nvme_pcie`: doorbells are a page that the VM shares and the engine polls.
    #[serde(default)]
    pub mapped_doorbells: bool,
    /// For `vhost_user`: number of request queues.
    #[serde(default)]
    pub queues: u16,
    /// For a VM: its memory is registered with the kernel page by page, as far as the VM has
    /// touched it.
    #[serde(default)]
    pub pinned_memory: bool,
    /// For a VM: the Unix socket for its client.
    #[serde(default)]
    pub socket: Option<String>,
    /// For a VM: the connected client.
    #[serde(default)]
    pub machine: Option<MachineClient>,
    /// Whether the volume may have other shared exports too.
    #[serde(default)]
    pub shared: bool,
    /// Whether hosts can only read: it exports a snapshot.
    #[serde(default)]
    pub read_only: bool,
    /// Whether it is internal: it serves an image transfer, and ends with it.
    #[serde(default)]
    pub internal: bool,
    /// NQN of its NVMe subsystem.
    pub nqn: String,
    /// Namespace id within the subsystem.
    pub nsid: u32,
    /// NQNs of hosts that may connect.
    pub hosts: Vec<String>,
    /// Whether every host may connect, listed or not.
    pub any_host: bool,
    /// Addresses to connect to, e.g. `127.0.0.1:4420`.
    pub addresses: Vec<String>,
    /// NQNs of connected hosts (those with an admin queue).
    pub connected_hosts: Vec<String>,
    /// The reactor that serves it now.
    #[serde(default)]
    pub reactor: Option<u32>,
    /// Why it is quarantined, if it is.
    pub quarantined: Option<String>,
    /// In the answer to a change: commands of disconnected hosts that were still at devices. Their
    /// writes may still appear, but no later ones.
    #[serde(default)]
    pub commands_ending: u64,
    /// In the answer to a creation: tenants whose bases are no longer guaranteed.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// The client of an export to a VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineClient {
    /// When it connected, Unix seconds.
    pub since_unix_s: u64,
    /// Memory that it shares with the engine.
    pub memory_bytes: u64,
    /// I/O queues in use.
    pub queues: u64,
}

/// The protocol of an export.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum ExportFrontend {
    /// NVMe/TCP, for any number of hosts.
    #[default]
    NvmeTcp,
    /// An NVMe disk over vfio-user, for one VM or one user-space driver.
    NvmePcie,
    /// A virtio disk over vhost-user, for one VM or one user-space driver.
    VhostUser,
}

/// Body of `POST /v1/exports`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportCreate {
    /// The volume's tenant.
    pub tenant: String,
    /// The volume, or a snapshot, which hosts can only read.
    pub volume: String,
    /// NQNs of hosts that may connect. After `nqn.2014-08.org.nvmexpress:uuid:` a UUID must follow.
    /// The discovery service's NQN is refused.
    #[serde(default)]
    pub hosts: Vec<String>,
    /// Let every host connect.
    #[serde(default)]
    pub any_host: bool,
    /// The protocol; hosts are for NVMe/TCP only.
    #[serde(default)]
    pub frontend: ExportFrontend,
    /// For `nvme_pcie`: doorbells are a page that the VM shares and the engine polls.
    #[serde(default)]
    pub mapped_doorbells: bool,
    /// For `vhost_user`: number of request queues, 1 to 64; default 1.
    #[serde(default)]
    pub queues: Option<u16>,
    /// For a VM: it never takes pages out of its memory (it has no balloon), so the engine may
    /// register the whole memory with the kernel.
    #[serde(default)]
    pub pinned_memory: bool,
    /// For a VM: the absolute path of the new Unix socket; by default in the daemon's runtime
    /// folder.
    #[serde(default)]
    pub socket: Option<String>,
    /// For a VM: the user id of the socket's owner.
    #[serde(default)]
    pub socket_user: Option<u32>,
    /// For a VM: the group id of the socket.
    #[serde(default)]
    pub socket_group: Option<u32>,
    /// Allow several exports of the volume; all of them must set this.
    #[serde(default)]
    pub shared: bool,
}

/// Body of `PATCH /v1/exports/{tenant}/{volume}`: which hosts may connect.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportUpdate {
    /// Host NQNs to add; those already listed are ignored.
    #[serde(default)]
    pub add_hosts: Vec<String>,
    /// Host NQNs to remove; each must be listed.
    #[serde(default)]
    pub remove_hosts: Vec<String>,
    /// If given, whether every host may connect.
    #[serde(default)]
    pub any_host: Option<bool>,
    /// Go on even if connected hosts may no longer connect: they lose the disk.
    #[serde(default)]
    pub disconnect_hosts: bool,
}
