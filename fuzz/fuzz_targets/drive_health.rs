//! A hostile drive below a device.
//!
//! The first byte selects ATA pages, with or without right checksums, or NVMe pages. No panic; texts
//! are short and printable.

#![no_main]

use forebay_device::health::{DriveHealth, ata, nvme};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, bytes)) = bytes.split_first() else {
        return;
    };
    if choice & 1 == 0 {
        let (log, names) = bytes.split_at(bytes.len().min(nvme::LOG_BYTES));
        check(&nvme::health(&filled(names), &filled(log)));
        return;
    }
    let mut pages: [[u8; ata::PAGE_BYTES]; 3] = [[0; ata::PAGE_BYTES]; 3];
    for (page, bytes) in pages.iter_mut().zip(bytes.chunks(ata::PAGE_BYTES)) {
        *page = filled(bytes);
    }
    let [identify, mut data, mut thresholds] = pages;
    if choice & 2 != 0 {
        for page in [&mut data, &mut thresholds] {
            let sum = page.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte));
            page[511] = page[511].wrapping_sub(sum);
        }
    }
    if let Ok(health) = ata::health(&identify, &data, &thresholds) {
        check(&health);
    }
});

fn filled<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut page = [0; N];
    let bytes = &bytes[..bytes.len().min(N)];
    page[..bytes.len()].copy_from_slice(bytes);
    page
}

fn check(health: &DriveHealth) {
    let texts = [
        (&health.model, 40),
        (&health.serial, 20),
        (&health.firmware, 8),
    ];
    for (text, most) in texts {
        assert!(text.len() <= most && text.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
    }
}
