//! Exports, as the API shows them and takes them.
//!
//! Not here: what is changed by them (`exports`).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An export: a volume shown to hosts over NVMe/TCP, or to a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Export {
    /// Tenant of the volume.
    pub tenant: String,
    /// The volume.
    pub volume: String,
    /// Its number in the pool: `VOLUME@ID` names it where the volume has several.
    #[serde(default)]
    pub id: u64,
    /// How it is reached.
    #[serde(default)]
    pub frontend: ExportFrontend,
    /// Of `nvme_pcie`: whether doorbells are a page that the machine shares and the engine polls.
    #[serde(default)]
    pub mapped_doorbells: bool,
    /// Of `vhost_user`: request queues.
    #[serde(default)]
    pub queues: u16,
    /// Of a machine's: whether its memory is registered with the kernel, page for page, as far as the machine has
    /// touched it.
    #[serde(default)]
    pub pinned_memory: bool,
    /// Of a machine's: the Unix socket that its client connects to.
    #[serde(default)]
    pub socket: Option<String>,
    /// Of a machine's: the client that is connected now.
    #[serde(default)]
    pub machine: Option<MachineClient>,
    /// Whether others that say the same may show the volume too.
    #[serde(default)]
    pub shared: bool,
    /// Whether it is the daemon's own: an image is moved through it, and it ends with that.
    #[serde(default)]
    pub internal: bool,
    /// NQN of its NVMe subsystem.
    pub nqn: String,
    /// Namespace id within the subsystem.
    pub nsid: u32,
    /// Host NQNs that may connect.
    pub hosts: Vec<String>,
    /// Whether every host may connect, listed or not.
    pub any_host: bool,
    /// Addresses to connect to, e.g. `127.0.0.1:4420`.
    pub addresses: Vec<String>,
    /// Host NQNs that are connected now (those with an admin queue).
    pub connected_hosts: Vec<String>,
    /// The reactor that serves it now.
    #[serde(default)]
    pub reactor: Option<u32>,
    /// Why it is not served, if it is quarantined.
    pub quarantined: Option<String>,
    /// In the answer to a change: commands that were still at devices, of hosts that it shut out. What
    /// these write may still appear; nothing later of these hosts will.
    #[serde(default)]
    pub commands_ending: u64,
    /// In the answer to its making: whose bases can't be had at any time since.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// The client of an export to a virtual machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineClient {
    /// When it connected, Unix seconds.
    pub since_unix_s: u64,
    /// Memory that it shares with the engine.
    pub memory_bytes: u64,
    /// I/O queues that are in use.
    pub queues: u64,
}

/// How an export is reached.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum ExportFrontend {
    /// By any number of hosts over NVMe/TCP.
    #[default]
    NvmeTcp,
    /// By one virtual machine, or one user-space driver, as an NVMe disk over vfio-user.
    NvmePcie,
    /// By one virtual machine, or one user-space driver, as a virtio disk over vhost-user.
    VhostUser,
}

/// Body of `POST /v1/exports`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportCreate {
    /// Tenant of the volume.
    pub tenant: String,
    /// The volume.
    pub volume: String,
    /// Host NQNs that may connect. One of `nqn.2014-08.org.nvmexpress:uuid:` ends in a UUID; the discovery service's is no
    /// host's.
    #[serde(default)]
    pub hosts: Vec<String>,
    /// Let every host connect.
    #[serde(default)]
    pub any_host: bool,
    /// How it is reached; hosts are of NVMe/TCP alone.
    #[serde(default)]
    pub frontend: ExportFrontend,
    /// Of `nvme_pcie`: doorbells are a page that the machine shares and the engine polls.
    #[serde(default)]
    pub mapped_doorbells: bool,
    /// Of `vhost_user`: request queues, 1 to 64; 1 if it isn't given.
    #[serde(default)]
    pub queues: Option<u16>,
    /// Of a machine's: the machine never takes pages out of its memory (it has no balloon), so that all of it may be
    /// registered with the kernel.
    #[serde(default)]
    pub pinned_memory: bool,
    /// Of a machine's: the absolute path of the Unix socket to be made; without it, it is beneath the
    /// daemon's runtime folder.
    #[serde(default)]
    pub socket: Option<String>,
    /// Of a machine's: the number of the user to whom the socket is to belong.
    #[serde(default)]
    pub socket_user: Option<u32>,
    /// Of a machine's: the number of the group to whom the socket is to belong.
    #[serde(default)]
    pub socket_group: Option<u32>,
    /// The volume may have several exports: all of them say so.
    #[serde(default)]
    pub shared: bool,
}

/// Body of `PATCH /v1/exports/{tenant}/{volume}`: who may connect.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportUpdate {
    /// Host NQNs to add; adding one that is there already changes nothing.
    #[serde(default)]
    pub add_hosts: Vec<String>,
    /// Host NQNs to remove; each must be listed.
    #[serde(default)]
    pub remove_hosts: Vec<String>,
    /// If given, whether every host may connect.
    #[serde(default)]
    pub any_host: Option<bool>,
    /// Go on even if hosts are connected that may no longer connect: they lose the disk.
    #[serde(default)]
    pub disconnect_hosts: bool,
}
