//! Hostile firmware images.
//!
//! The input is an image, and also the beginning of a description in an image of 8 to 20 KiB. No
//! panic; no such image is accepted.

#![no_main]

use std::io::Cursor;

use forebay_control::firmware::image::{Description, verify};
use libfuzzer_sys::fuzz_target;

const GRANULE: usize = 4096;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let [choice, description @ ..] = bytes {
        let granules = 2 + usize::from(choice % 4);
        let mut image = vec![0; granules * GRANULE];
        let end = &mut image[(granules - 1) * GRANULE..];
        let length = description.len().min(GRANULE);
        end[..length].copy_from_slice(&description[..length]);
        check(&image);
    }
});

fn check(image: &[u8]) {
    let described = Description::read(&mut Cursor::new(image));
    if let Ok(description) = &described {
        assert!(description.program_bytes < image.len() as u64);
        assert!(!description.version.is_empty() && !description.formats.is_empty());
    }
    let verified = verify(&mut Cursor::new(image), &[]);
    assert!(verified.is_err());
}
