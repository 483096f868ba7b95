//! What a message asks for, once it is checked.
//!
//! Purpose: from payload bytes to numbers that are within what the device has: whoever carries a request
//! out needs no check of its own against lengths, sizes and counts. Does NOT know what is mapped.

use crate::device::Device;
use crate::version::{self, Negotiated};
use crate::wire::{command, dma, irq_set_flags as set, u32_at, u64_at};
use crate::{Errno, MAX_DATA_BYTES};

/// A page: what memory maps begin and end with.
const PAGE_BYTES: u64 = 4096;

/// VFIO_USER_DMA_MAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMap {
    /// Where the region begins for the device.
    pub address: u64,
    /// Its length, not 0; address + length does not overflow. Whole pages.
    pub len_bytes: u64,
    /// Where it begins in the descriptor.
    pub offset_bytes: u64,
    /// It may be read.
    pub readable: bool,
    /// It may be written.
    pub writable: bool,
    /// A descriptor came with it; else nothing of it can be reached.
    pub has_descriptor: bool,
}

/// VFIO_USER_DMA_UNMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaUnmap {
    /// The region that begins there and is so long, exactly.
    One {
        /// Where it begins for the device.
        address: u64,
        /// Its length.
        len_bytes: u64,
    },
    /// All regions.
    All,
}

/// What is done to interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// They are not signalled until unmasked.
    Mask,
    /// They are signalled again, and at once where one was held back.
    Unmask,
    /// They are raised, or given their descriptors.
    Trigger,
}

/// To which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqData<'a> {
    /// All of them.
    None,
    /// Those whose byte is not 0; one byte each.
    Bool(&'a [u8]),
    /// Each gets the descriptor of its place (as many came as there are interrupts), or, when none came
    /// (false), has none any more. Only with [`IrqAction::Trigger`].
    Eventfd(bool),
}

/// VFIO_USER_DEVICE_SET_IRQS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetIrqs<'a> {
    /// VFIO_PCI_*_IRQ_INDEX, of a kind that the device has.
    pub index: u32,
    /// The first.
    pub start: u32,
    /// How many; start + count are within what the device has. 0 (with [`IrqData::None`] and
    /// [`IrqAction::Trigger`]): all of the kind lose their descriptors.
    pub count: u32,
    /// What.
    pub action: IrqAction,
    /// To which.
    pub data: IrqData<'a>,
}

/// Where a region is accessed: inside it, by at most [`MAX_DATA_BYTES`], and in the right direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionAccess {
    /// VFIO_PCI_*_REGION_INDEX.
    pub region: u32,
    /// Offset in it.
    pub offset_bytes: u64,
    /// How much, not 0.
    pub len_bytes: u32,
}

/// What a message asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// VFIO_USER_VERSION: it can be agreed to.
    Version(Negotiated),
    /// VFIO_USER_DMA_MAP.
    DmaMap(DmaMap),
    /// VFIO_USER_DMA_UNMAP.
    DmaUnmap(DmaUnmap),
    /// VFIO_USER_DEVICE_GET_INFO.
    DeviceInfo,
    /// VFIO_USER_DEVICE_GET_REGION_INFO.
    RegionInfo {
        /// Which.
        index: u32,
        /// How long the payload of the answer may be.
        argsz: u32,
    },
    /// VFIO_USER_DEVICE_GET_IRQ_INFO.
    IrqInfo {
        /// Which.
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

/// The request in a command's payload, with which so many descriptors came. Where it takes none they say
/// nothing: whoever only peeked at a stream may have been given a later message's (Linux does that).
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

/// `argsz`, of a payload that is as long as the fixed structure and says so.
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
        // A kind that the device doesn't have can be switched off all the same.
        (IrqAction::Trigger, IrqData::None) if disables => {}
        _ if count == 0 || end > irq.count => return Err(Errno::EINVAL),
        // No descriptors are signalled when an interrupt is masked.
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
