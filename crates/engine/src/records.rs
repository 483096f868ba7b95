//! The state region, kept without reference counts. **Not here:** the records
//! ([`forebay_xlate::boundary::region`]).

use forebay_xlate::boundary::region::Region;
use std::sync::Arc;

/// An engine has one region until its process ends.
pub(crate) fn keep_for_ever(region: &Arc<Region>) -> &'static Region {
    Box::leak(Box::new(region.clone()))
}
