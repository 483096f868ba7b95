//! A pool's device with changed bytes: labels, headers, tables, blocks of the database.
//!
//! Design: in `forebay_pool::fuzzing`, which sees the crate's inside. Checked: no panic; what opens is what was committed, whole.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| forebay_pool::fuzzing::image(bytes));
