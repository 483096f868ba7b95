//! A node in virtual time under the engine's scheduler, with thousands of tenants and many
//! reactors.
//!
//! [`simulation`] processes events, [`model`] has all assumptions about hardware, [`stats`] the
//! measurements, [`figures`] the paper's figures beside ours. All randomness comes from a seed. It
//! does not predict a real computer: `bench` measures.

pub mod figures;
pub mod model;
pub mod policy;
pub mod simulation;
pub mod stats;
#[cfg(test)]
mod tests;
