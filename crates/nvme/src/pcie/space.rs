//! PCI configuration space: 256 bytes with power management, PCI Express and MSI-X.
//!
//! A mask has the writable bits; BAR sizing follows from it. The monitor maps the BARs.

use super::{BAR0_BYTES, BAR4_BYTES, DEVICE_ID, PBA_AT, VECTORS, VENDOR_ID, addresses};

/// Implemented bytes; extended space reads as zeros.
pub const SPACE_BYTES: usize = 256;

const COMMAND: usize = 0x04;
const BAR0: usize = 0x10;
const BAR4: usize = 0x20;
const CAPABILITIES: usize = 0x34;
/// Power management.
const PM: usize = 0x40;
/// PCI Express.
const EXP: usize = 0x50;
/// Bit 15 is Initiate Function Level Reset.
const DEVICE_CONTROL: usize = EXP + 8;
const INITIATE_FLR: u16 = 1 << 15;
const MSIX: usize = 0x90;

const fn put16(mut bytes: [u8; SPACE_BYTES], at: usize, value: u16) -> [u8; SPACE_BYTES] {
    bytes[at] = value as u8;
    bytes[at + 1] = (value >> 8) as u8;
    bytes
}
const fn put32(bytes: [u8; SPACE_BYTES], at: usize, value: u32) -> [u8; SPACE_BYTES] {
    put16(put16(bytes, at, value as u16), at + 2, (value >> 16) as u16)
}

const DEFAULT: [u8; SPACE_BYTES] = {
    let mut s = [0; SPACE_BYTES];
    s = put16(s, 0x00, VENDOR_ID);
    s = put16(s, 0x02, DEVICE_ID);
    // Status: has capabilities.
    s = put16(s, 0x06, 1 << 4);
    // Revision 1; class 010802h, NVMe I/O controller.
    s = put32(s, 0x08, 0x0108_0201);
    // 64-bit memory, not prefetchable.
    s = put32(s, BAR0, 0b100);
    s = put32(s, BAR4, 0b100);
    s = put16(s, 0x2C, VENDOR_ID);
    s = put16(s, 0x2E, DEVICE_ID);
    s[CAPABILITIES] = PM as u8;
    // Power management 3; No Soft Reset.
    s = put16(s, PM, 0x01 | (EXP as u16) << 8);
    s = put16(s, PM + 2, 3);
    s = put16(s, PM + 4, 1 << 3);
    // PCIe 2 endpoint: 128-byte payloads, role-based error reporting, FLR.
    s = put16(s, EXP, 0x10 | (MSIX as u16) << 8);
    s = put16(s, EXP + 2, 2);
    s = put32(s, EXP + 4, 1 << 15 | 1 << 28);
    // Link of one lane at 2.5 GT/s, supported and current.
    s = put32(s, EXP + 0x0C, 0x11);
    s = put16(s, EXP + 0x12, 0x11);
    // MSI-X table at the start of BAR 4, then pending bits.
    s = put16(s, MSIX, 0x11);
    s = put16(s, MSIX + 2, VECTORS - 1);
    s = put32(s, MSIX + 4, 4);
    put32(s, MSIX + 8, PBA_AT as u32 | 4)
};

const WRITABLE: [u8; SPACE_BYTES] = {
    let mut s = [0; SPACE_BYTES];
    // Memory space, bus master, parity errors, SERR#, interrupt disable.
    s = put16(s, COMMAND, 1 << 1 | 1 << 2 | 1 << 6 | 1 << 8 | 1 << 10);
    // Cache line size.
    s[0x0C] = 0xFF;
    s = put32(s, BAR0, !(BAR0_BYTES as u32 - 1));
    s = put32(s, BAR0 + 4, u32::MAX);
    s = put32(s, BAR4, !(BAR4_BYTES as u32 - 1));
    s = put32(s, BAR4 + 4, u32::MAX);
    // Interrupt line.
    s[0x3C] = 0xFF;
    // Power state.
    s = put16(s, PM + 4, 0b11);
    // Device Control except FLR, which reads as 0; Link Control: clock bits.
    s = put16(s, DEVICE_CONTROL, !INITIATE_FLR);
    s = put16(s, EXP + 0x10, 0x00C0);
    // Enable and function mask.
    put16(s, MSIX + 2, 0b11 << 14)
};

