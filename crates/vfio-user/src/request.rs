//! Checked requests: their lengths, sizes and counts are within the device's limits.

use crate::device::Device;
use crate::version::{self, Negotiated};
use crate::wire::{command, dma, irq_set_flags as set, u32_at, u64_at};
use crate::{Errno, MAX_DATA_BYTES};

/// Maps begin and end at page boundaries.
const PAGE_BYTES: u64 = 4096;

/// VFIO_USER_DMA_MAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMap {
    /// Start for the device.
    pub address: u64,
    /// Length, not 0, in whole pages; does not overflow with `address`.
    pub len_bytes: u64,
    /// Offset in the descriptor.
    pub offset_bytes: u64,
    /// Whether it may be read.
    pub readable: bool,
    /// Whether it may be written.
    pub writable: bool,
    /// Whether a descriptor came; else the region is inaccessible.
    pub has_descriptor: bool,
}

/// VFIO_USER_DMA_UNMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaUnmap {
    /// The region with exactly this start and length.
    One {
        /// Its start for the device.
        address: u64,
        /// Its length.
        len_bytes: u64,
    },
    /// All regions.
    All,
}

/// An operation on interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Hold back signals until unmasked.
    Mask,
    /// Signal again, at once if one was held back.
    Unmask,
    /// Raise them, or set their descriptors.
    Trigger,
}

/// The interrupts concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqData<'a> {
    /// All of them.
    None,
    /// One byte each; not 0 selects the interrupt.
    Bool(&'a [u8]),
    /// `true`: each gets its descriptor. `false`: each loses it. Only with [`IrqAction::Trigger`].
    Eventfd(bool),
}

/// VFIO_USER_DEVICE_SET_IRQS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetIrqs<'a> {
    /// VFIO_PCI_*_IRQ_INDEX of an existing kind.
    pub index: u32,
    /// First interrupt.
    pub start: u32,
    /// Number, within the device's. 0, with [`IrqData::None`] and [`IrqAction::Trigger`]: all of
    /// the kind lose their descriptors.
    pub count: u32,
    /// The operation.
    pub action: IrqAction,
    /// The interrupts concerned.
    pub data: IrqData<'a>,
}

/// A valid access of at most [`MAX_DATA_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionAccess {
    /// VFIO_PCI_*_REGION_INDEX.
    pub region: u32,
    /// Offset in the region.
    pub offset_bytes: u64,
    /// Length, not 0.
    pub len_bytes: u32,
}

/// A message's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// VFIO_USER_VERSION, acceptable.
    Version(Negotiated),
    /// VFIO_USER_DMA_MAP.
    DmaMap(DmaMap),
    /// VFIO_USER_DMA_UNMAP.
    DmaUnmap(DmaUnmap),
    /// VFIO_USER_DEVICE_GET_INFO.
    DeviceInfo,
    /// VFIO_USER_DEVICE_GET_REGION_INFO.
    RegionInfo {
        /// The region's index.
        index: u32,
        /// Size limit of the answer's payload.
        argsz: u32,
    },
    /// VFIO_USER_DEVICE_GET_IRQ_INFO.
    IrqInfo {
        /// The interrupt kind.
        index: u32,
    },
    /// VFIO_USER_DEVICE_SET_IRQS.
    SetIrqs(SetIrqs<'a>),
    /// VFIO_USER_REGION_READ.
    RegionRead(RegionAccess),
    /// VFIO_USER_REGION_WRITE.
    RegionWrite(RegionAccess, &'a [u8]),
    /// VFIO_USER_DEVICE_RESET.
    Reset,
}

/// Ignores unneeded descriptors: on a peek Linux may return a later message's.
pub(crate) fn judge<'a>(
    code: u16,
    payload: &'a [u8],
    descriptors: usize,
    device: &Device,
) -> Result<Request<'a>, Errno> {
    let request = match code {
        command::VERSION => Request::Version(version::judge(payload)?),
        command::DMA_MAP => Request::DmaMap(dma_map(payload, descriptors)?),
        command::DMA_UNMAP => Request::DmaUnmap(dma_unmap(payload)?),
        command::DEVICE_GET_INFO => {
            argsz(payload, 16)?;
            Request::DeviceInfo
        }
        command::DEVICE_GET_REGION_INFO => {
            let argsz = argsz(payload, 32)?;
            let index = u32_at(payload, 8).ok_or(Errno::EINVAL)?;
            match device.regions.get(index as usize) {
                Some(_) => Request::RegionInfo { index, argsz },
                None => return Err(Errno::EINVAL),
            }
        }
        command::DEVICE_GET_IRQ_INFO => {
            argsz(payload, 16)?;
            let index = u32_at(payload, 8).ok_or(Errno::EINVAL)?;
            match device.irqs.get(index as usize) {
                Some(_) => Request::IrqInfo { index },
                None => return Err(Errno::EINVAL),
            }
        }
        command::DEVICE_SET_IRQS => Request::SetIrqs(set_irqs(payload, descriptors, device)?),
        command::REGION_READ => {
            let access = access(payload, device, false)?;
            Request::RegionRead(access)
        }
        command::REGION_WRITE => {
            let access = access(payload, device, true)?;
            let data = payload.get(16..).unwrap_or_default();
            if data.len() != access.len_bytes as usize {
                return Err(Errno::EINVAL);
            }
            Request::RegionWrite(access, data)
        }
        command::DEVICE_RESET => Request::Reset,
        _ => return Err(Errno::ENOTSUP),
    };
    Ok(request)
}

