//! Checks the pool while it is in use, for `forebay pool check`: the catalog's copies, then the
//! maps against the extents. The check runs in pieces of about a millisecond, between which other
//! tasks run.

use forebay_pool::{Check, CheckProblem, CheckReport};

use crate::devices::api_error;
use crate::health::reports::Reports;
use crate::model::error::ApiError;

const EXTENTS_A_PIECE: u64 = 65_536;

impl Reports {
    /// Returns the problems, and how many leaked extents were freed.
    pub(crate) async fn pool_check(&self, repair: bool) -> Result<(CheckReport, u64), ApiError> {
        let mut check = Check::begin(&mut self.base.core.borrow_mut().pool).map_err(api_error)?;
        loop {
            let finished = check
                .step(&self.base.core.borrow_mut().pool, EXTENTS_A_PIECE)
                .map_err(api_error)?;
            if finished {
                break;
            }
            tokio::task::yield_now().await;
        }
        let mut report = check.end();
        report.problems.extend(self.check_on_disk().await);
        self.copies.poll_copies().await;
        let mut covered = self.labels.poll_labels().await;
        if repair && !covered.is_empty() {
            self.labels.repair_labels().await?;
            covered.clear();
        }
        report
            .problems
            .extend(covered.into_iter().map(|what| CheckProblem {
                what,
                repairable: true,
            }));
        let mut repaired = 0;
        if repair && report.leaked_extents > 0 {
            repaired = self
                .base
                .core
                .borrow_mut()
                .pool
                .repair(&report)
                .map_err(api_error)?;
            tracing::warn!(extents = repaired, "returned leaked extents to the pool");
            self.base.commit_for_api().await?;
            self.base.zero_fill_wanted.raise();
        }
        Ok((report, repaired))
    }

    /// Problems of the catalog on its devices. Leaks are left out, because the check in memory
    /// finds them.
    async fn check_on_disk(&self) -> Vec<CheckProblem> {
        let catalog = self.base.catalog.clone();
        let devices = self.base.core.borrow().pool.devices().to_vec();
        let checked = tokio::task::spawn_blocking(move || {
            let scrubbed = catalog.scrub();
            (scrubbed, forebay_pool::check_catalog(&catalog, &devices))
        });
        let problem = |what: String| CheckProblem {
            what,
            repairable: false,
        };
        match checked.await {
            Err(error) => vec![problem(format!("can't read the catalog: {error}"))],
            Ok((scrubbed, report)) => {
                let lost = scrubbed.err().map(|error| problem(error.to_string()));
                let found = report.problems.into_iter().filter(|p| !p.repairable);
                lost.into_iter().chain(found).collect()
            }
        }
    }
}
