//! Catalog records with valid checksums and arbitrary content.
//!
//! No panic; a pool that loads can be used.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| forebay_pool::fuzzing::records(bytes));
