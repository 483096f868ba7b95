//! # burst: a base for everyone, and the rest to whoever can use it
//!
//! **Purpose.** Who may begin an I/O now. Tenants have budgets ([`budget`]); what a node can carry and whom it takes is
//! [`admission`]'s, and whether its reactors can give that [`places`]'s; what an I/O costs is in [`cost`], and how far that is wrong in [`estimator`]; [`scheduler`] shares what
//! there is, once a window, for one reactor, and several reactors agree by way of a [`board`]; [`spread`] names the ways in which they serve queues; [`tiers`] says
//! how many of a reactor's buffers stay at hand.
//!
//! **Design.** BurstCBS (OSDI'24), its Algorithm 1 with the guard that the printed algorithm lacks; what the paper leaves
//! open is in [`params`], by name. No clock, no thread, no I/O, and after its making nothing here allocates on the path of
//! an I/O: time is a number of windows, usage comes in as costs.
//!
//! **What it does not do.** Hold the commands that wait (that is a lane's), measure (it is told), weigh tenants against
//! each other other than by their base and their demand, move tenants between nodes.

#![deny(unsafe_code)]
// Resources are numbers, and most loops over them are over several arrays.
#![allow(clippy::needless_range_loop)]

pub mod admission;
pub mod board;
pub mod budget;
pub mod cost;
pub mod credit;
pub mod estimator;
pub mod params;
pub mod places;
pub mod scheduler;
pub mod spread;
pub mod stated;
pub mod tiers;
pub mod units;
