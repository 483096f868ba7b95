//! The state region, as the engine's parts keep it.
//!
//! **Purpose.** Reactors and frontends write their records without counting references.
//! **Design.** An engine has one region until its process ends, so a reference to it may live as long.
//! **Not here:** what the records are ([`forebay_xlate::boundary::region`]).

use forebay_xlate::boundary::region::Region;
use std::sync::Arc;

/// A region that is there until the process ends, as its engine's is.
pub(crate) fn keep_for_ever(region: &Arc<Region>) -> &'static Region {
    Box::leak(Box::new(region.clone()))
}
