//! A node in virtual time, under the very scheduler that an engine uses.
//!
//! **Purpose.** It shows what the scheduler does with thousands of tenants and many reactors, and puts the paper's figures beside ours.
//! **Design.** [`simulation`] goes event by event: tenants ask, reactors serve in order, links carry, a backend answers. [`model`] has all
//! assumptions about hardware, [`stats`] what is measured, [`figures`] the paper's figures with their values. All chance comes from a seed.
//! **Not here:** a prediction of this computer: `bench` measures.

pub mod figures;
pub mod model;
pub mod policy;
pub mod simulation;
pub mod stats;
#[cfg(test)]
mod tests;
