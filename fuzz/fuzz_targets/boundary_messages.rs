//! Messages between daemon and engine, which do not trust each other.
//!
//! No panic; a decoded message survives encoding.

#![no_main]

use forebay_xlate::boundary::message::{FromEngine, ToEngine, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = decode::<ToEngine>(bytes) {
        let again = encode(&message).expect("no longer than it came");
        assert_eq!(decode::<ToEngine>(&again).expect("understood"), message);
    }
    if let Ok(message) = decode::<FromEngine>(bytes) {
        let again = encode(&message).expect("no longer than it came");
        assert_eq!(decode::<FromEngine>(&again).expect("understood"), message);
    }
});
