//! The parts that carry commands out, each with its own fields.
//!
//! **Purpose.** From a command in its place ([`slab`]) by its slices ([`submit`], `slice`) to devices ([`devices`]) and back.
//! **Design.** A part takes what it needs as arguments and does not know its caller. It returns the outcome of a step, and
//! [`crate::core`] takes the command to the next part. Everything is allocated at the start, nothing for a command.
//! **Not here:** the order of steps ([`crate::core`]), who may begin ([`crate::qos`]), and what a dead engine left
//! ([`crate::recovery`]).

pub(crate) mod clock;
pub(crate) mod command;
pub(crate) mod devices;
pub(crate) mod ended;
pub(crate) mod flush;
pub(crate) mod fused;
pub(crate) mod jobs;
pub(crate) mod lanes;
pub(crate) mod machine;
pub(crate) mod parked;
pub(crate) mod records;
pub(crate) mod settle;
pub(crate) mod slab;
pub(crate) mod slice;
pub mod staging;
pub(crate) mod submit;
pub(crate) mod waits;
pub(crate) mod zero;
