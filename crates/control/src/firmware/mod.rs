//! Firmware: signed images of the program.

pub mod image;
