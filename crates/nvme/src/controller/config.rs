//! What a controller is made with, and what it asks its surroundings for.
//!
//! Does NOT hold anything that a host can change: that is [`super::ControllerState`].

use super::{Ana, MAX_IO_QUEUES, MAX_NAMESPACES};
use crate::Nqn;
use crate::fabrics::DiscoveryLogEntry;
use crate::io::NamespaceGeometry;

/// What a controller is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerKind {
    /// I/O controller of an NVM subsystem.
    Io,
    /// Controller of the Discovery Service (Base 2.0, 3.1.2.3).
    Discovery,
    /// I/O controller on PCI Express: memory-based queues, interrupts ([`crate::pcie`]).
    Pcie,
}

impl ControllerKind {
    /// Whether it has I/O queues.
    pub(crate) const fn has_io(self) -> bool {
        !matches!(self, Self::Discovery)
    }
}

/// The fixed properties of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerConfig {
    /// I/O or Discovery.
    pub kind: ControllerKind,
    /// Controller Identifier, unique among the subsystem's live controllers; 0 to FFEFh.
    pub cntlid: u16,
    /// The subsystem's name.
    pub subnqn: Nqn,
    /// Serial Number: ASCII, padded with spaces. See [`ascii`].
    pub serial: [u8; 20],
    /// Model Number.
    pub model: [u8; 40],
    /// Firmware Revision.
    pub firmware: [u8; 8],
    /// The largest I/O queue, in entries: 2 to 65536. CAP.MQES and MAXCMD come from it.
    pub max_queue_entries: u32,
    /// I/O queues: 1 to [`MAX_IO_QUEUES`].
    pub max_io_queues: u16,
    /// Maximum Data Transfer Size: a power of two, 8192 or more, for I/O and Admin commands alike.
    pub mdts_bytes: u32,
    /// In-capsule data of an I/O command: a multiple of 16.
    pub in_capsule_bytes: u32,
    /// The highest namespace identifier: 1 to [`MAX_NAMESPACES`].
    pub namespaces: u32,
}

impl ControllerConfig {
    /// An I/O controller with queues of up to 128 entries, 64 queues, transfers of up to 1 MiB,
    /// 8 KiB in the capsule, and one namespace. Every field may be changed.
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

    /// A controller of the Discovery Service.
    pub fn discovery(cntlid: u16) -> Self {
        Self {
            kind: ControllerKind::Discovery,
            model: ascii("Forebay discovery"),
            mdts_bytes: 128 << 10,
            in_capsule_bytes: 0,
            ..Self::io(cntlid, Nqn::discovery(), "0")
        }
    }

    /// A controller on PCI Express, with 64 queues of up to 1024 entries, transfers of up to 512 KiB, and
    /// one namespace.
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

    /// The same with every number within what the fields' descriptions allow.
    pub fn normalized(mut self) -> Self {
        self.cntlid = self.cntlid.min(0xFFEF);
        self.max_queue_entries = self.max_queue_entries.clamp(2, 65536);
        self.max_io_queues = self.max_io_queues.clamp(1, MAX_IO_QUEUES);
        self.mdts_bytes = 1 << self.mdts_bytes.clamp(8192, 1 << 30).ilog2();
        self.in_capsule_bytes = self.in_capsule_bytes.min(1 << 30) / 16 * 16;
        self.namespaces = self.namespaces.clamp(1, MAX_NAMESPACES);
        self
    }

    /// MDTS as Identify Controller has it: 0 would be no limit, so 8 KiB is the least.
    pub(super) fn mdts_exponent(&self) -> u8 {
        (self.mdts_bytes / 4096).max(1).ilog2() as u8
    }
}

/// Text as a fixed ASCII field padded with spaces (Base 2.0, 1.4.2): what doesn't fit is cut, what
/// isn't printable ASCII becomes `?`.
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

/// What a controller asks about the world, each time a host asks the controller.
pub trait AdminEnv {
    /// A namespace as it is now, or `None` if that identifier is not in use.
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo>;

    /// The figures of the SMART / Health Information log page.
    fn health(&self) -> Health {
        Health::default()
    }

    /// How well this controller reaches its namespaces.
    fn ana(&self) -> Ana {
        Ana::default()
    }

    /// The controllers of the subsystem that the namespace is attached to; the one that asks is among
    /// them. Empty: not known.
    fn controllers(&self) -> Vec<SubsystemController> {
        Vec::new()
    }

    /// I/O queues that this controller may have: where several share what there is, not all that it could.
    fn io_queues_left(&self) -> u16 {
        u16::MAX
    }

    /// Whether the namespace's reservations persist through a power loss.
    fn persistent_reservations(&self) -> bool {
        false
    }

    /// Changes whenever the list that this host may see changes.
    fn discovery_generation(&self, host: &Nqn) -> u64 {
        let _ = host;
        0
    }

    /// How many entries this host may see.
    fn discovery_count(&self, host: &Nqn) -> u64 {
        let _ = host;
        0
    }

    /// One entry, `index` from 0.
    fn discovery_entry(&self, host: &Nqn, index: u64) -> Option<DiscoveryLogEntry> {
        let _ = (host, index);
        None
    }
}

/// A controller of the subsystem, as others of it see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubsystemController {
    /// Controller Identifier.
    pub cntlid: u16,
    /// Somebody drives it.
    pub online: bool,
}

/// A namespace as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// Block size and size.
    pub geometry: NamespaceGeometry,
    /// Blocks that have space allocated: Namespace Utilization.
    pub used_blocks: u64,
    /// The unit in which space is allocated and given back: a power of two, at least a block.
    pub extent_bytes: u32,
    /// Namespace Globally Unique Identifier, never reused.
    pub nguid: [u8; 16],
    /// UUID.
    pub uuid: [u8; 16],
}

/// The figures of the SMART / Health Information log page (Base 2.0, 5.16.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// Critical Warning bits (byte 0).
    pub critical_warning: u8,
    /// Composite temperature in kelvins; 0 where there is none to report.
    pub temperature_kelvin: u16,
    /// Available Spare.
    pub available_spare_percent: u8,
    /// Available Spare Threshold.
    pub spare_threshold_percent: u8,
    /// Percentage Used.
    pub percentage_used: u8,
    /// Bytes that hosts have read.
    pub bytes_read: u128,
    /// Bytes that hosts have written.
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
    /// Commands that a device could not carry out: of the subsystem, whatever controllers come and go.
    pub media_errors: u128,
}

impl Default for Health {
    /// A healthy device that has done nothing yet.
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
