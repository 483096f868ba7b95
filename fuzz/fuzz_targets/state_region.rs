//! A damaged state region of a dead engine.
//!
//! No panic; every socket continues or closes, and no slot is used twice.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| forebay_engine::fuzzing::region(bytes));
