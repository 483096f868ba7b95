//! A controller's fixed configuration and its environment.

use super::{Ana, MAX_IO_QUEUES, MAX_NAMESPACES, MAX_NSID};
use crate::Nqn;
use crate::fabrics::DiscoveryLogEntry;
use crate::io::NamespaceGeometry;

/// Kind of controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerKind {
    /// I/O controller in Fabrics.
    Io,
    /// Discovery controller (Base 2.0, 3.1.2.3).
    Discovery,
    /// I/O controller on PCI Express ([`crate::pcie`]).
    Pcie,
    /// A controller as a management endpoint sees it ([`crate::mi`]). CNTLID 0 is Administrative
    /// and primary, the others are I/O controllers.
    Management,
}

impl ControllerKind {
    pub(crate) const fn has_io(self) -> bool {
        !matches!(self, Self::Discovery)
    }

    pub(super) const fn is_fabrics(self) -> bool {
        matches!(self, Self::Io | Self::Discovery)
    }
}

/// A controller's fixed properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerConfig {
    /// Kind of controller.
    pub kind: ControllerKind,
    /// 0 to FFEFh, unique among the subsystem's live controllers.
    pub cntlid: u16,
    /// Subsystem NQN.
    pub subnqn: Nqn,
    /// Serial number, see [`ascii`].
    pub serial: [u8; 20],
    /// Model number.
    pub model: [u8; 40],
    /// Firmware revision.
    pub firmware: [u8; 8],
    /// Largest I/O queue, 2 to 65536 entries; sets CAP.MQES and MAXCMD.
    pub max_queue_entries: u32,
    /// I/O queues, 1 to [`MAX_IO_QUEUES`].
    pub max_io_queues: u16,
    /// MDTS: a power of two, at least 8192; also for admin commands.
    pub mdts_bytes: u32,
    /// In-capsule I/O data: a multiple of 16.
    pub in_capsule_bytes: u32,
    /// Highest namespace identifier, 1 to [`MAX_NAMESPACES`]. For
    /// [`ControllerKind::Management`], the most namespaces, with any identifiers.
    pub namespaces: u32,
}

impl ControllerConfig {
    /// Defaults: 64 queues of 128 entries, MDTS 1 MiB, 8 KiB in capsule, one namespace.
    pub fn io(cntlid: u16, subnqn: Nqn, serial: &str) -> Self {
        Self {
            kind: ControllerKind::Io,
            cntlid,
            subnqn,
            serial: ascii(serial),
            model: ascii("Forebay virtual disk"),
            firmware: ascii(env!("CARGO_PKG_VERSION")),
            max_queue_entries: 128,
            max_io_queues: 64,
            mdts_bytes: 1 << 20,
            in_capsule_bytes: 8192,
            namespaces: 1,
        }
    }

    /// A Discovery controller.
    pub fn discovery(cntlid: u16) -> Self {
        Self {
            kind: ControllerKind::Discovery,
            model: ascii("Forebay discovery"),
            mdts_bytes: 128 << 10,
            in_capsule_bytes: 0,
            ..Self::io(cntlid, Nqn::discovery(), "0")
        }
    }

    /// Defaults: 64 queues of 1024 entries, MDTS 512 KiB, one namespace.
    pub fn pcie(cntlid: u16, subnqn: Nqn, serial: &str) -> Self {
        Self {
            kind: ControllerKind::Pcie,
            max_queue_entries: 1024,
            max_io_queues: crate::pcie::MAX_IO_QUEUES,
            mdts_bytes: 512 << 10,
            in_capsule_bytes: 0,
            ..Self::io(cntlid, subnqn, serial)
        }
    }

    /// Defaults: log pages of at most 64 KiB, 1024 namespaces.
    pub fn management(cntlid: u16, subnqn: Nqn, serial: &str) -> Self {
        Self {
            kind: ControllerKind::Management,
            model: ascii("Forebay storage node"),
            mdts_bytes: 64 << 10,
            in_capsule_bytes: 0,
            namespaces: 1024,
            ..Self::io(cntlid, subnqn, serial)
        }
    }

    /// Clamps all numbers to their ranges.
    pub fn normalized(mut self) -> Self {
        self.cntlid = self.cntlid.min(0xFFEF);
        self.max_queue_entries = self.max_queue_entries.clamp(2, 65536);
        self.max_io_queues = self.max_io_queues.clamp(1, MAX_IO_QUEUES);
        self.mdts_bytes = 1 << self.mdts_bytes.clamp(8192, 1 << 30).ilog2();
        self.in_capsule_bytes = self.in_capsule_bytes.min(1 << 30) / 16 * 16;
        self.namespaces = match self.kind {
            ControllerKind::Management => self.namespaces.clamp(1, MAX_NSID),
            _ => self.namespaces.clamp(1, MAX_NAMESPACES),
        };
        self
    }

    /// At least 8 KiB, as 0 would mean no limit.
    pub(super) fn mdts_exponent(&self) -> u8 {
        (self.mdts_bytes / 4096).max(1).ilog2() as u8
    }
}

