//! Calibration: budgets must not limit the volumes of `forebay calibrate`, or it would measure the
//! scheduler. They belong to one tenant ([`TENANT`]), which has no share while the calibration
//! renews its lease. A restart of the daemon ends the lease.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::TenantId;
use tokio::time::{Instant, sleep_until};

use crate::link::engine_error;
use crate::model::error::ApiError;
use crate::model::scheduling::{CALIBRATION_TENANT as TENANT, MOST_CALIBRATION_SECONDS as MOST};
use crate::qos::budgets::Budgets;

#[derive(Debug, Default)]
pub(crate) struct Calibrating(Cell<Option<Instant>>);

impl Calibrating {
    fn is_on(&self) -> bool {
        self.0.get().is_some_and(|until| Instant::now() < until)
    }
}

impl Budgets {
    pub(crate) fn measures(&self, tenant: TenantId) -> bool {
        let core = self.base.core.borrow();
        let is_its = || (core.pool.tenants().named(TENANT)).is_ok_and(|its| its.id == tenant);
        self.calibrating.is_on() && is_its()
    }

    pub(crate) fn refuse_its_name(&self, name: &str) -> Result<(), ApiError> {
        match name == TENANT && !self.calibrating.is_on() {
            true => Err(ApiError::invalid(format!(
                "the tenant name {TENANT} is reserved for `forebay calibrate`, which deletes all volumes of that tenant"
            ))
            .hint("choose another name")),
            false => Ok(()),
        }
    }

    /// `None` ends the lease.
    pub(crate) async fn calibrating(self: &Rc<Self>, seconds: Option<u64>) -> Result<(), ApiError> {
        let until = match seconds {
            Some(seconds @ 1..=MOST) => Some(Instant::now() + Duration::from_secs(seconds)),
            None => None,
            Some(seconds) => {
                return Err(ApiError::invalid(format!(
                    "seconds is {seconds}: a calibration lasts 1 to {MOST} s, and must be renewed before its end"
                )));
            }
        };
        self.calibrating.0.set(until);
        if let Some(until) = until {
            let owner = self.clone();
            self.base.spawn(async move {
                sleep_until(until).await;
                // Unless the lease was renewed.
                if owner.calibrating.0.get() == Some(until) {
                    owner.calibrating.0.set(None);
                    let _ = owner.push_budgets().await;
                }
            });
        }
        let published = self.push_budgets().await;
        published.map_err(|error| engine_error(&error))
    }
}
