//! # qos: a base for everyone, and the rest to whoever can use it
//!
//! **Purpose.** Decide which I/O may begin now. Tenants have budgets ([`budget`]). [`admission`] knows what a node can carry and whom it
//! takes, [`placement`] which reactors can give that. [`cost`] knows what an I/O costs, [`estimator`] how far that is wrong. [`scheduler`]
//! shares out a window on one reactor; several reactors agree through a [`ledger`]. [`spread`] names the ways to serve queues, and
//! [`tiers`] says how many buffers of a reactor stay at hand.
//! **Design.** BurstCBS (OSDI'24): its Algorithm 1 with the guard that the printed algorithm lacks. [`params`] names what the paper leaves
//! open. No clock, thread or I/O, and no allocation on the path of an I/O: time is a number of windows, usage comes in as costs.
//!
//! **Not here:** the commands that wait (the lanes keep them), measuring, weights other than base and demand, tenants of other nodes.

#![deny(unsafe_code)]
// Resources are numbers, and most loops over them are over several arrays.
#![allow(clippy::needless_range_loop)]

pub mod admission;
pub mod budget;
pub mod cost;
pub mod credit;
pub mod estimator;
pub mod ledger;
pub mod params;
pub mod placement;
pub mod resources;
pub mod scheduler;
pub mod spread;
pub mod stated;
pub mod tiers;
