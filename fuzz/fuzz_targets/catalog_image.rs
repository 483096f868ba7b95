//! A pool's device with damaged labels, headers, tables or database blocks.
//!
//! No panic; a pool that opens has exactly the committed contents.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| forebay_pool::fuzzing::image(bytes));
