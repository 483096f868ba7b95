//! Catalog records with right checksums and any content: loaded, checked, used.
//!
//! Design: in `forebay_pool::fuzzing`, which sees the crate's inside. Checked: no panic; a pool that loads can be used.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| forebay_pool::fuzzing::records(bytes));
