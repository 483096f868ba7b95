//! What a client may ask about a device.
//!
//! Purpose: the sizes and rights that messages are judged by. Does NOT hold contents.

use crate::wire::{pci_irq, pci_region};

/// A part of a region that a client may map, in whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseArea {
    /// Where it begins in the region, and in the descriptor that is sent with the answer.
    pub offset_bytes: u64,
    /// Its length.
    pub len_bytes: u64,
}

/// A region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Its size; 0: there is none.
    pub size_bytes: u64,
    /// It may be read.
    pub readable: bool,
    /// It may be written.
    pub writable: bool,
    /// The part that may be mapped.
    pub mappable: Option<SparseArea>,
}

/// A kind of interrupt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Irq {
    /// How many there are of this kind.
    pub count: u32,
    /// MASK and UNMASK are understood.
    pub maskable: bool,
}

/// A PCI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// By VFIO_PCI_*_REGION_INDEX.
    pub regions: [Region; pci_region::COUNT],
    /// By VFIO_PCI_*_IRQ_INDEX.
    pub irqs: [Irq; pci_irq::COUNT],
}