/// Configuration space after reset.
pub const fn after_reset() -> [u8; SPACE_BYTES] {
    DEFAULT
}

/// Takes only the writable bits of an untrusted space.
pub fn sanitized(space: &[u8; SPACE_BYTES]) -> [u8; SPACE_BYTES] {
    std::array::from_fn(|i| DEFAULT[i] & !WRITABLE[i] | space[i] & WRITABLE[i])
}

/// Reads; zeros past the end.
pub fn read(space: &[u8; SPACE_BYTES], offset: u64, into: &mut [u8]) {
    for (at, byte) in addresses(offset, into.len()).zip(into) {
        let from = usize::try_from(at).ok().and_then(|at| space.get(at));
        *byte = from.copied().unwrap_or(0);
    }
}

/// Bus Master Enable.
pub const fn is_bus_master(space: &[u8; SPACE_BYTES]) -> bool {
    space[COMMAND] & 1 << 2 != 0
}

/// Whether MSI-X and its function mask are enabled (PCI 3.0, 6.8.2.3).
pub const fn masks_all(space: &[u8; SPACE_BYTES]) -> bool {
    space[MSIX + 3] >> 6 == 0b11
}

/// Writes writable bits. Returns true for a function level reset.
pub fn write(space: &mut [u8; SPACE_BYTES], offset: u64, from: &[u8]) -> bool {
    let mut flr = false;
    for (at, byte) in addresses(offset, from.len()).zip(from) {
        let Ok(at) = usize::try_from(at) else {
            break;
        };
        let (Some(cell), Some(mask)) = (space.get_mut(at), WRITABLE.get(at)) else {
            break;
        };
        *cell = *cell & !mask | byte & mask;
        flr |= at == DEVICE_CONTROL + 1 && byte & (INITIATE_FLR >> 8) as u8 != 0;
    }
    flr
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(space: &[u8; SPACE_BYTES], at: u64) -> u32 {
        let mut bytes = [0; 4];
        read(space, at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn bars_tell_their_sizes_when_ones_are_written() {
        let mut space = after_reset();
        for at in [0x10, 0x14, 0x18, 0x1C, 0x20, 0x24, 0x30] {
            write(&mut space, at, &[0xFF; 4]);
        }
        let bar = |at: u64| u64::from(u32_at(&space, at)) | u64::from(u32_at(&space, at + 4)) << 32;
        assert_eq!((!(bar(0x10) & !0xF)).wrapping_add(1), BAR0_BYTES);
        assert_eq!((!(bar(0x20) & !0xF)).wrapping_add(1), BAR4_BYTES);
        assert_eq!(
            (bar(0x10) & 0xF, bar(0x18), u32_at(&space, 0x30)),
            (4, 0, 0)
        );
        assert_eq!(u32_at(&space, 0x08) >> 8, 0x01_0802);
    }

    #[test]
    fn capabilities_are_a_list_that_ends() {
        let space = after_reset();
        let mut at = space[CAPABILITIES];
        let mut ids = Vec::new();
        while at != 0 {
            ids.push(space[usize::from(at)]);
            at = space[usize::from(at) + 1];
        }
        assert_eq!(ids, [0x01, 0x10, 0x11]);
        assert_eq!(u32_at(&space, 0x92) as u16 & 0x7FF, VECTORS - 1);
        assert_eq!(u32_at(&space, 0x54) & 1 << 28, 1 << 28);
    }

    #[test]
    fn a_function_level_reset_is_asked_for_by_its_bit_alone() {
        let mut space = after_reset();
        assert!(!write(&mut space, 0x58, &[0x10, 0x28]));
        assert!(write(&mut space, 0x58, &0x8000u16.to_le_bytes()));
        assert_eq!(u32_at(&space, 0x58) & 0x8000, 0);
        assert!(write(&mut space, 0x50, &[0xFF; 64]));
        assert!(!write(&mut space, 0xFE, &[0xFF; 64]));
        assert!(!write(&mut space, u64::MAX, &[0xFF; 4]));
        assert_eq!(space[..4], DEFAULT[..4]);
        assert_eq!(sanitized(&[0; SPACE_BYTES])[..4], DEFAULT[..4]);
        assert_eq!(sanitized(&space), space);
    }
}
