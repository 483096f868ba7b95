//! The device's sizes and rights, for the checks of messages.

use crate::wire::{pci_irq, pci_region};

/// A mappable part of a region, in whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseArea {
    /// Offset in the region and in the descriptor.
    pub offset_bytes: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
}

/// A region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Its size; 0 for none.
    pub size_bytes: u64,
    /// May be read.
    pub readable: bool,
    /// May be written.
    pub writable: bool,
    /// The mappable part.
    pub mappable: Option<SparseArea>,
}

/// A kind of interrupt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Irq {
    /// Interrupts of this kind.
    pub count: u32,
    /// Whether MASK and UNMASK work.
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