/// Space-padded ASCII (Base 2.0, 1.4.2), truncated; other characters become `?`.
pub fn ascii<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    for (to, from) in field.iter_mut().zip(text.chars()) {
        *to = if (' '..='~').contains(&from) {
            from as u8
        } else {
            b'?'
        };
    }
    field
}

/// The environment, queried for each command.
pub trait AdminEnv {
    /// The current namespace; `None`: unused identifier. Management controllers ask for any
    /// allocated one, others for attached ones.
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo>;

    /// Values for the SMART / Health log page.
    fn health(&self) -> Health {
        Health::default()
    }

    /// The ANA state of this path.
    fn ana(&self) -> Ana {
        Ana::default()
    }

    /// Controllers of the subsystem, including the caller; empty if unknown.
    fn controllers(&self) -> Vec<SubsystemController> {
        Vec::new()
    }

    /// I/O queues available, if several controllers share them.
    fn io_queues_left(&self) -> u16 {
        u16::MAX
    }

    /// Whether reservations survive a power loss.
    fn persistent_reservations(&self) -> bool {
        false
    }

    /// Changes whenever this host's discovery list does.
    fn discovery_generation(&self, host: &Nqn) -> u64 {
        let _ = host;
        0
    }

    /// Discovery entries for this host.
    fn discovery_count(&self, host: &Nqn) -> u64 {
        let _ = host;
        0
    }

    /// Entry `index`, from 0.
    fn discovery_entry(&self, host: &Nqn, index: u64) -> Option<DiscoveryLogEntry> {
        let _ = (host, index);
        None
    }

    /// Allocated namespaces with higher identifiers, ascending: the first 1024. This and the rest
    /// is for management controllers.
    fn allocated_after(&self, nsid: u32) -> Vec<u32> {
        let _ = nsid;
        Vec::new()
    }

    /// As [`Self::allocated_after`], but only namespaces of the addressed controller.
    fn attached_after(&self, nsid: u32) -> Vec<u32> {
        let _ = nsid;
        Vec::new()
    }

    /// Controllers with this namespace, ascending.
    fn controllers_of(&self, nsid: u32) -> Vec<u16> {
        let _ = nsid;
        Vec::new()
    }

    /// Capacity of the subsystem: total and unallocated bytes.
    fn capacity(&self) -> (u128, u128) {
        (0, 0)
    }

    /// The firmware; `None`: one slot with [`ControllerConfig::firmware`].
    fn firmware(&self) -> Option<Firmware> {
        None
    }

    /// Vendor log pages that the caller answers.
    fn vendor_logs(&self) -> &[u8] {
        &[]
    }

    /// Vendor Admin commands that the caller answers.
    fn vendor_commands(&self) -> &[u8] {
        &[]
    }
}

/// Two firmware slots (Base 2.0, 5.16.1.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Firmware {
    /// The slot that runs: 1 or 2.
    pub active_slot: u8,
    /// The slot of the next reset; 0: undecided.
    pub next_slot: u8,
    /// Revisions of both slots, see [`ascii`]; `None`: an empty slot.
    pub revisions: [Option<[u8; 8]>; 2],
}

impl Firmware {
    /// The revision that runs.
    pub(super) fn active(&self) -> Option<[u8; 8]> {
        let index = usize::from(self.active_slot).checked_sub(1)?;
        *self.revisions.get(index)?
    }
}

/// A controller of the subsystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubsystemController {
    /// Controller identifier.
    pub cntlid: u16,
    /// A host uses it.
    pub online: bool,
}

/// The current state of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// Block size and size.
    pub geometry: NamespaceGeometry,
    /// Allocated blocks (Namespace Utilization).
    pub used_blocks: u64,
    /// Allocation unit: a power of two, at least a block.
    pub extent_bytes: u32,
    /// NGUID, never reused.
    pub nguid: [u8; 16],
    /// UUID.
    pub uuid: [u8; 16],
}

/// SMART / Health values (Base 2.0, 5.16.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// Critical warning bits (byte 0).
    pub critical_warning: u8,
    /// Composite temperature; 0 if unknown.
    pub temperature_kelvin: u16,
    /// Available spare.
    pub available_spare_percent: u8,
    /// Available spare threshold.
    pub spare_threshold_percent: u8,
    /// Percentage used.
    pub percentage_used: u8,
    /// Bytes that hosts read.
    pub bytes_read: u128,
    /// Bytes that hosts wrote.
    pub bytes_written: u128,
    /// Read commands.
    pub host_reads: u128,
    /// Write commands.
    pub host_writes: u128,
    /// Controller busy time.
    pub busy_minutes: u128,
    /// Power cycles.
    pub power_cycles: u128,
    /// Power-on time.
    pub power_on_hours: u128,
    /// Unsafe shutdowns.
    pub unsafe_shutdowns: u128,
    /// Device errors of the subsystem, across controllers.
    pub media_errors: u128,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            critical_warning: 0,
            temperature_kelvin: 0,
            available_spare_percent: 100,
            spare_threshold_percent: 0,
            percentage_used: 0,
            bytes_read: 0,
            bytes_written: 0,
            host_reads: 0,
            host_writes: 0,
            busy_minutes: 0,
            power_cycles: 0,
            power_on_hours: 0,
            unsafe_shutdowns: 0,
            media_errors: 0,
        }
    }
}
