//! The state region of a dead engine with changed records: its successor believes no word of it.
//!
//! Design: in `forebay_engine::fuzzing`, which sees the crate's inside. Checked: no panic; every socket
//! goes on or ends, and no slot is used twice.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| forebay_engine::fuzzing::region(bytes));