/// Payload and `argsz` must cover the fixed structure.
fn argsz(payload: &[u8], fixed_bytes: usize) -> Result<u32, Errno> {
    let argsz = u32_at(payload, 0).ok_or(Errno::EINVAL)?;
    if payload.len() < fixed_bytes || (argsz as usize) < fixed_bytes {
        return Err(Errno::EINVAL);
    }
    Ok(argsz)
}

fn is_whole_pages(value: u64) -> bool {
    value.is_multiple_of(PAGE_BYTES)
}

fn dma_map(payload: &[u8], descriptors: usize) -> Result<DmaMap, Errno> {
    argsz(payload, 32)?;
    let field = |at| u64_at(payload, at).ok_or(Errno::EINVAL);
    let flags = u32_at(payload, 4).ok_or(Errno::EINVAL)?;
    let map = DmaMap {
        offset_bytes: field(8)?,
        address: field(16)?,
        len_bytes: field(24)?,
        readable: flags & dma::READABLE != 0,
        writable: flags & dma::WRITABLE != 0,
        has_descriptor: descriptors == 1,
    };
    let sound = flags & !(dma::READABLE | dma::WRITABLE) == 0
        && flags != 0
        && descriptors <= 1
        && map.len_bytes > 0
        && map.address.checked_add(map.len_bytes).is_some()
        && map.offset_bytes.checked_add(map.len_bytes).is_some()
        && is_whole_pages(map.address)
        && is_whole_pages(map.len_bytes)
        && is_whole_pages(map.offset_bytes);
    if sound { Ok(map) } else { Err(Errno::EINVAL) }
}

fn dma_unmap(payload: &[u8]) -> Result<DmaUnmap, Errno> {
    argsz(payload, 24)?;
    let flags = u32_at(payload, 4).ok_or(Errno::EINVAL)?;
    let address = u64_at(payload, 8).ok_or(Errno::EINVAL)?;
    let len_bytes = u64_at(payload, 16).ok_or(Errno::EINVAL)?;
    match (flags, address, len_bytes) {
        (dma::UNMAP_ALL, 0, 0) => Ok(DmaUnmap::All),
        (0, _, 1..) if address.checked_add(len_bytes).is_some() => {
            Ok(DmaUnmap::One { address, len_bytes })
        }
        _ => Err(Errno::EINVAL),
    }
}

fn set_irqs<'a>(
    payload: &'a [u8],
    descriptors: usize,
    device: &Device,
) -> Result<SetIrqs<'a>, Errno> {
    argsz(payload, 20)?;
    let field = |at| u32_at(payload, at).ok_or(Errno::EINVAL);
    let (flags, index, start, count) = (field(4)?, field(8)?, field(12)?, field(16)?);
    let irq = (device.irqs.get(index as usize)).ok_or(Errno::EINVAL)?;
    let end = start.checked_add(count).ok_or(Errno::EINVAL)?;
    if flags & !(set::DATA_MASK | set::ACTION_MASK_ALL) != 0 {
        return Err(Errno::EINVAL);
    }
    let action = match flags & set::ACTION_MASK_ALL {
        set::ACTION_MASK => IrqAction::Mask,
        set::ACTION_UNMASK => IrqAction::Unmask,
        set::ACTION_TRIGGER => IrqAction::Trigger,
        _ => return Err(Errno::EINVAL),
    };
    let data = match flags & set::DATA_MASK {
        set::DATA_NONE => IrqData::None,
        set::DATA_BOOL => {
            let bools = payload.get(20..).unwrap_or_default();
            IrqData::Bool(bools.get(..count as usize).ok_or(Errno::EINVAL)?)
        }
        set::DATA_EVENTFD if descriptors == 0 => IrqData::Eventfd(false),
        set::DATA_EVENTFD if descriptors as u64 == u64::from(count) => IrqData::Eventfd(true),
        _ => return Err(Errno::EINVAL),
    };
    let disables = count == 0 && start == 0;
    match (action, data) {
        // A missing kind can be disabled too.
        (IrqAction::Trigger, IrqData::None) if disables => {}
        _ if count == 0 || end > irq.count => return Err(Errno::EINVAL),
        // Masking has no descriptors.
        (IrqAction::Mask | IrqAction::Unmask, IrqData::Eventfd(_)) => return Err(Errno::ENOTSUP),
        (IrqAction::Mask | IrqAction::Unmask, _) if !irq.maskable => return Err(Errno::ENOTSUP),
        _ => {}
    }
    Ok(SetIrqs {
        index,
        start,
        count,
        action,
        data,
    })
}

fn access(payload: &[u8], device: &Device, write: bool) -> Result<RegionAccess, Errno> {
    let offset_bytes = u64_at(payload, 0).ok_or(Errno::EINVAL)?;
    let region = u32_at(payload, 8).ok_or(Errno::EINVAL)?;
    let len_bytes = u32_at(payload, 12).ok_or(Errno::EINVAL)?;
    let of = (device.regions.get(region as usize)).ok_or(Errno::EINVAL)?;
    let end = offset_bytes.checked_add(u64::from(len_bytes));
    let inside = end.is_some_and(|end| end <= of.size_bytes);
    if len_bytes == 0 || len_bytes > MAX_DATA_BYTES || !inside {
        return Err(Errno::EINVAL);
    }
    match if write { of.writable } else { of.readable } {
        true => Ok(RegionAccess {
            region,
            offset_bytes,
            len_bytes,
        }),
        false => Err(Errno::EACCES),
    }
}
