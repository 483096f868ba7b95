//! Parts that carry out commands, each with its own state. A part gets all it uses as arguments and
//! returns the outcome of a step; [`crate::core`] orders the steps. All memory is allocated at the
//! start. **Not here:** admission ([`crate::qos`]), recovery ([`crate::recovery`]).

pub(crate) mod clock;
pub(crate) mod command;
pub(crate) mod devices;
pub(crate) mod ended;
pub(crate) mod flush;
pub(crate) mod fused;
pub(crate) mod guest_memory;
pub(crate) mod jobs;
pub(crate) mod lanes;
pub(crate) mod overwrites;
pub(crate) mod parked;
pub(crate) mod records;
pub(crate) mod settle;
pub(crate) mod slab;
pub(crate) mod slice;
pub(crate) mod staging;
pub(crate) mod submit;
pub(crate) mod waits;
pub(crate) mod zero;
