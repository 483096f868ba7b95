//! Who may use how much of the node.
//!
//! Purpose: budgets of tenants and volumes are durable, guaranteed where they fit, and known to the engine.
//! Design: [`settings`] belong to the node, [`placement`] and [`promises`] decide which reactor serves what and whose
//! base fits, [`budgets`] tells the engine.
//! Not here: the arithmetic (`forebay_qos`), counting (`statistics`).

pub(crate) mod budgets;
pub(crate) mod calibration;
pub(crate) mod placement;
pub(crate) mod promises;
pub(crate) mod settings;
