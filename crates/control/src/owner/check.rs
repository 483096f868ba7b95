//! Checking the pool while it is used.
//!
//! Purpose: the maps against the extents, as `forebay pool check` asks for.
//! Design: the pool checks itself in pieces of about a millisecond; between two of them everybody
//! else gets a turn. What leaked is given back if that is asked for, and that is committed.
//! Not here: what is checked (the pool), the report's shape in the API.

use forebay_pool::CheckReport;

use super::Owner;
use crate::api::error::ApiError;
use crate::devices::api_error;

/// Extents looked at in one piece.
const EXTENTS_A_PIECE: u64 = 65_536;

impl Owner {
    /// Checks the pool; returns what was found, and how many leaked extents were given back.
    pub(crate) async fn pool_check(&self, repair: bool) -> Result<(CheckReport, u64), ApiError> {
        let mut check = self
            .core
            .borrow_mut()
            .pool
            .begin_check()
            .map_err(api_error)?;
        loop {
            let finished = self
                .core
                .borrow_mut()
                .pool
                .check_step(&mut check, EXTENTS_A_PIECE)
                .map_err(api_error)?;
            if finished {
                break;
            }
            tokio::task::yield_now().await;
        }
        let report = self.core.borrow_mut().pool.end_check(check);
        let mut repaired = 0;
        if repair && report.leaked_extents > 0 {
            repaired = self.core.borrow_mut().pool.repair(&report).map_err(api_error)?;
            tracing::warn!(extents = repaired, "leaked extents are given back");
            self.commit_for_api().await?;
            self.launder_wanted.raise();
        }
        Ok((report, repaired))
    }
}
