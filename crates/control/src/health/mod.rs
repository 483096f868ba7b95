//! The health of the whole pool: periodic checks, warnings, events and answers. It updates a stale catalog
//! copy and keeps this daemon's hold on the pool. It reads all other modules; none uses it.

pub(crate) mod check;
pub(crate) mod copies;
pub(crate) mod limits;
pub(crate) mod pool_hold;
pub(crate) mod reports;
pub(crate) mod show;
pub(crate) mod space;
pub(crate) mod wait_reports;
pub(crate) mod watch;
