//! Budgets: [`settings`] of the node, [`placement`] and [`promises`] (which reactor serves an
//! export, and whose base fits), and [`budgets`], which tells the engine.

pub(crate) mod budgets;
pub(crate) mod calibration;
pub(crate) mod clusters;
pub(crate) mod placement;
pub(crate) mod promises;
pub(crate) mod settings;
