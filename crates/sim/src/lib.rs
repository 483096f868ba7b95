//! A machine in virtual time, under the very scheduler that an engine uses.
//!
//! **Purpose.** To see what the scheduler does with thousands of tenants and many reactors, and to put the paper's figures
//! beside ours. **Design.** Event by event ([`simulation`]): tenants ask, reactors serve in order, links carry, a backend answers.
//! Everything that is assumed of hardware is in [`model`]; what is measured is [`stats`]'; [`figures`] are the paper's, each with its
//! values. Nothing is random but by a seed.
//! **What it does not do.** Predict this machine: `bench` measures.

pub mod figures;
pub mod model;
pub mod policy;
pub mod simulation;
pub mod stats;
#[cfg(test)]
mod tests;
