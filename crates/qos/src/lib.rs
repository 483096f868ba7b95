//! # qos: a base for everyone, and the rest to whoever can use it
//!
//! **Purpose.** Decide which I/O may begin now. [`admission`] knows what a node can carry, [`placement`] which reactors can give it, [`cost`]
//! what an I/O costs, [`estimator`] how far that is off. [`scheduler`] shares out a window on one reactor, several agree by a [`ledger`].
//! **Design.** BurstCBS (OSDI'24). No clock, thread or I/O, and no allocation on the path of an I/O: time is a number of windows.
//! **Not here:** the commands that wait, measuring, weights other than base and demand, tenants of other nodes.

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
