//! The Vital Product Data: one image of 256 bytes in the format of IPMI's *Platform Management FRU
//! Information Storage Definition* 1.2 (NVMe-MI 1.2, 8.2).

use uuid::Uuid;

/// The image's length.
pub(super) const VPD_BYTES: usize = 256;

const FORMAT: u8 = 1;
const ENGLISH: u8 = 25;
/// The type of a field: 8-bit ASCII; the length is in bits 5:0.
const ASCII: u8 = 3 << 6;
const FIELD_BYTES: usize = 0x3F;
const END_OF_FIELDS: u8 = 0xC1;
const MANUFACTURER: &str = "Forebay";
const PRODUCT: &str = "Forebay storage hypervisor";

/// The image of this node.
pub(super) fn image(version: &str, uuid: Uuid) -> [u8; VPD_BYTES] {
    let mut product = vec![FORMAT, 0, ENGLISH];
    let serial = uuid.simple().to_string();
    for field in [MANUFACTURER, PRODUCT, "", version, &serial, "", ""] {
        let text = field.as_bytes();
        let text = &text[..text.len().min(FIELD_BYTES)];
        product.push(ASCII | text.len() as u8);
        product.extend(text);
    }
    product.push(END_OF_FIELDS);
    // The area is a multiple of 8 bytes; its last byte is the checksum.
    product.resize((product.len() + 1).next_multiple_of(8) - 1, 0);
    product[1] = ((product.len() + 1) / 8) as u8;
    product.push(checksum(&product));
    // Offsets are in units of 8 bytes; only the product area exists.
    let mut header = vec![FORMAT, 0, 0, 0, 1, 0, 0];
    header.push(checksum(&header));
    let mut image = [0; VPD_BYTES];
    for (to, from) in image.iter_mut().zip(header.iter().chain(&product)) {
        *to = *from;
    }
    image
}

/// All bytes with it add up to 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_have_lengths_and_checksums() {
        for version in ["", "0.9.0", &"v".repeat(100)] {
            let image = image(version, Uuid::from_u128(7));
            let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            assert_eq!(sum(&image[..8]), 0);
            let at = usize::from(image[4]) * 8;
            let length = usize::from(image[at + 1]) * 8;
            assert!(at + length <= VPD_BYTES);
            assert_eq!(sum(&image[at..at + length]), 0);
            assert_eq!(&image[at + 4..at + 11], b"Forebay");
            assert!(image[at + length..].iter().all(|byte| *byte == 0));
        }
    }
}
